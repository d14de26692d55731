"""VerifiedObject: reads parts of an object and verifies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import xxhash

from composerlite.errors import CorruptCheckpointError
from composerlite.storage.disk.files import FileDigest
from composerlite.storage.disk.memory import address_of
from composerlite.storage.disk.reader import ReadTargets, Unit, cut, layers, put, units_of
from composerlite.storage.transfer import SameVersion, Transfer
from composerlite.types import Piece


@final
class VerifiedObject:
    """An object that is read in whole chunks, each compared with its digest.

    Without digests all bytes come from a single upload: ObjectStoreError if the object is replaced.

    Args:
        transfer: transfer of the bucket.
        name: name of the object.
        digest: size and hashes of the content; ``None``: not verified.
    """

    _BATCH_BYTES = 64 << 20

    def __init__(self, transfer: Transfer, name: str, digest: FileDigest | None) -> None:
        self._transfer = transfer
        self._name = name
        self._digest = digest
        self._same = SameVersion(name)
        try:
            self._chunks = [] if digest is None else digest.chunk_digests()
        except ValueError as e:
            raise CorruptCheckpointError(f"the digests of {name!r} are not those of a file: {e}.") from e
        if digest is not None and not self._chunks and digest.body_bytes:
            raise CorruptCheckpointError(f"the record has no digests of the chunks of {name!r}.")

    def read(self, offset: int, size: int) -> bytes:
        data = bytearray(size)
        self.read_into([(offset, address_of(data), size)] if size else [])
        return bytes(data)

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = int) -> None:
        if self._digest is None:
            self._transfer.read_into(self._name, targets, progress, self._same)
            return
        step, size_bytes = self._digest.chunk_bytes, self._digest.body_bytes
        for offset, _, size in targets:
            if offset < 0 or size < 0 or offset + size > size_bytes:
                raise CorruptCheckpointError(f"{self._name!r} has no bytes {offset} to {offset + size}.")
        for layer in layers(targets):
            places, batch, left = ReadTargets(layer), list[Unit](), self._BATCH_BYTES
            for start, end in units_of(layer, chunk_bytes=step, size_bytes=size_bytes):
                batch.append((start, end))
                left -= end - start
                if left <= 0:
                    self._read_units(batch, places, progress)
                    batch, left = [], self._BATCH_BYTES
            self._read_units(batch, places, progress)

    def _read_units(self, units: Sequence[Unit], places: ReadTargets, progress: Callable[[int], object]) -> None:
        """Read whole chunks at the same time, compare them, and copy the wanted parts."""
        assert self._digest is not None
        step = self._digest.chunk_bytes
        parts = [bytearray(end - start) for start, end in units]
        spans = [(start, address_of(part), len(part)) for (start, _), part in zip(units, parts, strict=True)]
        self._transfer.read_into(self._name, spans, progress)
        for (start, end), part in zip(units, parts, strict=True):
            data = memoryview(part)
            for begin, stop in cut(start, end, step):
                if xxhash.xxh3_64_digest(data[begin - start : stop - start]) != self._chunks[begin // step]:
                    raise CorruptCheckpointError(
                        f"the bytes {begin} to {stop} of {self._name!r} are not those that were saved."
                    )
            put(places, data, start)
