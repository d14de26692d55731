"""The weights of a model, whole and in fp32, out of the pieces that the ranks of DeepSpeed have saved.

In stages 1 and 2 the ranks have consecutive pieces of one vector for each group of parameters; in stage 3 each has a
piece of every parameter. How parameters lie in them is in the files beside: see ``zero_to_fp32.py`` of DeepSpeed, which
does the same in its own way.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from composerlite import dist
from composerlite.checkpoint.deepspeed.archives import MODEL_STATES, RankFiles, find_archives, model_states, the_file
from composerlite.checkpoint.load.reader import readable
from composerlite.checkpoint.save.plain_file import plain_writer
from composerlite.errors import CheckpointExistsError, ConfigError, CorruptCheckpointError
from composerlite.storage import is_uri, make_folder, parse_uri
from composerlite.types import StateDict

__all__ = ["merged_weights", "unshard_zero", "untrained"]

log = logging.getLogger(__name__)

_OPTIMIZER = "optim_states.pt"


def merged_weights(archives: Sequence[RankFiles]) -> dict[str, Tensor]:
    """The state dict of the model: parameters in fp32, buffers as they were saved.

    Args:
        archives: of all ranks, in their order.

    Raises:
        CorruptCheckpointError: they do not fit together.
        IncompatibleCheckpointError: they hold what is not understood here: experts, or layers split over ranks.
    """
    try:
        return _merged([_piece(archive) for archive in archives])
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as e:
        raise CorruptCheckpointError(f"its files of DeepSpeed do not fit together: {e!r}") from e


def untrained(archives: Sequence[RankFiles]) -> dict[str, Tensor]:
    """Select of :func:`merged_weights` what no optimizer has: buffers, and parameters that are frozen."""
    first = model_states(archives[0], prune=_of_the_model)
    trained = {name for group in first["param_shapes"] for name in group}
    trained |= {name for name, other in dict(first.get("shared_params") or {}).items() if other in trained}
    return {name: tensor for name, tensor in merged_weights(archives).items() if name not in trained}


class _Piece(NamedTuple):
    """The part of the weights that one rank has.

    Attributes:
        model: its model states.
        stage: of ZeRO.
        groups: the pieces of parameters that it has, group by group.
        paddings: numbers behind each parameter, group by group; ``None``: there are none.
    """

    model: StateDict
    stage: int
    groups: Sequence[Tensor]
    paddings: Sequence[Sequence[int]] | None


def _piece(archive: RankFiles) -> _Piece:
    has_model = any(name.endswith(MODEL_STATES) for name in archive.names)
    model = model_states(archive, prune=_of_the_model) if has_model else {}
    optimizer = archive.contents(the_file(archive, _OPTIMIZER), prune=_of_the_optimizer)
    return _Piece(model, optimizer["stage"], optimizer["groups"], optimizer["paddings"])


def _of_the_model(contents: StateDict) -> StateDict:
    keys = ("module", "param_shapes", "buffer_names", "frozen_param_shapes", "frozen_param_fragments", "shared_params")
    return {key: contents.get(key) for key in keys}


def _of_the_optimizer(contents: StateDict) -> StateDict:
    state = contents["optimizer_state_dict"]
    stage: Any = state["zero_stage"]
    stage = int(getattr(stage, "value", None) or (stage.arguments[0] if hasattr(stage, "arguments") else stage))
    groups: Any = state["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
    return {"stage": stage, "groups": groups, "paddings": state.get("param_alignment_paddings")}


def _merged(pieces: Sequence[_Piece]) -> dict[str, Tensor]:
    first = pieces[0]
    shapes: list[Mapping[str, Sequence[int]]] = first.model["param_shapes"]
    trained = _of_stage_3(pieces, shapes) if first.stage == 3 else _of_stages_1_and_2(pieces, shapes)
    trained |= _frozen(pieces)
    shared: Any = first.model.get("shared_params") or {}
    shared = dict(shared)
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


def _of_stages_1_and_2(pieces: Sequence[_Piece], shapes: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for number, group in enumerate(shapes):
        vector = torch.cat([piece.groups[number] for piece in pieces])
        paddings = [0] * len(group) if pieces[0].paddings is None else pieces[0].paddings[number]
        start = 0
        for (name, shape), padding in zip(group.items(), paddings, strict=True):
            size = math.prod(shape)
            found[name] = _part(vector, start, size, name).view(tuple(shape))
            start += size + padding
    return found


def _of_stage_3(pieces: Sequence[_Piece], shapes: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Tensor]:
    vectors = [torch.cat([group.flatten() for group in piece.groups]) for piece in pieces]
    found: dict[str, Tensor] = {}
    start = 0
    for name, shape in (item for group in shapes for item in group.items()):
        size = math.prod(shape)
        part = -(-size // len(pieces))
        found[name] = torch.cat([_part(vector, start, part, name) for vector in vectors])[:size].view(tuple(shape))
        start += part
    return found


def _part(vector: Tensor, start: int, size: int, name: str) -> Tensor:
    if start + size > vector.numel():
        raise ValueError(f"{name!r} is incomplete")
    return vector[start : start + size]


def _frozen(pieces: Sequence[_Piece]) -> dict[str, Tensor]:
    """Weights that are not trained, where they are saved apart: whole in stage 2, in pieces in stage 3."""
    shapes = cast("Mapping[str, Sequence[int]]", pieces[0].model.get("frozen_param_shapes") or {})
    having = [piece.model["frozen_param_fragments"] for piece in pieces if piece.model]
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        size = math.prod(shape)
        parts = [fragments[name].flatten() for fragments in (having if pieces[0].stage == 3 else having[:1])]
        found[name] = _part(torch.cat(parts), 0, size, name).view(tuple(shape)).float()
    return found


# ── as one file ──────────────────────────────────────────────────────────────────────────────────────────────────────
_SAFETENSORS = ".safetensors"


def unshard_zero(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    use_safetensors: bool | None = None,
    save_overwrite: bool = False,
    quiet: bool = False,
) -> Path:
    """Write the weights that the ranks of DeepSpeed saved to one file: the model's state dict, parameters in fp32.

    DeepSpeed need not be installed. All weights are in memory at once, twice for a moment.

    Args:
        path: path or URI of the archive of rank 0, or of a link to it; where it has no manifest, as those of Composer,
            with ``{rank}`` in the name.
        target: the file.
        use_safetensors: write a safetensors file; ``None``: if ``target`` ends with ``.safetensors``.
        save_overwrite: replace what is there.
        quiet: do not log what is written.

    Returns:
        The file.

    Raises:
        CheckpointExistsError: a FileExistsError: ``target`` is there, and ``save_overwrite`` is false.
        ConfigError: ``target`` is a URI; the archives of other ranks are not known.
        RuntimeError: there are several ranks.
        CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError, UntrustedCheckpointError: as
            :func:`load_checkpoint`.
    """
    if dist.get_world_size() > 1:
        raise RuntimeError("unshard_zero works in one process: call it where there are no other ranks.")
    if is_uri(os.fspath(target)):
        raise ConfigError(f"target={os.fspath(target)!r}: expected a file of this machine; upload it then.")
    file = Path(parse_uri(os.fspath(target))[2])
    write = plain_writer(use_safetensors=file.suffix == _SAFETENSORS if use_safetensors is None else use_safetensors)
    if file.exists() and not save_overwrite:
        raise CheckpointExistsError(f"{str(file)!r} exists: give another name, or save_overwrite=True.")
    archives = find_archives(os.fspath(path), "", None, argument="path")
    with archives.all_opened(None) as every, readable(Path(archives.names[0])):
        weights = merged_weights(every)
    make_folder(file.parent)
    write(file, weights)
    if not quiet:
        log.info("wrote %s", file)
    return file
