"""The tests of checkpoints, resumes and the trainer with other releases of torch and Python (``make compat``).

Each combination has an environment of its own in ``.compat``. pip takes torch from where it is configured to, or from
``TORCH_INDEX``, such as https://download.pytorch.org/whl/cpu, where builds for the CPU are:
https://pytorch.org/get-started/locally/. What cannot be installed here is skipped, with a line that says why.

The tests of :data:`LEFT_OUT` are not run, unless ``COMPAT_ALL`` is set. What has passed is not run again on the same
commit: a run that is interrupted continues where it was.

Usage: ``python benchmarks/compat.py [PYTHON:TORCH …]``, such as ``3.12:2.11``; all of them by default.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PYTHONS, TORCHES = ("3.11", "3.12", "3.13"), ("2.11", "2.12", "2.13")
TESTS = ("tests/checkpoint", "tests/resume", "tests/trainer", "tests/test_torch_compat.py")
LEFT_OUT = (
    *("buckets", "copies", "files_of_others", "hostile_files", "lease", "leases_of_runs", "replacing_matrix", "savers"),
    *("attempts", "bucket_kill", "evaluation_generators", "interrupted_evaluations", "memory_generation"),
    *("preempted_ranks", "preemption", "stopped_runs"),
)
"""Tests that take two thirds of the time: matrices of folders, buckets, disks and interruptions, which ask no more of
torch and Python than the others do. ``make test`` runs them."""
NEEDED = ".[tests]"
INSTALL_SECONDS, TEST_SECONDS = 3600, 7200


class Skipped(Exception):  # noqa: N818 - it is no error
    """A combination cannot be installed here; says why."""


class Combination(NamedTuple):
    """A release of Python and one of torch."""

    python: str
    torch: str

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch}"

    @property
    def folder(self) -> Path:
        """Its environment."""
        return ROOT / ".compat" / f"py{self.python}-torch{self.torch}"


def parse(text: str) -> Combination:
    """Return the combination that is called ``text``."""
    python, _, torch = text.partition(":")
    if python not in PYTHONS or torch not in TORCHES:
        raise SystemExit(f"{text!r} is none of {', '.join(f'{p}:{t}' for p in PYTHONS for t in TORCHES)}.")
    return Combination(python, torch)


def interpreter(version: str) -> list[str]:
    """Return the command of a Python of that version which can make environments.

    Raises:
        Skipped: there is none.
    """
    uv = shutil.which("uv")
    find = [uv or "", "python", "find", version]
    found = [subprocess.run(find, capture_output=True, text=True, check=False)] if uv else []
    candidates = [sys.executable, f"python{version}", *(one.stdout.strip() for one in found if not one.returncode)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    probe = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        if shutil.which(candidate) is None:
            continue
        done = subprocess.run([candidate, "-c", probe], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return [candidate]
    raise Skipped(f"there is no Python {version} on this machine (python{version}, uv, pyenv)")


def install(one: Combination) -> Path:
    """Make the environment, unless it is there; its Python.

    Raises:
        Skipped: it cannot be made here.
    """
    python, ready = one.folder / "bin" / "python", one.folder / ".installed"
    if ready.exists():
        return python
    command = interpreter(one.python)
    shutil.rmtree(one.folder, ignore_errors=True)
    run([*command, "-m", "venv", str(one.folder)], INSTALL_SECONDS)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--only-binary=torch"]
    index = os.environ.get("TORCH_INDEX")
    run([*pip, *(["--index-url", index] if index else []), f"torch=={one.torch}.*"], INSTALL_SECONDS)
    # What is there stays: no dependency replaces the torch that is tested.
    pinned = one.folder / "constraints.txt"
    pinned.write_text(f"torch=={one.torch}.*\n")
    run([*pip, "-c", str(pinned), "-e", NEEDED], INSTALL_SECONDS)
    ready.touch()
    return python


def run(command: Sequence[str], seconds: float) -> None:
    """Run a part of an installation.

    Raises:
        Skipped: it fails; says its last line.
    """
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise Skipped(f"{' '.join(command[2:5])} is not done after {seconds:.0f} s") from None
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise Skipped(lines[-1] if lines else f"{command[0]} ended with {done.returncode}")


def test(one: Combination, python: Path, state: str) -> str:
    """Run the tests, unless they have passed in this ``state`` of the project; what became of them."""
    passed = one.folder / ".passed"
    if state and passed.exists() and passed.read_text() == state:
        return "passed before, on the same commit"
    options = ["-q", "-n", "2", "--dist", "worksteal", "-m", "not soak", "-p", "no:cacheprovider"]
    if not os.environ.get("COMPAT_ALL"):
        options += [f"--ignore-glob=tests/*/test_{name}.py" for name in LEFT_OUT]
    try:
        command = [str(python), "-m", "pytest", *options, *TESTS]
        code = subprocess.run(command, cwd=ROOT, timeout=TEST_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"failed, not done after {TEST_SECONDS} s"
    if code:
        return f"failed, pytest ended with {code}"
    passed.write_text(state)
    return "passed"


def state_of_project() -> str:
    """Return the commit and how much is tested; nothing where files differ from the commit."""
    git = [subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False) for words in _GIT]
    if any(done.returncode for done in git) or git[0].stdout:
        return ""
    return f"{git[1].stdout.strip()} {os.environ.get('COMPAT_ALL', '')}"


_GIT = (["status", "--porcelain"], ["rev-parse", "HEAD"])


def main(names: Sequence[str]) -> int:
    """Test what was asked for; 1 where a test fails."""
    wanted = [parse(name) for name in names] or [Combination(p, t) for p in PYTHONS for t in TORCHES]
    state, results = state_of_project(), list[str]()
    for one in wanted:
        try:
            results.append(f"{one}: {test(one, install(one), state)}")
        except Skipped as e:
            results.append(f"{one}: skipped, {e}")
        print(results[-1], flush=True)
    print("", *results, sep="\n", flush=True)
    return int(any(": failed" in result for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
