"""The calls of ``fit`` of a run, by their numbers (``docs/adr/0013-fit-calls-and-settings.md``)."""

from __future__ import annotations

import logging
from typing import NamedTuple, final

from composerlite.core import State, Time, TimeInput, Timestamp, TimeUnit
from composerlite.errors import ConfigError
from composerlite.trainer import build

__all__ = ["Calls"]

log = logging.getLogger(__name__)


@final
class _Raised(NamedTuple):
    """State of a call that raised.

    Attributes:
        was_over: it had trained as long as it was to.
        did_reset: it counts from zero.
    """

    was_over: bool
    did_reset: bool


@final
class Calls:
    """The calls of ``fit``, in this process and, by ``state.fit_starts``, in those that a run is resumed from.

    A call is finished when it has returned. The one after a call that raised continues it.

    Args:
        state: of the run.

    Attributes:
        number: of the call to come, or of this one.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.number = 0
        self._raised: _Raised | None = None
        self._scaled: dict[int, tuple[Time, Time | None]] = {}

    @property
    def is_finished(self) -> bool:
        """Return true if an interrupted run had finished this call."""
        return self.number + 1 < len(self._state.fit_starts)

    @property
    def has_begun(self) -> bool:
        """Return true if this call has begun before: in this process, where it raised, or in another one."""
        return self.number < len(self._state.fit_starts)

    @property
    def is_retried(self) -> bool:
        """Return true if this call has raised in this process."""
        return self._raised is not None

    @property
    def only_ends(self) -> bool:
        """Return true if this call raised when it had trained as long as it was to: all but its end has been done."""
        return self._raised is not None and self._raised.was_over

    def set_end(self, duration: TimeInput | None, ratio: float | None, *, reset_time: bool) -> bool:
        """Set where this call ends, or ended, by the arguments of ``fit``; false where they do not say."""
        state, end = self._state, self._state.max_duration
        if duration is not None:
            time, start = Time.from_input(duration, TimeUnit.EPOCH), Timestamp() if reset_time else state.timestamp
            if self.has_begun:
                start = state.fit_starts[self.number]
            if int(start.batch_in_epoch) and start.batch_in_epoch == state.dataloader_len:
                start = start.to_next_epoch()  # a checkpoint of the last batch of an epoch: there is nothing left of it
            length = time if ratio is None else build.scaled_duration(time, ratio, argument="duration")
            state.max_duration = start.get(time.unit) + length
        elif ratio is not None and end is not None and not self.is_retried:
            whole, scaled = self._scaled.get(self.number, (end, None))
            whole = whole if scaled == end else end  # once, however often the call is refused
            scaled = build.scaled_duration(whole, ratio)
            state.max_duration, self._scaled = scaled, {self.number: (whole, scaled)}
        else:
            return False
        return True

    def begin(self, *, reset_time: bool) -> None:
        """Begin this call, or continue it.

        Raises:
            ConfigError: there is no end, or the clock is to be reset in the middle of the call.
        """
        state = self._state
        if self._raised is not None:
            if reset_time and not self._raised.did_reset:
                raise ConfigError(
                    f"reset_time=True: this call continues call {self.number + 1} of fit, which raised at batch "
                    f"{int(state.timestamp.batch)} and counts from where it began. Leave it out; to start over, build "
                    "another Trainer."
                )
            log.info("call %d of fit raised at batch %d: it is continued", self.number + 1, int(state.timestamp.batch))
        if not self.has_begun and reset_time:
            state.timestamp, state.previous_timestamp, state.evaluated_at = Timestamp(), None, {}
            state.dataset_state = {"train": None, "eval": {}}
        if state.max_duration is None:
            raise ConfigError("no duration to train for: pass max_duration to Trainer or duration to fit.")
        if not self.has_begun or build.is_later(state.max_duration, state.stopped):
            state.stopped = None
        elif state.stopped is not None:
            state.max_duration = state.timestamp.batch

    def note_start(self) -> None:
        """Note where this call begins, if it has not begun before: from here on it is one of the run."""
        if not self.has_begun:
            self._state.fit_starts = [*self._state.fit_starts, self._state.timestamp]

    def fail(self, *, begun_before: bool, reset_time: bool) -> None:
        """Note that this call raises: the next one continues it, if it has trained on anything.

        Args:
            begun_before: it had begun before it was called.
            reset_time: what it was called with.
        """
        state = self._state
        if not begun_before and state.timestamp == state.fit_starts[self.number]:
            state.fit_starts = state.fit_starts[: self.number]
        else:
            did_reset = reset_time or (self._raised is not None and self._raised.did_reset)
            self._raised = _Raised(state.training_is_over, did_reset)

    def finish(self) -> None:
        """Note that this call returns."""
        self.number, self._raised = self.number + 1, None
