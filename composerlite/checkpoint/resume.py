"""Which checkpoint a run goes on from."""

from __future__ import annotations

import dataclasses
import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

from composerlite import dist
from composerlite.checkpoint.catalog import Catalog
from composerlite.checkpoint.formats.directory import ON_ALL_NODES
from composerlite.checkpoint.manifest import FileRecord, Manifest
from composerlite.checkpoint.ranks_together import first_of, together
from composerlite.checkpoint.remote import RemoteCatalog
from composerlite.checkpoint.unlisted import check_unlisted, unlisted
from composerlite.errors import CorruptCheckpointError, RankError

__all__ = ["Bucket", "newest_good"]

log = logging.getLogger(__name__)
_KINDS = ("monolithic", "sharded", "deepspeed")
_REQUESTS = 16


@final
@dataclass(frozen=True, slots=True)
class Bucket:
    """Checkpoints in a bucket that a run may go on from.

    Attributes:
        remote: the bucket.
        link: name of its link to the latest; ``None`` if it has none.
        catalog: the folder that a checkpoint is fetched to.
    """

    remote: RemoteCatalog
    link: str | None
    catalog: Catalog


@final
@dataclass(frozen=True, slots=True)
class _Candidate:
    manifest: Manifest
    catalog: Catalog
    remote: RemoteCatalog | None = None  # it is there and not in the folder
    listed: bool = True  # it has a manifest

    @property
    def whole(self) -> bool:
        return not self.manifest.left_out

    @property
    def rank(self) -> tuple[bool, tuple[int, int], bool, bool, str]:
        """The greatest is tried first: what can be verified, and is there already, before what is not."""
        return self.whole, self.manifest.order[:2], self.listed, self.remote is None, self.manifest.saved_at

    @property
    def home(self) -> Catalog | RemoteCatalog:
        return self.catalog if self.remote is None else self.remote

    @property
    def is_directory(self) -> bool:
        return self.manifest.is_directory

    @property
    def place(self) -> Path | str:
        """Where it is once it was checked: directories stay where they are."""
        if self.remote is not None and self.is_directory:
            return self.remote.uri(self.manifest.name)
        return self.catalog.folder / self.manifest.name

    def check(self, progress: Callable[[int, int], object] | None) -> None:
        """See that it is good, and bring it to the folder if it is a file that is not there."""
        if not self.listed:
            check_unlisted(self.catalog, self.manifest)
            return
        if self.remote is None:
            self.catalog.verify(self.manifest)
            return
        if self.is_directory:
            _check_sizes(self.remote, self.manifest)
            return
        try:
            self.remote.fetch(self.manifest, self.catalog, progress)
        except CorruptCheckpointError as e:
            log.warning("fetching it once more, it may have been damaged on its way: %s", e)
            self.remote.fetch(self.manifest, self.catalog, progress)

    @property
    def source(self) -> str:
        name = self.manifest.name
        return str(self.catalog.folder / name) if self.remote is None else self.remote.uri(name)


@final
class Offer(NamedTuple):
    """A candidate, as all ranks know it."""

    manifest: Manifest
    folder: Path | None
    place: Path | str


def newest_good(
    catalogs: Sequence[Catalog],
    run_name: str,
    *,
    templates: Sequence[str] = (),
    buckets: Sequence[Bucket] = (),
    progress: Callable[[int, int], object] | None = None,
) -> Path | str | None:
    """The newest checkpoint of ``run_name`` whose bytes are those that were saved; ``None`` if there is none.

    What is newest in a bucket is fetched to its folder first; a directory stays there: its URI is returned. A damaged
    checkpoint is passed over, which is logged with the reason, and set aside. Weights-only checkpoints cannot be
    resumed from. One that was saved without some of its keys is taken only if there is no whole one: what it lacks
    would start afresh in the middle of the run.

    A file without a manifest, of another program or one whose manifest was lost, is taken if it can be read and agrees
    with its own checksums; the log says so.

    Every rank of a run calls it and gets the same. Rank 0 looks; the files of a directory are verified by all ranks,
    each its share. What a rank cannot read is passed over by all, and not set aside.

    Args:
        catalogs: the folders.
        templates: how checkpoints are named in each; where it is not given, only what has a manifest counts.
        buckets: where else checkpoints are. Three requests find the latest of one; only if that is not good is
            everything in it looked at.
        progress: is told how many bytes of how many were fetched.

    Raises:
        IncompatibleCheckpointError: there is a checkpoint of a newer version, which may be the newest.
        OSError: a folder cannot be read for any other reason than that it does not exist. With several ranks also:
            there are checkpoints, and none that every rank can read.
        ObjectStoreError: a bucket does not answer. PermissionError: it does not let us read. Neither means "nothing".
    """
    search: _Search | None = None
    with together("looking for checkpoints"):
        if dist.get_global_rank() == 0:
            search = _Search(catalogs, run_name, templates, buckets)
    while True:
        candidate: _Candidate | None = None
        with together("looking for checkpoints"):
            if search is not None:
                candidate = search.next()
        offer = dist.broadcast_object(None if candidate is None else _offer(candidate))
        if offer is None:
            return None
        error = _checked(candidate, offer, progress)
        with together("looking for checkpoints"):
            if search is not None and candidate is not None:
                if error is None:
                    search.accept(candidate)
                else:
                    search.reject(candidate, error)
            _follow(offer, error)
        if error is None:
            return offer.place


@final
class _Search:
    """The candidates, on rank 0."""

    def __init__(
        self, catalogs: Sequence[Catalog], run_name: str, templates: Sequence[str], buckets: Sequence[Bucket]
    ) -> None:
        for catalog in catalogs:
            catalog.set_aside_unreadable()
        self._catalogs = catalogs
        self._run_name = run_name
        self._unreadable: list[OSError] = []
        self._unseen: dict[str, Bucket] = {}
        """Buckets of which only the latest is a candidate, until that does not hold."""
        found = [
            _Candidate(manifest, catalog) for catalog in catalogs for manifest in _of(run_name, catalog.manifests())
        ]
        for catalog, template in zip(catalogs, templates, strict=False):
            found += [_Candidate(manifest, catalog, listed=False) for manifest in unlisted(catalog, template, run_name)]
        for bucket in buckets:
            manifest = None if bucket.link is None else bucket.remote.latest(bucket.link)
            if manifest is not None and (mine := _of(run_name, [manifest])):
                found.append(_Candidate(mine[0], bucket.catalog, bucket.remote))
                self._unseen[bucket.remote.uri()] = bucket
            else:
                found += _everything_in(bucket, run_name)
        self._candidates = found
        self._left = list(found)

    def next(self) -> _Candidate | None:
        """The newest that is left.

        Raises:
            OSError: there is none, but some cannot be read: that does not mean that there is nothing.
        """
        if self._left:
            candidate = max(self._left, key=lambda candidate: candidate.rank)
            self._left.remove(candidate)
            return candidate
        if self._unreadable:
            raise self._unreadable[0]
        for catalog in self._catalogs:
            catalog.mend_links(None)
        return None

    def reject(self, candidate: _Candidate, error: CorruptCheckpointError | OSError) -> None:
        """It is damaged, or a rank cannot read it."""
        log.warning("passed over: %s", error)
        if isinstance(error, CorruptCheckpointError):
            candidate.home.set_aside(candidate.manifest)  # the run will come to write one of that name again
        else:
            self._unreadable.append(error)
        bucket = None if candidate.remote is None else self._unseen.pop(candidate.remote.uri(), None)
        if bucket is not None:
            known = {(c.remote.uri(), c.manifest.name) for c in self._candidates if c.remote is not None}
            more = _everything_in(bucket, self._run_name)
            self._left += [c for c in more if (bucket.remote.uri(), c.manifest.name) not in known]

    def accept(self, candidate: _Candidate) -> None:
        """It is the one."""
        newer = [c for c in self._candidates if not c.whole and c.manifest.order > candidate.manifest.order]
        if not candidate.whole:
            log.warning(
                "%s is all there is to resume from; it was saved without %s",
                candidate.source,
                candidate.manifest.left_out,
            )
        elif newer:
            log.info("%s is not the newest: newer ones were saved without some of their keys", candidate.source)
        is_here = isinstance(candidate.place, Path)
        candidate.catalog.mend_links(candidate.manifest if is_here else None)


# ── on every rank ────────────────────────────────────────────────────────────────────────────────────────────────────
def _offer(candidate: _Candidate) -> Offer:
    return Offer(candidate.manifest, candidate.catalog.folder if candidate.remote is None else None, candidate.place)


def _checked(
    candidate: _Candidate | None, offer: Offer, progress: Callable[[int, int], object] | None
) -> CorruptCheckpointError | OSError | None:
    """What is wrong with it, the same on every rank. One process raises what is not damage."""
    if dist.get_world_size() == 1:
        assert candidate is not None
        try:
            candidate.check(progress)
        except CorruptCheckpointError as e:
            return e
        return None
    error: Exception | None = None
    try:
        if offer.folder is not None and len(offer.manifest.files) > 1:
            _check_share(Catalog(offer.folder), offer.manifest)
        elif candidate is not None:
            candidate.check(progress)
    except RankError:
        raise  # the ranks cannot meet any more
    except Exception as e:  # noqa: BLE001 - goes to every rank
        error = e
    outcomes = dist.gather_outcomes(f"verifying checkpoint {offer.manifest.name!r}", error)
    return _verdict(outcomes, error, is_here=offer.folder is not None)


def _verdict(
    outcomes: Mapping[int, BaseException], own: Exception | None, *, is_here: bool
) -> CorruptCheckpointError | OSError | None:
    """What counts of what the ranks met with. A bucket that cannot be read stops the run.

    Raises:
        Exception: it says nothing of the checkpoint.
    """
    if not outcomes:
        return None
    verdicts = (CorruptCheckpointError, OSError) if is_here else (CorruptCheckpointError,)
    if others := {rank: error for rank, error in outcomes.items() if not isinstance(error, verdicts)}:
        raise first_of(others, own)
    damages = {rank: e for rank, e in outcomes.items() if isinstance(e, CorruptCheckpointError)}
    found = first_of(damages or outcomes, own)
    assert isinstance(found, CorruptCheckpointError | OSError)
    return found


def _check_share(catalog: Catalog, manifest: Manifest) -> None:
    """Verify this rank's share of the files of a directory, if all ranks see it, each on its node's disk."""
    mine: Manifest | None = None
    try:
        mine = catalog.manifest_of(manifest.name)
    except (CorruptCheckpointError, OSError) as e:
        log.warning("%s cannot be read here: %s", manifest.name, e)
    sees = mine is not None and mine.identity == manifest.identity
    knows = sees or any(other.node is not None for other in _of(manifest.run_name, catalog.manifests()))
    absent = {file.node for file in manifest.files if not (catalog.folder / file.path).exists()}
    told = dist.all_gather_object((sees, knows, mine.node if mine is not None and sees else None, absent))
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
    """What to raise for a checkpoint that is there for rank 0 and not for ``blind`` ranks; ``bare`` ones see none."""
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


def _follow(offer: Offer, error: CorruptCheckpointError | OSError | None) -> None:
    """On the disks of other nodes than the first: what :class:`_Search` does on that one."""
    if offer.folder is None or offer.manifest.node is None or dist.get_local_rank() != 0 or dist.get_global_rank() == 0:
        return
    catalog = Catalog(offer.folder)
    mine = catalog.manifest_of(offer.manifest.name)
    if mine is None or mine.node == offer.manifest.node:
        return
    if error is None:
        catalog.mend_links(mine)
    elif isinstance(error, CorruptCheckpointError):
        catalog.set_aside(mine)


def _check_sizes(remote: RemoteCatalog, manifest: Manifest) -> None:
    """See that all files of a directory in a bucket are there; their bytes are verified as they are read."""

    def check(record: FileRecord) -> None:
        try:
            size = remote.transfer.size(remote.name_of(record.path))
        except FileNotFoundError as e:
            raise CorruptCheckpointError(f"checkpoint {remote.uri(manifest.name)!r}: {record.path!r} is gone.") from e
        if size != record.size_bytes:
            what = f"{record.path!r} has {size} bytes and not {record.size_bytes}"
            raise CorruptCheckpointError(f"checkpoint {remote.uri(manifest.name)!r}: {what}")

    with ThreadPoolExecutor(_REQUESTS) as pool:
        for done in pool.map(check, manifest.files):
            assert done is None


def _of(run_name: str, manifests: Sequence[Manifest]) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest.run_name == run_name and manifest.kind in _KINDS]


def _everything_in(bucket: Bucket, run_name: str) -> list[_Candidate]:
    """All checkpoints of a bucket, which takes a request for each."""
    return [_Candidate(m, bucket.catalog, bucket.remote) for m in _of(run_name, bucket.remote.manifests())]
