"""The directory of a sharded checkpoint in an object store."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import secrets
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, final

import xxhash

from composerlite.checkpoint.place.checkpoint_folder import (
    INDEX,
    SUFFIX,
    CheckpointFolder,
    Claim,
    checked_record,
    write_file,
)
from composerlite.checkpoint.place.remote import RemoteCatalog
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.errors import CheckpointExistsError, ConfigError, CorruptCheckpointError
from composerlite.storage import FileDigest, ObjectStore, Sink, Transfer, check_name, verify_file

if TYPE_CHECKING:
    from composerlite.checkpoint.format.torch_reader import ByteSource

__all__ = ["RemoteFolder", "VerifiedObject"]

log = logging.getLogger(__name__)
_MOST_INDEX_BYTES = 1 << 30


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
        self._catalog = RemoteCatalog(self._transfer, self._root.removesuffix(self.name))
        self._written: list[str] = []
        self._before: list[str] = []
        self._index_before: bytes | None = None

    @property
    def uri(self) -> str:
        return self._store.get_uri(self._root)

    def identity(self) -> str:
        return self.uri

    def names(self) -> list[str]:
        prefix = f"{self._root}/"
        return [info.name.removeprefix(prefix) for info in self._transfer.list(prefix)]

    def _full(self, name: str) -> str:
        return check_name(f"{self._root}/{name}")

    def manifest(self) -> Manifest | None:
        manifest = self._catalog.manifest_of(self.name)
        return None if manifest is None else checked_record(manifest, self.name, self.uri)

    def begun(self) -> Iterable[Manifest]:
        return self._catalog.begun(self.name)

    def index(self) -> bytes:
        return self._transfer.read_all(self._full(INDEX), most_bytes=_MOST_INDEX_BYTES)

    @contextlib.contextmanager
    def opened(self, name: str, digest: FileDigest | None, *, threads: int) -> Generator[ByteSource]:
        yield VerifiedObject(self._transfer, self._full(name), digest)

    def fetch(self, name: str, digest: FileDigest | None, target: Path) -> None:
        size = None if digest is None else digest.size_bytes
        check = None if digest is None else lambda path: verify_file(path, digest)
        self._transfer.download(self._full(name), target, overwrite=True, size_bytes=size, check=check)

    def claim(self, *, overwrite: bool) -> Claim:
        self._catalog.claim(self.name)
        try:
            self._before = self.check_free(overwrite=overwrite)
        except BaseException:
            self._catalog.end(self.name)
            raise
        return Claim("", f"_{secrets.token_hex(4)}" if self._before else "")

    def write(self, claim: Claim, name: str, most_bytes: int, fill: Callable[[Sink], object]) -> FileDigest:
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
            path = Path(folder) / name
            digest = write_file(path, most_bytes, fill)
            self._written.append(self._full(name))
            self._transfer.upload(self._full(name), path)
        return digest

    def commit(self, claim: Claim, index: bytes, files: Mapping[str, FileDigest], facts: Mapping[str, object]) -> None:
        manifest = self._manifest_of(index, files, facts)
        before: bytes | None = None
        if INDEX in self._before:
            before, there = self.described()
            if there is not None:
                self._catalog.announce(manifest, there)
        self._index_before = before
        try:
            self._transfer.put_bytes(self._full(INDEX), index, create_only=before is None)
        except FileExistsError as e:
            raise CheckpointExistsError(f"{self.uri!r} was saved by another process meanwhile.") from e
        self._written += [] if before is not None else [self._full(INDEX)]
        self._catalog.commit(manifest)
        self._written, self._index_before = [], None
        for name in self._before:
            if name.endswith(SUFFIX) and name not in files:
                self._transfer.delete(self._full(name))
        self._catalog.end(self.name)

    def abandon(self, claim: Claim) -> None:
        index, written = self._index_before, self._written
        self._index_before, self._written = None, []
        if index is not None:
            self._tidy(self._full(INDEX), lambda: self._transfer.put_bytes(self._full(INDEX), index))
        for name in reversed(written):  # the index first
            self._tidy(name, lambda name=name: self._transfer.delete(name))
        self._tidy(self._root, lambda: self._catalog.withdraw(self.name))
        self._tidy(self._root, lambda: self._catalog.end(self.name))

    def _tidy(self, name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as e:  # noqa: BLE001 - the save's own error is the one that counts
            log.warning("%s cannot be put back as it was: %s", self._store.get_uri(name), e)

    def close(self) -> None:
        self._transfer.close()
        if self._closes:
            self._store.close()


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
