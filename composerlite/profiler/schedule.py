"""Schedules that select the batches to profile."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

from composerlite.errors import ConfigError

if TYPE_CHECKING:
    from composerlite.core import State


class ProfilerAction(StrEnum):
    """Action of the profiler in a batch: skip, warm up, record, or record and save the trace after the batch."""

    SKIP = "skip"
    WARMUP = "warmup"
    ACTIVE = "active"
    ACTIVE_AND_SAVE = "active_and_save"


def cyclic_schedule(
    skip_first: int = 0, wait: int = 0, warmup: int = 1, active: int = 4, repeat: int = 1
) -> Callable[[State], ProfilerAction]:
    """Return a schedule with cycles of waiting, warming up and recording in each epoch.

    The trace of a cycle is saved after the last recorded batch, or at the end of the epoch. A run that resumes in the
    middle of an epoch counts from the batch of the resume.

    Args:
        skip_first: batches to skip at the start of an epoch.
        wait: batches to skip at the start of a cycle.
        warmup: batches to warm up.
        active: batches to record.
        repeat: cycles in an epoch; 0: as many as fit.

    Returns:
        A function from the state to the action of the next batch.

    Raises:
        ConfigError: a number is negative, or ``active`` is 0.

    Example:
        .. code-block:: python

            Profiler(cyclic_schedule(skip_first=10, active=2))
    """
    for name, value in (("skip_first", skip_first), ("wait", wait), ("warmup", warmup), ("repeat", repeat)):
        if value < 0:
            raise ConfigError(f"cyclic_schedule({name}={value}): expected 0 or more.")
    if active < 1:
        raise ConfigError(f"cyclic_schedule(active={active}): expected a number of batches to record, 1 or more.")
    cycle = wait + warmup + active

    def schedule(state: State) -> ProfilerAction:
        profiler = state.profiler
        resumed_at = 0 if profiler is None else profiler.resumption_batch_idx
        batch = int(state.timestamp.batch_in_epoch) - skip_first - resumed_at
        length = state.dataloader_len
        left = None if length is None else int(length) - int(state.timestamp.batch_in_epoch)
        if batch < 0 or (repeat and batch >= cycle * repeat) or left == 0:
            return ProfilerAction.SKIP
        place = batch % cycle
        if place < wait:
            return ProfilerAction.SKIP
        if place < wait + warmup:
            return ProfilerAction.WARMUP
        is_last = place == cycle - 1 or left == 1
        return ProfilerAction.ACTIVE_AND_SAVE if is_last else ProfilerAction.ACTIVE

    return schedule
