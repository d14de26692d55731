"""Digests of files: of the whole, and of each chunk, so that a part can be verified as it is read; and file sinks."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Protocol, final

import xxhash

__all__ = ["Digester", "FileDigest", "Sink", "chunk_bytes_for"]

_SMALLEST_CHUNK_BYTES = 1 << 20
_MOST_CHUNKS = 2048
_PIECE_BYTES = 256 << 10


@final
@dataclass(frozen=True, slots=True)
class FileDigest:
    """Digest of a file, and what each part of it must be.

    Attributes:
        size_bytes: of the file.
        xxh3_128: of the whole file, in hexadecimal.
        chunk_bytes: size of a chunk; the last one is what is left. 0: there are no digests of chunks.
        chunks: XXH3-64 of each chunk, 8 bytes each, big-endian, in base 64.
    """

    size_bytes: int
    xxh3_128: str
    chunk_bytes: int = 0
    chunks: str = ""

    def chunk_digests(self) -> list[bytes]:
        """The 8 bytes of each chunk.

        Raises:
            ValueError: they are not those of a file of this size.
        """
        if not self.chunk_bytes:
            return []
        digests = base64.b64decode(self.chunks, validate=True)
        if self.chunk_bytes < 0 or len(digests) != 8 * -(-self.size_bytes // self.chunk_bytes):
            raise ValueError(f"{len(digests)} bytes of digests for {self.size_bytes} bytes of {self.chunk_bytes} each")
        return [digests[at : at + 8] for at in range(0, len(digests), 8)]


def chunk_bytes_for(size_bytes: int) -> int:
    """The size of a chunk in a file of at most ``size_bytes``: 1 MiB, and more where that makes too many."""
    chunk_bytes = _SMALLEST_CHUNK_BYTES
    while size_bytes > chunk_bytes * _MOST_CHUNKS:
        chunk_bytes *= 2
    return chunk_bytes


@final
class Digester:
    """Digests a file from front to back, the whole and every chunk of ``chunk_bytes``, in one pass."""

    def __init__(self, chunk_bytes: int) -> None:
        self._whole = xxhash.xxh3_128()
        self._chunk = xxhash.xxh3_64()
        self._chunk_bytes = chunk_bytes
        self._left = chunk_bytes
        self._chunks = bytearray()
        self._size = 0

    def update(self, data: memoryview | bytes) -> None:
        """Digest the bytes that come next."""
        view = memoryview(data)
        self._size += len(view)
        while view:
            piece = view[: min(self._left, _PIECE_BYTES)]  # both digests of it while it is in the cache
            self._whole.update(piece)
            self._chunk.update(piece)
            self._left -= len(piece)
            view = view[len(piece) :]
            if not self._left:
                self._end_chunk()

    def finish(self) -> FileDigest:
        """The digests of all that came."""
        if self._left < self._chunk_bytes:
            self._end_chunk()
        chunks = base64.b64encode(self._chunks).decode()
        return FileDigest(self._size, self._whole.hexdigest(), self._chunk_bytes, chunks)

    def _end_chunk(self) -> None:
        self._chunks += self._chunk.digest()
        self._chunk.reset()
        self._left = self._chunk_bytes


class Sink(Protocol):
    """Takes the bytes of one file in order. Used as a context manager: leaving it without :meth:`finish` gives up.

    Attributes:
        size_bytes: taken so far.
        seconds: spent by name, ``hash``, ``write`` and ``flush`` among them. Complete after :meth:`finish`.
    """

    size_bytes: int
    seconds: dict[str, float]

    def write(self, data: bytes) -> None:
        """Append ``data``.

        Raises:
            OSError: what came before could not be written.
        """
        ...

    def copy(self, address: int, size: int) -> int:
        """Append ``size`` bytes of memory at ``address``; their CRC-32. The memory may change when this returns.

        Args:
            address: of the first byte.
            size: in bytes.

        Returns:
            CRC-32 of the bytes.

        Raises:
            OSError: what came before could not be written.
        """
        ...

    def finish(self) -> FileDigest:
        """Wait until everything is durable; what the file contains. Nothing can be appended any more.

        Raises:
            OSError: something could not be written.
        """
        ...

    def __enter__(self) -> Sink: ...

    def __exit__(self, *exception: object) -> None: ...
