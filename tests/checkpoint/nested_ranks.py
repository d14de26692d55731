"""What runs on each of several ranks: training whose algorithms and callbacks keep distributed tensors, deep inside."""

from __future__ import annotations

import collections
import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tiny_training import Classifier, CrashError, StopAt, trainer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from composerlite import Callback, Logger, State, Trainer, dist
from composerlite.algorithms import EMA, SWA
from composerlite.checkpoint import load_state_dict, save_state_dict
from composerlite.errors import SaveError

TP = {"tensor_parallel_degree": 2, "layer_plan": {"body": "colwise", "head": "rowwise"}}
SPREADS: dict[str, dict[str, Any]] = {
    "fsdp": {"parallelism_config": {"fsdp": {}}},
    "tp": {"parallelism_config": {"tp": TP}},
    "full": {"parallelism_config": {"fsdp": {"state_dict_type": "full"}}},
    "one": {},
}


class Uneven(Classifier):
    """Seven rows, which no two ranks share evenly; three, and one, which most ranks have nothing of."""

    def __init__(self, width: int = 7) -> None:
        super().__init__(width)
        self.few = nn.Parameter(torch.ones(1, width))
        self.three = nn.Parameter(torch.ones(3, width))

    def forward(self, batch: Any) -> torch.Tensor:
        scale = self.few.sum() + self.three.sum() if type(self.few) is nn.Parameter else 0
        return super().forward(batch) * (1 + 0.01 * scale)


class Lookback(torch.optim.Adam):
    """Goes back a little to where it was one and two steps ago, which it keeps in a dict and a list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            past = self.state[parameter].get("past", {"last": parameter, "before": [parameter]})
            last, (before,) = past["last"], past["before"]
            parameter.add_(last - 2 * parameter + before, alpha=0.1)
            self.state[parameter]["past"] = {"last": parameter.detach().clone(), "before": [last.detach().clone()]}
        return loss


class Keeps(Callback):
    """Keeps the first weights, as they were at each batch's end, in dicts and lists; and plain tensors in a tuple."""

    def __init__(self) -> None:
        self.kept: Any = None
        self.loaded: Any = None

    def batch_end(self, state: State, logger: Logger) -> None:
        weights = [parameter.detach().clone() for parameter in state.model.parameters()]
        self.kept = [
            int(state.timestamp.batch),
            {"first": weights[0], "w": [[weights[1]], {"third": weights[2]}]},
            {"plain": (torch.arange(3.0), collections.deque([torch.ones(2)], maxlen=2)), "weight": weights[-1]},
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept, "numbers": {7: "seven"}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = self.kept = state_dict["kept"]
        assert state_dict["numbers"] == {7: "seven"}


def whole(value: Any) -> Any:
    """``value`` with whole tensors of its own."""
    if isinstance(value, torch.Tensor):
        return dist.shards.full_tensor(value.detach()).clone()
    if isinstance(value, dict):
        return type(value)((key, whole(inner)) for key, inner in value.items())
    if isinstance(value, collections.deque):
        return collections.deque(map(whole, value), value.maxlen)
    if isinstance(value, Pair):
        return Pair(*map(whole, value))
    if isinstance(value, list | tuple):
        return type(value)(map(whole, value))
    return value


def state_of(run: Trainer) -> dict[str, Any]:
    """All that a checkpoint should bring back, whole."""
    state = run.state
    return whole(
        {
            "model": dict(state.model.named_parameters()),
            "moments": [dict(state.optimizers[0].state[parameter]) for parameter in state.model.parameters()],
            "algorithms": [algorithm.state_dict() for algorithm in state.algorithms],
            "kept": next(callback for callback in state.callbacks if isinstance(callback, Keeps)).kept,
        }
    )


def run_of(folder: Path, spread: str, duration: str, **arguments: Any) -> Trainer:
    """A run that averages its weights in both ways."""
    torch.manual_seed(3)
    how: dict[str, Any] = {
        "save_folder": folder,
        "save_interval": "1ep",
        "autoresume": True,
        "max_duration": duration,
        "algorithms": [EMA("2ba"), SWA("1ba", "100ba", "1ba")],
        "callbacks": [Keeps()],
        **SPREADS[spread],
        **arguments,
    }
    model = Uneven() if spread != "tp" else Classifier(8)
    return trainer(model=model, optimizers=Lookback(model.parameters(), lr=0.01), **how)


def train(folder: Path, spread: str) -> dict[str, Any]:
    """The end of a run of two epochs, and of one that crashed after the first."""
    ends: dict[str, Any] = {}
    with run_of(folder / "straight", spread, "2ep") as run:
        run.fit()
        ends["straight"] = state_of(run)
    with run_of(
        folder / "resumed", spread, "2ep", callbacks=[Keeps(), StopAt(2 if spread in ("fsdp", "full") else 4)]
    ) as run:
        with contextlib.suppress(CrashError):
            run.fit()
        ends["saved"] = state_of(run)
    return ends


def resume(folder: Path, spread: str) -> dict[str, Any]:
    """What it has when it is resumed, and in the end."""
    ends: dict[str, Any] = {}
    with run_of(folder / "resumed", spread, "2ep") as run:
        ends["loaded"] = state_of(run)
        average: Any = run.state.algorithms[0].state_dict()["tensors"]
        ends["sharded"] = [dist.is_distributed_tensor(tensor) for tensor in average.values()]
        run.fit()
        ends["resumed"] = state_of(run)
    return ends


def load(folder: Path, spread: str) -> dict[str, Any]:
    """What a run with another spread has after it was loaded."""
    with run_of(folder, spread, "2ep") as run:
        return state_of(run)


class Pair(NamedTuple):
    """A type of the user's."""

    left: Any
    right: Any


class Hidden:
    """Keeps a tensor where nobody looks."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


def distributed(rows: int, seed: int) -> torch.Tensor:
    """So many rows over all ranks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = torch.arange(rows * 3.0).reshape(rows, 3) + seed
    return distribute_tensor(whole, mesh, [Shard(0)])


def nested_state(seed: int) -> dict[str, Any]:
    """Distributed tensors in dicts and lists, and below keys of all types."""
    return {
        "list": [distributed(7, seed), [distributed(1, seed), {"a": distributed(2, seed), "text": f"text {seed}"}]],
        "keys": {
            3: {"w": distributed(5, seed)},
            True: [distributed(3, seed)],
            "3.5": seed,
            (1, 2): torch.ones(2) * seed,
        },
        "plain": (torch.arange(4.0) + seed, None, collections.deque([torch.ones(2) * seed], maxlen=3)),
        "pair": Pair(torch.ones(7) * seed, {"n": seed}),
    }


def save_nested(folder: Path) -> Any:
    """What was saved, whole, and what is said of distributed tensors that are refused."""
    state = nested_state(1)
    with torch.serialization.safe_globals([Pair]):
        save_state_dict(folder / "state", state)
        loaded = nested_state(5)
        load_state_dict(folder / "state", loaded)
    assert isinstance(loaded["list"][0], DTensor)
    refused: list[str] = []
    hidden = distributed(7, 0)
    for value in ((hidden,), [(hidden, 1)], Pair(hidden, 1), collections.deque([hidden]), {hidden}, Hidden(hidden)):
        try:
            save_state_dict(folder / "refused", {"value": value})
        except SaveError as e:
            refused.append(str(e))
    assert not (folder / "refused").exists()
    return whole(state), whole(loaded), refused


def load_nested(folder: Path) -> Any:
    """The same on another number of ranks."""
    loaded = nested_state(9)
    with torch.serialization.safe_globals([Pair]):
        load_state_dict(folder / "state", loaded)
    return whole(loaded)
