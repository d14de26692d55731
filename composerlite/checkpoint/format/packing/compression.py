"""Codecs of compressed checkpoints: a Python library where one is well kept, else the command-line tool.

Codecs whose streams may follow one another (gzip, bzip2, xz) encode blocks of 4 MB in several threads; Zstandard does
so by itself. What they write is what the tool of that name reads, and the other way round.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, final

from composerlite.checkpoint.format.packing.encoders import Encoder, ToolEncoder
from composerlite.checkpoint.format.packing.libraries import (
    Library,
    bzip2_library,
    gzip_library,
    lz4_library,
    lzma_library,
    xz_library,
    zstandard_library,
)
from composerlite.checkpoint.format.packing.packed_sink import PackedSink
from composerlite.checkpoint.format.packing.tool_pipe import ToolPipe
from composerlite.errors import ConfigError, CorruptCheckpointError

__all__ = ["KNOWN_COMPRESSORS", "Compressor", "codec_of", "get_compressor", "is_compressed_pt"]

_PIECE_BYTES = 64 << 10
_MOST_DECODED_BYTES = 1 << 20


@final
@dataclass(frozen=True, slots=True)
class Compressor:
    """A codec, known by the last part of a file name.

    Attributes:
        extension: of files, without the dot.
        tool: name of the program.
        options: with which the program compresses from its input to its output.
        magic: how its files begin.
        library: imports the Python library; ``None`` where none is well kept.
        package: what to install for it.
    """

    extension: str
    tool: str
    options: tuple[str, ...]
    magic: bytes
    library: Callable[[], Library] | None
    package: str = ""

    @property
    def exists(self) -> bool:
        """Whether files can be written and read here."""
        return self._imported() is not None or shutil.which(self.tool) is not None

    def check_exists(self) -> None:
        """Raise an error that says what is missing and how to get it.

        Raises:
            ConfigError: there is neither the library nor the program.
        """
        if self.exists:
            return
        ways = [f"the program {self.tool!r}, which is not on the PATH"]
        if self.package:
            ways.insert(0, f"the Python package {self.package!r} (pip install 'composerlite[compression]')")
        raise ConfigError(
            f"checkpoints that end in '.pt.{self.extension}' need {', or '.join(ways)}. Install it, or choose another "
            f"ending: {', '.join(f'.pt.{other.extension}' for other in KNOWN_COMPRESSORS if other is not self)}, .pt."
        )

    def encoder(self, size_bytes: int | None) -> Encoder:
        """For one file, which holds ``size_bytes`` where that is known.

        Raises:
            ConfigError: see :meth:`check_exists`.
        """
        self.check_exists()
        library = self._imported()
        return ToolEncoder([self.tool, *self.options]) if library is None else library.encoder(size_bytes)

    def decoded(self, pieces: Iterable[bytes]) -> Generator[bytes]:
        """What ``pieces`` of a file decode to, in pieces of 1 MiB at most.

        Raises:
            CorruptCheckpointError: the file is damaged or cut off.
            ConfigError: see :meth:`check_exists`.
        """
        self.check_exists()
        library = self._imported()
        return _tool_decoded(self.tool, pieces) if library is None else _library_decoded(library, self.tool, pieces)

    @contextmanager
    def compress(self, filename: str | Path) -> Generator[IO[bytes]]:
        """Write the file ``filename``, compressed. It is durable when the block is left."""
        Path(filename).touch()
        with PackedSink(Path(filename), self.encoder(None), most_bytes=0) as sink:
            with io.BufferedWriter(_SinkWriter(sink)) as file:  # type: ignore[arg-type]
                yield file
            sink.finish()

    @contextmanager
    def decompress(self, filename: str | Path) -> Generator[IO[bytes]]:
        """Read what the file ``filename`` holds, from front to back.

        Raises:
            CorruptCheckpointError: while it is read: the file is damaged or cut off.
        """
        with (
            Path(filename).open("rb", buffering=0) as source,
            closing(self.decoded(iter(lambda: source.read(_PIECE_BYTES), b""))) as pieces,
        ):
            yield io.BufferedReader(_PiecesReader(pieces))

    def _imported(self) -> Library | None:
        if self.library is None:
            return None
        try:
            return self.library()
        except ImportError:
            return None


def is_compressed_pt(filename: str | Path) -> bool:
    """Whether the name asks for a ``.pt`` file that is compressed by itself, not in an archive."""
    parts = Path(filename).name.lower().split(".")
    return len(parts) >= 2 and parts[-2] == "pt" and parts[-1] != "symlink"


def get_compressor(filename: str | Path) -> Compressor:
    """The codec of the compressed file ``filename``.

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
    """The codec of a file with this ``beginning``; ``None``: it is not compressed."""
    return next((known for known in KNOWN_COMPRESSORS if beginning.startswith(known.magic)), None)


# ── decoding ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _library_decoded(library: Library, name: str, pieces: Iterable[bytes]) -> Generator[bytes]:
    decoder = library.decoder()
    within = True  # a stream; between streams, zeros fill up to some block
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
                raise CorruptCheckpointError(f"its {name} data are damaged: {e}") from e
            data = b""
            if decoded:
                yield decoded
            if decoder.eof:
                data, within = decoder.unused_data, False
    if within:
        raise CorruptCheckpointError(f"its {name} data are cut off")


def _tool_decoded(tool: str, pieces: Iterable[bytes]) -> Generator[bytes]:
    pipe = ToolPipe([tool, "-d", "-c"], CorruptCheckpointError)
    try:
        for piece in pieces:
            yield from pipe.exchange(piece)
        yield from pipe.end()
    finally:
        pipe.close()


class _Writable(Protocol):
    def write(self, data: bytes) -> None: ...


@final
class _SinkWriter(io.RawIOBase):
    """A sink as a file that can be written to."""

    def __init__(self, sink: _Writable) -> None:
        self._sink = sink

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._sink.write(bytes(data))
        return len(data)


@final
class _PiecesReader(io.RawIOBase):
    """Pieces as a file that can be read."""

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


KNOWN_COMPRESSORS = (
    Compressor("bz2", "bzip2", ("-q", "-c"), b"BZh", bzip2_library),
    Compressor("gz", "gzip", ("-q", "-c"), b"\x1f\x8b", gzip_library),
    Compressor("lz4", "lz4", ("-q", "-c"), b"\x04\x22\x4d\x18", lz4_library, "lz4"),
    Compressor("lzma", "lzma", ("-q", "-c"), b"\x5d\0\0", lzma_library),
    Compressor("lzo", "lzop", ("-q", "-c"), b"\x89LZO\0\r\n\x1a\n", None),
    Compressor("xz", "xz", ("-q", "-c"), b"\xfd7zXZ\0", xz_library),
    Compressor("zst", "zstd", ("-q", "-c", "-1", "-T0"), b"\x28\xb5\x2f\xfd", zstandard_library, "backports.zstd"),
)
"""Every codec, by extension."""
