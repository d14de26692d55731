"""The commit of a checkpoint, the same in every place: it appears atomically.

begin → stage → prepare → commit → recover. What is written lies under names of its own, durable, before anything that
is there is touched. To prepare is to *announce* the manifest, under another name. To commit is to give all of it its
names, the manifest last. What had these names before is there until then, is given them back if the commit fails, and
goes when there is the manifest. A kill before the first name is given leaves nothing that counts; a kill after it
leaves all that the next start or the next save of that name needs to complete the commit.

What differs lies in the verbs of a place: a folder exchanges names at one instant, a bucket puts small objects which
decide what others mean.

In a folder a file is ``.<name>.tmp-<id>`` before that, a directory ``.<name>.saving-<id>``, and a manifest
``.<name>.json.tmp-<id>``, the *intention*: :func:`recover` completes a commit that a killed process left unfinished.
Files of the user in a directory that is replaced are moved to the one that takes its place. In a bucket:
:mod:`composerlite.checkpoint.place.bucket`.

A deletion is announced, too: the manifest becomes ``.<name>.gone.tmp-<id>``, and goes when the data are gone.
:func:`recover` completes a deletion that a killed process left unfinished (docs/adr/0096).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import logging
import os
import re
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import final

from composerlite.checkpoint.format import INDEX, INDEXES, SUFFIX, WEIGHTS_INDEX
from composerlite.checkpoint.record.manifest import MANIFESTS, FileRecord, Manifest, record_path
from composerlite.errors import CheckpointExistsError, CorruptCheckpointError
from composerlite.storage import (
    StagedFile,
    abandoned_temporaries,
    atomic_write,
    fsync_folder,
    is_abandoned,
    make_folder,
    read_small_file,
    temporary_name,
    verify_file,
)

__all__ = [
    "GONE",
    "MARKER",
    "MODEL",
    "OF_RANKS",
    "SAVING",
    "TRAIN",
    "Commit",
    "FolderCommit",
    "between_names",
    "dead_saves",
    "deleting",
    "deletion_of",
    "folders",
    "recover",
    "settle_dead_saves",
]

log = logging.getLogger(__name__)
MARKER = ".metadata.json"
"""The file that makes the directory of a step a checkpoint: it has no manifest."""
MODEL, TRAIN = "model_and_optim", "train"
OF_RANKS = re.compile(rf"{TRAIN}/rank\d+(?:_[0-9a-f]{{8}})?\.pt")
"""The files of ranks in a step."""
SAVING = re.compile(r"\.(.+)\.saving-[0-9a-f]{16}(-old|-failed)?")
"""The name of a directory that is being written, and in it that which it will have."""
_PART = re.compile(
    rf"(?:{MODEL}/)?(?:{re.escape(INDEX)}|[^/]*{re.escape(SUFFIX)})|{re.escape(MARKER)}(?:\.next)?"
    rf"|{OF_RANKS.pattern}|{re.escape(record_path(MODEL))}"
    rf"|(?:.*/)?\.[^/]+\.tmp-[0-9a-f]{{16}}|\.{MODEL}\.saving-[0-9a-f]{{16}}(?:-old|-failed)?/.*"
)
"""A file of a checkpoint that is a directory; all others in it are the user's."""
GONE = re.compile(r"\.(.+)\.gone\.tmp-[0-9a-f]{16}")
"""The manifest of a checkpoint that is being deleted: as long as that of a commit that has not ended."""
_WEIGHTS = re.compile(r"model(?:-\d+-of-\d+)?(?:_[0-9a-f]{8})?\.safetensors(?:\.index\.json)?")
"""The same, where it is a folder of weights."""
_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2


class Commit(ABC):
    """The commit of one checkpoint. Used as a context manager, which ends it: prepared and not committed, it is undone.

    A place makes one, which says how each step is done there.
    """

    @final
    def prepare(self, manifest: Manifest) -> None:
        """Make it durable what is to be committed: nothing is left but to give names."""
        self.announce(manifest.to_json())

    @final
    def commit(self) -> None:
        """Make the checkpoint exist.

        Raises:
            CheckpointExistsError: there is one by now, and it is not to be replaced.
            OSError, ObjectStoreError: it does not, and what was there before has its names again.
        """
        try:
            self.take_names()
            self.publish()
        except BaseException:
            self.undo()
            raise
        self.discard()

    @abstractmethod
    def announce(self, manifest: bytes) -> None:
        """Make the manifest durable under another name: it tells what is about to get its names."""

    @abstractmethod
    def take_names(self) -> None:
        """Give each part its name. From the first one on a kill leaves what completes the commit."""

    @abstractmethod
    def publish(self) -> None:
        """Give the manifest its name: the checkpoint exists."""

    @abstractmethod
    def undo(self) -> None:
        """Give the names back to what had them before."""

    @abstractmethod
    def discard(self) -> None:
        """Remove the replaced files. A failure is logged: they are no checkpoint."""

    def leave(self) -> None:
        """End without knowing whether it is to be committed: the next start finds out."""

    def close(self, error: BaseException | None) -> None:
        """Withdraw names that were announced and not published, unless the files were left. May be called twice."""

    def __enter__(self) -> Commit:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)


# ── in a folder ──────────────────────────────────────────────────────────────────────────────────────────────────
@final
class FolderCommit(Commit):
    """Files and directories by the paths that they will have, and the file that the manifest will be, or none."""

    def __init__(self, parts: Mapping[Path, Path], record: Path | None, *, overwrite: bool) -> None:
        self._parts = parts
        self._record = record
        self._overwrite = overwrite
        self._intention: StagedFile | None = None
        self._held = contextlib.ExitStack()
        self._taken: dict[Path, Path | None] = {}
        """Where what had a name before is now."""
        self._before: bytes | None = None

    def announce(self, manifest: bytes) -> None:
        assert self._record is not None
        make_folder(self._record.parent)
        intention = self._intention = StagedFile(self._record)
        intention.file.write(manifest)
        intention.flush()
        for folder in {self._record.parent, *(temporary.parent for temporary in self._parts.values())}:
            fsync_folder(folder)

    def take_names(self) -> None:
        if self._record is not None and self._record.is_file():
            self._before = self._record.read_bytes()
        self.leave()
        take = _take_name if self._overwrite else _take_new_name
        for path, temporary in self._parts.items():
            self._held.enter_context(_held(path))  # what is replaced is not swept before the commit has ended
            self._taken[path] = take(temporary, path)
        for folder in {path.parent for path in self._parts}:
            fsync_folder(folder)

    def publish(self) -> None:
        if self._intention is not None:
            self._intention.publish()

    def undo(self) -> None:
        """The manifest goes first, unless it is that of before: nothing is to be completed."""
        if self._intention is not None and self._record is not None:
            if not self._intention.temporary.exists():
                self._record.unlink()
            self._intention.temporary.unlink(missing_ok=True)
        for path, old in self._taken.items():
            if old is None or old != self._parts[path] or not _exchange(old, path):
                path.rename(self._parts[path])
                if old is not None:
                    old.rename(path)
        if self._record is not None and self._before is not None and not self._record.exists():
            with atomic_write(self._record) as file:
                file.write(self._before)

    def discard(self) -> None:
        for path, old in self._taken.items():
            if old is not None:
                _discard(old, path)

    def leave(self) -> None:
        if self._intention is not None:
            self._intention.leave_behind()

    def close(self, error: BaseException | None) -> None:
        self._held.close()
        intention, self._intention = self._intention, None
        if intention is not None:
            intention.__exit__(None if error is None else type(error), error, None)


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _take_name(place: Path, path: Path) -> Path | None:
    """Rename the file or directory ``place`` to ``path``; where what was there is now, unless there was nothing."""
    if place.is_dir():
        try:
            place.rename(path)  # an empty directory is replaced
            return None
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    elif not os.path.lexists(path):
        place.rename(path)
        return None
    if _exchange(place, path):
        return place
    if not place.is_dir():
        place.replace(path)
        return None
    old = place.with_name(f"{place.name}-old")
    path.rename(old)
    place.rename(path)
    return old


def _take_new_name(place: Path, path: Path) -> Path | None:
    """Do so where there is no checkpoint: nothing, or a directory with files of the user or of a save that did not end.

    Raises:
        CheckpointExistsError: there is one: another process was first.
    """
    try:
        if place.is_dir():
            old = _take_name(place, path)
            if old is not None and any((old / name).exists() for name in (*INDEXES, MARKER)):
                back = _take_name(old, path)
                if back is not None and back != place:
                    back.rename(place)
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            return old
        if not _rename(place, path, _RENAME_NOREPLACE):
            os.link(place, path)
            place.unlink()
    except FileExistsError as e:
        raise CheckpointExistsError(f"checkpoint {str(path)!r} was saved by another process meanwhile.") from e
    return None


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names at one instant; return whether the system can."""
    return _rename(a, b, _RENAME_EXCHANGE)


def _rename(a: Path, b: Path, how: int) -> bool:
    """Rename ``a`` to ``b`` in a way that not all file systems have; return whether this one has."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    sys.audit("os.rename", str(a), str(b), -1, -1)
    if rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), how) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(a), None, str(b))


@contextlib.contextmanager
def _held(path: Path) -> Generator[None]:
    """Within it, what is at ``path`` now does not count as left by a dead process, whatever name it gets."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # nothing is there, or it cannot be opened: then nobody can find it dead either
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks: nothing is swept there
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _discard(old: Path, path: Path) -> None:
    """Remove the old ``path``; files that are no part of a checkpoint are moved back to it.

    A failure is logged: the old files are no checkpoint, and the next start tries again.
    """
    try:
        if not old.is_dir() or old.is_symlink():
            old.unlink(missing_ok=True)
        elif _is_rescued(old, path):
            shutil.rmtree(old)
    except FileNotFoundError:
        return
    except OSError as e:
        log.warning("%s cannot be removed and is left behind: %s", old, e)


def _is_rescued(old: Path, path: Path) -> bool:
    """Move the user's files in ``old`` to ``path``; return whether none is left."""
    clear = True
    of_weights = (old / WEIGHTS_INDEX).is_file()
    for folder, _, names in os.walk(old):
        for entry in (Path(folder) / name for name in names):
            relative = entry.relative_to(old)
            if _PART.fullmatch(str(relative)) or (of_weights and _WEIGHTS.fullmatch(str(relative))):
                continue
            target = path / relative
            if not path.is_dir():
                log.warning("%s is left behind: it holds %s, which is not part of a checkpoint", old, relative)
                clear = False
            elif not os.path.lexists(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                entry.rename(target)
    return clear


# ── a checkpoint goes ────────────────────────────────────────────────────────────────────────────────────────────────
@contextlib.contextmanager
def deleting(root: Path, manifest: Manifest) -> Generator[None]:
    """Within it a checkpoint of the folder ``root`` exists no more, and its files are deleted.

    A kill in it, or an error, leaves what :func:`recover` completes the deletion with.
    """
    record = root / record_path(manifest.name)
    gone = record.with_name(temporary_name(record.name.removesuffix(".json") + ".gone"))
    with _held(record):
        try:
            record.rename(gone)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            record.unlink()  # a full disk may have no room for another name
        fsync_folder(record.parent)
        yield
        _end_deletion(root, manifest, gone)


def deletion_of(manifest: Manifest) -> bytes:
    """Return the content of an object that announces the deletion of a checkpoint."""
    return manifest.to_json()


def _end_deletion(root: Path, manifest: Manifest, gone: Path) -> None:
    """Forget a deletion when it is durable that the data are gone."""
    for folder in {(root / path).parent for path in (manifest.name, *(record.path for record in manifest.files))}:
        with contextlib.suppress(FileNotFoundError):
            fsync_folder(folder)
    gone.unlink(missing_ok=True)


# ── what dead processes have left ────────────────────────────────────────────────────────────────────────────────────
def between_names(path: Path) -> Iterator[Path]:
    """Yield temporary paths of the committed directory ``path``, on a disk that cannot exchange two names."""
    for place in sorted(path.parent.glob(f".{glob.escape(path.name)}.saving-*-old")):
        new = place.with_name(place.name.removesuffix("-old"))
        if SAVING.fullmatch(place.name) is not None and new.is_dir():
            yield new


def recover(
    root: Path,
    complete: Callable[[Path, Manifest], object],
    *,
    below: bool = True,
    may_touch: Callable[[Path], bool] = lambda _: True,
    committed: Mapping[str, str] | None,
) -> None:
    """Complete or remove what dead processes left unfinished in the folder ``root``. What a live one writes stays.

    Args:
        root: holds checkpoints, and the folder of their manifests.
        complete: deletes what is left of a checkpoint in a folder.
        below: look into the folders in it, too.
        may_touch: which leftovers to look at.
        committed: of what is prepared here as a part of a checkpoint on the disks of several nodes, what the first disk
            has is completed, and the rest removed: the identities of checkpoints, by name. On the first disk there are
            none. ``None``: it is left as it is.
    """
    seen = [root] if not below and root.is_dir() else [one for one in folders(root) if _is_seen(one)]
    kept: set[Path] = set()
    for folder in reversed(seen):  # a run's own folder first
        records = folder / MANIFESTS
        if records.is_dir() and not records.is_symlink():
            for inner in list(folders(records)) if below else [records]:
                for temporary in filter(may_touch, abandoned_temporaries(inner)):
                    if not _settle_deletion(folder, temporary, complete):
                        kept.update(_settle_commit(folder, temporary, committed))
    for folder in seen:
        for place in filter(may_touch, dead_saves(folder)):
            if place.with_name(_name_in(place)) not in kept:
                _settle(place)
        for temporary in filter(may_touch, abandoned_temporaries(folder)):
            if temporary not in kept:
                temporary.unlink(missing_ok=True)
                log.info("removed %s, left by a process that died while it wrote", temporary)


def settle_dead_saves(root: Path, name: str, complete: Callable[[Path, Manifest], object]) -> None:
    """Recover the directory ``name`` alone, as :func:`recover` does, but no commits that need several disks."""
    record = root / record_path(name)
    kept: set[Path] = set()
    for temporary in abandoned_temporaries(record.parent):
        if temporary.name.startswith(f".{record.stem}.gone.tmp-"):
            _settle_deletion(root, temporary, complete)
        if temporary.name.startswith(f".{record.name}.tmp-"):
            kept.update(_settle_commit(root, temporary, None))
    path = root / name
    for place in dead_saves(path.parent, path.name):
        if path not in kept:
            _settle(place)


def _is_seen(folder: Path) -> bool:
    """Return true if leftovers are looked for in ``folder``, which is not a save in progress itself."""
    return all(SAVING.fullmatch(part) is None for part in folder.parts)


def dead_saves(folder: Path, name: str = "*") -> Iterator[Path]:
    """The directories in ``folder`` that dead processes have left, of saves of ``name``; each is locked meanwhile."""
    for place in sorted(folder.glob(f".{name if name == '*' else glob.escape(name)}.saving-*")):
        if SAVING.fullmatch(place.name) is None:
            continue
        with is_abandoned(place) as dead:
            if dead and place.is_dir() and not place.is_symlink():
                yield place


def _name_in(place: Path) -> str:
    match = SAVING.fullmatch(place.name)
    assert match is not None
    return match[1]


def _settle(place: Path) -> None:
    """End the save of a directory at ``place``, whose process is dead and of which no intention tells.

    Where names cannot be exchanged a kill may have left the directory without its name, beside the old one.
    """
    path, old = place.with_name(_name_in(place)), place.with_name(f"{place.name}-old")
    if not os.path.lexists(path):
        if (old.is_dir() and (place / MARKER).is_file()) or place.name.endswith("-old"):
            place.rename(path)
        if not place.exists():
            fsync_folder(path.parent)
            log.info("completed %s, whose process had died", path)
            return
        if old.is_dir():
            old.rename(path)
    _discard(place, path)
    log.info("removed %s, left by a process that died while it saved", place)


def _announced(temporary: Path) -> Manifest | None:
    try:
        return Manifest.from_json(read_small_file(temporary), str(temporary))
    except (CorruptCheckpointError, FileNotFoundError):
        return None


def _settle_deletion(root: Path, temporary: Path, complete: Callable[[Path, Manifest], object]) -> bool:
    """Complete the deletion that ``temporary`` announces; false if it announces none."""
    if GONE.fullmatch(temporary.name) is None:
        return False
    if (manifest := _announced(temporary)) is not None:
        complete(root, manifest)
        _end_deletion(root, manifest, temporary)
        log.info("completed the deletion of %s, whose process had died", root / manifest.name)
        if manifest.name == MODEL:  # of a step, which is gone
            with contextlib.suppress(OSError):  # it holds files of the user
                temporary.parent.rmdir()
                root.rmdir()
    temporary.unlink(missing_ok=True)
    return True


def _settle_commit(root: Path, temporary: Path, committed: Mapping[str, str] | None) -> Iterable[Path]:
    """Complete the commit that ``temporary`` announces, or forget it; what of it is left for another to decide."""
    manifest = _announced(temporary)
    if manifest is None:
        temporary.unlink(missing_ok=True)
        return ()
    record = root / record_path(manifest.name)
    parts = _parts_of(root, manifest)
    if parts is not None and (not _has_begun(parts) or _is_whole(root, _announced(record))):
        if manifest.node is not None and committed is None:
            return temporary, *parts
        if manifest.node is None or (committed or {}).get(manifest.name) != manifest.identity:
            parts = None  # nothing of it has a name: what was there is, and it is not known to have been wanted
    if parts is None:
        _forget(root, manifest, temporary)
        return ()
    for path, place in parts.items():
        if path != place and (old := _take_name(place, path)) is not None:
            _discard(old, path)
    for folder in {path.parent for path in parts}:
        fsync_folder(folder)
    temporary.replace(record)
    fsync_folder(record.parent)
    log.info("completed the commit of %s, whose process had died", root / manifest.name)
    return ()


def _has_begun(parts: Mapping[Path, Path]) -> bool:
    """Return true if names have been given: this commit alone has all that makes a checkpoint of them."""
    return any(
        place == path or (not os.path.lexists(path) and place.with_name(f"{place.name}-old").is_dir())
        for path, place in parts.items()
    )


def _is_whole(root: Path, there: Manifest | None) -> bool:
    """Return true if all that the manifest ``there`` speaks of has its name, as after a later commit of that name.

    The times at which two processes saved do not tell which was first: their clocks may differ.
    """
    return there is not None and all(_holds(root, root / one.path, one) for one in there.here)


def _forget(root: Path, manifest: Manifest, temporary: Path) -> None:
    """Remove an intention that cannot be completed, and files that it alone speaks of: they would be in the way."""
    if not manifest.is_directory and len(manifest.files) > 1 and not (root / record_path(manifest.name)).exists():
        for record in manifest.files:
            if _holds(root, root / record.path, record):
                (root / record.path).unlink()
    temporary.unlink(missing_ok=True)


def _parts_of(root: Path, manifest: Manifest) -> dict[Path, Path] | None:
    """Current paths of the files, or of the directory, of ``manifest``, by their final paths.

    ``None`` if one is incomplete. Links are not followed.
    """
    if manifest.is_directory:
        path = root / manifest.name
        for place in (path, *sorted(path.parent.glob(f".{glob.escape(path.name)}.saving-*"))):
            if all(_holds(root, place / Path(one.path).relative_to(manifest.name), one) for one in manifest.here):
                return {path: place}
        return None
    parts: dict[Path, Path] = {}
    for record in manifest.files:
        path = root / record.path
        candidates = (path, *sorted(path.parent.glob(f".{glob.escape(path.name)}.tmp-*")))
        place = next((one for one in candidates if _holds(root, one, record)), None)
        if place is None:
            return None
        parts[path] = place
    return parts


def _holds(root: Path, path: Path, record: FileRecord) -> bool:
    """Return true if the file ``path`` is there, in the folder ``root`` itself, and holds what ``record`` says."""
    above = [path, *path.parents]
    if any(one.is_symlink() for one in above[: above.index(root)]):
        return False
    try:
        verify_file(path, record.digest)
    except (CorruptCheckpointError, FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return False
    return True


def folders(root: Path) -> Iterator[Path]:
    """Yield every folder below ``root``, itself included. Links are not followed.

    Raises:
        OSError: a folder cannot be read. What is not seen is not absent.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # another process deleted it
            raise error

    for folder, subfolders, _ in os.walk(root, onerror=refuse):
        subfolders.sort()
        yield Path(folder)
