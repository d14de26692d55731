"""Find the ranks with the same checkpoint folder, if nodes have own disks; read and write parts of files there."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

from composerlite import dist
from composerlite.checkpoint.record.record import new_id
from composerlite.errors import ConfigError
from composerlite.storage import StagedFile, make_folder
from composerlite.storage.disk.files import temporary_name

_APPEARS_SECONDS = 5.0
"""Longest time until a network file system shows a new file on other machines."""


@final
@dataclass(frozen=True, slots=True)
class Disks:
    """Disks of nodes, each with a folder of checkpoints for some ranks.

    Attributes:
        leaders: for each rank, the leader of its folder: the rank that begins, commits and deletes checkpoints there.
    """

    leaders: tuple[int, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Number of the folder of each rank, from 0. With a disk for each node this is the number of the node."""
        numbers = {leader: number for number, leader in enumerate(sorted(set(self.leaders)))}
        return tuple(numbers[leader] for leader in self.leaders)

    @property
    def is_folder_leader(self) -> bool:
        """True if this rank is the leader of its folder."""
        rank = dist.get_global_rank()
        return rank == self.leaders[rank]


def disks_of(folder: Path) -> Disks | None:
    """Find the ranks with the same ``folder``, and make a missing folder. Collective.

    The first rank of each node tries to make the same file, with the number of the rank as content. On a shared file
    system only the first attempt succeeds. Each rank then reads the number of its leader from the file.

    Returns:
        The disks; ``None``: all ranks share the folder.

    Raises:
        ConfigError: a rank sees no such file, or the folder is not writable. Every rank raises the error.
    """
    group = dist.get_group()
    mark, mark_id = folder / "seen-by-all", group.from_first("naming a file", new_id)
    with contextlib.ExitStack() as stack:
        with group.all_or_none("checking that the folder of checkpoints is writable"):
            if dist.get_local_rank() == 0:
                try:
                    make_folder(folder)
                    with contextlib.suppress(FileExistsError):  # another rank with the same folder was first
                        file = stack.enter_context(StagedFile(mark, mark_id)).file
                        file.write(f"{dist.get_global_rank()}\n".encode())
                        file.flush()
                except OSError as e:
                    raise ConfigError(
                        f"the folder of checkpoints {str(folder)!r} cannot be written to on node "
                        f"{dist.get_node_rank()}: {e}. Choose another folder."
                    ) from e
        leaders = group.gather(_leader(mark.with_name(temporary_name(mark.name, mark_id))))
    if blind := [rank for rank, leader in enumerate(leaders) if leader is None]:
        raise ConfigError(
            f"the folder of checkpoints {str(folder)!r} of rank 0 is not the folder of the ranks {blind} or of the "
            "first rank of their node: each rank writes its part of a sharded checkpoint. Choose a folder (with "
            "a URI: save_staging_folder) that all ranks of a node see; or set state_dict_type='full' in "
            "parallelism_config['fsdp'], so that rank 0 writes everything."
        )
    disks = Disks(tuple(leader for leader in leaders if leader is not None))
    return disks if len(set(disks.leaders)) > 1 else None


def _leader(mark: Path) -> int | None:
    """Return the rank in ``mark``; ``None`` if the file does not appear."""
    until = time.monotonic() + _APPEARS_SECONDS
    while True:
        with contextlib.suppress(OSError):  # not visible yet
            if (text := mark.read_text()).endswith("\n"):
                return int(text)
        if time.monotonic() >= until:
            return None
        time.sleep(0.1)


# ── parts of files that ranks send to each other ─────────────────────────────────────────────────────────────────────
def read_part(path: Path, offset: int, size: int) -> bytes:
    """Return ``size`` bytes at ``offset`` of the file ``path``. Raises OSError if the file is too short."""
    with path.open("rb") as file:
        data = os.pread(file.fileno(), size, offset)
    if len(data) != size:
        raise OSError(f"{str(path)!r} ends before byte {offset + size}")
    return data


def write_part(path: Path, offset: int, data: memoryview) -> None:
    """Write ``data`` at ``offset`` of the file ``path``. A missing file is made first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
