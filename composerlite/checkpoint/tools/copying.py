"""Copying checkpoints between places: verified, the deciding file last, and never over another checkpoint unasked.

Files are copied byte for byte, with the record in them. So a checkpoint that was renamed by hand stays a copy, which no
run resumes from, wherever it is copied to.
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
    """Make a checkpoint of ``source`` one of ``target``, under the same name; ``False``: it was there already.

    A kill at any moment leaves it out of the listing of ``target``, or whole. What an interrupted copy of a directory
    has brought is verified and not brought again.

    Args:
        source: has the checkpoint.
        found: the checkpoint.
        target: gets it.
        overwrite: replace another one of that name, once all bytes of the checkpoint were verified where it is. A step
            and archives of ranks are deleted before they are replaced; others stay until the copy is committed.
        progress: is called with each number of bytes.

    Raises:
        CheckpointExistsError: there is another one of that name, also one that was saved during the copy, or a file of
            the same name with other bytes. With ``overwrite`` if the one is a file and the other a directory.
        CorruptCheckpointError: it is incomplete, or a file is not what was saved. Nothing was copied.
        CheckpointNotFoundError: it has no record.
        IncompatibleCheckpointError: a part of it is on the disks of other nodes.
    """
    manifest = _whole(source, found)
    _check_kind(target, manifest)
    found_there = sealed(target, manifest.files[0].path)
    there = None if found_there is None else found_there.manifest
    is_same = there is not None and there.id == manifest.id
    if is_same and found_there is not None and not found_there.faults:
        return False
    is_taken = found_there is not None or target.exists(manifest.files[0].path)
    if is_taken and not overwrite and not is_same:
        raise CheckpointExistsError(
            f"{target.uri(manifest.name)!r} is another checkpoint of that name. Copy to another place, or give "
            "--overwrite to replace it."
        )
    if is_taken:  # nothing of what is there goes for what is damaged
        _verify(source, manifest)
    replaced = [] if there is None else own_files(target, there)
    if there is not None and manifest.form in ("step", "archives"):
        delete_checkpoint(target, there)
    replaces = overwrite or is_taken
    try:
        for record in manifest.files:
            if record.path not in manifest.deciders:
                _bring(source, record, target, overwrite=replaces, progress=progress)
        for record in manifest.files:  # the deciding ones, in their order
            if record.path in manifest.deciders:
                _take(source, record, target, overwrite=replaces, progress=progress)
    except FileExistsError as e:
        raise CheckpointExistsError(
            f"{target.uri(manifest.name)!r} was saved by another process meanwhile. Copy to another place, or give "
            "--overwrite to replace it."
        ) from e
    target.delete({*replaced} - {record.path for record in manifest.files})
    return True


def _whole(source: Place, found: Found) -> Manifest:
    """Return the record of ``found``, if all of it is here."""
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
    """See that ``target`` has no directory where a file comes, and no file where a directory comes."""
    is_file = target.exists(manifest.name)
    if is_file if manifest.is_directory else not is_file and any(target.files(manifest.name)):
        kinds = ("a file", "a directory") if manifest.is_directory else ("a directory", "a file")
        raise CheckpointExistsError(
            f"{target.uri(manifest.name)!r} is {kinds[0]}, which {kinds[1]} does not replace. Copy to another place, "
            "or remove it first."
        )


def _verify(source: Place, manifest: Manifest) -> None:
    for record in manifest.files:
        try:
            source.verify(record)
        except FileNotFoundError as e:
            raise CorruptCheckpointError(f"{source.uri(record.path)!r} is gone. Nothing was copied.") from e
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"{e} Nothing was copied, and what is in the target stays.") from e


def _bring(
    source: Place, record: FileRecord, target: Place, *, overwrite: bool, progress: Callable[[int], object]
) -> None:
    """Copy a file to ``target``, unless an earlier copy that was interrupted has brought it there."""
    try:
        target.verify(record, progress)
    except FileNotFoundError:
        pass
    except CorruptCheckpointError as e:
        if not overwrite:
            raise CheckpointExistsError(
                f"{target.uri(record.path)!r} is there, is no part of a checkpoint, and has other bytes. Copy to "
                "another place, or give --overwrite to replace it."
            ) from e
    else:
        return
    _take(source, record, target, overwrite=overwrite, progress=progress)


def _take(
    source: Place, record: FileRecord, target: Place, *, overwrite: bool, progress: Callable[[int], object]
) -> None:
    try:
        target.take(source, record, progress, create_only=not overwrite)
    except FileNotFoundError as e:
        raise CorruptCheckpointError(f"{source.uri(record.path)!r} is gone: {e}") from e
