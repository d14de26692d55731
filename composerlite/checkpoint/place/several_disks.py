"""A checkpoint whose parts lie on disks that nodes have of their own: how all of it is committed, or none.

When every rank has written, each disk's part is prepared: durable, and not yet a checkpoint. Then rank 0 commits its
own part, which decides, and the others follow. A kill in between leaves prepared parts, which the next start completes
if the first disk has the checkpoint, and removes if it has not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, final

from composerlite import dist
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.directory import Sealed
from composerlite.checkpoint.place.shared_folder import Disks, disks_of
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.errors import CorruptCheckpointError

__all__ = ["DiskBody", "DiskCommit", "delete_named", "prepared_folder"]

log = logging.getLogger(__name__)
R = TypeVar("R")


class DiskBody(Protocol):
    """What this rank writes of a checkpoint, and, on one rank of each disk, how it becomes a part of the whole."""

    def seal(self, manifest: Manifest, parts: Sequence[Any]) -> Sealed:
        """On rank 0: the index and the record of all files."""
        ...

    def prepare(self, sealed: Sealed) -> None:
        """Make this disk's part durable, so that nothing is left but to rename it."""
        ...

    def complete(self) -> None:
        """Give this disk's part its name and its commit record."""
        ...


@final
@dataclass(kw_only=True)
class DiskCommit:
    """The commit of one checkpoint on several disks.

    Attributes:
        body: what this rank writes.
        votes: three, of all ranks: when each has written, when each disk is prepared, when each is complete.
    """

    body: DiskBody
    votes: Sequence[dist.Vote]

    @property
    def may_be_committed(self) -> bool:
        """Rank 0 has committed its part, or it is not known here that it has not."""
        return self.votes[1].may_be_committed

    def run(
        self,
        finish: Callable[[], Any],
        manifest: Callable[[], Manifest],
        complete: Callable[[], object],
        conclude: Callable[[Manifest], R],
    ) -> R:
        """Commit on all disks; what ``conclude`` gave on rank 0, on every rank.

        Args:
            finish: wait until this rank's files are durable; what rank 0 needs to know of them.
            manifest: what will be committed, but for its files. On rank 0.
            complete: what else belongs to it on a rank whose disk is complete.
            conclude: what is left when all disks are. On rank 0.

        Raises:
            RankError: a rank failed. Nothing is committed unless :attr:`may_be_committed`.
        """
        written, prepared, completed = self.votes
        sealed: Sealed = written.run(finish, lambda parts: self.body.seal(manifest(), parts))

        def follow() -> None:
            if dist.get_global_rank() != 0:
                self.body.complete()
            complete()

        prepared.run(lambda: self.body.prepare(sealed), lambda _: self.body.complete())
        return completed.run(follow, lambda _: conclude(sealed.manifest))


def delete_named(catalog: Catalog, names: Iterable[str]) -> None:
    """Delete what this disk has of checkpoints that rank 0 has given up. What stays takes space, and that is logged."""
    for name in names:
        try:
            if (manifest := catalog.manifest_of(name)) is not None:
                catalog.delete(manifest)
        except (OSError, CorruptCheckpointError) as e:
            log.warning("%s is given up and cannot be deleted here: %s", catalog.folder / name, e)


def prepared_folder(catalog: Catalog) -> Disks:
    """Who shares the folder of ``catalog``. What a killed run left in those of other nodes is finished or removed.

    Every rank calls it, when rank 0 has done so with its own.

    Raises:
        ConfigError: see :func:`~composerlite.checkpoint.place.shared_folder.disks_of`.
    """
    group = dist.get_group()
    disks = disks_of(catalog.folder)
    if not disks.are_several:
        return disks
    log.info("%s: nodes have folders of their own, and each keeps what its ranks write", catalog.folder)
    committed = group.from_first(
        "finding the checkpoints of all nodes",
        lambda: {manifest.name: manifest.identity for manifest in catalog.manifests() if manifest.node is not None},
    )
    with group.all_or_none("preparing the folders of all nodes"):
        if disks.is_keeper and not group.is_first:
            catalog.recover(committed)
    return disks
