"""The folder in memory that a run keeps its newest checkpoint in: private, and of one save folder only."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from pathlib import Path

import xxhash

from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.errors import ConfigError
from composerlite.storage import fsync_folder, make_folder

__all__ = [
    "folder_key",
    "make_own",
    "make_private",
    "mark_of_bucket",
    "new_mark",
    "read_mark",
    "warn_of_others",
    "write_mark",
]

log = logging.getLogger(__name__)
_MARK = Path(".memory-id")
_MOST_BYTES = 64


def folder_key(save_folder: Path, place: str, number: bytes | None = None) -> str:
    """Key of ``save_folder``, unlike that of any other folder and of an earlier one at the same path.

    It is made of where the folder is and of a random number in it: a folder that was emptied and made again, or copied,
    has another key, and what is in memory of the one before it is not taken for its own.

    Args:
        save_folder: on this machine.
        place: what is published to, or the folder again.
        number: that of the bucket, see :func:`mark_of_bucket`, where the folder has only what is staged for it.

    Raises:
        OSError: the number can be neither read nor written.
    """
    if number is None:
        write_mark(save_folder, new_mark())
        number = read_mark(save_folder)
    assert number is not None
    return xxhash.xxh3_64_hexdigest(number + os.fsencode(save_folder.resolve()) + place.encode())


def mark_of_bucket(bucket: Bucket) -> bytes:
    """Return the random number of ``bucket`` below its root, which gets one if it has none, as when it was emptied."""
    name = bucket.name_of(_MARK.as_posix())
    with contextlib.suppress(FileNotFoundError):
        return bucket.transfer.read_all(name, _MOST_BYTES)
    number = new_mark()
    try:
        bucket.transfer.put_bytes(name, number, create_only=True)
    except FileExistsError:  # another launch was first
        return bucket.transfer.read_all(name, _MOST_BYTES)
    return number


def new_mark() -> bytes:
    """Return a random number for a folder."""
    return secrets.token_hex(16).encode()


def write_mark(save_folder: Path, number: bytes) -> None:
    """Write the random ``number`` of ``save_folder`` to it, unless it has one."""
    mark = save_folder / _MARK
    make_folder(mark.parent)
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(number)
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(mark.parent)


def read_mark(save_folder: Path) -> bytes | None:
    """Return the random number of ``save_folder``; ``None`` if it has none."""
    try:
        descriptor = os.open(save_folder / _MARK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


def make_private(folder: Path, *, levels: int) -> None:
    """Make ``folder`` and those above it, ``levels`` in all, so that no other user can read or write in them.

    Raises:
        ConfigError: one is there that is a link, belongs to another user, or can be written to by others: a
            checkpoint in it may have been planted.
    """
    for path in [*reversed(folder.parents[: levels - 1]), folder]:
        if (reason := make_own(path)) is not None:
            raise ConfigError(
                f"save_memory_folder: {str(path)!r} is refused: {reason}, and a checkpoint in it may be that of "
                "somebody else. Remove it, or name another folder in memory, which only this user can write to."
            )


def make_own(folder: Path) -> str | None:
    """Make ``folder`` so that no other user can read or write in it; return why what is there must not be used."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as e:
        return f"it is no folder that this user can open ({e.strerror})"
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            return f"it belongs to user {status.st_uid} and not to {os.geteuid()}"
        if stat.S_IMODE(status.st_mode) & 0o022:
            return f"others can write to it (mode {stat.S_IMODE(status.st_mode):04o})"
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return None


def warn_of_others(folder: Path, run_name: str) -> None:
    """Say in the log which folders beside ``folder`` hold checkpoints of a run of this name, and are ignored."""
    with contextlib.suppress(OSError):
        for other in sorted(folder.parent.iterdir()):
            is_of_run = other != folder and other.name.rpartition("-")[0] in (run_name, "") and other.is_dir()
            if is_of_run and Catalog(other).readable():
                log.warning(
                    "ignored: %s holds a checkpoint of a run named %r with another save_folder, or with this one "
                    "before it was emptied. Remove it when nobody needs it.",
                    other,
                    run_name,
                )
