"""Running a training program again and again, as a scheduler does with a job that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from forked import run_forked

SECONDS = 240


class Ended(NamedTuple):
    """A process that has ended: its exit code, what it said of each batch, its log."""

    code: int
    said: dict[int, str]
    log: str


def run(main: Callable[..., None], arguments: list[str], environment: Mapping[str, str], *, fork: bool) -> Ended:
    """Run ``main``, which prints a line for each batch, in a process that ends well or by SIGKILL.

    Args:
        main: of a module that is a program.
        arguments: of it.
        environment: variables to add.
        fork: start quickly, from a process that has imported everything; else a new interpreter.
    """
    if fork:
        done = run_forked(main, *arguments, cwd=Path.cwd(), environment=environment)
    else:
        command = [sys.executable, str(sys.modules[main.__module__].__file__), *arguments]
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    return Ended(done.returncode, {int(batch): rest for batch, rest in lines}, done.stderr)
