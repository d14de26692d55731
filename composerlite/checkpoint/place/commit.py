"""The commit of a checkpoint, and its deletion: the only code that makes a checkpoint exist or cease to exist.

A checkpoint exists if its deciding file does, which contains its record (:mod:`composerlite.checkpoint.record.tail`).
The commit is one atomic put of that file, after all other files are durable: one rename in a folder, one request in a
bucket. There is no state between "absent" and "committed", so there is nothing to recover.

Data files of a directory have names with the id of their save. Only the record with that id names them, so a save that
replaces a directory writes beside the files of the old one, and removes those after its commit. A step and archives of
ranks have fixed names: a save that replaces one deletes the old one first.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from composerlite.checkpoint.format import INDEX, SUFFIX, WEIGHTS_INDEX
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.errors import CheckpointExistsError, CorruptCheckpointError
from composerlite.storage import StagedFile, fsync_folder

if TYPE_CHECKING:
    from composerlite.checkpoint.place.place import Place

__all__ = ["commit_file", "data_file_id", "delete_checkpoint", "garbage", "put_decider"]

log = logging.getLogger(__name__)
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_DATA_FILE = re.compile(rf"(?:.*/)?[^/]+_([0-9a-f]{{16}})(?:{re.escape(SUFFIX)}|\.safetensors)")
"""Path of a data file of a directory; its group is the id of the save."""


# ── a checkpoint comes ───────────────────────────────────────────────────────────────────────────────────────────────
def commit_file(staged: StagedFile, *, overwrite: bool) -> None:
    """Give a durable file its name: if the file contains a record, its checkpoint exists.

    Args:
        staged: the file, flushed.
        overwrite: replace the file of that name, at the same instant.

    Raises:
        FileExistsError: there is a file of that name, and ``overwrite`` is false.
        OSError: the file system refused.
    """
    if overwrite:
        staged.publish()
        return
    if not _renamed_to_new(staged.temporary, staged.path):
        os.link(staged.temporary, staged.path)
        staged.temporary.unlink()
    staged.leave_behind()  # the temporary name is gone
    fsync_folder(staged.path.parent)


def _renamed_to_new(temporary: Path, path: Path) -> bool:
    """Rename ``temporary`` to ``path``, which nothing may have; return false if the file system cannot do so."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    sys.audit("os.rename", str(temporary), str(path), -1, -1)
    if rename(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(temporary), None, str(path))


def put_decider(place: Place, path: str, data: bytes, save_id: str, *, overwrite: bool) -> None:
    """Put the deciding object ``path`` into a bucket with one request: the checkpoint exists.

    Args:
        place: the bucket. All other files of the checkpoint are there.
        path: of the object.
        data: its content, which ends with the record.
        save_id: of the save.
        overwrite: replace the object of that name.

    Raises:
        CheckpointExistsError: there is one of another save, and ``overwrite`` is false.
    """
    try:
        place.put(path, data, create_only=not overwrite)
    except FileExistsError as e:
        if place.read(path) != data:  # else the answer to our own request was lost, and it was sent again
            raise CheckpointExistsError(
                f"checkpoint {place.uri(path)!r} was saved by another process meanwhile, not by save {save_id}."
            ) from e


# ── a checkpoint goes ────────────────────────────────────────────────────────────────────────────────────────────────
def delete_checkpoint(place: Place, manifest: Manifest) -> None:
    """Delete a checkpoint: its deciding files first, then the files that its record names. Other files stay.

    Where nodes have disks of their own it deletes all that this disk has: one may have the parts of several nodes.
    A kill in between leaves files that no record names, see :func:`garbage`. A missing file is no error.
    """
    for path in reversed(manifest.deciders):
        place.delete(path, durable=len(manifest.files) > 1)
    others = [file.path for file in manifest.files if file.path not in manifest.deciders]
    place.delete_all(others)
    if manifest.is_directory:
        place.remove_empty(manifest.name)
    log.debug("deleted checkpoint %s", place.uri(manifest.name))


def data_file_id(path: str) -> str | None:
    """Return the id of the save that wrote the data file ``path`` of a directory; ``None`` if it is no such file."""
    match = _DATA_FILE.fullmatch(path)
    return None if match is None else match[1]


def garbage(
    place: Place, files: Iterable[str], names: re.Pattern[str], record_of: Callable[[str], Manifest | None]
) -> list[str]:
    """Return the data files of killed saves of directories: no record names them, and no living process writes them.

    Args:
        place: a folder after :meth:`Place.sweep`, in which living processes alone have temporary files; or a bucket
            whose lease this process holds.
        files: the paths to look at.
        names: matches the names of the directories to look at.
        record_of: returns the record in a deciding file; raises CorruptCheckpointError if that is damaged.
    """
    found: dict[str, list[str]] = {}
    for path in files:
        if data_file_id(path) is not None and names.fullmatch(folder := path.rpartition("/")[0]):
            found.setdefault(folder, []).append(path)
    gone: list[str] = []
    for folder, paths in found.items():
        alive = {name.rpartition("-")[2] for name in place.names(folder) if ".tmp-" in name}
        try:
            indexes = [f"{folder}/{index}".lstrip("/") for index in (INDEX, WEIGHTS_INDEX)]
            records = [record_of(path) for path in indexes]
        except CorruptCheckpointError:
            continue  # it is unknown which files it names
        if any(record is None and place.exists(path) for record, path in zip(records, indexes, strict=True)):
            continue  # an index that was cut off, or that another program wrote, may need them
        named = {file.path for record in records if record is not None for file in record.files}
        gone += [path for path in paths if path not in named and data_file_id(path) not in alive]
    return gone
