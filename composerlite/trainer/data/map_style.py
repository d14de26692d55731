"""MapStylePosition: position in a plain ``DataLoader`` over a map-style data set, on one or several ranks."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Generator, Iterator
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from composerlite import dist
from composerlite._torch_compat import forget_workers, is_iterated_by_torch
from composerlite.core import Timestamp
from composerlite.devices import rng
from composerlite.errors import IncompatibleCheckpointError
from composerlite.trainer.data.held import Held
from composerlite.trainer.data.position import DataPosition
from composerlite.trainer.data.samplers import GlobalSampler, ReseedingDataset, Share
from composerlite.types import Batch, StateDict

__all__ = ["MapStylePosition"]

log = logging.getLogger(__name__)


@final
class MapStylePosition(DataPosition):
    """Position in the order of samples. A resume draws the order again and skips trained samples without loading them.

    The position counts samples, so the rest of an epoch can be trained in batches of another size and, if
    ``is_shared``, by another number of ranks.

    One process draws the order from the generators of training, as a plain loop over the loader does. Several ranks
    draw the same order from a stream of their own: it starts as the generators of rank 0 at the first epoch.

    In worker processes each sample seeds the generators from the seed of the run, the epoch and the place in the order,
    so random transforms do not depend on the number of workers and ranks.

    Args:
        loader: training data.
        timestamp: returns the current training time.
        seed: seed for worker processes. ``None`` for evaluation: workers keep their seeds and end after the epoch.
        share: part of the data for this rank.
        is_shared: all ranks draw the same order and divide it. False if the sampler of the user divides it.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        timestamp: Callable[[], Timestamp],
        *,
        seed: int | None,
        share: Share,
        is_shared: bool,
    ) -> None:
        held = Held(loader, leave_out=[loader.dataset, loader.collate_fn])
        super().__init__(loader, held, timestamp, share)
        self._loader: DataLoader[Any] = loader
        self._is_shared = is_shared
        self._data = Held({"dataset": loader.dataset, "collate_fn": loader.collate_fn}, leave_out=held.generators)
        self._sampler = GlobalSampler(loader, share if is_shared else Share(), self._drawing)
        self._begun_at = 0
        self._begun_done = 0
        if loader.num_workers and not getattr(loader, "in_order", True):
            log.warning("DataLoader(in_order=False): the order of batches depends on timing, a resume is not exact")
        self._own = copy.copy(loader)  # other code may iterate over the loader of the user
        forget_workers(self._own)
        self._worker_generator = self._own.generator = torch.Generator()
        vars(self._own)["sampler" if loader.batch_sampler is None else "batch_sampler"] = self._sampler
        if seed is None:
            vars(self._own)["persistent_workers"] = False
        elif loader.num_workers:
            vars(self._own)["dataset"] = ReseedingDataset(loader.dataset, seed)

    def epoch(self, number: int, skip: int) -> Iterator[Batch]:
        """Start or resume an epoch. The first call is collective if all ranks share the order.

        Args:
            number: completed epochs.
            skip: batches of this epoch that are already trained on.

        Returns:
            Iterator over the remaining batches.

        Raises:
            IncompatibleCheckpointError: the order of samples differs from the order before the checkpoint.
        """
        if self._is_shared and self._stream is None:  # users may have seeded each rank in another way
            stream = _on_cpu(rng.capture())
            packed = rng.packed({"stream": stream, "generators": self._held.generator_states()}).numpy().tobytes()
            agreed = rng.unpacked(torch.frombuffer(bytearray(dist.get_group().broadcast(packed)), dtype=torch.uint8))
            self._stream = agreed["stream"]
            self._held.set_generators(agreed["generators"])
        return super().epoch(number, skip)

    def __next__(self) -> Batch:
        batch = super().__next__()
        if self._sampler.paddings:
            self.is_padding = self._sampler.paddings.popleft()
        return batch

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a position of any number of ranks. The data set gets its state at the time of the checkpoint.

        Args:
            state_dict: result of :meth:`state_dict`.

        Raises:
            IncompatibleCheckpointError: the position is of another kind of loader.
        """
        super().load_state_dict(state_dict)
        saved = self._restored or {}
        if "rng" in saved and (self._is_shared or saved["is_shared"]):
            self._stream = _on_cpu(saved["rng"])
        if data := saved.get("data"):
            self._data.set_generators(data["generators"])
            self._data.load(data["states"])

    def batches_in_epoch(self) -> int | None:
        """Return the number of batches in the current epoch; ``None`` to use the length of the loader."""
        if not self._in_epoch:
            self._begun_at = self._begun_done = 0
        try:
            return self._begun_at + self._sampler.batches_after(self._begun_done)
        except (TypeError, NotImplementedError):
            return None

    def close(self) -> None:
        """Drop the live iterator, and end persistent workers at once."""
        super().close()
        forget_workers(self._own)

    def _begin(self, skip: int, saved: StateDict | None) -> Iterator[Batch]:
        unit = "samples" if self._sampler.counts_samples else "batches"
        where: StateDict = {} if saved is None or not skip else saved
        if where.get("unit", unit) != unit:
            raise IncompatibleCheckpointError(
                f"the interrupted run counted its data in {where['unit']}, this one counts {unit}: a batch_sampler was "
                "added or removed. Build the loader as in that run; or start the epoch's data afresh with "
                "spin_dataloaders=False."
            )
        done = where.get("done", skip * self._sampler.global_batch)
        drawn = where.get("drawn", done)
        self._draw_worker_seed()
        digest = self._sampler.begin(self._number, done, drawn)
        if self._sampler.drawn != drawn or digest != where.get("order", digest):
            raise IncompatibleCheckpointError(
                "the data loader gives another order of samples than in the interrupted run "
                f"(epoch {self._number}, first {done} {unit}). The data set or sampler has changed, or the sampler "
                "draws from a generator that is shared with training: give it a generator of its own. Or the sampler "
                "keeps a state that no checkpoint has: give it state_dict() and load_state_dict(). To continue "
                "regardless, pass spin_dataloaders=False."
            )
        if saved is not None and saved["states"] and not skip and not self._sampler.has_next():
            self._held.load(self._fresh)  # the saved state was the end of the last pass
            self._sampler.begin(self._number)
        if self._stream is not None:
            self._stream = _on_cpu(rng.capture())
        self._begun_at, self._begun_done = int(self._timestamp().batch_in_epoch), done
        return _batches_of(self._own)

    def _own_state(self) -> StateDict:
        own: StateDict = {"is_shared": self._stream is not None}
        if not self._is_shared and (self._data.generators or self._data.states()):
            own["data"] = {"generators": self._data.generator_states(), "states": self._data.states()}
        trained = int(self._timestamp().batch_in_epoch)
        if self._in_epoch and trained:
            sampler = self._sampler
            done = min(self._begun_done + (trained - self._begun_at) * sampler.global_batch, sampler.drawn)
            unit = "samples" if sampler.counts_samples else "batches"
            # Workers have drawn ahead of training. The resume draws as much, before training draws again.
            own.update(unit=unit, done=done, drawn=sampler.drawn, order=sampler.digest)
        return own

    def _depends_on_workers(self, before: int, now: int) -> bool:
        return (before == 0) != (now == 0)

    def _is_for_all(self) -> bool:
        return self._is_shared or super()._is_for_all()

    def _set_epoch(self, number: int) -> None:
        self._sampler.set_epoch(number)
        super()._set_epoch(number)

    def _draw_worker_seed(self) -> None:
        """Draw the seed of the workers as ``iter(loader)`` does: each epoch, or once for persistent workers.

        Persistent workers start in the first epoch or at a resume; the draw must not depend on that.
        """
        if not self._own.persistent_workers or self._number == 0:
            seed = torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
            self._worker_generator.manual_seed(int(seed))

    @contextlib.contextmanager
    def _drawing(self) -> Generator[None]:
        """Draw from the stream of all ranks within the block; in one process from the generators of training."""
        if self._stream is None:
            yield
            return
        own = rng.capture()
        rng.restore([self._stream])
        try:
            yield
        finally:
            self._stream = _on_cpu(rng.capture())
            rng.restore([own])


def _on_cpu(states: dict[str, Any]) -> dict[str, Any]:
    return {name: states[name] for name in ("python", "numpy", "torch")}


def _batches_of(loader: DataLoader[Any]) -> Iterator[Batch]:
    """Iterate like ``iter(loader)``. Without workers, skip the profiler record that torch makes for each batch.

    The record costs more than a step of the training loop, with and without a profiler.
    """
    if loader.num_workers or loader.pin_memory or not is_iterated_by_torch(loader):
        return iter(loader)
    dataset: Any = loader.dataset
    collate = loader.collate_fn
    batch_sampler = loader.batch_sampler
    if batch_sampler is None:
        return (collate(dataset[index]) for index in loader.sampler)
    if fetch := getattr(dataset, "__getitems__", None):
        return (collate(fetch(indices)) for indices in batch_sampler)
    return (collate([dataset[index] for index in indices]) for indices in batch_sampler)
