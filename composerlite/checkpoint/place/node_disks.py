"""Disks that nodes have of their own: who sees the same one, and how a checkpoint on all of them is committed, or none.

When every rank has written, each disk's part is prepared: durable, and not yet a checkpoint. Then rank 0 commits its
own part, which decides, and the others follow. A kill in between leaves prepared parts, which the next start completes
if the first disk has the checkpoint, and removes if it has not.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, final

from composerlite import dist
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.directory import FinalizedManifest
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.errors import ConfigError, CorruptCheckpointError
from composerlite.storage import make_folder

__all__ = [
    "ONE_DISK",
    "DiskBody",
    "DiskCommit",
    "Disks",
    "check_one_disk",
    "delete_named",
    "disks_of",
    "prepared_folder",
]

log = logging.getLogger(__name__)
R = TypeVar("R")
_APPEARS_SECONDS = 5.0
"""A network file system may show a new file on other machines a moment later."""
_PAUSE_SECONDS = 0.1


@final
@dataclass(frozen=True, slots=True)
class Disks:
    """Which ranks see the same folder of checkpoints.

    Attributes:
        keepers: for each rank, the one that begins, commits and deletes checkpoints in the folder that it sees.
    """

    keepers: tuple[int, ...] = ()

    @property
    def are_several(self) -> bool:
        """Whether nodes have folders of their own."""
        return len(set(self.keepers)) > 1

    @property
    def nodes(self) -> tuple[int, ...]:
        """For each rank, the number of the folder that it sees, from 0; that of a node, if each has its own."""
        numbers = {keeper: number for number, keeper in enumerate(sorted(set(self.keepers)))}
        return tuple(numbers[keeper] for keeper in self.keepers)

    @property
    def is_keeper(self) -> bool:
        """Whether this rank is the one for its folder."""
        rank = dist.get_global_rank()
        return rank == (self.keepers[rank] if self.keepers else 0)


ONE_DISK = Disks()
"""All ranks see one folder."""


def check_one_disk(disks: Disks, folder: Path) -> Disks:
    """``disks`` if they are one, which all ranks see.

    Raises:
        ConfigError: nodes have disks of their own.
    """
    if disks.are_several:
        raise ConfigError(
            f"the folder of checkpoints {str(folder)!r} is not the same on all nodes: rank 0 commits the files that "
            "the ranks of DeepSpeed write there. Choose a folder (with a URI: save_staging_folder) on a file system "
            "that all nodes mount."
        )
    return disks


def disks_of(folder: Path) -> Disks:
    """Who shares ``folder``. Every rank calls it. It is made where it is not there.

    The first rank of each node tries to make one and the same file: on a file system that several nodes mount one of
    them makes it, whatever the others have seen so far.

    Raises:
        ConfigError: a rank sees the folder of none of them, or it cannot be written to; on every rank.
    """
    group = dist.get_group()
    mark = folder / f".seen-by-all.tmp-{group.from_first('naming a file', lambda: secrets.token_hex(8))}"
    with contextlib.ExitStack() as stack:
        with group.all_or_none("writing to the folder of checkpoints"):
            if dist.get_local_rank() == 0:
                try:
                    make_folder(folder)
                    stack.enter_context(_marked(mark))
                except OSError as e:
                    raise ConfigError(
                        f"the folder of checkpoints {str(folder)!r} cannot be written to on node "
                        f"{dist.get_node_rank()}: {e}. Choose another folder."
                    ) from e
        keepers = group.gather(_keeper(mark))
    if blind := [rank for rank, keeper in enumerate(keepers) if keeper is None]:
        raise ConfigError(
            f"the folder of checkpoints {str(folder)!r} of rank 0 is not that of the ranks {blind}, nor that of the "
            "first rank of their node: each rank writes its part of a sharded checkpoint. Choose a folder (with a "
            "URI: save_staging_folder) that all ranks of a node see; or set state_dict_type='full' in "
            "parallelism_config['fsdp'], and rank 0 writes all."
        )
    return Disks(tuple(keeper for keeper in keepers if keeper is not None))


@contextlib.contextmanager
def _marked(mark: Path) -> Generator[None]:
    """For as long as the block lasts, ``mark`` says which rank has made it, this one or another."""
    try:
        file = mark.open("x")
    except FileExistsError:
        yield
        return
    with file:
        try:
            with contextlib.suppress(OSError):  # a file system without locks: nothing is swept there
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(f"{dist.get_global_rank()}\n")
            file.flush()
            yield
        finally:
            mark.unlink(missing_ok=True)


def _keeper(mark: Path) -> int | None:
    """The rank that made ``mark``, where it is seen."""
    until = time.monotonic() + _APPEARS_SECONDS
    while True:
        with contextlib.suppress(OSError):  # whatever the reason, it is not seen
            if (text := mark.read_text()).endswith("\n"):
                return int(text)
        if time.monotonic() >= until:
            return None
        time.sleep(_PAUSE_SECONDS)


# ── the commit ───────────────────────────────────────────────────────────────────────────────────────────────────────
class DiskBody(Protocol):
    """What this rank writes of a checkpoint, and, on one rank of each disk, how it becomes a part of the whole."""

    def seal(self, manifest: Manifest, parts: Sequence[Any]) -> FinalizedManifest:
        """On rank 0: the index and the record of all files."""
        ...

    def prepare(self, sealed: FinalizedManifest) -> None:
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
        sealed: FinalizedManifest = written.run(finish, lambda parts: self.body.seal(manifest(), parts))

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
        ConfigError: see :func:`disks_of`.
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
