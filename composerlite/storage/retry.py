"""Trying again what may pass: one policy, for errors that say so themselves and for no others."""

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

# The generator of the module random belongs to training: it is seeded, the same on every rank.
_chance = random.SystemRandom()


@final
@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Policy of trying an operation of an object store again: how often, and after which pauses.

    Only an :class:`~composerlite.errors.ObjectStoreTransientError` is. The pause before the next attempt is anything
    between none and a bound that doubles every time, so that many processes which failed together do not come back
    together; before it is the time that the service asks for, up to the longest pause.

    Args:
        attempts: in all, the first one included.
        first_delay_seconds: bound of the first pause.
        longest_delay_seconds: bound of every pause.
        budget_seconds: no attempt begins that long after the first one failed, which a large upload may do late.

    Raises:
        ConfigError: a value is out of its range.
    """

    attempts: int = 10
    first_delay_seconds: float = 0.25
    longest_delay_seconds: float = 20.0
    budget_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"attempts={self.attempts}: expected 1 (never again) or more")
        for name in ("first_delay_seconds", "longest_delay_seconds", "budget_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}: expected 0 or more")

    def run(self, operation: Callable[[], T], what: str, stopped: threading.Event | None = None) -> T:
        """Call ``operation`` until it succeeds and return its result.

        The first attempt that failed is logged as a warning, the others for debugging. What fails for the same cause
        within half a minute is warned of once: every operation of every thread would warn of an outage.

        Args:
            operation: may be called again after an ObjectStoreTransientError.
            what: the operation, for messages, as in ``"upload of 'run/ep1.pt'"``.
            stopped: no further attempt begins when it is set, and a pause ends.

        Returns:
            Result of ``operation``.

        Raises:
            ObjectStoreTransientError: it failed too often or for too long, or was stopped. The message says how often
                it was tried.
            Exception: any other that ``operation`` raises, at once.
        """
        began = time.monotonic()
        ends = math.inf
        for attempt in range(1, self.attempts + 1):
            try:
                return operation()
            except ObjectStoreTransientError as e:
                delay = self._delay(attempt) + min(e.retry_after_seconds, self.longest_delay_seconds)
                ends = min(ends, time.monotonic() + self.budget_seconds)
                late = ends - time.monotonic() <= delay
                last = attempt == self.attempts or late or (stopped is not None and stopped.is_set())
                _log_failure(what, attempt, self.attempts, None if last else delay, e)
                if last or _pause(delay, stopped):
                    seconds = time.monotonic() - began
                    raise ObjectStoreTransientError(f"{e} (attempts: {attempt}, in {seconds:.1f} s)") from e
        raise AssertionError("the last attempt returns or raises")

    def _delay(self, attempt: int) -> float:
        bound = min(self.longest_delay_seconds, self.first_delay_seconds * 2.0 ** min(attempt - 1, 60))
        return _chance.uniform(0.0, bound)


def _log_failure(what: str, attempt: int, attempts: int, delay: float | None, error: Exception) -> None:
    then = "the last" if delay is None else f"the next in {delay:.1f} s"
    is_news = attempt == 1 and delay is not None and _warned.is_news(str(error).rpartition(": ")[2])
    level = logging.WARNING if is_news else logging.DEBUG
    _log.log(level, "%s: attempt %d of %d failed, %s: %s", what, attempt, attempts, then, error)


@final
class _Warned:
    """The causes that were warned of last, and when."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._when: dict[str, float] = {}

    def is_news(self, cause: str) -> bool:
        """Return true if ``cause`` was not warned of for half a minute; it is now."""
        now = time.monotonic()
        with self._lock:
            self._when = {text: at for text, at in self._when.items() if now - at < _SECONDS_BETWEEN_WARNINGS}
            if cause in self._when:
                return False
            self._when[cause] = now
            return True


_warned = _Warned()


def _pause(seconds: float, stopped: threading.Event | None) -> bool:
    """Wait; return true if it was stopped."""
    if stopped is not None:
        return stopped.wait(seconds)
    time.sleep(seconds)
    return False


def retry(
    exc_class: type[Exception] | Sequence[type[Exception]] = Exception,
    num_attempts: int = 3,
    initial_backoff: float = 0.5,
    max_jitter: float = 0.5,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that it is called again when it raised an ``exc_class``; the last error is raised.

    A function with an argument ``retry_index`` gets the number of the attempt, from 0.

    >>> @retry(OSError, num_attempts=2, initial_backoff=0.0, max_jitter=0.0)
    ... def read(path):
    ...     return open(path).read()

    Args:
        exc_class: one or several types of errors.
        num_attempts: in all, the first one included.
        initial_backoff: seconds before the second attempt, twice as long before each further one.
        max_jitter: largest number of seconds added to each, at random.

    Returns:
        A decorator.

    Raises:
        ConfigError: ``num_attempts`` is less than 1.
    """
    if num_attempts < 1:
        raise ConfigError(f"num_attempts={num_attempts}: expected 1 or more")
    errors = (exc_class,) if isinstance(exc_class, type) else tuple(exc_class)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        counts = "retry_index" in inspect.signature(function).parameters

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            for attempt in range(1, num_attempts):
                try:
                    if counts:
                        kwargs["retry_index"] = attempt - 1
                    return function(*args, **kwargs)
                except errors as e:
                    delay = initial_backoff * 2 ** (attempt - 1) + _chance.uniform(0.0, max_jitter)
                    _log_failure(getattr(function, "__qualname__", repr(function)), attempt, num_attempts, delay, e)
                    time.sleep(delay)
            if counts:
                kwargs["retry_index"] = num_attempts - 1
            return function(*args, **kwargs)

        return wrapper

    return decorate
