"""DataPosition: iterate over the training data, save the position, and resume from a saved position."""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from composerlite.core import Timestamp
from composerlite.devices import rng
from composerlite.errors import IncompatibleCheckpointError
from composerlite.trainer.data.held import Held
from composerlite.trainer.data.samplers import Share
from composerlite.types import Batch, StateDict

__all__ = ["DataPosition"]

log = logging.getLogger(__name__)


class DataPosition(ABC):
    """Iterator over the training data, epoch by epoch, with a position for checkpoints.

    A position has the state of all generators and samplers at the start of the epoch, and the progress within the
    epoch. A resume restores the start of the epoch and continues after the progress. Within one process a second call
    of ``fit`` continues the live iterator.

    If each rank has a loader of its own, each rank has a position of its own. Then ``state_dict()`` has the position of
    this rank in the list ``per_rank``, and the code that saves gathers the lists of all ranks.

    Args:
        loader: training data.
        held: generators and states of the loader.
        timestamp: returns the current training time.
        share: part of the data for this rank.

    Attributes:
        is_padding: the last batch repeats a sample of another rank and must not count, because this rank has no sample
            left and other ranks have.
    """

    is_padding = False

    def __init__(self, loader: Iterable[Batch], held: Held, timestamp: Callable[[], Timestamp], share: Share) -> None:
        self._loader = loader
        self._held = held
        self._timestamp = timestamp
        self._share = share
        self._number = 0
        self._in_epoch = False
        self._was_cut = False
        self._start: StateDict = {}
        self._fresh: list[list[Any]] = []
        self._restored: StateDict | None = None
        self._stream: dict[str, Any] | None = None
        self._batches: Iterator[Batch] | None = None
        self._given = 0
        self._last: Batch = None

    @property
    def is_in_epoch(self) -> bool:
        """True between the start and the end of an epoch."""
        return self._in_epoch

    def epoch(self, number: int, skip: int) -> Iterator[Batch]:
        """Start or resume an epoch. The random generators of training are unchanged by a resume.

        Args:
            number: completed epochs.
            skip: batches of this epoch that are already trained on.

        Returns:
            Iterator over the remaining batches.

        Raises:
            IncompatibleCheckpointError: the loader does not repeat the batches before the checkpoint.
        """
        is_same = self._restored is None and number == self._number and self._given - skip in (0, 1)
        if self._batches is not None and is_same:
            if self._given > skip:  # training failed on the last batch: give the batch again
                self._given = skip
                self._batches = itertools.chain([self._last], self._batches)
            return self
        saved, self._number = self._restored, number
        training = rng.capture()
        if skip and "rng" not in self._start:
            log.warning("the checkpoint has no start of epoch %d: a shuffled order differs from here on", number)
            self._start = self._start_now()
        if skip:
            self._batches = self._resume(skip, saved)
        else:
            self._set_epoch(number)
            if self._stream is not None:
                rng.restore([self._stream])
            self._start = self._start_now()
            self._batches = self._begin(0, saved)
        if skip or self._stream is not None:
            rng.restore([training])
        self._in_epoch, self._given, self._restored = True, skip, None
        return self

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        assert self._batches is not None
        try:
            self._last = next(self._batches)
        except StopIteration:
            raise
        except BaseException:
            self._fail()
            raise
        self._given += 1
        return self._last

    def finish_epoch(self, *, exhausted: bool) -> None:
        """End the epoch.

        Args:
            exhausted: the loader has no more batches. False if ``train_subset_num_batches`` ended the epoch.
        """
        self._in_epoch, self._was_cut = False, not exhausted
        self._batches = self._last = None

    def state_dict(self) -> StateDict:
        """Return the position after the last trained batch. Not collective."""
        own = self._state_now() if self._restored is None else self._restored
        return own if self._is_for_all() else {"kind": own["kind"], "per_rank": [own]}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a position. Call before the first epoch.

        Args:
            state_dict: result of :meth:`state_dict`, with ``per_rank`` of all ranks.

        Raises:
            IncompatibleCheckpointError: the position is of another kind of loader, or of another number of ranks that
                each had a loader of its own.
        """
        kind = state_dict.get("kind")
        if kind != type(self).__name__:
            raise IncompatibleCheckpointError(
                f"the checkpoint's position in the data ({kind}) is not that of a {type(self._loader).__name__} "
                f"({type(self).__name__}). Use the kind of loader of that run; or start the epoch's data afresh with "
                "spin_dataloaders=False and load_ignore_keys=['state/dataset_state']."
            )
        if not self._is_for_all() or "per_rank" in state_dict:
            state_dict = self._of_this_rank(state_dict)
        before, now = state_dict.get("num_workers"), getattr(self._loader, "num_workers", None)
        if before is not None and now is not None and self._depends_on_workers(before, now):
            log.warning(
                "the interrupted run loaded its data with num_workers=%d and this one has num_workers=%d: random "
                "transforms draw other numbers, and an iterable data set may give another order, so this resume is "
                "not exact. For an exact resume give the loader num_workers=%d.",
                before,
                now,
                before,
            )
        self._start = {name: state_dict[name] for name in ("rng", "generators", "states") if name in state_dict}
        self._held.set_generators(state_dict["generators"])
        self._fresh = self._held.states()
        self._held.load(state_dict["states"])
        self._restored = state_dict

    def batches_in_epoch(self) -> int | None:
        """Return the number of batches in the current epoch; ``None`` to use the length of the loader."""
        return None

    def close(self) -> None:
        """Drop the live iterator, so that worker processes end."""
        self._batches = self._last = None

    @abstractmethod
    def _begin(self, skip: int, saved: StateDict | None) -> Iterator[Batch]:
        """Return the batches of the epoch from batch ``skip`` on.

        All generators have their state of the start of the epoch.

        Args:
            skip: batches to leave out.
            saved: position of a checkpoint; ``None`` if this process has loaded no position since the last epoch.
        """

    @abstractmethod
    def _own_state(self) -> StateDict:
        """Return the items that this kind of loader adds to the position."""

    def _depends_on_workers(self, before: int, now: int) -> bool:
        """Return true if ``now`` worker processes load other batches than ``before`` worker processes."""
        return before != now

    def _is_for_all(self) -> bool:
        """Return true if one position is valid on all ranks."""
        return self._share.world_size == 1

    def _fail(self) -> None:
        """Prepare for a retry after the loader has raised an error: the next call of ``epoch`` resumes."""
        self._restored = self._state_now()
        self.close()

    def _start_now(self) -> StateDict:
        """Return the current state of all generators, samplers and data sets as the start of an epoch."""
        states = rng.capture()
        if self._stream is not None:  # accelerators of ranks differ, and samplers draw on the CPU
            states = {name: states[name] for name in ("python", "numpy", "torch")}
        return {"rng": states, "generators": self._held.generator_states(), "states": self._held.states()}

    def _state_now(self) -> StateDict:
        if self._in_epoch:
            start = self._start
        else:
            start: StateDict = {"generators": self._held.generator_states(), "states": self._held.states()}
            if self._stream is not None:
                start["rng"] = self._stream
        share = {} if self._is_for_all() else {"share": [self._share.rank, self._share.world_size]}
        workers: int | None = getattr(self._loader, "num_workers", None)
        return {"kind": type(self).__name__, "num_workers": workers, **share, **start, **self._own_state()}

    def _resume(self, skip: int, saved: StateDict | None) -> Iterator[Batch]:
        """Restore the start of the epoch and begin after ``skip`` batches."""
        # Some classes save a position in the pass. At the start of an epoch this position is the end of the pass
        # before, and the epoch cannot be repeated from there. Then the state of a new process is right.
        tries = [self._start["states"], self._fresh] if self._start["states"] else [[]]
        for states in tries:
            self._held.load(states)
            self._set_epoch(self._number)
            rng.restore([self._start["rng"]])
            self._held.set_generators(self._start["generators"])
            try:
                return self._begin(skip, saved)
            except IncompatibleCheckpointError:
                if states is tries[-1]:
                    raise
        raise AssertionError

    def _of_this_rank(self, state_dict: StateDict) -> StateDict:
        states: list[StateDict] = state_dict.get("per_rank", [{**state_dict, "share": [0, 1]}])
        before, now = states[0]["share"][1], self._share.world_size
        if before != now:
            raise IncompatibleCheckpointError(
                f"the data were partitioned among {before} ranks by the {type(self._loader).__name__} itself, and this "
                f"run has {now}: only that loader knows the remaining samples. Resume with the same number of ranks; "
                "or start the epoch's data afresh with spin_dataloaders=False. A DataLoader over a map-style data set "
                "resumes with any number of ranks."
            )
        for state in states:
            if state["share"][0] == self._share.rank:
                return state
        raise IncompatibleCheckpointError(
            f"the checkpoint has no position in the data of rank {self._share.rank}: the {before} ranks did not save "
            "together. Start the epoch's data afresh with spin_dataloaders=False."
        )

    def _set_epoch(self, number: int) -> None:
        """Call ``set_epoch`` of the samplers that have this method, such as ``DistributedSampler``."""
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        for sampler in (getattr(self._loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(number)
