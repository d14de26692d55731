"""The position in a loader or data set that saves and restores itself."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from composerlite.checkpoint import rng
from composerlite.core import Timestamp
from composerlite.trainer.data.data_position import RewindingPosition
from composerlite.trainer.data.dealing import Share
from composerlite.trainer.data.persistent_workers import PersistentWorkers, has_persistent_workers
from composerlite.types import Batch, StateDict

__all__ = ["StatefulPosition", "is_streaming"]


@final
class StatefulPosition(RewindingPosition):
    """A loader (or streaming data set) that saves and restores its own position."""

    def __init__(
        self,
        loader: Iterable[Batch],
        stateful: Any,
        timestamp: Callable[[], Timestamp],
        *,
        seed: int,
        share: Share = Share(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(loader, share)
        persists: Any = loader if has_persistent_workers(loader) else None
        self._persistent = None if persists is None else PersistentWorkers(persists, seed)
        self._stateful = stateful
        self._timestamp = timestamp
        self._has_state = False
        self._pass: _Pass | None = None

    def load_state_dict(self, state_dict: StateDict) -> None:
        """See :meth:`DataPosition.load_state_dict`. Composer saves the bare state of a streaming data set."""
        if "kind" not in state_dict and is_streaming(self._stateful):
            state_dict = {"kind": type(self).__name__, "generators": self._epoch_generators, "loader": state_dict}
        super().load_state_dict(state_dict)

    def epoch(self, number: int, skip: int) -> Iterator[Batch]:
        """See :meth:`DataPosition.epoch`. A process that left the epoch in its middle goes on with the same pass."""
        if not skip or self._restored is not None or self._pass is None:
            self._pass = _Pass(super().epoch(number, skip), skip)
        return self._pass.after(skip)

    def close(self) -> None:
        """See :meth:`DataPosition.close`."""
        self._pass = None
        if self._persistent is not None:
            self._persistent.close()

    def _begin(self) -> Iterator[Batch]:
        return iter(self._loader) if self._persistent is None else self._persistent.begin(self._number)

    def _is_for_all(self) -> bool:
        """A streaming data set counts the samples of all ranks, and shares out the rest to however many there are."""
        return (
            super()._is_for_all()
            or is_streaming(self._stateful)
            or is_streaming(getattr(self._loader, "dataset", None))
        )

    def _start(self, skip: int) -> Iterator[Batch]:
        restored, self._restored = self._restored, None
        self._has_state = True
        if restored is None or restored["loader"] is None:
            return self._begin()
        before, own = rng.capture(), self._generator_states()
        self._stateful.load_state_dict(restored["loader"])
        if skip:
            batches = self._begin()
            # It may draw from a generator of the user's again or not; the next epoch goes on from where that stood.
            self._set_generators(restored.get("generators_now", restored["generators"]))
            return _without_drawing_a_seed(self._loader, batches)
        # Some loaders restore the epoch that is over when they are asked for their state, and draw for it once more.
        # The new epoch then begins with the generators as they were, as it does in a process that lived on.
        self._own_state()
        rng.restore([before])
        self._set_generators(own)
        return self._not_empty(self._begin(), before, own)

    def _not_empty(self, batches: Iterator[Batch], before: dict[str, Any], own: list[Any]) -> Iterator[Batch]:
        """``batches``; those of the next pass if there are none: some loaders end the restored epoch once more."""
        first = list(itertools.islice(batches, 1))
        if not first:
            rng.restore([before])
            self._set_generators(own)
            batches = self._begin()
        yield from itertools.chain(first, batches)

    def finish_epoch(self, *, exhausted: bool) -> None:
        """See :meth:`DataPosition.finish_epoch`."""
        super().finish_epoch(exhausted=exhausted)
        self._pass = None
        # A loader that was left in the middle starts the next epoch afresh: its state speaks of the one that is over.
        self._has_state = exhausted or is_streaming(self._stateful)

    def _own_state(self) -> StateDict:
        if not self._has_state:
            return {"loader": None}
        if is_streaming(self._stateful):
            done = int(self._timestamp().sample_in_epoch)
            saved = self._stateful.state_dict(num_samples=done, from_beginning=True)
            if not done and "epoch" in saved and self._epoch_rng is None:
                saved = {**saved, "epoch": saved["epoch"] + 1}  # it names the one it gave last, which is over
        else:
            saved = self._stateful.state_dict()
        return {"loader": saved, "generators_now": self._generator_states()}


@final
class _Pass:
    """One pass over a loader that cannot be begun again in its middle, for training to come back to."""

    def __init__(self, batches: Iterator[Batch], given: int) -> None:
        self._batches = batches
        self._given = given
        self._last: Batch = None

    def after(self, count: int) -> Iterator[Batch]:
        """What comes after ``count`` batches: training may have failed on the one that was given last."""
        if self._given == count + 1:
            self._given = count
            self._batches = itertools.chain([self._last], self._batches)
        assert self._given == count
        return self

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._last = next(self._batches)
        self._given += 1
        return self._last


def _without_drawing_a_seed(loader: Any, batches: Iterator[Batch]) -> Iterator[Batch]:
    """``batches`` of an epoch resumed in its middle, without the draw that began the epoch.

    A loader whose ``__iter__`` is a generator draws the seed of its workers only when asked for the first batch.
    """
    if not inspect.isgenerator(batches) or not isinstance(loader, DataLoader) or loader.generator is not None:
        return batches

    def without() -> Iterator[Batch]:
        loader.generator = torch.Generator()
        try:
            first = list(itertools.islice(batches, 1))
        finally:
            loader.generator = None
        yield from itertools.chain(first, batches)

    return without()


def is_streaming(dataset: Any) -> bool:
    """Whether ``dataset`` restores itself by sample count, as MosaicML's StreamingDataset does."""
    state_dict = getattr(dataset, "state_dict", None)
    if not callable(state_dict) or not callable(getattr(dataset, "load_state_dict", None)):
        return False
    return {"num_samples", "from_beginning"} <= inspect.signature(state_dict).parameters.keys()
