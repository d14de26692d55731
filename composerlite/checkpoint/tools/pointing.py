"""Resolution of a path or URI to a place with checkpoints, or to one checkpoint in such a place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

from composerlite.checkpoint.format import INDEX, MARKER, SUFFIX
from composerlite.checkpoint.format.weight_files import holds_model_states, holds_weights
from composerlite.checkpoint.load.resolve import deepspeed_save, followed, is_read_in_place
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
    if is_uri(text):
        return _bucket_at(text)
    folder = Path(parse_uri(text)[2])
    if may_be_new and folder.exists() and not folder.is_dir():
        raise ConfigError(f"{text!r} is a file: expected the folder of checkpoints to write to, or its URI.")
    if not may_be_new and not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise CheckpointNotFoundError(f"{text!r} {what}: expected the folder that has the checkpoints, or its URI.")
    return Folder(folder)


def _bucket_at(uri: str) -> Bucket:
    if parse_uri(uri)[0] in ("http", "https"):
        raise ConfigError(f"{uri!r}: expected a folder, or a URI of an object store: addresses cannot be listed.")
    return Bucket.of(open_store(uri), parse_uri(uri)[2])


@contextlib.contextmanager
def pointed(text: str) -> Generator[Pointed]:
    """Resolve ``text``, and keep the place open until the block ends. Links are followed.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint or folder.
        ConfigError: the URI names no store.
        CorruptCheckpointError: links form a loop.
    """
    if not is_uri(text):
        yield _on_disk(Path(parse_uri(text)[2]), text)
        return
    with contextlib.closing(_bucket_at(text)) as whole:
        name = followed(whole.inside("/"), whole.root) if whole.root else ""
        folder, _, last = name.rpartition("/")
        if name and any(whole.transfer.exists(at) for at in (name, f"{name}/{INDEX}", f"{name}/{MARKER}")):
            yield Pointed(*home_of(whole.inside(f"/{folder}"), last), text)
        else:
            yield Pointed(whole.inside(f"/{name}"), None, text)


def _on_disk(given: Path, text: str) -> Pointed:
    path = Path(followed(Folder(""), str(given))).resolve()  # a copy of a bucket has links that are files
    above = Folder(path.parent)
    place, name = above, path.name
    if path.is_file() or (path / MARKER).is_file() or is_read_in_place(path):
        place, name = home_of(above, path.name)
    elif not path.is_dir():
        there = _names_of(survey(above)) if path.parent.is_dir() else ""
        raise CheckpointNotFoundError(f"there is no checkpoint and no folder {text!r}.{there}")
    elif not any(file.name.endswith(SUFFIX) for file in path.iterdir()) and deepspeed_save(above, path.name) is None:
        place, name = Folder(path), None  # neither a sharded checkpoint without its index nor a save of DeepSpeed
    if not given.is_absolute() and path.is_relative_to(Path.cwd()):
        place = Folder(os.path.relpath(place.uri()))  # messages show the path as the user gave it
    return Pointed(place, name, text)


def _names_of(listed: list[Found]) -> str:
    names = [one.name for one in listed]
    return f" The folder holds: {', '.join(names[-8:])}." if names else " The folder holds no checkpoint."
