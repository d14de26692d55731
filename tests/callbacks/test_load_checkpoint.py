"""LoadCheckpoint: a checkpoint that is loaded at an event."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.tiny_training import train, trainer
from torch import nn

from composerlite import Callback
from composerlite.callbacks import LoadCheckpoint
from composerlite.checkpoint import save_checkpoint
from composerlite.core import Engine, Event, Logger, State
from composerlite.errors import (
    CheckpointNotFoundError,
    ConfigError,
    IncompatibleCheckpointError,
    UnknownArgumentError,
)


def new_state(*callbacks: LoadCheckpoint, value: float = 0.0, bias: bool = True) -> State:
    model = nn.Linear(2, 2, bias=bias)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return State(
        model,
        rank_zero_seed=0,
        run_name="run",
        device=torch.device("cpu"),
        max_duration="10ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=callbacks,
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """Batch 1 of a run, all weights are 3."""
    state = new_state(value=3.0)
    state.timestamp = state.timestamp.to_next_batch()
    return save_checkpoint(state, tmp_path / "run" / "base.pt")


def weight(state: State) -> float:
    return state.model.get_parameter("weight").mean().item()


@pytest.mark.parametrize(
    ("event", "at"),
    [(None, Event.BEFORE_LOAD), (Event.AFTER_LOAD, Event.AFTER_LOAD), ("fit_start", Event.FIT_START)],
)
def test_it_loads_at_its_event(checkpoint: str, event: Event | str | None, at: Event) -> None:
    """Before the trainer's own loading by default; the event may be given by name; not before it, and once only."""
    how = {} if event is None else {"event": event}
    state = new_state(LoadCheckpoint(checkpoint, **how))  # type: ignore[arg-type]
    engine = Engine(state, Logger(state))
    for now in (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START):
        assert weight(state) == 0
        engine.run_event(now)
        if now is at:
            break
    assert (weight(state), int(state.timestamp.batch)) == (3, 1)

    nn.init.constant_(state.model.get_parameter("weight"), 5.0)
    engine.run_event(at)
    assert weight(state) == 5


class StopsAt(Callback):
    """Raises at a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_start(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.batch:
            raise InterruptedError


@pytest.mark.parametrize("event", [Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START])
def test_a_run_that_is_resumed_does_not_load_it_again(event: Event, tmp_path: Path) -> None:
    """A fine-tuning script that is restarted keeps what it has trained, whichever event the base is loaded at."""
    train(save_folder=tmp_path / "base", run_name="base")
    base = LoadCheckpoint(tmp_path / "base" / "latest-rank0.pt", load_weights_only=True, event=event)

    def tuning(folder: str, *callbacks: Callback, **how: Any) -> Any:
        load = copy.copy(base)
        arguments = {"save_folder": tmp_path / folder, "save_interval": "1ba", "autoresume": True, "run_name": folder}
        return trainer(callbacks=[load, *callbacks], **{**arguments, **how})

    with tuning("whole") as whole:
        whole.fit()
    with pytest.raises(InterruptedError), tuning("cut", StopsAt(5)) as cut:
        cut.fit()
    with tuning("cut") as resumed:
        resumed.fit()
    for name, expected in whole.state.model.state_dict().items():
        assert torch.equal(resumed.state.model.state_dict()[name], expected), name


def load(state: State) -> None:
    Engine(state, Logger(state)).run_event(Event.BEFORE_LOAD)


def test_weights_alone_can_be_loaded(checkpoint: str) -> None:
    """The base of a fine-tuning: time stays where it is."""
    state = new_state(LoadCheckpoint(checkpoint, load_weights_only=True))
    load(state)
    assert (weight(state), int(state.timestamp.batch)) == (3, 0)


def test_keys_can_be_ignored(checkpoint: str) -> None:
    """By globs, as in the trainer."""
    state = new_state(LoadCheckpoint(checkpoint, ignore_keys=["state/model/weight"], strict_model_weights=False))
    load(state)
    assert weight(state) == 0
    assert state.model.get_parameter("bias").tolist() == [3, 3]


def test_strictness_can_be_given_up(checkpoint: str) -> None:
    """Strict by default: a model with other names is an error."""
    arguments: dict[str, Any] = {"load_path": checkpoint, "load_weights_only": True}
    with pytest.raises(IncompatibleCheckpointError, match=r"not in the model \(1\): bias"):
        load(new_state(LoadCheckpoint(**arguments), bias=False))
    state = new_state(LoadCheckpoint(**arguments, strict_model_weights=False), bias=False)
    load(state)
    assert weight(state) == 3


def test_the_path_may_have_the_name_of_the_run(checkpoint: str) -> None:
    """Variables are filled in when it loads."""
    state = new_state(LoadCheckpoint(checkpoint.replace("/run/", "/{run_name}/")))
    load(state)
    assert weight(state) == 3


def test_two_of_them_build_a_model_from_two_checkpoints(checkpoint: str, tmp_path: Path) -> None:
    """Each takes its part."""
    other = save_checkpoint(new_state(value=4.0), tmp_path / "other.pt")
    common: dict[str, Any] = {"load_weights_only": True, "strict_model_weights": False}
    state = new_state(
        LoadCheckpoint(checkpoint, ignore_keys=["state/model/bias"], **common),
        LoadCheckpoint(other, ignore_keys=["state/model/weight"], **common),
    )
    load(state)
    assert weight(state) == 3
    assert state.model.get_parameter("bias").tolist() == [4, 4]


def test_a_missing_checkpoint_is_an_error_at_the_event(checkpoint: str) -> None:
    """It says how to list those that there are."""
    state = new_state(LoadCheckpoint(checkpoint.replace("base", "bass")))
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint file .*bass\.pt.*checkpoint ls"):
        load(state)


def test_bad_arguments_are_errors_at_construction() -> None:
    """An event that does not exist, a misspelt argument, globs that are none."""
    with pytest.raises(ConfigError, match=r"event='befor_load' does not exist.*'before_load'"):
        LoadCheckpoint("x.pt", event="befor_load")
    with pytest.raises(UnknownArgumentError, match=r"'load_weight_only'.*'load_weights_only'"):
        LoadCheckpoint("x.pt", load_weight_only=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="ignore_keys='rng'"):
        LoadCheckpoint("x.pt", ignore_keys="rng")
