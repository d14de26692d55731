"""The ranks of a run while they train: how much data there was, when to stop, and how long they are connected."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, final

import torch

from composerlite import dist
from composerlite.core import State
from composerlite.errors import ConfigError, Preempted, RankError
from composerlite.trainer.data.samplers import Share
from composerlite.trainer.ranks.parallel import Parallel

__all__ = ["Communicator", "Counted", "Membership", "Ranks", "connected", "failing_together"]

log = logging.getLogger(__name__)

P = ParamSpec("P")

_DEFAULT_TIMEOUT_SECONDS = 300.0


@final
class Counted(NamedTuple):
    """The counts of a batch over all ranks.

    Attributes:
        samples, tokens: of all ranks.
        are_even: every rank has as many samples.
        stops: a rank asked before this batch for the end of training.
    """

    samples: int
    tokens: int
    are_even: bool = True
    stops: bool = False


@final
class Communicator:
    """The collectives of a batch. Every rank calls the same methods in the same order.

    The numbers are reduced in host memory, apart from the process group of training. In one process nothing is.

    Args:
        group: the ranks; by default this process by itself.
        counts: whether the data of this rank are its own: those that share layers have the same.
    """

    def __init__(self, group: dist.Group | None = None, *, counts: bool = True) -> None:
        self._group = dist.Group() if group is None else group
        self._is_single = self._group.size == 1
        self._counts = counts
        self._warned = False

    def count(self, state: State, samples: int, tokens: int) -> Counted | None:
        """Count a batch; return the sums over all ranks, or ``None`` if the data of one has ended."""
        if self._is_single:
            return Counted(samples, tokens)
        own = (samples, tokens) if self._counts else (0, 0)
        sums = self._sums(state, *own, samples, samples**2, int(state.stop_requested), 0)
        all_samples, all_tokens, added, squares, stops, ended = sums
        if ended:
            self._warn(ended)
            return None
        return Counted(all_samples, all_tokens, are_even=self._group.size * squares == added**2, stops=stops > 0)

    def end_of_data(self, state: State) -> None:
        """Report the end of this rank's data. In place of :meth:`count`."""
        if not self._is_single:
            self._warn(self._sums(state, 0, 0, 0, 0, int(state.stop_requested), 1)[-1])

    def abandon(self, state: State) -> None:
        """Report that this rank abandons its batch, since the run is preempted. In place of :meth:`count`."""
        if not self._is_single:
            self._sums(state, 0, 0, 0, 0, int(state.stop_requested), 0)

    def step(self, state: State, has_batch: bool, samples: int, tokens: int) -> tuple[int, int] | None:
        """Count like :meth:`count` where ranks may have unequal data; ``None`` once no rank has a batch."""
        if self._is_single:
            return (samples, tokens) if has_batch else None
        own = [samples, tokens] if self._counts else [0, 0]
        all_samples, all_tokens, ranks = self._sums(state, *own, int(has_batch))
        return (all_samples, all_tokens) if ranks else None

    def sync_stop(self, state: State) -> None:
        """Make training end now on every rank if it does on one. Once in a batch that no :meth:`count` began."""
        if self._is_single:
            return
        over, stops = self._sums(state, int(state.training_is_over), int(state.stop_requested))
        if stops:
            state.apply_stop()
        elif over and not state.training_is_over:  # as by a clock
            state.max_duration = state.timestamp.batch

    def any(self, happened: bool) -> bool:
        """Return true if it happened on any rank."""
        return bool(self.max(int(happened)))

    def same(self, value: int) -> bool:
        """Return true if every rank has this value."""
        return self.max(value) == -self.max(-value)

    def max(self, value: int) -> int:
        """The greatest of all ranks."""
        return self._group.max([value])[0]

    def mean(self, values: Mapping[str, float], weight: float) -> dict[str, float]:
        """The mean over ranks, where the ``weight`` of all add up to the number of ranks."""
        if self._is_single:
            return dict(values)
        sums = self._group.sum([float(value) * weight for value in values.values()])
        return {name: value / self._group.size for name, value in zip(values, sums, strict=True)}

    def _sums(self, state: State, *own: int) -> list[int]:
        """Sum the ``own`` numbers over all ranks, and in the same message those of the piggyback counters."""
        sums = self._group.sum([*own, *(counter.number() for counter in state.piggyback)])
        for counter, total in zip(state.piggyback, sums[len(own) :], strict=True):
            counter.reduced = total
        return sums[: len(own)]

    def _warn(self, ended: int) -> None:
        """Say once on rank 0 that loaders are of different lengths."""
        if ended == self._group.size or self._warned:
            return
        self._warned = True
        if self._group.is_first:
            log.warning(
                "the data of %d of %d ranks ended before those of the others, which ends the epoch for all: batches "
                "were left out. Give every rank a loader of the same length",
                ended,
                self._group.size,
            )


@dataclass(frozen=True, slots=True)
class Ranks:
    """The other ranks, as training and evaluation need them; by default there is none.

    Attributes:
        parallel: how they train one model. communicator: what they tell each other. share: this one's of the data.
    """

    parallel: Parallel = field(default_factory=Parallel)
    communicator: Communicator = field(default_factory=Communicator)
    share: Share = field(default_factory=Share)


@contextlib.contextmanager
def failing_together(what: str) -> Generator[None]:
    """Run a block in which ranks meet; an exception that ends it on this rank ends it on all.

    Raises:
        RankError: another rank failed and this one noticed; its cause is the other's exception.
    """
    try:
        yield
    except Preempted:
        raise  # on every rank
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
    """The ranks are connected as long as one of the trainers of this process is open.

    Those who called ``initialize_dist`` themselves keep their connection.

    Args:
        device: as ``initialize_dist`` takes it.
        timeout: of every wait for other ranks, in seconds.
        alone: connect a run of one process too: a device mesh needs that.
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

    def stay(self) -> None:
        """Keep the connection until the process ends: tensors that are sharded over ranks need it to be read."""
        if Membership._connected_here:
            Membership._connected_here = False
            atexit.register(dist.finalize_dist)

    def leave(self) -> None:
        """Free resources when the trainer is closed. May be called twice."""
        if not self._is_member:
            return
        self._is_member = False
        Membership._members -= 1
        if Membership._members == 0 and Membership._connected_here:
            Membership._connected_here = False
            dist.finalize_dist()


class _Member(Protocol):
    _membership: Membership


M = TypeVar("M", bound=_Member)


def connected(construct: Callable[Concatenate[M, P], None]) -> Callable[Concatenate[M, P], None]:
    """Decorate the constructor of the trainer: the ranks are connected before, and it succeeds on all or on none.

    Afterwards the object has a ``_membership``.
    """

    @functools.wraps(construct)
    def wrapper(self: M, /, *args: P.args, **kwargs: P.kwargs) -> None:
        given: dict[str, Any] = dict(kwargs)
        membership = Membership(
            given.get("device"),
            given.get("dist_timeout", _DEFAULT_TIMEOUT_SECONDS),
            alone=any(given.get(name) is not None for name in ("parallelism_config", "deepspeed_config")),
        )
        self._membership = membership  # pyright: ignore[reportPrivateUsage] - this is its constructor
        try:
            with dist.get_group().all_or_none("building the trainer"):
                construct(self, *args, **kwargs)
        except BaseException:
            membership.leave()
            raise

    return wrapper
