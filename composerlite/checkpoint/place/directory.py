"""Which directory of a sharded checkpoint a path or a URI means."""

from __future__ import annotations

import os
from pathlib import Path

from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.checkpoint_folder import INDEX, CheckpointFolder, Claim, Sealed
from composerlite.checkpoint.place.local_folder import ON_ALL_NODES, LocalFolder
from composerlite.checkpoint.place.place import Place
from composerlite.checkpoint.place.remote_folder import RemoteFolder
from composerlite.storage import is_uri, open_store, parse_uri

__all__ = [
    "INDEX",
    "ON_ALL_NODES",
    "CheckpointFolder",
    "Claim",
    "LocalFolder",
    "PathOrUri",
    "RemoteFolder",
    "Sealed",
    "directory_of",
    "folder_of",
]

PathOrUri = str | os.PathLike[str] | CheckpointFolder
"""Where a sharded checkpoint is: a path, or a URI of an object store."""


def folder_of(place: PathOrUri, *, threads: int | None = None) -> CheckpointFolder:
    """The directory at ``place``. ``threads`` are those that move bytes to and from an object store.

    Raises:
        ConfigError: the URI names no store, or nothing in it.
    """
    if isinstance(place, CheckpointFolder):
        return place
    text = os.fspath(place)
    if is_uri(text):
        return RemoteFolder(open_store(text), parse_uri(text)[2], threads=threads or 8, closes=True)
    return LocalFolder(Path(parse_uri(text)[2]))


def directory_of(place: Place, path: str, root: str | None = None) -> CheckpointFolder:
    """The directory ``path`` in ``place``; ``root`` of it has its commit record, if that is known."""
    if (here := place.path_of(path)) is not None:
        return LocalFolder(here, None if root is None else place.path_of(root))
    assert isinstance(place, Bucket)
    return RemoteFolder(place.transfer.store, place.name_of(path))
