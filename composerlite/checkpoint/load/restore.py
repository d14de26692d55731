"""Loading: find the file, see what it holds, see that it fits, read its tensors to where they belong."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from composerlite import dist
from composerlite.checkpoint.contents import (
    IgnoreKeys,
    Loaded,
    RestorePlan,
    TrainingState,
    check_ignore_keys,
    check_kind,
    half_loaded,
    without,
)
from composerlite.checkpoint.format.torch_reader import MapLocation, Sieve, TorchFile
from composerlite.checkpoint.format.zip_file import ZipRecord
from composerlite.checkpoint.load.reader import opened, opened_together, readable
from composerlite.checkpoint.load.resolve import Located, located, source_of
from composerlite.checkpoint.place.place import OnBytes, Place
from composerlite.checkpoint.record.naming import format_name_with_dist
from composerlite.devices import DeviceCopier, DeviceRing, RingSlots, shared_ring
from composerlite.storage import ObjectStore
from composerlite.types import StateDict, items_of, with_items

__all__ = ["FileOptions", "load_checkpoint", "read_checkpoint", "read_in_place"]

log = logging.getLogger(__name__)


def read_checkpoint(
    path: str | Path,
    *,
    trust_checkpoint: bool = False,
    progress_bar: bool = False,
    map_location: MapLocation = "cpu",
    ignore_keys: IgnoreKeys = None,
) -> StateDict:
    """The contents of the checkpoint file ``path``, verified by its record if it has one.

    Args:
        path: a file; compressed or in an archive, too.
        trust_checkpoint: load any type, **running whatever code the file holds**.
        progress_bar: show one on a terminal while a large file is read.
        map_location: where tensors go, as ``torch.load`` takes it.
        ignore_keys: leave these out; the bytes of their tensors are not read.

    Returns:
        ``{'state': …, 'rng': …}`` as saved, without the ignored keys.

    Raises:
        CheckpointNotFoundError: there is no such file; the message lists what the folder has.
        CorruptCheckpointError: the bytes are not those that were saved.
        UntrustedCheckpointError: it holds a type that is not known to be safe.
        IncompatibleCheckpointError: a torch file, but not a checkpoint.
    """
    path = Path(path)
    ignore_keys = check_ignore_keys(ignore_keys, argument="ignore_keys")
    opening = opened(path, map_location=map_location, trust=trust_checkpoint, progress_bar=progress_bar)
    with opening as (file, progress, _):
        check_kind(file.contents, str(path))
        file.contents = without(file.contents, ignore_keys)
        file.read(progress=progress)
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

    Every rank of a run calls it; what counts is what rank 0 finds under ``path``. A checkpoint that is one file is read
    by one rank of each node at most. Of a directory, as several ranks or ``torch.distributed.checkpoint`` save it, each
    rank reads what it needs, whatever ranks had saved it. If it cannot be loaded on one rank, all raise that error.

    The generators are not touched: apply them with ``composerlite.checkpoint.rng.restore`` when training starts.

    What does not fit is said, whole, before anything in ``state`` is changed. Tensors that have the
    form of the saved ones are then read in place, and verified as they are: a file whose damage shows only there leaves
    ``state`` unusable, and the error says so. Autoresume then restores an older checkpoint.

    Args:
        path: a file or directory, a URI, or a name in ``object_store``; format variables of ranks (``{run_name}``,
            ``{rank}``) are filled in, links are followed. A file that is elsewhere is downloaded first.
        state: what to restore.
        logger: not used; accepted because Composer's function has it.
        object_store: the store that ``path`` is a name in.
        load_weights_only: restore the model alone.
        strict_model_weights: parameter names must agree exactly; shapes must agree in any case.
        progress_bar: show one on a terminal while a large file is downloaded or read.
        ignore_keys: leave these keys as they are in ``state``; the bytes of their tensors are not read.
        exclude_algorithms: names of algorithms whose state is not restored and which are not rebuilt.
        algorithm_passes: not used; accepted because Composer's function has it.
        trust_checkpoint: load any type, **running whatever code the file holds**. Directories have only known types.
        monolith_rank0_only: no rank but the first reads a checkpoint that is one file.
        key_map: where the parts are in a checkpoint of another program, as the trainer's ``load_key_map``.

    Returns:
        The generator states, or ``None`` where weights only were loaded or saved.

    Raises:
        CheckpointError: see :func:`read_checkpoint`; or the checkpoint does not fit, with all that differs.
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
        source=source_of(name),
        key_map=key_map,
    )
    if state.deepspeed is not None:
        return state.deepspeed.load_checkpoint(str(path), plan, object_store, trust=trust_checkpoint)
    options = FileOptions(progress_bar, trust_checkpoint, monolith_rank0_only)
    return read_in_place(name, plan, object_store, options).restore()


@final
class FileOptions(NamedTuple):
    """The way in which a checkpoint that is one file is read.

    Attributes:
        progress_bar: show one on a terminal while a large file is downloaded or read.
        trust: load any type, **running whatever code the file holds**.
        rank0_only: no rank but the first reads it.
    """

    progress_bar: bool
    trust: bool
    rank0_only: bool


def read_in_place(name: str, plan: RestorePlan, object_store: ObjectStore | None, options: FileOptions) -> Loaded:
    """Read the tensors of a checkpoint into the state of ``plan``. Nothing else changes until :meth:`Loaded.restore`.

    If damage shows on one rank, all raise it: then another checkpoint must be read into the state.

    Args:
        name: the same on every rank, without format variables.
        plan: what to restore.
        object_store: the store that ``name`` is a name in.
        options: of a file.

    Raises:
        CheckpointError: as :func:`load_checkpoint`.
    """

    def merge(place: Place, folder: str, target: Path) -> Path:
        from composerlite.checkpoint.load.deepspeed_folder import merged_file  # rarely needed

        return merged_file(place, folder, target, trust=options.trust)

    with located(name, object_store, progress_bar=options.progress_bar, merge=merge) as place:
        if place.is_directory:
            from composerlite.checkpoint.load.sharded import load_directory

            step = place.step_folder(object_store) if place.step else None
            return load_directory(place.folder(object_store), plan, step)
        return _read_file(place, plan, options)


def _read_file(place: Located, plan: RestorePlan, options: FileOptions) -> Loaded:
    if dist.get_world_size() == 1:
        assert place.path is not None
        opening = opened(place.path, trust=options.trust, progress_bar=options.progress_bar)
    else:
        opening = opened_together(place.path, place.name, **options._asdict())
    with opening as (file, progress, verified):
        with dist.get_group().all_or_none("comparing the checkpoint with the run"):
            file.contents = plan.wanted(file.contents)
            live = plan.places(file.contents)
        _read_tensors(file, live, progress, place.path)
        return Loaded(plan, file.contents, {} if place.path is None else {place.path.name: verified})


def _read_tensors(file: TorchFile, live: StateDict, progress: OnBytes, path: Path | None) -> None:
    """Read the tensors of ``file``, those that can into ``live`` ones, which then are in the contents instead."""
    file.contents, targets = placed(file.contents, live, file.unread(), file.ring)
    with contextlib.nullcontext() if path is None else readable(path.resolve()), half_loaded(bool(targets)):
        file.read(places=targets.addresses, sieves=targets.sieves, progress=progress)


# ── tensors that are read in place ───────────────────────────────────────────────────────────────────────────────────
@final
class LoadTargets(NamedTuple):
    """Places to read records to.

    Attributes:
        addresses: of the memory of live tensors, by record.
        sieves: that fill this rank's part of distributed ones, and tensors on devices, by record.
    """

    addresses: dict[str, int]
    sieves: dict[str, Sieve]

    def __bool__(self) -> bool:
        return bool(self.addresses or self.sieves)


class _Pair(NamedTuple):
    """A tensor of the checkpoint and the live one that it is to become, if there is one."""

    saved: Tensor
    live: Tensor | None


def placed(
    contents: Any, live: Any, unread: Mapping[int, ZipRecord], ring: DeviceRing = shared_ring
) -> tuple[Any, LoadTargets]:
    """``contents`` with live tensors in the place of those that can be read into them, and where to read which record.

    A tensor of the checkpoint is read in place where it is all of its storage, in the same order as the live one; and
    where no two live tensors share memory unless those of the checkpoint do just the same. Of one that is to become a
    distributed tensor a rank keeps its part. Neither that nor what goes to a device is whole in this machine's memory.

    Args:
        contents: what the checkpoint holds, unread.
        live: the live tensors, by the same path of keys.
        unread: the record of each storage, by the ``id`` of the storage.
        ring: knows the devices.
    """
    groups: dict[int, list[_Pair]] = {}
    for pair in _pairs(contents, live):
        groups.setdefault(id(pair.saved.untyped_storage()), []).append(pair)
    shared = _shared_memory(groups)
    places = LoadTargets({}, {})
    replaced: dict[int, Tensor] = {}
    taken: set[int] = set()
    for storage, pairs in groups.items():
        record = unread.get(storage)
        if record is None:
            continue
        if (targets := _distributed_targets(pairs, record, taken)) is not None:
            places.sieves[record.name] = _Rows(pairs[0].saved, targets)
            replaced |= {id(pair.saved): target for pair, target in zip(pairs, targets, strict=True)}
        elif all(_fits(pair, pairs[0], record) for pair in pairs):
            target = cast("Tensor", pairs[0].live)
            address = target.data_ptr()
            if (address, address + record.size) not in shared:
                if (copier := ring.copier_of(target.untyped_storage())) is None:
                    places.addresses[record.name] = address
                else:
                    places.sieves[record.name] = _OnDevice(target, copier)
                replaced |= {id(pair.saved): pair.live for pair in pairs if pair.live is not None}
    return _with_live(contents, live, replaced), places


def _distributed_targets(pairs: Sequence[_Pair], record: ZipRecord, taken: set[int]) -> list[Tensor] | None:
    """The distributed tensors that the record is to be read to; ``None`` if it cannot be read a few rows at a time.

    They are the live ones, or new ones where numbers have to be converted afterwards, which is then said.
    """
    targets: list[Tensor] = []
    for saved, live in pairs:
        if live is None or not dist.is_distributed_tensor(live) or type(saved) is not Tensor:
            return None
        if not saved.is_contiguous() or saved.numel() * saved.itemsize != record.size or saved.shape != live.shape:
            return None
        if record.size == 0 or saved.is_conj() or saved.is_neg() or saved.dtype is not pairs[0].saved.dtype:
            return None
        targets.append(live if live.dtype is saved.dtype else dist.empty_shard_like(live, saved.dtype))
    memory = {local.data_ptr() for target in targets if (local := dist.local_shard(target).local).numel()}
    if memory & taken:
        return None  # tied here and not in the checkpoint: what is loaded last counts
    taken |= memory
    return targets


@final
class _OnDevice:
    """Takes a tensor in pieces and copies each to where it belongs on a device."""

    step_bytes = 1

    def __init__(self, live: Tensor, copier: DeviceCopier) -> None:
        self._storage, self._first = live.untyped_storage(), int(live.storage_offset()) * live.itemsize
        self._copier = copier
        self.device: torch.device | None = live.device

    def take(self, start: int, part: Tensor, slots: RingSlots) -> None:
        slots.is_copied(self._copier, self._copier.load(part, self._storage, self._first + start))


@final
class _Rows:
    """Takes a tensor row by row and keeps what belongs to distributed ones."""

    device: torch.device | None = None

    def __init__(self, saved: Tensor, targets: Sequence[Tensor]) -> None:
        self._dtype = saved.dtype
        self._row = tuple(saved.shape[1:])
        self._parts = [dist.local_shard(target) for target in targets]
        self.step_bytes = math.prod(self._row) * saved.itemsize

    def take(self, start: int, part: Tensor, slots: RingSlots) -> None:
        first = start // self.step_bytes
        rows = part.view(self._dtype).view(-1, *self._row)
        for offsets, lengths, local in self._parts:
            if not offsets:  # it has no dimensions
                local.copy_(rows[0])
                continue
            begin = max(offsets[0], first)
            end = min(offsets[0] + lengths[0], first + len(rows))
            if begin >= end:
                continue
            wanted = rows[begin - first : end - first]
            for dim in range(1, len(offsets)):
                wanted = wanted.narrow(dim, offsets[dim], lengths[dim])
            local[begin - offsets[0] : end - offsets[0]].copy_(wanted)


def _pairs(saved: Any, live: Any) -> Iterator[_Pair]:
    if isinstance(saved, Tensor):
        if (
            type(saved) in (Tensor, nn.Parameter) and saved.layout is torch.strided
        ):  # others have no storage to speak of
            yield _Pair(saved, live if isinstance(live, Tensor) else None)
        return
    lives = dict(items_of(live))
    for key, value in items_of(saved):
        if isinstance(value, Tensor | dict | list | tuple | deque):
            yield from _pairs(value, lives.get(key))


def _fits(pair: _Pair, first: _Pair, record: ZipRecord) -> bool:
    saved, live = pair
    if live is None or first.live is None or type(live) not in (Tensor, nn.Parameter) or type(saved) is not Tensor:
        return False
    return (
        live.device.type != "meta"
        and live.device == first.live.device
        and live.layout is torch.strided
        and live.dtype is saved.dtype
        and live.shape == saved.shape
        and _same_order(live, saved, first.saved)
        and live.data_ptr() == first.live.data_ptr()
        and saved.dtype is first.saved.dtype
        and saved.numel() * saved.itemsize == record.size > 0
        and _is_dense(saved)
        and not (live.is_conj() or live.is_neg() or saved.is_conj() or saved.is_neg())
    )


def _same_order(*tensors: Tensor) -> bool:
    """Check that the elements of tensors of one shape follow each other in the same order."""
    strides = {tensor.stride() for tensor in tensors}
    return len(strides) == 1 or all(_strides(tensor) == _strides(tensors[0]) for tensor in tensors)


def _strides(tensor: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of each dimension whose stride matters."""
    return [pair for pair in zip(tensor.shape, tensor.stride(), strict=True) if pair[0] != 1]


def _is_dense(tensor: Tensor) -> bool:
    """Check that its elements are next to each other in memory, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in _strides(tensor)):
        if stride != expected:
            return False
        expected *= size
    return True


def _shared_memory(groups: Mapping[int, list[_Pair]]) -> set[tuple[int, int]]:
    """The ranges of addresses of live tensors that are to get the bytes of more than one storage."""
    owners: dict[tuple[int, int], set[int]] = {}
    for storage, pairs in groups.items():
        for _, live in pairs:
            if live is not None and type(live) in (Tensor, nn.Parameter) and live.layout is torch.strided:
                dense = live.is_contiguous()
                extent = live.numel() if dense else 1 + sum((size - 1) * stride for size, stride in _strides(live))
                start = live.data_ptr()
                owners.setdefault((start, start + extent * live.itemsize), set()).add(storage)
    shared = {span for span, storages in owners.items() if len(storages) > 1}
    widest = (0, 0)
    for here in sorted(owners):
        if here[0] < widest[1]:
            shared |= {here, widest}
        widest = max(here, widest, key=lambda span: span[1])
    return shared


def _with_live(saved: Any, live: Any, replaced: Mapping[int, Tensor]) -> Any:
    if isinstance(saved, Tensor):
        return replaced.get(id(saved), saved)
    lives = dict(items_of(live))
    return with_items(saved, lambda key, value: _with_live(value, lives[key], replaced) if key in lives else value)
