"""Runs that would write the same files, and a folder that vanishes or goes read-only under a run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from forked import started
from tiny_training import saved_batches, train, trainer

from composerlite import Callback, Logger, State
from composerlite.checkpoint import CheckpointManager
from composerlite.errors import RunInUseError, SaveError

"""The default of save_filename, which the lease of a run is named after."""


class Wait(Callback):
    """Tells the number of the process after five batches, and waits until it may go on."""

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == 5:
            sys.stdout.write(f"{os.getpid()}\n")
            sys.stdout.flush()
            sys.stdin.readline()


def train_and_wait(folder: str) -> None:
    """Train, and stand in the middle of it."""
    torch.set_num_threads(1)
    with trainer(callbacks=[Wait()], save_folder=folder, save_interval="1ba") as run:
        run.fit()


@contextmanager
def another_launch(folder: Path) -> Generator[int]:
    """A program that trains, and stands in the middle of it until the block ends: its process."""
    with started(train_and_wait, str(folder)) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        _, said = process.communicate("\n", timeout=240)
        assert process.returncode == 0, said


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """A launch waits for another launch for a second."""
    monkeypatch.setattr(CheckpointManager.take_leases, "__defaults__", (1.0,))


def test_two_launches_without_autoresume_do_not_write_the_same_files(tmp_path: Path) -> None:
    """The second is refused before its first batch, with the process and the machine of the first."""
    with (
        another_launch(tmp_path) as first,
        trainer(save_folder=tmp_path, save_interval="1ba", save_overwrite=True) as run,
    ):
        with pytest.raises(
            RunInUseError, match=rf"run 'run': .* is written by another process, process {first} on .*another launch"
        ):
            run.fit()
        assert int(run.state.timestamp.batch) == 0
    assert saved_batches(tmp_path) == list(range(1, 13))
    train(save_folder=tmp_path, save_interval="1ba", save_overwrite=True)


def test_two_runs_whose_files_have_the_same_names_do_not_share_a_folder(tmp_path: Path) -> None:
    """They are told before the first batch; with the run's name in the names of its files both train."""
    with another_launch(tmp_path) as first:
        with (
            trainer(run_name="other", save_folder=tmp_path, save_overwrite=True) as run,
            pytest.raises(
                RunInUseError,
                match=rf"process {first} on .*would replace these files.* its own save_folder or file names",
            ),
        ):
            run.fit()
        train(
            run_name="other",
            save_folder=tmp_path,
            save_filename="{run_name}-ep{epoch}.pt",
            save_latest_filename="{run_name}.pt",
        )
    assert len(saved_batches(tmp_path)) == 12 + 3


class At(Callback):
    """Does something at the end of one batch."""

    def __init__(self, batch: int, do: Callable[[], object]) -> None:
        self.batch, self.do = batch, do

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.batch:
            self.do()


def test_a_run_whose_folder_is_removed_ends_with_an_error(tmp_path: Path) -> None:
    """Nothing is saved to a new folder of that name."""
    folder = tmp_path / "saves"
    remove = At(6, lambda: shutil.rmtree(folder))
    with (
        trainer(callbacks=[remove], save_folder=folder, save_interval="1ba", save_async=False) as run,
        pytest.raises(SaveError, match="saves' was removed or replaced while this run saves to it"),
    ):
        run.fit()
    assert int(run.state.timestamp.batch) == 6
    assert not folder.exists()


# ── a disk without an inode ──────────────────────────────────────────────────────────────────────────────────────────
