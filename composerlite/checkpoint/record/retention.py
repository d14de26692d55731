"""The choice of checkpoints that may go: a pure function of manifests and a policy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

from composerlite.checkpoint.record.manifest import Manifest, Position
from composerlite.errors import ConfigError, did_you_mean

__all__ = [
    "Interval",
    "KeepAll",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "Retention",
    "RetentionPolicy",
    "deletions",
    "retention_policy",
]

_FIELDS = {"iter": "iteration", "ep": "epoch", "ba": "batch", "sp": "sample", "tok": "token", "sec": "total_wct"}
_MODES = ("max", "min")


class RetentionPolicy(Protocol):
    """Decides which checkpoints to keep. Must be pure: the same records give the same answer after a resume."""

    def keep(self, manifests: Sequence[Manifest]) -> Sequence[bool]:
        """Decide for each of ``manifests``, oldest first, if its checkpoint is kept. None of them is ephemeral."""
        ...


class Interval(Protocol):
    """An amount of training, such as ``Time(10, 'ep')``."""

    @property
    def value(self) -> int | float: ...

    @property
    def unit(self) -> str:
        """``'ep'``, ``'ba'``, ``'sp'``, ``'tok'``, ``'iter'`` or ``'sec'``."""
        ...


@final
class KeepAll:
    """Policy that deletes nothing."""

    def keep(self, manifests: Sequence[Manifest]) -> Sequence[bool]:
        """Keep all."""
        return [True] * len(manifests)


@final
@dataclass(frozen=True)
class KeepLast:
    """The newest ``count`` stay."""

    count: int

    def keep(self, manifests: Sequence[Manifest]) -> Sequence[bool]:
        """The last ``count`` stay."""
        return [index >= len(manifests) - self.count for index in range(len(manifests))]


@final
class KeepEvery:
    """The first checkpoint at or after each multiple of ``interval`` stays.

    That one is first whatever came between it and the last multiple, so the answer is the same whether those are there
    or were deleted. Where ``reset_time`` set the counts back, multiples count anew; that is seen by a later call of
    ``fit`` with no more batches than what is left of the one before.
    """

    def __init__(self, interval: Interval) -> None:
        self.interval = interval
        self._field = _FIELDS[interval.unit]

    def keep(self, manifests: Sequence[Manifest]) -> Sequence[bool]:
        """Keep the first checkpoint past each multiple."""
        stays: list[bool] = []
        passed = 0
        before: Manifest | None = None
        for manifest in manifests:
            if before is not None and _counts_anew(before, manifest):
                passed = 0
            multiple = int(manifest.timestamp.get(self._field, 0) // self.interval.value)
            stays.append(multiple > passed)
            passed = max(passed, multiple)
            before = manifest
        return stays


@final
@dataclass(frozen=True)
class KeepBest:
    """The ``count`` checkpoints with the best value of ``metric`` stay; of equal ones the newer.

    NaN is worse than any number. A checkpoint without the metric is none of the best and pushes none out, nor is one
    that is marked as ``not_finite``.
    """

    count: int
    metric: str
    mode: str = "max"

    def keep(self, manifests: Sequence[Manifest]) -> Sequence[bool]:
        """The best ``count`` stay."""
        measured = [index for index, one in enumerate(manifests) if self.metric in one.metrics and not one.not_finite]
        best = set(sorted(measured, key=lambda index: (self._goodness(manifests[index]), index))[-self.count :])
        return [index in best for index in range(len(manifests))]

    def _goodness(self, manifest: Manifest) -> tuple[bool, float]:
        value = manifest.metrics[self.metric]
        if math.isnan(value):
            return False, 0.0
        return True, value if self.mode == "max" else -value


@final
@dataclass(frozen=True)
class KeepAny:
    """A policy by which what any of ``policies`` keeps stays."""

    policies: Sequence[RetentionPolicy]

    def keep(self, manifests: Sequence[Manifest]) -> Sequence[bool]:
        """The union of what each keeps."""
        answers = [policy.keep(manifests) for policy in self.policies]
        return [any(votes) for votes in zip(*answers, strict=True)]


def retention_policy(
    num_checkpoints_to_keep: int = -1,
    *,
    keep_every: Interval | None = None,
    best_k: int | None = None,
    best_metric: str | None = None,
    best_mode: str = "max",
) -> RetentionPolicy:
    """A checkpoint stays if any of the rules keeps it.

    Args:
        num_checkpoints_to_keep: number of the newest. -1: no such rule; all are kept if there is no other rule.
            ``best_k=3`` alone keeps the best three, and the newest, which :func:`deletions` never gives up.
        keep_every: the first at or after each multiple of it, for ever, as of ``Time(10, 'ep')``. It counts training
            rather than checkpoints, since that is known when others are deleted.
        best_k: number of the best by ``best_metric``, the name of a value in ``Manifest.metrics``.
        best_mode: ``'max'`` or ``'min'``: which values are better.

    Raises:
        ConfigError: a number that would keep nothing, an interval that cannot be counted in checkpoints, ``best_k``
            without ``best_metric`` or the other way round, or an unknown mode.
    """
    policies: list[RetentionPolicy] = []
    if not _is_whole(num_checkpoints_to_keep) or (num_checkpoints_to_keep != -1 and num_checkpoints_to_keep < 1):
        raise ConfigError(
            f"num_checkpoints_to_keep={num_checkpoints_to_keep!r}: expected -1 to keep all or a positive number; a "
            "local folder that keeps none could not be resumed from."
        )
    if num_checkpoints_to_keep != -1:
        policies.append(KeepLast(num_checkpoints_to_keep))
    if keep_every is not None:
        policies.append(KeepEvery(_checked_interval(keep_every)))
    if best_mode not in _MODES:
        raise ConfigError(f"best_mode={best_mode!r}: no such mode.{did_you_mean(str(best_mode), _MODES)}")
    if (best_k is None) != (best_metric is None):
        raise ConfigError(f"best_k={best_k}, best_metric={best_metric!r}: give both, as 3 and 'eval/<name>', or none.")
    if best_k is not None and best_metric is not None:
        if not _is_whole(best_k) or best_k < 1:
            raise ConfigError(
                f"best_k={best_k!r}: expected a positive number of checkpoints, or None for no such rule."
            )
        policies.append(KeepBest(best_k, best_metric, best_mode))
    return KeepAny(policies) if policies else KeepAll()


def deletions(manifests: Sequence[Manifest], policy: RetentionPolicy) -> list[Manifest]:
    """List the checkpoints to delete, oldest first: those that ``policy`` does not keep, and ephemeral ones.

    Three are never among them: the newest, the newest that is not ephemeral, and the newest that a run would resume
    from, which is not marked as ``not_finite``. An ephemeral one stays as long as it is
    the newest of all; it is not shown to the policy, so it does not count among the last N or the best K.

    Deleting them after each save leaves the same checkpoints as one call with the whole history, as
    long as each save is newer than those before it: the policies of :func:`retention_policy` keep of a longer history
    no old checkpoint that they gave up in a shorter one.
    """
    ordered = sorted(manifests, key=lambda manifest: manifest.order)
    permanent = [manifest for manifest in ordered if not manifest.ephemeral]
    kept = [manifest for manifest, stays in zip(permanent, policy.keep(permanent), strict=True) if stays]
    good = [manifest for manifest in ordered if not manifest.not_finite]
    stay = {id(manifest) for manifest in (*kept, *permanent[-1:], *ordered[-1:], *good[-1:])}
    return [manifest for manifest in ordered if id(manifest) not in stay]


@final
class Retention(NamedTuple):
    """Retention of a run's checkpoints by ``policy``, once the one at ``position`` is saved.

    Attributes:
        held: names of checkpoints that stay in any case.
    """

    policy: RetentionPolicy
    position: Position
    held: frozenset[str] = frozenset()

    def given_up(self, manifests: Iterable[Manifest], template: str) -> list[Manifest]:
        """List the checkpoints to delete among the run's own in ``manifests`` that are named after ``template``."""
        given_up = deletions(self.position.own(manifests, template), self.policy)
        return [manifest for manifest in given_up if manifest.name not in self.held]


def _counts_anew(before: Manifest, manifest: Manifest) -> bool:
    """Check that ``reset_time`` lies between the two: a later call of ``fit``, and no more batches than before."""
    return manifest.fit_calls > before.fit_calls and manifest.batch <= before.batch


def _checked_interval(keep_every: Interval) -> Interval:
    if keep_every.unit not in _FIELDS:
        raise ConfigError(
            f"keep_every={str(keep_every)!r}: a checkpoint does not know how long training will be. Give an amount "
            "that can be counted, as in '10ep', '1000ba', '1e9tok' or '6h'."
        )
    if keep_every.value <= 0:
        raise ConfigError(f"keep_every={str(keep_every)!r}: expected more than zero, or None to keep none for ever.")
    return keep_every


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
