"""The objects of a bucket below a prefix.

A bucket has no renames and no links. An object with the suffix ``.symlink`` is a link: its content is the name of the
target.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, final

import xxhash

from composerlite.checkpoint.place.catalog import map_reads
from composerlite.checkpoint.place.lease import HeartbeatLease, lease_name
from composerlite.checkpoint.place.place import (
    LINK_SUFFIX,
    MOST_READ_BYTES,
    Folder,
    NewFile,
    OnBytes,
    Place,
    StoredFile,
)
from composerlite.checkpoint.record.record import FileRecord
from composerlite.errors import CorruptCheckpointError
from composerlite.storage import FileDigest, ObjectStore, Transfer, check_name, make_folder, verify_file
from composerlite.storage.object_store import is_name
from composerlite.storage.transfer import VerifiedObject

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource

_STEP_BYTES = 64 << 20
"""Bytes of a single request, all in memory, while an object is verified."""


@final
class Bucket(Place):
    """The checkpoints below ``root`` in a bucket.

    Every method retries transient errors, and raises the errors of :class:`~composerlite.storage.ObjectStore`.

    Args:
        transfer: moves the bytes.
        root: prefix of the names of checkpoints; may be empty.
    """

    reads_at_once = 16

    def __init__(self, transfer: Transfer, root: str = "") -> None:
        self.transfer = transfer
        self.root = root.strip("/")
        self._prefix = f"{self.root}/" if self.root else ""
        self._owned = contextlib.ExitStack()

    @classmethod
    def of(cls, store: ObjectStore, root: str = "", *, threads: int = 8, closes: bool = True) -> Bucket:
        """Return the bucket of ``store`` below ``root``.

        ``threads`` threads move bytes. With ``closes``, :meth:`close` closes ``store``, too.
        """
        bucket = cls(Transfer(store, threads=threads), root)
        if closes:
            bucket._owned.callback(store.close)
        bucket._owned.callback(bucket.transfer.close)
        return bucket

    # ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────
    def uri(self, path: str = "") -> str:
        name, get_uri = self._full(path).rstrip("/"), self.transfer.store.get_uri
        return get_uri(name) if name else get_uri("x").removesuffix("x")

    def name_of(self, path: str) -> str:
        return check_name(self._full(path))

    def _full(self, path: str) -> str:
        return path[1:] if path.startswith("/") else self._prefix + path

    def path_of(self, path: str) -> None:
        return None

    def inside(self, path: str) -> Bucket:
        return Bucket(self.transfer, self._full(path))

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def files(self, below: str = "") -> Mapping[str, StoredFile]:
        prefix = f"{self.name_of(below)}/" if below else self._prefix
        return {
            path: StoredFile(path, info.size_bytes, info.modified_at)
            for info in self.transfer.list(prefix)
            # Names such as ``run//file`` belong to other programs: stores refuse such names from composerlite.
            if is_name(info.name) and (path := info.name.removeprefix(self._prefix))
        }

    def names(self, folder: str) -> list[str]:
        prefix = f"{self.name_of(folder)}/" if folder else self._prefix
        objects, folders = self.transfer.list_level(prefix)
        found = {*(info.name for info in objects if is_name(info.name)), *folders}
        return sorted(name.removeprefix(prefix).rstrip("/") for name in found)

    def read(self, path: str) -> bytes:
        return self.transfer.read_all(self.name_of(path), most_bytes=MOST_READ_BYTES)

    def end(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        name = self.name_of(path)
        return self.transfer.read_tail(name, most_bytes) if most_bytes else (self.transfer.size(name), b"")

    def opened(
        self, path: str, digest: FileDigest | None, *, threads: int = 8
    ) -> contextlib.AbstractContextManager[ByteSource]:
        return contextlib.nullcontext(VerifiedObject(self.transfer, self.name_of(path), digest))

    def verify(self, record: FileRecord, progress: OnBytes = int) -> None:
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
            raise CorruptCheckpointError(f"the bytes of {uri!r} differ from the saved bytes.")

    def fetch(
        self, path: str, target: Path, digest: FileDigest | None, progress: OnBytes = int, *, create_only: bool = False
    ) -> None:
        make_folder(target.parent)
        self.transfer.download(
            self.name_of(path),
            target,
            overwrite=not create_only,
            size_bytes=None if digest is None else digest.size_bytes,
            callback=_counting(progress),
            check=None if digest is None else lambda file: verify_file(file, digest),
        )

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def write(self, file: NewFile) -> FileDigest:
        name = PurePosixPath(file.path).name
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
            digest = Folder(folder).write(file._replace(path=name))
            self.put(file.path, Path(folder) / name)
        return digest

    def put(self, path: str, data: bytes | Path, *, create_only: bool = False, progress: OnBytes = int) -> None:
        if isinstance(data, Path):
            self.transfer.upload(self.name_of(path), data, _counting(progress), create_only=create_only)
        else:
            self.transfer.put_bytes(self.name_of(path), data, create_only=create_only)

    def delete(self, paths: Iterable[str], *, durable: bool = False, folders: bool = False) -> None:
        for path in paths:
            self.transfer.delete(self.name_of(path))

    # ── links, locks, leftovers ──────────────────────────────────────────────────────────────────────────────────
    @contextlib.contextmanager
    def pointing(self, links: Mapping[str, str]) -> Generator[None]:
        for link in links:
            if not link.startswith("/"):
                self.check_link(link)
        yield
        for link, name in links.items():
            self.put(link + LINK_SUFFIX, self.name_of(name).encode())

    def target_of(self, link: str) -> str:
        return self.read(link + LINK_SUFFIX).decode(errors="replace").strip().removeprefix(self._prefix)

    def links(self) -> Mapping[str, str]:
        links = [path.removesuffix(LINK_SUFFIX) for path in self.files() if path.endswith(LINK_SUFFIX)]

        def read(link: str) -> str:
            with contextlib.suppress(FileNotFoundError):  # another process has deleted the link
                return self.target_of(link)
            return ""

        return dict(zip(links, map_reads(self, read, links), strict=True))

    def lock(self, name: str) -> HeartbeatLease:
        return HeartbeatLease(self.transfer, self.name_of(lease_name(name)))

    def sweep(self, older_than: timedelta, *, dry_run: bool = False) -> list[StoredFile]:
        return [
            StoredFile(upload.name.removeprefix(self._prefix), 0, upload.started_at)
            for upload in self.transfer.abort_stale(self._prefix, older_than, dry_run=dry_run)
        ]

    def close(self) -> None:
        self._owned.close()


def _counting(progress: OnBytes) -> Callable[[int, int], object]:
    """Return a callback for a transfer, to be called with (bytes so far, total).

    The callback calls ``progress`` with the number of bytes since the last call.
    """
    before = 0

    def count(done: int, _: int) -> None:
        nonlocal before
        progress(done - before)
        before = done

    return count
