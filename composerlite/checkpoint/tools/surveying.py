"""Survey of a place: its checkpoints, complete and incomplete, with the reasons. Opens no data file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import final

from composerlite.checkpoint.format.weight_files import holds_model_states, holds_weights
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import remove_manifest
from composerlite.checkpoint.place.place import Place, StoredFile
from composerlite.checkpoint.place.step import MARKER, MODEL, NEXT, TRAIN, Successor
from composerlite.checkpoint.record.manifest import (
    MANIFESTS,
    CheckpointMetadata,
    FileRecord,
    Manifest,
    living_line,
    record_path,
    with_files_of_others,
)
from composerlite.errors import CheckpointError

__all__ = ["UNLISTED", "Found", "abandoned", "committing", "newest", "remove", "survey", "vouched_from_above"]

UNLISTED = "it has no manifest: its save did not end, or another program wrote it"
_INDEX = ".metadata"
_STEP = re.compile(r"(?:.*/)?step(\d+)")
_OF_OTHERS = re.compile(r"\.(?:ckpt|safetensors)$", re.I)
"""What other programs call a checkpoint that is one file, and a save of ours does not."""
_LOOKS_SAVED = re.compile(
    rf"{_OF_OTHERS.pattern}|\.pt(?:\.(?:gz|bz2|xz|lzma|lz4|zst|lzo))?$|\.tar(?:\.\w+)?$|\.tgz$|(?:^|/)ep\d+-ba\d+", re.I
)
"""What a checkpoint that is one file is called."""
_MANIFEST = re.compile(rf"(?P<root>(?:[^./][^/]*/)*){re.escape(MANIFESTS)}/(?P<name>(?:[^/]+/)*[^./][^/]*)\.json")
""".manifest/ep1.pt.json; a folder of many runs has one for each of them."""


@final
@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint, or what is left of one.

    Attributes:
        name: below the place.
        kind: ``'monolithic'``, ``'weights'``, ``'sharded'``; ``'step'``: the directory of a ``Checkpointer``; empty:
            nothing says what it is.
        manifest: of the checkpoint; ``None``: it has none. That of a step is put together from what its files say.
        faults: what is wrong with it; a checkpoint that is committed has none.
        files: those that are there, without the manifest.
        commits: what makes it exist, in the order in which that was written: it goes first.
    """

    name: str
    kind: str
    manifest: Manifest | None
    faults: tuple[str, ...]
    files: tuple[StoredFile, ...]
    commits: tuple[str, ...]

    @property
    def state(self) -> str:
        """``'committed'``, ``'unverified'`` where nothing is missing but a manifest, or ``'incomplete'``."""
        return "unverified" if self.faults == (UNLISTED,) else "incomplete" if self.faults else "committed"

    @property
    def may_be_left_over(self) -> bool:
        """Return true for data that a save of ours which did not end may have left: nothing is in its name or files
        that only other programs write."""
        return (
            self.manifest is None and not self.commits and self.kind != "weights" and not _OF_OTHERS.search(self.name)
        )

    @property
    def committed(self) -> Manifest | None:
        """Manifest of the checkpoint, if it is complete."""
        return None if self.faults else self.manifest

    @property
    def run_name(self) -> str | None:
        """Name of the run that saved it; ``None`` if there is no manifest."""
        return None if self.manifest is None else self.manifest.run_name

    @property
    def home(self) -> str:
        """The folder that it was saved to, with its slash; empty: the place itself."""
        if self.kind == "step":
            return "".join(self.name.rpartition("/")[:2])
        return self.commits[0].partition(f"{MANIFESTS}/")[0] if self.commits else ""

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


def vouched_from_above(place: Place) -> Callable[[Found], bool]:
    """Return true if what is found in ``place`` is of a checkpoint whose record lies in a place that this one is in.

    So is the record of a commit that has begun, which the next start may complete.

    Raises:
        OSError, ObjectStoreError: that cannot be seen. What is not seen is not absent.
    """
    if place.exists(MARKER) or any(up.exists(MARKER) for up, _ in place.above()):
        return lambda _: True  # in the directory of a step, all is a part of it
    taken: set[str] = set()
    for up, prefix in place.above():
        records = up.inside(MANIFESTS)
        paths = [path for path in records.files() if path.endswith(".json")]
        begun = [(MANIFESTS, data) for data in up.announced(None)]
        for path, data in (*zip(paths, records.read_all(paths), strict=True), *begun):
            try:
                files = () if data is None else Manifest.from_json(data, records.uri(path)).files
            except CheckpointError:
                return lambda _: True  # it is unknown which files it lists
            taken |= {file.path.removeprefix(prefix) for file in files if file.path.startswith(prefix)}
    return lambda found: any(file.path in taken for file in found.files)


def survey(place: Place) -> list[Found]:
    """The checkpoints in ``place`` and in the folders in it, oldest first; what has no manifest comes last.

    What is no checkpoint by its name or by its files is left out.

    Raises:
        OSError, ObjectStoreError: the place cannot be listed. What is not seen is not absent.
    """
    files = dict(place.files())
    markers = [path for path in files if path.rpartition("/")[2] == MARKER and "/" in path]
    models = [path.removesuffix(MARKER) + record_path(MODEL) for path in markers]
    unfinished = [folder for path in files if (folder := _unfinished_step(path, files)) is not None]
    of_steps = {*models, *(f"{folder}/{record_path(MODEL)}" for folder in unfinished)}
    manifests = [path for path in files if _MANIFEST.fullmatch(path) is not None and path not in of_steps]
    followers = [path for marker in markers if (path := _next_of(marker)) in files]
    read = [*manifests, *markers, *models, *followers]
    contents = dict(zip(read, place.read_all(read), strict=True))
    found = [_of_manifest(place, path, data, files) for path in manifests if (data := contents[path]) is not None]
    strange = with_files_of_others(one.manifest for one in found if one.manifest is not None)
    found = [
        _torn(
            one.name, "", files, one.commits, f"its manifest names {strange[one.name]!r}, a file of another checkpoint"
        )
        if one.name in strange
        else one
        for one in found
    ]
    for marker, model in zip(markers, models, strict=True):
        if (data := contents[marker]) is not None:
            found.append(_of_step(place, marker, data, contents[model], contents.get(_next_of(marker)), files))
    for name in unfinished:
        commits = (f"{name}/{record_path(MODEL)}",)
        found.append(_torn(name, "step", files, commits, f"{MARKER} is missing: its save did not end"))
    taken = {file.path for one in found for file in one.files} | {path for one in found for path in one.commits}
    found.sort(key=_age)
    return found + _unlisted(files, taken, {one.name for one in found})


def committing(place: Place, listed: Iterable[Found]) -> set[str]:
    """Return the files of commits in ``place`` that have begun and not ended: to be called after it was ``listed``.

    Args:
        place: has them.
        listed: what is in it. The commits are looked for in the folders of these.
    """
    paths = [PurePosixPath(file.path) for one in listed for file in one.files]
    files: set[str] = set()
    for home in {"" if str(folder) == "." else f"{folder}/" for path in paths for folder in path.parents}:
        for manifest in Catalog(place.inside(home.rstrip("/"))).begun():
            files |= {home + record.path for record in manifest.files}
    return files


def remove(place: Place, found: Found, *, dry_run: bool = False) -> bool:
    """Remove a checkpoint: what makes it one first, and of a directory its index next.

    A kill leaves a deletion that the next start completes, where there was a manifest.

    Args:
        place: has the checkpoint.
        found: the checkpoint.
        dry_run: do not remove it.

    Returns:
        Whether it goes. It stays if another one of its name was saved since it was found, or is being saved.
    """
    data = sorted((file.path for file in found.files), key=lambda path: not path.endswith(f"/{_INDEX}"))
    with contextlib.ExitStack() as stack:
        for match in filter(None, map(_MANIFEST.fullmatch, found.commits)):
            home = place.inside(match["root"].rstrip("/"))
            with contextlib.suppress(CheckpointError):  # a damaged one says nothing
                manifest = Catalog(home).manifest_of(match["name"])
                if found.manifest is not None and manifest is None:
                    return True  # another process deletes it
                if manifest is not None:
                    if _is_another(place, home, found, manifest):
                        return False
                    if not dry_run:
                        stack.enter_context(home.deleting(manifest))
        if dry_run:
            return True
        for record in reversed(found.commits):
            remove_manifest(place, record)
        for path in data:
            place.delete(path)
    place.remove_emptied([*found.commits, *data])
    return True


def _is_another(place: Place, home: Place, found: Found, there: Manifest) -> bool:
    """Return true if what the name of ``found`` has is not what was found: its manifest is ``there``."""
    if found.manifest is None:
        return False
    is_same = there.saved_at == found.manifest.saved_at and {file.xxh3_128 for file in there.here} <= {
        file.xxh3_128 for file in found.records
    }
    follower = f"{found.name}/{NEXT}"  # of a step in a bucket, which is to be replaced
    is_followed = found.kind == "step" and place.exists(follower) and follower not in {one.path for one in found.files}
    return not is_same or is_followed or any(True for _ in Catalog(home).begun(there.name))


def _age(one: Found) -> tuple[bool, tuple[int, int, int, str], str]:
    return one.manifest is None, (0, 0, 0, "") if one.manifest is None else one.manifest.order, one.name


# ── checkpoints with metadata of their own ───────────────────────────────────────────────────────────────────────────
def _of_manifest(place: Place, path: str, data: bytes, files: Mapping[str, StoredFile]) -> Found:
    match = _MANIFEST.fullmatch(path)
    assert match is not None
    root, name = match["root"], match["root"] + match["name"]
    try:
        manifest = Manifest.from_json(data, place.uri(path))
    except CheckpointError as e:
        return _torn(name, "", files, (path,), str(e))
    if manifest.name != match["name"]:
        return _torn(name, "", files, (path,), f"its manifest is that of {manifest.name!r}")
    records = tuple(replace(record, path=root + record.path) for record in manifest.files)
    return _compared(replace(manifest, name=name, files=records), manifest.kind, files, (path,))


def _compared(manifest: Manifest, kind: str, files: Mapping[str, StoredFile], commits: tuple[str, ...]) -> Found:
    """A checkpoint, with what differs between its files and what they must be by their names and sizes."""
    faults: list[str] = []
    there: list[StoredFile] = []
    for record in manifest.here:
        file = files.get(record.path)
        if file is None:
            faults.append(f"{record.path} is missing")
            continue
        there.append(file)
        if file.size_bytes != record.size_bytes:
            faults.append(f"{record.path} has {file.size_bytes} bytes and was saved with {record.size_bytes}")
    return Found(manifest.name, kind, manifest, tuple(faults), tuple(there), commits)


def _next_of(marker: str) -> str:
    return marker.removesuffix(MARKER) + NEXT


def _of_step(
    place: Place,
    marker: str,
    data: bytes,
    model: bytes | None,
    follower: bytes | None,
    files: Mapping[str, StoredFile],
) -> Found:
    """The directory of a step, as ``Checkpointer`` or OLMo-core saves it; ``follower`` is to take its place."""
    name = marker.removesuffix(f"/{MARKER}")
    try:
        said = CheckpointMetadata.from_json(data, place.uri(marker))
        ranks = tuple(replace(record, path=f"{name}/{record.path}") for record in said.train)
        inner = None if model is None else Manifest.from_json(model, place.uri(f"{name}/{record_path(MODEL)}"))
        new = None if follower is None else Successor.from_json(follower, place.uri(_next_of(marker)))
    except CheckpointError as e:
        return _torn(name, "step", files, (marker,), f"its {MARKER} or its manifest is damaged: {e}")
    missing = [path for path in (f"{MODEL}/{_INDEX}", f"{TRAIN}/rank0.pt") if f"{name}/{path}" not in files]
    if inner is None:  # of another program: nothing says what its files must contain
        return _torn(name, "step", files, (marker,), *([f"{path} is missing" for path in missing] or [UNLISTED]))
    records = tuple(replace(record, path=f"{name}/{record.path}") for record in inner.files)
    commits = (f"{name}/{record_path(MODEL)}", marker)
    index = next((record.xxh3_128 for record in inner.files if record.path == f"{MODEL}/{_INDEX}"), "")
    if new is not None and new.replaces != index and new.marker.encode() != data:
        # the model is that of another save than the files of ranks
        fault = "a save that replaces it has not ended: once it has, or the step is saved again, it is whole"
        return _torn(name, "step", files, commits, fault)
    number = _STEP.fullmatch(name)
    manifest = Manifest(
        name=name,
        kind="step",
        template="step{step}",
        run_name="",
        timestamp={"batch": 0 if number is None else int(number[1])},
        files=(*ranks, *records),
        versions=inner.versions,
        saved_at=inner.saved_at,
        world_size=said.world_size,
        ephemeral=said.ephemeral,
    )
    found = _compared(manifest, "step", files, commits)
    return found if new is None else replace(found, files=(*found.files, files[_next_of(marker)]))


def _unfinished_step(path: str, files: Mapping[str, StoredFile]) -> str | None:
    """The directory of a step whose commit record of the model is ``path`` and which does not exist for all that."""
    folder = path.removesuffix(f"/{record_path(MODEL)}")
    is_one = folder != path and f"{folder}/{TRAIN}/rank0.pt" in files and f"{folder}/{MARKER}" not in files
    return folder if is_one else None


# ── files without a manifest ─────────────────────────────────────────────────────────────────────────────────────────
def _unlisted(everything: Mapping[str, StoredFile], taken: set[str], known: set[str]) -> list[Found]:
    """Directories with the files of sharded checkpoints or with weights, and files that are called as checkpoints.

    None of them has a file that is ``taken``. What a save that did not end has left in the directory of one that is
    ``known`` is none: the next save of that name removes it.
    """
    files = {path: file for path, file in everything.items() if path not in taken}
    directories: dict[str, str] = {}
    alone: list[str] = []
    for path in files:
        folder, _, last = path.rpartition("/")
        if any(part.startswith(".") for part in folder.split("/")):
            continue
        if folder and (last == _INDEX or last.endswith(".distcp")):
            if (name := folder.removesuffix(f"/{MODEL}")) not in known:
                directories[name] = "sharded"
        elif folder and (holds_weights([last]) or holds_model_states([last])):
            directories.setdefault(folder, "weights")
        elif not last.startswith(".") and _LOOKS_SAVED.search(path):
            alone.append(path)
    found = [_torn(name, kind, files, (), _lack(name, kind, files)) for name, kind in sorted(directories.items())]
    inside = {file.path for one in found for file in one.files}
    return found + [Found(path, "", None, (UNLISTED,), (files[path],), ()) for path in alone if path not in inside]


def _lack(name: str, kind: str, files: Mapping[str, StoredFile]) -> str:
    """Reason why a directory without a manifest is listed so."""
    has_index = any(path in files for path in (f"{name}/{_INDEX}", f"{name}/{MODEL}/{_INDEX}"))
    return UNLISTED if kind == "weights" or has_index else f"{_INDEX} is missing: its save did not end"


def _torn(name: str, kind: str, files: Mapping[str, StoredFile], commits: tuple[str, ...], *faults: str) -> Found:
    """A checkpoint of which no manifest says what it must be."""
    return Found(name, kind, None, faults, _below(files, name), commits)


def _below(files: Mapping[str, StoredFile], name: str) -> tuple[StoredFile, ...]:
    """The file ``name``, or those in the directory of that name, without the manifest."""
    prefix = f"{name}/"
    return tuple(
        file
        for path, file in files.items()
        if path == name or (path.startswith(prefix) and path != prefix + MARKER and f"/{MANIFESTS}/" not in path)
    )
