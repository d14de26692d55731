"""The commit of a checkpoint, the same in every place: it appears atomically.

begin → stage → prepare → commit → recover. What is written lies under names of its own, durable, before anything that
is there is touched. To prepare is to *announce* the manifest, under another name. To commit is to give all of it its
names, the manifest last. What had these names before is there until then, is given them back if the commit fails, and
goes when there is the manifest. A kill before the first name is given leaves nothing that counts; a kill after it
leaves all that the next start or the next save of that name needs to complete the commit.

What differs lies in the verbs of a place: a folder exchanges names at one instant, a bucket puts small objects which
decide what others mean.

In a folder a file is ``.<name>.tmp-<id>`` before that, a directory ``.<name>.saving-<id>``, and a manifest
``.<name>.json.tmp-<id>``, the *intention*: ``Folder.recover`` completes a commit that a killed process left unfinished.
Files of the user in a directory that is replaced are moved to the one that takes its place. Commits that replace
in one folder wait for each other from the first name to the last, where its file system has locks. In a bucket:
:mod:`composerlite.checkpoint.place.bucket`.

A deletion is announced, too: the manifest becomes ``.<name>.gone.tmp-<id>``, and goes when the data are gone.
``Folder.recover`` completes a deletion that a killed process left unfinished (docs/adr/0096).
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
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, final

from composerlite.checkpoint.format import INDEX, INDEXES, SUFFIX, WEIGHTS_INDEX
from composerlite.checkpoint.record.manifest import MANIFESTS, FileRecord, Manifest, record_path
from composerlite.errors import CheckpointExistsError, ConfigError, CorruptCheckpointError
from composerlite.storage import (
    abandoned_temporaries,
    fsync_folder,
    is_abandoned,
    read_small_file,
    verify_file,
)

__all__ = [
    "GONE",
    "MARKER",
    "MODEL",
    "OF_RANKS",
    "SAVING",
    "STEP_MODEL",
    "TRAIN",
    "Commit",
    "Settlement",
    "between_names",
    "check_replaceable",
    "dead_saves",
    "deletion_of",
    "discard",
    "end_deletion",
    "exchange",
    "folders",
    "held",
    "named_instead",
    "remove_manifest",
    "settle_dead_saves",
    "settle_record",
    "settle_save",
    "settlement",
    "take_name",
    "take_new_name",
    "write_manifest",
]

log = logging.getLogger(__name__)
MARKER = ".metadata.json"
"""The file that makes the directory of a step a checkpoint: it has no manifest."""
MODEL, TRAIN = "model_and_optim", "train"
STEP_MODEL = f"step{{step}}/{MODEL}"
"""Template in the manifest of a model that is a part of a step; that of one that was saved alone is ``MODEL``."""
OF_RANKS = re.compile(rf"{TRAIN}/rank(\d+)(?:_[0-9a-f]{{8}})?\.pt")
"""The files of ranks in a step; its group is the rank."""
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
_WITH_PARTS = re.compile(
    rf"{MODEL}|{TRAIN}|{re.escape(MANIFESTS)}|\.{MODEL}\.saving-[0-9a-f]{{16}}(?:-old|-failed)?(?:/.*)?"
)
"""A folder of a checkpoint that is a directory."""
_WEIGHTS = re.compile(r"model(?:-\d+-of-\d+)?(?:_[0-9a-f]{8})?\.safetensors(?:\.index\.json)?")
"""The same, where it is a folder of weights."""
_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2


class Records(Protocol):
    """The verbs of a place that its manifests need."""

    def put(self, path: str, data: bytes | Path, *, create_only: bool = False) -> None: ...
    def delete(self, path: str, *, kept_as: str | None = None) -> None: ...
    def left_of(self, manifest: Manifest) -> Sequence[str]: ...
    def complete_deletion(self, manifest: Manifest, left: Sequence[str]) -> None: ...


def write_manifest(place: Records, path: str, data: bytes | Path, *, create_only: bool = False) -> None:
    """Give a manifest, or the marker of a step, its name: a checkpoint exists. Nothing else does.

    Args:
        place: has the data already.
        path: of the manifest.
        data: its content, or a durable file of it in the same folder.
        create_only: raise FileExistsError if there is one.
    """
    place.put(path, data, create_only=create_only)


def remove_manifest(place: Records, path: str, *, kept_as: str | None = None) -> None:
    """Take a manifest, or the marker of a step, away: a checkpoint exists no more. Nothing else does.

    Args:
        place: has the data still.
        path: of the manifest, which need not be there.
        kept_as: the path under which its content stays.
    """
    place.delete(path, kept_as=kept_as)


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
            TimeoutError: another process hangs in a commit in the same folder.
        """
        with self.turn():
            try:
                self.take_names()
                self.publish()
            except BaseException:
                self.undo()
                raise
        self.discard()

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Within it no other commit gives the same names, where the place can see to it."""
        return contextlib.nullcontext()

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


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def take_name(place: Path, path: Path) -> Path | None:
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
    if place.is_dir():
        place.chmod(stat.S_IMODE(path.stat().st_mode))
    if exchange(place, path):
        return place
    if not place.is_dir():
        place.replace(path)
        return None
    old = place.with_name(f"{place.name}-old")
    path.rename(old)
    place.rename(path)
    return old


def take_new_name(place: Path, path: Path) -> Path | None:
    """Do so where there is no checkpoint: nothing, or a directory with files of the user or of a save that did not end.

    Raises:
        CheckpointExistsError: there is one: another process was first.
    """
    try:
        if place.is_dir():
            old = take_name(place, path)
            if old is not None and any((old / name).exists() for name in (*INDEXES, MARKER)):
                back = take_name(old, path)
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


def exchange(a: Path, b: Path) -> bool:
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
def held(path: Path) -> Generator[None]:
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


def discard(old: Path, path: Path) -> None:
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
    """Move the user's files and folders in ``old`` to ``path``, each as a whole; return whether none is left."""
    of_weights = (old / WEIGHTS_INDEX).is_file()
    clear = True
    folders = [Path()]
    while folders:
        for entry in sorted((old / folders.pop()).iterdir()):
            relative, is_folder = entry.relative_to(old), entry.is_dir() and not entry.is_symlink()
            if is_folder and (_WITH_PARTS.fullmatch(str(relative)) or (path / relative).is_dir()):
                folders.append(relative)
            elif not is_folder and (
                _PART.fullmatch(str(relative)) or (of_weights and _WEIGHTS.fullmatch(str(relative)))
            ):
                continue
            elif os.path.lexists(path / relative) or not path.is_dir():
                log.warning("%s is left behind: it holds %s, which is not part of a checkpoint", old, relative)
                clear = False
            else:
                (path / relative).parent.mkdir(parents=True, exist_ok=True)
                entry.rename(path / relative)
    return clear


def check_replaceable(path: Path) -> None:
    """See that the directory ``path``, if there is one, can give its name to a new one: see :func:`take_name`.

    Raises:
        ConfigError: others use it by its name.
    """
    real = Path(os.path.realpath(path))
    reason = ""
    if real in (home := Path("~").expanduser(), *home.parents):
        reason = "is, or holds, the home of this user"
    elif os.path.ismount(real):
        reason = "is a mount point"
    elif real.is_dir() and real.stat().st_mode & stat.S_ISVTX:
        reason = "is a directory that users share"
    with contextlib.suppress(FileNotFoundError):  # the current directory was removed
        if real in (here := Path.cwd(), *here.parents):
            reason = "is, or holds, the current directory"
    if reason:
        raise ConfigError(
            f"checkpoint {str(path)!r}: a new directory takes the place of the one that is there, and {str(real)!r} "
            f"{reason}. Save to a directory below it."
        )


# ── a checkpoint goes ────────────────────────────────────────────────────────────────────────────────────────────────
def deletion_of(manifest: Manifest) -> bytes:
    """Return the content of an object that announces the deletion of a checkpoint."""
    return manifest.to_json()


def end_deletion(root: Path, manifest: Manifest, gone: Path) -> None:
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


def settle_dead_saves(place: Records, root: Path, name: str) -> None:
    """Recover the directory ``name`` of the folder ``root`` alone, but no commits that need several disks."""
    record = root / record_path(name)
    kept: set[Path] = set()
    for temporary in abandoned_temporaries(record.parent):
        if temporary.name.startswith((f".{record.stem}.gone.tmp-", f".{record.name}.tmp-")):
            kept.update(settle_record(place, root, temporary, None))
    path = root / name
    for staged in dead_saves(path.parent, path.name):
        settle_save(staged, kept)


@final
@dataclass(frozen=True, slots=True)
class Settlement:
    """Fate of a commit or deletion that a dead process has announced, decided before anything is touched.

    Attributes:
        temporary: announces it, and goes.
        manifest: what is announced; ``None``: nothing that can be read.
        parts: of a commit that is completed, the current paths by those to be; ``None``: nothing is completed.
        gone: paths below the folder that go, in that order: the rest of a deletion, or of a commit that is forgotten.
        is_left: it is left for another to decide.
    """

    temporary: Path
    manifest: Manifest | None = None
    parts: Mapping[Path, Path] | None = None
    gone: Sequence[str] = ()
    is_left: bool = False

    @property
    def is_deletion(self) -> bool:
        """Return true if a deletion was announced."""
        return GONE.fullmatch(self.temporary.name) is not None


def settlement(
    place: Records, root: Path, temporary: Path, committed: Mapping[str, str] | None = MappingProxyType({})
) -> Settlement:
    """Decide about the commit, or the deletion, that ``temporary`` announces in ``place``; change nothing.

    Args:
        place: that it is in.
        root: the folder of it.
        temporary: left by a process that died.
        committed: see :meth:`~composerlite.checkpoint.place.place.Place.recover`.
    """
    manifest = _announced(temporary)
    if manifest is None:
        return Settlement(temporary)
    if GONE.fullmatch(temporary.name) is not None:
        return Settlement(temporary, manifest, gone=place.left_of(manifest))
    record = root / record_path(manifest.name)
    parts = _parts_of(root, manifest)
    if parts is not None and (not _has_begun(parts) or _is_whole(root, _announced(record))):
        if manifest.node is not None and committed is None:
            return Settlement(temporary, manifest, parts, is_left=True)
        if manifest.node is None or (committed or {}).get(manifest.name) != manifest.identity:
            parts = None  # nothing of it has a name: what was there is, and it is not known to have been wanted
    return Settlement(temporary, manifest, parts, _forgotten(root, manifest) if parts is None else ())


def settle_record(place: Records, root: Path, temporary: Path, committed: Mapping[str, str] | None) -> Iterable[Path]:
    """Execute the decision of :func:`settlement`.

    Returns:
        What of it is left for another to decide: under temporary names and under those that are to be.
    """
    decided = settlement(place, root, temporary, committed)
    manifest = decided.manifest
    if decided.is_left:
        return temporary, *(decided.parts or ())
    if manifest is not None and decided.is_deletion:
        place.complete_deletion(manifest, decided.gone)
        end_deletion(root, manifest, temporary)
        log.info("completed the deletion of %s, whose process had died", root / manifest.name)
        if manifest.template == STEP_MODEL:  # the step is gone
            with contextlib.suppress(OSError):  # it holds files of the user
                temporary.parent.rmdir()
                root.rmdir()
    elif manifest is not None and decided.parts is not None:
        _complete_commit(place, root, decided.parts, manifest, temporary)
        return ()
    for path in () if decided.is_deletion else decided.gone:
        (root / path).unlink(missing_ok=True)
    temporary.unlink(missing_ok=True)
    return ()


def dead_saves(folder: Path, name: str = "*") -> Iterator[Path]:
    """The directories in ``folder`` that dead processes have left, of saves of ``name``; each is locked meanwhile."""
    for place in sorted(folder.glob(f".{name if name == '*' else glob.escape(name)}.saving-*")):
        if SAVING.fullmatch(place.name) is None:
            continue
        with is_abandoned(place) as dead:
            if dead and place.is_dir() and not place.is_symlink():
                yield place


def named_instead(place: Path) -> Path | None:
    """Return the directory that gets the name of the save at ``place``, of a dead process, if nothing has it.

    That is the directory itself, or the old one; ``None``: nothing.
    """
    old = place.with_name(f"{place.name}-old")
    if place.name.endswith("-old") or (old.is_dir() and (place / MARKER).is_file()):
        return place
    return old if old.is_dir() else None


def settle_save(place: Path, kept: Container[Path]) -> None:
    """End the save of a directory at ``place``, whose process is dead, unless it is to stay: ``kept``.

    Where names cannot be exchanged a kill may have left the directory without its name, beside the old one.
    """
    match = SAVING.fullmatch(place.name)
    assert match is not None
    path = place.with_name(match[1])
    if path in kept:
        return
    if not os.path.lexists(path) and (named := named_instead(place)) is not None:
        named.rename(path)
        if named == place:
            fsync_folder(path.parent)
            log.info("completed %s, whose process had died", path)
            return
    discard(place, path)
    log.info("removed %s, left by a process that died while it saved", place)


def _announced(temporary: Path) -> Manifest | None:
    try:
        return Manifest.from_json(read_small_file(temporary), str(temporary))
    except (CorruptCheckpointError, FileNotFoundError):
        return None


def _complete_commit(
    place: Records, root: Path, parts: Mapping[Path, Path], manifest: Manifest, temporary: Path
) -> None:
    for path, staged in parts.items():
        if path != staged and (old := take_name(staged, path)) is not None:
            discard(old, path)
    for folder in {path.parent for path in parts}:
        fsync_folder(folder)
    write_manifest(place, record_path(manifest.name), temporary)
    log.info("completed the commit of %s, whose process had died", root / manifest.name)


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


def _forgotten(root: Path, manifest: Manifest) -> Sequence[str]:
    """Return the files that a commit which cannot be completed alone speaks of: they would be in the way."""
    if manifest.is_directory or len(manifest.files) < 2 or (root / record_path(manifest.name)).exists():
        return ()
    return [record.path for record in manifest.files if _holds(root, root / record.path, record)]


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
