"""The attempt that a checkpoint belongs to, and the line of checkpoints that a run follows.

A run that is started over leaves the checkpoints of the attempt before it in the same folder. Batch counts do not tell
the two apart, and clocks may jump, so each attempt has a number: one more than any that was in the folder or the bucket
when it began. Everything here is a pure function of manifests.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from composerlite.types import Ancestor, Lineage

if TYPE_CHECKING:
    from composerlite.checkpoint.record.manifest import Manifest

__all__ = ["RESUMABLE", "continued", "highest_attempt", "in_line", "living_line", "may_be_replaced", "new_attempt"]

RESUMABLE = ("monolithic", "sharded", "deepspeed")
"""The kinds of checkpoints that autoresume takes."""

T = TypeVar("T")


def in_line(lineage: Lineage, manifest: Manifest) -> bool:
    """Check that ``manifest`` belongs to the attempt of ``lineage``, or to an ancestor before it was left."""
    own = manifest.lineage
    if (own.attempt, own.id) == (lineage.attempt, lineage.id):
        return True
    return any(
        (own.attempt, own.id) == (ancestor.attempt, ancestor.id) and manifest.moment <= ancestor.until
        for ancestor in lineage.ancestors
    )


def living_line(items: Sequence[T], manifest_of: Callable[[T], Manifest]) -> list[T]:
    """Select the checkpoints of the newest attempt and of its ancestors; the others are abandoned.

    The newest attempt is the one with the highest number of those that can be resumed from. Where two began at the same
    time, neither knowing of the other, it is the one that saved last. A later attempt that has saved weights alone so
    far is not abandoned either.
    """
    manifests = [manifest_of(item) for item in items]
    whole = [manifest for manifest in manifests if manifest.kind in RESUMABLE] or manifests
    if not whole:
        return []
    newest = max(whole, key=lambda m: (m.lineage.attempt, m.saved_at)).lineage
    return [
        item
        for item, manifest in zip(items, manifests, strict=True)
        if in_line(newest, manifest) or manifest.lineage.attempt > newest.attempt
    ]


def highest_attempt(manifests: Iterable[Manifest]) -> int:
    """Return the highest attempt number of ``manifests``, 0 if there are none."""
    return max((manifest.lineage.attempt for manifest in manifests), default=0)


def new_attempt(highest: int, origin: Manifest | None = None, *, passed_over: bool = False) -> Lineage:
    """Begin an attempt.

    Args:
        highest: the highest attempt number that is known.
        origin: the checkpoint of the same run that it starts from; ``None``: it starts from scratch, or elsewhere.
        passed_over: later checkpoints of that attempt could not be used.
    """
    if origin is None:
        return Lineage(highest + 1, uuid.uuid4().hex[:16])
    parent = origin.lineage
    earlier = (dataclasses.replace(one, **_at(min(one.until, origin.moment))) for one in parent.ancestors)
    left = Ancestor(parent.attempt, parent.id, **_at(origin.moment), passed_over=passed_over)
    return Lineage(highest + 1, uuid.uuid4().hex[:16], (*earlier, left), origin.name)


def continued(chosen: Manifest, known: Sequence[Manifest], resumable: Iterable[Manifest]) -> Lineage:
    """Return the lineage of a run that resumes from ``chosen``.

    It is that of ``chosen`` where nothing newer is left behind; otherwise a new attempt begins, so that what was passed
    over does not come before what is saved from now on.

    Args:
        chosen: the checkpoint. known: all of the run. resumable: those that were tried, or would have been.
    """
    newer = any(in_line(chosen.lineage, one) and one.order[:3] > chosen.order[:3] for one in resumable)
    highest = highest_attempt(known)
    if newer or highest > chosen.lineage.attempt:
        return new_attempt(highest, chosen, passed_over=newer)
    return chosen.lineage


def may_be_replaced(lineage: Lineage, manifest: Manifest) -> bool:
    """Check that ``manifest`` was passed over when an attempt of this line began; that one saves its name again."""
    own = manifest.lineage
    return any(
        (own.attempt, own.id) == (ancestor.attempt, ancestor.id) and ancestor.passed_over
        for ancestor in lineage.ancestors
    )


def _at(moment: tuple[int, int]) -> dict[str, int]:
    return {"fit_calls": moment[0], "batch": moment[1]}
