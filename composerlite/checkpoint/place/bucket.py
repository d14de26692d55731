"""The objects that a bucket has below a prefix.

There are no renames and no links: a link is an object that holds the name of another, with ``.symlink`` after its own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar, final

import xxhash

from composerlite.checkpoint.place.commit import put_decider
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.lease import HeartbeatLease, lease_name, renew_leases
from composerlite.checkpoint.place.place import LINK_SUFFIX, Leftover, NewFile, Place, StoredFile
from composerlite.checkpoint.record.manifest import FileRecord, Manifest
from composerlite.errors import CheckpointExistsError, CorruptCheckpointError
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

__all__ = ["Bucket", "exists_error"]

T = TypeVar("T")
R = TypeVar("R")
_NEXT = ".next"
"""End of the name of the object that names the checkpoint which is being uploaded, and so may be newer than a link."""
_MOST_LINK_BYTES = 4096
_READERS = 16
_MOST_SMALL_BYTES = 1 << 30
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
        self.put(".deletable", b"")
        self.delete(".deletable")

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
        return self.transfer.read_all(self.name_of(path), most_bytes=_MOST_SMALL_BYTES)

    def end(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        return self.transfer.read_tail(self.name_of(path), most_bytes)

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
        digest, body_bytes = xxhash.xxh3_128(), record.digest.body_bytes
        for start in range(0, body_bytes, _STEP_BYTES):
            data = self.transfer.read(name, start, min(_STEP_BYTES, body_bytes - start))
            digest.update(data)
            progress(len(data))
        tail = self.transfer.read(name, body_bytes, record.tail_bytes) if record.tail_bytes else b""
        has_tail = not tail or xxhash.xxh3_128_hexdigest(tail) == record.tail_xxh3_128
        if digest.hexdigest() != record.xxh3_128 or not has_tail:
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
        for path in self.files():
            if not path.endswith(LINK_SUFFIX) and not PurePosixPath(path).name.startswith("."):
                yield path
            elif path.endswith("/.metadata"):
                yield path.rpartition("/")[0]

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def write_all(self, files: Iterable[NewFile]) -> list[FileDigest]:
        digests: list[FileDigest] = []
        for file in files:
            name = PurePosixPath(file.path).name
            with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
                digests += Folder(Path(folder)).write_all([file._replace(path=name)])
                self.send(Path(folder) / name, file.path)
        return digests

    def send(self, source: Path, path: str, progress: Callable[[int, int], object] | None = None) -> None:
        self.transfer.upload(self.name_of(path), source, _renewing(progress))

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        self.transfer.put_bytes(self.name_of(path), data, create_only=create_only)

    def stage_decider(self, path: str, save_id: str) -> _UnstagedDecider:
        return _UnstagedDecider(self, path, save_id)

    def delete(self, path: str, *, durable: bool = False) -> None:
        self.transfer.delete(self.name_of(path))

    # ── links and locks ──────────────────────────────────────────────────────────────────────────────────────────
    def point(self, link: str, name: str | None) -> None:
        pointer = self._link(link)
        if name is not None and not link.startswith("/"):
            self.check_link(link)
        if name is None:
            self.transfer.delete(pointer)
        else:
            self.transfer.put_bytes(pointer, self.name_of(name).encode())

    def target_of(self, link: str) -> str:
        return self._content_of(self._link(link)).removeprefix(self._prefix)

    def announce_target(self, link: str, manifest: Manifest) -> None:
        self.transfer.put_bytes(self._announcement(link), f"{self.name_of(manifest.name)}\n{manifest.id}".encode())

    def announced_target(self, link: str) -> tuple[str, str]:
        name, _, save_id = self._content_of(self._announcement(link)).partition("\n")
        return name.removeprefix(self._prefix), save_id

    def announced_links(self) -> Sequence[str]:
        objects, _ = self.transfer.list_level(self._prefix)
        names = [info.name.removeprefix(self._prefix) for info in objects]
        return [name[1:].removesuffix(_NEXT) for name in names if name.startswith(".") and name.endswith(_NEXT)]

    def _content_of(self, pointer: str) -> str:
        """Return the text of the object ``pointer``. Raises CorruptCheckpointError if it holds none."""
        try:
            return self.transfer.read_all(pointer, most_bytes=_MOST_LINK_BYTES).decode().strip()
        except UnicodeDecodeError as e:
            raise CorruptCheckpointError(f"{self.transfer.store.get_uri(pointer)!r} holds no name: {e}") from e

    def _announcement(self, link: str) -> str:
        """Return the name of the object that says where a link is about to lead. It is hidden in the place."""
        return self.name_of(f".{PurePosixPath(link).name}{_NEXT}")

    def _link(self, link: str) -> str:
        """Return the name of the object that the link is."""
        return check_name(link[1:] + LINK_SUFFIX) if link.startswith("/") else self.name_of(link + LINK_SUFFIX)

    def lock(self, name: str, *, beat_seconds: float = 5.0, dead_seconds: float = 20.0) -> HeartbeatLease:
        """Return the lease of the object name ``name``. For the seconds see :class:`HeartbeatLease`."""
        full_name = self.name_of(lease_name(name))
        return HeartbeatLease(self.transfer, full_name, beat_seconds=beat_seconds, dead_seconds=dead_seconds)

    # ── what is left ─────────────────────────────────────────────────────────────────────────────────────────────
    def in_use(self) -> set[str]:
        files = self.files().values()
        paths = [
            file.path
            for file in files
            if file.path.endswith((LINK_SUFFIX, _NEXT)) and file.size_bytes <= _MOST_LINK_BYTES
        ]
        texts = (data.decode(errors="replace").strip() for data in self.read_all(paths) if data is not None)
        return {text.partition("\n")[0].removeprefix(self._prefix) for text in texts}

    def leftovers(self, older_than: timedelta) -> list[Leftover]:
        return [
            Leftover(
                self.transfer.store.get_uri(upload.name),
                f"the parts of an upload that was started {upload.started_at}",
                0,
            )
            for upload in self.transfer.stale(self._prefix, older_than)
        ]

    def sweep(self, older_than: timedelta) -> None:
        self.transfer.abort_stale(self._prefix, older_than)

    def close(self) -> None:
        if self._closing is not None:
            self._closing()


@final
class _UnstagedDecider:
    """The deciding object of a directory, of which there is nothing before its commit: see :class:`StagedDecider`."""

    def __init__(self, bucket: Bucket, path: str, save_id: str) -> None:
        self._bucket = bucket
        self._path = path
        self._save_id = save_id

    def commit(self, data: bytes, *, overwrite: bool) -> None:
        put_decider(self._bucket, self._path, data, self._save_id, overwrite=overwrite)

    def close(self) -> None:
        """Do nothing: there is no temporary object."""


def _renewing(progress: Callable[[int, int], object] | None) -> Callable[[int, int], object]:
    """Return ``progress`` that renews the leases, too: a transfer without threads is one of the thread that trains."""

    def tell(done: int, total: int) -> None:
        renew_leases()
        if progress is not None:
            progress(done, total)

    return tell


def exists_error(uri: str, there: Manifest) -> CheckpointExistsError:
    """Error to raise where ``there`` is the record of another checkpoint at ``uri``."""
    return CheckpointExistsError(
        f"checkpoint {uri!r} exists, of run {there.run_name!r} at batch {there.batch}. Give names that differ, as with "
        "'{run_name}' or '{batch}' in them, delete it, or pass overwrite=True (save_overwrite=True in the Trainer)."
    )
