"""Copying checkpoints between places: verified, the deciding file last, and never over another checkpoint unasked.

Files are copied byte for byte, with the record at the end. So a checkpoint with a changed name stays a copy in the
target, too, and no run resumes from a copy.
"""

from __future__ import annotations

from collections.abc import Callable

from composerlite.checkpoint.place.commit import check_own, delete_checkpoint, own_files
from composerlite.checkpoint.place.place import Place
from composerlite.checkpoint.record.manifest import FileRecord, Manifest
from composerlite.checkpoint.tools.surveying import Found, sealed
from composerlite.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)

__all__ = ["copy"]


def copy(
    source: Place,
    found: Found,
    target: Place,
    *,
    overwrite: bool = False,
    progress: Callable[[int], object] = int,
) -> bool:
    """Copy a checkpoint of ``source`` to ``target``, under the same name. Returns false if the copy existed already.

    A kill at any moment leaves the copy out of the listing of ``target``, or whole. Files of a directory that an
    interrupted copy has brought are verified and not copied again.

    Args:
        source: has the checkpoint.
        found: the checkpoint.
        target: gets the copy.
        overwrite: replace another checkpoint of that name, after all bytes of the source were verified. A step and
            archives of ranks are deleted before the copy; other forms stay until the copy is committed.
        progress: is called with each number of bytes.

    Raises:
        CheckpointExistsError: ``target`` has another checkpoint of that name, also one that was saved during the copy,
            or a file of that name with other bytes. With ``overwrite`` if one is a file and the other a directory.
        CorruptCheckpointError: the checkpoint is incomplete, or a file has other bytes than were saved.
        CheckpointNotFoundError: the checkpoint has no record.
        IncompatibleCheckpointError: a part of the checkpoint is on the disks of other nodes.
    """
    manifest = _whole(source, found)
    uri = target.uri(manifest.name)
    _check_kind(target, manifest)
    there = sealed(target, manifest.files[0].path)
    replaced = None if there is None else there.manifest
    is_same = replaced is not None and replaced.id == manifest.id
    if there is not None and is_same and not there.faults:
        return False
    is_taken = there is not None or target.exists(manifest.files[0].path)
    if is_taken and not overwrite and not is_same:
        raise CheckpointExistsError(
            f"{uri!r} is another checkpoint of that name. Copy to another place, or give --overwrite to replace it."
        )
    if is_taken:  # before anything in the target is deleted
        _verify(source, manifest)
    old = [] if replaced is None else own_files(target, replaced)
    if replaced is not None and manifest.form in ("step", "archives"):
        delete_checkpoint(target, replaced)
    create_only = not (overwrite or is_taken)
    deciders = [record for record in manifest.files if record.path in manifest.deciders]
    try:
        for record in manifest.files:
            if record not in deciders and not _is_copied(target, record, progress):
                target.take(source, record, progress, create_only=create_only)
        for record in deciders:
            target.take(source, record, progress, create_only=create_only)
    except FileExistsError as e:
        raise CheckpointExistsError(
            f"{uri!r} was saved by another process meanwhile, or has a file of the same name with other bytes. Copy to "
            "another place, or give --overwrite to replace it."
        ) from e
    except FileNotFoundError as e:
        raise CorruptCheckpointError(f"a file of {source.uri(manifest.name)!r} is gone: {e}") from e
    target.delete({*old} - {record.path for record in manifest.files})
    return True


def _whole(source: Place, found: Found) -> Manifest:
    """Return the record of ``found``, if all of the checkpoint is in ``source``."""
    uri = source.uri(found.name)
    if found.manifest is None and not found.decider:
        raise CheckpointNotFoundError(
            f"{uri!r} has no record: nothing says what its bytes must be. Copy it as any other file: load_path takes "
            "it as it is."
        )
    if found.manifest is None or found.faults:
        raise CorruptCheckpointError(f"{uri!r} is incomplete: {'; '.join(found.faults[:3])}. Nothing was copied.")
    if len(found.records) != len(found.manifest.files):
        raise IncompatibleCheckpointError(
            f"{uri!r} has parts on the disks of other nodes, which are not here. Copy the files of all nodes to one "
            "folder, or save to a bucket."
        )
    check_own(source, found.manifest)
    return found.manifest


def _check_kind(target: Place, manifest: Manifest) -> None:
    """Refuse to copy a file where ``target`` has a directory, and a directory where ``target`` has a file."""
    is_file = target.exists(manifest.name)
    if is_file if manifest.is_directory else not is_file and any(target.files(manifest.name)):
        kinds = ("a file", "a directory") if manifest.is_directory else ("a directory", "a file")
        raise CheckpointExistsError(
            f"{target.uri(manifest.name)!r} is {kinds[0]}, which {kinds[1]} does not replace. Copy to another place, "
            "or remove it first."
        )


def _verify(source: Place, manifest: Manifest) -> None:
    try:
        for record in manifest.files:
            source.verify(record)
    except (FileNotFoundError, CorruptCheckpointError) as e:
        raise CorruptCheckpointError(f"{e} Nothing was copied, and what is in the target stays.") from e


def _is_copied(target: Place, record: FileRecord, progress: Callable[[int], object]) -> bool:
    """Return true if an interrupted copy has brought the file to ``target``, with the right bytes."""
    try:
        target.verify(record, progress)
    except (FileNotFoundError, CorruptCheckpointError):
        return False
    return True
