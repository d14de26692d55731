"""The commit of a checkpoint, and its deletion: the only code that makes a checkpoint exist or cease to exist.

A save calls :func:`commit_file` or :func:`put_decider`, an upload :func:`send_files` and :func:`commit_sent`, a
download :func:`fetch_checkpoint`. A checkpoint goes by :func:`delete_checkpoint` or :func:`quarantine_checkpoint`; what
killed saves have left is :func:`garbage`.

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
from collections.abc import Container, Iterable, Mapping
from pathlib import Path, PurePosixPath

from composerlite.checkpoint.format import INDEXES
from composerlite.checkpoint.place.catalog import ANNOUNCED, record_in
from composerlite.checkpoint.place.place import OnBytes, Place
from composerlite.checkpoint.record.manifest import Manifest, NewerManifestError
from composerlite.checkpoint.record.naming import data_file_id, numbers_in
from composerlite.checkpoint.record.tail import MOST_TAIL_BYTES, unseal
from composerlite.errors import CheckpointExistsError, CorruptCheckpointError, bytes_text
from composerlite.storage import StagedFile

__all__ = [
    "check_own",
    "commit_file",
    "commit_sent",
    "delete_checkpoint",
    "fetch_checkpoint",
    "garbage",
    "own_files",
    "put_decider",
    "quarantine_checkpoint",
    "quarantine_file",
    "send_files",
]

log = logging.getLogger(__name__)


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
            raise CheckpointExistsError(f"{place.uri(path)!r} was saved by another process meanwhile.") from e


def send_files(
    place: Place, manifest: Manifest, files: Mapping[str, Path | bytes], *, overwrite: bool = False
) -> Manifest | None:
    """Send the files of a checkpoint to a bucket, all but the deciding one, for which there is :func:`commit_sent`.

    Nothing is sent if the checkpoint is there. Archives of ranks that have its names are deleted first.

    Args:
        place: the bucket.
        manifest: the record, as it will lie in the bucket.
        files: of this machine, or their contents, by their paths in the bucket.
        overwrite: replace a checkpoint of the same name. One of the same moment of the same run is replaced in any
            case: a run that was interrupted does it again.

    Returns:
        The checkpoint that has the name; ``None`` if there is none.

    Raises:
        CheckpointExistsError: that is another one.
    """
    there = _replaced_record(place, manifest.files[0].path)
    if there is not None and there.id == manifest.id:
        return there
    same_moment = there is not None and (there.run_name, there.moment) == (manifest.run_name, manifest.moment)
    if there is not None and not overwrite and not same_moment:
        raise _exists_error(place, there)
    if there is not None and there.form == "archives":
        delete_checkpoint(place, there)
        there = None
    for path, file in files.items():
        if path != manifest.files[0].path:
            place.put(path, file)
    return there


def commit_sent(
    place: Place,
    manifest: Manifest,
    decider: Path | bytes,
    there: Manifest | None,
    links: Mapping[str, str],
    *,
    overwrite: bool = False,
) -> None:
    """Put the deciding file of a checkpoint into a bucket: the checkpoint exists. Then point links to it.

    A kill at any moment leaves it out of the listing or complete, and ``latest`` on a complete one. Of two processes
    that commit different checkpoints under one new name, one succeeds.

    Args:
        place: the bucket.
        manifest: the record, as it lies in the bucket.
        decider: the file, or its content.
        there: what :func:`send_files` returned.
        links: full names without ``.symlink``, and the file that each leads to; ``latest`` first.
        overwrite: as for :func:`send_files`.

    Raises:
        CheckpointExistsError: another process has committed another checkpoint of that name meanwhile.
    """
    path = manifest.files[0].path
    if there is None or there.id != manifest.id:
        for link in list(links)[:1]:  # after a kill before the link is moved the next start looks here first
            place.put(f".{PurePosixPath(link).name}{ANNOUNCED}", f"{manifest.name}\n{manifest.id}".encode())
        try:
            place.put(path, decider, create_only=there is None and not overwrite)
        except FileExistsError as e:
            now = _replaced_record(place, path)
            if now is None:
                place.put(path, decider)
            elif now.id != manifest.id:  # else the answer to our own request was lost
                raise _exists_error(place, now) from e
    for link, name in links.items():
        place.point(f"/{link}", name)
    if there is not None:
        place.delete(set(own_files(place, there)) - {file.path for file in manifest.files})


def _replaced_record(place: Place, path: str) -> Manifest | None:
    """Return the record in the file ``path`` that is to be replaced; ``None`` if there is none to be read."""
    try:
        return record_in(place, path)
    except CorruptCheckpointError as e:
        log.warning("replacing %s, which is damaged: %s", place.uri(path), e)
        return None


def _exists_error(place: Place, there: Manifest) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"checkpoint {place.uri(there.name)!r} exists, of run {there.run_name!r} at batch {there.batch}. Give names "
        "that differ, as with '{run_name}' or '{batch}' in them, delete it, or pass overwrite=True "
        "(save_overwrite=True in the Trainer)."
    )


def fetch_checkpoint(source: Place, manifest: Manifest, target: Place, progress: OnBytes = int) -> None:
    """Bring a checkpoint of files to ``target``, verified. It exists there with its deciding file.

    Args:
        source: has the checkpoint.
        manifest: its record.
        target: gets it.
        progress: called with each number of bytes received.

    Raises:
        CorruptCheckpointError: a file is missing or its bytes are not those that were saved. There is no
            checkpoint of that name in the place then, unless there was one.
    """
    check_own(source, manifest)
    for record in (*manifest.files[1:], manifest.files[0]):
        uri, size = source.uri(record.path), bytes_text(record.size_bytes)
        log.info("fetching %s (%s) to %s", uri, size, target.uri(record.path))
        try:
            target.take(source, record, progress)  # what is there stays until what comes was verified
        except FileNotFoundError as e:
            raise CorruptCheckpointError(f"checkpoint file {uri!r} is gone: {e}") from e


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
    record has the same id, and the same deciding file.

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
        return found.form == "archives" and found.id == manifest.id and f"/{first}".endswith(f"/{found.name}")

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


def quarantine_checkpoint(place: Place, manifest: Manifest, names: re.Pattern[str]) -> None:
    """Take a damaged checkpoint out of the way: its data stay as ``<name>.damaged``.

    Args:
        place: has the checkpoint.
        manifest: the record.
        names: matches the names of the run. Archives of ranks that have one of them go, too, if their own record is
            missing or damaged.
    """
    first = numbers_in(names, manifest.name)
    damaged = [file.path for file in manifest.files if first is not None and numbers_in(names, file.path) == first]
    paths = own_files(place, manifest, damaged) if manifest.form == "archives" else [manifest.name]
    for path in reversed(paths):  # after a kill the record is still there, and the next start continues
        quarantine_file(place, path)


def quarantine_file(place: Place, name: str) -> None:
    """Take a damaged file or directory out of the way: it stays as ``<name>.damaged``."""
    place.quarantine(name)
    log.warning("quarantined %s as %s.damaged", place.uri(name), name)


def garbage(place: Place, files: Iterable[str], names: re.Pattern[str]) -> list[str]:
    """Return the data files of killed saves of directories: no record names them, and no living process writes them.

    Args:
        place: a folder after :meth:`Place.sweep`, in which living processes alone have temporary files; or a bucket
            whose lease this process holds.
        files: the paths to look at.
        names: matches the names of the directories to look at.
    """
    found: dict[str, list[str]] = {}
    for path in files:
        if data_file_id(path) is not None and names.fullmatch(folder := path.rpartition("/")[0]):
            found.setdefault(folder, []).append(path)
    gone: list[str] = []
    for folder, paths in found.items():
        alive = {name.rpartition("-")[2] for name in place.names(folder) if ".tmp-" in name}
        try:
            indexes = [f"{folder}/{index}".lstrip("/") for index in INDEXES]
            records = [record_in(place, path) for path in indexes]
        except CorruptCheckpointError:
            continue  # it is unknown which files it names
        if any(record is None and place.exists(path) for record, path in zip(records, indexes, strict=True)):
            continue  # an index that was cut off, or that another program wrote, may need them
        named = {file.path for record in records if record is not None for file in record.files}
        gone += [path for path in paths if path not in named and data_file_id(path) not in alive]
    return gone
