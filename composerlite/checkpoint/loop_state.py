"""The state of a training loop without a Trainer: its parts by name, and the number of steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composerlite import dist
from composerlite._version import VERSION
from composerlite.checkpoint.record.naming import TIME_VARIABLES
from composerlite.errors import ConfigError, IncompatibleCheckpointError
from composerlite.types import Lineage, StateDict, Stateful

log = logging.getLogger(__name__)
Part: TypeAlias = Stateful | dict[str, Any]
"""An object with ``state_dict()`` and ``load_state_dict()``, or a dict of plain values and tensors."""
_OWN = ("dataset_state", "metadata", "optimizers", "ranks", "run_name", "timestamp")
"""Keys of a checkpoint besides the names of parts."""


@final
class Steps(NamedTuple):
    """The time of a loop that counts steps."""

    batch: int

    def state_dict(self) -> dict[str, Any]:
        """Return the variables in names of checkpoints: ``{batch}`` is the step, and all others are 0."""
        return {name: self.batch if name == "batch" else 0 for name in TIME_VARIABLES}


@final
class LoopState:
    """A :class:`composerlite.checkpoint.TrainingState` made of the parts of a loop.

    A checkpoint has the states of modules and optimizers by the names of the parts. The states of all other parts are
    saved for each rank, since ranks read different data.

    Attributes:
        run_name: name of the run.
        timestamp: number of steps done.
        lineage: attempt of the run.
        not_finite: always empty; a loop does not report losses.

    Raises:
        ConfigError: a part has no state, or a name that checkpoints use themselves.
    """

    deepspeed = None
    dataloader_len = None
    schedulers: Sequence[Any] = ()
    algorithms: Sequence[Any] = ()
    fit_starts: Sequence[Any] = ()

    def __init__(self, run_name: str, parts: Mapping[str, Part]) -> None:
        for name, part in parts.items():
            if name in _OWN:
                raise ConfigError(f"the part {name!r}: this name is reserved for checkpoints. Choose another.")
            if not isinstance(part, Stateful | dict):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"the part {name!r} is of the type {type(part).__name__}: expected an object with state_dict() and "
                    "load_state_dict(), such as a model, an optimizer, a scheduler or a stateful loader, or a dict."
                )
        self.run_name = run_name
        self.timestamp = Steps(0)
        self.lineage = Lineage()
        self.not_finite: tuple[str, ...] = ()
        # Saved once for all ranks: modules and optimizers. The state of other parts is saved for each rank.
        self._shared = {name: part for name, part in parts.items() if isinstance(part, nn.Module | Optimizer)}
        self._of_rank = {name: part for name, part in parts.items() if name not in self._shared}

    @property
    def sharding(self) -> str | None:
        """``'sharded'`` if a module has distributed tensors: every rank writes a part of a directory. Else ``None``."""
        modules = [part for part in self._shared.values() if isinstance(part, nn.Module)]
        is_sharded = any(dist.is_distributed_tensor(one) for module in modules for one in module.parameters())
        return "sharded" if is_sharded else None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers among the parts."""
        return [part for part in self._shared.values() if isinstance(part, Optimizer)]

    # ── save ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def state_dict(self) -> StateDict:
        """Return the contents of a checkpoint. ``ranks`` has the item of this rank; the save adds the other ranks."""
        of_rank = self._of_rank.items()
        return {
            **{name: self._state_of(part) for name, part in self._shared.items()},
            "ranks": [{name: dict(part) if isinstance(part, dict) else part.state_dict() for name, part in of_rank}],
            "timestamp": {"batch": self.timestamp.batch},
            "run_name": self.run_name,
            "metadata": {"composerlite_version": VERSION, "torch_version": str(torch.__version__)},
        }

    def weights_state_dict(self) -> StateDict:
        """Return the states of the modules."""
        return {name: part.state_dict() for name, part in self._shared.items() if isinstance(part, nn.Module)}

    def get_optim_state_dict(self) -> StateDict:
        """Return the states of the optimizers."""
        return {name: part.state_dict() for name, part in self._shared.items() if isinstance(part, Optimizer)}

    def _state_of(self, part: nn.Module | Optimizer) -> StateDict:
        """Return the state of a module or an optimizer.

        A checkpoint directory needs text keys, so with sharding the keys of an optimizer's state are text, not numbers.
        """
        state = part.state_dict()
        if isinstance(part, Optimizer) and self.sharding is not None:
            state["state"] = {str(number): one for number, one in state["state"].items()}
        return state

    # ── restore ──────────────────────────────────────────────────────────────────────────────────────────────────
    def places_for(self, state_dict: StateDict, *, source: str, **_: Any) -> StateDict:
        """Return the live tensors to load ``state_dict`` into.

        Raises:
            IncompatibleCheckpointError: parts, names or shapes of tensors differ; lists all differences.
        """
        ranks = cast("list[StateDict]", state_dict.get("ranks")) or [{}]
        saved = {*state_dict, *ranks[0]} - {*_OWN}
        parts = {**self._shared, **self._of_rank}
        problems = [f"the part {name!r} is missing in the checkpoint" for name in parts if name not in saved]
        problems += [f"the part {name!r} of the checkpoint is missing here" for name in sorted(saved - {*parts})]
        for name in parts:
            is_shared = name in self._shared
            if name in saved and is_shared != (name in state_dict):
                here, there = ("", "not ") if is_shared else ("not ", "")
                problems.append(f"the part {name!r} was {there}a module or an optimizer, and is {here}one now")
        live = {name: self._state_of(part) for name, part in self._shared.items() if name in state_dict}
        for name, state in live.items():
            part, there = self._shared[name], state_dict[name]
            if isinstance(part, Optimizer):
                if self.sharding is not None and not state["state"]:  # before the first step
                    state["state"] = _new_shards(part, there.get("state", {}))
                continue
            problems += [f"{name}.{key} is missing in the checkpoint" for key in state if key not in there]
            problems += [f"{name}.{key} of the checkpoint is missing here" for key in there if key not in state]
            for key, value in state.items():
                other = there.get(key)
                if isinstance(value, Tensor) and isinstance(other, Tensor) and value.shape != other.shape:
                    shapes = f"{tuple(other.shape)} there and {tuple(value.shape)} here"
                    problems.append(f"{name}.{key} has the shape {shapes}")
        if problems:
            raise IncompatibleCheckpointError(
                f"{source} does not fit the parts of this loop: {'; '.join(problems)}. Build the same parts as the "
                "run that saved it, or start in another folder."
            )
        return live

    def load_state_dict(self, state_dict: StateDict, *, source: str, **_: Any) -> None:
        """Restore all parts, dicts in place.

        If the run has more ranks than before, each rank without saved states restores the states of rank 0.

        Raises:
            IncompatibleCheckpointError: a part rejects the saved state. Earlier parts are restored already.
        """
        ranks, rank = cast("list[StateDict]", state_dict["ranks"]), dist.get_global_rank()
        if len(ranks) != dist.get_world_size() and rank == 0:
            text = "%s was saved by %d ranks and is loaded by %d. Additional ranks load the parts of rank 0."
            log.warning(text, source, len(ranks), dist.get_world_size())
        own = ranks[rank] if rank < len(ranks) else ranks[0]
        for name, part in {**self._shared, **self._of_rank}.items():
            saved = state_dict[name] if name in self._shared else own[name]
            if isinstance(part, Optimizer):
                # A directory omits empty dicts, and has text in place of numbers: see _state_of.
                saved = {**saved, "state": {int(number): one for number, one in saved.get("state", {}).items()}}
            try:
                if isinstance(part, dict):
                    part.clear()
                    part.update(saved)
                else:
                    part.load_state_dict(saved)
            except (KeyError, RuntimeError, TypeError, ValueError) as e:
                raise IncompatibleCheckpointError(f"{source}: the part {name!r} cannot be restored: {e}") from e
        self.timestamp = Steps(int(state_dict["timestamp"]["batch"]))


def _new_shards(optimizer: Optimizer, saved: dict[Any, Any]) -> StateDict:
    """Return new shards in the form of ``saved``, the state of a sharded optimizer by numbers of parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {str(number): parameter for number, parameter in enumerate(parameters)}
    return dist.shards.shards_like(saved, {key: dict.fromkeys(saved.get(key, ()), one) for key, one in numbers.items()})
