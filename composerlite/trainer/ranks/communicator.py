"""Collectives of training, and the process group's lifetime."""

from __future__ import annotations

import atexit
import contextlib
import logging
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch

from composerlite import dist
from composerlite.core import State
from composerlite.errors import ConfigError, Preempted, RankError
from composerlite.trainer.data.samplers import Share
from composerlite.trainer.ranks.parallel import Parallel

__all__ = ["Communicator", "Counted", "Membership", "Ranks", "failing_together"]

log = logging.getLogger(__name__)


@final
class Counted(NamedTuple):
    """Counts of a batch over all ranks.

    Attributes:
        samples: samples of all ranks.
        tokens: tokens of all ranks.
        stops: a rank called ``stop_training`` before this batch.
    """

    samples: int
    tokens: int
    stops: bool = False


@final
class Communicator:
    """Small collectives of training and evaluation. Every rank calls the same methods in the same order.

    Numbers are reduced in host memory by a process group of their own. With one process nothing is sent.

    Args:
        group: process group; by default a group of this process alone.
        counts: count the data of this rank. False if another rank has the same data, as with tensor parallelism.
    """

    def __init__(self, group: dist.Group | None = None, *, counts: bool = True) -> None:
        self._group = dist.Group() if group is None else group
        self._is_single = self._group.size == 1
        self._counts = counts
        self._warned = False

    def count(self, state: State, samples: int, tokens: int, *, has_batch: bool = True) -> Counted | None:
        """Sum samples and tokens of a training batch over all ranks. Call before each batch.

        Args:
            state: its stop flag is sent along.
            samples: samples of this rank.
            tokens: tokens of this rank.
            has_batch: false at the end of this rank's data.

        Returns:
            Counts over all ranks; ``None`` if the data of any rank has ended.
        """
        if self._is_single:
            return Counted(samples, tokens) if has_batch else None
        own = (samples, tokens) if self._counts else (0, 0)
        all_samples, all_tokens, stops, ended = self._sums(state, *own, int(state.stop_requested), int(not has_batch))
        if not ended:
            return Counted(all_samples, all_tokens, stops=stops > 0)
        if ended < self._group.size and not self._warned:
            self._warned = True
            if self._group.is_first:
                log.warning(
                    "the data of %d of %d ranks ended before the data of the others, which ends the epoch for all: "
                    "batches were skipped. Give every rank a loader of the same length",
                    ended,
                    self._group.size,
                )
        return None

    def count_evaluation(self, state: State, has_batch: bool, samples: int, tokens: int) -> tuple[int, int] | None:
        """Sum samples and tokens of an evaluation batch over all ranks, which may have unequal numbers of batches.

        Args:
            state: its counters are sent along.
            has_batch: false at the end of this rank's data.
            samples: samples of this rank.
            tokens: tokens of this rank.

        Returns:
            Samples and tokens of all ranks; ``None`` once no rank has a batch.
        """
        if self._is_single:
            return (samples, tokens) if has_batch else None
        own = [samples, tokens] if self._counts else [0, 0]
        all_samples, all_tokens, ranks = self._sums(state, *own, int(has_batch))
        return (all_samples, all_tokens) if ranks else None

    def sync_stop(self, state: State) -> None:
        """End training on every rank if it ends on any rank, by ``stop_training`` or by a time limit."""
        if self._is_single:
            return
        over, stops = self._sums(state, int(state.training_is_over), int(state.stop_requested))
        if stops:
            state.apply_stop()
        elif over and not state.training_is_over:
            state.max_duration = state.timestamp.batch

    def any(self, happened: bool) -> bool:
        """Return true if ``happened`` is true on any rank."""
        return bool(self.max(int(happened)))

    def max(self, value: int) -> int:
        """Return the greatest value of all ranks."""
        return self._group.max([value])[0]

    def mean(self, values: Mapping[str, float], weight: float) -> dict[str, float]:
        """Return the weighted mean over ranks. The weights of all ranks add up to the number of ranks."""
        if self._is_single:
            return dict(values)
        sums = self._group.sum([float(value) * weight for value in values.values()])
        return {name: value / self._group.size for name, value in zip(values, sums, strict=True)}

    def _sums(self, state: State, *own: int) -> list[int]:
        """Sum ``own`` over all ranks, and the piggyback counters of ``state`` in the same message."""
        sums = self._group.sum([*own, *(counter.number() for counter in state.piggyback)])
        for counter, total in zip(state.piggyback, sums[len(own) :], strict=True):
            counter.reduced = total
        return sums[: len(own)]


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among all ranks, for training and evaluation; by default there is one rank.

    Attributes:
        parallel: trains the model together with the other ranks.
        communicator: collectives of a batch.
        share: this rank's share of the data.
    """

    parallel: Parallel = field(default_factory=Parallel)
    communicator: Communicator = field(default_factory=Communicator)
    share: Share = field(default_factory=Share)


@contextlib.contextmanager
def failing_together(what: str) -> Generator[None]:
    """Run a block with collectives. An exception on this rank ends the block on all ranks.

    Args:
        what: name of the block, for errors.

    Raises:
        RankError: another rank failed; the cause is the exception of that rank.
    """
    try:
        yield
    except Preempted:
        raise  # raised on every rank
    except BaseException as e:
        if dist.get_world_size() == 1:
            raise
        cause: Any = dist.get_group().cause_elsewhere(what, e)
        if cause is not None:
            raise cause from e
        if not (isinstance(e, RankError) and e.everywhere):
            dist.get_group().leave(e)
        raise


@final
class Membership:
    """Keeps the ranks connected while any trainer of this process is open.

    A process group that the script has initialized stays connected.

    Args:
        device: device of this rank, for :func:`composerlite.dist.initialize_dist`.
        timeout: limit of each wait for other ranks, in seconds.
        alone: initialize a process group for a single process too; a device mesh needs a process group.

    Raises:
        ConfigError: ``timeout`` is not a positive number.
    """

    _members = 0
    _connected_here = False

    def __init__(self, device: str | torch.device | None, timeout: float, *, alone: bool) -> None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"dist_timeout={timeout!r}: expected a positive number of seconds.")
        if dist.initialize_dist(device, timeout, min_world_size=1 if alone else 2):
            Membership._members, Membership._connected_here = 0, True
        else:
            dist.get_group().begin_run()
        Membership._members += 1
        self._is_member = True

    @contextlib.contextmanager
    def building(self) -> Generator[None]:
        """Build the trainer within this context. An exception on any rank raises on all, and disconnects."""
        try:
            with dist.get_group().all_or_none("building the trainer"):
                yield
        except BaseException:
            self.leave()
            raise

    def stay(self) -> None:
        """Keep the connection until the process ends: reading a sharded tensor needs the other ranks."""
        if Membership._connected_here:
            Membership._connected_here = False
            atexit.register(dist.finalize_dist)

    def leave(self) -> None:
        """Disconnect if no other trainer of this process is open. May be called twice."""
        if not self._is_member:
            return
        self._is_member = False
        Membership._members -= 1
        if Membership._members == 0 and Membership._connected_here:
            Membership._connected_here = False
            dist.finalize_dist()
