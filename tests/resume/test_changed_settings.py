"""Settings that the script, or a callback, changes: which value a resumed run uses, and what the log says."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.tiny_training import Classifier, trainer
from torch.optim import lr_scheduler as L
from torch.utils.data import DataLoader, TensorDataset
from trainer.trainer_parts import At, Net, Seen, build, same, weights

from composerlite import Callback, Event, Logger, State, Trainer
from composerlite.core import Precision
from composerlite.errors import ConfigError, IncompatibleCheckpointError
from composerlite.optim import LinearScheduler


def launch(folder: Path, batches: int, rate: float, *, scheduler: str = "") -> Any:
    """Train up to so many batches; the trainer, which is closed."""
    torch.manual_seed(1)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedulers: Any = None
    if scheduler == "composer":
        schedulers = LinearScheduler(alpha_f=0.0, t_max="10ba")
    elif scheduler == "torch":
        schedulers = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    with trainer(
        model=model,
        optimizers=optimizer,
        schedulers=schedulers,
        step_schedulers_every_batch=True,
        max_duration=f"{batches}ba",
        save_folder=folder,
        save_interval="1ba",
        autoresume=True,
    ) as run:
        run.fit()
        return run


@pytest.mark.parametrize("scheduler", ["", "composer", "torch"])
def test_another_learning_rate_holds_from_there_on(
    tmp_path: Path, scheduler: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Scaled by where the schedule stands, once and not again at the next resume."""
    launch(tmp_path, 4, 0.1, scheduler=scheduler)
    with caplog.at_level(logging.WARNING):
        changed = launch(tmp_path, 5, 0.02, scheduler=scheduler)
    assert "the learning rate was (0.1,) in the interrupted run and is (0.02,) now" in caplog.text
    expected = 0.02 * (0.5 if scheduler else 1)
    assert changed.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(expected)
    caplog.clear()
    again = launch(tmp_path, 6, 0.02, scheduler=scheduler)
    assert again.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.02 * (0.4 if scheduler else 1))
    assert "learning rate was" not in caplog.text


class Peak(L.LRScheduler):
    """A user's, that keeps a rate of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, peak_lr: float) -> None:
        self.peak_lr = peak_lr
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [self.peak_lr / (1 + self.last_epoch)]


def parts(optimizer: Any) -> list[Any]:
    """Two schedulers, one of which goes to a lowest rate."""
    return [L.LinearLR(optimizer, total_iters=3), L.CosineAnnealingLR(optimizer, 20, eta_min=0.01)]


def nested(optimizer: Any) -> Any:
    """A sequence that is a part of another sequence."""
    return L.SequentialLR(optimizer, [L.LinearLR(optimizer), L.ExponentialLR(optimizer, 0.9)], [2])


@pytest.mark.parametrize(
    ("make", "holds"),
    [
        (lambda o: L.SequentialLR(o, parts(o), [3]), False),
        (lambda o: L.SequentialLR(o, [L.ConstantLR(o, 0.5, 3), L.CosineAnnealingWarmRestarts(o, 8)], [3]), True),
        (
            lambda o: L.SequentialLR(
                o, [L.SequentialLR(o, [L.LinearLR(o), L.ExponentialLR(o, 0.9)], [2]), L.PolynomialLR(o)], [6]
            ),
            True,
        ),
        (lambda o: L.ChainedScheduler([L.ConstantLR(o, 0.5, 6), L.CosineAnnealingWarmRestarts(o, 8)]), True),
        (lambda o: L.CosineAnnealingLR(o, 10, eta_min=0.01), False),
        (lambda o: L.CosineAnnealingLR(o, 10), True),
        (lambda o: L.PolynomialLR(o, 10), True),
        (lambda o: L.OneCycleLR(o, o.param_groups[0]["lr"], 20), True),
        (lambda o: L.CyclicLR(o, o.param_groups[0]["lr"], o.param_groups[0]["lr"] * 2, 4, cycle_momentum=False), False),
        (lambda o: Peak(o, o.param_groups[0]["lr"]), False),
        (lambda o: L.SequentialLR(o, [L.ConstantLR(o, 0.5, 3), Peak(o, o.param_groups[0]["lr"])], [3]), False),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of")  # torch's own, about a SequentialLR in another
def test_the_rate_that_the_log_says_holds_does(
    make: Any, holds: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With every kind of schedule, and those made of others: for all batches that follow, as if it had been so."""

    def rates(folder: str, rate: float, until: int) -> list[float]:
        found: list[float] = []

        class Rates(Callback):
            def batch_start(self, state: State, logger: Logger) -> None:
                found.append(float(state.optimizers[0].param_groups[0]["lr"]))

        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with trainer(
            model=model,
            optimizers=optimizer,
            schedulers=make(optimizer),
            step_schedulers_every_batch=True,
            max_duration=f"{until}ba",
            save_folder=tmp_path / folder,
            save_interval="1ba",
            autoresume=True,
            callbacks=[Rates()],
        ) as run:
            run.fit()
        return found

    expected = rates("whole", 0.2 if holds else 0.1, 12)
    rates("cut", 0.1, 5)
    with caplog.at_level(logging.WARNING):
        found = rates("cut", 0.2, 12)
    assert found == pytest.approx(expected[5:])
    assert ("the new value is used, scaled by the schedule" in caplog.text) is holds
    assert ("because the rates of" in caplog.text) is not holds


def test_an_optimizer_of_another_kind_is_told_the_way_out(tmp_path: Path) -> None:
    """Filters do not apply to a run that resumes: what the error says to do instead works."""
    launch(tmp_path / "run", 2, 0.1)

    def other(**arguments: Any) -> Any:
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keys = ["state/optimizers", "state/schedulers"]
        given = {"model": model, "optimizers": optimizer, "load_ignore_keys": keys, "autoresume": True}
        return trainer(save_interval="1ba", max_duration="3ba", **given, **arguments)

    with pytest.raises(IncompatibleCheckpointError) as error:
        other(save_folder=tmp_path / "run")
    assert "the load_… arguments apply only to load_path" in str(error.value)
    found = re.search(r"another run_name and load_path='(.*)'\.$", str(error.value))
    assert found is not None
    with other(save_folder=tmp_path / "other", run_name="other", load_path=found[1]) as run:
        assert int(run.state.timestamp.batch) == 2


# ── all that is another ──────────────────────────────────────────────────────────────────────────────────────────────
def relaunch(folder: Path, until: str, *, samples: int = 16, batch_size: int = 4, **arguments: Any) -> Any:
    """Train until then on so many samples, with SGD of these ``optimizer`` arguments; the trainer, which is closed."""
    model = Classifier()
    how: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **arguments.pop("optimizer", {})}
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=batch_size, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), **how)
    saved: dict[str, Any] = {"save_folder": folder, "autoresume": True, **arguments}
    with trainer(model=model, optimizers=optimizer, train_dataloader=loader, max_duration=until, **saved) as run:
        run.fit()
        return run


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of the warning about changed settings; none if there was none."""
    found = [record.getMessage() for record in caplog.records if " changed:" in record.getMessage()]
    assert len(found) <= 1
    return found[0].splitlines() if found else []


def test_one_warning_lists_all_settings_that_are_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each with its values, which of them holds, and how to choose the other."""
    relaunch(tmp_path, "1ep")
    optimizer = {"lr": 0.2, "weight_decay": 0.5, "dampening": 0.25, "nesterov": False, "maximize": True}
    other = relaunch(tmp_path, "2ep", optimizer=optimizer, samples=8, batch_size=2, seed=4, precision="amp_bf16")
    lines = said(caplog)
    path = str(tmp_path / "ep1-ba4-rank0.pt")
    optimizer_keys = "load_ignore_keys=['state/optimizers', 'state/schedulers']"
    seed_keys = "load_ignore_keys=['state/rank_zero_seed', 'state/dataset_state', 'rng']"
    used = "the new value is used; to continue as before give"
    depends = "Within an epoch the run stops with an error if the rest of the epoch depends on this setting"
    kept = "the checkpoint's value is used, because {} depend on this setting; to use the new value, start another "
    kept += f"run_name with load_path={path!r} and "
    assert lines == [
        "run 'run' resumes at batch 4 with 8 settings changed:",
        "  the learning rate was (0.1,) in the interrupted run and is (0.2,) now: the new value is used, scaled by the "
        "schedule; to continue as before give lr=0.1",
        f"  the dampening was 0 in the interrupted run and is 0.25 now: {used} dampening=0",
        f"  the weight_decay was 0.01 in the interrupted run and is 0.5 now: {used} weight_decay=0.01",
        "  the maximize was False in the interrupted run and is True now: "
        + kept.format("tensors of the optimizer")
        + optimizer_keys,
        f"  the precision was fp32 in the interrupted run and is amp_bf16 now: {used} precision='fp32'",
        f"  the batch size was 4 in the interrupted run and is 2 now: {used} batch_size=4. {depends}",
        f"  the number of training samples was 16 in the interrupted run and is 8 now: {used} a dataset of 16 samples. "
        + depends,
        "  the seed was 3 in the interrupted run and is 4 now: " + kept.format("the random generators") + seed_keys,
    ]
    (group,) = other.state.optimizers[0].param_groups
    assert (group["weight_decay"], group["dampening"], group["maximize"]) == (0.5, 0.25, False)
    assert group["lr"] == pytest.approx(0.2)
    assert other.state.rank_zero_seed == 3
    settings = torch.load(path, weights_only=True)["state"]["metadata"]["settings"]
    assert json.loads(json.dumps(settings)) == settings


def test_what_was_said_is_not_said_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next resume compares with what held, and not with what the script said."""
    relaunch(tmp_path, "1ep")
    relaunch(tmp_path, "2ep", optimizer={"weight_decay": 0.5, "maximize": True})
    caplog.clear()
    third = relaunch(tmp_path, "3ep", optimizer={"weight_decay": 0.5})
    assert said(caplog) == []
    assert third.state.optimizers[0].param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"optimizer": {"momentum": 0.0}}, "  the momentum was 0.9 in the interrupted run and is 0.0 now: the checkp"),
        ({"optimizer": {"momentum": 0.8}}, "  the momentum was 0.9 in the interrupted run and is 0.8 now: the new"),
    ],
)
def test_one_other_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], line: str) -> None:
    """A value that the tensors of the optimizer do not fit is not used."""
    relaunch(tmp_path, "1ep")
    relaunch(tmp_path, "2ep", **change)
    head, only = said(caplog)
    assert head == "run 'run' resumes at batch 4 with 1 setting changed:"
    assert only.startswith(line)


def test_with_load_path_the_checkpoint_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning says so, and its way to the script's values works."""
    relaunch(tmp_path, "1ep")
    path, changed = tmp_path / "ep1-ba4-rank0.pt", {"lr": 0.2, "weight_decay": 0.5}
    loaded = relaunch(tmp_path, "2ep", optimizer=changed, load_path=path, autoresume=False)
    assert said(caplog) == [
        "run 'run' resumes at batch 4 with 2 settings changed:",
        "  the learning rate was (0.1,) in the interrupted run and is (0.2,) now: the checkpoint's value is used; "
        "autoresume=True uses the script's value",
        "  the weight_decay was 0.01 in the interrupted run and is 0.5 now: the checkpoint's value is used; "
        "autoresume=True uses the script's value",
    ]
    assert loaded.state.optimizers[0].param_groups[0]["weight_decay"] == 0.01
    resumed = relaunch(tmp_path, "3ep", optimizer=changed)
    (group,) = resumed.state.optimizers[0].param_groups
    assert (group["lr"], group["weight_decay"]) == (pytest.approx(0.2), 0.5)


@pytest.mark.parametrize("kind", ["one_cycle", "seedless"])
def test_what_a_scheduler_or_nobody_changed_is_no_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A schedule of the learning rate and of momentum, and a seed that the script leaves to the trainer."""

    def launch_one(until: str) -> None:
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        how: dict[str, Any] = {"seed": None}
        if kind == "one_cycle":
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=12)
            how = {"schedulers": scheduler, "step_schedulers_every_batch": True}
        with trainer(
            model=model, optimizers=optimizer, max_duration=until, save_folder=tmp_path, autoresume=True, **how
        ) as run:
            run.fit()

    launch_one("1ep")
    launch_one("2ep")
    assert said(caplog) == []


def test_the_way_to_another_seed_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the warning says to do begins another run at the same batch, with that seed."""
    relaunch(tmp_path / "run", "1ep")
    relaunch(tmp_path / "run", "2ep", seed=4)
    found = re.search(r"load_path='(.*)' and load_ignore_keys=(\[.*\])$", said(caplog)[1])
    assert found is not None
    keys = json.loads(found[2].replace("'", '"'))
    caplog.clear()
    other = relaunch(tmp_path / "other", "2ep", run_name="other", seed=4, load_path=found[1], load_ignore_keys=keys)
    assert (other.state.rank_zero_seed, int(other.state.timestamp.batch)) == (4, 8)
    assert said(caplog) == []


Script = Callable[[Trainer], object]


class KilledError(Exception):
    """What ends a process in these tests."""


def at(batch: int, action: Callable[[State], object], event: Event = Event.BATCH_END) -> At:
    """Does that when so many batches are done."""
    return At(event, lambda state: action(state) if int(state.timestamp.batch) == batch else None)


def setting(name: str, value: object, batch: int) -> At:
    return at(batch, lambda state: setattr(state, name, value))


def run(folder: Path, *callbacks: At, cut: int | None = None, script: Script = Trainer.fit, **arguments: Any) -> Any:
    """One launch, which is killed when ``cut`` batches are done; the batches, and the trainer, which is closed."""

    def kill(state: State) -> None:
        raise KilledError

    seen = Seen()
    killed = [] if cut is None else [at(cut, kill, Event.BATCH_START)]
    own: dict[str, Any] = {"save_folder": folder, "save_interval": "1ba", "autoresume": True, "run_name": "run"}
    with build(callbacks=[*callbacks, *killed, seen], dropout=0.5, **{**own, **arguments}) as trainer:
        try:
            script(trainer)
        except KilledError:
            assert cut is not None
    return seen.steps, trainer


def changes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of the warning about changed settings."""
    return [line for record in caplog.records for line in record.getMessage().splitlines() if " now: " in line]


def two_calls(trainer: Trainer) -> None:
    trainer.fit(duration="4ba")
    trainer.fit(duration="8ba", device_train_microbatch_size=4)


def set_between_calls(trainer: Trainer) -> None:
    trainer.fit()
    trainer.state.max_duration = "2ep"
    trainer.fit()


@pytest.mark.parametrize(
    ("name", "value", "batch", "script", "end"),
    [
        ("max_duration", "3ep", 3, Trainer.fit, "2ep"),
        ("max_duration", "12ba", 5, Trainer.fit, "3ep"),
        ("max_duration", "13ba", 7, two_calls, None),
        ("max_duration", "12ba", 7, set_between_calls, "5ba"),
        ("device_train_microbatch_size", 2, 3, Trainer.fit, "3ep"),
        ("device_train_microbatch_size", 2, 7, two_calls, "3ep"),
        ("precision", Precision.AMP_BF16, 5, Trainer.fit, "3ep"),
        ("iteration_length", "2ep", 3, Trainer.fit, "3ep"),
    ],
)
def test_what_a_callback_has_set_holds_after_a_resume(
    tmp_path: Path, name: str, value: object, batch: int, script: Script, end: str | None
) -> None:
    """In the relaunch nothing sets it that was set before: all is as without the interruption."""
    cut = 8
    change = setting(name, value, batch)
    whole, first = run(tmp_path / "whole", change, script=script, max_duration=end)
    before, _ = run(tmp_path / "cut", change, cut=cut, script=script, max_duration=end)
    after, second = run(tmp_path / "cut", script=script, max_duration=end)
    assert before + after == whole
    assert same(weights(second), weights(first))
    assert getattr(second.state, name) == getattr(first.state, name)
    assert run(tmp_path / "cut", script=script, max_duration=end)[0] == []


@pytest.mark.parametrize("cut", [3, 4, 8])
@pytest.mark.parametrize(("frozen", "trained"), [(False, True), (True, False)], ids=["unfreezes", "freezes"])
def test_layers_that_a_callback_freezes_or_unfreezes_are_so_after_a_resume(
    tmp_path: Path, cut: int, frozen: bool, trained: bool
) -> None:
    """A script freezes a layer, and a callback unfreezes it after three batches, or the other way round."""

    def model() -> Net:
        net = Net(0.5)
        net.layers[0].requires_grad_(frozen)
        return net

    def train(folder: Path, *callbacks: At, cut: int | None = None) -> tuple[Any, Any]:
        torch.manual_seed(7)
        return run(folder, *callbacks, cut=cut, model=model(), max_duration="2ep")

    change = at(3, lambda state: state.model.get_submodule("layers.0").requires_grad_(trained))
    whole, first = train(tmp_path / "whole", change)
    before, _ = train(tmp_path / "cut", change, cut=cut)
    after, second = train(tmp_path / "cut", change)
    assert before + after == whole
    assert same(weights(second), weights(first))
    assert [one.requires_grad for one in second.state.model.parameters()] == [trained, trained, True, True]


def test_layers_that_the_script_freezes_are_frozen_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The script that resumes the run freezes what was trained."""
    run(tmp_path, cut=6)
    model = Net(0.5)
    model.layers[0].requires_grad_(False)
    _, trainer = run(tmp_path, model=model)
    assert [one.requires_grad for one in trainer.state.model.parameters()] == [False, False, True, True]
    assert changes(caplog) == [
        "  the list of frozen parameters was [] in the interrupted run and is ['layers.0.weight', 'layers.0.bias'] "
        "now: the new value is used; to continue as before give the same frozen parameters to the Trainer"
    ]


def test_what_was_set_in_a_finished_call_holds_in_the_next(tmp_path: Path) -> None:
    """Killed before the second call has saved anything."""

    def script(trainer: Trainer) -> None:
        trainer.fit(duration="4ba")
        trainer.fit(duration="6ba")

    change = setting("device_train_microbatch_size", 3, 2)
    whole, first = run(tmp_path / "whole", change, script=script, max_duration=None)
    for cut in (4, 5):
        before, _ = run(tmp_path / str(cut), change, cut=cut, script=script, max_duration=None)
        after, second = run(tmp_path / str(cut), script=script, max_duration=None)
        assert before + after == whole
        assert same(weights(second), weights(first))


def test_another_value_of_the_script_holds_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was given after the callback's. Once only: the next resume compares with it."""
    change = setting("max_duration", "12ba", 3), setting("device_train_microbatch_size", 2, 3)
    run(tmp_path, *change, cut=6, max_duration="3ep", device_train_microbatch_size=4)
    steps, _ = run(tmp_path, cut=13, max_duration="4ep", device_train_microbatch_size=1)
    assert [count for count, _ in steps] == list(range(7, 14))
    assert changes(caplog) == [
        "  the max_duration was 12ba in the interrupted run and is 4ep now: the new value is used; to continue as "
        "before give max_duration='3ep'",
        "  the device_train_microbatch_size was 2 in the interrupted run and is 1 now: the new value is used; to "
        "continue as before give device_train_microbatch_size=4",
    ]
    caplog.clear()
    steps, last = run(tmp_path, max_duration="4ep", device_train_microbatch_size=1)
    assert [count for count, _ in steps] == list(range(14, 21))
    assert (last.state.device_train_microbatch_size, changes(caplog)) == (1, [])


def test_a_later_end_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where nobody but the script has set it."""
    run(tmp_path, max_duration="1ep")
    assert len(run(tmp_path, max_duration="2ep")[0]) == 5
    assert changes(caplog) == []


def test_a_run_that_was_stopped_before_a_changed_end_stays_stopped(tmp_path: Path) -> None:
    """A callback has brought the end nearer, and another stopped the run before it."""
    changes = setting("max_duration", "2ep", 2), at(7, lambda state: state.stop_training())
    assert len(run(tmp_path, *changes, max_duration="3ep")[0]) == 7
    assert run(tmp_path, max_duration="3ep")[0] == []


def out_of_memory_above(size: int) -> At:
    def check(state: State) -> None:
        if len(state.batch[0]) > size:
            raise torch.OutOfMemoryError("out of memory")

    return At(Event.BEFORE_FORWARD, check)


@pytest.mark.parametrize("giving", ["constructor", "fit"])
def test_the_size_that_was_found_is_not_looked_for_again(tmp_path: Path, giving: str) -> None:
    """Two samples fitted: whatever fits after the resume, whoever was told to find the size."""

    def fit(trainer: Trainer) -> None:
        if giving == "fit":
            trainer.fit(device_train_microbatch_size="auto")
        else:
            trainer.fit()

    given: dict[str, Any] = {"script": fit}
    if giving == "constructor":
        given["device_train_microbatch_size"] = "auto"
    whole, first = run(tmp_path / "whole", out_of_memory_above(2), **given)
    before, _ = run(tmp_path / "cut", out_of_memory_above(2), cut=6, **given)
    after, second = run(tmp_path / "cut", **given)
    assert before + after == whole
    assert second.state.device_train_microbatch_size == 2
    assert same(weights(second), weights(first))


def test_the_end_of_a_finished_call_is_that_of_the_run(tmp_path: Path) -> None:
    """In a relaunch as in one process: the next call without a duration is refused, or has ended."""

    def script(trainer: Trainer) -> None:
        trainer.fit(duration="4ba")
        trainer.fit(duration="2ba")
        with pytest.raises(ConfigError, match="max_duration=6ba has been reached"):
            trainer.fit()

    assert len(run(tmp_path, script=script, max_duration="4ep")[0]) == 6

    def relaunched(trainer: Trainer) -> None:
        trainer.fit(duration="4ba")
        trainer.fit(duration="2ba")
        trainer.fit()

    steps, trainer = run(tmp_path, script=relaunched, max_duration="4ep")
    assert (steps, trainer.state.max_duration) == ([], "6ba")
