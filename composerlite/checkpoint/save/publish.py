"""Publishing: the checkpoints that a saver commits in its folder are uploaded to buckets, in the background.

A :class:`Publisher` uploads to one bucket, one checkpoint after the other. :class:`Publishing` has the publishers of a
saver: on rank 0, or on a rank of each node where nodes have disks of their own. The training thread takes note of the
outcomes, on all ranks at the same batch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple, final

from composerlite import dist
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import commit_sent, delete_checkpoint, send_files
from composerlite.checkpoint.place.lease import HeartbeatLease
from composerlite.checkpoint.record.manifest import Manifest, Position
from composerlite.checkpoint.record.naming import (
    FIRST_RANK,
    NamedState,
    format_name_with_dist,
    name_pattern,
    root_and_template,
)
from composerlite.checkpoint.record.retention import Retention, retention_policy
from composerlite.checkpoint.record.tail import index_of, seal_index
from composerlite.checkpoint.save.form import Form, first_name
from composerlite.checkpoint.save.options import SaveOptions
from composerlite.checkpoint.save.run_folder import RunFolder
from composerlite.errors import CheckpointError, ConfigError, ObjectStoreError, bytes_text
from composerlite.storage import ObjectStore, Transfer, Uploader, check_name, pinned_file, seconds_left
from composerlite.types import CheckpointNews

__all__ = ["Publication", "Publisher", "Publishing"]

log = logging.getLogger(__name__)
_MOST_WAITING = 2
"""So many checkpoints may wait to be uploaded. A save that comes too early for the network waits."""
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
        error: why the checkpoint is not published; ``None``: it is.
        gone: name of the checkpoint in the folder, if it was deleted there since it is published.
        deleted: names of the older checkpoints that were deleted from the bucket.
        deletion_error: why one of those could not be deleted.
    """

    news: CheckpointNews
    lag_seconds: float
    error: Exception | None
    gone: str | None
    deleted: Sequence[str]
    deletion_error: Exception | None


@final
@dataclass(eq=False, kw_only=True)
class Publisher:
    """Publishes the checkpoints of one saver to a bucket, in a thread of ``uploader``, in the order of :meth:`submit`.

    Attributes:
        uploader: has the threads, and may have other work.
        bucket: where checkpoints go.
        template: of the names in the bucket, below its root.
        links: full names of the links to the latest; of several where each rank has a file, that of rank 0 first.
        timeout: seconds to wait for the uploads before, where too many wait.
        keep: number of checkpoints to keep in the bucket; -1: all but ephemeral ones.
        check: is called before the first request and before the commit; raises if this process must not write.
        before_each: are called before a checkpoint is published, in the thread that does it.
        outcomes: of the checkpoints so far, until someone takes them; on rank 0.
    """

    uploader: Uploader
    bucket: Bucket
    template: str
    links: Sequence[str]
    timeout: float
    keep: int
    check: Callable[[], object]
    before_each: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    outcomes: deque[Publication] = field(default_factory=deque[Publication])
    _known: list[Manifest] | None = None

    @property
    def remote(self) -> Catalog:
        """The checkpoints in the bucket."""
        return Catalog(self.bucket)

    @property
    def link(self) -> str | None:
        """Full name of the link to the latest; ``None``: there is none."""
        return self.links[0] if self.links else None

    # ── names, leases and unfinished uploads ─────────────────────────────────────────────────────────────────────
    def objects(self, state: NamedState) -> dict[str, str]:
        """URIs of its files and its link at the current time, by the argument that names them."""
        link = {} if self.link is None else {"latest_remote_file_name": self.bucket.transfer.store.get_uri(self.link)}
        return {"remote_file_name": self.bucket.uri(first_name(self.template, state)), **link}

    def leases(self, run_name: str) -> dict[str, HeartbeatLease]:
        """Return the leases of the checkpoint names and of the link, by the URI of each.

        A lease object lies in the folder at which the constant part of its name ends, so that publishers with
        different roots and the same names find the same object.
        """
        leases = dict[str, HeartbeatLease]()
        for name in (self.bucket.name_of(self.template.replace("{run_name}", run_name)), *self.links[:1]):
            folder = name.partition("{")[0].rpartition("/")[0]
            lease = self.bucket.inside(f"/{folder}").lock(name.removeprefix(folder).lstrip("/"))
            leases[self.bucket.transfer.store.get_uri(name)] = lease
        return leases

    def remove_uploads(self, older_than: timedelta, run_name: str | None = None) -> None:
        """Remove the parts of unfinished uploads below the root: they are not listed and cost money.

        Args:
            older_than: remove those that were started so long ago.
            run_name: remove those of the checkpoint names of this run alone. A process that takes the lease over does
                so: the process that had the lease may be suspended, and continue an upload when it wakes up.
        """
        prefix = f"{self.bucket.root}/" if self.bucket.root else ""
        names = ".*" if run_name is None else rf"{name_pattern(self.template, run_name).pattern}(?:/.*)?"
        try:
            for upload in self.bucket.transfer.stale(prefix, older_than):
                if re.fullmatch(re.escape(prefix) + names, upload.name):
                    upload.abort()
                    log.info("removed the parts of the upload of %s by another process", upload.name)
        except (PermissionError, ObjectStoreError) as e:
            level = logging.INFO if run_name is None else logging.WARNING  # parts of dead processes take space, no more
            log.log(level, "unfinished uploads below %s were not removed: %s", self.bucket.uri(), e)

    def is_behind(self, manifest: Manifest) -> bool:
        """Return true if the link to the latest is missing, or leads to an older checkpoint than ``manifest``."""
        latest = None if self.link is None else self.remote.latest(self.link, manifest.run_name, announced=False)
        return latest is None or latest.order < manifest.order

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────
    def submit(
        self, manifest: Manifest, catalog: Catalog, vote: dist.Vote, *, overwrite: bool = False, moves: bool = False
    ) -> None:
        """Publish a checkpoint of ``catalog`` in the background. It may be deleted there from now on.

        Waits where too many do, and so bounds what is staged: not for the training thread.

        Args:
            manifest: its record.
            catalog: of the folder.
            vote: of the ranks that publish it together.
            overwrite: replace another checkpoint of that name.
            moves: delete it from the folder when it is published.

        Raises:
            ObjectStoreError: those before it are not uploaded in time.
        """
        self.wait(self.timeout, at_most=_MOST_WAITING - 1)
        there = _in_bucket(manifest, first_name(self.template, manifest), self.template)
        paths = dict(zip(manifest.files, (file.path for file in there.files), strict=True))
        files: dict[str, Path | bytes] = {}
        with contextlib.ExitStack() as stack:
            for file in manifest.here:
                pin = pinned_file(catalog.folder / file.path, (catalog.folder / manifest.name).parent)
                files[paths[file]] = stack.enter_context(pin)
            if manifest.form == "sharded" and (manifest.node is not None or there.name != manifest.name):
                decider = manifest.files[0].path  # which says where the files are
                index = index_of(catalog.place.read(decider), catalog.place.uri(decider))
                files[there.files[0].path] = seal_index(replace(there, files=there.files[1:]), index)
            held = stack.pop_all()  # the files stay as they are until it is closed
        publish = functools.partial(self._publish, manifest, there, files, held, vote, overwrite=overwrite)
        work = functools.partial(publish, folder=catalog if moves else None)
        self.uploader.submit(self.bucket.uri(there.name), work, lane=self.bucket.uri(), dropped=held.close)

    def _publish(
        self,
        manifest: Manifest,
        there: Manifest,
        files: Mapping[str, Path | bytes],
        held: contextlib.ExitStack,
        vote: dist.Vote,
        *,
        overwrite: bool,
        folder: Catalog | None,
    ) -> None:
        """Publish a checkpoint, then delete older ones from the bucket. Rank 0 keeps the outcome, which all have.

        Args:
            manifest: its record in the folder.
            there: its record in the bucket.
            files: what this process sends, by the paths in the bucket.
            held: closed when they are sent.
            vote: of the ranks that send files of it.
            overwrite: replace another checkpoint of that name.
            folder: delete it from there when it is published.
        """
        uri, began = self.bucket.uri(there.name), time.time()
        error = deletion_error = None
        deleted: list[str] = []
        try:
            with held:
                for call in self.before_each:
                    call()
                self.check()
                send = functools.partial(send_files, self.bucket, there, files, overwrite=overwrite)
                commit = functools.partial(self._commit, there, files[there.files[0].path], overwrite=overwrite)
                vote.run(send, commit)
            if folder is not None:
                delete_checkpoint(folder.place, manifest)
        except Exception as e:  # noqa: BLE001 - in the outcome, which the training thread raises
            log.error("checkpoint %s could not be published: %s", uri, e)
            error = e
        ended = time.time()
        seconds = max(0.0, ended - began)  # the clock may have been set back
        if dist.get_global_rank() != 0:
            return
        if error is None:
            log.info("uploaded checkpoint %s (%s in %.2f s)", uri, bytes_text(there.size_bytes), seconds)
            try:
                deleted.extend(self._delete_old(there))
            except Exception as e:  # noqa: BLE001 - in the outcome, which the training thread raises
                log.error("a checkpoint before %s could not be deleted: %s", uri, e)
                deletion_error = e
        news = CheckpointNews(
            what="uploaded" if error is None else "upload failed",
            name=there.name,
            where=self.bucket.uri(),
            batch=there.batch,
            at=ended,
            size_bytes=there.size_bytes,
            seconds={"upload": seconds},
            error=None if error is None else f"{type(error).__name__}: {error}",
        )
        lag = max(0.0, ended - datetime.fromisoformat(there.saved_at).timestamp())
        gone = manifest.name if folder is not None and error is None else None
        self.outcomes.append(Publication(news, lag, error, gone, deleted, deletion_error))

    def _commit(
        self, there: Manifest, decider: Path | bytes, replaced: Sequence[Manifest | None], *, overwrite: bool
    ) -> None:
        """Commit on rank 0, when all ranks have sent their files: ``replaced`` is what each has found."""
        self.check()
        targets = [file.path for file in there.files] if there.form == "archives" else [there.name]
        links = dict(zip(self.links, targets, strict=False))
        commit_sent(self.bucket, there, decider, replaced[0], links, overwrite=overwrite)

    def _delete_old(self, newest: Manifest) -> Iterator[str]:
        """Delete the checkpoints that are not kept beside ``newest``; yields the name of each."""
        if self.keep == -1 and self._known is None and not newest.ephemeral:
            return
        if self._known is None:  # from here on we know what comes and goes
            self._known = [m for m in self.remote.readable() if m.run_name == newest.run_name]
        self._known = [m for m in self._known if m.name != newest.name] + [newest]
        now = Position(newest.run_name, newest.moment, newest.run.lineage)
        for old in Retention(retention_policy(self.keep), now).given_up(self._known, self.template):
            delete_checkpoint(self.bucket, old)
            self._known.remove(old)
            yield old.name

    def wait(self, seconds: float, *, at_most: int = 0) -> None:
        """Wait until at most ``at_most`` checkpoints are not published, or a grace period is over.

        Raises:
            ObjectStoreError: that is not so after ``seconds``.
        """
        if not self.uploader.wait(seconds, lane=self.bucket.uri(), at_most=at_most) and seconds_left():
            raise ObjectStoreError(
                f"{', '.join(self.uploader.pending)}: not uploaded within {self.timeout:.0f} s "
                "(upload_timeout_in_seconds). Save less often, or give it longer."
            )


def _in_bucket(manifest: Manifest, name: str, template: str) -> Manifest:
    """Return the record of a checkpoint as it lies in the bucket, where all files are in one place."""
    old, new = ("", "") if manifest.form == "archives" else (manifest.name, name)  # archives have the same names there
    files = [replace(file, path=new + file.path.removeprefix(old), node=None) for file in manifest.files]
    return replace(manifest, name=name, template=template, files=tuple(files), node=None)


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
        ranks_with_news: counts the ranks with outcomes, of which there is one.
    """

    def __init__(self, options: SaveOptions, store: ObjectStore | None, where: RunFolder, form: Form) -> None:
        self._options = options
        self._store = store
        self._where = where
        self._uploader: Uploader | None = None
        self.publishers: list[Publisher] = []
        self._buckets: list[str] = []  # on every rank
        # What the ranks tell each other rides on what they reduce in a batch.
        self.ranks_with_news = dist.PiggybackCounter(lambda: int(any(one.outcomes for one in self.publishers)))
        self._root, template = root_and_template(options.names.remote_filename, options.names.filename)
        same = template == options.names.filename
        self._template = where.filename.filename if same else form.template(template, "save_remote_file_name")
        self._links_ranks = form.has_names_of_ranks
        if self._links_ranks and self._template != where.filename.filename:
            raise ConfigError(
                f"save_remote_file_name={options.names.remote_filename!r}: each rank of DeepSpeed has a file, and they "
                f"name each other, so they have the same names in a bucket: let it end with {options.names.filename!r}."
            )
        latest = options.names.remote_latest
        self._link = None if latest is None else form.template(latest, "save_latest_remote_file_name")

    # ── finding buckets ──────────────────────────────────────────────────────────────────────────────────────────
    def open(self, state: NamedState, uploaders: Sequence[tuple[Uploader, str]]) -> None:
        """Find the buckets and see that what is to be done there can be. Collective.

        Args:
            state: of the run.
            uploaders: of the run's loggers, each with the prefix of the names that it uploads to.

        Raises:
            ConfigError: this rank publishes what is on the disk of its node, and has other loggers than rank 0.
            PermissionError: one cannot be written to, or nothing can be deleted where older checkpoints are to go.
            FileNotFoundError: there is no such bucket.
            ObjectStoreError: it does not answer, or fails.
        """
        group = dist.get_group()
        self._buckets = group.from_first("finding buckets", functools.partial(self._open, state, uploaders))
        with group.all_or_none("finding buckets"):
            others = self._where.is_leader and not group.is_first
            if others and (own := self._open(state, uploaders)) != self._buckets:
                raise ConfigError(
                    f"loggers upload checkpoints to {own} here and to {self._buckets} on rank 0: give every rank the "
                    "same loggers, for each node uploads what is on its disk."
                )

    def _open(self, state: NamedState, uploaders: Sequence[tuple[Uploader, str]]) -> list[str]:
        """Find the buckets for this rank to publish to; returns their URIs."""
        if self._store is not None:
            timeout = self._options.upload_timeout
            # One thread for checkpoints, one for the rest.
            self._uploader = Uploader(Transfer(self._store), num_concurrent=2, timeout=timeout)
            uploaders = [(self._uploader, "")]
        self.publishers = [self._publisher(uploader, prefix, state) for uploader, prefix in uploaders]
        self._options.names.check_buckets(publisher.bucket.uri() for publisher in self.publishers)
        keep = self._options.keep.in_bucket
        argument = "save_ephemeral_interval" if keep == -1 else f"save_num_remote_checkpoints_to_keep={keep}"
        for publisher in self.publishers:
            bucket, uploader = publisher.bucket, publisher.uploader
            if uploader is self._uploader:  # loggers check theirs themselves
                bucket.transfer.check_writable(bucket.name_of("file"))
            if uploader is self._uploader and bucket.root:  # the whole bucket is not ours to tidy
                what = f"removing unfinished uploads of killed processes in {bucket.root!r}"
                uploader.submit(what, functools.partial(publisher.remove_uploads, _STALE))
            try:
                if keep != -1 or self._options.keep.any_ephemeral:
                    bucket.put(".deletable", b"")
                    bucket.delete([".deletable"])
            except (PermissionError, ObjectStoreError) as e:
                e.add_note(
                    f"{argument}: older checkpoints are to be deleted from {bucket.uri()}. Get the right to delete "
                    "there, or leave the argument out, and all of them stay."
                )
                raise
        return [publisher.bucket.uri() for publisher in self.publishers]

    def _publisher(self, uploader: Uploader, prefix: str, state: NamedState) -> Publisher:
        root = prefix + format_name_with_dist(self._root, state.run_name, **FIRST_RANK)
        links = [
            check_name(prefix + format_name_with_dist(self._link, state.run_name, **{**FIRST_RANK, "rank": rank}))
            for rank in range(dist.get_world_size() if self._links_ranks else 1)
            if self._link is not None
        ]
        return Publisher(
            uploader=uploader,
            bucket=Bucket(uploader.transfer, root),
            template=self._template,
            links=links,
            timeout=self._options.upload_timeout,
            keep=self._options.keep.in_bucket,
            check=self._where.confirm_leases,
        )

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────
    def behind(self, manifests: Sequence[Manifest]) -> list[tuple[str, int]]:
        """Return the checkpoints of a run to publish again, oldest first: name, and number of the bucket.

        A kill may have come before the end of the newest upload. Where none stays in the folder, all go that are there.
        """
        every = self._options.keep.none_here
        newest = manifests if every else manifests[-1:]
        buckets = list(enumerate(self.publishers))
        return [(one.name, number) for number, its in buckets for one in newest if every or its.is_behind(one)]

    def of(self, name: str, buckets: Sequence[int] | None = None, *, overwrite: bool) -> Callable[[], object]:
        """Return a function that publishes the checkpoint ``name`` of the folder in the background.

        All ranks get the function, in the training thread. Once the checkpoint is committed the ranks call it that
        publish, or all.

        Args:
            name: of the checkpoint.
            buckets: their numbers; ``None``: all.
            overwrite: replace another checkpoint of that name in the buckets.
        """
        group = dist.SingleProcess() if self._where.disks is None else dist.get_group()
        numbers = range(len(self._buckets)) if buckets is None else buckets
        what = f"publishing checkpoint {name!r}"
        votes = {number: group.vote(what, longest_work=_LONGEST_UPLOAD) for number in numbers}
        return functools.partial(self._publish, name, votes, overwrite=overwrite)

    def _publish(self, name: str, votes: Mapping[int, dist.Vote], *, overwrite: bool) -> None:
        if not self._where.is_leader:  # it has nothing to send and need not know how it ends
            for vote in votes.values():
                vote.pass_by()
            return
        catalog = self._where.own_catalog
        manifest = catalog.manifest_of(name)
        if manifest is None:
            raise CheckpointError(f"checkpoint {name!r} is gone from {catalog.place.uri()!r} before it was published.")
        moves = self._options.keep.none_here
        for number, vote in votes.items():
            self.publishers[number].submit(manifest, catalog, vote, overwrite=overwrite, moves=moves)

    def names_in_buckets(self, name: str, state: NamedState) -> dict[str, str]:
        """Return the names that the next checkpoint gets in buckets and not in the folder, each with its template."""
        there = first_name(self._template, state)
        return {} if there == name else {there: self._template}

    # ── outcomes, and waiting for them ───────────────────────────────────────────────────────────────────────────
    def take_news(self) -> list[Publication]:
        """Return the outcomes since the last call; rank 0 has them."""
        return [one.outcomes.popleft() for one in self.publishers for _ in range(len(one.outcomes))]

    def wait(self, group: dist.Group) -> None:
        """Wait until every rank of ``group`` has published what it is to, well or not.

        Raises:
            ObjectStoreError: on every rank, if one has not within the timeout.
            RankError: a rank failed or was lost meanwhile.
        """
        group.wait_for_all(self.is_done, timedelta(seconds=self._options.upload_timeout))
        with group.all_or_none("waiting for uploads"):
            for publisher in self.publishers:
                publisher.wait(0)

    def is_done(self, seconds: float) -> bool:
        """Wait until this rank has published what it is to, ``seconds`` for each bucket; return true if it has."""
        return all(one.uploader.wait(seconds, lane=one.bucket.uri()) for one in self.publishers)

    def close(self) -> None:
        """Wait for what is being published. May be called twice.

        Raises:
            Exception: what made an upload fail.
        """
        if self._uploader is not None:
            self._uploader.close()
