"""Publishing: checkpoints that a saver commits in its folder are uploaded to a bucket, in the background.

A :class:`Publisher` does it for one bucket; :class:`Publishing` for all of a saver, from rank 0, or from a rank of each
node that has a disk of its own. How it went is taken note of on the training thread, by all ranks at the same batch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, final

from composerlite import dist, storage
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import Catalog, CollectiveStep, alone
from composerlite.checkpoint.place.lease import Lease
from composerlite.checkpoint.record.manifest import FileRecord, Manifest, Position, bytes_text
from composerlite.checkpoint.record.naming import (
    DIST_VARIABLES,
    FIRST_RANK,
    NamedState,
    format_name_with_dist,
    format_name_with_dist_and_time,
    name_pattern,
    variables_in,
)
from composerlite.checkpoint.record.retention import Retention, RetentionPolicy, retention_policy
from composerlite.checkpoint.record.tail import index_of, seal_index
from composerlite.checkpoint.save.form import Form
from composerlite.checkpoint.save.run_folder import RunFolder, SaveOptions
from composerlite.errors import CheckpointError, ConfigError, ObjectStoreError
from composerlite.storage import (
    HardlinkPin,
    ObjectStore,
    check_name,
    seconds_left,
)
from composerlite.types import CheckpointNews

if TYPE_CHECKING:
    from composerlite.storage import Transfer, Uploader

__all__ = ["Destinations", "Publication", "PublishVotes", "Publisher", "Publishing", "PublishingNews"]

log = logging.getLogger(__name__)
Work = Callable[[], object]
T = TypeVar("T")
R = TypeVar("R")
_MOST_WAITING = 2
"""So many checkpoints may wait to be uploaded. What is saved faster than the network takes it has to wait."""
_LONGEST_UPLOAD = timedelta(hours=2)
"""A rank that sends for longer than that does not count as alive any more."""
_STALE = timedelta(days=1)
"""Age from which an incomplete upload is taken for that of a killed process."""


@final
class Publication(NamedTuple):
    """Outcome of publishing a checkpoint.

    Attributes:
        news: what loggers are told: name and place, when it ended, and the seconds from the first request to the link.
        lag_seconds: from the call of the save until then, by the clock.
        error: what made it fail; ``None``: it is there.
        deleted: names of those that were given up for it.
        deletion_error: why one of those could not be deleted.
    """

    news: CheckpointNews
    lag_seconds: float
    error: Exception | None
    deleted: Sequence[str]
    deletion_error: Exception | None


@final
class PublishingNews(NamedTuple):
    """Uploads that have ended since the last query.

    Attributes:
        gone: names of checkpoints that were deleted from the folder, since they are in a bucket.
        outcomes: how uploads went.
    """

    gone: list[str]
    outcomes: list[Publication]


@final
@dataclass(frozen=True)
class PublishVotes:
    """The votes over one publication of files on several disks, of which a rank of each node sends what its node has.

    That it begins, which rank 0 says, and that all have sent their files. Every rank calls :meth:`over`, and then
    publishes or calls :meth:`stay_out`.
    """

    begin: dist.Vote
    end: dist.Vote

    @classmethod
    def over(cls, what: str) -> PublishVotes:
        """Return the votes of all ranks over ``what``; in the main thread, in the same order on all."""
        group = dist.get_group()
        return cls(*(group.vote(f"publishing {what}", longest_work=_LONGEST_UPLOAD) for _ in range(2)))

    def stay_out(self) -> None:
        """Take no part, on a rank that has nothing to send and need not know how it ends."""
        self.begin.pass_by()
        self.end.pass_by()


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
        retention: of the bucket, besides the newest; ephemeral checkpoints are never kept.
        keeps_all: of others than ephemeral ones.
        check: is called before a checkpoint is begun and before it is committed, and raises if that must not be.

    Attributes:
        before_each: are called before a checkpoint is published, in the thread that does it.
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
        check: Callable[[], object],
        links_of_ranks: Sequence[str] = (),
    ) -> None:
        self.uploader = uploader
        self.bucket = bucket
        self.remote = Catalog(bucket)
        self.template = template
        self.link = link
        self.before_each: list[Callable[[], object]] = []
        self._links_of_ranks = links_of_ranks
        self._timeout = timeout
        self._retention = retention
        self._deletes = not keeps_all
        self._check = check
        self._lane = f"checkpoints of {bucket.uri()}"
        self._outcomes: deque[Publication] = deque()
        self._known: list[Manifest] | None = None

    def move_to(self, root: str) -> None:
        """Publish below ``root`` from now on."""
        self.bucket = self.bucket.at(root)
        self.remote = Catalog(self.bucket)

    def objects(self, state: NamedState) -> dict[str, str]:
        """URIs of its files and its link at the current time, by the argument that names them."""
        file = format_name_with_dist_and_time(self.template, state.run_name, state.timestamp, **FIRST_RANK)
        link = {} if self.link is None else {"latest_remote_file_name": self.bucket.transfer.store.get_uri(self.link)}
        return {"remote_file_name": self.bucket.uri(file), **link}

    def leases(self, run_name: str) -> dict[str, Lease]:
        """Return the leases of the checkpoint names and of the link, by the URI of each.

        A lease object lies in the folder at which the constant part of its name ends, so that publishers with
        different roots and the same names find the same object.
        """
        leases = dict[str, Lease]()
        for name in (self.bucket.name_of(self.template.replace("{run_name}", run_name)), self.link):
            if name is not None:
                folder = "/".join(itertools.takewhile(lambda part: "{" not in part, name.split("/")[:-1]))
                lease = self.bucket.at(folder).lock(name.removeprefix(folder).lstrip("/"))
                leases[self.bucket.transfer.store.get_uri(name)] = lease
        return leases

    def abort_uploads(self, run_name: str) -> None:
        """Abort unfinished uploads of the checkpoint names of ``run_name``.

        Call after this process took the lease over: the process that had the lease may be suspended, and may continue
        an upload when it wakes up. Uploads of other names belong to other runs.
        """
        prefix = f"{self.bucket.root}/" if self.bucket.root else ""
        own = re.compile(rf"{re.escape(prefix)}{name_pattern(self.template, run_name).pattern}(?:/.*)?")
        try:
            for upload in self.bucket.transfer.stale(prefix, timedelta()):
                if own.fullmatch(upload.name):
                    upload.abort()
                    log.info("aborted the upload of %s by the process that had the lease before", upload.name)
        except (PermissionError, ObjectStoreError) as e:
            log.warning("unfinished uploads below %s were not aborted: %s", self.bucket.uri(), e)

    def publish(
        self,
        manifest: Manifest,
        catalog: Catalog,
        run_name: str,
        *,
        overwrite: bool = False,
        afterwards: Callable[[], object] | None = None,
        votes: PublishVotes | None = None,
    ) -> None:
        """Start publishing a checkpoint that is committed in ``catalog``. It may be deleted there from now on.

        Waits where too many do, and so keeps what is staged within bounds: not for the training thread.

        Args:
            manifest: its commit record.
            run_name: of the run.
            overwrite: replace another checkpoint of that name.
            afterwards: is called when it is published.
            votes: how ranks publish it together, where its files are on several disks.

        Raises:
            ObjectStoreError: those before it are not uploaded in time.
        """
        self.wait(at_most=_MOST_WAITING - 1)
        name = self.name_of(manifest, run_name)
        held = _Held(catalog, manifest)
        there, files = _in_bucket(catalog, manifest, held.paths, name, self.template)
        is_first = dist.get_global_rank() == 0  # what fails on others that share in it fails there, too

        def attempt() -> Publication:
            began = time.time()
            ended, error = began, None
            deleted, deletion_error = list[str](), None
            try:
                for call in self.before_each:
                    call()
                self.remote.publish(
                    there,
                    files,
                    link=self.link,
                    links=dict(zip(self._links_of_ranks, [record.path for record in there.files], strict=False)),
                    overwrite=overwrite,
                    begins=self._checked(alone if votes is None else votes.begin.run),
                    ends=self._checked(alone if votes is None else votes.end.run),
                )
                ended = time.time()
                if afterwards is not None:
                    afterwards()
                if is_first:
                    size, seconds = bytes_text(manifest.size_bytes), max(0.0, ended - began)
                    log.info("uploaded checkpoint %s (%s in %.2f s)", self.bucket.uri(name), size, seconds)
            except Exception as e:  # noqa: BLE001 - who saves asks for it: see outcomes
                log.error("checkpoint %s could not be published: %s", self.bucket.uri(name), e)
                ended, error = time.time(), e
            if is_first and error is None:
                try:
                    deleted.extend(old.name for old in self._delete_old(there))
                except Exception as e:  # noqa: BLE001 - who saves asks for it: see outcomes
                    log.error("a checkpoint before %s could not be deleted: %s", self.bucket.uri(name), e)
                    deletion_error = e
            news = CheckpointNews(
                what="uploaded" if error is None else "upload failed",
                name=name,
                where=self.bucket.uri(),
                batch=manifest.batch,
                at=ended,
                size_bytes=manifest.size_bytes,
                seconds={"upload": max(0.0, ended - began)},  # the clock may have been set back
                error=None if error is None else f"{type(error).__name__}: {error}",
            )
            lag = ended - datetime.fromisoformat(manifest.saved_at).timestamp()
            return Publication(news, max(0.0, lag), error, deleted, deletion_error)

        def upload() -> None:
            try:
                outcome = attempt()
                if is_first:
                    self._outcomes.append(outcome)
            finally:
                held.remove()

        self.uploader.submit(self.bucket.uri(name), upload, lane=self._lane, dropped=held.remove)

    def _checked(self, step: CollectiveStep) -> CollectiveStep:
        """Return ``step`` in which the first process checks that it may write before it does."""

        def checked(write: Callable[[], T], commit: Callable[[list[T]], R], /) -> R:
            def commit_checked(written: list[T]) -> R:
                self._check()
                return commit(written)

            return step(write, commit_checked)

        return checked

    def published(self, seconds: float, *, at_most: int = 0) -> bool:
        """Wait, ``seconds`` at most, until at most ``at_most`` checkpoints are not published; return true if so."""
        return self.uploader.wait(seconds, lane=self._lane, at_most=at_most)

    def wait(self, *, at_most: int = 0) -> None:
        """Wait until at most ``at_most`` checkpoints are not published, or a grace period is over.

        Raises:
            ObjectStoreError: that is not so within the timeout.
        """
        if not self.published(self._timeout, at_most=at_most) and seconds_left():  # else closing tells what is missing
            raise self.late()

    def late(self) -> ObjectStoreError:
        """Return the error to raise if the pending uploads are not done within the timeout."""
        return ObjectStoreError(
            f"{', '.join(self.uploader.pending)}: not uploaded within {self._timeout:.0f} s "
            "(upload_timeout_in_seconds). Save less often, or give it longer."
        )

    def outcomes(self) -> list[Publication]:
        """Return the outcomes of publications since the last call, in order."""
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def is_behind(self, manifest: Manifest, run_name: str) -> bool:
        """Return true if the bucket's latest, or its link, is missing or older than ``manifest``."""
        latest = None if self.link is None else self.remote.latest(self.link, run_name)
        if latest is None or self.link is None or latest.order < manifest.order:
            return True
        return latest.name == self.name_of(manifest, run_name) and not self.remote.leads(self.link, latest.name)

    def name_of(self, manifest: Manifest, run_name: str) -> str:
        """Return the name of a checkpoint in the bucket, below its root."""
        return format_name_with_dist_and_time(self.template, run_name, _Moment(manifest), **FIRST_RANK)

    def _delete_old(self, newest: Manifest) -> Iterator[Manifest]:
        """Delete the checkpoints not to be kept once there is ``newest``; yields the record of each."""
        self._deletes |= newest.ephemeral
        if not self._deletes:
            return
        if self._known is None:  # from here on we know what comes and goes
            self._known = [m for m in self.remote.readable() if m.run_name == newest.run_name]
        self._known = [m for m in self._known if m.name != newest.name] + [newest]
        now = Position(newest.run_name, newest.moment, newest.lineage)
        for old in Retention(self._retention, now).given_up(self._known, self.template):
            self.remote.delete(old)
            self._known.remove(old)
            yield old


@final
class _Held:
    """Second names of a checkpoint's files, which keep their contents until :meth:`remove`."""

    def __init__(self, catalog: Catalog, manifest: Manifest) -> None:
        folder = (catalog.folder / manifest.name).parent
        self._names: list[HardlinkPin] = []
        try:
            for record in manifest.here:
                self._names.append(HardlinkPin(catalog.folder / record.path, folder))
        except BaseException:
            self.remove()
            raise

    @property
    def paths(self) -> list[Path]:
        """Paths of the second names, in the order of ``manifest.here``."""
        return [name.path for name in self._names]

    def remove(self) -> None:
        """Remove the second names of the files. May be called twice."""
        for name in self._names:
            name.remove()


def _in_bucket(
    catalog: Catalog, manifest: Manifest, held: Sequence[Path], name: str, template: str
) -> tuple[Manifest, dict[str, Path | bytes]]:
    """Return the record of a checkpoint as it lies in the bucket, and the files that this process sends, by path.

    In the bucket all files are in one place. The record of a directory is written anew if it says something else.
    """
    moved = dict(zip(manifest.files, _moved(manifest, name), strict=True))
    there = dataclasses.replace(manifest, name=name, template=template, files=tuple(moved.values()), node=None)
    files: dict[str, Path | bytes] = {moved[own].path: path for own, path in zip(manifest.here, held, strict=True)}
    if manifest.form == "sharded" and (manifest.node is not None or name != manifest.name):
        decider = manifest.files[0].path
        index = index_of(catalog.place.read(decider), catalog.place.uri(decider))
        files[there.files[0].path] = seal_index(dataclasses.replace(there, files=there.files[1:]), index)
    return there, files


def _moved(manifest: Manifest, name: str) -> list[FileRecord]:
    """Return the files of a checkpoint that lies at ``name``, all in one place."""
    paths = [file.path for file in manifest.files]
    if manifest.form != "archives":  # which have the same names in a bucket
        paths = [name + path.removeprefix(manifest.name) for path in paths]
    return [dataclasses.replace(file, path=path, node=None) for file, path in zip(manifest.files, paths, strict=True)]


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
class Publishing:
    """Publication of a saver's checkpoints to the bucket of its URI, or to those of the run's loggers.

    Args:
        options: of the saver.
        store: of its URI, which stays open; ``None``: loggers have some.
        where: the folder to publish from.
        form: of the checkpoints in it.

    Attributes:
        publishers: one for each bucket, on the ranks that publish, after :meth:`open`.
        ranks_with_news: counts the ranks on which uploads have ended.
    """

    def __init__(self, options: SaveOptions, store: ObjectStore | None, where: RunFolder, form: Form) -> None:
        self._options = options
        self._store = store
        self._where = where
        self._uploader: Uploader | None = None
        self.publishers: list[Publisher] = []
        self._roots: list[str] = []
        self._gone: deque[str] = deque()
        self._outcomes: list[Publication] = []
        # What the ranks tell each other rides on what they reduce in a batch.
        self.ranks_with_news = dist.PiggybackCounter(lambda: int(self._has_news()))
        self._root, template = _root_and_template(str(options.remote_file_name), options.filename)
        same = template == options.filename
        self._template = where.filename.filename if same else form.template(template, "save_remote_file_name")
        self._links_ranks = form.has_names_of_ranks
        if self._links_ranks and self._template != where.filename.filename:
            raise ConfigError(
                f"save_remote_file_name={str(options.remote_file_name)!r}: each rank of DeepSpeed has a file, and they "
                f"name each other, so they have the same names in a bucket: let it end with {options.filename!r}."
            )
        self._link: str | None = None
        if options.latest_remote_file_name is not None:
            self._link = form.template(str(options.latest_remote_file_name), "save_latest_remote_file_name")

    # ── finding buckets ──────────────────────────────────────────────────────────────────────────────────────────
    def open(self, state: NamedState, logger: Destinations) -> None:
        """Find the buckets and see that what is to be done there can be; on rank 0, before :meth:`begin`.

        Raises:
            PermissionError: one cannot be written to, or nothing can be deleted where older checkpoints are to go.
            FileNotFoundError: there is no such bucket.
            ObjectStoreError: it does not answer, or fails.
        """
        store = self._store
        if store is None:
            self.publishers = [
                self._publisher(destination.uploader, destination.checkpoint_prefix, state)
                for destination in logger.destinations
                if destination.uploader is not None
            ]
            self._options.check_buckets(publisher.bucket.uri() for publisher in self.publishers)
            self._check_deletable()
            return
        timeout = self._options.upload_timeout_in_seconds
        # Checkpoints, and the sweep.
        uploader = storage.Uploader(storage.Transfer(store), num_concurrent=2, timeout=timeout)
        self._uploader = uploader
        self.publishers = [self._publisher(uploader, "", state)]
        bucket = self.publishers[0].bucket
        self._options.check_buckets([bucket.uri()])
        bucket.check_writable()
        self._check_deletable()
        if root := bucket.root:  # the whole bucket is not ours to tidy
            what = f"removing unfinished uploads of killed processes in {root!r}"
            uploader.submit(what, functools.partial(_sweep, root, uploader.transfer), lane="sweep")

    def _check_deletable(self) -> None:
        keep = self._options.num_remote_checkpoints_to_keep
        if keep == -1 and not self._options.any_ephemeral:
            return
        argument = "save_ephemeral_interval" if keep == -1 else f"save_num_remote_checkpoints_to_keep={keep}"
        for publisher in self.publishers:
            try:
                publisher.bucket.check_deletable()
            except (PermissionError, ObjectStoreError) as e:
                e.add_note(
                    f"{argument}: older checkpoints are to be deleted from {publisher.bucket.uri()}. Get the right to "
                    "delete there, or leave the argument out, and all of them stay."
                )
                raise

    def begin(self, state: NamedState, logger: Destinations) -> None:
        """Prepare to publish. Collective. With a folder per node a rank of each publishes.

        Raises:
            ConfigError: this rank publishes, and has other loggers than rank 0.
        """
        group = dist.get_group()
        if self._are_several:
            self._roots = group.from_first("finding buckets", lambda: [one.bucket.root for one in self.publishers])
            with group.all_or_none("finding buckets"):
                if self._where.is_leader and not group.is_first:
                    self._follow(state, logger)

    @property
    def _are_several(self) -> bool:
        return self._where.disks is not None

    def _follow(self, state: NamedState, logger: Destinations) -> None:
        """Publish from another rank than 0, for what its node has of checkpoints, to the same places."""
        self.open(state, logger)
        if len(self.publishers) != len(self._roots):
            raise ConfigError(
                f"{len(self.publishers)} loggers upload checkpoints here and {len(self._roots)} on rank 0: give every "
                "rank the same loggers, for each node uploads what is on its disk."
            )
        for publisher, root in zip(self.publishers, self._roots, strict=True):
            publisher.move_to(root)

    def _publisher(self, uploader: Uploader, prefix: str, state: NamedState) -> Publisher:
        root = prefix + format_name_with_dist(self._root, state.run_name, **FIRST_RANK)
        ranks = dist.get_world_size() if self._links_ranks else 1
        links = [
            check_name(prefix + format_name_with_dist(str(self._link), state.run_name, **{**FIRST_RANK, "rank": rank}))
            for rank in range(0 if self._link is None else ranks)
        ]
        keep = self._options.num_remote_checkpoints_to_keep
        return Publisher(
            uploader,
            Bucket(uploader.transfer, root),
            template=self._template,
            link=links[0] if links else None,
            links_of_ranks=links if self._links_ranks else (),
            timeout=self._options.upload_timeout_in_seconds,
            retention=retention_policy(keep),
            keeps_all=keep == -1,
            check=self._where.confirm_leases,
        )

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────
    def _votes(self, name: str) -> PublishVotes | None:
        """Votes of all ranks on publishing a checkpoint; ``None`` where rank 0 has all files."""
        return PublishVotes.over(f"checkpoint {name!r}") if self._are_several else None

    def behind(self, manifests: Sequence[Manifest], run_name: str) -> list[tuple[int, str]]:
        """Return the checkpoints of a run to publish again: number of the bucket and name, oldest first."""
        behind: list[tuple[int, str]] = []
        for number, publisher in enumerate(self.publishers):
            if self._options.keeps_none:  # what was fetched, or was not uploaded when the run died: none of it stays
                behind += [(number, manifest.name) for manifest in manifests]
            elif manifests and publisher.is_behind(manifests[-1], run_name):
                behind.append((number, manifests[-1].name))  # a kill came before the end of its upload
        return behind

    def again(
        self, behind: Sequence[tuple[int, str]], run_name: str, may_overwrite: Callable[[str], bool]
    ) -> list[Work]:
        """Functions that publish each of ``behind`` again. Collective: each rank calls all of them or none."""
        return [self._part(number, name, run_name, overwrite=may_overwrite(name)) for number, name in behind]

    def of_next(self, name: str, run_name: str, *, overwrite: bool) -> Callable[[Manifest], object]:
        """Function that hands the checkpoint ``name``, once it is committed, to all uploaders, in the background."""
        parts = [self._part(number, name, run_name, overwrite=overwrite) for number in range(len(self._roots))]

        def publish(manifest: Manifest) -> None:
            for publisher in () if self._are_several else self.publishers:
                self._submit(publisher, manifest, run_name, None, overwrite=overwrite)
            for part in parts:
                part()

        return publish

    def names_in_buckets(self, name: str, state: NamedState) -> dict[str, str]:
        """Return the names that the next checkpoint gets in buckets and not in the folder, each with its template."""
        there = format_name_with_dist_and_time(self._template, state.run_name, state.timestamp, **FIRST_RANK)
        return {} if there == name else {there: self._template}

    def _part(self, number: int, name: str, run_name: str, *, overwrite: bool) -> Work:
        """Function that hands a checkpoint of the folder to one uploader; with a folder per node, on a rank of each."""
        votes = self._votes(name)

        def publish() -> None:
            if self._where.is_leader:
                manifest = self._where.own_catalog.manifest_of(name)
                if manifest is None:
                    folder = str(self._where.root)
                    raise CheckpointError(f"checkpoint {name!r} is gone from {folder!r} while it was to be published.")
                self._submit(self.publishers[number], manifest, run_name, votes, overwrite=overwrite)
            elif votes is not None:
                votes.stay_out()

        return publish

    def _submit(
        self, publisher: Publisher, manifest: Manifest, run_name: str, votes: PublishVotes | None, *, overwrite: bool
    ) -> None:
        catalog = self._where.own_catalog

        def delete_local() -> None:
            catalog.delete(manifest)
            self._gone.append(manifest.name)

        publisher.publish(
            manifest,
            catalog,
            run_name,
            overwrite=overwrite,
            afterwards=delete_local if self._options.keeps_none else None,
            votes=votes,
        )

    # ── how it went ──────────────────────────────────────────────────────────────────────────────────────────────
    def take_news(self) -> PublishingNews:
        """Return the news of this rank since the last call: deleted checkpoints, outcomes of uploads."""
        self._has_news()
        outcomes, self._outcomes = self._outcomes, []
        return PublishingNews([self._gone.popleft() for _ in range(len(self._gone))], outcomes)

    def take_news_of_all(self) -> PublishingNews:
        """Return the news of all ranks since the last call. Collective."""
        every = dist.get_group().gather(self.take_news())
        return PublishingNews([name for gone, _ in every for name in gone], [one for _, ones in every for one in ones])

    @property
    def has_news(self) -> bool:
        """True if uploads had ended on any rank at the last reduction; the same on every rank."""
        return bool(self.ranks_with_news.total)

    def _has_news(self) -> bool:
        """Check whether uploads have ended on this rank since :meth:`take_news`."""
        self._outcomes += [outcome for publisher in self.publishers for outcome in publisher.outcomes()]
        return bool(self._gone or self._outcomes)

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────
    def wait(self) -> None:
        """Wait until everything of this rank is published, well or not.

        Raises:
            ObjectStoreError: it is not within the timeout.
        """
        for publisher in self.publishers:
            publisher.wait()

    def wait_together(self) -> None:
        """Wait on every rank until those have published that do.

        Raises:
            ObjectStoreError: on every rank.
            RankError: a rank failed or was lost meanwhile.
        """
        group = dist.get_group()
        group.wait_for_all(self._published, timedelta(seconds=self._options.upload_timeout_in_seconds))
        with group.all_or_none("waiting for uploads"):
            for publisher in self.publishers:
                if not publisher.published(0):
                    raise publisher.late()

    def published(self, seconds: float) -> bool:
        """Wait on every rank until all is published, ``seconds`` at most; whether it is."""
        return dist.get_group().wait_for_all(self._published, timedelta(seconds=max(seconds, 0.001)))

    def _published(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        return all(publisher.published(until - time.monotonic()) for publisher in self.publishers)

    def close(self) -> None:
        """Wait for what is being published. May be called twice.

        Raises:
            Exception: what made an upload fail.
        """
        uploader, self._uploader = self._uploader, None
        if uploader is not None:
            uploader.close()


def _sweep(root: str, transfer: Transfer) -> None:
    """Remove parts of abandoned uploads: they are not listed and cost money."""
    try:
        transfer.abort_stale(f"{root}/", _STALE)
    except (PermissionError, ObjectStoreError) as e:  # they take space and no more
        log.info("could not look for unfinished uploads of killed processes: %s", e)


def _root_and_template(remote: str, local: str) -> tuple[str, str]:
    """Cut the template ``remote`` of names in a bucket: what all begin with, without variables of time, and the rest.

    It is cut as in the folder if it ends with ``local``, the template there. Otherwise the root is the folders at its
    beginning whose names do not change with time.
    """
    if remote == local or remote.endswith(f"/{local}"):
        return remote.removesuffix(local).rstrip("/"), local
    parts = remote.split("/")
    fixed = 0
    while fixed < len(parts) - 1 and set(variables_in(parts[fixed], remote)) <= set(DIST_VARIABLES):
        fixed += 1
    return "/".join(parts[:fixed]), "/".join(parts[fixed:])
