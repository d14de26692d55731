"""Functions to save and load a state dict, or a model and an optimizer, as a sharded checkpoint at a path or a URI.

Plain ``torch.distributed.checkpoint`` reads the saved directories. The functions of this module also read directories
of plain ``torch.distributed.checkpoint``. The record at the end of ``.metadata``, or in
``model.safetensors.index.json``, has the digests to verify all bytes.

In one process no set-up is needed. With ``torch.distributed`` all functions but :func:`load_keys` are collective.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from composerlite._torch_compat import EXTRA_STATE
from composerlite.checkpoint.api.state_fit import check_fit, check_groups, is_group_members
from composerlite.checkpoint.format.sharded_index import leaves, leaves_of, nested
from composerlite.checkpoint.load import sharded
from composerlite.checkpoint.load.sharded_reader import RemoteFileSystemReader
from composerlite.checkpoint.load.state_dicts import (
    SETTINGS_OF_SCHEDULERS,
    flattened,
    model_state,
    optimizer_state,
    optimizer_state_to_fill,
    set_model_state,
    set_optimizer_state,
    swap_param_keys,
)
from composerlite.checkpoint.place.directory import PathOrUri, ShardedDirectory
from composerlite.checkpoint.record.record import Manifest
from composerlite.checkpoint.save.form import RankWriter
from composerlite.checkpoint.save.safetensors_writer import LARGEST_FILE_BYTES, SafetensorsWriter
from composerlite.checkpoint.save.save import SaveTask
from composerlite.checkpoint.save.sharded_writer import ShardWriter, record_of_directory
from composerlite.checkpoint.save.snapshot import shared_staging
from composerlite.dist import Group, group_of, is_initialized
from composerlite.errors import ConfigError, IncompatibleCheckpointError, did_you_mean
from composerlite.storage import number_of
from composerlite.types import StateDict, Stateful

if TYPE_CHECKING:
    from composerlite.checkpoint.load.sharded import Metadata

WorkDir = str | os.PathLike[str] | None


# ── save ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def save_state_dict(
    dir: PathOrUri,
    state_dict: StateDict,
    *,
    process_group: Any = None,
    save_overwrite: bool = False,
    thread_count: int | None = None,
    process_count: int | None = None,
    throttle_uploads: bool = False,
    enable_plan_caching: bool = False,
) -> None:
    """Save ``state_dict`` to the directory ``dir``.

    The checkpoint is durable when this returns. After an error there is no checkpoint, or, with ``save_overwrite``, the
    old one; and the directory can be saved to again.

    Args:
        dir: a path, or a URI of an object store.
        state_dict: tensors and values, nested in dicts. For a top-level value with a ``state_dict()`` method, the
            result of the method is saved.
        process_group: the ranks that save together. A background save also communicates in this group: run a single
            save at a time. ``None``: all ranks, with a group separate from training.
        save_overwrite: replace the checkpoint in the directory.
        thread_count: number of files for a rank to write at the same time.
        process_count: accepted for OLMo-core, and ignored: threads write.
        throttle_uploads: if ``dir`` is a URI, each rank uploads a single file at a time.
        enable_plan_caching: accepted for OLMo-core, and ignored: the plan of an earlier save is always reused if no
            key, shape, type or placement has changed on any rank.

    Raises:
        CheckpointExistsError: the directory is not empty, and ``save_overwrite`` is false. Also a FileExistsError.
        ConfigError: an argument has a wrong type or is out of range, the directory cannot have this name, or the URI
            names no store. Nothing was written.
        SaveError: a value cannot be saved; names the key.
        RankError: a rank failed to write, or is late. Raised on every rank; names the failed rank. The cause is the
            error on the failed rank.
        OSError, ObjectStoreError: the files cannot be written.
    """
    state = functools.partial(_plain, state_dict)
    _begin(dir, state, process_group, save_overwrite, thread_count, throttle_uploads).run()


def async_save_state_dict(
    dir: PathOrUri,
    state_dict: StateDict,
    *,
    process_group: Any = None,
    save_overwrite: bool = False,
    thread_count: int | None = None,
    process_count: int | None = None,
    throttle_uploads: bool = False,
    enable_plan_caching: bool = False,
) -> Future[None]:
    """Copy the state, and save the copy in the background, as :func:`save_state_dict` does.

    Returns:
        A future: done when the checkpoint is durable, or failed with the error of the save. The program waits for the
        future before it exits.

    Args:
        dir, state_dict, process_group, save_overwrite, thread_count, process_count, throttle_uploads,
            enable_plan_caching: as in :func:`save_state_dict`.

    Raises:
        CheckpointExistsError, ConfigError: as :func:`save_state_dict`, before the copy.
    """
    state = functools.partial(_plain, state_dict)
    return _begin(dir, state, process_group, save_overwrite, thread_count, throttle_uploads).begin(shared_staging)


def save_model_and_optim_state(
    dir: PathOrUri,
    model: nn.Module,
    optim: Optimizer | None = None,
    *,
    process_group: Any = None,
    save_overwrite: bool = False,
    flatten_optimizer_state: bool = False,
    thread_count: int | None = None,
    process_count: int | None = None,
    throttle_uploads: bool = False,
    enable_plan_caching: bool = False,
) -> None:
    """Save a model, sharded or not, and an optimizer to the directory ``dir``, as :func:`save_state_dict` does.

    If the optimizer has made no step yet, the optimizer's state is first initialized with zeros.

    Args:
        dir: a path, or a URI of an object store.
        model: saved below ``model``.
        optim: saved below ``optim``, by the names of the parameters.
        flatten_optimizer_state: save the settings of a parameter group once per parameter. Use if the groups differ
            between ranks, as in pipeline parallelism. Loading detects the layout.
        process_group, save_overwrite, thread_count, process_count, throttle_uploads, enable_plan_caching: as in
            :func:`save_state_dict`, with the same errors.

    Raises:
        ConfigError: also if a tensor of the model is on the device ``meta``, or if a parameter or a key of the state
            of the optimizer is no parameter of the model.
    """
    state = functools.partial(model_and_optim_state, model, optim, flatten=flatten_optimizer_state)
    _begin(dir, state, process_group, save_overwrite, thread_count, throttle_uploads).run()


def async_save_model_and_optim_state(
    dir: PathOrUri,
    model: nn.Module,
    optim: Optimizer | None = None,
    *,
    process_group: Any = None,
    save_overwrite: bool = False,
    flatten_optimizer_state: bool = False,
    thread_count: int | None = None,
    process_count: int | None = None,
    throttle_uploads: bool = False,
    enable_plan_caching: bool = False,
) -> Future[None]:
    """Copy model and optimizer, and save the copy in the background, as :func:`save_model_and_optim_state` does.

    Args:
        dir, model, optim, process_group, save_overwrite, flatten_optimizer_state, thread_count, process_count,
            throttle_uploads, enable_plan_caching: as in :func:`save_model_and_optim_state`.

    Returns:
        A future: done when the checkpoint is durable, or failed with the error of the save.
    """
    state = functools.partial(model_and_optim_state, model, optim, flatten=flatten_optimizer_state)
    return _begin(dir, state, process_group, save_overwrite, thread_count, throttle_uploads).begin(shared_staging)


def _begin(
    place: PathOrUri,
    state: Callable[[], StateDict],
    process_group: Any,
    overwrite: bool,
    threads: int | None,
    throttle: bool,
) -> SaveTask:
    """Prepare a save of the result of ``state()`` to ``place``. Collective over ``process_group``."""
    number_of(threads, 1)
    group = group_of(process_group)
    folder = ShardedDirectory.of(place, threads=threads)
    own_threads = 1 if throttle and folder.path is None else threads
    writer = ShardWriter(state, folder, group=group, overwrite=overwrite, threads=own_threads)
    group.from_first(f"removing leftovers in {folder.uri}", folder.sweep)
    return task_of(record_of_directory(folder.name, group.size), folder.uri, writer, group)


def task_of(manifest: Manifest, path: str | Path, writer: RankWriter, group: Group) -> SaveTask:
    """Return the task to save a checkpoint to ``path``. The record ``manifest`` lists no files yet. Collective."""
    return SaveTask(manifest=manifest, path=path, writer=writer, votes=[group.vote(f"saving {path}")])


def _plain(state: StateDict) -> StateDict:
    """Return ``state`` with the result of ``state_dict()`` for each value with this method."""
    if not isinstance(cast("object", state), Mapping):
        raise ConfigError(
            f"state_dict is of the type {type(state).__name__}: expected a dict. A model or an optimizer goes below a "
            "key, as in {'model': model}."
        )
    # Tensors first: the check for a protocol takes 50 us.
    return {
        k: v.state_dict() if not isinstance(v, torch.Tensor) and isinstance(v, Stateful) else v
        for k, v in state.items()
    }


def save_safetensors(
    dir: PathOrUri,
    model: nn.Module | StateDict,
    *,
    save_overwrite: bool = False,
    largest_file_bytes: int = LARGEST_FILE_BYTES,
) -> None:
    """Write the weights of ``model`` to the folder ``dir`` in safetensors, with ``model.safetensors.index.json``.

    Collective; all ranks write. Each tensor is whole in one file: other ranks send their parts of the tensor, some rows
    at a time, to the writing rank. As with :func:`save_state_dict`, the folder is durable when the call returns, and an
    error leaves no new weights. The functions of this module verify the weights when loading.

    Args:
        dir: a path, or a URI of an object store.
        model: a model, sharded or not, or a state dict. Keys of nested dicts are joined by dots; a weight with two
            names is written under both; values other than tensors are left out.
        save_overwrite: replace the weights in the folder. Other files, such as ``config.json``, stay.
        largest_file_bytes: size limit of a file with several tensors. Each rank with tensors writes at least one file.

    Raises:
        CheckpointExistsError: the directory is not empty, and ``save_overwrite`` is false. Also a FileExistsError.
        ConfigError: there are no tensors, a value is out of its range, or the URI names no store.
        SaveError: safetensors does not have the type or the layout of a tensor; names the key.
        RankError: a rank failed to write, or is late. Raised on every rank; names the failed rank. The cause is the
            error on the failed rank.
        OSError, ObjectStoreError: the files cannot be written.
    """
    number_of(largest_file_bytes, 1, "largest_file_bytes")
    group = group_of()
    with ShardedDirectory.of(dir) as folder:
        group.from_first(f"removing leftovers in {folder.uri}", folder.sweep)
        writer = SafetensorsWriter(
            lambda: model_state(model) if isinstance(model, nn.Module) else _plain(model),
            folder,
            overwrite=save_overwrite,
            largest_file_bytes=largest_file_bytes,
        )
        task_of(record_of_directory(folder.name, group.size, kind="weights"), folder.uri, writer, group).run()


def model_and_optim_state(model: nn.Module, optim: Optimizer | None, *, flatten: bool) -> StateDict:
    """Return the state of a model below ``model``, and of an optimizer below ``optim``."""
    state: StateDict = {"model": model_state(model)}
    if optim is not None:
        state["optim"] = optimizer_state(model, optim)
        if flatten:
            state["optim"] = flattened(state["optim"])
    return state


# ── load ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def load_state_dict(
    dir: PathOrUri,
    state_dict: StateDict,
    *,
    process_group: Any = None,
    pre_download: bool = False,
    work_dir: WorkDir = None,
    thread_count: int | None = None,
) -> None:
    """Load the keys of ``state_dict`` in place: tensors are filled, other values are replaced.

    Other keys of the checkpoint are ignored. A value of ``None`` is replaced by any value of the checkpoint.

    Args:
        dir: a path, or a URI of an object store.
        state_dict: all saved keys, or some of the saved keys. Tensors may be sharded differently than at the save.
        process_group: the ranks of the load; ``None``: all.
        pre_download: first download the needed files to this machine.
        work_dir: folder for the downloads, kept for later loads of this checkpoint. ``None``: temporary.
        thread_count: number of reading threads.

    Raises:
        IncompatibleCheckpointError: a key is missing in the checkpoint, or has another shape or type; lists all such
            keys. Or a tensor has several names, and the checkpoint has different numbers under these names; the tensor
            may have been filled.
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError: the bytes differ from the saved bytes. Tensors may have been filled.
        UntrustedCheckpointError: the checkpoint has types not known to be safe to load.
    """
    group = group_of(process_group)
    wanted = _plain(state_dict)
    reader = RemoteFileSystemReader(dir, thread_count=thread_count, pre_download=pre_download, work_dir=work_dir)
    with reader:
        what = "reading a checkpoint"
        group.agree(what, lambda: check_fit(reader, leaves(wanted, as_dcp=True).values, strict=True, owned=()))
        sharded.load(reader, wanted, group=group)
    for key, value in state_dict.items():
        if isinstance(value, Stateful):
            value.load_state_dict(wanted[key])
        else:
            state_dict[key] = wanted[key]


def load_model_and_optim_state(
    dir: PathOrUri,
    model: nn.Module,
    optim: Optimizer | None = None,
    *,
    process_group: Any = None,
    key_mapping: Mapping[str, str] | None = None,
    pre_download: bool = False,
    work_dir: WorkDir = None,
    strict: bool = True,
    flatten_optimizer_state: bool = False,
    thread_count: int | None = None,
) -> None:
    """Load a model, and an optimizer, in place from a checkpoint of any number of ranks.

    Args:
        dir: a path, or a URI of an object store.
        model: the model to fill.
        optim: the optimizer to fill. The layout of the saved state is detected.
        process_group: the ranks of the load; ``None``: all.
        key_mapping: names of parameters in the checkpoint, by their current names.
        pre_download, work_dir, thread_count: as in :func:`load_state_dict`.
        strict: the checkpoint must have the same keys and types as the model and the optimizer. If false, keys missing
            on either side are skipped, and numbers are converted. In both cases shapes must agree, and so must
            the optimizer's grouping of the parameters on both sides.
        flatten_optimizer_state: accepted for OLMo-core, and not needed.

    Raises:
        IncompatibleCheckpointError: keys are missing or unexpected, or have another shape or type; lists all of them.
            Nothing was loaded. Or tied weights have different numbers in the checkpoint; they may have been filled.
        ConfigError: the model or the optimizer cannot be saved: see :func:`save_model_and_optim_state`.
        CheckpointNotFoundError, CorruptCheckpointError, UntrustedCheckpointError: as :func:`load_state_dict`.
    """
    mapping = key_mapping or {}
    group = group_of(process_group)
    reader = RemoteFileSystemReader(dir, thread_count=thread_count, pre_download=pre_download, work_dir=work_dir)
    with reader:
        state = group.agree("reading a checkpoint", lambda: _checked_state(reader, model, optim, mapping, strict))
        metadata = reader.read_metadata()
        # Without strict, parameters may be missing on either side, so the groups keep the optimizer's own lists.
        common = None if strict else {key for key in metadata.state_dict_metadata if not is_group_members(key)}
        sharded.load(reader, state, group=group, only=common)
    swap_param_keys(state, mapping, metadata, reverse=True, quiet=True)
    set_model_state(model, state["model"], strict=strict)
    if optim is not None:
        set_optimizer_state(model, optim, state["optim"])


def _checked_state(
    reader: RemoteFileSystemReader, model: nn.Module, optim: Optimizer | None, mapping: Mapping[str, str], strict: bool
) -> StateDict:
    """Check that the checkpoint fits, and return the state to fill, with the keys of the checkpoint."""
    metadata = reader.read_metadata()
    stored = metadata.state_dict_metadata
    state: StateDict = {"model": model_state(model)}
    if optim is not None:
        steps = (key.split(".") for key in stored if key.startswith("optim.state."))
        prefixes = {prefix for path in steps for prefix in itertools.accumulate(path, "{}.{}".format)}
        names = {old: new for old, new in mapping.items() if f"model.{new}" in stored}
        state["optim"] = optimizer_state_to_fill(
            model, optim, lambda name: f"optim.state.{names.get(name, name)}" in prefixes, strict=strict
        )
    swap_param_keys(state, mapping, metadata, quiet=True)
    groups: list[StateDict] = state.get("optim", {}).get("param_groups", [])
    # True if the settings of the optimizer's groups were saved once per parameter.
    is_flat = "optim.param_groups.0.params" not in stored and any(k.startswith("optim.param_groups.") for k in stored)
    # A scheduler may be made before or after the load: a setting such as ``initial_lr`` on one side is no difference.
    for number, group in enumerate(groups):
        members = group["params"] if is_flat else [str(number)]
        for setting in SETTINGS_OF_SCHEDULERS:
            keys = [f"optim.param_groups.{name}.{setting}" for name in members]
            if keys and all(key in stored for key in keys):
                group.setdefault(setting, sharded.unread(metadata, keys[:1])[keys[0]])
            else:
                group.pop(setting, None)
    if groups and is_flat:
        state["optim"] = flattened(state["optim"])
    for name in state["model"]:
        # An extra state may have any type and size.
        if name.endswith(EXTRA_STATE) and (found := leaves_of(metadata, f"model.{name}")):
            values = sharded.unread(metadata, found)
            state["model"][name] = values.get(f"model.{name}", nested(metadata, f"model.{name}", found, values))
    check_fit(reader, leaves(state, as_dcp=True).values, strict=strict, owned=tuple(state))
    if groups:
        check_groups(reader, [group["params"] for group in groups], flatten=is_flat, strict=strict)
    return state


def load_keys(
    dir: PathOrUri, keys: Iterable[str], *, pre_download: bool = False, work_dir: WorkDir = None
) -> Generator[Any]:
    """Load the whole values of ``keys``, in order. In one process only.

    Args:
        dir: a path, or a URI of an object store.
        keys: keys of the index (:func:`get_checkpoint_metadata`), such as ``'model.w1.weight'``, or common prefixes of
            several keys, such as ``'model'``.
        pre_download, work_dir: as in :func:`load_state_dict`.

    Yields:
        Tensors on the CPU, values, or a dict for a prefix.

    Raises:
        RuntimeError: ``torch.distributed`` is in use.
        IncompatibleCheckpointError: the checkpoint does not have a key.
        CheckpointNotFoundError, CorruptCheckpointError, UntrustedCheckpointError: as :func:`load_state_dict`.
    """
    if is_initialized():
        raise RuntimeError("load_keys reads whole tensors in one process: call it where torch.distributed is not used.")
    wanted = list(keys)
    with RemoteFileSystemReader(dir, pre_download=pre_download, work_dir=work_dir) as reader:
        metadata = reader.read_metadata()
        keys_of = {key: leaves_of(metadata, key) for key in wanted}
        if missing := [key for key, found in keys_of.items() if not found]:
            hint = did_you_mean(missing[0], metadata.state_dict_metadata).partition(" Known:")[0]
            raise IncompatibleCheckpointError(f"checkpoint {reader.uri!r} has no key {missing[0]!r}.{hint}")
        values = sharded.load_flat(reader, dict.fromkeys(itertools.chain(*keys_of.values())))
    return (values[key] if key in values else nested(metadata, key, keys_of[key], values) for key in wanted)


def get_checkpoint_metadata(dir: PathOrUri) -> Metadata:
    """Return the index of ``torch.distributed.checkpoint``: keys, shapes, types and places of the data.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError, UntrustedCheckpointError: the index is damaged, or has types not known to be safe.
    """
    with RemoteFileSystemReader(dir) as reader:
        return reader.read_metadata()
