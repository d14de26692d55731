"""Copies of checkpoints between places: verified, the deciding file last, and never over another checkpoint unasked.

Files are copied byte for byte, with the record at the end. So a copy under a changed name stays a copy in the target,
and no run resumes from a copy.
"""

from __future__ import annotations

from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import check_own, delete_checkpoint, fetch_checkpoint, own_files
from composerlite.checkpoint.place.place import OnBytes, Place
from composerlite.checkpoint.tools.surveying import Found, checkpoint_at
from composerlite.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)


def copy(found: Found, target: Place, *, overwrite: bool = False, progress: OnBytes = int) -> bool:
    """Copy the checkpoint ``found`` to ``target``, under the same name. Returns false if the copy existed already.

    If the process is killed at any moment, a listing of ``target`` shows the complete copy or none. Files of a
    directory from an interrupted copy are verified and not copied again.

    Args:
        found: the checkpoint.
        target: place of the copy.
        overwrite: replace another checkpoint of the same name, after all bytes of the source were verified. If the
            source is a step or archives of ranks, the old checkpoint is deleted before the copy; otherwise the old
            checkpoint stays until the copy is committed.
        progress: called with each number of bytes.

    Raises:
        CheckpointExistsError: without ``overwrite``: ``target`` has another checkpoint of the same name, perhaps saved
            during the copy, or a file of the same name with other bytes. With or without ``overwrite``: a file would
            replace a directory, or a directory a file.
        CorruptCheckpointError: the checkpoint is incomplete, or the bytes of a file differ from the record.
        CheckpointNotFoundError: the checkpoint has no record.
        IncompatibleCheckpointError: a part of the checkpoint is on the disks of other nodes.
    """
    source, manifest = found.place, found.manifest
    if manifest is None and not found.decider:
        raise CheckpointNotFoundError(
            f"{found.uri!r} has no record, so its bytes cannot be verified. Copy it like any other file: load_path "
            "accepts it."
        )
    if manifest is None or found.faults:
        raise CorruptCheckpointError(f"{found.uri!r} is incomplete: {'; '.join(found.faults[:3])}. Nothing was copied.")
    if len(manifest.here) != len(manifest.files):
        raise IncompatibleCheckpointError(
            f"{found.uri!r} has parts on the disks of other nodes. Copy the files of all nodes to one folder, or "
            "save to a bucket."
        )
    check_own(source, manifest)
    uri = target.uri(manifest.name)
    is_file = target.exists(manifest.name)
    if is_file if manifest.is_directory else not is_file and any(target.files(manifest.name)):
        kinds = ("a file", "a directory") if manifest.is_directory else ("a directory", "a file")
        raise CheckpointExistsError(
            f"{uri!r} is {kinds[0]}, which {kinds[1]} does not replace. Copy to another place, or remove it first."
        )
    there = checkpoint_at(target, manifest.files[0].path)
    replaced = None if there is None else there.manifest
    is_same = replaced is not None and replaced.id == manifest.id
    if there is not None and is_same and not there.faults:
        return False
    is_taken = there is not None or target.exists(manifest.files[0].path)
    if is_taken and not overwrite and not is_same:
        raise CheckpointExistsError(
            f"{uri!r} is another checkpoint with that name. Copy to another place, or give --overwrite to replace it."
        )
    old = [] if replaced is None else own_files(target, replaced)
    if is_taken and manifest.form in ("step", "archives"):  # old and new files have the same names
        Catalog(source).verify(manifest)
        if replaced is not None:
            delete_checkpoint(target, replaced)
    try:
        fetch_checkpoint(source, manifest, target, progress, create_only=not (overwrite or is_taken))
    except FileExistsError as e:
        raise CheckpointExistsError(
            f"{uri!r} was saved by another process meanwhile, or has a file with the same name and other bytes. "
            "Copy to another place, or give --overwrite to replace it."
        ) from e
    target.delete({*old} - {record.path for record in manifest.files})
    return True
