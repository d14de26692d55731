"""Compressed checkpoints: codecs by file name, writing, reading, and the last frame, which contains the record.

Files are compressed in blocks of 4 MB in several threads. Each block is a frame: see
:mod:`composerlite.checkpoint.format.codecs`. ``gzip -d``, ``bzip2 -d``, ``xz -d``, ``lz4 -d`` and ``zstd -d`` read the
files, and files that these programs write are read here.
"""

from __future__ import annotations

import ctypes
import functools
import io
import os
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, final

import xxhash
from isal import isal_zlib

from composerlite.checkpoint.format import codecs
from composerlite.errors import ConfigError, CorruptCheckpointError
from composerlite.storage import Digester, FileDigest, Seal, WorkerPool, chunk_bytes_for

__all__ = [
    "KNOWN_COMPRESSORS",
    "Compressor",
    "PackedSink",
    "PiecesReader",
    "codec_of",
    "get_compressor",
    "is_compressed_pt",
    "last_frame",
]

_PIECE_BYTES = 64 << 10
_MOST_DECODED_BYTES = 1 << 20
_MOST_FRAME_DATA_BYTES = 0xFFFF  # more does not fit into a stored block of gzip
_FOOTER_MARK = b"\nCLREC1 "
"""Beginning of the last line of a record: see :mod:`composerlite.checkpoint.record.tail`."""
_MOST_FOOTER_BYTES = 64
_MOST_TRIES = 8
"""Places that may be tried as the beginning of a last frame. A file with more of them was made to cost time."""


_ZSTANDARD, _PACKAGE = b"\x28\xb5\x2f\xfd", "backports.zstd"


@final
@dataclass(frozen=True, slots=True)
class Compressor:
    """A codec, known by the last part of a file name.

    Attributes:
        extension: of files, without the dot.
        magic: first bytes of every frame.
        library: imports the Python library.
        encode_last: returns data as a last frame, without the library.
        last_magic: first bytes of every last frame.
        data_offset: offset of the data in a last frame; 0: the data are compressed.
        package: name of the library's package; empty if composerlite requires it.
    """

    extension: str
    magic: bytes
    library: Callable[[], codecs.Library]
    encode_last: Callable[[bytes], bytes]
    last_magic: bytes
    data_offset: int
    package: str = ""

    @property
    def exists(self) -> bool:
        """True if the library is installed."""
        try:
            self.library()
        except ImportError:
            return False
        return True

    def check_exists(self) -> None:
        """Raise an error if the library is not installed.

        Raises:
            ConfigError: it is not. The message names the package.
        """
        if not self.exists:
            others = ", ".join(f".pt.{other.extension}" for other in KNOWN_COMPRESSORS if other is not self)
            raise ConfigError(
                f"checkpoints that end in '.pt.{self.extension}' need the Python package {self.package!r}: pip install "
                f"'composerlite[compression]', or choose another ending: {others}, .pt."
            )

    def frame(self, data: bytes) -> bytes:
        """Return ``data`` as a last frame: the same bytes on every machine.

        Raises:
            ValueError: more than 65,535 bytes.
        """
        if len(data) > _MOST_FRAME_DATA_BYTES:
            raise ValueError(f"{len(data)} bytes for a last frame, which has at most {_MOST_FRAME_DATA_BYTES}")
        return self.encode_last(data)

    def data_of(self, frame: bytes) -> bytes | None:
        """Return the data of the last frame ``frame``, which end with a record; ``None``: it is no such frame."""
        data = b""
        if self.data_offset:
            footer = frame.rfind(_FOOTER_MARK)
            data = frame[self.data_offset : frame.find(b"\n", footer + 1) + 1]
        else:
            library = self.library()
            try:
                data = library.decoder().decompress(frame, _MOST_FRAME_DATA_BYTES)
            except library.errors:
                return None  # bytes that begin like a frame
        if len(data) > _MOST_FRAME_DATA_BYTES or not data.endswith(b"\n"):
            return None
        return data if _FOOTER_MARK in data[-_MOST_FOOTER_BYTES:] and self.frame(data) == frame else None

    def decoded(self, pieces: Iterable[bytes]) -> Generator[bytes]:
        """Decode a file.

        Args:
            pieces: the bytes of the file, in order.

        Returns:
            The decoded bytes, in pieces of at most 1 MiB.

        Raises:
            CorruptCheckpointError: the file is damaged or cut off.
            ConfigError: see :meth:`check_exists`.
        """
        self.check_exists()
        library = self.library()
        decoder, within = library.decoder(), True  # within a frame. Between frames, zeros may fill the block of a tape
        for piece in pieces:
            data = piece
            while data or (within and not decoder.needs_input):
                if not within:
                    if not (data := data.lstrip(b"\0")):
                        break
                    decoder, within = library.decoder(), True
                try:
                    decoded = decoder.decompress(data, _MOST_DECODED_BYTES)
                except library.errors as e:
                    raise CorruptCheckpointError(f"its {self.extension} data are damaged: {e}") from e
                data = b""
                if decoded:
                    yield decoded
                if decoder.eof:
                    data, within = decoder.unused_data, False
        if within:
            raise CorruptCheckpointError(f"its {self.extension} data are cut off")

    @contextmanager
    def compress(self, filename: str | Path) -> Generator[IO[bytes]]:
        """Open the compressed file ``filename`` for writing. The file is durable after the block."""
        Path(filename).touch()
        with PackedSink(Path(filename), self, most_bytes=0) as sink:
            with io.BufferedWriter(_SinkWriter(sink)) as file:  # type: ignore[arg-type]
                yield file
            sink.finish()

    @contextmanager
    def decompress(self, filename: str | Path) -> Generator[IO[bytes]]:
        """Open the decompressed contents of the file ``filename``, for reading from front to back.

        Raises:
            CorruptCheckpointError: while reading, if the file is damaged or cut off.
        """
        with (
            Path(filename).open("rb", buffering=0) as source,
            closing(self.decoded(iter(lambda: source.read(_PIECE_BYTES), b""))) as pieces,
        ):
            yield io.BufferedReader(PiecesReader(pieces))


KNOWN_COMPRESSORS = (
    Compressor("bz2", b"BZh", codecs.bzip2_library, codecs.bzip2_frame, b"BZh91AY&SY", 0),
    Compressor("gz", b"\x1f\x8b", codecs.gzip_library, codecs.gzip_frame, codecs.gzip_frame(b"")[:11], 15),
    Compressor("lz4", b"\x04\x22\x4d\x18", codecs.lz4_library, codecs.lz4_frame, codecs.lz4_frame(b"")[:7], 11, "lz4"),
    Compressor("xz", b"\xfd7zXZ\0", codecs.xz_library, codecs.xz_frame, codecs.xz_frame(b" ")[:25], 27),
    Compressor("zst", _ZSTANDARD, codecs.zstandard_library, codecs.zstandard_frame, _ZSTANDARD + b"\xa4", 12, _PACKAGE),
)
"""Every codec, by extension."""
_LAST_MAGIC = re.compile(b"|".join(re.escape(known.last_magic) for known in KNOWN_COMPRESSORS))


def is_compressed_pt(filename: str | Path) -> bool:
    """Return true if the name is that of a compressed ``.pt`` file. Compressed archives are not ``.pt`` files."""
    parts = Path(filename).name.lower().split(".")
    return len(parts) >= 2 and parts[-2] == "pt" and parts[-1] != "symlink"


def get_compressor(filename: str | Path) -> Compressor:
    """Return the codec of the compressed file ``filename``.

    Raises:
        ConfigError: the name does not end in ``.pt`` and the extension of a codec.
    """
    if is_compressed_pt(filename):
        extension = Path(filename).suffix[1:].lower()
        for compressor in KNOWN_COMPRESSORS:
            if compressor.extension == extension:
                return compressor
    known = ", ".join(f".pt.{compressor.extension}" for compressor in KNOWN_COMPRESSORS)
    raise ConfigError(f"{str(filename)!r} is not the name of a compressed checkpoint. Those end in {known}.")


def codec_of(beginning: bytes) -> Compressor | None:
    """Return the codec of a file that begins with ``beginning``; ``None`` if the file is not compressed."""
    return next((known for known in KNOWN_COMPRESSORS if beginning.startswith(known.magic)), None)


def last_frame(end: bytes) -> tuple[int, bytes] | None:
    """Find the last frame of a compressed file, which contains the record of the checkpoint.

    Args:
        end: the end of the file.

    Returns:
        Offset of the frame in ``end``, and the data in the frame; ``None`` if the file does not end with such a frame,
        or if a bit of the frame was flipped.
    """
    for match in reversed(list(_LAST_MAGIC.finditer(end))[-_MOST_TRIES:]):
        codec = next(known for known in KNOWN_COMPRESSORS if known.last_magic == match[0])
        if (data := codec.data_of(end[match.start() :])) is not None:
            return match.start(), data
    return None


@final
class _SinkWriter(io.RawIOBase):
    """A writable file whose bytes a sink takes."""

    def __init__(self, sink: PackedSink) -> None:
        self._sink = sink

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._sink.write(bytes(data))
        return len(data)


@final
class PiecesReader(io.RawIOBase):
    """A readable file that contains ``pieces``."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


_HASHED_BYTES = 1 << 20  # a piece is still in the processor's cache when it is copied
_HELD_BYTES = 22
"""Size of the end record of a zip archive, whose comment is the tail."""
_MOST_THREADS = 8  # each needs memory for a block and its frame
_NICENESS = 5  # the threads get a third of the time that training gets, if both want the processor


@final
class PackedSink:
    """Writes a compressed file.

    Threads of low priority compress, so that training gets the processors first. Memory holds at most two blocks more
    than there are threads. Used as a context manager: leaving the block before :meth:`finish` stops the threads.

    The last 22 bytes and the tail are a frame of their own, the last one. So a program that decompresses the file
    returns the file inside with its tail.

    Args:
        path: an existing file, empty.
        compressor: the codec.
        most_bytes: size before compression, in bytes, if it is known. It decides the size of chunks.

    Attributes:
        size_bytes: number of bytes appended, before compression.
        piece_bytes: number of bytes that are best appended at once.
        seconds: time by activity. ``hash``: checksums and digests. ``compress``: waiting for the threads. ``write``.
            ``flush``: until the file is durable.
    """

    def __init__(self, path: Path, compressor: Compressor, *, most_bytes: int) -> None:
        compressor.check_exists()
        self.size_bytes = 0
        self.piece_bytes = _HASHED_BYTES
        self.seconds = {"hash": 0.0, "compress": 0.0, "write": 0.0, "flush": 0.0}
        self._path = path
        self._compressor = compressor
        self._library = compressor.library()
        self._plain = xxhash.xxh3_128()
        self._digester = Digester(chunk_bytes_for(most_bytes))
        self._block_bytes = self._library.block_bytes
        self._free: list[bytearray] = []
        self._block, self._filled = bytearray(self._block_bytes + _HELD_BYTES), 0
        self._pending: deque[tuple[Future[bytes], bytearray]] = deque()
        self._is_begun = False
        self._given_up = False
        self._threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        self._file = os.open(path, os.O_WRONLY)
        self._pool = WorkerPool(self._threads, name="checkpoint-compressor", first=_lower_priority)

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        self._append(memoryview(data))

    def copy(self, address: int, size: int, crc: int | None = 0) -> int:
        """Append ``size`` bytes of memory at ``address``, and return their CRC-32, continued from ``crc``."""
        crc = crc or 0
        for start in range(0, size, _HASHED_BYTES):
            length = min(_HASHED_BYTES, size - start)
            piece = memoryview((ctypes.c_char * length).from_address(address + start)).cast("B")
            with self._timed("hash"):
                crc = isal_zlib.crc32(piece, crc)
            self._append(piece)
        return crc

    def finish(self, seal: Seal | None = None) -> FileDigest:
        """Wait until the file is durable, and return its digest: that of all frames but the last one.

        Args:
            seal: makes the tail from the digests of the frames before and of the bytes inside. ``None``: no tail.

        Raises:
            OSError: the file could not be written.
        """
        held_bytes = 0 if seal is None else min(_HELD_BYTES, self._filled)
        if self._filled > held_bytes or not (self._is_begun or seal):  # an empty file is a frame without data
            self._queue_block(self._filled - held_bytes)
        while self._pending:
            self._write_oldest()
        digest = self._digester.finish()
        if seal is not None:
            tail = seal(digest, FileDigest(self.size_bytes, self._plain.hexdigest()))
            frame = self._compressor.frame(bytes(self._block[:held_bytes]) + tail)
            self._write_out(frame)
            digest = digest.with_tail(frame)
        with self._timed("flush"):
            try:
                os.fsync(self._file)
            except OSError as e:
                raise OSError(e.errno, e.strerror, str(self._path)) from e
        self._close()
        return digest

    def __enter__(self) -> PackedSink:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def _append(self, data: memoryview) -> None:
        self.size_bytes += len(data)
        with self._timed("hash"):
            self._plain.update(data)
        while data:
            room = len(self._block) - self._filled
            piece, data = data[:room], data[room:]
            self._block[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            if self._filled == len(self._block):
                self._queue_block(self._block_bytes)

    def _queue_block(self, size: int) -> None:
        """Compress the first ``size`` bytes of the block in a thread. The rest begins the next block."""
        block, filled, self._is_begun = self._block, self._filled, True
        work = functools.partial(self._encode, memoryview(block)[:size])
        self._pending.append((self._pool.submit(work), block))
        if len(self._pending) > self._threads:
            self._write_oldest()
        self._block = self._free.pop() if self._free else bytearray(len(block))
        self._filled = filled - size
        self._block[: self._filled] = block[size:filled]

    def _encode(self, block: memoryview) -> bytes:
        return b"" if self._given_up else self._library.encode(block)

    def _write_oldest(self) -> None:
        future, block = self._pending.popleft()
        with self._timed("compress"):
            frame = future.result()
        with self._timed("hash"):
            self._digester.update(frame)
        self._write_out(frame)
        self._free.append(block)

    def _write_out(self, frame: bytes) -> None:
        left = memoryview(frame)
        with self._timed("write"):
            try:
                while left:
                    left = left[os.write(self._file, left) :]
            except OSError as e:
                raise OSError(e.errno, e.strerror, str(self._path)) from e

    @contextmanager
    def _timed(self, activity: str) -> Generator[None]:
        before = time.perf_counter()
        yield
        self.seconds[activity] += time.perf_counter() - before

    def _close(self) -> None:
        if self._given_up:
            return
        self._given_up = True
        self._pool.close()
        os.close(self._file)


def _lower_priority() -> None:
    os.nice(_NICENESS)  # on Linux, of this thread alone
