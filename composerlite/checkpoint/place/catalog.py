"""The checkpoints in a folder: which there are, which is the latest, how one comes and goes."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import final

from composerlite.checkpoint.place.commit import MANIFESTS, FolderCommit, intentions, record_path, recover
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.record.naming import name_pattern
from composerlite.errors import CheckpointExistsError, CorruptCheckpointError
from composerlite.storage import (
    StagedLink,
    atomic_write,
    fsync_folder,
    make_folder,
    read_small_file,
    verify_file,
)

__all__ = ["Catalog"]

log = logging.getLogger(__name__)


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
        root = self.folder / MANIFESTS
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
        newest = self.manifest_of(manifest.name)
        for newer in (*intentions(self.folder, manifest.name), *(() if newest is None else (newest,))):
            with contextlib.suppress(CorruptCheckpointError):
                self.verify(newer)
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
        parts = {self.folder / name: temporary for name, temporary in temporaries.items()}
        with FolderCommit(parts, self.record_path(manifest.name), overwrite=overwrite) as commit:
            commit.prepare(manifest)
            commit.commit()

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
        root = self.folder / MANIFESTS
        for path in list(self._records()):
            name = str(path.relative_to(root)).removesuffix(".json")
            try:
                if names.fullmatch(name) is None or not _is_regular(path):
                    continue
                self._read(path)
            except CorruptCheckpointError as e:
                self._rename_damaged(f"{MANIFESTS}/{name}.json")
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

    def recover(self, committed: Mapping[str, str] = MappingProxyType({})) -> None:
        """Complete or remove what dead processes left unfinished. What a live one is writing stays."""
        recover(self.folder, committed=committed)

    def tidy(self) -> None:
        """Do so for what this user's processes have left in the folder, not in those below it.

        For who saves without a trainer. What is prepared for the disks of several nodes is left to :meth:`recover`.
        What cannot be removed is logged: it is no checkpoint, and in nobody's way.
        """
        try:
            recover(self.folder, below=False, may_touch=_is_own, committed=None)
        except OSError as e:
            log.warning("what dead processes left in %s is not removed: %s", self.folder, e)

    def record_path(self, name: str) -> Path:
        """Where the manifest of the checkpoint ``name`` is, or would be."""
        return record_path(self.folder, name)

    def _remove_manifest(self, name: str) -> None:
        path = self.record_path(name)
        if path.exists():
            path.unlink(missing_ok=True)
            fsync_folder(path.parent)


def _is_own(path: Path) -> bool:
    """Whether it belongs to the user of this process."""
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_uid == os.geteuid()
    return False


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
