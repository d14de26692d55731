"""Where the directory of a sharded checkpoint is, how its files get there, and the commit that makes it exist.

Beside the directory, in ``.manifest/<name>.json`` of its parent, lies its commit record: there the catalogs look for
those of all checkpoints. A directory without one was written by another program, and is read unverified.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import logging
import os
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple, final

import xxhash

from composerlite.checkpoint.formats.torch_reader import ByteSource
from composerlite.checkpoint.manifest import FileRecord, Manifest
from composerlite.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
)
from composerlite.storage import (
    FileDigest,
    ObjectStore,
    ParallelReader,
    Sink,
    StagedFile,
    StreamWriter,
    Transfer,
    atomic_write,
    check_name,
    fsync_folder,
    is_uri,
    make_folder,
    open_store,
    parse_uri,
    verify_file,
)

__all__ = ["INDEX", "CheckpointFolder", "Claim", "LocalFolder", "PathOrUri", "RemoteFolder", "folder_of"]

log = logging.getLogger(__name__)
INDEX = ".metadata"
"""The file that says what is where in the others."""
_SUFFIX = ".distcp"
_MANIFESTS = ".manifest"
_MOST_INDEX_BYTES, _MOST_MANIFEST_BYTES = 1 << 30, 1 << 30
_LEAST_CHUNK_BYTES, _MOST_CHUNKS = 64 << 10, 1 << 14
_RING_BYTES = 32 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Claim(NamedTuple):
    """A save that is going on.

    Attributes:
        place: where its files go.
        suffix: what their names need so that they differ from those that are there.
    """

    place: str
    suffix: str


class CheckpointFolder(ABC):
    """The directory of one sharded checkpoint. Used as a context manager, or until :meth:`close`."""

    name: str
    """Its name in the folder or bucket that has its commit record."""

    @property
    @abstractmethod
    def uri(self) -> str:
        """Where it is, for messages."""

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def names(self) -> list[str]:
        """The names of what is in it; empty if it is not there."""

    @abstractmethod
    def manifest(self) -> Manifest | None:
        """Its commit record; ``None`` if it has none.

        Raises:
            CorruptCheckpointError: it is damaged, or that of another checkpoint.
        """

    @abstractmethod
    def index(self) -> bytes:
        """The bytes of ``.metadata``, unverified; FileNotFoundError if there is none."""

    @abstractmethod
    def opened(
        self, name: str, digest: FileDigest | None, *, threads: int
    ) -> contextlib.AbstractContextManager[ByteSource]:
        """The file ``name``, whose bytes are compared with ``digest`` as they are read; FileNotFoundError."""

    @abstractmethod
    def fetch(self, name: str, digest: FileDigest | None, target: Path) -> None:
        """Make the file ``name`` the local file ``target``, verified."""

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def check_free(self, *, overwrite: bool) -> list[str]:
        """See that a checkpoint may be saved here; the names of what is there.

        What a save that was killed has left is nothing.

        Raises:
            CheckpointExistsError: there is something, and ``overwrite`` is false.
        """
        names = self.names()
        left_over = all(name.endswith(_SUFFIX) for name in names)
        if not overwrite and not left_over:
            what = "holds a checkpoint" if INDEX in names else f"is not empty: it holds {names[0]!r}"
            raise CheckpointExistsError(
                f"{self.uri!r} {what}. Give another directory, delete it, or pass save_overwrite=True."
            )
        return names

    @abstractmethod
    def claim(self, *, overwrite: bool) -> Claim:
        """Begin a save, in one process for all. Raises as :meth:`check_free` does."""

    @abstractmethod
    def write(self, claim: Claim, name: str, most_bytes: int, fill: Callable[[Sink], object]) -> FileDigest:
        """Make a durable file of what ``fill`` gives, at most ``most_bytes``; what it contains."""

    @abstractmethod
    def commit(self, claim: Claim, index: bytes, files: Mapping[str, FileDigest], facts: Mapping[str, object]) -> None:
        """Make the checkpoint exist, in the process that claimed: with ``index`` first, the commit record at last.

        Args:
            claim: what :meth:`claim` gave.
            index: the content of ``.metadata``.
            files: all others.
            facts: further fields of the commit record.
        """

    @abstractmethod
    def abandon(self, claim: Claim) -> None:
        """After an error, when no rank writes any more: remove what was written. Raises nothing."""

    def close(self) -> None:
        """Let go of connections; twice is fine."""

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def missing(self) -> CheckpointNotFoundError:
        """What to raise where there is no ``.metadata``."""
        names = self.names()
        if not names:
            return CheckpointNotFoundError(f"there is no checkpoint {self.uri!r}: there is no such directory.")
        hint = ""
        if any(name.partition("/")[0] == "model_and_optim" for name in names):
            hint = f" Did you mean {self.uri.rstrip('/') + '/model_and_optim'!r}?"
        return CheckpointNotFoundError(
            f"{self.uri!r} is no sharded checkpoint, or one whose save did not end: it has no {INDEX!r} and holds "
            f"{', '.join(sorted(names)[:8])}.{hint}"
        )

    def _manifest_of(self, index: bytes, files: Mapping[str, FileDigest], facts: Mapping[str, object]) -> Manifest:
        digests = {**files, INDEX: FileDigest(len(index), xxhash.xxh3_128_hexdigest(index))}
        return Manifest(
            name=self.name,
            kind="sharded",
            template=self.name,
            run_name="",
            timestamp={"batch": 0},
            files=tuple(
                FileRecord(f"{self.name}/{name}", d.size_bytes, d.xxh3_128, d.chunk_bytes, d.chunks)
                for name, d in sorted(digests.items())
            ),
            **facts,  # type: ignore[arg-type]
        )


PathOrUri = str | os.PathLike[str] | CheckpointFolder
"""Where a sharded checkpoint is: a path, or a URI of an object store."""


def folder_of(place: PathOrUri, *, threads: int | None = None) -> CheckpointFolder:
    """The directory at ``place``. ``threads`` are those that move bytes to and from an object store.

    Raises:
        ConfigError: the URI names no store, or nothing in it.
    """
    if isinstance(place, CheckpointFolder):
        return place
    text = os.fspath(place)
    if is_uri(text):
        return RemoteFolder(open_store(text), parse_uri(text)[2], threads=threads or 8, closes=True)
    return LocalFolder(Path(parse_uri(text)[2]))


def _chunk_bytes(size_bytes: int) -> int:
    """Small: what is read of a shard is verified by whole chunks, and is often one tensor among many."""
    chunk_bytes = _LEAST_CHUNK_BYTES
    while size_bytes > chunk_bytes * _MOST_CHUNKS:
        chunk_bytes *= 2
    return chunk_bytes


def _write_file(path: Path, most_bytes: int, fill: Callable[[Sink], object], ring_bytes: int) -> FileDigest:
    path.open("xb").close()
    with StreamWriter(path, most_bytes, ring_bytes=ring_bytes, chunk_bytes=_chunk_bytes(most_bytes)) as sink:
        fill(sink)
        return sink.finish()


# ── on a disk ────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class LocalFolder(CheckpointFolder):
    """A directory of this machine, or one that all machines mount.

    A save is written to ``.<name>.saving-<id>`` beside it, which is locked as long as the process lives, and renamed.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self.name = self.path.name
        if not self.name:
            raise ConfigError(f"{str(path)!r} is no directory for a checkpoint: give one below it.")
        self._lock = -1
        self._claimed = ""
        self._overwrite = False

    @property
    def uri(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        try:
            return sorted(path.name for path in self.path.iterdir())
        except FileNotFoundError:
            return []
        except NotADirectoryError as e:
            raise ConfigError(f"{str(self.path)!r} is a file and no directory of a sharded checkpoint.") from e

    @property
    def _manifest_path(self) -> Path:
        return self.path.parent / _MANIFESTS / f"{self.name}.json"

    def manifest(self) -> Manifest | None:
        try:
            data = self._manifest_path.read_bytes()
        except FileNotFoundError:
            return None
        return _checked(Manifest.from_json(data, str(self._manifest_path)), self.name, str(self._manifest_path))

    def index(self) -> bytes:
        return (self.path / INDEX).read_bytes()

    @contextlib.contextmanager
    def opened(self, name: str, digest: FileDigest | None, *, threads: int) -> Generator[ByteSource]:
        with ParallelReader(self.path / name, digest, threads=threads) as reader:
            yield reader

    def fetch(self, name: str, digest: FileDigest | None, target: Path) -> None:
        shutil.copyfile(self.path / name, target)
        if digest is not None:
            verify_file(target, digest)

    def claim(self, *, overwrite: bool) -> Claim:
        self.check_free(overwrite=overwrite)
        self._overwrite = overwrite
        make_folder(self.path.parent)
        self._sweep()
        while True:
            place = self.path.with_name(f".{self.name}.saving-{secrets.token_hex(8)}")
            place.mkdir()
            self._lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks: nothing is swept there
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if place.is_dir():
                self._claimed = place.name
                return Claim(place.name, "")
            self._unlock()  # a sweep was faster than our lock: take another name

    def write(self, claim: Claim, name: str, most_bytes: int, fill: Callable[[Sink], object]) -> FileDigest:
        return _write_file(self.path.with_name(claim.place) / name, most_bytes, fill, _RING_BYTES)

    def commit(self, claim: Claim, index: bytes, files: Mapping[str, FileDigest], facts: Mapping[str, object]) -> None:
        place = self.path.with_name(claim.place)
        self.check_free(overwrite=self._overwrite)  # another process may have saved here meanwhile
        with (place / INDEX).open("xb") as file:
            file.write(index)
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(place)
        make_folder(self._manifest_path.parent)
        with StagedFile(self._manifest_path) as intention:
            intention.file.write(self._manifest_of(index, files, facts).to_json())
            intention.flush()
            before = self._manifest_path.read_bytes() if self._manifest_path.exists() else None
            self._manifest_path.unlink(missing_ok=True)
            fsync_folder(self._manifest_path.parent)
            intention.leave_behind()  # a kill from here on leaves what completes the commit at the next start
            old = _take_name(place, self.path)
            try:
                fsync_folder(self.path.parent)
                intention.publish()
            except BaseException:
                self._give_name_back(place, old, before)
                raise
        self._unlock()
        if old is not None:
            self._remove_old(old)

    def _give_name_back(self, place: Path, old: Path | None, manifest: bytes | None) -> None:
        """Undo a commit that failed halfway."""
        failed = place.with_name(f"{place.name}-failed")
        self.path.rename(failed)
        if old is not None:
            old.rename(self.path)
        if manifest is not None:
            with atomic_write(self._manifest_path) as file:
                file.write(manifest)
        _remove(failed)

    def _remove_old(self, old: Path) -> None:
        """Remove the checkpoint that was replaced; what is not part of it goes to where it was."""
        for entry in list(old.iterdir()):
            if entry.name != INDEX and not entry.name.endswith(_SUFFIX):
                entry.replace(self.path / entry.name)
        _remove(old)

    def abandon(self, claim: Claim) -> None:
        if self._claimed == claim.place:  # only one process removes what all have written
            _remove(self.path.with_name(claim.place))
            self._unlock()
            self._claimed = ""

    def _sweep(self) -> None:
        """Remove what saves of dead processes have left."""
        for place in self.path.parent.glob(f".{glob.escape(self.name)}.saving-*"):
            try:
                descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            except (FileNotFoundError, NotADirectoryError):
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(place)
                log.info("removed %s, left by a process that died while it saved", place)
            except OSError:  # its process lives, or nothing can be proven dead here
                continue
            finally:
                os.close(descriptor)

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _take_name(place: Path, path: Path) -> Path | None:
    """Rename the directory ``place`` to ``path``; where the one is that was there, unless it was empty."""
    try:
        place.rename(path)  # an empty directory is replaced
        return None
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if _exchange(place, path):
        return place
    old = place.with_name(f"{place.name}-old")
    path.rename(old)
    place.rename(path)
    return old


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names at one instant; whether the system can."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(a), None, str(b))


def _remove(folder: Path) -> None:
    """Remove a directory that nobody needs. What cannot be removed is logged: it is not a checkpoint."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as e:
        log.warning("%s cannot be removed and is left behind: %s", folder, e)


# ── in an object store ───────────────────────────────────────────────────────────────────────────────────────────────
@final
class RemoteFolder(CheckpointFolder):
    """The objects below ``root/`` in ``store``.

    There are no renames: data come under names that are free, then ``.metadata``, then the commit record; what was
    there before goes at last.

    Args:
        store: keeps the objects.
        root: a name in it, not empty.
        threads: that move bytes at the same time.
        closes: whether the store is closed with this.
    """

    def __init__(self, store: ObjectStore, root: str, *, threads: int = 8, closes: bool = False) -> None:
        self._root = root.strip("/")
        if not self._root:
            raise ConfigError(f"{store.get_uri('x')[:-1]!r} is a bucket: give a directory in it, as 'run/step100'.")
        self.name = PurePosixPath(self._root).name
        self._store = store
        self._closes = closes
        self._transfer = Transfer(store, threads=threads)
        self._written: list[str] = []
        self._before: list[str] = []
        self._replaced: dict[str, bytes] = {}

    @property
    def uri(self) -> str:
        return self._store.get_uri(self._root)

    def names(self) -> list[str]:
        prefix = f"{self._root}/"
        return [info.name.removeprefix(prefix) for info in self._transfer.list(prefix)]

    @property
    def _manifest_name(self) -> str:
        above = self._root.removesuffix(self.name)
        return check_name(f"{above}{_MANIFESTS}/{self.name}.json")

    def _full(self, name: str) -> str:
        return check_name(f"{self._root}/{name}")

    def manifest(self) -> Manifest | None:
        try:
            data = self._transfer.read_all(self._manifest_name, most_bytes=_MOST_MANIFEST_BYTES)
        except FileNotFoundError:
            return None
        uri = self._store.get_uri(self._manifest_name)
        return _checked(Manifest.from_json(data, uri), self.name, uri)

    def index(self) -> bytes:
        return self._transfer.read_all(self._full(INDEX), most_bytes=_MOST_INDEX_BYTES)

    @contextlib.contextmanager
    def opened(self, name: str, digest: FileDigest | None, *, threads: int) -> Generator[ByteSource]:
        yield _VerifiedObject(self._transfer, self._full(name), digest)

    def fetch(self, name: str, digest: FileDigest | None, target: Path) -> None:
        size = None if digest is None else digest.size_bytes
        check = None if digest is None else lambda path: verify_file(path, digest)
        self._transfer.download(self._full(name), target, overwrite=True, size_bytes=size, check=check)

    def claim(self, *, overwrite: bool) -> Claim:
        self._before = self.check_free(overwrite=overwrite)
        return Claim("", f"_{secrets.token_hex(4)}" if self._before else "")

    def write(self, claim: Claim, name: str, most_bytes: int, fill: Callable[[Sink], object]) -> FileDigest:
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
            path = Path(folder) / name
            digest = _write_file(path, most_bytes, fill, _RING_BYTES)
            self._written.append(self._full(name))
            self._transfer.upload(self._full(name), path)
        return digest

    def commit(self, claim: Claim, index: bytes, files: Mapping[str, FileDigest], facts: Mapping[str, object]) -> None:
        there = INDEX in self._before
        if there:
            self._replaced = {self._full(INDEX): self.index()}
            with contextlib.suppress(FileNotFoundError):
                self._replaced[self._manifest_name] = self._transfer.read_all(self._manifest_name, _MOST_MANIFEST_BYTES)
        self._transfer.delete(self._manifest_name)
        try:
            self._transfer.put_bytes(self._full(INDEX), index, create_only=not there)
        except FileExistsError as e:
            raise CheckpointExistsError(f"{self.uri!r} was saved by another process meanwhile.") from e
        self._written += [] if there else [self._full(INDEX)]
        self._transfer.put_bytes(self._manifest_name, self._manifest_of(index, files, facts).to_json())
        self._written, self._replaced = [], {}
        for name in self._before:
            if name.endswith(_SUFFIX) and name not in files:
                self._transfer.delete(self._full(name))

    def abandon(self, claim: Claim) -> None:
        replaced, written = self._replaced, self._written
        self._replaced, self._written = {}, []
        for name, data in replaced.items():
            self._tidy(name, lambda name=name, data=data: self._transfer.put_bytes(name, data))
        for name in reversed(written):  # the index first
            self._tidy(name, lambda name=name: self._transfer.delete(name))

    def _tidy(self, name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as e:  # noqa: BLE001 - the save's own error is the one that counts
            log.warning("%s cannot be put back as it was: %s", self._store.get_uri(name), e)

    def close(self) -> None:
        self._transfer.close()
        if self._closes:
            self._store.close()


def _checked(manifest: Manifest, name: str, source: str) -> Manifest:
    if manifest.name != name or manifest.kind != "sharded":
        raise CorruptCheckpointError(f"manifest {source!r} is that of another checkpoint, {manifest.name!r}.")
    return manifest


@final
class _VerifiedObject:
    """An object, whose bytes are compared with its digests chunk by chunk as they are read."""

    _BATCH_BYTES = 64 << 20

    def __init__(self, transfer: Transfer, name: str, digest: FileDigest | None) -> None:
        self._transfer = transfer
        self._name = name
        self._digest = digest
        try:
            self._chunks = [] if digest is None else digest.chunk_digests()
        except ValueError as e:
            raise CorruptCheckpointError(f"the digests of {name!r} are not those of a file: {e}.") from e
        if digest is not None and not self._chunks and digest.size_bytes:
            raise CorruptCheckpointError(f"the manifest has no digests of the chunks of {name!r}.")

    def read(self, offset: int, size: int) -> bytes:
        data = bytearray(size)
        if size:
            view = (ctypes.c_char * size).from_buffer(data)
            self.read_into([(offset, ctypes.addressof(view), size)])
        return bytes(data)

    def read_into(self, targets: Sequence[tuple[int, int, int]], progress: Callable[[int], object] = int) -> None:
        if self._digest is None:
            self._transfer.read_into(self._name, targets, progress)
            return
        step, size_bytes = self._digest.chunk_bytes, self._digest.size_bytes
        for offset, _, size in targets:
            if offset < 0 or size < 0 or offset + size > size_bytes:
                raise CorruptCheckpointError(f"{self._name!r} has no bytes {offset} to {offset + size}.")
        wanted = sorted(target for target in targets if target[2])
        touched = sorted({n for offset, _, size in wanted for n in range(offset // step, -(-(offset + size) // step))})
        most = max(1, self._BATCH_BYTES // step)
        for at in range(0, len(touched), most):
            self._read_chunks(touched[at : at + most], wanted, progress)

    def _read_chunks(
        self, numbers: Sequence[int], wanted: Sequence[tuple[int, int, int]], progress: Callable[[int], object]
    ) -> None:
        """Read some chunks, compare them, and copy what is wanted of them."""
        assert self._digest is not None
        step, size_bytes = self._digest.chunk_bytes, self._digest.size_bytes
        memory = bytearray(len(numbers) * step)
        start = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
        sizes = [min(step, size_bytes - number * step) for number in numbers]
        spans = [(n * step, start + at * step, sizes[at]) for at, n in enumerate(numbers)]
        self._transfer.read_into(self._name, spans, progress)
        places: dict[int, int] = {}
        for at, number in enumerate(numbers):
            chunk = memoryview(memory)[at * step : at * step + sizes[at]]
            if xxhash.xxh3_64_digest(chunk) != self._chunks[number]:
                raise CorruptCheckpointError(
                    f"the bytes {number * step} to {number * step + sizes[at]} of {self._name!r} are not those that "
                    "were saved."
                )
            places[number] = start + at * step
        for offset, address, size in wanted:
            for number in range(offset // step, -(-(offset + size) // step)):
                if (place := places.get(number)) is not None:
                    begin, end = max(offset, number * step), min(offset + size, (number + 1) * step)
                    ctypes.memmove(address + begin - offset, place + begin - number * step, end - begin)
