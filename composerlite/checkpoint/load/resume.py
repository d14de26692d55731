"""Resuming a run: list its checkpoints, sort them, restore the first one that verifies."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import gc
import logging
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias, final

from composerlite import dist
from composerlite.checkpoint.contents import Loaded, RestorePlan, TrainingState
from composerlite.checkpoint.load.candidates import (
    IN_REPLICAS,
    Candidate,
    Listing,
    RunBucket,
    RunPlace,
    list_checkpoints,
    newest_first,
    quarantine_damaged,
    repair_links,
)
from composerlite.checkpoint.load.progress import progress_of
from composerlite.checkpoint.load.resolve import source_of
from composerlite.checkpoint.load.restore import read_in_place
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import fetch_checkpoint
from composerlite.checkpoint.place.directory import ON_ALL_NODES
from composerlite.checkpoint.record.manifest import Manifest, continued, highest_attempt, new_attempt
from composerlite.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError, RankError
from composerlite.storage import ObjectStore, verify_file, without_secrets
from composerlite.types import Lineage

__all__ = ["Choice", "RunBucket", "RunPlace", "advising", "choose"]

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
    state: TrainingState | None = None,
    stores: Sequence[ObjectStore] = (),
    *,
    trust: bool = False,
    progress_bar: bool = False,
) -> Choice:
    """Read the newest usable checkpoint of ``run_name``. Then quarantine damaged files and repair links.

    Candidates are the checkpoints of the newest attempt and its ancestors; checkpoints of abandoned attempts are never
    restored. A file in a bucket is first downloaded to the folder. Bytes are verified while tensors are read into
    ``state``; all other bytes in a folder are verified afterwards.

    A candidate is skipped if damaged, marked as ``not_finite``, or in a folder unreadable for a rank. Once an older
    candidate is good, damaged candidates in folders are quarantined. Damaged candidates in a bucket stay: this machine
    may read wrongly. Weights alone are no candidate. Candidates saved without some of their keys are tried last: the
    missing state would start afresh in the middle of the run. Files of other programs, without a record, are no
    candidates. If only unusable checkpoints exist, the run does not start over: CheckpointError.

    Every rank of a run calls this and gets the same result. Rank 0 lists the checkpoints.

    Args:
        places: the places of each saver of the run.
        run_name: name of the run.
        state: the state to read a candidate into; ``None``: candidates are only verified.
        stores: open stores, used for the URIs in them. Other stores are opened by URI.
        trust: load any type, **running any code in the file**.
        progress_bar: show a progress bar on a terminal while a large file is downloaded or read.

    Raises:
        CheckpointError: there are checkpoints, and none of them is good.
        IncompatibleCheckpointError: the run has a checkpoint of a newer version, which may be the newest; or a
            candidate does not fit ``state``.
        OSError: a folder exists and cannot be read; or there are checkpoints, and none is readable for every rank.
        ObjectStoreError: a bucket does not answer.
        PermissionError: a bucket denies access.
    """
    group = dist.get_group()
    algorithms = [] if state is None else list(state.algorithms)
    replicas = {number: place.memory.find(run_name) for number, place in enumerate(places) if place.memory is not None}
    listing, queue, rejected = Listing(), list[Candidate](), list[Rejected]()  # the first two on rank 0 only
    while True:
        with group.all_or_none(_STEP):
            if group.is_first and not (rejected and listing.is_complete):  # at first, only the latest of a bucket
                listing = list_checkpoints(places, run_name, replicas, whole_buckets=bool(rejected))
                tried = {(one.source, one.manifest.id) for one, _ in rejected}
                queue = [one for one in newest_first(listing.known) if (one.source, one.manifest.id) not in tried]
        candidate = group.broadcast(queue.pop(0) if queue else None)
        if candidate is None:
            return Choice(None, _first_attempt(listing, rejected, places, run_name))
        loaded: Loaded | None = None
        try:
            share = _fetch(candidate, places[candidate.place], progress_bar=progress_bar)
            if state is not None:
                loaded = _read(candidate, state, algorithms, stores, trust=trust, progress_bar=progress_bar)
            _verify_rest(share, candidate, places[candidate.place].catalog, loaded)
        except RankError:
            raise  # the ranks can no longer reach each other
        except (_NotFiniteError, CorruptCheckpointError, OSError) as e:
            if isinstance(e, OSError) and candidate.bucket is not None:
                raise
            rejected.append((candidate, copy.copy(e)))  # a copy, without frames that keep the read tensors alive
        else:
            return Choice(candidate.path, _accept(candidate, listing, rejected, places, run_name), loaded)
        if group.is_first:
            log.warning("skipped %s: %s", candidate.source, rejected[-1][1])
        gc.collect()  # there may not be memory for two checkpoints


# ── one candidate ────────────────────────────────────────────────────────────────────────────────────────────────────
def _fetch(candidate: Candidate, place: RunPlace, *, progress_bar: bool) -> Manifest | None:
    """Make sure that the ranks can read all files of a candidate; download a file in a bucket. Collective.

    Returns:
        The record with the files for this rank to verify; ``None``: the rank verifies no file.

    Raises:
        _NotFiniteError, CorruptCheckpointError, OSError: the candidate cannot be used; on every rank.
    """
    group, manifest, catalog = dist.get_group(), candidate.manifest, place.catalog
    if manifest.not_finite:
        raise _NotFiniteError(f"{', '.join(manifest.not_finite)} was not finite when it was saved.")
    if candidate.nearness == IN_REPLICAS and place.memory is not None:
        place.memory.bring(manifest)
    share = manifest if group.is_first and isinstance(candidate.path, Path) else None
    if candidate.bucket is None and manifest.form != "file":
        share = _share_of_files(manifest, catalog)
    with group.all_or_none(f"reading checkpoint {manifest.name!r}"):
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
    return share


def _read(
    candidate: Candidate,
    state: TrainingState,
    algorithms: Sequence[object],
    stores: Sequence[ObjectStore],
    *,
    trust: bool,
    progress_bar: bool,
) -> Loaded:
    """Read a candidate into ``state``, which had these ``algorithms`` before any candidate was read. Collective.

    Raises:
        IncompatibleCheckpointError: the candidate does not fit, or a damaged candidate has changed the model.
        CheckpointError, OSError: as :func:`read_in_place`.
    """
    name = str(candidate.path)
    if added := [one for one in state.algorithms if one not in algorithms]:
        raise IncompatibleCheckpointError(
            f"the newest checkpoint is damaged, and {', '.join(map(repr, added))} changed the model to load it: no "
            f"other can be restored now. Pass the same in algorithms=[…] to resume from {name!r}."
        )
    roots = {} if isinstance(candidate.path, Path) else {one.get_uri("x").removesuffix("x"): one for one in stores}
    root = next((root for root in roots if name.startswith(root)), "")
    with advising(name):
        plan = RestorePlan(state, source_of(name))
        name, store = name.removeprefix(root), roots.get(root)
        return read_in_place(name, plan, store, progress_bar=progress_bar, trust=trust)


@contextlib.contextmanager
def advising(path: str) -> Generator[None]:
    """Add to the error of a checkpoint that does not fit how a run can start from other parts of the checkpoint."""
    try:
        yield
    except IncompatibleCheckpointError as e:
        raise IncompatibleCheckpointError(
            f"{e}\nautoresume takes back all of a run: the load_… arguments apply to load_path alone. To leave parts "
            f"of this checkpoint out, begin a run of another run_name with load_path={without_secrets(path)!r}."
        ) from e


def _verify_rest(share: Manifest | None, candidate: Candidate, catalog: Catalog, loaded: Loaded | None) -> None:
    """Verify the bytes in the files of ``share`` that no rank has read. Collective.

    Raises:
        CorruptCheckpointError, OSError: a file is damaged or cannot be read; on every rank.
    """
    group, manifest = dist.get_group(), candidate.manifest
    own: Mapping[str, Collection[int]] = {} if loaded is None else loaded.verified
    every = [own] if manifest.form == "file" or loaded is None else group.gather(own)
    with group.all_or_none(f"verifying checkpoint {manifest.name!r}"):
        for file in () if share is None else share.here:
            name = file.path.removeprefix(manifest.home)
            verified = set[int]().union(*(chunks.get(name, ()) for chunks in every))
            verify_file(catalog.folder / file.path, file.digest, skip=verified)


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
    """Quarantine damaged files, and return the attempt of the run that continues from ``chosen``. Collective."""
    group, lineage = dist.get_group(), Lineage()
    with group.all_or_none(_STEP):
        damaged = [one for one, error in rejected if isinstance(error, CorruptCheckpointError)]
        quarantine_damaged(damaged, chosen, listing, places, run_name)
        if group.is_first:
            if chosen.manifest.left_out:
                message = "resuming from %s, which was saved without %s: no checkpoint with all keys is usable"
                log.warning(message, chosen.source, chosen.manifest.left_out)
            lineage = continued(
                chosen.manifest,
                [one.manifest for one in listing.known],
                [one.manifest for one in newest_first(listing.known)],
                damaged=not all(one.is_damage for one in listing.unusable),
            )
    return group.broadcast(lineage)


def _first_attempt(
    listing: Listing, rejected: Sequence[Rejected], places: Sequence[RunPlace], run_name: str
) -> Lineage:
    """Begin a run without checkpoints, except in memory, with parts lost with a node. Collective.

    Raises:
        OSError: a checkpoint cannot be read; on every rank.
        CheckpointError: all checkpoints are damaged or marked as not finite; on every rank.
    """
    group, lineage = dist.get_group(), Lineage()
    with group.all_or_none(_STEP):
        if group.is_first:
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
                    f"run {run_name!r} has checkpoints, and none of them is good, so it does not start over by itself. "
                    f"Tried: {tried}. No checkpoint was deleted or renamed. If the files are good on another machine, "
                    "this one reads them wrongly. Otherwise name one to load with load_path and autoresume=False, or "
                    "start over in another save_folder, or with autoresume=False and save_overwrite=True."
                )
            for place in places:
                repair_links(place, None, run_name)
            lineage = new_attempt(highest_attempt(one.manifest for one in listing.known))
    return group.broadcast(lineage)
