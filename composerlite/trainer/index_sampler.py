"""Drawing, counting and skipping the indices of a map-style data set, and seeding workers by batch."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Iterator
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader

__all__ = ["IndexSampler", "ReseedingDataset"]


class NumberedBatch(list[Any]):
    """The indices of one batch, and which batch of which epoch it is: what a worker seeds its generators with."""

    __slots__ = ("epoch", "number")

    def __init__(self, indices: Any = (), epoch: int = 0, number: int = 0) -> None:
        super().__init__(indices)
        self.epoch = epoch
        self.number = number

    def __reduce__(self) -> Any:
        return NumberedBatch, (list(self), self.epoch, self.number)


@final
class IndexSampler:
    """Stands in for the (batch) sampler of a loader: gives the same indices, can skip the first ones, digests them all.

    The digest after n batches is equal in two runs that drew the same n batches of indices.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._batched = loader.batch_sampler is not None
        self._inner: Any = loader.batch_sampler if self._batched else loader.sampler
        self._numbered = loader.num_workers > 0
        # A loader with workers draws ahead of what training has seen: remember the digests of that far back.
        ahead = loader.num_workers * (loader.prefetch_factor or 0)
        self._digests: deque[int] = deque([0], maxlen=ahead + 2)
        self._drawn = 0
        self._epoch = 0
        self._skip = 0
        self._indices: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return len(self._inner)

    def begin(self, epoch: int, skip: int) -> None:
        """The next iteration is epoch ``epoch`` and leaves out its first ``skip`` batches."""
        self._epoch = epoch
        self._skip = skip

    def __iter__(self) -> Iterator[Any]:
        self._digests.clear()
        self._digests.append(0)
        self._drawn = 0
        # Nothing is drawn before the first next(): the loader draws its own seed first, as without us.
        self._indices = self._draw()
        return self._rest() if self._skip else self._indices

    def skip_now(self) -> None:
        """Draw what is to be left out now, rather than when the loader asks for the first batch."""
        while self._drawn < self._skip:
            if next(self._indices, None) is None:
                return

    def digest(self, batches: int) -> int:
        """The digest of the first ``batches`` batches of indices; they must have been drawn, not too long ago.

        Zero if fewer were drawn.
        """
        behind = self._drawn - batches
        return self._digests[-1 - behind] if 0 <= behind < len(self._digests) else 0

    def _rest(self) -> Iterator[Any]:
        self.skip_now()
        yield from self._indices

    def _draw(self) -> Iterator[Any]:
        last = 0
        for indices in self._inner:
            last = _digest(last, indices)
            self._digests.append(last)
            number = self._drawn
            self._drawn += 1
            if not self._numbered:
                yield indices
            else:
                yield NumberedBatch(indices if self._batched else (indices,), self._epoch, number)


def _digest(previous: int, indices: Any) -> int:
    if isinstance(indices, list) and indices and type(indices[0]) is int:
        return hash((previous, *indices))  # the hash of integers is the same in every process
    return zlib.crc32(repr(indices).encode(), previous & 0xFFFFFFFF)


@final
class ReseedingDataset:
    """A map-style data set in a worker process, with the generators seeded for each batch.

    The seed is a function of (run seed, epoch, batch) and of nothing else: random transforms of a batch are the same
    whichever worker loads it and whatever that worker loaded before. Attributes are those of the data set inside.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        object.__setattr__(self, "_dataset", dataset)
        object.__setattr__(self, "_seed", seed)

    def __getitems__(self, batch: NumberedBatch) -> list[Any]:
        self._reseed(batch)
        indices = list(batch)
        if fetch := getattr(self._dataset, "__getitems__", None):
            return fetch(indices)
        return [self._dataset[index] for index in indices]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, NumberedBatch):  # a loader without automatic batching: one index at a time
            self._reseed(index)
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

    def _reseed(self, batch: NumberedBatch) -> None:
        words = np.random.SeedSequence((self._seed, batch.epoch, batch.number)).generate_state(3)
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))
        torch.manual_seed(int(words[2]))
