"""The checkpoints that a bucket has below a prefix.

There are no renames and no links: a link is an object that holds the name of another, with ``.symlink`` after its own.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar, final

import xxhash

from composerlite.checkpoint.place.lease import HeartbeatLease, Lease
from composerlite.checkpoint.place.place import MANIFESTS, Leftover, Place, StoredFile, by_steps
from composerlite.checkpoint.record.manifest import FileRecord
from composerlite.errors import CorruptCheckpointError
from composerlite.storage import FileDigest, Helpers, ObjectStore, Transfer, check_name, make_folder, verify_file

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource

__all__ = ["LINK_SUFFIX", "Bucket", "VerifiedObject"]

T = TypeVar("T")
R = TypeVar("R")
LINK_SUFFIX = ".symlink"
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
        """Return what ``store`` has below ``root``, by so many threads; ``closes``: the store is closed with it."""
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
        """Return what the same bucket has below another prefix, until this one is closed."""
        other = copy.copy(self)
        other.root, other._closing = root.strip("/"), None
        return other

    def inside(self, path: str) -> Bucket:
        return self.at(self.name_of(path) if path else self.root)

    def above(self) -> Iterator[tuple[Bucket, str]]:
        for parent in PurePosixPath(self.root).parents if self.root else ():
            root = "" if str(parent) == "." else str(parent)
            yield self.at(root), self.root.removeprefix(root).strip("/") + "/"

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def files(self, below: str = "") -> Mapping[str, StoredFile]:
        prefix = f"{self.name_of(below)}/" if below else self._prefix
        return {
            path: StoredFile(path, info.size_bytes, info.modified_at)
            for info in self.transfer.list(prefix)
            if (path := info.name.removeprefix(self._prefix))
        }

    @property
    def _prefix(self) -> str:
        return f"{self.root}/" if self.root else ""

    def exists(self, path: str) -> bool:
        return self.transfer.exists(self.name_of(path))

    def size(self, path: str) -> int:
        return self.transfer.size(self.name_of(path))

    def read(self, path: str) -> bytes:
        return self.transfer.read_all(self.name_of(path), most_bytes=_MOST_SMALL_BYTES)

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        with Helpers(_READERS, name="bucket") as pool:
            doing = [pool.submit(functools.partial(work, item)) for item in items]
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
            callback=progress,
            check=None if digest is None else lambda file: verify_file(file, digest),
        )

    @contextlib.contextmanager
    def lent(self, path: str, digest: FileDigest | None = None) -> Generator[Path]:
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
            copied = Path(folder) / PurePosixPath(path).name
            self.write_to(copied, path, digest)
            yield copied

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def take(self, source: Place, record: FileRecord, progress: Callable[[int], object] = int) -> None:
        with source.lent(record.path, record.digest) as path:
            self.transfer.upload(self.name_of(record.path), path, by_steps(progress))

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        self.transfer.put_bytes(self.name_of(path), data, create_only=create_only)

    def delete(self, path: str) -> None:
        self.transfer.delete(self.name_of(path))

    def point(self, link: str, name: str) -> None:
        self.put(link + LINK_SUFFIX, self.name_of(name).encode())

    def lock(self, name: str, *, beat_seconds: float = 5.0, dead_seconds: float = 20.0) -> Lease:
        """See :class:`Place`; for the seconds see :class:`HeartbeatLease`."""
        whole = self.name_of(f"{MANIFESTS}/.{name}.lease")
        return HeartbeatLease(self.transfer, whole, beat_seconds=beat_seconds, dead_seconds=dead_seconds)

    # ── what is left ─────────────────────────────────────────────────────────────────────────────────────────────
    def in_use(self) -> set[str]:
        paths = [path for path in self.files() if path.endswith((LINK_SUFFIX, ".next"))]
        targets = (data.decode(errors="replace").strip() for data in self.read_all(paths) if data is not None)
        return {target.removeprefix(self._prefix) for target in targets}

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
class VerifiedObject:
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
