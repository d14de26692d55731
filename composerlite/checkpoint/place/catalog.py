"""The checkpoints in a place: which there are, which is the latest, how one comes, goes, and gets to another place."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Protocol, TypeAlias, TypeVar, final

from composerlite.checkpoint.place.bucket import exists_error
from composerlite.checkpoint.place.commit import Commit, remove_manifest
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.place import Place, by_total
from composerlite.checkpoint.record.manifest import (
    MANIFESTS,
    FileRecord,
    Manifest,
    NewerManifestError,
    bytes_text,
    record_path,
    with_files_of_others,
)
from composerlite.checkpoint.record.naming import name_pattern
from composerlite.errors import CheckpointExistsError, ConfigError, CorruptCheckpointError

__all__ = ["Catalog", "CollectiveStep", "Fault", "alone"]

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
Fault: TypeAlias = CorruptCheckpointError | NewerManifestError | OSError
"""The reason why a manifest is left out."""


class CollectiveStep(Protocol):
    """A step of several processes: each calls ``write``, the first one then ``commit``, and all return its result."""

    def __call__(self, write: Callable[[], T], commit: Callable[[list[T]], R], /) -> R: ...


def alone(write: Callable[[], T], commit: Callable[[list[T]], R]) -> R:
    """CollectiveStep in one process."""
    return commit([write()])


@final
class Catalog:
    """The checkpoints in ``place``. Reading it opens manifests only, never data.

    A data file without a manifest is not a checkpoint of ours: it is never listed and never deleted. Every method
    raises what the place raises; only "not found" is taken for absence.
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
        """Return the manifest of every committed checkpoint, oldest first. A damaged one is logged and left out.

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
        """Return manifests as :meth:`manifests` does. One that cannot be read here is left out as well.

        It is for those who do nothing to what they do not see.
        """
        return self.manifests_and_faults(names)[0]

    def manifests_and_faults(self, names: Sequence[str] | None = None) -> tuple[list[Manifest], dict[str, Fault]]:
        """Return manifests as :meth:`readable` does, and the names of those that are left out, with the reason.

        Only a damaged one may be acted on. One that a bucket does not let us read is raised.
        """
        names = self._records() if names is None else names
        found = self.place.each(self._read, names)
        faults: dict[str, Fault] = {
            name: e for name, e in zip(names, found, strict=True) if not isinstance(e, Manifest | None)
        }
        manifests = [manifest for manifest in found if isinstance(manifest, Manifest)]
        for name, path in with_files_of_others(manifests).items():
            e = faults[name] = CorruptCheckpointError(
                f"manifest {self.place.uri(record_path(name))!r} names {path!r}, a file of another checkpoint."
            )
            log.warning("left out: %s", e)
        whole = (manifest for manifest in manifests if manifest.name not in faults)
        return sorted(whole, key=lambda manifest: manifest.order), faults

    def _records(self) -> list[str]:
        """Return the names that manifests are there for."""
        paths = (PurePosixPath(path) for path in self.place.files(MANIFESTS))
        records = (path for path in paths if path.suffix == ".json" and not path.name.startswith("."))
        return [str(path.relative_to(MANIFESTS)).removesuffix(".json") for path in records]

    def _read(self, name: str) -> Manifest | Fault | None:
        """Return the manifest of ``name``, or what is wrong with it."""
        try:
            return self.manifest_of(name)
        except OSError as e:
            if self.place.path_of(name) is None:
                raise
            fault: Fault = e
        except (CorruptCheckpointError, NewerManifestError) as e:
            fault = e
        log.warning("left out: %s", fault)
        return fault

    def manifest_of(self, name: str) -> Manifest | None:
        """Return the manifest of the checkpoint ``name``; ``None`` if it has none.

        Raises:
            CorruptCheckpointError: it has a damaged one.
            NewerManifestError: it has one of a newer version.
        """
        path = record_path(name)
        try:
            data = self.place.read(path)
        except FileNotFoundError:
            return None
        found: Manifest | NewerManifestError
        try:
            found = Manifest.from_json(data, self.place.uri(path))
        except NewerManifestError as e:
            found = e
        if isinstance(found.name, str) and found.name != name:
            raise CorruptCheckpointError(
                f"manifest {self.place.uri(path)!r} is that of another checkpoint, {found.name!r}."
            )
        if isinstance(found, NewerManifestError):
            raise found
        return found

    def begun(self, name: str | None = None) -> Iterator[Manifest]:
        """Yield the manifests of commits that have begun and not ended: of the checkpoint ``name``, or of all."""
        for data in self.place.announced(name):
            try:
                manifest = Manifest.from_json(data, f"{self.place.uri(name or MANIFESTS)}, of a commit that has begun,")
            except (CorruptCheckpointError, NewerManifestError) as e:
                log.warning("left out: %s", e)
                continue
            if name in (None, manifest.name):
                yield manifest

    def latest(self, link: str, run_name: str) -> Manifest | None:
        """Return the newest checkpoint of a run in a bucket, if its data are there: four requests. ``None`` if not.

        It is the one that was being published last, or, where that was not committed, the one that ``link`` leads
        to, a full name. A checkpoint that is damaged is logged and is ``None``, too, and so is one of another run, or
        one in whose place another was being published: :meth:`manifests` and :meth:`begun` tell what there is.

        Args:
            link: full name of the link. run_name: of the run.

        Returns:
            The manifest, or ``None``.

        Raises:
            NewerManifestError: it is of a newer version.
        """
        for ahead in (True, False):
            try:
                manifest = self._complete_manifest(self.place.target_of(f"/{link}", ahead=ahead))
                is_other = manifest.run_name != run_name
                return None if is_other or any(True for _ in self.begun(manifest.name)) else manifest
            except FileNotFoundError as e:
                log.debug("%s does not lead to a checkpoint: %s", link, e)
            except (CorruptCheckpointError, NewerManifestError, ConfigError) as e:
                if isinstance(e, NewerManifestError) and e.may_be_of(run_name):
                    raise
                log.warning("%s does not lead to a checkpoint: %s", self.place.uri(PurePosixPath(link).name), e)
                return None
        return None

    def _complete_manifest(self, name: str) -> Manifest:
        """Return the manifest of the checkpoint ``name``, whose data are there."""
        manifest = self.manifest_of(name)
        if manifest is None:
            raise FileNotFoundError(f"{self.place.uri(name)} has no manifest")
        self.check_sizes(manifest)
        return manifest

    def check_sizes(self, manifest: Manifest) -> None:
        """See that all files of a checkpoint are there, with their sizes.

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

        self.place.each(check, manifest.here)

    def files(self) -> Iterator[str]:
        """Yield the paths of all files that may be checkpoints, with a manifest or without."""
        return (path for path in self.place.files() if not any(part.startswith(".") for part in path.split("/")))

    def names(self) -> list[str]:
        """Return all names that a new checkpoint would come into conflict with."""
        return list(self.place.taken())

    def verify(self, manifest: Manifest, progress: Callable[[int], object] = int) -> None:
        """Read all data of a checkpoint that are here and compare them with its manifest.

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

    def is_replaced(self, manifest: Manifest) -> bool:
        """Return true if the data of the checkpoint is, whole, that of a newer one that takes its place.

        Between the two renames of a commit the newer data is there beside the older manifest; a killed process leaves
        it so until :meth:`recover`, and a live one may have continued since ``manifest`` was read.
        """
        newest = self.manifest_of(manifest.name)
        for newer in (*self.begun(manifest.name), *(() if newest is None else (newest,))):
            with contextlib.suppress(CorruptCheckpointError):
                self.verify(newer)
                return True
        return False

    # ── a checkpoint comes ───────────────────────────────────────────────────────────────────────────────────────
    def check_free(self, name: str, *, overwrite: bool = False) -> None:
        """See that a folder has no checkpoint ``name``, nor a file of that name.

        Args:
            name: of the checkpoint, relative to the folder.
            overwrite: accept a name that is taken.

        Raises:
            CheckpointExistsError: there is, and ``overwrite`` is false.
        """
        path = self.folder / name
        if overwrite:
            return
        if path.exists() or self.record_path(name).exists():
            raise CheckpointExistsError(
                f"checkpoint {str(path)!r} exists. Give names that differ, as with '{{batch}}' in them, delete it, or "
                "pass overwrite=True (save_overwrite=True in the Trainer). If another run is writing to this folder, "
                "give each run a folder of its own."
            )

    def commit(self, manifest: Manifest, temporaries: Mapping[str, Path], *, overwrite: bool = True) -> None:
        """Make a checkpoint exist, each file of which is durable under a temporary name beside its own.

        In place of an older checkpoint of the same name there is at every moment the old one or the new one: see
        :mod:`~composerlite.checkpoint.place.commit`.

        Args:
            manifest: names the files.
            temporaries: where each of them is, by name.
            overwrite: replace a checkpoint of that name.

        Raises:
            CheckpointExistsError: another process was first.
        """
        with self.place.commit(
            manifest.name, temporaries, overwrite=overwrite, record=record_path(manifest.name)
        ) as commit:
            commit.prepare(manifest)
            commit.commit()

    def adopt(self, manifest: Manifest) -> None:
        """Make a checkpoint exist whose data are in the place already, durable and whole."""
        self.commit(manifest, {})

    def fetch(self, manifest: Manifest, target: Catalog, progress: Callable[[int, int], object] | None = None) -> None:
        """Bring a checkpoint to the place of ``target``, verified, and commit it there.

        Args:
            manifest: of a checkpoint of this catalog.
            target: the catalog that gets it.
            progress: called with (bytes received, total).

        Raises:
            CorruptCheckpointError: a file is missing or its bytes are not those that were saved. There is no
                checkpoint of that name in the place then, unless there was one.
        """
        home = PurePosixPath(manifest.name).parent
        strange = [record.path for record in manifest.files if PurePosixPath(record.path).parent != home]
        if strange or not manifest.files or ".." in home.parts:
            raise CorruptCheckpointError(
                f"checkpoint {self.place.uri(manifest.name)!r} has {len(manifest.files)} files, which are not all "
                f"beside it: {', '.join(strange)}"
            )
        tell = by_total(manifest.size_bytes, progress)
        for record in manifest.files:
            uri, size = self.place.uri(record.path), bytes_text(record.size_bytes)
            log.info("fetching %s (%s) to %s", uri, size, target.place.uri(record.path))
            try:
                target.place.take(self.place, record, tell)  # what is there stays until what comes was verified
            except FileNotFoundError as e:
                raise CorruptCheckpointError(f"checkpoint file {uri!r} is gone: {e}") from e
        target.adopt(manifest)

    # ── publishing ───────────────────────────────────────────────────────────────────────────────────────────────
    def publish(
        self,
        manifest: Manifest,
        files: Sequence[Path],
        *,
        here: Sequence[FileRecord] | None = None,
        link: str | None = None,
        links: Mapping[str, str] | None = None,
        overwrite: bool = False,
        begins: CollectiveStep = alone,
        ends: CollectiveStep = alone,
    ) -> None:
        """Make a checkpoint exist in a bucket, and point ``link`` to it: one commit, of files that are sent to it.

        A kill at any moment leaves it out of the listing or complete, and ``link`` on a complete one. What the bucket
        has of that name stays until the new one is committed. What it has of it from an earlier try is not sent again.

        Args:
            manifest: its commit record.
            files: its data on this machine, in the order of ``here``.
            here: their records; ``None``: those of all of it.
            link: full name of the link, without ``.symlink``.
            links: full names of further ones, and the file that each leads to.
            overwrite: replace a checkpoint of the same name. One of the same moment of the same run is replaced in any
                case: a run that was interrupted does it again.
            begins: the vote of processes that send files of it together over its begin. ends: over its commit.

        Raises:
            CheckpointExistsError: there is another checkpoint of that name.
        """
        commit: Commit | None = None

        def begin(_: object) -> bool:
            nonlocal commit
            commit = self._announced(manifest, link, overwrite=overwrite)
            return commit is None

        def send() -> None:
            sent = zip(manifest.files if here is None else here, files, strict=True)
            for record, path in sorted(sent, key=lambda pair: pair[0].path.endswith("/.metadata")):  # that is an index
                self.place.send(path, record.path)

        def finish(_: object) -> None:
            if commit is not None:
                if link is not None:  # a kill before the link is moved: the next start looks here first
                    self.place.point(f"/{link}", manifest.name, ahead=True)
                commit.commit()
            for other, name in (links or {}).items():
                if other != link:
                    self.place.point(f"/{other}", name)
            if link is not None:
                self.place.point(f"/{link}", manifest.name)
            log.debug("published checkpoint %s", self.place.uri(manifest.name))

        try:
            is_there = begins(lambda: None, begin)
            ends(lambda: None if is_there else send(), finish)
        finally:
            self.place.release(manifest.name)

    def _announced(self, manifest: Manifest, link: str | None, *, overwrite: bool) -> Commit | None:
        """Return the commit of what is to be published, prepared; ``None``: the bucket has just this checkpoint.

        Where files are replaced one by one before the commit, which those with names of their own are not, the
        announced manifest tells readers what they are, and ``link`` leads them to it.
        """
        self.place.acquire(manifest.name)
        found = self._read(manifest.name)
        if isinstance(found, NewerManifestError | OSError):
            raise found  # nothing says that it may be replaced
        there = found if isinstance(found, Manifest) else None
        if there is not None and there.files == manifest.files:
            with contextlib.suppress(FileNotFoundError, CorruptCheckpointError):
                self._complete_manifest(manifest.name)
                return None
        elif there is not None and not overwrite and _moment(there) != _moment(manifest):
            raise exists_error(self.place.uri(there.name), there)
        commit = self.place.commit(manifest.name, {}, overwrite=there is not None, record=record_path(manifest.name))
        commit.prepare(manifest)
        if there is not None and link is not None:
            self.place.point(f"/{link}", manifest.name, ahead=True)
        return commit

    # ── links ────────────────────────────────────────────────────────────────────────────────────────────────────
    def point_latest(self, link: str, name: str) -> None:
        """Make the link ``link`` point to the checkpoint ``name``. There is always one or the other.

        Args:
            link: name of the link, relative to the folder.
            name: of the checkpoint.
        """
        self.place.point(link, name)

    @contextlib.contextmanager
    def pointing(self, links: Mapping[str, str]) -> Generator[None]:
        """Point ``links``, each to a checkpoint, when the block has made them exist.

        In a folder they are made before it: a disk that has no room for them has no checkpoint either.
        """
        with self.place.pointing(links):
            yield

    def leads(self, link: str, name: str) -> bool:
        """Return true if ``link``, a full name in a bucket, leads to the checkpoint ``name``; no damaged one does.

        Args:
            link: full name of the link.
            name: of the checkpoint.

        Returns:
            True if the link is readable and names the checkpoint.
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
        """Remove a checkpoint, its manifest first. What is gone already is not an error."""
        with self.place.deleting(manifest):
            for record in sorted(manifest.files, key=lambda record: not record.path.endswith("/.metadata")):
                self.place.delete(record.path)
            if manifest.is_directory:
                self.place.remove_empty(manifest.name)  # what the user has put there stays, and its folder
        log.debug("deleted checkpoint %s", self.place.uri(manifest.name))

    def quarantine(self, manifest: Manifest) -> None:
        """Take a damaged checkpoint out of the way: its data stay as ``<name>.damaged``, its manifest goes."""
        for name in [manifest.name] if manifest.is_directory else [record.path for record in manifest.files]:
            self.place.quarantine(name)
        # Last: after a kill before it the checkpoint is still damaged.
        remove_manifest(self.place, record_path(manifest.name))
        log.warning("quarantined the damaged checkpoint %s as %s.damaged", self.place.uri(manifest.name), manifest.name)

    def quarantine_file(self, name: str) -> None:
        """Take a damaged file that has no manifest out of the way: it stays as ``<name>.damaged``."""
        self.place.quarantine(name)
        log.warning("quarantined the damaged file %s as %s.damaged", self.place.uri(name), name)

    def quarantine_damaged(self, names: re.Pattern[str]) -> None:
        """Take checkpoints of ``names`` out of the way whose manifest is damaged or that of another, and the manifest.

        The run will save these names again. Other files, such as a copy made by hand, are left alone.
        """
        for name, e in self.manifests_and_faults()[1].items():
            if isinstance(e, CorruptCheckpointError) and names.fullmatch(name) is not None:
                record = record_path(name)
                remove_manifest(self.place, record, kept_as=self.place.damaged_name(record))
                self.place.quarantine(name)
                log.warning("quarantined %s as %s.damaged: %s", self.place.uri(name), name, e)

    # ── what dead processes have left ────────────────────────────────────────────────────────────────────────────
    def recover(self, committed: Mapping[str, str] = MappingProxyType({})) -> None:
        """Complete or remove what dead processes left unfinished. What a live one is writing stays."""
        self.place.recover(committed)

    def tidy(self) -> None:
        """Do so for what this user's processes have left in the folder, not in those below it.

        For who saves without a trainer. What is prepared for the disks of several nodes is left to :meth:`recover`.
        What cannot be removed is logged: it is no checkpoint, and in nobody's way.
        """
        try:
            self.place.recover(None, everywhere=False)
        except OSError as e:
            log.warning("could not remove leftovers of killed processes in %s: %s", self.place.uri(), e)

    def record_path(self, name: str) -> Path:
        """Path of the manifest of the checkpoint ``name``, which need not exist."""
        return self.folder / record_path(name)


def _moment(manifest: Manifest) -> tuple[str, tuple[int, int]]:
    return manifest.run_name, manifest.moment


def _as_before(manifest: Manifest, target: str) -> str:
    """Target of a link that led to ``target``: the file of the same rank, where each rank has one."""
    if len(manifest.files) == 1 or manifest.is_directory:
        return manifest.name
    match = name_pattern(manifest.template, manifest.run_name).fullmatch(target)
    rank = 0 if match is None else int(match.groupdict().get("rank", 0))
    return manifest.files[rank].path if rank < len(manifest.files) else manifest.name
