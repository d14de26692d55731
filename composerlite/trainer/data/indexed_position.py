"""The position in a plain DataLoader over a map-style data set: samples already seen are skipped by index."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch.utils.data import BatchSampler, DataLoader, MapDataPipe

from composerlite._torch_compat import forget_workers, is_iterated_by_torch
from composerlite.core import Timestamp
from composerlite.errors import IncompatibleCheckpointError
from composerlite.trainer.data.data_position import RewindingPosition
from composerlite.trainer.data.dealing import Share
from composerlite.trainer.data.index_sampler import IndexSampler, ReseedingDataset
from composerlite.types import Batch, StateDict

__all__ = ["IndexedPosition", "fetched", "warn_of_disorder"]

log = logging.getLogger(__name__)


@final
class IndexedPosition(RewindingPosition):
    """A plain DataLoader over a map-style data set: batches already seen are skipped by index, without loading them.

    In worker processes the generators are seeded for each batch from (seed, epoch, batch), so that random transforms of
    a batch do not depend on which batches the worker loaded before.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        timestamp: Callable[[], Timestamp],
        *,
        seed: int,
        share: Share = Share(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(loader, share)
        self._loader: DataLoader[Any] = loader
        self._timestamp = timestamp
        warn_of_disorder(loader)
        self._sampler = IndexSampler(loader)
        # The user's loader is left as it is: DataLoader forbids to change it, and others may iterate over it.
        own = copy.copy(loader)
        forget_workers(own)
        vars(own)["batch_sampler" if loader.batch_sampler is not None else "sampler"] = self._sampler
        if loader.num_workers:
            vars(own)["dataset"] = ReseedingDataset(loader.dataset, seed)
        if loader.persistent_workers:
            own.generator = torch.Generator()  # draws the workers' seed, which says nothing: see _start
        self._own = own

    def close(self) -> None:
        """See :meth:`DataPosition.close`."""
        forget_workers(self._own)

    def _depends_on_workers(self, before: int, now: int) -> bool:
        return (before == 0) != (now == 0)  # workers seed each batch, whichever of them loads it

    def _start(self, skip: int) -> Iterator[Batch]:
        """Begin the epoch. The order of indices is compared with that of the interrupted run."""
        drawn = self._own_state() if self._restored is None else self._restored
        self._restored = None
        self._sampler.begin(self._number, skip, drawn.get("drawn", 0) if skip else 0)
        if self._own.persistent_workers and self._number == 0:
            # A loader draws a seed when it starts its workers. Those that persist start in the first epoch, or wherever
            # a resume finds itself; what training sees must not depend on it.
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        batches = fetched(self._own)
        if skip:
            digest = self._sampler.draw_again()
            if digest != drawn.get("indices", digest):
                raise IncompatibleCheckpointError(
                    "the data loader gives another order of samples than in the interrupted run (epoch "
                    f"{self._number}, first {skip} batches). The data set, batch size or sampler has changed, or it "
                    "draws from a generator that is shared with training: give it a generator of its own. To go on "
                    "regardless, pass spin_dataloaders=False."
                )
        return batches

    def _own_state(self) -> StateDict:
        if int(self._timestamp().batch_in_epoch) == 0 or self._sampler.drawn == 0:
            return {}
        batch_sampler = self._loader.batch_sampler
        batch_size = batch_sampler.batch_size if type(batch_sampler) is BatchSampler else None
        return {"drawn": self._sampler.drawn, "indices": self._sampler.digest, "batch_size": batch_size}


def warn_of_disorder(loader: DataLoader[Any]) -> None:
    """Say so where workers give batches in the order in which they are done."""
    if loader.num_workers and not getattr(loader, "in_order", True):
        log.warning("DataLoader(in_order=False): the order of batches depends on timing, a resume is not exact")


def fetched(loader: DataLoader[Any]) -> Iterator[Batch]:
    """The batches of a loader over a map-style data set."""
    return _fetched_here(loader) if _loads_in_process(loader) else iter(loader)


def _loads_in_process(loader: DataLoader[Any]) -> bool:
    sharded = isinstance(loader.dataset, MapDataPipe)  # by the loader's iterator
    return loader.num_workers == 0 and not loader.pin_memory and is_iterated_by_torch(loader) and not sharded


def _fetched_here(loader: DataLoader[Any]) -> Iterator[Batch]:
    """What ``iter(loader)`` gives of a map-style data set, without the profiler's record around each batch.

    That record costs more than a step of the training loop itself, and is made whether or not anyone profiles.
    """
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # the workers' seed, drawn without workers
    dataset: Any = loader.dataset
    collate = loader.collate_fn
    batch_sampler = loader.batch_sampler
    if batch_sampler is None:
        return (collate(dataset[index]) for index in loader.sampler)
    if fetch := getattr(dataset, "__getitems__", None):
        return (collate(fetch(indices)) for indices in batch_sampler)
    return (collate([dataset[index] for index in indices]) for indices in batch_sampler)
