"""Encoders and decoders of compressed files: Python libraries, in blocks or as one stream, and programs."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol, cast, final

from composerlite.errors import CheckpointError, SaveError

__all__ = [
    "Encoder",
    "Library",
    "ToolEncoder",
    "ToolPipe",
    "bzip2_library",
    "gzip_library",
    "lz4_library",
    "lzma_library",
    "thread_count",
    "xz_library",
    "zstandard_library",
]

_BLOCK_BYTES = 4 << 20
_MOST_THREADS = 8  # each holds a block and its encoding


class Encoder(ABC):
    """Encodes one file, block by block.

    Attributes:
        block_bytes: size of every block but the last.
        threads: how many blocks may be encoded at once. 1: one after the other, in order.
    """

    block_bytes = _BLOCK_BYTES
    threads = 1

    @abstractmethod
    def encode(self, block: memoryview) -> bytes:
        """Return the next bytes of the file."""

    def finish(self) -> bytes:
        """Return the end of the file. Nothing may be encoded any more."""
        return b""

    def stop(self) -> None:
        """Do not continue. For any thread: one that waits for a program meanwhile fails."""

    def close(self) -> None:
        """Free all resources, when no thread encodes any more. May be called twice."""


class StreamCompressor(Protocol):
    def compress(self, data: memoryview, /) -> bytes: ...

    def flush(self) -> bytes: ...


@final
class BlockEncoder(Encoder):
    """Encoder that makes of each block a compressed stream, and of a file a sequence of streams."""

    def __init__(self, encode: Callable[[memoryview], bytes], block_bytes: int = _BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self.threads = thread_count()
        self._encode = encode

    def encode(self, block: memoryview) -> bytes:
        return self._encode(block)


@final
class StreamEncoder(Encoder):
    """The whole file is one stream."""

    def __init__(self, compressor: StreamCompressor, start: bytes = b"") -> None:
        self._compressor = compressor
        self._start = start

    def encode(self, block: memoryview) -> bytes:
        start, self._start = self._start, b""
        return start + self._compressor.compress(block)

    def finish(self) -> bytes:
        return self._start + self._compressor.flush()


@final
class ToolEncoder(Encoder):
    """The whole file is sent through a program."""

    def __init__(self, command: list[str]) -> None:
        self._pipe = ToolPipe(command, SaveError)

    def encode(self, block: memoryview) -> bytes:
        return b"".join(self._pipe.exchange(block))

    def finish(self) -> bytes:
        return b"".join(self._pipe.finish())

    def stop(self) -> None:
        self._pipe.stop()

    def close(self) -> None:
        self._pipe.close()


def thread_count() -> int:
    """Number of threads that compress at once: they have a low priority, so that all processors may be used."""
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)


# ── libraries ────────────────────────────────────────────────────────────────────────────────────────────────────────
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
    """A Python library: its encoder, its decoder, and the decoder's errors."""

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


# ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────────────
_PIECE_BYTES = 64 << 10
_EXIT_SECONDS = 10.0
_SILENCE_SECONDS = 600.0  # a program that neither takes nor gives a byte for so long has stopped


@final
class ToolPipe:
    """A program that reads standard input and writes standard output.

    The program starts with the first byte, at the priority of the thread that sends it. It has a session of its own:
    what the user types in the terminal does not end it.

    Args:
        command: the program and its arguments.
        error: raised when the program says that it failed. One that was killed is a plain
            :class:`~composerlite.errors.CheckpointError`, which says nothing against the bytes.
    """

    def __init__(self, command: Sequence[str], error: type[CheckpointError]) -> None:
        self._command = command
        self._error = error
        self._selector = selectors.DefaultSelector()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the pipe
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._stopped = False

    def exchange(self, data: memoryview | bytes) -> Iterator[bytes]:
        """Send ``data`` while it is iterated over; what the program gives meanwhile, in pieces of 64 KiB at most."""
        process = self._running()
        assert process.stdin is not None
        left = memoryview(data)
        while left:
            for file in self._ready():
                if file is process.stdin:
                    left = left[self._send(process, left) :]
                    if not left:
                        break
                else:
                    if not (piece := self._receive(process)):
                        self._fail(process)
                    yield piece

    def finish(self) -> Iterator[bytes]:
        """Close the program's input; the rest of what it gives.

        Raises:
            CheckpointError: it failed.
        """
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        self._selector.unregister(process.stdin)
        process.stdin.close()
        while self._ready() and (piece := self._receive(process)):
            yield piece
        if process.wait(_EXIT_SECONDS) != 0:
            self._fail(process)

    def stop(self) -> None:
        """End the program if it still runs, and start none. For any thread: another one that exchanges bytes fails."""
        with self._starting:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Free all resources, when no thread exchanges bytes any more. May be called twice."""
        self.stop()
        if self._process is not None:
            self._process.wait(_EXIT_SECONDS)
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
        self._selector.close()
        self._said.close()

    def _running(self) -> subprocess.Popen[bytes]:
        with self._starting:
            if self._stopped:
                raise CheckpointError(f"the program {self._command[0]!r} is not started: the file was given up")
            if self._process is None:
                self._process = self._start()
            return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        self._selector.register(process.stdin, selectors.EVENT_WRITE)
        self._selector.register(process.stdout, selectors.EVENT_READ)
        return process

    def _ready(self) -> list[object]:
        """Wait for the pipes of the program; those that can be used, at least one."""
        ready = self._selector.select(_SILENCE_SECONDS)
        if not ready:
            name = Path(self._command[0]).name
            raise CheckpointError(f"the program {name!r} has done nothing for {_SILENCE_SECONDS:g} s: it hangs")
        return [key.fileobj for key, _ in ready]

    def _send(self, process: subprocess.Popen[bytes], data: memoryview) -> int:
        assert process.stdin is not None
        try:
            return os.write(process.stdin.fileno(), data[:_PIECE_BYTES])
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            self._fail(process)

    def _receive(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        return os.read(process.stdout.fileno(), _PIECE_BYTES)

    def _fail(self, process: subprocess.Popen[bytes]) -> NoReturn:
        """The program ended before it should have."""
        code = process.wait(_EXIT_SECONDS)
        name = Path(self._command[0]).name
        if code < 0:
            raise CheckpointError(f"the program {name!r} was killed by {signal.Signals(-code).name}")
        self._said.seek(0)
        said = self._said.read(1000).decode(errors="replace").strip()
        raise self._error(f"the program {name!r} ended with exit code {code}: {said or 'it did not say why'}")
