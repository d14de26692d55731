"""Codecs of compressed files: Python libraries for blocks of data, and the layouts of last frames.

A compressed file is a sequence of frames. Each frame is a complete stream of its codec: a member of gzip, a stream of
bzip2 or xz, a frame of lz4 or Zstandard. Decoders of all five codecs return the data of all frames, one after another.
"""

from __future__ import annotations

import bz2
import lzma
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast, final

import xxhash
from isal import igzip_lib

_BLOCK_BYTES = 4 << 20
_BZ2_BLOCK_BYTES = 4 * 900_000  # bzip2 compresses 900 kB at a time
_DECODER_MEMORY_BYTES = 128 << 20  # `xz -9` needs 65 MiB
_XZ_PRESET = 0  # on floating-point numbers, higher presets take three times as long for the same size


class Decoder(Protocol):
    """Decodes one frame. The decoders of the standard library have this interface."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /, max_length: int = -1) -> bytes: ...


@final
@dataclass(frozen=True, slots=True)
class Library:
    """A Python library that compresses and decompresses.

    Attributes:
        encode: returns a block of data as one frame. Called in several threads at once.
        decoder: returns a new decoder of one frame.
        errors: exceptions that the decoder raises for damaged data.
        block_bytes: size of the blocks that ``encode`` gets.
    """

    encode: Callable[[memoryview], bytes]
    decoder: Callable[[], Decoder]
    errors: tuple[type[Exception], ...]
    block_bytes: int = _BLOCK_BYTES


def gzip_library() -> Library:
    """Return the codec of ``.gz``: isal compresses ten times as fast as zlib."""
    encode = partial(igzip_lib.compress, level=1, flag=igzip_lib.COMP_GZIP)
    decoder = partial(igzip_lib.IgzipDecompressor, flag=igzip_lib.DECOMP_GZIP)
    return Library(encode, decoder, (cast(type[Exception], igzip_lib.error), ValueError))


def bzip2_library() -> Library:
    """Return the codec of ``.bz2``."""
    return Library(bz2.compress, bz2.BZ2Decompressor, (OSError, ValueError), _BZ2_BLOCK_BYTES)


def xz_library() -> Library:
    """Return the codec of ``.xz``."""
    decoder = partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=_DECODER_MEMORY_BYTES)
    return Library(partial(lzma.compress, preset=_XZ_PRESET), decoder, (lzma.LZMAError,))


def lz4_library() -> Library:
    """Return the codec of ``.lz4``. Raises ImportError if the package ``lz4`` is not installed."""
    from lz4 import frame

    encode = partial(frame.compress, block_size=frame.BLOCKSIZE_MAX4MB, content_checksum=True)
    return Library(encode, cast(Any, frame.LZ4FrameDecompressor), (RuntimeError,))


def zstandard_library() -> Library:
    """Return the codec of ``.zst``. Raises ImportError if neither Python nor ``backports.zstd`` has it."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    option = zstd.CompressionParameter
    options: dict[int, int] = {option.compression_level: 1, option.checksum_flag: 1}
    return Library(partial(zstd.compress, options=options), zstd.ZstdDecompressor, (zstd.ZstdError,))


# ── last frames ──────────────────────────────────────────────────────────────────────────────────────────────────────
# The same data always give the same bytes, whatever version of a library is installed. So a reader that encodes the
# data again detects every flipped bit, also in the bits that no checksum of the format covers.
def bzip2_frame(data: bytes) -> bytes:
    """Return ``data`` as a stream of bzip2, which has no stored blocks. All versions of libbz2 give the same bytes."""
    return bz2.compress(data)


def gzip_frame(data: bytes) -> bytes:
    """Return ``data``, at most 65,535 bytes, as a gzip member of one stored block (RFC 1951 and 1952)."""
    head = b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + struct.pack("<BHH", 1, len(data), len(data) ^ 0xFFFF)
    return head + data + struct.pack("<II", zlib.crc32(data), len(data))


def xz_frame(data: bytes) -> bytes:
    """Return ``data``, at most 65,536 bytes, as an xz stream of one stored block (the .xz file format, version 1.2)."""
    check_kind, filters = b"\0\1", b"\x02\0\x21\1\x08\0\0\0"  # CRC-32; LZMA2 with a dictionary of 64 KiB
    head = b"\xfd7zXZ\0" + _with_crc(check_kind) + _with_crc(filters)
    block = b"\1" + struct.pack(">H", len(data) - 1) + data + b"\0"
    unpadded_bytes = len(filters) + 4 + len(block) + 4
    index = b"\0\1" + _xz_number(unpadded_bytes) + _xz_number(len(data))
    index = _with_crc(index + bytes(-len(index) % 4))
    footer = struct.pack("<I", len(index) // 4 - 1) + check_kind
    check = struct.pack("<I", zlib.crc32(data))
    return head + block + bytes(-len(block) % 4) + check + index + _with_crc(footer)[-4:] + footer + b"YZ"


def lz4_frame(data: bytes) -> bytes:
    """Return ``data``, at most 65,536 bytes, as an lz4 frame of one stored block (LZ4 frame format, version 1.6)."""
    descriptor = b"\x64\x40"  # independent blocks of at most 64 KiB, a checksum of the content
    head = b"\x04\x22\x4d\x18" + descriptor + bytes([xxhash.xxh32_intdigest(descriptor) >> 8 & 0xFF])
    block = struct.pack("<I", len(data) | 1 << 31) + data + bytes(4)
    return head + block + struct.pack("<I", xxhash.xxh32_intdigest(data))


def zstandard_frame(data: bytes) -> bytes:
    """Return ``data``, at most 128 KiB, as a Zstandard frame of one raw block (RFC 8878)."""
    head = b"\x28\xb5\x2f\xfd\xa4" + struct.pack("<I", len(data))  # one segment, its size in 4 bytes, a checksum
    block = (len(data) << 3 | 1).to_bytes(3, "little") + data
    return head + block + struct.pack("<I", xxhash.xxh64_intdigest(data) & 0xFFFFFFFF)


def _with_crc(data: bytes) -> bytes:
    return data + struct.pack("<I", zlib.crc32(data))


def _xz_number(value: int) -> bytes:
    """Return ``value`` in groups of 7 bits, as the index of an xz stream has it."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])
