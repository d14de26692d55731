"""Options of a manager of checkpoints: names and numbers are checked, and defaults are filled in."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, final

from composerlite.checkpoint.contents import IgnoreKeys, check_ignore_keys, remove_keys
from composerlite.checkpoint.record.naming import check_template, check_variables
from composerlite.checkpoint.record.retention import RetentionPolicy, retention_policy
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
    "overwrite": False,
    "num_checkpoints_to_keep": -1,
    "weights_only": False,
    "ignore_keys": None,
    "compat": None,
    "asynchronous": True,
    "staging_bytes": None,
    "on_exception": False,
    "in_memory": False,
    "replication": None,
    "failure_limit": 0,
    "ephemeral_interval": None,
    "keep_every": None,
    "best_k": None,
    "best_metric": None,
    "best_mode": "max",
    "staging_folder": None,
    "num_concurrent_uploads": 1,
    "upload_timeout_in_seconds": 3600,
    "num_remote_checkpoints_to_keep": -1,
}
"""The options of a manager, with defaults. :class:`composerlite.callbacks.CheckpointSaver` documents the options."""


@final
class Names(NamedTuple):
    """Templates of the names of a manager's files.

    Attributes:
        folder: as the user gave it, a path or a URI.
        bucket: the URI of the bucket of ``folder``; ``None``: ``folder`` is on this machine.
        local_folder: the folder on this machine, which has each checkpoint first.
        filename: of a checkpoint, below the folder.
        latest: of the link to the newest, below the folder; ``None``: no link.
        remote_filename: of a checkpoint in a bucket, from the root of the bucket.
        remote_latest: of the link in a bucket; ``None``: no link.
        named_buckets: names in buckets that the user gave as URIs: (URI, name of the argument).
    """

    folder: str
    bucket: str | None
    local_folder: str
    filename: str
    latest: str | None
    remote_filename: str
    remote_latest: str | None
    named_buckets: tuple[tuple[str, str], ...]

    def check_buckets(self, places: Iterable[str]) -> None:
        """Check that the buckets in the names of remote files are among ``places``, the URIs that are saved to.

        Raises:
            ConfigError: a name is in another bucket.
        """
        buckets = {parse_uri(place)[:2] for place in places}
        for name, argument in self.named_buckets:
            if parse_uri(name)[:2] not in buckets:
                have = ", ".join(f"{scheme}://{bucket}" for scheme, bucket in sorted(buckets)) or "none"
                raise ConfigError(
                    f"{argument}={name!r}: nothing is uploaded to that bucket (buckets of this run: {have}). Give "
                    "save_folder its URI, or the Trainer a RemoteUploaderDownloader for it."
                )


@final
class Keep(NamedTuple):
    """Rules of retention.

    Attributes:
        policy: for the folder.
        only_newest: the folder keeps the newest alone.
        none_here: the folder keeps none: a checkpoint is deleted from the folder after the upload to a bucket.
        deletes: a save may delete older checkpoints from the folder, by ``policy`` or as ephemeral checkpoints.
        in_bucket: number of newest checkpoints to keep in a bucket; -1: all.
        any_ephemeral: there are ephemeral checkpoints, each deleted as soon as there is a newer checkpoint.
    """

    policy: RetentionPolicy
    only_newest: bool
    none_here: bool
    deletes: bool
    in_bucket: int
    any_ephemeral: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of a manager. :class:`composerlite.callbacks.CheckpointSaver` documents them.

    Attributes:
        names: of files and links.
        keep: rules of retention.
        staging_bytes: largest memory for a copy of the state, in bytes; ``None``: half of the free memory.
        replication: replicate checkpoints in memory to another node, at most at this rate in GB/s; ``None``: do not.
        upload_timeout: longest wait for uploads, in seconds.
    """

    names: Names
    keep: Keep
    overwrite: bool
    weights_only: bool
    ignore_keys: IgnoreKeys
    asynchronous: bool
    staging_bytes: int | None
    in_memory: bool
    replication: float | None
    on_exception: bool
    failure_limit: int
    best_metric: str | None
    upload_timeout: float


def save_options(given: Mapping[str, Any]) -> SaveOptions:
    """Check the options ``given``, by the names in :data:`DEFAULTS`, and fill in defaults.

    Raises:
        ConfigError: an option is unknown, a name or a number is invalid, or the folder is a URI of no known store.
    """
    for name in given:
        if name not in DEFAULTS:
            raise ConfigError(f"there is no option {name!r} of checkpoints.{did_you_mean(name, DEFAULTS)}")
    arguments = {**DEFAULTS, **given}
    replication = arguments["replication"]
    if arguments["staging_bytes"] is not None:
        _check_number(arguments["staging_bytes"], argument="save_staging_bytes")
    if replication is not None and not 0 < replication < math.inf:
        raise ConfigError(
            f"save_memory_replication={replication!r}: expected more than zero gigabytes per second, or None."
        )
    _check_number(arguments["failure_limit"], argument="save_failure_limit")
    _check_number(arguments["num_concurrent_uploads"], argument="num_concurrent_uploads", least=1)
    timeout, most = arguments["upload_timeout_in_seconds"], timedelta.max.total_seconds()
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout <= most:
        raise ConfigError(
            f"upload_timeout_in_seconds={timeout!r}: expected a number of seconds, more than 0, as 3600 for an hour."
        )
    ignore_keys = check_ignore_keys(arguments["ignore_keys"], argument="save_ignore_keys")
    if arguments["compat"] not in (None, "composer"):
        raise ConfigError(f"save_compat={arguments['compat']!r}: expected 'composer' or None.")
    if arguments["compat"] is not None:
        ignore_keys = functools.partial(_for_composer, ignore_keys)
    keep = _keep(arguments)
    return SaveOptions(
        names=_names(arguments, has_link_here=not keep.none_here),
        keep=keep,
        overwrite=arguments["overwrite"],
        weights_only=arguments["weights_only"],
        ignore_keys=ignore_keys,
        asynchronous=arguments["asynchronous"],
        staging_bytes=arguments["staging_bytes"],
        in_memory=arguments["in_memory"],
        replication=replication,
        on_exception=arguments["on_exception"],
        failure_limit=arguments["failure_limit"],
        best_metric=arguments["best_metric"],
        upload_timeout=timeout,
    )


def _keep(arguments: Mapping[str, Any]) -> Keep:
    """Check the arguments about retention."""
    any_ephemeral = arguments["ephemeral_interval"] is not None
    number, in_bucket = arguments["num_checkpoints_to_keep"], arguments["num_remote_checkpoints_to_keep"]
    _check_number(number, argument="save_num_checkpoints_to_keep", or_all=True)
    _check_number(in_bucket, argument="save_num_remote_checkpoints_to_keep", least=1, or_all=True)
    policy = retention_policy(
        -1 if number == 0 else number,
        keep_every=arguments["keep_every"],
        best_k=arguments["best_k"],
        best_metric=arguments["best_metric"],
        best_mode=arguments["best_mode"],
    )
    has_rules = arguments["keep_every"] is not None or arguments["best_k"] is not None or number not in (-1, 0)
    return Keep(policy, number == 1, number == 0, has_rules or any_ephemeral, in_bucket, any_ephemeral)


def _names(arguments: Mapping[str, Any], *, has_link_here: bool) -> Names:
    """Check the names in ``arguments``, and fill in missing names in buckets.

    With ``has_link_here``, the local folder has a link to the newest checkpoint.
    """
    folder, filename, staging = str(arguments["folder"]), str(arguments["filename"]), arguments["staging_folder"]
    link = None if arguments["latest_filename"] is None else str(arguments["latest_filename"])
    remote, remote_link = arguments["remote_file_name"], arguments["latest_remote_file_name"]
    check_variables(folder, argument="save_folder", allow_time=False)
    with naming("save_folder", folder):
        scheme, bucket, path = parse_uri(folder)
    if scheme in ("http", "https"):
        raise ConfigError(f"save_folder={folder!r}: checkpoints cannot be saved to an address, but to a bucket.")
    if staging is not None and not scheme:
        raise ConfigError(
            f"save_staging_folder={str(staging)!r}: nothing is staged for save_folder={folder!r}, a local folder. "
            "Leave it out, or give save_folder a URI."
        )
    if staging is not None and (not str(staging) or is_uri(str(staging))):
        raise ConfigError(f"save_staging_folder={str(staging)!r}: expected a folder on this machine.")
    local = path
    if scheme:
        path = path.strip("/")
        local = (path or "checkpoints") if staging is None else f"{str(staging).rstrip('/')}/{path}".rstrip("/")
    check_template(filename, argument="save_filename")
    given = {"save_remote_file_name": str(remote), "save_latest_remote_file_name": str(remote_link)}
    below = path.removeprefix("./").strip("/")
    if remote == OWN_REMOTE_NAME:
        remote = None if scheme else OWN_REMOTE_NAME.replace("{filename}", filename)
    if remote_link == OWN_REMOTE_LATEST:
        remote_link = None if scheme or link is None else OWN_REMOTE_LATEST.replace("{latest_filename}", link)
    has_remote_link = link is not None or remote_link is not None
    latest = link if has_link_here else None
    if latest is not None:
        check_template(latest, argument="save_latest_filename")
    return Names(
        folder=folder,
        bucket=f"{scheme}://{bucket}" if scheme else None,
        local_folder=local,
        filename=filename,
        latest=latest,
        remote_filename=_in_bucket(remote, f"{below}/{filename}", "save_remote_file_name"),
        remote_latest=_in_bucket(remote_link, f"{below}/{link}", "save_latest_remote_file_name")
        if has_remote_link
        else None,
        named_buckets=tuple((name, argument) for argument, name in given.items() if is_uri(name)),
    )


def _in_bucket(name: str | Path | None, default: str, argument: str) -> str:
    """Return the template of a name in a bucket: ``name``, the path of the URI ``name``, or ``default``."""
    if name is None:
        return default.lstrip("/")
    text = str(name)
    return check_template(parse_uri(text)[2] if is_uri(text) else text, argument=argument)


def _check_number(value: object, *, argument: str, least: int = 0, or_all: bool = False) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or (value < least and not (or_all and value == -1)):
        rule = "-1 for all, or a whole number" if or_all else "a whole number"
        raise ConfigError(f"{argument}={value!r}: expected {rule}, {least} or more.")


def _for_composer(ignore_keys: IgnoreKeys, contents: StateDict) -> None:
    """Remove ``ignore_keys`` from ``contents``, and convert the rest to the form of Composer, in place."""
    from composerlite.checkpoint.foreign.systems import make_loadable_in_composer  # rarely needed

    remove_keys(ignore_keys, contents)
    make_loadable_in_composer(contents)
