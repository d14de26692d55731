"""Sending checkpoints to a bucket: the files first, then the deciding one, then the links that lead to it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from composerlite.checkpoint.place.catalog import ANNOUNCED, record_in
from composerlite.checkpoint.place.commit import delete_checkpoint, own_files
from composerlite.checkpoint.place.place import Place
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.errors import CheckpointExistsError, CorruptCheckpointError

__all__ = ["commit_sent", "send_files"]

log = logging.getLogger(__name__)


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
