"""Running a training program again and again, as a scheduler does with a job that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from composerlite.testing.cluster import quick_processes

SECONDS = 240


class Ended(NamedTuple):
    """A process that has ended: its exit code, what it said of each batch, its log."""

    code: int
    said: dict[int, str]
    log: str


def run(
    main: Callable[..., None], arguments: list[str], folder: Path, environment: Mapping[str, str], *, fork: bool
) -> Ended:
    """Run ``main``, which prints a line for each batch, in a process that ends well or by SIGKILL.

    Args:
        main: of a module that is a program.
        arguments: of it.
        folder: for what it prints.
        environment: variables to add.
        fork: start quickly, from a process that has imported everything; else a new interpreter.
    """
    out, err = folder / "out", folder / "err"
    if fork:
        process = quick_processes().Process(target=_child, args=(main, arguments, dict(environment), out, err))
        process.start()
        process.join(SECONDS)
        code = process.exitcode
        process.kill()
        process.join()
    else:
        with out.open("w") as said, err.open("w") as log:
            command = [sys.executable, str(sys.modules[main.__module__].__file__), *arguments]
            code = subprocess.run(
                command, env={**os.environ, **environment}, stdout=said, stderr=log, timeout=SECONDS, check=False
            ).returncode
    assert code in (0, -signal.SIGKILL), err.read_text()
    lines = [line.split(" ", 1) for line in out.read_text().splitlines()]
    return Ended(code, {int(batch): rest for batch, rest in lines}, err.read_text())


def _child(main: Callable[..., None], arguments: list[str], environment: dict[str, str], out: Path, err: Path) -> None:
    os.environ.update(environment)
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    main(*arguments)
    sys.stdout.flush()
