"""Ranks that save and load one sharded state together, by the functions of several systems, all in turn.

The state is that of ``fully_shard`` (FSDP2) and AdamW. Every system does what its documentation says, with its
defaults; all take turns in the same processes.
"""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from checkpoint_limits import Limits, make_cached
from measure import ForeignCpu, only_installed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

__all__ = ["SYSTEMS", "ShardedRun", "join", "take_turns"]

TIMEOUT = 300.0
WIDTH = 2048

Measured = tuple[str, dict[str, float], float]
"""The part, its numbers, and the share of a core that other programs used meanwhile."""


def join() -> None:
    """Make the process group of all ranks, of one too: what is sharded needs one."""
    from composerlite.dist import initialize_dist

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    initialize_dist("cpu", timedelta(seconds=TIMEOUT), min_world_size=1)


class ShardedRun:
    """A model of linear layers and AdamW, in fp32, sharded over all ranks, after a step with random gradients."""

    def __init__(self, layers: int, width: int = WIDTH) -> None:
        torch.manual_seed(dist.get_rank())
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.rand_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[Tensor]:
        """This rank's part of the state."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [
            tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for tensor in (*self.model.parameters(), *states)
            if isinstance(tensor, Tensor)
        ]

    @torch.no_grad()
    def spoil(self) -> Callable[[], None]:
        """Change the first and the last tensor; call what is returned after a load to see that they are back."""
        kept = [tensor.clone() for tensor in (self.tensors()[0], self.tensors()[-1])]
        for tensor in (self.tensors()[0], self.tensors()[-1]):
            tensor.add_(1)

        def check() -> None:
            now = (self.tensors()[0], self.tensors()[-1])
            assert all(map(torch.equal, kept, now)), "the state that was loaded is not the one that was saved"

        return check


class System(ABC):
    """How all ranks together save ``run`` to a directory and read it back; both ways of saving flush.

    Args:
        run: whose state it is.
        group: of all ranks, for systems that would send behind training what meets there what training sends.

    Attributes:
        distribution: name of its package.
    """

    distribution: ClassVar[str]

    def __init__(self, run: ShardedRun, group: Any) -> None:
        self.run = run
        self.group = group

    @abstractmethod
    def save(self, path: Path) -> None:
        """Save to ``path``, which does not exist."""

    @abstractmethod
    def start(self, path: Path) -> Callable[[], object]:
        """Save to ``path`` behind training. What is returned waits for the end."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Restore the run from ``path``."""


class Composerlite(System):
    """The functional interface."""

    distribution = "composerlite"

    def save(self, path: Path) -> None:
        from composerlite.checkpoint import save_model_and_optim_state

        save_model_and_optim_state(path, self.run.model, self.run.optimizer)

    def start(self, path: Path) -> Callable[[], object]:
        from composerlite.checkpoint import async_save_model_and_optim_state

        future = async_save_model_and_optim_state(path, self.run.model, self.run.optimizer, process_group=self.group)
        return lambda: future.result(TIMEOUT)

    def load(self, path: Path) -> None:
        from composerlite.checkpoint import load_model_and_optim_state

        load_model_and_optim_state(path, self.run.model, self.run.optimizer)


class TorchDcp(System):
    """``torch.distributed.checkpoint`` and its functions for state dicts."""

    distribution = "torch"

    def __init__(self, run: ShardedRun, group: Any) -> None:
        import torch.distributed.checkpoint as dcp
        import torch.distributed.checkpoint.state_dict as state_dicts

        super().__init__(run, group)
        self.dcp, self.state_dicts = dcp, state_dicts

    def _state(self) -> dict[str, Any]:
        model, optimizer = self.state_dicts.get_state_dict(self.run.model, self.run.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path) -> None:
        self.dcp.save(self._state(), checkpoint_id=path)

    def start(self, path: Path) -> Callable[[], object]:
        future: Any = self.dcp.async_save(self._state(), checkpoint_id=path, process_group=self.group)
        return lambda: future.result(TIMEOUT)

    def load(self, path: Path) -> None:
        state = self._state()
        self.dcp.load(state, checkpoint_id=path)
        self.state_dicts.set_state_dict(
            self.run.model,
            self.run.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class OlmoCore(System):
    """``save_model_and_optim_state`` and its sisters."""

    distribution = "ai2-olmo-core"

    def __init__(self, run: ShardedRun, group: Any) -> None:
        import olmo_core.distributed.checkpoint as olmo

        super().__init__(run, group)
        self.olmo = olmo

    def save(self, path: Path) -> None:
        self.olmo.save_model_and_optim_state(path, self.run.model, self.run.optimizer)

    def start(self, path: Path) -> Callable[[], object]:
        future = self.olmo.async_save_model_and_optim_state(
            path, self.run.model, self.run.optimizer, process_group=self.group
        )
        return lambda: future.result(TIMEOUT)

    def load(self, path: Path) -> None:
        self.olmo.load_model_and_optim_state(path, self.run.model, self.run.optimizer)


SYSTEMS = only_installed({"composerlite": Composerlite, "torch DCP": TorchDcp, "OLMo-core": OlmoCore})


# ── one rank ─────────────────────────────────────────────────────────────────────────────────────────────────────
def take_turns(root: int, folder: Path, layers: int, repeats: int) -> list[Measured]:
    """What one rank does: every system saves, saves behind, and loads; ``repeats`` times, after one that is not kept.

    Args:
        root: the process that started the ranks.
        folder: on the disk that is measured.
        layers: of the model.
        repeats: of each part of each system.

    Returns:
        One for each repeat of each part, with the numbers of the slowest rank, on every rank.
    """
    join()
    run = ShardedRun(layers)
    own = folder / f"rank{dist.get_rank()}"
    own.mkdir()
    group = dist.new_group(backend="gloo")
    turns = Turns(run, Limits(run.tensors(), own), folder, root)
    systems = {name: kind(run, group) for name, kind in SYSTEMS.items()}
    found: list[Measured] = []
    for number in range(1 + repeats):
        names = list(systems)[number % len(systems) :] + list(systems)[: number % len(systems)]
        measured = list(turns.round({name: systems[name] for name in names}))
        found += measured if number > 0 else []
    return found


class Turns:
    """One system after the other, each part beside a probe of the limit that all ranks take together right before."""

    def __init__(self, run: ShardedRun, limits: Limits, folder: Path, root: int) -> None:
        self.run = run
        self.limits = limits
        self.folder = folder
        self.root = root

    def round(self, systems: Mapping[str, System]) -> Iterator[Measured]:
        """One repeat of each part of each system."""
        for name, system in systems.items():
            yield self._measured(f"{name}, sync", self._synchronous, system, self.folder / name)
        self._probe(self.limits.buffered_write)  # for the probe that reads
        for name, system in systems.items():
            yield self._measured(f"{name}, load", self._load, system, self.folder / name)
        self.limits.close()
        for name, system in systems.items():
            yield self._measured(f"{name}, async", self._asynchronous, system, self.folder / name)

    def _measured(
        self, part: str, measure: Callable[[System, Path], dict[str, float]], system: System, path: Path
    ) -> Measured:
        with ForeignCpu(self.root) as foreign:
            values = measure(system, path)
        return part, values, foreign.share

    def _synchronous(self, system: System, path: Path) -> dict[str, float]:
        limit = self._probe(self.limits.disk_write)
        durable = self._together(lambda: system.save(path))
        return {"disk_write_s": limit, "durable_s": durable, "of_disk_write": limit / durable}

    def _load(self, system: System, path: Path) -> dict[str, float]:
        check = self.run.spoil()
        limit = self._probe(self.limits.page_cache_read)
        if dist.get_rank() == 0:
            make_cached(path)
        warm = self._together(lambda: system.load(path))
        check()
        self._remove(path)
        return {"page_cache_read_s": limit, "warm_s": warm, "of_page_cache_read": limit / warm}

    def _asynchronous(self, system: System, path: Path) -> dict[str, float]:
        memcpy = self._probe(self.limits.memcpy)
        dist.barrier()
        start = time.perf_counter()
        wait = system.start(path)
        blocked = time.perf_counter() - start
        wait()
        durable = slowest(time.perf_counter() - start)
        blocked = slowest(blocked)
        self._remove(path)
        return {"memcpy_s": memcpy, "blocked_s": blocked, "durable_s": durable, "memcpys": blocked / memcpy}

    def _probe(self, probe: Callable[[], float]) -> float:
        """Seconds of the slowest rank, each with its part of the state."""
        dist.barrier()
        return slowest(probe())

    def _together(self, do: Callable[[], object]) -> float:
        dist.barrier()
        start = time.perf_counter()
        do()
        return slowest(time.perf_counter() - start)

    def _remove(self, path: Path) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)


def slowest(seconds: float) -> float:
    """The same on every rank."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()
