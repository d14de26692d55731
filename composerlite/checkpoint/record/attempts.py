"""Attempts of a run, and the checkpoints of an attempt in a set of records.

An attempt is one course of a run, from a start until the run is started over. A run that resumes from its newest
checkpoint continues the attempt. Otherwise a new attempt begins, and the attempts before are the ancestors.

A run that is started over leaves the checkpoints of the attempt before in the same folder. Batch counts do not tell the
attempts apart, and clocks may jump. So each attempt has a number: the highest number in the folder or the bucket, plus
one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from composerlite.checkpoint.record.record import RESUMABLE, Manifest, new_id
from composerlite.types import Ancestor, Lineage

T = TypeVar("T")


def living_line(items: Sequence[T], manifest_of: Callable[[T], Manifest]) -> list[T]:
    """Select the checkpoints of the newest attempt and its ancestors. All others are abandoned.

    The newest attempt has the highest number among checkpoints of a kind in ``RESUMABLE``. Of two attempts with the
    same number, begun at the same time, the attempt with the last save is the newest. Checkpoints of later attempts,
    which have other kinds only, are selected, too.
    """
    manifests = [manifest_of(item) for item in items]
    whole = [manifest for manifest in manifests if manifest.kind in RESUMABLE] or manifests
    if not whole:
        return []
    newest = max(whole, key=lambda m: (m.run.lineage.attempt, m.saved_at)).run.lineage
    return [
        item
        for item, manifest in zip(items, manifests, strict=True)
        if manifest.is_in_line(newest) or manifest.run.lineage.attempt > newest.attempt
    ]


def highest_attempt(manifests: Iterable[Manifest]) -> int:
    """Return the highest attempt number of ``manifests``; 0 if there are no records."""
    return max((manifest.run.lineage.attempt for manifest in manifests), default=0)


def new_attempt(highest: int, origin: Manifest | None = None, *, passed_over: bool = False) -> Lineage:
    """Return the lineage of a new attempt.

    Args:
        highest: the highest known attempt number.
        origin: the checkpoint of the same run to start from; ``None``: the run starts from scratch, or elsewhere.
        passed_over: later checkpoints of the attempt of ``origin`` could not be used.
    """
    if origin is None:
        return Lineage(highest + 1, new_id())
    parent = origin.run.lineage
    earlier = (dataclasses.replace(one, until=min(one.until, origin.run.moment)) for one in parent.ancestors)
    left = Ancestor(parent.attempt, parent.id, origin.run.moment, passed_over)
    return Lineage(highest + 1, new_id(), (*earlier, left), origin.name)


def continued(
    chosen: Manifest, known: Sequence[Manifest], resumable: Iterable[Manifest], *, is_incomplete: bool = False
) -> Lineage:
    """Return the lineage of a run that resumes from ``chosen``.

    The run continues the attempt of ``chosen`` if no newer checkpoint is skipped. Otherwise a new attempt begins, so
    that skipped checkpoints do not count as newer than the next saves.

    Args:
        chosen: the checkpoint.
        known: all checkpoints of the run.
        resumable: the checkpoints of the run from which a run can resume, ``chosen`` included.
        is_incomplete: ``known`` lacks checkpoints whose records cannot be read, and which may be newer.
    """
    own = chosen.run.lineage
    newer = is_incomplete or any(one.is_in_line(own) and one.order[:3] > chosen.order[:3] for one in resumable)
    highest = highest_attempt(known)
    return new_attempt(highest, chosen, passed_over=newer) if newer or highest > own.attempt else own
