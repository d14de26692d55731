"""A damaged checkpoint costs the steps since the one before it, and nothing else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from small_run import BATCHES, Cell, Trace, build, differences, final_state


@pytest.mark.parametrize("damaged", [1, 3], ids=["newest", "three-newest"])
def test_a_run_with_damaged_checkpoints_goes_on_from_the_one_before(
    damaged: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says which were damaged, sets them aside, writes those names again, and ends as if nothing had happened."""
    cell, folder = Cell(), tmp_path / "run"
    arguments = {"save_folder": folder, "save_interval": "10ba", "run_name": "damaged", "autoresume": True}
    trace = Trace()
    with build(cell, [trace], save_folder=tmp_path / "whole", run_name="damaged") as trainer:
        trainer.fit()
        final = final_state(trainer)
    with build(cell, train_subset_num_batches=20, **arguments) as trainer:
        trainer.fit(duration="45ba")
        saved = trainer.saved_checkpoints
    assert [Path(path).name for path in saved][-1] == "ep2-ba45-rank0.pt"
    for path in saved[-damaged:]:
        data = bytearray(Path(path).read_bytes())
        data[len(data) // 2] ^= 1
        Path(path).write_bytes(data)

    rest = Trace()
    with caplog.at_level(logging.WARNING), build(cell, [rest], **arguments) as trainer:
        assert int(trainer.state.timestamp.batch) == [45, 40, 30, 20][damaged]
        trainer.fit()
        assert rest.steps == trace.steps[-len(rest.steps) :]
        assert differences(final, final_state(trainer)) == []
        assert int(trainer.state.timestamp.batch) == BATCHES
    assert caplog.text.count("differ from the saved bytes") == damaged
    assert len(list(folder.glob("*.damaged"))) == damaged


def test_a_run_whose_time_was_reset_goes_on_from_its_newest_training(tmp_path: Path) -> None:
    """After ``fit(reset_time=True)`` the newest checkpoint has a smaller batch count than older ones."""
    arguments = {"save_folder": tmp_path, "save_interval": "2ba", "run_name": "reset", "autoresume": True}
    with build(Cell(), save_overwrite=True, **arguments) as trainer:
        trainer.fit(duration="9ba")
        trainer.fit(duration="5ba", reset_time=True)
    with build(Cell(), save_overwrite=True, **arguments) as trainer:
        assert int(trainer.state.timestamp.batch) == 5
