"""The checkpoints that a bucket has below a prefix.

There are no renames and no links: a link is an object that holds the name of another, with ``.symlink`` after its own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar, final

import xxhash

from composerlite.checkpoint.format import INDEXES, SUFFIX
from composerlite.checkpoint.format.weight_files import digest_of_index, is_part_of_weights
from composerlite.checkpoint.place.commit import Commit, deletion_of, remove_manifest, write_manifest
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.lease import HeartbeatLease, Lease, renew_leases, take_leases
from composerlite.checkpoint.place.place import (
    DELETION,
    Leftover,
    NewFile,
    Parts,
    Place,
    SaveHandle,
    StoredFile,
)
from composerlite.checkpoint.record.manifest import MANIFESTS, FileRecord, Manifest, record_path
from composerlite.errors import CheckpointExistsError, CorruptCheckpointError, ObjectStoreError, RunInUseError
from composerlite.storage import (
    FileDigest,
    ObjectStore,
    Transfer,
    VerifiedObject,
    WorkerPool,
    check_name,
    is_name,
    make_folder,
    verify_file,
)

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource

__all__ = ["LINK_SUFFIX", "Bucket", "exists_error", "has_index"]

T = TypeVar("T")
R = TypeVar("R")
log = logging.getLogger(__name__)
LINK_SUFFIX = ".symlink"
_NEXT = ".next"
"""The end of the names of objects that say what is about to be."""
_GONE = ".gone"
"""The end of the name of a manifest whose checkpoint is being deleted. An empty one announces nothing."""
_REFUSED = "the announcement of a deletion that was refused"
_MOST_LINK_BYTES = 4096
_DEAD_SECONDS = 30.0
"""For so long a save waits for another of the same name in a process that may be dead."""
_LONGEST_SECONDS = 3600.0
"""For so long it waits for one in this process, which is alive: as long as a run waits for an upload by default."""
_saving: set[str] = set()
"""The checkpoints that this process is saving: a lease tells processes apart, and not the threads of one."""
_saving_changed = threading.Condition()
_READERS = 16
_MOST_SMALL_BYTES = 1 << 30
_MOST_MANIFEST_BYTES = 64 << 20
"""Many of them are in memory at once."""
_STEP_BYTES = 64 << 20
"""What is in memory while an object is verified."""


@final
class Bucket(Place):
    """The checkpoints below ``root`` in a bucket.

    Every method raises what :class:`~composerlite.storage.ObjectStore` raises, after it was tried again where that may
    help.

    Args:
        transfer: moves the bytes.
        root: what stands before the names of checkpoints; may be empty.
        closing: is called by ``close``.
    """

    where = "remote"

    def __init__(self, transfer: Transfer, root: str = "", *, closing: Callable[[], object] | None = None) -> None:
        self.transfer = transfer
        self.root = root.strip("/")
        self._closing = closing
        self._held: dict[str, Lease] = {}
        self._written: list[str] = []

    @classmethod
    def of(cls, store: ObjectStore, root: str = "", *, threads: int = 8, closes: bool = True) -> Bucket:
        """Bucket of the objects of ``store`` below ``root``; ``closes``: :meth:`close` closes ``store``, too."""
        transfer = Transfer(store, threads=threads)

        def close() -> None:
            transfer.close()
            if closes:
                store.close()

        return cls(transfer, root, closing=close)

    # ── where ────────────────────────────────────────────────────────────────────────────────────────────────────
    def uri(self, path: str = "") -> str:
        if path or self.root:
            return self.transfer.store.get_uri(self.name_of(path) if path else self.root)
        return self.transfer.store.get_uri("x").removesuffix("x")

    def name_of(self, path: str) -> str:
        """Return the full name of the object ``path``."""
        return check_name(f"{self.root}/{path}" if self.root else path)

    def path_of(self, path: str) -> None:
        return None

    def at(self, root: str) -> Bucket:
        """The same bucket below another prefix, usable until this one is closed."""
        other = copy.copy(self)
        other.root, other._closing = root.strip("/"), None
        other._held, other._written = {}, []
        return other

    def inside(self, path: str) -> Bucket:
        return self.at(self.name_of(path) if path else self.root)

    def above(self) -> Iterator[tuple[Bucket, str]]:
        for parent in PurePosixPath(self.root).parents if self.root else ():
            root = "" if str(parent) == "." else str(parent)
            yield self.at(root), self.root.removeprefix(root).strip("/") + "/"

    def check_writable(self) -> None:
        self.transfer.check_writable(self.name_of("file"))

    def check_deletable(self) -> None:
        """See that objects can be deleted. Where they cannot, an empty one of one name is left."""
        path = f"{MANIFESTS}/.deletable"
        self.put(path, b"")
        self.delete(path)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def files(self, below: str = "") -> Mapping[str, StoredFile]:
        prefix = f"{self.name_of(below)}/" if below else self._prefix
        return {
            path: StoredFile(path, info.size_bytes, info.modified_at)
            for info in self.transfer.list(prefix)
            # Others may have names that no store takes from us, as ``run//file``: they cannot be ours.
            if is_name(info.name) and (path := info.name.removeprefix(self._prefix))
        }

    @property
    def _prefix(self) -> str:
        return f"{self.root}/" if self.root else ""

    def size(self, path: str) -> int:
        return self.transfer.size(self.name_of(path))

    def read(self, path: str) -> bytes:
        most = _MOST_MANIFEST_BYTES if MANIFESTS in path.split("/") else _MOST_SMALL_BYTES
        return self.transfer.read_all(self.name_of(path), most_bytes=most)

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        everything = list(items)
        if len(everything) < 2:
            return [work(item) for item in everything]
        with WorkerPool(min(_READERS, len(everything)), name="bucket") as pool:
            doing = [pool.submit(functools.partial(work, item)) for item in everything]
            return [done.result() for done in doing]

    @contextlib.contextmanager
    def opened(self, path: str, digest: FileDigest | None, *, threads: int = 8) -> Generator[ByteSource]:
        yield VerifiedObject(self.transfer, self.name_of(path), digest)

    def verify(self, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        name = self.name_of(record.path)
        uri = self.uri(record.path)
        if (size := self.transfer.size(name)) != record.size_bytes:
            raise CorruptCheckpointError(f"{uri!r} has {size} bytes and was saved with {record.size_bytes}.")
        digest = xxhash.xxh3_128()
        for start in range(0, size, _STEP_BYTES):
            data = self.transfer.read(name, start, min(_STEP_BYTES, size - start))
            digest.update(data)
            progress(len(data))
        if digest.hexdigest() != record.xxh3_128:
            raise CorruptCheckpointError(f"the bytes of {uri!r} are not those that were saved.")

    def write_to(
        self,
        target: Path,
        path: str,
        digest: FileDigest | None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        make_folder(target.parent)
        self.transfer.download(
            self.name_of(path),
            target,
            overwrite=True,
            size_bytes=None if digest is None else digest.size_bytes,
            callback=_renewing(progress),
            check=None if digest is None else lambda file: verify_file(file, digest),
        )

    def names(self, folder: str) -> list[str]:
        prefix = f"{folder}/" if folder else ""
        return sorted({path.removeprefix(prefix).partition("/")[0] for path in self.files(folder)})

    def identity(self, paths: Iterable[str]) -> str:
        return " ".join(self.uri(path) for path in paths)

    def taken(self) -> Iterator[str]:
        for path in self.files(MANIFESTS):  # what has no manifest is replaced
            if path.endswith(".json"):
                yield path.removeprefix(f"{MANIFESTS}/").removesuffix(".json")

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def write_all(self, files: Iterable[NewFile]) -> list[FileDigest]:
        digests: list[FileDigest] = []
        for file in files:
            name = PurePosixPath(file.path).name
            with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
                digests += Folder(Path(folder)).write_all([file._replace(path=name)])
                self._written.append(file.path)
                self.send(Path(folder) / name, file.path)
        return digests

    def send(self, source: Path, path: str, progress: Callable[[int, int], object] | None = None) -> None:
        self.transfer.upload(self.name_of(path), source, _renewing(progress))

    def put(self, path: str, data: bytes | Path, *, create_only: bool = False) -> None:
        content = data if isinstance(data, bytes) else data.read_bytes()
        self.transfer.put_bytes(self.name_of(path), content, create_only=create_only)

    def delete(self, path: str, *, kept_as: str | None = None) -> None:
        if kept_as is None:  # nothing in a bucket gets another name on the word of one machine
            self.transfer.delete(self.name_of(path))

    @contextlib.contextmanager
    def deleting(self, manifest: Manifest) -> Generator[None]:
        record = record_path(manifest.name)
        self.put(record + _GONE, deletion_of(manifest))
        try:
            remove_manifest(self, record)
        except BaseException:
            with self.undoing(record + _GONE):
                if self.exists(record):  # refused: the checkpoint stays, and nothing says that it is to go
                    self.put(record + _GONE, b"")
                    self.delete(record + _GONE)
            raise
        yield
        self.delete(record + _GONE)

    def has(self, record: FileRecord) -> bool:
        """Return true if there is such an object of that size: to read it would cost what it is to save."""
        return self.exists(record.path) and self.size(record.path) == record.size_bytes

    # ── commits ──────────────────────────────────────────────────────────────────────────────────────────────────
    def acquire(self, name: str) -> None:
        if name in self._held:
            return
        uri = self.uri(name)
        with _saving_changed:
            began = time.monotonic()
            while uri in _saving:  # perhaps by a run before this one, which has failed and whose uploads continue
                seconds = time.monotonic() - began
                if seconds >= _LONGEST_SECONDS:
                    raise CheckpointExistsError(
                        f"checkpoint {uri!r} is being saved in this process already: waited {seconds:.0f} s for the "
                        "end of that. Save it again when it is there."
                    )
                log.warning(
                    "checkpoint %r is being saved in this process: waiting for the end of that, for %.0f s now and "
                    "%.0f s at most",
                    uri,
                    seconds,
                    _LONGEST_SECONDS,
                )
                _saving_changed.wait_for(lambda: uri not in _saving, _DEAD_SECONDS)
            _saving.add(uri)
        lease = HeartbeatLease(self.transfer, self.name_of(f"{MANIFESTS}/.{name.replace('/', '%2F')}.saving"))
        try:
            take_leases([lease], f"checkpoint {uri!r}", _DEAD_SECONDS, "one of them would replace the other.")
        except BaseException as e:
            _is_saved(uri)
            if isinstance(e, RunInUseError):
                raise CheckpointExistsError(str(e)) from e
            raise
        self._held[name] = lease

    def release(self, name: str) -> None:
        self._written = [path for path in self._written if not path.startswith(f"{name}/")]
        lease = self._held.pop(name, None)
        if lease is not None:
            lease.release()
            _is_saved(self.uri(name))

    def begin(self, name: str, check: Callable[[], bool], *, overwrite: bool) -> SaveHandle:
        self.acquire(name)
        try:
            is_there = check()
            if is_there:
                self._settle(name)
        except BaseException:
            self.release(name)
            raise
        return SaveHandle(PurePosixPath(name).name, f"_{secrets.token_hex(4)}" if is_there else "")

    def _settle(self, name: str) -> None:
        """Complete or withdraw the commit of the directory ``name`` that a dead process had announced."""
        for data in self.announced(name):
            for index in INDEXES:
                with contextlib.suppress(FileNotFoundError, CorruptCheckpointError):
                    if has_index(Manifest.from_json(data, name), self.read(f"{name}/{index}")):
                        write_manifest(self, record_path(name), data)
            self.delete(record_path(name) + _NEXT)

    def abandon(self, name: str, handle: SaveHandle) -> None:
        for path in [path for path in self._written if path.startswith(f"{name}/")]:
            with self.undoing(path):
                self.delete(path)
        with self.undoing(name):
            self.release(name)

    @contextlib.contextmanager
    def undoing(self, path: str) -> Generator[None]:
        """Within it an error is logged: the save's own error is the one that counts."""
        try:
            yield
        except Exception as e:  # noqa: BLE001
            log.warning("%s could not be restored: %s", self.uri(path), e)

    def parts(self, name: str, handle: SaveHandle, deciding: str, data: bytes) -> Parts:
        return {f"{name}/{deciding}": data}

    def commit(self, name: str, parts: Parts, *, overwrite: bool, record: str | None) -> Commit:
        small = {path: data for path, data in parts.items() if isinstance(data, bytes)}
        return _BucketCommit(self, name, small, overwrite=overwrite, record=record)

    def announced(self, name: str | None) -> Iterator[bytes]:
        all_of_them = [] if name else [path for path in self.files(MANIFESTS) if path.endswith(f".json{_NEXT}")]
        for path in [record_path(name) + _NEXT] if name else all_of_them:
            with contextlib.suppress(FileNotFoundError):
                yield self.read(path)

    # ── links and locks ──────────────────────────────────────────────────────────────────────────────────────────
    def point(self, link: str, name: str | None, *, ahead: bool = False) -> None:
        pointer = self._link(link, ahead=ahead)
        if name is not None and not link.startswith("/"):
            self.check_link(link)
        if name is None:
            self.transfer.delete(pointer)
        else:
            self.transfer.put_bytes(pointer, self.name_of(name).encode())

    def target_of(self, link: str, *, ahead: bool = False) -> str:
        pointer = self._link(link, ahead=ahead)
        try:
            target = self.transfer.read_all(pointer, most_bytes=_MOST_LINK_BYTES).decode()
        except UnicodeDecodeError as e:
            raise CorruptCheckpointError(f"{self.transfer.store.get_uri(pointer)!r} holds no name: {e}") from e
        return target.strip().removeprefix(self._prefix)

    def links(self) -> Sequence[str]:
        names = (path.removeprefix(f"{MANIFESTS}/") for path in self.files(MANIFESTS) if path.endswith(_NEXT))
        return [name.removesuffix(_NEXT) for name in names if "/" not in name and not name.endswith(f".json{_NEXT}")]

    def _link(self, link: str, *, ahead: bool) -> str:
        """Return the object that the link is: that of a link which is about to move lies beside the manifests."""
        if ahead:
            return self.name_of(f"{MANIFESTS}/{PurePosixPath(link).name}{_NEXT}")
        return check_name(link[1:] + LINK_SUFFIX) if link.startswith("/") else self.name_of(link + LINK_SUFFIX)

    def lock(
        self, name: str, *, beat_seconds: float = 5.0, dead_seconds: float = 20.0, of: HeartbeatLease | None = None
    ) -> HeartbeatLease:
        """See :class:`Place`; for the seconds, and the run that the lease is ``of``, see :class:`HeartbeatLease`."""
        whole = self.name_of(f"{MANIFESTS}/.{name}.lease")
        return HeartbeatLease(self.transfer, whole, beat_seconds=beat_seconds, dead_seconds=dead_seconds, of=of)

    # ── what is left ─────────────────────────────────────────────────────────────────────────────────────────────
    def in_use(self) -> set[str]:
        files = self.files().values()
        paths = [
            file.path
            for file in files
            if file.path.endswith((LINK_SUFFIX, _NEXT)) and file.size_bytes <= _MOST_LINK_BYTES
        ]
        targets = (data.decode(errors="replace").strip() for data in self.read_all(paths) if data is not None)
        return {target.removeprefix(self._prefix) for target in targets}

    def recover(self, committed: Mapping[str, str] | None, *, everywhere: bool = True) -> None:
        if everywhere:
            self._complete_deletions(MANIFESTS)

    def _deletions(self, below: str) -> Iterator[tuple[str, Bucket, Manifest]]:
        """Yield the announced deletions in ``below``: the object, the place that it is in, what is deleted."""
        there = self.files(below).items()
        for path in [path for path, file in there if path.endswith(f".json{_GONE}") and file.size_bytes]:
            home, _, name = path.rpartition(f"{MANIFESTS}/")
            try:
                manifest = Manifest.from_json(self.read(path), self.uri(path))
            except FileNotFoundError:
                continue
            except CorruptCheckpointError as e:
                log.warning("left out: %s", e)
                continue
            if name == f"{manifest.name}.json{_GONE}":
                yield path, self.inside(home.strip("/")), manifest

    def _complete_deletions(self, below: str) -> None:
        """Complete the deletions in ``below`` that dead processes have left unfinished."""
        for path, place, manifest in self._deletions(below):
            place.complete_deletion(manifest, place.left_of(manifest))
            self.delete(path)
            log.info("completed the deletion of %s, whose process had died", place.uri(manifest.name))

    def _told(self, path: str, place: Bucket, manifest: Manifest) -> Leftover:
        left = place.left_of(manifest)
        size = self.size(path) + sum(place.size(one) for one in left)
        home = place.root.removeprefix(self.root).strip("/")
        paths = frozenset(f"{home}/{one}".strip("/") for one in left)
        return Leftover(place.uri(manifest.name), DELETION, size, paths)

    def leftovers(self, older_than: timedelta) -> list[Leftover]:
        refused = [Leftover(self.uri(path), _REFUSED, 0) for path in self._taken_back(older_than)]
        return [*(self._told(*one) for one in self._deletions("")), *refused] + [
            Leftover(
                self.transfer.store.get_uri(upload.name),
                f"the parts of an upload that was started {upload.started_at}",
                0,
            )
            for upload in self.transfer.stale(self._prefix, older_than)
        ]

    def sweep(self, older_than: timedelta) -> None:
        self._complete_deletions("")
        for path in self._taken_back(older_than):
            self.delete(path)
        self.transfer.abort_stale(self._prefix, older_than)

    def _taken_back(self, older_than: timedelta) -> list[str]:
        """Return the empty announcements of deletions that were refused; a new one may be about to get a content."""
        latest = datetime.now(UTC) - older_than
        return [
            path
            for path, file in self.files().items()
            if path.endswith(f".json{_GONE}") and PurePosixPath(path).parent.name == MANIFESTS
            if not file.size_bytes and file.modified_at is not None and file.modified_at <= latest
        ]

    def close(self) -> None:
        if self._closing is not None:
            self._closing()


@final
class _BucketCommit(Commit):
    """Small objects that decide which others count, which have come under names of their own, and a manifest.

    What is replaced one by one under its name, as the file of a checkpoint, is announced before that.
    """

    def __init__(
        self, bucket: Bucket, name: str, parts: Mapping[str, bytes], *, overwrite: bool, record: str | None
    ) -> None:
        self._bucket = bucket
        self._name = name
        self._parts = parts
        self._overwrite = overwrite
        self._has_manifest = record is not None
        self._manifest = b""
        self._there: Manifest | None = None
        self._before: dict[str, bytes | None] = {}

    @property
    def _record(self) -> str:
        return record_path(self._name)

    def _readable(self) -> Manifest | None:
        """Return the manifest that is there, if it can be read and is not that of another checkpoint."""
        try:
            manifest = Manifest.from_json(self._bucket.read(self._record), self._bucket.uri(self._record))
        except (FileNotFoundError, CorruptCheckpointError):
            return None
        return manifest if manifest.name == self._name else None

    def announce(self, manifest: bytes) -> None:
        self._manifest = manifest
        self._there = self._readable() if self._overwrite else None
        if self._there is not None:
            self._bucket.put(self._record + _NEXT, manifest)

    def take_names(self) -> None:
        for path, data in self._parts.items():
            before = None
            if self._overwrite:
                with contextlib.suppress(FileNotFoundError):
                    before = self._bucket.read(path)
            self._before[path] = before
            try:
                self._bucket.put(path, data, create_only=before is None)
            except FileExistsError as e:
                del self._before[path]
                uri = self._bucket.uri(self._name)
                raise CheckpointExistsError(f"{uri!r} was saved by another process meanwhile.") from e

    def publish(self) -> None:
        if not self._has_manifest:
            return
        try:
            write_manifest(self._bucket, self._record, self._manifest, create_only=self._there is None)
        except FileExistsError as e:
            found = self._readable()
            if found is not None and found.files != Manifest.from_json(self._manifest, self._name).files:
                raise exists_error(self._bucket.uri(self._name), found) from e
            if found is None:  # what is there is damaged
                write_manifest(self._bucket, self._record, self._manifest)

    def undo(self) -> None:
        for path, before in reversed(self._before.items()):
            with self._bucket.undoing(path):
                if before is None:
                    self._bucket.delete(path)
                else:
                    self._bucket.put(path, before)
        if self._there is not None and self._parts:  # else files may have been replaced by now: it tells what they are
            with self._bucket.undoing(self._name):
                self._bucket.delete(self._record + _NEXT)

    def discard(self) -> None:
        if not self._has_manifest:
            return
        kept = {record.path for record in Manifest.from_json(self._manifest, self._name).files}
        old = [] if self._there is None else [record.path for record in self._there.files]
        try:
            if self._parts:  # a directory: what saves that did not end have left, too
                files = self._bucket.files(self._name)
                old += [path for path in files if path.endswith(SUFFIX) or is_part_of_weights(path.rpartition("/")[2])]
            for path in old:
                if path not in kept:
                    self._bucket.delete(path)
            if self._there is not None:
                self._bucket.delete(self._record + _NEXT)
        except (OSError, ObjectStoreError) as e:
            log.warning("could not remove the files that %s replaced: %s", self._bucket.uri(self._name), e)


def _renewing(progress: Callable[[int, int], object] | None) -> Callable[[int, int], object]:
    """Return ``progress`` that renews the leases, too: a transfer without threads is one of the thread that trains."""

    def tell(done: int, total: int) -> None:
        renew_leases()
        if progress is not None:
            progress(done, total)

    return tell


def _is_saved(uri: str) -> None:
    with _saving_changed:
        _saving.discard(uri)
        _saving_changed.notify_all()


def exists_error(uri: str, there: Manifest) -> CheckpointExistsError:
    """Error to raise where ``there`` is the manifest of another checkpoint at ``uri``."""
    return CheckpointExistsError(
        f"checkpoint {uri!r} exists, of run {there.run_name!r} at batch {there.batch}. Give names that differ, as with "
        "'{run_name}' or '{batch}' in them, delete it, or pass overwrite=True (save_overwrite=True in the Trainer)."
    )


def has_index(manifest: Manifest, index: bytes) -> bool:
    """Return true if ``index`` is that of the directory that ``manifest`` describes."""
    digest = digest_of_index(index) or xxhash.xxh3_128_hexdigest(index)
    paths = [f"{manifest.name}/{name}" for name in INDEXES]
    return any(record.path in paths and record.xxh3_128 == digest for record in manifest.files)
