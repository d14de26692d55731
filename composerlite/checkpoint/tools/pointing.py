"""Resolution of a path or URI to a place with checkpoints, or to one checkpoint in such a place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

from composerlite.checkpoint.format import INDEX, MARKER, SUFFIX
from composerlite.checkpoint.format.weight_files import holds_model_states, holds_weights
from composerlite.checkpoint.load.resolve import deepspeed_save, place_of
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import home_of
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.place import Place
from composerlite.checkpoint.tools.surveying import UNLISTED, Found, checkpoint_at, survey
from composerlite.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from composerlite.storage import is_uri, open_store, parse_uri


class Pointed(NamedTuple):
    """A path or URI, resolved.

    Attributes:
        place: the place with the checkpoints.
        name: name of one checkpoint in ``place``; ``None``: all checkpoints there.
        text: the path or URI.
    """

    place: Place
    name: str | None
    text: str

    def found(self) -> list[Found]:
        """Return the checkpoint of this name, or all checkpoints of the place, oldest first.

        Raises:
            CheckpointNotFoundError: there is no checkpoint of this name.
        """
        if self.name is None:
            return survey(self.place)
        if (one := checkpoint_at(self.place, self.name)) is not None and one.name == self.name:
            return [one]
        listed = survey(self.place)
        if chosen := [one for one in listed if one.name == self.name]:
            return chosen
        if (file := self.place.files().get(self.name)) is not None:  # a checkpoint by its contents, not by its name
            return [Found(file.path, "", None, (UNLISTED,), (file,))]
        inside = tuple(self.place.files(self.name).values())
        names = [file.path.rpartition("/")[2] for file in inside]
        if holds_weights(names) or holds_model_states(names):
            return [Found(self.name, "", None, (UNLISTED,), inside)]
        raise CheckpointNotFoundError(f"{self.place.uri(self.name)!r} is no checkpoint.{_names_of(listed)}")

    def the_one(self, *, whole: bool = False) -> Found:
        """Return the one checkpoint of this name.

        Raises:
            ConfigError: ``text`` is a folder of several checkpoints.
            CheckpointNotFoundError: there is no checkpoint of this name.
            CorruptCheckpointError: the checkpoint is incomplete, and ``whole`` is true.
        """
        if self.name is None:
            raise ConfigError(f"{self.text!r} is a folder of checkpoints: give one of them, as 'ls' names it.")
        (found,) = self.found()
        if whole and found.manifest is not None and found.faults:
            raise CorruptCheckpointError(f"{self.text!r} is incomplete: {'; '.join(found.faults[:3])}.")
        return found


def place_at(text: str, *, may_be_new: bool = False) -> Place:
    """Open the folder, or the part of a bucket, at ``text``. No request is sent to a bucket.

    Args:
        text: a path or a URI.
        may_be_new: the folder need not exist: a copy makes the folder.

    Raises:
        ConfigError: the URI names no store, or ``text`` is a file and ``may_be_new`` is true.
        CheckpointNotFoundError: there is no such folder.
    """
    _check_listable(text)
    if is_uri(text):
        return Bucket.of(open_store(text), parse_uri(text)[2])
    folder = Path(parse_uri(text)[2])
    if may_be_new and folder.exists() and not folder.is_dir():
        raise ConfigError(f"{text!r} is a file: expected the folder of checkpoints to write to, or its URI.")
    if not may_be_new and not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise CheckpointNotFoundError(f"{text!r} {what}: expected the folder that has the checkpoints, or its URI.")
    return Folder(folder)


def _check_listable(text: str) -> None:
    if parse_uri(text)[0] in ("http", "https"):
        raise ConfigError(f"{text!r}: expected a folder, or a URI of an object store: addresses cannot be listed.")


@contextlib.contextmanager
def pointed(text: str) -> Generator[Pointed]:
    """Resolve ``text``, and keep the place open until the block ends. Links are followed.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint or folder.
        ConfigError: the URI names no store.
        CorruptCheckpointError: links form a loop.
    """
    _check_listable(text)
    with place_of(text, None) as (above, name):
        here = above.path_of(name)
        is_file = name != "" and above.exists(name)
        inside = [] if is_file or not name else above.names(name)
        is_one = is_file or any(one in (INDEX, MARKER) or one.endswith(SUFFIX) for one in inside)
        if is_one or (here and holds_weights(inside)) or (inside and deepspeed_save(above, name) is not None):
            place, found = home_of(above, name)
        elif here is None or here.is_dir():
            place, found = above.inside(name), None
        else:
            there = _names_of(survey(above)) if here.parent.is_dir() else ""
            raise CheckpointNotFoundError(f"there is no checkpoint and no folder {text!r}.{there}")
        if here and not Path(parse_uri(text)[2]).is_absolute() and here.is_relative_to(Path.cwd()):
            place = Folder(os.path.relpath(place.uri()))  # messages show the path as the user gave it
        yield Pointed(place, found, text)


def _names_of(listed: list[Found]) -> str:
    names = [one.name for one in listed]
    return f" The folder holds: {', '.join(names[-8:])}." if names else " The folder holds no checkpoint."
