"""A barrier of all ranks over a store: who is late is known by name, and failures travel.

A rank that failed comes too and says so. Nothing here uses a process group, so a rank that does not come leaves
nothing behind that could block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pickle
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, final

from composerlite.errors import LateRankError, RankError

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage] - documented

T = TypeVar("T")

_SHORTEST_PAUSE_SECONDS = 5e-5
_CHECKS_PER_SECOND = 4000  # of all ranks together, in a long wait


def format_ranks(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


@final
@dataclass(frozen=True)
class Failure:
    """A failure of a rank, as it travels to the others.

    Attributes:
        rank: where.
        text: type and message of the exception.
        trace: its traceback.
        pickled: the exception itself; empty if it cannot be pickled.
        late: the ranks that were waited for in vain, if that is the failure.
        everywhere: every rank has this failure already; see :class:`RankError`.
    """

    rank: int
    text: str
    trace: str
    pickled: bytes
    late: tuple[int, ...] = ()

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        try:
            pickled = pickle.dumps(error)
        except Exception:  # noqa: BLE001 - any object may hang on an exception; the text says what happened
            pickled = b""
        late = error.ranks if isinstance(error, LateRankError) else ()
        text = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error)).rstrip()
        return cls(rank, text, trace, pickled, late)

    def exception(self) -> BaseException:
        """The exception as it was raised, or one with the same text where that one does not travel."""
        try:
            error = pickle.loads(self.pickled) if self.pickled else None
        except Exception:  # noqa: BLE001 - a constructor of somebody else's; the text says what happened
            error = None
        return error if isinstance(error, BaseException) else RankError(self.text, [self.rank])


def to_be_told(failures: Sequence[Failure]) -> list[Failure]:
    """``failures`` as all ranks read them: without the tracebacks that nobody is shown."""
    return [*failures[:1], *(dataclasses.replace(failure, trace="") for failure in failures[1:])]


def rank_error(what: str, failures: Sequence[Failure], own: BaseException | None = None) -> RankError:
    """The error that every rank raises when some failed in ``what``.

    Its cause is this rank's ``own`` exception, or else that of the first rank that failed.
    """
    if late := [failure for failure in failures if failure.late]:
        return LateRankError(str(late[0].exception()), late[0].late, everywhere=True)
    ranks: dict[str, list[int]] = {}
    for failure in failures:
        ranks.setdefault(failure.text, []).append(failure.rank)
    texts = [f"{format_ranks(who)} failed: {text}" for text, who in ranks.items()]
    error = RankError(f"{what}: {'; '.join(texts)}", [failure.rank for failure in failures], everywhere=True)
    error.causes = tuple(failure.exception() for failure in failures)
    first = failures[0]
    if own is None:
        error.__cause__ = first.exception()
        error.add_note(f"On rank {first.rank}:\n{first.trace}")
    else:
        error.__cause__ = own
    return error


def late_error(what: str, timeout: timedelta, late: Sequence[int], notes: Sequence[str] = ()) -> LateRankError:
    """The error of a wait that ended before the ranks ``late`` had come."""
    verb = "has" if len(late) == 1 else "have"
    message = f"{what}: {format_ranks(late)} {verb} not come in {timeout.total_seconds():g} s."
    return LateRankError(" ".join([message, *notes]), late)


def gone_error(rank: int) -> LateRankError:
    """The error of waits for a rank that is lost."""
    return LateRankError(f"{format_ranks([rank])} is gone: its process was killed, or its node is lost.", [rank])


@contextlib.contextmanager
def reaching_the_store(what: str) -> Generator[None]:
    """Turn a lost connection to the store into a RankError: the process that holds the store is gone."""
    from torch.distributed import DistError

    try:
        yield
    except DistError as e:
        raise RankError(
            f"{what}: the store of the process group does not answer ({e}). The process that holds it, "
            "rank 0 or its torchrun agent, is gone: its own output says why."
        ) from e


@final
class Poll:
    """Looks for a key of ``store`` until it is there, more and more seldom.

    It does not block inside the store: signals get through, other threads can use the store, and no rank of many
    asks more than its share.
    """

    def __init__(self, store: Store, world_size: int) -> None:
        self._store = store
        self._longest = max(0.02, world_size / _CHECKS_PER_SECOND)

    def until(self, key: str, timeout: timedelta, otherwise: Callable[[], None] = lambda: None) -> bool:
        """Wait for ``key``; false if it is not there after ``timeout``. A long wait calls ``otherwise`` as it goes."""
        return self.when(lambda: self._store.check([key]), timeout, otherwise)

    def when(
        self, happened: Callable[[], bool], timeout: timedelta, otherwise: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait like :meth:`until`, until ``happened`` is true, which asks the store."""
        start = time.monotonic()
        while not happened():
            waited = time.monotonic() - start
            if waited >= timeout.total_seconds():
                return False
            pause = min(max(waited / 8, _SHORTEST_PAUSE_SECONDS), self._longest)
            if pause == self._longest:
                otherwise()
            time.sleep(min(pause, timeout.total_seconds() - waited))
        return True


def decide_once(store: Store, key: str, value: object) -> bool:
    """Set ``key`` to ``value`` unless another rank has set it; true if it is this rank's."""
    mine = pickle.dumps(value)
    return store.compare_set(key, "", mine) == mine  # pyright: ignore[reportArgumentType] - takes bytes, says str


_TICKETS = 2**40  # of one run, more than any takes


@final
@dataclass(frozen=True)
class _Arrival:
    """Position of a rank in the sequence of barriers."""

    ticket: int
    what: str
    failure: Failure | None


@final
class StoreBarrier:
    """Barriers of all ranks, one after the other: every rank calls the same methods in the same order, in one thread.

    ``store`` has keys of its own, used by nobody else.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._poll = Poll(store, world_size)
        self._tickets = itertools.count(1)
        self._last_ticket = 0
        self._run = 0

    def begin_run(self) -> None:
        """Begin another run over the same connection: that a rank left an earlier one, and where, counts no more."""
        self._run += 1
        self._tickets = itertools.count(self._run * _TICKETS + 1)

    def announce(self, what: str) -> int:
        """Note for the others that this rank begins ``what``, without waiting. Returns its number for :meth:`late`."""
        ticket = next(self._tickets)
        with reaching_the_store(what):
            self._tell(_Arrival(ticket, what, None))
        return ticket

    def wait(self, what: str, timeout: timedelta, error: BaseException | None = None) -> list[Failure]:
        """Wait until every rank is here; returns the failures of all, in the order of ranks: the same on every rank.

        Args:
            what: the ranks wait for; the same on every rank, unless a rank comes with an ``error`` from elsewhere.
            timeout: of the wait. The first rank whose time is up ends the wait of all.
            error: what this rank failed with before.

        Raises:
            RankError: a rank has left the run for good, or the store is gone.
        """
        ticket = next(self._tickets)
        failure = None if error is None else Failure.of(error, self.rank)
        with reaching_the_store(what):
            self._tell(_Arrival(ticket, what, failure))
            if self._store.add(f"{ticket}/came", 1) == self.world_size:
                decide_once(self._store, f"{ticket}/outcome", self._failures(ticket, what))
            elif not self._poll.until(f"{ticket}/outcome", timeout, lambda: self.check_nobody_left(what)):
                late = self._late(ticket, what, timeout)
                if not late.ranks and not self._poll.until(f"{ticket}/outcome", timeout):  # the last to come says it
                    lost = self.missing(what, timeout) or [rank for rank in range(self.world_size) if rank != self.rank]
                    late = late_error(what, timeout, lost, ["Lost in the moment of coming."])
                if late.ranks:
                    decide_once(self._store, f"{ticket}/outcome", [Failure.of(late, self.rank)])
            outcome = pickle.loads(self._store.get(f"{ticket}/outcome"))
            if not any(failure.late for failure in outcome):
                self._forget_last(ticket)
        return outcome

    def succeed(self, what: str, timeout: timedelta, error: Exception | None = None) -> None:
        """:meth:`wait`, and raise what any rank failed with.

        Raises:
            RankError: a rank failed; its cause is the exception. Where all failed in the same way: the exception.
        """
        if failures := self.wait(what, timeout, error):
            if error is not None and len(failures) == self.world_size and len({f.text for f in failures}) == 1:
                raise error  # everybody's: the user's mistake, most likely
            raise rank_error(what, failures, error)

    @contextlib.contextmanager
    def all_succeed(self, what: str, timeout: timedelta) -> Generator[None]:
        """Run a block on every rank and :meth:`succeed`. An exit (``KeyboardInterrupt``) leaves, and does not wait."""
        try:
            yield
        except Exception as e:
            if not (isinstance(e, RankError) and e.everywhere):
                self.succeed(what, timeout, e)
            raise
        except BaseException as e:
            self.leave(e)
            raise
        self.succeed(what, timeout)

    def leave(self, error: BaseException) -> None:
        """Report that this rank failed and reaches no further barrier of the run: the waits of others end with that.

        Never waits. An error that all ranks have is not told.
        """
        if isinstance(error, RankError) and error.everywhere:
            return
        with reaching_the_store("leaving the run"):
            decide_once(self._store, f"left/{self._run}", Failure.of(error, self.rank))

    def report_gone(self, rank: int) -> None:
        """Report that the process of ``rank`` is gone: the waits of all end with that, or with a rank that had left."""
        error = gone_error(rank)
        with contextlib.suppress(RankError), reaching_the_store("reporting a lost rank"):
            self._store.set("gone", str(rank))
            decide_once(self._store, "lost", Failure.of(error, rank))  # without the store all have an error anyway

    def gone(self) -> int | None:
        """Return the rank that :meth:`report_gone` was called for, the last one; ``None``: none."""
        return int(self._store.get("gone")) if self._store.check(["gone"]) else None

    def check_nobody_left(self, what: str) -> None:
        """Raise the error of a rank that called :meth:`leave` in this run, or that is gone.

        Raises:
            RankError: with the cause; or the store is gone.
        """
        with reaching_the_store(what):
            for key in (f"left/{self._run}", "lost"):
                if self._store.check([key]):
                    raise rank_error(what, [pickle.loads(self._store.get(key))])

    def late(self, ticket: int, what: str, timeout: timedelta) -> LateRankError | None:
        """Error that names the ranks that have not reached ``ticket``; ``None`` if all have."""
        with reaching_the_store(what):
            error = self._late(ticket, what, timeout)
        return error if error.ranks else None

    def missing(self, what: str, timeout: timedelta) -> list[int]:
        """The ranks that do not come here too, after the connection broke in ``what``: those that are lost."""
        prefix = "broken"
        with reaching_the_store(what):
            self._store.set(f"{prefix}/{self.rank}", "")
            if self._store.add(prefix, 1) == self.world_size:
                self._store.set(f"{prefix}/all", "")
            self._poll.until(f"{prefix}/all", timeout, lambda: self.check_nobody_left(what))
            return [rank for rank in range(self.world_size) if not self._store.check([f"{prefix}/{rank}"])]

    def _tell(self, place: _Arrival) -> None:
        self._store.set(f"at/{self.rank}", pickle.dumps(place))  # pyright: ignore[reportArgumentType] - takes bytes, says str

    def _places(self) -> dict[int, _Arrival]:
        keys = {rank: f"at/{rank}" for rank in range(self.world_size)}
        if not self._store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        texts = self._store.multi_get(list(keys.values()))
        return {rank: pickle.loads(text) for rank, text in zip(keys, texts, strict=True)}

    def _failures(self, ticket: int, what: str) -> list[Failure]:
        """Return the failures of all, as the last to come reads them."""
        places = self._places()
        failures = [place.failure for place in places.values() if place.failure is not None]
        if failures:
            return to_be_told(failures)
        strays = {rank: place for rank, place in places.items() if (place.ticket, place.what) != (ticket, what)}
        return to_be_told([Failure.of(_stray_error(rank, place, what), self.rank) for rank, place in strays.items()])

    def _late(self, ticket: int, what: str, timeout: timedelta) -> LateRankError:
        places = self._places()
        late: dict[int, str] = {}
        for rank in range(self.world_size):
            place = places.get(rank)
            if place is None:
                late[rank] = "never seen"
            elif place.ticket < ticket:
                late[rank] = f"last seen in {place.what!r}"
        seen: dict[str, list[int]] = {}
        for rank, text in late.items():
            seen.setdefault(text, []).append(rank)
        notes = [f"{format_ranks(ranks).capitalize()}: {text}." for text, ranks in seen.items()]
        notes += [
            f"Rank {rank} failed: {place.failure.text}."
            for rank, place in places.items()
            if place.ticket == ticket and place.failure is not None
        ]
        return late_error(what, timeout, list(late), notes)

    def _forget_last(self, ticket: int) -> None:
        """Remove, on rank 0, the keys of the previous barrier: all ranks reached this one, so all have read them."""
        if self.rank == 0 and self._last_ticket:
            self._store.delete_key(f"{self._last_ticket}/came")
            self._store.delete_key(f"{self._last_ticket}/outcome")
        self._last_ticket = ticket


def _stray_error(rank: int, place: _Arrival, what: str) -> RankError:
    return RankError(f"rank {rank} called {place.what!r} where another called {what!r}: every rank must call the same")
