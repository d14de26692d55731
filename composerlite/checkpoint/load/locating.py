"""What a checkpoint's name stands for: a file, or the directory of a sharded one, on this machine or elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from composerlite import dist
from composerlite.checkpoint.load.download import fetched, followed, resolved, transferring
from composerlite.checkpoint.place.directory import INDEX, CheckpointFolder, LocalFolder, RemoteFolder, folder_of
from composerlite.errors import CheckpointNotFoundError
from composerlite.storage import ObjectStore, is_uri, parse_uri

__all__ = ["Located", "located"]


@final
@dataclass(frozen=True, slots=True)
class Located:
    """Where a checkpoint is.

    Attributes:
        name: as it was asked for.
        is_directory: whether it is a sharded one.
        path: of the file on this machine; ``None``: only rank 0 has it. Of the directory, if it is no URI.
        uri: of the directory.
        key: name of the directory in the object store that was given.
    """

    name: str
    is_directory: bool = False
    path: Path | None = None
    uri: str = ""
    key: str = ""

    def folder(self, object_store: ObjectStore | None) -> CheckpointFolder:
        """The directory, from this rank."""
        if self.path is not None:
            path = Path(os.path.realpath(self.path))
            roots = (root for root in path.parents if (root / ".manifest" / f"{path.relative_to(root)}.json").is_file())
            return LocalFolder(path, next(roots, None))
        return RemoteFolder(object_store, self.key) if object_store is not None else folder_of(self.uri)


@contextlib.contextmanager
def located(name: str, object_store: ObjectStore | None, *, progress_bar: bool) -> Generator[Located]:
    """What ``name`` is, the same on every rank, for as long as the block lasts. Rank 0 looks.

    A file that is elsewhere is downloaded, by rank 0. A directory is left where it is: each rank reads its part of it.

    Args:
        name: a path, a URI, or a name in ``object_store``.
        object_store: the store that ``name`` is a name in.
        progress_bar: show one on a terminal while a large file is downloaded.

    Raises:
        CheckpointNotFoundError: there is nothing, and it is elsewhere. What is not on this machine is told when it is
            read.
        ConfigError, PermissionError, ObjectStoreError: see :func:`~composerlite.checkpoint.load.download.fetched`.
    """
    is_here = object_store is None and not is_uri(name)
    with contextlib.ExitStack() as stack:
        found: Located | None = None
        with dist.get_group().all_or_none("looking for the checkpoint"):
            if dist.get_global_rank() == 0:
                found = _on_this_machine(name) if is_here else _elsewhere(stack, name, object_store, progress_bar)
        told = dist.get_group().broadcast(found)
        assert told is not None
        if not is_here and not told.is_directory and dist.get_global_rank() != 0:
            told = dataclasses.replace(told, path=None)
        yield told


def _on_this_machine(name: str) -> Located:
    path = resolved(Path(parse_uri(name)[2]))
    return Located(name, is_directory=(path / INDEX).is_file(), path=path)


def _elsewhere(stack: contextlib.ExitStack, name: str, object_store: ObjectStore | None, progress_bar: bool) -> Located:
    try:
        return Located(name, path=stack.enter_context(fetched(name, object_store, progress_bar=progress_bar)))
    except CheckpointNotFoundError:
        if object_store is None and parse_uri(name)[0] in ("http", "https"):
            raise
        with transferring(name, object_store) as (transfer, wanted):
            key = followed(transfer, wanted).rstrip("/")
            if not transfer.exists(f"{key}/{INDEX}"):
                raise
            return Located(name, is_directory=True, uri=transfer.store.get_uri(key), key=key)
