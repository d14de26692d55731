"""A run that was killed, for reports."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from recorded_run import launch


@pytest.fixture(scope="session")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that was killed after batches 6 and 13 and then finished. Read only."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    assert [launch(folder, die) for die in ("6", "13", "0")] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    return folder


@pytest.fixture
def run_copy(killed_run: Path, tmp_path: Path) -> Path:
    """Copy of ``killed_run`` that a test may change."""
    return Path(shutil.copytree(killed_run, tmp_path / "run", symlinks=True))
