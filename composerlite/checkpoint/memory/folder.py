"""The private folder in memory (such as ``/dev/shm``) with the newest checkpoints of a run, for one save folder only.

Each save folder or bucket has a file with a random number, which connects the place with its folder in memory.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from composerlite.checkpoint.place.place import Place
from composerlite.checkpoint.record.manifest import new_id
from composerlite.errors import ConfigError

MARK = ".memory-id"
"""Name of the file with the random number of a folder or bucket."""


def mark_of(place: Place, number: bytes | None = None) -> bytes:
    """Return the random number of ``place``, as text in bytes. If missing, write ``number`` or a new number, durable.

    A folder that was emptied and made again, or copied, has another number: the checkpoints in memory of the earlier
    folder are ignored.

    Raises:
        OSError, ObjectStoreError: the number can be neither read nor written.
    """
    with contextlib.suppress(FileNotFoundError):
        return place.read(MARK)
    with contextlib.suppress(FileExistsError):  # another launch was first
        place.put(MARK, number or new_id().encode(), create_only=True)
    return place.read(MARK)


def make_private(folder: Path, *, levels: int) -> None:
    """Make ``folder`` and the folders above, ``levels`` in all, for this user alone (mode 0700).

    The folder above these must exist.

    Raises:
        ConfigError: an existing folder is a link, belongs to another user, or is writable by others: a checkpoint in
            the folder may have been planted.
    """
    for path in [*reversed(folder.parents[: levels - 1]), folder]:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            reason = "it is no folder"
        elif status.st_uid != os.geteuid():
            reason = f"it belongs to user {status.st_uid} and not to {os.geteuid()}"
        elif stat.S_IMODE(status.st_mode) & 0o022:
            reason = f"others can write to it (mode {stat.S_IMODE(status.st_mode):04o})"
        else:
            path.chmod(0o700)
            continue
        raise ConfigError(
            f"save_memory_folder: {str(path)!r} is refused: {reason}, and a checkpoint in it may be that of "
            "somebody else. Remove it, or name another folder in memory, which only this user can write to."
        )
