"""Numbers that parts of a run add to the one reduction that its ranks make in each batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from composerlite.dist.env import get_world_size

__all__ = ["Rider", "Riders"]


@final
class Rider:
    """A number of each rank, which the ranks add up in each batch of a run that it was added to.

    Args:
        number: gives this rank's; it waits for nobody.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self.number = number
        self.reduced = 0

    @property
    def total(self) -> int:
        """Of all ranks, as it was at the last reduction: the same on every rank. In one process: as it is now."""
        return self.number() if get_world_size() == 1 else self.reduced


@final
class Riders:
    """The riders of a run. Every rank adds the same ones in the same order, before training starts."""

    def __init__(self) -> None:
        self._riders: list[Rider] = []

    def add(self, rider: Rider) -> None:
        """Have the number of ``rider`` added up over the ranks in each batch, before ``BATCH_CHECKPOINT``."""
        self._riders.append(rider)

    def numbers(self) -> list[int]:
        """This rank's, to be reduced with others."""
        return [rider.number() for rider in self._riders]

    def settle(self, totals: Sequence[int]) -> None:
        """Take what the :meth:`numbers` of all ranks add up to."""
        for rider, total in zip(self._riders, totals, strict=True):
            rider.reduced = total
