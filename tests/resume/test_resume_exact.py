"""A resumed run is bit for bit the run that was not interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_run import BATCHES, CELLS, Cell, Trace, build, differences, final_state

from composerlite import Event, State


def uninterrupted(cell: Cell, folder: Path, batches: list[int]) -> tuple[Trace, dict[str, Any]]:
    """Train to the end, saving after each of ``batches``."""

    def interval(state: State, event: Event) -> bool:
        return event is Event.BATCH_CHECKPOINT and int(state.timestamp.batch) in batches

    trace = Trace()
    with build(cell, [trace], save_folder=folder, save_interval=interval, run_name="whole") as trainer:
        trainer.fit()
        return trace, final_state(trainer)


def resumed(cell: Cell, checkpoint: Path) -> tuple[Trace, dict[str, Any]]:
    """Load a checkpoint into a new trainer and train to the end."""
    trace = Trace()
    with build(cell, [trace], load_path=checkpoint, run_name="whole") as trainer:
        trainer.fit()
        return trace, final_state(trainer)


def check_every(cell: Cell, folder: Path, batches: list[int]) -> None:
    """Resume after each of ``batches`` and compare everything with the uninterrupted run."""
    trace, final = uninterrupted(cell, folder, batches)
    assert [step[0] for step in trace.steps] == list(range(1, BATCHES + 1))
    checkpoints = {int(path.name.split("ba")[1].split("-")[0]): path for path in folder.glob("ep*.pt")}
    for batch in batches:
        rest, end = resumed(cell, checkpoints[batch])
        assert rest.steps == trace.steps[batch:], f"order of samples or losses differ after a resume at batch {batch}"
        assert differences(final, end) == [], f"the end differs after a resume at batch {batch}"


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_resume_is_exact_at_a_sample_of_batches(cell: Cell, tmp_path: Path) -> None:
    """Weights, optimizer, losses and order of samples are equal: first batch, mid-epoch, an epoch's edge, the last."""
    batches = [1, 27, 40, 59] if cell.workers == 0 else [33, 40]
    check_every(cell, tmp_path, batches)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_resume_is_exact_at_every_batch(cell: Cell, tmp_path: Path) -> None:
    """The same, for an interruption after every one of the 60 batches."""
    check_every(cell, tmp_path, list(range(1, BATCHES)))
