"""Compressed files: the codecs, a sink with several threads, and the last frame with the record of the checkpoint.

A compressed file is a sequence of frames. Each frame is a complete stream of its codec: a member of gzip, a stream of
bzip2 or xz, a frame of lz4 or Zstandard. The sink writes a frame for every block of 4 MB and, if the checkpoint has a
record, a last frame with only the record. ``gzip -d``, ``bzip2 -d``, ``xz -d``, ``lz4 -d`` and ``zstd -d``
read these files and return the file inside with the record. Files of these programs are read, too.
"""

from __future__ import annotations

import bz2
import ctypes
import lzma
import os
import shutil
import struct
import sys
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast, final

import xxhash
from isal import igzip_lib, isal_zlib

from composerlite.errors import ConfigError, CorruptCheckpointError
from composerlite.storage import FileDigest, Seal, StreamWriter, WorkerPool, chunk_bytes_for
from composerlite.storage.disk.files import write_all

_PIECE_BYTES = 64 << 10
_MOST_DECODED_BYTES = 1 << 20
_MOST_FRAME_DATA_BYTES = 0xFFFF  # more does not fit into a stored block of gzip
_BLOCK_BYTES = 4 << 20
_DECODER_MEMORY_BYTES = 128 << 20  # `xz -9` needs 65 MiB
_FOOTER_MARK, _FOOTER_BYTES = b"\nCLREC1 ", 50
"""Beginning and size of the last line of a record: see :mod:`composerlite.checkpoint.record.record`."""


@final
class Library(NamedTuple):
    """Functions of a Python library for compression.

    Attributes:
        encode: compresses a block of data into a frame. Called in several threads at once.
        decoder: returns a new decoder for a frame, with the interface of ``bz2.BZ2Decompressor``.
        errors: exceptions of the decoder for damaged data.
    """

    encode: Callable[[memoryview], bytes]
    decoder: Callable[[], Any]
    errors: tuple[type[Exception], ...]


def _gzip_library() -> Library:
    encode = partial(igzip_lib.compress, level=1, flag=igzip_lib.COMP_GZIP)  # ten times as fast as zlib
    decoder = partial(igzip_lib.IgzipDecompressor, flag=igzip_lib.DECOMP_GZIP)
    return Library(encode, decoder, (cast(type[Exception], igzip_lib.error), ValueError))


def _xz_library() -> Library:
    encode = partial(lzma.compress, preset=0)  # higher presets take three times as long for numbers of the same size
    decoder = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=_DECODER_MEMORY_BYTES)
    return Library(encode, decoder, (lzma.LZMAError,))


def _lz4_library() -> Library:
    from lz4 import frame

    encode = partial(frame.compress, block_size=frame.BLOCKSIZE_MAX4MB, content_checksum=True)
    return Library(encode, frame.LZ4FrameDecompressor, (RuntimeError,))


def _zstandard_library() -> Library:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    option = zstd.CompressionParameter
    options: dict[int, int] = {option.compression_level: 1, option.checksum_flag: 1}
    return Library(partial(zstd.compress, options=options), zstd.ZstdDecompressor, (zstd.ZstdError,))


# ── last frames ──────────────────────────────────────────────────────────────────────────────────────────────────────
# A frame with a stored block contains its data uncompressed, so a reader needs no library to find the record. The same
# data always give the same bytes. So a reader encodes the data again and detects every flipped bit, also in bits
# without a checksum. For bzip2 and xz, Python has the library. All versions of libbz2 give the same bytes, and the
# checksums of xz cover all bits.
def _gzip_frame(data: bytes) -> bytes:
    """Return ``data`` as a gzip member with a stored block (RFC 1951 and 1952)."""
    head = b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + struct.pack("<BHH", 1, len(data), len(data) ^ 0xFFFF)
    return head + data + struct.pack("<II", zlib.crc32(data), len(data))


def _lz4_frame(data: bytes) -> bytes:
    """Return ``data`` as an lz4 frame with a stored block (LZ4 frame format, version 1.6)."""
    descriptor = b"\x64\x40"  # independent blocks of at most 64 KiB, a checksum of the content
    head = b"\x04\x22\x4d\x18" + descriptor + bytes([xxhash.xxh32_intdigest(descriptor) >> 8 & 0xFF])
    block = struct.pack("<I", len(data) | 1 << 31) + data + bytes(4)
    return head + block + struct.pack("<I", xxhash.xxh32_intdigest(data))


def _zstandard_frame(data: bytes) -> bytes:
    """Return ``data`` as a Zstandard frame with a raw block (RFC 8878)."""
    head = b"\x28\xb5\x2f\xfd\xa4" + struct.pack("<I", len(data))  # a single segment, a size of 4 bytes, a checksum
    block = (len(data) << 3 | 1).to_bytes(3, "little") + data
    return head + block + struct.pack("<I", xxhash.xxh64_intdigest(data) & 0xFFFFFFFF)


@final
@dataclass(frozen=True, slots=True)
class Compressor:
    """A codec, known by the last part of a file name.

    Attributes:
        extension: of files, without the dot.
        magic: first bytes of every frame.
        library: imports the Python library.
        encode_last: returns data as a last frame, without the library.
        package: name of the library's package; empty if composerlite requires the package.
        block_bytes: size of a block before compression.
    """

    extension: str
    magic: bytes
    library: Callable[[], Library]
    encode_last: Callable[[bytes], bytes]
    package: str = ""
    block_bytes: int = _BLOCK_BYTES

    @property
    def exists(self) -> bool:
        """True if the library is installed."""
        try:
            self.library()
        except ImportError:
            return False
        return True

    def imported(self) -> Library:
        """Return the library.

        Raises:
            ConfigError: the library is missing. The message names the package.
        """
        try:
            return self.library()
        except ImportError as e:
            others = ", ".join(f".pt.{other.extension}" for other in KNOWN_COMPRESSORS if other is not self)
            raise ConfigError(
                f"checkpoints that end in '.pt.{self.extension}' need the Python package {self.package!r}: pip install "
                f"'composerlite[compression]', or choose another ending: {others}, .pt."
            ) from e

    def frame(self, data: bytes) -> bytes:
        """Return ``data`` as a last frame.

        Raises:
            ValueError: more than 65,535 bytes.
        """
        if len(data) > _MOST_FRAME_DATA_BYTES:
            raise ValueError(f"{len(data)} bytes for a last frame, which has at most {_MOST_FRAME_DATA_BYTES}")
        return self.encode_last(data)

    def decoded(self, file: IO[bytes]) -> Generator[bytes]:
        """Yield the decoded bytes of ``file``, in pieces of at most 1 MiB.

        Raises:
            CorruptCheckpointError: the file is damaged or cut off.
            ConfigError: see :meth:`imported`.
        """
        library = self.imported()
        decoder, within = library.decoder(), True  # within a frame. Between frames, zeros may fill the block of a tape
        while data := file.read(_PIECE_BYTES):
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
        """Open a file for writing. Leaving the block compresses the contents into the durable file ``filename``."""
        Path(filename).write_bytes(b"")
        with tempfile.TemporaryFile() as file, PackedSink(Path(filename), self, most_bytes=0) as sink:
            yield file
            file.seek(0)
            shutil.copyfileobj(file, sink, _MOST_DECODED_BYTES)
            sink.finish()

    @contextmanager
    def decompress(self, filename: str | Path, *, most_bytes: int = sys.maxsize) -> Generator[IO[bytes]]:
        """Open the decompressed contents of the file ``filename`` for reading.

        The contents are in a file without a name. Its folder is ``TMPDIR``, else the folder of ``filename``, else the
        system's temporary folder.

        Raises:
            CorruptCheckpointError: the file is damaged or cut off, or has more than ``most_bytes`` of contents.
            ConfigError: see :meth:`imported`.
            OSError: no space.
        """
        # The folder of a large file is on a disk for large files, and temporary folders may be in memory.
        beside = Path(filename).parent if os.access(Path(filename).parent, os.W_OK) else Path(tempfile.gettempdir())
        folder = Path(os.environ.get("TMPDIR") or beside)
        with (
            Path(filename).open("rb", buffering=0) as packed,
            tempfile.TemporaryFile(buffering=0, dir=folder) as target,
        ):
            size = 0
            for piece in self.decoded(packed):
                try:
                    write_all(target.fileno(), memoryview(piece), size)
                except OSError as e:
                    message = f"{e.strerror} to unpack {str(filename)!r}; TMPDIR=… names another"
                    raise OSError(e.errno, message, str(folder)) from e
                size += len(piece)
                if size > most_bytes:
                    raise CorruptCheckpointError(
                        f"it unpacks to more than {most_bytes} bytes, and a checkpoint of its size holds less. If you "
                        "trust it, unpack it with the tool of its format and load the .pt file."
                    )
            yield target


_BZIP2 = Library(bz2.compress, bz2.BZ2Decompressor, (OSError, ValueError))
KNOWN_COMPRESSORS = (
    Compressor("bz2", b"BZh", lambda: _BZIP2, bz2.compress, block_bytes=4 * 900_000),  # bzip2 has blocks of 900 kB
    Compressor("gz", b"\x1f\x8b", _gzip_library, _gzip_frame),
    Compressor("lz4", b"\x04\x22\x4d\x18", _lz4_library, _lz4_frame, "lz4"),
    Compressor("xz", b"\xfd7zXZ\0", _xz_library, lzma.compress),
    Compressor("zst", b"\x28\xb5\x2f\xfd", _zstandard_library, _zstandard_frame, "backports.zstd"),
)
"""Every codec, by extension."""


def is_compressed_pt(filename: str | Path) -> bool:
    """Return true if the name belongs to a compressed ``.pt`` file, perhaps of an unknown codec.

    Compressed archives are not ``.pt`` files.
    """
    parts = Path(filename).name.lower().split(".")
    return len(parts) >= 2 and parts[-2] == "pt" and parts[-1] != "symlink"


def get_compressor(filename: str | Path) -> Compressor:
    """Return the codec of the compressed file ``filename``.

    Raises:
        ConfigError: the name does not end in ``.pt`` and the extension of a codec.
    """
    for compressor in KNOWN_COMPRESSORS:
        if str(filename).lower().endswith(f".pt.{compressor.extension}"):
            return compressor
    known = ", ".join(f".pt.{compressor.extension}" for compressor in KNOWN_COMPRESSORS)
    raise ConfigError(f"{str(filename)!r} is not the name of a compressed checkpoint. Those end in {known}.")


def codec_of(beginning: bytes) -> Compressor | None:
    """Return the codec of a file with the first bytes ``beginning``; ``None`` if the file is not compressed."""
    return next((known for known in KNOWN_COMPRESSORS if beginning.startswith(known.magic)), None)


def last_frame(end: bytes) -> tuple[int, bytes] | None:
    """Find the last frame of a compressed file, with the record of the checkpoint.

    Args:
        end: the end of the file.

    Returns:
        Offset of the frame in ``end``, and the data in the frame; ``None`` if the file does not end with such a frame,
        or if a bit of the frame was flipped.
    """
    for magic, decoder in ((b"BZh91AY&SY", bz2.BZ2Decompressor()), (b"\xfd7zXZ\0", _xz_library().decoder())):
        start = max(0, end.rfind(magic))
        with suppress(OSError, ValueError, lzma.LZMAError):
            data = decoder.decompress(end[start:], _MOST_FRAME_DATA_BYTES)
            is_whole = decoder.eof and not decoder.unused_data and _FOOTER_MARK in data[-_FOOTER_BYTES:]
            if is_whole and (magic[:1] != b"B" or end[start:] == bz2.compress(data)):
                return start, data
    place = end.rfind(_FOOTER_MARK)
    try:
        start = place - int(end[place + len(_FOOTER_MARK) :][:8], 16)
    except ValueError:
        return None
    data = end[max(0, start) : place + _FOOTER_BYTES]
    if start < 0 or len(data) > _MOST_FRAME_DATA_BYTES:
        return None
    frames = (encode(data) for encode in (_gzip_frame, _lz4_frame, _zstandard_frame))
    return next(((len(end) - len(frame), data) for frame in frames if end.endswith(frame)), None)


_HASHED_BYTES = 1 << 20  # small enough for the processor's cache
_MOST_THREADS = 8  # a thread needs memory for a block and a frame
_NICENESS = 5  # if training wants the processor, the threads get a third of its time


@final
class PackedSink:
    """Writes a compressed file.

    Threads of low priority compress, so training gets the processors first. Memory holds at most two blocks more than
    there are threads. Used as a context manager: leaving the block before :meth:`finish` stops the threads.

    Args:
        path: an existing file, empty.
        compressor: the codec.
        most_bytes: expected size before compression, in bytes. Decides the size of chunks.

    Attributes:
        size_bytes: number of bytes appended, before compression.
        piece_bytes: best number of bytes to append at once.
        seconds: time by activity. ``hash``: checksums and digests. ``compress``: waiting for the threads. ``write``.
            ``flush``: until the file is durable.
    """

    def __init__(self, path: Path, compressor: Compressor, *, most_bytes: int) -> None:
        self._encode = compressor.imported().encode
        self._compressor = compressor
        # Only the size of chunks follows from the expected size: a compressed file needs less space.
        self._file = StreamWriter(path, 0, chunk_bytes=chunk_bytes_for(most_bytes))
        self.size_bytes = 0
        self.piece_bytes = _HASHED_BYTES
        self.seconds = self._file.seconds
        self.seconds["compress"] = 0.0
        self._plain = xxhash.xxh3_128()
        self._block = bytearray()
        self._pending: deque[Future[bytes]] = deque()
        self._threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        self._pool = WorkerPool(self._threads, name="checkpoint-compressor", first=partial(os.nice, _NICENESS))

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        self.size_bytes += len(data)
        self._plain.update(data)
        left = memoryview(data)
        while left:
            room = self._compressor.block_bytes - len(self._block)
            self._block += left[:room]
            left = left[room:]
            if len(self._block) == self._compressor.block_bytes:
                self._compress_block()

    def copy(self, address: int, size: int, crc: int | None = 0) -> int:
        """Append ``size`` bytes of memory at ``address``, and return their CRC-32, continued from ``crc``."""
        data = ctypes.string_at(address, size)
        self.write(data)
        return isal_zlib.crc32(data, crc or 0)

    def finish(self, seal: Seal | None = None) -> FileDigest:
        """Write the rest, wait until the file is durable, stop the threads, and return the digest of the file.

        Args:
            seal: makes the tail, the record for the last frame, from the digest of the other frames and the digest of
                the uncompressed bytes. ``None``: no tail.

        Raises:
            OSError: the file could not be written.
        """
        if self._block or not (self.size_bytes or seal):  # an empty file is a frame without data
            self._compress_block()
        while self._pending:
            self._write_oldest()
        plain = FileDigest(self.size_bytes, self._plain.hexdigest())
        tail = None if seal is None else lambda stored, _: self._compressor.frame(seal(stored, plain))
        with self:
            return self._file.finish(tail)

    def __enter__(self) -> PackedSink:
        return self

    def __exit__(self, *exception: object) -> None:
        for future in self._pending:
            future.cancel()
        self._pool.close()
        self._file.__exit__()

    def _compress_block(self) -> None:
        """Compress the block in a thread. If all threads have work, first write the oldest frame."""
        self._pending.append(self._pool.submit(partial(self._encode, memoryview(self._block))))
        self._block = bytearray()
        if len(self._pending) > self._threads:
            self._write_oldest()

    def _write_oldest(self) -> None:
        started = time.perf_counter()
        frame = self._pending.popleft().result()
        self.seconds["compress"] += time.perf_counter() - started
        self._file.write(frame)
