"""Loaders over iterable data sets whose workers live on from one epoch to the next."""

from __future__ import annotations

import copy
import inspect
import itertools
import random
from collections.abc import Iterator
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from composerlite._torch_compat import forget_workers
from composerlite.core import seed_torch
from composerlite.types import Batch

__all__ = ["PersistentWorkers", "has_persistent_workers"]


def has_persistent_workers(loader: Any) -> bool:
    """Whether ``loader`` is one of torch's whose workers live on from one epoch to the next."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers


@final
class PersistentWorkers:
    """Passes over a loader whose workers persist, each of which is a function of (seed, epoch).

    A worker's generators have a history, which a resume does not repeat: here they are seeded when an epoch begins. And
    the loader draws the seed that its workers start with from a generator apart, since nobody else knows when they do.

    Workers of other loaders than a plain ``DataLoader`` are not seeded by us; there only the draw is apart.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._loader = loader
        self._seed = seed
        self._epoch: torch.Tensor | None = None
        plain = type(loader).__iter__ is DataLoader.__iter__ and not isinstance(loader.dataset, IterDataPipe)
        if plain and isinstance(loader.dataset, IterableDataset):
            self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
            self._loader = copy.copy(loader)  # the user's is left as it is
            forget_workers(self._loader)
            vars(self._loader)["dataset"] = _ReseedingStream(loader.dataset, seed, self._epoch)

    def begin(self, number: int) -> Iterator[Batch]:
        """The batches of epoch ``number``."""
        if self._epoch is not None:
            self._epoch.fill_(number)
        loader = self._loader
        given = loader.generator
        if number == 0:  # as a loader does whose workers start then
            torch.empty((), dtype=torch.int64).random_(generator=given)
        loader.generator = torch.Generator().manual_seed(self._seed)
        try:
            batches = iter(loader)
            if inspect.isgenerator(batches):  # which draws when it is asked for the first batch
                return itertools.chain(list(itertools.islice(batches, 1)), batches)
            return batches
        finally:
            loader.generator = given

    def close(self) -> None:
        """End the workers now, where they are not the user's."""
        if self._epoch is not None:
            forget_workers(self._loader)


@final
class _ReseedingStream(IterableDataset[Any]):
    """An iterable data set in a worker, with the generators seeded when a pass begins. Else it is the one inside."""

    def __init__(self, dataset: Any, seed: int, epoch: torch.Tensor) -> None:
        vars(self).update(_dataset=dataset, _seed=seed, _epoch=epoch)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        words = np.random.SeedSequence((self._seed, int(self._epoch), number)).generate_state(3)
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))
        seed_torch(int(words[2]))
        return iter(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> Any:
        return _ReseedingStream, (self._dataset, self._seed, self._epoch)
