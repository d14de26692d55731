"""Publishing: what a saver commits in its folder comes to a bucket, behind training."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol, final

from composerlite.checkpoint.catalog import Catalog
from composerlite.checkpoint.manifest import Manifest
from composerlite.checkpoint.naming import (
    DIST_VARIABLES,
    NamedState,
    check_template,
    format_name_with_dist,
    format_name_with_dist_and_time,
    variables_in,
)
from composerlite.checkpoint.remote import RemoteCatalog
from composerlite.checkpoint.retention import RetentionPolicy, deletions, retention_policy
from composerlite.errors import ConfigError, ObjectStoreError
from composerlite.storage import (
    ObjectStore,
    RetryPolicy,
    SecondName,
    Transfer,
    Uploader,
    check_name,
    is_uri,
    open_store,
    parse_uri,
)

__all__ = ["Publisher", "RemoteSaving"]

log = logging.getLogger(__name__)
_MOST_WAITING = 2
"""So many checkpoints may wait to be uploaded. What is saved faster than the network takes it has to wait."""
_STALE = timedelta(days=1)
"""An upload that was begun so long ago and is not complete is that of a dead run."""


@final
class Publisher:
    """Publishes the checkpoints of one saver, one after the other, in threads of an :class:`Uploader`.

    Args:
        uploader: does the work; others may use it, too.
        remote: where they go.
        template: of the names in the bucket, below ``remote``.
        link: full name of the bucket's link to the latest.
        timeout: seconds to wait for the uploads before, where too many wait.
        retention: what stays in the bucket; ``None`` for all.
    """

    def __init__(
        self,
        uploader: Uploader,
        remote: RemoteCatalog,
        *,
        template: str,
        link: str | None,
        timeout: float,
        retention: RetentionPolicy | None = None,
    ) -> None:
        self.uploader = uploader
        self.remote = remote
        self.template = template
        self.link = link
        self._timeout = timeout
        self._retention = retention

    def publish(
        self,
        manifest: Manifest,
        catalog: Catalog,
        run_name: str,
        *,
        overwrite: bool = False,
        afterwards: Callable[[], object] | None = None,
    ) -> None:
        """Have a checkpoint published that is committed in ``catalog``. It may be deleted there from now on.

        Waits where too many do, and so keeps what is staged within bounds: not for the training thread.

        Args:
            manifest: its commit record.
            run_name: of the run.
            overwrite: replace another checkpoint of that name.
            afterwards: is called when it is published.

        Raises:
            ObjectStoreError: those before it are not uploaded in time.
        """
        if not self.uploader.wait(self._timeout, at_most=_MOST_WAITING - 1):
            raise ObjectStoreError(
                f"{', '.join(self.uploader.pending)}: not uploaded within {self._timeout:.0f} s "
                "(upload_timeout_in_seconds). Save less often, or give it longer."
            )
        name = format_name_with_dist_and_time(self.template, run_name, _Moment(manifest))
        (record,) = manifest.files
        files = (dataclasses.replace(record, path=name),)
        there = dataclasses.replace(manifest, name=name, template=self.template, files=files)
        held = SecondName(catalog.folder / record.path)

        def upload(_: Transfer) -> None:
            try:
                self.remote.publish(there, [held.path], link=self.link, overwrite=overwrite)
            finally:
                held.remove()
            if afterwards is not None:
                afterwards()
            self._delete_old(there)

        self.uploader.submit(
            f"checkpoints of {self.remote.uri()}", upload, what=self.remote.uri(name), dropped=held.remove
        )

    def is_behind(self, manifest: Manifest) -> bool:
        """Whether the bucket's latest is older than ``manifest``, or there is none."""
        latest = None if self.link is None else self.remote.latest(self.link)
        return latest is None or latest.order < manifest.order

    def _delete_old(self, newest: Manifest) -> None:
        if self._retention is None:
            return
        mine = [
            manifest
            for manifest in self.remote.manifests()
            if manifest.run_name == newest.run_name
            and manifest.template == self.template
            and manifest.order[:2] <= newest.order[:2]
        ]
        for old in deletions(mine, self._retention):
            self.remote.delete(old)


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
        num_concurrent_uploads: of an uploader of its own.
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
        num_concurrent_uploads: int,
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
        self._names = _Names.of(_checked(remote_file_name, f"{below}/{filename}", "save_remote_file_name"), filename)
        link = None if latest_filename is None else f"{below}/{latest_filename}"
        if link is not None or latest_remote_file_name is not None:
            link = _checked(latest_remote_file_name, str(link), "save_latest_remote_file_name")
        self._link = link
        self._num_concurrent_uploads = num_concurrent_uploads
        self._timeout = timeout
        self._retention = None if num_to_keep == -1 else retention_policy(num_to_keep)
        self._store: ObjectStore | None = None if self._bucket is None else open_store(self._bucket)
        self._uploader: Uploader | None = None
        self.publishers: list[Publisher] = []

    def open(self, state: NamedState, logger: Destinations) -> None:
        """Find the buckets and see that they can be written to.

        Raises:
            PermissionError: one cannot. FileNotFoundError: there is no such bucket.
            ObjectStoreError: it does not answer, or fails.
        """
        if self._store is not None:
            self._uploader = Uploader(Transfer(self._store), num_concurrent=self._num_concurrent_uploads)
            self.publishers = [self._publisher(self._uploader, "", state)]
            store, name = self._store, self.publishers[0].remote.name_of("file")
            RetryPolicy().run(lambda: store.check_writable(name), f"check that {store.get_uri(name)} can be written")
            self._uploader.submit(
                "sweep", self._sweep, what=f"what dead runs left below {self.publishers[0].remote.uri()}"
            )
            return
        self.publishers = [
            self._publisher(destination.uploader, destination.checkpoint_prefix, state)
            for destination in logger.destinations
            if destination.uploader is not None
        ]

    def _sweep(self, transfer: Transfer) -> None:
        """Remove parts of uploads that nobody goes on with: they are not seen and cost money."""
        root = self.publishers[0].remote.root
        try:
            transfer.abort_stale(f"{root}/" if root else "", _STALE)
        except (PermissionError, ObjectStoreError) as e:  # they take space and no more
            log.info("did not look for parts that dead runs left: %s", e)

    def raise_failures(self) -> None:
        """Raise what failed since the last time in an uploader of its own; loggers raise what failed in theirs."""
        if self._uploader is not None:
            self._uploader.raise_failures()

    def wait(self) -> None:
        """Wait until everything is published.

        Raises:
            ObjectStoreError: it is not within the timeout.
        """
        for publisher in self.publishers:
            if not publisher.uploader.wait(self._timeout):
                raise ObjectStoreError(
                    f"{', '.join(publisher.uploader.pending)}: not uploaded within {self._timeout:.0f} s "
                    "(upload_timeout_in_seconds)."
                )

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
        root = prefix + format_name_with_dist(self._names.root, state.run_name)
        link = None if self._link is None else prefix + format_name_with_dist(self._link, state.run_name)
        return Publisher(
            uploader,
            RemoteCatalog(uploader.transfer, root.strip("/")),
            template=self._names.template,
            link=None if link is None else check_name(link),
            timeout=self._timeout,
            retention=self._retention,
        )


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
