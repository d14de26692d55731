"""Deletions of older checkpoints that are slow, that fail, or that are cut off: the newest checkpoint is there."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked, started
from tiny_training import Record, saved_batches, train, trainer

from composerlite import Callback, Logger, State
from composerlite.checkpoint import Catalog


class Times(Callback):
    """Prints when the first and the last batch of the third epoch begin."""

    def batch_start(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) in (8, 11):
            sys.stdout.write(f"{time.monotonic()}\n")


def program(folder: str, how: str, failures: str = "0", save_async: str = "True") -> None:
    """Train four epochs, save each and keep one checkpoint, whose deletion takes ``how`` seconds, or fails."""

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.remove" and (name := Path(arguments[0]).name).startswith("ep") and ".json" not in name:
            os.write(2, b"deleting\n")
            if how == "fail":
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(arguments[0]))
            time.sleep(float(how))

    sys.addaudithook(look)
    torch.set_num_threads(1)
    torch.manual_seed(7)
    arguments: dict[str, Any] = {"save_num_checkpoints_to_keep": 1, "save_failure_limit": int(failures)}
    arguments["save_async"] = save_async == "True"
    with trainer(callbacks=[Times()], save_folder=folder, max_duration="4ep", **arguments) as run:
        run.fit()
        sys.stdout.write("ended\n")


def launch(folder: Path, how: str, failures: int = 0, *, save_async: bool = True) -> subprocess.CompletedProcess[str]:
    return run_forked(program, str(folder), how, str(failures), str(save_async), cwd=Path.cwd())


def test_a_slow_deletion_does_not_hold_up_training(tmp_path: Path) -> None:
    """The deletion takes four seconds; when training has ended only the newest checkpoint is there."""
    run = launch(tmp_path, "4")
    assert run.returncode == 0, run.stderr
    before, after = (float(line) for line in run.stdout.split()[:2])
    assert after - before < 2, "training waited until the first checkpoint was deleted"
    assert saved_batches(tmp_path) == [16]
    assert [path.name for path in tmp_path.glob("ep*")] == ["ep4-ba16-rank0.pt"]


def test_a_deletion_that_fails_is_an_error_and_the_newest_is_there(tmp_path: Path) -> None:
    """The system's error, with the file, as for a save that fails."""
    run = launch(tmp_path, "fail")
    assert run.returncode == 1
    assert "ended" not in run.stdout
    assert "OSError: [Errno 5] Input/output error" in run.stderr
    assert "ep1-ba4-rank0.pt" in run.stderr
    newest = saved_batches(tmp_path)[-1]
    assert newest >= 8
    assert f"ba{newest}-" in str((tmp_path / "latest-rank0.pt").readlink())


@pytest.mark.parametrize("save_async", [True, False])
def test_deletions_that_fail_are_counted_where_failures_are_tolerated(tmp_path: Path, save_async: bool) -> None:
    """A warning for each with the number in a row, and training ends; one too many in a row is an error. No save failed
    with it."""
    run = launch(tmp_path / "many", "fail", failures=10, save_async=save_async)
    assert run.returncode == 0, run.stderr
    assert "ended" in run.stdout
    for number in (1, 2, 3):
        assert f"a checkpoint could not be deleted ({number} in a row, save_failure_limit=10): OSError" in run.stderr
    assert "could not be saved" not in run.stderr
    assert saved_batches(tmp_path / "many") == [4, 8, 12, 16], "a file that cannot be removed is a checkpoint"
    run = launch(tmp_path / "few", "fail", failures=1, save_async=save_async)
    assert run.returncode == 1
    assert "a checkpoint could not be deleted (1 in a row, save_failure_limit=1)" in run.stderr


@pytest.mark.parametrize("number", [1, 2])
def test_a_kill_during_a_deletion_loses_nothing(number: int, tmp_path: Path) -> None:
    """The newest checkpoint is whole, ``latest`` leads to it, and the relaunch goes on from there to the same end."""
    with started(program, str(tmp_path), "60" if number == 1 else "1") as run:
        assert run.stderr is not None
        for _ in range(number):
            while "deleting" not in (line := run.stderr.readline()):
                assert line, "the run ended before it had deleted so many"
        run.send_signal(signal.SIGKILL)
        run.wait(60)
    kept = saved_batches(tmp_path)
    assert kept[-1] >= 4 * (number + 1)
    link = Catalog(tmp_path).manifest_of(str((tmp_path / "latest-rank0.pt").readlink()))
    assert link is not None
    assert link.batch == kept[-1]
    record = Record()
    how: dict[str, Any] = {"max_duration": "4ep", "save_num_checkpoints_to_keep": 1, "save_overwrite": True}
    with trainer(callbacks=[record], save_folder=tmp_path, autoresume=True, **how) as again:
        again.fit()
    assert record.batches == list(range(kept[-1] + 1, 17))
    assert saved_batches(tmp_path) == [16]
    torch.manual_seed(7)
    whole = train(save_folder=tmp_path / "whole", **how)
    mine, theirs = again.state.model.state_dict(), whole.state.model.state_dict()
    assert all(mine[key].equal(theirs[key]) for key in mine)
