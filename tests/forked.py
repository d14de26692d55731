"""Programs of the tests that start in a moment: each is forked from a process that has only imported things."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingUnixStreamServer
from typing import IO, Any, Self

from composerlite.testing.cluster import quick_processes

__all__ = ["Launcher", "run_forked", "started"]

SECONDS = 240.0
CLIENT = Path(__file__).with_name("forked_client.py")
_starting = threading.Lock()  # multiprocessing looks at all processes whenever it starts one


def run_forked(
    main: Callable[..., None],
    *arguments: str,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    timeout: float = SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run ``main(*arguments)`` in a process of its own, as :func:`subprocess.run` runs a program.

    ``environment``: variables to add.
    """
    command = [main.__name__, *arguments]
    with ExitStack() as stack:
        out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        files = [os.devnull, *(f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err))]
        process = _start(main, list(arguments), str(cwd), {**os.environ, **(environment or {})}, files)
        process.join(timeout)
        code = process.exitcode
        _end(process)
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout, _text(out), _text(err))
        return subprocess.CompletedProcess(command, code, _text(out), _text(err))


@contextmanager
def started(main: Callable[..., None], *arguments: str) -> Generator[subprocess.Popen[str]]:
    """A process that runs ``main(*arguments)``, with pipes to it as of :class:`subprocess.Popen`.

    Its number is not that of the command here, which ends with it and it with the command. None is left afterwards.
    """
    with (
        Launcher(main) as launcher,
        subprocess.Popen(
            [*launcher.command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


class Launcher:
    """Starts ``main(*arguments)`` for every command that asks for it: for tools and shells. A context manager.

    ``command`` is a small program (``forked_client.py``) that asks for a process, lends it its input and output, and
    ends as it does. A process that has not ended after ``timeout`` seconds is killed.
    """

    def __init__(self, main: Callable[..., None], timeout: float = SECONDS) -> None:
        self._main = main
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory(prefix="launcher-")

    def __enter__(self) -> Self:
        launch = self._launch

        class Handler(StreamRequestHandler):
            def handle(self) -> None:
                code = launch(json.loads(self.rfile.readline()), self.connection)
                with suppress(BrokenPipeError):  # the command was killed, and its process with it
                    self.wfile.write(f"{code}\n".encode())

        self._server = ThreadingUnixStreamServer(str(self._address), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join(60)
        self._server.server_close()
        self._folder.cleanup()

    @property
    def command(self) -> list[str]:
        """To be followed by arguments. The client runs isolated: it loads nothing but what it needs."""
        return [sys.executable, "-I", "-S", str(CLIENT), str(self._address)]

    @property
    def _address(self) -> Path:
        return Path(self._folder.name, "socket")

    def _launch(self, order: dict[str, Any], client: Any) -> int | None:
        """Start it, and wait until it or the command that asked for it has ended: its exit code."""
        files = [f"/proc/{order['process']}/fd/{number}" for number in range(3)]
        with _starting:
            process = _start(self._main, order["arguments"], order["folder"], order["environment"], files)
        wait([process.sentinel, client], self._timeout)
        with _starting:
            _end(process)
            return process.exitcode


def _start(
    main: Callable[..., None], arguments: list[str], folder: str, environment: dict[str, str], files: list[str]
) -> ForkServerProcess:
    process = quick_processes().Process(target=_live, args=(main, arguments, folder, environment, files))
    process.start()
    return process


def _end(process: ForkServerProcess) -> None:
    if process.is_alive():
        process.kill()
    process.join()


def _live(
    main: Callable[..., None], arguments: list[str], folder: str, environment: dict[str, str], files: list[str]
) -> None:
    """What the process does."""
    for descriptor, path in enumerate(files):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND if descriptor else os.O_RDONLY), descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - which multiprocessing has closed
    multiprocessing.set_start_method(None, force=True)  # as in any program, where it is not that of this process
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [main.__name__, *arguments]
    main(*arguments)
    sys.stdout.flush()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()
