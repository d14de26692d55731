"""Schedulers that ``fit`` is given continue after a resume, though they are made when the checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import covering
from torch.optim import lr_scheduler
from trainer.trainer_parts import At, Net, Seen, build, loader, same, weights

from composerlite import Event, State, Trainer
from composerlite.errors import IncompatibleCheckpointError
from composerlite.optim import ExponentialScheduler, LinearScheduler

Make = Callable[[torch.optim.Optimizer], Any]
Script = Callable[[Trainer, Make], object]


class KilledError(Exception):
    """What ends a process in these tests."""


def kill(state: State) -> None:
    raise KilledError


KINDS: dict[str, Make] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 2)),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=7),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=30),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.CosineAnnealingLR(optimizer, 9)], [3]
    ),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, threshold=1.0, patience=0),
    "Composer's": lambda _: LinearScheduler(t_max="20ba"),
}


def one_call(trainer: Trainer, make: Make) -> None:
    trainer.fit(duration="8ba", schedulers=make(trainer.state.optimizers[0]), step_schedulers_every_batch=True)


def in_the_first_of_two(trainer: Trainer, make: Make) -> None:
    trainer.fit(duration="3ba", schedulers=make(trainer.state.optimizers[0]), step_schedulers_every_batch=True)
    trainer.fit(duration="5ba")


def in_the_second_of_two(trainer: Trainer, make: Make) -> None:
    trainer.fit(duration="3ba")
    trainer.fit(duration="5ba", schedulers=make(trainer.state.optimizers[0]), step_schedulers_every_batch=True)


def in_both(trainer: Trainer, make: Make) -> None:
    trainer.fit(duration="3ba", schedulers=make(trainer.state.optimizers[0]), step_schedulers_every_batch=True)
    trainer.fit(duration="5ba", schedulers=make(trainer.state.optimizers[0]), train_dataloader=loader(12))


def made_beforehand(trainer: Trainer, make: Make) -> None:
    first, second = make(trainer.state.optimizers[0]), make(trainer.state.optimizers[0])
    trainer.fit(duration="3ba", schedulers=first, step_schedulers_every_batch=True)
    trainer.fit(duration="5ba", schedulers=second)


SCRIPTS: dict[str, Script] = {
    script.__name__: script
    for script in (one_call, in_the_first_of_two, in_the_second_of_two, in_both, made_beforehand)
}


def launch(
    folder: Path,
    script: Script,
    make: Make,
    *,
    own: Make | None = None,
    lr: float = 0.1,
    cut: int | None = None,
    **arguments: Any,
) -> Any:
    """One launch, which is killed when ``cut`` batches are done; what was trained and how fast, and the trainer."""
    model = Net(dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    seen, rates = Seen(), list[Any]()
    rate = At(Event.BATCH_START, lambda state: rates.append({**state.optimizers[0].param_groups[0], "params": None}))
    killed = [At(Event.BATCH_START, lambda state: kill(state) if int(state.timestamp.batch) == cut else None)]
    given: dict[str, Any] = {
        "model": model,
        "optimizers": optimizer,
        "schedulers": None if own is None else own(optimizer),
        "max_duration": None,
        "step_schedulers_every_batch": True,
        "save_folder": folder,
        "save_interval": "1ba",
        "autoresume": True,
        "run_name": "run",
        "eval_dataloader": loader(shuffle=False),
        "eval_interval": "2ba",
        "callbacks": [*killed, rate, seen],
    }
    with build(**{**given, **arguments}) as trainer:
        try:
            script(trainer, make)
        except KilledError:
            assert cut is not None
    return list(zip(seen.steps, rates, strict=False)), trainer


def check(tmp_path: Path, script: Script, make: Make, cuts: tuple[int, ...], **arguments: Any) -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()

    def go(folder: Path, **more: Any) -> Any:
        torch.set_rng_state(state)
        return launch(folder, script, make, **arguments, **more)

    whole, first = go(tmp_path / "whole")
    assert len({step[1]["lr"] for step in whole}) > 1
    for cut in cuts:
        before, _ = go(tmp_path / str(cut), cut=cut)
        after, second = go(tmp_path / str(cut))
        assert before + after == whole, f"killed after batch {cut}"
        assert same(weights(second), weights(first)), f"killed after batch {cut}"
        for one, other in zip(first.state.schedulers, second.state.schedulers, strict=True):
            assert str(one.state_dict()) == str(other.state_dict())


@pytest.mark.parametrize(("kind", "name"), covering(1, list(KINDS), list(SCRIPTS)))
def test_a_run_is_resumed_with_its_schedule(
    tmp_path: Path, kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Within the call that was given it, in a later one, and at the boundary; nothing is said that does not match."""
    check(tmp_path, SCRIPTS[name], KINDS[kind], (2, 3, 6))
    assert "does not match" not in caplog.text


@pytest.mark.parametrize("kind", ["StepLR", "Composer's"])
@pytest.mark.parametrize("name", ["in_the_second_of_two", "in_both"])
def test_the_schedule_of_the_constructor_takes_no_other_ones_state(tmp_path: Path, name: str, kind: str) -> None:
    """Of the same class or another one."""
    own: Make = lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.9)
    check(tmp_path, SCRIPTS[name], KINDS[kind], (2, 3, 6), own=own)


def by_ratio(trainer: Trainer, make: Make) -> None:
    trainer.fit(duration="6ba", scale_schedule_ratio=0.5)
    trainer.fit(duration="5ba")


def test_a_ratio_that_a_finished_call_was_given_holds(tmp_path: Path) -> None:
    """In the calls after it, and in a relaunch of them."""
    check(tmp_path, by_ratio, KINDS["Composer's"], (2, 3, 6), own=lambda _: LinearScheduler(t_max="20ba"))


def phases(trainer: Trainer, make: Make) -> None:
    trainer.fit(duration="3ba")
    trainer.fit(duration="5ba", schedulers=LinearScheduler(t_max="20ba"))


@pytest.mark.parametrize("cut", [2, 6])
def test_no_alarm_is_raised_before_the_schedulers_are_there(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Composer's schedules of a run that has no end yet are made by the first call of fit."""
    own: Make = lambda _: ExponentialScheduler(0.9, "1ba")
    check(tmp_path, phases, KINDS["Composer's"], (cut,), own=own)
    assert "does not match" not in caplog.text


def test_what_does_not_match_is_said_when_the_call_has_begun(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, with both sides."""
    launch(tmp_path, one_call, KINDS["StepLR"], cut=3)
    launch(tmp_path, one_call, KINDS["LambdaLR"])
    (said,) = [record.getMessage() for record in caplog.records if "does not match" in record.getMessage()]
    assert said.endswith(
        "the checkpoint has no state of 'LambdaLR' in schedulers: LambdaLR starts fresh; "
        "the checkpoint has a state of 'StepLR' in schedulers, and the run has no StepLR"
    )


def test_a_new_run_begins_the_schedule_that_fit_is_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It takes the state for the one of its constructor, as it did, and not for another."""
    launch(tmp_path / "base", one_call, KINDS["StepLR"])
    tuning: dict[str, Any] = {"load_path": tmp_path / "base" / "latest-rank0.pt", "run_name": "tuned"}
    _, fresh = launch(tmp_path / "tuned", one_call, KINDS["StepLR"], **tuning)
    assert fresh.state.schedulers[0].last_epoch == 8
    assert "has a state of 'StepLR' in schedulers, and the run has no StepLR" in caplog.text
    caplog.clear()

    def without(trainer: Trainer, make: Make) -> None:
        trainer.fit(duration="8ba")

    _, taken = launch(tmp_path / "own", without, KINDS["StepLR"], own=KINDS["StepLR"], **tuning)
    assert taken.state.schedulers[0].last_epoch == 16
    assert "does not match" not in caplog.text


def test_another_learning_rate_scales_the_schedule_of_fit_too(tmp_path: Path) -> None:
    """As it does that of the constructor: from the resume on."""
    whole, _ = launch(tmp_path / "whole", one_call, KINDS["LambdaLR"], lr=0.2)
    launch(tmp_path / "cut", one_call, KINDS["LambdaLR"], lr=0.1, cut=3)
    after, _ = launch(tmp_path / "cut", one_call, KINDS["LambdaLR"], lr=0.2)
    assert [step[1]["lr"] for step in after] == pytest.approx([step[1]["lr"] for step in whole[3:]])


def test_a_checkpoint_from_before_fit_holds_what_was_loaded(tmp_path: Path) -> None:
    """A relaunch that saves at once, and has no schedulers yet, loses nothing."""
    launch(tmp_path / "cut", one_call, KINDS["StepLR"], cut=3)

    def saving(trainer: Trainer, make: Make) -> None:
        trainer.save_checkpoint(str(tmp_path / "saved.pt"))

    launch(tmp_path / "cut", saving, KINDS["StepLR"])
    assert torch.load(tmp_path / "saved.pt")["state"]["schedulers"]["StepLR"]["last_epoch"] == 3


def test_state_that_a_scheduler_cannot_take_is_named(tmp_path: Path) -> None:
    """With the way to leave it out, as of the constructor's."""
    launch(tmp_path / "cut", one_call, KINDS["SequentialLR"], cut=3)
    contents = torch.load(tmp_path / "cut" / "latest-rank0.pt", weights_only=False)
    contents["state"]["schedulers"]["SequentialLR"] = {"_schedulers": None}
    torch.save(contents, tmp_path / "damaged.pt")
    loaded: dict[str, Any] = {"load_path": tmp_path / "damaged.pt", "autoresume": False, "save_folder": None}
    with pytest.raises(IncompatibleCheckpointError, match=r"cannot restore 'schedulers/SequentialLR'.*ignore_keys"):
        launch(tmp_path, one_call, KINDS["SequentialLR"], **loaded)
