"""The Python libraries that compress, imported when they are used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast, final

from composerlite.checkpoint.format.packing.encoders import BlockEncoder, Encoder, StreamEncoder, thread_count

__all__ = [
    "Decoder",
    "Library",
    "bzip2_library",
    "gzip_library",
    "lz4_library",
    "lzma_library",
    "xz_library",
    "zstandard_library",
]

_BZ2_BLOCK_BYTES = 4 * 900_000  # bzip2 works on 900 kB at a time
_DECODER_MEMORY_BYTES = 128 << 20  # more than `xz -9` asks for
_XZ_PRESET = 0  # on numbers the higher ones take three times as long for the same size


class Decoder(Protocol):
    """Decodes one stream, as those of the standard library do."""

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
    """What a Python library does: an encoder of a file of so many bytes, a decoder, and what that raises."""

    encoder: Callable[[int | None], Encoder]
    decoder: Callable[[], Decoder]
    errors: tuple[type[Exception], ...]


def gzip_library() -> Library:
    from isal import igzip_lib

    def encode(block: memoryview) -> bytes:
        return igzip_lib.compress(block, level=1, flag=igzip_lib.COMP_GZIP)

    def decoder() -> Decoder:
        return igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)

    return Library(lambda _: BlockEncoder(encode), decoder, (cast(type[Exception], igzip_lib.error), ValueError))


def bzip2_library() -> Library:
    import bz2

    def encoder(_: int | None) -> Encoder:
        return BlockEncoder(bz2.compress, _BZ2_BLOCK_BYTES)

    return Library(encoder, bz2.BZ2Decompressor, (OSError, ValueError))


def xz_library() -> Library:
    import lzma

    def encode(block: memoryview) -> bytes:
        return lzma.compress(block, preset=_XZ_PRESET)

    def decoder() -> Decoder:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_DECODER_MEMORY_BYTES)

    return Library(lambda _: BlockEncoder(encode), decoder, (lzma.LZMAError,))


def lzma_library() -> Library:
    """The format from before xz: one stream, without a checksum."""
    import lzma

    def encoder(_: int | None) -> Encoder:
        return StreamEncoder(lzma.LZMACompressor(lzma.FORMAT_ALONE, preset=_XZ_PRESET))

    def decoder() -> Decoder:
        return lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=_DECODER_MEMORY_BYTES)

    return Library(encoder, decoder, (lzma.LZMAError,))


def lz4_library() -> Library:
    from lz4 import frame

    def encoder(size_bytes: int | None) -> Encoder:
        compressor = frame.LZ4FrameCompressor(block_size=frame.BLOCKSIZE_MAX4MB, content_checksum=True)
        return StreamEncoder(compressor, start=compressor.begin(size_bytes or 0))

    def decoder() -> Decoder:
        return cast(Decoder, frame.LZ4FrameDecompressor())

    return Library(encoder, decoder, (RuntimeError,))


def zstandard_library() -> Library:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    option = zstd.CompressionParameter

    def encoder(size_bytes: int | None) -> Encoder:
        threads = min(thread_count(), option.nb_workers.bounds()[1])  # 0: built without threads
        options: dict[int, int] = {option.compression_level: 1, option.nb_workers: threads, option.checksum_flag: 1}
        compressor = zstd.ZstdCompressor(options=options)
        compressor.set_pledged_input_size(size_bytes)
        return StreamEncoder(compressor)

    return Library(encoder, zstd.ZstdDecompressor, (zstd.ZstdError,))
