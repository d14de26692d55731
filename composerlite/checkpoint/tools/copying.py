"""Copying checkpoints between places: verified, what makes one exist at last, and never over another unasked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from composerlite.checkpoint.place.commit import remove_manifest, write_manifest
from composerlite.checkpoint.place.place import Place, StoredFile
from composerlite.checkpoint.place.step import MARKER, NEXT
from composerlite.checkpoint.record.manifest import FileRecord
from composerlite.checkpoint.tools.surveying import Found, survey
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

    A kill at any moment leaves it out of the listing of ``target``, or whole. What an interrupted copy has brought is
    verified and not brought again.

    Args:
        source: has the checkpoint.
        found: the checkpoint.
        target: gets it.
        overwrite: replace another one of that name, and files of the same names, once all bytes of the checkpoint were
            verified where it is; the other one is deleted first then. An incomplete copy of this very checkpoint is
            replaced in any case.
        progress: is called with each number of bytes.

    Raises:
        CheckpointExistsError: there is another one of that name, or a file of the same name with other bytes.
        CorruptCheckpointError: it is incomplete, or a file is not what was saved. Nothing was copied.
        CheckpointNotFoundError: it has no manifest.
        IncompatibleCheckpointError: a part of it is on the disks of other nodes.
    """
    _check_whole(source, found)
    commits = {path: source.read(path) for path in found.commits}
    there = dict(zip(commits, target.read_all(commits), strict=True))
    others = dict(target.files()) if any(data is not None for data in there.values()) else {}
    if there == commits and all(_has(others, record) for record in found.records):
        return False
    if not overwrite and any(data is not None and data != commits[path] for path, data in there.items()):
        raise CheckpointExistsError(
            f"{target.uri(found.name)!r} is another checkpoint of that name. Copy to another place, or give "
            "--overwrite to replace it."
        )
    mends = any(data is not None for data in there.values())  # an incomplete copy of this one is there
    if mends or overwrite:  # nothing of what is there goes for what is damaged
        _verify(source, found)
    before = _files_of(target, found.name) if others else ()
    for path in reversed(commits):
        remove_manifest(target, path)
    for path in commits:
        if path.endswith(f"/{MARKER}"):  # what was to follow the one before does not follow this one
            target.delete(path.removesuffix(MARKER) + NEXT)
    for record in sorted(found.records, key=lambda record: record.path.endswith("/.metadata")):  # that is an index
        _bring(source, record, target, overwrite=overwrite or mends, progress=progress)
    for path, data in commits.items():
        try:
            write_manifest(target, path, data, create_only=True)
        except FileExistsError as e:
            raise CheckpointExistsError(f"{target.uri(found.name)!r} was written by another process meanwhile.") from e
    kept = {record.path for record in found.records}
    target.delete_all(file.path for file in before if file.path not in kept)
    return True


def _check_whole(source: Place, found: Found) -> None:
    uri = source.uri(found.name)
    if found.manifest is None and not found.commits:
        raise CheckpointNotFoundError(
            f"{uri!r} has no manifest: nothing says what its bytes must be. Copy it as any other file: load_path takes "
            "it as it is."
        )
    if found.manifest is None or found.faults:
        raise CorruptCheckpointError(f"{uri!r} is incomplete: {'; '.join(found.faults[:3])}. Nothing was copied.")
    if len(found.records) != len(found.manifest.files):
        raise IncompatibleCheckpointError(
            f"{uri!r} has parts on the disks of other nodes, which are not here. Copy the files of all nodes to one "
            "folder, or save to a bucket."
        )


def _verify(source: Place, found: Found) -> None:
    for record in found.records:
        try:
            source.verify(record)
        except FileNotFoundError as e:
            raise CorruptCheckpointError(f"{source.uri(record.path)!r} is gone. Nothing was copied.") from e
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"{e} Nothing was copied, and what is in the target stays.") from e


def _has(files: dict[str, StoredFile], record: FileRecord) -> bool:
    return record.path in files and files[record.path].size_bytes == record.size_bytes


def _files_of(target: Place, name: str) -> Sequence[StoredFile]:
    return next((one.files for one in survey(target) if one.name == name), ())


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
    try:
        target.take(source, record, progress)
    except FileNotFoundError as e:
        raise CorruptCheckpointError(f"{source.uri(record.path)!r} is gone: {e}") from e
