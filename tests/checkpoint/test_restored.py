"""What a load gives a model and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_kinds_parts import kinds, laid_out_like, same
from tiny_training import Classifier, CrashError, StopAt, trainer
from torch import Tensor, nn

from composerlite.checkpoint import (
    Checkpointer,
    load_model_and_optim_state,
    load_state_dict,
    save_model_and_optim_state,
    save_safetensors,
    save_state_dict,
)
from composerlite.errors import IncompatibleCheckpointError

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


@pytest.mark.parametrize("name", list(EXTRA))
def test_a_resumed_run_has_what_a_module_keeps_besides(tmp_path: Path, name: str) -> None:
    """What ``get_extra_state`` returns is handed to ``set_extra_state``, of whatever type."""
    model = resumed(tmp_path, With(extra=EXTRA[name]), With(extra={"of another": "type"}))
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


class Kept(Classifier):
    """Has buffers."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.kept: torch.Tensor
        self.register_buffer("kept", buffer)


# ── other types of numbers ───────────────────────────────────────────────────────────────────────────────────────────
OTHER_KINDS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "complex to real": (torch.ones(3) + 1j, torch.zeros(3)),
    "float to integer": (torch.tensor([3.7, float("nan"), 1]), torch.zeros(3, dtype=torch.int64)),
    "8-bit integer to float": (torch.ones(3, dtype=torch.int8), torch.zeros(3)),
    "bool to float": (torch.ones(3, dtype=torch.bool), torch.zeros(3)),
}
OTHER_VALUES: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "too large for fp16": (torch.tensor([1.0, 1e6, float("inf")]), torch.zeros(3, dtype=torch.float16)),
    "too large for bf16": (torch.tensor([3.4e38, 1.0, 1.0]), torch.zeros(3, dtype=torch.bfloat16)),
    "too large for fp8": (torch.tensor([1e5, 1.0, 1.0]), torch.zeros(3, dtype=torch.float8_e5m2)),
    "too large for fp32": (torch.tensor([1e200, 1.0, 1.0], dtype=torch.float64), torch.zeros(3)),
    "no mask": (torch.arange(3), torch.zeros(3, dtype=torch.bool)),
    "too large for 8 bits": (torch.tensor([300, 1, 1]), torch.zeros(3, dtype=torch.int8)),
}
"""Numbers in the checkpoint, and the buffer that they would be converted for."""


@pytest.mark.parametrize("kind", OTHER_KINDS | OTHER_VALUES)
@pytest.mark.parametrize("strict", [True, False])
def test_numbers_that_a_conversion_would_change_are_refused(tmp_path: Path, kind: str, strict: bool) -> None:
    """With the name, both types and the way out."""
    saved, live = (OTHER_KINDS | OTHER_VALUES)[kind]
    torch.save(Kept(saved).state_dict(), tmp_path / "saved.pt")
    message = rf"kept.*{saved.dtype}.*{live.dtype}.*load_ignore_keys"
    with pytest.raises(IncompatibleCheckpointError, match=f"(?s){message}"):
        trainer(model=Kept(live), load_path=str(tmp_path / "saved.pt"), load_strict_model_weights=strict)


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
    with pytest.raises(IncompatibleCheckpointError, match="LBFGS has no state before its first step"):
        load_model_and_optim_state(tmp_path / "c", *made(torch.optim.LBFGS))


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
