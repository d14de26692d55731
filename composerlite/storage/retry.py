"""Retries: RetryPolicy for all operations of object stores, and the decorator ``retry`` for any function."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar, final

from composerlite.errors import ConfigError, ObjectStoreTransientError

_SECONDS_BETWEEN_WARNINGS = 30.0

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_log = logging.getLogger(__name__)

# Training seeds and restores the generator of the module random, so pauses must not draw from that generator.
_random = random.SystemRandom()
_warned_at: dict[str, float] = {}
"""Time of the last warning of each cause."""


@final
@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number of attempts of an operation of an object store, and the pauses between attempts.

    Only an :class:`~composerlite.errors.ObjectStoreTransientError` is retried. A pause is random, between 0 and a bound
    that doubles every time.

    Args:
        attempts: total number of attempts, the first attempt included.
        first_delay_seconds: bound of the first pause.
        longest_delay_seconds: bound of every pause.
        budget_seconds: time after the first failure in which further attempts may begin.

    Raises:
        ConfigError: a value is out of its range.
    """

    attempts: int = 10
    first_delay_seconds: float = 0.25
    longest_delay_seconds: float = 20.0
    budget_seconds: float = 600.0

    def __post_init__(self) -> None:
        seconds = (self.first_delay_seconds, self.longest_delay_seconds, self.budget_seconds)
        if self.attempts < 1 or min(seconds) < 0:
            raise ConfigError(f"{self}: expected attempts of 1 or more, and seconds of 0 or more.")

    def run(self, operation: Callable[[], T], what: str, stopped: threading.Event | None = None) -> T:
        """Call ``operation`` until it succeeds and return its result.

        The first failure is logged as a warning if another attempt follows, at most every 30 seconds for each cause.
        Other failures are logged with level DEBUG.

        Args:
            operation: may be called several times.
            what: name of the operation in messages, such as ``"upload of 'run/ep1.pt'"``.
            stopped: when set, a pause ends and no further attempt begins.

        Returns:
            Result of ``operation``.

        Raises:
            ObjectStoreTransientError: after the last attempt, also if ``stopped`` or the budget ends the attempts. The
                message has the number of attempts.
            Exception: any other error of ``operation``, at once.
        """
        stopped = stopped or threading.Event()
        began, ends, attempt = time.monotonic(), math.inf, 0
        while True:
            attempt += 1
            try:
                return operation()
            except ObjectStoreTransientError as e:
                delay, now = self._delay(attempt), time.monotonic()
                ends = min(ends, now + self.budget_seconds)
                is_last = attempt >= self.attempts or now + delay >= ends or stopped.is_set()
                _log_failure(what, attempt, self.attempts, None if is_last else delay, e)
                if is_last or stopped.wait(delay):
                    seconds = time.monotonic() - began
                    raise ObjectStoreTransientError(f"{e} (attempts: {attempt}, in {seconds:.1f} s)") from e

    def _delay(self, attempt: int) -> float:
        bound = min(self.longest_delay_seconds, self.first_delay_seconds * 2.0 ** min(attempt - 1, 60))
        return _random.uniform(0.0, bound)


def _log_failure(what: str, attempt: int, attempts: int, delay: float | None, error: Exception) -> None:
    """Log a failed attempt. ``delay`` is the pause before the next attempt; ``None``: no further attempt."""
    cause, now, level = str(error).rpartition(": ")[2], time.monotonic(), logging.DEBUG
    is_due = now - _warned_at.get(cause, -math.inf) >= _SECONDS_BETWEEN_WARNINGS
    if attempt == 1 and delay is not None and is_due:
        level, _warned_at[cause] = logging.WARNING, now
    then = "the last" if delay is None else f"the next in {delay:.1f} s"
    _log.log(level, "%s: attempt %d of %d failed, %s: %s", what, attempt, attempts, then, error)


def retry(
    exc_class: type[Exception] | Sequence[type[Exception]] = Exception,
    num_attempts: int = 3,
    initial_backoff: float = 0.5,
    max_jitter: float = 0.5,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: call the function again after an ``exc_class``. The error of the last call is raised.

    A function with an argument ``retry_index`` gets the number of earlier calls.

    >>> @retry(OSError, num_attempts=2, initial_backoff=0.0, max_jitter=0.0)
    ... def read(path):
    ...     return open(path).read()

    Args:
        exc_class: one or several types of errors.
        num_attempts: total number of calls.
        initial_backoff: seconds before the second call. Doubles before each further call.
        max_jitter: largest number of random seconds added to each pause.

    Returns:
        A decorator.

    Raises:
        ConfigError: ``num_attempts`` is less than 1.
    """
    if num_attempts < 1:
        raise ConfigError(f"num_attempts={num_attempts}: expected 1 or more")
    errors = (exc_class,) if isinstance(exc_class, type) else tuple(exc_class)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        takes_index = "retry_index" in inspect.signature(function).parameters

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            attempt = 0
            while True:
                if takes_index:
                    kwargs["retry_index"] = attempt
                attempt += 1
                try:
                    return function(*args, **kwargs)
                except errors as e:
                    if attempt == num_attempts:
                        raise
                    delay = initial_backoff * 2 ** (attempt - 1) + _random.uniform(0.0, max_jitter)
                    _log_failure(getattr(function, "__qualname__", repr(function)), attempt, num_attempts, delay, e)
                    time.sleep(delay)

        return wrapper

    return decorate
