"""Resuming a run: list its checkpoints, sort them, restore the first one that verifies."""

from __future__ import annotations

import copy
import dataclasses
import errno
import gc
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias, final

from composerlite import dist
from composerlite.checkpoint.contents import Loaded
from composerlite.checkpoint.load.candidates import (
    IN_FOLDER,
    IN_MEMORY,
    IN_REPLICAS,
    Candidate,
    Listing,
    RunBucket,
    RunPlace,
    list_checkpoints,
    newest_first,
)
from composerlite.checkpoint.load.progress import progress_of
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import fetch_checkpoint, quarantine_checkpoint, quarantine_file
from composerlite.checkpoint.place.directory import ON_ALL_NODES
from composerlite.checkpoint.record.manifest import Manifest, continued, highest_attempt, new_attempt
from composerlite.checkpoint.record.naming import name_pattern
from composerlite.errors import CheckpointError, CorruptCheckpointError, RankError
from composerlite.storage import verify_file
from composerlite.types import Lineage

__all__ = ["Choice", "RunBucket", "RunPlace", "choose"]

log = logging.getLogger(__name__)
_STEP = "choosing the checkpoint to resume from"
Rejected: TypeAlias = tuple[Candidate, CheckpointError | OSError]
"""A skipped candidate, and the reason."""


@final
class Choice(NamedTuple):
    """The checkpoint that a run resumes from.

    Attributes:
        place: path of the checkpoint, or URI of a directory in a bucket; ``None``: the run has no checkpoint.
        lineage: attempt of the run, for all checkpoints saved from now on.
        loaded: the contents, read into the state.
    """

    place: Path | str | None
    lineage: Lineage
    loaded: Loaded | None = None


class _NotFiniteError(CheckpointError):
    """The checkpoint was saved while a loss, gradient norm or weight was not finite."""


class _IncompleteError(OSError):
    """A rank does not see the checkpoint, or no rank has some of its files. No tensor was changed."""


def choose(
    places: Sequence[RunPlace],
    run_name: str,
    read: Callable[[Path | str], Loaded] | None = None,
    *,
    progress_bar: bool = False,
) -> Choice:
    """Restore the newest usable checkpoint of ``run_name``. Then quarantine damaged files and repair links.

    Candidates are the checkpoints of the newest attempt and its ancestors; checkpoints of abandoned attempts are never
    restored. A file in a bucket is first downloaded to the folder. ``read`` verifies the bytes of a candidate while
    reading; all other bytes in a folder are verified afterwards.

    A candidate is skipped if damaged, marked as ``not_finite``, or in a folder unreadable for a rank. Once an older
    candidate is good, damaged candidates in folders are quarantined. Damaged candidates in a bucket stay: this machine
    may read wrongly. Weights alone are no candidate. Candidates saved without some of their keys are tried last: the
    missing state would start afresh in the middle of the run. Files of other programs, without a record, are no
    candidates. If only unusable checkpoints exist, the run does not start over: CheckpointError.

    Every rank of a run calls this and gets the same result. Rank 0 lists the checkpoints.

    Args:
        places: the places of each saver of the run.
        run_name: name of the run.
        read: function that reads a candidate into the state of the run, on all ranks. If ``read`` raises
            CorruptCheckpointError, or an OSError for a candidate in a folder, the next candidate is read. ``None``:
            candidates are only verified.
        progress_bar: show a progress bar on a terminal while a large file is downloaded.

    Raises:
        CheckpointError: there are checkpoints, and none of them is good.
        IncompatibleCheckpointError: the run has a checkpoint of a newer version, which may be the newest.
        OSError: a folder exists and cannot be read; or there are checkpoints, and none is readable for every rank.
        ObjectStoreError: a bucket does not answer.
        PermissionError: a bucket denies access.
    """
    group = dist.get_group()
    replicas = {number: place.memory.find(run_name) for number, place in enumerate(places) if place.memory is not None}
    listing, queue = Listing(), list[Candidate]()  # filled on rank 0 only
    rejected: list[Rejected] = []
    with group.all_or_none(_STEP):
        if group.is_first:
            listing = list_checkpoints(places, run_name, replicas)
            queue = newest_first(listing.known)
    while (candidate := group.broadcast(queue.pop(0) if queue else None)) is not None:
        try:
            loaded = _read_and_verify(candidate, places[candidate.place], read, progress_bar=progress_bar)
        except RankError:
            raise  # the ranks can no longer reach each other
        except (_NotFiniteError, CorruptCheckpointError, OSError) as e:
            if isinstance(e, OSError) and candidate.bucket is not None:
                raise
            rejected.append((candidate, copy.copy(e)))  # a copy, without frames that keep the read tensors alive
        else:
            return Choice(candidate.path, _accept(candidate, listing, rejected, places, run_name), loaded)
        gc.collect()  # there may not be memory for two checkpoints
        with group.all_or_none(_STEP):
            if group.is_first:
                log.warning("skipped %s: %s", candidate.source, rejected[-1][1])
                if candidate.bucket is not None and not listing.is_complete:
                    listing = list_checkpoints(places, run_name, replicas, whole_buckets=True)
                    tried = {(one.source, one.manifest.id) for one, _ in rejected}
                    queue = [one for one in newest_first(listing.known) if (one.source, one.manifest.id) not in tried]
    lineage = Lineage()
    with group.all_or_none(_STEP):
        if group.is_first:
            _check_that_there_is_none(listing, rejected, places, run_name)
            for place in places:
                _repair_links(place, None, run_name)
            lineage = new_attempt(highest_attempt(one.manifest for one in listing.known))
    return Choice(None, group.broadcast(lineage))


def _read_and_verify(
    candidate: Candidate, place: RunPlace, read: Callable[[Path | str], Loaded] | None, *, progress_bar: bool
) -> Loaded | None:
    """Read a candidate, and verify all bytes in a folder. Collective.

    Raises:
        _NotFiniteError, CorruptCheckpointError, OSError: the candidate cannot be used; on every rank.
    """
    group, manifest, catalog = dist.get_group(), candidate.manifest, place.catalog
    what = f"reading checkpoint {manifest.name!r}"
    if manifest.not_finite:
        raise _NotFiniteError(f"{', '.join(manifest.not_finite)} was not finite when it was saved.")
    if candidate.nearness == IN_REPLICAS and place.memory is not None:
        place.memory.bring(manifest)
    share = manifest if group.is_first and isinstance(candidate.path, Path) else None
    if candidate.bucket is None and manifest.form != "file":
        share = _share_of_files(manifest, catalog)
    with group.all_or_none(what):
        if candidate.bucket is None:
            if share is not None:
                catalog.check_sizes(share)
        elif group.is_first and manifest.is_directory:
            place.buckets[candidate.bucket].remote.check_sizes(manifest)  # bytes are verified while they are read
        elif group.is_first:
            remote = place.buckets[candidate.bucket].remote.place
            with progress_of("downloading a checkpoint", manifest.size_bytes, progress_bar) as progress:
                try:
                    fetch_checkpoint(remote, manifest, catalog.place, progress)
                except CorruptCheckpointError as e:
                    log.warning("downloading the checkpoint once more: %s", e)
                    fetch_checkpoint(remote, manifest, catalog.place, progress)
    loaded = None if read is None else read(candidate.path)
    own: Mapping[str, Collection[int]] = {} if loaded is None else loaded.verified
    every = [own] if manifest.form == "file" or loaded is None else group.gather(own)
    with group.all_or_none(what):
        for file in () if share is None else share.here:
            name = file.path.removeprefix(manifest.home)
            verified = set[int]().union(*(chunks.get(name, ()) for chunks in every))
            verify_file(catalog.folder / file.path, file.digest, skip=verified)
    return loaded


def _share_of_files(manifest: Manifest, catalog: Catalog) -> Manifest:
    """Check that the ranks together see all files; return the record with the files for this rank to verify.

    All ranks divide the files in a shared folder; the ranks of a node divide the files on its own disk. Collective.

    Raises:
        _IncompleteError: a rank does not see the checkpoint, or a file is on no disk of this run.
        CorruptCheckpointError: the record is damaged.
    """
    group = dist.get_group()
    mine: Manifest | None = None
    with group.all_or_none(f"reading the record of checkpoint {manifest.name!r}"):
        mine = catalog.manifest_of(manifest.name)
        absent = {file.node for file in manifest.files if not (catalog.folder / file.path).exists()}
    is_seen = mine is not None and mine.id == manifest.id
    every = group.gather((is_seen, None if mine is None else mine.node, absent))
    nodes = [node for _, node, _ in every]
    without = [rank for rank, (is_seen_there, *_) in enumerate(every) if not is_seen_there]
    # check_sizes reports a missing file of a node of this run: that is damage.
    lost = set[int | None].intersection(*(absent_there for *_, absent_there in every)) - {*nodes}
    if mine is None or without or lost:
        raise _IncompleteError(
            errno.ENOENT,
            f"checkpoint {manifest.name!r} is visible to rank 0 and not to the ranks {without}, and no rank has the "
            f"files from the disks of the nodes {sorted(node or 0 for node in lost)}. {ON_ALL_NODES}",
            str(catalog.folder),
        )
    neighbours = [rank for rank, node in enumerate(nodes) if node == nodes[group.rank]]
    return dataclasses.replace(mine, files=mine.here[neighbours.index(group.rank) :: len(neighbours)])


# ── after the last candidate ─────────────────────────────────────────────────────────────────────────────────────────
def _accept(
    chosen: Candidate, listing: Listing, rejected: Sequence[Rejected], places: Sequence[RunPlace], run_name: str
) -> Lineage:
    """Quarantine damaged files, since the run will save these names again, and repair links. Collective.

    Rank 0 changes its folders. If nodes have disks of their own, the first rank of each other node changes its disk.
    The path of ``chosen`` is skipped: a download has replaced the damaged file.

    Returns:
        The attempt of the run that continues from ``chosen``.
    """
    group, lineage = dist.get_group(), Lineage()
    with group.all_or_none(_STEP):
        renamed: list[Manifest] = []
        for one, error in rejected:
            in_folder = one.nearness in (IN_FOLDER, IN_MEMORY) and one.path != chosen.path
            catalog = places[one.place].catalog
            if in_folder and isinstance(error, CorruptCheckpointError) and (own := _own_record(one, catalog)):
                quarantine_checkpoint(catalog.place, own)
                renamed.append(own)
        for fault in listing.unusable:  # on rank 0
            if fault.is_damage and fault.catalog.folder / fault.name != chosen.path:
                quarantine_file(fault.catalog.place, fault.name)
        place = places[chosen.place]
        if (own := _own_record(chosen, place.catalog)) is not None:
            _repair_links(place, own if isinstance(chosen.path, Path) else None, run_name, renamed)
        if group.is_first:
            if chosen.manifest.left_out:
                message = "resuming from %s, which was saved without %s: no checkpoint with all keys is usable"
                log.warning(message, chosen.source, chosen.manifest.left_out)
            lineage = continued(
                chosen.manifest,
                [one.manifest for one in listing.known],
                [one.manifest for one in newest_first(listing.known)],
                damaged=any(one.is_unread for one in listing.unusable),
            )
    return group.broadcast(lineage)


def _own_record(candidate: Candidate, catalog: Catalog) -> Manifest | None:
    """Return the record of a checkpoint on this rank's disk; ``None``: another rank changes this disk."""
    manifest = candidate.manifest
    if dist.get_global_rank() == 0:
        return manifest
    if dist.get_local_rank() != 0 or manifest.node is None:
        return None
    own = catalog.readable([manifest.name])
    return own[0] if own and (candidate.nearness == IN_REPLICAS or own[0].node != manifest.node) else None


def _repair_links(place: RunPlace, manifest: Manifest | None, run_name: str, renamed: Sequence[Manifest] = ()) -> None:
    """Point the broken links of the run's saver to the checkpoint of ``manifest``; ``None``: delete the links.

    Links with other names stay, and links to anything but a checkpoint of the saver or one of ``renamed``.
    """
    if place.link is None or place.template is None:
        return
    links, names = name_pattern(place.link, run_name), name_pattern(place.template, run_name)
    gone = {path for one in renamed for path in (one.name, *(file.path for file in one.files))}
    for link, target in place.catalog.place.links().items():
        path, match = place.catalog.folder / link, names.fullmatch(target)
        if path.exists() or links.fullmatch(link) is None or (match is None and target not in gone):
            continue
        if manifest is None:
            path.unlink(missing_ok=True)
            continue
        rank = 0 if match is None else int(match.groupdict().get("rank", 0))
        is_of_rank = manifest.form == "archives" and rank < len(manifest.files)  # each rank has a file and a link
        place.catalog.place.point(link, manifest.files[rank].path if is_of_rank else manifest.name)


def _check_that_there_is_none(
    listing: Listing, rejected: Sequence[Rejected], places: Sequence[RunPlace], run_name: str
) -> None:
    """Check that the run has no checkpoint at all, except in memory, with parts lost with a node.

    Raises:
        OSError: a checkpoint cannot be read.
        CheckpointError: all checkpoints are damaged or marked as not finite.
    """
    found: list[tuple[str, CheckpointError | OSError]] = []
    found += [(fault.catalog.place.uri(fault.name), fault.error) for fault in listing.unusable]
    for one, error in rejected:
        if not (isinstance(error, _IncompleteError) and places[one.place].in_memory):
            found.append((one.source, error))
    for _, error in found:
        if isinstance(error, OSError):
            raise error
    if found:
        tried = "; ".join(f"{source}: {error}" for source, error in found)
        raise CheckpointError(
            f"run {run_name!r} has checkpoints, and none of them is good, so it does not start over by itself. Tried: "
            f"{tried}. No checkpoint was deleted or renamed. If the files are good on another machine, this one reads "
            "them wrongly. Otherwise name one to load with load_path and autoresume=False, or start over in another "
            "save_folder, or with autoresume=False and save_overwrite=True."
        )
