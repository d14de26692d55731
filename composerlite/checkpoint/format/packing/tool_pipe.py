"""A command-line compressor that bytes are sent through, with bounded memory and no thread."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn, final

from composerlite.errors import CheckpointError

__all__ = ["ToolPipe"]

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

    def end(self) -> Iterator[bytes]:
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
        """Give everything back, when no thread exchanges bytes any more; twice is fine."""
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
