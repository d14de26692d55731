"""The order of the epoch that is over: by it a resume between two epochs finds out where the samplers stand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, final

from composerlite.errors import IncompatibleCheckpointError
from composerlite.trainer.data.held import Held, Pairs
from composerlite.types import StateDict

__all__ = ["PastOrder", "other_order"]

log = logging.getLogger(__name__)

Draw = Callable[[StateDict, Pairs], tuple[StateDict, bool] | None]


@final
class PastOrder:
    """The order of the last epoch, and of the first one that a new process draws.

    A sampler that counts epochs is, in a process that resumes, where it was when the run began. So the last epoch is
    drawn again before the next one begins: its order is the same where the sampler depends on what was restored, and
    then the sampler stands where it stood; it is the order of the first epoch where the sampler has started over.

    Args:
        held: by the loader, data set apart.

    Attributes:
        first: the order of the first epoch, as it was noted.
    """

    def __init__(self, held: Held) -> None:
        self._held = held
        self.first: StateDict | None = None
        self._last: StateDict | None = None

    def note(self, order: StateDict, **start: Any) -> None:
        """An epoch is over that began at ``start``, which is for :meth:`rejoin` to draw it again; its ``order``."""
        self._last = {"order": order, **start}
        if self.first is None:
            self.first = order

    def state_dict(self, *, between: bool) -> StateDict:
        """Content of a checkpoint; less where it is not saved ``between`` two epochs."""
        first = {} if self.first is None else {"first_order": self.first}
        return {**first, "last": self._last} if between and self._last is not None else first

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take back what :meth:`state_dict` gave."""
        self.first, self._last = state_dict.get("first_order"), state_dict.get("last")

    def rejoin(self, number: int, held: StateDict, fresh: Pairs, draw: Draw) -> None:
        """Put the samplers where they stood when epoch ``number`` was over.

        Args:
            number: of the last epoch.
            held: as :meth:`Held.state_dict` gave it then. fresh: the states of this process before that was loaded.
            draw: draws the last epoch again from its start, with these states. Gives its order, and whether that may be
                another one since training draws from the same generators; ``None`` where the two cannot be compared.

        Raises:
            IncompatibleCheckpointError: they have started over.
        """
        last = self._last
        if last is None or self._held.are_set(held):
            return
        suspects = self._held.suspects(held)
        states, order, is_shared = held.get("states", []), {}, False
        for start in [last["states"], fresh] if states else [fresh]:  # a state may be that of a pass that is over
            if (drawn := draw(last, start)) is None or drawn[0] == last["order"]:
                return
            order, is_shared = drawn
        self._held.load(states)
        if is_shared:
            return
        if order == self.first:
            where = f"epoch {number}, the last one, drawn again: it is the order of the first epoch"
            raise other_order(where, suspects)
        log.warning(
            "the order of epoch %d, the last one of the interrupted run, could not be drawn again: the data set or the "
            "sampler has changed, or it depends on something else than what a checkpoint restores. Then what follows "
            "is not the run that was interrupted.",
            number,
        )


def other_order(where: str, suspects: str) -> IncompatibleCheckpointError:
    """The error that the order of samples is another one than in the interrupted run.

    Args:
        where: that was found. suspects: see :meth:`Held.suspects`.
    """
    return IncompatibleCheckpointError(
        f"the data loader gives another order of samples than in the interrupted run ({where}). The data set, batch "
        "size or sampler has changed, or it draws from a generator that is shared with training: give it a generator "
        f"of its own.{suspects} To continue regardless, pass spin_dataloaders=False."
    )
