"""The numbered calls of ``fit`` of a run (``docs/adr/0013-fit-calls-and-settings.md``)."""

from __future__ import annotations

import logging
from typing import NamedTuple, final

from composerlite.core import State, Time, TimeInput, Timestamp, TimeUnit
from composerlite.errors import ConfigError
from composerlite.trainer.build import scaled_duration

__all__ = ["Calls"]

log = logging.getLogger(__name__)


@final
class _Raised(NamedTuple):
    """A call that raised in this process.

    Attributes:
        was_over: training had reached ``max_duration``.
        did_reset: the call had ``reset_time=True``.
    """

    was_over: bool
    did_reset: bool


@final
class Calls:
    """Counts the calls of ``fit`` of a run, including the calls before a resume, by ``state.fit_starts``.

    A call is finished when it has returned. After a call that raised, the next call continues it.

    Args:
        state: training state.

    Attributes:
        number: number of the current or next call, from 0.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.number = 0
        self._raised: _Raised | None = None
        self._scaled: dict[int, tuple[Time, Time | None]] = {}

    @property
    def is_finished(self) -> bool:
        """True if the run had finished this call before the checkpoint."""
        return self.number + 1 < len(self._state.fit_starts)

    @property
    def has_begun(self) -> bool:
        """True if this call has begun before: in this process and raised, or before the checkpoint."""
        return self.number < len(self._state.fit_starts)

    @property
    def is_retried(self) -> bool:
        """True if this call has raised in this process."""
        return self._raised is not None

    @property
    def only_ends(self) -> bool:
        """True if this call raised after its last batch, so that only its end remains."""
        return self._raised is not None and self._raised.was_over

    def set_end(self, duration: TimeInput | None, ratio: float | None, *, reset_time: bool) -> bool:
        """Set ``max_duration`` from the arguments of ``fit``.

        Returns:
            False if the arguments do not change ``max_duration``.
        """
        state, end = self._state, self._state.max_duration
        if duration is not None:
            time, start = Time.from_input(duration, TimeUnit.EPOCH), Timestamp() if reset_time else state.timestamp
            if self.has_begun:
                start = state.fit_starts[self.number]
            if int(start.batch_in_epoch) and start.batch_in_epoch == state.dataloader_len:
                start = start.to_next_epoch()  # the checkpoint is after the last batch of an epoch
            length = time if ratio is None else scaled_duration(time, ratio, argument="duration")
            state.max_duration = start.get(time.unit) + length
        elif ratio is not None and end is not None and not self.is_retried:
            whole, scaled = self._scaled.get(self.number, (end, None))
            whole = whole if scaled == end else end  # a call that raised a ConfigError has scaled the end before
            scaled = scaled_duration(whole, ratio)
            state.max_duration, self._scaled = scaled, {self.number: (whole, scaled)}
        else:
            return False
        return True

    def begin(self, *, reset_time: bool) -> None:
        """Begin or continue this call.

        Raises:
            ConfigError: there is no ``max_duration``, or ``reset_time`` is new in a call that continues.
        """
        state = self._state
        if self._raised is not None:
            if reset_time and not self._raised.did_reset:
                raise ConfigError(
                    f"reset_time=True: this call continues call {self.number + 1} of fit, which raised at batch "
                    f"{int(state.timestamp.batch)} and did not reset the time. Leave reset_time out; to start over, "
                    "build another Trainer."
                )
            log.info("call %d of fit raised at batch %d: it is continued", self.number + 1, int(state.timestamp.batch))
        if not self.has_begun and reset_time:
            state.timestamp, state.previous_timestamp, state.evaluated_at = Timestamp(), None, {}
            state.dataset_state = {"train": None, "eval": {}}
        end, stopped = state.max_duration, state.stopped
        if end is None:
            raise ConfigError("no duration to train for: pass max_duration to Trainer or duration to fit.")
        if stopped is not None:
            if not self.has_begun or end.unit is not stopped.unit or end > stopped:
                state.stopped = None  # the script asks for more training after stop_training
            else:
                state.max_duration = state.timestamp.batch

    def record_start(self) -> None:
        """Record the timestamp at the start of this call, unless the call continues."""
        if not self.has_begun:
            self._state.fit_starts = [*self._state.fit_starts, self._state.timestamp]

    def fail(self, *, begun_before: bool, reset_time: bool) -> None:
        """Record that this call raised. The next call continues it if it has trained on a batch.

        Args:
            begun_before: the call had begun before.
            reset_time: argument of the call.
        """
        state = self._state
        if not begun_before and state.timestamp == state.fit_starts[self.number]:
            state.fit_starts = state.fit_starts[: self.number]
        else:
            did_reset = reset_time or (self._raised is not None and self._raised.did_reset)
            self._raised = _Raised(state.training_is_over, did_reset)

    def finish(self) -> None:
        """Record that this call returns."""
        self.number, self._raised = self.number + 1, None
