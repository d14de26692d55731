"""``save_on_exception``: a run that fails leaves what it had, and nobody goes on from that unasked."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tiny_training import Record, trainer

from composerlite import Callback, Logger, State
from composerlite.checkpoint import Catalog
from composerlite.errors import ConfigError


class FailAt(Callback):
    """Raises in the forward pass of a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def after_forward(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.batch:
            raise ValueError("no such label")


def test_a_failed_run_leaves_a_checkpoint_marked_as_such(tmp_path: Path) -> None:
    """The error says where; the weights are those of the last step; ``latest`` and the list of checkpoints are as
    before; retention does not count it."""
    with trainer(
        save_folder=tmp_path,
        save_interval="2ba",
        save_num_checkpoints_to_keep=1,
        save_on_exception=True,
        callbacks=[FailAt(5)],
    ) as run:
        with pytest.raises(ValueError, match="no such label") as error:
            run.fit()
        expected = {name: tensor.clone() for name, tensor in run.state.model.state_dict().items()}
    assert run.saved_checkpoints == [f"{tmp_path}/ep0-ba4-rank0.pt"]
    path = tmp_path / "crash-ep1-ba5-rank0.pt"
    assert f"The state of training was saved as {str(path)!r}." in error.value.__notes__
    found = torch.load(path, weights_only=True)["state"]["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert {m.name: m.kind for m in Catalog(tmp_path).manifests()} == {
        "ep0-ba4-rank0.pt": "monolithic",
        "crash-ep1-ba5-rank0.pt": "crash",
    }
    assert (tmp_path / "latest-rank0.pt").resolve().name == "ep0-ba4-rank0.pt"


def test_autoresume_passes_over_it_and_load_path_takes_it(tmp_path: Path) -> None:
    """Where it is all there is, the run begins anew."""
    with (
        trainer(save_folder=tmp_path, save_on_exception=True, autoresume=True, callbacks=[FailAt(3)]) as run,
        pytest.raises(ValueError, match="no such label"),
    ):
        run.fit()
    (manifest,) = Catalog(tmp_path).manifests()
    again, beyond = Record(), Record()
    with trainer(save_folder=tmp_path, autoresume=True, callbacks=[again], max_duration="2ba") as run:
        run.fit()
    assert again.batches == [1, 2]
    with trainer(load_path=tmp_path / manifest.name, callbacks=[beyond], max_duration="5ba") as run:
        run.fit()
    assert beyond.batches == [4, 5]


def test_a_disk_that_is_gone_does_not_hide_the_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What training failed with is raised; that nothing could be saved is a note, and in the log."""

    class Remove(FailAt):
        def batch_end(self, state: State, logger: Logger) -> None:
            folder = tmp_path / "saves"
            folder.rename(tmp_path / "gone")
            folder.write_text("a file in its place")

    with caplog.at_level(logging.ERROR):
        run = trainer(save_folder=tmp_path / "saves", save_on_exception=True, callbacks=[Remove(1)])
        with pytest.raises(ValueError, match="no such label") as error:
            run.fit()
        run.close()
    assert any("could not be saved" in note for note in error.value.__notes__)
    assert "could not save the state of training" in caplog.text


def test_several_ranks_are_told_that_they_cannot(tmp_path: Path) -> None:
    """Before training."""
    with pytest.raises(ConfigError, match="save_on_exception=True with several ranks"):
        trainer(save_folder=tmp_path, save_on_exception=True, parallelism_config={"fsdp": {}})
