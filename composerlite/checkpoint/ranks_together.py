"""What every rank does for itself, and all have done or none: a failure of one is raised by all, as what it is."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Mapping
from datetime import timedelta
from typing import TypeVar

import torch

from composerlite import dist
from composerlite.errors import CheckpointError, RankError

__all__ = ["SEEN_BY", "first_of", "from_first_rank", "together", "wait_together"]

T = TypeVar("T")
SEEN_BY = "Seen by rank"
"""How a note of an error begins that says which rank met with it."""


@contextlib.contextmanager
def together(what: str, timeout: timedelta | None = None) -> Generator[None]:
    """Run a block on every rank; afterwards it succeeded on all, or all raise the error of the lowest that failed.

    In one process it is the block alone. An error keeps its type, so that those who wait for a
    ``CheckpointNotFoundError`` get one on every rank.

    Args:
        what: the block does, for errors.
        timeout: of the wait for the others, from the end of this rank's block.

    Raises:
        RankError: a rank did not come, or was lost.
    """
    if dist.get_world_size() == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except RankError:
        raise  # the ranks cannot meet any more, or all have it
    except Exception as e:  # noqa: BLE001 - raised below, on every rank
        error = e
    if outcomes := dist.gather_outcomes(what, error, timeout):
        raise first_of(outcomes, error) from error


def from_first_rank(what: str, make: Callable[[], T]) -> T:
    """What ``make`` gives on rank 0, on every rank; it is called there only, and its error is raised by all."""
    value: T | None = None
    with together(what):
        if dist.get_global_rank() == 0:
            value = make()
    return dist.broadcast_object(value)  # type: ignore[return-value] - that of rank 0 is one


def wait_together(wait: Callable[[float], bool], timeout: timedelta) -> bool:
    """Wait until ``wait`` is true on every rank, or for ``timeout``; whether it is, the same on every rank.

    For waits that may take longer than a rank is waited for: in between the ranks hear of each other, and one that is
    lost is missed in time.

    Args:
        wait: waits itself, so many seconds at most, and says whether there is nothing left to wait for.
        timeout: of the whole.

    Raises:
        RankError: a rank failed or did not come.
    """
    if dist.get_world_size() == 1:
        return wait(timeout.total_seconds())
    turn = min(timeout, dist.get_control().timeout / 4)
    for _ in range(math.ceil(timeout / turn)):
        done = torch.tensor(int(wait(turn.total_seconds())))
        dist.all_reduce(done, "MIN")
        if done:
            return True
    return False


def first_of(outcomes: Mapping[int, BaseException], own: Exception | None) -> BaseException:
    """The error of the lowest rank that failed, to be raised on every rank: the same text everywhere."""
    rank = min(outcomes)
    error = outcomes[rank]
    if any(note.startswith(SEEN_BY) for note in getattr(error, "__notes__", ())):
        return error  # all ranks raise what one of them has met with, and it says which
    mine = own is not None and rank == dist.get_global_rank()
    if isinstance(error, CheckpointError):
        named = type(error)(f"{error} ({SEEN_BY} {rank}.)")
        return named.with_traceback(error.__traceback__) if mine else named
    error.add_note(f"{SEEN_BY} {rank}.")
    return error
