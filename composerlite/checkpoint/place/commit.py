"""The commit of a checkpoint, and its deletion: the only code that makes a checkpoint exist or cease to exist.

A checkpoint exists if its deciding file does, which contains its record (:mod:`composerlite.checkpoint.record.tail`).
The commit is one atomic put of that file, after all other files are durable: one rename in a folder, one request in a
bucket. There is no state between "absent" and "committed", so there is nothing to recover.

Data files of a directory have names with the id of their save. Only the record with that id names them, so a save that
replaces a directory writes beside the files of the old one, and removes those after its commit. A step and archives of
ranks have fixed names: a save that replaces one deletes the old one first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Container
from typing import TYPE_CHECKING

from composerlite.checkpoint.format import SUFFIX
from composerlite.checkpoint.record.manifest import Manifest, NewerManifestError
from composerlite.checkpoint.record.tail import MOST_TAIL_BYTES, unseal
from composerlite.errors import CheckpointExistsError, CorruptCheckpointError
from composerlite.storage import StagedFile

if TYPE_CHECKING:
    from composerlite.checkpoint.place.place import Place

__all__ = ["check_own", "commit_file", "data_file_id", "delete_checkpoint", "own_files", "put_decider"]

log = logging.getLogger(__name__)
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
    staged.publish(overwrite=overwrite)


def put_decider(place: Place, path: str, data: bytes, staged: StagedFile | None, *, overwrite: bool) -> None:
    """Give the deciding file of a directory its content and its name, durable, at one instant: the checkpoint exists.

    Args:
        place: has all other files of the checkpoint.
        path: of the file.
        data: its content, which contains the record.
        staged: the file under its temporary name; ``None``: the place is a bucket, and takes it with one request.
        overwrite: replace the file of that name.

    Raises:
        CheckpointExistsError: there is one of another save, and ``overwrite`` is false.
    """
    try:
        if staged is None:
            place.put(path, data, create_only=not overwrite)
        else:
            staged.file.write(data)
            staged.flush()
            commit_file(staged, overwrite=overwrite)
    except FileExistsError as e:
        if place.read(path) != data:  # else the answer to our own request was lost, and it was sent again
            raise CheckpointExistsError(
                f"checkpoint {place.uri(path)!r} was saved by another process meanwhile."
            ) from e


# ── a checkpoint goes ────────────────────────────────────────────────────────────────────────────────────────────────
def delete_checkpoint(place: Place, manifest: Manifest) -> None:
    """Delete a checkpoint: its deciding files first, then the files of :func:`own_files`. Other files stay.

    Where nodes have disks of their own it deletes all that this disk has: one may have the parts of several nodes.
    A kill in between leaves files that no record names, see :func:`garbage`. A missing file is no error.
    """
    others = [path for path in own_files(place, manifest) if path not in manifest.deciders]
    place.delete(reversed(manifest.deciders), durable=bool(others), folders=manifest.is_directory)
    place.delete(others, folders=manifest.is_directory)
    log.debug("deleted checkpoint %s", place.uri(manifest.name))


def own_files(place: Place, manifest: Manifest, damaged: Container[str] = ()) -> list[str]:
    """Return the paths of the files that go with a checkpoint when it is deleted, renamed or replaced.

    A planted record of archives can name any file of its folder. So the archive of another rank counts only if its own
    record has the same id, and the name of the same deciding file.

    Args:
        place: has the checkpoint.
        manifest: its record.
        damaged: archives that count even if their own record is missing or damaged.
    """
    first, *others = (file.path for file in manifest.files)
    if manifest.form != "archives":
        return [first, *others]

    def is_own(path: str) -> bool:
        try:
            size_bytes, end = place.end(path, MOST_TAIL_BYTES)
            found = unseal(path, size_bytes, end, place.uri(path))
        except (FileNotFoundError, CorruptCheckpointError, NewerManifestError):
            found = None
        if found is None:
            return path in damaged
        names_first = f"/{first}".endswith(f"/{found.name}")
        return found.form == "archives" and found.id == manifest.id and names_first

    return [first, *(path for path, own in zip(others, place.each(is_own, others), strict=True) if own)]


def check_own(place: Place, manifest: Manifest) -> None:
    """See that all files of a checkpoint are its own, before they replace others elsewhere.

    Raises:
        CorruptCheckpointError: one is not: see :func:`own_files`.
    """
    strange = {file.path for file in manifest.files} - {*own_files(place, manifest)}
    if strange:
        uri = place.uri(min(strange))
        raise CorruptCheckpointError(f"checkpoint {place.uri(manifest.name)!r} names {uri!r}, which is no part of it.")


def data_file_id(path: str) -> str | None:
    """Return the id of the save that wrote the data file ``path`` of a directory; ``None`` if it is no such file."""
    match = _DATA_FILE.fullmatch(path)
    return None if match is None else match[1]
