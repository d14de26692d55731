"""The history of a run in its records: the attempts, and the checkpoints to delete. Pure functions of records.

An attempt is one course of a run, from a start until the run is started over. A run that resumes from its newest
checkpoint continues the attempt. Otherwise a new attempt begins. If the new attempt starts from a checkpoint of an
earlier attempt, the earlier attempt and its ancestors are the ancestors of the new attempt.

A run that is started over leaves the checkpoints of the previous attempt in the same folder. Batch counts do not
distinguish the attempts, and clocks may jump. So each attempt has a number: the highest number in the folder or the
bucket, plus one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, final

from composerlite.checkpoint.record.record import RESUMABLE, Manifest, SavedRun, new_id
from composerlite.errors import ConfigError, did_you_mean
from composerlite.types import Ancestor, Lineage

T = TypeVar("T")
_FIELDS = {"iter": "iteration", "ep": "epoch", "ba": "batch", "sp": "sample", "tok": "token", "sec": "total_wct"}
_MODES = ("max", "min")


# ── attempts ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def is_in_line(manifest: Manifest, lineage: Lineage) -> bool:
    """Return true if the attempt of ``lineage``, or an ancestor, saved the checkpoint.

    The checkpoints of an ancestor count only up to the checkpoint from which the next attempt started.
    """
    own, ancestor = manifest.run.lineage, ancestor_in(lineage, manifest)
    is_newest = (own.attempt, own.id) == (lineage.attempt, lineage.id)
    return is_newest or (ancestor is not None and manifest.run.moment <= ancestor.until)


def ancestor_in(lineage: Lineage, manifest: Manifest) -> Ancestor | None:
    """Return the ancestor in ``lineage`` that saved the checkpoint; ``None``: no ancestor saved the checkpoint."""
    own = manifest.run.lineage
    return next((one for one in lineage.ancestors if (one.attempt, one.id) == (own.attempt, own.id)), None)


def living_line(items: Sequence[T], manifest_of: Callable[[T], Manifest]) -> list[T]:
    """Select the checkpoints of the newest attempt and its ancestors. All others are abandoned.

    The newest attempt has the highest number among checkpoints of a kind in ``RESUMABLE``. Of two attempts with the
    same number, begun at the same time, the attempt with the last save is the newest. An attempt with a higher number
    has no checkpoint of a kind in ``RESUMABLE``. Checkpoints of such an attempt are selected, too.
    """
    manifests = [manifest_of(item) for item in items]
    whole = [manifest for manifest in manifests if manifest.kind in RESUMABLE] or manifests
    if not whole:
        return []
    newest = max(whole, key=lambda m: (m.run.lineage.attempt, m.saved_at)).run.lineage
    return [
        item
        for item, manifest in zip(items, manifests, strict=True)
        if is_in_line(manifest, newest) or manifest.run.lineage.attempt > newest.attempt
    ]


def highest_attempt(manifests: Iterable[Manifest]) -> int:
    """Return the highest attempt number of ``manifests``; 0 if there are no records."""
    return max((manifest.run.lineage.attempt for manifest in manifests), default=0)


def new_attempt(highest: int, origin: Manifest | None = None, *, passed_over: bool = False) -> Lineage:
    """Return the lineage of a new attempt.

    Args:
        highest: the highest known attempt number.
        origin: the checkpoint of the same run to start from; ``None``: the run starts from scratch, or from a
            checkpoint of another run.
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

    The run continues the attempt of ``chosen`` if no newer checkpoint is skipped and no attempt has a higher number.
    Otherwise a new attempt begins, so that skipped checkpoints do not count as newer than the next saves.

    Args:
        chosen: the checkpoint.
        known: all checkpoints of the run.
        resumable: the checkpoints of the run from which a run can resume, ``chosen`` included.
        is_incomplete: records of some checkpoints, perhaps newer than ``chosen``, are unreadable and not in ``known``.
    """
    own = chosen.run.lineage
    newer = is_incomplete or any(is_in_line(one, own) and one.order[:3] > chosen.order[:3] for one in resumable)
    highest = highest_attempt(known)
    return new_attempt(highest, chosen, passed_over=newer) if newer or highest > own.attempt else own


# ── retention ────────────────────────────────────────────────────────────────────────────────────────────────────────
class Interval(Protocol):
    """An amount of training, such as ``Time(10, 'ep')``."""

    @property
    def value(self) -> int | float: ...

    @property
    def unit(self) -> str:
        """``'ep'``, ``'ba'``, ``'sp'``, ``'tok'``, ``'iter'`` or ``'sec'``."""
        ...


@final
@dataclass(frozen=True)
class RetentionPolicy:
    """Rules of retention: a checkpoint stays if any rule keeps the checkpoint. Without rules all checkpoints stay.

    Attributes:
        last: the newest ``last`` checkpoints stay.
        every: the first checkpoint at or after each multiple of this interval stays. The result is the same whether
            the checkpoints in between exist or are deleted. After ``reset_time`` multiples are counted from zero. A
            checkpoint of a later call of ``fit`` without a higher batch count than the checkpoint before shows a reset.
        best: the ``best`` checkpoints with the best value of ``metric`` stay; of equal values the newer checkpoint.
            Checkpoints without the metric, with NaN, or marked as ``not_finite`` do not count.
        metric: name of a value in :attr:`SavedRun.metrics`.
        mode: ``'max'``: larger values are better; ``'min'``: smaller values are better.
        held: names of checkpoints that :meth:`given_up` does not list, such as checkpoints with replicas in memory.
    """

    last: int | None = None
    every: Interval | None = None
    best: int | None = None
    metric: str = ""
    mode: str = "max"
    held: frozenset[str] = frozenset()

    def given_up(self, manifests: Iterable[Manifest], newest: Manifest) -> list[Manifest]:
        """List the checkpoints to delete among the checkpoints with the run and the template of ``newest``."""
        own = own_checkpoints(manifests, newest.run, newest.template)
        return [manifest for manifest in deletions(own, self) if manifest.name not in self.held]

    def keep(self, manifests: Sequence[Manifest]) -> list[bool]:
        """Return for each checkpoint whether it stays. ``manifests``: oldest first, without ephemeral checkpoints."""
        last, every, best = self.last, self.every, self.best
        if last is None and every is None and best is None:
            return [True] * len(manifests)
        kept = set[int]() if last is None else set(range(len(manifests))[-last:])
        if every is not None:
            passed = 0
            for index, manifest in enumerate(manifests):
                before = manifests[index - 1] if index else manifest
                if manifest.run.fit_calls > before.run.fit_calls and manifest.batch <= before.batch:  # reset_time
                    passed = 0
                multiple = int(manifest.timestamp.get(_FIELDS[every.unit], 0) // every.value)
                if multiple > passed:
                    passed = multiple
                    kept.add(index)
        if best is not None:
            goodness: dict[int, float] = {}
            for index, manifest in enumerate(manifests):
                value = manifest.run.metrics.get(self.metric, math.nan)
                if not math.isnan(value) and not manifest.run.not_finite:
                    goodness[index] = value if self.mode == "max" else -value
            kept.update(sorted(goodness, key=lambda index: (goodness[index], index))[-best:])
        return [index in kept for index in range(len(manifests))]


def retention_policy(
    num_checkpoints_to_keep: int = -1,
    *,
    keep_every: Interval | None = None,
    best_k: int | None = None,
    best_metric: str | None = None,
    best_mode: str = "max",
) -> RetentionPolicy:
    """Check a user's options, and return the policy.

    Args:
        num_checkpoints_to_keep: number of newest checkpoints to keep, 1 or more; -1: no such rule. ``best_k=3`` alone
            keeps the best three and the newest, which :func:`deletions` never deletes.
        keep_every: as ``RetentionPolicy.every``. The interval counts training, not checkpoints, so the choice does not
            change after other checkpoints are deleted.
        best_k: number of best checkpoints by ``best_metric``.
        best_metric: as ``RetentionPolicy.metric``.
        best_mode: as ``RetentionPolicy.mode``.

    Raises:
        ConfigError: ``best_k`` is not a positive integer, ``keep_every`` has no unit of :class:`Interval` or is not
            positive, ``best_k`` is given without ``best_metric`` or the other way round, or the mode is unknown.
    """
    if keep_every is not None and keep_every.unit not in _FIELDS:
        raise ConfigError(
            f"keep_every={str(keep_every)!r}: the length of training is not known to a checkpoint. Give an "
            "absolute amount, such as '10ep', '1000ba', '1e9tok' or '6h'."
        )
    if keep_every is not None and keep_every.value <= 0:
        raise ConfigError(f"keep_every={str(keep_every)!r}: expected more than zero, or None to keep none forever.")
    if best_mode not in _MODES:
        raise ConfigError(f"best_mode={best_mode!r}: no such mode.{did_you_mean(str(best_mode), _MODES)}")
    if (best_k is None) != (best_metric is None):
        raise ConfigError(f"best_k={best_k}, best_metric={best_metric!r}: expected both, or neither.")
    if best_k is not None and (type(best_k) is not int or best_k < 1):
        raise ConfigError(f"best_k={best_k!r}: expected a positive number of checkpoints, or None for no limit.")
    last = None if num_checkpoints_to_keep == -1 else num_checkpoints_to_keep
    return RetentionPolicy(last, keep_every, best_k, best_metric or "", best_mode)


def deletions(manifests: Sequence[Manifest], policy: RetentionPolicy) -> list[Manifest]:
    """List the checkpoints to delete, oldest first: those that ``policy`` does not keep, and ephemeral checkpoints.

    Three checkpoints always stay: the newest, the newest permanent checkpoint, and the newest without ``not_finite``,
    for a resume. An ephemeral checkpoint stays while it is the newest. The policy does not see ephemeral checkpoints:
    the last N and the best K are permanent.

    Deletions after each save leave the same checkpoints as one call with the whole history, if each save is newer than
    the saves before.
    """
    ordered = sorted(manifests, key=lambda manifest: manifest.order)
    permanent = [manifest for manifest in ordered if not manifest.ephemeral]
    kept = [manifest for manifest, stays in zip(permanent, policy.keep(permanent), strict=True) if stays]
    good = [manifest for manifest in ordered if not manifest.run.not_finite]
    stay = {id(manifest) for manifest in (*kept, *permanent[-1:], *ordered[-1:], *good[-1:])}
    return [manifest for manifest in ordered if id(manifest) not in stay]


def own_checkpoints(manifests: Iterable[Manifest], run: SavedRun, template: str | None) -> list[Manifest]:
    """Select the checkpoints of ``run`` with names of ``template``, also from before a resume, oldest first.

    With the template ``None`` all names are selected.

    Checkpoints of abandoned attempts are left out. Checkpoints from after the present time of the run are left out,
    too: a run that was started over must not take old checkpoints for newer checkpoints.
    """
    own = [
        manifest
        for manifest in manifests
        if manifest.run.name == run.name
        and template in (None, manifest.template)
        and is_in_line(manifest, run.lineage)
        and manifest.run.moment <= run.moment
    ]
    return sorted(own, key=lambda manifest: manifest.order)
