"""DataSpec: what the trainer needs to know about a data loader. Evaluator: one to evaluate on, and when."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch

from composerlite.core.interval import SchedulePredicate, create_interval_scheduler
from composerlite.core.time import TimeInput
from composerlite.devices import move_to_device
from composerlite.errors import ConfigError, checked_arguments
from composerlite.types import Batch

__all__ = [
    "DataSpec",
    "Evaluator",
    "batch_get",
    "batch_set",
    "count_samples",
    "count_tokens",
    "ensure_data_spec",
    "ensure_evaluator",
    "length_of",
    "move_to_device",
    "split_batch",
]

T = TypeVar("T")


def batch_get(batch: Batch, key: Any) -> Any:
    """Return one item of ``batch``: by index, key or attribute name, or by a function of the batch.

    ``key`` may be a pair of functions, one that gets and one that sets, as algorithms take it.

    Args:
        batch: tensor, sequence, mapping, dataclass or any object.
        key: index, key, attribute name, function of the batch, or a pair of functions.

    Returns:
        The item.
    """
    if _is_pair_of_functions(key):
        key = key[0]
    if callable(key):
        return key(batch)
    return getattr(batch, key) if isinstance(key, str) and not _is_mapping(batch) else batch[key]


def batch_set(batch: Batch, key: Any, value: Any) -> Batch:
    """Return ``batch`` with ``value`` in place of the item ``key``: changed in place where it can be, else a new one.

    A function gets ``(batch, value)`` and returns the new batch; of a pair of functions it is the second.

    Args:
        batch: tensor, sequence, mapping, dataclass or any object.
        key: index, key, attribute name, function of (batch, value), or a pair of functions.
        value: the new item.

    Returns:
        The batch with the new item.
    """
    if _is_pair_of_functions(key):
        key = key[1]
    if callable(key):
        return key(batch, value)
    by_name = isinstance(key, str) and not _is_mapping(batch)
    if by_name and hasattr(batch, "_replace"):
        return batch._replace(**{key: value})
    if by_name:
        setattr(batch, key, value)
        return batch
    if _is_tuple(batch):
        items, place = list(cast("tuple[Any, ...]", batch)), cast("int", key)
        items[place] = value
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    batch[key] = value
    return batch


def _is_pair_of_functions(key: Any) -> bool:
    return isinstance(key, tuple | list) and len(cast("Sequence[Any]", key)) == 2 and all(map(callable, key))


def _is_mapping(batch: Batch) -> bool:  # plain functions: narrowing Any would make its items unknown
    return isinstance(batch, Mapping)


def _is_tuple(batch: Batch) -> bool:
    return isinstance(batch, tuple)


def count_samples(batch: Batch) -> int:
    """The length of the first dimension of the first tensor in ``batch``; of a list that has an item of each sample.

    Raises:
        ConfigError: there is no tensor in it; pass ``DataSpec(get_num_samples_in_batch=…)``.
    """
    if type(batch) in (list, tuple) and batch and type(batch[0]) is torch.Tensor and batch[0].dim():
        return batch[0].size(0)  # what default collation of (inputs, targets) gives: once per step, so made quick
    found = _first_tensor(batch)
    if found is None:
        raise ConfigError(
            f"cannot count the samples of a batch of type {type(batch).__name__}: it holds no tensor. Pass "
            "DataSpec(loader, get_num_samples_in_batch=lambda batch: …)."
        )
    first = next(iter((_parts(batch) or {}).values()), None)
    if first is not None and not isinstance(first, torch.Tensor):  # perhaps a list of samples
        with contextlib.suppress(ConfigError):  # it can be counted and not be split
            if (sizes := _sizes(batch, "batch", is_whole=True)) and len(sizes) == 1:
                return next(iter(sizes))
    return found.shape[0] if found.dim() else 1


def count_tokens(batch: Batch) -> int:
    """The number of elements of ``batch['input_ids']``; 0 where there is no such thing."""
    if type(batch) in (list, tuple):
        return 0
    if isinstance(batch, Mapping) and isinstance(ids := batch.get("input_ids"), torch.Tensor):
        return ids.numel()
    return 0


def _first_tensor(batch: Batch) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch
    parts = _parts(batch)
    return None if parts is None else next((t for t in map(_first_tensor, parts.values()) if t is not None), None)


def split_batch(batch: Batch, microbatch_size: int) -> Sequence[Batch]:
    """``batch`` cut between samples into pieces of at most ``microbatch_size`` samples.

    Tensors are cut along the first dimension; lists, tuples, mappings and dataclasses in each of their parts. A list or
    tuple inside a batch that has as many items as there are samples is cut between its items, as is a batch that is a
    list without tensors. Text, numbers, ``None`` and tensors of no dimension are repeated in each piece.

    Args:
        batch: tensors, in nested lists, tuples, mappings and dataclasses.
        microbatch_size: samples of a microbatch.

    Returns:
        Microbatches, in order; the last one may be smaller.

    Raises:
        ConfigError: the batch holds something else, or what may be read in two ways; pass ``DataSpec(split_batch=…)``.
    """
    if isinstance(batch, torch.Tensor) and batch.dim():
        return batch.split(microbatch_size)
    holds_values = type(batch) in (list, tuple) and not any(_parts(item) for item in batch)
    if holds_values and _first_tensor(batch) is None:
        return [batch[i : i + microbatch_size] for i in range(0, len(batch), microbatch_size)]
    sizes = _sizes(batch, "batch", is_whole=True)
    if sizes is None or len(sizes) != 1:
        raise _unclear(batch, sizes)
    return _cut(batch, next(iter(sizes)), microbatch_size, is_whole=True)


_REPEATED = (str, bytes, int, float, complex, type(None))


def _parts(batch: Any) -> dict[str, Any] | None:
    """The parts of a mapping, list, tuple or dataclass by name; ``None`` if it is no such thing."""
    if isinstance(batch, Mapping):
        return {f"[{key!r}]": value for key, value in cast("Mapping[Any, Any]", batch).items()}
    if isinstance(batch, list | tuple):
        return {f"[{index}]": value for index, value in enumerate(cast("Sequence[Any]", batch))}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {f".{field.name}": getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return None


def _is_repeated(part: Any) -> bool:
    return isinstance(part, _REPEATED) or (isinstance(part, torch.Tensor) and not part.dim())


def _sizes(part: Any, name: str, *, is_whole: bool = False) -> frozenset[int] | None:
    """The numbers of samples that ``part`` may be read to hold; ``None`` if it says nothing of that."""
    if _is_repeated(part):
        return None
    if isinstance(part, torch.Tensor | np.ndarray):
        return frozenset((len(part),))
    parts = _parts(part)
    if parts is None:
        raise ConfigError(
            f"cannot split {name} into microbatches: it is a {type(part).__name__}. Pass "
            "DataSpec(loader, split_batch=lambda batch, microbatch_size: […])."
        )
    is_list = isinstance(part, list | tuple) and not hasattr(part, "_fields")
    if is_list and all(_is_repeated(item) for item in parts.values()):
        return frozenset((len(parts),))
    common: frozenset[int] | None = None
    try:
        for key, item in parts.items():
            found = _sizes(item, name + key)
            if found is not None:
                common = found if common is None else common & found
    except ConfigError:
        if not is_list or is_whole:
            raise
        return frozenset((len(parts),))  # a list of samples, whatever a sample is
    if is_list and not is_whole:
        return frozenset((len(parts),)) if common is None else common | {len(parts)}
    return common


def _unclear(batch: Any, sizes: frozenset[int] | None) -> ConfigError:
    found = {name: _sizes(part, name) for name, part in (_parts(batch) or {}).items()}
    said = ", ".join(f"{name}: {' or '.join(map(str, sorted(size)))}" for name, size in found.items() if size)
    rule = "has no part that says" if sizes is None else "cannot tell" if sizes else "parts have different numbers"
    return ConfigError(
        f"cannot split a {type(batch).__name__} into microbatches: {rule} how many samples it has ({said}). All parts "
        "need the same first dimension. Pass DataSpec(loader, split_batch=lambda batch, microbatch_size: […])."
    )


def _cut(part: Any, samples: int, size: int, *, is_whole: bool = False) -> Sequence[Any]:
    """Cut ``part``, which holds ``samples`` samples, into pieces of ``size``."""
    starts = range(0, samples, size)
    if _is_repeated(part):
        return [part] * len(starts)
    if isinstance(part, torch.Tensor | np.ndarray):
        return [part[start : start + size] for start in starts]
    parts = _parts(part)
    assert parts is not None
    if isinstance(part, list | tuple) and not hasattr(part, "_fields") and not is_whole and len(parts) == samples:
        if all(isinstance(item, torch.Tensor) and item.shape[:1] == (samples,) for item in parts.values()):
            raise ConfigError(
                f"cannot split a list of {samples} tensors with a first dimension of {samples} into microbatches: they "
                "may be samples or columns. Pass DataSpec(loader, split_batch=lambda batch, microbatch_size: […])."
            )
        return [cast("Any", part)[start : start + size] for start in starts]
    columns = [_cut(item, samples, size) for item in parts.values()]
    return [_like(part, row) for row in zip(*columns, strict=True)] if columns else [part] * len(starts)


def _like(part: Any, values: Sequence[Any]) -> Any:
    """Such a container as ``part`` with other values."""
    if isinstance(part, Mapping):
        return dict(zip(cast("Mapping[Any, Any]", part), values, strict=True))
    if isinstance(part, list | tuple):
        return type(part)(*values) if hasattr(part, "_fields") else type(part)(values)
    names = [field.name for field in dataclasses.fields(part)]
    cut = copy.copy(part)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(cut, name, value)
    return cut


class DataSpec:
    """A data loader and how to read its batches.

    Args:
        dataloader: any iterable of batches that can be iterated once per epoch.
        num_samples: samples per epoch; by default ``len(dataloader.dataset)`` where there is one.
        num_tokens: tokens per epoch.
        batch_transforms: applied to each batch on the device.
        microbatch_transforms: applied to each microbatch.
        split_batch: ``(batch, microbatch_size) -> microbatches``; by default :func:`split_batch`.
        get_num_samples_in_batch: by default :func:`count_samples`.
        get_num_tokens_in_batch: by default :func:`count_tokens`.
        replay_on_resume: the data set keeps state from item to item, so that a resume in the middle of an epoch must
            load the items already seen again; by default a ``DataLoader`` over a map-style data set skips by index.
    """

    @checked_arguments
    def __init__(
        self,
        dataloader: Iterable[Batch],
        num_samples: int | None = None,
        num_tokens: int | None = None,
        batch_transforms: Callable[[Batch], Batch] | None = None,
        microbatch_transforms: Callable[[Batch], Batch] | None = None,
        split_batch: Callable[[Batch, int], Sequence[Batch]] | None = None,
        get_num_samples_in_batch: Callable[[Batch], int] | None = None,
        get_num_tokens_in_batch: Callable[[Batch], int] | None = None,
        replay_on_resume: bool = False,
    ) -> None:
        if isinstance(dataloader, type):
            raise ConfigError(
                f"{dataloader.__name__} is a class, not a data loader. Did you pass the class instead of an object of "
                "it?"
            )
        if not hasattr(dataloader, "__iter__"):
            raise ConfigError(
                f"a data loader of type {type(dataloader).__name__} cannot be iterated. Pass a DataLoader or any "
                "iterable of batches."
            )
        if isinstance(dataloader, torch.Tensor | Mapping | str):
            raise ConfigError(
                f"a {type(dataloader).__name__} is not a data loader. Pass a DataLoader or any iterable of batches."
            )
        self.dataloader = dataloader
        self.num_samples = length_of(getattr(dataloader, "dataset", None)) if num_samples is None else num_samples
        self.num_tokens = num_tokens
        self.replay_on_resume = replay_on_resume
        self.batch_transforms = batch_transforms
        self.microbatch_transforms = microbatch_transforms
        self.split_batch = _split_batch if split_batch is None else split_batch
        self.get_num_samples_in_batch = count_samples if get_num_samples_in_batch is None else get_num_samples_in_batch
        self.get_num_tokens_in_batch = count_tokens if get_num_tokens_in_batch is None else get_num_tokens_in_batch


_split_batch = split_batch  # the constructor's argument of the same name hides the function


def length_of(data: object) -> int | None:
    """``len(data)``; ``None`` where it has none: data sets and loaders may define ``__len__`` and not know it."""
    try:
        return len(data)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def ensure_data_spec(dataloader: DataSpec | Iterable[Batch] | Mapping[str, Any]) -> DataSpec:
    """``dataloader`` as a :class:`DataSpec`: one already, its arguments as a dict, or an iterable of batches."""
    if isinstance(dataloader, DataSpec):
        return dataloader
    if isinstance(dataloader, Mapping):
        return DataSpec(**dataloader)
    return DataSpec(dataloader)


class Evaluator:
    """A data set to evaluate on.

    Args:
        label: names its metrics, ``metrics/<label>/<metric>``.
        dataloader: the batches, as a loader, a :class:`DataSpec` or its arguments as a dict.
        metric_names: which of the model's metrics to compute; all by default. Globs are allowed.
        subset_num_batches: number of batches; -1 for all, ``None`` for the trainer's setting.
        eval_interval: when during training; ``None`` for the trainer's setting. An int counts epochs; 0 is never.
        device_eval_microbatch_size: samples per forward pass; a whole batch by default.
    """

    @checked_arguments
    def __init__(
        self,
        *,
        label: str,
        dataloader: DataSpec | Iterable[Batch] | Mapping[str, Any],
        metric_names: Sequence[str] | None = None,
        subset_num_batches: int | None = None,
        eval_interval: TimeInput | SchedulePredicate | None = None,
        device_eval_microbatch_size: int | None = None,
    ) -> None:
        if subset_num_batches is not None and (subset_num_batches == 0 or subset_num_batches < -1):
            raise ConfigError(
                f"Evaluator(subset_num_batches={subset_num_batches}): expected a positive number, or -1 for all."
            )
        self.label = label
        self.dataloader = ensure_data_spec(dataloader)
        self.metric_names = list(metric_names) if metric_names is not None else None
        self.subset_num_batches = subset_num_batches
        self.device_eval_microbatch_size = device_eval_microbatch_size
        self.eval_interval: SchedulePredicate | None = None
        if eval_interval is not None:
            self.eval_interval = create_interval_scheduler(eval_interval, checkpoint_events=False)

    def with_defaults(self, *, subset_num_batches: int, eval_interval: TimeInput | SchedulePredicate) -> Evaluator:
        """Return this evaluator with the arguments in place of settings that it has not.

        Args:
            subset_num_batches: batches to evaluate on; -1 for all.
            eval_interval: interval of evaluations.

        Returns:
            An evaluator with all settings.
        """
        if self.subset_num_batches is None:
            self.subset_num_batches = subset_num_batches
        if self.eval_interval is None:
            self.eval_interval = create_interval_scheduler(eval_interval, checkpoint_events=False)
        return self


def ensure_evaluator(evaluator: Evaluator | DataSpec | Iterable[Batch] | Mapping[str, Any]) -> Evaluator:
    """``evaluator`` as an :class:`Evaluator`; a bare loader gets the label ``'eval'``."""
    return evaluator if isinstance(evaluator, Evaluator) else Evaluator(label="eval", dataloader=evaluator)
