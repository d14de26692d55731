"""Whoever writes to a weight between a save and the next step, and however: what is committed is the save's moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forked import run_forked
from parts import Saves, new_state, temporaries
from torch import nn

from composerlite.checkpoint import Catalog, safe_torch_load
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.core import State

LAYERS, SIZE = 6, 1 << 19  # 12 MB of weights, and as much of momentum
Writer = Callable[[list[nn.Parameter], State], None]


class Layers(nn.Module):
    """Weights in storages of their own."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.rand(size)) for _ in range(LAYERS)])


def state_at(batch: int, size: int = SIZE) -> State:
    """Of :class:`Layers`, whose optimizer has its momentum."""
    state = new_state(batch)
    state.model = Layers(size)
    state.optimizers = [torch.optim.SGD(state.model.parameters(), lr=0.1, momentum=0.9)]
    step(state)
    return state


def step(state: State) -> None:
    """An optimizer step: every weight becomes another."""
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizers[0].step()
    state.timestamp = state.timestamp.to_next_batch(4)


# ── how weights are changed ──────────────────────────────────────────────────────────────────────────────────────────
def nobody(weights: list[nn.Parameter], state: State) -> None:
    """Nothing is changed."""


def in_place(weights: list[nn.Parameter], state: State) -> None:
    with torch.no_grad():
        for weight in weights:
            weight.mul_(0.5)


def data_dense(weights: list[nn.Parameter], state: State) -> None:
    for weight in weights:
        weight.data.clamp_(-0.01, 0.01)


def data_sparse(weights: list[nn.Parameter], state: State) -> None:
    for weight in weights:
        weight.data[SIZE // 2 + 7] = 100.0


def data_at_the_ends(weights: list[nn.Parameter], state: State) -> None:
    for weight in weights:
        weight.data[0] = weight.data[-1] = 100.0


def data_assigned(weights: list[nn.Parameter], state: State) -> None:
    for weight in weights:
        weight.data = torch.zeros(SIZE)


def storage_set(weights: list[nn.Parameter], state: State) -> None:
    with torch.no_grad():
        for weight in weights:
            weight.set_(torch.zeros(SIZE))  # pyright: ignore[reportArgumentType]


def foreach(weights: list[nn.Parameter], state: State) -> None:
    torch._foreach_add_([weight.data for weight in weights], 1.0)


def fused_by_another(weights: list[nn.Parameter], state: State) -> None:
    """An optimizer that the saver was not told of."""
    torch.optim.SGD(weights, lr=1.0, fused=True).step()


def numpy_view(weights: list[nn.Parameter], state: State) -> None:
    for weight in weights:
        weight.detach().numpy()[SIZE // 3 :] = 7.0


def momentum(weights: list[nn.Parameter], state: State) -> None:
    for kept in state.optimizers[0].state.values():
        kept["momentum_buffer"].data.zero_()


def thread(weights: list[nn.Parameter], state: State) -> None:
    other = threading.Thread(target=data_dense, args=(weights, state))
    other.start()
    other.join()


WRITERS: list[Writer] = [
    nobody,
    in_place,
    data_dense,
    data_sparse,
    data_at_the_ends,
    data_assigned,
    storage_set,
    foreach,
    fused_by_another,
    numpy_view,
    momentum,
    thread,
]
WAYS = ("lazy", "async", "sync")
"""``lazy`` is for accelerators: on the CPU it is as ``async``."""


def bytes_of(state: State) -> dict[str, torch.Tensor]:
    """Copies of the weights and of what the optimizer keeps."""
    kept = state.optimizers[0].state
    weights = dict(state.model.named_parameters())
    return {
        **{f"weight {name}": weight.detach().clone() for name, weight in weights.items()},
        **{f"momentum {name}": kept[weight]["momentum_buffer"].clone() for name, weight in weights.items()},
    }


def bytes_in(path: Path) -> dict[str, torch.Tensor]:
    """The same of a checkpoint."""
    saved = safe_torch_load(path)["state"]
    (optimizer,) = saved["optimizers"].values()
    return {
        **{f"weight {name}": weight for name, weight in saved["model"].items()},
        **{f"momentum {name}": one["momentum_buffer"] for name, one in optimizer["state"].items()},
    }


def save_as_it_is(saves: Saves, state: State, folder: Path, way: str, write: Writer) -> None:
    """Save, let somebody write, step: every byte of the checkpoint must be that of the save."""
    expected = bytes_of(state)
    pending = saves.save(SaveRequest(state=state, catalog=Catalog(folder), template="ba{batch}.pt"), way)
    write([*state.model.parameters()], state)
    step(state)
    found = bytes_in(pending.wait().path)
    assert found.keys() == expected.keys()
    torn = [key for key, value in expected.items() if not torch.equal(found[key], value)]
    assert not torn, f"{way}, {write.__name__}: a checkpoint of two moments was committed: {torn}"


@pytest.fixture
def saves() -> Iterator[Saves]:
    """Closed at the end."""
    saves = Saves()
    yield saves
    saves.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_no_checkpoint_of_two_moments_is_committed(saves: Saves, tmp_path: Path, write: Writer, way: str) -> None:
    """Saves that are each followed at once by a write, without a copy and with one."""
    state = state_at(0)
    for _ in range(3):
        save_as_it_is(saves, state, tmp_path, way, write)
        assert saves.prepared()
    assert temporaries(tmp_path) == []


def a_run_whose_weights_are_replaced(where: str) -> None:
    folder = Path(where)
    saves = Saves()
    size = 10 << 20  # what is that large, malloc gives back to the system at once
    state = state_at(0, size)
    for batch in range(12):
        pending = saves.save(SaveRequest(state=state, catalog=Catalog(folder), template="ba{batch}.pt"))
        for weight in state.model.parameters() if batch else ():
            weight.data = torch.ones(1)  # nothing of the user's refers to the memory that was there
        for weight in state.model.parameters():
            weight.data = torch.full((size,), float(batch))
        step(state)
        pending.wait()
    saves.close()


def test_a_model_that_replaces_its_weights_does_not_kill_the_process(tmp_path: Path) -> None:
    """``p.data = new`` right after a save frees memory that is being copied: it must stay until it is copied."""
    done = run_forked(a_run_whose_weights_are_replaced, str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(Catalog(tmp_path).manifests()) == 12
