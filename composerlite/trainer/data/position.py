"""The position of training in its data, whatever the loader."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from composerlite.devices import rng
from composerlite.errors import IncompatibleCheckpointError
from composerlite.trainer.data.held import Held, Pairs, tell_of_lacking
from composerlite.trainer.data.samplers import Share
from composerlite.trainer.data.states import set_generator_state
from composerlite.types import Batch, StateDict

__all__ = ["DataPosition", "RewindingPosition"]

log = logging.getLogger(__name__)


class DataPosition(ABC):
    """Iterates over the training data, epoch by epoch, and knows where it is.

    ``state_dict`` is called between two batches. ``load_state_dict`` is called before the first epoch; the epoch that
    it speaks of is then iterated from where it was.

    Where the loader of each rank is an affair of its own, so is its position. A checkpoint then holds a list of them
    under ``per_rank``: ``state_dict`` has that of this rank, and the caller of a save gathers those of all ranks.

    Attributes:
        is_padding: the batch given last has no sample of this rank's own, and counts for nothing: the rank was given
            something to do because others have a sample left.
        samples: that all ranks together were given with the last batch, where :meth:`knows_samples`.
    """

    is_padding = False
    samples = 0

    def __init__(self, loader: Iterable[Batch], held: Held, share: Share = Share()) -> None:  # noqa: B008 - frozen
        self._loader = loader
        self._share = share
        self._held = held
        self._in_epoch = False
        self._epoch_rng: dict[str, Any] | None = None
        self._epoch_generators = held.generator_states()
        self._epoch_held: StateDict = {}
        self._fresh: list[list[Any]] = []
        self._restored: StateDict | None = None

    @property
    def is_in_epoch(self) -> bool:
        """True from the beginning of an epoch to its end."""
        return self._in_epoch

    @abstractmethod
    def epoch(self, number: int, skip: int) -> Iterator[Batch]:
        """The batches of epoch ``number`` from batch ``skip`` on. Training's generators stand afterwards as before.

        Args:
            number: epochs completed before.
            skip: batches of this epoch already trained on.

        Raises:
            IncompatibleCheckpointError: the loader does not give the batches that it gave before.
        """

    def finish_epoch(self, *, exhausted: bool) -> None:
        """The epoch is over: what comes next is the start of another.

        Args:
            exhausted: the loader itself said so; else training had enough of it.
        """
        self._in_epoch = False
        self._epoch_rng = None
        self._epoch_generators = self._held.generator_states()

    def state_dict(self) -> StateDict:
        """State at the start of the current epoch, and the state of this kind of loader. No rank waits for another."""
        own = self._state_here()
        return own if self._is_for_all() else {"kind": own["kind"], "per_rank": [own]}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take back what :meth:`state_dict` gave.

        Raises:
            IncompatibleCheckpointError: it was given by another kind of loader, or by another number of ranks whose
                loaders cannot share out the data anew.
        """
        kind = state_dict.get("kind")
        if not self._accepts(kind):
            raise IncompatibleCheckpointError(
                f"the checkpoint's position in the data ({kind}) is not that of a {type(self._loader).__name__} "
                f"({type(self).__name__}). Use the kind of loader of that run; or start the epoch's data afresh with "
                "spin_dataloaders=False and load_ignore_keys=['state/dataset_state']."
            )
        if not self._is_for_all() or "per_rank" in state_dict:
            state_dict = self._of_this_rank(state_dict)
        self._warn_of_workers(state_dict.get("num_workers"))
        self._epoch_rng = state_dict.get("epoch_rng")
        self._epoch_generators = state_dict["generators"]
        self._set_generators(self._epoch_generators)
        self._epoch_held = state_dict.get("held", {})
        self._fresh = self._held.states()
        self._held.load(self._states_to_load(state_dict))
        tell_of_lacking(self._held, self._epoch_held, self._epoch_generators)
        self._restored = state_dict

    def batches_in_epoch(self) -> int | None:
        """Batches of the current epoch, where the position knows better than the loader; else ``None``."""
        return None

    def knows_samples(self) -> bool:
        """Return true if every rank knows by itself how many samples all have in a batch, and that all have it.

        That is so where each sample of the order becomes one sample of a batch.
        """
        return False

    def close(self) -> None:
        """Close the loader's iterator. Persistent workers end at once; garbage collection would wait."""

    @abstractmethod
    def _own_state(self) -> StateDict:
        """State of this kind of position besides generators."""

    def _states_to_load(self, state_dict: StateDict) -> Pairs:
        """States among ``state_dict`` of what the loader holds, for the epoch that begins next."""
        return state_dict.get("held", {}).get("states", [])

    def _accepts(self, kind: object) -> bool:
        """Return true if a state of such a kind can be taken back."""
        return kind == type(self).__name__

    def _is_for_all(self) -> bool:
        """Return true if the position of one rank is that of all."""
        return self._share.world_size == 1

    def _state_here(self) -> StateDict:
        if self._restored is not None:
            return self._restored  # loaded and not used yet
        epoch_rng = {} if self._epoch_rng is None else {"epoch_rng": self._epoch_rng}
        share = {} if self._is_for_all() else {"share": [self._share.rank, self._share.world_size]}
        found = self._epoch_held if self._in_epoch else self._held.state_dict()
        held = {"held": found} if found else {}
        own = self._own_state()
        workers: int | None = getattr(self._loader, "num_workers", None)
        noted = {} if workers is None else {"num_workers": workers}
        generators = {"generators": self._epoch_generators}
        return {"kind": type(self).__name__, **share, **epoch_rng, **noted, **generators, **held, **own}

    def _depends_on_workers(self, before: int, now: int) -> bool:
        """Return true if random numbers that are drawn where data are loaded are others with ``now`` workers."""
        return before != now

    def _warn_of_workers(self, before: int | None) -> None:
        """Say so where the run cannot be the one that was interrupted, since others load its data."""
        now: int | None = getattr(self._loader, "num_workers", None)
        if before is not None and now is not None and self._depends_on_workers(before, now):
            log.warning(
                "the interrupted run loaded its data with num_workers=%d and this one has num_workers=%d: random "
                "transforms draw other numbers, and an iterable data set may give another order, so this is not the "
                "run that it would have been. For an exact resume give the loader num_workers=%d.",
                before,
                now,
                before,
            )

    def _of_this_rank(self, state_dict: StateDict) -> StateDict:
        """This rank's among the states of all ranks."""
        states: Sequence[StateDict] = state_dict.get("per_rank", [{**state_dict, "share": [0, 1]}])
        before, now = states[0]["share"][1], self._share.world_size
        if before != now:
            raise IncompatibleCheckpointError(
                f"the data were shared out to {before} ranks by the {type(self._loader).__name__} itself, and this run "
                f"has {now}: nobody but that loader could tell what is still to be seen. Resume with the same "
                "number of ranks; or start the epoch's data afresh with spin_dataloaders=False. A DataLoader over a "
                "map-style data set can be resumed with any number of ranks."
            )
        for state in states:
            if state["share"][0] == self._share.rank:
                return state
        raise IncompatibleCheckpointError(
            f"the checkpoint has no position in the data of rank {self._share.rank}: it was not saved on all "
            f"{before} ranks together. Start the epoch's data afresh with spin_dataloaders=False."
        )

    def _set_epoch(self, number: int) -> None:
        """Tell the samplers that shuffle by epoch number, as DistributedSampler does."""
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        for sampler in (getattr(self._loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(number)

    def _note_start(self) -> None:
        """An epoch begins: note how all stands that the loader holds."""
        self._in_epoch = True
        self._epoch_generators = self._held.generator_states()
        self._epoch_held = self._held.state_dict()

    def _set_generators(self, states: Sequence[Any]) -> None:
        generators = self._held.generators
        if len(states) not in (len(generators), self._held.first):
            raise IncompatibleCheckpointError(
                f"the checkpoint's data loader had {len(states)} generators of its own and this one has "
                f"{len(generators)}: build the loader as in that run."
            )
        for generator, state in zip(generators, states, strict=False):
            set_generator_state(generator, state)


class RewindingPosition(DataPosition):
    """The loader draws from training's generators: they are put where they stood when the epoch began, and back."""

    _number = 0
    _suspects = ""

    def epoch(self, number: int, skip: int) -> Iterator[Batch]:
        """See :meth:`DataPosition.epoch`."""
        self._number = number
        saved, now = self._restored, rng.capture()
        if not skip:
            if saved is not None:
                generators = self._held.generator_states()
                self._rejoin(saved)
                rng.restore([now])
                self._set_generators(generators)
            self._set_epoch(number)
            self._epoch_rng = rng.capture()
            self._note_start()
            batches = self._start(0, saved)
        else:
            if self._epoch_rng is None:
                log.warning(
                    "the checkpoint has no start of epoch %d: a shuffled loader gives another order from here on",
                    number,
                )
                self._epoch_rng = now
            batches = self._resume(skip, saved)
            rng.restore([now])
        self._restored = None
        return batches

    def _rejoin(self, saved: StateDict) -> None:
        """The next epoch follows on one that is over: have all stand as it stood then. Generators are put back."""
        held = saved.get("held", {})
        if self._number and held.get("counts"):
            self._set_epoch(self._number - 1)
        self._held.tell_of_counts(held)

    def _resume(self, skip: int, saved: StateDict | None) -> Iterator[Batch]:
        """Begin the epoch again, ``saved`` being what a checkpoint has; ``None`` within one process."""
        states, own = self._epoch_held.get("states", []), self._fresh if saved is not None else self._held.states()
        try:
            batches = self._again(skip, saved, states)
        except IncompatibleCheckpointError:
            if not states:
                raise
            batches = self._again(skip, saved, own)  # the state was one of a pass that was over
        self._in_epoch = True
        if saved is not None:
            self._held.tell_of_counts(self._epoch_held)
        return batches

    def _again(self, skip: int, saved: StateDict | None, states: Pairs) -> Iterator[Batch]:
        assert self._epoch_rng is not None
        self._held.load(states)
        self._set_epoch(self._number)
        rng.restore([self._epoch_rng])
        self._set_generators(self._epoch_generators)
        self._suspects = self._held.suspects(self._epoch_held)  # as long as they have counted nothing
        return self._start(skip, saved)

    @abstractmethod
    def _start(self, skip: int, saved: StateDict | None) -> Iterator[Batch]:
        """Begin the epoch at batch ``skip``. The generators are where they were when it began the first time."""
