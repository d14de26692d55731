"""What savers put into checkpoints, several at once too, and what other runs begin from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parts import tree
from tiny_training import Classifier, Record, saved_batches, train, trainer

from composerlite import Event
from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import Catalog, load_checkpoint, read_checkpoint
from composerlite.errors import CheckpointExistsError, ConfigError, IncompatibleCheckpointError


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_several_savers_work_side_by_side(tmp_path: Path) -> None:
    """Each with its own folder, interval, contents and number of checkpoints to keep."""
    full = CheckpointSaver(tmp_path / "full", save_interval="2ep", num_checkpoints_to_keep=1)
    weights = CheckpointSaver(tmp_path / "weights", weights_only=True)
    run = train(callbacks=[full, weights])
    assert saved_batches(tmp_path / "full") == [12]
    assert saved_batches(tmp_path / "weights") == [4, 8, 12]
    kinds = {folder: Catalog(tmp_path / folder).manifests()[-1].kind for folder in ("full", "weights")}
    assert kinds == {"full": "monolithic", "weights": "weights"}
    assert run.saved_checkpoints == full.saved_checkpoints == [str(tmp_path / "full" / "ep3-ba12-rank0.pt")]


def test_savers_of_one_folder_are_told_apart_by_their_names(tmp_path: Path) -> None:
    """Neither deletes what the other keeps, and each has its link."""
    often = CheckpointSaver(
        tmp_path, "often-{batch}.pt", latest_filename="often.pt", save_interval="1ba", num_checkpoints_to_keep=2
    )
    rarely = CheckpointSaver(
        tmp_path, "rarely-{batch}.pt", latest_filename="rarely.pt", save_interval="1ep", num_checkpoints_to_keep=2
    )
    train(callbacks=[often, rarely])
    names = [name for name in tree(tmp_path) if not name.startswith(".")]
    assert names == ["often-11.pt", "often-12.pt", "often.pt", "rarely-12.pt", "rarely-8.pt", "rarely.pt"]


def test_savers_keep_separate_states(tmp_path: Path) -> None:
    """Each remembers its own last save; after a resume each goes on where it was."""

    def savers() -> list[CheckpointSaver]:
        return [
            CheckpointSaver(tmp_path / "a", save_interval="1ba"),
            CheckpointSaver(tmp_path / "b", save_interval="3ba"),
        ]

    train(callbacks=savers(), max_duration="7ba")
    checkpoint = tmp_path / "a" / "ep1-ba5-rank0.pt"
    states = read_checkpoint(checkpoint)["state"]["callbacks"]
    assert states == {
        "CheckpointSaver": {"last_checkpoint_batch": 5},
        "CheckpointSaver:1": {"last_checkpoint_batch": 3},
    }
    resumed = savers()
    trainer(callbacks=resumed, load_path=checkpoint).close()
    assert [saver.last_checkpoint_batch for saver in resumed] == [5, 3]


def test_ignored_keys_are_not_saved(tmp_path: Path) -> None:
    """The file is smaller, the manifest says what it lacks, and the training is not harmed."""
    run = train(save_folder=tmp_path, save_ignore_keys=["state/optimizers/*", "rng"])
    contents = read_checkpoint(run.saved_checkpoints[-1])
    assert "optimizers" not in contents["state"]
    assert "rng" not in contents
    assert Catalog(tmp_path).manifests()[-1].left_out == ("state/optimizers/*", "rng")
    assert len(run.state.optimizers[0].state) == 4


def test_a_checkpoint_without_an_optimizer_is_gone_on_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a fresh one, and a warning."""
    train(save_folder=tmp_path, save_ignore_keys=["state/optimizers/*"], max_duration="1ep")
    record = Record()
    train(callbacks=[record], load_path=tmp_path / "latest-rank0.pt")
    assert record.batches == list(range(5, 13))
    assert "has no optimizer state: the optimizer starts fresh" in caplog.text


# ── fine-tuning ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("how", [{"save_weights_only": True}, {"load_weights_only": True}])
def test_another_training_begins_from_the_weights(tmp_path: Path, how: dict[str, Any]) -> None:
    """Saved alone or loaded alone: time, optimizer and names of the other run do not come along."""
    saving = {name: value for name, value in how.items() if name.startswith("save")}
    loading = {name: value for name, value in how.items() if name.startswith("load")}
    first = train(save_folder=tmp_path, **saving)
    run = trainer(run_name="tuned", load_path=tmp_path / "latest-rank0.pt", **loading)
    with run:
        assert equal(run.state.model.state_dict(), first.state.model.state_dict())
        assert int(run.state.timestamp.batch) == 0
        assert (run.state.run_name, len(run.state.optimizers[0].state)) == ("tuned", 0)
        run.fit()


def test_another_head_is_trained_on_the_same_body(tmp_path: Path) -> None:
    """The old head is left out by its keys; strictness is given up for what is missing then."""
    first = train(save_folder=tmp_path)
    arguments: dict[str, Any] = {"load_path": tmp_path / "latest-rank0.pt", "load_weights_only": True}
    with pytest.raises(IncompatibleCheckpointError, match=r"head\.weight: \(2, 3\) in the checkpoint, \(5, 3\) in the"):
        trainer(model=Classifier(classes=5), **arguments)
    model = Classifier(classes=5)
    run = trainer(model=model, load_ignore_keys=["state/model/head.*"], load_strict_model_weights=False, **arguments)
    run.close()
    assert torch.equal(model.body.weight, first.state.model.get_parameter("body.weight"))


def test_strictness_holds_for_full_checkpoints_too(tmp_path: Path) -> None:
    """A model with one more layer is refused, unless it was asked for."""
    train(save_folder=tmp_path)

    def larger() -> Classifier:
        model = Classifier()
        model.add_module("extra", torch.nn.Linear(1, 1))
        return model

    arguments: dict[str, Any] = {
        "load_path": tmp_path / "latest-rank0.pt",
        "load_ignore_keys": ["state/optimizers"],
        "max_duration": "4ep",
    }
    with pytest.raises(
        IncompatibleCheckpointError, match=r"missing in the checkpoint \(2\): extra\.weight; extra\.bias"
    ):
        trainer(model=larger(), **arguments)
    with trainer(model=larger(), load_strict_model_weights=False, **arguments) as run:
        assert int(run.state.timestamp.batch) == 12


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_checkpoint_can_be_saved_at_any_time(tmp_path: Path) -> None:
    """To a path of one's own, or where the saver saves."""
    with trainer(save_folder=tmp_path / "folder", save_interval="100ep") as run:
        run.fit(duration="2ba")
        path = run.save_checkpoint(f"{tmp_path}/{{run_name}}-{{batch}}.pt")
        assert path == f"{tmp_path}/run-2.pt"
        assert set(read_checkpoint(run.save_checkpoint(f"{tmp_path}/weights.pt", weights_only=True))) == {"state"}
        run.fit(duration="1ba")
        assert run.saved_checkpoints[-1] == str(tmp_path / "folder" / "ep0-ba3-rank0.pt")
    with trainer() as fresh:
        load_checkpoint(path, fresh.state)
        assert int(fresh.state.timestamp.batch) == 2


def test_saving_to_the_folder_by_hand_follows_the_saver(tmp_path: Path) -> None:
    """Its names, its link, its retention; without a saver it is an error that says what to pass."""
    with trainer(save_folder=tmp_path, save_interval=lambda state, event: False) as run:
        run.fit(duration="2ba")
        path = run.save_checkpoint_to_save_folder()
    assert path == run.saved_checkpoints[-1] == str(tmp_path / "ep0-ba2-rank0.pt")
    assert str((tmp_path / "latest-rank0.pt").readlink()) == "ep0-ba2-rank0.pt"
    with trainer() as run, pytest.raises(ConfigError, match="save_folder"):
        run.save_checkpoint_to_save_folder()


def test_a_saver_may_save_at_a_moment_of_ones_own(tmp_path: Path) -> None:
    """A function of state and event; it is asked at checkpoint events."""
    asked: set[Event] = set()

    def when(state: Any, event: Event) -> bool:
        asked.add(event)
        return event is Event.EPOCH_CHECKPOINT and int(state.timestamp.epoch) > 1

    train(save_folder=tmp_path, save_interval=when)
    assert saved_batches(tmp_path) == [8, 12]
    assert asked == {Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT}


def test_a_second_training_from_zero_needs_leave_to_overwrite(tmp_path: Path) -> None:
    """``reset_time`` in one folder: refused like any other start over, and done when allowed."""
    with trainer(save_folder=tmp_path, max_duration="1ep") as run:
        run.fit()
        with pytest.raises(CheckpointExistsError):
            run.fit(reset_time=True)
    with trainer(save_folder=tmp_path, max_duration="1ep", save_overwrite=True) as run:
        run.fit()
        run.fit(reset_time=True)
        assert run.saved_checkpoints == [str(tmp_path / "ep1-ba4-rank0.pt")]
    assert saved_batches(tmp_path) == [4]
