"""The private folder in memory with the newest checkpoint of a run, for one save folder only."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

import xxhash

from composerlite.checkpoint.place.bucket import Bucket
from composerlite.errors import ConfigError
from composerlite.storage import StagedFile, make_folder

__all__ = [
    "folder_key",
    "make_private",
    "mark_of_bucket",
    "new_mark",
    "read_mark",
    "write_mark",
]

_MARK = ".memory-id"
_MOST_BYTES = 64


def folder_key(save_folder: Path, place: str, number: bytes | None = None) -> str:
    """Return a key of ``save_folder``, unlike the key of any other folder and of an earlier folder at the same path.

    The key is a hash of the path and of a random number in the folder. A folder that was emptied and made again, or
    copied, has another key: the checkpoints in memory of the earlier folder are ignored.

    Args:
        save_folder: folder on this machine.
        place: URIs of the buckets with the uploads, or the folder again.
        number: random number of the bucket, see :func:`mark_of_bucket`, if the folder only stages uploads.

    Raises:
        OSError: the number can be neither read nor written.
    """
    if number is None:
        write_mark(save_folder, new_mark())
        number = read_mark(save_folder)
    assert number is not None
    return xxhash.xxh3_64_hexdigest(number + os.fsencode(save_folder.resolve()) + place.encode())


def mark_of_bucket(bucket: Bucket) -> bytes:
    """Return the random number of ``bucket`` below its root. A bucket without a number gets a new number."""
    name = bucket.name_of(_MARK)
    with contextlib.suppress(FileNotFoundError):
        return bucket.transfer.read_all(name, _MOST_BYTES)
    with contextlib.suppress(FileExistsError):  # another launch was first
        bucket.transfer.put_bytes(name, new_mark(), create_only=True)
    return bucket.transfer.read_all(name, _MOST_BYTES)


def new_mark() -> bytes:
    """Return a random number for a folder."""
    return secrets.token_hex(16).encode()


def write_mark(save_folder: Path, number: bytes) -> None:
    """Write the random ``number`` of ``save_folder``, durable, unless the folder has a number."""
    make_folder(save_folder)
    with contextlib.suppress(FileExistsError), StagedFile(save_folder / _MARK) as staged:
        staged.file.write(number)
        staged.flush()
        staged.publish(overwrite=False)


def read_mark(save_folder: Path) -> bytes | None:
    """Return the random number of ``save_folder``; ``None`` if there is no number."""
    try:
        return (save_folder / _MARK).read_bytes()[:_MOST_BYTES]
    except FileNotFoundError:
        return None


def make_private(folder: Path, *, levels: int) -> None:
    """Make ``folder`` and the folders above, ``levels`` in all, for this user alone.

    Raises:
        ConfigError: an existing folder is a link, belongs to another user, or is writable by others: a checkpoint in
            the folder may have been planted.
    """
    for path in [*reversed(folder.parents[: levels - 1]), folder]:
        if (reason := _make_own(path)) is not None:
            raise ConfigError(
                f"save_memory_folder: {str(path)!r} is refused: {reason}, and a checkpoint in it may be that of "
                "somebody else. Remove it, or name another folder in memory, which only this user can write to."
            )


def _make_own(folder: Path) -> str | None:
    """Make ``folder`` for this user alone; return the reason if an existing folder must not be used."""
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
