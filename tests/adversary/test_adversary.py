"""Whatever a user, a scheduler, others and kills do in any order: nothing is lost, and nothing of others is touched."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from adversary_bucket import BucketAdversary, Server
from adversary_checks import Machine
from adversary_machine import Adversary
from adversary_oracle import FoundError
from hypothesis.stateful import run_state_machine_as_test

STEPS = 50
RULES = os.environ.get("ADVERSARY_RULES", "").split()
"""To look for one thing, some of: train restart older load clock memory ranks beside prune gc convert copy
plant links record damage wrong-bytes remove reboot sharded functions."""
SECONDS = float(os.environ.get("ADVERSARY_SECONDS", "3600"))
SEED = os.environ.get("ADVERSARY_SEED")


def play(seed: int, steps: int, machine: type[Machine] = Adversary, *, at_once: int = STEPS) -> int:
    """Play so many steps, drawn from ``seed``: how many there were. ``at_once``: with one history."""
    Drawn = type("Drawn", (machine,), {"only": frozenset(RULES) or None, "steps": 0})
    settings = hypothesis.settings(
        max_examples=-(-steps // at_once),
        stateful_step_count=at_once,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=True,
        phases=[hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if SEED else [])],
        report_multiple_bugs=False,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    logging.disable(logging.CRITICAL)
    FoundError.seen.clear()
    try:
        run_state_machine_as_test(hypothesis.seed(seed)(Drawn), settings=settings)
    except BaseException as e:
        e.add_note(f"for these steps again, and for fewer that fail: ADVERSARY_SEED={seed}")
        e.add_note(f"first: {FoundError.seen[0] if FoundError.seen else None}")
        raise
    finally:
        logging.disable(logging.NOTSET)
    return Drawn.steps


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2, 3))])
def test_nothing_is_lost(seed: int, record_property: Callable[[str, object], None]) -> None:
    """The run resumes from where it has to, with the weights that it had there; what must stay stays as it is."""
    steps = play(int(SEED or seed), 500)
    record_property("count", f"adversary, seed {seed}: {steps} steps")
    assert steps >= 500


@pytest.mark.timeout(1200)
def test_nothing_is_lost_in_a_bucket(s3_server: Server, record_property: Callable[[str, object], None]) -> None:
    """The same where machines come and go, two of them at once, too, and the bucket stays."""
    steps = play(int(SEED or 0), 60, in_bucket(s3_server), at_once=15)
    record_property("count", f"adversary in a bucket: {steps} steps")
    assert steps >= 45


def in_bucket(server: Server) -> type[Machine]:
    """The machine for buckets of this server."""
    return type("InBucket", (BucketAdversary,), {"server": server})


@pytest.fixture
def s3_server(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Server:
    """As programs find it."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.mark.soak
@pytest.mark.timeout(int(SECONDS) + 1200)
def test_nothing_is_lost_for_an_hour(s3_server: Server, record_property: Callable[[str, object], None]) -> None:
    """With other steps each time; a failure names its seed."""
    until, seed = time.monotonic() + SECONDS, int(SEED or random.SystemRandom().randrange(10**9))
    steps = in_buckets = 0
    record_property("count", f"adversary for {SECONDS:.0f} s: from seed {seed}")
    while time.monotonic() < until:
        steps += play(seed, 500)
        in_buckets += play(seed, 30, in_bucket(s3_server), at_once=30)
        seed += 1
    record_property("count", f"adversary for {SECONDS:.0f} s: {steps} steps, {in_buckets} in buckets")
    assert steps
    assert in_buckets
