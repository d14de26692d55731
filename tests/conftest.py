"""What holds for every test: fixed seeds, nothing left behind for the next test, counts said at the end."""

from __future__ import annotations

import importlib.util
import multiprocessing.util
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# One thread per torch process, as in make test: sums are rounded otherwise with two, and a fork of a process whose
# threads have worked waits for them for ever. The environment is that of all programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from composerlite.core import seed_all
from composerlite.storage import leave_by
from composerlite.testing.cluster import quick_processes

# Real services on loopback, started for the tests that name them.
pytest_plugins = [
    "storage.servers.gcs",
    "storage.servers.oci",
    "storage.servers.seaweedfs",
    "storage.servers.sftp",
]

# What forked programs of the tests import that others need not.
quick_processes(
    "click.testing",
    "composerlite.callbacks.checkpoint_saver",
    "composerlite.callbacks.load_checkpoint",
    "composerlite.callbacks.preemption",
    "composerlite.cli.app",
    "composerlite.config.build",
    "composerlite.trainer.resuming",
    *(["composerlite.storage.stores.s3"] if importlib.util.find_spec("boto3") else []),
    "hypothesis.stateful",
    "sklearn.datasets",
)

# The same examples in every run, and no deadline: the machine may be busy.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("repeatable")

# Set by libraries on first use, for themselves: pytest, OpenMP through scikit-learn, torch.compile.
_VARIABLES_OF_OTHERS = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TRITON_")


def _process_settings() -> dict[str, Any]:
    """What belongs to the whole process and is not a test's to change."""
    return {
        "the current directory": Path.cwd(),
        "the environment": {k: v for k, v in os.environ.items() if not k.startswith(_VARIABLES_OF_OTHERS)},
        "torch's default dtype": torch.get_default_dtype(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's grad mode": torch.is_grad_enabled(),
        "the process group, which dist.finalize_dist() destroys": torch.distributed.is_initialized(),
    }


def _unfinished(known: set[threading.Thread]) -> list[str]:
    """The names of the non-daemon threads that run on. One that is ending anyway gets a moment to do so."""
    new = [thread for thread in threading.enumerate() if thread not in known and not thread.daemon]
    for thread in new:
        thread.join(timeout=1)
    return [thread.name for thread in new if thread.is_alive()]


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give temporary files a folder of the session, of killed processes and of other libraries too, and remove it."""
    multiprocessing.util.get_temp_dir()  # its own is removed when the process ends, and is to be there until then
    before, folder = os.environ.get("TMPDIR"), tmp_path_factory.mktemp("temporary")
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    yield
    tempfile.tempdir = None
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """Seed the generators; afterwards fail a test that changed the process or left a thread running."""
    before, threads = _process_settings(), set(threading.enumerate())
    seed_all(17)
    yield
    leave_by()  # a run that was preempted in this process, which lives on
    if names := _unfinished(threads):
        pytest.fail(f"the test left threads running: {', '.join(names)}")
    after = _process_settings()
    for what, value in before.items():
        if after[what] != value:
            pytest.fail(f"the test changed {what}: {_difference(value, after[what])}")


def _difference(before: Any, after: Any) -> str:
    if not isinstance(before, dict):
        return f"{before} → {after}"
    changed = sorted(k for k in {*before, *after} if before.get(k) != after.get(k))
    return ", ".join(f"{k}: {before.get(k)} → {after.get(k)}" for k in changed)


@pytest.fixture
def restore_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests of ``deterministic_mode``: torch and the environment are as before afterwards."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.benchmark, cudnn.deterministic
    yield
    torch.use_deterministic_algorithms(before[0])
    cudnn.benchmark, cudnn.deterministic = before[1:]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small disk in memory: ``mount('size=256k')``. Skips where this process may not mount."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount program")
        if done.returncode != 0:
            pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


_ROOT = Path(__file__).parents[1]
_CHECKOUT = pytest.StashKey[set[str]]()
# Environments and caches of tools. All else, files that git ignores included, would be seen by other tests.
_NOT_OF_TESTS = shutil.ignore_patterns(
    ".git", ".venv", ".compat", ".*cache", ".hypothesis", "__pycache__", "*.egg-info"
)


def _checkout() -> set[str]:
    """The files and folders of the repository."""
    found: set[str] = set()
    for folder, folders, files in os.walk(_ROOT):
        ignored = _NOT_OF_TESTS(folder, [*folders, *files])
        folders[:] = [name for name in folders if name not in ignored]
        found.update(os.path.relpath(Path(folder, name), _ROOT) for name in {*folders, *files} - ignored)
    return found


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember the files of the repository: once, where pytest runs in several processes."""
    if not hasattr(session.config, "workerinput"):
        session.config.stash[_CHECKOUT] = _checkout()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tests that share a folder of the repository meet there: fail where one was written to."""
    if (before := session.config.stash.get(_CHECKOUT, None)) is not None and (new := _checkout() - before):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nERROR: the tests wrote into the repository and not into their own folders: {sorted(new)}")  # noqa: T201


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded as ``count``; xdist brings it from its workers."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    properties = [item for report in reports for item in getattr(report, "user_properties", [])]
    if counts := sorted({str(value) for name, value in properties if name == "count"}):
        terminalreporter.section("counts")
        for line in counts:
            terminalreporter.write_line(line)
