"""Votes of all ranks through a store: every rank gives a value, rank 0 decides, every rank gets the answer.

A vote needs no process group. So a vote can run in any thread while the main thread runs collectives, and an absent
rank blocks no operation after the vote.
"""

from __future__ import annotations

import io
import pickle
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, final

from torch.distributed import DistError  # pyright: ignore[reportPrivateImportUsage] - documented

from composerlite.errors import LateRankError, RankError

T = TypeVar("T")
R = TypeVar("R")

_SHORTEST_PAUSE_SECONDS = 5e-5
_LONGEST_PAUSE_SECONDS = 0.02
_CHECKS_PER_SECOND = 4000
"""Highest rate of requests of all ranks together in a long wait."""
_MOST_BYTES = 4 << 20
"""Largest request, in bytes. TCPStore closes the connection after a request above 8 MiB."""


# ── errors of ranks ──────────────────────────────────────────────────────────────────────────────────────────────────
def format_ranks(ranks: Sequence[int]) -> str:
    """Return ``ranks`` as text, such as ``rank 3`` or ``ranks 0-2, 5``."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


@final
class Failure(NamedTuple):
    """An exception of a rank, in a form to be sent to every other rank.

    Attributes:
        rank: number of the rank.
        text: type and message of the exception.
        trace: traceback of the exception; empty if another traceback is shown.
        error: the exception, or a ``RankError`` with the same text if the exception cannot be pickled.
        names_ranks: true if the exception is a ``RankError``, with the ranks at fault.
    """

    rank: int
    text: str
    trace: str
    error: BaseException
    names_ranks: bool

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Make the failure of ``rank`` that raised ``error``."""
        text = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error)).rstrip()
        sent = error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - an exception may refer to any object; the text says what happened
            sent = RankError(text, [rank])
        return cls(rank, text, trace, sent, isinstance(error, RankError))


def rank_error(operation: str, failures: Sequence[Failure], own: BaseException | None = None) -> RankError:
    """Return the error of every rank after some ranks failed.

    Args:
        operation: the operation, for the message.
        failures: the failures of all ranks, in the order of ranks; not empty.
        own: the exception of this rank.

    Returns:
        The exception of the first rank that failed because other ranks were lost or late: this exception names the
        other ranks. If no rank did: a new error, caused by ``own``, or else by the exception of the first rank.
    """
    ranks: dict[str, list[int]] = {}
    for failure in failures:
        if failure.names_ranks and isinstance(failure.error, RankError):
            failure.error.everywhere = True
            return failure.error
        ranks.setdefault(failure.text, []).append(failure.rank)
    texts = [f"{format_ranks(failed)} failed: {text}" for text, failed in ranks.items()]
    error = RankError(f"{operation}: {'; '.join(texts)}", [failure.rank for failure in failures], everywhere=True)
    error.causes = tuple(failure.error for failure in failures)
    if own is None:
        error.add_note(f"On rank {failures[0].rank}:\n{failures[0].trace}")
    error.__cause__ = error.causes[0] if own is None else own
    return error


def lost_error(rank: int) -> LateRankError:
    """Return the error to raise in a wait for ``rank`` after the process of ``rank`` has ended."""
    return LateRankError(f"{format_ranks([rank])} is lost: its process was killed, or its node failed.", [rank])


@contextmanager
def reaching_the_store(operation: str) -> Generator[None]:
    """Raise a ``RankError`` if the store does not answer: the process with the store has ended."""
    try:
        yield
    except DistError as e:
        raise RankError(
            f"{operation}: the store of the process group does not answer ({e}). The process that hosts it, rank 0 "
            "or its torchrun agent, has ended: see its log."
        ) from e


# ── votes ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
@dataclass(eq=False)
class Vote:
    """A vote of all ranks, used once, in one thread. A vote of one process does not communicate.

    :meth:`run` is the whole vote; other methods are the steps of :meth:`run`. Every rank calls :meth:`arrive`. Then
    rank 0 calls :meth:`decide`, and the other ranks call :meth:`wait`. Only rank 0 ends a vote.

    All votes are appended to a single key, and the numbers of the voters to another key. So the number of requests of
    a rank does not depend on the number of ranks.

    Args:
        store: a ``torch.distributed.Store`` with keys for this vote only; ``None`` for one process.
        rank: of this process.
        world_size: number of ranks.
        operation: name of the operation, for errors.
        timeout: of the wait for the votes of all ranks, and of the wait for rank 0 after that.
        check: called repeatedly in a long wait, with the awaited ranks. Raises a ``RankError`` if these ranks cannot
            answer.

    Attributes:
        may_be_committed: true after a commit, if the outcome is unknown, or if rank 0 was lost. If true, do not delete
            the files; the next start of the run removes files without a record.
    """

    store: Any
    rank: int
    world_size: int
    operation: str
    timeout: timedelta
    check: Callable[[Sequence[int]], object] = lambda _: None
    may_be_committed: bool = field(default=False, init=False)
    _own_error: BaseException | None = field(default=None, init=False)

    def run(self, write: Callable[[], T], commit: Callable[[list[T]], R]) -> R:
        """Write on every rank, then commit on rank 0. If a rank fails to write, rank 0 does not commit.

        Args:
            write: called on every rank.
            commit: called on rank 0 with the results of ``write`` in the order of ranks.

        Returns:
            Result of ``commit``, on every rank.

        Raises:
            RankError: a rank failed, was lost or is late. Delete files only if ``may_be_committed`` is false.
            Exception: in one process: the exception of ``write`` or ``commit``.
        """
        if self.world_size == 1:
            result = commit([write()])
            self.may_be_committed = True
            return result
        value: Any = None
        error: BaseException | None = None
        try:
            value = write()
        except BaseException as e:  # noqa: BLE001 - raised by wait and decide, on every rank
            error = e
        self.arrive(value, error=error)
        return self.decide(commit) if self.rank == 0 else self.wait()

    def pass_by(self) -> None:
        """Vote for the commit without waiting, in place of :meth:`run`, on a rank other than 0.

        The rank does not get the result of the commit.

        Raises:
            RankError: the store does not answer.
        """
        self.arrive()
        with reaching_the_store(self.operation):
            self._leave()

    def arrive(self, value: object = None, *, error: BaseException | None = None) -> None:
        """Vote once: for the commit, or against the commit because of ``error``.

        Args:
            value: for rank 0, if this rank votes for the commit.
            error: exception of this rank; ``None``: this rank votes for the commit.
        """
        self._own_error = error
        vote = pickle.dumps((value, None if error is None else Failure.of(error, self.rank)))
        with reaching_the_store(self.operation):
            for at in range(0, len(vote), _MOST_BYTES):
                piece = vote[at : at + _MOST_BYTES]
                self.store.append("votes", pickle.dumps((self.rank, piece)))
            self.store.append("voters", f"{self.rank} ")

    def decide(self, commit: Callable[[list[Any]], R]) -> R:
        """Wait for every vote, commit if no rank voted against the commit, and answer all ranks. Called on rank 0.

        Args:
            commit: called with the values in the order of ranks.

        Returns:
            Result of ``commit``.

        Raises:
            RankError: a rank voted against the commit, or was lost before voting; or ``commit`` failed.
            LateRankError: not every rank voted in time.
        """
        result: Any = None
        votes: list[tuple[Any, Failure | None]] = []
        own = self._own_error
        with reaching_the_store(self.operation):
            try:
                if late := self._wait(self._late):
                    raise self._late_error(late)
                votes = self._votes()
                failures = [failure for _, failure in votes if failure is not None]
            except RankError as e:
                failures = [Failure.of(e, self.rank)]
            if not failures:
                try:
                    result = commit([value for value, _ in votes])
                except BaseException as e:  # noqa: BLE001 - raised below, on every rank
                    own = e
                    failures = [Failure.of(e, self.rank)]
            self.may_be_committed = not failures
            # Every rank reads the failures of all ranks, so only the first failure keeps the traceback.
            sent = [*failures[:1], *(failure._replace(trace="") for failure in failures[1:])]
            self.store.set("released", pickle.dumps((result, sent)))
            self._leave()
        if failures:
            raise rank_error(self.operation, failures, own)
        return result

    def wait(self) -> Any:
        """Wait for the end of the vote, on a rank other than 0. Returns the result of the commit.

        Raises:
            RankError: a rank failed, or rank 0 failed to commit.
            LateRankError: a rank is late, or rank 0 was lost. See ``may_be_committed``.
        """
        self.may_be_committed = self._own_error is None  # until the answer of rank 0 is read
        with reaching_the_store(self.operation):
            if self._wait(self._silent_rank_0) and ((late := self._late()) or self._wait(self._silent_rank_0)):
                self._leave()
                raise self._late_error(late)
            value, failures = pickle.loads(self.store.get("released"))
            self._leave()
        self.may_be_committed = not failures
        if failures:
            raise rank_error(self.operation, failures, self._own_error)
        return value

    def _silent_rank_0(self) -> Sequence[int]:
        """Return rank 0 as long as it has not answered."""
        return () if self.store.check(["released"]) else (0,)

    def _wait(self, awaited: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Wait until ``awaited`` returns no rank. Return the awaited ranks after the timeout.

        The wait does not block inside the store. The pauses between requests grow, up to a limit that grows with the
        number of ranks.
        """
        start, limit = time.monotonic(), self.timeout.total_seconds()
        longest = max(_LONGEST_PAUSE_SECONDS, (self.world_size if self.rank else 1) / _CHECKS_PER_SECOND)
        while ranks := awaited():
            waited = time.monotonic() - start
            if waited >= limit:
                return ranks
            pause = min(max(waited / 8, _SHORTEST_PAUSE_SECONDS), longest)
            if pause == longest:
                self.check(ranks)
            time.sleep(min(pause, limit - waited))
        return ()

    def _late_error(self, late: Sequence[int]) -> LateRankError:
        """Return the error after a wait for the votes of ``late``; if ``late`` is empty, for the answer of rank 0."""
        seconds = f"{self.timeout.total_seconds():g} s"
        text = f"rank 0 voted, but has not answered within {seconds}. It is unknown whether rank 0 committed."
        if late:
            text = f"{format_ranks(late)} {'has' if len(late) == 1 else 'have'} not arrived within {seconds}."
        return LateRankError(f"{self.operation}: {text}", late or [0])

    def _late(self) -> list[int]:
        """Return the ranks that have not voted."""
        voters = self.store.get("voters").split() if self.store.check(["voters"]) else ()
        return sorted(set(range(self.world_size)).difference(map(int, voters)))

    def _votes(self) -> list[tuple[Any, Failure | None]]:
        """Return the value and the failure of every rank, in the order of ranks."""
        votes = [bytearray() for _ in range(self.world_size)]
        data = io.BytesIO(self.store.get("votes"))
        while data.tell() < len(data.getvalue()):
            rank, piece = pickle.load(data)
            votes[rank] += piece
        return [pickle.loads(vote) for vote in votes]

    def _leave(self) -> None:
        """Remove the keys of this vote on the last rank to leave: no other rank reads them any more."""
        if self.store.add("gone", 1) == self.world_size:
            for key in ("votes", "voters", "released", "gone"):
                self.store.delete_key(key)
