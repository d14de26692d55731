"""Runs that were killed, for reports."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from recorded_run import launch


@pytest.fixture(scope="session")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed after batches 6 and 13, and then came to its end. Not to be changed."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    assert [launch(folder, die) for die in ("6", "13", "0")] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    return folder


@pytest.fixture
def run_copy(killed_run: Path, tmp_path: Path) -> Path:
    """The same, for one test to spoil."""
    return Path(shutil.copytree(killed_run, tmp_path / "run", symlinks=True))
