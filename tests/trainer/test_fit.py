"""``Trainer`` and ``fit``: how long a call trains, what a relaunch does, and what is refused before training."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import DataLoader
from trainer_parts import At, Events, Net, Points, Seen, Step, build, loader, optimizer_state, same, weights

from composerlite import Callback, ComposerModel, Event, Logger, State, Timestamp, Trainer
from composerlite.callbacks import CheckpointSaver
from composerlite.core import LoggerDestination
from composerlite.errors import (
    CheckpointNotFoundError,
    ConfigError,
    IncompatibleCheckpointError,
    UnknownArgumentError,
)
from composerlite.loggers import InMemoryLogger
from composerlite.optim import LinearScheduler

Launch = Callable[[Trainer], None]


class PowerCutError(Exception):
    """What ends a run in these tests."""


class PowerCut(Callback):
    """Fails when the ``count``-th batch of this process ends, after it was saved."""

    def __init__(self, count: int) -> None:
        self.left = count

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self.left -= 1
        if self.left == 0:
            raise PowerCutError


def launch(script: Launch, folder: Path, cut: int = 0, **arguments: Any) -> tuple[list[Step], Trainer]:
    """Start a script, as a job does each time: what it saw. ``cut`` interrupts it after so many batches."""
    seen = Seen()
    saver = CheckpointSaver(folder, save_interval=arguments.pop("save_interval", "1ba"), overwrite=True)
    defaults: dict[str, Any] = {"autoresume": True, "run_name": "job", "dropout": 0.5, "max_duration": None}
    with build(callbacks=[seen, saver, PowerCut(cut)], **{**defaults, **arguments}) as trainer:
        if cut:
            with pytest.raises(PowerCutError):
                script(trainer)
        else:
            script(trainer)
        return seen.steps, trainer


# ── one call, several calls ──────────────────────────────────────────────────────────────────────────────────────────
def test_duration_adds_to_where_the_run_stands() -> None:
    """In any unit; an int counts epochs. ``max_duration`` of the constructor is replaced."""
    with build(max_duration="1ba") as trainer:
        stands: list[tuple[int, int]] = []
        for duration in ("3ba", 1, "2ep", "8sp", "1ba"):
            trainer.fit(duration=duration)
            stands.append((int(trainer.state.timestamp.epoch), int(trainer.state.timestamp.batch)))
    assert stands == [(0, 3), (1, 5), (3, 15), (3, 17), (3, 18)]


def test_several_calls_are_one_training() -> None:
    """Ended in the middle of an epoch and gone on with: batches, weights and optimizer are as with one call."""
    whole, parts = Seen(), Seen()
    with build(callbacks=whole, dropout=0.5) as one:
        one.fit()
    with build(callbacks=parts, dropout=0.5) as several:
        for duration in ("2ba", "5ba", "1ba", "2ba"):
            several.fit(duration=duration)
    assert parts.steps == whole.steps
    assert same(weights(one), weights(several))
    assert all(torch.equal(a, b) for a, b in zip(optimizer_state(one), optimizer_state(several), strict=True))
    assert several.state.timestamp.epoch == "2ep"


def test_events_of_an_epoch_come_once_where_it_is_gone_on_with() -> None:
    """EPOCH_START is not told again in the middle of the epoch; EPOCH_END is told when it ends."""
    events = Events()
    with build(callbacks=events) as trainer:
        trainer.fit(duration="2ba")
        trainer.fit(duration="3ba")
        trainer.fit(duration="1ba")
    of_epochs = [event for event in events.events if event in (Event.FIT_START, Event.EPOCH_START, Event.EPOCH_END)]
    assert of_epochs == [
        *(Event.FIT_START, Event.EPOCH_START),
        *(Event.FIT_START, Event.EPOCH_END),
        *(Event.FIT_START, Event.EPOCH_START),
    ]


def test_reset_time_starts_counting_from_zero() -> None:
    """Weights stay, time does not; the epoch begins afresh, with a shuffle of its own."""
    seen, kept = Seen(), list[bool]()
    with build(max_duration="7ba", callbacks=seen) as trainer:
        trainer.fit()
        before = weights(trainer)
        trainer.state.callbacks.append(At(Event.BATCH_START, lambda state: kept.append(same(before, weights(trainer)))))
        trainer.fit(reset_time=True)
    assert kept == [True] + [False] * 6
    assert [count for count, _ in seen.steps] == [*range(1, 8), *range(1, 8)]
    assert trainer.state.timestamp.batch == "7ba"
    assert sorted(number for batch in seen.numbers[7:12] for number in batch) == list(range(20))


def test_fit_takes_training_data() -> None:
    """Given to fit rather than to the constructor, or in place of what the constructor got."""
    seen = Seen()
    with build(train_dataloader=None, callbacks=seen) as trainer:
        trainer.fit(train_dataloader=loader(8, shuffle=False), duration="1ep", train_dataloader_label="first")
        assert trainer.state.dataloader_label == "first"
        trainer.fit(train_dataloader=loader(12, shuffle=False), duration="1ep", train_subset_num_batches=1)
    assert seen.numbers == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_fit_takes_settings_of_the_constructor() -> None:
    """Precision and microbatches, schedulers and their steps."""
    rates: list[float] = []
    kinds: list[tuple[int, torch.dtype]] = []
    callbacks = [
        At(Event.BATCH_START, lambda state: rates.append(round(state.optimizers[0].param_groups[0]["lr"], 6))),
        At(Event.AFTER_FORWARD, lambda state: kinds.append((len(state.outputs), state.outputs.dtype))),
    ]
    with build(callbacks=callbacks, max_duration="1ep", train_dataloader=loader(8)) as trainer:
        trainer.fit(precision="amp_bf16", device_train_microbatch_size=3, schedulers=LinearScheduler())
        trainer.fit(duration="1ep", step_schedulers_every_batch=False, scale_schedule_ratio=2.0, precision="fp32")
    assert kinds == [(3, torch.bfloat16), (1, torch.bfloat16)] * 2 + [(3, torch.float32), (1, torch.float32)] * 4
    assert rates[:2] == [0.1, 0.05]
    assert rates[2] == rates[3]


# ── a job that is started again ──────────────────────────────────────────────────────────────────────────────────────
def one_fit(trainer: Trainer) -> None:
    trainer.fit(duration="2ep")


def two_fits(trainer: Trainer) -> None:
    trainer.fit(duration="4ba")
    trainer.fit(duration="7ba")


def two_kinds_of_data(trainer: Trainer) -> None:
    trainer.fit(train_dataloader=loader(12), duration="1ep")
    trainer.fit(train_dataloader=loader(20), duration="1ep")


def reset_at_once(trainer: Trainer) -> None:
    trainer.fit(duration="6ba", reset_time=True)


def with_schedule(trainer: Trainer) -> None:
    trainer.fit(duration="8ba", schedulers=LinearScheduler())


def with_schedule_per_epoch(trainer: Trainer) -> None:
    trainer.fit(duration="8ba", schedulers=LinearScheduler(t_max="8ba"), step_schedulers_every_batch=False)


SCRIPTS: dict[str, tuple[Launch, dict[str, Any]]] = {
    "one call": (one_fit, {}),
    "two calls": (two_fits, {}),
    "two kinds of data": (two_kinds_of_data, {"train_dataloader": None}),
    "reset_time": (reset_at_once, {}),
    "schedule given to fit": (with_schedule, {}),
    "schedule given to fit, steps per epoch": (with_schedule_per_epoch, {}),
}


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_is_started_again_goes_on_where_it_was(name: str, every: int, tmp_path: Path) -> None:
    """Interrupted after one batch or another: the calls of fit end where they would have ended, bit for bit."""
    script, arguments = SCRIPTS[name]
    steps, whole = launch(script, tmp_path / "whole", **arguments)
    for cut in range(1, len(steps), every):
        folder = tmp_path / str(cut)
        before, _ = launch(script, folder, cut=cut, **arguments)
        after, resumed = launch(script, folder, **arguments)
        assert before + after == steps, f"interrupted after batch {cut}"
        assert same(weights(resumed), weights(whole)), f"interrupted after batch {cut}"


def then_an_epoch(trainer: Trainer) -> None:
    trainer.fit(duration="5ba")
    trainer.fit(duration="1ep")


def then_an_iteration(trainer: Trainer) -> None:
    trainer.fit(duration="1ep")
    trainer.fit(duration="2iter")


def then_other_data(trainer: Trainer) -> None:
    trainer.fit(duration="5ba")
    trainer.fit(train_dataloader=loader(16), duration="5ba")


def then_another_schedule(trainer: Trainer) -> None:
    optimizer = trainer.state.optimizers[0]
    trainer.fit(duration="5ba", schedulers=StepLR(optimizer, 1, 0.5))
    trainer.fit(duration="7ba", schedulers=StepLR(optimizer, 2, 0.1))


@pytest.mark.parametrize("script", [then_an_epoch, then_an_iteration, then_other_data, then_another_schedule])
def test_a_call_begins_behind_the_epoch_that_the_one_before_ended_with(script: Launch, tmp_path: Path) -> None:
    """A run is killed when the last batch of a call, and of an epoch, has been saved: the next call trains as long as
    it would have, counts the same epochs and steps the same schedules."""
    steps, whole = launch(script, tmp_path / "whole")
    interval = "1ep" if script is then_an_iteration else "1ba"
    before, _ = launch(script, tmp_path / "cut", cut=6 if interval == "1ep" else 5, save_interval=interval)
    after, resumed = launch(script, tmp_path / "cut")
    assert before[:5] + after == steps
    assert same(weights(resumed), weights(whole))
    counts = [{n: c for n, c in one.state.timestamp.plain().items() if "wct" not in n} for one in (whole, resumed)]
    assert counts[0] == counts[1]
    schedules = [[schedule.state_dict() for schedule in one.state.schedulers] for one in (whole, resumed)]
    assert schedules[0] == schedules[1]


def test_a_changed_rate_is_told_where_the_next_call_takes_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A script whose learning rate was changed between two calls of fit trains the second with it, and says so."""
    launch(two_fits, tmp_path, cut=4)
    model = Net(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps, trainer = launch(two_fits, tmp_path, model=model, optimizers=optimizer)
    assert len(steps) == 7
    assert trainer.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)
    assert "the learning rate was (0.1,) in the interrupted run and is (0.05,) now" in caplog.text


def test_a_torch_schedule_without_max_duration_goes_on_where_it_was(tmp_path: Path) -> None:
    """The end is given to fit, after the checkpoint was loaded: the schedule's own count is loaded all the same."""

    def start(cut: int = 0) -> list[float]:
        rates: list[float] = []
        note = At(Event.BATCH_START, lambda state: rates.append(state.optimizers[0].param_groups[0]["lr"]))
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        callbacks = [note, CheckpointSaver(tmp_path, save_interval="1ba"), PowerCut(cut)]
        arguments: dict[str, Any] = {"run_name": "job", "autoresume": True, "step_schedulers_every_batch": True}
        schedulers = ExponentialLR(optimizer, 0.5)
        with build(
            model=model,
            optimizers=optimizer,
            schedulers=schedulers,
            callbacks=callbacks,
            max_duration=None,
            **arguments,
        ) as trainer:
            try:
                trainer.fit(duration="6ba")
            except PowerCutError:
                assert cut
        return rates

    assert start(cut=3) + start() == [1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125]


def stopped_early(trainer: Trainer) -> None:
    stop = At(Event.BATCH_END, lambda state: state.stop_training() if state.timestamp.batch == "3ba" else None)
    trainer.state.callbacks.append(stop)
    trainer.fit()
    trainer.fit(duration="4ba")


def from_zero_in_the_second_call(trainer: Trainer) -> None:
    trainer.fit(duration="4ba")
    trainer.fit(duration="3ba", reset_time=True)


@pytest.mark.parametrize("script", [stopped_early, from_zero_in_the_second_call])
def test_a_call_that_was_finished_is_not_begun_again(script: Launch, tmp_path: Path) -> None:
    """Also where the first call ended before its max_duration, or the clock was set back after it."""
    steps, whole = launch(script, tmp_path / "whole", max_duration="20ba")
    before, _ = launch(script, tmp_path / "cut", max_duration="20ba", cut=5)
    newest: dict[str, Any] = {"load_path": tmp_path / "cut" / "latest-rank0.pt", "autoresume": False}
    after, resumed = launch(script, tmp_path / "cut", max_duration="20ba", **newest)
    assert before + after == steps
    assert same(weights(resumed), weights(whole))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_finished_script_that_is_started_again_does_nothing(name: str, tmp_path: Path) -> None:
    """No batch, no event of training, no error."""
    script, arguments = SCRIPTS[name]
    _, first = launch(script, tmp_path, save_interval="1ep", **arguments)
    events = Events()

    def watched(trainer: Trainer) -> None:
        trainer.state.callbacks.append(events)
        script(trainer)

    steps, second = launch(watched, tmp_path, save_interval="1ep", **arguments)
    assert (steps, events.events) == ([], [])
    assert second.state.timestamp.batch == first.state.timestamp.batch
    assert second.state.timestamp.epoch == first.state.timestamp.epoch
    assert same(weights(second), weights(first))


def test_a_finished_run_may_be_given_a_later_end(tmp_path: Path) -> None:
    """The same command with a larger max_duration trains the difference."""
    steps, _ = launch(Trainer.fit, tmp_path, max_duration="3ep")
    launch(Trainer.fit, tmp_path / "more", max_duration="2ep")
    more, _ = launch(Trainer.fit, tmp_path / "more", max_duration="3ep")
    assert more == steps[10:]


def test_fine_tuning_adds_to_where_the_checkpoint_stands(tmp_path: Path) -> None:
    """From the checkpoint of another run: ``duration`` counts from there, and once only, if this run is interrupted."""
    launch(one_fit, tmp_path / "pretraining", run_name="pretraining", save_interval="1ep")
    checkpoint = tmp_path / "pretraining" / "latest-rank0.pt"

    def tune(trainer: Trainer) -> None:
        trainer.fit(duration="1ep")

    arguments: dict[str, Any] = {"load_path": checkpoint, "run_name": "tuning"}
    before, _ = launch(tune, tmp_path / "tuning", cut=2, **arguments)
    after, trainer = launch(tune, tmp_path / "tuning", **arguments)
    assert [count for count, _ in before + after] == [11, 12, 13, 14, 15]
    assert trainer.state.timestamp.epoch == "3ep"


def test_fine_tuning_begins_behind_the_epoch_that_is_over(tmp_path: Path) -> None:
    """A run that ended with the last batch of an epoch is trained for an epoch more, as it is in one process."""
    arguments: dict[str, Any] = {"max_duration": "5ba"}
    with build(save_folder=tmp_path, save_interval="5ba", **arguments) as trainer:
        trainer.fit()
        trainer.fit(duration="1ep")
    seen = Seen()
    checkpoint = tmp_path / "ep0-ba5-rank0.pt"
    with build(load_path=checkpoint, callbacks=seen, max_duration=None) as more:
        more.fit(duration="1ep")
    assert [count for count, _ in seen.steps] == [6, 7, 8, 9, 10]
    assert same(weights(more), weights(trainer))


@pytest.mark.filterwarnings("error:Detected call of")
def test_a_schedule_that_steps_first_after_a_resume_is_not_warned_of(tmp_path: Path) -> None:
    """torch says that the optimizer should have stepped before: it has, in the process before."""
    rates: list[float] = []
    for load_path in (None, tmp_path / "ep0-ba5-rank0.pt"):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with build(
            model=model,
            optimizers=optimizer,
            schedulers=StepLR(optimizer, 1, 0.5),
            run_name="run",
            **({"load_path": load_path} if load_path else {"save_folder": tmp_path, "save_interval": "5ba"}),
        ) as trainer:
            trainer.fit()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.025, 0.025]


def test_fine_tuning_may_count_from_zero(tmp_path: Path) -> None:
    """``reset_time=True`` takes effect once, at the start of the new run, and not again when it is resumed."""
    launch(one_fit, tmp_path / "pretraining", run_name="pretraining", save_interval="1ep")

    def tune(trainer: Trainer) -> None:
        trainer.fit(duration="1ep", reset_time=True)

    arguments: dict[str, Any] = {"load_path": tmp_path / "pretraining" / "latest-rank0.pt", "run_name": "tuning"}
    before, _ = launch(tune, tmp_path / "tuning", cut=2, **arguments)
    after, _ = launch(tune, tmp_path / "tuning", **arguments)
    assert [count for count, _ in before + after] == [1, 2, 3, 4, 5]


class Holding(LoggerDestination):
    """Holds something, such as a file, from its start until it is closed."""

    held = False

    def init(self, state: State, logger: Logger) -> None:
        self.held = True

    def close(self, state: State, logger: Logger) -> None:
        self.held = False


def test_a_load_that_fails_closes_what_was_opened(tmp_path: Path) -> None:
    """A trainer that cannot be built leaves no logger open."""
    destination, opened = Holding(), list[bool]()
    look = At(Event.BEFORE_LOAD, lambda state: opened.append(destination.held))
    with pytest.raises(CheckpointNotFoundError):
        build(load_path=tmp_path / "nothing.pt", loggers=destination, callbacks=look)
    assert opened == [True]
    assert not destination.held


# ── reproducibility ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_seed_makes_runs_equal() -> None:
    """Order and dropout follow from the seed alone, whatever was drawn before."""

    def train(seed: int | None) -> tuple[list[Step], dict[str, torch.Tensor]]:
        seen = Seen()
        with build(seed=seed, dropout=0.5, callbacks=seen) as trainer:
            trainer.fit()
            return seen.steps, weights(trainer)

    steps, end = train(5)
    torch.rand(3)
    random.random()
    np.random.rand()
    again, end_again = train(5)
    assert again == steps
    assert same(end_again, end)
    assert train(6)[0] != steps
    assert train(None)[0] != train(None)[0]


@pytest.mark.usefixtures("restore_torch")
def test_deterministic_mode_is_torchs() -> None:
    """It switches torch to deterministic kernels; a run computes the same as on any CPU."""
    with build(deterministic_mode=True) as trainer:
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
        trainer.fit()
    torch.use_deterministic_algorithms(False)
    with build() as plain:
        plain.fit()
    assert same(weights(trainer), weights(plain))


def test_a_compiled_model_trains_as_it_is() -> None:
    """``compile_config`` goes to torch.compile; names in checkpoints do not change."""
    with build(compile_config={"backend": "eager"}, dropout=0.5) as compiled:
        compiled.fit()
    with build(dropout=0.5) as plain:
        plain.fit()
    assert same(weights(compiled), weights(plain))
    assert compiled.state.state_dict()["model"].keys() == plain.state.state_dict()["model"].keys()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of modules that inductor imports
@pytest.mark.parametrize("mode", ["reduce-overhead", "default"])
def test_memory_of_cuda_graphs_is_used_again_from_batch_to_batch(mode: str) -> None:
    """torch is told once a batch that its outputs are not needed any more, and not between microbatches."""
    from torch._inductor.cudagraph_trees import MarkStepBox  # pyright: ignore[reportPrivateImportUsage]

    before = MarkStepBox.mark_step_counter
    config = {"backend": "eager", "mode": mode}
    with build(compile_config=config, device_train_microbatch_size=2, max_duration="3ba") as trainer:
        trainer.fit()
    assert abs(MarkStepBox.mark_step_counter - before) == (3 if mode == "reduce-overhead" else 0)


# ── the trainer as an object ─────────────────────────────────────────────────────────────────────────────────────────
def test_closing_twice_is_fine_and_a_closed_trainer_trains_no_more() -> None:
    """The context manager closes; what is closed says so."""
    with build() as trainer:
        trainer.close()
    trainer.close()
    with pytest.raises(RuntimeError, match="this trainer is closed"):
        trainer.fit()


def test_a_model_may_be_trained_by_one_trainer_after_another() -> None:
    """The second goes on with the weights of the first."""
    model = Net()
    with build(model=model) as first:
        first.fit()
    after_first = weights(first)
    with build(model=model) as second:
        assert same(weights(second), after_first)
        second.fit()
    assert not same(weights(second), after_first)


def test_a_run_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The given one, that of the environment, or a new one each time."""
    monkeypatch.delenv("RUN_NAME", raising=False)
    monkeypatch.delenv("COMPOSER_RUN_NAME", raising=False)
    assert build(run_name="mine").state.run_name == "mine"
    assert build().state.run_name != build().state.run_name
    monkeypatch.setenv("RUN_NAME", "of-the-scheduler")
    assert build().state.run_name == "of-the-scheduler"
    assert build(run_name="mine").state.run_name == "mine"


def test_plain_arguments_can_be_logged() -> None:
    """``auto_log_hparams``: numbers and texts of the constructor, not its objects."""
    logged = InMemoryLogger()
    with build(loggers=logged, auto_log_hparams=True, run_name="mine"):
        assert logged.hyperparameters["run_name"] == "mine"
        assert logged.hyperparameters["seed"] == 3
        assert "model" not in logged.hyperparameters


def test_without_an_optimizer_there_is_a_default(caplog: pytest.LogCaptureFixture) -> None:
    """As in Composer, with a warning."""
    with build(optimizers=None) as trainer:
        trainer.fit()
    assert type(trainer.state.optimizers[0]).__name__ == "DecoupledSGDW"
    assert "no optimizer was given" in caplog.text


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────
def foreign_optimizer() -> torch.optim.Optimizer:
    """An optimizer of another model."""
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"model": nn.Linear(1, 1)}, "model=Linear is not a ComposerModel.*ComposerClassifier"),
    ({"model": Net, "optimizers": None}, "model=Net is not a ComposerModel.*the class instead of an object"),
    ({"train_dataloader": 5}, "int cannot be iterated"),
    ({"train_dataloader": torch.ones(3)}, "a Tensor is not a data loader"),
    ({"train_dataloader": {"dataloader": [], "num_sample": 3}}, "no argument 'num_sample'. Did you mean 'num_samples'"),
    ({"train_subset_num_batches": 0}, "train_subset_num_batches=0: expected a positive number"),
    ({"train_subset_num_batches": "3"}, "train_subset_num_batches='3': expected a positive number"),
    ({"spin_dataloaders": "no"}, "spin_dataloaders='no': expected True or False"),
    ({"max_duration": "banana"}, "max_duration='banana'.*expected <number><unit>, such as '10ba'"),
    ({"max_duration": "5epochs"}, "max_duration='5epochs'"),
    ({"max_duration": 1.5}, "max_duration=1.5.*whole number"),
    ({"max_duration": 0}, "max_duration=0: expected more than zero"),
    ({"max_duration": "-3ba"}, "max_duration='-3ba': expected more than zero"),
    ({"max_duration": "0.5dur"}, "max_duration='0.5dur'.*Use another unit"),
    ({"algorithms": 5}, "algorithms: 5 is not of type Algorithm"),
    ({"algorithms": [Events()]}, "algorithms: .*Events.* is not of type Algorithm"),
    ({"algorithm_passes": [5]}, r"algorithm_passes=\[5\]: expected functions"),
    ({"optimizers": torch.optim.SGD}, "optimizers: .*the class instead of an object"),
    ({"optimizers": [foreign_optimizer(), foreign_optimizer()]}, "optimizers: 2 were given and one is supported"),
    ({"optimizers": foreign_optimizer()}, "optimizers: the optimizer has no parameter of the model"),
    ({"optimizers": torch.optim.LBFGS(nn.Linear(1, 1).parameters())}, "optimizers: LBFGS"),
    ({"schedulers": 5}, "schedulers: 5 is not of type LRScheduler or ComposerScheduler"),
    ({"schedulers": ExponentialLR}, "schedulers: .*the class instead of an object"),
    ({"schedulers": ExponentialLR(foreign_optimizer(), 0.5)}, "schedulers: ExponentialLR was built for another"),
    ({"scale_schedule_ratio": 0}, "scale_schedule_ratio=0: expected a positive number"),
    ({"scale_schedule_ratio": "2"}, "scale_schedule_ratio='2': expected a positive number"),
    ({"scale_schedule_ratio": 0.1}, "scale_schedule_ratio=0.1 makes max_duration=2ep zero"),
    ({"eval_dataloader": 5}, "int cannot be iterated"),
    ({"eval_interval": "banana"}, "eval_interval='banana'.*expected <number><unit>"),
    ({"eval_subset_num_batches": 0}, "eval_subset_num_batches=0: expected a positive number"),
    ({"callbacks": [Events]}, "callbacks: .*the class instead of an object"),
    ({"callbacks": "checkpoint"}, "callbacks: 'checkpoint' is not of type Callback"),
    ({"loggers": Events()}, "loggers: .* is not of type LoggerDestination"),
    ({"run_name": "a/b"}, "run_name='a/b' names folders: it cannot contain '/'"),
    ({"run_name": ""}, "run_name='': expected a name"),
    ({"progress_bar": True, "console_stream": "nowhere"}, "stream='nowhere'"),
    ({"console_log_interval": "banana"}, "console_log_interval='banana'"),
    ({"load_path": "{typo}.pt"}, "{typo} is not a variable"),
    ({"load_ignore_keys": "state"}, "load_ignore_keys='state': expected a list of globs"),
    ({"load_exclude_algorithms": [1]}, "load_exclude_algorithms: 1 is not of type str"),
    ({"save_folder": "/proc/nothing"}, "save_folder='/proc/nothing' cannot be written to"),
    ({"save_folder": "f", "save_filename": "{epok}.pt"}, "save_filename='{epok}.pt'.*Did you mean 'epoch'"),
    ({"save_folder": "f", "save_interval": "banana"}, "invalid time 'banana': expected <number><unit>"),
    ({"save_folder": "f", "save_num_checkpoints_to_keep": -2}, "num_checkpoints_to_keep=-2: expected -1"),
    ({"save_folder": "f", "save_ignore_keys": "model"}, "save_ignore_keys='model': expected a list of globs"),
    ({"autoresume": True}, "autoresume=True needs a run_name"),
    ({"autoresume": True, "run_name": "job"}, "autoresume=True needs checkpoints to resume from"),
    ({"device": "toaster"}, "device='toaster' is not known. Known: cpu"),
    ({"precision": "fp7"}, "precision='fp7' does not exist. Known: fp32"),
    ({"device_train_microbatch_size": 0}, "device_train_microbatch_size=0: expected a positive number"),
    ({"device_train_microbatch_size": "all"}, "device_train_microbatch_size='all'.*'auto' or None"),
    ({"seed": -1}, "seed=-1: expected a whole number from 0 to"),
    ({"seed": 1.5}, "seed=1.5: expected a whole number"),
    ({"deterministic_mode": "false"}, "deterministic_mode='false': expected True or False"),
    ({"python_log_level": "loud"}, "python_log_level='loud' does not exist"),
    ({"compile_config": True}, "compile_config=True: expected a dict"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), BAD_ARGUMENTS, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_a_bad_value_is_refused_at_construction(
    arguments: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any training, with the name of the argument, its value, and what would be right."""
    monkeypatch.chdir(tmp_path)
    for name in ("RUN_NAME", "COMPOSER_RUN_NAME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=message):
        build(**arguments)


BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"duration": "banana"}, "invalid time 'banana'"),
    ({"duration": "0.5dur"}, "'dur'"),
    ({"duration": 0}, "max_duration=0ep has been reached"),
    ({"train_subset_num_batches": 0}, "train_subset_num_batches=0"),
    ({"train_dataloader": 5}, "int cannot be iterated"),
    ({"eval_subset_num_batches": 0}, "eval_subset_num_batches=0"),
    ({"eval_interval": "banana"}, "eval_interval='banana'"),
    ({"device_train_microbatch_size": 0}, "device_train_microbatch_size=0"),
    ({"precision": "fp7"}, "precision='fp7'"),
    ({"schedulers": 5}, "schedulers: 5"),
    ({"scale_schedule_ratio": 0}, "scale_schedule_ratio=0"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), BAD_CALLS, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_a_bad_value_is_refused_by_fit(arguments: dict[str, Any], message: str) -> None:
    """Before the first batch."""
    seen = Seen()
    with build(callbacks=seen) as trainer, pytest.raises(ConfigError, match=message):
        trainer.fit(**arguments)
    assert seen.steps == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build(max_duratoin="2ep"), r"Trainer has no argument 'max_duratoin'. Did you mean 'max_duration'\?.*"),
        (
            lambda: build(batch_size=4),
            "Trainer has no argument 'batch_size'. Known: accumulate_train_batch_on_tokens, ",
        ),
        (lambda: build().fit(max_duratoin=3), "Trainer.fit has no argument 'max_duratoin'.*Known: device_train"),  # pyright: ignore[reportCallIssue]
    ],
)
def test_an_unknown_argument_lists_the_known_ones(call: Any, message: str) -> None:
    """And names the nearest, if one is near."""
    with pytest.raises(UnknownArgumentError, match=message):
        call()


def test_training_needs_data_and_an_end() -> None:
    """What is missing is named, with where it may be passed."""
    with build(train_dataloader=None) as trainer, pytest.raises(ConfigError, match="there is no train_dataloader"):
        trainer.fit()
    with (
        build(max_duration=None) as trainer,
        pytest.raises(ConfigError, match="no duration to train for: pass max_duration"),
    ):
        trainer.fit()


def test_an_end_that_is_behind_is_an_error(tmp_path: Path) -> None:
    """A second call of fit without a later end, or a checkpoint of another run that is further than the end."""
    with build(save_folder=tmp_path, run_name="first") as trainer:
        trainer.fit()
        with pytest.raises(ConfigError, match="max_duration=2ep has been reached: the run is at epoch 2, batch 10"):
            trainer.fit()
    arguments: dict[str, Any] = {"load_path": tmp_path / "latest-rank0.pt", "run_name": "second"}
    with build(max_duration="1ep", **arguments) as trainer, pytest.raises(ConfigError, match="has been reached"):
        trainer.fit()


def test_half_an_environment_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what is missing, rather than have each process train on everything."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="sets WORLD_SIZE, but not RANK"):
        build()


def test_a_model_that_does_not_fit_the_checkpoint_is_refused(tmp_path: Path) -> None:
    """At construction, with all that differs; the model is as it was."""

    class Other(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))

        def forward(self, batch: Any) -> Any:
            return self.layers(batch[0])

        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs.sum()

    with build(save_folder=tmp_path) as trainer:
        trainer.fit()
    other = Other()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(IncompatibleCheckpointError, match=r"layers.0.weight: \(8, 4\) in the checkpoint"):
        build(model=other, load_path=tmp_path / "latest-rank0.pt")
    assert same(other.state_dict(), before)


def test_a_failed_construction_leaves_the_data_as_it_is() -> None:
    """The same loader serves the next trainer."""
    data = DataLoader(Points(), batch_size=4)
    with pytest.raises(ConfigError):
        build(train_dataloader=data, max_duration="banana")
    with build(train_dataloader=data, max_duration="1ep") as trainer:
        trainer.fit()
    assert trainer.state.timestamp.batch == Timestamp(batch=5).batch
