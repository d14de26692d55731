"""Which checkpoints go: never the newest, and exactly those that the policy gives up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composerlite.checkpoint import Manifest, deletions, retention_policy
from composerlite.errors import ConfigError


def manifest(batch: int, saved_at: int) -> Manifest:
    return Manifest(
        name=f"{batch}-{saved_at}.pt",
        kind="monolithic",
        template="{batch}.pt",
        run_name="run",
        timestamp={"batch": batch},
        files=(),
        saved_at=f"{saved_at:09}",
    )


MANIFESTS = st.lists(
    st.builds(manifest, st.integers(0, 9), st.integers(0, 99)), max_size=12, unique_by=lambda m: m.name
)


def oldest_first(manifests: Sequence[Manifest]) -> list[Manifest]:
    return sorted(manifests, key=lambda m: (m.batch, m.saved_at))


class Whim:
    """A policy that keeps what it likes, perhaps nothing at all."""

    def __init__(self, answers: Sequence[bool]) -> None:
        self.answers = answers

    def keep(self, manifests: Sequence[Manifest]) -> Sequence[bool]:
        return [self.answers[i % len(self.answers)] for i in range(len(manifests))]


@given(MANIFESTS, st.lists(st.booleans(), min_size=1, max_size=12))
def test_the_newest_is_never_deleted(manifests: list[Manifest], answers: list[bool]) -> None:
    """Whatever the policy says, in whatever order the checkpoints come."""
    gone = deletions(manifests, Whim(answers))
    assert all(m in manifests for m in gone)
    assert not manifests or oldest_first(manifests)[-1] not in gone


@given(MANIFESTS, st.integers(1, 14))
def test_the_newest_so_many_stay(manifests: list[Manifest], count: int) -> None:
    """Exactly ``count``, or all if there are fewer; by batch count first, by time of the save then."""
    gone = deletions(manifests, retention_policy(count))
    stay = [m for m in oldest_first(manifests) if m not in gone]
    assert stay == oldest_first(manifests)[-count:]


@given(MANIFESTS, st.integers(1, 5))
def test_asking_again_deletes_nothing_more(manifests: list[Manifest], count: int) -> None:
    """The answer depends on what is there, not on what was deleted before: it is the same after a resume."""
    policy = retention_policy(count)
    stay = [m for m in manifests if m not in deletions(manifests, policy)]
    assert deletions(stay, policy) == []


@given(MANIFESTS)
def test_by_default_all_stay(manifests: list[Manifest]) -> None:
    """-1 keeps everything."""
    assert deletions(manifests, retention_policy(-1)) == []


@pytest.mark.parametrize("count", [0, -2, 1.5, "3", None, True])
def test_a_number_that_keeps_nothing_is_refused(count: Any) -> None:
    """Zero, and what is no number of checkpoints; the message says what can be asked for."""
    with pytest.raises(ConfigError, match=rf"num_checkpoints_to_keep={count!r}: want -1 to keep all or a positive"):
        retention_policy(count)
