"""Encoders of compressed files: blocks that stand alone, one stream, or a program."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol, final

from composerlite.checkpoint.format.packing.tool_pipe import ToolPipe
from composerlite.errors import SaveError

__all__ = ["BlockEncoder", "Encoder", "StreamCompressor", "StreamEncoder", "ToolEncoder", "thread_count"]

_BLOCK_BYTES = 4 << 20
_MOST_THREADS = 8  # each holds a block and its encoding


class Encoder(Protocol):
    """Encodes one file, block by block.

    Attributes:
        block_bytes: size of every block but the last.
        threads: how many blocks may be encoded at once. 1: one after the other, in order.
    """

    block_bytes: int
    threads: int

    def encode(self, block: memoryview, /) -> bytes:
        """What comes next in the file."""
        ...

    def finish(self) -> bytes:
        """The end of the file. Nothing may be encoded any more."""
        ...

    def stop(self) -> None:
        """Do not go on. For any thread: one that waits for a program meanwhile fails."""
        ...

    def close(self) -> None:
        """Give everything back, when no thread encodes any more; twice is fine."""
        ...


class StreamCompressor(Protocol):
    def compress(self, data: memoryview, /) -> bytes: ...

    def flush(self) -> bytes: ...


@final
class BlockEncoder:
    """Each block becomes a stream of its own; the file is one stream after the other."""

    def __init__(self, encode: Callable[[memoryview], bytes], block_bytes: int = _BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self.threads = thread_count()
        self.encode = encode

    def finish(self) -> bytes:
        return b""

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


@final
class StreamEncoder:
    """The whole file is one stream."""

    block_bytes = _BLOCK_BYTES
    threads = 1

    def __init__(self, compressor: StreamCompressor, start: bytes = b"") -> None:
        self._compressor = compressor
        self._start = start

    def encode(self, block: memoryview) -> bytes:
        start, self._start = self._start, b""
        return start + self._compressor.compress(block)

    def finish(self) -> bytes:
        return self._start + self._compressor.flush()

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass


@final
class ToolEncoder:
    """The whole file is sent through a program."""

    block_bytes = _BLOCK_BYTES
    threads = 1

    def __init__(self, command: list[str]) -> None:
        self._pipe = ToolPipe(command, SaveError)
        self.stop = self._pipe.stop
        self.close = self._pipe.close

    def encode(self, block: memoryview) -> bytes:
        return b"".join(self._pipe.exchange(block))

    def finish(self) -> bytes:
        return b"".join(self._pipe.end())


def thread_count() -> int:
    """How many threads compress at once: they have a low priority, so that all processors may be used."""
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)
