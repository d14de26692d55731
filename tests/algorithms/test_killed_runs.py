"""A run with many algorithms at once, killed and started again."""

from __future__ import annotations

import signal
from pathlib import Path

import killed_run
import pytest
from forked import run_forked


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the run that nobody kills ends with."""
    folder = tmp_path_factory.mktemp("whole")
    done = run_forked(killed_run.main, str(folder), "0", cwd=folder)
    assert done.returncode == 0, done.stderr
    begun, digest = (folder / "end.txt").read_text().split()
    assert begun == "0"
    return digest


@pytest.mark.parametrize("kill_in", [8, 14, 23])
def test_a_killed_run_ends_as_the_one_that_was_not(kill_in: int, expected: str, tmp_path: Path) -> None:
    """In the first or the second pass of SAM, while layers are frozen and blocks left out: to the last bit."""
    killed = run_forked(killed_run.main, str(tmp_path), str(kill_in), cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "end.txt").exists()
    done = run_forked(killed_run.main, str(tmp_path), "0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    begun, digest = (tmp_path / "end.txt").read_text().split()
    assert int(begun) > 0
    assert digest == expected
