"""Copying checkpoints between places: verified, what makes one exist at last, and never over another unasked."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import remove_manifest, write_manifest
from composerlite.checkpoint.place.place import Place, StoredFile, by_steps
from composerlite.checkpoint.place.step import MARKER, NEXT
from composerlite.checkpoint.record.manifest import FileRecord, Manifest, record_path
from composerlite.checkpoint.tools.surveying import Found, survey
from composerlite.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from composerlite.storage import StagedFile, verify_file

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
    verified and not brought again; what killed processes left in its folder is completed or removed first.

    Args:
        source: has the checkpoint.
        found: the checkpoint.
        target: gets it.
        overwrite: replace another one of that name, and files of the same names, once all bytes of the checkpoint were
            verified where it is. A whole one is there until the commit of this one, but for a directory in a bucket,
            which is deleted first. An incomplete copy of this very checkpoint is replaced in any case.
        progress: is called with each number of bytes.

    Raises:
        CheckpointExistsError: there is another one of that name, or a file of the same name with other bytes. Also with
            ``overwrite`` if the one is a file and the other a directory.
        CorruptCheckpointError: it is incomplete, or a file is not what was saved. Nothing was copied.
        CheckpointNotFoundError: it has no manifest.
        IncompatibleCheckpointError: a part of it is on the disks of other nodes.
    """
    _check_whole(source, found)
    Catalog(target.inside(found.home.rstrip("/"))).tidy()  # which may be a checkpoint of this name
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
    old = next((one for one in survey(target) if one.name == found.name), None) if others else None
    if old is not None and old.commits and _is_of_another_kind(old, found):
        kinds = ("a file", "a directory") if _is_directory(found) else ("a directory", "a file")
        raise CheckpointExistsError(
            f"{target.uri(found.name)!r} is {kinds[0]}, which {kinds[1]} does not replace. Copy to another place, or "
            "remove it first."
        )
    mends = any(data is not None for data in there.values())  # an incomplete copy of this one is there
    if mends or overwrite:  # nothing of what is there goes for what is damaged
        _verify(source, found)
    before = () if old is None else old.files
    if there != commits and old is not None and _can_replace(old, found, target):
        _replace(source, found, target.inside(found.home.rstrip("/")), commits, progress)
        _remove_others(target, before, found)
        return True
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
    _remove_others(target, before, found)
    return True


def _remove_others(target: Place, before: Sequence[StoredFile], found: Found) -> None:
    """Remove the files that only the checkpoint ``before`` had."""
    kept = {record.path for record in found.records}
    target.delete_all(file.path for file in before if file.path not in kept)


def _can_replace(old: Found, found: Found, target: Place) -> bool:
    """Return true if the commit of a save can replace ``old``: in a bucket no directory, as its files keep names."""
    if old.committed is None or found.manifest is None:
        return False
    return target.path_of("") is not None or not _is_directory(found)


def _is_directory(found: Found) -> bool:
    return found.kind == "step" or (found.manifest is not None and found.manifest.is_directory)


def _is_of_another_kind(old: Found, found: Found) -> bool:
    """Return true if ``old`` is a file where ``found`` is a directory, or a directory where that is a file."""
    if _is_directory(found):
        return any(file.path == found.name for file in old.files)
    return any(file.path.startswith(f"{found.name}/") for file in old.files)


def _replace(
    source: Place, found: Found, home: Place, commits: Mapping[str, bytes], progress: Callable[[int], object]
) -> None:
    """Put a checkpoint in the place of another one of its name, as a save does: until its commit the other is there."""
    name = found.name.removeprefix(found.home)
    paths = [record.path.removeprefix(found.home) for record in found.records]
    data = list(commits.values())[-1]
    if (folder := home.path_of("")) is None:
        manifest = Manifest.from_json(data, home.uri(name))
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(source.lent(record.path, record.digest)) for record in found.records]
            Catalog(home).publish(manifest, files, overwrite=True)
        progress(found.size_bytes)
    elif not _is_directory(found):
        with contextlib.ExitStack() as stack:
            parts: dict[str, Path] = {}
            for path, record in zip(paths, found.records, strict=True):
                staged = stack.enter_context(StagedFile(folder / path))
                with source.lent(record.path, record.digest) as file, file.open("rb", buffering=0) as opened:
                    shutil.copyfileobj(opened, staged.file, 8 << 20)
                staged.flush()
                verify_file(staged.temporary, record.digest, progress)
                parts[path] = staged.temporary
            with home.commit(name, parts, overwrite=True, record=record_path(name)) as commit:
                commit.announce(data)
                commit.commit()
    else:
        _replace_directory(source, found, home, commits, progress)


def _replace_directory(
    source: Place, found: Found, home: Place, commits: Mapping[str, bytes], progress: Callable[[int], object]
) -> None:
    """Do so with a directory of this machine."""
    name, is_step = found.name.removeprefix(found.home), found.kind == "step"
    handle = home.begin(name, lambda: True, overwrite=True)
    try:
        staged = PurePosixPath(name).with_name(handle.place)
        for record in found.records:
            path = home.path_of(str(staged / record.path.removeprefix(f"{found.name}/")))
            assert path is not None
            source.write_to(path, record.path, record.digest, by_steps(progress))
        for path, data in commits.items() if is_step else ():
            if not path.endswith(f"/{MARKER}"):
                write_manifest(home, str(staged / path.removeprefix(f"{found.name}/")), data)
        last = list(commits.values())[-1]
        parts = home.parts(name, handle, MARKER if is_step else "", last)
        with home.commit(name, parts, overwrite=True, record=None if is_step else record_path(name)) as commit:
            if not is_step:
                commit.announce(last)
            commit.commit()
    except BaseException:
        home.abandon(name, handle)
        raise
    home.release(name)


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
