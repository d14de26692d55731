"""The position in a plain DataLoader over a map-style data set: samples already seen are skipped by index."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, final

import torch
from torch.utils.data import BatchSampler, DataLoader, MapDataPipe, Subset, default_collate

from composerlite import dist
from composerlite._torch_compat import forget_workers, is_iterated_by_torch
from composerlite.core import Timestamp
from composerlite.devices import rng
from composerlite.errors import IncompatibleCheckpointError
from composerlite.trainer.data.held import (
    Pairs,
    draws_from_generators_alone,
    held_by_data,
    held_by_order,
    tell_of_lacking,
)
from composerlite.trainer.data.order import PastOrder, other_order
from composerlite.trainer.data.position import DataPosition, RewindingPosition
from composerlite.trainer.data.samplers import GlobalSampler, IndexSampler, ReseedingDataset, SavedBatches, Share
from composerlite.trainer.data.states import set_generator_state
from composerlite.types import Batch, StateDict

__all__ = ["DealtPosition", "IndexedPosition"]

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
        held = held_by_order(loader)
        super().__init__(loader, held, share)
        self._loader: DataLoader[Any] = loader
        self._timestamp = timestamp
        self._data = held_by_data(loader, held)
        self._past = None if draws_from_generators_alone(loader) else PastOrder(held)
        self._sampler = IndexSampler(loader)
        self._drawn: StateDict = {}
        self._own = _with_sampler(loader, self._sampler, seed)
        if loader.persistent_workers:
            self._own.generator = torch.Generator()  # draws the workers' seed, which says nothing: see _start

    def close(self) -> None:
        """See :meth:`DataPosition.close`."""
        forget_workers(self._own)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """See :meth:`DataPosition.load_state_dict`. The data set stands where it stood, not where the epoch began."""
        super().load_state_dict(state_dict)
        assert self._restored is not None
        data: StateDict = self._restored.get("data", {})
        if len(states := data.get("generators", [])) == len(self._data.generators):
            for generator, state in zip(self._data.generators, states, strict=True):
                set_generator_state(generator, state)
        self._data.load(data.get("states", []))
        tell_of_lacking(self._data, data, data.get("generators", []))
        if self._past is not None:
            self._past.load_state_dict(self._restored)

    def finish_epoch(self, *, exhausted: bool) -> None:
        """See :meth:`DataPosition.finish_epoch`."""
        if self._past is not None and self._epoch_rng is not None:
            order = {"drawn": self._sampler.drawn, "indices": self._sampler.digest, "batch_size": self._batch_size}
            start = {"rng": _on_cpu(self._epoch_rng), "states": self._epoch_held.get("states", [])}
            self._past.note({**order, "ended": exhausted}, generators=self._epoch_generators, **start)
        super().finish_epoch(exhausted=exhausted)

    @property
    def _batch_size(self) -> int | None:
        batch_sampler = self._loader.batch_sampler
        return batch_sampler.batch_size if type(batch_sampler) is BatchSampler else None

    def _depends_on_workers(self, before: int, now: int) -> bool:
        return (before == 0) != (now == 0)  # workers seed each batch, whichever of them loads it

    def _rejoin(self, saved: StateDict) -> None:
        self._data.tell_of_counts(saved.get("data", {}))
        if self._past is not None and self._number:
            self._past.rejoin(self._number - 1, saved.get("held", {}), self._fresh, self._draw_last)
        super()._rejoin(saved)

    def _draw_last(self, last: StateDict, states: Pairs) -> tuple[StateDict, bool] | None:
        """See :meth:`PastOrder.rejoin`."""
        number, noted = self._number - 1, last["order"]
        if noted["batch_size"] != self._batch_size:
            return None
        self._held.load(states)
        self._set_epoch(number)
        rng.restore([last["rng"]])
        self._set_generators(last["generators"])
        self._draw_seed_of_workers(number)
        self._sampler.begin(number, 0)
        drawing = itertools.islice(self._sampler, noted["drawn"] + 1 if noted["ended"] else noted["drawn"])
        deque(itertools.islice(drawing, 1), maxlen=0)
        before = rng.packed(_on_cpu(rng.capture()))
        deque(drawing, maxlen=0)
        order = {"drawn": self._sampler.drawn, "indices": self._sampler.digest}
        is_shared = not torch.equal(before, rng.packed(_on_cpu(rng.capture())))
        return {**noted, **order}, is_shared

    def _draw_seed_of_workers(self, number: int) -> None:
        """Draw the seed that a loader draws when it starts its workers: each epoch, or in the first if they persist."""
        if not self._own.persistent_workers or number == 0:
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)

    def _resume(self, skip: int, saved: StateDict | None) -> Iterator[Batch]:
        self._drawn = self._own_state() if saved is None else saved
        return super()._resume(skip, saved)

    def _start(self, skip: int, saved: StateDict | None) -> Iterator[Batch]:
        """Begin the epoch. The order of indices is compared with that of the interrupted run."""
        self._sampler.begin(self._number, skip, self._drawn.get("drawn", 0) if skip else 0)
        if self._own.persistent_workers:
            # A loader draws a seed when it starts its workers. Those that persist start in the first epoch, or wherever
            # a resume finds itself; what training sees must not depend on it.
            self._draw_seed_of_workers(self._number)
        batches = _fetched(self._own)
        if skip:
            digest = self._sampler.draw_again()
            if digest != self._drawn.get("indices", digest):
                raise other_order(f"epoch {self._number}, first {skip} batches", self._suspects)
        return batches

    def _own_state(self) -> StateDict:
        is_between = int(self._timestamp().batch_in_epoch) == 0
        past = {} if self._past is None else self._past.state_dict(between=is_between)
        data = {**self._data.state_dict(), "generators": self._data.generator_states()}
        if not self._data.generators:
            del data["generators"]
        own = {**past, "data": data} if data else past
        if is_between or self._sampler.drawn == 0:
            return own
        return {**own, "drawn": self._sampler.drawn, "indices": self._sampler.digest, "batch_size": self._batch_size}


_REMEMBERED = 64  # batches that were given and are perhaps not yet trained on


@final
class DealtPosition(DataPosition):
    """Position in data of which every rank draws the same order and loads its share of each global batch.

    The position in the order is saved: the rest can be partitioned among another number of ranks, in batches of
    another size. The samplers draw from generators that are the same on every rank and that training does not draw
    from: they start where those of rank 0 stand when the first epoch begins, so that the order is that of one process.

    In worker processes the generators are seeded for each sample from (seed, epoch, place in the order), so that random
    transforms of a sample do not depend on the number of ranks.
    """

    def __init__(
        self, loader: DataLoader[Any], timestamp: Callable[[], Timestamp], *, seed: int | None, share: Share
    ) -> None:
        """``seed`` is that of the run; ``None`` leaves workers as they are, and they end with each epoch."""
        held = held_by_order(loader)
        super().__init__(loader, held, share)
        self._loader: DataLoader[Any] = loader
        self._timestamp = timestamp
        self._past = None if draws_from_generators_alone(loader) else PastOrder(held)
        self._sampler = GlobalSampler(loader, share, self._drawing)
        self._own = _with_sampler(loader, self._sampler, seed)
        self._own.generator = torch.Generator()
        if seed is None:
            vars(self._own)["persistent_workers"] = False
        self._stream: dict[str, Any] | None = None
        self._agreed = False
        self._number = 0
        self._begun_at = 0
        self._given = 0
        self._reached: deque[tuple[int, int, int]] = deque(maxlen=_REMEMBERED)

    def epoch(self, number: int, skip: int) -> Iterator[Batch]:
        """See :meth:`DataPosition.epoch`. The order is compared with that of the interrupted run."""
        self._number = number
        self._agree()
        restored = self._restored
        if skip and self._epoch_rng is None:
            log.warning("the checkpoint has no start of epoch %d: the order of samples may differ from here on", number)
        if restored is not None and not skip:
            self._rejoin(restored)
        states, others = self._states_of_epoch(skip)
        where = self._where(skip) if skip else (0, 0, None)
        try:
            found = self._begin(skip, where, states)
        except IncompatibleCheckpointError:
            if others is None:
                raise
            found = self._begin(skip, where, others)  # the state was one of a pass that was over
        if restored is not None:
            self._held.tell_of_counts(self._epoch_held)
        self._restored = None
        self._begun_at = int(self._timestamp().batch_in_epoch)
        self._given = 0
        self._reached.clear()
        self._reached.append((self._begun_at, self._sampler.done, found))
        return self._counted(_fetched(self._own))

    def _states_of_epoch(self, skip: int) -> tuple[Pairs, Pairs | None]:
        """States with which the epoch begins, and others to try; none are loaded where it does not begin again."""
        states = self._epoch_held.get("states") if skip else None
        if not states:
            return [], None
        return states, self._held.states() if self._restored is None else self._fresh

    def _begin(self, skip: int, where: tuple[int, int | None, SavedBatches | None], states: Pairs) -> int:
        """Begin the epoch after what is done of it; the digest of that. The order is compared."""
        done, digest, saved = where
        self._held.load(states)
        self._set_epoch(self._number)
        if skip and self._epoch_rng is not None:
            self._stream = self._epoch_rng
            self._set_generators(self._epoch_generators)
        self._epoch_rng = self._stream
        if not skip:
            self._note_start()
        self._in_epoch = True
        suspects = self._held.suspects(self._epoch_held)
        with self._drawing():
            self._draw_seed_of_workers(self._number)
            found = self._sampler.begin(done, saved)
        if found is None or (digest is not None and (self._sampler.done, found) != (done, digest)):
            raise other_order(f"epoch {self._number}, first {done} {self._unit}", suspects)
        return found

    def _rejoin(self, restored: StateDict) -> None:
        """The next epoch follows on one that is over: have the samplers stand as they stood then."""
        stream, generators = self._stream, self._held.generator_states()
        if self._number:
            if self._past is not None:
                self._past.rejoin(self._number - 1, restored.get("held", {}), self._fresh, self._draw_last)
            self._set_epoch(self._number - 1)
        self._held.tell_of_counts(restored.get("held", {}))
        self._stream = stream
        self._set_generators(generators)

    def _draw_last(self, last: StateDict, states: Pairs) -> tuple[StateDict, bool] | None:
        """See :meth:`PastOrder.rejoin`. That of a run of one process is drawn as well."""
        noted = last["order"]
        of_one = "drawn" in noted
        assert self._past is not None
        if not of_one and noted["unit"] != self._unit:
            return None
        self._held.load(states)
        self._set_epoch(self._number - 1)
        self._stream = last["rng"]
        self._set_generators(last["generators"])
        with self._drawing():
            self._draw_seed_of_workers(self._number - 1)
            self._sampler.begin(0 if of_one else noted["done"])
            known = [one for one in (noted, self._past.first) if of_one and one is not None and "drawn" in one]
            found = [one for one in known if self._sampler.begins_with(_batches_in(one))]
            if noted["ended"]:
                self._sampler.draw_rest()
        if of_one:
            return found[0] if found else {}, not found  # training may have drawn from the same generators then
        return {**noted, "done": self._sampler.done, "order": self._sampler.digest}, False

    def _draw_seed_of_workers(self, number: int) -> None:
        """Draw the seed that a loader draws when it starts its workers: each epoch, or in the first if they persist."""
        if not self._own.persistent_workers or number == 0:
            seed = torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
            assert self._own.generator is not None
            self._own.generator.manual_seed(int(seed))

    def _set_epoch(self, number: int) -> None:
        self._sampler.set_epoch(number)
        super()._set_epoch(number)

    def batches_in_epoch(self) -> int | None:
        """See :meth:`DataPosition.batches_in_epoch`. Those done may have been of another size."""
        try:
            if not self._reached:
                return len(self._sampler)
            return self._reached[0][0] + self._sampler.batches_after(self._reached[0][1])
        except (TypeError, NotImplementedError):
            return None

    def knows_samples(self) -> bool:
        """See :meth:`DataPosition.knows_samples`. A ``collate_fn`` of the user's may leave samples out."""
        dataset: Any = self._loader.dataset
        while type(dataset) is Subset:
            dataset = dataset.dataset
        whole = self._loader.collate_fn is default_collate and not hasattr(dataset, "__getitems__")
        return whole and self._sampler.counts_samples

    def finish_epoch(self, *, exhausted: bool) -> None:
        """See :meth:`DataPosition.finish_epoch`."""
        if self._past is not None and self._epoch_rng is not None:
            order = {"done": self._sampler.done, "order": self._sampler.digest, "unit": self._unit, "ended": exhausted}
            start = {"rng": self._epoch_rng, "states": self._epoch_held.get("states", [])}
            self._past.note(order, generators=self._epoch_generators, **start)
        super().finish_epoch(exhausted=exhausted)
        self._epoch_rng = self._stream
        self._reached.clear()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """See :meth:`DataPosition.load_state_dict`. The state of a run of one process is understood as well."""
        super().load_state_dict(state_dict)
        self._stream = self._epoch_rng
        if self._past is not None:
            self._past.load_state_dict(state_dict)

    def close(self) -> None:
        """See :meth:`DataPosition.close`."""
        forget_workers(self._own)

    @property
    def _unit(self) -> str:
        return "samples" if self._sampler.counts_samples else "batches"

    def _accepts(self, kind: object) -> bool:
        return kind in ("DealtPosition", "IndexedPosition")

    def _is_for_all(self) -> bool:
        return True

    def _depends_on_workers(self, before: int, now: int) -> bool:
        return (before == 0) != (now == 0)

    def _own_state(self) -> StateDict:
        trained = int(self._timestamp().batch_in_epoch)
        past = {} if self._past is None else self._past.state_dict(between=trained == 0)
        for batches, done, digest in self._reached:
            if batches == trained and done:
                return {**past, "unit": self._unit, "done": done, "order": digest}
        return past

    def _where(self, skip: int) -> tuple[int, int | None, SavedBatches | None]:
        """Return the position in the order after ``skip`` batches; its digest; or else what one process noted."""
        saved = self._restored
        if saved is None:
            for batches, done, digest in self._reached:
                if batches == skip:
                    return done, digest, None
            saved = {}
        if "done" in saved:
            if saved["unit"] != self._unit:
                raise IncompatibleCheckpointError(
                    f"the interrupted run counted its data in {saved['unit']}, this one counts {self._unit}: a "
                    "batch_sampler was added or left out. Build the loader as in that run; or start the epoch's data "
                    "afresh with spin_dataloaders=False."
                )
            return saved["done"], saved["order"], None
        batch_size = saved.get("batch_size", self._sampler.batch_size)
        noted = _batches_in({**saved, "batch_size": batch_size}) if "drawn" in saved else None
        if noted is None:
            return skip * self._sampler.global_batch, None, None
        return skip * (batch_size or 1), None, noted

    def _agree(self) -> None:
        """Set the generators of every rank to the state of rank 0's, whatever seeds the user has given."""
        if self._agreed:
            return
        self._agreed = True
        stream = _on_cpu(rng.capture() if self._stream is None else self._stream)
        packed = rng.packed({"stream": stream, "generators": self._held.generator_states()}).numpy().tobytes()
        agreed = rng.unpacked(torch.frombuffer(bytearray(dist.get_group().broadcast(packed)), dtype=torch.uint8))
        self._stream = agreed["stream"]
        self._set_generators(agreed["generators"])

    @contextlib.contextmanager
    def _drawing(self) -> Generator[None]:
        """Python's, numpy's and torch's generators are those that all ranks draw the order from."""
        assert self._stream is not None
        own = rng.capture()
        rng.restore([self._stream])
        try:
            yield
        finally:
            self._stream = _on_cpu(rng.capture())
            rng.restore([own])

    def _counted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            part = self._sampler.parts.popleft()
            self._given += 1
            self.is_padding = part.is_padding
            self.samples = part.end - self._reached[-1][1]
            self._reached.append((self._begun_at + self._given, part.end, part.digest))
            yield batch


def _batches_in(order: StateDict) -> SavedBatches:
    return SavedBatches(order["drawn"], order["batch_size"], order["indices"])


def _on_cpu(states: dict[str, Any]) -> dict[str, Any]:
    """The generators that samplers draw from."""
    return {name: states[name] for name in ("python", "numpy", "torch")}


def _with_sampler(loader: DataLoader[Any], sampler: object, seed: int | None) -> DataLoader[Any]:
    """Copy ``loader`` with another (batch) sampler; workers seed their generators unless ``seed`` is ``None``.

    The user's loader is left as it is: DataLoader forbids to change it, and others may iterate over it.
    """
    if loader.num_workers and not getattr(loader, "in_order", True):
        log.warning("DataLoader(in_order=False): the order of batches depends on timing, a resume is not exact")
    own = copy.copy(loader)
    forget_workers(own)
    vars(own)["batch_sampler" if loader.batch_sampler is not None else "sampler"] = sampler
    if loader.num_workers and seed is not None:
        vars(own)["dataset"] = ReseedingDataset(loader.dataset, seed)
    return own


def _fetched(loader: DataLoader[Any]) -> Iterator[Batch]:
    """The batches of a loader over a map-style data set."""
    return _fetched_here(loader) if _loads_in_process(loader) else iter(loader)


def _loads_in_process(loader: DataLoader[Any]) -> bool:
    sharded = isinstance(loader.dataset, MapDataPipe)  # by the loader's iterator
    return loader.num_workers == 0 and not loader.pin_memory and is_iterated_by_torch(loader) and not sharded


def _fetched_here(loader: DataLoader[Any]) -> Iterator[Batch]:
    """Iterate over a map-style data set like ``iter(loader)``, without the profiler's record around each batch.

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
