"""Options of a manager of checkpoints: names and numbers are checked, and defaults are filled in."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, final

from composerlite.checkpoint.contents import IgnoreKeys, check_ignore_keys, remove_keys
from composerlite.checkpoint.record.history import retention_policy
from composerlite.checkpoint.record.naming import check_template, check_variables
from composerlite.errors import ConfigError, did_you_mean, naming
from composerlite.storage import is_uri, parse_uri
from composerlite.types import StateDict

OWN_REMOTE_NAME, OWN_REMOTE_LATEST = "{run_name}/checkpoints/{filename}", "{run_name}/checkpoints/{latest_filename}"
"""Default names in buckets of loggers, as in Composer. If save_folder is a URI, names are below the path of the URI."""

DEFAULTS: Mapping[str, Any] = {
    "folder": "{run_name}/checkpoints",
    "filename": "ep{epoch}-ba{batch}-rank{rank}.pt",
    "remote_file_name": OWN_REMOTE_NAME,
    "latest_filename": "latest-rank{rank}.pt",
    "latest_remote_file_name": OWN_REMOTE_LATEST,
    "num_checkpoints_to_keep": -1,
    "num_remote_checkpoints_to_keep": -1,
    "best_mode": "max",
    "asynchronous": True,
    "failure_limit": 0,
    "num_concurrent_uploads": 1,
    "upload_timeout_in_seconds": 3600,
    **dict.fromkeys(("overwrite", "weights_only", "on_exception", "in_memory"), False),
    **dict.fromkeys(("ephemeral_interval", "keep_every", "best_k", "best_metric"), None),
    **dict.fromkeys(("ignore_keys", "compat", "staging_folder", "staging_bytes", "replication"), None),
}
"""The options of a manager, with defaults. :class:`composerlite.callbacks.CheckpointSaver` documents the options."""


@final
class Names:
    """Templates of the names of a manager's files. Checks the names, and fills in missing names in buckets.

    Args:
        options: all options of the manager.
        has_link_here: the local folder has a link to the newest checkpoint.

    Attributes:
        folder: path or URI, as given by the user.
        bucket: the URI of the bucket of ``folder``; ``None``: ``folder`` is on this machine.
        local_folder: the folder on this machine. Each checkpoint is saved here first.
        filename: template for a checkpoint, relative to the folder.
        latest: template for the link to the newest checkpoint, relative to the folder; ``None``: no link.
        remote_filename: template for a checkpoint in a bucket, from the root of the bucket.
        remote_latest: template for the link in a bucket, from the root of the bucket; ``None``: no link.

    Raises:
        ConfigError: a name is invalid, or the folder is a URI of no known store.
    """

    def __init__(self, options: Mapping[str, Any], *, has_link_here: bool) -> None:
        self.folder = folder = str(options["folder"])
        staging = None if options["staging_folder"] is None else str(options["staging_folder"])
        check_variables(folder, argument="save_folder", allow_time=False)
        with naming("save_folder", folder):
            scheme, bucket, path = parse_uri(folder)
        if scheme in ("http", "https"):
            raise ConfigError(f"save_folder={folder!r}: checkpoints cannot be saved to a web address. Give a bucket.")
        if staging is not None and (not scheme or not staging or is_uri(staging)):
            raise ConfigError(
                f"save_staging_folder={staging!r} with save_folder={folder!r}: expected a local folder together "
                "with a URI as save_folder. Leave it out to save to a local folder."
            )
        self.bucket = f"{scheme}://{bucket}" if scheme else None
        self._path = self.local_folder = path.strip("/") if scheme else path
        if staging is not None:
            self.local_folder = f"{staging.rstrip('/')}/{self._path}".rstrip("/")
        elif scheme and not self._path:
            self.local_folder = "checkpoints"
        self.filename = check_template(str(options["filename"]), argument="save_filename")
        link = options["latest_filename"]
        if link is not None:
            link = check_template(str(link), argument="save_latest_filename")
        self.latest: str | None = link if has_link_here else None
        self._named_buckets: list[tuple[str, str]] = []  # names given as URIs, each with the argument
        self.remote_filename = self._in_bucket(options, "remote_file_name", self.filename)
        self.remote_latest: str | None = None
        if link is not None or options["latest_remote_file_name"] not in (None, OWN_REMOTE_LATEST):
            self.remote_latest = self._in_bucket(options, "latest_remote_file_name", link or "")

    def _in_bucket(self, options: Mapping[str, Any], option: str, here: str) -> str:
        """Return the template for a bucket from the value of ``option``. ``here``: the template for the folder."""
        given, default, argument = options[option], DEFAULTS[option], f"save_{option}"
        if given is None or (given == default and self.bucket is not None):
            return f"{self._path.removeprefix('./').strip('/')}/{here}".lstrip("/")
        if given == default:
            return f"{default.rpartition('/')[0]}/{here}"
        name = str(given)
        if is_uri(name):
            self._named_buckets.append((name, argument))
            name = parse_uri(name)[2]
        return check_template(name, argument=argument)

    def check_buckets(self, places: Iterable[str]) -> None:
        """Check that the buckets in the names of remote files are among ``places``, the URIs that are saved to.

        Raises:
            ConfigError: a name is in another bucket.
        """
        buckets = {parse_uri(place)[:2] for place in places}
        for name, argument in self._named_buckets:
            if parse_uri(name)[:2] not in buckets:
                have = ", ".join(f"{scheme}://{bucket}" for scheme, bucket in sorted(buckets)) or "none"
                raise ConfigError(
                    f"{argument}={name!r}: nothing is uploaded to that bucket (buckets of this run: {have}). Give "
                    "save_folder its URI, or the Trainer a RemoteUploaderDownloader for it."
                )


@final
class Keep:
    """Rules of retention, checked.

    Args:
        options: all options of the manager.

    Attributes:
        policy: retention policy of the folder.
        none_here: the folder keeps no checkpoint: each checkpoint is deleted from the folder after upload to a bucket.
        any_ephemeral: there are ephemeral checkpoints, each deleted as soon as there is a newer checkpoint.
        deletes: a save may delete older checkpoints from the folder, by ``policy`` or as ephemeral checkpoints.
        in_bucket: number of newest checkpoints to keep in a bucket; -1: all.

    Raises:
        ConfigError: a number is invalid.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        number: int = options["num_checkpoints_to_keep"]
        self.in_bucket: int = options["num_remote_checkpoints_to_keep"]
        _check_number(number, argument="save_num_checkpoints_to_keep", or_all=True)
        _check_number(self.in_bucket, argument="save_num_remote_checkpoints_to_keep", least=1, or_all=True)
        rules = {name: options[name] for name in ("keep_every", "best_k", "best_metric", "best_mode")}
        self.policy = policy = retention_policy(-1 if number == 0 else number, **rules)
        self.none_here = number == 0
        self.any_ephemeral = options["ephemeral_interval"] is not None
        self.deletes = self.any_ephemeral or any(one is not None for one in (policy.last, policy.every, policy.best))


@final
class SaveOptions:
    """Options of a manager, checked. :class:`composerlite.callbacks.CheckpointSaver` documents the options.

    Args:
        given: options by the names in :data:`DEFAULTS`. Other options have their defaults.

    Attributes:
        names: templates of the names of files and links.
        keep: rules of retention.
        staging_bytes: largest memory for a copy of the state, in bytes; ``None``: half of the free memory.
        replication: replicate checkpoints in memory to another node, at most at this rate in GB/s; ``None``: do not.
        upload_timeout: longest wait for uploads, in seconds.

    Raises:
        ConfigError: an option is unknown, a name or a number is invalid, or the folder is a URI of no known store.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        for name in given:
            if name not in DEFAULTS:
                raise ConfigError(f"there is no option {name!r} of checkpoints.{did_you_mean(name, DEFAULTS)}")
        options = {**DEFAULTS, **given}
        self.overwrite: bool = options["overwrite"]
        self.weights_only: bool = options["weights_only"]
        self.asynchronous: bool = options["asynchronous"]
        self.in_memory: bool = options["in_memory"]
        self.on_exception: bool = options["on_exception"]
        self.staging_bytes: int | None = options["staging_bytes"]
        if self.staging_bytes is not None:
            _check_number(self.staging_bytes, argument="save_staging_bytes")
        self.replication: float | None = options["replication"]
        if self.replication is not None and not 0 < self.replication < math.inf:
            raise ConfigError(
                f"save_memory_replication={self.replication!r}: expected more than zero gigabytes per second, or None."
            )
        self.failure_limit: int = options["failure_limit"]
        _check_number(self.failure_limit, argument="save_failure_limit")
        _check_number(options["num_concurrent_uploads"], argument="num_concurrent_uploads", least=1)
        timeout, most = options["upload_timeout_in_seconds"], timedelta.max.total_seconds()
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout <= most:
            raise ConfigError(
                f"upload_timeout_in_seconds={timeout!r}: expected a number of seconds above 0, such as 3600."
            )
        self.upload_timeout = timeout
        self.ignore_keys = check_ignore_keys(options["ignore_keys"], argument="save_ignore_keys")
        if options["compat"] == "composer":
            self.ignore_keys = functools.partial(_for_composer, self.ignore_keys)
        elif options["compat"] is not None:
            raise ConfigError(f"save_compat={options['compat']!r}: expected 'composer' or None.")
        self.keep = Keep(options)
        self.names = Names(options, has_link_here=not self.keep.none_here)


def _check_number(value: object, *, argument: str, least: int = 0, or_all: bool = False) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or (value < least and not (or_all and value == -1)):
        rule = "-1 for all, or a whole number" if or_all else "a whole number"
        raise ConfigError(f"{argument}={value!r}: expected {rule}, {least} or more.")


def _for_composer(ignore_keys: IgnoreKeys, contents: StateDict) -> None:
    """Remove ``ignore_keys`` from ``contents``, and convert the rest to the form of Composer, in place."""
    from composerlite.checkpoint.foreign.systems import make_loadable_in_composer  # rarely needed

    remove_keys(ignore_keys, contents)
    make_loadable_in_composer(contents)
