"""Training that comes to NaN: it is said at once, and no run goes on from there by itself."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.tiny_training import Classifier, trainer
from forked import run_forked

from composerlite import Callback, Logger, State, dist
from composerlite.callbacks import CheckpointSaver, OptimizerMonitor
from composerlite.checkpoint import Catalog
from composerlite.checkpoint.record.history import deletions, retention_policy
from composerlite.errors import CheckpointError
from composerlite.loggers import InMemoryLogger

SAID = (
    "loss/train/total is nan at batch 5, not finite. Checkpoints are marked until the value is finite "
    "again; autoresume and save_best_k skip marked checkpoints."
)


class Spoilt(Classifier):
    """Its loss is NaN from one batch on."""

    def __init__(self, good_batches: int) -> None:
        super().__init__()
        self.left = good_batches

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        self.left -= 1
        return super().loss(outputs, batch) * (1.0 if self.left >= 0 else float("nan"))


class SpoiltGradient(Classifier):
    """Its loss is a number, and its gradient is not, from one batch on."""

    def __init__(self, good_batches: int) -> None:
        super().__init__()
        self.left = good_batches

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        self.left -= 1
        weight = self.head.weight.flatten()[0]
        bad = torch.sqrt(weight - weight)  # 0, whose derivative is not finite
        return super().loss(outputs, batch) + (0.0 if self.left >= 0 else bad)


class DieWithMark(Callback):
    """Kills the process before batch 5, when the checkpoint of batch 4 is committed."""

    def batch_start(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == 4:
            (saver,) = [callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)]
            if saver.manager.pending is not None:
                saver.manager.pending.join()
            os.kill(os.getpid(), signal.SIGKILL)


def diverge_and_die(folder: str, sharded: str) -> None:
    """A run whose gradient is not finite in the batch before its second checkpoint, and that is killed then."""
    how = {"parallelism_config": {"fsdp": {}}} if int(sharded) else {}
    launch(folder, 0, model=SpoiltGradient(3), callbacks=[DieWithMark()], **how)


def launch(folder: Path | str, good_batches: int, until: str = "8ba", *, model: Any = None, **arguments: Any) -> Any:
    """Train until then with so many good batches, a checkpoint of each second batch; the trainer, which is closed."""
    model = Spoilt(good_batches) if model is None else model
    how: dict[str, Any] = {"save_interval": "2ba", "autoresume": True, **arguments}
    try:
        with trainer(model=model, max_duration=until, save_folder=folder, **how) as run:
            run.fit()
            return run
    finally:
        dist.finalize_dist()  # FSDP has made a process group


def marks(folder: Path) -> dict[int, list[str]]:
    """The marks of the checkpoints, by batch."""
    return {one.batch: list(one.run.not_finite) for one in Catalog(folder).manifests()}


@pytest.mark.parametrize("logs", [True, False])
def test_a_loss_that_is_nan_is_said_once_and_marked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, logs: bool
) -> None:
    """At its batch where a logger reads it, and else at the next save."""
    launch(tmp_path, 4, loggers=InMemoryLogger() if logs else None)
    said = [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    assert said == [SAID if logs else SAID.replace("batch 5", "batch 6")]
    name = "loss/train/total"
    assert marks(tmp_path) == {2: [], 4: [], 6: [name], 8: [name]}


def test_a_gradient_that_is_not_finite_is_said_where_its_norm_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss is still a number; the weights are not any more."""
    monitor = OptimizerMonitor(batch_log_interval=1)
    launch(tmp_path, 0, "2ba", model=SpoiltGradient(1), loggers=InMemoryLogger(), callbacks=[monitor])
    said = [record.getMessage() for record in caplog.records if "not finite" in record.getMessage()]
    assert [line.partition(",")[0] for line in said] == ["l2_norm/grad/global is nan at batch 2"]
    assert marks(tmp_path) == {2: ["l2_norm/grad/global"]}


@pytest.mark.parametrize("how", ["file", "blocking", "packed", "weights", "directory"])
def test_weights_that_are_not_finite_mark_the_checkpoint_that_has_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Although the loss of its batch was a number and nobody looks at gradients: the save finds it, and says where."""
    arguments: dict[str, Any] = {
        "file": {},
        "blocking": {"save_async": False},
        "packed": {"save_filename": "ba{batch}.pt.gz"},
        "weights": {"save_weights_only": True, "autoresume": False},
        "directory": {"parallelism_config": {"fsdp": {}}},
    }[how]
    launch(tmp_path, 0, "6ba", model=SpoiltGradient(3), **arguments)
    loss = "loss/train/total"
    assert marks(tmp_path) == {2: [], 4: ["model/head.weight"], 6: [loss]}
    (said,) = [record.getMessage() for record in caplog.records if "has NaN" in record.getMessage()]
    name = next(one.name for one in Catalog(tmp_path).manifests() if one.batch == 4)
    assert said == (
        f"checkpoint {tmp_path / name}: model/head.weight has NaN or infinite values although the loss is finite. "
        "autoresume and save_best_k skip this checkpoint."
    )


@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_that_is_killed_after_a_marked_checkpoint_resumes_from_the_one_before(
    tmp_path: Path, sharded: bool
) -> None:
    """Killed when that is committed, and before any loss has told of it."""
    killed = run_forked(diverge_and_die, str(tmp_path), str(int(sharded)), cwd=tmp_path, environment={})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert marks(tmp_path) == {2: [], 4: ["model/head.weight"]}
    how = {"parallelism_config": {"fsdp": {}}} if sharded else {}
    again = launch(tmp_path, 0, "6ba", model=SpoiltGradient(100), **how)
    assert "ba2" in Path(str(again.state.load_path)).name
    assert marks(tmp_path) == {2: [], 4: [], 6: []}


def test_values_that_no_optimizer_changes_mark_nothing(tmp_path: Path) -> None:
    """Such as a mask in a buffer, whose values are infinite for good, and a weight that is not trained."""

    class Masked(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((3,), float("-inf")))
            self.fixed = torch.nn.Parameter(torch.tensor(float("nan")), requires_grad=False)

    model = Masked()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    launch(tmp_path, 0, "4ba", model=model, optimizers=torch.optim.SGD(trained, lr=0.1))
    assert marks(tmp_path) == {2: [], 4: []}


def test_one_bad_batch_marks_no_later_checkpoint(tmp_path: Path) -> None:
    """Where training recovers, its checkpoints are good again."""

    class Once(Spoilt):
        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            good = Classifier.loss(self, outputs, batch)
            self.left -= 1
            return good.detach() + torch.tensor(float("nan")) + outputs.sum() * 0 if self.left == -1 else good

    launch(tmp_path, 3, model=Once(3), loggers=InMemoryLogger())
    assert marks(tmp_path) == {2: [], 4: ["loss/train/total"], 6: [], 8: []}


def test_a_resume_passes_over_what_is_marked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It takes the newest good one, says so, and saves the names of the marked ones again."""
    launch(tmp_path, 4, loggers=InMemoryLogger())
    caplog.clear()
    again = launch(tmp_path, 100)
    said = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert said[0] == (f"skipped {tmp_path}/ep1-ba8-rank0.pt: loss/train/total had NaN or infinite values when saved.")
    assert len(said) == 2
    assert again.state.load_path == str(tmp_path / "ep0-ba4-rank0.pt")
    assert marks(tmp_path) == {2: [], 4: [], 6: [], 8: []}
    assert all(torch.isfinite(parameter).all() for parameter in again.state.model.parameters())


def test_a_resume_from_a_bucket_passes_over_what_is_marked(
    tmp_path: Path, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine, whose folder is empty: the latest in the bucket is a marked one."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    uri = f"s3://{s3_server.new_bucket()}/run"
    launch(uri, 4, loggers=InMemoryLogger(), save_staging_folder=tmp_path / "one")
    again = launch(uri, 100, save_staging_folder=tmp_path / "two")
    assert str(again.state.load_path) == str(tmp_path / "two" / "run" / "ep0-ba4-rank0.pt")


def test_a_run_with_marked_checkpoints_alone_says_how_to_go_on(tmp_path: Path) -> None:
    """It neither resumes nor starts over, and what the message says to do works."""
    launch(tmp_path, 0, "4ba", loggers=InMemoryLogger())
    path = str(tmp_path / "ep0-ba4-rank0.pt")
    tried = re.escape(f"Tried: {path}: loss/train/total had NaN or infinite values when saved.")
    with pytest.raises(CheckpointError, match=rf"none can be loaded.*{tried}.*load a checkpoint with load_path"):
        launch(tmp_path, 100, "6ba")
    loaded = launch(tmp_path, 100, "6ba", load_path=path, autoresume=False)
    assert int(loaded.state.timestamp.batch) == 6


def test_the_newest_good_one_stays_and_marked_ones_are_none_of_the_best(tmp_path: Path) -> None:
    """However long a run goes on with NaN, there is something to resume from."""
    launch(tmp_path, 4, "12ba", loggers=InMemoryLogger(), save_num_checkpoints_to_keep=2, autoresume=False)
    assert sorted(marks(tmp_path)) == [4, 10, 12]
    manifests = sorted(Catalog(tmp_path).manifests(), key=lambda one: one.order)
    runs = [dataclasses.replace(one.run, metrics={"eval/x": float(at)}) for at, one in enumerate(manifests)]
    measured = [dataclasses.replace(one, run=run) for one, run in zip(manifests, runs, strict=True)]
    assert retention_policy(best_k=1, best_metric="eval/x").keep(measured) == [True, False, False]
    assert [one.batch for one in deletions(measured, retention_policy(1))] == [10]
