"""The position in what cannot be indexed: it restores itself, or what was seen is loaded again and thrown away."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from composerlite._torch_compat import forget_workers
from composerlite.core import Timestamp
from composerlite.devices import rng
from composerlite.errors import IncompatibleCheckpointError
from composerlite.trainer.data.digests import digest_of
from composerlite.trainer.data.held import Held, Pairs, held_by, is_streaming
from composerlite.trainer.data.position import RewindingPosition
from composerlite.trainer.data.samplers import Share, seed_generators
from composerlite.trainer.data.states import same
from composerlite.types import Batch, StateDict, Stateful

__all__ = ["PersistentWorkers", "ReplayPosition", "StatefulPosition", "has_persistent_workers"]

log = logging.getLogger(__name__)


def has_persistent_workers(loader: Any) -> bool:
    """Return true if ``loader`` is one of torch's whose workers live on from one epoch to the next."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers


@final
class PersistentWorkers:
    """Epochs of a loader whose workers persist, each of which is a function of (seed, epoch).

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
        seed_generators(self._seed, int(self._epoch), number)
        return iter(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> Any:
        return _ReseedingStream, (self._dataset, self._seed, self._epoch)


class _StreamPosition(RewindingPosition):
    """The position in a loader that is iterated as it is, with the workers ``persistent`` if they persist."""

    def __init__(self, loader: Iterable[Batch], held: Held, persistent: PersistentWorkers | None, share: Share) -> None:
        super().__init__(loader, held, share)
        self._iterated = loader
        self._persistent = persistent

    def close(self) -> None:
        """See :meth:`DataPosition.close`."""
        if self._persistent is not None:
            self._persistent.close()

    def _begin(self) -> Iterator[Batch]:
        return iter(self._iterated) if self._persistent is None else self._persistent.begin(self._number)

    def _not_empty(self, batches: Iterator[Batch], before: dict[str, Any], own: list[Any]) -> Iterator[Batch]:
        """``batches``; those of the next pass if there are none: some loaders end the restored epoch once more."""
        first = list(itertools.islice(batches, 1))
        if not first:
            self._held.load(self._fresh)
            rng.restore([before])
            self._set_generators(own)
            batches = self._begin()
        yield from itertools.chain(first, batches)


@final
class ReplayPosition(_StreamPosition):
    """Anything else that can be iterated: the batches already seen are loaded again and thrown away.

    Workers that load a map-style data set end with each epoch: what persisting ones keep of the epochs before would not
    be there after a resume.
    """

    def __init__(self, loader: Iterable[Batch], *, seed: int, share: Share = Share()) -> None:  # noqa: B008 - frozen
        own: Any = loader
        persists = has_persistent_workers(loader)
        plain = persists and type(own).__iter__ is DataLoader.__iter__ and not isinstance(own.dataset, IterableDataset)
        workers = PersistentWorkers(own, seed) if persists and not plain else None
        super().__init__(loader, held_by(loader), workers, share)
        self._first: str | None = None
        self._expected: str | None = None
        self._was_left = False
        if plain:
            self._iterated = own = copy.copy(own)  # the user's is left as it is
            forget_workers(own)
            vars(own)["persistent_workers"] = False

    def finish_epoch(self, *, exhausted: bool) -> None:
        """See :meth:`DataPosition.finish_epoch`."""
        super().finish_epoch(exhausted=exhausted)
        self._first, self._was_left = None, not exhausted

    def _states_to_load(self, state_dict: StateDict) -> Pairs:
        """None after an epoch that was left in its middle: they may say where in it, and the next one is another."""
        return [] if state_dict.get("was_left") else super()._states_to_load(state_dict)

    def _rejoin(self, saved: StateDict) -> None:
        if saved.get("was_left") and self._held.differs_from(saved.get("held", {}).get("states", [])):
            log.warning(
                "the last epoch of the interrupted run ended before its data: the state_dict() of %s may say where, "
                "and is not restored. If it says more than that, this is not the run that was interrupted.",
                ", ".join(self._held.kinds),
            )
        super()._rejoin(saved)

    def _start(self, skip: int, saved: StateDict | None) -> Iterator[Batch]:
        if isinstance(self._loader, Sequence):
            return itertools.islice(self._begin(), skip, None)
        if skip:
            batches = self._begin(None if saved is not None and self._has_other_workers(saved) else self._expected)
            _replay(batches, skip, type(self._loader).__name__)
            return batches
        if saved is None or not saved.get("held", {}).get("states"):
            return self._begin()
        before, own = rng.capture(), self._held.generator_states()
        return self._not_empty(self._begin(), before, own)

    def _resume(self, skip: int, saved: StateDict | None) -> Iterator[Batch]:
        importlib.import_module("rich.progress")  # draws from Python's generator when it is imported: not in a replay
        self._expected = self._first if saved is None else saved.get("first")
        return super()._resume(skip, saved)

    def _begin(self, expected: str | None = None) -> Iterator[Batch]:
        batches = super()._begin()
        if isinstance(self._loader, Sequence):
            return batches
        return itertools.chain(self._noted(batches, expected), batches)

    def _noted(self, batches: Iterator[Batch], expected: str | None) -> Iterator[Batch]:
        """The first of ``batches``, of which the digest is noted, and compared with an ``expected`` one."""
        for batch in itertools.islice(batches, 1):
            self._first = digest_of(batch)
            if expected not in (None, self._first):
                raise IncompatibleCheckpointError(
                    f"the data loader gives other batches than in the interrupted run: the first one of epoch "
                    f"{self._number}, replayed, is not what it was. The data, the batch size or the loader has "
                    f"changed.{self._suspects} To continue regardless, pass spin_dataloaders=False."
                )
            yield batch

    def _has_other_workers(self, saved: StateDict) -> bool:
        """Return true where another number of workers gives another order, which was said."""
        return saved.get("num_workers") != getattr(self._loader, "num_workers", None)

    def _own_state(self) -> StateDict:
        first = {} if self._first is None else {"first": self._first}
        return {**first, "was_left": True} if self._was_left and not self._in_epoch else first


def _replay(batches: Iterator[Batch], count: int, kind: str) -> None:
    from rich.console import Console
    from rich.progress import track

    log.info("replaying %d batches: a %s cannot skip by index and has no state_dict", count, kind)
    console = Console(stderr=True, quiet=not sys.stderr.isatty())
    for done in track(range(count), description="replaying data", console=console):
        try:
            next(batches)
        except StopIteration as e:
            raise IncompatibleCheckpointError(
                f"the data loader ended after {done} batches, before the {count} that the interrupted run had seen of "
                "this epoch: the data set has become smaller. To start the epoch's data afresh pass "
                "spin_dataloaders=False."
            ) from e


@final
class StatefulPosition(_StreamPosition):
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
        persists: Any = loader if has_persistent_workers(loader) else None
        held = held_by(loader, asks=False)
        super().__init__(loader, held, None if persists is None else PersistentWorkers(persists, seed), share)
        self._stateful = stateful
        self._timestamp = timestamp
        self._has_state = False
        self._was_left = False
        self._pass: _Pass | None = None

    def load_state_dict(self, state_dict: StateDict) -> None:
        """See :meth:`DataPosition.load_state_dict`. Composer saves the bare state of a streaming data set."""
        if "kind" not in state_dict and is_streaming(self._stateful):
            state_dict = {"kind": type(self).__name__, "generators": self._epoch_generators, "loader": state_dict}
        super().load_state_dict(state_dict)

    def epoch(self, number: int, skip: int) -> Iterator[Batch]:
        """See :meth:`DataPosition.epoch`. A process that left the epoch in its middle continues with the same pass."""
        if not skip or self._restored is not None or self._pass is None:
            self._pass = _Pass(super().epoch(number, skip), skip)
        return self._pass.after(skip)

    def close(self) -> None:
        """See :meth:`DataPosition.close`."""
        self._pass = None
        super().close()

    def _is_for_all(self) -> bool:
        """A streaming data set counts the samples of all ranks, and shares out the rest to however many there are."""
        return (
            super()._is_for_all()
            or is_streaming(self._stateful)
            or is_streaming(getattr(self._loader, "dataset", None))
        )

    def _start(self, skip: int, saved: StateDict | None) -> Iterator[Batch]:
        self._has_state = True
        if saved is None or saved["loader"] is None:
            return self._begin()
        before, own = rng.capture(), self._held.generator_states()
        if skip and self._is_given_again(saved["loader"]):
            batches = self._begin()
            _replay(batches, skip, type(self._loader).__name__)
            return batches
        self._stateful.load_state_dict(saved["loader"])
        if skip:
            batches = self._begin()
            if _is_over(saved["loader"]):
                batches = iter(())
            # It may draw from a generator of the user's again or not; the next epoch resumes from where that stood.
            self._set_generators(saved.get("generators_now", saved["generators"]))
            return _without_drawing_a_seed(self._loader, batches)
        # Some loaders restore the epoch that is over when they are asked for their state, and draw for it once more.
        # The new epoch then begins with the generators as they were, as it does in a process that lived on.
        self._own_state()
        rng.restore([before])
        self._set_generators(own)
        return self._not_empty(self._begin(), before, own)

    def _is_given_again(self, state: Any) -> bool:
        """Return true if torchdata's loader would begin again, for some of its workers, what these have given whole.

        It asks all of them for another batch in any case; the data set of those starts anew after its end.
        """
        dataset: Any = getattr(self._loader, "dataset", None)
        workers = _workers_in(state)
        done = [worker.get("dataset_state") for worker in workers if _has_ended(worker)]
        if not done or len(done) == len(workers) or not isinstance(dataset, Stateful):
            return False
        fresh = dataset.state_dict()
        return any(same(one, fresh) for one in done)

    def finish_epoch(self, *, exhausted: bool) -> None:
        """See :meth:`DataPosition.finish_epoch`."""
        super().finish_epoch(exhausted=exhausted)
        self._pass = None
        # A loader that was left in the middle starts the next epoch afresh: its state speaks of the one that is over.
        self._has_state = exhausted or is_streaming(self._stateful)
        self._was_left = not self._has_state

    def _rejoin(self, saved: StateDict) -> None:
        if saved.get("was_left") and self._may_keep_its_place():
            log.warning(
                "the last epoch of the interrupted run ended before its data, and the next one begins at the beginning "
                "of the %s. If that keeps its place from one pass to the next, this is not the run that was "
                "interrupted: data are given again. Have it end each pass itself, without train_subset_num_batches, "
                "and its state is restored.",
                type(self._stateful).__name__,
            )
        super()._rejoin(saved)

    def _may_keep_its_place(self) -> bool:
        """Return true if a pass that follows one that was left may continue where that was: nobody can tell before."""
        loader: Any = self._loader
        if not isinstance(loader, DataLoader):
            return True
        stays = loader.num_workers == 0 or loader.persistent_workers  # other workers begin with a copy each time
        return stays and isinstance(loader.dataset, IterableDataset) and isinstance(loader.dataset, Stateful)

    def _own_state(self) -> StateDict:
        if not self._has_state:
            return {"loader": None, "was_left": True} if self._was_left else {"loader": None}
        if is_streaming(self._stateful):
            done = int(self._timestamp().sample_in_epoch)
            saved = self._stateful.state_dict(num_samples=done, from_beginning=True)
            if not done and "epoch" in saved and self._epoch_rng is None:
                saved = {**saved, "epoch": saved["epoch"] + 1}  # it names the one it gave last, which is over
        else:
            saved = self._stateful.state_dict()
        return {"loader": saved, "generators_now": self._held.generator_states()}


@final
class _Pass:
    """One iteration of a loader that cannot be begun again in its middle, for training to come back to."""

    def __init__(self, batches: Iterator[Batch], given: int) -> None:
        self._batches = batches
        self._given = given
        self._last: Batch = None

    def after(self, count: int) -> Iterator[Batch]:
        """Return the batches after the first ``count``: training may have failed on the last one that was given."""
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


def _is_over(state: Any) -> bool:
    """Return true if ``state`` of torchdata's loader says that all of its workers have given their last batch.

    torchdata asks them for another one in any case, and a data set that starts anew after its end would give it.
    """
    workers = _workers_in(state)
    return bool(workers) and all(map(_has_ended, workers))


def _workers_in(state: Any) -> list[StateDict]:
    """States of the workers in ``state`` of torchdata's loader; none in another one."""
    parts: list[Any] = [one for one in state.values() if isinstance(one, dict)] if isinstance(state, dict) else []
    return [worker for part in parts for worker in (part.get("_worker_snapshots") or {}).values()]


def _has_ended(worker: StateDict) -> bool:
    return (worker.get("fetcher_state") or {}).get("fetcher_ended") is True
