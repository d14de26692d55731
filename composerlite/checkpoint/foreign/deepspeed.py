"""Checkpoints of DeepSpeed: finding and merging the parts of all ranks, and selecting the parts for a run.

In stages 1 and 2 each rank has a consecutive piece of a vector per group of parameters; in stage 3 each rank has a
piece of every parameter. The files of model states say where parameters are in the vectors: see ``zero_to_fp32.py`` of
DeepSpeed. The state of the optimizer is divided like the weights.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor

from composerlite.checkpoint.foreign.keys import Counts, Taken
from composerlite.checkpoint.format.weight_files import MODEL_STATES
from composerlite.errors import CorruptCheckpointError, IncompatibleCheckpointError
from composerlite.types import StateDict

_OPTIMIZER_STATES = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MOST_RANKS = 1 << 16
_MODEL_KEYS = (
    "module",
    "param_shapes",
    "buffer_names",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
)
"""Keys of a rank's model states that the weights need."""
_WEIGHT_KEYS = ("zero_stage", "fp32_flat_groups", "single_partition_of_fp32_groups", "param_alignment_paddings")
"""Keys of the state of DeepSpeed's optimizer that the weights need."""
_TAKEN = ("module", "optimizer", "lr_scheduler", "global_steps")
_SETTINGS = {
    *_MODEL_KEYS, *_TAKEN, "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config",
    "ds_version", "skipped_steps", "global_samples", "sparse_tensor_module_names",
}  # fmt: skip
"""Keys that are loaded, or are of no use in another run. All other keys with a value are logged as not loaded."""
_Shapes = Sequence[Mapping[str, Sequence[int]]]


@final
class Piece(NamedTuple):
    """Part of a checkpoint that one rank saved.

    Attributes:
        model: model states; empty if the first rank saved the model states for all ranks.
        state: state of DeepSpeed's own optimizer; ``None`` in stage 0, where each rank has all weights.
    """

    model: StateDict
    state: Any

    @property
    def stage(self) -> int:
        """Stage of ZeRO."""
        stage: Any = self.state["zero_stage"]
        return int(getattr(stage, "value", None) or (stage.arguments[0] if hasattr(stage, "arguments") else stage))

    @property
    def groups(self) -> Sequence[Tensor]:
        """The rank's piece of each group of parameters."""
        return self.state["fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"]

    @property
    def inner(self) -> StateDict:
        """State of the optimizer of torch, with the pieces as parameters."""
        return self.state["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]


def merged_contents(
    names: Collection[str], read: Callable[[str], StateDict], source: str, *, weights_only: bool = False
) -> StateDict:
    """Read the files of all ranks, and return the model states of the first rank, with whole weights as ``module``.

    Parameters are in fp32. Buffers, and all weights of stage 0, are as saved.

    Args:
        names: names of the files of one save.
        read: reads the file of the given name; with ``weights_only`` the parts of :func:`parts_for_weights` are enough.
        source: the checkpoint, for messages.
        weights_only: leave out ``optimizer``, the merged state of the optimizer.

    Raises:
        CorruptCheckpointError: a file is missing, or the files do not fit together.
        IncompatibleCheckpointError: layers or experts are split over ranks.
    """
    pieces = _read_pieces(names, read, source)
    first = pieces[0]
    try:
        made = {key: value for key, value in first.model.items() if key not in _MODEL_KEYS}
        made["module"] = _merged_weights(pieces)
        if first.state is not None and not weights_only:
            made["optimizer"] = _merged_optimizer(pieces)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as e:
        raise CorruptCheckpointError(f"{source}: its DeepSpeed files do not fit together: {e!r}") from e
    return made


def _read_pieces(names: Collection[str], read: Callable[[str], StateDict], source: str) -> list[Piece]:
    """Return the pieces in the order of the ranks. Arguments and errors as :func:`merged_contents`."""
    models, optimizers = (by_rank(names, pattern, source) for pattern in (MODEL_STATES, _OPTIMIZER_STATES))
    if 0 not in models:
        raise CorruptCheckpointError(f"{source}: the model states of its first rank are missing.")
    first = read(models[0])
    if not optimizers:  # stage 0: each rank has all weights
        return [Piece(first, None)]
    ranks = max(rank_count(first, source), len(optimizers))
    if missing := [rank for rank in range(ranks) if rank not in optimizers]:
        raise CorruptCheckpointError(f"{source} is incomplete: the files of ranks {missing[:8]} are missing.")
    pieces: list[Piece] = []
    for rank in range(ranks):
        contents = read(optimizers[rank])
        if not isinstance(contents.get("optimizer_state_dict", {}), dict):
            raise CorruptCheckpointError(f"{source}: {optimizers[rank]!r} has no state of an optimizer.")
        model = first if rank == 0 else read(models[rank]) if rank in models else {}
        pieces.append(Piece(model, contents.get("optimizer_state_dict")))
    return pieces


def rank_count(model_states: StateDict, source: str) -> int:
    """Return the number of ranks that saved the checkpoint ``source``.

    Raises:
        CorruptCheckpointError: ``model_states``, those of the first rank, do not have a possible number.
    """
    ranks = model_states.get("dp_world_size")
    if type(ranks) is not int or not 1 <= ranks <= _MOST_RANKS:
        raise CorruptCheckpointError(f"{source} does not record how many ranks saved it.")
    return ranks


def parts_for_weights(contents: StateDict) -> StateDict:
    """Select the parts of a rank's file that the weights need."""
    kept: StateDict = {key: contents.get(key) for key in (*_MODEL_KEYS, "dp_world_size")}
    if "optimizer_state_dict" in contents:
        state = contents["optimizer_state_dict"]
        is_state = isinstance(state, dict)
        kept["optimizer_state_dict"] = {key: state[key] for key in _WEIGHT_KEYS if key in state} if is_state else state
    return kept


def by_rank(names: Collection[str], pattern: re.Pattern[str], source: str) -> dict[int, str]:
    """Return the names that match ``pattern``, by data-parallel rank.

    Raises:
        IncompatibleCheckpointError: layers or experts are split over ranks.
    """
    found: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        is_of_states = name.endswith(("model_states.pt", "optim_states.pt"))
        if match is None and (not is_of_states or MODEL_STATES.fullmatch(name) or _OPTIMIZER_STATES.fullmatch(name)):
            continue  # states that match neither pattern are of a layer or an expert, and raise below
        is_of_rank = match is not None and not int(match[2]) and len(match[1] or "") <= 6
        rank = int(match[1] or 0) if match is not None else 0
        if not is_of_rank or rank in found:
            raise IncompatibleCheckpointError(
                f"{source} has {name!r}: models whose layers or experts are split over ranks cannot be read. "
                "Convert it with DeepSpeed's own tools."
            )
        found[rank] = name
    return found


def _merged_weights(pieces: Sequence[Piece]) -> dict[str, Tensor]:
    """Return the state dict of the model from the pieces of all ranks."""
    first = pieces[0]
    if first.state is None:
        return first.model["module"]
    shapes: _Shapes = first.model["param_shapes"]
    trained = _whole(pieces, [piece.groups for piece in pieces], shapes) | _frozen(pieces)
    shared: dict[str, str] = dict(first.model.get("shared_params") or {})
    buffers = set(first.model["buffer_names"])
    merged: dict[str, Tensor] = {}
    for name, saved in first.model["module"].items():
        if name in buffers:
            merged[name] = saved
        elif name in trained or shared.get(name) in trained:
            merged[name] = trained[name if name in trained else shared[name]]
        elif first.stage < 3:
            merged[name] = saved.float()
        else:
            raise ValueError(f"no rank has {name!r}")
    return merged


def _whole(pieces: Sequence[Piece], vectors: Sequence[Sequence[Tensor]], shapes: _Shapes) -> dict[str, Tensor]:
    """Merge the vectors of all ranks, and return whole tensors by the names of parameters.

    Args:
        pieces: of all ranks.
        vectors: of each rank, group by group.
        shapes: of parameters by name, group by group.
    """
    found: dict[str, Tensor] = {}
    all_paddings: Sequence[Sequence[int]] | None = None
    if pieces[0].stage == 3:  # a vector of all groups for each rank
        shapes = [dict(item for group in shapes for item in group.items())]
        joined = [[torch.cat([group.flatten() for group in groups]) for groups in vectors]]
    else:  # a vector of all ranks for each group
        all_paddings = pieces[0].state.get("param_alignment_paddings")
        joined = [[torch.cat([groups[number] for groups in vectors])] for number in range(len(shapes))]
    for number, group in enumerate(shapes):
        paddings = [0] * len(group) if all_paddings is None else all_paddings[number]
        start = 0
        for (name, shape), padding in zip(group.items(), paddings, strict=True):
            size = math.prod(shape)
            length = -(-size // len(joined[number]))
            parts = [_part(vector, start, length, name) for vector in joined[number]]
            found[name] = (parts[0] if len(parts) == 1 else torch.cat(parts))[:size].view(tuple(shape))
            start += length + padding
    return found


def _part(vector: Tensor, start: int, size: int, name: str) -> Tensor:
    if size < 0 or start + size > vector.numel():
        raise ValueError(f"{name!r} is incomplete")
    return vector[start : start + size]


def _frozen(pieces: Sequence[Piece]) -> dict[str, Tensor]:
    """Return the frozen weights that have entries of their own: saved whole in stages 1 and 2, in pieces in stage 3."""
    shapes = cast("Mapping[str, Sequence[int]]", pieces[0].model.get("frozen_param_shapes") or {})
    having = [piece.model["frozen_param_fragments"] for piece in pieces if piece.model]
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        size = math.prod(shape)
        parts = [fragments[name].flatten() for fragments in (having if pieces[0].stage == 3 else having[:1])]
        found[name] = _part(torch.cat(parts), 0, size, name).view(tuple(shape)).float()
    return found


def _merged_optimizer(pieces: Sequence[Piece]) -> StateDict:
    """Return the state by the names of parameters, as ``get_optimizer_state_dict`` of torch does."""
    first = pieces[0]
    shapes: _Shapes = first.model["param_shapes"]
    numbers = sorted(first.inner["state"])
    whole: dict[str, dict[str, Tensor]] = {}
    alone: StateDict = {}
    for key, value in first.inner["state"][numbers[0]].items() if numbers else ():
        if isinstance(value, Tensor) and value.numel() == first.groups[0].numel() and value.ndim:
            vectors = [[piece.inner["state"][number][key] for number in numbers] for piece in pieces]
            whole[key] = _whole(pieces, vectors, shapes)
        elif (isinstance(value, Tensor) and value.numel() != 1) or not isinstance(
            value, Tensor | int | float | NoneType
        ):
            raise ValueError(f"{key!r} of the optimizer is {type(value).__name__} of another size than its parameters")
        else:
            alone[key] = torch.as_tensor(value, dtype=torch.float32) if key == "step" else value
    names = [list(group) for group in shapes]
    parts = {name: {key: tensors[name] for key, tensors in whole.items()} for group in names for name in group}
    state = {name: {**copy.deepcopy(alone), **part} for name, part in parts.items()}  # each parameter has its own step
    groups = [
        {**group, "params": [name for number in group["params"] for name in names[number]]}
        for group in first.inner["param_groups"]
    ]
    return {"state": state if numbers else {}, "param_groups": groups}


def taken_from_deepspeed(contents: StateDict, source: str) -> Taken:
    """Select the weights, the states of optimizer and scheduler, and the step from ``contents``.

    Raises:
        IncompatibleCheckpointError: ``contents`` are a single file of a checkpoint.
    """
    if contents.get("param_shapes"):
        raise IncompatibleCheckpointError(
            f"{source} is one file of a checkpoint of DeepSpeed's ZeRO, and other files have its weights in fp32. Give "
            "the folder that it is in."
        )
    optimizer, scheduler = (contents.get(key) for key in _TAKEN[1:3])
    optimizer = optimizer if isinstance(optimizer, Mapping) and "param_groups" in optimizer else None
    progress = Counts(contents["global_steps"]) if "global_steps" in contents else None
    left = [key for key, value in contents.items() if key not in _SETTINGS and value]
    return Taken(contents["module"], optimizer, scheduler, progress, left=left)
