"""What users of other trainers write: the message says what it is here, before training where that can be known."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from trainer_parts import Net, Points, build, loader

from composerlite import Algorithm, Callback, Event, Logger, State
from composerlite.core import LoggerDestination
from composerlite.errors import ConfigError, TrainingError, UnknownArgumentError
from composerlite.loggers import CSVLogger, FileLogger, JSONLLogger


def first_line(error: pytest.ExceptionInfo[Any]) -> str:
    return str(error.value).splitlines()[0]


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────────────────
_SPLIT = "device_train_microbatch_size, the samples of one forward pass: a batch is split, its gradients add up"
_CLIPPING = "algorithms=GradientClipping(clipping_type='norm', clipping_threshold=1.0)"
_LOADING = "load_path='…', or autoresume=True, which finds the newest checkpoint of the run by itself"


@pytest.mark.parametrize(
    ("argument", "here"),
    [
        ("max_epochs", "max_duration='90ep'"),
        ("num_train_epochs", "max_duration='3ep'"),
        ("max_steps", "max_duration='10000ba'"),
        ("grad_accum", _SPLIT),
        ("gradient_accumulation_steps", _SPLIT),
        ("accumulate_grad_batches", _SPLIT),
        ("gradient_clip_val", _CLIPPING),
        ("max_grad_norm", _CLIPPING),
        ("accelerator", "device='gpu', 'cpu' or 'mps'"),
        ("devices", "the launcher: torchrun --nproc-per-node=8 script.py starts a process for each GPU"),
        ("strategy", "parallelism_config={'fsdp': {}}, and nothing for data parallel training"),
        ("fsdp_config", "parallelism_config={'fsdp': {…}}"),
        ("mixed_precision", "precision='amp_bf16', 'amp_fp16' or 'fp32'"),
        ("fp16", "precision='amp_fp16'"),
        ("bf16", "precision='amp_bf16'"),
        ("output_dir", "save_folder='…'"),
        ("save_total_limit", "save_num_checkpoints_to_keep=3"),
        ("resume_from_checkpoint", _LOADING),
        ("ckpt_path", _LOADING),
        ("train_dataset", "train_dataloader=DataLoader(…)"),
        ("val_dataloaders", "eval_dataloader=DataLoader(…), or a list of them"),
        ("optimizer", "optimizers=…"),
        ("lr_scheduler", "schedulers=…"),
        ("logger", "loggers=…"),
        ("warmup_steps", "schedulers=LinearWithWarmupScheduler(t_warmup='100ba')"),
        ("per_device_train_batch_size", "the batch_size of the DataLoader"),
    ],
)
def test_an_argument_of_another_trainer_is_told_by_its_name_here(argument: str, here: str) -> None:
    """Composer's old names, Lightning's, those of transformers and of Accelerate."""
    with pytest.raises(UnknownArgumentError) as error:
        build(**{argument: 1})
    assert first_line(error) == f"Trainer has no argument {argument!r}: here it is {here}."


def test_fit_tells_of_arguments_of_other_trainers_too() -> None:
    """Lightning's ``fit(ckpt_path=…)``, for one."""
    with build() as trainer, pytest.raises(UnknownArgumentError) as error:
        trainer.fit(val_dataloaders=loader())  # pyright: ignore[reportCallIssue]
    here = "eval_dataloader=DataLoader(…), or a list of them"
    assert first_line(error) == f"Trainer.fit has no argument 'val_dataloaders': here it is {here}."


@pytest.mark.parametrize(
    ("value", "here"),
    [
        ("bf16", "amp_bf16"),
        ("bf16-mixed", "amp_bf16"),
        ("fp16", "amp_fp16"),
        (16, "amp_fp16"),
        (32, "fp32"),
        ("no", "fp32"),
    ],
)
def test_a_precision_of_another_trainer_is_told_by_its_name_here(value: Any, here: str) -> None:
    """``'bf16'`` of Accelerate and transformers, ``'bf16-mixed'`` and ``16`` of Lightning."""
    with pytest.raises(ConfigError) as error:
        build(precision=value)
    assert first_line(error) == f"precision={value!r} does not exist: here it is precision={here!r}."


# ── callbacks ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("method", "here"),
    [
        ("on_batch_end", "batch_end(self, state, logger)"),
        ("on_train_batch_end", "batch_end(self, state, logger)"),
        ("on_train_epoch_end", "epoch_end(self, state, logger)"),
        ("on_validation_end", "eval_end(self, state, logger)"),
        ("on_step_end", "batch_end(self, state, logger)"),
        ("on_train_begin", "fit_start(self, state, logger)"),
        ("on_save_checkpoint", "state_dict(self)"),
        ("on_load_checkpoint", "load_state_dict(self, state_dict)"),
    ],
)
def test_a_callback_with_a_method_of_another_trainer_is_refused(method: str, here: str) -> None:
    """Nothing would ever call it."""
    kind = type("Mine", (Callback,), {method: lambda self, *arguments: None})
    with pytest.raises(ConfigError) as error:
        build(callbacks=[kind()])
    assert first_line(error) == f"Mine has a method {method!r}, which is never called: here it is {here}."


def test_a_callback_may_be_for_two_trainers() -> None:
    """It has the methods of both; and one of its own may be called ``on_anything``."""
    called: list[str] = []

    class Both(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            self.on_train_batch_end()

        def on_train_batch_end(self) -> None:
            called.append("on_train_batch_end")

        def on_demand(self) -> None:
            called.append("on_demand")

    with build(callbacks=Both(), max_duration="1ba") as trainer:
        trainer.fit()
    assert called == ["on_train_batch_end"]


# ── losses ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class LossOf(Net):
    """A model whose loss is what ``change`` makes of a good one."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def loss(self, outputs: Any, batch: Any) -> Any:
        return self.change(torch.nn.functional.cross_entropy(outputs, batch[1], reduction="none"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda loss: loss,
            "model.loss returned a tensor of shape [4]: expected a scalar. Take the mean over the samples: "
            "loss.mean(), or reduction='mean' of the loss function.",
        ),
        (
            lambda loss: {"a": loss, "b": loss},
            "model.loss returned a tensor of shape [4]: expected a scalar. Take the mean over the samples: "
            "loss.mean(), or reduction='mean' of the loss function.",
        ),
        (
            lambda loss: loss.mean().detach(),
            "model.loss returned a tensor that has no gradient, so nothing can be trained. Look in forward and "
            "loss for detach(), item(), argmax() or torch.no_grad(), and for parameters that all have "
            "requires_grad=False.",
        ),
        (
            lambda loss: loss.mean().item(),
            "model.loss returned float: expected a tensor, a sequence of tensors, or a dict of tensors. .item() takes "
            "a number out of the graph.",
        ),
        (
            lambda loss: None,
            "model.loss returned NoneType: expected a tensor, a sequence of tensors, or a dict of tensors.",
        ),
    ],
)
@pytest.mark.parametrize("size", [None, 2])
def test_a_loss_that_cannot_be_trained_on_is_told_with_the_way_out(change: Any, message: str, size: int | None) -> None:
    """In whole batches and in microbatches."""
    message = message.replace("[4]", "[4]" if size is None else "[2]")
    with build(model=LossOf(change), device_train_microbatch_size=size) as trainer:
        with pytest.raises(TrainingError) as error:
            trainer.fit()
        assert first_line(error) == message


def test_an_error_of_the_backward_pass_stays_what_it_is() -> None:
    """Only a loss that cannot be trained on is told as such."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise RuntimeError("mine")

    with (
        build(model=LossOf(lambda loss: Fails.apply(loss.mean()))) as trainer,
        pytest.raises(RuntimeError, match="mine"),
    ):
        trainer.fit()


# ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def empty() -> DataLoader[Any]:
    return DataLoader(Points(0), batch_size=4)


def test_an_empty_data_set_is_told_before_training() -> None:
    """For training and for evaluation."""
    message = "the dataset Points is empty: its length is 0. Check path and filter."
    with pytest.raises(ConfigError) as error:
        build(train_dataloader=empty())
    assert first_line(error) == f"train_dataloader: {message}"
    with pytest.raises(ConfigError) as error:
        build(eval_dataloader=[loader(), empty()])
    assert first_line(error) == f"eval_dataloader 'eval_1': {message}"


def test_a_batch_size_that_leaves_no_batch_is_told_before_training() -> None:
    """``drop_last`` with less than one batch of data."""
    with pytest.raises(ConfigError) as error:
        build(train_dataloader=loader(3, batch_size=4, drop_last=True))
    assert first_line(error) == (
        "train_dataloader: 3 samples make no batch of 4, and drop_last=True leaves out smaller batches. Pass a smaller "
        "batch_size, or drop_last=False."
    )


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_two_loggers_on_one_file_are_refused(tmp_path: Path) -> None:
    """Each would write over what the other has written."""
    path = tmp_path / "log"
    with pytest.raises(ConfigError) as error:
        build(loggers=[JSONLLogger(str(path)), CSVLogger(path)])
    assert first_line(error) == (
        f"loggers: JSONLLogger and CSVLogger both write {str(path)!r}. Give each a filename of its own."
    )
    with build(loggers=[JSONLLogger(), CSVLogger(), FileLogger(filename=f"{tmp_path}/log.txt")], save_folder=tmp_path):
        pass


def test_a_name_that_is_always_the_same_is_told_with_what_follows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each save replaces the last; not told where one checkpoint is all that is wanted."""
    caplog.set_level(logging.WARNING, "composerlite")

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if "is constant" in record.getMessage()]

    with build(save_folder=tmp_path / "a", save_filename="model.pt", save_num_checkpoints_to_keep=1) as trainer:
        trainer.fit()
    with build(save_folder=tmp_path / "b", save_filename="ep{epoch}.pt") as trainer:
        trainer.fit()
    assert not warnings()
    with build(save_folder=tmp_path / "c", save_filename="model.pt") as trainer:
        trainer.fit()
    assert warnings() == [
        "save_filename='model.pt' is constant: each save replaces the last, so only one checkpoint is kept. To "
        "keep several, put {epoch} or {batch} into it, as in 'ep{epoch}-ba{batch}-rank{rank}.pt'."
    ]
    assert (tmp_path / "c" / "model.pt").is_file()


# ── ReduceLROnPlateau ────────────────────────────────────────────────────────────────────────────────────────────────
def plateau_run(**arguments: Any) -> Any:
    """A run whose learning rate is halved at each evaluation that is not better by far."""
    torch.manual_seed(5)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.2)
    return build(
        model=model, optimizers=optimizer, schedulers=scheduler, eval_dataloader=[loader(8), loader(4)], **arguments
    )


def test_reduce_lr_on_plateau_follows_the_loss_of_the_first_evaluator() -> None:
    """It steps once for each evaluation within training, with that loss; ``Trainer.eval`` is none of them."""
    with plateau_run(max_duration="6ep") as trainer:
        trainer.eval()
        trainer.fit()
        scheduler = trainer.state.schedulers[0]
        assert scheduler.last_epoch == 6
        assert trainer.state.optimizers[0].param_groups[0]["lr"] == 0.5 * 0.5**2


def test_reduce_lr_on_plateau_follows_a_metric_by_its_name() -> None:
    """That of any evaluator, at each measurement of it; a name that nothing measures is told before training."""
    from composerlite.optim import ReduceLROnPlateau

    def run(metric: str) -> Any:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = ReduceLROnPlateau(optimizer, metric, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs")
        return build(
            model=model, optimizers=optimizer, schedulers=scheduler, eval_dataloader=[loader(8), loader(4)],
            max_duration="3ep",
        )  # fmt: skip

    with run("eval_1/loss") as trainer:
        trainer.fit()
        scheduler: Any = trainer.state.schedulers[0]
        assert scheduler.last_epoch == 3
        assert scheduler.best != trainer.state.eval_metric_values["loss"]
        assert trainer.state.optimizers[0].param_groups[0]["lr"] == 0.5 * 0.5**2
        assert "metric" not in scheduler.state_dict()
    with run("eval_1/accuracy") as trainer, pytest.raises(ConfigError) as error:
        trainer.fit()
    said = "ReduceLROnPlateau: metric='eval_1/accuracy': there is no such metric. Known: eval/loss, eval_1/loss."
    assert first_line(error) == said


def test_reduce_lr_on_plateau_is_resumed_exactly(tmp_path: Path) -> None:
    """What it has seen and what it has done are in the checkpoint."""
    with plateau_run(max_duration="6ep") as whole:
        whole.fit()
    with plateau_run(max_duration="3ep", save_folder=tmp_path, run_name="plateau") as first:
        first.fit()
    with plateau_run(max_duration="6ep", save_folder=tmp_path, run_name="plateau", autoresume=True) as second:
        assert int(second.state.timestamp.epoch) == 3
        second.fit()
    assert second.state.schedulers[0].state_dict() == whole.state.schedulers[0].state_dict()
    assert second.state.optimizers[0].param_groups[0]["lr"] == whole.state.optimizers[0].param_groups[0]["lr"]
    for name, value in whole.state.model.state_dict().items():
        assert torch.equal(second.state.model.state_dict()[name], value)


def test_reduce_lr_on_plateau_without_evaluation_is_told_before_training() -> None:
    """There would be nothing to follow."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with build(model=model, optimizers=optimizer, schedulers=scheduler) as trainer:
        with pytest.raises(ConfigError) as error:
            trainer.fit()
        assert first_line(error) == (
            "schedulers: ReduceLROnPlateau follows the loss of the first evaluator, and there is no evaluator. Pass "
            "eval_dataloader."
        )


# ── half of a state ──────────────────────────────────────────────────────────────────────────────────────────────────
class SavesOnly(Callback):
    """Forgets to take back what it gives."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}


class SavesAndLoads(SavesOnly):
    """Does not."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {"n": 1}


class LogsOnly(SavesOnly, LoggerDestination):
    """A logger is a callback."""


class AppliesOnly(Algorithm):
    """Algorithms have a state, too."""

    def match(self, event: Event, state: State) -> bool:
        return False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        raise AssertionError("it matches nothing")

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}


@pytest.mark.parametrize(
    "arguments", [{"callbacks": SavesOnly()}, {"loggers": LogsOnly()}, {"algorithms": AppliesOnly()}]
)
def test_a_state_that_would_be_saved_and_not_restored_is_an_error(arguments: dict[str, Any]) -> None:
    """Before training: a resume would begin it anew, and say nothing."""
    with pytest.raises(ConfigError, match=r"Only has state_dict\(\) and no load_state_dict\(state_dict\)"):
        build(**arguments)
    build(callbacks=[SavesAndLoads(), Callback()]).close()


# ── what cannot be called, or is no object ───────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedulers": lambda a, b, c: 1.0}, r"schedulers=.*<lambda>\(a, b, c\): expected a function \(state\)"),
        (
            {"schedulers": lambda state: 1.0, "scale_schedule_ratio": 0.5},
            r"schedulers=.*<lambda>\(state\): expected a function \(state, ssr\)",
        ),
        ({"schedulers": lambda state: "x"}, "returned 'x': expected a number, the factor of the learning rate"),
        ({"schedulers": lambda state: None}, "returned None: expected a number"),
        ({"save_interval": lambda state: True}, r"save_interval=.*expected a function \(state, event\)"),
        ({"eval_interval": lambda state: True}, r"eval_interval=.*expected a function \(state, event\)"),
        ({"console_log_interval": lambda: True}, "console_log_interval=.*expected a function"),
        ({"train_dataloader": DataLoader}, "dataloader=DataLoader is a class, not a data loader"),
        ({"eval_dataloader": DataLoader}, "dataloader=DataLoader is a class, not a data loader"),
        ({"run_name": "nul\0"}, r"run_name='nul\\x00' has a null character"),
        ({"save_latest_filename": "ep1-ba7-rank0.pt"}, "save_latest_filename='ep1-ba7-rank0.pt' is also the name of"),
        (
            {"save_latest_filename": "ep7-ba7-rank{rank}.pt"},
            "save_latest_filename='ep7-ba7-rank{rank}.pt' is also the name",
        ),
        ({"save_latest_filename": "newest", "save_filename": "{run_name}"}, None),
        ({"save_latest_filename": "ba{batch}.pt", "save_filename": "ba{batch}.pt"}, None),
    ],
)
def test_what_could_only_fail_in_training_is_said_before(
    arguments: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    """With the argument, its value and what is expected; what works is left as it is."""
    given = {"save_folder": tmp_path, **arguments}
    if message is None:
        build(**given).close()
        return
    with pytest.raises(ConfigError, match=message):
        build(**given)


def test_a_function_of_another_length_of_arguments_in_python_or_c_works() -> None:
    """With defaults, as a bound method, or where it does not say what it takes."""
    seen: list[Any] = []

    class Due:
        def __call__(self, state: State, event: Event, *rest: Any, verbose: bool = False) -> bool:
            seen.append(event)
            return False

    schedule = lambda state, ssr=1.0, *more: np.float32(0.5)
    with build(schedulers=schedule, eval_dataloader=loader(), eval_interval=Due(), max_duration="1ba") as trainer:
        trainer.fit()
    assert seen
