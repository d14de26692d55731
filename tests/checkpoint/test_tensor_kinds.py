"""A tensor of any kind is restored exactly, or refused before training starts: never saved and lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_kinds_parts import Scaled, kinds, same, zeros_like
from tiny_training import Classifier, CrashError, StopAt, trainer

from composerlite import Callback, State
from composerlite.checkpoint import (
    Checkpointer,
    async_save_state_dict,
    load_keys,
    load_state_dict,
    save_state_dict,
)

pytestmark = [pytest.mark.filterwarnings("ignore:.*"), pytest.mark.parametrize("name", list(kinds()))]


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    """As the script of who uses the class."""
    with torch.serialization.safe_globals([Scaled]):
        yield


class With(Classifier):
    """Has a buffer of some kind."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", buffer)


class Keeps(Callback):
    """Has a tensor of some kind, by itself and in a tuple."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.kept: Any = {"itself": tensor, "inside": (tensor, [tensor])}

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict


def assert_kept(run: Any, tensor: torch.Tensor) -> None:
    state: State = run.state
    kept = next(callback for callback in state.callbacks if isinstance(callback, Keeps)).kept
    assert same(state.model.kept, tensor)
    assert same(kept["itself"], tensor)
    assert same(kept["inside"][0], tensor)
    assert same(kept["inside"][1][0], tensor)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_resumed_run_has_it(tmp_path: Path, name: str, mode: str) -> None:
    """As a buffer of the model and in a callback; and plain torch opens the file without running code."""
    tensor = kinds()[name]
    how: dict[str, Any] = {"save_folder": tmp_path, "save_interval": "1ba", "save_async": mode == "async"}
    how |= {"max_duration": "1ep", "autoresume": True}
    with trainer(model=With(tensor), callbacks=[Keeps(tensor), StopAt(2)], **how) as run, pytest.raises(CrashError):
        run.fit()
    other = zeros_like(tensor)
    with trainer(model=With(other), callbacks=[Keeps(other)], **how) as run:
        assert_kept(run, tensor)
        run.fit()
        path = run.saved_checkpoints[-1]
    read = torch.load(path, weights_only=True)["state"]
    assert same(read["model"]["kept"], tensor)


def test_functions_save_and_load_it(tmp_path: Path, name: str) -> None:
    """By itself, in containers, behind the thread; into what is there, and where nothing is."""
    tensor = kinds()[name]
    state = {"itself": tensor, "below": {3: [tensor, {"a": tensor}]}, "tuple": (tensor, 1)}
    save_state_dict(tmp_path / "now", state)
    async_save_state_dict(tmp_path / "later", state).result()
    for folder in ("now", "later"):
        other = zeros_like(tensor)
        loaded: dict[str, Any] = {"itself": None, "below": {3: [other, {"a": zeros_like(tensor)}]}, "tuple": (other, 0)}
        load_state_dict(tmp_path / folder, loaded)
        (read,) = load_keys(tmp_path / folder, ["below"])
        for found in (loaded["itself"], loaded["below"][3][0], loaded["below"][3][1]["a"], loaded["tuple"][0]):
            assert same(found, tensor)
        assert same(read[3][0], tensor)


def test_the_checkpointer_saves_and_loads_it(tmp_path: Path, name: str) -> None:
    """As a buffer of the model, and in what a rank remembers."""
    tensor = kinds()[name]
    Checkpointer().save(tmp_path / "step1", With(tensor), {"mine": (tensor,)})
    model = With(zeros_like(tensor))
    remembered = Checkpointer().load(tmp_path / "step1", model)
    assert remembered is not None
    assert same(remembered["mine"][0], tensor)
    assert same(model.kept, tensor)
