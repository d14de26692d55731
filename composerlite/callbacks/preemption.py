"""PreemptionHandler: a preempted run saves what there is time for, and can be launched again."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, final

from composerlite import dist
from composerlite.callbacks.checkpoint_saver import CheckpointSaver
from composerlite.core import Callback, Logger, State, Time, TimeUnit
from composerlite.errors import ConfigError, Preempted, checked_arguments, did_you_mean, naming, raise_all
from composerlite.storage import leave_by

log = logging.getLogger(__name__)
GRACE_VARIABLE = "COMPOSERLITE_GRACE_PERIOD"
_SLURM_END, _SLURM_JOB = "SLURM_JOB_END_TIME", "SLURM_JOB_ID"
_DEFAULT_GRACE_SECONDS = 30.0
_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
_ONE_KEY_PRESS_SECONDS = 1.0
"""A launcher passes Ctrl-C on to processes that the terminal has sent it to as well."""
_SAFETY = 1.2
"""Multiple of the duration of the last save that must be left to begin one."""
_REQUEUE_SECONDS = 20.0

Handler = Callable[[int, FrameType | None], Any] | int | None


@final
class PreemptionHandler(Callback):
    """Ends training in good order when the process is preempted: by a scheduler, a spot market or Ctrl-C.

    A signal only sets a flag. The run ends after the batch, or between two batches of an evaluation, which the resumed
    run repeats. All ranks end after the same batch if one rank was signalled. Then every :class:`CheckpointSaver` that
    saves more than weights saves a checkpoint if there is time, and ``fit`` raises :class:`Preempted`, a
    ``SystemExit``.

    ``Trainer(autoresume=True)`` has one by itself: the same command resumes where the run was.

    Args:
        grace_period: how long there is between the request and the kill, as ``'30s'``, ``'2m'`` or a number of
            seconds. ``None``: ``COMPOSERLITE_GRACE_PERIOD`` of the environment; after SIGUSR1 in a Slurm job the time
            until its end; else 30 seconds, what torchrun and Kubernetes give by default.
        signals: names of the signals that ask for the end. The second SIGINT stops at once.
        exit_code: of the process; ``None`` for 128 and the number of the signal, which schedulers take for a signal
            rather than an error of the program.
        slurm_requeue: have the Slurm job put back into the queue, by ``scontrol requeue``.

    Raises:
        ConfigError: a grace period, signal or code that cannot be used.
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
        self._numbers = [_signal_number(name) for name in signals]
        if exit_code is not None and not 0 <= exit_code <= 255:
            raise ConfigError(f"exit_code={exit_code!r}: expected a number from 0 to 255, or None.")
        self._exit_code = exit_code
        self._slurm_requeue = slurm_requeue
        self._before: dict[int, Handler] = {}
        self._process = os.getpid()
        self._state: State | None = None
        self._logger: Logger | None = None
        self._reason = ""
        self._in_fit = False  # also where it raised, until something else is asked for
        self._code = 128 + signal.SIGTERM
        self._pressed_at = math.inf
        self._until = math.inf

    # ── hearing of it ────────────────────────────────────────────────────────────────────────────────────────────
    def preempt(self, reason: str = "preempt()", grace_period: str | float | Time | None = None) -> None:
        """Ask for the end of the run from any thread, as one that has heard of the end of a spot instance.

        Args:
            reason: for the log.
            grace_period: see the constructor.
        """
        given = None if grace_period is None else _seconds(grace_period, "grace_period")
        self._note(reason, 128 + signal.SIGTERM, given)
        if self._state is not None:
            self._state.interruption.request()

    def _note(self, reason: str, code: int, grace_seconds: float | None = None) -> None:
        call_raised = self._in_fit and not (self._state is not None and self._state.interruption.is_watched)
        if self._reason and not call_raised:
            return
        self._in_fit = self._in_fit and not call_raised
        if grace_seconds is None:
            grace_seconds = _DEFAULT_GRACE_SECONDS if self._grace_seconds is None else self._grace_seconds
        self._until = time.monotonic() + grace_seconds
        self._reason, self._code = reason, code

    def _heard(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        state = self._state
        if os.getpid() != self._process or state is None or not (state.interruption.is_watched or self._reason):
            self._let_through(number)
            return
        if number == signal.SIGINT:
            now = time.monotonic()
            self._pressed_at = min(self._pressed_at, now)
            if now - self._pressed_at > _ONE_KEY_PRESS_SECONDS:
                raise KeyboardInterrupt
        name = signal.Signals(number).name
        self._note(name, 128 + number, self._of_slurm() if number == signal.SIGUSR1 else None)
        state.interruption.request()

    def _of_slurm(self) -> float | None:
        """Seconds until the end of the Slurm job; ``None``: not known, or a period was given."""
        with contextlib.suppress(ValueError, KeyError):
            left = float(os.environ[_SLURM_END]) - time.time()
            return left if self._grace_seconds is None and left > 0 else None
        return None

    def _let_through(self, number: int) -> None:
        """Pass a signal to the previous handler: training is over, or this is a forked child."""
        signal.signal(number, _restorable(self._before.get(number, signal.SIG_DFL)))
        os.kill(os.getpid(), number)

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────
    def fit_start(self, state: State, logger: Logger) -> None:
        """Listen, if this is the main thread: Python hands signals to no other."""
        self._state, self._logger, self._process = state, logger, os.getpid()
        if self._in_fit:  # the last call raised, and this process lives on, as a notebook does: it was for that call
            self._reason, self._pressed_at = "", math.inf
        state.interruption.watch(self._leave, self._numbers)
        self._in_fit = True
        if self._reason:
            state.interruption.request()
        if threading.current_thread() is not threading.main_thread():
            log.warning("PreemptionHandler: fit runs in another thread than the main one and hears no signals")
            return
        for number in self._numbers:
            if number not in self._before:
                self._before[number] = signal.signal(number, self._heard)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Training is over: signals are as before."""
        self._in_fit = False
        self._stop_listening()

    def post_close(self) -> None:
        """Everything is saved and closed: signals are as before."""
        self._stop_listening()
        self._state = self._logger = None

    def _stop_listening(self) -> None:
        if threading.current_thread() is threading.main_thread() and os.getpid() == self._process:
            for number, handler in self._before.items():
                if signal.getsignal(number) == self._heard:
                    signal.signal(number, _restorable(handler))
            self._before = {}

    # ── leaving ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _leave(self) -> None:
        """Save, as far as the remaining time allows, and end. Collective, after the same batch on all ranks.

        Raises:
            Preempted: the run ends. Exception: what made a save fail, when every saver has tried.
        """
        state = self._state
        assert state is not None
        if state.training_is_over and state.interruption.evaluation is None:
            return  # it ends by itself
        asked = [one for one in dist.get_group().gather((self._reason, self._code, self._left)) if one[0]]
        reason, code, left = min(asked, key=lambda one: one[2])
        self._until = time.monotonic() + left
        leave_by(self._until)  # nothing waits for uploads longer: neither close nor the end of the program
        is_first = dist.get_global_rank() == 0
        if is_first:
            log.warning("%s: the run ends after batch %d, %.0f s are left", reason, int(state.timestamp.batch), left)
        savers = [saver for saver in state.callbacks if isinstance(saver, CheckpointSaver)]
        savers = [saver for saver in savers if not saver.weights_only and not saver.in_memory]
        kept, failures = list[str](), list[Exception]()
        for saver in savers:
            try:
                kept.append(self._keep(saver, state))
            except Exception as e:  # noqa: BLE001 - raised below: another saver may have room
                failures.append(e)
        if failures:
            if is_first and kept:
                log.warning("%s: a save failed; %s", reason, "; ".join(kept))
            raise_all(failures, f"{len(failures)} savers failed as the run was to end")
        newest = next((path for saver in savers[:1] for path in saver.saved_checkpoints[-1:]), None)
        if is_first:
            what = "; ".join(kept) or "nothing was saved: there is no CheckpointSaver that saves more than weights"
            log.warning(
                "%s. Launch the same command again to continue: %s; %.1f s of the grace period are left",
                reason,
                what,
                self._left,
            )
            if self._slurm_requeue:
                _requeue()
        raise Preempted(code if self._exit_code is None else self._exit_code, newest)

    @property
    def _left(self) -> float:
        return self._until - time.monotonic()

    def _keep(self, saver: CheckpointSaver, state: State) -> str:
        """Save where the run stands if there is time; what was kept, for the log."""
        group = dist.get_group()
        if not saver.has_saved(state) and int(state.timestamp.batch) > 0:
            reports = saver.manager.outcomes.reports
            expected = reports[-1].seconds["total"] if reports else 0.0
            needed = group.from_first("deciding what to save", lambda: expected * _SAFETY)
            left = group.from_first("deciding what to save", lambda: self._left)
            if needed > left:
                return (
                    f"no checkpoint of batch {int(state.timestamp.batch)} was begun: it takes {needed:.1f} s and "
                    f"{left:.1f} are left; the newest is {(saver.saved_checkpoints or ['none'])[-1]}"
                )
            saver.save_last(state)
        name = (saver.saved_checkpoints or [f"the checkpoint of batch {int(state.timestamp.batch)}"])[-1]
        published = saver.manager.published(self._left)
        if published is None:
            return f"kept {name}"
        if published:
            return f"kept {name}, and in the bucket"
        return f"kept {name} on this machine, whose upload continues: the next launch here finishes it"


def _seconds(value: str | float | Time, argument: str) -> float:
    """A grace period in seconds; ConfigError, which names ``argument``."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        with naming(argument, value):
            time_ = Time.from_input(value, TimeUnit.SECOND)
        if time_.unit is not TimeUnit.SECOND:
            raise ConfigError(
                f"{argument}={str(value)!r}: expected a time by the clock, such as '30s', '2m' or seconds."
            )
        seconds = float(time_.value)
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{argument}={value!r}: expected more than 0 seconds.")
    return seconds


def _signal_number(name: str) -> int:
    known = [one.name for one in signal.Signals if one not in (signal.SIGKILL, signal.SIGSTOP)]
    if name not in known:
        raise ConfigError(f"signals: {name!r} is not a signal that a process can handle.{did_you_mean(name, known)}")
    return int(signal.Signals[name])


def _restorable(handler: Handler) -> Any:
    """Handler as ``signal.signal`` takes it; ``None`` is a handler that Python has not set."""
    return signal.SIG_DFL if handler is None else handler


def _requeue() -> None:
    job = os.environ.get(_SLURM_JOB)
    if job is None:
        log.error("slurm_requeue=True: %s is not set, this is no Slurm job", _SLURM_JOB)
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=_REQUEUE_SECONDS, capture_output=True)
    except (OSError, subprocess.SubprocessError) as e:
        log.error("the Slurm job %s could not be requeued: %s %s", job, e, getattr(e, "stderr", b"") or "")
    else:
        log.warning("the Slurm job %s is in the queue again", job)
