"""Random access to the bytes of a file, or of a file within another file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol, final

from composerlite.storage.disk.memory import memory_at
from composerlite.types import Piece


class ByteSource(Protocol):
    """Random access to the bytes of a file. Raises :class:`CorruptCheckpointError` for damaged bytes."""

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        ...

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = ...) -> None:
        """Fill memory with bytes of the file.

        Args:
            targets: offset in the file, address in memory and number of bytes of each piece.
            progress: called after each read with the number of bytes read.
        """
        ...


@final
class MemoryFile(NamedTuple):
    """A file in memory. The caller reads no bytes beyond the end.

    Attributes:
        data: the bytes of the file.
    """

    data: bytes | bytearray

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        return bytes(self.data[offset : offset + size])

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = int) -> None:
        """Fill memory."""
        for offset, address, size in targets:
            memory_at(address, size)[:] = self.data[offset : offset + size]
            progress(size)


@final
class Window(NamedTuple):
    """A file within another file, or a whole file. The caller reads no bytes beyond ``size_bytes``.

    Attributes:
        source: the other file.
        start: offset of this file in ``source``.
        size_bytes: size of this file.
        verified: numbers of the chunks of the checkpoint's file that were read and verified so far.
    """

    source: ByteSource
    start: int
    size_bytes: int
    verified: Collection[int] = ()

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        return self.source.read(self.start + offset, size)

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = int) -> None:
        """Fill memory."""
        self.source.read_into([(self.start + offset, address, size) for offset, address, size in targets], progress)
