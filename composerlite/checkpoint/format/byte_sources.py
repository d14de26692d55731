"""The bytes of a file, or of a file within another file, in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import IO, NamedTuple, Protocol, final

from composerlite.errors import CorruptCheckpointError
from composerlite.storage.disk.memory import memory_at
from composerlite.storage.disk.reader import read_bytes
from composerlite.types import Piece

_STEP_BYTES = 1 << 20


class ByteSource(Protocol):
    """The bytes of a file, in any order. Raises :class:`CorruptCheckpointError` for damaged bytes."""

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        ...

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = ...) -> None:
        """Fill memory with bytes of the file.

        Args:
            targets: offset in the file, address in memory and number of bytes of each piece.
            progress: called with the number of bytes after each read.
        """
        ...


@final
class UnverifiedFile:
    """An open file, without verification of the bytes. The caller closes the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes. Raises :class:`CorruptCheckpointError` if the file ends before."""
        return read_bytes(self.read_into, offset, size)

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = int) -> None:
        """Fill memory piece by piece."""
        for offset, address, size in targets:
            self._file.seek(offset)
            view = memory_at(address, size)
            while view:
                count = self._file.readinto(view[:_STEP_BYTES])  # type: ignore[attr-defined]
                if not count:
                    raise CorruptCheckpointError(f"it ends before {offset + size}")
                progress(count)
                view = view[count:]


@final
class Window(NamedTuple):
    """A file within another file, or a whole file. The caller reads no bytes beyond ``size_bytes``.

    Attributes:
        source: the other file.
        start: offset of this file in ``source``.
        size_bytes: size of this file.
    """

    source: ByteSource
    start: int
    size_bytes: int

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        return self.source.read(self.start + offset, size)

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = int) -> None:
        """Fill memory."""
        self.source.read_into([(self.start + offset, address, size) for offset, address, size in targets], progress)
