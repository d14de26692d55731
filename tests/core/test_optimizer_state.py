"""Optimizer state by parameter name: independent of the order in which parameters were made."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
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


def test_the_next_step_is_that_of_the_saved_optimizer() -> None:
    """Training on after loading gives the weights that training on without saving gives."""
    model, optimizer = trained(NAMES, [["a", "c"], ["b", "d"]])
    saved, weights = copy.deepcopy((named_optimizer_state(optimizer, model), model.state_dict()))
    again, fresh = trained(NAMES[::-1], [["c", "a"], ["d", "b"]], steps=0)
    load_named_optimizer_state(fresh, again, saved, source="the checkpoint")
    again.load_state_dict(weights)
    for m, o in ((model, optimizer), (again, fresh)):
        o.zero_grad()
        torch.stack([parameter.square().sum() for parameter in m.parameters()]).sum().backward()
        o.step()
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


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
        "group 0 was saved with, and has not: b",
        "group 1 has no saved state for: b",
        "group 1 was saved with, and has not: c",
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


def test_a_parameter_that_never_had_a_gradient_has_no_state() -> None:
    """A frozen parameter is in its group and not in the state, and loads so."""
    model = Model(NAMES)
    optimizer = torch.optim.AdamW(model.parameters())
    model.get_parameter("a").square().sum().backward()
    optimizer.step()
    saved = named_optimizer_state(optimizer, model)
    assert list(saved["state"]) == ["a"]
    again, fresh = trained(NAMES, steps=0)
    load_named_optimizer_state(fresh, again, saved, source="the checkpoint")
    assert list(named_optimizer_state(fresh, again)["state"]) == ["a"]


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
