"""Resuming a run: list its checkpoints, sort them, restore the first that verifies."""

from __future__ import annotations

import copy
import dataclasses
import errno
import gc
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, final

from composerlite import dist
from composerlite.checkpoint.contents import Loaded
from composerlite.checkpoint.load.candidates import Candidate, Listing, RunBucket, RunPlace, UnusableFile, listed
from composerlite.checkpoint.load.resolve import progress_of
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import fetch_checkpoint, quarantine_checkpoint, quarantine_file
from composerlite.checkpoint.place.directory import ON_ALL_NODES
from composerlite.checkpoint.place.place import OnBytes
from composerlite.checkpoint.record.manifest import Manifest, continued, highest_attempt, new_attempt
from composerlite.checkpoint.record.naming import name_pattern
from composerlite.errors import CheckpointError, CorruptCheckpointError, RankError
from composerlite.storage import verify_file
from composerlite.types import Lineage

__all__ = ["Choice", "RunBucket", "RunPlace", "choose"]

log = logging.getLogger(__name__)
_LOOKING = "looking for checkpoints"


@final
class Choice(NamedTuple):
    """The checkpoint that a run resumes from.

    Attributes:
        place: the path, or the URI of a directory in a bucket; ``None``: the run has no checkpoint.
        lineage: of what the run saves from now on.
        loaded: what was read of it.
    """

    place: Path | str | None
    lineage: Lineage
    loaded: Loaded | None = None


@final
class _Rejected(NamedTuple):
    """A candidate that the run does not resume from.

    Attributes:
        candidate: the checkpoint.
        error: the reason.
        is_lost: the memory that had it is gone; nothing of it was read.
    """

    candidate: Candidate
    error: CheckpointError | OSError
    is_lost: bool


class _NotFiniteError(CheckpointError):
    """The checkpoint was saved while a loss, gradient norm or weight was not finite."""


def choose(
    places: Sequence[RunPlace],
    run_name: str,
    read: Callable[[Path | str], Loaded] | None = None,
    *,
    progress_bar: bool = False,
) -> Choice:
    """Restore the newest usable checkpoint of ``run_name``. Then quarantine damaged files and repair links.

    Only checkpoints of the newest attempt and its ancestors are candidates: those of abandoned attempts are never
    restored. A file in a bucket is downloaded to its folder first. A candidate is verified while ``read`` reads it;
    bytes in a folder that ``read`` leaves out are verified afterwards.

    A candidate is skipped if it is damaged, marked as ``not_finite``, or in a folder that a rank cannot read. Once an
    older one is found to be good, damaged ones in folders are quarantined. Damaged ones in a bucket stay: this machine
    may read wrongly. Weights alone are no candidate. A checkpoint that was saved without some of its keys is tried
    after all others: the missing state would start afresh in the middle of the run. A file without a record, of
    another program, is no candidate. If only unusable checkpoints exist, the run does not start over: CheckpointError.

    Every rank of a run calls this and gets the same result. Rank 0 lists the checkpoints.

    Args:
        places: of each of its savers.
        run_name: of the run.
        read: reads a candidate into the state of the run, together on all ranks. After CorruptCheckpointError, or an
            OSError for a candidate in a folder, it is called with the next one. ``None``: candidates are only verified.
        progress_bar: show one on a terminal while a large file is downloaded.

    Raises:
        CheckpointError: there are checkpoints, and none of them is good, or all are marked.
        IncompatibleCheckpointError: the run has a checkpoint of a newer version, which may be the newest.
        OSError: a folder cannot be read for any other reason than that it does not exist; or there are checkpoints, and
            none that every rank can read.
        ObjectStoreError: a bucket does not answer. PermissionError: a bucket denies access. Neither means that there is
            no checkpoint.
    """
    group = dist.get_group()
    scattered = {number: place.memory.find(run_name) for number, place in enumerate(places) if place.memory is not None}
    rejected: list[_Rejected] = []
    listing, left = Listing(), list[Candidate]()  # filled on rank 0 only
    with group.all_or_none(_LOOKING):
        if group.is_first:
            listing = listed(places, run_name, scattered)
            left = listing.untried(())
    while (candidate := group.broadcast(left.pop(0) if left else None)) is not None:
        loaded, failure = _tried(candidate, places, read, progress_bar=progress_bar)
        lineage = Lineage()
        with group.all_or_none(_LOOKING):
            if failure is None:
                if group.is_first:
                    lineage = _lineage_after(candidate, listing)
                _clean_up(candidate, rejected, listing.faults, places, run_name)
            else:
                rejected.append(failure)
            if failure is not None and group.is_first:
                log.warning("skipped %s: %s", candidate.source, failure.error)
                if candidate.bucket is not None and not listing.is_complete:
                    listing = listed(places, run_name, scattered, whole_buckets=True)
                    left = listing.untried({(one.candidate.source, one.candidate.manifest.id) for one in rejected})
        if failure is None:
            return Choice(candidate.path, group.broadcast(lineage), loaded)
    lineage = Lineage()
    with group.all_or_none(_LOOKING):
        if group.is_first:
            _check_that_there_is_none(rejected, listing.faults, run_name)
            for place in places:
                _mend_links(place, None, run_name)
            lineage = new_attempt(highest_attempt(one.manifest for one in listing.known))
    return Choice(None, group.broadcast(lineage))


# ── one candidate, on every rank ─────────────────────────────────────────────────────────────────────────────────────
def _tried(
    candidate: Candidate,
    places: Sequence[RunPlace],
    read: Callable[[Path | str], Loaded] | None,
    *,
    progress_bar: bool,
) -> tuple[Loaded | None, _Rejected | None]:
    """Read a candidate and verify all of it that is in a folder; or return why it is not taken. The same on every rank.

    Raises:
        Exception: the error does not concern the checkpoint.
    """
    place, loaded, was_read = places[candidate.place], None, False
    try:
        share = _checked(candidate, place, progress_bar=progress_bar)
        if read is not None:
            was_read = True
            loaded = read(candidate.path)
        _verify_rest(candidate.manifest, share, place.catalog, loaded)
        return loaded, None
    except RankError:
        raise  # the ranks cannot meet any more
    except (_NotFiniteError, CorruptCheckpointError, OSError) as e:
        if isinstance(e, OSError) and candidate.bucket is not None:
            raise
        error = copy.copy(e)  # without the frames, which hold what was read
    gc.collect()  # there may not be memory for two checkpoints
    return None, _Rejected(candidate, error, isinstance(error, OSError) and place.in_memory and not was_read)


def _checked(candidate: Candidate, place: RunPlace, *, progress_bar: bool) -> Manifest | None:
    """See that the files of a candidate are there, with their sizes, and fetch a file from a bucket.

    Returns:
        The record, with those files that this rank verifies; ``None``: none.
    """
    group, manifest = dist.get_group(), candidate.manifest
    if manifest.not_finite:
        raise _NotFiniteError(f"{', '.join(manifest.not_finite)} was not finite when it was saved.")
    if candidate.is_scattered and place.memory is not None:
        place.memory.bring(manifest)
    share = manifest if group.is_first and not isinstance(candidate.path, str) else None
    if candidate.bucket is None and manifest.form != "file":
        share = _share(manifest, place.catalog)
    with group.all_or_none(f"looking at checkpoint {manifest.name!r}"):
        if candidate.bucket is None:
            if share is not None:
                place.catalog.check_sizes(share)
        elif group.is_first:
            remote = place.buckets[candidate.bucket].remote
            if manifest.is_directory:
                remote.check_sizes(manifest)  # bytes are verified as they are read
            else:
                with progress_of("downloading a checkpoint", manifest.size_bytes, progress_bar) as progress:
                    _fetch(remote, manifest, place.catalog, progress)
    return share


def _fetch(remote: Catalog, manifest: Manifest, target: Catalog, progress: OnBytes) -> None:
    try:
        fetch_checkpoint(remote.place, manifest, target.place, progress)
    except CorruptCheckpointError as e:
        log.warning("downloading the checkpoint once more: %s", e)
        fetch_checkpoint(remote.place, manifest, target.place, progress)


def _share(manifest: Manifest, catalog: Catalog) -> Manifest:
    """Return the record of a checkpoint of several files, with the share of the files that this rank verifies.

    Raises:
        OSError: a rank does not see the checkpoint, or a file is on no disk of this run.
        CorruptCheckpointError: the record is damaged, or a node of this run has lost the checkpoint.
    """
    group = dist.get_group()
    mine: Manifest | None = None
    with group.all_or_none(f"looking at checkpoint {manifest.name!r}"):
        mine = catalog.manifest_of(manifest.name)
        sees = mine is not None and mine.id == manifest.id
        has_others = sees or any(other.run_name == manifest.run_name for other in catalog.readable())
        absent = {file.node for file in manifest.files if not (catalog.folder / file.path).exists()}
    told = group.gather((sees, has_others, None if mine is None else mine.node, absent))
    if blind := [rank for rank, (its_sees, *_) in enumerate(told) if not its_sees]:
        raise _not_everywhere(catalog, manifest, blind, is_lost=all(told[rank][1] for rank in blind))
    nodes = [node for _, _, node, _ in told]
    # What a node of this run lacks of its own is reported by check_sizes.
    lost = set[int | None].intersection(*(its[3] for its in told)) - {*nodes}
    if gone := [file for file in manifest.files if file.node in lost]:
        raise FileNotFoundError(
            errno.ENOENT,
            f"{gone[0].path!r} was saved to the disk of node {gone[0].node}, and no rank of this run has it. "
            f"{ON_ALL_NODES} No such file in",
            str(catalog.folder),
        )
    company = [rank for rank, node in enumerate(nodes) if node == nodes[group.rank]]
    assert mine is not None
    return dataclasses.replace(mine, files=mine.here[company.index(group.rank) :: len(company)])


def _not_everywhere(catalog: Catalog, manifest: Manifest, blind: list[int], *, is_lost: bool) -> Exception:
    """Make the error of a checkpoint that ``blind`` ranks do not see. ``is_lost``: they see others of the run."""
    if manifest.node is not None and is_lost:
        return CorruptCheckpointError(
            f"checkpoint {str(catalog.folder / manifest.name)!r} is not on the disks of the ranks {blind}, which have "
            "others of this run."
        )
    return OSError(
        errno.ENOENT,
        f"checkpoint {manifest.name!r} is visible to rank 0 and not to the ranks {blind}: each rank reads its part "
        "of a directory. Is the folder on a file system that all nodes share, or are these the nodes that saved it?",
        str(catalog.folder),
    )


def _verify_rest(manifest: Manifest, share: Manifest | None, catalog: Catalog, loaded: Loaded | None) -> None:
    """Verify the bytes of the files in ``share`` that no rank has verified while it read."""
    group = dist.get_group()
    own: Mapping[str, Collection[int]] = {} if loaded is None else loaded.verified
    every = [own] if manifest.form == "file" or loaded is None else group.gather(own)
    with group.all_or_none(f"verifying checkpoint {manifest.name!r}"):
        for file in () if share is None else share.here:
            name = file.path.removeprefix(manifest.home)
            verified = set[int]().union(*(one.get(name, ()) for one in every))
            verify_file(catalog.folder / file.path, file.digest, skip=verified)


# ── after the search ─────────────────────────────────────────────────────────────────────────────────────────────────
def _check_that_there_is_none(rejected: Sequence[_Rejected], faults: Sequence[UnusableFile], run_name: str) -> None:
    """Check that the run has no checkpoint at all, except those lost with the memory of a node.

    Raises:
        OSError: a checkpoint cannot be read.
        CheckpointError: all checkpoints are damaged or marked.
    """
    rejected = [one for one in rejected if not one.is_lost]
    for error in (one.error for one in (*faults, *rejected)):
        if isinstance(error, OSError):
            raise error
    damaged = [fault for fault in faults if isinstance(fault.error, CorruptCheckpointError)]
    marked = [one.candidate for one in rejected if isinstance(one.error, _NotFiniteError)]
    if marked and len(marked) == len(rejected) + len(damaged):
        raise CheckpointError(
            f"run {run_name!r} has checkpoints, and all of them were saved while "
            f"{marked[0].manifest.not_finite[0]} was not finite, so it does not resume by itself. No "
            "checkpoint was deleted or renamed. "
            f"To resume from the newest all the same: load_path={marked[0].source!r} and autoresume=False. To start "
            "over: another save_folder, or autoresume=False and save_overwrite=True."
        )
    found = [(one.candidate.source, one.error) for one in rejected]
    found += [(fault.catalog.place.uri(fault.name), fault.error) for fault in damaged]
    if found:
        tried = "; ".join(f"{source}: {error}" for source, error in found)
        raise CheckpointError(
            f"run {run_name!r} has checkpoints, and none of them is good, so it does not start over by "
            f"itself. Tried: {tried}. No checkpoint was deleted or renamed. If the files are good on another machine, "
            "this one reads them wrongly. Otherwise name one to load with load_path and autoresume=False, or start "
            "over in another save_folder, or with autoresume=False and save_overwrite=True."
        )


def _lineage_after(chosen: Candidate, listing: Listing) -> Lineage:
    """Return the lineage of what is saved after a resume from ``chosen``."""
    resumable = listing.resumable
    if not chosen.has_all_keys:
        log.warning(
            "resuming from %s, which was saved without %s: no checkpoint with all keys is usable",
            chosen.source,
            chosen.manifest.left_out,
        )
    elif any(not one.has_all_keys and one.manifest.order > chosen.manifest.order for one in resumable):
        log.info("%s is not the newest: newer ones were saved without some of their keys", chosen.source)
    known = [one.manifest for one in listing.known]
    return continued(chosen.manifest, known, [one.manifest for one in resumable], damaged=listing.has_unread)


def _clean_up(
    chosen: Candidate,
    rejected: Sequence[_Rejected],
    faults: Sequence[UnusableFile],
    places: Sequence[RunPlace],
    run_name: str,
) -> None:
    """Quarantine damaged files in folders, since the run will save those names again, and repair links.

    Rank 0 does so; where nodes have disks of their own, the first rank of each other node does so on its disk. The path
    of ``chosen`` is skipped: a good checkpoint was copied over the damaged one.
    """
    quarantined: list[Manifest] = []
    for one, error, _ in rejected:
        in_folder = one.bucket is None and not one.is_scattered and one.path != chosen.path
        if in_folder and isinstance(error, CorruptCheckpointError):
            catalog = places[one.place].catalog
            if (own := _own_record(one, catalog)) is not None:
                quarantine_checkpoint(catalog.place, own)
                quarantined.append(own)
    for fault in faults:
        if fault.is_damage and fault.catalog.folder / fault.name != chosen.path:
            quarantine_file(fault.catalog.place, fault.name)
    place = places[chosen.place]
    own = _own_record(chosen, place.catalog)
    if dist.get_group().is_first or own is not None:
        _mend_links(place, own if isinstance(chosen.path, Path) else None, run_name, quarantined)


def _own_record(candidate: Candidate, catalog: Catalog) -> Manifest | None:
    """Return the record of a checkpoint on the disk that this rank cleans up; ``None``: this rank cleans up nothing."""
    manifest = candidate.manifest
    if dist.get_global_rank() == 0:
        return manifest
    if dist.get_local_rank() != 0 or manifest.node is None:
        return None
    own = catalog.readable([manifest.name])
    return own[0] if own and (candidate.is_scattered or own[0].node != manifest.node) else None


def _mend_links(
    place: RunPlace, manifest: Manifest | None, run_name: str, quarantined: Sequence[Manifest] = ()
) -> None:
    """Point the broken links of the run's saver to the checkpoint of ``manifest``; ``None``: delete the links.

    Links that have other names, or lead to anything but a checkpoint of the saver or one of ``quarantined``, stay.
    """
    if place.link is None or place.template is None:
        return
    links, names = name_pattern(place.link, run_name), name_pattern(place.template, run_name)
    gone = {path for one in quarantined for path in (one.name, *(file.path for file in one.files))}
    catalog = place.catalog
    for link, target in catalog.place.links().items():
        path, match = catalog.folder / link, names.fullmatch(target)
        if path.exists() or links.fullmatch(link) is None or (match is None and target not in gone):
            continue
        if manifest is None:
            path.unlink(missing_ok=True)
            continue
        rank = 0 if match is None else int(match.groupdict().get("rank", 0))
        is_of_rank = manifest.form == "archives" and rank < len(manifest.files)  # each rank has a file and a link
        catalog.place.point(link, manifest.files[rank].path if is_of_rank else manifest.name)
