"""The order of samples: drawing, counting and skipping indices, dividing them among ranks, seeding workers by them.

Every rank draws the whole order, the same on all, and takes its share of each global batch. So a rank needs nobody to
know what the others load, and a run may resume with another number of ranks: what was done is a length of the order.
"""

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
from typing import Any, final

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

__all__ = [
    "GlobalSampler",
    "IndexSampler",
    "NumberedBatch",
    "RankBatch",
    "ReseedingDataset",
    "SavedBatches",
    "Share",
    "chained",
    "deals_by_itself",
    "seed_generators",
]


class NumberedBatch(list[Any]):
    """The indices of one batch, and which batch of which epoch it is: what a worker seeds its generators with.

    Attributes:
        number: of the batch. With a ``stride``: of its first sample.
        stride: how far the numbers of its samples are from each other; ``None`` if only the batch has a number.
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
class IndexSampler:
    """Stands in for the (batch) sampler of a loader: gives the same indices, can skip the first ones, digests them all.

    Attributes:
        drawn: batches of indices drawn in this pass; a loader with workers draws ahead of what training has seen.
        digest: of all that were drawn. It is equal in two runs that drew the same.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._batched = loader.batch_sampler is not None
        self._inner: Any = loader.batch_sampler if self._batched else loader.sampler
        self._numbered = loader.num_workers > 0
        self._epoch = 0
        self._skip = 0
        self._again = 0
        self._ahead: list[Any] = []
        self._indices: Iterator[Any] = iter(())
        self.drawn = 0
        self.digest = 0
        self.digest_again = 0

    def __len__(self) -> int:
        return len(self._inner)

    def begin(self, epoch: int, skip: int, again: int = 0) -> None:
        """The next iteration is epoch ``epoch`` and leaves out its first ``skip`` batches.

        ``again`` batches, if that is more, are drawn at once, as many as the interrupted run had drawn.
        """
        self._epoch = epoch
        self._skip = skip
        self._again = max(skip, again)

    def __iter__(self) -> Iterator[Any]:
        self.drawn = self.digest = self.digest_again = 0
        self._ahead = []
        # Nothing is drawn before the first next(): the loader draws its own seed first, as without us.
        self._indices = self._draw()
        return self._rest() if self._again else self._indices

    def draw_again(self) -> int:
        """Draw now what was drawn before the interruption, rather than when the loader asks; the digest of it."""
        if self.drawn < self._again:
            self._ahead = list(itertools.islice(self._indices, self._again))[self._skip :]
            self._again = self.drawn  # fewer, if there are no more
            self.digest_again = self.digest
        return self.digest_again

    def _rest(self) -> Iterator[Any]:
        self.draw_again()
        yield from self._ahead
        yield from self._indices

    def _draw(self) -> Iterator[Any]:
        for indices in self._inner:
            self.digest = chained(self.digest, indices)
            number = self.drawn
            self.drawn += 1
            if not self._numbered:
                yield indices
            else:
                yield NumberedBatch(indices if self._batched else (indices,), self._epoch, number)


def chained(previous: int, indices: Any) -> int:
    """The digest of the batches so far, from that of the ones before and the indices of one more."""
    if isinstance(indices, list) and indices and type(indices[0]) is int:
        return hash((previous, *indices))  # the hash of integers is the same in every process
    return zlib.crc32(repr(indices).encode(), previous & 0xFFFFFFFF)


@final
class ReseedingDataset:
    """A map-style data set in a worker process, with the generators seeded for each batch, or for each numbered sample.

    The seed is a function of (run seed, epoch, number) and of nothing else: random transforms are the same whichever
    worker loads a batch and whatever that worker loaded before. Attributes are those of the data set inside.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        object.__setattr__(self, "_dataset", dataset)
        object.__setattr__(self, "_seed", seed)

    def __getitems__(self, batch: NumberedBatch) -> list[Any]:
        self._reseed(batch, batch.number)
        if fetch := getattr(self._dataset, "__getitems__", None):
            return fetch(list(batch))
        if batch.stride is None:
            return [self._dataset[index] for index in batch]
        return [self._numbered(batch, index, batch.number + i * batch.stride) for i, index in enumerate(batch)]

    def _numbered(self, batch: NumberedBatch, index: Any, number: int) -> Any:
        self._reseed(batch, number)
        return self._dataset[index]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, NumberedBatch):  # a loader without automatic batching: one index at a time
            return self._numbered(index, index[0], index.number)
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
        seed_generators(self._seed, batch.epoch, number)


def seed_generators(*key: int) -> None:
    """Seed the generators of Python, numpy and torch as a function of ``key``: the run's seed, the epoch, a number."""
    words = np.random.SeedSequence(key).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    seed_torch(int(words[2]))


# They draw from the shared generators at the start of an epoch only.
_DRAW_AT_ONCE = (RandomSampler, SequentialSampler, WeightedRandomSampler, DistributedSampler)
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's part of the data: one of ``world_size`` equal ones.

    Ranks that hold parts of one tensor-parallel model have the same share: they need the same samples.
    """

    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One rank's part of one global batch.

    Attributes:
        indices: for the data set.
        end: how much of the order is done after it, by all ranks.
        digest: of the order up to there.
        is_padding: the rank has no sample of its own in it; it loads one of another's to keep step.
    """

    indices: Any
    end: int
    digest: int
    is_padding: bool


@dataclass(frozen=True, slots=True)
class SavedBatches:
    """Record of the order of a run of one process: number, size and digest of the batches drawn."""

    count: int
    size: int | None
    digest: int


@final
class GlobalSampler:
    """Stands in for the (batch) sampler of a loader: gives this rank's share of each global batch.

    The order is counted in samples where the loader makes the batches; ``k``-th global batch: the next ``batch_size`` ×
    ``world_size`` samples. It is counted in batches where a sampler of the user's makes them: then a global batch is
    the next ``world_size`` batches. The last global batch is shared out evenly, a batch of the user's is cut for that.

    Attributes:
        counts_samples: else batches of the user's.
        batch_size: samples a rank takes at a time; ``None`` where the user's sampler makes the batches.
        done: how much of the order was drawn. digest: of that.
        parts: batches requested from the loader that training has not received yet.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        share: Share,
        drawing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """``drawing`` is the context in which the sampler draws what all ranks draw."""
        self._share = share
        self._drawing = drawing
        self._batched = loader.batch_sampler is not None
        batch_sampler: Any = loader.batch_sampler
        self.counts_samples = type(batch_sampler) is BatchSampler
        self.batch_size: int | None = batch_sampler.batch_size if self.counts_samples else None
        self._drop_last: bool = self.counts_samples and batch_sampler.drop_last
        whole: Any = (
            batch_sampler.sampler if self.counts_samples else batch_sampler if self._batched else loader.sampler
        )
        self._distributed = isinstance(whole, DistributedSampler)
        self._sampler: Any = _undivided(whole, share) if self._distributed else whole
        self._numbered = loader.num_workers > 0
        self._limit: int | None = None
        if self._distributed and whole.drop_last:
            self._limit = len(whole.dataset) // share.world_size * share.world_size
        self._draws_at_once = type(self._sampler) in _DRAW_AT_ONCE
        self._epoch = 0
        self._order: Iterator[Any] = iter(())
        self.done = 0
        self.digest = 0
        self.parts: deque[RankBatch] = deque()

    @property
    def global_batch(self) -> int:
        """Samples of the order that all ranks take at a time."""
        return self._share.world_size * (self.batch_size or 1)

    def __len__(self) -> int:
        """Global batches in an epoch."""
        return self.batches_after(0)

    def batches_after(self, done: int) -> int:
        """Global batches that are left of an epoch when ``done`` of the order is done.

        Raises:
            TypeError, NotImplementedError: the sampler has no length.
        """
        length = len(self._sampler) if self._limit is None else self._limit
        full, rest = divmod(max(0, length - done), self.global_batch)
        return full if self._drop_last or not rest else full + 1

    def set_epoch(self, number: int) -> None:
        """Tell the sampler that shuffles by epoch number."""
        self._epoch = number
        if self._distributed:
            self._sampler.set_epoch(number)

    def begin(self, done: int, saved: SavedBatches | None = None) -> int | None:
        """Draw the order of an epoch anew and leave out what is done of it, or all there is; the digest of that.

        Called where the sampler may draw. ``None`` if ``saved`` is given and is not of this order.
        """
        self._order = itertools.islice(self._sampler, self._limit)
        self.done = self.digest = 0
        self.parts.clear()
        if saved is not None and not self.begins_with(saved):
            return None
        while self.done < done and self._take(min(_PIECE, done - self.done)):
            pass
        if self._draws_at_once:  # now, where it may draw from what the ranks share
            first = list(itertools.islice(self._order, 1))
            self._order = itertools.chain(first, self._order)
        return self.digest

    def draw_rest(self) -> None:
        """Draw the order to its end."""
        while self._take(_PIECE):
            pass

    def __iter__(self) -> Iterator[Any]:
        """Return the samples that this rank loads, from the position set by :meth:`begin`."""
        while batch := self._draw():
            if self._drop_last and len(batch) < self.global_batch:
                return
            indices, first, stride = self._mine(batch)
            is_padding = indices is None
            if indices is None:
                indices = _one_of(batch[0]) if not self.counts_samples else batch[:1]
            self.parts.append(RankBatch(indices, self.done, self.digest, is_padding))
            if not self._numbered:
                yield indices
            else:
                yield NumberedBatch(indices if self._batched else (indices,), self._epoch, first, stride)

    def _draw(self) -> list[Any]:
        if self._draws_at_once:
            return self._take(self.global_batch)
        with self._drawing():
            return self._take(self.global_batch)

    def _take(self, count: int) -> list[Any]:
        taken = list(itertools.islice(self._order, count))
        self.done += len(taken)
        self.digest = _digest(self.digest, taken, self.counts_samples)
        return taken

    def begins_with(self, saved: SavedBatches) -> bool:
        """Return true if a run of one process would draw ``saved`` next; nothing is taken."""
        size = saved.size if self.counts_samples else 1
        if size is None or (saved.size is None) == self.counts_samples:
            return False
        drawn = list(itertools.islice(self._order, saved.count * size))
        self._order = itertools.chain(drawn, self._order)
        batches = [drawn[i : i + size] for i in range(0, len(drawn), size)] if self.counts_samples else drawn
        digest = 0
        for batch in batches:
            digest = chained(digest, batch)
        return digest == saved.digest

    def _mine(self, batch: list[Any]) -> tuple[Any, int, int | None]:
        """Return this rank's share of a global batch, the position of its first sample in the order, and the stride."""
        rank, world_size = self._share.rank, self._share.world_size
        start = self.done - len(batch)
        if self.counts_samples:
            if self._distributed:  # as that sampler partitions them
                return batch[rank::world_size] or None, start + rank, world_size
            first, last = _bounds(len(batch), rank, world_size)
            return batch[first:last] or None, start + first, 1
        if len(batch) == world_size:
            return batch[rank], start + rank, None
        if all(isinstance(item, list) for item in batch):
            samples = list(itertools.chain.from_iterable(batch))
            first, last = _bounds(len(samples), rank, world_size)
            return samples[first:last] or None, start + rank, None
        return (batch[rank] if rank < len(batch) else None), start + rank, None


def deals_by_itself(loader: DataLoader[Any]) -> bool:
    """Return true if a sampler of ``loader`` gives each rank indices of its own in a way that only itself knows."""
    batch_sampler: Any = loader.batch_sampler
    for sampler in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        known = type(sampler).__iter__ is DistributedSampler.__iter__ if sampler is not None else True
        if not known and (hasattr(sampler, "num_replicas") or isinstance(sampler, DistributedSampler)):
            return True
    # In a batch sampler of the user's it partitions before those batches are made.
    return type(batch_sampler) is not BatchSampler and isinstance(
        getattr(batch_sampler, "sampler", None), DistributedSampler
    )


def _undivided(sampler: DistributedSampler[Any], share: Share) -> DistributedSampler[Any]:
    """The order of which ``sampler`` gives each rank its part, without what it repeats to fill up the last ones."""
    if (sampler.rank, sampler.num_replicas) not in ((share.rank, share.world_size), (0, 1)):
        raise ConfigError(
            f"DistributedSampler(num_replicas={sampler.num_replicas}, rank={sampler.rank}) on rank {share.rank} of the "
            f"{share.world_size} that share the data: expected these two numbers. Without a DistributedSampler the "
            "trainer partitions the samples itself."
        )
    return DistributedSampler(sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed)


def _bounds(count: int, rank: int, world_size: int) -> tuple[int, int]:
    return count * rank // world_size, count * (rank + 1) // world_size


def _one_of(batch: Any) -> Any:
    return batch[:1] if isinstance(batch, list) else batch


def _digest(previous: int, order: list[Any], counts_samples: bool) -> int:
    """Extend the digest of an order by its next part: the same in however many pieces it is drawn."""
    if counts_samples:
        return zlib.crc32(_as_bytes(order), previous)
    for batch in order:
        previous = zlib.crc32(b"|" + _as_bytes(batch if isinstance(batch, list) else [batch]), previous)
    return previous


def _as_bytes(indices: list[Any]) -> bytes:
    try:
        return array("q", indices).tobytes()
    except (TypeError, OverflowError):  # a data set may be indexed by anything
        return "".join(f"{index!r};" for index in indices).encode()
