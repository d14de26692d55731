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


def as_you_go(history: Sequence[Manifest], policy: RetentionPolicy) -> list[Manifest]:
    """What is left if the policy is asked after each save about what is left by then."""
    left: list[Manifest] = []
    for saved in history:
        left = stay([*left, saved], policy)
    return left


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


@st.composite
def histories(draw: st.DrawFn) -> list[Manifest]:
    """The saves of a run in their order; each later than the one before, some of them within the same epoch."""
    steps = draw(st.lists(st.integers(1, 17), max_size=20))
    calls = sorted(draw(st.lists(st.integers(1, 3), min_size=len(steps), max_size=len(steps))))
    return [
        manifest(
            sum(steps[: i + 1]),
            i,
            fit_calls=call,
            accuracy=draw(ACCURACIES),
            ephemeral=draw(st.booleans()),
        )
        for i, call in enumerate(calls)
    ]


POLICIES = st.builds(
    lambda last, every, best, mode: retention_policy(
        last, keep_every=every, best_k=best, best_metric=None if best is None else ACCURACY, best_mode=mode
    ),
    st.just(-1) | st.integers(1, 5),
    st.none() | st.sampled_from(["1ep", "2ep", "7ba", "25sp", "6s", "3iter"]).map(Time.from_timestring),
    st.none() | st.integers(1, 4),
    st.sampled_from(["max", "min"]),
)


class Whim:
    """A policy that keeps what it likes, perhaps nothing at all."""

    def __init__(self, answers: Sequence[bool]) -> None:
        self.answers = answers

    def keep(self, manifests: Sequence[Manifest]) -> Sequence[bool]:
        return [self.answers[i % len(self.answers)] for i in range(len(manifests))]


# ── what holds for every policy ──────────────────────────────────────────────────────────────────────────────────
@given(MANIFESTS, st.lists(st.booleans(), min_size=1, max_size=12))
def test_the_newest_is_never_deleted(manifests: list[Manifest], answers: list[bool]) -> None:
    """Whatever the policy says, in whatever order the checkpoints come; nor the newest that is not ephemeral."""
    gone = deletions(manifests, Whim(answers))
    assert all(m in manifests for m in gone)
    for stays in (manifests, [m for m in manifests if not m.ephemeral]):
        assert not stays or max(stays, key=lambda m: m.order) not in gone


@given(MANIFESTS, POLICIES)
def test_asking_again_deletes_nothing_more(manifests: list[Manifest], policy: RetentionPolicy) -> None:
    """The answer depends on what is there, not on what was deleted before: it is the same after a resume."""
    assert deletions(stay(manifests, policy), policy) == []


@given(MANIFESTS, POLICIES, st.randoms())
def test_the_order_in_which_they_are_listed_does_not_matter(
    manifests: list[Manifest], policy: RetentionPolicy, random: Any
) -> None:
    """A folder may be listed in any order."""
    shuffled = list(manifests)
    random.shuffle(shuffled)
    assert deletions(shuffled, policy) == deletions(manifests, policy)


@given(histories(), POLICIES)
def test_deleting_as_you_go_is_deleting_at_once(history: list[Manifest], policy: RetentionPolicy) -> None:
    """Asked after every save or once at the end, it leaves the same: no checkpoint goes that would be wanted later."""
    assert as_you_go(history, policy) == stay(history, policy)


@given(histories(), st.data(), POLICIES)
def test_a_run_resumed_from_an_older_checkpoint(history: list[Manifest], data: st.DataObject, policy: Any) -> None:
    """Resumed where it was before, a run keeps of its new past what the policy says, and its newest at any moment."""
    left = as_you_go(history, policy)
    point = data.draw(st.integers(0, len(left)))
    behind, again = left[:point], [replace(m, saved_at=f"9{m.saved_at[1:]}") for m in left[point:]]
    assert deletions(behind, policy) == []
    for index, saved in enumerate(again):
        behind = stay([*behind, saved], policy)
        assert behind[-1] is again[index]
    assert behind == stay([*left[:point], *again], policy)


@given(histories(), histories(), POLICIES)
def test_time_that_was_set_back(before: list[Manifest], after: list[Manifest], policy: RetentionPolicy) -> None:
    """After ``reset_time`` counts begin again, and what was saved before is still older than anything saved since."""
    later = [replace(m, run=replace(m.run, fit_calls=m.run.fit_calls + 3)) for m in after]
    left = as_you_go([*before, *later], policy)
    assert not later or left[-1] == later[-1]
    assert deletions(left, policy) == []


# ── the newest N ─────────────────────────────────────────────────────────────────────────────────────────────────
@given(MANIFESTS, st.integers(1, 14))
def test_the_newest_so_many_stay(manifests: list[Manifest], count: int) -> None:
    """Exactly ``count``, or all if there are fewer; by call of fit, batch count and time of the save, in that order."""
    permanent = [replace(m, ephemeral=False) for m in manifests]
    ordered = sorted(permanent, key=lambda m: (m.run.fit_calls, m.batch, m.saved_at))
    assert stay(permanent, retention_policy(count)) == ordered[-count:]


@given(MANIFESTS)
def test_by_default_all_stay(manifests: list[Manifest]) -> None:
    """-1 keeps everything that is not ephemeral."""
    assert deletions([replace(m, ephemeral=False) for m in manifests], retention_policy(-1)) == []


# ── ephemeral ones ───────────────────────────────────────────────────────────────────────────────────────────────
def test_an_ephemeral_one_goes_when_there_is_a_newer_one() -> None:
    """Whether that is ephemeral or not; the newest of all stays in any case."""
    policy = retention_policy()
    history = [manifest(1), manifest(2, ephemeral=True), manifest(3, ephemeral=True), manifest(4)]
    assert batches(stay(history[:2], policy)) == [1, 2]
    assert batches(stay(history[:3], policy)) == [1, 3]
    assert batches(stay(history, policy)) == [1, 4]


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


def test_the_last_one_that_is_not_ephemeral_stays() -> None:
    """Where only the best are kept, an ephemeral save, soon to be replaced, costs no checkpoint of the other kind."""
    policy = retention_policy(best_k=1, best_metric=ACCURACY)
    history = [manifest(1, accuracy=0.9), manifest(2, accuracy=0.1), manifest(3, ephemeral=True)]
    assert batches(stay(history, policy)) == [1, 2, 3]


# ── every Nth ────────────────────────────────────────────────────────────────────────────────────────────────────
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


def test_a_jump_over_several_multiples_keeps_one() -> None:
    """Between two saves lie three multiples: the later save stands for them all."""
    history = [manifest(5), manifest(35), manifest(36), manifest(41), manifest(42)]
    assert batches(stay(history, retention_policy(keep_every=Time.from_timestring("10ba")))) == [35, 41, 42]


def test_another_call_of_fit_goes_on_counting() -> None:
    """``fit(duration='2ba')`` again and again is one training: it keeps every tenth batch and not one of each call."""
    history = [manifest(2 * call, fit_calls=call) for call in range(1, 12)]
    assert batches(stay(history, retention_policy(keep_every=Time.from_timestring("10ba")))) == [10, 20, 22]


def test_multiples_count_anew_where_time_was_reset() -> None:
    """The tenth batch after ``reset_time`` is another one than that before."""
    history = [manifest(batch, fit_calls=call) for call in (1, 2) for batch in (5, 10, 15)]
    assert [m.run.moment for m in stay(history, retention_policy(keep_every=Time.from_timestring("10ba")))] == [
        (1, 10),
        (2, 10),
        (2, 15),
    ]


# ── the best K ───────────────────────────────────────────────────────────────────────────────────────────────────
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


# ── together, and what is refused ────────────────────────────────────────────────────────────────────────────────
def test_what_any_rule_keeps_stays() -> None:
    """The last two, every tenth batch and the best one, and nothing else."""
    history = [manifest(batch, accuracy=1 / batch) for batch in range(3, 30)]
    policy = retention_policy(2, keep_every=Time.from_timestring("10ba"), best_k=1, best_metric=ACCURACY)
    assert batches(stay(history, policy)) == [3, 10, 20, 28, 29]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"best_k": 3}, r"best_k=3, best_metric=None: give both, such as 3 and 'eval/<name>', or neither"),
        ({"best_metric": ACCURACY}, r"best_k=None, best_metric='.*': give both"),
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
