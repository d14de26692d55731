"""Which checkpoints may go: a pure function of manifests and a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

from composerlite.checkpoint.manifest import Manifest
from composerlite.errors import ConfigError

__all__ = ["KeepAll", "KeepLast", "RetentionPolicy", "deletions", "retention_policy"]


class RetentionPolicy(Protocol):
    """Says which checkpoints to keep. Must be pure: the same manifests give the same answer after a resume."""

    def keep(self, manifests: Sequence[Manifest]) -> Sequence[bool]:
        """For each of ``manifests``, oldest first, whether it stays."""
        ...


@final
class KeepAll:
    """Nothing is deleted."""

    def keep(self, manifests: Sequence[Manifest]) -> Sequence[bool]:
        """All stay."""
        return [True] * len(manifests)


@final
class KeepLast:
    """The newest ``count`` stay."""

    def __init__(self, count: int) -> None:
        self.count = count

    def keep(self, manifests: Sequence[Manifest]) -> Sequence[bool]:
        """The last ``count`` stay."""
        return [index >= len(manifests) - self.count for index in range(len(manifests))]


def retention_policy(num_checkpoints_to_keep: int) -> RetentionPolicy:
    """-1 keeps all, a positive number the newest so many.

    Raises:
        ConfigError: zero, which would keep nothing, less than -1, or no whole number.
    """
    whole = isinstance(num_checkpoints_to_keep, int) and not isinstance(num_checkpoints_to_keep, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if whole and num_checkpoints_to_keep == -1:
        return KeepAll()
    if not whole or num_checkpoints_to_keep < 1:
        raise ConfigError(
            f"num_checkpoints_to_keep={num_checkpoints_to_keep!r}: want -1 to keep all or a positive number; a local "
            "folder that keeps none could not be resumed from."
        )
    return KeepLast(num_checkpoints_to_keep)


def deletions(manifests: Sequence[Manifest], policy: RetentionPolicy) -> list[Manifest]:
    """What ``policy`` gives up of ``manifests``, oldest first. The newest is never among them."""
    ordered = sorted(manifests, key=lambda manifest: manifest.order)
    keep = policy.keep(ordered)
    return [manifest for manifest, stays in zip(ordered[:-1], keep, strict=False) if not stays]
