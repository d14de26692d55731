"""A file that is compressed while it is written, with bounded memory."""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import final

from isal import isal_zlib

from composerlite.checkpoint.format.packing.encoders import Encoder
from composerlite.storage import Digester, FileDigest, Helpers, chunk_bytes_for

__all__ = ["PackedSink"]

_PIECE_BYTES = 1 << 20  # checksum and copy meet in the cache
_NICENESS = 5  # a third of what training gets where both want the processor


@final
class PackedSink:
    """Takes the bytes of a file and writes them compressed.

    Blocks are encoded by threads of low priority, which leave the processors to training where that wants them. At most
    two blocks more than there are threads are in memory. Used as a context manager: leaving the block without
    :meth:`finish` ends the threads, and the program if there is one.

    Args:
        path: an existing file, empty.
        encoder: of this file; closed at the end.
        most_bytes: what will be written at most, before compression.

    Attributes:
        size_bytes: taken so far, before compression.
        seconds: spent by name: ``hash``: sums and digests; ``compress``: waiting for the encoder; ``write``; ``flush``:
            until everything was durable.
    """

    def __init__(self, path: Path, encoder: Encoder, *, most_bytes: int) -> None:
        self.size_bytes = 0
        self.seconds = {"hash": 0.0, "compress": 0.0, "write": 0.0, "flush": 0.0}
        self._path = path
        self._encoder = encoder
        self._digester = Digester(chunk_bytes_for(most_bytes))
        self._free: list[bytearray] = []
        self._block, self._filled = bytearray(encoder.block_bytes), 0
        self._pending: deque[tuple[Future[bytes], bytearray]] = deque()
        self._file = os.open(path, os.O_WRONLY)
        self._open = True
        self._given_up = False
        self._pool = Helpers(encoder.threads, name="checkpoint-compressor", first=_step_back)

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        self._append(memoryview(data))

    def copy(self, address: int, size: int) -> int:
        """Append ``size`` bytes of memory at ``address``; their CRC-32."""
        crc = 0
        for start in range(0, size, _PIECE_BYTES):
            length = min(_PIECE_BYTES, size - start)
            piece = memoryview((ctypes.c_char * length).from_address(address + start)).cast("B")
            with self._timed("hash"):
                crc = isal_zlib.crc32(piece, crc)
            self._append(piece)
        return crc

    def finish(self) -> FileDigest:
        """Wait until everything is written and durable; what the file contains.

        Raises:
            OSError: something could not be written.
            CheckpointError: the program that compresses failed or was killed.
        """
        if self._filled:
            self._hand_over()
        while self._pending:
            self._write_oldest()
        with self._timed("compress"):
            end = self._pool.submit(self._encoder.finish).result()
        self._write_out(end)
        with self._timed("flush"):
            os.fsync(self._file)
        self._close()
        return self._digester.finish()

    def __enter__(self) -> PackedSink:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def _append(self, data: memoryview) -> None:
        self.size_bytes += len(data)
        while data:
            room = len(self._block) - self._filled
            piece, data = data[:room], data[room:]
            self._block[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            if self._filled == len(self._block):
                self._hand_over()

    def _hand_over(self) -> None:
        view = memoryview(self._block)[: self._filled]
        self._pending.append((self._pool.submit(functools.partial(self._encode, view)), self._block))
        if len(self._pending) > self._encoder.threads:
            self._write_oldest()
        self._block = self._free.pop() if self._free else bytearray(self._encoder.block_bytes)
        self._filled = 0

    def _encode(self, view: memoryview) -> bytes:
        return b"" if self._given_up else self._encoder.encode(view)

    def _write_oldest(self) -> None:
        future, block = self._pending.popleft()
        with self._timed("compress"):
            data = future.result()
        self._write_out(data)
        self._free.append(block)

    def _write_out(self, data: bytes) -> None:
        with self._timed("hash"):
            self._digester.update(data)
        left = memoryview(data)
        try:
            with self._timed("write"):
                while left:
                    left = left[os.write(self._file, left) :]
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(self._path)) from e

    @contextmanager
    def _timed(self, name: str) -> Generator[None]:
        before = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - before

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._given_up = True
        self._encoder.stop()  # whoever waits for the program does not any more
        self._pool.close()
        self._encoder.close()
        os.close(self._file)


def _step_back() -> None:
    """Give this thread, and what it starts, a lower priority than its process has."""
    os.nice(_NICENESS)  # on Linux that of the thread
