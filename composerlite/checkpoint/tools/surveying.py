"""List the checkpoints in a place, complete and incomplete, with the reasons. Reads records, and no data."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import final

from composerlite.checkpoint.format import INDEX, INDEXES, MARKER, MODEL, SUFFIX, TRAIN
from composerlite.checkpoint.format.weight_files import holds_model_states, holds_weights
from composerlite.checkpoint.place.catalog import may_be_decider, record_in
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.place.place import Place, StoredFile
from composerlite.checkpoint.record.manifest import FileRecord, Manifest, living_line
from composerlite.errors import CheckpointError

__all__ = ["UNLISTED", "Found", "abandoned", "newest", "remove", "sealed", "survey"]

UNLISTED = "it has no record: its save did not end, or another program wrote it"
_LOOKS_SAVED = re.compile(
    r"\.(?:ckpt|safetensors)$|\.pt(?:\.(?:gz|bz2|xz|lzma|lz4|zst))?$|\.tar(?:\.\w+)?$|\.tgz$|(?:^|/)ep\d+-ba\d+", re.I
)
"""Names of checkpoints that are one file."""


@final
@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, or the files of an incomplete one.

    Attributes:
        name: relative to the place.
        kind: ``'monolithic'``, ``'weights'``, ``'sharded'``; ``'step'``: the directory of a ``Checkpointer``; empty:
            unknown.
        manifest: the record; ``None``: there is none, or it is damaged.
        faults: reasons why the checkpoint is not committed; empty for a committed checkpoint.
        files: the files that exist.
        decider: path of the file with the record; empty if there is none.
        copy_of: name in the record of a copy made by hand; ``None`` otherwise.
        saved_as: name in the record, if the path of the checkpoint ends with that name; ``None`` for copies and steps.
    """

    name: str
    kind: str
    manifest: Manifest | None
    faults: tuple[str, ...]
    files: tuple[StoredFile, ...]
    decider: str = ""
    copy_of: str | None = None
    saved_as: str | None = None

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
        """Name of the run that saved the checkpoint; ``None`` without a record."""
        return None if self.manifest is None else self.manifest.run_name

    @property
    def home(self) -> str:
        """The folder of the run, with a slash at the end; empty: the place itself."""
        if self.saved_as is None:
            return "".join(self.name.rpartition("/")[:2])
        return self.name.removesuffix(self.saved_as)

    @property
    def records(self) -> tuple[FileRecord, ...]:
        """Path and digest of each file that the record names on this disk."""
        return () if self.manifest is None else self.manifest.here

    @property
    def size_bytes(self) -> int:
        """Size of the files that exist, in bytes."""
        return sum(file.size_bytes for file in self.files)


def newest(listed: Iterable[Found]) -> Found | None:
    """Return the newest committed checkpoint of the run that saved last; ``None`` if no checkpoint is committed."""
    whole = [(one, manifest) for one in listed if (manifest := one.committed) is not None]
    if not whole:
        return None
    _, last = max(whole, key=lambda pair: pair[1].saved_at)
    of_run = [pair for pair in whole if pair[1].run_name == last.run_name]
    return max(living_line(of_run, lambda pair: pair[1]), key=lambda pair: pair[1].order)[0]


def abandoned(listed: Iterable[Found]) -> set[str]:
    """Return the names of the committed checkpoints, in one place, of abandoned attempts.

    A run leaves such checkpoints when it is started over, or goes back to an older one. No run resumes from them.
    """
    runs: dict[tuple[str, str], list[Manifest]] = {}
    for one in listed:
        if (manifest := one.committed) is not None:
            runs.setdefault((one.home, manifest.run_name), []).append(manifest)
    left: set[str] = set()
    for manifests in runs.values():
        living = living_line(manifests, lambda manifest: manifest)
        left |= {manifest.name for manifest in manifests} - {manifest.name for manifest in living}
    return left


def survey(place: Place) -> list[Found]:
    """List the checkpoints in ``place`` and its folders, oldest first; files without a record come last.

    Files that are no checkpoint by their names are left out.

    Raises:
        OSError, ObjectStoreError: the place cannot be listed. Only "not found" counts as absence.
    """
    files = place.files()
    deciders = [path for path in files if may_be_decider(path)]

    def read(path: str) -> Manifest | CheckpointError | None:
        try:
            return record_in(place, path)
        except CheckpointError as e:
            return e

    found: list[Found] = []
    for path, record in zip(deciders, place.each(read, deciders), strict=True):
        if isinstance(record, Manifest):
            found.append(_of_record(path, record, files))
        elif record is not None:
            name = path.rpartition("/")[0].removesuffix(f"/{MODEL}") if path.endswith(INDEXES) else path
            found.append(Found(name, "", None, (str(record),), _below(files, name), path))
    known = {one.name for one in found}
    for path in files:  # steps of another program: no record says what their files must contain
        name = path.removesuffix(f"/{MARKER}")
        if name != path and name not in known:
            needed = (f"{name}/{MODEL}/{INDEX}", f"{name}/{TRAIN}/rank0.pt")
            faults = tuple(f"{one.removeprefix(f'{name}/')} is missing" for one in needed if one not in files)
            found.append(Found(name, "step", None, faults or (UNLISTED,), _below(files, name), path))
    taken = {file.path for one in found for file in one.files}
    found.sort(key=_age)
    rest = {path: file for path, file in files.items() if path not in taken}
    return found + _without_record(rest, {one.name for one in found})


def sealed(place: Place, path: str) -> Found | None:
    """Return the checkpoint with the deciding file ``path``; ``None``: the file is missing, or has no record."""
    try:
        record = record_in(place, path)
    except CheckpointError as e:
        return Found(path, "", None, (str(e),), (StoredFile(path, place.size(path), None),), path)
    if record is None:
        return None

    def stored(name: str) -> StoredFile | None:
        with contextlib.suppress(FileNotFoundError):
            return StoredFile(name, place.size(name), None)
        return None

    files = place.each(stored, [file.path for file in record.here])
    return _of_record(path, record, {file.path: file for file in files if file is not None})


def remove(place: Place, found: Found, *, dry_run: bool = False) -> bool:
    """Delete a checkpoint that has a record.

    Args:
        place: has the checkpoint.
        found: the checkpoint.
        dry_run: do not delete it.

    Returns:
        Whether the checkpoint is deleted. It stays if another checkpoint was saved under its name meanwhile.
    """
    if found.manifest is None:
        return False
    there = record_in(place, found.decider)
    if there is not None and there.id != found.manifest.id:
        return False
    if not dry_run:
        delete_checkpoint(place, found.manifest)
    return True


def _age(one: Found) -> tuple[bool, tuple[int, int, int, str], str]:
    return one.manifest is None, (0, 0, 0, "") if one.manifest is None else one.manifest.order, one.name


def _of_record(decider: str, record: Manifest, files: Mapping[str, StoredFile]) -> Found:
    """Compare names and sizes of ``files`` with the record."""
    name = record.path_of(decider)
    manifest = replace(record, name=name, template=record.also.get(name, record.template))
    faults: list[str] = []
    there: list[StoredFile] = []
    for one in manifest.here:
        file = files.get(one.path)
        if file is None:
            faults.append(f"{one.path} is missing")
            continue
        there.append(file)
        if file.size_bytes != one.size_bytes:
            faults.append(f"{one.path} has {file.size_bytes} bytes and was saved with {one.size_bytes}")
    names = [saved for saved in (record.name, *record.also) if f"/{name}".endswith(f"/{saved}")]
    saved_as = None if record.form == "step" else max(names, key=len, default=None)
    copy_of = record.name if saved_as is None and record.form != "step" else None
    return Found(name, manifest.kind, manifest, tuple(faults), tuple(there), decider, copy_of, saved_as)


def _without_record(files: Mapping[str, StoredFile], known: set[str]) -> list[Found]:
    """Find sharded directories, folders of weights, and single files with the names of checkpoints.

    Data files of a killed save in a ``known`` directory are left out: ``gc`` removes them.
    """
    directories: dict[str, str] = {}
    alone: list[str] = []
    for path in files:
        folder, _, last = path.rpartition("/")
        if any(part.startswith(".") for part in folder.split("/")):
            continue
        if folder and (last == INDEX or last.endswith(SUFFIX)):
            if (name := folder.removesuffix(f"/{MODEL}")) not in known:
                directories[name] = "sharded"
        elif folder and (holds_weights([last]) or holds_model_states([last])):
            if folder not in known:
                directories.setdefault(folder, "weights")
        elif not last.startswith(".") and _LOOKS_SAVED.search(path):
            alone.append(path)
    found: list[Found] = []
    for name, kind in sorted(directories.items()):
        has_index = any(path in files for path in (f"{name}/{INDEX}", f"{name}/{MODEL}/{INDEX}"))
        fault = UNLISTED if kind == "weights" or has_index else f"{INDEX} is missing: its save did not end"
        found.append(Found(name, kind, None, (fault,), _below(files, name)))
    inside = {file.path for one in found for file in one.files}
    return found + [Found(path, "", None, (UNLISTED,), (files[path],)) for path in alone if path not in inside]


def _below(files: Mapping[str, StoredFile], name: str) -> tuple[StoredFile, ...]:
    """Return the file ``name``, or the files in the directory of that name."""
    return tuple(file for path, file in files.items() if path == name or path.startswith(f"{name}/"))
