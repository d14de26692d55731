"""Read the records of the checkpoints in a place, and find the latest checkpoint. This module changes no place.

The deciding file of a checkpoint contains the record. The checkpoint exists if this file exists. The deciding file of a
checkpoint in one file is that file, the deciding file of a directory is its index.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TypeAlias, final

from composerlite.checkpoint.format import INDEX, INDEXES, MODEL, MOST_TAIL_BYTES, SUFFIX, WEIGHTS_INDEX
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.place import LINK_SUFFIX, OnBytes, Place, map_reads
from composerlite.checkpoint.record.naming import data_file_id
from composerlite.checkpoint.record.record import (
    FileRecord,
    Manifest,
    NewerManifestError,
    tail_bytes,
    unseal,
    unseal_index,
    unseal_weights_index,
)
from composerlite.errors import CheckpointError, CheckpointExistsError, ConfigError, CorruptCheckpointError

log = logging.getLogger(__name__)
Fault: TypeAlias = CorruptCheckpointError | NewerManifestError | OSError
"""The reason for an unreadable record."""
ANNOUNCED = ".next"
"""Suffix of an announcement: an object, written before the commit of an upload, with the name and the id of the
checkpoint. The announced checkpoint may be newer than the target of the link.
"""
_MOST_RECORD_BYTES = 64 << 20
_NEVER = (SUFFIX, LINK_SUFFIX, ".safetensors", ".json")
"""Suffixes of files without a record, other than the index of weights."""


def may_be_decider(path: str) -> bool:
    """Return true if a file of this name may contain the record of a checkpoint."""
    folder, _, last = path.rpartition("/")
    if any(part.startswith(".") for part in folder.split("/")):
        return False
    return last in INDEXES or not (last.startswith(".") or last.endswith(_NEVER))


def record_in(place: Place, path: str, *, chunks: bool = False) -> Manifest | None:
    """Return the record in the file ``path``.

    ``None``: there is no such file, or the file has no record, or is the archive of a rank other than 0, which does not
    list the other archives.

    Args:
        place: the place.
        path: path of the file.
        chunks: read the whole index of a directory, with the digests of the chunks of data files.

    Raises:
        CorruptCheckpointError: the record is damaged.
        NewerManifestError: a newer version of composerlite wrote the record.
    """
    try:
        folder, _, last = path.rpartition("/")
        if last == WEIGHTS_INDEX or (chunks and last == INDEX):
            return record_of_index(place, path, place.read(path))
        size_bytes, end = place.end(path, MOST_TAIL_BYTES)
        if len(end) < (needed := min(tail_bytes(end), size_bytes, _MOST_RECORD_BYTES)):
            size_bytes, end = place.end(path, needed)
    except FileNotFoundError:
        return None
    found = unseal(path, size_bytes, end, place.uri(path))
    # The index of another program is a whole pickle. Any other index beside our data was cut off.
    is_cut = found is None and last == INDEX and not end.endswith(pickle.STOP)
    if is_cut and any(data_file_id(f"{folder}/{name}".lstrip("/")) for name in place.names(folder)):
        raise CorruptCheckpointError(f"the record of {place.uri(path)!r} is gone: the file was cut off")
    is_part = found is not None and found.form == "archives" and len(found.files) == 1  # of another rank
    return None if found is None or is_part else _with_node(place, found)


def record_of_index(place: Place, path: str, index: bytes) -> Manifest | None:
    """Return the record, with digests of chunks, in the index ``path`` with the content ``index``.

    Raises as :func:`record_in`.
    """
    unsealed = unseal_index if path.rpartition("/")[2] == INDEX else unseal_weights_index
    found = unsealed(path, index, place.uri(path))
    return None if found is None else _with_node(place, found)


def _with_node(place: Place, manifest: Manifest) -> Manifest:
    """Return the record with the number of the node whose files are in ``place``, if nodes have disks of their own.

    If the files of no node are here, the result has the number of no node, so ``Manifest.here`` has only common files.
    """
    firsts = {file.node: file.path for file in reversed(manifest.files) if file.node is not None}
    if not firsts:
        return manifest
    here = [node for node, path in sorted(firsts.items()) if place.exists(path)]
    return replace(manifest, node=here[0] if here else max(firsts) + 1)


def home_of(place: Place, name: str) -> tuple[Place, str]:
    """Return the place in which the checkpoint ``name`` was saved, and the name at the save.

    If the saved name has folders, such as ``sub/ep1.pt``, the result is above ``place``. Without a readable record the
    result is ``place`` and ``name``.
    """
    full = f"/{place.name_of(name)}"
    for path in _deciders_of(name):
        try:
            record = record_in(place, path)
        except CheckpointError:  # raised again when the checkpoint is opened
            break
        for saved in () if record is None else (record.name, *record.also):
            if saved != name and full.endswith(f"/{saved}"):
                return place.inside(full.removesuffix(saved)), saved
    return place, name


@final
class Catalog:
    """The checkpoints in ``place``, a folder or a bucket. Only :meth:`verify` reads data.

    A file without a record is no checkpoint, and is never listed. The same holds for a copy made by hand, with another
    name in the record. Every method raises the errors of the place; only FileNotFoundError counts as absence.
    """

    def __init__(self, place: str | Path | Place) -> None:
        self.place = Folder(place) if isinstance(place, str | Path) else place

    @property
    def folder(self) -> Path:
        """Path of the place, which must be a folder of this machine."""
        path = self.place.path_of("")
        assert path is not None, f"{self.place.uri()} is no folder"
        return path

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────
    def manifests(self, names: Sequence[str] | None = None) -> list[Manifest]:
        """Return the record of every committed checkpoint, oldest first. Unreadable records are logged and left out.

        Do not decide deletions from a record that is missing in the result.

        Args:
            names: names of checkpoints; ``None``: all.

        Raises:
            OSError: a record in a bucket cannot be read.
        """
        return self.manifests_and_faults(names)[0]

    def manifests_and_faults(self, names: Sequence[str] | None = None) -> tuple[list[Manifest], dict[str, Fault]]:
        """Return records as :meth:`manifests` does, and the fault of each unreadable record, by name.

        Only CorruptCheckpointError may justify a rename or a deletion. An OSError of a bucket is raised.
        """
        listed = self.place.files() if names is None else [path for name in names for path in _deciders_of(name)]
        paths = [path for path in listed if may_be_decider(path)]
        faults: dict[str, Fault] = {}
        manifests: list[Manifest] = []
        for path, one in zip(paths, map_reads(self.place, self._read, paths), strict=True):
            if isinstance(one, Manifest):
                manifests.append(one)
            elif one is not None:
                folder, _, last = path.rpartition("/")
                faults[folder if last in INDEXES else path] = one
        return sorted(manifests, key=lambda manifest: manifest.order), faults

    def _read(self, decider: str) -> Manifest | Fault | None:
        """Return the record in the deciding file ``decider``, or the fault.

        ``None``: there is no record, or the checkpoint is a step, or was moved or copied by hand.
        """
        try:
            found = record_in(self.place, decider)
            if found is None or found.form == "step":
                return None
            return found.lying_at(found.path_of(decider))
        except OSError as e:
            if self.place.path_of(decider) is None:
                raise
            fault: Fault = e
        except (CorruptCheckpointError, NewerManifestError) as e:
            fault = e
        log.warning("left out: %s", fault)
        return fault

    def manifest_of(self, name: str) -> Manifest | None:
        """Return the record of the checkpoint or copy ``name``, with digests of chunks; ``None`` if there is no record.

        Raises:
            CorruptCheckpointError: the record is damaged.
            NewerManifestError: a newer version wrote the record.
        """
        for path in _deciders_of(name):
            if (found := record_in(self.place, path, chunks=True)) is not None:
                return found.lying_at(name) or replace(found, name=name)
        return None

    # ── the latest in a bucket ───────────────────────────────────────────────────────────────────────────────────
    def latest(self, link: str, run_name: str, *, announced: bool = True) -> Manifest | None:
        """Find the newest checkpoint of a run in a bucket, with two or three requests.

        Args:
            link: full name of the link to the newest checkpoint, from the top of the bucket, without ``.symlink``.
            run_name: name of the run.
            announced: try the announced checkpoint first: the target of the link may be older.

        Returns:
            The record; ``None`` if the link leads to no record of this run, the record is damaged (this is logged), or
            the announced upload did not end. Then call :meth:`manifests`, which lists all checkpoints.

        Raises:
            NewerManifestError: a newer version wrote the record.
        """
        found: Manifest | None = None
        try:
            if announced:
                with contextlib.suppress(FileNotFoundError):
                    target, save_id = self.announced(PurePosixPath(link).name)
                    found = self.manifest_of(target)
                    if self.place.exists(target) if found is None else found.id != save_id:
                        return None  # a kill interrupted the upload, or another upload replaced the checkpoint
            if found is None:
                target = self.place.target_of(f"/{link}")
                found = self.manifest_of(target)
        except FileNotFoundError as e:
            log.debug("%s does not lead to a checkpoint: %s", link, e)
        except (CorruptCheckpointError, ConfigError) as e:
            log.warning("%s does not lead to a checkpoint: %s", self.place.uri(PurePosixPath(link).name), e)
        return found if found is not None and found.run_name == run_name else None

    def announced(self, link: str) -> tuple[str, str]:
        """Return the name and the id of the checkpoint that becomes, or is, the target of ``link`` in a bucket.

        If the stored checkpoint has another id, the upload of the announced checkpoint did not end.

        Raises:
            FileNotFoundError: there is no announcement.
        """
        name, _, save_id = self.place.read(f".{link}{ANNOUNCED}").decode(errors="replace").partition("\n")
        return name, save_id

    def announcements(self) -> list[str]:
        """Return the names of all links with an announcement."""
        names = self.place.names("")
        return [name[1:].removesuffix(ANNOUNCED) for name in names if name.startswith(".") and name.endswith(ANNOUNCED)]

    def in_use(self) -> set[str]:
        """Return the targets of all links, also announced targets."""
        return {*self.place.links().values(), *(self.announced(link)[0] for link in self.announcements())}

    # ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────
    def check_sizes(self, manifest: Manifest, files: Sequence[FileRecord]) -> None:
        """Check that ``files`` of a checkpoint exist with their recorded sizes, except the deciding file.

        Args:
            manifest: the record.
            files: some of its files.

        Raises:
            CorruptCheckpointError: a file is missing or has another size.
        """

        def check(record: FileRecord) -> None:
            checkpoint = f"checkpoint {self.place.uri(manifest.name)!r}"
            try:
                size = self.place.size(record.path)
            except FileNotFoundError as e:
                raise CorruptCheckpointError(f"{checkpoint}: {record.path!r} is gone.") from e
            if size != record.size_bytes:
                raise CorruptCheckpointError(
                    f"{checkpoint}: {record.path!r} has {size} bytes and not {record.size_bytes}"
                )

        map_reads(self.place, check, [file for file in files if file.path != manifest.deciders[0]])

    def verify(self, manifest: Manifest, progress: OnBytes = int) -> None:
        """Read all data of a checkpoint in this place and compare the bytes with the record.

        Args:
            manifest: the record.
            progress: called with each number of bytes read.

        Raises:
            CorruptCheckpointError: a file is missing, or its size or its bytes differ.
        """
        for record in manifest.here:
            try:
                self.place.verify(record, progress)
            except (FileNotFoundError, CorruptCheckpointError) as e:
                raise CorruptCheckpointError(f"checkpoint {manifest.name!r}: {e}") from e

    def files(self) -> list[str]:
        """Return the paths of all files that are not hidden."""
        return [path for path in self.place.files() if not any(part.startswith(".") for part in path.split("/"))]

    def names(self) -> list[str]:
        """Return all names that a new checkpoint may not have: visible files, and the folders above."""
        visible = [path for path in self.files() if not path.endswith(LINK_SUFFIX)]
        in_bucket = self.place.path_of("") is None  # where a directory without an index is no conflict
        whole = [path for path in self.place.files() if path.endswith(f"/{INDEX}")] if in_bucket else visible
        return [*visible, *{str(folder) for path in whole for folder in PurePosixPath(path).parents}]

    def check_free(self, name: str) -> None:
        """Check that ``name``, the name of a new file, is free in a folder.

        Raises:
            CheckpointExistsError: the name is taken.
        """
        path = self.folder / name
        if path.exists():
            raise CheckpointExistsError(
                f"checkpoint {str(path)!r} exists. Give names that differ, as with '{{batch}}' in them, delete it, or "
                "pass overwrite=True (save_overwrite=True in the Trainer). If another run is writing to this folder, "
                "give each run a folder of its own."
            )


def _deciders_of(name: str) -> tuple[str, ...]:
    """Return all possible paths of the deciding file of the checkpoint ``name``."""
    return name, f"{name}/{INDEX}", f"{name}/{WEIGHTS_INDEX}", f"{name}/{MODEL}/{INDEX}"
