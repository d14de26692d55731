"""An object read in parts, each verified as it passes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import final

import xxhash

from composerlite.errors import CorruptCheckpointError
from composerlite.storage.disk.digests import FileDigest
from composerlite.storage.transfer import Transfer

__all__ = ["VerifiedObject"]


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
