"""Publishing: the background upload of a saver's committed checkpoints from the folder to buckets.

A :class:`Publisher` uploads to a single bucket, in the order of submission. :class:`Publishing` has the publishers of a
saver: on rank 0, or on a rank of each node if nodes have disks of their own. The training threads of all ranks process
an outcome at the same batch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple, final

from composerlite import dist
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import Catalog, read_index
from composerlite.checkpoint.place.commit import commit_sent, delete_checkpoint, send_files
from composerlite.checkpoint.place.lease import HeartbeatLease
from composerlite.checkpoint.record.history import retention_policy
from composerlite.checkpoint.record.naming import (
    FIRST_RANK,
    NamedState,
    format_name_with_dist,
    name_pattern,
    names_of_ranks,
    root_and_template,
)
from composerlite.checkpoint.record.record import Manifest, seal_index
from composerlite.checkpoint.save.form import Form
from composerlite.checkpoint.save.options import SaveOptions
from composerlite.checkpoint.save.run_folder import RunFolder
from composerlite.errors import CheckpointError, ConfigError, ObjectStoreError, bytes_text
from composerlite.storage import Transfer, Uploader, check_name, open_store
from composerlite.storage.disk.files import pinned_file
from composerlite.storage.workers import seconds_left
from composerlite.types import CheckpointNews

log = logging.getLogger(__name__)
_MOST_WAITING = 2
"""Largest number of checkpoints waiting for upload. If saves outpace the network, the next save waits."""
_LONGEST_UPLOAD = timedelta(hours=2)
"""Longest upload. A rank with a longer upload counts as lost."""


@final
class Publication(NamedTuple):
    """Outcome of an upload, or of the deletions after an upload.

    Attributes:
        work: ``"published"`` or ``"deleted from a bucket"``.
        upload: event of the upload: name and place, time of the end, and the seconds from the first request to the
            link. An event of a failure has the same name and place.
        error: reason for a failure; ``None``: success.
        events: events for loggers, without an event of a failure. The events of an upload include the deletion from the
            folder, if any: the manager forgets the checkpoint.
    """

    work: str
    upload: CheckpointNews
    error: Exception | None
    events: Sequence[CheckpointNews]


@final
@dataclass(eq=False, kw_only=True)
class Publisher:
    """Publisher of a saver's checkpoints to a bucket, in a thread of ``uploader``, in the order of :meth:`submit`.

    Attributes:
        uploader: owner of the threads, perhaps with other work.
        bucket: target of the uploads.
        template: template of the names in the bucket, below the root.
        links: full names of the links to the latest checkpoint. If each rank has a file: a link per rank, rank 0 first.
        options: options of the saver.
        check: called before the first request and before the commit; raises if this process must not write.
        before_each: functions to call before each upload, in the uploading thread.
        outcomes: outcomes on rank 0 since the last :meth:`Publishing.take_news`.
    """

    uploader: Uploader
    bucket: Bucket
    template: str
    links: Sequence[str]
    options: SaveOptions
    check: Callable[[], object]
    before_each: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    outcomes: deque[Publication] = field(default_factory=deque[Publication])
    _known: list[Manifest] | None = None

    @property
    def remote(self) -> Catalog:
        """Catalog of the checkpoints in the bucket."""
        return Catalog(self.bucket)

    @property
    def link(self) -> str | None:
        """Full name of the link to the latest checkpoint; ``None``: no link."""
        return self.links[0] if self.links else None

    # ── names, leases and unfinished uploads ─────────────────────────────────────────────────────────────────────
    def leases(self, run_name: str) -> dict[str, HeartbeatLease]:
        """Return the leases of the checkpoint names and of the link, by the URI of each.

        The folder of a lease object is the constant part of the protected name, up to the last slash. So publishers
        with different roots and the same full names find the same object.
        """
        leases = dict[str, HeartbeatLease]()
        for name in (self.bucket.name_of(self.template.replace("{run_name}", run_name)), *self.links[:1]):
            folder = name.partition("{")[0].rpartition("/")[0]
            lease = self.bucket.inside(f"/{folder}").lock(name.removeprefix(folder).lstrip("/"))
            leases[self.bucket.transfer.store.get_uri(name)] = lease
        return leases

    def remove_uploads(self, run_name: str) -> None:
        """Remove the parts of unfinished uploads of the run's checkpoints.

        Call after the takeover of a lease: the previous holder may be suspended, and may continue an upload later.
        """
        prefix = f"{self.bucket.root}/" if self.bucket.root else ""
        names = rf"{name_pattern(self.template, run_name).pattern}(?:/.*)?"
        try:
            is_own = re.compile(re.escape(prefix) + names).fullmatch
            self.bucket.transfer.abort_stale(prefix, timedelta(), is_own)
        except (PermissionError, ObjectStoreError) as e:
            log.warning("unfinished uploads below %s were not removed: %s", self.bucket.uri(), e)

    def is_behind(self, manifest: Manifest) -> bool:
        """Return true if the link to the latest checkpoint is missing or has a target older than ``manifest``."""
        latest = None if self.link is None else self.remote.latest(self.link, manifest.run_name)
        return latest is None or latest.order < manifest.order

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────
    def submit(
        self, manifest: Manifest, catalog: Catalog, vote: dist.Vote, *, overwrite: bool = False, moves: bool = False
    ) -> None:
        """Publish a checkpoint of ``catalog`` in the background. After the call the folder's copy may be deleted.

        Waits while too many uploads are pending, since each pending upload keeps files on the disk. The background
        thread of a save calls this method. The training thread calls this method only before training, for interrupted
        uploads.

        Args:
            manifest: record of the checkpoint.
            catalog: catalog of the folder.
            vote: vote of the ranks that publish the checkpoint together.
            overwrite: replace another checkpoint of the same name.
            moves: delete the checkpoint from the folder after the upload.

        Raises:
            ObjectStoreError: the earlier checkpoints are not uploaded within the timeout of the options.
            OSError: a file of the checkpoint cannot be opened.
        """
        self.wait(self.options.upload_timeout, at_most=_MOST_WAITING - 1)
        there = _in_bucket(manifest, names_of_ranks(self.template, manifest)[0], self.template)
        paths = dict(zip(manifest.files, (file.path for file in there.files), strict=True))
        files: dict[str, Path | bytes] = {}
        with contextlib.ExitStack() as stack:
            for file in manifest.here:
                pin = pinned_file(catalog.folder / file.path, (catalog.folder / manifest.name).parent)
                files[paths[file]] = stack.enter_context(pin)
            if manifest.form == "sharded" and (manifest.node is not None or there.name != manifest.name):
                decider = manifest.files[0].path  # the record in this file has the paths of all files
                index, _ = read_index(catalog.place, decider, catalog.place.read(decider))
                files[there.files[0].path] = seal_index(replace(there, files=there.files[1:]), index)
            held = stack.pop_all()  # the files stay pinned until ``held`` is closed

        def commit(replaced: Sequence[Manifest | None]) -> None:
            """Commit on rank 0 after all ranks have sent files. ``replaced``: existing record found by each rank."""
            self.check()
            targets = [file.path for file in there.files] if there.form == "archives" else [there.name]
            links = dict(zip(self.links, targets, strict=False))
            commit_sent(self.bucket, there, files[there.files[0].path], replaced[0], links, overwrite=overwrite)

        def publish() -> None:
            began, error, moved = time.time(), None, list[CheckpointNews]()
            try:
                with held:
                    for call in self.before_each:
                        call()
                    self.check()
                    send = functools.partial(send_files, self.bucket, there, files, overwrite=overwrite)
                    vote.run(send, commit)
                if moves:
                    delete_checkpoint(catalog.place, manifest)
                    where = str(catalog.folder)
                    moved.append(CheckpointNews(what="deleted", name=manifest.name, where=where, at=time.time()))
            except Exception as e:  # noqa: BLE001 - stored in the outcome, raised by the training thread
                log.error("checkpoint %s could not be uploaded: %s", self.bucket.uri(there.name), e)
                error = e
            if dist.get_global_rank() == 0:
                self._note(there, began, error, moved)

        self.uploader.submit(self.bucket.uri(there.name), publish, lane=self.bucket.uri(), dropped=held.close)

    def _note(self, there: Manifest, began: float, error: Exception | None, moved: Sequence[CheckpointNews]) -> None:
        """Store the outcome of all ranks, on rank 0. After a success delete older checkpoints from the bucket.

        Args:
            there: record in the bucket.
            began: time of the first request.
            error: reason for a failure.
            moved: event of the deletion of the checkpoint from the folder, if the folder keeps none.
        """
        ended = time.time()
        seconds = max(0.0, ended - began)  # the clock may have been set back
        lag = max(0.0, ended - datetime.fromisoformat(there.saved_at).timestamp())
        numbers = {"uploaded_batch": there.batch, "uploaded_bytes": there.size_bytes}
        upload = CheckpointNews(
            what="uploaded",
            name=there.name,
            where=self.bucket.uri(),
            batch=there.batch,
            at=ended,
            size_bytes=there.size_bytes,
            seconds={"upload": seconds},
            metrics={**numbers, "upload_seconds": seconds, "upload_lag_seconds": lag},
        )
        if error is not None:
            self.outcomes.append(Publication("published", upload, error, []))
            return
        size = bytes_text(there.size_bytes)
        log.info("uploaded checkpoint %s (%s in %.2f s)", self.bucket.uri(there.name), size, seconds)
        deleted: list[CheckpointNews] = []
        try:
            for name in self._delete_old(there):
                deleted.append(CheckpointNews(what="deleted", name=name, where=self.bucket.uri(), at=ended))
        except Exception as e:  # noqa: BLE001 - stored in the outcome, raised by the training thread
            log.error("a checkpoint before %s could not be deleted: %s", self.bucket.uri(there.name), e)
            error = e
        self.outcomes.append(Publication("published", upload, None, [*moved, upload]))
        self.outcomes.append(Publication("deleted from a bucket", upload, error, deleted))

    def _delete_old(self, newest: Manifest) -> Iterator[str]:
        """Delete the checkpoints that retention does not keep beside ``newest``; yield the name of each."""
        keep = self.options.keep.in_bucket
        if keep == -1 and self._known is None and not newest.ephemeral:
            return
        if self._known is None:  # listed once: later uploads and deletions update the list
            self._known = [m for m in self.remote.manifests() if m.run_name == newest.run_name]
        self._known = [m for m in self._known if m.name != newest.name] + [newest]
        for old in retention_policy(keep).given_up(self._known, newest):
            delete_checkpoint(self.bucket, old)
            self._known.remove(old)
            yield old.name

    def wait(self, seconds: float, *, at_most: int = 0) -> None:
        """Wait until at most ``at_most`` checkpoints are unpublished, or until the deadline of a shutdown.

        Raises:
            ObjectStoreError: more checkpoints are unpublished after ``seconds``.
        """
        if not self.uploader.wait(seconds, lane=self.bucket.uri(), at_most=at_most) and seconds_left():
            raise ObjectStoreError(
                f"{', '.join(self.uploader.pending)}: not uploaded within {self.options.upload_timeout:.0f} s "
                "(upload_timeout_in_seconds). Save less often, or increase the timeout."
            )


def _in_bucket(manifest: Manifest, name: str, template: str) -> Manifest:
    """Return the record of a checkpoint for the bucket, which has the files of all nodes."""
    old, new = ("", "") if manifest.form == "archives" else (manifest.name, name)  # archives keep their names
    files = [replace(file, path=new + file.path.removeprefix(old), node=None) for file in manifest.files]
    return replace(manifest, name=name, template=template, files=tuple(files), node=None, also={})


@final
class Publishing:
    """Publishes a saver's checkpoints to the bucket of the saver's URI, or to the buckets of the run's loggers.

    Args:
        options: options of the saver.
        where: folder to publish from.
        check: as in :class:`Publisher`.

    Attributes:
        buckets: URIs of the buckets, on every rank, after :meth:`open`; empty: nothing is published.
        publishers: a publisher for each bucket, on the publishing ranks, after :meth:`open`.
        ranks_with_news: 1 if rank 0 has new outcomes, else 0; every rank receives the number with each batch.
    """

    def __init__(self, options: SaveOptions, where: RunFolder, check: Callable[[], object]) -> None:
        bucket = options.names.bucket
        self._options = options
        self._store = None if bucket is None else open_store(bucket)
        self._where, self._check = where, check
        self._uploader: Uploader | None = None
        self.publishers: list[Publisher] = []
        self.buckets: list[str] = []
        # The ranks sum this number in the reduction of each batch, so that all act at the same batch.
        self.ranks_with_news = dist.PiggybackCounter(lambda: int(any(one.outcomes for one in self.publishers)))
        self._root = self._template = ""
        self._links: list[str] = []  # templates

    # ── finding buckets ──────────────────────────────────────────────────────────────────────────────────────────
    def open(self, state: NamedState, form: Form, uploaders: Sequence[tuple[Uploader, str]]) -> None:
        """Find the buckets, and check that the buckets allow writes, and deletions if needed. Collective.

        Args:
            state: state of the run.
            form: form of the checkpoints in the folder.
            uploaders: uploaders of the run's loggers, each with a prefix for names in the bucket.

        Raises:
            ConfigError: the options need a bucket, and there is no bucket or another bucket; names do not fit the form;
                or a rank publishes from the disk of a node, and has other loggers than rank 0.
            PermissionError: a bucket refuses writes, or refuses deletions although old checkpoints must be deleted.
            FileNotFoundError: a bucket does not exist.
            ObjectStoreError: a store does not answer, or fails.
        """
        names, local = self._options.names, self._where.filename
        self._root, template = root_and_template(names.remote_filename, names.filename)
        same = template == names.filename
        self._template = local if same else form.template(template, "save_remote_file_name")
        if form.kind == "deepspeed" and self._template != local:
            raise ConfigError(
                f"save_remote_file_name={names.remote_filename!r}: each rank of DeepSpeed has a file that "
                f"contains these names. The names in the bucket must be the same: let it end with {names.filename!r}."
            )
        if names.remote_latest is not None:
            link = form.template(names.remote_latest, "save_latest_remote_file_name")
            self._links = [link] * (dist.get_world_size() if form.kind == "deepspeed" else 1)
        group = dist.get_group()
        self.buckets = group.from_first("finding buckets", functools.partial(self._open, state, uploaders))
        with group.all_or_none("finding buckets"):
            others = self._where.is_leader and not group.is_first
            if others and (own := self._open(state, uploaders)) != self.buckets:
                raise ConfigError(
                    f"loggers upload checkpoints to {own} here and to {self.buckets} on rank 0: give every rank "
                    "the same loggers, since each node uploads the files on its disk."
                )

    def _open(self, state: NamedState, uploaders: Sequence[tuple[Uploader, str]]) -> list[str]:
        """Create the publishers of this rank, and check the buckets. Return the URIs of the buckets."""
        keep = self._options.keep.in_bucket
        if self._store is not None:
            # A thread for checkpoints, and a thread for other work.
            self._uploader = Uploader(Transfer(self._store), num_concurrent=2, timeout=self._options.upload_timeout)
            uploaders = [(self._uploader, "")]
        for uploader, prefix in uploaders:
            root = prefix + format_name_with_dist(self._root, state.run_name, **FIRST_RANK)
            links = [
                check_name(prefix + format_name_with_dist(link, state.run_name, **{**FIRST_RANK, "rank": rank}))
                for rank, link in enumerate(self._links)
            ]
            publisher = Publisher(
                uploader=uploader,
                bucket=Bucket(uploader.transfer, root),
                template=self._template,
                links=links,
                options=self._options,
                check=self._check,
            )
            self.publishers.append(publisher)
        self._options.names.check_buckets(publisher.bucket.uri() for publisher in self.publishers)
        if self._options.keep.none_here and not self.publishers:
            raise ConfigError(
                "num_checkpoints_to_keep=0 keeps no checkpoint in the folder, and the run has no bucket: give "
                "save_folder a URI, or the Trainer a RemoteUploaderDownloader, or keep 1 or more."
            )
        argument = "save_ephemeral_interval" if keep == -1 else f"save_num_remote_checkpoints_to_keep={keep}"
        for publisher in self.publishers:
            bucket, uploader = publisher.bucket, publisher.uploader
            if uploader is self._uploader:  # loggers check their own buckets
                bucket.transfer.check_writable(bucket.name_of("file"))
            try:
                if keep != -1 or self._options.keep.any_ephemeral:
                    bucket.put(".deletable", b"")
                    bucket.delete([".deletable"])
            except (PermissionError, ObjectStoreError) as e:
                e.add_note(
                    f"{argument}: older checkpoints must be deleted from {bucket.uri()}, which is not allowed. "
                    "Grant the right to delete, or leave the argument out to keep all checkpoints."
                )
                raise
        return [publisher.bucket.uri() for publisher in self.publishers]

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────
    def behind(self, manifests: Sequence[Manifest]) -> list[str]:
        """Return the names of the checkpoints of a run to publish again, oldest first.

        A kill may have interrupted the newest upload. If the folder keeps no checkpoints, return all in the folder.
        """
        if self._options.keep.none_here:
            return [manifest.name for manifest in manifests]
        return [newest.name for newest in manifests[-1:] if any(one.is_behind(newest) for one in self.publishers)]

    def of(self, name: str, *, overwrite: bool) -> Callable[[], object]:
        """Return a function that publishes the checkpoint ``name`` of the folder in the background.

        All ranks must call this method, in the training thread, in the same order. After the commit of the checkpoint,
        rank 0 calls the returned function; if nodes have disks of their own, all ranks do.

        Args:
            name: name of the checkpoint.
            overwrite: replace another checkpoint of the same name in the buckets.
        """
        group = dist.Group() if self._where.form.disks is None else dist.get_group()
        what = f"publishing checkpoint {name!r}"
        votes = [group.vote(what, longest_work=_LONGEST_UPLOAD) for _ in self.buckets]
        return functools.partial(self._publish, name, votes, overwrite=overwrite)

    def _publish(self, name: str, votes: Sequence[dist.Vote], *, overwrite: bool) -> None:
        if not self._where.is_leader:  # nothing to send, and no need for the outcome
            for vote in votes:
                vote.pass_by()
            return
        catalog = self._where.catalog
        manifest = catalog.manifest_of(name)
        if manifest is None:
            raise CheckpointError(f"checkpoint {name!r} is gone from {catalog.place.uri()!r} before it was uploaded.")
        for publisher, vote in zip(self.publishers, votes, strict=True):
            # The last upload deletes the checkpoint from the folder: all others have its files open by then.
            moves = self._options.keep.none_here and publisher is self.publishers[-1]
            publisher.submit(manifest, catalog, vote, overwrite=overwrite, moves=moves)

    def names_in_buckets(self, name: str, state: NamedState) -> dict[str, str]:
        """Return ``{name in buckets: template}`` for the checkpoint ``name``; empty if both names are equal."""
        there = names_of_ranks(self._template, state)[0]
        return {} if there == name else {there: self._template}

    # ── outcomes, and waiting for them ───────────────────────────────────────────────────────────────────────────
    def take_news(self) -> list[Publication]:
        """Return the outcomes since the last call. Only rank 0 has outcomes."""
        return [one.outcomes.popleft() for one in self.publishers for _ in range(len(one.outcomes))]

    def wait(self, group: dist.Group) -> None:
        """Wait until every rank of ``group`` has no pending uploads. Failed uploads count as finished.

        Raises:
            ObjectStoreError: a rank has pending uploads after the timeout; on every rank.
            RankError: a rank failed or was lost during the wait.
        """
        group.wait_for_all(self.is_done, timedelta(seconds=self._options.upload_timeout))
        with group.all_or_none("waiting for uploads"):
            for publisher in self.publishers:
                publisher.wait(0)

    def is_done(self, seconds: float) -> bool:
        """Wait for the pending uploads of this rank, ``seconds`` for each bucket; return true if none remain."""
        return all(one.uploader.wait(seconds, lane=one.bucket.uri()) for one in self.publishers)

    def close(self) -> None:
        """Wait for the uploads to the bucket of the saver's URI, and stop the threads. May be called twice.

        Uploads to buckets of loggers continue: see :meth:`wait`. Failed uploads are in the outcomes and not raised.

        Raises:
            ObjectStoreError: uploads are pending after the timeout.
        """
        if self._uploader is not None:
            self._uploader.close()

    def close_store(self) -> None:
        """Close the store of the saver's URI, after the leases are released. Stores of loggers stay open."""
        if self._store is not None:
            self._store.close()
