"""Saves that go on behind training: when their errors surface, what waits for them, what is given up for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, ComposerModel, Logger, State, Trainer
from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import Catalog
from composerlite.errors import CheckpointError, CheckpointExistsError, ConfigError, SaveError
from composerlite.loggers import InMemoryLogger


class Model(ComposerModel):
    """One layer; ``width`` makes it large."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(1, width)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0]).mean(1, keepdim=True)

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return ((outputs - batch[1]) ** 2).mean()


def data() -> DataLoader[Any]:
    """Four batches."""
    inputs = torch.linspace(-1, 1, 16)[:, None]
    return DataLoader(TensorDataset(inputs, inputs), batch_size=4)


def trainer(folder: Path, *callbacks: Callback, width: int = 1, **arguments: Any) -> Trainer:
    """Twelve batches of a run that saves each."""
    how: dict[str, Any] = {"max_duration": "3ep", "save_interval": "1ba", "run_name": "run", "progress_bar": False}
    model = Model(width)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    how = {"train_dataloader": data(), "optimizers": adam, "seed": 1, **how, **arguments}
    return Trainer(model=model, callbacks=list(callbacks), save_folder=folder, **how)


def batches(folder: Path) -> list[int]:
    """The batch counts of the committed checkpoints, each verified."""
    manifests = Catalog(folder).manifests()
    for manifest in manifests:
        Catalog(folder).verify(manifest)
    return [manifest.batch for manifest in manifests]


class Count(Callback):
    """Batches that were trained on."""

    batches = 0

    def batch_end(self, state: State, logger: Logger) -> None:
        self.batches = int(state.timestamp.batch)


class InTheWay(Callback):
    """At one batch, puts folders where the files of some of the next checkpoints belong: those saves fail."""

    def __init__(self, folder: Path, at: int, *names: int) -> None:
        self.folder, self.at, self.names = folder, at, names

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.at:
            for batch in self.names:
                (self.folder / f"ba{batch}.pt").mkdir(parents=True)


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("save_async", [True, False])
def test_a_failed_save_ends_training_at_the_next_batch(tmp_path: Path, save_async: bool) -> None:
    """Not at the end of days of training; older checkpoints stay."""
    count = Count()
    run = trainer(
        tmp_path,
        InTheWay(tmp_path, 3, 5),
        count,
        save_filename="ba{batch}.pt",
        save_overwrite=True,
        save_async=save_async,
    )
    with run, pytest.raises(OSError, match=r"ba5\.pt"):
        run.fit()
    assert count.batches == (6 if save_async else 5)
    assert set(batches(tmp_path)) >= {1, 2, 3, 4}


def test_failures_are_tolerated_as_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two in a row with a warning each; a success in between counts from nought again."""
    logger = InMemoryLogger()
    run = trainer(
        tmp_path,
        InTheWay(tmp_path, 1, 3, 4, 6, 7),
        loggers=logger,
        save_filename="ba{batch}.pt",
        save_overwrite=True,
        save_failure_limit=2,
    )
    with run:
        run.fit()
        assert run.saved_checkpoints == [f"{tmp_path}/ba{batch}.pt" for batch in (1, 2, 5, 8, 9, 10, 11, 12)]
    warnings = [record.message for record in caplog.records if "could not be saved" in record.message]
    assert len(warnings) == 4
    assert "(2 in a row, save_failure_limit=2)" in warnings[1]
    assert "(1 in a row, save_failure_limit=2)" in warnings[2]
    assert [value for _, value in logger.data["checkpoint/failures_in_a_row"]] == [1, 2, 1, 2]


def test_a_tolerated_failure_of_a_save_that_is_asked_for_is_named(tmp_path: Path) -> None:
    """``save_checkpoint_to_save_folder`` has no path to return, and says why."""
    run = trainer(
        tmp_path,
        save_filename="ba{batch}.pt",
        save_interval=lambda *_: False,
        save_overwrite=True,
        save_failure_limit=2,
    )
    with run:
        run.fit()
        (tmp_path / "ba12.pt" / "of the user").mkdir(parents=True)
        with pytest.raises(CheckpointError, match=r"could not be saved: \w+: .*ba12\.pt"):
            run.save_checkpoint_to_save_folder()


@pytest.mark.parametrize(
    ("at", "names", "limit", "raised"),
    [(1, (4, 5, 6), 2, "ba6"), (3, (12,), 0, "ba12")],
    ids=["one-failure-too-many", "last-save"],
)
def test_failures_that_fit_raises(tmp_path: Path, at: int, names: tuple[int, ...], limit: int, raised: str) -> None:
    """The third failure in a row if two are tolerated, and a failure of the last save: a run must not end well."""
    how: dict[str, Any] = {"save_filename": "ba{batch}.pt", "save_overwrite": True, "save_failure_limit": limit}
    with (
        trainer(tmp_path, InTheWay(tmp_path, at, *names), **how) as run,
        pytest.raises(OSError, match=rf"{raised}\.pt"),
    ):
        run.fit()


def test_what_cannot_be_pickled_is_an_error_of_the_save(tmp_path: Path) -> None:
    """Found while the snapshot is taken, raised at once."""

    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"odd": lambda: 0}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise AssertionError("it was never saved")

    with trainer(tmp_path, Odd()) as run, pytest.raises(SaveError, match="state cannot be written"):
        run.fit()


def a_run_whose_last_save_fails(where: str) -> None:
    folder = Path(where)
    trainer(folder, InTheWay(folder, 3, 12), save_filename="ba{batch}.pt", save_overwrite=True, width=10).fit()


def test_a_program_whose_last_save_fails_does_not_exit_well(tmp_path: Path) -> None:
    """Its exit status is not 0, and it says which file."""
    done = run_forked(a_run_whose_last_save_fails, str(tmp_path), cwd=tmp_path)
    assert done.returncode != 0
    assert "ba12.pt" in done.stderr


def a_run_that_crashes_as_a_save_fails(where: str) -> None:
    """The crash comes when the save has failed, and before training looks at it."""
    folder = Path(where)

    class Crash(Callback):
        def before_forward(self, state: State, logger: Logger) -> None:
            for saver in state.callbacks if int(state.timestamp.batch) == 6 else ():
                if isinstance(saver, CheckpointSaver):
                    if saver.manager.pending is not None:
                        saver.manager.pending.join()
                    raise RuntimeError("crash")

    trainer(folder, InTheWay(folder, 3, 6), Crash(), save_filename="ba{batch}.pt", save_overwrite=True).fit()


def test_a_failed_save_is_named_when_a_crash_comes_before_it(tmp_path: Path) -> None:
    """Nobody asks for it any more: the log says what is missing, and why."""
    done = run_forked(a_run_that_crashes_as_a_save_fails, str(tmp_path), cwd=tmp_path)
    assert "RuntimeError: crash" in done.stderr
    assert re.search(r"could not save checkpoint '.*/ba6\.pt': IsADirectoryError", done.stderr), done.stderr


def test_close_waits_when_training_crashes(tmp_path: Path) -> None:
    """The save that was in flight is committed; the crash is what is raised."""

    class Crash(Callback):
        def batch_start(self, state: State, logger: Logger) -> None:
            if int(state.timestamp.batch) == 6:
                raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"), trainer(tmp_path, Crash(), width=500_000) as run:
        run.fit()
    assert batches(tmp_path) == [1, 2, 3, 4, 5, 6]


# ── paths ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_explicit_save_returns_a_path_that_exists(tmp_path: Path) -> None:
    """To any file, and through the saver; it is whole then."""
    with trainer(tmp_path / "folder", save_interval="100ba", width=500_000) as run:
        run.fit(duration="2ba")
        torch.load(run.save_checkpoint(f"{tmp_path}/mine.pt"), weights_only=True)
        path = run.save_checkpoint_to_save_folder()
        torch.load(path, weights_only=True)
        assert run.saved_checkpoints[-1] == path


@pytest.mark.parametrize("save_async", [True, False])
def test_the_checkpoints_are_the_same_either_way(tmp_path: Path, save_async: bool) -> None:
    """Whether training waits or not: every one of them, and the names that are known."""
    with trainer(tmp_path, save_async=save_async) as run:
        run.fit()
        assert [Path(path).name for path in run.saved_checkpoints] == [m.name for m in Catalog(tmp_path).manifests()]
    assert batches(tmp_path) == list(range(1, 13))


class WeightsAt(Callback):
    """The weights after each batch."""

    def __init__(self) -> None:
        self.weights: dict[int, torch.Tensor] = {}

    def batch_end(self, state: State, logger: Logger) -> None:
        self.weights[int(state.timestamp.batch)] = next(state.model.parameters()).detach().clone()


@pytest.mark.parametrize("save_lazy", [None, True, False])
def test_each_checkpoint_is_its_step(tmp_path: Path, save_lazy: bool | None) -> None:
    """Large enough that training is some steps further when it is written."""
    seen = WeightsAt()
    with trainer(tmp_path, seen, width=700_000, save_filename="ba{batch}.pt", save_lazy=save_lazy) as run:
        run.fit()
    for batch, weight in seen.weights.items():
        saved = torch.load(tmp_path / f"ba{batch}.pt", weights_only=True, mmap=True)["state"]
        assert torch.equal(saved["model"]["layer.weight"], weight)
        assert saved["optimizers"]["Adam"]["state"]["layer.weight"]["step"] == batch


# ── what stays ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_ephemeral_saves_go_when_there_is_a_newer_one(tmp_path: Path) -> None:
    """Those of the interval stay, of the others only the newest, and it is what a resume finds."""
    arguments: dict[str, Any] = {"save_interval": "5ba", "save_ephemeral_interval": "1ba"}
    with trainer(tmp_path, max_duration="7ba", **arguments) as run:
        run.fit()
    assert batches(tmp_path) == [5, 7]  # 7 is the end of training
    with trainer(tmp_path, autoresume=True, max_duration="9ba", **arguments) as run:
        run.fit()
    assert batches(tmp_path) == [5, 7, 9]


def test_an_ephemeral_save_does_not_replace_one_that_is_due(tmp_path: Path) -> None:
    """The batch that ends an epoch is saved ephemerally, and the epoch for good."""
    run = trainer(tmp_path, save_interval="1ep", save_ephemeral_interval="2ba", save_filename="ep{epoch}-ba{batch}.pt")
    with run:
        run.fit()
    assert [m.name for m in Catalog(tmp_path).manifests()] == ["ep1-ba4.pt", "ep2-ba8.pt", "ep3-ba12.pt"]


def test_ephemeral_saves_are_cleared_up_by_a_resume_that_makes_none(tmp_path: Path) -> None:
    """The interval was taken away: the next save still replaces the last ephemeral one."""

    class Crash(Callback):
        def batch_start(self, state: State, logger: Logger) -> None:
            if int(state.timestamp.batch) == 3:
                raise RuntimeError("crash")

    with (
        pytest.raises(RuntimeError, match="crash"),
        trainer(tmp_path, Crash(), save_interval="1ep", save_ephemeral_interval="1ba") as run,
    ):
        run.fit()
    assert batches(tmp_path) == [3]
    with trainer(tmp_path, save_interval="1ep", autoresume=True) as run:
        run.fit()
    assert batches(tmp_path) == [4, 8, 12]


def test_intervals_that_are_kept_for_ever(tmp_path: Path) -> None:
    """The newest two, and the first after each five batches."""
    with trainer(tmp_path, save_num_checkpoints_to_keep=2, save_keep_every="5ba") as run:
        run.fit()
        assert len(run.saved_checkpoints) == 4
    assert batches(tmp_path) == [5, 10, 11, 12]


def test_a_metric_that_is_not_measured_is_an_error_before_training(tmp_path: Path) -> None:
    """Rather than after the first evaluation."""
    run = trainer(tmp_path, save_best_k=1, save_best_metric="eval/accuracy")
    with run, pytest.raises(ConfigError, match="save_best_metric='eval/accuracy': there is no such metric"):
        run.fit()
    assert batches(tmp_path) == []


# ── what is logged ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_every_save_is_logged(tmp_path: Path) -> None:
    """What it cost, by name; the sum of what training waited for is an attribute."""
    logger = InMemoryLogger()
    with trainer(tmp_path, loggers=logger) as run:
        run.fit()
        (saver,) = [callback for callback in run.state.callbacks if isinstance(callback, CheckpointSaver)]
    assert [value for _, value in logger.data["checkpoint/batch"]] == list(range(1, 13))
    for name in ("stall", "snapshot", "hash", "write", "flush", "commit", "waiting", "total"):
        assert len(logger.data[f"checkpoint/{name}_seconds"]) == 12
    assert [report.batch for report in saver.manager.outcomes.reports] == list(range(1, 13))
    assert saver.blocked_seconds > 0
    assert saver.blocked_seconds >= sum(report.seconds["stall"] for report in saver.manager.outcomes.reports)


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────────
BAD: list[tuple[dict[str, Any], str]] = [
    ({"save_failure_limit": -1}, "save_failure_limit=-1: expected a whole number, 0 or more"),
    ({"save_staging_bytes": 1.5}, r"save_staging_bytes=1\.5: expected a whole number"),
    ({"save_ephemeral_interval": "1x"}, "save_ephemeral_interval='1x'"),
    ({"save_ephemeral_interval": "auto:1%"}, "save_ephemeral_interval='auto:1%'"),
    ({"save_interval": "auto:0%"}, "save_interval='auto:0%'"),
    ({"save_keep_every": "x"}, "save_keep_every='x'"),
    ({"save_best_k": 3}, "best_metric"),
    ({"save_best_k": 0, "save_best_metric": "eval/a"}, "best_k=0"),
    ({"save_best_k": 1, "save_best_metric": "eval/a", "save_best_mode": "least"}, "best_mode='least'"),
    ({"save_async": "yes"}, "save_async='yes'"),
    ({"save_filename": "a.pt.zip"}, r"\.zip"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_arguments_are_errors_at_construction(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    """They name the argument and the rule."""
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, **arguments)


def test_names_that_do_not_differ_collide_early(tmp_path: Path) -> None:
    """Another run's ``last.pt`` is not overwritten: an error before training."""
    with trainer(tmp_path, save_filename="last.pt") as run:
        run.fit(duration="2ba")
    assert batches(tmp_path) == [2]
    with trainer(tmp_path, run_name="other", save_filename="last.pt") as run, pytest.raises(CheckpointExistsError):
        run.fit(duration="2ba")
    assert batches(tmp_path) == [2]


# ── models that change their own weights ─────────────────────────────────────────────────────────────────────────────
class Clamped(Model):
    """Its forward pass changes its weights, by ways that torch does not count."""

    def forward(self, batch: Any) -> torch.Tensor:
        if self.training:
            self.layer.weight.data.mul_(0.999)
            self.layer.bias.data = self.layer.bias.data.clamp(-1, 1) + 0.001
        return super().forward(batch)


def test_a_model_that_changes_its_weights_in_forward_is_saved_as_it_was(
    tmp_path: Path,
) -> None:
    """Also where the optimizer has no state to begin with: each file is its batch's."""
    seen = WeightsAt()
    model = Clamped(700_000)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    run = Trainer(
        model=model,
        optimizers=adam,
        train_dataloader=data(),
        callbacks=[seen],
        max_duration="3ep",
        save_interval="1ba",
        save_filename="ba{batch}.pt",
        save_folder=tmp_path,
        save_lazy=True,
        progress_bar=False,
    )
    with run:
        run.fit()
    assert batches(tmp_path) == list(range(1, 13))
    for batch, weight in seen.weights.items():
        saved = torch.load(tmp_path / f"ba{batch}.pt", weights_only=True, mmap=True)["state"]["model"]
        assert torch.equal(saved["layer.weight"], weight)
