"""List the complete and incomplete checkpoints in a place, with reasons. Only records are read, no data."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import final

from composerlite.checkpoint.format import INDEX, INDEXES, MARKER, MODEL, SUFFIX, TRAIN
from composerlite.checkpoint.format.weight_files import holds_model_states, holds_weights
from composerlite.checkpoint.place.catalog import may_be_decider, record_in
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.place.place import Place, StoredFile, map_reads
from composerlite.checkpoint.record.attempts import living_line
from composerlite.checkpoint.record.record import FileRecord, Manifest
from composerlite.errors import CheckpointError

UNLISTED = "it has no record: its save did not end, or another program wrote it"
_LOOKS_SAVED = re.compile(
    r"\.(?:ckpt|safetensors)$|\.pt(?:\.(?:gz|bz2|xz|lzma|lz4|zst))?$|\.tar(?:\.\w+)?$|\.tgz$|^ep\d+-ba\d+", re.I
)
"""Names of checkpoints in a single file."""


@final
@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, or the files of an incomplete checkpoint.

    Attributes:
        name: path below the place.
        kind: ``'monolithic'``, ``'weights'``, ``'sharded'``; ``'step'``: the directory of a ``Checkpointer``; empty:
            unknown.
        manifest: the record; ``None``: no record, or a damaged record.
        faults: reasons why the checkpoint is not committed; empty for a committed checkpoint.
        files: the existing files.
        decider: path of the file with the record; empty without a record.
        copy_of: name in the record of a copy made by hand; ``None`` otherwise.
        home: the folder of the run, with a slash at the end; empty: the place itself.
    """

    name: str
    kind: str
    manifest: Manifest | None
    faults: tuple[str, ...]
    files: tuple[StoredFile, ...]
    decider: str = ""
    copy_of: str | None = None
    home: str = ""

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
    whole = [(one, manifest) for one in listed if (manifest := one.committed) is not None]
    if not whole:
        return None
    last, _ = max(whole, key=lambda pair: pair[1].saved_at)
    of_run = [pair for pair in whole if (pair[0].home, pair[0].run_name) == (last.home, last.run_name)]
    return max(living_line(of_run, lambda pair: pair[1]), key=lambda pair: pair[1].order)[0]


def abandoned(listed: Iterable[Found]) -> set[str]:
    """Return the names of the committed checkpoints of abandoned attempts, in one place.

    A run abandons checkpoints when the run is started over, or goes back to an older checkpoint. No run resumes from
    abandoned checkpoints.
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

    Files without the name of a checkpoint are left out.

    Raises:
        OSError, ObjectStoreError: the place cannot be listed. Only "not found" counts as absence.
    """
    files = place.files()
    deciders = [path for path in files if may_be_decider(path)]
    found: list[Found] = []
    for path, record in zip(deciders, map_reads(place, functools.partial(_record, place), deciders), strict=True):
        if isinstance(record, Manifest):
            found.append(_of_record(path, record, files))
        elif record is not None:
            name = path.rpartition("/")[0].removesuffix(f"/{MODEL}") if path.endswith(INDEXES) else path
            found.append(Found(name, "", None, (str(record),), _below(files, name), path))
    known = {one.name for one in found}
    for path in files:  # steps of other programs have no record with the names of their files
        name = path.removesuffix(f"/{MARKER}")
        if name != path and name not in known:
            needed = (f"{MODEL}/{INDEX}", f"{TRAIN}/rank0.pt")
            faults = tuple(f"{last} is missing" for last in needed if f"{name}/{last}" not in files)
            found.append(Found(name, "step", None, faults or (UNLISTED,), _below(files, name), path))
    found.sort(key=lambda one: (*((1,) if one.manifest is None else (0, *one.manifest.order)), one.name))
    taken = {file.path for one in found for file in one.files}
    rest = {path: file for path, file in files.items() if path not in taken}
    return found + _without_record(rest, {one.name for one in found})


def checkpoint_at(place: Place, path: str) -> Found | None:
    """Return the checkpoint with the deciding file ``path``; ``None``: the file is missing, or has no record."""
    record = _record(place, path)
    if record is None:
        return None
    if not isinstance(record, Manifest):
        return Found(path, "", None, (str(record),), (StoredFile(path, place.size(path), None),), path)

    def stored(name: str) -> StoredFile | None:
        with contextlib.suppress(FileNotFoundError):
            return StoredFile(name, place.size(name), None)
        return None

    files = map_reads(place, stored, [file.path for file in record.here])
    return _of_record(path, record, {file.path: file for file in files if file is not None})


def remove(place: Place, found: Found, *, dry_run: bool = False) -> bool:
    """Delete a checkpoint with a record.

    Args:
        place: place of the checkpoint.
        found: the checkpoint.
        dry_run: delete nothing.

    Returns:
        True if the checkpoint is deleted. A checkpoint saved under this name meanwhile stays.
    """
    if found.manifest is None:
        return False
    there = record_in(place, found.decider)
    if there is not None and there.id != found.manifest.id:
        return False
    if not dry_run:
        delete_checkpoint(place, found.manifest)
    return True


def _record(place: Place, path: str) -> Manifest | CheckpointError | None:
    """Return the record in the file ``path``, or the error of an unreadable record."""
    try:
        return record_in(place, path)
    except CheckpointError as e:
        return e


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
    home, copy_of = "".join(name.rpartition("/")[:2]), None
    if record.form != "step":
        names = [saved for saved in (record.name, *record.also) if f"/{name}".endswith(f"/{saved}")]
        home, copy_of = (name.removesuffix(max(names, key=len)), None) if names else (home, record.name)
    return Found(name, manifest.kind, manifest, tuple(faults), tuple(there), decider, copy_of, home)


def _without_record(files: Mapping[str, StoredFile], known: set[str]) -> list[Found]:
    """Find sharded directories, folders of weights, and single files with the names of checkpoints.

    Data files of a killed save in a ``known`` directory are left out: ``gc`` removes these files.
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
        elif not last.startswith(".") and _LOOKS_SAVED.search(last):
            alone.append(path)
    found: list[Found] = []
    for name, kind in sorted(directories.items()):
        has_index = any(path in files for path in (f"{name}/{INDEX}", f"{name}/{MODEL}/{INDEX}"))
        fault = UNLISTED if kind == "weights" or has_index else f"{INDEX} is missing: its save did not end"
        found.append(Found(name, kind, None, (fault,), _below(files, name)))
    inside = {file.path for one in found for file in one.files}
    return found + [Found(path, "", None, (UNLISTED,), (files[path],)) for path in alone if path not in inside]


def _below(files: Mapping[str, StoredFile], name: str) -> tuple[StoredFile, ...]:
    """Return the file ``name``, or the files in the directory of this name."""
    return tuple(file for path, file in files.items() if path == name or path.startswith(f"{name}/"))
