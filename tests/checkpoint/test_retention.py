"""Which checkpoints go: never the newest, and exactly those that no rule keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composerlite.checkpoint import Manifest
from composerlite.checkpoint.record.history import RetentionPolicy, deletions, retention_policy
from composerlite.checkpoint.record.record import SavedRun
from composerlite.core import Time, TimeUnit
from composerlite.errors import ConfigError

ACCURACY = "eval/MulticlassAccuracy"


def manifest(
    batch: int, saved_at: int = 0, *, fit_calls: int = 1, accuracy: float | None = None, ephemeral: bool = False
) -> Manifest:
    """A checkpoint after so many batches, ten to an epoch; each has three samples and takes half a second."""
    return Manifest(
        name=f"{fit_calls}-{batch}-{saved_at}.pt",
        kind="monolithic",
        template="{batch}.pt",
        run=SavedRun(
            name="run",
            timestamp={
                "iteration": batch // 10,
                "epoch": batch // 10,
                "batch": batch,
                "sample": 3 * batch,
                "token": 0,
                "total_wct": batch / 2,
            },
            fit_calls=fit_calls,
            metrics={} if accuracy is None else {ACCURACY: accuracy},
        ),
        files=(),
        ephemeral=ephemeral,
        saved_at=f"{saved_at:09}",
    )


def batches(manifests: Sequence[Manifest]) -> list[int]:
    return [m.batch for m in manifests]


def stay(manifests: Sequence[Manifest], policy: RetentionPolicy) -> list[Manifest]:
    """What is left, oldest first."""
    gone = deletions(manifests, policy)
    return sorted((m for m in manifests if m not in gone), key=lambda m: m.order)


ACCURACIES = st.none() | st.sampled_from([0.0, 0.1, 0.5, 0.5, 0.9, math.nan, math.inf, -math.inf])
MANIFESTS = st.lists(
    st.builds(
        manifest,
        st.integers(0, 40),
        st.integers(0, 99),
        fit_calls=st.integers(1, 2),
        accuracy=ACCURACIES,
        ephemeral=st.booleans(),
    ),
    max_size=14,
    unique_by=lambda m: m.name,
)


class Whim:
    """A policy that keeps what it likes, perhaps nothing at all."""

    def __init__(self, answers: Sequence[bool]) -> None:
        self.answers = answers

    def keep(self, manifests: Sequence[Manifest]) -> Sequence[bool]:
        return [self.answers[i % len(self.answers)] for i in range(len(manifests))]


@given(MANIFESTS, st.lists(st.booleans(), min_size=1, max_size=12))
def test_the_newest_is_never_deleted(manifests: list[Manifest], answers: list[bool]) -> None:
    """Whatever the policy says, in whatever order the checkpoints come; nor the newest that is not ephemeral."""
    gone = deletions(manifests, Whim(answers))
    assert all(m in manifests for m in gone)
    for stays in (manifests, [m for m in manifests if not m.ephemeral]):
        assert not stays or max(stays, key=lambda m: m.order) not in gone


@given(MANIFESTS, st.integers(1, 14))
def test_the_newest_so_many_stay(manifests: list[Manifest], count: int) -> None:
    """Exactly ``count``, or all if there are fewer; by call of fit, batch count and time of the save, in that order."""
    permanent = [replace(m, ephemeral=False) for m in manifests]
    ordered = sorted(permanent, key=lambda m: (m.run.fit_calls, m.batch, m.saved_at))
    assert stay(permanent, retention_policy(count)) == ordered[-count:]


def test_ephemeral_ones_take_no_place_of_others() -> None:
    """They do not count among the last N, the best K or the first past a multiple."""
    policy = retention_policy(2, keep_every=Time.from_timestring("10ba"), best_k=1, best_metric=ACCURACY)
    history = [
        manifest(3, accuracy=0.5),
        manifest(10, ephemeral=True),
        manifest(11),
        manifest(12),
        manifest(13),
        manifest(14),
        manifest(15, accuracy=0.9, ephemeral=True),
    ]
    assert batches(stay(history, policy)) == [3, 11, 13, 14, 15]


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (Time.from_timestring("10ba"), [12, 20, 32, 40]),  # 48 is the newest
        (Time.from_timestring("2ep"), [20, 40]),
        (Time.from_timestring("2iter"), [20, 40]),
        (Time.from_timestring("36sp"), [12, 24, 36, 48]),
        (Time.from_timestring("10s"), [20, 40]),
        (Time.from_timestring("100ba"), []),
    ],
)
def test_the_first_at_or_after_each_multiple_stays(interval: Time, expected: list[int]) -> None:
    """Saves need not fall on the multiples; the count is that of training, in any unit."""
    history = [manifest(batch) for batch in range(4, 52, 4)]
    assert batches(stay(history, retention_policy(keep_every=interval))) == sorted({*expected, 48})


@given(st.lists(st.builds(manifest, st.integers(1, 40), accuracy=ACCURACIES), unique_by=lambda m: m.batch), st.data())
def test_no_measured_checkpoint_that_goes_is_better_than_one_that_stays(
    manifests: list[Manifest], data: st.DataObject
) -> None:
    """Whatever the direction; a checkpoint whose value is NaN counts as not measured."""
    count, mode = data.draw(st.integers(1, 4)), data.draw(st.sampled_from(["max", "min"]))
    left = stay(manifests, retention_policy(best_k=count, best_metric=ACCURACY, best_mode=mode))
    newest = max(manifests, key=lambda m: m.order, default=None)
    measured = [m for m in manifests if not math.isnan(m.run.metrics.get(ACCURACY, math.nan))]
    best = [m for m in left if m in measured]
    assert {m.batch for m in left} - {m.batch for m in best} <= {newest.batch if newest else 0}
    assert len(best) in (min(count, len(measured)), min(count, len(measured)) + 1)
    sign = 1 if mode == "max" else -1
    for gone in (m.run.metrics[ACCURACY] for m in measured if m not in left):
        for value in (m.run.metrics[ACCURACY] for m in best if m is not newest):
            assert sign * value >= sign * gone


@pytest.mark.parametrize(
    ("accuracies", "mode", "expected"),
    [
        ([0.1, 0.9, 0.5, 0.7, 0.2], "max", [2, 4, 5]),
        ([0.1, 0.9, 0.5, 0.7, 0.8], "min", [1, 3, 5]),
        ([0.5, 0.5, 0.5, 0.1, 0.2], "max", [2, 3, 5]),  # of equal ones the newer
        ([math.nan, 0.0, math.nan, -1.0, math.nan], "max", [2, 4, 5]),
        ([math.nan, 0.0, math.nan, -1.0, math.nan], "min", [2, 4, 5]),
        ([0.2, None, None, 0.1, None], "max", [1, 4, 5]),  # not measured: not among them, and in nobody's way
        ([math.nan, None, 0.3, None, None], "max", [3, 5]),
    ],
)
def test_the_best_stay_and_the_newest(accuracies: list[float | None], mode: str, expected: list[int]) -> None:
    """Two of them, by the direction asked for; zero is a value, NaN is none."""
    history = [manifest(i + 1, accuracy=accuracy) for i, accuracy in enumerate(accuracies)]
    policy = retention_policy(best_k=2, best_metric=ACCURACY, best_mode=mode)
    assert batches(stay(history, policy)) == expected


def test_what_any_rule_keeps_stays() -> None:
    """The last two, every tenth batch and the best one, and nothing else."""
    history = [manifest(batch, accuracy=1 / batch) for batch in range(3, 30)]
    policy = retention_policy(2, keep_every=Time.from_timestring("10ba"), best_k=1, best_metric=ACCURACY)
    assert batches(stay(history, policy)) == [3, 10, 20, 28, 29]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"best_k": 3}, r"best_k=3, best_metric=None: expected both, or neither"),
        ({"best_metric": ACCURACY}, r"best_k=None, best_metric='.*': expected both"),
        ({"best_k": 0, "best_metric": ACCURACY}, "best_k=0: expected a positive number"),
        ({"best_k": True, "best_metric": ACCURACY}, "best_k=True: expected a positive number"),
        ({"best_k": 1, "best_metric": ACCURACY, "best_mode": "mx"}, "best_mode='mx': no such mode. Did you mean 'max'"),
        ({"keep_every": Time.from_timestring("0ba")}, "keep_every='0ba': expected more than zero"),
        ({"keep_every": Time(0.1, TimeUnit.DURATION)}, "keep_every='0.1dur': the length of training"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(arguments: dict[str, Any], says: str) -> None:
    """At construction, with what to give instead."""
    with pytest.raises(ConfigError, match=says):
        retention_policy(**arguments)
