"""The checkpoints in a place: which there are, which is the latest, and how one gets to another place."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Protocol, TypeAlias, TypeVar, final

from composerlite.checkpoint.format import INDEX, INDEXES, MODEL, SUFFIX, WEIGHTS_INDEX
from composerlite.checkpoint.place.bucket import exists_error
from composerlite.checkpoint.place.commit import data_file_id, delete_checkpoint
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.place import LINK_SUFFIX, Place, by_total
from composerlite.checkpoint.record.manifest import FileRecord, Manifest, NewerManifestError, bytes_text
from composerlite.checkpoint.record.naming import name_pattern
from composerlite.checkpoint.record.tail import (
    MOST_TAIL_BYTES,
    tail_bytes,
    unseal,
    unseal_index,
    unseal_weights_index,
)
from composerlite.errors import CheckpointExistsError, ConfigError, CorruptCheckpointError

__all__ = ["Catalog", "CollectiveStep", "Fault", "alone", "may_be_decider", "record_in", "with_node"]

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
Fault: TypeAlias = CorruptCheckpointError | NewerManifestError | OSError
"""The reason why a record is left out."""
_MOST_RECORD_BYTES = 64 << 20
_NEVER = (SUFFIX, LINK_SUFFIX, ".safetensors", ".json")
"""Ends of the names of files that contain no record."""


class CollectiveStep(Protocol):
    """A step of several processes: each calls ``write``, the first one then ``commit``, and all return its result."""

    def __call__(self, write: Callable[[], T], commit: Callable[[list[T]], R], /) -> R: ...


def alone(write: Callable[[], T], commit: Callable[[list[T]], R]) -> R:
    """CollectiveStep in one process."""
    return commit([write()])


def may_be_decider(path: str) -> bool:
    """Return true if a file of this name may contain the record of a checkpoint."""
    folder, _, last = path.rpartition("/")
    if any(part.startswith(".") for part in folder.split("/")):
        return False
    return last in INDEXES or not (last.startswith(".") or last.endswith(_NEVER))


def record_in(place: Place, path: str) -> Manifest | None:
    """Return the record that the file ``path`` contains; ``None``: there is no such file, or it has no record.

    The digests of the data files of a directory have no chunks: see :meth:`Catalog.manifest_of`.

    Raises:
        CorruptCheckpointError: the record is damaged.
        NewerManifestError: a newer version wrote it.
    """
    try:
        if path.rpartition("/")[2] == WEIGHTS_INDEX:
            return unseal_weights_index(path, place.read(path), place.uri(path))
        size_bytes, end = place.end(path, MOST_TAIL_BYTES)
        if len(end) < (needed := min(tail_bytes(end), size_bytes, _MOST_RECORD_BYTES)):
            size_bytes, end = place.end(path, needed)
    except FileNotFoundError:
        return None
    found = unseal(path, size_bytes, end, place.uri(path))
    folder, _, last = path.rpartition("/")
    # An index that another program wrote in place of ours is a whole pickle. Beside our data, anything else was cut.
    is_cut = found is None and last == INDEX and not end.endswith(pickle.STOP)
    if is_cut and any(data_file_id(f"{folder}/{name}".lstrip("/")) for name in place.names(folder)):
        raise CorruptCheckpointError(f"the record of {place.uri(path)!r} is gone: the file was cut off")
    return None if found is None else with_node(place, found)


def with_node(place: Place, manifest: Manifest) -> Manifest:
    """Return the record with the number of the node whose files lie here, where nodes have disks of their own."""
    firsts = {file.node: file.path for file in reversed(manifest.files) if file.node is not None}
    if not firsts:
        return manifest
    here = [node for node, path in sorted(firsts.items()) if place.exists(path)]
    return replace(manifest, node=here[0] if here else max(firsts) + 1)


@final
class Catalog:
    """The checkpoints in ``place``. Reading it reads records only, never data.

    A file without a record is not a checkpoint: it is never listed and never deleted. Neither is a checkpoint whose
    record has the name of another path, which is a copy made by hand. Every method raises what the place raises; only
    "not found" counts as absence.
    """

    def __init__(self, place: str | Path | Place) -> None:
        self.place = Folder(place) if isinstance(place, str | Path) else place

    @property
    def folder(self) -> Path:
        """The folder of a place on this machine."""
        path = self.place.path_of("")
        assert path is not None, f"{self.place.uri()} is no folder"
        return path

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def manifests(self, names: Sequence[str] | None = None) -> list[Manifest]:
        """Return the record of every committed checkpoint, oldest first. A damaged one is logged and left out.

        Args:
            names: of the checkpoints to look for; ``None``: all.

        Raises:
            NewerManifestError: one was written by a newer version.
            OSError: one cannot be read.
        """
        manifests, faults = self.manifests_and_faults(names)
        for fault in faults.values():
            if not isinstance(fault, CorruptCheckpointError):
                raise fault
        return manifests

    def readable(self, names: Sequence[str] | None = None) -> list[Manifest]:
        """Return records as :meth:`manifests` does, without those that cannot be read.

        Do not decide deletions from what is missing in the result.
        """
        return self.manifests_and_faults(names)[0]

    def manifests_and_faults(self, names: Sequence[str] | None = None) -> tuple[list[Manifest], dict[str, Fault]]:
        """Return records as :meth:`readable` does, and the reason for each that is left out, by name.

        Only a damaged one may be acted on. One that a bucket does not let us read is raised.
        """
        paths: Iterable[str]
        if names is None:
            paths = [path for path in self.place.files() if may_be_decider(path)]
        else:
            paths = [path for name in names for path in _deciders_of(name)]
        found = self.place.each(self._read, paths)
        faults: dict[str, Fault] = {}
        manifests: list[Manifest] = []
        for path, one in zip(paths, found, strict=True):
            if isinstance(one, Manifest):
                manifests.append(one)
            elif one is not None:
                folder, _, last = path.rpartition("/")
                faults[folder if last in INDEXES else path] = one
        return sorted(manifests, key=lambda manifest: manifest.order), faults

    def _read(self, decider: str) -> Manifest | Fault | None:
        """Return the record in ``decider``, if the checkpoint lies where it was saved; or what is wrong with it."""
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
        """Return the record of the checkpoint ``name``, or of a copy of one, complete; ``None`` if it has none.

        Raises:
            CorruptCheckpointError: it has a damaged one.
            NewerManifestError: it has one of a newer version.
        """
        for path in _deciders_of(name):
            try:
                if path.rpartition("/")[2] == INDEX:
                    found = unseal_index(path, self.place.read(path), self.place.uri(path))
                else:
                    found = record_in(self.place, path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if found is not None:
                return with_node(self.place, found.lying_at(name) or replace(found, name=name))
        return None

    def latest(self, link: str, run_name: str) -> Manifest | None:
        """Find the newest checkpoint of a run in a bucket, with two or three requests.

        It is the one that was being uploaded last, or, if that was not committed, the one that ``link`` leads to.

        Args:
            link: full name of the link.
            run_name: of the run.

        Returns:
            Its record; ``None`` if there is none, or it is damaged (which is logged) or of another run. Then
            :meth:`manifests` lists all checkpoints.

        Raises:
            NewerManifestError: it is of a newer version.
        """
        for announced in (True, False):
            try:
                if announced:
                    name, save_id = self.place.announced_target(f"/{link}")
                else:
                    name, save_id = self.place.target_of(f"/{link}"), None
                manifest = self.manifest_of(name)
                if manifest is None:
                    log.debug("%s leads to %s, which is no checkpoint", link, name)
                    if announced and self.place.exists(name):  # cut off by a kill: the listing tells of it
                        return None
                    continue
                self.check_sizes(manifest)
                is_other = manifest.run_name != run_name or save_id not in (None, manifest.id)
                return None if is_other else manifest
            except FileNotFoundError as e:
                log.debug("%s does not lead to a checkpoint: %s", link, e)
            except (CorruptCheckpointError, NewerManifestError, ConfigError) as e:
                if isinstance(e, NewerManifestError) and e.may_be_of(run_name):
                    raise
                log.warning("%s does not lead to a checkpoint: %s", self.place.uri(PurePosixPath(link).name), e)
                return None
        return None

    def check_sizes(self, manifest: Manifest) -> None:
        """See that all files of a checkpoint are there, with their sizes. The deciding file was read already.

        Raises:
            CorruptCheckpointError: one is not, or has another size.
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

        self.place.each(check, manifest.here[1:])

    def files(self) -> Iterator[str]:
        """Yield the paths of all files that may be checkpoints, with a record or without."""
        return (path for path in self.place.files() if not any(part.startswith(".") for part in path.split("/")))

    def names(self) -> list[str]:
        """Return all names that a new checkpoint would come into conflict with."""
        return list(self.place.taken())

    def verify(self, manifest: Manifest, progress: Callable[[int], object] = int) -> None:
        """Read all data of a checkpoint that are here and compare them with its record.

        Args:
            manifest: of the checkpoint.
            progress: called with each number of bytes read.

        Raises:
            CorruptCheckpointError: a file is missing, has another size or other bytes.
        """
        for record in manifest.here:
            try:
                self.place.verify(record, progress)
            except FileNotFoundError as e:
                uri = self.place.uri(record.path)
                raise CorruptCheckpointError(f"checkpoint {manifest.name!r}: its file {uri!r} is gone.") from e
            except CorruptCheckpointError as e:
                raise CorruptCheckpointError(f"checkpoint {manifest.name!r}: {e}") from e

    def check_free(self, name: str, *, overwrite: bool = False) -> None:
        """See that nothing in a folder has the name of a checkpoint to come.

        Args:
            name: of the checkpoint, relative to the folder.
            overwrite: accept a name that is taken.

        Raises:
            CheckpointExistsError: it is taken, and ``overwrite`` is false.
        """
        path = self.folder / name
        if not overwrite and path.exists():
            raise CheckpointExistsError(
                f"checkpoint {str(path)!r} exists. Give names that differ, as with '{{batch}}' in them, delete it, or "
                "pass overwrite=True (save_overwrite=True in the Trainer). If another run is writing to this folder, "
                "give each run a folder of its own."
            )

    # ── copies ───────────────────────────────────────────────────────────────────────────────────────────────────
    def fetch(self, manifest: Manifest, target: Catalog, progress: Callable[[int, int], object] | None = None) -> None:
        """Bring a checkpoint of files to the place of ``target``, verified. It exists there with its deciding file.

        Args:
            manifest: of a checkpoint of this catalog.
            target: the catalog that gets it.
            progress: called with (bytes received, total).

        Raises:
            CorruptCheckpointError: a file is missing or its bytes are not those that were saved. There is no
                checkpoint of that name in the place then, unless there was one.
        """
        tell = by_total(manifest.size_bytes, progress)
        for record in (*manifest.files[1:], manifest.files[0]):
            uri, size = self.place.uri(record.path), bytes_text(record.size_bytes)
            log.info("fetching %s (%s) to %s", uri, size, target.place.uri(record.path))
            try:
                target.place.take(self.place, record, tell)  # what is there stays until what comes was verified
            except FileNotFoundError as e:
                raise CorruptCheckpointError(f"checkpoint file {uri!r} is gone: {e}") from e

    def publish(
        self,
        manifest: Manifest,
        files: Mapping[str, Path | bytes],
        *,
        link: str | None = None,
        links: Mapping[str, str] | None = None,
        overwrite: bool = False,
        begins: CollectiveStep = alone,
        ends: CollectiveStep = alone,
    ) -> None:
        """Make a checkpoint exist in a bucket, and point ``link`` to it: the deciding file is sent last.

        A kill at any moment leaves it out of the listing or complete, and ``link`` on a complete one.

        Args:
            manifest: the record, as it lies in the bucket.
            files: the files that this process sends, or their contents, by their paths in the bucket; the deciding file
                among them in the first process.
            link: full name of the link, without ``.symlink``.
            links: full names of further ones, and the file that each leads to.
            overwrite: replace a checkpoint of the same name. One of the same moment of the same run is replaced in any
                case: a run that was interrupted does it again.
            begins: the vote of processes that send files of it together over its begin. ends: over its commit.

        Raises:
            CheckpointExistsError: there is another checkpoint of that name.
        """
        decider = manifest.files[0].path
        replaced: Manifest | None = None

        def begin(_: object) -> bool:
            nonlocal replaced
            there = self._replaceable(manifest, overwrite=overwrite)
            if there is not None and there.id == manifest.id:
                return True
            if link is not None:  # after a kill before the link is moved the next start looks here first
                self.place.announce_target(f"/{link}", manifest)
            replaced = there
            if there is not None and there.form == "archives":
                delete_checkpoint(self.place, there)
            return False

        def send() -> None:
            for path, file in files.items():
                if path != decider:
                    self._send(file, path)

        def finish(_: object) -> None:
            if not is_there:
                self._send(files[decider], decider)
            for other, name in {**(links or {}), **({} if link is None else {link: manifest.name})}.items():
                self.place.point(f"/{other}", name)
            log.debug("published checkpoint %s", self.place.uri(manifest.name))
            if replaced is not None:
                kept = {file.path for file in manifest.files}
                self.place.delete_all(file.path for file in replaced.files if file.path not in kept)

        is_there = begins(lambda: None, begin)
        ends(lambda: None if is_there else send(), finish)

    def _send(self, file: Path | bytes, path: str) -> None:
        if isinstance(file, bytes):
            self.place.put(path, file)
        else:
            self.place.send(file, path)

    def _replaceable(self, manifest: Manifest, *, overwrite: bool) -> Manifest | None:
        """Return the checkpoint that has the name of ``manifest``; ``None``: there is none.

        Raises:
            CheckpointExistsError: it is another one, and may not be replaced.
        """
        try:
            there = record_in(self.place, manifest.files[0].path)
        except CorruptCheckpointError as e:
            log.warning("replacing %s, which is damaged: %s", self.place.uri(manifest.name), e)
            return None
        if there is not None and there.id != manifest.id and not overwrite and _moment(there) != _moment(manifest):
            raise exists_error(self.place.uri(there.name), there)
        return there

    # ── links ────────────────────────────────────────────────────────────────────────────────────────────────────
    def leads(self, link: str, name: str) -> bool:
        """Check if a link in a bucket leads to a checkpoint.

        Args:
            link: full name of the link.
            name: of the checkpoint.

        Returns:
            True if it does. A damaged link leads nowhere.
        """
        try:
            return self.place.target_of(f"/{link}") == name
        except (FileNotFoundError, CorruptCheckpointError):
            return False

    def mend_links(self, manifest: Manifest | None, links: re.Pattern[str], names: re.Pattern[str]) -> None:
        """Point the links whose checkpoint is gone to that of ``manifest``; remove them if there is none.

        Args:
            manifest: what to point to.
            links: matches the names of links that the saver makes. names: those of its checkpoints. A link that is not
                called so, or leads elsewhere, is of somebody else and is left alone.
        """
        for link, target in list(self.place.broken_links()):
            if links.fullmatch(link) is None or names.fullmatch(target) is None:
                continue
            self.place.point(link, None if manifest is None else _as_before(manifest, target))

    # ── a checkpoint goes ────────────────────────────────────────────────────────────────────────────────────────
    def delete(self, manifest: Manifest) -> None:
        """Delete a checkpoint. What is gone already is not an error."""
        delete_checkpoint(self.place, manifest)

    def quarantine(self, manifest: Manifest) -> None:
        """Take a damaged checkpoint out of the way: its data stay as ``<name>.damaged``."""
        paths = [file.path for file in manifest.files] if manifest.form == "archives" else [manifest.name]
        for path in reversed(paths):  # after a kill the record is still there, and the next start continues
            self.quarantine_file(path)

    def quarantine_file(self, name: str) -> None:
        """Take a damaged file or directory out of the way: it stays as ``<name>.damaged``."""
        self.place.quarantine(name)
        log.warning("quarantined %s as %s.damaged", self.place.uri(name), name)

    def quarantine_damaged(self, names: re.Pattern[str]) -> None:
        """Take checkpoints of ``names`` out of the way whose record is damaged.

        The run will save these names again. Other files, such as a copy made by hand, are left alone.
        """
        for name, e in self.manifests_and_faults()[1].items():
            if isinstance(e, CorruptCheckpointError) and names.fullmatch(name) is not None:
                self.quarantine_file(name)


def _deciders_of(name: str) -> tuple[str, ...]:
    """Return the paths that the deciding file of the checkpoint ``name`` may have."""
    return name, f"{name}/{INDEX}", f"{name}/{WEIGHTS_INDEX}", f"{name}/{MODEL}/{INDEX}"


def _moment(manifest: Manifest) -> tuple[str, tuple[int, int]]:
    return manifest.run_name, manifest.moment


def _as_before(manifest: Manifest, target: str) -> str:
    """Target of a link that led to ``target``: the file of the same rank, where each rank has one."""
    if manifest.form != "archives":
        return manifest.name
    match = name_pattern(manifest.template, manifest.run_name).fullmatch(target)
    rank = 0 if match is None else int(match.groupdict().get("rank", 0))
    return manifest.files[rank].path if rank < len(manifest.files) else manifest.name
