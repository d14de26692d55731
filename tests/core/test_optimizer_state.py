"""Optimizer state by parameter name: independent of the order in which parameters were made."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from checkpoint.sharded_parts import same
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from composerlite.core.state.optimizer_state import clean_name, load_named_optimizer_state, named_optimizer_state
from composerlite.errors import IncompatibleCheckpointError

NAMES = ["a", "b", "c", "d"]


class Model(nn.Module):
    """Parameters of different shapes, made in the order of ``names``; values depend on the name alone."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        for name in names:
            size = NAMES.index(name) + 2
            self.register_parameter(name, nn.Parameter(torch.arange(float(size))))


def trained(
    names: Sequence[str], groups: Sequence[Sequence[str]] = (), steps: int = 3
) -> tuple[Model, torch.optim.Optimizer]:
    """A model and its optimizer after ``steps`` steps. ``groups`` names parameters by group; by default all in one."""
    model = Model(names)
    parameters = dict(model.named_parameters())
    chosen = [
        {"params": [parameters[name] for name in group], "lr": 0.1 * (index + 1)}
        for index, group in enumerate(groups or [names])
    ]
    optimizer = torch.optim.AdamW(chosen, lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum().backward()
        optimizer.step()
    return model, optimizer


def test_state_is_keyed_by_name() -> None:
    """Names take the place of numbers, in the state and in the groups."""
    model, optimizer = trained(NAMES, [["a", "b"], ["c", "d"]])
    named = named_optimizer_state(optimizer, model)
    assert list(named["state"]) == NAMES
    assert [group["params"] for group in named["param_groups"]] == [["a", "b"], ["c", "d"]]
    assert named["state"]["b"]["exp_avg"].shape == (3,)


@given(st.permutations(NAMES))
def test_it_loads_whatever_the_order_of_parameters_is(order: list[str]) -> None:
    """Each parameter gets its own state back, also where parameters are made in another order."""
    model, optimizer = trained(NAMES)
    saved = named_optimizer_state(optimizer, model)
    again, fresh = trained(order, steps=0)
    load_named_optimizer_state(fresh, again, saved, source="the checkpoint")
    parameters = dict(again.named_parameters())
    for name, values in saved["state"].items():
        for key, value in values.items():
            assert torch.equal(fresh.state[parameters[name]][key], value)
    torch.testing.assert_close(named_optimizer_state(fresh, again)["state"], saved["state"], rtol=0, atol=0)


def test_parameters_of_another_group_are_all_named() -> None:
    """Where groups differ, the error lists every parameter on either side, and nothing was changed."""
    model, optimizer = trained(NAMES, [["a", "b"], ["c", "d"]])
    saved = named_optimizer_state(optimizer, model)
    again, fresh = trained(NAMES, [["a", "c"], ["b", "d"]], steps=0)
    with pytest.raises(IncompatibleCheckpointError) as error:
        load_named_optimizer_state(fresh, again, saved, source="ep1.pt")
    text = str(error.value)
    assert text.startswith("ep1.pt: AdamW does not fit. group 0 has no saved state for: c; ")
    for part in (
        "group 0 was saved with other parameters: b",
        "group 1 has no saved state for: b",
        "group 1 was saved with other parameters: c",
        "load_ignore_keys=['state/optimizers']",
    ):
        assert part in text
    assert not fresh.state


def test_another_number_of_groups_is_an_error() -> None:
    """One group cannot take the state of two."""
    model, optimizer = trained(NAMES, [["a", "b"], ["c", "d"]])
    again, fresh = trained(NAMES, steps=0)
    with pytest.raises(IncompatibleCheckpointError, match="saved with 2 parameter groups and has 1 now"):
        load_named_optimizer_state(fresh, again, named_optimizer_state(optimizer, model), source="the checkpoint")


def test_a_moment_of_another_shape_is_refused_before_the_first_step() -> None:
    """The optimizer has not stepped: the parameter tells the shape, also where only one of them has changed."""
    model, optimizer = trained(NAMES)
    again, fresh = trained(NAMES, steps=0)
    saved = copy.deepcopy(named_optimizer_state(optimizer, model))
    saved["state"]["b"]["exp_avg"] = torch.zeros(7)
    with pytest.raises(IncompatibleCheckpointError, match=r"exp_avg of b has another shape: \(7,\).*, \(3,\) now"):
        load_named_optimizer_state(fresh, again, saved, source="the checkpoint")
    assert not fresh.state


class OfOthers(torch.optim.Optimizer):
    """An optimizer of another library, with the state that ``make`` gives a parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter], make: Callable[[torch.Tensor], dict[str, Any]]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = make(parameter.detach())


FACTORED: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "rows and columns": lambda p: {"row": p.sum(-1), "col": p.sum(0), "step": torch.zeros(1)},
    "rows of the same rank": lambda p: {"row_var": p.sum(-1, keepdim=True), "col_var": p.sum(0, keepdim=True)},
    "preconditioners": lambda p: {f"precond_{i}": torch.eye(size) for i, size in enumerate(p.shape)},
    "8-bit blocks": lambda p: {
        "state1": p.clone(),
        "qmap1": torch.zeros(256),
        "absmax1": torch.zeros(-(-p.numel() // 4)),
    },
    "low rank": lambda p: {"exp_avg": torch.zeros(min(2, p.shape[0]), *p.shape[1:]), "step": 3},
    "flat": lambda p: {"buffer": p.flatten()},
    "lists": lambda p: {"GG": [torch.zeros(size, size) for size in p.shape]},
}
"""State that is not shaped as its parameter is."""


@pytest.mark.parametrize("kind", FACTORED)
def test_state_of_another_form_than_its_parameter_is_restored(kind: str) -> None:
    """Of optimizers whose state we do not know: factored, flat, in blocks."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3), nn.Linear(3, 1))
        return model, OfOthers(model.parameters(), FACTORED[kind])

    model, optimizer = build()
    saved = copy.deepcopy(named_optimizer_state(optimizer, model))
    again, fresh = build()
    fresh.state.clear()
    load_named_optimizer_state(fresh, again, saved, source="the checkpoint")
    assert same(named_optimizer_state(fresh, again)["state"], saved["state"])


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    name: functools.partial(kind, lr=0.1)
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and name not in ("Optimizer", "SparseAdam", "Muon")
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_each_optimizer_of_torch_is_restored_before_the_first_step(kind: str) -> None:
    """Whatever it keeps of matrices, vectors and numbers."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
        model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
        return model, KINDS[kind](model.parameters())

    def loss() -> torch.Tensor:
        value = (model(torch.ones(2, 5)) * model.scale).square().sum()
        optimizer.zero_grad()
        value.backward()
        return value

    model, optimizer = build()
    optimizer.step(loss)
    saved = copy.deepcopy(named_optimizer_state(optimizer, model))
    again, fresh = build()
    load_named_optimizer_state(fresh, again, saved, source="the checkpoint")
    assert same(named_optimizer_state(fresh, again)["state"], saved["state"])


def test_names_that_an_optimizer_keeps_stay_beside_their_parameters() -> None:
    """``param_names`` of a file in another order do not come with it."""
    model, again = Model(NAMES), Model(NAMES[::-1])
    saved = named_optimizer_state(torch.optim.SGD(model.named_parameters(), lr=0.1), model)
    fresh = torch.optim.SGD(again.named_parameters(), lr=0.2)
    load_named_optimizer_state(fresh, again, saved, source="the checkpoint")
    assert named_optimizer_state(fresh, again)["param_groups"][0]["param_names"] == NAMES[::-1]
    assert fresh.param_groups[0]["lr"] == 0.1


def test_a_parameter_that_is_not_the_models_is_named_by_its_place() -> None:
    """The optimizer's state of a temperature beside the model is saved and restored, for who saves the temperature."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer, nn.Parameter]:
        model, extra = Model(["a"]), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1, momentum=0.9)
        return model, optimizer, extra

    model, optimizer, extra = build()
    extra.square().sum().backward()
    optimizer.step()
    saved = named_optimizer_state(optimizer, model)
    assert list(saved["state"]) == ["optimizer.0.1"]
    again, fresh, other = build()
    load_named_optimizer_state(fresh, again, saved, source="the checkpoint")
    assert torch.equal(fresh.state[other]["momentum_buffer"], optimizer.state[extra]["momentum_buffer"])


def test_a_compiled_model_has_the_names_of_the_bare_one() -> None:
    """``torch.compile`` leaves no mark in names; a user's own ``module`` keeps its name."""
    assert clean_name("_orig_mod.layer.weight") == "layer.weight"
    assert clean_name("block._orig_mod.layer.weight") == "block.layer.weight"
    assert clean_name("module.layer.weight") == "module.layer.weight"
