"""The choice of the checkpoint that a run resumes from."""

from __future__ import annotations

import dataclasses
import errno
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple, final

from composerlite import dist
from composerlite.checkpoint.load.reader import opened
from composerlite.checkpoint.place.catalog import Catalog, Fault
from composerlite.checkpoint.place.directory import ON_ALL_NODES
from composerlite.checkpoint.place.memory_replicas import NodeMemory
from composerlite.checkpoint.record.manifest import (
    RESUMABLE,
    Manifest,
    NewerManifestError,
    continued,
    highest_attempt,
    living_line,
    new_attempt,
)
from composerlite.checkpoint.record.naming import differ_by_rank, name_pattern
from composerlite.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    RankError,
    UntrustedCheckpointError,
)
from composerlite.types import Lineage

__all__ = ["Choice", "RunBucket", "RunPlace", "choose"]

log = logging.getLogger(__name__)


@final
class RunBucket(NamedTuple):
    """Checkpoints in a bucket that a run may resume from.

    Attributes:
        remote: the bucket.
        link: name of its link to the latest; ``None`` if it has none.
        template: of the names of checkpoints; ``None``: damaged ones do not count.
    """

    remote: Catalog
    link: str | None
    template: str | None = None


@final
@dataclass(frozen=True, slots=True)
class RunPlace:
    """Checkpoints of one saver of a run.

    Attributes:
        catalog: the folder. What is only in a bucket is fetched to it.
        template: of the names of checkpoints; ``None``: only what has a record counts.
        link: of the names of links to the latest; ``None``: there are none. Only those that are called so and lead to a
            checkpoint of ``template`` are mended or removed.
        buckets: where else checkpoints are. Four requests find the latest of one, and a listing what other links are
            there; only if that is not good, or another link leads to a later one, is everything in it looked at.
        in_memory: the folder is in memory: of two checkpoints of the same moment, that in memory is taken.
        memory: of all nodes, where each keeps replicas of another's: what this node's lacks is brought to it.
    """

    catalog: Catalog
    template: str | None = None
    link: str | None = None
    buckets: Sequence[RunBucket] = ()
    in_memory: bool = False
    memory: NodeMemory | None = None


@final
@dataclass(frozen=True, slots=True)
class _Candidate:
    manifest: Manifest
    catalog: Catalog
    remote: Catalog | None = None  # it is there and not in the folder
    in_memory: bool = False
    elsewhere: int | None = None  # a part of it is in the memory of another node: the number of its place

    @property
    def whole(self) -> bool:
        return not self.manifest.left_out

    @property
    def rank(self) -> tuple[bool, tuple[int, int, int], int, str]:
        """Sort key: the greatest is tried first. Of two of one moment, the nearer one is."""
        nearness = 0 if self.remote is not None else 1 if not self.in_memory else 2 if self.elsewhere is not None else 3
        return self.whole, self.manifest.order[:3], nearness, self.manifest.saved_at

    @property
    def is_directory(self) -> bool:
        return self.manifest.is_directory

    @property
    def place(self) -> Path | str:
        """The place of it once it was checked: directories stay where they are."""
        if self.remote is not None and self.is_directory:
            return self.remote.place.uri(self.manifest.name)
        return self.catalog.folder / self.manifest.name

    def check(self, progress: Callable[[int, int], object] | None) -> None:
        """See that it is good, and bring it to the folder if it is a file that is not there.

        Raises:
            CorruptCheckpointError: it is not, or something of it is gone.
        """
        try:
            self._check(progress)
        except FileNotFoundError as e:
            raise CorruptCheckpointError(f"checkpoint {self.source!r}: something of it is gone: {e}") from e

    def _check(self, progress: Callable[[int, int], object] | None) -> None:
        if self.remote is None:
            self.catalog.verify(self.manifest)
            return
        if self.is_directory:
            self.remote.check_sizes(self.manifest)  # bytes are verified as they are read
            return
        try:
            self.remote.fetch(self.manifest, self.catalog, progress)
        except CorruptCheckpointError as e:
            log.warning("fetching it once more, it may have been damaged on its way: %s", e)
            self.remote.fetch(self.manifest, self.catalog, progress)

    @property
    def source(self) -> str:
        name = self.manifest.name
        if self.elsewhere is not None:
            return f"{name} in the memory of several nodes"
        return str(self.catalog.folder / name) if self.remote is None else self.remote.place.uri(name)


@final
class Offer(NamedTuple):
    """A candidate, as all ranks know it."""

    manifest: Manifest
    folder: Path | None
    place: Path | str
    elsewhere: int | None


@final
class Choice(NamedTuple):
    """The checkpoint that a run resumes from.

    Attributes:
        place: the path, or the URI of a directory in a bucket; ``None``: the run has no checkpoint.
        lineage: of what the run saves from now on.
    """

    place: Path | str | None
    lineage: Lineage


def choose(
    places: Sequence[RunPlace], run_name: str, *, progress: Callable[[int, int], object] | None = None
) -> Choice:
    """Choose the newest checkpoint of ``run_name`` whose bytes are those that were saved.

    Only the line of the newest attempt counts: what an earlier attempt saved after the run was started over is never
    resumed from. What is newest in a bucket is fetched to its folder first; a directory stays there: its URI is
    returned. A checkpoint that is marked as ``not_finite`` is skipped, and so is a damaged one, which is logged
    with the reason; in a folder it is quarantined once an older one was found to be good, and in a bucket it stays:
    it may be this machine that reads wrongly. One whose record cannot be read is skipped and stays. Weights alone
    cannot be resumed from. One that was saved without some of its keys is taken only if there is no whole one: what it
    lacks would start afresh in the middle of the run.

    A file without a record, of another program, is never taken. If there is nothing else, that is an error: the run
    does not start over beside it.

    Every rank of a run calls it and gets the same. Rank 0 looks; the files of a directory are verified by all ranks,
    each its share. What a rank cannot read in a folder is skipped by all, and not quarantined.

    Args:
        places: of each of its savers.
        run_name: of the run.
        progress: is called with (bytes received, total).

    Raises:
        CheckpointError: there are checkpoints, and none of them is good, or all are marked.
        IncompatibleCheckpointError: the run has a checkpoint of a newer version, which may be the newest.
        OSError: a folder cannot be read for any other reason than that it does not exist; or there are checkpoints, and
            none that every rank can read.
        ObjectStoreError: a bucket does not answer. PermissionError: it does not let us read. Neither means "nothing".
    """
    group = dist.get_group()
    its_links = {
        place.catalog.folder: _Links(name_pattern(place.link, run_name), name_pattern(place.template, run_name))
        for place in places
        if place.link is not None and place.template is not None
    }
    search: _Search | None = None
    damaged: list[Manifest] = []
    elsewhere = {number: place.memory.find(run_name) for number, place in enumerate(places) if place.memory is not None}
    with group.all_or_none("looking for checkpoints"):
        if group.is_first:
            search = _Search(places, run_name, its_links, elsewhere)
    while True:
        candidate: _Candidate | None = None
        with group.all_or_none("looking for checkpoints"):
            if search is not None:
                candidate = search.next()
        offer = group.broadcast(None if candidate is None else _offer(candidate))
        lineage = Lineage()  # that of rank 0 counts
        if offer is None:
            if search is not None:
                lineage = search.new_attempt()
            return Choice(None, group.broadcast(lineage))
        error = _checked(candidate, offer, places, progress)
        with group.all_or_none("looking for checkpoints"):
            if search is not None and candidate is not None:
                if error is None:
                    lineage = search.accept(candidate)
                else:
                    search.reject(candidate, error)
            _follow(offer, error, damaged, its_links)
        if error is None:
            return Choice(offer.place, group.broadcast(lineage))


@final
class _Links(NamedTuple):
    """Names of the links of a saver, and of what they lead to."""

    names: re.Pattern[str]
    targets: re.Pattern[str]


def _mend(
    catalog: Catalog, manifest: Manifest | None, links: Mapping[Path, _Links], quarantined: Sequence[Manifest] = ()
) -> None:
    """Repair broken links of the run's saver, and those to checkpoints that were just quarantined."""
    if (own := links.get(catalog.folder)) is not None:
        gone = (re.escape(path) for one in quarantined for path in (one.name, *(file.path for file in one.files)))
        catalog.mend_links(manifest, own.names, re.compile("|".join([f"(?:{own.targets.pattern})", *gone])))


class _NotFiniteError(CheckpointError):
    """Intact checkpoint of training with values that are not finite."""


@final
class _Search:
    """The candidates, on rank 0."""

    def __init__(
        self,
        places: Sequence[RunPlace],
        run_name: str,
        links: Mapping[Path, _Links],
        elsewhere: Mapping[int, Sequence[Manifest]],
    ) -> None:
        self._places = places
        self._links = links
        self._run_name = run_name
        self._unreadable: list[OSError] = []
        self._rejected: list[tuple[_Candidate, CheckpointError | OSError]] = []
        self._skipped_records = False
        """Checkpoints are left where they are whose record is damaged, in a bucket, or cannot be read here."""
        self._damage: dict[str, CorruptCheckpointError] = {}
        """Checkpoints of the run's names that are no candidates, since they or their records cannot be read."""
        self._unlisted_damage: list[tuple[Catalog, str]] = []
        """Those of them in folders that have no record."""
        self._unseen: dict[str, RunBucket] = {}
        """Buckets of which only the latest is a candidate, until that does not hold."""
        found: list[_Candidate] = []
        for place in places:
            manifests = self._listed(place.catalog, place.template)
            found += [_Candidate(one, place.catalog, in_memory=place.in_memory) for one in self._of_run(manifests)]
        found += [
            _Candidate(manifest, places[number].catalog, in_memory=True, elsewhere=number)
            for number, manifests in elsewhere.items()
            for manifest in manifests
        ]
        for catalog, bucket in [(place.catalog, bucket) for place in places for bucket in place.buckets]:
            manifest = None if bucket.link is None else bucket.remote.latest(bucket.link, run_name)
            if manifest is not None and manifest.kind in RESUMABLE and not self._may_be_later(bucket, manifest):
                found.append(_Candidate(manifest, catalog, bucket.remote))
                self._unseen[bucket.remote.place.uri()] = bucket
            else:
                found += self._everything_in(bucket, catalog)
        self._known = found
        self._look_at_line()

    def _may_be_later(self, bucket: RunBucket, latest: Manifest) -> bool:
        """Return true if another link than the bucket's own leads to a later checkpoint than ``latest``, or to nothing.

        Links have other names where the run saved files before and saves directories now, and where the user says so.
        """
        own = None if bucket.link is None else PurePosixPath(bucket.link).name
        for link in bucket.remote.place.announced_links():
            if link == own:
                continue
            try:
                found = bucket.remote.manifest_of(bucket.remote.place.announced_target(f"/{link}")[0])
            except (FileNotFoundError, CorruptCheckpointError, NewerManifestError, ConfigError) as e:
                log.debug("%s does not lead to a checkpoint: %s", link, e)
                return True
            if found is None or (found.kind in RESUMABLE and self._of_run([found]) and found.order > latest.order):
                return True
        return False

    def _everything_in(self, bucket: RunBucket, catalog: Catalog) -> list[_Candidate]:
        """List all checkpoints of the run in a bucket, which takes a request for each."""
        remote = bucket.remote
        return [_Candidate(one, catalog, remote) for one in self._of_run(self._listed(remote, bucket.template))]

    def _listed(self, catalog: Catalog, template: str | None) -> list[Manifest]:
        """List the checkpoints of a place, and take note of the faults that hide others."""
        manifests, faults = catalog.manifests_and_faults()
        found: dict[str, Fault] = dict(faults)
        if template is not None:
            without = _files_without_record(catalog, template, self._run_name, manifests, faults)
            found |= {**without.foreign, **without.damaged}
            self._unlisted_damage += [(catalog, name) for name in without.damaged]
        if catalog.place.path_of("") is None:  # damaged files of a folder are renamed, those of a bucket stay
            self._skipped_records |= any(isinstance(fault, CorruptCheckpointError) for fault in found.values())
        self._note(catalog, template, found)
        return manifests

    def _of_run(self, manifests: Iterable[Manifest]) -> list[Manifest]:
        return [manifest for manifest in manifests if manifest.run_name == self._run_name]

    def _note(self, catalog: Catalog, template: str | None, faults: Mapping[str, Fault]) -> None:
        """Take note of checkpoints that cannot be read, if their names are the run's: so they may be its own.

        Raises:
            NewerManifestError: one of the run is of a newer version.
        """
        names = re.compile(r"(?!)") if template is None else name_pattern(template, self._run_name)
        for name, fault in faults.items():
            if isinstance(fault, NewerManifestError):
                if fault.may_be_of(self._run_name):
                    raise fault
            elif names.fullmatch(name) is None:
                continue
            elif isinstance(fault, CorruptCheckpointError):
                self._damage[catalog.place.uri(name)] = fault
            else:
                self._unreadable.append(fault)
                self._skipped_records = True

    def _look_at_line(self) -> None:
        """Find the living line of the known checkpoints, and the ones of it that were not tried."""
        tried = {id(one) for one, _ in self._rejected}
        known = [candidate for candidate in self._known if candidate.manifest.kind in RESUMABLE]
        self._candidates = living_line(known, _manifest)
        self._left = [one for one in self._candidates if id(one) not in tried]

    def new_attempt(self) -> Lineage:
        """Begin an attempt: there is nothing to resume from."""
        return new_attempt(highest_attempt(candidate.manifest for candidate in self._known))

    def next(self) -> _Candidate | None:
        """The newest that is left.

        Raises:
            OSError: there is none, but some cannot be read: that does not mean that there is nothing.
            CheckpointError: there is none, but there were some that are damaged. What was lost with the memory of a
                node does not count.
        """
        while self._left:
            candidate = max(self._left, key=lambda candidate: candidate.rank)
            self._left.remove(candidate)
            if not (marks := candidate.manifest.not_finite):
                return candidate
            self.reject(candidate, _NotFiniteError(f"{', '.join(marks)} was not finite when it was saved."))
        if self._unreadable:
            raise self._unreadable[0]
        rejected = [(one, error) for one, error in self._rejected if not _is_lost(one, error)]
        marked = [candidate for candidate, error in rejected if isinstance(error, _NotFiniteError)]
        if marked and len(marked) == len(rejected) + len(self._damage):
            newest = marked[0]
            raise CheckpointError(
                f"run {self._run_name!r} has checkpoints, and all of them were saved while "
                f"{newest.manifest.not_finite[0]} was not finite, so it does not resume by itself. Nothing was "
                "changed. "
                f"To resume from the newest all the same: load_path={newest.source!r} and autoresume=False. To start "
                "over: another save_folder, or autoresume=False and save_overwrite=True."
            )
        found = [(candidate.source, error) for candidate, error in rejected] + [*self._damage.items()]
        if found:
            tried = "; ".join(f"{source}: {error}" for source, error in found)
            raise CheckpointError(
                f"run {self._run_name!r} has checkpoints, and none of them is good, so it does not start over by "
                f"itself. Tried: {tried}. Nothing was changed. If the files are good on another machine, this one "
                "reads them wrongly. Otherwise name one to load with load_path and autoresume=False, or start over in "
                "another save_folder, or with autoresume=False and save_overwrite=True."
            )
        for place in self._places:
            _mend(place.catalog, None, self._links)
        return None

    def reject(self, candidate: _Candidate, error: CheckpointError | OSError) -> None:
        """Skip a candidate that is damaged or marked, or that a rank cannot read."""
        log.warning("skipped %s: %s", candidate.source, error)
        self._rejected.append((candidate, error))
        if isinstance(error, OSError) and not _is_lost(candidate, error):
            self._unreadable.append(error)
        uri = "" if candidate.remote is None else candidate.remote.place.uri()
        if (bucket := self._unseen.pop(uri, None)) is not None:
            others = self._everything_in(bucket, candidate.catalog)
            self._known += [o for o in others if o.manifest.name != candidate.manifest.name]
            self._look_at_line()

    def accept(self, candidate: _Candidate) -> Lineage:
        """Accept a candidate and quarantine damaged ones in folders. Returns the lineage of the following saves."""
        quarantined: list[Manifest] = []
        for rejected, error in self._rejected:
            if rejected.place == candidate.place:
                continue  # what is good was fetched from a bucket to take its place
            is_here = rejected.remote is None and rejected.elsewhere is None
            if is_here and isinstance(error, CorruptCheckpointError):
                rejected.catalog.quarantine(rejected.manifest)  # the run will write one of that name again
                quarantined.append(rejected.manifest)
        self._quarantine_damaged(candidate)
        newer = [c for c in self._candidates if not c.whole and c.manifest.order > candidate.manifest.order]
        if not candidate.whole:
            log.warning(
                "resuming from %s, which was saved without %s: there is no other checkpoint",
                candidate.source,
                candidate.manifest.left_out,
            )
        elif newer:
            log.info("%s is not the newest: newer ones were saved without some of their keys", candidate.source)
        is_here = isinstance(candidate.place, Path)
        _mend(candidate.catalog, candidate.manifest if is_here else None, self._links, quarantined)
        known, resumable = [c.manifest for c in self._known], [c.manifest for c in self._candidates]
        return continued(candidate.manifest, known, resumable, damaged=self._skipped_records)

    def _quarantine_damaged(self, accepted: _Candidate) -> None:
        """Quarantine damaged files of folders: the run will save these names again."""
        for place in self._places if self._damage else ():
            if place.template is not None:
                place.catalog.quarantine_damaged(name_pattern(place.template, self._run_name))
        for catalog, name in self._unlisted_damage:
            if catalog.folder / name != accepted.place:  # what is good was fetched to take its place
                catalog.quarantine_file(name)


def _is_lost(candidate: _Candidate, error: Exception) -> bool:
    """Return true if a rank does not see it since it was in memory that is gone."""
    return candidate.in_memory and isinstance(error, OSError)


# ── on every rank ────────────────────────────────────────────────────────────────────────────────────────────────────
def _offer(candidate: _Candidate) -> Offer:
    folder = candidate.catalog.folder if candidate.remote is None else None
    return Offer(candidate.manifest, folder, candidate.place, candidate.elsewhere)


def _checked(
    candidate: _Candidate | None,
    offer: Offer,
    places: Sequence[RunPlace],
    progress: Callable[[int, int], object] | None,
) -> CorruptCheckpointError | OSError | None:
    """Verify it; what is wrong with it, the same on every rank. What a bucket does not answer is raised."""
    group = dist.get_group()
    error: Exception | None = None
    try:
        if offer.elsewhere is not None and (memory := places[offer.elsewhere].memory) is not None:
            memory.bring(offer.manifest)
        if group.size > 1 and offer.folder is not None and len(offer.manifest.files) > 1:
            _check_share(Catalog(offer.folder), offer.manifest)
        elif candidate is not None:
            candidate.check(progress)
    except RankError:
        raise  # the ranks cannot meet any more
    except Exception as e:  # noqa: BLE001 - goes to every rank
        error = e
    outcomes = group.outcomes(f"verifying checkpoint {offer.manifest.name!r}", error)
    return _verdict(outcomes, error, may_be_passed_over=offer.folder is not None)


def _verdict(
    outcomes: Mapping[int, BaseException], own: Exception | None, *, may_be_passed_over: bool
) -> CorruptCheckpointError | OSError | None:
    """Select the error to act on among those of all ranks. An unreadable checkpoint ends the run or is skipped.

    Raises:
        Exception: it says nothing of the checkpoint.
    """
    group = dist.get_group()
    if not outcomes:
        return None
    verdicts = (CorruptCheckpointError, OSError) if may_be_passed_over else (CorruptCheckpointError,)
    if others := {rank: error for rank, error in outcomes.items() if not isinstance(error, verdicts)}:
        raise group.first_error(others, own)
    damages = {rank: e for rank, e in outcomes.items() if isinstance(e, CorruptCheckpointError)}
    found = group.first_error(damages or outcomes, own)
    assert isinstance(found, CorruptCheckpointError | OSError)
    return found


def _check_share(catalog: Catalog, manifest: Manifest) -> None:
    """Verify this rank's share of the files of a directory, if all ranks see it, each on its node's disk."""
    mine: Manifest | None = None
    try:
        mine = catalog.manifest_of(manifest.name)
    except (CorruptCheckpointError, OSError) as e:
        log.warning("%s cannot be read here: %s", manifest.name, e)
    sees = mine is not None and mine.id == manifest.id
    knows = sees or any(other.node is not None for other in _of(manifest.run_name, catalog.readable()))
    absent = {file.node for file in manifest.files if not (catalog.folder / file.path).exists()}
    told = dist.get_group().gather((sees, knows, mine.node if mine is not None and sees else None, absent))
    if blind := [rank for rank, its in enumerate(told) if not its[0]]:
        raise _not_everywhere(catalog, manifest, blind, [rank for rank in blind if not told[rank][1]])
    nodes = [node for _, _, node, _ in told]
    lost = set[int | None].intersection(*(its[3] for its in told)) - {*nodes}  # what is gone from its own disk shows
    if lost := [file for file in manifest.files if file.node in lost]:
        raise FileNotFoundError(
            errno.ENOENT,
            f"{lost[0].path!r} was saved to the disk of node {lost[0].node}, and no rank of this run has it. "
            f"{ON_ALL_NODES} No such file in",
            str(catalog.folder),
        )
    rank = dist.get_global_rank()
    company = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    assert mine is not None
    share = mine.here[company.index(rank) :: len(company)]
    catalog.verify(dataclasses.replace(mine, files=share))


def _not_everywhere(catalog: Catalog, manifest: Manifest, blind: list[int], bare: list[int]) -> Exception:
    """Make the error of a checkpoint that is there for rank 0 and not for ``blind`` ranks; ``bare`` ones see none."""
    if manifest.node is not None and not bare:  # their disks are those of this run: it was lost there
        return CorruptCheckpointError(
            f"checkpoint {str(catalog.folder / manifest.name)!r} is not on the disks of the ranks {blind}, which have "
            "others of this run."
        )
    return OSError(
        errno.ENOENT,
        f"checkpoint {manifest.name!r} is there for rank 0 and not for the ranks {blind}: each rank reads its part "
        "of a directory. Is the folder on a file system that all nodes share, or are these the nodes that saved it?",
        str(catalog.folder),
    )


def _follow(
    offer: Offer,
    error: CorruptCheckpointError | OSError | None,
    damaged: list[Manifest],
    links: Mapping[Path, _Links],
) -> None:
    """Do, on the disks of all nodes but the first, the changes of :class:`_Search` on that one.

    ``damaged`` are the checkpoints that were found to be, to be quarantined when there is a good one.
    """
    if offer.folder is None or offer.manifest.node is None or dist.get_local_rank() != 0 or dist.get_global_rank() == 0:
        return
    catalog = Catalog(offer.folder)
    mine = catalog.manifest_of(offer.manifest.name)
    if mine is None or (mine.node == offer.manifest.node and offer.elsewhere is None):
        return
    if error is None:
        for one in damaged:
            if one.name != mine.name:  # what is good was brought to take its place
                catalog.quarantine(one)
        _mend(catalog, mine, links)
    elif isinstance(error, CorruptCheckpointError):
        damaged.append(mine)


def _of(run_name: str, manifests: Sequence[Manifest]) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest.run_name == run_name and manifest.kind in RESUMABLE]


def _manifest(candidate: _Candidate) -> Manifest:
    return candidate.manifest


# ── files without a record ───────────────────────────────────────────────────────────────────────────────────────────
class _NoRecord(NamedTuple):
    """Files of a run's names that have no record of that name, each with the reason why a run does not resume from it.

    Attributes:
        foreign: written by another program, or in a bucket, where nothing is renamed.
        damaged: files in a folder that cannot be read, or that differ from the record in them.
    """

    foreign: Mapping[str, CorruptCheckpointError]
    damaged: Mapping[str, CorruptCheckpointError]


def _files_without_record(
    catalog: Catalog, template: str, run_name: str, manifests: Sequence[Manifest], faults: Mapping[str, Fault]
) -> _NoRecord:
    """Find the files that ``template`` names and that are no checkpoints. Intact copies made by hand are left out.

    Args:
        catalog: the place.
        template: of the names of the run's checkpoints.
        run_name: of the run.
        manifests: of the checkpoints in the place.
        faults: of the names that have a damaged record.
    """
    pattern = name_pattern(template, run_name)
    known = {record.path for manifest in manifests for record in manifest.files} | faults.keys()
    foreign: dict[str, CorruptCheckpointError] = {}
    damaged: dict[str, CorruptCheckpointError] = {}
    for name in catalog.files():
        if name in known or pattern.fullmatch(name) is None:
            continue
        if any(differ_by_rank(other, name, template, run_name) for other in faults):
            continue  # the other one may list it
        copy, path = catalog.manifest_of(name), catalog.place.path_of(name)
        try:
            if copy is not None and path is not None:
                catalog.verify(copy)
            elif path is not None:
                with opened(path):
                    pass
        except FileNotFoundError:
            continue  # deleted since it was listed
        except CorruptCheckpointError as e:
            log.warning("skipped: %s", e)
            damaged[name] = e
            continue
        except (UntrustedCheckpointError, IncompatibleCheckpointError) as e:
            log.warning("left alone: %s", e)
        if copy is None:
            foreign[name] = CorruptCheckpointError(
                f"{catalog.place.uri(name)!r} has no record of composerlite: it was cut off, or another program wrote "
                "it. Name it in load_path to load it."
            )
            log.warning("skipped: %s", foreign[name])
    return _NoRecord(foreign, damaged)
