"""Sharded checkpoints as functions: save and load a state dict, or a model and its optimizer, at a path or a URI.

The directory is one that plain ``torch.distributed.checkpoint`` reads; one that it wrote is read here. Beside it, in
``.manifest/<name>.json``, lies the commit record, with which what is read is verified.

In one process nothing has to be set up. Where ``torch.distributed`` is, all ranks of ``process_group`` call together.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composerlite.checkpoint.formats import sharded
from composerlite.checkpoint.formats.directory import PathOrUri, folder_of
from composerlite.errors import ConfigError, IncompatibleCheckpointError, did_you_mean
from composerlite.types import StateDict, Stateful

if TYPE_CHECKING:
    from composerlite.checkpoint.formats.sharded import Metadata

__all__ = [
    "async_save_model_and_optim_state",
    "async_save_state_dict",
    "get_checkpoint_metadata",
    "load_keys",
    "load_model_and_optim_state",
    "load_state_dict",
    "merge_state_dicts",
    "prune_state_dict",
    "save_model_and_optim_state",
    "save_state_dict",
    "swap_param_keys",
]

log = logging.getLogger(__name__)
_MOST_LISTED = 20
WorkDir = str | os.PathLike[str] | None


# ── save ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def save_state_dict(
    dir: PathOrUri,  # noqa: A002 - OLMo-core's name
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

    When this returns the checkpoint is durable. Where it raises there is no checkpoint, or, with ``save_overwrite``,
    the one that was there; and the same directory can be saved to again.

    Args:
        dir: a path, or a URI of an object store.
        state_dict: tensors and values, nested in dicts; what has a ``state_dict()`` is asked for it.
        process_group: the ranks that save together; ``None``: all.
        save_overwrite: replace what is there.
        thread_count: files that a rank writes at the same time.
        process_count: as OLMo-core has it; threads write here, and nothing is gained by processes.
        throttle_uploads: one file of a rank is written at a time.
        enable_plan_caching: as OLMo-core has it; the plan is made anew at every save.

    Raises:
        CheckpointExistsError: a FileExistsError: the directory is not empty, and ``save_overwrite`` is false.
        ConfigError: a value is out of its range, or the URI names no store.
        OSError, ObjectStoreError: it cannot be written.
    """
    _check_counts(thread_count, process_count)
    with folder_of(dir, threads=thread_count) as folder:
        sharded.save(
            folder,
            _plain(state_dict),
            group=process_group,
            overwrite=save_overwrite,
            threads=1 if throttle_uploads else thread_count,
        )


def async_save_state_dict(
    dir: PathOrUri,  # noqa: A002
    state_dict: StateDict,
    *,
    process_group: Any = None,
    save_overwrite: bool = False,
    thread_count: int | None = None,
    process_count: int | None = None,
    throttle_uploads: bool = False,
    enable_plan_caching: bool = False,
) -> Future[None]:
    """:func:`save_state_dict` behind this thread: when this returns, what will be saved has been copied.

    Returns:
        A future that is done when the checkpoint is durable, or has the error for which there is none. A program that
        ends waits for it.

    Raises:
        CheckpointExistsError, ConfigError: as :func:`save_state_dict`, before anything is copied.
    """
    _check_counts(thread_count, process_count)
    with folder_of(dir) as folder:
        if not sharded.is_distributed():  # else all ranks must hear of it: at the save
            folder.check_free(overwrite=save_overwrite)
    snapshot = sharded.copied(_plain(state_dict))
    return _behind(
        lambda: save_state_dict(
            dir,
            snapshot,
            process_group=process_group,
            save_overwrite=save_overwrite,
            thread_count=thread_count,
            throttle_uploads=throttle_uploads,
        )
    )


def save_model_and_optim_state(
    dir: PathOrUri,  # noqa: A002
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
    """Save a model, sharded or not, and its optimizer to the directory ``dir``, as :func:`save_state_dict` does.

    An optimizer that has not stepped yet gets a state first, of zeros.

    Args:
        dir: a path, or a URI of an object store.
        model: whose state is saved, below ``model``.
        optim: whose state is saved, below ``optim``, by the names of the parameters.
        flatten_optimizer_state: repeat the settings of its groups for every parameter: for groups that differ between
            ranks, as in pipeline parallelism. Loading finds out which it was.
        process_group, save_overwrite, thread_count, process_count, throttle_uploads, enable_plan_caching: as in
            :func:`save_state_dict`, which says what is raised, too.
    """
    save_state_dict(
        dir,
        _state_of(model, optim, flatten=flatten_optimizer_state),
        process_group=process_group,
        save_overwrite=save_overwrite,
        thread_count=thread_count,
        process_count=process_count,
        throttle_uploads=throttle_uploads,
        enable_plan_caching=enable_plan_caching,
    )


def async_save_model_and_optim_state(
    dir: PathOrUri,  # noqa: A002
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
    """:func:`save_model_and_optim_state` behind this thread, as :func:`async_save_state_dict`."""
    return async_save_state_dict(
        dir,
        _state_of(model, optim, flatten=flatten_optimizer_state),
        process_group=process_group,
        save_overwrite=save_overwrite,
        thread_count=thread_count,
        process_count=process_count,
        throttle_uploads=throttle_uploads,
        enable_plan_caching=enable_plan_caching,
    )


def _behind(work: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            work()
        except BaseException as e:  # noqa: BLE001 - it is the future's
            future.set_exception(e)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="checkpoint-save").start()  # no daemon: a program that ends waits for it
    return future


def _check_counts(*counts: int | None) -> None:
    for name, count in zip(("thread_count", "process_count"), counts, strict=False):
        if count is not None and count < 1:
            raise ConfigError(f"{name}={count}: want 1 or more, or None")


def _plain(state: StateDict) -> StateDict:
    """``state`` with what has a ``state_dict()`` asked for it."""
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}


def _state_of(model: nn.Module, optim: Optimizer | None, *, flatten: bool) -> StateDict:
    state: StateDict = {"model": sharded.model_state(model)}
    if optim is not None:
        state["optim"] = sharded.optimizer_state(model, optim, flatten=flatten)
    return state


# ── load ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def load_state_dict(
    dir: PathOrUri,  # noqa: A002
    state_dict: StateDict,
    *,
    process_group: Any = None,
    pre_download: bool = False,
    work_dir: WorkDir = None,
    thread_count: int | None = None,
) -> None:
    """Load what ``state_dict`` has, in place: tensors are filled, other values are replaced.

    What the checkpoint has beyond that is left alone. A value of ``None`` stands for whatever the checkpoint has.

    Args:
        dir: a path, or a URI of an object store.
        state_dict: as it was saved, or a part of it; tensors may be sharded in another way.
        process_group: the ranks that load together; ``None``: all.
        pre_download: first bring the files that are needed to this machine.
        work_dir: where to. They stay there, for this very checkpoint only. ``None``: to a temporary folder.
        thread_count: threads that read at the same time.

    Raises:
        IncompatibleCheckpointError: the checkpoint has not all of it, or in other shapes or types; lists all of that.
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError: the bytes are not those that were saved. Tensors may have been filled.
        UntrustedCheckpointError: it names what is not known to be safe to load.
    """
    with _reader(dir, pre_download, work_dir, thread_count) as reader:
        wanted = _plain(state_dict)
        _fill_in(wanted, reader.read_metadata())
        _check(reader, sharded.flat(wanted), strict=True, owned=())
        sharded.load(reader, wanted, group=process_group)
    for key, value in state_dict.items():
        if isinstance(value, Stateful):
            value.load_state_dict(wanted[key])
        else:
            state_dict[key] = wanted[key]


def load_model_and_optim_state(
    dir: PathOrUri,  # noqa: A002
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
    """Load a model, and its optimizer, in place from a checkpoint of any number of ranks.

    Args:
        dir: a path, or a URI of an object store.
        model: to be loaded.
        optim: to be loaded, too. Which layout its state was saved in is found out.
        process_group: the ranks that load together; ``None``: all.
        key_mapping: names of parameters in the checkpoint, by those that they have now.
        pre_download, work_dir, thread_count: as in :func:`load_state_dict`.
        strict: the checkpoint must have just what the model and the optimizer have, in the same types. If false, what
            only one of the two has stays as it is, and numbers are converted; shapes and the groups of the optimizer
            must agree in any case.
        flatten_optimizer_state: as OLMo-core has it; not needed.

    Raises:
        IncompatibleCheckpointError: it is one of another model or optimizer; lists what is missing, unexpected, or of
            another shape or type. Nothing has been loaded then.
        CheckpointNotFoundError, CorruptCheckpointError, UntrustedCheckpointError: as :func:`load_state_dict`.
    """
    with _reader(dir, pre_download, work_dir, thread_count) as reader:
        metadata = reader.read_metadata()
        flatten = flatten_optimizer_state
        if optim is not None:
            flatten = _is_flattened(metadata, default=flatten_optimizer_state)
        state = _state_of(model, optim, flatten=flatten)
        mapping = key_mapping or {}
        swap_param_keys(state, mapping, metadata, quiet=True)
        _check(reader, sharded.flat(state), strict=strict, owned=tuple(state))
        if optim is not None:
            _check_groups(reader, _groups(model, optim, state["optim"], mapping, metadata), flatten=flatten)
        complete = _containers(state)
        if not strict:
            prune_state_dict(state, set(metadata.state_dict_metadata))
        sharded.load(reader, state, group=process_group)
        merge_state_dicts(state, complete)
    swap_param_keys(state, mapping, metadata, reverse=True, quiet=True)
    sharded.set_model_state(model, state["model"], strict=strict)
    if optim is not None:
        sharded.set_optimizer_state(model, optim, state["optim"], flatten=flatten, strict=strict)


def load_keys(
    dir: PathOrUri,  # noqa: A002
    keys: Iterable[str],
    *,
    pre_download: bool = False,
    work_dir: WorkDir = None,
) -> Generator[Any]:
    """The values of ``keys``, whole, in their order. In one process only.

    Args:
        dir: a path, or a URI of an object store.
        keys: as :func:`get_checkpoint_metadata` lists them, such as ``'model.w1.weight'``; or what comes before
            several, such as ``'model'``, which gives a dict. One may come twice.
        pre_download, work_dir: as in :func:`load_state_dict`.

    Raises:
        RuntimeError: ``torch.distributed`` is in use.
        IncompatibleCheckpointError: the checkpoint does not have a key.
        CheckpointNotFoundError, CorruptCheckpointError, UntrustedCheckpointError: as :func:`load_state_dict`.
    """
    if sharded.is_distributed():
        raise RuntimeError("load_keys reads whole tensors in one process: call it where torch.distributed is not used.")
    wanted = list(keys)
    with _reader(dir, pre_download, work_dir, None) as reader:
        metadata = reader.read_metadata()
        leaves = {key: _leaves(metadata, key) for key in wanted}
        if missing := [key for key, found in leaves.items() if not found]:
            raise IncompatibleCheckpointError(
                f"checkpoint {reader.uri!r} has no key {missing[0]!r}.{_near(missing[0], metadata.state_dict_metadata)}"
            )
        values = sharded.load_flat(reader, dict.fromkeys(leaf for found in leaves.values() for leaf in found))

    def each() -> Generator[Any]:
        for key in wanted:
            yield values[key] if key in values else nested(metadata, key, leaves[key], values)

    return each()


def get_checkpoint_metadata(dir: PathOrUri) -> Metadata:  # noqa: A002
    """The index that ``torch.distributed.checkpoint`` keeps: keys, shapes, types, and where the data are.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError, UntrustedCheckpointError: the index is damaged, or names what is not known to be safe.
    """
    with _reader(dir, False, None, None) as reader:
        return reader.read_metadata()


def _reader(
    place: PathOrUri, pre_download: bool, work_dir: WorkDir, thread_count: int | None
) -> sharded.RemoteFileSystemReader:
    _check_counts(thread_count)
    return sharded.RemoteFileSystemReader(
        place, thread_count=thread_count, pre_download=pre_download, work_dir=work_dir
    )


def _fill_in(state: StateDict, metadata: Metadata, path: str = "") -> None:
    """Put a tensor where ``None`` stands for one."""
    for key, value in state.items():
        full = f"{path}.{key}" if path else key
        stored = metadata.state_dict_metadata.get(full)
        if isinstance(value, dict):
            _fill_in(cast("StateDict", value), metadata, full)
        elif value is None and isinstance(stored, sharded.TensorStorageMetadata):
            state[key] = torch.empty(stored.size, dtype=stored.properties.dtype)


def _leaves(metadata: Metadata, key: str) -> list[str]:
    """The keys of the index that ``key`` stands for."""
    if key in metadata.state_dict_metadata:
        return [key]
    return [leaf for leaf in metadata.state_dict_metadata if leaf.startswith(f"{key}.")]


def nested(metadata: Metadata, prefix: str, leaves: Sequence[str], values: Mapping[str, Any]) -> Any:
    """The dict that ``leaves`` make up, below ``prefix``."""
    tree: dict[str | int, Any] = {}
    for leaf in leaves:
        path = sharded.key_path(metadata, leaf)
        depth = next((n for n in range(len(path)) if ".".join(map(str, path[:n])) == prefix), 0)
        node = tree
        for part in path[depth:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = values[leaf]
    return _with_lists(tree)


def _with_lists(tree: Any) -> Any:
    """``tree`` with lists where the keys are 0, 1, 2 …"""
    if not isinstance(tree, dict):
        return tree
    made = {key: _with_lists(value) for key, value in cast("dict[Any, Any]", tree).items()}
    if made and all(type(key) is int for key in made) and sorted(made) == list(range(len(made))):
        return [made[number] for number in range(len(made))]
    return made


# ── strictness ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _check(
    reader: sharded.RemoteFileSystemReader, wanted: Mapping[str, Any], *, strict: bool, owned: Sequence[str]
) -> None:
    """Compare what is wanted with what there is.

    Args:
        reader: of the checkpoint.
        wanted: by the keys of the index.
        strict: whether it matters what is missing, unexpected, or of another type.
        owned: what all keys of the checkpoint that begin so must be wanted of.
    """
    stored = reader.read_metadata().state_dict_metadata
    missing, shapes, dtypes = [], [], []
    for key, value in wanted.items():
        there = stored.get(key)
        if there is None:
            missing.append(key)
        elif isinstance(value, Tensor) != isinstance(there, sharded.TensorStorageMetadata):
            kinds = ("a tensor", "no tensor")
            have, want = kinds if isinstance(there, sharded.TensorStorageMetadata) else kinds[::-1]
            shapes.append(f"{key}: {have} in the checkpoint, {want} here")
        elif isinstance(value, Tensor) and isinstance(there, sharded.TensorStorageMetadata):
            if value.shape != there.size:
                shapes.append(f"{key}: {tuple(there.size)} in the checkpoint, {tuple(value.shape)} here")
            if value.dtype is not there.properties.dtype:
                dtypes.append(f"{key}: {there.properties.dtype} in the checkpoint, {value.dtype} here")
    prefixes = tuple(f"{name}." for name in owned)
    unexpected = [key for key in stored if key not in wanted and key.startswith(prefixes)] if owned else []
    found = {"of another shape": shapes}
    if strict:
        found = {"missing in the checkpoint": missing, "unexpected": unexpected, **found, "of another type": dtypes}
    if any(found.values()):
        lists = "; ".join(f"{len(keys)} {what}: {_listed(keys)}" for what, keys in found.items() if keys)
        way_out = " strict=False loads the rest." if strict and owned and not shapes else ""
        raise IncompatibleCheckpointError(f"checkpoint {reader.uri!r} is one of something else: {lists}.{way_out}")


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _MOST_LISTED} more" if len(keys) > _MOST_LISTED else ""
    return ", ".join(keys[:_MOST_LISTED]) + more


def _near(key: str, known: Iterable[str]) -> str:
    known = list(known)
    hint = did_you_mean(key, known)
    return hint if len(known) <= _MOST_LISTED else hint.partition(" Known:")[0]


# ── optimizers ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _is_flattened(metadata: Metadata, *, default: bool) -> bool:
    """Whether the settings of the optimizer's groups were saved for every parameter."""
    groups = [key for key in metadata.state_dict_metadata if key.startswith("optim.param_groups.")]
    if not groups:
        return default
    path = sharded.key_path(metadata, groups[0])
    if len(path) > 2:
        return type(path[2]) is not int
    return "optim.param_groups.0.params" not in groups


def _groups(
    model: nn.Module, optim: Optimizer, state: StateDict, mapping: Mapping[str, str], metadata: Metadata
) -> list[list[str]]:
    """The names of the parameters of each group of ``optim``, as the checkpoint has them."""
    if "param_groups" not in state:  # flattened: it does not say
        state = sharded.optimizer_state(model, optim, flatten=False)
        swap_param_keys({"optim": state}, mapping, metadata, quiet=True)
    return [group["params"] for group in state["param_groups"]]


def _containers(value: Any) -> Any:
    """``value`` with dicts and lists of its own."""
    if isinstance(value, dict):
        return {key: _containers(inner) for key, inner in cast("StateDict", value).items()}
    if type(value) is list:
        return [_containers(inner) for inner in cast("list[Any]", value)]
    return value


def _check_groups(reader: sharded.RemoteFileSystemReader, groups: Sequence[Sequence[str]], *, flatten: bool) -> None:
    """See that the optimizer's groups are those of the checkpoint.

    Args:
        reader: of the checkpoint.
        groups: the names of the parameters of each group, as the checkpoint has them.
        flatten: how the checkpoint was saved.
    """
    metadata = reader.read_metadata()
    stored = [key for key in metadata.state_dict_metadata if key.startswith("optim.param_groups.")]
    if not stored:
        return
    problems = list((_flat_problems if flatten else _group_problems)(reader, groups, stored))
    if problems:
        raise IncompatibleCheckpointError(
            f"checkpoint {reader.uri!r}: the optimizer's parameter groups are others: {_listed(problems)}. Make the "
            "optimizer with the groups that it was saved with, or load without it."
        )


def _group_problems(
    reader: sharded.RemoteFileSystemReader, groups: Sequence[Sequence[str]], stored: Sequence[str]
) -> Iterator[str]:
    values = sharded.load_flat(reader, [key for key in stored if key.count(".") == 3 and key.endswith(".params")])
    saved = {int(key.split(".")[2]): cast("list[str]", names) for key, names in values.items()}
    if len(saved) != len(groups):
        yield f"it has {len(saved)}, and the optimizer has {len(groups)}"
        return
    for number, names in enumerate(groups):
        if differing := sorted(set(saved.get(number, ())) ^ set(names)):
            yield f"number {number} differs in {_listed(differing)}"


def _flat_problems(
    reader: sharded.RemoteFileSystemReader, groups: Sequence[Sequence[str]], stored: Sequence[str]
) -> Iterator[str]:
    """Parameters that are in one group now must have been saved with the same settings."""
    metadata = reader.read_metadata().state_dict_metadata
    plain = [key for key in stored if not isinstance(metadata[key], sharded.TensorStorageMetadata)]
    settings: dict[str, dict[str, Any]] = {}
    for key, value in sharded.load_flat(reader, plain).items():
        name, _, setting = key.removeprefix("optim.param_groups.").rpartition(".")
        settings.setdefault(name, {})[setting] = value
    for number, names in enumerate(groups):
        known = [name for name in names if name in settings]
        for name in known[1:]:
            first = settings[known[0]]
            differing = [key for key, value in settings[name].items() if key in first and first[key] != value]
            if differing:
                yield (
                    f"{known[0]!r} and {name!r}, which are in group {number} here, were saved with "
                    f"{differing[0]}={first[differing[0]]!r} and {settings[name][differing[0]]!r}"
                )


# ── renaming, leaving out, putting back ──────────────────────────────────────────────────────────────────────────────
def swap_param_keys(
    state_dict: StateDict,
    key_mapping: Mapping[str, str],
    metadata: Metadata | None = None,
    reverse: bool = False,
    quiet: bool = False,
) -> None:
    """Rename parameters in the state of a model and its optimizer, in place.

    Args:
        state_dict: ``{"model": …, "optim": …}``, the optimizer's in either layout.
        key_mapping: new names by present names.
        metadata: of a checkpoint: a parameter whose new name it does not have keeps the present one.
        reverse: from the new names to the present ones.
        quiet: do not log what is renamed.
    """
    names = {
        old: new
        for old, new in key_mapping.items()
        if metadata is None or f"model.{new}" in metadata.state_dict_metadata
    }
    if reverse:
        names = {new: old for old, new in names.items()}
    if not names:
        return
    if not quiet:
        for old, new in names.items():
            log.info("renamed %s to %s", old, new)
    if isinstance(state_dict.get("model"), dict):
        _rename(state_dict["model"], names)
    optim = state_dict.get("optim")
    if isinstance(optim, dict):
        _rename_in_optimizer(cast("StateDict", optim), names)


def _rename_in_optimizer(optim: StateDict, names: Mapping[str, str]) -> None:
    if isinstance(optim.get("state"), dict):
        _rename(optim["state"], names)
    for group in cast("list[StateDict]", optim.get("param_groups", [])):
        group["params"] = [names.get(name, name) for name in group["params"]]
    flat = {key: _renamed_flat(key, names) for key in optim if key.startswith(("state.", "param_groups."))}
    if any(old != new for old, new in flat.items()):
        items = {flat.get(key, key): value for key, value in optim.items()}
        optim.clear()
        optim.update(items)


def _rename(state: StateDict, names: Mapping[str, str]) -> None:
    """Rename keys, all at once: two may change places."""
    items = {names.get(key, key): value for key, value in state.items()}
    state.clear()
    state.update(items)


def _renamed_flat(key: str, names: Mapping[str, str]) -> str:
    """``state.<name>.<field>`` with another name."""
    kind, _, rest = key.partition(".")
    name, _, setting = rest.rpartition(".")
    return f"{kind}.{names.get(name, name)}.{setting}"


def prune_state_dict(state_dict: StateDict, allowed_keys: set[str]) -> set[str]:
    """Remove what is not among ``allowed_keys``, in place; returns the keys of what was removed.

    Args:
        state_dict: nested dicts.
        allowed_keys: as in an index: the keys of the dicts one after the other, with dots between.
    """
    removed: set[str] = set()

    def prune(node: StateDict, prefix: str) -> None:
        for key, value in list(node.items()):
            full = f"{prefix}{key}"
            if full in allowed_keys:
                continue
            inner = _dicts_in(value)
            for place, below in inner:
                prune(below, f"{full}.{place}" if place else f"{full}.")
            if not any(below for _, below in inner):
                if not inner:
                    removed.add(full)
                del node[key]

    prune(state_dict, "")
    return removed


def _dicts_in(value: Any) -> list[tuple[str, StateDict]]:
    """The dicts that ``value`` is or holds, if it is a list of such, and what stands before their keys."""
    if isinstance(value, dict):
        return [("", cast("StateDict", value))]
    if isinstance(value, list) and value and all(isinstance(inner, dict) for inner in cast("list[Any]", value)):
        return [(f"{number}.", inner) for number, inner in enumerate(cast("list[StateDict]", value))]
    return []


def merge_state_dicts(lhs: StateDict, rhs: StateDict) -> None:
    """Give ``lhs``, in place, what only ``rhs`` has. Nested dicts are merged likewise, and those in lists."""
    for key, value in rhs.items():
        if key not in lhs:
            lhs[key] = value
            continue
        for (_, mine), (_, theirs) in zip(_dicts_in(lhs[key]), _dicts_in(value), strict=False):
            merge_state_dicts(mine, theirs)
