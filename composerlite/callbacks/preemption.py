"""PreemptionHandler: a preempted run saves a checkpoint in time, and can be launched again."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, final

from composerlite import dist
from composerlite.callbacks.checkpoint_saver import CheckpointSaver
from composerlite.core import Callback, Logger, State, Time, TimeUnit
from composerlite.errors import ConfigError, Preempted, checked_arguments, did_you_mean, naming, raise_all
from composerlite.storage import leave_by

log = logging.getLogger(__name__)
GRACE_VARIABLE = "COMPOSERLITE_GRACE_PERIOD"
_DEFAULT_GRACE_SECONDS = 30.0
_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
_ONE_KEY_PRESS_SECONDS = 1.0
"""A launcher may forward Ctrl-C to processes that got the signal from the terminal already."""
_SAFETY = 1.2
"""A save begins if the time left is at least this multiple of the duration of the last save."""
_REQUEUE_SECONDS = 20.0


@final
class PreemptionHandler(Callback):
    """Saves a checkpoint and ends training when the process is preempted: by a scheduler, a spot market or Ctrl-C.

    A signal only sets a flag. The run ends after the batch, or between two batches of an evaluation, which the resumed
    run repeats. All ranks end after the same batch if one rank got a signal. Then every :class:`CheckpointSaver` that
    saves more than weights saves a checkpoint, if there is time, and ``fit`` raises :class:`Preempted`, a
    ``SystemExit``.

    ``Trainer(autoresume=True)`` adds a handler: the same command resumes the run.

    Args:
        grace_period: time between the signal and the kill, as ``'30s'``, ``'2m'`` or a number of seconds. ``None``:
            ``COMPOSERLITE_GRACE_PERIOD`` of the environment; after SIGUSR1 in a Slurm job the time until the end of the
            job; otherwise 30 seconds, the default of torchrun and Kubernetes.
        signals: names of the signals that preempt the run. The second SIGINT ends the process at once.
        exit_code: exit code of the process; ``None``: 128 plus the number of the signal, which schedulers do not count
            as an error of the program.
        slurm_requeue: put the Slurm job back into the queue, with ``scontrol requeue``.

    Raises:
        ConfigError: the grace period, a signal or the code is invalid.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=PreemptionHandler("2m", slurm_requeue=True), save_folder="runs/fox")
    """

    @checked_arguments
    def __init__(
        self,
        grace_period: str | float | Time | None = None,
        *,
        signals: Sequence[str] = _SIGNALS,
        exit_code: int | None = None,
        slurm_requeue: bool = False,
    ) -> None:
        self._grace_seconds = None if grace_period is None else _seconds(grace_period, "grace_period")
        if grace_period is None and (given := os.environ.get(GRACE_VARIABLE)):
            self._grace_seconds = _seconds(given, GRACE_VARIABLE)
        if isinstance(signals, str):
            raise ConfigError(f"signals={signals!r}: expected a list of names.")
        known = [one.name for one in signal.Signals if one not in (signal.SIGKILL, signal.SIGSTOP)]
        for name in signals:
            if name not in known:
                raise ConfigError(
                    f"signals: {name!r} is not a signal that a process can handle.{did_you_mean(name, known)}"
                )
        if exit_code is not None and not 0 <= exit_code <= 255:
            raise ConfigError(f"exit_code={exit_code!r}: expected a number from 0 to 255, or None.")
        self._numbers = [int(signal.Signals[name]) for name in signals]
        self._exit_code = exit_code
        self._slurm_requeue = slurm_requeue
        self._handlers: dict[int, Any] = {}  # the handlers before fit
        self._process = os.getpid()
        self._state: State | None = None
        self._reason = ""  # of the preemption
        self._in_fit = False  # stays true after a fit that raised
        self._code = 128 + signal.SIGTERM
        self._pressed_at = math.inf
        self._until = math.inf

    def preempt(self, reason: str = "preempt()", grace_period: str | float | Time | None = None) -> None:
        """Preempt the run from any thread, such as a thread that polls the metadata of a spot instance.

        Args:
            reason: text for the log.
            grace_period: time until the kill; see the constructor.
        """
        seconds = None if grace_period is None else _seconds(grace_period, "grace_period")
        self._note(reason, 128 + signal.SIGTERM, seconds)
        if self._state is not None:
            self._state.interruption.request()

    def _note(self, reason: str, code: int, grace_seconds: float | None = None) -> None:
        """Set the reason and the end of the grace period, unless the run is preempted already."""
        fit_raised = self._in_fit and not (self._state is not None and self._state.interruption.is_watched)
        if self._reason and not fit_raised:
            return
        self._in_fit = self._in_fit and not fit_raised
        if grace_seconds is None:
            grace_seconds = _DEFAULT_GRACE_SECONDS if self._grace_seconds is None else self._grace_seconds
        self._until = time.monotonic() + grace_seconds
        self._reason, self._code = reason, code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        state = self._state
        if os.getpid() != self._process or state is None or not (state.interruption.is_watched or self._reason):
            # A forked child, or training is over: use the handler from before fit.
            signal.signal(number, self._handlers.get(number, signal.SIG_DFL))
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT:
            self._pressed_at = min(self._pressed_at, time.monotonic())
            if time.monotonic() - self._pressed_at > _ONE_KEY_PRESS_SECONDS:
                raise KeyboardInterrupt
        seconds = None
        if number == signal.SIGUSR1 and self._grace_seconds is None:
            with contextlib.suppress(ValueError, KeyError):
                left = float(os.environ["SLURM_JOB_END_TIME"]) - time.time()
                seconds = left if left > 0 else None
        self._note(signal.Signals(number).name, 128 + number, seconds)
        state.interruption.request()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Register the signal handlers, in the main thread: Python calls handlers in no other thread."""
        self._state, self._process = state, os.getpid()
        if self._in_fit:  # the last fit raised, and the process continues, as a notebook does
            self._reason, self._pressed_at = "", math.inf
        state.interruption.watch(self._save_and_exit, self._numbers)
        self._in_fit = True
        if self._reason:
            state.interruption.request()
        if threading.current_thread() is not threading.main_thread():
            log.warning("PreemptionHandler: fit does not run in the main thread, so the run gets no signals")
            return
        for number in self._numbers:
            if number not in self._handlers:
                before = signal.signal(number, self._on_signal)
                self._handlers[number] = signal.SIG_DFL if before is None else before  # None: not set by Python

    def fit_end(self, state: State, logger: Logger) -> None:
        """Restore the signal handlers."""
        self._in_fit = False
        self._restore_handlers()

    def post_close(self) -> None:
        """Restore the signal handlers after all savers have closed."""
        self._restore_handlers()
        self._state = None

    def _restore_handlers(self) -> None:
        if threading.current_thread() is threading.main_thread() and os.getpid() == self._process:
            for number, handler in self._handlers.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, handler)
            self._handlers = {}

    def _save_and_exit(self) -> None:
        """Save if the time suffices, and raise. Collective: all ranks call this method after the same batch.

        Raises:
            Preempted: the run ends.
            Exception: a save failed. The other savers have saved.
        """
        state = self._state
        assert state is not None
        if state.training_is_over and state.interruption.evaluation is None:
            return
        everyone = dist.get_group().gather((self._reason, self._code, self._seconds_left))
        reason, code, left = min((one for one in everyone if one[0]), key=lambda one: one[2])
        self._until = time.monotonic() + left
        leave_by(self._until)  # close and the end of the program do not wait longer for uploads
        is_first = dist.get_global_rank() == 0
        if is_first:
            log.warning("%s: the run ends after batch %d, %.0f s are left", reason, int(state.timestamp.batch), left)
        savers = [saver for saver in state.callbacks if isinstance(saver, CheckpointSaver)]
        savers = [saver for saver in savers if not saver.weights_only and not saver.in_memory]
        results, failures = list[str](), list[Exception]()
        for saver in savers:
            try:
                results.append(self._save(saver, state))
            except Exception as e:  # noqa: BLE001 - raised below: another saver may have free space
                failures.append(e)
        if failures:
            if is_first and results:
                log.warning("%s: a save failed; %s", reason, "; ".join(results))
            raise_all(failures, f"{len(failures)} savers failed at the end of a preempted run")
        newest = next((path for saver in savers[:1] for path in saver.saved_checkpoints[-1:]), None)
        if is_first:
            log.warning(
                "%s. Launch the same command again to continue: %s; %.1f s of the grace period are left",
                reason,
                "; ".join(results) or "nothing was saved: there is no CheckpointSaver that saves more than weights",
                self._seconds_left,
            )
            if self._slurm_requeue:
                _requeue()
        raise Preempted(code if self._exit_code is None else self._exit_code, newest)

    @property
    def _seconds_left(self) -> float:
        return self._until - time.monotonic()

    def _save(self, saver: CheckpointSaver, state: State) -> str:
        """Save a checkpoint of the present batch if the time suffices. Return a text for the log."""
        batch = int(state.timestamp.batch)
        if not saver.has_saved(state) and batch > 0:
            reports = saver.manager.outcomes.reports
            expected = reports[-1].seconds["total"] if reports else 0.0
            needed, left = dist.get_group().from_first(
                "deciding what to save", lambda: (expected * _SAFETY, self._seconds_left)
            )
            if needed > left:
                return (
                    f"no checkpoint of batch {batch} was saved: a save takes {needed:.1f} s and {left:.1f} are left; "
                    f"the newest is {(saver.saved_checkpoints or ['none'])[-1]}"
                )
            saver.save_last(state)
        name = (saver.saved_checkpoints or [f"the checkpoint of batch {batch}"])[-1]
        published = saver.manager.published(self._seconds_left)
        if published is None:
            return f"kept {name}"
        if published:
            return f"kept {name}, and in the bucket"
        return f"kept {name} on this machine; the next launch on this machine finishes the upload"


def _seconds(value: str | float | Time, argument: str) -> float:
    """Return a grace period in seconds. Errors name ``argument``."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        with naming(argument, value):
            time_ = Time.from_input(value, TimeUnit.SECOND)
        if time_.unit is not TimeUnit.SECOND:
            raise ConfigError(f"{argument}={str(value)!r}: expected seconds, or a time such as '30s' or '2m'.")
        seconds = float(time_.value)
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{argument}={value!r}: expected more than 0 seconds.")
    return seconds


def _requeue() -> None:
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        log.error("slurm_requeue=True: SLURM_JOB_ID is not set, so the process is not in a Slurm job")
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=_REQUEUE_SECONDS, capture_output=True)
    except (OSError, subprocess.SubprocessError) as e:
        log.error("could not requeue the Slurm job %s: %s %s", job, e, getattr(e, "stderr", b"") or "")
    else:
        log.warning("the Slurm job %s is in the queue again", job)
