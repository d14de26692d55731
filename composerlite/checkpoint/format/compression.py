"""Codecs of compressed checkpoints: a Python library where one is well kept, else the command-line tool.

Codecs whose streams may follow one another (gzip, bzip2, xz) encode blocks of 4 MB in several threads; Zstandard does
so by itself. What they write is what the tool of that name reads, and the other way round.
"""

from __future__ import annotations

import ctypes
import functools
import io
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, final

from isal import isal_zlib

from composerlite.checkpoint.format.codecs import (
    Encoder,
    Library,
    ToolEncoder,
    ToolPipe,
    bzip2_library,
    gzip_library,
    lz4_library,
    lzma_library,
    xz_library,
    zstandard_library,
)
from composerlite.errors import ConfigError, CorruptCheckpointError
from composerlite.storage import Digester, FileDigest, WorkerPool, chunk_bytes_for

__all__ = [
    "KNOWN_COMPRESSORS",
    "Compressor",
    "PackedSink",
    "PiecesReader",
    "codec_of",
    "get_compressor",
    "is_compressed_pt",
]

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
        """Check that files can be written and read here."""
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
        """Create the encoder of one file, of ``size_bytes`` where that is known.

        Raises:
            ConfigError: see :meth:`check_exists`.
        """
        self.check_exists()
        library = self._imported()
        return ToolEncoder([self.tool, *self.options]) if library is None else library.encoder(size_bytes)

    def decoded(self, pieces: Iterable[bytes]) -> Generator[bytes]:
        """Decode ``pieces`` of a file; in pieces of 1 MiB at most.

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
        """Open the decompressed contents of the file ``filename``, to be read from front to back.

        Raises:
            CorruptCheckpointError: while it is read: the file is damaged or cut off.
        """
        with (
            Path(filename).open("rb", buffering=0) as source,
            closing(self.decoded(iter(lambda: source.read(_PIECE_BYTES), b""))) as pieces,
        ):
            yield io.BufferedReader(PiecesReader(pieces))

    def _imported(self) -> Library | None:
        if self.library is None:
            return None
        try:
            return self.library()
        except ImportError:
            return None


def is_compressed_pt(filename: str | Path) -> bool:
    """Check that the name asks for a ``.pt`` file that is compressed by itself, not in an archive."""
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
        yield from pipe.finish()
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
class PiecesReader(io.RawIOBase):
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


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────
_HASHED_BYTES = 1 << 20  # checksum and copy meet in the cache
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
        piece_bytes: what is summed at once.
        seconds: spent by name: ``hash``: sums and digests; ``compress``: waiting for the encoder; ``write``; ``flush``:
            until everything was durable.
    """

    def __init__(self, path: Path, encoder: Encoder, *, most_bytes: int) -> None:
        self.size_bytes = 0
        self.piece_bytes = _HASHED_BYTES
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
        self._pool = WorkerPool(encoder.threads, name="checkpoint-compressor", first=_step_back)

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        self._append(memoryview(data))

    def copy(self, address: int, size: int, crc: int | None = 0) -> int:
        """Append ``size`` bytes of memory at ``address``; their CRC-32."""
        crc = crc or 0
        for start in range(0, size, _HASHED_BYTES):
            length = min(_HASHED_BYTES, size - start)
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
            self._queue_block()
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
                self._queue_block()

    def _queue_block(self) -> None:
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
