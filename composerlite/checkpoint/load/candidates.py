"""List and sort the checkpoints of a run in folders and buckets, and quarantine damaged files with names of the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias, final

from composerlite import dist
from composerlite.checkpoint.load.reader import opened
from composerlite.checkpoint.memory import Replication
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import quarantine_checkpoint
from composerlite.checkpoint.record.history import living_line
from composerlite.checkpoint.record.naming import name_pattern
from composerlite.checkpoint.record.record import RESUMABLE, Manifest, NewerManifestError
from composerlite.errors import CheckpointError, CorruptCheckpointError

log = logging.getLogger(__name__)
IN_BUCKET, IN_FOLDER, IN_REPLICAS, IN_MEMORY = range(4)
"""Nearness of a candidate. Of two checkpoints of one batch, the checkpoint with the higher number is tried first."""


@final
@dataclass(frozen=True, slots=True)
class RunPlace:
    """The place for the checkpoints of one saver of a run: a folder or a bucket.

    Attributes:
        catalog: catalog of the bucket, or of the folder, which also receives downloads of files from ``buckets``.
        template: template of the names of checkpoints.
        link: in a bucket, full name of the link to the latest checkpoint; ``None``: there is no link.
        buckets: buckets with the uploads of the saver.
        in_memory: the folder is in memory. Of two checkpoints of the same batch, the one in memory is tried first.
        memory: replicas in the memory of all nodes. Missing files are copied to the memory of this node.
    """

    catalog: Catalog
    template: str = ""
    link: str | None = None
    buckets: Sequence[RunPlace] = ()
    in_memory: bool = False
    memory: Replication | None = None


@final
class Candidate(NamedTuple):
    """A checkpoint of a run. Rank 0 lists candidates and broadcasts each candidate in turn.

    Attributes:
        record: the record.
        place_number: index of the place among the places of the run.
        path: path to load, after a download if the checkpoint is a file in a bucket; URI of a directory in a bucket.
        source: path or URI where the checkpoint is now, for messages.
        nearness: 0 bucket, 1 folder, 2 replicas in the memory of several nodes, 3 memory.
        bucket_number: index of the bucket among the buckets of the place; ``None``: the checkpoint is in the folder.
    """

    record: Manifest
    place_number: int
    path: Path | str
    source: str
    nearness: int
    bucket_number: int | None = None


Fault: TypeAlias = tuple[Catalog, str, CheckpointError | OSError]
"""Folder or bucket, name there, and the reason why the file or directory cannot be used."""


@final
@dataclass(slots=True)
class Listing:
    """The checkpoints of a run.

    Attributes:
        known: all checkpoints of the run, of every kind and attempt. Only the latest checkpoint of a bucket is known if
            the bucket was not listed as a whole.
        damaged: damaged files in folders with names of the run. These files are renamed once a good checkpoint is
            found, since the run will save these names again.
        unusable: other files with names of the run and without a usable record. These files stay, and may be newer
            checkpoints.
        is_complete: all records of every bucket were read.
    """

    known: list[Candidate] = field(default_factory=list[Candidate])
    damaged: list[Fault] = field(default_factory=list[Fault])
    unusable: list[Fault] = field(default_factory=list[Fault])
    is_complete: bool = True


def list_checkpoints(
    places: Sequence[RunPlace],
    run_name: str,
    replicas: Mapping[int, Sequence[Manifest]],
    *,
    whole_buckets: bool = False,
) -> Listing:
    """List the checkpoints of a run. Called on rank 0.

    The data of a file are read, to find damage, only if the file has a name of the run and no record has this name.

    Args:
        places: the places of each saver of the run.
        run_name: name of the run.
        replicas: checkpoints in the memory of several nodes, by the index of their place.
        whole_buckets: read all records of each bucket. Otherwise follow the link of the bucket to the latest
            checkpoint, and read all records only if the linked checkpoint may not be the latest to resume from.

    Raises:
        IncompatibleCheckpointError: a newer version of composerlite wrote a record under a name of the run. This may be
            the newest checkpoint, so the run must not resume from an older checkpoint.
        OSError, ObjectStoreError: a folder or bucket exists and cannot be listed.
    """
    listing = Listing()
    for number, place in enumerate(places):
        folder = place.catalog.folder
        for one in _records(place, run_name, listing):
            nearness = IN_MEMORY if place.in_memory else IN_FOLDER
            listing.known.append(Candidate(one, number, folder / one.name, str(folder / one.name), nearness))
        for one in replicas.get(number, ()):
            source = f"{one.name} in the memory of several nodes"
            listing.known.append(Candidate(one, number, folder / one.name, source, IN_REPLICAS))
        for position, bucket in enumerate(place.buckets):
            latest = None if whole_buckets else _latest(bucket, run_name)
            listing.is_complete &= latest is None
            for one in _records(bucket, run_name, listing) if latest is None else [latest]:
                uri = bucket.catalog.place.uri(one.name)
                path = uri if one.is_directory else folder / one.name
                listing.known.append(Candidate(one, number, path, uri, IN_BUCKET, position))
    return listing


def _latest(bucket: RunPlace, run_name: str) -> Manifest | None:
    """Return the latest checkpoint of a run in a bucket; ``None``: the bucket must be listed as a whole.

    The link leads to an older checkpoint after a kill between a commit and the move of the link, or if the user changed
    the names of the checkpoints and changed them back. So the records of files that were written later are read, too.
    """
    catalog = bucket.catalog
    latest = None if bucket.link is None else catalog.latest(bucket.link, run_name)
    if latest is None or latest.kind not in RESUMABLE or latest.left_out:
        return None
    later = catalog.written_since(latest)
    records, faults = catalog.manifests_and_faults(later)
    has_newer = any(m.run_name == run_name and m.kind in RESUMABLE and m.order > latest.order for m in records)
    without_record = {*later}.difference(m.files[0].path for m in records)
    has_unrecorded = any(map(name_pattern(bucket.template, run_name).fullmatch, without_record))
    return None if has_newer or has_unrecorded or faults else latest


def newest_first(known: Sequence[Candidate]) -> list[Candidate]:
    """Return the checkpoints to resume from, in the order of trial: the newest attempt and its ancestors, newest first.

    Checkpoints saved without some of their keys come last.
    """
    resumable = living_line([one for one in known if one.record.kind in RESUMABLE], lambda one: one.record)

    def order(one: Candidate) -> tuple[bool, tuple[int, ...], int, str]:
        return not one.record.left_out, one.record.order[:3], one.nearness, one.record.saved_at

    return sorted(resumable, key=order, reverse=True)


def _records(place: RunPlace, run_name: str, listing: Listing) -> list[Manifest]:
    """Return the records of a run in a folder or bucket, and add unusable files with names of the run to ``listing``.

    Raises:
        NewerManifestError: a newer version of composerlite wrote the record under a name of the run.
    """
    catalog, names = place.catalog, name_pattern(place.template, run_name)
    records, faults = catalog.manifests_and_faults()
    errors: dict[str, CheckpointError | OSError] = {name: e for name, e in faults.items() if names.fullmatch(name)}
    for error in errors.values():
        if isinstance(error, NewerManifestError):
            raise error
    with_record = {file.path for record in records for file in record.files} | faults.keys()
    for name in catalog.files():
        match = names.fullmatch(name)
        if match is None or name in with_record or int(match.groupdict().get("rank", 0)):
            continue
        if (error := _fault_without_record(catalog, name)) is not None:
            log.warning("skipped: %s", error)
            errors[name] = error
    for name, error in errors.items():
        is_damaged = catalog.place.path_of(name) is not None and isinstance(error, CorruptCheckpointError)
        (listing.damaged if is_damaged else listing.unusable).append((catalog, name, error))
    return [record for record in records if record.run_name == run_name]


def _fault_without_record(catalog: Catalog, name: str) -> CheckpointError | None:
    """Return the reason why a run cannot resume from the file ``name``, if no record has this name.

    A file in a folder is read: a file that is no complete torch file is damaged. ``None``: the file is an intact copy
    made by hand, with the record of another name, or was deleted after the listing.
    """
    uri, in_folder = catalog.place.uri(name), catalog.place.path_of(name) is not None
    try:
        if (copied := catalog.manifest_of(name)) is not None:
            if in_folder:
                catalog.verify(copied)
            return None
        if in_folder:
            with opened(catalog.folder / name):
                pass
    except FileNotFoundError:
        return None
    except CorruptCheckpointError as e:
        return e
    except CheckpointError as e:
        log.warning("%r cannot be verified: %s", uri, e)
    return CheckpointError(
        f"{uri!r} has no record of composerlite: another program wrote it. To load it, name it in load_path."
    )


# ── once a good checkpoint is found ──────────────────────────────────────────────────────────────────────────────────
def quarantine_damaged(
    damaged: Sequence[Candidate], chosen: Candidate, listing: Listing, places: Sequence[RunPlace]
) -> None:
    """Rename damaged checkpoints in folders, since the run will save these names again.

    Every rank calls this. Rank 0 renames in its folders. If nodes have disks of their own, the first rank of each other
    node renames on the disk of the node. The path of ``chosen`` is skipped: a download has replaced the damaged file.
    """
    for one in damaged:
        record, catalog = one.record, places[one.place_number].catalog
        own = [record]
        if dist.get_global_rank() != 0:
            own = catalog.manifests([record.name]) if dist.get_local_rank() == 0 and record.node is not None else []
        if one.nearness in (IN_FOLDER, IN_MEMORY) and one.path != chosen.path:
            for manifest in own:
                quarantine_checkpoint(catalog.place, manifest)
    for catalog, name, _ in listing.damaged:  # on rank 0
        if catalog.folder / name != chosen.path:
            catalog.place.quarantine(name)
