"""Which checkpoint a run goes on from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from composerlite.checkpoint.catalog import Catalog
from composerlite.checkpoint.manifest import Manifest
from composerlite.checkpoint.remote import RemoteCatalog
from composerlite.checkpoint.unlisted import check_unlisted, unlisted
from composerlite.errors import CorruptCheckpointError

__all__ = ["Bucket", "newest_good"]

log = logging.getLogger(__name__)


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

    def check(self, progress: Callable[[int, int], object] | None) -> None:
        """See that it is good, and bring it to the folder if it is not there."""
        if not self.listed:
            check_unlisted(self.catalog, self.manifest)
            return
        if self.remote is None:
            self.catalog.verify(self.manifest)
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


def newest_good(
    catalogs: Sequence[Catalog],
    run_name: str,
    *,
    templates: Sequence[str] = (),
    buckets: Sequence[Bucket] = (),
    progress: Callable[[int, int], object] | None = None,
) -> Path | None:
    """The newest checkpoint of ``run_name`` whose bytes are those that were saved; ``None`` if there is none.

    What is newest in a bucket is fetched to its folder first. A damaged checkpoint is passed over, which is logged with
    the reason, and set aside. Weights-only checkpoints cannot be resumed from. One that was saved without
    some of its keys is taken only if there is no whole one: what it lacks would start afresh in the middle of the run.

    A file without a manifest, of another program or one whose manifest was lost, is taken if it can be read and agrees
    with its own checksums; the log says so.

    Args:
        catalogs: the folders.
        templates: how checkpoints are named in each; where it is not given, only what has a manifest counts.
        buckets: where else checkpoints are. Three requests find the latest of one; only if that is not good is
            everything in it looked at.
        progress: is told how many bytes of how many were fetched.

    Raises:
        IncompatibleCheckpointError: there is a checkpoint of a newer version, which may be the newest.
        OSError: a folder cannot be read for any other reason than that it does not exist.
        ObjectStoreError: a bucket does not answer. PermissionError: it does not let us read. Neither means "nothing".
    """
    for catalog in catalogs:
        catalog.set_aside_unreadable()
    local = [_Candidate(manifest, catalog) for catalog in catalogs for manifest in _of(run_name, catalog.manifests())]
    for catalog, template in zip(catalogs, templates, strict=False):
        local += [_Candidate(manifest, catalog, listed=False) for manifest in unlisted(catalog, template, run_name)]
    candidates = list(local)
    unseen: dict[str, Bucket] = {}
    for bucket in buckets:
        manifest = None if bucket.link is None else bucket.remote.latest(bucket.link)
        if manifest is not None and (mine := _of(run_name, [manifest])):
            candidates.append(_Candidate(mine[0], bucket.catalog, bucket.remote))
            unseen[bucket.remote.uri()] = bucket
        else:
            candidates += _everything_in(bucket, run_name)
    found = _first_good(candidates, unseen, run_name, progress)
    if found is None:
        for catalog in catalogs:
            catalog.mend_links(None)
        return None
    found.catalog.mend_links(found.manifest.name)
    return found.catalog.folder / found.manifest.name


def _first_good(
    candidates: list[_Candidate],
    unseen: dict[str, Bucket],
    run_name: str,
    progress: Callable[[int, int], object] | None,
) -> _Candidate | None:
    """The newest that holds. Of the buckets ``unseen`` only the latest is a candidate, until that does not hold."""
    left = list(candidates)
    while left:
        candidate = max(left, key=lambda candidate: candidate.rank)
        left.remove(candidate)
        try:
            candidate.check(progress)
        except CorruptCheckpointError as e:
            log.warning("passed over: %s", e)
            candidate.home.set_aside(candidate.manifest)  # the run will come to write one of that name again
            bucket = None if candidate.remote is None else unseen.pop(candidate.remote.uri(), None)
            if bucket is not None:
                left += _everything_in(bucket, run_name)
            continue
        newer = [c for c in candidates if not c.whole and c.manifest.order > candidate.manifest.order]
        if not candidate.whole:
            log.warning(
                "%s is all there is to resume from; it was saved without %s",
                candidate.source,
                candidate.manifest.left_out,
            )
        elif newer:
            log.info("%s is not the newest: newer ones were saved without some of their keys", candidate.source)
        return candidate
    return None


def _of(run_name: str, manifests: Sequence[Manifest]) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest.run_name == run_name and manifest.kind == "monolithic"]


def _everything_in(bucket: Bucket, run_name: str) -> list[_Candidate]:
    """All checkpoints of a bucket, which takes a request for each."""
    return [_Candidate(m, bucket.catalog, bucket.remote) for m in _of(run_name, bucket.remote.manifests())]
