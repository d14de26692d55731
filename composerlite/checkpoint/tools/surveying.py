"""Survey of a place: its checkpoints, complete and incomplete, with the reasons. Reads records, and no data."""

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
"""What a checkpoint that is one file is called."""


@final
@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, or what is left of one.

    Attributes:
        name: below the place.
        kind: ``'monolithic'``, ``'weights'``, ``'sharded'``; ``'step'``: the directory of a ``Checkpointer``; empty:
            nothing says what it is.
        manifest: the record; ``None``: it has none, or a damaged one.
        faults: what is wrong with it; a checkpoint that is committed has none.
        files: those that are there.
        decider: path of the file with the record; empty if there is none.
        copy_of: name in the record of a copy made by hand, which lies elsewhere; ``None`` otherwise.
        saved_as: name in the record, where it lies under that name in some folder; ``None`` for copies and steps.
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
        """The record of the checkpoint, if it is complete and lies where it was saved."""
        return None if self.faults or self.copy_of is not None else self.manifest

    @property
    def run_name(self) -> str | None:
        """Name of the run that saved it; ``None`` if there is no record."""
        return None if self.manifest is None else self.manifest.run_name

    @property
    def home(self) -> str:
        """The folder that it was saved to, with a slash; empty: the place itself."""
        if self.saved_as is None:
            return "".join(self.name.rpartition("/")[:2])
        return self.name.removesuffix(self.saved_as)

    @property
    def records(self) -> tuple[FileRecord, ...]:
        """The files that must be there, and what they must contain."""
        return () if self.manifest is None else self.manifest.here

    @property
    def size_bytes(self) -> int:
        """Size of its files, in bytes."""
        return sum(file.size_bytes for file in self.files)


def newest(listed: Iterable[Found]) -> Found | None:
    """The newest that is committed and whole, of the run that saved last; ``None``: there is none.

    Of equal ones it is the first.
    """
    whole = [(one, manifest) for one in listed if (manifest := one.committed) is not None]
    if not whole:
        return None
    _, last = max(whole, key=lambda pair: pair[1].saved_at)
    of_run = [pair for pair in whole if pair[1].run_name == last.run_name]
    return max(living_line(of_run, lambda pair: pair[1]), key=lambda pair: pair[1].order)[0]


def abandoned(listed: Iterable[Found]) -> set[str]:
    """Return the names of the committed checkpoints in one place that are of an attempt that was abandoned.

    A run that was started over, or went back to an older checkpoint, left them behind: it resumes from none of them.
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
    """The checkpoints in ``place`` and in the folders in it, oldest first; what has no record comes last.

    What is no checkpoint by its name or by its files is left out.

    Raises:
        OSError, ObjectStoreError: the place cannot be listed. What is not seen is not absent.
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
    markers = [path for path in files if path.endswith(f"/{MARKER}") and path.removesuffix(f"/{MARKER}") not in known]
    found += [_of_marker(path, files) for path in markers]
    taken = {file.path for one in found for file in one.files}
    found.sort(key=_age)
    return found + _unlisted(files, taken, {one.name for one in found})


def sealed(place: Place, path: str) -> Found | None:
    """The checkpoint whose deciding file is ``path``; ``None`` if there is no such file, or it has no record."""
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


# ── checkpoints with a record ────────────────────────────────────────────────────────────────────────────────────────
def _of_record(decider: str, record: Manifest, files: Mapping[str, StoredFile]) -> Found:
    """A checkpoint, with what differs between its files and what they must be by their names and sizes."""
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
    names = [saved for saved in (record.name, *record.also) if _is_at(name, saved)]
    saved_as = None if record.form == "step" else max(names, key=len, default=None)
    copy_of = record.name if saved_as is None and record.form != "step" else None
    return Found(name, manifest.kind, manifest, tuple(faults), tuple(there), decider, copy_of, saved_as)


def _is_at(path: str, name: str) -> bool:
    """Return true if ``path`` is ``name`` in some folder."""
    return f"/{path}".endswith(f"/{name}")


def _of_marker(marker: str, files: Mapping[str, StoredFile]) -> Found:
    """The directory of a step that another program wrote: nothing says what its files must contain."""
    name = marker.removesuffix(f"/{MARKER}")
    needed = (f"{MODEL}/{INDEX}", f"{TRAIN}/rank0.pt")
    faults = tuple(f"{path} is missing" for path in needed if f"{name}/{path}" not in files) or (UNLISTED,)
    return Found(name, "step", None, faults, _below(files, name), marker)


# ── files without a record ───────────────────────────────────────────────────────────────────────────────────────────
def _unlisted(everything: Mapping[str, StoredFile], taken: set[str], known: set[str]) -> list[Found]:
    """Directories with the files of sharded checkpoints or with weights, and files that are called as checkpoints.

    None of them has a file that is ``taken``. Data files of a killed save in a directory that is ``known`` are garbage
    beside a checkpoint, and no checkpoint.
    """
    files = {path: file for path, file in everything.items() if path not in taken}
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
    found = [
        Found(name, kind, None, (_lack(name, kind, files),), _below(files, name))
        for name, kind in sorted(directories.items())
    ]
    inside = {file.path for one in found for file in one.files}
    return found + [Found(path, "", None, (UNLISTED,), (files[path],)) for path in alone if path not in inside]


def _lack(name: str, kind: str, files: Mapping[str, StoredFile]) -> str:
    """Reason why a directory without a record is listed so."""
    has_index = any(path in files for path in (f"{name}/{INDEX}", f"{name}/{MODEL}/{INDEX}"))
    return UNLISTED if kind == "weights" or has_index else f"{INDEX} is missing: its save did not end"


def _below(files: Mapping[str, StoredFile], name: str) -> tuple[StoredFile, ...]:
    """The file ``name``, or those in the directory of that name."""
    return tuple(file for path, file in files.items() if path == name or path.startswith(f"{name}/"))
