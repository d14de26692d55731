"""Runs that are killed, and started again with the same command, end as if nothing had happened."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
import small_run
import torch
from relaunch import run
from small_run import BATCHES, CELLS, Cell, differences


def launch(folder: Path, cell: Cell, interval: str, die: str = "", *, fork: bool = True) -> tuple[int, dict[int, str]]:
    """Run the program once: its exit code, and what it said of each batch."""
    arguments = [str(folder), str(cell.workers), str(cell.accumulation), cell.extra, interval, die]
    ended = run(small_run.main, arguments, {}, fork=fork)
    return ended.code, ended.said


def check_chain(folder: Path, cell: Cell, interval: str, deaths: list[str]) -> None:
    """Kill the run at each of ``deaths`` in turn, let it end, and compare with one that was never killed."""
    code, whole = launch(folder / "whole", cell, interval)
    assert code == 0
    assert sorted(whole) == list(range(1, BATCHES + 1))
    for die in deaths:
        code, said = launch(folder / "killed", cell, interval, die)
        assert code == -signal.SIGKILL, f"the run was to die at {die}"
        assert said.items() <= whole.items(), f"before {die} it trained on other samples, or with other losses"
    code, said = launch(folder / "killed", cell, interval, fork=False)
    assert code == 0
    assert said.items() <= whole.items()
    final = [torch.load(folder / run / "final.pt", weights_only=True) for run in ("whole", "killed")]
    assert differences(*final) == []
    code, said = launch(folder / "killed", cell, interval)
    assert (code, said) == (0, {}), "a finished run that is started again does nothing"


@pytest.mark.parametrize(
    "cell", [pytest.param(Cell(0, 4, "dropout"), marks=pytest.mark.soak), Cell(2, 1, "ema")], ids=str
)
def test_a_chain_of_five_kills_changes_nothing(cell: Cell, tmp_path: Path) -> None:
    """SIGKILL in a batch, at an epoch's edge, before and after a save: five times, and the result is the same."""
    deaths = ["after_backward:5", "batch_end:14", "epoch_end:20", "batch_checkpoint:35", "before_forward:50"]
    check_chain(tmp_path, cell, "7ba", deaths)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_random_chains_of_kills_change_nothing(cell: Cell, tmp_path: Path) -> None:
    """Five kills at random events of random batches, for every cell."""
    chooser = random.Random(str(cell))
    events = ["before_dataloader", "batch_start", "after_loss", "after_train_batch", "batch_end", "batch_checkpoint"]
    batches = sorted(chooser.sample(range(4, BATCHES - 2), 5))
    check_chain(tmp_path, cell, "3ba", [f"{chooser.choice(events)}:{batch}" for batch in batches])
