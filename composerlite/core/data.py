"""DataSpec: what the trainer needs to know about a data loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from composerlite.errors import ConfigError, checked_arguments
from composerlite.types import Batch

__all__ = ["DataSpec", "count_samples", "count_tokens", "ensure_data_spec", "move_to_device", "split_batch"]

T = TypeVar("T")


def move_to_device(batch: T, device: torch.device) -> T:
    """``batch`` with every tensor in nested lists, tuples and mappings on ``device``."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)  # pyright: ignore[reportReturnType]
    if isinstance(batch, Mapping):
        moved = {key: move_to_device(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[return-value, call-arg]
    if isinstance(batch, tuple):
        items = [move_to_device(item, device) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)  # type: ignore[return-value]
    if isinstance(batch, list):
        return [move_to_device(item, device) for item in batch]  # type: ignore[return-value]
    return batch


def count_samples(batch: Batch) -> int:
    """The length of the first dimension of the first tensor in ``batch``.

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
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, list | tuple):
        return None
    return next((t for t in map(_first_tensor, batch) if t is not None), None)


def split_batch(batch: Batch, microbatch_size: int) -> Sequence[Batch]:
    """``batch`` cut along the first dimension into pieces of at most ``microbatch_size`` samples.

    Tensors, and lists, tuples and mappings of things that can be split, are split; a list that holds no tensor is
    taken for a list of samples.

    Raises:
        ConfigError: the batch holds something else; pass ``DataSpec(split_batch=…)``.
    """
    if isinstance(batch, torch.Tensor):
        return batch.split(microbatch_size)
    if isinstance(batch, Mapping):
        _check_rows(batch.values())
        parts = {key: split_batch(value, microbatch_size) for key, value in batch.items()}
        count = len(next(iter(parts.values())))
        return [{key: part[i] for key, part in parts.items()} for i in range(count)]
    if isinstance(batch, list | tuple):
        if _first_tensor(batch) is None:
            return [batch[i : i + microbatch_size] for i in range(0, len(batch), microbatch_size)]
        _check_rows(batch)
        columns = [split_batch(item, microbatch_size) for item in batch]
        count = len(columns[0])
        rows = [[column[i] for column in columns] for i in range(count)]
        if hasattr(batch, "_fields"):
            return [type(batch)(*row) for row in rows]
        return [type(batch)(row) for row in rows]
    raise ConfigError(
        f"cannot split a batch that holds {type(batch).__name__} into microbatches. Pass "
        "DataSpec(loader, split_batch=lambda batch, microbatch_size: […])."
    )


def _check_rows(parts: Iterable[Any]) -> None:
    """Every part of a batch must hold the same number of samples."""
    counts: set[int] = set()
    for part in parts:
        tensor = _first_tensor(part)
        if tensor is not None:
            counts.add(tensor.shape[0] if tensor.dim() else 1)
        elif isinstance(part, list | tuple):
            counts.add(len(part))
    if len(counts) > 1:
        raise ConfigError(
            f"cannot split a batch whose parts have {' and '.join(map(str, sorted(counts)))} samples: all need the "
            "same first dimension. Pass DataSpec(loader, split_batch=lambda batch, microbatch_size: […])."
        )


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
        self.num_samples = _dataset_length(dataloader) if num_samples is None else num_samples
        self.num_tokens = num_tokens
        self.replay_on_resume = replay_on_resume
        self.batch_transforms = batch_transforms
        self.microbatch_transforms = microbatch_transforms
        self.split_batch = _split_batch if split_batch is None else split_batch
        self.get_num_samples_in_batch = count_samples if get_num_samples_in_batch is None else get_num_samples_in_batch
        self.get_num_tokens_in_batch = count_tokens if get_num_tokens_in_batch is None else get_num_tokens_in_batch


_split_batch = split_batch  # the constructor's argument of the same name hides the function


def _dataset_length(dataloader: Iterable[Batch]) -> int | None:
    dataset = getattr(dataloader, "dataset", None)
    if dataset is None or not hasattr(dataset, "__len__"):
        return None
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # torch datasets may define __len__ and not know it
        return None


def ensure_data_spec(dataloader: DataSpec | Iterable[Batch] | Mapping[str, Any]) -> DataSpec:
    """``dataloader`` as a :class:`DataSpec`: one already, its arguments as a dict, or an iterable of batches."""
    if isinstance(dataloader, DataSpec):
        return dataloader
    if isinstance(dataloader, Mapping):
        return DataSpec(**dataloader)
    return DataSpec(dataloader)
