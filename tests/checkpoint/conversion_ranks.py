"""Runs on one, two and four ranks that save what all of them load."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composerlite import dist
from composerlite.checkpoint import load_checkpoint, rng, save_state_dict
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.checkpoint.save.save import save
from composerlite.core import State

KINDS = {"one": 1, "ddp2": 2, "fsdp2": 2, "fsdp4": 4, "hsdp": 4, "2d": 4}
"""How a run is spread, and over how many ranks."""
_STEPS = 3


@functools.cache
def _mesh(kind: str) -> Any:
    if kind in ("hsdp", "2d"):
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("first", "second"))
    return init_device_mesh("cpu", (KINDS[kind],)) if kind.startswith("fsdp") else None


def new_run(kind: str, *, seed: int = 0) -> State:
    """A run that has not trained. The sizes do not go up in the number of ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3), nn.Linear(3, 1))
    if (mesh := _mesh(kind)) is not None:
        if kind == "2d":
            parallelize_module(model, mesh["second"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            mesh = mesh["first"]
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return State(
        model,
        rank_zero_seed=17,
        run_name="run",
        device=torch.device("cpu"),
        max_duration="9ep",
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.1),
        rank=dist.get_global_rank(),
        world_size=dist.get_world_size(),
    )


def trained(kind: str) -> State:
    """A run after some steps: the same numbers, however it is spread."""
    state = new_run(kind)
    for step in range(_STEPS):
        for number, parameter in enumerate(state.model.parameters()):
            grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(97 * step + number))
            parameter.grad = dist.shards.distributed_like(grad, parameter) if isinstance(parameter, DTensor) else grad
        state.optimizers[0].step()
        state.timestamp = state.timestamp.to_next_batch(4, 8, 0.5)
    for name, buffer in state.model.named_buffers():
        buffer.fill_(3 + len(name))
    return state


def numbers(state: State) -> dict[str, Tensor]:
    """All tensors of the model and the optimizer."""
    found: dict[str, Tensor] = {}

    def look(node: Any, path: str) -> None:
        if isinstance(node, Tensor):
            found[path] = node.detach()
        elif isinstance(node, dict):
            for key, value in node.items():
                look(value, f"{path}/{key}")

    contents = state.state_dict()
    look({"model": contents["model"], "optimizers": contents["optimizers"]}, "")
    return found


def _is_part(tensor: Tensor, whole: Tensor) -> bool:
    """Whether what this rank has of ``tensor`` is that of ``whole``, to the bit."""
    part = dist.local_shard(tensor)
    for dim, (start, length) in enumerate(zip(part.offsets, part.lengths, strict=True)):
        whole = whole.narrow(dim, start, length)
    return torch.equal(part.local, whole)


def _gathered(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _gathered(value) for key, value in node.items()}
    return node.full_tensor() if isinstance(node, DTensor) else node


def save_kinds(folder: Path, kinds: list[str]) -> None:
    """Save a run of each kind as a file and as a directory."""
    _mesh.cache_clear()  # of an earlier run in this process
    for kind in kinds:
        state = trained(kind)
        contents: dict[str, Any] = {"state": state.state_dict(), "rng": [rng.capture()] * KINDS[kind]}
        save_state_dict(folder / f"{kind}-directory", contents)
        gathered = _gathered(contents)
        if kind == "one":
            save(SaveRequest(state=state, catalog=Catalog(folder), template="one-file.pt", latest=None))
        elif dist.get_global_rank() == 0:
            torch.save(gathered, folder / f"{kind}-file.pt")


def load_into_kinds(folder: Path, kinds: list[str]) -> list[str]:
    """Load everything that was saved into a run of each kind; what is not as it was saved."""
    _mesh.cache_clear()
    wanted = numbers(trained("one"))
    wrong: list[str] = []
    for kind in kinds:
        for source in KINDS:
            for form in ("file.pt", "directory"):
                name = f"{source}-{form}"
                wrong += [
                    f"{name} into {kind}: {what}" for what in _wrong(new_run(kind, seed=5), folder / name, wanted)
                ]
        state = new_run(kind, seed=5)
        _step(state)
        wrong += [f"{kind} that had stepped: {what}" for what in _wrong(state, folder / "hsdp-directory", wanted)]
    return wrong


def _wrong(state: State, path: Path, wanted: dict[str, Tensor]) -> list[str]:
    """What is not as it was saved after ``path`` was loaded."""
    states = load_checkpoint(path, state, progress_bar=False)
    found = numbers(state)
    wrong = [key for key in wanted if key not in found or not _is_part(found[key], wanted[key])]
    wrong += [f"{key}, which is new" for key in found if key not in wanted]
    wrong += [f"{name} is whole" for name in _whole_where_spread(state)]
    if int(state.timestamp.batch) != _STEPS or len(states or ()) != KINDS[path.name.split("-")[0]]:
        wrong.append(f"{state.timestamp.batch}, {len(states or ())} generators")
    return wrong


def _step(state: State) -> None:
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizers[0].step()


def _whole_where_spread(state: State) -> list[str]:
    """Parameters that are spread and whose state is not."""
    states = state.optimizers[0].state
    return [
        name
        for name, parameter in state.model.named_parameters()
        if isinstance(parameter, DTensor)
        and not all(isinstance(states[parameter][key], DTensor) for key in ("exp_avg", "exp_avg_sq"))
    ]
