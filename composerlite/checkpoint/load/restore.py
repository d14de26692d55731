"""Loading: find the checkpoint, compare its contents with the state, and read its tensors into the live tensors."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from composerlite import dist
from composerlite.checkpoint.contents import (
    IgnoreKeys,
    RestorePlan,
    TrainingState,
    check_ignore_keys,
    check_kind,
    half_loaded,
    tensor_pairs,
    with_tensors,
    without,
)
from composerlite.checkpoint.format.torch_reader import MapLocation, Sieve
from composerlite.checkpoint.load.reader import opened
from composerlite.checkpoint.load.resolve import find_checkpoint
from composerlite.checkpoint.record.naming import format_name_with_dist
from composerlite.devices import DeviceCopier, DeviceRing, RingSlots, shared_ring
from composerlite.on_demand import uncollected
from composerlite.storage import ObjectStore, without_secrets
from composerlite.types import StateDict


def read_checkpoint(
    path: str | Path,
    *,
    trust_checkpoint: bool = False,
    progress_bar: bool = False,
    map_location: MapLocation = "cpu",
    ignore_keys: IgnoreKeys = None,
) -> StateDict:
    """Return the contents of the checkpoint file ``path``, verified by the record if there is a record.

    Args:
        path: a file, also compressed or in an archive.
        trust_checkpoint: load any type, **running any code in the file**.
        progress_bar: show a progress bar on a terminal while a large file is read.
        map_location: device of the tensors, as in ``torch.load``.
        ignore_keys: keys to leave out; the bytes of their tensors are not read.

    Returns:
        ``{'state': …, 'rng': …}`` as saved, without the ignored keys.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: the bytes differ from the saved bytes.
        UntrustedCheckpointError: the file holds a type that is not known to be safe.
        IncompatibleCheckpointError: the file is a torch file, and no checkpoint.
    """
    path = Path(path)
    ignore_keys = check_ignore_keys(ignore_keys, argument="ignore_keys")
    with opened(path, map_location=map_location, trust=trust_checkpoint, progress_bar=progress_bar) as file:
        check_kind(file.contents, str(path))
        file.contents = without(file.contents, ignore_keys)
        file.read()
        return file.contents


def load_checkpoint(
    path: str | Path,
    state: TrainingState,
    logger: object = None,
    object_store: ObjectStore | None = None,
    load_weights_only: bool = False,
    strict_model_weights: bool = True,
    progress_bar: bool = True,
    ignore_keys: IgnoreKeys = None,
    exclude_algorithms: Sequence[str] | None = None,
    algorithm_passes: object = None,
    *,
    trust_checkpoint: bool = False,
    monolith_rank0_only: bool = False,
    key_map: Mapping[str, str] | None = None,
) -> list[dict[str, Any]] | None:
    """Restore ``state`` from the checkpoint ``path`` and return the states of the random generators, one per rank.

    Collective: every rank of a run calls this function. Rank 0 finds ``path``. A checkpoint of one file is read by rank
    0 alone. Of a directory, or of a file of safetensors, each rank reads a part. The number of ranks may differ from
    the number at the save. If the checkpoint cannot be loaded on one rank, all ranks raise that error.

    The generators are not touched: apply them with ``composerlite.checkpoint.rng.restore`` when training starts.

    All differences between checkpoint and state are raised in one error, before ``state`` changes. Then live tensors
    with the shape and type of the saved tensors are filled in place, and the bytes are verified meanwhile. If damage
    shows at this point, the error says that ``state`` is unusable. Autoresume then restores an older checkpoint.

    Args:
        path: a file or directory, a URI, or a name in ``object_store``; format variables of ranks (``{run_name}``,
            ``{rank}``) are filled in with the values of rank 0, links are followed. A file in a store is downloaded
            first, unless the file is one of safetensors. With DeepSpeed: the archive of rank 0, or a name with
            ``{rank}`` for the archives of all ranks.
        state: what to restore.
        logger: not used; accepted because Composer's function has it.
        object_store: the store that ``path`` is a name in.
        load_weights_only: restore the model alone.
        strict_model_weights: parameter names must agree exactly; shapes must agree in any case.
        progress_bar: show a progress bar on a terminal while a large file is downloaded or read.
        ignore_keys: keys not to change in ``state``; the bytes of these tensors are not read.
        exclude_algorithms: names of algorithms whose state is not restored and which are not rebuilt.
        algorithm_passes: not used; accepted because Composer's function has it.
        trust_checkpoint: load any type, **running any code in the file**. Directories have only known types.
        monolith_rank0_only: not used: rank 0 alone reads a checkpoint of one file and broadcasts the contents.
        key_map: paths of the parts in a checkpoint of another program, as the trainer's ``load_key_map``.

    Returns:
        The generator states, or ``None`` if only weights were loaded or saved.

    Raises:
        CheckpointError: see :func:`read_checkpoint`; or the checkpoint does not fit, with all differences.
    """
    ignore_keys = check_ignore_keys(ignore_keys, argument="load_ignore_keys")
    group = dist.get_group()
    name = group.from_first("naming the checkpoint", lambda: format_name_with_dist(str(path), state.run_name))
    plan = RestorePlan(
        state,
        weights_only=load_weights_only,
        strict=strict_model_weights,
        ignore_keys=ignore_keys,
        exclude_algorithms=tuple(exclude_algorithms or ()),
        source=f"checkpoint {without_secrets(name)!r}",
        key_map=key_map,
    )
    if state.deepspeed is not None:
        return state.deepspeed.load_checkpoint(str(path), plan, object_store, trust=trust_checkpoint)
    return read_in_place(name, plan, object_store, progress_bar=progress_bar, trust=trust_checkpoint).restore()


def read_in_place(
    name: str, plan: RestorePlan, object_store: ObjectStore | None, *, progress_bar: bool, trust: bool
) -> RestorePlan:
    """Read a checkpoint into ``plan``, and tensors into the state. ``plan.restore()`` restores the rest of the state.

    Collective. If damage shows on a rank, all ranks raise the error: then another checkpoint must be read into the
    state.

    Args:
        name: path, URI or name in ``object_store``, the same on every rank, without format variables.
        plan: what to restore.
        object_store: the store that ``name`` is a name in.
        progress_bar: show a progress bar on a terminal while a large file is downloaded or read.
        trust: load any type, **running any code in the file**. Directories have only known types.

    Raises:
        CheckpointError: as :func:`load_checkpoint`.
    """
    group = dist.get_group()
    # The garbage collector would look through all objects of the process several times while objects are created.
    with contextlib.ExitStack() as stack, uncollected():
        find = functools.partial(find_checkpoint, stack, name, object_store, progress_bar=progress_bar, trust=trust)
        place = group.from_first("finding the checkpoint", find)
        if place.kind != "file":
            from composerlite.checkpoint.load.sharded import load_directory

            folder, step = place.opened(object_store)
            return load_directory(folder, plan, step)
        assert place.path is not None
        with opened(place.path, trust=trust, progress_bar=progress_bar, together=place.name) as file:
            with group.all_or_none("checking that the checkpoint fits the run"):
                wanted, live = plan.matched(file.contents)
            file.contents, addresses, sieves = placed(wanted, live, file.unread, file.ring)
            del wanted  # the reader skips tensors without a reference
            with half_loaded(bool(addresses or sieves)):
                file.read(places=addresses, sieves=sieves)
            plan.contents = file.contents
            plan.verified = {place.path.name: file.verified}
            return plan


# ── tensors that are read in place ───────────────────────────────────────────────────────────────────────────────────
_Pair: TypeAlias = tuple[Tensor, Tensor | None]
"""A tensor of the checkpoint, and the live tensor at the same path of keys, if there is one."""


def placed(
    contents: Any, live: Any, unread: Mapping[str, torch.UntypedStorage], ring: DeviceRing = shared_ring
) -> tuple[Any, dict[str, int], dict[str, Sieve]]:
    """Choose the saved tensors to read directly into live tensors.

    A saved tensor is read in place if its elements are its whole storage, in the same order as in the live tensor. Live
    tensors that share memory are filled in place only if the saved tensors share storage in the same way. Each rank
    keeps its part of a distributed tensor. Distributed tensors and tensors on devices pass through host memory in
    pieces.

    Args:
        contents: contents of the checkpoint, with tensors whose bytes are not read yet.
        live: the live tensors, by the same path of keys.
        unread: the storages whose bytes are not read yet, by the name of the record in the zip archive.
        ring: staging memory for copies to devices.

    Returns:
        ``contents`` with the chosen saved tensors replaced by live tensors; the addresses of live tensors in host
        memory, by record; and the writers to distributed tensors and to tensors on devices, by record.
    """
    names = {id(storage): name for name, storage in unread.items()}
    groups: dict[int, list[_Pair]] = {}  # by the ``id`` of the saved storage
    owners: dict[int, set[int]] = {}  # the saved storages of each storage of live tensors, by address
    for saved, live_one in tensor_pairs(contents, live):
        if not _is_plain(saved):  # others have no storage of numbers
            continue
        storage = id(saved.untyped_storage())
        groups.setdefault(storage, []).append((saved, live_one))
        if live_one is not None and _is_plain(live_one):
            owners.setdefault(live_one.untyped_storage().data_ptr(), set()).add(storage)
    addresses: dict[str, int] = {}
    sieves: dict[str, Sieve] = {}
    replaced: dict[int, Tensor] = {}
    taken: set[int] = set()
    for storage, pairs in groups.items():
        name, target = names.get(storage), pairs[0][1]
        forms = {_form_in_place(*pair) for pair in pairs}
        if name is None or target is None:
            continue
        if (targets := _distributed_targets(pairs, taken)) is not None:
            sieves[name] = _Rows(pairs[0][0], targets)
            replaced |= {id(saved): filled for (saved, _), filled in zip(pairs, targets, strict=True)}
        elif len(forms) == 1 and None not in forms and len(owners[target.untyped_storage().data_ptr()]) == 1:
            if (copier := ring.copier_of(target.untyped_storage())) is None:
                addresses[name] = target.data_ptr()
            else:
                sieves[name] = _OnDevice(target, copier)
            replaced |= {id(saved): filled for saved, filled in pairs if filled is not None}
    return with_tensors(contents, replaced), addresses, sieves


def _distributed_targets(pairs: Sequence[_Pair], taken: set[int]) -> list[Tensor] | None:
    """Return the distributed tensors to fill from a saved storage; ``None`` if the storage cannot be read in rows.

    ``taken`` has the addresses of the tensors to fill so far. The addresses of the result are added.

    A live tensor of another dtype is replaced by a new tensor of the saved dtype; the caller converts the numbers.
    """
    targets: list[Tensor] = []
    for saved, live in pairs:
        if live is None or not dist.is_distributed_tensor(live) or saved.shape != live.shape:
            return None
        if not _is_whole(saved) or not saved.is_contiguous() or saved.dtype is not pairs[0][0].dtype:
            return None
        targets.append(live if live.dtype is saved.dtype else dist.empty_shard_like(live, saved.dtype))
    memory = {local.data_ptr() for target in targets if (local := dist.local_shard(target).local).numel()}
    if memory & taken:
        return None  # tied in the state and not in the checkpoint: the tensor loaded last counts
    taken |= memory
    return targets


@final
class _OnDevice:
    """Copies the pieces of a tensor to a live tensor on a device."""

    step_bytes = 1

    def __init__(self, live: Tensor, copier: DeviceCopier) -> None:
        self._storage, self._first = live.untyped_storage(), int(live.storage_offset()) * live.itemsize
        self._copier = copier
        self.device: torch.device | None = live.device

    def take(self, start: int, part: Tensor, slots: RingSlots) -> None:
        slots.is_copied(self._copier, self._copier.load(part, self._storage, self._first + start))


@final
class _Rows:
    """Copies rows of a saved tensor to this rank's part of distributed tensors."""

    device: torch.device | None = None

    def __init__(self, saved: Tensor, targets: Sequence[Tensor]) -> None:
        self._dtype = saved.dtype
        self._row = tuple(saved.shape[1:])
        parts = map(dist.local_shard, targets)
        # A tensor without dimensions counts as one row.
        self._parts = [part if part.offsets else ((0,), (1,), part.local.view(-1)) for part in parts]
        self.step_bytes = math.prod(self._row) * saved.itemsize

    def take(self, start: int, part: Tensor, slots: RingSlots) -> None:
        first = start // self.step_bytes
        rows = part.view(self._dtype).view(-1, *self._row)
        for offsets, lengths, local in self._parts:
            begin = max(offsets[0], first)
            end = min(offsets[0] + lengths[0], first + len(rows))
            if begin >= end:
                continue
            wanted = rows[begin - first : end - first]
            for dim in range(1, len(offsets)):
                wanted = wanted.narrow(dim, offsets[dim], lengths[dim])
            local[begin - offsets[0] : end - offsets[0]].copy_(wanted)


def _form_in_place(saved: Tensor, live: Tensor | None) -> object:
    """Return the memory and the form of ``live``; ``None`` if ``saved`` cannot be read in place into ``live``.

    A storage is read in place only if all saved tensors of the storage have the same result.
    """
    if live is None or not _is_plain(live) or live.is_meta or live.is_conj() or live.is_neg() or not _is_whole(saved):
        return None
    if (live.shape, live.stride(), live.dtype) != (saved.shape, saved.stride(), saved.dtype):
        return None
    return live.device, live.data_ptr(), live.stride(), live.dtype


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _is_whole(saved: Tensor) -> bool:
    """Return true if the elements of a tensor, each once, are the whole storage, and the storage is not empty."""
    # The number of elements from the first to the last element in memory.
    extent = 1 + sum((size - 1) * stride for size, stride in zip(saved.shape, saved.stride(), strict=True))
    has_all_bytes = extent == saved.numel() and saved.numel() * saved.itemsize == saved.untyped_storage().nbytes() > 0
    return type(saved) is Tensor and has_all_bytes and not (saved.is_conj() or saved.is_neg())
