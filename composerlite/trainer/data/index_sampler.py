"""Drawing, counting and skipping the indices of a map-style data set, and seeding workers by batch."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator
from typing import Any, final

import numpy as np
from torch.utils.data import DataLoader

from composerlite.core import seed_torch

__all__ = ["IndexSampler", "NumberedBatch", "ReseedingDataset", "chained"]


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
        words = np.random.SeedSequence((self._seed, batch.epoch, number)).generate_state(3)
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))
        seed_torch(int(words[2]))
