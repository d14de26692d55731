"""List all checkpoints in a place, with the faults of incomplete checkpoints; find the checkpoint at a path or URI.

Only records are read, no data.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, final

from composerlite.checkpoint.format import INDEX, INDEXES, MARKER, MODEL, SUFFIX, TRAIN
from composerlite.checkpoint.format.weight_files import holds_model_states, holds_weights
from composerlite.checkpoint.load.resolve import deepspeed_save, place_of
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import home_of, map_reads, may_be_decider, record_in
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.place.place import Folder, Place, StoredFile
from composerlite.checkpoint.record.history import living_line
from composerlite.checkpoint.record.record import FileRecord, Manifest
from composerlite.errors import CheckpointError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from composerlite.storage import is_uri, open_store, parse_uri

UNLISTED = "it has no record: its save did not end, or another program wrote it"
_LOOKS_SAVED = re.compile(
    r"\.(?:ckpt|safetensors)$|\.pt(?:\.(?:gz|bz2|xz|lzma|lz4|zst))?$|\.tar(?:\.\w+)?$|\.tgz$|^ep\d+-ba\d+", re.I
)
"""Names of checkpoints in a single file."""


@final
class Found(NamedTuple):
    """A checkpoint, or the files of an incomplete checkpoint.

    Attributes:
        place: the folder or the bucket. Methods that read work until the place is closed.
        name: path below the place.
        kind: ``'monolithic'``, ``'weights'``, ``'sharded'``; ``'step'``: the directory of a ``Checkpointer``; empty:
            unknown.
        manifest: the record; ``None``: no record, or a damaged record.
        faults: reasons why the checkpoint is not committed; empty for a committed checkpoint.
        files: the existing files.
        decider: path of the file with the record; empty without a record.
        copy_of: for a copy made by hand, the name in the record; ``None`` otherwise.
        home: the folder of the run, with a slash at the end; empty: the place itself.
        abandoned: the checkpoint is committed, but no run resumes from it: its run was started over, or went back to
            an older checkpoint.
    """

    place: Place
    name: str
    kind: str
    manifest: Manifest | None
    faults: tuple[str, ...]
    files: tuple[StoredFile, ...]
    decider: str = ""
    copy_of: str | None = None
    home: str = ""
    abandoned: bool = False

    @property
    def uri(self) -> str:
        """Path or URI of the checkpoint."""
        return self.place.uri(self.name)

    @property
    def state(self) -> str:
        """``'committed'``, ``'copy'``, ``'unverified'`` if only the record is missing, or ``'incomplete'``."""
        if self.copy_of is not None and not self.faults:
            return "copy"
        return "unverified" if self.faults == (UNLISTED,) else "incomplete" if self.faults else "committed"

    @property
    def committed(self) -> Manifest | None:
        """The record of a committed checkpoint under its own name; ``None`` for all others."""
        return None if self.faults or self.copy_of is not None else self.manifest

    @property
    def run_name(self) -> str | None:
        """Name of the run; ``None`` without a record."""
        return None if self.manifest is None else self.manifest.run_name

    @property
    def records(self) -> tuple[FileRecord, ...]:
        """Path and digest of each recorded file on this disk."""
        return () if self.manifest is None else self.manifest.here

    @property
    def size_bytes(self) -> int:
        """Size of the existing files in bytes."""
        return sum(file.size_bytes for file in self.files)


def newest(listed: Iterable[Found]) -> Found | None:
    """Find the run that saved last, and return its newest committed checkpoint; ``None``: nothing is committed."""
    of_run = max(_by_run(listed), key=lambda pairs: max(manifest.saved_at for _, manifest in pairs), default=[])
    living = living_line(of_run, lambda pair: pair[1])
    return max(living, key=lambda pair: pair[1].order)[0] if living else None


def survey(place: Place) -> list[Found]:
    """List the checkpoints in ``place`` and its folders, oldest first; files without a record come last.

    Files without the name of a checkpoint are left out.

    Raises:
        OSError, ObjectStoreError: the place cannot be listed. Only "not found" counts as absence.
    """
    files = place.files()
    deciders = [path for path in files if may_be_decider(path)]
    records = zip(deciders, map_reads(place, functools.partial(_record, place), deciders), strict=True)
    found = [_of_record(place, path, record, files) for path, record in records if record is not None]
    known = {one.name for one in found}
    for path in files:  # a step of another program has no record with the names of the files
        name = path.removesuffix(f"/{MARKER}")
        if name != path and name not in known:
            needed = (f"{MODEL}/{INDEX}", f"{TRAIN}/rank0.pt")
            faults = tuple(f"{last} is missing" for last in needed if f"{name}/{last}" not in files)
            found.append(Found(place, name, "step", None, faults or (UNLISTED,), files_of(files, name), path))
    living = {one.name for pairs in _by_run(found) for one, _ in living_line(pairs, lambda pair: pair[1])}
    found = [one._replace(abandoned=one.committed is not None and one.name not in living) for one in found]
    found.sort(key=lambda one: (*((1,) if one.manifest is None else (0, *one.manifest.order)), one.name))
    taken = {file.path for one in found for file in one.files}
    rest = {path: file for path, file in files.items() if path not in taken}
    return found + _without_record(place, rest, {one.name for one in found})


def _by_run(listed: Iterable[Found]) -> list[list[tuple[Found, Manifest]]]:
    """Return the committed checkpoints of each run, with the records."""
    runs: dict[tuple[str, str], list[tuple[Found, Manifest]]] = {}
    for one in listed:
        if (manifest := one.committed) is not None:
            runs.setdefault((one.home, manifest.run_name), []).append((one, manifest))
    return list(runs.values())


def checkpoint_at(place: Place, path: str) -> Found | None:
    """Return the checkpoint with the record in the file ``path``; ``None``: no such file, or no record in the file."""
    record = _record(place, path)
    if record is None:
        return None

    def stored(name: str) -> StoredFile | None:
        with contextlib.suppress(FileNotFoundError):
            return StoredFile(name, place.size(name), None)
        return None

    paths = [file.path for file in record.here] if isinstance(record, Manifest) else [path]
    files = map_reads(place, stored, paths)
    return _of_record(place, path, record, {file.path: file for file in files if file is not None})


def remove(found: Found, *, dry_run: bool = False) -> bool:
    """Delete a checkpoint with a record.

    Args:
        found: the checkpoint.
        dry_run: delete nothing.

    Returns:
        True if the checkpoint is deleted, or with ``dry_run`` would be deleted. A checkpoint saved under the same name
        meanwhile is not deleted.
    """
    if found.manifest is None:
        return False
    there = record_in(found.place, found.decider)
    if there is not None and there.id != found.manifest.id:
        return False
    if not dry_run:
        delete_checkpoint(found.place, found.manifest)
    return True


# ── paths and URIs ───────────────────────────────────────────────────────────────────────────────────────────────────
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
        if chosen := [one for one in survey(self.place) if one.name == self.name]:
            return chosen
        files = files_of(self.place.files(), self.name)
        has_index = any(file.path.endswith(f"/{INDEX}") for file in files)  # the model of a step
        if files and not has_index:  # the contents show a checkpoint, the name does not
            return [Found(self.place, self.name, "", None, (UNLISTED,), files)]
        raise CheckpointNotFoundError(f"{self.place.uri(self.name)!r} is not a checkpoint.")

    def the_one(self, *, whole: bool = False) -> Found:
        """Return the one checkpoint of this name.

        Args:
            whole: an incomplete checkpoint with a record is an error.

        Raises:
            ConfigError: ``text`` is a folder of checkpoints.
            CheckpointNotFoundError: there is no checkpoint of this name.
            CorruptCheckpointError: the checkpoint has a record and is incomplete, and ``whole`` is true.
        """
        if self.name is None:
            raise ConfigError(f"{self.text!r} is a folder of checkpoints: give one checkpoint, as listed by 'ls'.")
        (found,) = self.found()
        if whole and found.manifest is not None and found.faults:
            raise CorruptCheckpointError(f"{self.text!r} is incomplete: {'; '.join(found.faults[:3])}.")
        return found


def place_at(text: str, *, may_be_new: bool = False) -> Place:
    """Open the folder, or the part of a bucket, at ``text``. No request is sent to a bucket.

    Args:
        text: a path or a URI.
        may_be_new: accept a missing folder, for a copy to make later.

    Raises:
        ConfigError: the URI names no store, or ``text`` is a file.
        CheckpointNotFoundError: there is no such folder.
    """
    if is_uri(text):
        return Bucket.of(open_store(text), parse_uri(text)[2])
    folder = Path(parse_uri(text)[2])
    if folder.is_file():
        raise ConfigError(f"{text!r} is a file: expected a folder of checkpoints, or its URI.")
    if not may_be_new and not folder.is_dir():
        raise CheckpointNotFoundError(f"{text!r} does not exist: expected a folder of checkpoints, or its URI.")
    return Folder(folder)


@contextlib.contextmanager
def pointed(text: str) -> Generator[Pointed]:
    """Resolve ``text``, and keep the place open until the block ends. Links are followed.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint or folder.
        ConfigError: the URI names no store.
        CorruptCheckpointError: links form a loop.
    """
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
            raise CheckpointNotFoundError(f"there is neither a checkpoint nor a folder of checkpoints at {text!r}.")
        if here and not Path(parse_uri(text)[2]).is_absolute() and here.is_relative_to(Path.cwd()):
            place = Folder(os.path.relpath(place.uri()))  # messages show the path as the user gave it
        yield Pointed(place, found, text)


# ── records and files ────────────────────────────────────────────────────────────────────────────────────────────────
def _record(place: Place, path: str) -> Manifest | CheckpointError | None:
    """Return the record in the file ``path``, or the error of an unreadable record."""
    try:
        return record_in(place, path)
    except CheckpointError as e:
        return e


def _of_record(
    place: Place, decider: str, record: Manifest | CheckpointError, files: Mapping[str, StoredFile]
) -> Found:
    """Return the checkpoint of a record. The faults are differences between the record and ``files``.

    An unreadable record, given as the error, is the only fault.
    """
    if not isinstance(record, Manifest):
        name = decider.rpartition("/")[0].removesuffix(f"/{MODEL}") if decider.endswith(INDEXES) else decider
        return Found(place, name, "", None, (str(record),), files_of(files, name), decider)
    name = record.name
    faults: list[str] = []
    there: list[StoredFile] = []
    for one in record.here:
        file = files.get(one.path)
        if file is None:
            faults.append(f"{one.path} is missing")
            continue
        there.append(file)
        if file.size_bytes != one.size_bytes:
            faults.append(f"{one.path} has {file.size_bytes} bytes and was saved with {one.size_bytes}")
    home, copy_of = "".join(name.rpartition("/")[:2]), None
    if record.form != "step":
        names = [saved for saved in record.also if f"/{name}".endswith(f"/{saved}")]
        home, copy_of = (name.removesuffix(max(names, key=len)), None) if names else (home, record.saved_as)
    return Found(place, name, record.kind, record, tuple(faults), tuple(there), decider, copy_of, home)


def _without_record(place: Place, files: Mapping[str, StoredFile], known: set[str]) -> list[Found]:
    """Find checkpoints without a record: sharded directories, folders of weights, and files named as checkpoints.

    Data files of a killed save in a ``known`` directory are left out: ``gc`` removes these files.
    """
    directories: dict[str, str] = {}
    alone: list[str] = []
    for path in files:
        folder, _, last = path.rpartition("/")
        if any(part.startswith(".") for part in folder.split("/")):
            continue
        if folder and (last == INDEX or last.endswith(SUFFIX)):
            directories[folder.removesuffix(f"/{MODEL}")] = "sharded"
        elif folder and (holds_weights([last]) or holds_model_states([last])):
            directories.setdefault(folder, "weights")
        elif not last.startswith(".") and _LOOKS_SAVED.search(last):
            alone.append(path)
    found: list[Found] = []
    for name in sorted(directories.keys() - known):
        has_index = any(path in files for path in (f"{name}/{INDEX}", f"{name}/{MODEL}/{INDEX}"))
        fault = UNLISTED if directories[name] == "weights" or has_index else f"{INDEX} is missing: its save did not end"
        found.append(Found(place, name, directories[name], None, (fault,), files_of(files, name)))
    inside = {file.path for one in found for file in one.files}
    return found + [Found(place, path, "", None, (UNLISTED,), (files[path],)) for path in alone if path not in inside]


def files_of(files: Mapping[str, StoredFile], name: str) -> tuple[StoredFile, ...]:
    """Return the file ``name``, or the files in the directory of this name."""
    return tuple(file for path, file in files.items() if path == name or path.startswith(f"{name}/"))
