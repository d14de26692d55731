"""GoodputMonitor: how much of the wall time was training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol, final, runtime_checkable

from composerlite.core import Callback, Event, Logger, State, Time, TimeInput, create_interval_scheduler
from composerlite.errors import ConfigError, checked_arguments

log = logging.getLogger(__name__)

_PARTS = ("save_stall", "eval", "data", "restart")
"""What is not training. Training is the rest, so that all of them add up to the wall time."""


@runtime_checkable
class _BlockingSaver(Protocol):
    """A callback that measures the seconds for which its saves have blocked training."""

    @property
    def blocked_seconds(self) -> float: ...


@final
class GoodputMonitor(Callback):
    """Logs where the wall time of a run went, from the first call of ``fit`` on, over all its interruptions.

    ==============================  ===================================================================================
    ``goodput/seconds/train``       the rest: training steps, and what callbacks and loggers take. This is the goodput
    ``goodput/seconds/save_stall``  saves blocked training
    ``goodput/seconds/eval``        evaluation within ``fit``
    ``goodput/seconds/data``        waiting for the next batch
    ``goodput/seconds/restart``     lost to interruptions: from the checkpoint that the run was resumed from until it
                                    trained again, so with the steps that were lost, the time it was down, and starting
    ``goodput/seconds/wall``        all of them together
    ``goodput/fraction/…``          each as a part of ``wall``
    ``goodput/restarts``            how often the run was resumed
    ==============================  ===================================================================================

    They are logged at ``log_interval``, at the end of epochs and at the end of ``fit``. Time between two calls of
    ``fit`` does not count, but for what saves take of it; nor does the time before a run that had reached its end is
    trained further. A run continues counting where its checkpoint stopped if it has the same ``run_name``; a clock that
    went back counts as no time.

    Args:
        log_interval: when to log: a number of epochs, a time string or a function ``(state, event) -> bool``.
        clock: seconds that never go back, for what happens within the process.
        utc: seconds since 1970, for what happens between processes.

    Raises:
        ConfigError: an interval that cannot be read.
    """

    @checked_arguments
    def __init__(
        self,
        log_interval: TimeInput | Callable[[State, Event], bool] = "100ba",
        clock: Callable[[], float] = time.monotonic,
        utc: Callable[[], float] = time.time,
    ) -> None:
        try:
            self._log_due = create_interval_scheduler(log_interval, checkpoint_events=False)
        except ConfigError as e:
            raise ConfigError(f"GoodputMonitor(log_interval={log_interval!r}): {e}") from e
        self._clock = clock
        self._utc = utc
        self._state: State | None = None  # while fit runs
        self._end: Time | None = None
        self._start_over("")

    def _start_over(self, run_name: str) -> None:
        self._run_name = run_name
        self._restarts = 0
        self._wall = 0.0
        self._seconds = dict.fromkeys(_PARTS, 0.0)
        self._resumed_from: float | None = None  # when the checkpoint was saved that the run will resume from
        self._looked_at: float | None = None  # the clock, up to which everything is counted; None: it stands still
        self._savers: list[_BlockingSaver] = []
        self._blocked = self._data_began = self._eval_began = 0.0

    # ── report ───────────────────────────────────────────────────────────────────────────────────────────────────
    def report(self) -> dict[str, float]:
        """The metrics, without ``goodput/``: ``{'seconds/train': 3.5, …, 'fraction/train': 0.9, …, 'restarts': 0}``.

        Fractions are 0 before there is anything to take a part of.
        """
        self._look_at_the_clock()
        train = max(0.0, self._wall - sum(self._seconds.values()))
        seconds = {"train": train, **self._seconds}
        return {
            **{f"seconds/{name}": value for name, value in seconds.items()},
            "seconds/wall": self._wall,
            **{f"fraction/{name}": value / self._wall if self._wall else 0.0 for name, value in seconds.items()},
            "restarts": float(self._restarts),
        }

    def _log(self, logger: Logger) -> None:
        logger.log_metrics({f"goodput/{name}": value for name, value in self.report().items()})

    # ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────
    def fit_start(self, state: State, logger: Logger) -> None:
        self._state, self._end = state, state.max_duration
        self._looked_at = None
        if self._resumed_from is None or self._run_name != state.run_name:
            self._begin(state)

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._data_began = self._clock()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if self._looked_at is None:  # resumed, and about to train. It may also have ended at FIT_START
            self._begin(state)
        else:
            self._seconds["data"] += self._clock() - self._data_began

    def eval_before_all(self, state: State, logger: Logger) -> None:
        self._eval_began = self._clock()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if self._looked_at is not None:
            self._seconds["eval"] += self._clock() - self._eval_began

    def batch_end(self, state: State, logger: Logger) -> None:
        self._look_at_the_clock()
        if self._log_due(state, Event.BATCH_END):
            self._log(logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._log(logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._log(logger)
        self._state = self._looked_at = None

    def _begin(self, state: State) -> None:
        """Count from now on; first what an interruption has cost, if this run was resumed."""
        if self._run_name != state.run_name:  # new, or begun with a checkpoint of another run
            self._start_over(state.run_name)
        if self._resumed_from is not None:
            lost = self._utc() - self._resumed_from
            if lost < 0:
                log.warning("GoodputMonitor: the clock went back by %.1f s: the restart counts as no time", -lost)
            self._seconds["restart"] += max(0.0, lost)
            self._wall += max(0.0, lost)
            self._restarts += 1
            self._resumed_from = None
        self._savers = [callback for callback in state.callbacks if isinstance(callback, _BlockingSaver)]
        self._looked_at, self._blocked = self._clock(), self._blocked_seconds()

    def _look_at_the_clock(self) -> None:
        """Add the time since the last call; outside of fit, only the part that saves took."""
        blocked = self._blocked_seconds() - self._blocked
        self._blocked += blocked
        self._seconds["save_stall"] += blocked
        if self._looked_at is None:
            self._wall += blocked
        else:
            now = self._clock()
            self._wall += now - self._looked_at
            self._looked_at = now

    def _blocked_seconds(self) -> float:
        return sum(saver.blocked_seconds for saver in self._savers)

    # ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────
    def state_dict(self) -> dict[str, Any]:
        """The counts so far, and when that was."""
        self._look_at_the_clock()
        return {
            "run_name": self._run_name,
            "wall": self._wall,
            "seconds": dict(self._seconds),
            "restarts": self._restarts,
            "interrupted_at": self._utc() if self._is_unfinished() else self._resumed_from,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting from there. What has passed since then is a restart, unless no training was in progress."""
        self._start_over(state_dict["run_name"])
        self._wall = float(state_dict["wall"])
        self._seconds.update(state_dict["seconds"])
        self._restarts = int(state_dict["restarts"])
        self._resumed_from = state_dict["interrupted_at"]

    def _is_unfinished(self) -> bool:
        """Return true if a checkpoint of now would be one of a training that continues."""
        if self._looked_at is None or self._state is None:
            return False
        return self._end is None or self._state.timestamp < self._end
