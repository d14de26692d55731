"""Read the records of the checkpoints in a place, and find the latest checkpoint. This module changes no place.

A place is a folder or a bucket. The deciding file of a checkpoint contains the record. The checkpoint exists if this
file exists. A checkpoint in one file is its own deciding file. The deciding file of a directory is the index.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TypeAlias, TypeVar, cast, final

from composerlite.checkpoint.format import INDEX, INDEXES, MODEL, MOST_TAIL_BYTES, SUFFIX, WEIGHTS_INDEX
from composerlite.checkpoint.place.place import LINK_SUFFIX, Folder, OnBytes, Place
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
from composerlite.errors import CheckpointError, ConfigError, CorruptCheckpointError
from composerlite.storage import WorkerPool

log = logging.getLogger(__name__)
Fault: TypeAlias = CorruptCheckpointError | NewerManifestError | OSError
"""The reason for an unreadable record."""
T = TypeVar("T")
R = TypeVar("R")
_MOST_RECORD_BYTES = 64 << 20
_NEVER = (SUFFIX, LINK_SUFFIX, ".safetensors", ".json")
"""Suffixes of files without a record, other than the index of weights."""


def may_be_decider(path: str) -> bool:
    """Return true if a file of this name may contain the record of a checkpoint."""
    folder, _, last = path.rpartition("/")
    if _is_hidden(folder):
        return False
    return last in INDEXES or not (last.startswith(".") or last.endswith(_NEVER))


def record_in(place: Place, path: str, *, chunks: bool = False, parts: bool = False) -> Manifest | None:
    """Return the record in the file ``path``; ``None``: there is no such file, or the file has no record.

    Args:
        place: the place.
        path: path of the file.
        chunks: read the whole index of a directory, with the digests of the chunks of data files.
        parts: also return the record in the archive of a rank other than 0. Such a record does not list other archives.

    Raises:
        CorruptCheckpointError: the record is damaged.
        NewerManifestError: a newer version of composerlite wrote the record.
    """
    try:
        folder, _, last = path.rpartition("/")
        if last == WEIGHTS_INDEX or (chunks and last == INDEX):
            return read_index(place, path, place.read(path))[1]
        size_bytes, end = place.end(path, MOST_TAIL_BYTES)
        if len(end) < (needed := min(tail_bytes(end), size_bytes, _MOST_RECORD_BYTES)):
            size_bytes, end = place.end(path, needed)
    except FileNotFoundError:
        return None
    found = unseal(path, size_bytes, end, place.uri)
    # The index of another program ends as a pickle does. An index without this end, beside our data, was cut off.
    is_cut = found is None and last == INDEX and not end.endswith(pickle.STOP)
    if is_cut and any(data_file_id(f"{folder}/{name}".lstrip("/")) for name in place.names(folder)):
        raise CorruptCheckpointError(f"the record of {place.uri(path)!r} is missing: the file was cut off")
    is_part = found is not None and found.form == "archives" and len(found.files) == 1
    return None if found is None or (is_part and not parts) else _with_node(place, found)


def read_index(place: Place, path: str, data: bytes) -> tuple[bytes, Manifest | None]:
    """Return the index and the record, with digests of chunks, in the file ``path`` with the content ``data``.

    Raises the errors of :func:`record_in` for a damaged or newer record.
    """
    if path.rpartition("/")[2] == INDEX:
        index, found = unseal_index(path, data, place.uri)
    else:
        index, found = data, unseal_weights_index(path, data, place.uri)
    return index, None if found is None else _with_node(place, found)


def _with_node(place: Place, manifest: Manifest) -> Manifest:
    """Return the record with the number of the node whose files are in ``place``, if nodes have disks of their own.

    If ``place`` has no file of any node, the number is unused, so ``Manifest.here`` has only common files.
    """
    firsts = {file.node: file.path for file in reversed(manifest.files) if file.node is not None}
    if not firsts:
        return manifest
    here = [node for node, path in sorted(firsts.items()) if place.exists(path)]
    return replace(manifest, node=here[0] if here else max(firsts) + 1)


def home_of(place: Place, name: str) -> tuple[Place, str]:
    """Return the place in which the checkpoint ``name`` was saved, and the name at the save.

    If the name at the save has folders, such as ``sub/ep1.pt``, the returned place is above ``place``. Without a
    readable record the result is ``place`` and ``name``.
    """
    full = f"/{place.name_of(name)}"
    for path in _deciders_of(name):
        try:
            record = record_in(place, path)
        except CheckpointError:  # raised again when the checkpoint is opened
            break
        for saved in () if record is None else record.also:
            if saved != name and full.endswith(f"/{saved}"):
                return place.inside(full.removesuffix(saved)), saved
    return place, name


@final
class Catalog:
    """The checkpoints in ``place``, a folder or a bucket. Only :meth:`verify` reads data.

    A file without a record is no checkpoint, and is never listed. The same holds for a copy made by hand, with another
    name in the record. Every method raises the errors of the place; only FileNotFoundError counts as absence.

    Attributes:
        place: the place.
        folder: path of the place. Use only if the place is a folder of this machine; ``None`` in a bucket.
    """

    def __init__(self, place: str | Path | Place) -> None:
        self.place = Folder(place) if isinstance(place, str | Path) else place
        self.folder = cast("Path", self.place.path_of(""))

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────────
    def manifests(self, names: Sequence[str] | None = None) -> list[Manifest]:
        """Return the record of every committed checkpoint, oldest first. Unreadable records are logged and left out.

        Steps are left out, too. Do not decide deletions from a record that is missing in the result.

        Args:
            names: names of checkpoints; ``None``: all.

        Raises:
            OSError: a record in a bucket cannot be read.
        """
        listed = None if names is None else [path for name in names for path in _deciders_of(name)]
        return self.manifests_and_faults(listed)[0]

    def manifests_and_faults(self, listed: Iterable[str] | None = None) -> tuple[list[Manifest], dict[str, Fault]]:
        """Return records as :meth:`manifests` does, and the fault of each unreadable record, by name.

        Only CorruptCheckpointError may justify a rename or a deletion. An OSError of a bucket is raised.

        Args:
            listed: paths of files to read; files that cannot have a record are skipped. ``None``: all files.
        """
        paths = [path for path in (self.place.files() if listed is None else listed) if may_be_decider(path)]
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
            is_copy = found is not None and found.name not in found.also
            return None if found is None or found.form == "step" or is_copy else found
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
                return found
        return None

    # ── the latest in a bucket ───────────────────────────────────────────────────────────────────────────────────
    def latest(self, link: str, run_name: str) -> Manifest | None:
        """Return the record of the checkpoint that ``link`` leads to in a bucket, with two or three requests.

        After a kill between a commit and the move of the link, another checkpoint is newer: see :meth:`written_since`.

        Args:
            link: full name of the link to the newest checkpoint, from the top of the bucket, without ``.symlink``.
            run_name: name of the run.

        Returns:
            The record; ``None`` if the link leads to no record of this run, or the record is damaged (this is logged).
            Then call :meth:`manifests`, which lists all checkpoints.

        Raises:
            NewerManifestError: a newer version wrote the record.
        """
        found: Manifest | None = None
        try:
            found = self.manifest_of(self.place.target_of(f"/{link}"))
        except FileNotFoundError as e:
            log.debug("%s does not lead to a checkpoint: %s", link, e)
        except (CorruptCheckpointError, ConfigError) as e:
            log.warning("%s does not lead to a checkpoint: %s", self.place.uri(PurePosixPath(link).name), e)
        return found if found is not None and found.run_name == run_name else None

    def written_since(self, manifest: Manifest) -> list[str]:
        """Return the paths of files in a bucket that can have a record and were written with ``manifest`` or later.

        Lists the bucket, and compares times of the store's clock. A file is returned, too, if a time is unknown. The
        deciding file of ``manifest`` is left out.
        """
        times = {path: file.modified_at for path, file in self.place.files().items() if may_be_decider(path)}
        since = times.get(manifest.files[0].path)
        later = [path for path, at in times.items() if since is None or at is None or at >= since]
        return [path for path in later if path != manifest.files[0].path]

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
            fault = "is gone"
            with contextlib.suppress(FileNotFoundError):
                if (size := self.place.size(record.path)) == record.size_bytes:
                    return
                fault = f"has {size} bytes and not {record.size_bytes}"
            raise CorruptCheckpointError(f"checkpoint {self.place.uri(manifest.name)!r}: {record.path!r} {fault}.")

        map_reads(self.place, check, [file for file in files if file.path != manifest.files[0].path])

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
        return [path for path in self.place.files() if not _is_hidden(path)]

    def names(self) -> list[str]:
        """Return all names that a new checkpoint may not have: visible files, and folders with such files.

        In a bucket, only folders with an index count.
        """
        every = list(self.place.files())
        visible = [path for path in every if not (_is_hidden(path) or path.endswith(LINK_SUFFIX))]
        in_bucket = self.place.path_of("") is None  # where a directory without an index is no conflict
        whole = [path for path in every if path.endswith(f"/{INDEX}")] if in_bucket else visible
        return [*visible, *{str(folder) for path in whole for folder in PurePosixPath(path).parents}]


def map_reads(place: Place, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return the results of ``work`` for ``items``, in order. ``work`` reads files of ``place``.

    ``work`` runs in up to ``place.reads_at_once`` threads.
    """
    everything = list(items)
    threads = min(place.reads_at_once, len(everything))
    if threads < 2:
        return [work(item) for item in everything]
    with WorkerPool(threads, name="place") as pool:
        results = [pool.submit(functools.partial(work, item)) for item in everything]
        return [result.result() for result in results]


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def _deciders_of(name: str) -> tuple[str, ...]:
    """Return all possible paths of the deciding file of the checkpoint ``name``."""
    return name, f"{name}/{INDEX}", f"{name}/{WEIGHTS_INDEX}", f"{name}/{MODEL}/{INDEX}"
