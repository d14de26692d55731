"""The position of training in its data, whatever the loader, and the generators that the loader holds itself."""

from __future__ import annotations

import contextlib
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from composerlite.devices import rng
from composerlite.errors import IncompatibleCheckpointError
from composerlite.trainer.data.samplers import Share
from composerlite.types import Batch, StateDict

__all__ = ["DataPosition", "RewindingPosition", "generator_state", "generators_of", "put_back", "set_generator_state"]

log = logging.getLogger(__name__)


def generators_of(loader: Any) -> list[Any]:
    """The generators that ``loader`` and its samplers hold as attributes, each once."""
    found: dict[int, Any] = {}
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    for holder in holders:
        attributes: Mapping[str, Any] = getattr(holder, "__dict__", {})
        for value in attributes.values():
            if isinstance(value, torch.Generator | np.random.Generator | np.random.RandomState | random.Random):
                found[id(value)] = value
    return list(found.values())


@contextlib.contextmanager
def put_back(loader: Any) -> Generator[None]:
    """Within it anybody may iterate over ``loader``: its generators stand afterwards as before."""
    before = [(generator, generator_state(generator)) for generator in generators_of(loader)]
    try:
        yield
    finally:
        for generator, state in before:
            set_generator_state(generator, state)


def generator_state(generator: Any) -> Any:
    """Return the state of ``generator``, as tensors and plain values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return _with_tensors(dict(generator.bit_generator.state))
    return _with_tensors(dict(generator.get_state(legacy=False)))


def set_generator_state(generator: Any, state: Any) -> None:
    """Put ``generator`` where :func:`generator_state` found it."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, internal, gauss = state
        generator.setstate((version, tuple(internal), gauss))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _with_arrays(state)
    else:
        generator.set_state(_with_arrays(state))


def _with_tensors(state: dict[str, Any]) -> dict[str, Any]:
    """numpy's arrays as tensors: arrays are not among the types that torch.load opens by itself."""
    swap = {np.ndarray: lambda array: torch.from_numpy(array.copy()), dict: _with_tensors}
    return {name: swap.get(type(value), lambda same: same)(value) for name, value in state.items()}


def _with_arrays(state: dict[str, Any]) -> dict[str, Any]:
    swap = {torch.Tensor: lambda tensor: tensor.numpy(), dict: _with_arrays}
    return {name: swap.get(type(value), lambda same: same)(value) for name, value in state.items()}


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

    def __init__(self, loader: Iterable[Batch], share: Share = Share()) -> None:  # noqa: B008 - frozen
        self._loader = loader
        self._share = share
        self._generators = generators_of(loader)
        self._epoch_rng: dict[str, Any] | None = None
        self._epoch_generators = self._generator_states()
        self._restored: StateDict | None = None

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
        self._epoch_rng = None
        self._epoch_generators = self._generator_states()

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
        own = self._own_state()
        workers: int | None = getattr(self._loader, "num_workers", None)
        noted = {} if workers is None else {"num_workers": workers}
        return {"kind": type(self).__name__, **share, **epoch_rng, **noted, "generators": self._epoch_generators, **own}

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


class RewindingPosition(DataPosition):
    """The loader draws from training's generators: they are put where they stood when the epoch began, and back."""

    _number = 0

    def epoch(self, number: int, skip: int) -> Iterator[Batch]:
        """See :meth:`DataPosition.epoch`."""
        self._number = number
        self._set_epoch(number)
        if not skip:
            self._epoch_rng = rng.capture()
            self._epoch_generators = self._generator_states()
            return self._start(0)
        now = rng.capture()
        if self._epoch_rng is None:
            log.warning(
                "the checkpoint has no start of epoch %d: a shuffled loader gives another order from here on",
                number,
            )
            self._epoch_rng = now
        rng.restore([self._epoch_rng])
        self._set_generators(self._epoch_generators)
        batches = self._start(skip)
        rng.restore([now])
        return batches

    @abstractmethod
    def _start(self, skip: int) -> Iterator[Batch]:
        """Begin the epoch at batch ``skip``. The generators are where they were when it began the first time."""
