"""Loading sharded checkpoints: directories in the format of ``torch.distributed.checkpoint`` (DCP).

Each rank reads its own parts of tensors, directly into live tensors where possible. Ranks communicate through
:class:`composerlite.dist.Group` only, never through DCP.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parameter import is_lazy

from composerlite import dist
from composerlite._torch_compat import with_versions
from composerlite.checkpoint.contents import RestorePlan, half_loaded
from composerlite.checkpoint.format.sharded_index import leaves, nested
from composerlite.checkpoint.load.sharded_reader import RemoteFileSystemReader, requests_of, safe_contents
from composerlite.checkpoint.load.sharing import fetch_from_nodes, plan_load
from composerlite.checkpoint.place.directory import ShardedDirectory, StepFolder
from composerlite.dist import Group, empty_shard_like, exchange, group_of, is_dense
from composerlite.errors import CheckpointError, ConfigError, IncompatibleCheckpointError, RankError
from composerlite.types import StateDict, items_of, with_items

log = logging.getLogger(__name__)
T = TypeVar("T")


def load_directory(folder: ShardedDirectory, plan: RestorePlan, step: StepFolder | None = None) -> RestorePlan:
    """Read the directory ``folder`` into a state. Collective.

    The keys of the directory are compared with the state first. Then tensors are read in place.

    Args:
        folder: the directory; closed at the end.
        plan: what to restore.
        step: the step whose model and optimizer are in ``folder``, with a file of the train state of each rank; closed
            at the end. ``None``: the directory is no part of a step.

    Returns:
        ``plan``, with the contents. Nothing but tensors has changed in the state.

    Raises:
        CheckpointError: as :func:`composerlite.checkpoint.load_checkpoint`, on every rank.
    """
    with contextlib.nullcontext() if step is None else step, RemoteFileSystemReader(folder) as reader:
        plan.contents = read_whole(reader, dist.get_group(), lambda reader: _read_state(reader, plan, step))
        plan.verified = reader.verified
        return plan


def _read_state(reader: RemoteFileSystemReader, plan: RestorePlan, step: StepFolder | None) -> Any:
    """Return the state to restore, with the train states of ``step``. Collective.

    Tensors are read into live tensors where possible.
    """
    group = dist.get_group()
    beside: StateDict = {}
    if step is not None:
        place, paths = step.place, step.rank_files
        files = group.from_first(
            f"reading the train states of {step.uri}",
            lambda: {path: place.read(path) for _, path in sorted(paths().items())},
        )
        beside["train"] = [safe_contents(data, name, step.uri) for name, data in files.items()]
    metadata = reader.read_metadata()
    stored = metadata.state_dict_metadata
    tensors = {key: one for key, one in unread(metadata, stored, device="meta").items() if one is not None}
    # Rank 0 reads the values, for every rank.
    keys = dict.fromkeys(key for key in stored if key not in tensors)
    fetch_from_nodes(reader, keys if group.is_first else {}, plan.source)
    what = f"reading the small parts of {plan.source}"
    read = group.from_first(what, lambda: reader.read(requests_of(metadata, keys, reader.uri)))
    values = {key: safe_contents(data, key, reader.uri) for key, data in read.items()}
    with group.all_or_none("comparing the checkpoint with the run"):
        held = nested(metadata, "", list(stored), {**values, **tensors})
        whole = as_in_a_file({**cast("StateDict", held), **beside}) if isinstance(held, dict) else held
        wanted, live = plan.matched(whole)
    targets: dict[str, Tensor] = {}
    wanted = _with_targets(wanted, live, {id(tensor): key for key, tensor in tensors.items()}, targets, set())
    fetch_from_nodes(reader, targets, plan.source)
    with half_loaded(bool(targets)):
        load_leaves(reader, targets, group=group)
    return wanted


def as_in_a_file(contents: StateDict) -> StateDict:
    """Return the contents of a run's directory in the form of a file: with empty dicts, and a list of generators."""
    generators = contents.get("rng")
    by_rank = cast("StateDict", generators) if isinstance(generators, dict) else {}
    if by_rank and all(key.isdecimal() for key in by_rank):  # a rank saves its generators under its number
        contents = {**contents, "rng": [by_rank[key] for key in sorted(by_rank, key=int)]}
    state = contents.get("state")
    if isinstance(state, dict):
        for optimizer in cast("StateDict", state).get("optimizers", {}).values():
            if isinstance(optimizer, dict):
                cast("StateDict", optimizer).setdefault("state", {})
        if isinstance(algorithms := cast("StateDict", state).get("algorithms"), list):
            pairs = cast("list[Any]", algorithms)
            state["algorithms"] = [tuple(cast("Any", pair)) if isinstance(pair, list) else pair for pair in pairs]
        if isinstance(state.get("dataset_state"), dict):  # pyright: ignore[reportUnknownMemberType]
            state["dataset_state"] = {"train": None, "eval": {}, **state["dataset_state"]}
    return contents


def _with_targets(wanted: Any, live: Any, key_of: dict[int, str], targets: dict[str, Tensor], taken: set[int]) -> Any:
    """Return ``wanted`` with a tensor to fill for each unread tensor.

    Args:
        wanted: the contents to restore.
        live: the live tensors, by the same path of keys.
        key_of: the key of the index for the ``id`` of each unread tensor.
        targets: gets the tensors to fill, by the key of the index.
        taken: gets the addresses of live tensors to fill.
    """
    if isinstance(wanted, Tensor) and id(wanted) in key_of:
        key = key_of[id(wanted)]
        if key not in targets:  # a weight may have two names
            targets[key] = _live_or_new(wanted, live if isinstance(live, Tensor) else None, taken)
        return targets[key]
    lives = dict(items_of(live))
    return with_items(wanted, lambda key, value: _with_targets(value, lives.get(key), key_of, targets, taken))


def _live_or_new(unread: Tensor, live: Tensor | None, taken: set[int]) -> Tensor:
    """Return the live tensor if shape and type are equal, or a new tensor to fill. ``taken`` gets the address.

    No two tensors are read into the same memory, since the order of the reads would decide the result.
    """
    if live is None or is_lazy(live) or live.shape != unread.shape or live.is_meta:
        return torch.empty(unread.shape, dtype=unread.dtype)
    dist.shards.make_fillable(live)
    local = dist.local_shard(live).local
    address = local.data_ptr() if local.numel() else 0
    if live.dtype is unread.dtype and is_dense(local) and address not in taken:
        taken |= {address} - {0}
        return live
    if dist.is_distributed_tensor(live):
        return dist.empty_shard_like(live, unread.dtype)
    return torch.empty(unread.shape, dtype=unread.dtype)


_ATTEMPTS = 20
_PAUSE_SECONDS = 0.02


# ── loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def read_whole(reader: RemoteFileSystemReader, group: Group, read: Callable[[RemoteFileSystemReader], T]) -> T:
    """Return the result of ``read``, from the same checkpoint on all ranks. Collective.

    If another process replaces the checkpoint meanwhile, the ranks read again, up to 20 times.

    Args:
        reader: of the checkpoint.
        group: the ranks of the load.
        read: collective; reads the whole checkpoint with ``reader``. An error on a rank must be raised on all ranks.
    """
    for attempt in range(_ATTEMPTS):
        try:
            if group.all_reduce("version", reader.version, lambda versions: len(set(versions)) == 1):
                return read(reader)
        except (CheckpointError, RankError, FileNotFoundError) as e:
            if isinstance(e, RankError) and not e.everywhere:
                raise
            if not group.all_reduce("looking for another checkpoint", reader.was_replaced, any):
                raise
        log.info("%s was replaced while it was read: reading it again", reader.uri)
        reader.reset()
        time.sleep(_PAUSE_SECONDS * attempt)
    return read(reader)


def load(
    reader: RemoteFileSystemReader, state: StateDict, *, group: Group | None = None, only: Container[str] | None = None
) -> None:
    """Fill ``state``, of nested dicts, in place: tensors are filled, values are replaced. Collective.

    Sparse tensors, and tensors of a subclass, are replaced by tensors of the same class, layout, type and shape. A
    value of ``None`` is replaced by any value or tensor of the checkpoint.

    Args:
        reader: of the checkpoint.
        state: to fill.
        group: the ranks of the load; ``None``: all.
        only: keys of the index to load; ``None``: all keys of ``state``.

    Raises:
        IncompatibleCheckpointError: the checkpoint does not have a key, has a tensor of another shape, or has different
            numbers for two names of one tensor. Raised on all ranks.
    """
    found = leaves(state, as_dcp=True)
    wanted = {key: value for key, value in found.values.items() if only is None or key in only}
    stored = reader.read_metadata().state_dict_metadata
    for key, value in wanted.items():
        if isinstance(value, Tensor):
            dist.shards.make_fillable(value)
            wanted[key] = value if is_dense(value) else None
        elif value is None and key in stored:
            wanted.update(unread(reader.read_metadata(), [key]))
    tied = dist.tied_names(wanted)
    for key in (key for _, *others in tied for key in others):  # read apart, to compare the numbers
        wanted[key] = empty_shard_like(found.values[key], found.values[key].dtype)
    group = group or group_of()
    load_leaves(reader, wanted, group=group)
    group.agree("comparing names of the same tensor", lambda: _check_tied(wanted, tied, reader.uri))
    wanted |= {key: found.values[key] for _, *others in tied for key in others}
    for key, value in wanted.items():
        if isinstance(found.values[key], Tensor) and value is not found.values[key]:
            has, own = (
                (type(one).__name__, one.layout, one.dtype, tuple(one.shape))
                if isinstance(one, Tensor)
                else type(one).__name__
                for one in (value, found.values[key])
            )
            if has != own:
                text = f"checkpoint {reader.uri!r} has {has} for {key!r}, and here is {own}."
                raise IncompatibleCheckpointError(text)
            dist.shards.make_fillable(found.values[key], value)
        if value is not found.values[key]:
            node: Any = state
            for step in found.places[key][:-1]:
                node = node[step]
            node[found.places[key][-1]] = value


def _check_tied(loaded: StateDict, tied: Iterable[Sequence[str]], uri: str) -> None:
    """Raise if the numbers loaded for several names of one tensor differ in a bit."""

    def bits(key: str) -> Tensor:
        return dist.local_shard(loaded[key]).local.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)

    different = [names for names in tied if any(not torch.equal(bits(names[0]), bits(name)) for name in names[1:])]
    if different:
        raise IncompatibleCheckpointError(
            f"checkpoint {uri!r} has different numbers for what is one tensor here: "
            f"{'; '.join(', '.join(names) for names in different[:20])}. Load into tensors of their own, as in a "
            "model whose weights are not tied, or leave all names but one out of the state dict."
        )


def load_leaves(reader: RemoteFileSystemReader, state: StateDict, *, group: Group) -> None:
    """Fill ``state`` in place. The checkpoint must have all keys of ``state``, with the same shapes. Collective.

    If several ranks need the same part of a tensor, one rank reads the part and sends the part to the others. Each rank
    reads all values.

    Args:
        reader: of the checkpoint.
        state: tensors to fill, and values to replace, by the keys of the index.
        group: the ranks of the load.
    """
    requests, transfers = plan_load(reader, state, group)

    def read() -> None:
        for key, data in reader.read(requests).items():
            state[key] = safe_contents(data, key, reader.uri)

    group.agree("reading a sharded checkpoint", read)
    if group.exchanges:
        exchange(f"checkpoint {reader.uri!r}", transfers)


def load_flat(reader: RemoteFileSystemReader, keys: Iterable[str]) -> dict[str, Any]:
    """Return the tensors and values of ``keys`` of the index, whole, in host memory. Not collective."""
    state = unread(reader.read_metadata(), keys)
    if state:
        load_leaves(reader, state, group=Group())
    return state


def unread(metadata: Metadata, keys: Iterable[str], *, device: str = "cpu") -> dict[str, Any]:
    """Return, by key of the index, a new tensor to fill for each tensor, and ``None`` for each value."""
    found: dict[str, Any] = {}
    for key in keys:
        stored: Any = metadata.state_dict_metadata[key]
        is_tensor = isinstance(stored, TensorStorageMetadata)
        found[key] = torch.empty(stored.size, dtype=stored.properties.dtype, device=device) if is_tensor else None
    return found


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────
_WRAPPED = ("module", "_orig_mod", "_checkpoint_wrapped_module")
"""Names of a wrapped module: in DDP, ``torch.compile``, activation checkpointing."""


def model_state(model: nn.Module) -> StateDict:
    """Return the state of ``model`` on the CPU, this rank's shards only. Tensors may share memory with the model.

    torch's ``get_model_state_dict`` looks up each name twice, and takes longer than the rest of the planning of a save.
    So it is called only for models with tensors on devices, with FSDP1, or with wrapped modules in their names.

    Raises:
        ConfigError: ``model`` is no module, or has parameters on the device ``meta``.
    """
    if not isinstance(cast("object", model), nn.Module):
        raise ConfigError(
            f"model is of the type {type(model).__name__}: expected a torch.nn.Module. Put several into one, as "
            "nn.ModuleDict does; a state dict goes to save_state_dict and load_state_dict."
        )
    # FSDP, and patches of torch, rename keys or move data.
    if "state_dict" not in vars(model) and not any(isinstance(m, FullyShardedDataParallel) for m in model.modules()):
        state = model.state_dict()
        if without := [name for name, value in state.items() if isinstance(value, Tensor) and value.is_meta]:
            raise ConfigError(
                f"the model has no numbers in {len(without)} of its tensors, {without[0]!r} for example: they are on "
                "the device 'meta'. Call model.to_empty(device='cpu') first, and make its optimizer after that."
            )
        parts = {part for name in state for part in name.split(".")}
        plain = (type(one) is Tensor or dist.is_distributed_tensor(one) for one in state.values())
        if parts.isdisjoint(_WRAPPED) and all(plain) and all(one.device.type == "cpu" for one in state.values()):
            return dict(state)
    return get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))


def set_model_state(model: nn.Module, state: StateDict, *, strict: bool) -> None:
    """Load ``state`` into ``model``, in place. If ``strict`` is true, the names must agree exactly."""
    for name, live in itertools.chain(model.named_parameters(), model.named_buffers()):
        if name in state:
            dist.shards.make_fillable(live)
    set_model_state_dict(model, with_versions(state, model), options=StateDictOptions(cpu_offload=True, strict=strict))
