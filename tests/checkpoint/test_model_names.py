"""The names that functions and ``Checkpointer`` give weights are those of ``get_model_state_dict``, for any model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _patch_model_state_dict,  # pyright: ignore[reportPrivateUsage]
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from composerlite.checkpoint.load import state_dicts


class Tied(nn.Module):
    """Two names for one weight, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("left_out", torch.arange(3.0), persistent=False)


class OwnState(nn.Linear):
    """Something in the state that is no tensor, and changes."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen = [0]

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}


class Renaming(nn.Module):
    """As modules of torchtune: a hook leaves a name out, and ``_fqn_modifiers`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_state_dict_post_hook(lambda _module, state, prefix, _: _leave_out(state, f"{prefix}inner."))

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "inner", "bias": "inner"}


def _leave_out(state: dict[str, Any], prefix: str) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        state[name.replace("inner.", "")] = state.pop(name)


def module_named_module() -> nn.Module:
    return nn.ModuleDict({"module": nn.Linear(2, 2), "modules_": nn.Linear(2, 2)})


def recomputed() -> nn.Module:
    return nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))


def compiled() -> nn.Module:
    model: Any = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    return model


def compiled_inside() -> nn.Module:
    inner: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    return nn.Sequential(inner, nn.Linear(2, 2))


def of_a_subclass() -> nn.Module:
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.zeros(2, 2)))
    return model


def patched() -> nn.Module:
    """``state_dict`` gathers what is split."""
    model = fsdp2()
    _patch_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return model


def ddp() -> nn.Module:
    return DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))


def ddp_inside() -> nn.Module:
    return nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2))


def fsdp2() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.fixture(scope="module", autouse=True)
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


MODELS: list[Callable[[], nn.Module]] = [
    Tied, OwnState, Renaming, module_named_module, recomputed, compiled, compiled_inside, of_a_subclass, ddp,
    ddp_inside, fsdp2, patched,
]  # fmt: skip


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_names_and_values_are_those_of_torch(make: Callable[[], nn.Module]) -> None:
    """The same names in the same order, and of each the same tensor and not a copy."""
    model = make()
    expected = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    state = state_dicts.model_state(model)
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert type(state[name]) is type(value)
        if isinstance(value, Tensor) and type(value) is Tensor:
            assert state[name].data_ptr() == value.data_ptr()
            assert torch.equal(state[name], value)
        elif not isinstance(value, Tensor):
            assert state[name] == value


@pytest.mark.parametrize("make", [Tied, fsdp2, ddp, compiled], ids=lambda make: make.__name__)
def test_what_is_saved_loads_with_torch(make: Callable[[], nn.Module]) -> None:
    """torch's own function takes the state back into a model of the kind."""
    model = make()
    state = copy.deepcopy(state_dicts.model_state(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    set_model_state_dict(model, dict(state))
    for name, value in state_dicts.model_state(model).items():
        assert torch.equal(_local(value), _local(state[name]))


def test_extra_state_is_of_the_moment_of_the_save() -> None:
    """What a module keeps beside tensors may change while a save is being written; the saved one does not."""
    model = OwnState()
    state = state_dicts.model_state(model)
    model.seen.append(1)
    assert state["_extra_state"] == {"seen": [0]}


def _local(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value
