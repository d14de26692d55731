"""Resuming a run: list its checkpoints, sort them, and read the first good one into the state."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import gc
import logging
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias, final

from composerlite import dist
from composerlite.checkpoint.contents import RestorePlan, TrainingState
from composerlite.checkpoint.load.candidates import (
    IN_REPLICAS,
    Candidate,
    Listing,
    RunPlace,
    list_checkpoints,
    newest_first,
    quarantine_damaged,
)
from composerlite.checkpoint.load.restore import read_in_place
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import fetch_checkpoint
from composerlite.checkpoint.place.directory import ON_ALL_NODES
from composerlite.checkpoint.record.history import continued, highest_attempt, new_attempt
from composerlite.checkpoint.record.record import FileRecord, Manifest
from composerlite.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError, RankError
from composerlite.storage import ObjectStore, verify_file, without_secrets
from composerlite.storage.progress import progress_of
from composerlite.types import Lineage

log = logging.getLogger(__name__)
_STEP = "choosing the checkpoint to resume from"
Rejected: TypeAlias = tuple[Candidate, CheckpointError | OSError]
"""A skipped candidate, and the reason."""


@final
class Choice(NamedTuple):
    """The checkpoint that a run resumes from.

    Attributes:
        path: path of the checkpoint; the URI of a directory in a bucket; ``None``: the run starts over.
        lineage: attempt of the run and its ancestors, for the record of all checkpoints saved from now on.
        loaded: the contents, read into the state.
    """

    path: Path | str | None
    lineage: Lineage
    loaded: RestorePlan | None = None


class _NotFiniteError(CheckpointError):
    """The checkpoint was saved while a loss, gradient norm or weight was not finite."""


class _IncompleteError(FileNotFoundError):
    """A rank does not see the checkpoint, or a file is on the disk of no rank. Raised before the checkpoint is read."""


def choose(
    places: Sequence[RunPlace],
    run_name: str,
    state: TrainingState | None = None,
    stores: Sequence[ObjectStore] = (),
    *,
    trust: bool = False,
    progress_bar: bool = False,
) -> Choice:
    """Read the newest usable checkpoint of ``run_name``. Then quarantine the files of damaged checkpoints.

    A run consists of numbered attempts. A resume from the newest checkpoint continues the attempt. A new attempt begins
    if newer checkpoints are skipped or if the run starts over; its ancestors are the attempts that it continues.
    Candidates are the checkpoints of the newest attempt and its ancestors; checkpoints of other attempts are never
    restored. A file in a bucket is first downloaded to the folder of its entry in ``places``. Bytes are verified while
    tensors are read into ``state``. All other bytes are verified afterwards, except for a directory in a bucket.

    A candidate is skipped if the candidate is damaged, marked as ``not_finite``, or in a folder and a rank cannot read
    the files. Once another candidate is good, damaged candidates in folders are quarantined. Damaged candidates in a
    bucket stay, because the fault may be in this machine. Checkpoints of weights alone are no candidates. Candidates
    saved without some keys are tried last: the missing state keeps its initial values. Files of other programs, without
    a record, are no candidates. If only unusable checkpoints exist, the run does not start over: CheckpointError.

    Every rank of a run calls this and gets the same result. Rank 0 lists the checkpoints.

    Args:
        places: an entry for each saver of the run: folder, buckets and memory.
        run_name: name of the run.
        state: the state to read a candidate into; ``None``: candidates are only verified.
        stores: open stores, used for URIs inside them. Other stores are opened by URI.
        trust: load any type, **running any code in the file**.
        progress_bar: show a progress bar on a terminal while a large file is downloaded or read.

    Raises:
        CheckpointError: there are checkpoints, and none of them is good.
        IncompatibleCheckpointError: a newer version of composerlite wrote a record under a name of the run, so that
            checkpoint may be the newest; or a candidate does not fit ``state``.
        OSError: a folder exists and cannot be read; or no candidate is good, and a rank could not read a candidate.
        ObjectStoreError: a bucket does not answer.
        PermissionError: a bucket denies access.
    """
    group = dist.get_group()
    algorithms = [] if state is None else list(state.algorithms)
    read: Candidate | None = None  # the last candidate with bytes that may be in ``state``
    replicas = {number: place.memory.find(run_name) for number, place in enumerate(places) if place.memory is not None}
    listing, queue = Listing(), list[Candidate]()  # filled on rank 0 only
    rejected = list[Rejected]()  # the same on every rank
    loaded: RestorePlan | None = None
    while True:
        with group.all_or_none(_STEP):
            if group.is_first and not (rejected and listing.is_complete):  # again after a rejection, with whole buckets
                listing = list_checkpoints(places, run_name, replicas, whole_buckets=bool(rejected))
                tried = {(one.source, one.record.id) for one, _ in rejected}
                queue = [one for one in newest_first(listing.known) if (one.source, one.record.id) not in tried]
        candidate = group.broadcast(queue.pop(0) if queue else None)
        if candidate is None:
            start_over = functools.partial(_started_over, listing, rejected, places, run_name)
            return Choice(None, group.from_first(_STEP, start_over))
        try:
            files = _fetch(candidate, places[candidate.place_number], progress_bar=progress_bar)
            if state is not None:
                before, read = read, candidate
                loaded = _read(candidate, before, state, algorithms, stores, trust=trust, progress_bar=progress_bar)
            _verify_rest(files, candidate, places[candidate.place_number].catalog, loaded)
        except RankError:
            raise  # the ranks have lost contact
        except (_NotFiniteError, CorruptCheckpointError, OSError) as e:
            if isinstance(e, OSError) and candidate.bucket_number is not None:
                raise  # a fault of the network or the disk says nothing about the checkpoint: take no older one
            rejected.append((candidate, copy.copy(e)))  # a copy, without frames that keep the read tensors alive
        else:
            damaged = [one for one, error in rejected if isinstance(error, CorruptCheckpointError)]
            with group.all_or_none(_STEP):
                quarantine_damaged(damaged, candidate, listing, places)
            lineage = group.from_first(_STEP, functools.partial(_continued_from, candidate, listing))
            return Choice(candidate.path, lineage, loaded)
        if group.is_first:
            log.warning("skipped %s: %s", candidate.source, rejected[-1][1])
        loaded = None  # there may not be memory for two checkpoints
        gc.collect()


# ── one candidate ────────────────────────────────────────────────────────────────────────────────────────────────────
def _fetch(candidate: Candidate, place: RunPlace, *, progress_bar: bool) -> Sequence[FileRecord]:
    """Make sure that the ranks can read all files of a candidate; download a file in a bucket. Collective.

    Returns:
        The files in the folder that this rank verifies after the read. Files that stay in a bucket are verified while
        they are read.

    Raises:
        _NotFiniteError, CorruptCheckpointError, OSError: the candidate cannot be used; on every rank.
    """
    group, record, catalog = dist.get_group(), candidate.record, place.catalog
    if record.run.not_finite:
        raise _NotFiniteError(f"{', '.join(record.run.not_finite)} had NaN or infinite values when saved.")
    if candidate.nearness == IN_REPLICAS and place.memory is not None:
        place.memory.bring(record)
    files = record.here if group.is_first and isinstance(candidate.path, Path) else ()
    if candidate.bucket_number is None and record.form != "file":
        files = _files_of_rank(record, catalog)
    with group.all_or_none(f"reading checkpoint {record.name!r}"):
        if candidate.bucket_number is None:
            catalog.check_sizes(record, files)
        elif group.is_first and record.is_directory:
            place.buckets[candidate.bucket_number].catalog.check_sizes(record, record.here)
        elif group.is_first:
            bucket = place.buckets[candidate.bucket_number].catalog.place
            with progress_of("downloading a checkpoint", record.size_bytes, progress_bar) as progress:
                try:
                    fetch_checkpoint(bucket, record, catalog.place, progress)
                except CorruptCheckpointError as e:
                    log.warning("downloading the checkpoint again: %s", e)
                    fetch_checkpoint(bucket, record, catalog.place, progress)
    return files


def _read(
    candidate: Candidate,
    before: Candidate | None,
    state: TrainingState,
    algorithms: Sequence[object],
    stores: Sequence[ObjectStore],
    *,
    trust: bool,
    progress_bar: bool,
) -> RestorePlan:
    """Read a candidate into ``state``. Collective.

    ``state`` had ``algorithms`` before the first read. ``before`` is a damaged candidate, read in part; or ``None``.

    Raises:
        IncompatibleCheckpointError: the candidate does not fit, does not replace all that was read of ``before``, or
            ``before`` has added algorithms to the model.
        CheckpointError, OSError: as :func:`read_in_place`.
    """
    name = str(candidate.path)
    if before is not None and (lacks := {*candidate.record.left_out}.difference(before.record.left_out)):
        raise IncompatibleCheckpointError(
            f"checkpoint {name!r} was saved without {', '.join(sorted(lacks))}, and parts of the damaged "
            f"{before.source!r} may have been loaded instead: delete the damaged checkpoint and start again."
        )
    if added := [one for one in state.algorithms if one not in algorithms]:
        raise IncompatibleCheckpointError(
            f"a newer checkpoint could not be read, and loading it added {', '.join(map(repr, added))} to the "
            f"model: no other checkpoint fits now. Add these to algorithms=[…] to resume from {name!r}."
        )
    plan = RestorePlan(state, f"checkpoint {without_secrets(name)!r}")
    roots = {} if isinstance(candidate.path, Path) else {one.get_uri("x").removesuffix("x"): one for one in stores}
    root = next((root for root in roots if name.startswith(root)), "")
    with advising(name):
        return read_in_place(name.removeprefix(root), plan, roots.get(root), progress_bar=progress_bar, trust=trust)


@contextlib.contextmanager
def advising(path: str) -> Generator[None]:
    """Add to the error of a checkpoint that does not fit how a run can start from some parts of the checkpoint."""
    try:
        yield
    except IncompatibleCheckpointError as e:
        raise IncompatibleCheckpointError(
            f"{e}\nautoresume restores the complete run: the load_… arguments apply only to load_path. To load "
            f"parts of this checkpoint, start a run with another run_name and load_path={without_secrets(path)!r}."
        ) from e


def _verify_rest(
    files: Sequence[FileRecord], candidate: Candidate, catalog: Catalog, loaded: RestorePlan | None
) -> None:
    """Verify those bytes of ``files`` in the folder that no rank has read. Collective.

    Raises:
        CorruptCheckpointError, OSError: a file is damaged or cannot be read; on every rank.
    """
    group, record = dist.get_group(), candidate.record
    verified_here: Mapping[str, Collection[int]] = {} if loaded is None else loaded.verified
    by_rank = [verified_here] if record.form == "file" or loaded is None else group.gather(verified_here)
    with group.all_or_none(f"verifying checkpoint {record.name!r}"):
        for file in files:
            name = file.path.removeprefix(record.home)
            verified = set[int]().union(*(chunks.get(name, ()) for chunks in by_rank))
            verify_file(catalog.folder / file.path, file.digest, skip=verified)


def _files_of_rank(record: Manifest, catalog: Catalog) -> Sequence[FileRecord]:
    """Check that the ranks together see all files; return the files for this rank to verify. Collective.

    In a shared folder all ranks divide the files. If nodes have separate disks, the ranks of a node divide its files.

    Raises:
        FileNotFoundError: a rank does not see the checkpoint, or a file is on the disk of a node without a rank.
        CorruptCheckpointError: the record is damaged.
    """
    group = dist.get_group()
    seen: Manifest | None = None
    with group.all_or_none(f"reading the record of checkpoint {record.name!r}"):
        seen = catalog.manifest_of(record.name)
        seen = seen if seen is not None and seen.id == record.id else None
        lacks = {file.node for file in record.files if not (catalog.folder / file.path).exists()}
    every = group.gather((seen is not None, None if seen is None else seen.node, lacks))
    blind_ranks = [rank for rank, (is_seen, *_) in enumerate(every) if not is_seen]
    nodes = [node for _, node, _ in every]
    # Nodes with files that no rank has, and without a rank here. A missing file of a node with ranks is damage, which
    # check_sizes finds.
    lost_nodes = set[int | None].intersection(*(lacks_there for *_, lacks_there in every)) - {*nodes}
    if seen is None or blind_ranks or lost_nodes:
        text = f"checkpoint {record.name!r} is visible to rank 0 but not to the ranks {blind_ranks}."
        if not blind_ranks:
            numbers = sorted(node or 0 for node in lost_nodes)
            text = f"no rank has the files of checkpoint {record.name!r} from the disks of the nodes {numbers}."
        raise _IncompleteError(errno.ENOENT, f"{text} {ON_ALL_NODES}", str(catalog.folder))
    neighbours = [rank for rank, node in enumerate(nodes) if node == nodes[group.rank]]
    return seen.here[neighbours.index(group.rank) :: len(neighbours)]


# ── a candidate is good, or none is left ─────────────────────────────────────────────────────────────────────────────
def _continued_from(chosen: Candidate, listing: Listing) -> Lineage:
    """Return the attempt that continues from ``chosen``. On rank 0."""
    if chosen.record.left_out:
        message = "resuming from %s, which was saved without %s: no checkpoint with all keys can be loaded"
        log.warning(message, chosen.source, chosen.record.left_out)
    known = [one.record for one in listing.known]
    resumable = [one.record for one in newest_first(listing.known)]
    return continued(chosen.record, known, resumable, is_incomplete=bool(listing.unusable))


def _started_over(listing: Listing, rejected: Sequence[Rejected], places: Sequence[RunPlace], run_name: str) -> Lineage:
    """Return a new attempt of a run without checkpoints; raise if there are unusable checkpoints. On rank 0.

    A checkpoint in memory does not count if some of its files were lost with a node.

    Raises:
        OSError: a checkpoint cannot be read.
        CheckpointError: there are checkpoints, and none is usable.
    """
    found = [(catalog.place.uri(name), error) for catalog, name, error in listing.damaged + listing.unusable]
    for one, error in rejected:
        if not (isinstance(error, _IncompleteError) and places[one.place_number].in_memory):
            found.append((one.source, error))
    for _, error in found:
        if isinstance(error, OSError):
            raise error
    if found:
        tried = "; ".join(f"{source}: {error}" for source, error in found)
        raise CheckpointError(
            f"run {run_name!r} has checkpoints, but none can be loaded. A run with checkpoints never starts over "
            f"by itself. Tried: {tried}. No checkpoint was deleted or renamed. If the files are good on another "
            "machine, this machine reads them wrongly. Otherwise set autoresume=False and load a "
            "checkpoint with load_path, or start over with save_overwrite=True or another save_folder."
        )
    return new_attempt(highest_attempt(one.record for one in listing.known))
