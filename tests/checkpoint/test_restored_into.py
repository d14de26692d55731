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


def test_a_tensor_with_elements_that_share_memory_gets_memory_for_each(tmp_path: Path) -> None:
    """The saved elements may differ where those of the live tensor are one."""
    saved = torch.arange(6.0).view(3, 2)
    save_state_dict(tmp_path / "saved", {"one": saved})
    live = torch.zeros(4).as_strided((3, 2), (1, 1))
    load_state_dict(tmp_path / "saved", {"one": live})
    assert same(live, saved)


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


class Kept(Classifier):
    """Has buffers."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.kept: torch.Tensor
        self.register_buffer("kept", buffer)


# ── one weight under two names ───────────────────────────────────────────────────────────────────────────────────────
class Tied(Classifier):
    """A body and a head that may have one weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__(4, 4)
        if tied:
            self.head.weight = self.body.weight


@pytest.mark.parametrize("own", [True, False], ids=["own checkpoint", "state dict"])
def test_two_weights_are_not_loaded_into_one(tmp_path: Path, own: bool) -> None:
    """Both are named, with the way to leave one out; equal ones are loaded, also with what is no number in them."""
    path, model = tmp_path / "saved.pt", Tied(tied=False)
    with torch.no_grad():
        model.body.weight[0, 0] = float("nan")

    def save() -> None:
        if own:
            with trainer(model=model) as run:
                run.save_checkpoint(str(path), weights_only=True)
        else:
            torch.save(model.state_dict(), path)

    save()
    how: dict[str, Any] = {"load_path": str(path), "load_weights_only": True}
    with pytest.raises(IncompatibleCheckpointError, match=r"(?s)body\.weight, head\.weight.*load_ignore_keys"):
        trainer(model=Tied(tied=True), **how)
    left = {"load_ignore_keys": ["state/model/head.weight"], "load_strict_model_weights": False}
    with trainer(model=Tied(tied=True), **how, **left) as run:
        assert equal(run.state.model.state_dict()["head.weight"][1:], model.body.weight[1:].detach())
    with torch.no_grad():
        model.head.weight.copy_(model.body.weight)
    path.unlink()
    save()
    with trainer(model=Tied(tied=True), **how) as run:
        assert equal(run.state.model.state_dict()["head.weight"][1:], model.body.weight[1:].detach())


def test_buffers_that_share_memory_and_get_their_own_are_no_pair(tmp_path: Path) -> None:
    """Two that ``expand`` has made of one number are loaded apart."""
    model, fresh = Kept(torch.arange(3.0)), Kept(torch.zeros(()).expand(3))
    model.register_buffer("other", torch.arange(3.0) + 1)
    fresh.register_buffer("other", fresh.kept.detach())
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    with trainer(model=fresh, load_path=str(tmp_path / "saved.pt")):
        assert equal(fresh.kept, model.kept)
        assert equal(fresh.get_buffer("other"), model.get_buffer("other"))


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


CONVERTED: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "less precise": (torch.tensor([1.001, float("inf"), float("nan")]), torch.zeros(3, dtype=torch.bfloat16)),
    "more precise": (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3)),
    "a mask of bytes": (torch.tensor([0, 1, 1], dtype=torch.uint8), torch.zeros(3, dtype=torch.bool)),
    "smaller integers": (torch.arange(3), torch.zeros(3, dtype=torch.uint8)),
    "complex": (torch.ones(3, dtype=torch.complex128), torch.zeros(3, dtype=torch.complex64)),
}


@pytest.mark.parametrize("kind", CONVERTED)
def test_numbers_of_another_precision_are_converted_and_named(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As torch does it; what was no number stays none."""
    saved, live = CONVERTED[kind]
    torch.save(Kept(saved).state_dict(), tmp_path / "saved.pt")
    with trainer(model=(model := Kept(live)), load_path=str(tmp_path / "saved.pt")):
        assert torch.allclose(model.kept, saved.to(live.dtype), equal_nan=True)
    assert f"kept from {saved.dtype} to {live.dtype}" in caplog.text


def test_a_model_that_converts_numbers_itself_gets_them(tmp_path: Path) -> None:
    """Its hook is handed what the checkpoint has, of whatever type."""

    def scaled(_: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict[f"{prefix}kept"] = state_dict[f"{prefix}kept"] / 2

    torch.save(Kept(torch.ones(3, dtype=torch.int8)).state_dict(), tmp_path / "saved.pt")
    model = Kept(torch.zeros(3))
    model.register_load_state_dict_pre_hook(scaled)
    with trainer(model=model, load_path=str(tmp_path / "saved.pt")):
        assert model.kept.tolist() == [0.5] * 3


# ── what is no tensor, in files of others ────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("nested", [True, False], ids=["in a dict", "a state dict"])
@pytest.mark.parametrize("name", list(EXTRA))
def test_extra_state_in_a_file_of_torch_is_restored(tmp_path: Path, name: str, nested: bool) -> None:
    """Whatever its type; a model that keeps none refuses the file, unless it is loaded without strictness."""
    saved = With(extra=EXTRA[name]).state_dict()
    torch.save({"model": saved} if nested else saved, path := tmp_path / "saved.pt")
    model = With(extra={"of another": "type"})
    with trainer(model=model, load_path=str(path)):
        assert equal(model.part.extra, EXTRA[name])
    with pytest.raises(IncompatibleCheckpointError, match=r"not in the model \(1\): part\._extra_state"):
        trainer(model=Classifier(), load_path=str(path))
    with trainer(model=Classifier(), load_path=str(path), load_strict_model_weights=False):
        pass


@pytest.mark.parametrize("nested", [True, False], ids=["in a dict", "a state dict"])
def test_weights_of_numpy_are_loaded(tmp_path: Path, nested: bool) -> None:
    """With the numbers that they have, in whatever order of bytes."""
    model = Classifier()
    saved = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    saved["head.bias"] = saved["head.bias"].astype(">f4")
    torch.save({"model": saved} if nested else saved, path := tmp_path / "saved.pt")
    with trainer(model=(fresh := Classifier()), load_path=str(path)):
        assert equal(fresh.state_dict(), model.state_dict())


def test_what_is_no_weight_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What lies between weights and is none is left out with a warning; two of one name are refused."""
    saved = {**Classifier().state_dict(), "config": {"width": 3}, "version": "2"}
    torch.save({"model": saved}, tmp_path / "saved.pt")
    with trainer(load_path=str(tmp_path / "saved.pt")):
        pass
    assert "not weights, left out: config.width, version" in caplog.text
    saved["body"] = {"weight": torch.ones(3, 4)}
    torch.save({"model": saved}, tmp_path / "saved.pt")
    with pytest.raises(IncompatibleCheckpointError, match=r"two weights.*'body\.weight'"):
        trainer(load_path=str(tmp_path / "saved.pt"))
