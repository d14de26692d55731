"""The schedulers of a run: those of the constructor, or of the last call of ``fit`` that was given some."""

from __future__ import annotations

import logging
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from composerlite._torch_compat import mark_as_stepped
from composerlite.core import State
from composerlite.core.state.run_state import by_class
from composerlite.optim import ComposerScheduler
from composerlite.trainer import build
from composerlite.trainer.checks import as_list
from composerlite.trainer.settings import rebase

__all__ = ["Schedules"]

log = logging.getLogger(__name__)

_SET_BY_SCHEDULERS = (
    *("lr", "initial_lr", "min_lr", "max_lr", "swa_lr"),
    *("momentum", "betas", "base_momentum", "max_momentum"),
)


@final
class Schedules:
    """Schedulers that the script gives, and the torch schedulers in ``state`` that are built of them.

    A checkpoint is loaded before ``fit`` is given anything. What it holds of schedulers is restored once the call that
    was interrupted has its own, which may be those of a call before it.

    Args:
        state: of the run.
        given: to the constructor.
    """

    def __init__(self, state: State, given: object) -> None:
        self._state = state
        self._given: list[Any] = as_list(given, LRScheduler, ComposerScheduler, argument="schedulers")
        self._is_old = False
        self._loaded: list[dict[str, Any]] | None = None
        state.script.schedulers_in_fit = True

    @property
    def need_no_end(self) -> bool:
        """Return true if all can be built before the end of the run is known."""
        return all(isinstance(one, LRScheduler) for one in self._given)

    def step_every_batch(self) -> bool:
        """Return true if the learning rate changes each batch where nobody has said when, and not each epoch."""
        return not any(isinstance(s, LRScheduler) and not isinstance(s, ReduceLROnPlateau) for s in self._given)

    def note_loaded(self) -> None:
        """Record the rates of the optimizer as loaded: torch's schedulers change them when they are made."""
        if int(self._state.timestamp.batch) > 0:
            mark_as_stepped(self._state.optimizers[0])
        if self._state.resumed.schedulers is not None:
            self._loaded = [_set_by_schedulers(group) for group in self._state.optimizers[0].param_groups]

    def give(self, given: object, ratio: float | None) -> None:
        """Note the arguments of a call of ``fit``: schedulers, and a scale schedule ratio."""
        if given is not None:
            self._given = as_list(given, LRScheduler, ComposerScheduler, argument="schedulers")
        self._is_old = self._is_old or given is not None or ratio is not None

    def build(self, ratio: float, *, keep_rates: bool) -> None:
        """Build the schedulers. ``keep_rates``: keep the learning rates that there are, also within an epoch."""
        groups = self._state.optimizers[0].param_groups
        rates = [group["lr"] for group in groups]
        self._state.schedulers = build.build_schedulers(self._given, self._state, scale_schedule_ratio=ratio)
        self._is_old = False
        if keep_rates:
            mark_as_stepped(self._state.optimizers[0])
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def begin(self, ratio: float, *, begun_before: bool, are_given: bool) -> None:
        """Put the schedulers of a call of ``fit`` into the state, and restore them.

        Args:
            ratio: scale schedule ratio.
            begun_before: the call was interrupted, in this process or another.
            are_given: the call was given schedulers.
        """
        state = self._state
        changed_groups = self._is_old
        if self._is_old or len(state.schedulers) < len(self._given):
            self.build(ratio, keep_rates=begun_before)
        loaded, state.resumed.schedulers, state.script.schedulers_in_fit = state.resumed.schedulers, None, False
        if loaded is None:
            return
        if are_given and not begun_before:  # the run that was loaded knows nothing of these
            unmatched = loaded.unmatched(by_class(loaded.restored))
        else:
            own = by_class(state.schedulers)
            late = loaded.restore(own)
            before = tuple(state.resumed.metadata.get("learning_rates", ()))
            if before and before != tuple(state.script.learning_rates):
                rebase(late, state.script.learning_rates)
            unmatched = loaded.unmatched(own)
        if begun_before and changed_groups and self._loaded is not None:
            for group, values in zip(state.optimizers[0].param_groups, self._loaded, strict=False):
                group.update(values)
        self._loaded = None
        if unmatched:
            log.warning("%s does not match the run in all parts: %s", loaded.source, "; ".join(unmatched))


def _set_by_schedulers(group: dict[str, Any]) -> dict[str, Any]:
    values = {name: group[name] for name in _SET_BY_SCHEDULERS if name in group}
    return {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in values.items()}
