"""Disks that nodes have of their own: which ranks see the same one."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

from composerlite import dist
from composerlite.checkpoint.record.manifest import new_id
from composerlite.errors import ConfigError
from composerlite.storage import StagedFile, make_folder

__all__ = ["Disks", "disks_of"]

_APPEARS_SECONDS = 5.0
"""A network file system may show a new file on other machines a moment later."""


@final
@dataclass(frozen=True, slots=True)
class Disks:
    """Several disks that nodes have of their own: which ranks see the same folder of checkpoints.

    Attributes:
        leaders: for each rank, the one that begins, commits and deletes checkpoints in the folder that it sees.
    """

    leaders: tuple[int, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Number, for each rank, of the folder that it sees, from 0; that of its node, if each node has its own."""
        numbers = {leader: number for number, leader in enumerate(sorted(set(self.leaders)))}
        return tuple(numbers[leader] for leader in self.leaders)

    @property
    def is_folder_leader(self) -> bool:
        """True if this rank leads the ranks that see its folder."""
        rank = dist.get_global_rank()
        return rank == self.leaders[rank]


def disks_of(folder: Path) -> Disks | None:
    """Find out which ranks share ``folder``, and create it if missing; ``None``: all share one. Collective.

    The first rank of each node tries to make one and the same file, with its number in it: on a file system that
    several nodes mount one of them makes it, whatever the others have seen so far.

    Raises:
        ConfigError: a rank sees the folder of none of them, or it cannot be written to; on every rank.
    """
    group = dist.get_group()
    mark, mark_id = folder / "seen-by-all", group.from_first("naming a file", new_id)
    with contextlib.ExitStack() as stack:
        with group.all_or_none("writing to the folder of checkpoints"):
            if dist.get_local_rank() == 0:
                try:
                    make_folder(folder)
                    with contextlib.suppress(FileExistsError):  # another rank sees the same folder, and made it
                        file = stack.enter_context(StagedFile(mark, mark_id)).file
                        file.write(f"{dist.get_global_rank()}\n".encode())
                        file.flush()
                except OSError as e:
                    raise ConfigError(
                        f"the folder of checkpoints {str(folder)!r} cannot be written to on node "
                        f"{dist.get_node_rank()}: {e}. Choose another folder."
                    ) from e
        leaders = group.gather(_leader(StagedFile.temporary_of(mark, mark_id)))
    if blind := [rank for rank, leader in enumerate(leaders) if leader is None]:
        raise ConfigError(
            f"the folder of checkpoints {str(folder)!r} of rank 0 is not that of the ranks {blind}, nor that of the "
            "first rank of their node: each rank writes its part of a sharded checkpoint. Choose a folder (with a "
            "URI: save_staging_folder) that all ranks of a node see; or set state_dict_type='full' in "
            "parallelism_config['fsdp'], and rank 0 writes all."
        )
    disks = Disks(tuple(leader for leader in leaders if leader is not None))
    return disks if len(set(disks.leaders)) > 1 else None


def _leader(mark: Path) -> int | None:
    """The rank that made ``mark``, where it is seen."""
    until = time.monotonic() + _APPEARS_SECONDS
    while True:
        with contextlib.suppress(OSError):  # whatever the reason, it is not seen
            if (text := mark.read_text()).endswith("\n"):
                return int(text)
        if time.monotonic() >= until:
            return None
        time.sleep(0.1)
