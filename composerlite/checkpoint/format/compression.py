"""Compressed files: the codecs, a sink, and the last frame with the record of the checkpoint.

A compressed file is a sequence of frames. Each frame is a complete stream of its codec: a member of gzip, a stream of
bzip2 or xz, a frame of lz4 or Zstandard. :class:`PackedSink` writes one frame with the checkpoint and, if there is a
record, a last frame with only the record. ``gzip -d``, ``bzip2 -d``, ``xz -d``, ``lz4 -d`` and ``zstd -d`` decompress
these files to the checkpoint followed by the record. This module also reads files of these programs.
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
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast, final

import xxhash
from isal import igzip_lib, isal_zlib

from composerlite.errors import ConfigError, CorruptCheckpointError
from composerlite.storage import FileDigest, Seal, StreamWriter, chunk_bytes_for
from composerlite.storage.disk.files import write_all
from composerlite.types import Closing

_READ_BYTES = 64 << 10
_PIECE_BYTES = 1 << 20  # encoded or decoded at once: small enough for the processor's cache
_MOST_FRAME_DATA_BYTES = 0xFFFF  # more does not fit into a stored block of gzip
_DECODER_MEMORY_BYTES = 128 << 20  # `xz -9` needs 65 MiB
_FOOTER_MARK, _FOOTER_BYTES = b"\nCLREC1 ", 50
"""Beginning and size of the last line of a record: see :mod:`composerlite.checkpoint.record.record`."""


@final
class Library(NamedTuple):
    """Functions of a Python library for compression.

    Attributes:
        encoder: returns a new encoder for a frame, with the interface of ``bz2.BZ2Compressor``.
        decoder: returns a new decoder for a frame, with the interface of ``bz2.BZ2Decompressor``.
        errors: exceptions of the decoder for damaged data.
    """

    encoder: Callable[[], Any]
    decoder: Callable[[], Any]
    errors: tuple[type[Exception], ...]


_BZIP2 = Library(bz2.BZ2Compressor, bz2.BZ2Decompressor, (OSError, ValueError))
_GZIP = Library(
    partial(isal_zlib.compressobj, 1, isal_zlib.DEFLATED, 31),  # ten times as fast as zlib; 31: in the form of gzip
    partial(igzip_lib.IgzipDecompressor, flag=igzip_lib.DECOMP_GZIP),
    (cast(type[Exception], igzip_lib.error), ValueError),
)
_XZ = Library(
    partial(lzma.LZMACompressor, preset=0),  # higher presets take three times as long, and compress numbers no better
    partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=_DECODER_MEMORY_BYTES),
    (lzma.LZMAError,),
)


def _lz4_library() -> Library:
    from lz4 import frame

    encoder = partial(frame.LZ4FrameCompressor, block_size=frame.BLOCKSIZE_MAX4MB, content_checksum=True)
    return Library(encoder, frame.LZ4FrameDecompressor, (RuntimeError,))


def _zstandard_library() -> Library:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    option = zstd.CompressionParameter
    options: dict[int, int] = {option.compression_level: 1, option.checksum_flag: 1}
    return Library(partial(zstd.ZstdCompressor, options=options), zstd.ZstdDecompressor, (zstd.ZstdError,))


# ── last frames ──────────────────────────────────────────────────────────────────────────────────────────────────────
# A frame with a stored block contains its data uncompressed, so a reader needs no library to find the record. The same
# data always give the same bytes. So a reader encodes the data again and detects every flipped bit, also in bits
# without a checksum. Last frames of bzip2 and xz are compressed, since Python has the libraries. All versions of libbz2
# give the same bytes, and the checksums of xz cover all bits.
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
class Compressor(NamedTuple):
    """A codec, known by the last part of a file name.

    Attributes:
        extension: of files, without the dot.
        magic: first bytes of every frame.
        library: imports the Python library.
        encode_last: returns data as a last frame, without the library.
        package: name of the library's package; empty if composerlite requires the package.
    """

    extension: str
    magic: bytes
    library: Callable[[], Library]
    encode_last: Callable[[bytes], bytes]
    package: str = ""

    @property
    def exists(self) -> bool:
        """True if the library is installed."""
        with suppress(ImportError):
            self.library()
            return True
        return False

    def imported(self) -> Library:
        """Return the library.

        Raises:
            ConfigError: the library is missing. The message names the package.
        """
        try:
            return self.library()
        except ImportError as e:
            raise ConfigError(
                f"checkpoints that end in '.pt.{self.extension}' need the Python package {self.package!r}: pip install "
                "'composerlite[compression]', or choose another ending, such as .pt.gz or .pt."
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
            ConfigError: the library is missing.
        """
        library = self.imported()
        decoder = library.decoder()
        while data := file.read(_READ_BYTES):
            while data or not (decoder.eof or decoder.needs_input):
                if decoder.eof:  # zeros between frames are padding, as on a tape
                    if not (data := data.lstrip(b"\0")):
                        break
                    decoder = library.decoder()
                try:
                    decoded = decoder.decompress(data, _PIECE_BYTES)
                except library.errors as e:
                    raise CorruptCheckpointError(f"its {self.extension} data are damaged: {e}") from e
                data = decoder.unused_data if decoder.eof else b""
                if decoded:
                    yield decoded
        if not decoder.eof:
            raise CorruptCheckpointError(f"its {self.extension} data are cut off")

    @contextmanager
    def compress(self, filename: str | Path) -> Generator[IO[bytes]]:
        """Open a file for writing. Leaving the block compresses the contents into the durable file ``filename``."""
        Path(filename).write_bytes(b"")
        with tempfile.TemporaryFile() as file, PackedSink(Path(filename), self, most_bytes=0) as sink:
            yield file
            file.seek(0)
            shutil.copyfileobj(file, sink, _PIECE_BYTES)
            sink.finish()

    @contextmanager
    def decompress(self, filename: str | Path, *, most_bytes: int = sys.maxsize) -> Generator[IO[bytes]]:
        """Open the decompressed contents of the file ``filename`` for reading.

        The contents are in an unnamed file in the folder ``TMPDIR``. If ``TMPDIR`` is not set, the file is in the
        folder of ``filename``, or in the system's temporary folder if the folder of ``filename`` is not writable.

        Raises:
            CorruptCheckpointError: the file is damaged or cut off, or has more than ``most_bytes`` of contents.
            ConfigError: the library is missing.
            OSError: no space.
        """
        # The folder of a large file is on a disk for large files, and temporary folders may be in memory.
        beside = Path(filename).parent if os.access(Path(filename).parent, os.W_OK) else Path(tempfile.gettempdir())
        folder = Path(os.environ.get("TMPDIR") or beside)
        with tempfile.TemporaryFile(buffering=0, dir=folder) as target:
            size = 0
            with Path(filename).open("rb", buffering=0) as packed:
                for piece in self.decoded(packed):
                    try:
                        write_all(target.fileno(), memoryview(piece), size)
                    except OSError as e:
                        message = f"{e.strerror} to unpack {str(filename)!r}; TMPDIR=… names another"
                        raise OSError(e.errno, message, str(folder)) from e
                    size += len(piece)
                    if size > most_bytes:
                        raise CorruptCheckpointError(
                            f"it unpacks to more than {most_bytes} bytes, and a checkpoint of its size holds less. If "
                            "you trust it, unpack it with the tool of its format and load the .pt file."
                        )
            yield target


KNOWN_COMPRESSORS = (
    Compressor("bz2", b"BZh", lambda: _BZIP2, bz2.compress),
    Compressor("gz", b"\x1f\x8b", lambda: _GZIP, _gzip_frame),
    Compressor("lz4", b"\x04\x22\x4d\x18", _lz4_library, _lz4_frame, "lz4"),
    Compressor("xz", b"\xfd7zXZ\0", lambda: _XZ, lzma.compress),
    Compressor("zst", b"\x28\xb5\x2f\xfd", _zstandard_library, _zstandard_frame, "backports.zstd"),
)
"""All codecs, sorted by extension."""


def is_compressed_pt(filename: str | Path) -> bool:
    """Return true if the name belongs to a compressed ``.pt`` file, perhaps of an unknown codec.

    Links (``.pt.symlink``) and compressed archives are not compressed ``.pt`` files.
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
    for magic, decoder in ((b"BZh91AY&SY", bz2.BZ2Decompressor()), (b"\xfd7zXZ\0", _XZ.decoder())):
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


@final
class PackedSink(Closing):
    """Writes a compressed file: a frame with all bytes, and a last frame if there is a record.

    Used as a context manager: leaving the block before :meth:`finish` leaves an incomplete file.

    Args:
        path: an existing file, empty.
        compressor: the codec.
        most_bytes: expected size before compression, in bytes. Decides the size of chunks.

    Attributes:
        size_bytes: number of bytes appended, before compression.
        piece_bytes: best number of bytes to append at once.
        seconds: time by activity. ``hash``: checksums and digests. ``compress``. ``write``. ``flush``: until the file
            is durable.
    """

    def __init__(self, path: Path, compressor: Compressor, *, most_bytes: int) -> None:
        self._compressor = compressor
        self._encoder = compressor.imported().encoder()
        # Pass 0, and not the expected size, which decides only the size of chunks: a compressed file needs less space.
        self._file = StreamWriter(path, 0, chunk_bytes=chunk_bytes_for(most_bytes))
        self.size_bytes = 0
        self.piece_bytes = _PIECE_BYTES
        self.seconds = self._file.seconds
        self.seconds["compress"] = 0.0
        self._plain = xxhash.xxh3_128()
        if hasattr(self._encoder, "begin"):  # the encoder of lz4 returns the header first
            self._file.write(self._encoder.begin())

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        self.size_bytes += len(data)
        self._plain.update(data)
        started = time.perf_counter()
        packed = self._encoder.compress(data)
        self.seconds["compress"] += time.perf_counter() - started
        self._file.write(packed)

    def copy(self, address: int, size: int, crc: int | None = 0) -> int:
        """Append ``size`` bytes of memory at ``address``, and return their CRC-32, continued from ``crc``."""
        data = ctypes.string_at(address, size)
        self.write(data)
        return isal_zlib.crc32(data, crc or 0)

    def finish(self, seal: Seal | None = None) -> FileDigest:
        """Write the rest, wait until the file is durable, and return the digest of the file.

        Args:
            seal: makes the record in the last frame, from the digest of the first frame and the digest of the
                uncompressed bytes. ``None``: no last frame.

        Raises:
            OSError: the file could not be written.
        """
        self._file.write(self._encoder.flush())
        plain = FileDigest(self.size_bytes, self._plain.hexdigest())
        tail = None if seal is None else lambda stored, _: self._compressor.frame(seal(stored, plain))
        return self._file.finish(tail)

    def close(self) -> None:
        """Stop the threads that write. May be called twice."""
        self._file.close()
