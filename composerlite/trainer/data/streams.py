"""Positions in data that cannot be indexed: load and discard batches, or let the loader restore itself."""

from __future__ import annotations

import importlib
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from composerlite.core import Timestamp
from composerlite.devices import rng
from composerlite.errors import IncompatibleCheckpointError, TrainingError
from composerlite.trainer.data.held import Held, is_streaming
from composerlite.trainer.data.position import DataPosition
from composerlite.trainer.data.samplers import Share
from composerlite.trainer.data.states import same
from composerlite.types import Batch, StateDict, Stateful

__all__ = ["ReplayPosition", "StatefulPosition"]

log = logging.getLogger(__name__)


class ReplayPosition(DataPosition):
    """Position in any iterable. A resume loads the trained batches of the epoch again and discards them.

    If ``train_subset_num_batches`` ends an epoch, the states of data sets and samplers may be a place within the pass.
    So they are not restored for the next epoch.
    """

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a position.

        Args:
            state_dict: result of :meth:`state_dict`.

        Raises:
            IncompatibleCheckpointError: the position is of another kind of loader or another number of ranks.
        """
        importlib.import_module("rich.progress")  # the import draws from Python's generator: not during a replay
        super().load_state_dict(state_dict)

    def _begin(self, skip: int, saved: StateDict | None) -> Iterator[Batch]:
        if skip:
            return self._replay(skip)
        self._warn_if_cut(saved)
        return self._not_empty() if saved is not None and saved["states"] else iter(self._loader)

    def _own_state(self) -> StateDict:
        return {"was_cut": True, "states": []} if self._was_cut and not self._in_epoch else {}

    def _may_keep_place(self) -> bool:
        """Return true if a pass may continue where the pass before ended."""
        return bool(self._held.states())

    def _warn_if_cut(self, saved: StateDict | None) -> None:
        if saved is not None and saved.get("was_cut") and self._may_keep_place():
            log.warning(
                "the last epoch of the interrupted run ended before its data, and the next one begins at the beginning "
                "of the %s. If the data keep their place from one pass to the next, this resume is not exact: let each "
                "pass end itself, without train_subset_num_batches, and the place is restored.",
                type(self._loader).__name__,
            )

    def _not_empty(self) -> Iterator[Batch]:
        """Return the next pass, or the pass after it if it is empty: the restored state was the end of a pass."""
        before, own = rng.capture(), self._held.generator_states()
        batches = iter(self._loader)

        def chained() -> Iterator[Batch]:
            first, rest = list(itertools.islice(batches, 1)), batches
            if not first:
                self._held.load(self._fresh)
                rng.restore([before])
                self._held.set_generators(own)
                rest = iter(self._loader)
            yield from itertools.chain(first, rest)

        return chained()

    def _replay(self, count: int) -> Iterator[Batch]:
        """Return the batches after the first ``count``, which are loaded and discarded."""
        from rich.console import Console
        from rich.progress import track

        kind = type(self._loader).__name__
        log.info("replaying %d batches: a %s cannot skip by index and has no state_dict", count, kind)
        batches = iter(self._loader)
        console = Console(stderr=True, quiet=not sys.stderr.isatty())
        for done in track(range(count), description="replaying data", console=console):
            try:
                next(batches)
            except StopIteration as e:
                raise IncompatibleCheckpointError(
                    f"the data loader ended after {done} batches, before the {count} that the interrupted run had seen "
                    "of this epoch: the data set has become smaller. To start the epoch's data afresh pass "
                    "spin_dataloaders=False."
                ) from e
        return batches


@final
class StatefulPosition(ReplayPosition):
    """Position in a loader, or streaming data set, that saves and restores itself.

    Args:
        loader: training data.
        held: generators of the loader.
        timestamp: returns the current training time.
        share: part of the data for this rank.
        stateful: loader or data set with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(
        self, loader: Iterable[Batch], held: Held, timestamp: Callable[[], Timestamp], share: Share, *, stateful: Any
    ) -> None:
        super().__init__(loader, held, timestamp, share)
        self._stateful = stateful
        self._counts_samples = is_streaming(stateful)
        self._has_state = False

    def epoch(self, number: int, skip: int) -> Iterator[Batch]:
        """Start or resume an epoch.

        Args:
            number: completed epochs.
            skip: batches of this epoch that are already trained on.

        Returns:
            Iterator over the remaining batches.

        Raises:
            TrainingError: the loader has raised an error in this epoch.
        """
        if skip and self._in_epoch and self._batches is None and self._restored is None:
            raise TrainingError(
                f"the {type(self._stateful).__name__} has raised an error in this epoch, so its position is unknown. "
                "Build a new Trainer, and resume from the last checkpoint."
            )
        return super().epoch(number, skip)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a position, or the bare state of a streaming data set that Composer has saved.

        Args:
            state_dict: result of :meth:`state_dict`, or of the data set.

        Raises:
            IncompatibleCheckpointError: the position is of another kind of loader or another number of ranks.
        """
        if "kind" not in state_dict and self._counts_samples:
            bare = {"generators": self._held.generator_states(), "states": [], "loader": state_dict}
            state_dict = {"kind": type(self).__name__, **bare}
        super().load_state_dict(state_dict)

    def finish_epoch(self, *, exhausted: bool) -> None:
        """End the epoch.

        Args:
            exhausted: the loader has no more batches. Otherwise the state of the loader is a place within the ended
                epoch, and is not saved.
        """
        super().finish_epoch(exhausted=exhausted)
        self._has_state = exhausted or self._counts_samples
        self._was_cut = not self._has_state

    def _begin(self, skip: int, saved: StateDict | None) -> Iterator[Batch]:
        self._has_state = True
        state = None if saved is None else saved["loader"]
        if skip and (state is None or self._would_repeat(state)):
            return self._replay(skip)
        if state is None:
            self._warn_if_cut(saved)
            return iter(self._loader)
        assert saved is not None
        before, own = rng.capture(), self._held.generator_states()
        self._stateful.load_state_dict(state)
        if not skip:
            # Some loaders restore the finished epoch when state_dict() is called, and draw for that. A new epoch
            # begins with the generators from before, as in a process that was not interrupted.
            self._own_state()
            rng.restore([before])
            self._held.set_generators(own)
            return self._not_empty()
        batches = iter(self._loader)
        workers = _workers_in(state)
        if workers and all(map(_has_ended, workers)):
            batches = iter(())  # torchdata would ask the workers for another batch
        # The loader may have drawn from these generators again. The next epoch continues from the saved states.
        self._held.set_generators(saved.get("generators_now", saved["generators"]))
        return self._without_seed_draw(batches)

    def _own_state(self) -> StateDict:
        if not self._has_state:
            return {"loader": None, **super()._own_state()}
        if self._counts_samples:
            done = int(self._timestamp().sample_in_epoch)
            saved = self._stateful.state_dict(num_samples=done, from_beginning=True)
            if not done and "epoch" in saved and not self._in_epoch:
                saved = {**saved, "epoch": saved["epoch"] + 1}  # the data set returns the finished epoch
        else:
            saved = self._stateful.state_dict()
        return {"loader": saved, "generators_now": self._held.generator_states()}

    def _is_for_all(self) -> bool:
        # A streaming data set counts the samples of all ranks, and divides the rest among any number of ranks.
        dataset = getattr(self._loader, "dataset", None)
        return super()._is_for_all() or self._counts_samples or is_streaming(dataset)

    def _fail(self) -> None:
        if self._counts_samples:
            super()._fail()
        else:
            self.close()

    def _may_keep_place(self) -> bool:
        loader: Any = self._loader
        if not isinstance(loader, DataLoader):
            return True
        return (
            not loader.num_workers
            and isinstance(loader.dataset, IterableDataset)
            and isinstance(loader.dataset, Stateful)
        )

    def _would_repeat(self, state: Any) -> bool:
        """Return true if torchdata's loader would repeat the part of a worker that has already given its whole part.

        torchdata asks each worker for another batch, and some data sets start again after their end.
        """
        dataset: Any = getattr(self._loader, "dataset", None)
        workers = _workers_in(state)
        ended = [worker.get("dataset_state") for worker in workers if _has_ended(worker)]
        if not ended or len(ended) == len(workers) or not isinstance(dataset, Stateful):
            return False
        fresh = dataset.state_dict()
        return any(same(one, fresh) for one in ended)

    def _without_seed_draw(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return ``batches`` without a second draw of the seed of the workers from the generators of training.

        A loader whose ``__iter__`` is a generator draws this seed with the first batch.
        """
        loader: Any = self._loader
        if not inspect.isgenerator(batches) or not isinstance(loader, DataLoader) or loader.generator is not None:
            return batches

        def drawn_apart() -> Iterator[Batch]:
            loader.generator = torch.Generator()
            try:
                first = list(itertools.islice(batches, 1))
            finally:
                loader.generator = None
            yield from itertools.chain(first, batches)

        return drawn_apart()


def _workers_in(state: Any) -> list[StateDict]:
    """Return the states of the workers in a state of torchdata's loader; an empty list for other states."""
    parts: list[Any] = [one for one in state.values() if isinstance(one, dict)] if isinstance(state, dict) else []
    return [worker for part in parts for worker in (part.get("_worker_snapshots") or {}).values()]


def _has_ended(worker: StateDict) -> bool:
    return (worker.get("fetcher_state") or {}).get("fetcher_ended") is True
