"""Commit and delete checkpoints. Only :mod:`composerlite.checkpoint.memory` has a commit of its own, for replicas.

A save calls :func:`commit_file` or :func:`put_decider`, an upload :func:`send_files` and :func:`commit_sent`, a
download :func:`fetch_checkpoint`. :func:`delete_checkpoint` and :func:`quarantine_checkpoint` remove a checkpoint.
:func:`garbage` lists the files of killed saves.

A checkpoint exists if the deciding file exists. The deciding file contains the record of the checkpoint
(:mod:`composerlite.checkpoint.record.record`). The deciding file of a checkpoint in one file is that file, the deciding
file of a directory is its index. A checkpoint of the form ``step`` has a second deciding file, the marker, and exists
if both files exist. The commit is a single atomic put of the (last) deciding file, after all other files are durable: a
rename in a folder, a request in a bucket. There is no state between "absent" and "committed", so there is nothing to
recover.

The name of each data file in a directory contains the id of the save, and only the record with this id names the file.
To replace a directory, a save writes new files beside the old files, commits, and then deletes the old files. The files
of a step (``Checkpointer``) and the archives of ranks have fixed names: a save deletes old files first.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from composerlite.checkpoint.format import INDEXES, MARKER
from composerlite.checkpoint.place.catalog import map_reads, record_in
from composerlite.checkpoint.place.place import OnBytes, Place, local_copy, set_link
from composerlite.checkpoint.record.naming import data_file_id
from composerlite.checkpoint.record.record import Manifest, NewerManifestError
from composerlite.errors import CheckpointExistsError, CorruptCheckpointError, bytes_text
from composerlite.storage import StagedFile

log = logging.getLogger(__name__)


# ── commits ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def commit_file(staged: StagedFile, *, overwrite: bool) -> None:
    """Rename a flushed file to its final name. With a record in the file, this commits the checkpoint.

    Args:
        staged: the file, flushed.
        overwrite: replace the file of that name in the same atomic step.

    Raises:
        FileExistsError: a file of that name exists, and ``overwrite`` is false.
        OSError: the file system failed.
    """
    staged.publish(overwrite=overwrite)


def put_decider(place: Place, path: str, data: bytes, staged: StagedFile | None, *, overwrite: bool) -> None:
    """Commit a directory: write the deciding file, durable, and give the file its name in an atomic step.

    Args:
        place: the place with all other files of the checkpoint.
        path: path of the deciding file.
        data: content of the deciding file, with the record.
        staged: the file under its temporary name; ``None`` for a bucket, where a single request writes the file.
        overwrite: replace the file of that name.

    Raises:
        CheckpointExistsError: the deciding file of another save exists, and ``overwrite`` is false.
    """
    try:
        if staged is None:
            place.put(path, data, create_only=not overwrite)
        else:
            staged.file.write(data)
            staged.flush()
            commit_file(staged, overwrite=overwrite)
    except FileExistsError as e:
        if place.read(path) != data:  # equal: the first request succeeded, and the answer was lost
            raise CheckpointExistsError(f"Another process saved {place.uri(path)!r} during this save.") from e


def send_files(
    place: Place, manifest: Manifest, files: Mapping[str, Path | bytes], *, overwrite: bool = False
) -> Manifest | None:
    """Upload all files of a checkpoint to a bucket except the deciding file. Call :func:`commit_sent` afterwards.

    Nothing is uploaded if the bucket has this checkpoint. Archives of ranks under the same names are deleted first.

    Args:
        place: the bucket.
        manifest: the record for the bucket.
        files: local files, or contents, by their paths in the bucket.
        overwrite: replace a checkpoint of the same name. A checkpoint of the same run at the same moment is always
            replaced, since a resumed run saves this moment again.

    Returns:
        The record of the checkpoint that the commit will replace, or of this checkpoint if it is in the bucket; for
        ``existing`` of :func:`commit_sent`. ``None`` if there is no readable record.

    Raises:
        CheckpointExistsError: the bucket has another checkpoint of the name, and ``overwrite`` is false.
        NewerManifestError: a newer version of composerlite saved a checkpoint of the name.
    """
    existing = _replaced_record(place, manifest.files[0].path)
    if existing is not None:
        if existing.id == manifest.id:
            return existing
        before, now = existing.run, manifest.run
        if not overwrite and (before.name, before.moment) != (now.name, now.moment):
            raise _exists_error(place, existing)
        if existing.form == "archives":
            delete_checkpoint(place, existing)
            existing = None
    for path, file in files.items():
        if path != manifest.files[0].path:
            place.put(path, file)
    return existing


def commit_sent(
    place: Place,
    manifest: Manifest,
    decider: Path | bytes,
    existing: Manifest | None,
    links: Mapping[str, str],
    *,
    overwrite: bool = False,
) -> None:
    """Upload the deciding file: the commit. Then move the links, and delete the replaced files.

    After a kill at any moment the checkpoint is unlisted or complete, and the target of ``latest`` is complete. Of two
    processes with different checkpoints and the same new name, only the first succeeds.

    Args:
        place: the bucket.
        manifest: the record for the bucket.
        decider: the deciding file, or the content.
        existing: the result of :func:`send_files`.
        links: path of the target by full name of the link, without ``.symlink``.
        overwrite: as for :func:`send_files`.

    Raises:
        CheckpointExistsError: another process has committed another checkpoint of that name meanwhile.
    """
    path = manifest.files[0].path
    if existing is None or existing.id != manifest.id:
        try:
            place.put(path, decider, create_only=existing is None and not overwrite)
        except FileExistsError as e:
            now = _replaced_record(place, path)
            if now is None:
                place.put(path, decider)
            elif now.id != manifest.id:  # equal: the request succeeded, and the answer was lost
                raise _exists_error(place, now) from e
    for link, name in links.items():
        set_link(place, f"/{link}", name)
    if existing is not None:
        place.delete(set(own_files(place, existing)) - {file.path for file in manifest.files})


def _replaced_record(place: Place, path: str) -> Manifest | None:
    """Return the record in the file ``path``, before the file is replaced; ``None`` if no record can be read."""
    try:
        return record_in(place, path)
    except CorruptCheckpointError as e:
        log.warning("replacing the damaged file %s: %s", place.uri(path), e)
        return None


def _exists_error(place: Place, existing: Manifest) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"checkpoint {place.uri(existing.name)!r} of run {existing.run_name!r} at batch {existing.batch} exists. "
        "Delete it, give names that differ, as with '{run_name}' or '{batch}' in them, or pass overwrite=True "
        "(save_overwrite=True in the Trainer)."
    )


def fetch_checkpoint(
    source: Place, manifest: Manifest, target: Place, progress: OnBytes = int, *, create_only: bool = False
) -> None:
    """Copy a checkpoint to ``target`` and verify each file. The deciding files are copied last: the commit.

    Intact files from an interrupted copy are not copied again.

    Args:
        source: the place of the checkpoint.
        manifest: the record.
        target: the place of the copy.
        progress: called with the number of bytes of each piece.
        create_only: replace no file.

    Raises:
        CorruptCheckpointError: a file is missing, or the bytes differ from the record. Then the checkpoint is not in
            ``target``, and files of the same names in ``target`` stay unless replaced already.
        FileExistsError: ``create_only`` is true, and ``target`` has a deciding file, or another file of the name with
            other bytes.
    """
    check_own(source, manifest)
    deciders = _deciders(manifest)
    for record in sorted(manifest.files, key=lambda file: file.path in deciders):
        if record.path not in deciders:
            with contextlib.suppress(FileNotFoundError, CorruptCheckpointError):
                target.verify(record, progress)
                continue
        uri, here = source.uri(record.path), target.path_of(record.path)
        log.info("fetching %s (%s) to %s", uri, bytes_text(record.size_bytes), target.uri(record.path))
        try:  # an old file stays until the new file is verified
            if here is not None:
                source.fetch(record.path, here, record.digest, progress, create_only=create_only)
            else:
                with local_copy(source, record.path, record.digest) as path:
                    target.put(record.path, path, create_only=create_only, progress=progress)
        except FileNotFoundError as e:
            raise CorruptCheckpointError(f"checkpoint file {uri!r} is missing: {e}") from e
        except CorruptCheckpointError as e:
            raise CorruptCheckpointError(f"checkpoint file {uri!r} cannot be fetched: {e}") from e


# ── deletions ────────────────────────────────────────────────────────────────────────────────────────────────────────
def delete_checkpoint(place: Place, manifest: Manifest) -> None:
    """Delete a checkpoint: the deciding files first, then the other files of :func:`own_files`.

    If nodes have disks of their own, every part on this disk is deleted: a disk may have parts of several nodes.
    A kill between the two steps leaves files without a record, which :func:`garbage` lists. A missing file is no error.
    """
    deciders = _deciders(manifest)
    is_directory = deciders[0] != manifest.name
    others = [path for path in own_files(place, manifest) if path not in deciders]
    place.delete(reversed(deciders), durable=bool(others), folders=is_directory)
    place.delete(others, folders=is_directory)
    log.debug("deleted checkpoint %s", place.uri(manifest.name))


def _deciders(manifest: Manifest) -> tuple[str, ...]:
    """Return the paths of the deciding files, in the order of the writes: the checkpoint exists if all exist."""
    return manifest.files[0].path, *((f"{manifest.home}{MARKER}",) if manifest.form == "step" else ())


def own_files(place: Place, manifest: Manifest, *, or_damaged: bool = False) -> list[str]:
    """Return the paths of the files to delete, rename or replace together with a checkpoint.

    A forged record of archives can name any file of the folder. So the archive of another rank counts only with
    a record of the same id and the same deciding file.

    Args:
        place: the place of the checkpoint.
        manifest: the record.
        or_damaged: archives with a missing, damaged or newer record count, too.
    """
    first, *others = (file.path for file in manifest.files)
    if manifest.form != "archives":
        return [first, *others]

    def is_own(path: str) -> bool:
        try:
            found = record_in(place, path, parts=True)
        except (CorruptCheckpointError, NewerManifestError):
            found = None
        if found is None:
            return or_damaged
        return found.form == "archives" and found.id == manifest.id and f"/{first}".endswith(f"/{found.saved_as}")

    return [first, *(path for path, own in zip(others, map_reads(place, is_own, others), strict=True) if own)]


def check_own(place: Place, manifest: Manifest) -> None:
    """Check that all files of the record belong to the checkpoint. Call before the files replace other files.

    Raises:
        CorruptCheckpointError: a file belongs to another checkpoint: see :func:`own_files`.
    """
    foreign = {file.path for file in manifest.files} - {*own_files(place, manifest)}
    if foreign:
        uri = place.uri(min(foreign))
        raise CorruptCheckpointError(f"checkpoint {place.uri(manifest.name)!r} names {uri!r}, a foreign file.")


def quarantine_checkpoint(place: Place, manifest: Manifest) -> None:
    """Rename all files of a damaged checkpoint by :meth:`Place.quarantine`; also archives without a readable record."""
    paths = own_files(place, manifest, or_damaged=True) if manifest.form == "archives" else [manifest.name]
    for path in reversed(paths):  # the file with the record comes last: after a kill the next start finishes
        place.quarantine(path)


def garbage(place: Place, files: Iterable[str], names: re.Pattern[str]) -> list[str]:
    """Return the data files of killed saves of directories: files in no record, whose save has ended.

    Args:
        place: a folder after :meth:`Place.sweep`, with temporary files of living processes only; or a bucket with the
            lease held by this process.
        files: the paths to consider.
        names: pattern of the names of the directories to consider.
    """
    found: dict[str, list[str]] = {}
    for path in files:
        if data_file_id(path) is not None and names.fullmatch(folder := path.rpartition("/")[0]):
            found.setdefault(folder, []).append(path)
    unused: list[str] = []
    for folder, paths in found.items():
        live_ids = {name.rpartition("-")[2] for name in place.names(folder) if ".tmp-" in name}
        try:
            indexes = [f"{folder}/{index}".lstrip("/") for index in INDEXES]
            records = [record_in(place, path) for path in indexes]
        except (CorruptCheckpointError, NewerManifestError):
            continue  # the record may name these files
        if any(record is None and place.exists(path) for record, path in zip(records, indexes, strict=True)):
            continue  # an index without a record may need these files
        named = {file.path for record in records if record is not None for file in record.files}
        unused += [path for path in paths if path not in named and data_file_id(path) not in live_ids]
    return unused
