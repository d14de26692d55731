"""Publishing: what a saver commits in its folder comes to a bucket, behind training."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final

from composerlite import dist, storage
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.record.lineage import in_line
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.record.naming import (
    DIST_VARIABLES,
    FIRST_RANK,
    NamedState,
    archive_template,
    check_template,
    directory_template,
    format_name_with_dist,
    format_name_with_dist_and_time,
    names_of_ranks,
    variables_in,
)
from composerlite.checkpoint.record.retention import RetentionPolicy, deletions, retention_policy
from composerlite.checkpoint.save.publishing_together import Shares
from composerlite.errors import ConfigError, ObjectStoreError
from composerlite.storage import (
    ObjectStore,
    RetryPolicy,
    SecondName,
    check_name,
    is_uri,
    open_store,
    parse_uri,
)

if TYPE_CHECKING:
    from composerlite.storage import Transfer, Uploader

__all__ = ["Publication", "Publisher", "RemoteSaving"]

log = logging.getLogger(__name__)
_MOST_WAITING = 2
"""So many checkpoints may wait to be uploaded. What is saved faster than the network takes it has to wait."""
_STALE = timedelta(days=1)
"""An upload that was begun so long ago and is not complete is that of a dead run."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """How publishing a checkpoint went.

    Attributes:
        name: of it, below ``where``. where: the URI that it was to come to.
        batch: optimizer steps done when it was saved. size_bytes: of its data.
        at: when that ended, in seconds since 1970.
        seconds: it took, from the first request to the link.
        lag_seconds: from the call of the save until then, by the clock.
        error: what made it fail; ``None``: it is there.
        deleted: names of those that were given up for it.
    """

    name: str
    where: str
    batch: int
    size_bytes: int
    at: float
    seconds: float
    lag_seconds: float
    error: Exception | None = None
    deleted: Sequence[str] = ()


@final
class Publisher:
    """Publishes the checkpoints of one saver, one after the other, in threads of an :class:`Uploader`.

    Args:
        uploader: does the work; others may use it, too.
        bucket: where they go.
        template: of the names in the bucket, below its root.
        link: full name of the bucket's link to the latest.
        links_of_ranks: where each rank has a file of its own, full names of the links to those, that of rank 0 first.
        timeout: seconds to wait for the uploads before, where too many wait.
        retention: what stays in the bucket besides the newest; ephemeral checkpoints never do.
        keeps_all: of others than ephemeral ones.
    """

    def __init__(
        self,
        uploader: Uploader,
        bucket: Bucket,
        *,
        template: str,
        link: str | None,
        timeout: float,
        retention: RetentionPolicy,
        keeps_all: bool,
        links_of_ranks: Sequence[str] = (),
    ) -> None:
        self.uploader = uploader
        self.bucket = bucket
        self.remote = Catalog(bucket)
        self.template = template
        self.link = link
        self._links_of_ranks = links_of_ranks
        self._timeout = timeout
        self._retention = retention
        self._deletes = not keeps_all
        self._lane = f"checkpoints of {bucket.uri()}"
        self._outcomes: deque[Publication] = deque()
        self._known: list[Manifest] | None = None

    def move_to(self, root: str) -> None:
        """Publish below ``root`` from now on."""
        self.bucket = self.bucket.at(root)
        self.remote = Catalog(self.bucket)

    def publish(
        self,
        manifest: Manifest,
        catalog: Catalog,
        run_name: str,
        *,
        overwrite: bool = False,
        afterwards: Callable[[], object] | None = None,
        shares: Shares | None = None,
    ) -> None:
        """Have a checkpoint published that is committed in ``catalog``. It may be deleted there from now on.

        Waits where too many do, and so keeps what is staged within bounds: not for the training thread.

        Args:
            manifest: its commit record.
            run_name: of the run.
            overwrite: replace another checkpoint of that name.
            afterwards: is called when it is published.
            shares: how ranks publish it together, where its files are on several disks.

        Raises:
            ObjectStoreError: those before it are not uploaded in time.
        """
        self.wait(at_most=_MOST_WAITING - 1)
        name = self.name_of(manifest, run_name)
        there = _in_bucket(manifest, name, self.template, run_name)
        held = _Held(catalog, manifest)
        is_first = dist.get_global_rank() == 0  # what fails on others that share in it fails there, too

        def send() -> None:
            if shares is None:
                links = dict(zip(self._links_of_ranks, [record.path for record in there.files], strict=False))
                self.remote.publish(there, held.paths, link=self.link, links=links, overwrite=overwrite)
                return
            here = _in_bucket(dataclasses.replace(manifest, files=manifest.here), name, self.template, run_name).files
            files = list(zip(here, held.paths, strict=True))
            shares.publish(self.remote, there, files, link=self.link, overwrite=overwrite)

        def attempt() -> Publication:
            began = time.time()
            ended, error, deleted = began, None, list[str]()
            try:
                send()
                ended = time.time()
                if afterwards is not None:
                    afterwards()
                if is_first:
                    deleted = [old.name for old in self._delete_old(there)]
            except Exception as e:  # noqa: BLE001 - who saves asks for it: see outcomes
                log.warning("checkpoint %s could not be published: %s", self.bucket.uri(name), e)
                ended, error = time.time(), e
            return Publication(
                name=name,
                where=self.bucket.uri(),
                batch=manifest.batch,
                size_bytes=manifest.size_bytes,
                at=ended,
                seconds=max(0.0, ended - began),  # the clock may have been set back
                lag_seconds=max(0.0, ended - datetime.fromisoformat(manifest.saved_at).timestamp()),
                error=error,
                deleted=deleted,
            )

        def upload(_: Transfer) -> None:
            try:
                outcome = attempt()
                if is_first:
                    self._outcomes.append(outcome)
            finally:
                held.remove()

        self.uploader.submit(self._lane, upload, what=self.bucket.uri(name), dropped=held.remove)

    def published(self, seconds: float, *, at_most: int = 0) -> bool:
        """Wait until at most so many checkpoints are not published, ``seconds`` at most; whether that is so."""
        return self.uploader.wait(seconds, lane=self._lane, at_most=at_most)

    def wait(self, *, at_most: int = 0) -> None:
        """Wait until at most so many checkpoints are not published.

        Raises:
            ObjectStoreError: that is not so within the timeout.
        """
        if not self.published(self._timeout, at_most=at_most):
            raise self.late()

    def late(self) -> ObjectStoreError:
        """What to raise when what waits is not published within the timeout."""
        return ObjectStoreError(
            f"{', '.join(self.uploader.pending)}: not uploaded within {self._timeout:.0f} s "
            "(upload_timeout_in_seconds). Save less often, or give it longer."
        )

    def outcomes(self) -> list[Publication]:
        """How publications went since the last time, in order."""
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def is_behind(self, manifest: Manifest, run_name: str) -> bool:
        """Whether the bucket's latest, or its link, is older than ``manifest``, or there is none."""
        latest = None if self.link is None else self.remote.latest(self.link)
        if latest is None or self.link is None or latest.order < manifest.order:
            return True
        return latest.name == self.name_of(manifest, run_name) and not self.remote.leads(self.link, latest.name)

    def name_of(self, manifest: Manifest, run_name: str) -> str:
        """What a checkpoint is called in the bucket, below its root."""
        return format_name_with_dist_and_time(self.template, run_name, _Moment(manifest), **FIRST_RANK)

    def _delete_old(self, newest: Manifest) -> Sequence[Manifest]:
        """Delete what is not to be kept now that there is ``newest``; what that was."""
        self._deletes |= newest.ephemeral
        if not self._deletes:
            return ()
        if self._known is None:  # from here on we know what comes and goes
            self._known = [m for m in self.remote.manifests() if m.run_name == newest.run_name]
        self._known = [m for m in self._known if m.name != newest.name] + [newest]
        mine = [
            m
            for m in self._known
            if m.template == self.template and in_line(newest.lineage, m) and m.moment <= newest.moment
        ]
        given_up = deletions(sorted(mine, key=lambda m: m.order), self._retention)
        for old in given_up:
            self.remote.delete(old)
            self._known.remove(old)
        return given_up


@final
class _Held:
    """The files of a checkpoint that are here, by names that stay until :meth:`remove`, whatever becomes of it."""

    def __init__(self, catalog: Catalog, manifest: Manifest) -> None:
        folder = (catalog.folder / manifest.name).parent
        self._names: list[SecondName] = []
        try:
            for record in manifest.here:
                self._names.append(SecondName(catalog.folder / record.path, folder))
        except BaseException:
            self.remove()
            raise

    @property
    def paths(self) -> list[Path]:
        """In the order of the manifest."""
        return [name.path for name in self._names]

    def remove(self) -> None:
        """The files are there by their own names only; twice is fine."""
        for name in self._names:
            name.remove()


def _in_bucket(manifest: Manifest, name: str, template: str, run_name: str) -> Manifest:
    """The record of the checkpoint as it is called there: all files are in one place."""
    paths = [name + record.path.removeprefix(manifest.name) for record in manifest.files]
    if manifest.kind == "deepspeed":
        paths = names_of_ranks(template, run_name, _Moment(manifest), len(manifest.files))
    files = [dataclasses.replace(r, path=path, node=None) for r, path in zip(manifest.files, paths, strict=True)]
    return dataclasses.replace(manifest, name=name, template=template, files=tuple(files), node=None)


class _Moment:
    """The timestamp of a checkpoint, for its name."""

    def __init__(self, manifest: Manifest) -> None:
        self._fields = dict(manifest.timestamp)

    def state_dict(self) -> dict[str, int | float]:
        return self._fields


class Destination(Protocol):
    """A logger, as far as it is asked for its object store."""

    @property
    def uploader(self) -> Uploader | None: ...

    @property
    def checkpoint_prefix(self) -> str: ...


class Destinations(Protocol):
    """The loggers of a run."""

    @property
    def destinations(self) -> Sequence[Destination]: ...


@final
class RemoteSaving:
    """Where a saver's checkpoints go besides its folder: the bucket of its URI, or those of the run's loggers.

    Args:
        folder: what the user gave, a path or a URI; ``local_folder`` is the folder on this machine.
        filename: template of the names in the folder.
        remote_file_name: template of the names in the bucket. ``None``: as in the folder, below its path.
        latest_filename: template of the folder's link to the latest.
        latest_remote_file_name: template of the bucket's.
        staging_folder: the folder on this machine for a URI; ``None``: the URI's path.
        timeout: seconds to wait for uploads.
        num_to_keep: in the bucket; -1 for all.

    Attributes:
        local_folder: where checkpoints are saved first; with format variables.
        publishers: one for each bucket, after :meth:`open`.

    Raises:
        ConfigError: a name or number that cannot be used, or the URI names no store.
    """

    def __init__(
        self,
        *,
        folder: str,
        filename: str,
        remote_file_name: str | Path | None,
        latest_filename: str | Path | None,
        latest_remote_file_name: str | Path | None,
        staging_folder: str | Path | None,
        timeout: float,
        num_to_keep: int,
    ) -> None:
        scheme, bucket, path = parse_uri(folder)
        if scheme in ("http", "https"):
            raise ConfigError(f"save_folder={folder!r}: checkpoints cannot be saved to an address, but to a bucket.")
        self._bucket = f"{scheme}://{bucket}" if scheme else None
        path = path.rstrip("/") if scheme else path
        if scheme:
            self.local_folder = path or "checkpoints"
            if staging_folder is not None:
                self.local_folder = f"{str(staging_folder).rstrip('/')}/{path}".rstrip("/")
        else:
            self.local_folder = path
            if staging_folder is not None:
                raise ConfigError(
                    f"save_staging_folder={str(staging_folder)!r}: nothing is staged for save_folder={folder!r}, a "
                    "local folder. Leave it out, or give save_folder a URI."
                )
        below = path.removeprefix("./").strip("/")
        self._filename = filename
        self._names = _Names.of(_checked(remote_file_name, f"{below}/{filename}", "save_remote_file_name"), filename)
        link = None if latest_filename is None else f"{below}/{latest_filename}"
        if link is not None or latest_remote_file_name is not None:
            link = _checked(latest_remote_file_name, str(link), "save_latest_remote_file_name")
        self._link = link
        self._links_ranks = False
        self._timeout = timeout
        self._retention, self._keeps_all = retention_policy(num_to_keep), num_to_keep == -1
        self._store: ObjectStore | None = None if self._bucket is None else open_store(self._bucket)
        self._uploader: Uploader | None = None
        self.publishers: list[Publisher] = []

    @property
    def is_uri(self) -> bool:
        """Whether the user gave a bucket, and the folder is where checkpoints are made for it."""
        return self._bucket is not None

    def name_directories(self, template: str) -> None:
        """Checkpoints are directories, called ``template`` in the folder: those in the bucket have names to match."""
        same = self._names.template == self._filename
        name = template if same else directory_template(self._names.template, argument="save_remote_file_name")
        self._names = dataclasses.replace(self._names, template=name)
        if self._link is not None:
            self._link = directory_template(self._link, argument="save_latest_remote_file_name")

    def name_archives(self, template: str) -> None:
        """Checkpoints are archives, one for each rank, called ``template`` in the folder."""
        same = self._names.template == self._filename
        name = template if same else archive_template(self._names.template, argument="save_remote_file_name")
        self._names = dataclasses.replace(self._names, template=name)
        self._links_ranks = True
        if self._link is not None:
            self._link = archive_template(self._link, argument="save_latest_remote_file_name")

    def open(self, state: NamedState, logger: Destinations) -> None:
        """Find the buckets and see that they can be written to.

        Raises:
            PermissionError: one cannot. FileNotFoundError: there is no such bucket.
            ObjectStoreError: it does not answer, or fails.
        """
        if self._store is not None:
            self._uploader = storage.Uploader(
                storage.Transfer(self._store), num_concurrent=2
            )  # checkpoints, and the sweep
            self.publishers = [self._publisher(self._uploader, "", state)]
            store, name = self._store, self.publishers[0].bucket.name_of("file")
            RetryPolicy().run(lambda: store.check_writable(name), f"check that {store.get_uri(name)} can be written")
            if root := self.publishers[0].bucket.root:  # the whole bucket is not ours to tidy
                self._uploader.submit("sweep", functools.partial(_sweep, root), what=f"what dead runs left in {root!r}")
            return
        self.publishers = [
            self._publisher(destination.uploader, destination.checkpoint_prefix, state)
            for destination in logger.destinations
            if destination.uploader is not None
        ]

    @property
    def roots(self) -> list[str]:
        """What all names in each bucket begin with."""
        return [publisher.bucket.root for publisher in self.publishers]

    def follow(self, state: NamedState, logger: Destinations, roots: Sequence[str]) -> None:
        """:meth:`open` on another rank than 0, for what its node has of checkpoints: to the same places, ``roots``.

        Raises:
            ConfigError: this rank has other loggers.
        """
        self.open(state, logger)
        if len(self.publishers) != len(roots):
            raise ConfigError(
                f"{len(self.publishers)} loggers upload checkpoints here and {len(roots)} on rank 0: give every rank "
                "the same loggers, for each node uploads what is on its disk."
            )
        for publisher, root in zip(self.publishers, roots, strict=True):
            publisher.move_to(root)

    def outcomes(self) -> list[Publication]:
        """How publications went since the last time."""
        return [outcome for publisher in self.publishers for outcome in publisher.outcomes()]

    def wait(self) -> None:
        """Wait until everything is published, well or not.

        Raises:
            ObjectStoreError: it is not within the timeout.
        """
        for publisher in self.publishers:
            publisher.wait()

    def wait_together(self) -> None:
        """:meth:`wait` on every rank until those have published that do.

        Raises:
            ObjectStoreError: on every rank.
            RankError: a rank failed or was lost meanwhile.
        """
        group = dist.get_group()
        group.wait_for_all(self._published, timedelta(seconds=self._timeout))
        with group.all_or_none("waiting for uploads"):
            for publisher in self.publishers:
                if not publisher.published(0):
                    raise publisher.late()

    def published_together(self, seconds: float) -> bool:
        """Whether everything is published on every rank, within so many seconds."""
        return dist.get_group().wait_for_all(self._published, timedelta(seconds=max(seconds, 0.001)))

    def _published(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        return all(publisher.published(until - time.monotonic()) for publisher in self.publishers)

    def close(self) -> None:
        """Wait for what is being published and let go of the store; twice is fine.

        Raises:
            Exception: what made an upload fail.
        """
        uploader, self._uploader = self._uploader, None
        try:
            if uploader is not None:
                uploader.close(self._timeout)
        finally:
            if self._store is not None:
                self._store.close()

    def _publisher(self, uploader: Uploader, prefix: str, state: NamedState) -> Publisher:
        root = prefix + format_name_with_dist(self._names.root, state.run_name, **FIRST_RANK)
        ranks = dist.get_world_size() if self._links_ranks else 1
        links = [
            check_name(prefix + format_name_with_dist(str(self._link), state.run_name, **{**FIRST_RANK, "rank": rank}))
            for rank in range(0 if self._link is None else ranks)
        ]
        return Publisher(
            uploader,
            Bucket(uploader.transfer, root),
            template=self._names.template,
            link=links[0] if links else None,
            links_of_ranks=links if self._links_ranks else (),
            timeout=self._timeout,
            retention=self._retention,
            keeps_all=self._keeps_all,
        )


def _sweep(root: str, transfer: Transfer) -> None:
    """Remove parts of uploads that nobody goes on with: they are not seen and cost money."""
    try:
        transfer.abort_stale(f"{root}/", _STALE)
    except (PermissionError, ObjectStoreError) as e:  # they take space and no more
        log.info("did not look for parts that dead runs left: %s", e)


@final
@dataclass(frozen=True, slots=True)
class _Names:
    """How checkpoints are called in a bucket.

    Attributes:
        root: what all names begin with; without variables of time.
        template: of each name below it.
    """

    root: str
    template: str

    @classmethod
    def of(cls, remote: str, local: str) -> _Names:
        """The names for ``remote``, cut as in the folder if it ends with ``local``, the template there.

        Otherwise the root is the folders at its beginning whose names do not change with time.
        """
        if remote == local or remote.endswith(f"/{local}"):
            return cls(remote.removesuffix(local).rstrip("/"), local)
        parts = remote.split("/")
        fixed = 0
        while fixed < len(parts) - 1 and set(variables_in(parts[fixed], remote)) <= set(DIST_VARIABLES):
            fixed += 1
        return cls("/".join(parts[:fixed]), "/".join(parts[fixed:]))


def _checked(name: str | Path | None, default: str, argument: str) -> str:
    """The template of a name in a bucket; a URI of the bucket's own means its path."""
    if name is None:
        return default.lstrip("/")
    text = str(name)
    return check_template(parse_uri(text)[2] if is_uri(text) else text, argument=argument)
