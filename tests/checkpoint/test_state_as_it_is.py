"""A save reads, and changes nothing; a load gives a model and an optimizer what was saved, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import train, trainer
from torch import Tensor, nn

from composerlite.checkpoint import (
    Checkpointer,
    load_model_and_optim_state,
    save_model_and_optim_state,
    save_safetensors,
)
from composerlite.errors import IncompatibleCheckpointError
from composerlite.models import ComposerClassifier

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
    "Adamax": torch.optim.Adamax,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD, dampening": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "LBFGS": torch.optim.LBFGS,
}


class TwoHeads(nn.Module):
    """Of which one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def made(optimizer: Callable[[Any], torch.optim.Optimizer]) -> tuple[TwoHeads, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = TwoHeads()
    return model, optimizer(model.parameters())


def steps(model: nn.Module, optim: torch.optim.Optimizer, seeds: Iterable[int]) -> None:
    for seed in seeds:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))

        def closure(x: Tensor = x) -> Tensor:
            optim.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        optim.step(closure)  # pyright: ignore[reportArgumentType] - a float, says torch


def save_functions(path: Path, model: nn.Module, optim: torch.optim.Optimizer) -> None:
    save_model_and_optim_state(path, model, optim)


def save_flat(path: Path, model: nn.Module, optim: torch.optim.Optimizer) -> None:
    save_model_and_optim_state(path, model, optim, flatten_optimizer_state=True)


def save_step(path: Path, model: nn.Module, optim: torch.optim.Optimizer) -> None:
    Checkpointer().save(path, (model, optim), {})


def load_step(path: Path, model: nn.Module, optim: torch.optim.Optimizer) -> None:
    Checkpointer().load(path, (model, optim))


WAYS = pytest.mark.parametrize(
    ("save", "load"),
    [(save_functions, load_model_and_optim_state), (save_flat, load_model_and_optim_state), (save_step, load_step)],
    ids=["functions", "flat", "steps"],
)


@WAYS
@pytest.mark.parametrize(
    ("name", "before"), [(name, before) for name in OPTIMIZERS for before in ((0,) if name == "LBFGS" else (0, 2))]
)
def test_a_run_with_a_save_and_one_without_are_the_same(
    name: str, before: int, save: Callable[..., None], load: Callable[..., None], tmp_path: Path
) -> None:
    """Also if it saves before its first step, when the optimizer has no state: none is made for it. And a run that is
    resumed from there goes on as it, with a head that has no gradients."""
    make = OPTIMIZERS[name]
    whole, whole_optim = made(make)
    steps(whole, whole_optim, range(5))
    model, optim = made(make)
    steps(model, optim, range(before))
    hooks: list[int] = []
    optim.register_step_pre_hook(lambda *_: hooks.append(1))
    save(tmp_path / "c", model, optim)
    assert not hooks, "no step is made"
    assert all(one.grad is None for one in model.unused.parameters())
    steps(model, optim, range(before, 5))
    resumed, resumed_optim = made(make)
    load(tmp_path / "c", resumed, resumed_optim)
    assert not resumed_optim.state if not before else resumed_optim.state_dict()["state"].keys() <= {0, 1}
    steps(resumed, resumed_optim, range(before, 5))
    for one in (model, resumed):
        for key, value in whole.state_dict().items():
            assert torch.equal(one.state_dict()[key], value), key


@WAYS
def test_a_parameter_that_had_no_state_has_none_after_the_load(
    save: Callable[..., None], load: Callable[..., None], tmp_path: Path
) -> None:
    """Into an optimizer that has made steps with it: what the checkpoint has not is gone."""
    model, optim = made(torch.optim.AdamW)
    steps(model, optim, range(2))
    save(tmp_path / "c", model, optim)
    other, other_optim = made(torch.optim.AdamW)
    (other.used(torch.ones(3)) + other.unused(torch.ones(3))).sum().backward()
    other_optim.step()
    load(tmp_path / "c", other, other_optim)
    assert other_optim.state_dict()["state"].keys() == optim.state_dict()["state"].keys() == {0, 1}
    assert torch.equal(other_optim.state[other.used.weight]["exp_avg"], optim.state[model.used.weight]["exp_avg"])


def test_an_optimizer_that_has_no_state_before_a_step_says_so(tmp_path: Path) -> None:
    """LBFGS, which needs a closure to make one."""
    model, optim = made(torch.optim.LBFGS)
    steps(model, optim, range(1))
    save_model_and_optim_state(tmp_path / "c", model, optim)
    with pytest.raises(IncompatibleCheckpointError, match="LBFGS has a state after its first step only"):
        load_model_and_optim_state(tmp_path / "c", *made(torch.optim.LBFGS))


# ── modules whose state has had another form ─────────────────────────────────────────────────────────────────────────
class Doubled(nn.Module):
    """Of version 2: what is of version 1 is doubled."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, metadata, *args)  # pyright: ignore[reportUnknownMemberType]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def versioned() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), Doubled())


def test_a_module_does_not_take_its_state_for_one_of_an_older_version(tmp_path: Path) -> None:
    """As with ``torch.save`` and ``load_state_dict``, whose state dict knows the versions."""
    model = versioned()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    save_model_and_optim_state(tmp_path / "c", model, optim)
    save_step(tmp_path / "step1", model, optim)
    save_safetensors(tmp_path / "s", model)
    for load in (
        lambda new: load_model_and_optim_state(tmp_path / "c", new),
        lambda new: Checkpointer().load(tmp_path / "step1", new),
        lambda new: load_model_and_optim_state(tmp_path / "s", new),
    ):
        load(new := versioned())
        assert all(torch.equal(value, expected[name]) for name, value in new.state_dict().items())


def test_a_run_with_such_a_module_resumes(tmp_path: Path) -> None:
    """With the Trainer, too."""
    how: dict[str, Any] = {"save_folder": str(tmp_path), "run_name": "versions"}

    def model() -> ComposerClassifier:
        return ComposerClassifier(nn.Sequential(nn.Linear(4, 2), Doubled()), num_classes=2)

    saved = train(model=model(), max_duration="1ep", **how).state.model.state_dict()
    with trainer(model=model(), autoresume=True, **how) as run:
        for name, value in run.state.model.state_dict().items():
            assert torch.equal(value, saved[name])
