"""GlobalSampler: draw the order of samples, skip, divide among ranks. ReseedingDataset: seed workers by the order."""

from __future__ import annotations

import contextlib
import itertools
import random
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from composerlite.core.numerics import seed_torch
from composerlite.errors import ConfigError

__all__ = ["GlobalSampler", "NumberedBatch", "ReseedingDataset", "Share", "divides_by_itself"]

_DRAW_AT_ONCE = (RandomSampler, SequentialSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers that use the shared generators only for the first index of an epoch."""
_PIECE = 1 << 16


class NumberedBatch(list[Any]):
    """Indices of one batch with their place in the order, from which a worker computes seeds.

    Attributes:
        epoch: number of the epoch.
        number: place of the first sample in the order, or number of the batch.
        stride: distance between the places of two samples; ``None`` if only the batch has a place.
    """

    __slots__ = ("epoch", "number", "stride")

    def __init__(self, indices: Any = (), epoch: int = 0, number: int = 0, stride: int | None = None) -> None:
        super().__init__(indices)
        self.epoch = epoch
        self.number = number
        self.stride = stride

    def __reduce__(self) -> Any:
        return NumberedBatch, (list(self), self.epoch, self.number, self.stride)


@final
class ReseedingDataset:
    """Map-style data set for a worker process: seeds the generators before each sample.

    The seed depends on the seed of the run, the epoch and the place of the sample in the order. So random transforms do
    not depend on the worker. A data set with ``__getitems__`` and a batch sampler of the user get one seed per batch.
    Attributes are the attributes of the wrapped data set.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        object.__setattr__(self, "_dataset", dataset)
        object.__setattr__(self, "_seed", seed)

    def __getitems__(self, batch: NumberedBatch) -> list[Any]:
        self._reseed(batch, batch.number)
        if fetch := getattr(self._dataset, "__getitems__", None):
            return fetch(list(batch))
        items: list[Any] = []
        for place, index in enumerate(batch):
            if batch.stride is not None:
                self._reseed(batch, batch.number + place * batch.stride)
            items.append(self._dataset[index])
        return items

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, NumberedBatch):  # a loader with batch_size=None asks for one index at a time
            self._reseed(index, index.number)
            return self._dataset[index[0]]
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> Any:
        return ReseedingDataset, (self._dataset, self._seed)

    def _reseed(self, batch: NumberedBatch, number: int) -> None:
        words = np.random.SeedSequence((self._seed, batch.epoch, number)).generate_state(3)
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))
        seed_torch(int(words[2]))


@dataclass(frozen=True, slots=True)
class Share:
    """Part of the data for one rank: ``world_size`` equal parts, of which this is number ``rank``.

    Ranks of one tensor-parallel group have the same share.
    """

    rank: int = 0
    world_size: int = 1


@final
class GlobalSampler:
    """Replacement for the sampler or batch sampler of a loader: gives this rank's part of each global batch.

    All ranks draw the same order. The order counts samples if the loader makes the batches: a global batch is the next
    ``batch_size * world_size`` samples. If a batch sampler of the user makes the batches, the order counts batches: a
    global batch is the next ``world_size`` batches. The last global batch is divided evenly.

    Args:
        loader: loader of the user.
        share: part of the data for this rank.
        drawing: context in which indices are drawn.

    Attributes:
        counts_samples: whether the order counts samples.
        global_batch: length of a global batch in the order.
        drawn: length of the part of the order that is drawn.
        digest: digest of the drawn part.
        paddings: for each batch requested by the loader and not yet used for training, whether this rank has no sample
            of its own in the batch. Empty with one rank.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        share: Share,
        drawing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        batch_sampler: Any = loader.batch_sampler
        self._share = share
        self._drawing = drawing
        self._batched = batch_sampler is not None
        self._numbered = loader.num_workers > 0
        self.counts_samples = type(batch_sampler) is BatchSampler
        sampler: Any = loader.sampler
        if self._batched:
            sampler = batch_sampler.sampler if self.counts_samples else batch_sampler
        self._drop_last: bool = self.counts_samples and batch_sampler.drop_last
        self.global_batch: int = share.world_size * (batch_sampler.batch_size if self.counts_samples else 1)
        self._limit: int | None = None
        self._divided = isinstance(sampler, DistributedSampler) and share.world_size > 1
        if self._divided:
            if sampler.drop_last:
                self._limit = len(cast("Any", sampler).dataset) // share.world_size * share.world_size
            sampler = _undivided(sampler, share)
        self._sampler: Any = sampler
        self._draws_at_once = type(sampler) in _DRAW_AT_ONCE
        self._epoch = 0
        self._order: Iterator[Any] = iter(())
        self._ahead: list[Any] = []
        self._done = 0
        self.drawn = 0
        self.digest = 0
        self.paddings: deque[bool] = deque()

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        return self.batches_after(0)

    def batches_after(self, done: int) -> int:
        """Return the number of global batches after the first ``done`` items of the order.

        Raises:
            TypeError, NotImplementedError: the sampler has no length.
        """
        length = len(self._sampler) if self._limit is None else self._limit
        full, rest = divmod(max(0, length - done), self.global_batch)
        return full if self._drop_last or not rest else full + 1

    def set_epoch(self, number: int) -> None:
        """Set the epoch of a ``DistributedSampler``; the loader has another copy of this sampler."""
        if self._divided:
            self._sampler.set_epoch(number)

    def begin(self, epoch: int, done: int = 0, drawn: int = 0) -> int:
        """Draw the order of an epoch again. Call with the generators that draw the order.

        Args:
            epoch: number of the epoch.
            done: items of the order to skip.
            drawn: items of the order to draw at once, at least ``done``. ``self.drawn`` is smaller afterwards if the
                order is shorter.

        Returns:
            Digest of the drawn part.
        """
        self._epoch, self._order = epoch, iter(self._sampler)
        self.drawn = self.digest = 0
        self.paddings.clear()
        while self.drawn < done and self._draw(min(_PIECE, done - self.drawn)):
            pass
        self._done, self._ahead = done, self._draw(drawn - self.drawn)
        if self._draws_at_once:  # now, with the generators of the order
            self.has_next()
        return self.digest

    def has_next(self) -> bool:
        """Return true if the order has another item."""
        first = list(itertools.islice(self._order, 1))
        self._order = itertools.chain(first, self._order)
        return bool(first or self._ahead)

    def __iter__(self) -> Iterator[Any]:
        """Yield the indices that this rank loads, from the position set by :meth:`begin`."""
        while batch := self._take():
            if self._drop_last and len(batch) < self.global_batch:
                return
            indices, first, stride = self._mine(batch)
            if self._share.world_size > 1:
                self.paddings.append(indices is None)
                if indices is None:  # load something, so that this rank takes part in the step
                    indices = batch[:1] if self.counts_samples else batch[0]
                    indices = indices[:1] if isinstance(indices, list) else indices
            if not self._numbered:
                yield indices
            else:
                yield NumberedBatch(indices if self._batched else (indices,), self._epoch, first, stride)

    def _take(self) -> list[Any]:
        """Return the next global batch of the order."""
        count = self.global_batch if self._limit is None else min(self.global_batch, self._limit - self._done)
        if self._ahead:
            batch, self._ahead = self._ahead[:count], self._ahead[count:]
            if len(batch) < count:
                with self._drawing():
                    batch += self._draw(count - len(batch))
        elif self._draws_at_once:
            batch = self._draw(count)
        else:
            with self._drawing():
                batch = self._draw(count)
        self._done += len(batch)
        return batch

    def _draw(self, count: int) -> list[Any]:
        """Draw items of the order, and add them to the digest, which does not depend on the size of the pieces."""
        drawn = list(itertools.islice(self._order, max(0, count)))
        self.drawn += len(drawn)
        if self.counts_samples:
            self.digest = zlib.crc32(_as_bytes(drawn), self.digest)
        else:
            for item in drawn:
                self.digest = zlib.crc32(b"|" + _as_bytes(item if isinstance(item, list) else [item]), self.digest)
        return drawn

    def _mine(self, batch: list[Any]) -> tuple[Any, int, int | None]:
        """Return this rank's part of a global batch, the place of its first sample, and the stride of places."""
        rank, world_size = self._share.rank, self._share.world_size
        start = self._done - len(batch)
        if self._divided:  # as DistributedSampler divides
            return batch[rank::world_size] or None, start + rank, world_size
        if self.counts_samples:
            first, last = len(batch) * rank // world_size, len(batch) * (rank + 1) // world_size
            return batch[first:last] or None, start + first, 1
        if len(batch) < world_size and all(isinstance(item, list) for item in batch):
            samples = list(itertools.chain.from_iterable(batch))
            first, last = len(samples) * rank // world_size, len(samples) * (rank + 1) // world_size
            return samples[first:last] or None, start + rank, None
        return (batch[rank] if rank < len(batch) else None), start + rank, None


def divides_by_itself(loader: DataLoader[Any]) -> bool:
    """Return true if a sampler of the user in ``loader`` gives each rank indices of its own."""
    batch_sampler: Any = loader.batch_sampler
    inner = getattr(batch_sampler, "sampler", None)
    for sampler in (loader.sampler, batch_sampler, inner):
        known = sampler is None or type(sampler).__iter__ is DistributedSampler.__iter__
        if not known and (hasattr(sampler, "num_replicas") or isinstance(sampler, DistributedSampler)):
            return True
    return type(batch_sampler) is not BatchSampler and isinstance(inner, DistributedSampler)


def _undivided(sampler: DistributedSampler[Any], share: Share) -> DistributedSampler[Any]:
    """Return a sampler of the order that ``sampler`` divides, without the repeated samples at the end."""
    if (sampler.rank, sampler.num_replicas) not in ((share.rank, share.world_size), (0, 1)):
        raise ConfigError(
            f"DistributedSampler(num_replicas={sampler.num_replicas}, rank={sampler.rank}) on rank {share.rank} of the "
            f"{share.world_size} that share the data: expected these two numbers. Without a DistributedSampler the "
            "trainer partitions the samples itself."
        )
    return DistributedSampler(sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed)


def _as_bytes(indices: list[Any]) -> bytes:
    try:
        return array("q", indices).tobytes()
    except (TypeError, OverflowError):  # a data set may be indexed by anything
        return "".join(f"{index!r};" for index in indices).encode()
