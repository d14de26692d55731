"""The checkpoints of a run in its folders and buckets, and files with names of the run that are no checkpoints."""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple, final

from composerlite.checkpoint.load.reader import opened
from composerlite.checkpoint.memory.replicas import NodeMemory
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.record.manifest import RESUMABLE, Manifest, NewerManifestError, living_line
from composerlite.checkpoint.record.naming import FIRST_RANK, name_pattern
from composerlite.errors import (
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UntrustedCheckpointError,
)

__all__ = ["Candidate", "Listing", "RunBucket", "RunPlace", "UnusableFile", "listed"]

log = logging.getLogger(__name__)


@final
class RunBucket(NamedTuple):
    """Checkpoints in a bucket that a run may resume from.

    Attributes:
        remote: the bucket.
        link: name of its link to the latest; ``None`` if it has none.
        template: of the names of checkpoints; ``None``: damaged checkpoints are ignored.
    """

    remote: Catalog
    link: str | None
    template: str | None = None


@final
@dataclass(frozen=True, slots=True)
class RunPlace:
    """Checkpoints of one saver of a run.

    Attributes:
        catalog: the folder. A file that is only in a bucket is fetched to it.
        template: of the names of checkpoints; ``None``: files without a record are ignored.
        link: of the names of links to the latest; ``None``: there are none. Only broken links with these names that
            lead to a checkpoint of ``template`` are repaired or deleted.
        buckets: that the checkpoints are uploaded to.
        in_memory: the folder is in memory. Of two checkpoints of the same batch, the one in memory is tried first.
        memory: replicas in the memory of all nodes. Files that this node lacks are copied to it.
    """

    catalog: Catalog
    template: str | None = None
    link: str | None = None
    buckets: Sequence[RunBucket] = ()
    in_memory: bool = False
    memory: NodeMemory | None = None


@final
class Candidate(NamedTuple):
    """A checkpoint of a run. Rank 0 lists them; every rank gets the one that is tried.

    Attributes:
        manifest: its record.
        place: index of the place that it is in.
        path: to load it from, after a download if it is a file in a bucket; the URI of a directory in a bucket.
        source: where it is now, for messages.
        nearness: of two checkpoints of one batch the higher is tried first: 0 bucket, 1 folder, 2 memory of several
            nodes, 3 memory.
        bucket: number of the place's bucket that has it; ``None``: the folder has it.
        is_scattered: parts of it are in the memory of other nodes.
    """

    manifest: Manifest
    place: int
    path: Path | str
    source: str
    nearness: int
    bucket: int | None = None
    is_scattered: bool = False

    @property
    def has_all_keys(self) -> bool:
        """False if it was saved without some of its keys."""
        return not self.manifest.left_out

    @property
    def order(self) -> tuple[bool, tuple[int, int, int], int, str]:
        """Sort key: the greatest is tried first."""
        return self.has_all_keys, self.manifest.order[:3], self.nearness, self.manifest.saved_at


@final
class UnusableFile(NamedTuple):
    """A file or directory that has a name of the run and is no candidate.

    Attributes:
        catalog: where it is. name: of it there.
        error: the reason.
        is_damage: it is quarantined once a good checkpoint is found, since the run will save that name again.
    """

    catalog: Catalog
    name: str
    error: CorruptCheckpointError | OSError
    is_damage: bool


@final
class Listing(NamedTuple):
    """The checkpoints of a run.

    Attributes:
        known: all checkpoints of the run, of every kind and attempt.
        faults: what has a name of the run and is no checkpoint, or cannot be read.
        is_complete: all of every bucket was listed.
    """

    known: Sequence[Candidate] = ()
    faults: Sequence[UnusableFile] = ()
    is_complete: bool = True

    @property
    def resumable(self) -> list[Candidate]:
        """The checkpoints of the newest attempt and its ancestors that a run can resume from."""
        return living_line([one for one in self.known if one.manifest.kind in RESUMABLE], lambda one: one.manifest)

    def untried(self, tried: Container[tuple[str, str]]) -> list[Candidate]:
        """The candidates in the order in which they are tried, without those ``tried``, by source and id."""
        left = [one for one in self.resumable if (one.source, one.manifest.id) not in tried]
        return sorted(left, key=lambda one: one.order, reverse=True)

    @property
    def has_unread(self) -> bool:
        """True if checkpoints whose record cannot be read stay in their place: they may be newer."""
        return any(isinstance(one.error, OSError) or one.catalog.place.path_of("") is None for one in self.faults)


def listed(
    places: Sequence[RunPlace],
    run_name: str,
    scattered: Mapping[int, Sequence[Manifest]],
    *,
    whole_buckets: bool = False,
) -> Listing:
    """List the checkpoints of a run. It reads records only, never data.

    Args:
        places: of each saver of the run.
        run_name: of the run.
        scattered: checkpoints in the memory of several nodes, by the number of the place.
        whole_buckets: list all of each bucket. Otherwise list only the latest, with four requests, unless its link
            cannot be read or another link leads to a later checkpoint.

    Raises:
        IncompatibleCheckpointError: the run has a checkpoint of a newer version, which may be the newest.
        OSError, ObjectStoreError: a folder or bucket exists and cannot be listed.
    """
    known: list[Candidate] = []
    faults: list[UnusableFile] = []
    is_complete = True
    for number, place in enumerate(places):
        catalog = place.catalog
        for one in _records(catalog, place.template, run_name, faults):
            path = catalog.folder / one.name
            known.append(Candidate(one, number, path, str(path), 3 if place.in_memory else 1))
        for one in scattered.get(number, ()):
            source = f"{one.name} in the memory of several nodes"
            known.append(Candidate(one, number, catalog.folder / one.name, source, 2, is_scattered=True))
        for position, bucket in enumerate(place.buckets):
            latest = None if whole_buckets else _latest(bucket, run_name)
            is_complete = is_complete and latest is None
            for one in [latest] if latest else _records(bucket.remote, bucket.template, run_name, faults):
                uri = bucket.remote.place.uri(one.name)
                path = uri if one.is_directory else catalog.folder / one.name
                known.append(Candidate(one, number, path, uri, 0, bucket=position))
    return Listing(known, faults, is_complete)


def _records(catalog: Catalog, template: str | None, run_name: str, faults: list[UnusableFile]) -> list[Manifest]:
    """Return the records of a run in a place, and add unusable files to ``faults``."""
    manifests, unread = catalog.manifests_and_faults()
    names = None if template is None else name_pattern(template, run_name)
    in_folder = catalog.place.path_of("") is not None
    for name, error in unread.items():
        if isinstance(error, NewerManifestError):
            if error.may_be_of(run_name, name):
                raise error
        elif names is not None and names.fullmatch(name):
            faults.append(UnusableFile(catalog, name, error, in_folder and isinstance(error, CorruptCheckpointError)))
    if template is not None:
        known = {record.path for manifest in manifests for record in manifest.files}
        faults += _files_without_record(catalog, template, run_name, known, unread)
    return [manifest for manifest in manifests if manifest.run_name == run_name]


def _latest(bucket: RunBucket, run_name: str) -> Manifest | None:
    """Return the latest checkpoint of a run in a bucket; ``None``: all of the bucket has to be listed.

    A bucket has links of other names if the run saved files before and saves directories now, or if the user renamed
    the link. If one of them leads to a later checkpoint, or to nothing, the link of this bucket is not trusted.
    """
    if bucket.link is None:
        return None
    latest = bucket.remote.latest(bucket.link, run_name)
    if latest is None or latest.kind not in RESUMABLE:
        return None
    for link in bucket.remote.announcements():
        if link == PurePosixPath(bucket.link).name:
            continue
        try:
            found = bucket.remote.manifest_of(bucket.remote.announced(link)[0])
        except (FileNotFoundError, CorruptCheckpointError, NewerManifestError, ConfigError) as e:
            log.debug("%s does not lead to a checkpoint: %s", link, e)
            return None
        if found is None:
            return None
        if found.kind in RESUMABLE and found.run_name == run_name and found.order > latest.order:
            return None
    return latest


def _numbers_in(names: re.Pattern[str], name: str) -> Mapping[str, str] | None:
    """Return the numbers in ``name`` that are the same on all ranks; ``None``: it is none of ``names``.

    Args:
        names: of the checkpoints of a run.
        name: a path.
    """
    match = names.fullmatch(name)
    return None if match is None else {key: text for key, text in match.groupdict().items() if key not in FIRST_RANK}


def _files_without_record(
    catalog: Catalog, template: str, run_name: str, known: Container[str], unread: Iterable[str]
) -> Iterator[UnusableFile]:
    """Yield the files with names of ``template`` that are no checkpoints. Intact copies made by hand are left out.

    Args:
        catalog: the place.
        template: of the names of the run's checkpoints.
        run_name: of the run.
        known: files of checkpoints.
        unread: names that have a damaged record, and may have files of other ranks.
    """
    pattern = name_pattern(template, run_name)
    of_unread = [_numbers_in(pattern, name) for name in unread]
    for name in catalog.files():
        if name in known or (numbers := _numbers_in(pattern, name)) is None or numbers in of_unread:
            continue
        copy, path = catalog.manifest_of(name), catalog.place.path_of(name)
        error, is_damage = (
            CorruptCheckpointError(
                f"{catalog.place.uri(name)!r} has no record of composerlite: the file was cut off, or another program "
                "wrote it. To load it, name it in load_path."
            ),
            False,
        )
        try:
            if path is not None and copy is None:
                with opened(path):
                    pass
            elif path is not None and copy is not None:
                catalog.verify(copy)
        except FileNotFoundError:
            continue  # deleted since it was listed
        except CorruptCheckpointError as e:
            error, is_damage = e, True
        except (UntrustedCheckpointError, IncompatibleCheckpointError) as e:
            log.warning("%r cannot be verified: %s", catalog.place.uri(name), e)
        if copy is None or is_damage:
            log.warning("skipped: %s", error)
            yield UnusableFile(catalog, name, error, is_damage)
