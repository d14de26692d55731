"""Whatever a module has in its state, and however its tensors lie in memory: what can be saved is restored into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_kinds_parts import kinds, laid_out_like, same
from tiny_training import Classifier, CrashError, StopAt, trainer
from torch import nn

from composerlite.checkpoint import Checkpointer, load_state_dict, save_state_dict

LAID_OUT = ("expanded", "columns", "transposed", "overlapping", "channels last")
EXTRA: dict[str, Any] = {
    "a dict": {"scale": torch.arange(3.0), "history": [1.5, (2, "three")], 4: None},
    "a list": [1, torch.ones(2)],
    "a number": 7,
    "a text": "amax",
    "bytes": b"\x00\x01",
    "a set": {1, 2},
    "a tensor": torch.tensor([1, 2]),
    "an empty dict": {},
    "nothing": None,
}


class With(Classifier):
    """Has buffers, and a part with state of its own."""

    def __init__(self, buffer: torch.Tensor | None = None, extra: Any = None) -> None:
        super().__init__()
        self.register_buffer("kept", buffer)
        self.part = Part(extra)


class Part(nn.Module):
    """Keeps what is no parameter and no buffer, as modules with 8-bit numbers keep their scales."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def resumed(folder: Path, saved: With, fresh: With) -> With:
    """``fresh``, restored by a run that resumes one that trained ``saved`` and crashed."""
    how: dict[str, Any] = {"save_folder": folder, "save_interval": "1ba", "max_duration": "1ep", "autoresume": True}
    with trainer(model=saved, callbacks=[StopAt(2)], **how) as run, pytest.raises(CrashError):
        run.fit()
    with trainer(model=fresh, **how) as run:
        run.fit()
    return fresh


@pytest.mark.parametrize("name", LAID_OUT)
def test_a_resumed_run_fills_a_buffer_however_it_lies_in_memory(tmp_path: Path, name: str) -> None:
    """Also one whose elements share memory, into which torch copies nothing."""
    tensor = kinds()[name]
    model = resumed(tmp_path, With(tensor), With(laid_out_like(tensor)))
    assert same(model.kept, tensor)


class Plain(With):
    """Has a ``state_dict`` of its own, which takes no arguments."""

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().state_dict()


def test_a_resumed_run_fills_a_model_with_a_state_dict_of_its_own(tmp_path: Path) -> None:
    """It is called as it is saved, without arguments."""
    tensor = kinds()["columns"]
    assert same(resumed(tmp_path, Plain(tensor), Plain(laid_out_like(tensor))).kept, tensor)


@pytest.mark.parametrize("name", LAID_OUT)
def test_functions_fill_a_tensor_however_it_lies_in_memory(tmp_path: Path, name: str) -> None:
    """In place: who else has it sees what was loaded."""
    tensor = kinds()[name]
    save_state_dict(tmp_path / "saved", {"one": tensor, "below": [tensor]})
    one, other = laid_out_like(tensor), laid_out_like(tensor)
    load_state_dict(tmp_path / "saved", {"one": one, "below": [other]})
    assert same(one, tensor)
    assert same(other, tensor)


@pytest.mark.parametrize("name", LAID_OUT)
def test_the_checkpointer_fills_a_buffer_however_it_lies_in_memory(tmp_path: Path, name: str) -> None:
    """As a run that resumes."""
    tensor = kinds()[name]
    Checkpointer().save(tmp_path / "step1", With(tensor), {})
    model = With(laid_out_like(tensor))
    Checkpointer().load(tmp_path / "step1", model)
    assert same(model.kept, tensor)


@pytest.mark.parametrize("name", list(EXTRA))
def test_a_resumed_run_has_what_a_module_keeps_besides(tmp_path: Path, name: str) -> None:
    """What ``get_extra_state`` returns is handed to ``set_extra_state``, of whatever type."""
    model = resumed(tmp_path, With(extra=EXTRA[name]), With(extra={"of another": "type"}))
    assert equal(model.part.extra, EXTRA[name])


@pytest.mark.parametrize("name", sorted(EXTRA.keys() - {"a set", "an empty dict"}))
def test_the_checkpointer_has_what_a_module_keeps_besides(tmp_path: Path, name: str) -> None:
    """As a run that resumes; what torch's functions for the state of a model do not take, and what is empty, apart."""
    Checkpointer().save(tmp_path / "step1", With(extra=EXTRA[name]), {})
    model = With(extra={"of another": "type"})
    Checkpointer().load(tmp_path / "step1", model)
    assert equal(model.part.extra, EXTRA[name])


def equal(one: Any, other: Any) -> bool:
    """Compare values of the same types, with tensors in them."""
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and same(one, other)
    if isinstance(other, dict):
        return isinstance(one, dict) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in other)
    if isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other
