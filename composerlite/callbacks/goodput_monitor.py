"""GoodputMonitor: the share of the wall time spent on training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, final

from composerlite.core import Callback, Event, Logger, State, Time, TimeInput, create_interval_scheduler
from composerlite.errors import ConfigError, checked_arguments

log = logging.getLogger(__name__)

_PARTS = ("save_stall", "eval", "data", "restart")
"""Everything except training. Training is the rest, so all parts add up to the wall time."""


@final
class GoodputMonitor(Callback):
    """Logs the use of the wall time of a run, from the first call of ``fit`` on, over all interruptions.

    ==============================  ===================================================================================
    ``goodput/seconds/train``       training steps, callbacks and loggers: the rest of the time. This is the goodput
    ``goodput/seconds/save_stall``  training waits for saves
    ``goodput/seconds/eval``        evaluation within ``fit``
    ``goodput/seconds/data``        training waits for the next batch
    ``goodput/seconds/restart``     lost to interruptions: from the checkpoint until the resumed run trains again,
                                    including lost steps, down time and startup
    ``goodput/seconds/wall``        all parts together
    ``goodput/fraction/…``          each part divided by ``wall``
    ``goodput/restarts``            number of resumes
    ==============================  ===================================================================================

    Values are logged at ``log_interval``, at the end of epochs and at the end of ``fit``. Time between two calls of
    ``fit`` does not count, except for saves; nor does the time before a finished run is trained further. A run
    continues the counts of a checkpoint with the same ``run_name``. If the clock went back, a restart takes no time.

    Args:
        log_interval: a number of epochs, a time string or a function ``(state, event) -> bool``.

    Raises:
        ConfigError: the interval is invalid.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=GoodputMonitor(), save_folder="runs/fox", autoresume=True)
    """

    @checked_arguments
    def __init__(self, log_interval: TimeInput | Callable[[State, Event], bool] = "100ba") -> None:
        try:
            self._log_due = create_interval_scheduler(log_interval, checkpoint_events=False)
        except ConfigError as e:
            raise ConfigError(f"GoodputMonitor(log_interval={log_interval!r}): {e}") from e
        self._state: State | None = None  # during fit
        self._end: Time | None = None
        self._reset("")

    def _reset(self, run_name: str) -> None:
        self._run_name = run_name
        self._restarts = 0
        self._wall = 0.0
        self._seconds = dict.fromkeys(_PARTS, 0.0)
        self._resumed_from: float | None = None  # time of the checkpoint, until the resumed run trains
        self._counted_until: float | None = None  # by time.monotonic; None: outside of training
        self._savers: list[Any] = []  # callbacks with blocked_seconds: seconds for which saves have blocked training
        self._blocked = self._data_began = self._eval_began = 0.0

    def report(self) -> dict[str, float]:
        """Return the metrics without ``goodput/``: ``{'seconds/train': 3.5, 'fraction/train': 0.9, 'restarts': 0, …}``.

        Fractions are 0 before training.
        """
        self._count()
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

    def fit_start(self, state: State, logger: Logger) -> None:
        self._state, self._end = state, state.max_duration
        self._counted_until = None
        if self._resumed_from is None or self._run_name != state.run_name:
            self._begin(state)

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._data_began = time.monotonic()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if self._counted_until is None:  # resumed, and about to train: the data are loaded
            self._begin(state)
        else:
            self._seconds["data"] += time.monotonic() - self._data_began

    def eval_before_all(self, state: State, logger: Logger) -> None:
        self._eval_began = time.monotonic()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if self._counted_until is not None:
            self._seconds["eval"] += time.monotonic() - self._eval_began

    def batch_end(self, state: State, logger: Logger) -> None:
        self._count()
        if self._log_due(state, Event.BATCH_END):
            self._log(logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._log(logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._log(logger)
        self._state = self._counted_until = None

    def _begin(self, state: State) -> None:
        """Count the time from now on. If the run was resumed, add the time since the checkpoint as a restart."""
        if self._run_name != state.run_name:  # a new run, or a run that began with a checkpoint of another run
            self._reset(state.run_name)
        if self._resumed_from is not None:
            lost = time.time() - self._resumed_from
            if lost < 0:
                log.warning("GoodputMonitor: the clock went back by %.1f s: the restart takes no time", -lost)
            self._seconds["restart"] += max(0.0, lost)
            self._wall += max(0.0, lost)
            self._restarts += 1
            self._resumed_from = None
        self._savers = [callback for callback in state.callbacks if hasattr(callback, "blocked_seconds")]
        self._blocked = sum(saver.blocked_seconds for saver in self._savers)
        self._counted_until = time.monotonic()

    def _count(self) -> None:
        """Add the time since the last call. Outside of ``fit`` only saves count."""
        blocked = sum(saver.blocked_seconds for saver in self._savers)
        stall, self._blocked = blocked - self._blocked, blocked
        self._seconds["save_stall"] += stall
        if self._counted_until is None:
            self._wall += stall
        else:
            now = time.monotonic()
            self._wall += now - self._counted_until
            self._counted_until = now

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the time if training is in progress."""
        self._count()
        state, end = self._state, self._end
        is_unfinished = state is not None and (end is None or state.timestamp < end)
        is_interrupted = is_unfinished and self._counted_until is not None
        return {
            "run_name": self._run_name,
            "wall": self._wall,
            "seconds": dict(self._seconds),
            "restarts": self._restarts,
            "interrupted_at": time.time() if is_interrupted else self._resumed_from,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the counts. The time until training begins is a restart if training was in progress."""
        self._reset(state_dict["run_name"])
        self._wall = float(state_dict["wall"])
        self._seconds.update(state_dict["seconds"])
        self._restarts = int(state_dict["restarts"])
        self._resumed_from = state_dict["interrupted_at"]
