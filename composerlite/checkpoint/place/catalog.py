"""The checkpoints in a folder: which there are, which is the latest, how one comes and goes."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import final

from composerlite.checkpoint.place.directory import SAVING, LocalFolder
from composerlite.checkpoint.record.manifest import FileRecord, Manifest
from composerlite.checkpoint.record.naming import name_pattern
from composerlite.errors import CheckpointExistsError, CorruptCheckpointError
from composerlite.storage import (
    StagedFile,
    StagedLink,
    abandoned_temporaries,
    atomic_write,
    fsync_folder,
    make_folder,
    read_small_file,
    verify_file,
)

__all__ = ["Catalog"]

log = logging.getLogger(__name__)
_MANIFESTS = ".manifest"


@final
class Catalog:
    """The checkpoints below ``folder``. Reading it opens manifests only, never data.

    A data file without a manifest is not a checkpoint of ours: it is never listed and never deleted.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def manifests(self) -> list[Manifest]:
        """Every committed checkpoint, oldest first. A damaged manifest is logged and left out.

        Raises:
            IncompatibleCheckpointError: one was written by a newer version.
        """
        found: list[Manifest] = []
        for path in self._records():
            try:
                found.append(self._read(path))
            except CorruptCheckpointError as e:
                log.warning("left out: %s", e)
            except FileNotFoundError:  # another process deleted it since we listed the folder
                continue
        return sorted(found, key=lambda manifest: manifest.order)

    def _records(self) -> Iterator[Path]:
        """Where manifests are. Folders of them that are links lead elsewhere, and are left out."""
        root = self.folder / _MANIFESTS
        if root.is_symlink() or (root.exists() and not root.is_dir()):
            log.warning("left out: %s is no folder of this one", root)
            return
        for path in _files(root):
            if path.suffix == ".json" and not path.name.startswith("."):
                yield path

    def manifest_of(self, name: str) -> Manifest | None:
        """The manifest of the checkpoint ``name``; ``None`` if it has none.

        Raises:
            CorruptCheckpointError: it has a damaged one.
        """
        try:
            return self._read(self.record_path(name))
        except FileNotFoundError:
            return None

    def _read(self, path: Path) -> Manifest:
        manifest = Manifest.from_json(read_small_file(path), str(path))
        if self.record_path(manifest.name) != path:
            raise CorruptCheckpointError(f"manifest {str(path)!r} is that of another checkpoint, {manifest.name!r}.")
        return manifest

    def files(self) -> Iterator[str]:
        """Paths below the folder of all files that may be checkpoints, with a manifest or without."""
        return (name for name in self._entries() if _is_regular(self.folder / name))

    def _entries(self) -> Iterator[str]:
        for path in _files(self.folder):
            relative = path.relative_to(self.folder)
            if not any(part.startswith(".") for part in relative.parts) and not path.is_symlink():
                yield str(relative)

    def names(self) -> Iterator[str]:
        """Paths below the folder of all files and folders that may be checkpoints, with a manifest or without."""
        folders: set[str] = set()
        for name in self._entries():
            yield name
            new = {str(folder) for folder in Path(name).parents[:-1]} - folders
            folders |= new
            yield from new

    def verify(self, manifest: Manifest, progress: Callable[[int], object] = int) -> None:
        """Read all data of a checkpoint that are here and compare them with its manifest.

        ``progress`` is told of each so many bytes.

        Raises:
            CorruptCheckpointError: a file is missing, has another size or other bytes.
        """
        for record in manifest.here:
            path = self.folder / record.path
            try:
                verify_file(path, record.digest, progress)
            except FileNotFoundError as e:
                raise CorruptCheckpointError(f"checkpoint {manifest.name!r}: its file {str(path)!r} is gone.") from e
            except CorruptCheckpointError as e:
                raise CorruptCheckpointError(f"checkpoint {manifest.name!r}: {e}") from e

    def is_replaced(self, manifest: Manifest) -> bool:
        """Whether the data of the checkpoint is, whole, that of a newer one that takes its place.

        Between the two renames of a commit the newer data is there beside the older manifest; a killed process leaves
        it so until :meth:`recover`, and a live one may have gone on since ``manifest`` was read.
        """
        path = self.record_path(manifest.name)
        for candidate in (path, *path.parent.glob(f".{glob.escape(path.name)}.tmp-*")):
            newer = self._finished_intention(candidate)
            if newer is not None and newer.name == manifest.name:
                return True
        return False

    # ── changing ─────────────────────────────────────────────────────────────────────────────────────────────────
    def reserve(self, name: str, *, overwrite: bool) -> Path:
        """The path for the data of a new checkpoint ``name``; its folders exist.

        Raises:
            CheckpointExistsError: there is one already, or a file of that name, and ``overwrite`` is false.
        """
        path = self.folder / name
        if not overwrite:
            self.check_free(name)
        make_folder(path.parent)
        make_folder(self.record_path(name).parent)
        return path

    def check_free(self, name: str) -> None:
        """See that there is no checkpoint ``name``, nor a file of that name.

        Raises:
            CheckpointExistsError: there is.
        """
        path = self.folder / name
        if path.exists() or self.record_path(name).exists():
            raise CheckpointExistsError(
                f"checkpoint {str(path)!r} exists. Give names that differ, as with '{{batch}}' in them, delete it, or "
                "pass overwrite=True (save_overwrite=True in the Trainer). If another run is writing to this folder, "
                "give each run a folder of its own."
            )

    def commit(self, manifest: Manifest, data: StagedFile) -> None:
        """Make a checkpoint exist: ``data``, which must be flushed, gets its name, and then it has a manifest.

        The manifest is durable under a temporary name before the data gets its name. A kill between the two leaves
        that intention behind, and :meth:`recover` completes or forgets it; in place of an older checkpoint of the same
        name there is at every moment the old one or the new one.
        """
        path = self.record_path(manifest.name)
        with StagedFile(path) as intention:
            intention.file.write(manifest.to_json())
            intention.flush()
            fsync_folder(path.parent)
            intention.leave_behind()  # if the disk fails from here on, the next start completes what can be completed
            data.publish()
            intention.publish()

    def commit_together(self, manifest: Manifest, temporaries: Mapping[str, Path]) -> None:
        """Make a checkpoint of several files exist, each of which is durable under a temporary name beside its own.

        What has these names goes: its manifest at first. A kill from there on leaves what :meth:`recover` completes.

        Args:
            manifest: names the files.
            temporaries: where each of them is, by name.
        """
        path = self.record_path(manifest.name)
        with StagedFile(path) as intention:
            intention.file.write(manifest.to_json())
            intention.flush()
            for folder in {path.parent, *(temporary.parent for temporary in temporaries.values())}:
                fsync_folder(folder)
            intention.leave_behind()
            self._remove_manifest(manifest.name)
            try:
                self._name_all(temporaries)
                intention.publish()
            except OSError:
                for name, temporary in temporaries.items():
                    if not temporary.exists():
                        (self.folder / name).unlink(missing_ok=True)
                raise

    def _name_all(self, temporaries: Mapping[str, Path]) -> None:
        for name, temporary in temporaries.items():
            temporary.replace(self.folder / name)
        for folder in {(self.folder / name).parent for name in temporaries}:
            fsync_folder(folder)

    def adopt(self, manifest: Manifest) -> None:
        """Make a checkpoint exist whose data are in the folder already, durable and whole, after :meth:`reserve`."""
        with atomic_write(self.record_path(manifest.name)) as file:
            file.write(manifest.to_json())

    def point_latest(self, link: str, name: str) -> None:
        """Make the symbolic link ``link`` point to the checkpoint ``name``. There is always one or the other."""
        with self.latest_link(link, name) as staged:
            staged.publish()

    def latest_link(self, link: str, name: str) -> StagedLink:
        """Return the symbolic link ``link`` to the checkpoint ``name``, which replaces the one there when published."""
        path = self.folder / link
        make_folder(path.parent)
        up = "../" * (len(Path(link).parts) - 1)
        return StagedLink(path, up + name)

    def delete(self, manifest: Manifest) -> None:
        """Remove a checkpoint, its manifest first. What is gone already is not an error."""
        self._remove_manifest(manifest.name)
        for record in sorted(manifest.files, key=lambda record: not record.path.endswith("/.metadata")):
            if self._is_own(record.path):
                (self.folder / record.path).unlink(missing_ok=True)
        if manifest.is_directory:
            with contextlib.suppress(FileNotFoundError, OSError):  # what the user has put there stays, and its folder
                (self.folder / manifest.name).rmdir()
        log.info("deleted checkpoint %s", self.folder / manifest.name)

    def _is_own(self, name: str) -> bool:
        """Check that ``name`` is a file that lies in the folder itself: no link, nor anything behind one."""
        path = self.folder / name
        if any((self.folder / parent).is_symlink() for parent in Path(name).parents):
            log.warning("%s is behind a link and is left alone", path)
            return False
        if path.is_symlink() or (path.exists() and not path.is_file()):
            log.warning("%s is no file and is left alone", path)
            return False
        return path.exists()

    def set_aside(self, manifest: Manifest) -> None:
        """Take a damaged checkpoint out of the way: its data stay as ``<name>.damaged``, its manifest goes."""
        self._remove_manifest(manifest.name)
        for name in [manifest.name] if manifest.is_directory else [record.path for record in manifest.files]:
            self._rename_damaged(name)
        log.warning("set aside the damaged checkpoint %s as %s.damaged", self.folder / manifest.name, manifest.name)

    def set_aside_file(self, name: str) -> None:
        """Take a damaged file that has no manifest out of the way: it stays as ``<name>.damaged``."""
        self._rename_damaged(name)
        log.warning("set aside the damaged file %s as %s.damaged", self.folder / name, name)

    def set_aside_unreadable(self, names: re.Pattern[str]) -> None:
        """Take checkpoints of ``names`` out of the way whose manifest is damaged or that of another, and the manifest.

        The run comes to save these names. What is called otherwise, such as a copy made by hand, is left alone.
        """
        root = self.folder / _MANIFESTS
        for path in list(self._records()):
            name = str(path.relative_to(root)).removesuffix(".json")
            try:
                if names.fullmatch(name) is None or not _is_regular(path):
                    continue
                self._read(path)
            except CorruptCheckpointError as e:
                self._rename_damaged(f"{_MANIFESTS}/{name}.json")
                self._rename_damaged(name)
                log.warning("set aside %s as %s.damaged: %s", self.folder / name, name, e)
            except FileNotFoundError:
                continue

    def mend_links(self, manifest: Manifest | None, links: re.Pattern[str], names: re.Pattern[str]) -> None:
        """Point the links whose checkpoint is gone to that of ``manifest``; remove them if there is none.

        Args:
            manifest: what to point to.
            links: matches the names of links that the saver makes. names: those of its checkpoints. A link that is not
                called so, or leads elsewhere, is of somebody else and is left alone.
        """
        for folder in list(_folders(self.folder)):
            for path in list(folder.iterdir()):
                link = str(path.relative_to(self.folder))
                if links.fullmatch(link) is None or not path.is_symlink() or path.exists():
                    continue
                target = os.path.relpath(path.parent / path.readlink(), self.folder)
                if names.fullmatch(target) is None:
                    continue
                if manifest is None:
                    path.unlink()
                else:
                    self.point_latest(link, _as_before(manifest, target))

    def _rename_damaged(self, name: str) -> None:
        """Rename what is in the folder itself, to a name that nothing has: what was set aside before stays."""
        path = self.folder / name
        if not path.is_dir() or path.is_symlink():
            if not self._is_own(name):
                return
        elif any((self.folder / parent).is_symlink() for parent in Path(name).parents):
            return
        damaged, number = path.with_name(f"{path.name}.damaged"), 1
        while damaged.exists() or damaged.is_symlink():
            number += 1
            damaged = path.with_name(f"{path.name}.damaged-{number}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(damaged)

    def recover(self) -> None:
        """Complete or remove what dead processes left unfinished. What a live one is writing stays.

        A commit that had got as far as naming its data is completed, and so is one of several files that are all there,
        by whatever name; every other temporary is removed.
        """
        if not self.folder.is_dir():
            return
        root = self.folder / _MANIFESTS
        for folder in _folders(root) if root.is_dir() and not root.is_symlink() else ():
            for temporary in abandoned_temporaries(folder):
                self._end_commit(temporary)
        for folder in list(_folders(self.folder)):
            if (saving := SAVING.fullmatch(folder.name)) is not None:
                LocalFolder(folder.with_name(saving[1])).sweep()
            for temporary in abandoned_temporaries(folder):
                _remove_temporary(temporary)

    def tidy(self) -> None:
        """Complete or remove what this user's dead processes left unfinished in the folder, not in those below it.

        For who saves without a trainer. What is prepared for the disks of several nodes is left to :meth:`recover`.
        What cannot be removed is logged: it is no checkpoint, and in nobody's way.
        """
        try:
            kept: set[str] = set()
            root = self.folder / _MANIFESTS
            for temporary in filter(_is_own, () if root.is_symlink() else abandoned_temporaries(root)):
                prepared = _prepared_name(temporary)
                if prepared is None:
                    self._end_commit(temporary)
                else:
                    kept.add(prepared)
            for place in filter(_is_own, list(self.folder.glob(".*.saving-*"))):
                if (saving := SAVING.fullmatch(place.name)) is not None and saving[1] not in kept:
                    LocalFolder(place.with_name(saving[1])).sweep()
            for temporary in filter(_is_own, abandoned_temporaries(self.folder)):
                _remove_temporary(temporary)
        except OSError as e:
            log.warning("what dead processes left in %s is not removed: %s", self.folder, e)

    def _end_commit(self, temporary: Path) -> None:
        """Complete the commit that ``temporary`` announces, or forget it."""
        manifest = self._finished_intention(temporary) or self._completed_intention(temporary)
        if manifest is None:
            temporary.unlink(missing_ok=True)
        else:
            temporary.replace(self.record_path(manifest.name))
            fsync_folder(temporary.parent)
            log.info("completed the commit of %s, whose process had died", self.folder / manifest.name)

    def _finished_intention(self, temporary: Path) -> Manifest | None:
        """The manifest in ``temporary`` if its data is there, whole."""
        try:
            manifest = Manifest.from_json(read_small_file(temporary), str(temporary))
            self.verify(manifest)
        except (CorruptCheckpointError, FileNotFoundError):
            return None
        return manifest

    def _completed_intention(self, temporary: Path) -> Manifest | None:
        """The manifest in ``temporary``, of several files, if all are there: those without their names get them now.

        If not, those that have got theirs are removed: without a manifest they are no checkpoint, and in the way.
        """
        try:
            manifest = Manifest.from_json(read_small_file(temporary), str(temporary))
        except (CorruptCheckpointError, FileNotFoundError):
            return None
        if len(manifest.files) == 1 or manifest.is_directory:
            return None
        named: list[Path] = []
        unnamed: dict[str, Path] = {}
        for record in manifest.files:
            path = self.folder / record.path
            if _holds(path, record):
                named.append(path)
                continue
            staged = path.parent.glob(f".{glob.escape(path.name)}.tmp-*")
            found = next((one for one in staged if _holds(one, record)), None)
            if found is not None:
                unnamed[record.path] = found
        if len(named) + len(unnamed) == len(manifest.files):
            self._name_all(unnamed)
            return manifest
        for path in named if not self.record_path(manifest.name).exists() else ():
            if self._is_own(str(path.relative_to(self.folder))):
                path.unlink()
        return None

    def record_path(self, name: str) -> Path:
        """Where the manifest of the checkpoint ``name`` is, or would be."""
        return self.folder / _MANIFESTS / f"{name}.json"

    def _remove_manifest(self, name: str) -> None:
        path = self.record_path(name)
        if path.exists():
            path.unlink(missing_ok=True)
            fsync_folder(path.parent)


def _remove_temporary(temporary: Path) -> None:
    temporary.unlink(missing_ok=True)
    log.info("removed %s, left by a process that died while it wrote", temporary)


def _is_own(path: Path) -> bool:
    """Whether it belongs to the user of this process."""
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_uid == os.geteuid()
    return False


def _prepared_name(temporary: Path) -> str | None:
    """The name of the checkpoint that ``temporary`` prepares on one of several disks; ``None`` if it does not."""
    try:
        manifest = Manifest.from_json(temporary.read_bytes(), str(temporary))
    except (CorruptCheckpointError, IsADirectoryError, FileNotFoundError):
        return None
    return None if manifest.node is None else manifest.name


def _as_before(manifest: Manifest, target: str) -> str:
    """What a link leads to in the place of ``target``: where each rank has a file, to that of the same rank."""
    if len(manifest.files) == 1 or manifest.is_directory:
        return manifest.name
    match = name_pattern(manifest.template, manifest.run_name).fullmatch(target)
    rank = 0 if match is None else int(match.groupdict().get("rank", 0))
    return manifest.files[rank].path if rank < len(manifest.files) else manifest.name


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:  # another process deleted it
        return False


def _holds(path: Path, record: FileRecord) -> bool:
    """Whether the file ``path`` is there and holds what ``record`` says."""
    try:
        verify_file(path, record.digest)
    except (CorruptCheckpointError, FileNotFoundError):
        return False
    return True


def _walk(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Every folder below ``root``, itself included, and the names of its files, in order. Links are not followed.

    Raises:
        OSError: a folder cannot be read. What is not seen is not absent.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # another process deleted it
            raise error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders.sort()
        yield Path(folder), sorted(names)


def _folders(root: Path) -> Iterator[Path]:
    return (folder for folder, _ in _walk(root))


def _files(root: Path) -> Iterator[Path]:
    return (folder / name for folder, names in _walk(root) for name in names)
