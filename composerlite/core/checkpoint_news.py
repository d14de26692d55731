"""What becomes of checkpoints, as those are told who keep a record of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final

__all__ = ["CheckpointNews", "CheckpointStep"]

CheckpointStep: TypeAlias = Literal["begun", "committed", "uploaded", "deleted", "failed", "upload failed"]
"""``begun``: training has handed it over. ``committed``: it exists, in the folder. ``uploaded``: in a bucket, too."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNews:
    """Something became of a checkpoint. It is told on rank 0, on the training thread, perhaps some batches later.

    Attributes:
        what: became of it.
        name: of the checkpoint, below ``where``.
        where: the folder, or the URI.
        batch: optimizer steps done when it was saved; ``None`` where that is not at hand.
        at: when that was, in seconds since 1970.
        size_bytes: of its data; ``None``: not known (yet).
        seconds: what it cost, by name: of ``'committed'`` as in ``SaveReport``; ``'upload'``.
        ephemeral: it goes as soon as a newer one is committed.
        error: why it failed.
    """

    what: CheckpointStep
    name: str
    where: str
    batch: int | None
    at: float
    size_bytes: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    ephemeral: bool = False
    error: str | None = None
