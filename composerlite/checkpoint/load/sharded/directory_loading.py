"""Loading the directory of a sharded checkpoint: of each tensor a rank reads what it needs, and where it belongs."""

from __future__ import annotations

import io
import logging
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from composerlite import dist
from composerlite.checkpoint.format.stored_item import item_contents
from composerlite.checkpoint.format.tensor_kinds import is_dense
from composerlite.checkpoint.load.restoring import Restoring, half_loaded
from composerlite.checkpoint.load.sharded import reader as sharded
from composerlite.checkpoint.load.sharded.elsewhere import Elsewhere
from composerlite.checkpoint.load.sharded.state_keys import nested
from composerlite.checkpoint.place.directory import CheckpointFolder
from composerlite.errors import IncompatibleCheckpointError
from composerlite.types import StateDict, items_of, with_items

__all__ = ["as_in_a_file", "load_directory"]

log = logging.getLogger(__name__)


def load_directory(folder: CheckpointFolder, restoring: Restoring) -> list[dict[str, Any]] | None:
    """Restore a state from the directory ``folder``, on every rank; the states of the random generators, if any.

    What it holds is compared with the state before a tensor is read. Tensors are then read in place.

    Raises:
        CheckpointError: as :func:`composerlite.checkpoint.load_checkpoint`, on every rank.
    """

    def read(reader: sharded.RemoteFileSystemReader) -> Any:
        with Elsewhere(folder, reader, restoring.source) as elsewhere:
            return _read_state(reader, elsewhere, restoring)

    with sharded.RemoteFileSystemReader(folder) as reader:
        wanted = sharded.read_whole(reader, dist.get_group(), read)
    with dist.get_group().all_or_none("restoring the run"):
        return restoring.load(wanted)


def _read_state(reader: sharded.RemoteFileSystemReader, elsewhere: Elsewhere, restoring: Restoring) -> Any:
    """What is to be restored, with its tensors, those that can in the live ones."""
    with dist.get_group().all_or_none(f"reading the index of {restoring.source}"):
        metadata = reader.read_metadata()
    values = _plain_values(reader, elsewhere, restoring.source)
    tensors = _unread_tensors(metadata)
    with dist.get_group().all_or_none("comparing the checkpoint with the run"):
        held = nested(metadata, "", list(metadata.state_dict_metadata), {**values, **tensors})
        wanted = restoring.wanted(_as_of_a_run(held, restoring))
        live = restoring.places(wanted)
    key_of = {id(tensor): key for key, tensor in tensors.items()}
    targets: dict[str, Tensor] = {}
    wanted = _with_targets(wanted, live, key_of, targets, set())
    _read(reader, elsewhere, targets)
    return wanted


def _read(reader: sharded.RemoteFileSystemReader, elsewhere: Elsewhere, targets: dict[str, Tensor]) -> None:
    """Fill ``targets``, on every rank. What several ranks want of the files that they see one of them reads."""
    elsewhere.bring_tensors(targets)
    with half_loaded(bool(targets)):
        sharded.load_leaves(reader, targets, group=dist.get_group())


def _plain_values(reader: sharded.RemoteFileSystemReader, elsewhere: Elsewhere, source: str) -> dict[str, Any]:
    """What is no tensor, read by rank 0."""
    stored = reader.read_metadata().state_dict_metadata
    keys = [key for key, kind in stored.items() if not isinstance(kind, sharded.TensorStorageMetadata)]
    if dist.get_world_size() == 1:
        return sharded.load_flat(reader, keys)
    elsewhere.bring_values(keys)

    def packed() -> bytes:
        buffer = io.BytesIO()
        torch.save(sharded.load_flat(reader, keys), buffer)
        return buffer.getvalue()

    return item_contents(dist.get_group().from_first(f"reading the small parts of {source}", packed))


def _unread_tensors(metadata: sharded.Metadata) -> dict[str, Tensor]:
    """A tensor without memory for each that is stored."""
    return {
        key: torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
        for key, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, sharded.TensorStorageMetadata)
    }


def _as_of_a_run(held: Any, restoring: Restoring) -> Any:
    """The contents of a checkpoint of a run; those of a model and its optimizer have another form there."""
    if not isinstance(held, dict):
        return held
    contents = cast("StateDict", held)
    if "state" not in contents and isinstance(contents.get("model"), dict):
        contents = _of_model_and_optimizer(contents, restoring)
    return as_in_a_file(contents)


def as_in_a_file(contents: StateDict) -> StateDict:
    """The contents of a directory of a run as a file has them: with what is empty, and a list of generators."""
    generators = contents.get("rng")
    by_rank = cast("StateDict", generators) if isinstance(generators, dict) else {}
    if by_rank and all(key.isdecimal() for key in by_rank):  # each rank saves its own, under its number
        contents = {**contents, "rng": [by_rank[key] for key in sorted(by_rank, key=int)]}
    state = contents.get("state")
    if isinstance(state, dict):
        for optimizer in cast("StateDict", state).get("optimizers", {}).values():
            if isinstance(optimizer, dict):
                cast("StateDict", optimizer).setdefault("state", {})
        if isinstance(state.get("dataset_state"), dict):  # pyright: ignore[reportUnknownMemberType]
            state["dataset_state"] = {"train": None, "eval": {}, **state["dataset_state"]}
    return contents


def _of_model_and_optimizer(held: StateDict, restoring: Restoring) -> StateDict:
    """What ``save_model_and_optim_state`` and OLMo-core save: nothing but weights and the state of one optimizer."""
    state: StateDict = {"model": held["model"]}
    optimizers = restoring.state.optimizers
    saved = held.get("optim")
    if isinstance(saved, dict) and optimizers:
        if not isinstance(saved.get("param_groups"), list):  # pyright: ignore[reportUnknownMemberType]
            raise IncompatibleCheckpointError(
                f"{restoring.source} has the settings of its optimizer by parameter, not by group: load it with "
                "composerlite.checkpoint.load_model_and_optim_state, or its model alone with load_weights_only=True."
            )
        state["optimizers"] = {type(optimizers[0]).__qualname__: saved}
    log.warning("%s holds a model and its optimizer only: time, data and callbacks start afresh", restoring.source)
    return {"state": state}


def _with_targets(wanted: Any, live: Any, key_of: dict[int, str], targets: dict[str, Tensor], taken: set[int]) -> Any:
    """``wanted`` with a tensor to be filled for each unread one: the live one where it is of the same form."""
    if isinstance(wanted, Tensor) and id(wanted) in key_of:
        target = _target(wanted, live, taken)
        targets[key_of[id(wanted)]] = target
        return target
    lives = dict(items_of(live))
    return with_items(wanted, lambda key, value: _with_targets(value, lives.get(key), key_of, targets, taken))


def _target(unread: Tensor, live: Any, taken: set[int]) -> Tensor:
    """Where to read a tensor to. No two are read to the same memory: what is loaded last counts there."""
    if not isinstance(live, Tensor) or is_lazy(live) or live.shape != unread.shape or live.is_meta:
        return torch.empty(unread.shape, dtype=unread.dtype)
    local = dist.local_shard(live).local
    address = local.data_ptr() if local.numel() else 0
    if live.dtype is unread.dtype and is_dense(local) and address not in taken:
        taken |= {address} - {0}
        return live
    if dist.is_distributed_tensor(live):
        return dist.empty_shard_like(live, unread.dtype)
    return torch.empty(unread.shape, dtype=unread.dtype)
