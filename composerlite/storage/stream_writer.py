"""Writing a large file at the speed of the disk: past the page cache where the file system takes it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import final

import xxhash

__all__ = ["StreamWriter"]

_BLOCK = 4096
_SLOT_BYTES, _SLOTS = 8 << 20, 4
_COPY_BYTES = 1 << 20  # larger copies are slower: libc changes its method


@final
class StreamWriter:
    """Writes one file from front to back: the caller fills a ring of buffers, a thread behind writes them out.

    Memory is bounded by the ring (32 MiB). Everything is digested (XXH3-128) on its way. Blocks are written with
    O_DIRECT where the file system takes it, else through the page cache; which one is found by trying. Used as a
    context manager: leaving the block without :meth:`finish` stops the thread and closes the file.

    Args:
        path: an existing file, empty.
        size_bytes: what will be written, if known: space is reserved first, so that a full disk is an error at once.

    Raises:
        OSError: the space cannot be reserved.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._digest = xxhash.xxh3_128()
        self._plain = os.open(path, os.O_WRONLY)
        self._direct: int | None = None
        self._error: OSError | None = None
        self._closed = False
        self._reserved = size_bytes > _SLOT_BYTES
        self._position = 0
        self.size_bytes = 0
        try:
            if self._reserved:  # below that the page cache is quicker: fewer changes to make durable
                _reserve(self._plain, size_bytes, path)
                self._direct = _open_direct(path)
        except BaseException:
            os.close(self._plain)
            raise
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[mmap.mmap, int, int] | None] = queue.SimpleQueue()
        for _ in range(_SLOTS):
            self._free.put(mmap.mmap(-1, _SLOT_BYTES))
        self._slot, self._filled = self._free.get(), 0
        self._address = _address(self._slot)
        self._thread = threading.Thread(target=self._write_out, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
        assert address is not None
        for _ in self.copy(address, len(data)):
            pass

    def copy(self, address: int, size: int) -> Iterator[tuple[int, int]]:
        """Append ``size`` bytes of memory at ``address``; after each piece, where it is now, for a checksum of it."""
        while size:
            if self._filled == _SLOT_BYTES:
                self._hand_over()
            piece = min(size, _SLOT_BYTES - self._filled, _COPY_BYTES)
            target = self._address + self._filled
            ctypes.memmove(target, address, piece)
            self._digest.update(memoryview(self._slot)[self._filled : self._filled + piece])
            yield self._filled, piece
            self._filled += piece
            self.size_bytes += piece
            address += piece
            size -= piece

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes of a piece that :meth:`copy` has just given."""
        return memoryview(self._slot)[offset : offset + size]

    def finish(self) -> str:
        """Wait until everything is written and durable; its XXH3-128.

        Raises:
            OSError: something could not be written.
        """
        if self._filled:
            self._hand_over()
        for _ in range(_SLOTS - 1):  # all buffers but the one at hand come back when they are written
            self._free.get()
        self._raise_if_failed()
        if self._reserved:
            os.ftruncate(self._plain, self.size_bytes)  # the last block was written whole, or less than was reserved
        os.fsync(self._plain)
        self._close()
        return self._digest.hexdigest()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._full.put(None)
        self._thread.join()
        os.close(self._plain)
        if self._direct is not None:
            os.close(self._direct)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _hand_over(self) -> None:
        self._raise_if_failed()
        self._full.put((self._slot, self._filled, self._position))
        self._position += self._filled
        self._slot, self._filled = self._free.get(), 0
        self._address = _address(self._slot)

    def _write_out(self) -> None:
        while (item := self._full.get()) is not None:
            slot, size, position = item
            if self._error is None:
                try:
                    self._write_block(slot, size, position)
                except OSError as e:
                    self._error = OSError(e.errno, e.strerror, str(self._path))  # raised at the next write or finish
            self._free.put(slot)

    def _write_block(self, slot: mmap.mmap, size: int, position: int) -> None:
        if self._direct is not None:
            padded = size + -size % _BLOCK
            try:
                _write_all(self._direct, memoryview(slot)[:padded], position)
                return
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                os.close(self._direct)  # opened with O_DIRECT and refused at the first write: some file systems do
                self._direct = None
        _write_all(self._plain, memoryview(slot)[:size], position)


def _address(slot: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slot))


def _reserve(descriptor: int, size: int, path: Path) -> None:
    if size == 0:
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as e:
        if e.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return  # the file system cannot reserve: a full disk shows when it is written
        raise OSError(e.errno, f"cannot reserve {size} bytes: {os.strerror(e.errno or 0)}", str(path)) from e


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError as e:
        if e.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise


def _write_all(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written
