"""DataSpec: a data loader with functions to count and split batches. Evaluator: data to evaluate on."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

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

_FIX = "Pass DataSpec(loader, split_batch=lambda batch, microbatch_size: […])."


def batch_get(batch: Batch, key: Any) -> Any:
    """Return one item of ``batch``.

    Args:
        batch: tensor, sequence, mapping, dataclass or any object.
        key: index, key, attribute name, function of the batch, or a pair of functions that get and set the item.

    Returns:
        The item.
    """
    if _is_pair_of_functions(key):
        key = key[0]
    if callable(key):
        return key(batch)
    return getattr(batch, key) if isinstance(key, str) and not issubclass(type(batch), Mapping) else batch[key]


def batch_set(batch: Batch, key: Any, value: Any) -> Batch:
    """Return ``batch`` with a new item. Mutable batches are changed in place.

    Args:
        batch: tensor, sequence, mapping, dataclass or any object.
        key: index, key, attribute name, function of (batch, value) that returns the new batch, or a pair of functions
            that get and set the item.
        value: the new item.

    Returns:
        The batch with the new item.
    """
    if _is_pair_of_functions(key):
        key = key[1]
    if callable(key):
        return key(batch, value)
    by_name = isinstance(key, str) and not issubclass(type(batch), Mapping)
    if by_name and hasattr(batch, "_replace"):
        return batch._replace(**{key: value})
    if by_name:
        setattr(batch, key, value)
        return batch
    if issubclass(type(batch), tuple):
        items, place = list(cast("tuple[Any, ...]", batch)), cast("int", key)
        items[place] = value
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    batch[key] = value
    return batch


def _is_pair_of_functions(key: Any) -> bool:
    return isinstance(key, tuple | list) and len(cast("Sequence[Any]", key)) == 2 and all(map(callable, key))


def count_samples(batch: Batch) -> int:
    """Count samples: the first dimension of the first tensor in ``batch``, or the length of a list of samples.

    Raises:
        ConfigError: the batch has no tensor; pass ``DataSpec(get_num_samples_in_batch=…)``.
    """
    if type(batch) in (list, tuple) and batch and type(batch[0]) is torch.Tensor and batch[0].dim():
        return batch[0].size(0)  # fast path for the default collation of (inputs, targets), once per step
    found = _first_tensor(batch)
    if found is None:
        raise ConfigError(
            f"cannot count the samples of a batch of type {type(batch).__name__} without a tensor. Pass "
            "DataSpec(loader, get_num_samples_in_batch=lambda batch: …)."
        )
    first = next(iter((_parts(batch) or {}).values()), None)
    if first is not None and not isinstance(first, torch.Tensor):  # maybe a list of samples
        with contextlib.suppress(ConfigError):  # a batch that cannot be split can still be counted
            if (sizes := _sizes(batch, "batch", is_whole=True)) and len(sizes) == 1:
                return next(iter(sizes))
    return found.shape[0] if found.dim() else 1


def count_tokens(batch: Batch) -> int:
    """Count tokens: the number of elements of ``batch['input_ids']``; 0 without ``input_ids``."""
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
    """Split ``batch`` into microbatches of at most ``microbatch_size`` samples.

    Tensors are split along the first dimension; lists, tuples, mappings and dataclasses part by part. A list or tuple
    inside a batch with an item per sample is split between items, and so is a batch without tensors. Text, numbers,
    ``None`` and tensors without dimensions are repeated in each microbatch.

    Args:
        batch: tensors, in nested lists, tuples, mappings and dataclasses.
        microbatch_size: largest number of samples in a microbatch.

    Returns:
        Microbatches, in order; the last microbatch may be smaller.

    Raises:
        ConfigError: the batch has other objects, or is ambiguous; pass ``DataSpec(split_batch=…)``.
    """
    if isinstance(batch, torch.Tensor) and batch.dim():
        return batch.split(microbatch_size)
    holds_values = type(batch) in (list, tuple) and not any(_parts(item) for item in batch)
    if holds_values and _first_tensor(batch) is None:
        return [batch[i : i + microbatch_size] for i in range(0, len(batch), microbatch_size)]
    sizes = _sizes(batch, "batch", is_whole=True)
    if sizes is None or len(sizes) != 1:
        problem = "no part tells the number of samples" if sizes is None else "its parts do not have the same length"
        raise ConfigError(
            f"cannot split a {type(batch).__name__} into microbatches: {problem}. All parts need the same first "
            f"dimension. {_FIX}"
        )
    return _cut(batch, next(iter(sizes)), microbatch_size, is_whole=True)


_REPEATED = (str, bytes, int, float, complex, type(None))


def _parts(batch: Any) -> dict[str, Any] | None:
    """Return the parts of a mapping, list, tuple or dataclass by name; ``None`` for other objects."""
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
    """Return the possible numbers of samples in ``part``; ``None`` if ``part`` does not tell a number."""
    if _is_repeated(part):
        return None
    if isinstance(part, torch.Tensor | np.ndarray):
        return frozenset((len(part),))
    parts = _parts(part)
    if parts is None:
        raise ConfigError(f"cannot split {name} of type {type(part).__name__} into microbatches. {_FIX}")
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
        return frozenset((len(parts),))  # a list of samples of any kind
    if is_list and not is_whole:
        return frozenset((len(parts),)) if common is None else common | {len(parts)}
    return common


def _cut(part: Any, samples: int, size: int, *, is_whole: bool = False) -> Sequence[Any]:
    """Split ``part`` with ``samples`` samples into pieces of ``size`` samples."""
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
                f"cannot split a list of {samples} tensors with a first dimension of {samples} into microbatches: the "
                f"tensors may be samples or columns. {_FIX}"
            )
        return [cast("Any", part)[start : start + size] for start in starts]
    columns = [_cut(item, samples, size) for item in parts.values()]
    return [_like(part, row) for row in zip(*columns, strict=True)] if columns else [part] * len(starts)


def _like(part: Any, values: Sequence[Any]) -> Any:
    """Return a container like ``part`` with other values."""
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
    """A data loader with functions to count and split its batches.

    Args:
        dataloader: iterable of batches, iterated once per epoch.
        num_samples: samples per epoch; by default ``len(dataloader.dataset)`` if the dataset has a length.
        num_tokens: tokens per epoch.
        batch_transforms: applied to each batch on the device.
        microbatch_transforms: applied to each microbatch.
        split_batch: ``(batch, microbatch_size) -> microbatches``; by default :func:`split_batch`.
        get_num_samples_in_batch: by default :func:`count_samples`.
        get_num_tokens_in_batch: by default :func:`count_tokens`.
        replay_on_resume: load all earlier items of the epoch again on resume, for a data set with state from item to
            item; by default a ``DataLoader`` over a map-style data set skips by index.
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
                f"dataloader={dataloader.__name__} is a class, not a data loader. Pass an object of this class."
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
    """Return ``len(data)``; ``None`` if ``data`` has no length, or if ``__len__`` raises."""
    try:
        return len(data)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def ensure_data_spec(dataloader: DataSpec | Iterable[Batch] | Mapping[str, Any]) -> DataSpec:
    """Return ``dataloader`` as a :class:`DataSpec`. Accepts a spec, a dict of arguments, or an iterable of batches."""
    if isinstance(dataloader, DataSpec):
        return dataloader
    if isinstance(dataloader, Mapping):
        return DataSpec(**dataloader)
    return DataSpec(dataloader)


class Evaluator:
    """A data set to evaluate on.

    Args:
        label: prefix of the metrics, ``metrics/<label>/<metric>``.
        dataloader: a loader, a :class:`DataSpec`, or a dict of arguments of a ``DataSpec``.
        metric_names: names or globs of the model's metrics to compute; by default all.
        subset_num_batches: number of batches; -1 for all, ``None`` for the trainer's setting.
        eval_interval: interval during training; ``None`` for the trainer's setting. An int counts epochs; 0 is never.
        device_eval_microbatch_size: samples per forward pass; by default a whole batch.
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
        """Set the settings that are ``None``, and return this evaluator.

        Args:
            subset_num_batches: batches to evaluate on; -1 for all.
            eval_interval: interval of evaluations.

        Returns:
            This evaluator.
        """
        if self.subset_num_batches is None:
            self.subset_num_batches = subset_num_batches
        if self.eval_interval is None:
            self.eval_interval = create_interval_scheduler(eval_interval, checkpoint_events=False)
        return self


def ensure_evaluator(evaluator: Evaluator | DataSpec | Iterable[Batch] | Mapping[str, Any]) -> Evaluator:
    """Return ``evaluator`` as an :class:`Evaluator`. A loader gets the label ``'eval'``."""
    return evaluator if isinstance(evaluator, Evaluator) else Evaluator(label="eval", dataloader=evaluator)
