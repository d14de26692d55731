"""What may pass is tried again, within limits; what will not is raised at once."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

import pytest

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError
from composerlite.storage import RetryPolicy, retry

QUICK = RetryPolicy(attempts=4, first_delay_seconds=0.001, longest_delay_seconds=0.002)


def failing(times: int, error: Exception) -> tuple[Callable[[], str], list[int]]:
    """An operation that fails so many times before it succeeds, and a list that grows with every call."""
    calls: list[int] = []

    def operation() -> str:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return "done"

    return operation, calls


@pytest.mark.parametrize("times", [0, 1, 3])
def test_what_may_pass_is_tried_again(times: int) -> None:
    """An operation that fails for a while returns what it returns in the end."""
    operation, calls = failing(times, ObjectStoreTransientError("503"))
    assert QUICK.run(operation, "put of 'a'") == "done"
    assert len(calls) == times + 1


def test_the_last_error_says_how_often_it_was_tried() -> None:
    """What does not pass is raised after the last attempt, with its cause and the number of attempts."""
    operation, calls = failing(9, ObjectStoreTransientError("503 SlowDown"))
    with pytest.raises(ObjectStoreTransientError, match=r"503 SlowDown .*attempts: 4"):
        QUICK.run(operation, "put of 'a'")
    assert len(calls) == 4


@pytest.mark.parametrize("error", [PermissionError("403"), FileNotFoundError("404"), ObjectStoreError("400")])
def test_what_will_not_pass_is_raised_at_once(error: Exception) -> None:
    """A 403, a 404 and the like are not tried again."""
    operation, calls = failing(9, error)
    with pytest.raises(type(error)) as raised:
        QUICK.run(operation, "put of 'a'")
    assert raised.value is error
    assert len(calls) == 1


def test_every_failed_attempt_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A log shows what was tried, how often, and why it failed: the first attempt as a warning, the others below."""
    operation, _ = failing(2, ObjectStoreTransientError("s3://b/a: put: connection reset"))
    with caplog.at_level(logging.DEBUG):
        QUICK.run(operation, "put of 'a'")
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]
    assert caplog.messages[0] == "put of 'a': attempt 1 of 4 failed, the next in 0.0 s: s3://b/a: put: connection reset"
    assert "put of 'a': attempt 2 of 4 failed" in caplog.messages[1]
    assert "connection reset" in caplog.messages[1]


def test_an_outage_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Many operations that fail for one cause at a time are one line; another cause is another line."""
    with caplog.at_level(logging.WARNING):
        for key, cause in (("a", "outage"), ("b", "outage"), ("c", "too many requests"), ("a", "outage")):
            operation, _ = failing(3, ObjectStoreTransientError(f"s3://b/{key}: put: {cause}"))
            QUICK.run(operation, f"put of {key!r}")
    assert [message.partition(",")[0] for message in caplog.messages] == [
        "put of 'a': attempt 1 of 4 failed",
        "put of 'c': attempt 1 of 4 failed",
    ]


def test_the_budget_ends_it() -> None:
    """No attempt begins after the budget is spent, however many are left."""
    policy = RetryPolicy(attempts=1000, first_delay_seconds=0.02, longest_delay_seconds=0.02, budget_seconds=0.2)
    operation, calls = failing(1000, ObjectStoreTransientError("503"))
    began = time.monotonic()
    with pytest.raises(ObjectStoreTransientError, match="attempts"):
        policy.run(operation, "put of 'a'")
    assert time.monotonic() - began < 10.0
    assert 1 < len(calls) < 1000


def test_what_fails_after_the_budget_is_tried_again() -> None:
    """A large upload that takes longer than the budget and then loses its connection is sent again."""
    policy = RetryPolicy(attempts=3, first_delay_seconds=0.001, longest_delay_seconds=0.001, budget_seconds=0.1)
    operation, calls = failing(1, ObjectStoreTransientError("connection reset"))

    def slow() -> str:
        time.sleep(0.2)
        return operation()

    assert policy.run(slow, "upload of 'a'") == "done"
    assert len(calls) == 2


def test_a_pause_can_be_ended() -> None:
    """Who sets the event need not wait for the next attempt, which does not take place."""
    stopped = threading.Event()
    policy = RetryPolicy(attempts=2, first_delay_seconds=1e6, longest_delay_seconds=1e6, budget_seconds=1e9)
    operation, calls = failing(9, ObjectStoreTransientError("503"))
    threading.Timer(0.05, stopped.set).start()
    began = time.monotonic()
    with pytest.raises(ObjectStoreTransientError):
        policy.run(operation, "put of 'a'", stopped)
    assert time.monotonic() - began < 5.0
    assert len(calls) == 1


def test_pauses_grow_and_differ() -> None:
    """Pauses are anything from none to a bound that doubles up to the longest: crowds that failed together part."""
    policy = RetryPolicy(first_delay_seconds=1.0, longest_delay_seconds=8.0)
    for attempt, bound in [(1, 1.0), (2, 2.0), (4, 8.0), (10, 8.0), (10_000, 8.0)]:
        delays = [policy._delay(attempt) for _ in range(200)]
        assert 0 <= min(delays) < 0.2 * bound
        assert 0.8 * bound < max(delays) <= bound


def test_chance_is_not_taken_from_training() -> None:
    """A retry leaves the generator of the module random as it was: a run with one trains as a run without."""
    before = random.getstate()
    QUICK.run(failing(3, ObjectStoreTransientError("503"))[0], "put of 'a'")
    retry(OSError, 2, 0.0, 0.001)(failing(1, OSError())[0])()
    assert random.getstate() == before


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"first_delay_seconds": -1.0}, {"budget_seconds": -0.1}])
def test_wrong_values_are_refused(wrong: dict[str, float]) -> None:
    """A policy that cannot be followed is a ConfigError that names the value."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RetryPolicy(**wrong)  # type: ignore[arg-type]


def test_the_decorator_tries_again() -> None:
    """A decorated function is called until it succeeds, for errors of the given types."""
    operation, calls = failing(2, OSError("busy"))
    assert retry((OSError, KeyError), num_attempts=3, initial_backoff=0.001, max_jitter=0.001)(operation)() == "done"
    assert len(calls) == 3


def test_the_decorator_raises_the_last_error() -> None:
    """After the last attempt the error itself is raised; errors of other types at once."""
    error = OSError("busy")
    operation, calls = failing(9, error)
    with pytest.raises(OSError, match="busy") as raised:
        retry(OSError, num_attempts=2, initial_backoff=0.0, max_jitter=0.0)(operation)()
    assert (raised.value, len(calls)) == (error, 2)
    operation, calls = failing(9, ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong"):
        retry(OSError, num_attempts=5)(operation)()
    assert len(calls) == 1


def test_the_decorator_keeps_names_and_arguments() -> None:
    """A decorated function takes and returns what it did, under its own name."""

    @retry(OSError, num_attempts=2)
    def add(a: int, *, b: int) -> int:
        """Sum."""
        return a + b

    assert (add(1, b=2), add.__name__, add.__doc__) == (3, "add", "Sum.")
    with pytest.raises(ConfigError, match="num_attempts=0"):
        retry(OSError, num_attempts=0)
