"""The training data and the position in it.

A resumed run must see exactly the batches that the interrupted one would have seen. What that takes depends on the
loader; :func:`position_in` chooses (``docs/adr/0001-data-position.md`` says why):

* a plain ``DataLoader`` over a map-style data set: :class:`IndexedPosition` puts the generators where they were when
  the epoch began, draws the same indices, and skips those already seen without loading them;
* a loader with ``state_dict`` and ``load_state_dict``, or over a streaming data set: :class:`StatefulPosition` lets it
  restore itself;
* anything else: :class:`ReplayPosition` asks it for the batches already seen and throws them away.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from composerlite.checkpoint import rng
from composerlite.core import DataSpec, Timestamp
from composerlite.errors import IncompatibleCheckpointError
from composerlite.trainer.generators import generator_state, generators_of, set_generator_state
from composerlite.trainer.index_sampler import IndexSampler, ReseedingDataset
from composerlite.types import Batch, StateDict, Stateful

__all__ = ["DataPosition", "IndexedPosition", "ReplayPosition", "StatefulPosition", "position_in"]

log = logging.getLogger(__name__)


def position_in(spec: DataSpec, *, seed: int, timestamp: Callable[[], Timestamp]) -> DataPosition:
    """How to iterate over ``spec.dataloader`` so that a resume is exact.

    Args:
        spec: the training data.
        seed: of this rank; seeds worker processes.
        timestamp: tells where training stands.
    """
    loader = spec.dataloader
    if isinstance(loader, Stateful):
        return StatefulPosition(loader, loader, timestamp)
    dataset = getattr(loader, "dataset", None)
    if _is_streaming(dataset):
        return StatefulPosition(loader, dataset, timestamp)
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if plain and not isinstance(dataset, IterableDataset) and not spec.replay_on_resume:
        return IndexedPosition(loader, timestamp, seed=seed)  # type: ignore[arg-type]
    return ReplayPosition(loader)


class DataPosition(ABC):
    """Iterates over the training data, epoch by epoch, and knows where it is.

    ``state_dict`` is called between two batches. ``load_state_dict`` is called before the first epoch; the epoch that
    it speaks of is then iterated from where it was.
    """

    def __init__(self, loader: Iterable[Batch]) -> None:
        self._loader = loader
        self._generators = generators_of(loader)
        self._epoch_rng: dict[str, Any] | None = None
        self._epoch_generators = self._generator_states()
        self._restored: StateDict | None = None

    def epoch(self, number: int, skip: int) -> Iterator[Batch]:
        """The batches of epoch ``number`` from batch ``skip`` on. The generators stand afterwards where they stood.

        Args:
            number: epochs completed before.
            skip: batches of this epoch already trained on.

        Raises:
            IncompatibleCheckpointError: the loader does not give the batches that it gave before.
        """
        self._set_epoch(number)
        if not skip:
            self._epoch_rng = rng.capture()
            self._epoch_generators = self._generator_states()
            return self._start(0)
        now = rng.capture()
        if self._epoch_rng is None:
            log.warning(
                "the checkpoint does not tell how epoch %d began: a shuffled loader gives another order from here on",
                number,
            )
            self._epoch_rng = now
        rng.restore([self._epoch_rng])
        self._set_generators(self._epoch_generators)
        batches = self._start(skip)
        rng.restore([now])
        return batches

    def finish_epoch(self, *, exhausted: bool) -> None:
        """The epoch is over: what comes next is the start of another.

        Args:
            exhausted: the loader itself said so; else training had enough of it.
        """
        self._epoch_rng = None
        self._epoch_generators = self._generator_states()

    def state_dict(self) -> StateDict:
        """How the current epoch began, and what else the kind of loader needs."""
        if self._restored is not None:
            return self._restored  # loaded and not used yet
        epoch_rng = {} if self._epoch_rng is None else {"epoch_rng": self._epoch_rng}
        return {"kind": type(self).__name__, **epoch_rng, "generators": self._epoch_generators, **self._own_state()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take back what :meth:`state_dict` gave.

        Raises:
            IncompatibleCheckpointError: it was given by another kind of loader.
        """
        kind = state_dict.get("kind")
        if kind != type(self).__name__:
            raise IncompatibleCheckpointError(
                f"the checkpoint's position in the data ({kind}) is not that of a {type(self._loader).__name__} "
                f"({type(self).__name__}). Use the kind of loader of that run; or start the epoch's data afresh with "
                "spin_dataloaders=False and load_ignore_keys=['state/dataset_state']."
            )
        self._epoch_rng = state_dict.get("epoch_rng")
        self._epoch_generators = state_dict["generators"]
        self._set_generators(self._epoch_generators)
        self._restored = state_dict

    def close(self) -> None:
        """Let go of what iterates over the loader. Persistent workers end at once; garbage collection would wait."""

    @abstractmethod
    def _start(self, skip: int) -> Iterator[Batch]:
        """Begin the epoch at batch ``skip``. The generators are where they were when it began the first time."""

    @abstractmethod
    def _own_state(self) -> StateDict:
        """What this kind of position saves besides generators."""

    def _set_epoch(self, number: int) -> None:
        """Tell the samplers that shuffle by epoch number, as DistributedSampler does."""
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        for sampler in (getattr(self._loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(number)

    def _generator_states(self) -> list[Any]:
        return [generator_state(generator) for generator in self._generators]

    def _set_generators(self, states: Sequence[Any]) -> None:
        if len(states) != len(self._generators):
            raise IncompatibleCheckpointError(
                f"the checkpoint's data loader had {len(states)} generators of its own and this one has "
                f"{len(self._generators)}: build the loader as in that run."
            )
        for generator, state in zip(self._generators, states, strict=True):
            set_generator_state(generator, state)


@final
class IndexedPosition(DataPosition):
    """A plain DataLoader over a map-style data set: batches already seen are skipped by index, without loading them.

    In worker processes the generators are seeded for each batch from (seed, epoch, batch), so that random transforms of
    a batch do not depend on which batches the worker loaded before.
    """

    def __init__(self, loader: DataLoader[Any], timestamp: Callable[[], Timestamp], *, seed: int) -> None:
        super().__init__(loader)
        self._loader: DataLoader[Any] = loader
        self._timestamp = timestamp
        if loader.num_workers and not getattr(loader, "in_order", True):
            log.warning("DataLoader(in_order=False): the order of batches depends on timing, a resume is not exact")
        self._sampler = IndexSampler(loader)
        # The user's loader is left as it is: DataLoader forbids to change it, and others may iterate over it.
        own = copy.copy(loader)
        vars(own)["_iterator"] = None
        vars(own)["batch_sampler" if loader.batch_sampler is not None else "sampler"] = self._sampler
        if loader.num_workers:
            vars(own)["dataset"] = ReseedingDataset(loader.dataset, seed)
        if loader.persistent_workers:
            own.generator = torch.Generator()  # draws the workers' seed, which says nothing: see _start
        self._own = own
        self._number = 0

    def epoch(self, number: int, skip: int) -> Iterator[Batch]:
        """See :meth:`DataPosition.epoch`. The order of indices is compared with that of the interrupted run."""
        self._number = number
        return super().epoch(number, skip)

    def close(self) -> None:
        """See :meth:`DataPosition.close`."""
        vars(self._own)["_iterator"] = None

    def _start(self, skip: int) -> Iterator[Batch]:
        drawn = self._own_state() if self._restored is None else self._restored
        self._restored = None
        self._sampler.begin(self._number, skip, drawn.get("drawn", 0) if skip else 0)
        if self._own.persistent_workers and self._number == 0:
            # A loader draws a seed when it starts its workers. Those that persist start in the first epoch, or wherever
            # a resume finds itself; what training sees must not depend on it.
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        batches = _fetched(self._own) if _loads_in_process(self._own) else iter(self._own)
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
        return {"drawn": self._sampler.drawn, "indices": self._sampler.digest}


def _loads_in_process(loader: DataLoader[Any]) -> bool:
    standard = type(loader)._get_iterator is DataLoader._get_iterator  # pyright: ignore[reportPrivateUsage]
    sharded = isinstance(loader.dataset, MapDataPipe)  # by the loader's iterator
    return loader.num_workers == 0 and not loader.pin_memory and standard and not sharded


def _fetched(loader: DataLoader[Any]) -> Iterator[Batch]:
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


@final
class StatefulPosition(DataPosition):
    """A loader (or streaming data set) that saves and restores its own position."""

    def __init__(self, loader: Iterable[Batch], stateful: Any, timestamp: Callable[[], Timestamp]) -> None:
        super().__init__(loader)
        self._stateful = stateful
        self._timestamp = timestamp
        self._has_state = False
        self._pass: _Pass | None = None

    def load_state_dict(self, state_dict: StateDict) -> None:
        """See :meth:`DataPosition.load_state_dict`. Composer saves the bare state of a streaming data set."""
        if "kind" not in state_dict and _is_streaming(self._stateful):
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

    def _start(self, skip: int) -> Iterator[Batch]:
        restored, self._restored = self._restored, None
        self._has_state = True
        if restored is None or restored["loader"] is None:
            return iter(self._loader)
        before, own = rng.capture(), self._generator_states()
        self._stateful.load_state_dict(restored["loader"])
        if skip:
            batches = iter(self._loader)
            # It may draw from a generator of the user's again or not; the next epoch goes on from where that stood.
            self._set_generators(restored.get("generators_now", restored["generators"]))
            return _without_drawing_a_seed(self._loader, batches)
        # Some loaders restore the epoch that is over when they are asked for their state, and draw for it once more.
        # The new epoch then begins with the generators as they were, as it does in a process that lived on.
        self._own_state()
        rng.restore([before])
        self._set_generators(own)
        return self._not_empty(iter(self._loader), before, own)

    def _not_empty(self, batches: Iterator[Batch], before: dict[str, Any], own: list[Any]) -> Iterator[Batch]:
        """``batches``; those of the next pass if there are none: some loaders end the restored epoch once more."""
        first = list(itertools.islice(batches, 1))
        if not first:
            rng.restore([before])
            self._set_generators(own)
            batches = iter(self._loader)
        yield from itertools.chain(first, batches)

    def finish_epoch(self, *, exhausted: bool) -> None:
        """See :meth:`DataPosition.finish_epoch`."""
        super().finish_epoch(exhausted=exhausted)
        self._pass = None
        # A loader that was left in the middle starts the next epoch afresh: its state speaks of the one that is over.
        self._has_state = exhausted or _is_streaming(self._stateful)

    def _own_state(self) -> StateDict:
        if not self._has_state:
            return {"loader": None}
        if _is_streaming(self._stateful):
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


@final
class ReplayPosition(DataPosition):
    """Anything else that can be iterated: the batches already seen are loaded again and thrown away."""

    def _start(self, skip: int) -> Iterator[Batch]:
        batches = iter(self._loader)
        self._restored = None
        if isinstance(self._loader, Sequence):
            return itertools.islice(batches, skip, None)
        if skip:
            _replay(batches, skip, type(self._loader).__name__)
        return batches

    def _own_state(self) -> StateDict:
        return {}


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


def _is_streaming(dataset: Any) -> bool:
    """Whether ``dataset`` restores itself by sample count, as MosaicML's StreamingDataset does."""
    state_dict = getattr(dataset, "state_dict", None)
    if not callable(state_dict) or not callable(getattr(dataset, "load_state_dict", None)):
        return False
    return {"num_samples", "from_beginning"} <= inspect.signature(state_dict).parameters.keys()
