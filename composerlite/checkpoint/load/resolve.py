"""Names of checkpoints, and the file or the sharded directory that each stands for, on this machine or elsewhere.

What is elsewhere and is one file is brought here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar, final

from composerlite import storage
from composerlite.checkpoint.format import INDEX, MODEL
from composerlite.checkpoint.format.packing import is_packed, is_tar, unpacked
from composerlite.checkpoint.format.weight_files import (
    WEIGHTS_SUFFIX,
    holds_model_states,
    holds_weights,
    is_safetensors,
)
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import fetch_checkpoint
from composerlite.checkpoint.place.directory import Directory, ShardedDirectory, StepFolder
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.place import LINK_SUFFIX, OnBytes, Place
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from composerlite.storage import (
    ObjectStore,
    RetryPolicy,
    StagedFile,
    is_uri,
    open_store,
    parse_uri,
    replace_symlink,
    without_secrets,
)

if TYPE_CHECKING:
    from composerlite.storage import Transfer

__all__ = [
    "Located",
    "deepspeed_save",
    "download_bar",
    "download_checkpoint",
    "engine_folder",
    "fetched",
    "followed",
    "get_file",
    "is_read_in_place",
    "located",
    "manifest_at",
    "progress_of",
    "resolved",
    "source_of",
    "transferring",
    "what_is_there",
]

D = TypeVar("D", bound=Directory)


@final
@dataclass(frozen=True, slots=True)
class Located:
    """The place of a checkpoint.

    Attributes:
        name: as it was asked for.
        is_directory: whether it is a sharded one, or files of weights, which each rank reads where they are.
        path: of the file on this machine; ``None``: only rank 0 has it. Of the directory, if it is no URI.
        uri: of the directory.
        key: name of the directory in the object store that was given.
        is_file: ``uri`` and ``key`` are those of a file of weights.
        step: whether the directory is that of a step, with the model and the optimizer below it.
    """

    name: str
    is_directory: bool = False
    path: Path | None = None
    uri: str = ""
    key: str = ""
    is_file: bool = False
    step: bool = False

    def folder(self, object_store: ObjectStore | None) -> ShardedDirectory:
        """The directory, from this rank; that of the model and the optimizer if it is that of a step."""
        if self.step:
            return self.step_folder(object_store).model()
        if self.path is not None and self.path.is_file():
            path = Path(os.path.realpath(self.path))
            return ShardedDirectory(Folder(path.parent), "", path.name)
        if self.is_file:
            store = open_store(self.uri) if object_store is None else object_store
            folder, _, file = self.key.rpartition("/")
            return ShardedDirectory(Bucket.of(store, closes=object_store is None), folder, file)
        return self._opened(ShardedDirectory, object_store)

    def step_folder(self, object_store: ObjectStore | None) -> StepFolder:
        """The directory of the step, from this rank."""
        return self._opened(StepFolder, object_store)

    def _opened(self, kind: type[D], object_store: ObjectStore | None) -> D:
        if object_store is None or self.path is not None:
            return kind.of(self.path or self.uri)
        return kind.in_store(object_store, self.key)


def source_of(name: str) -> str:
    """Name of the checkpoint ``name`` in messages."""
    return f"checkpoint {without_secrets(name)!r}"


Merge = Callable[[Place, str, Path], Path]


@contextlib.contextmanager
def located(name: str, object_store: ObjectStore | None, *, progress_bar: bool, merge: Merge) -> Generator[Located]:
    """Locate ``name``, the same on every rank, for as long as the block lasts. Rank 0 looks.

    A file that is elsewhere is downloaded, by rank 0. A directory or a file of safetensors in a store is left where it
    is: each rank reads its part of it. A folder of DeepSpeed becomes one file.

    Args:
        name: a path, a URI, or a name in ``object_store``.
        object_store: the store that ``name`` is a name in.
        progress_bar: show one on a terminal while a large file is downloaded.
        merge: is called where it is a folder of DeepSpeed, with the place, the folder in it with one save, and a
            folder of this machine, in which it writes the file that it returns.

    Raises:
        CheckpointNotFoundError: it does not exist there. A missing local file raises when it is
            read.
        ConfigError, PermissionError, ObjectStoreError: see :func:`~composerlite.checkpoint.load.resolve.fetched`.
    """
    from composerlite import dist  # imports torch, which a listing does without

    is_here = object_store is None and not is_uri(name)
    with contextlib.ExitStack() as stack:
        found: Located | None = None
        with dist.get_group().all_or_none("looking for the checkpoint"):
            if dist.get_global_rank() == 0:
                if is_here:
                    found = _on_this_machine(stack, name, merge)
                else:
                    found = _elsewhere(stack, name, object_store, progress_bar, merge)
        told = dist.get_group().broadcast(found)
        assert told is not None
        if not is_here and not told.is_directory and dist.get_global_rank() != 0:
            told = dataclasses.replace(told, path=None)
        yield told


def _on_this_machine(stack: contextlib.ExitStack, name: str, merge: Merge) -> Located:
    path = resolved(Path(parse_uri(name)[2]))
    if (path / MODEL / INDEX).is_file():
        return Located(name, is_directory=True, path=path, step=True)
    if is_read_in_place(path):
        return Located(name, is_directory=True, path=path)
    if (found := stack.enter_context(engine_folder(name, None))) is not None:
        return _merged(stack, name, *found, merge)
    return Located(name, path=path)


@contextlib.contextmanager
def engine_folder(name: str, object_store: ObjectStore | None) -> Generator[tuple[Place, str] | None]:
    """Open the folder of DeepSpeed's engine that is called ``name``: the place, and the folder in it with one save.

    ``None``: it is something else.
    """
    if object_store is None and not is_uri(name):
        whole = Path(os.path.realpath(resolved(Path(parse_uri(name)[2]))))
        place = Folder(whole.parent) if whole.is_dir() else None
        save = None if place is None else deepspeed_save(place, whole.name)
        yield None if place is None or save is None else (place, save)
    elif object_store is None and parse_uri(name)[0] in ("http", "https"):
        yield None
    else:
        with transferring(name, object_store) as (transfer, wanted):
            key = followed(transfer, wanted).rstrip("/")
            folder = ShardedDirectory.in_store(transfer.store, key) if key else None
            save = None if folder is None else deepspeed_save(folder.place, folder.name)
            yield None if folder is None or save is None else (folder.place, save)


def deepspeed_save(place: Place, folder: str) -> str | None:
    """Return the folder with the files of one save of DeepSpeed's engine: ``folder``, or that which ``latest`` names.

    ``None``: there is none.
    """
    names = place.names(folder)
    if holds_model_states(names):
        return folder
    if "latest" not in names:
        return None
    try:
        tag = place.read(f"{folder}/latest").decode().strip()
    except (CorruptCheckpointError, UnicodeDecodeError, OSError):  # a folder of ours may be called so
        return None
    save = f"{folder}/{tag}"
    return save if tag in names and holds_model_states(place.names(save)) else None


def _merged(stack: contextlib.ExitStack, name: str, place: Place, save: str, merge: Merge) -> Located:
    target = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="composerlite-")))
    return Located(name, path=merge(place, save, target))


def is_read_in_place(path: Path) -> bool:
    """Return true for a sharded directory, and for a file or a folder of safetensors."""
    if path.is_dir():
        return (path / INDEX).is_file() or holds_weights([one.name for one in path.iterdir()])
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return is_safetensors(file.read(9)) or path.suffix == WEIGHTS_SUFFIX


def _elsewhere(
    stack: contextlib.ExitStack, name: str, object_store: ObjectStore | None, progress_bar: bool, merge: Merge
) -> Located:
    try:
        if object_store is not None or parse_uri(name)[0] not in ("http", "https"):
            with transferring(name, object_store) as (transfer, wanted):
                key = followed(transfer, wanted)
                if key.endswith(WEIGHTS_SUFFIX) and transfer.exists(key):
                    uri = transfer.store.get_uri(key)
                    return Located(name, is_directory=True, uri=uri, key=key, is_file=True)
        path = stack.enter_context(fetched(name, object_store, progress_bar=progress_bar))
        return Located(without_secrets(name), is_directory=is_read_in_place(path), path=path)
    except CheckpointNotFoundError:
        if object_store is None and parse_uri(name)[0] in ("http", "https"):
            raise
        with transferring(name, object_store) as (transfer, wanted):
            key = followed(transfer, wanted).rstrip("/")
            if key and transfer.exists(f"{key}/{MODEL}/{INDEX}"):
                return Located(name, is_directory=True, uri=transfer.store.get_uri(key), key=key, step=True)
            has_index = bool(key) and transfer.exists(f"{key}/{INDEX}")
            if not has_index and (found := stack.enter_context(engine_folder(name, object_store))) is not None:
                return _merged(stack, name, *found, merge)
            if not has_index and not (key and holds_weights(Bucket(transfer).names(key))):
                raise
            return Located(name, is_directory=True, uri=transfer.store.get_uri(key), key=key)


_PLAIN_NAME, _ARCHIVED_NAME = "rank0_checkpoint", "composer_states.pt"
_LARGE_BYTES = 1 << 28
_MOST_LINKS, _MOST_LINK_BYTES = 8, 4096
_DOWNLOADS = 5
"""Times that a file is downloaded which is replaced meanwhile."""


@contextlib.contextmanager
def fetched(
    path: str | Path, object_store: ObjectStore | None = None, *, progress_bar: bool = False
) -> Generator[Path]:
    """The checkpoint ``path`` as a file of this machine, for as long as the block lasts.

    A path is itself. What is at an address or in an object store is downloaded to a temporary folder; with its
    manifest, where it has one: then its bytes are verified.

    Args:
        path: a path, a URI, or a name in ``object_store``.
        object_store: the store that ``path`` is a name in.
        progress_bar: show one on a terminal while a large file is downloaded.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        CorruptCheckpointError: the bytes are not those that were saved.
        ConfigError: the URI names no store, or what it takes is not installed.
        PermissionError, ObjectStoreError: the store does not let us read, or fails.
    """
    if object_store is None and not is_uri(str(path)):
        yield resolved(Path(parse_uri(str(path))[2]))
        return
    with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
        scheme = "" if object_store is not None else parse_uri(str(path))[0]
        if scheme in ("http", "https"):
            target = Path(folder) / (PurePosixPath(str(path).partition("?")[0]).name or "checkpoint.pt")
            _download_url(str(path), target, progress_bar)
            yield target
            return
        with transferring(path, object_store) as (transfer, name):
            try:
                target = _download(transfer, name, Path(folder), progress_bar)
            except FileNotFoundError as e:
                raise CheckpointNotFoundError(f"there is no checkpoint {transfer.store.get_uri(name)}: {e}") from e
        yield target


def get_file(
    path: str | Path,
    destination: str | Path,
    object_store: ObjectStore | None = None,
    overwrite: bool = False,
    progress_bar: bool = True,
) -> None:
    """Make the file ``path`` available as ``destination``: a symbolic link to a file of this machine, else a copy.

    What ends with ``.symlink`` holds the name of another, which is taken instead; also where there is no ``path`` but a
    ``path.symlink``.

    Args:
        path: a path, a URI, or a name in ``object_store``.
        destination: a path at which there is nothing, in a folder that exists.
        object_store: the store that ``path`` is a name in.
        overwrite: replace what is at ``destination``.
        progress_bar: show one on a terminal while a large file is downloaded.

    Raises:
        CheckpointNotFoundError: there is no such file.
        FileNotFoundError: there is no folder for ``destination``.
        FileExistsError: there is something at ``destination`` and ``overwrite`` is false.
        ConfigError: the URI names no store, or what it takes is not installed.
        PermissionError, ObjectStoreError: the store does not let us read, or fails.
    """
    target = Path(destination)
    if not overwrite and (target.is_symlink() or target.exists()):
        raise FileExistsError(f"{str(target)!r} exists: give another destination, or overwrite=True.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{str(target)!r}: there is no folder {str(target.parent)!r}: make it first.")
    if object_store is None and not is_uri(str(path)):
        source = resolved(Path(parse_uri(str(path))[2]))
        if not source.is_file():
            raise CheckpointNotFoundError(f"there is no file {str(path)!r}")
        replace_symlink(target, str(source.resolve()))
        return
    if object_store is None and parse_uri(str(path))[0] in ("http", "https"):
        _download_url(str(path), target, progress_bar)
        return
    with transferring(path, object_store) as (transfer, name):
        try:
            _download_object(transfer, followed(transfer, name), target, progress_bar)
        except FileNotFoundError as e:
            raise CheckpointNotFoundError(f"there is no file {transfer.store.get_uri(name)}: {e}") from e


def download_checkpoint(
    path: str | Path,
    node_checkpoint_folder: str | Path,
    object_store: ObjectStore | None = None,
    progress_bar: bool = True,
    fsdp_sharded_state_dict_enabled: bool = False,
    deepspeed_sharded_checkpoint: bool = False,
) -> tuple[str, str | None, bool]:
    """Bring the checkpoint ``path`` to ``node_checkpoint_folder``, unpacked, for ``safe_torch_load``.

    A file of this machine that ``torch.load`` opens as it is is linked, not copied.

    Args:
        path: of the checkpoint, in any format: a path, a URI, or a name in ``object_store``.
        node_checkpoint_folder: a folder.
        object_store: the store that ``path`` is a name in.
        progress_bar: show one on a terminal while a large file is downloaded.
        fsdp_sharded_state_dict_enabled: must be false: sharded checkpoints are read in place.
        deepspeed_sharded_checkpoint: must be false, too.

    Returns:
        The path of the ``.pt`` file; the folder that the archive was extracted to, ``None`` if it was none; and
        whether another rank's archive was extracted, which is never so.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        CorruptCheckpointError: its bytes are not those that were saved, or it cannot be unpacked.
        ConfigError: the URI names no store, what it takes is not installed, or the checkpoint is said to be sharded.
        PermissionError, ObjectStoreError: the store does not let us read, or fails.
    """
    if fsdp_sharded_state_dict_enabled or deepspeed_sharded_checkpoint:
        raise ConfigError(f"{str(path)!r}: sharded checkpoints are not downloaded yet; load them from where they are")
    folder = Path(node_checkpoint_folder)
    with fetched(path, object_store, progress_bar=progress_bar) as source:
        if not source.is_file():
            raise CheckpointNotFoundError(f"there is no file {str(path)!r}")
        extracted = folder / "checkpoint" if is_tar(source) else None
        target = folder / _PLAIN_NAME if extracted is None else extracted / _ARCHIVED_NAME
        target.parent.mkdir(exist_ok=True)
        if is_packed(source):
            with unpacked(source) as file, StagedFile(target) as staged:
                shutil.copyfileobj(file, staged.file, 1 << 20)
                staged.flush()
                staged.publish()
        elif object_store is None and not is_uri(str(path)):
            replace_symlink(target, str(source.resolve()))
        else:
            shutil.move(source, target)
    return str(target), None if extracted is None else str(extracted), False


# ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def resolved(path: Path) -> Path:
    """``path``, or the file whose name is in it if it is a ``.symlink``."""
    for _ in range(_MOST_LINKS):
        if path.suffix != LINK_SUFFIX or not path.is_file():
            if path.exists() or not (link := path.with_name(path.name + LINK_SUFFIX)).is_file():
                return path
            path = link
        with path.open("rb") as file:
            target = file.read(_MOST_LINK_BYTES).decode(errors="replace").strip()
        found = path.parent / target
        path = found if found.exists() or not Path(target).name else _beside(path, target)
    raise CorruptCheckpointError(f"{str(path)!r} leads to a loop of links.")


def _beside(link: Path, target: str) -> Path:
    """Path of the object ``target`` in a copy of a bucket: the link's folder has it, without the folders before it."""
    return link.parent / PurePosixPath(target).name


def followed(transfer: Transfer, name: str) -> str:
    """The object that ``name`` means: itself, or the one that a link of that name holds."""
    for _ in range(_MOST_LINKS):
        if not name.endswith(LINK_SUFFIX):
            if transfer.exists(name) or not transfer.exists(name + LINK_SUFFIX):
                return name
            name += LINK_SUFFIX
        target = transfer.read_all(name, most_bytes=_MOST_LINK_BYTES).decode(errors="replace").strip()
        folder = name.rpartition("/")[0]
        name = target if "/" in target or not folder else f"{folder}/{target}"
    raise CorruptCheckpointError(f"{transfer.store.get_uri(name)} leads to a loop of links.")


# ── who knows it ─────────────────────────────────────────────────────────────────────────────────────────────────────
def manifest_at(transfer: Transfer, name: str) -> tuple[Catalog, Manifest | None]:
    """Return the catalog of the folder of the object ``name``, and the record of the checkpoint of that name."""
    folder, _, last = name.rpartition("/")
    catalog = Catalog(Bucket(transfer, folder))
    return catalog, catalog.manifest_of(last)


def what_is_there(path: Path) -> str:
    """Hint for a ``path`` without a checkpoint: a sentence on what the user may have meant, after a space."""
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f" The folder {str(folder)!r} does not exist either."
    names = [manifest.name for manifest in Catalog(folder).readable()]
    if not names:
        return f" The folder {str(folder)!r} holds no checkpoint."
    kind = "is a folder that holds" if path.is_dir() else "does not exist; the folder holds"
    return f" {str(path)!r} {kind}: {', '.join(names[-8:])}. Give one of these files."


# ── downloads ────────────────────────────────────────────────────────────────────────────────────────────────────────
@contextlib.contextmanager
def transferring(path: str | Path, object_store: ObjectStore | None) -> Generator[tuple[Transfer, str]]:
    """Open a transfer for ``path``, and yield it with the name of the object."""
    if object_store is not None:
        with storage.Transfer(object_store) as transfer:
            yield transfer, str(path)
        return
    with open_store(str(path)) as store, storage.Transfer(store) as transfer:
        yield transfer, parse_uri(str(path))[2]


def _download(transfer: Transfer, name: str, folder: Path, progress_bar: bool) -> Path:
    """Download a checkpoint to ``folder``, verified by its record if it has one.

    One that is replaced meanwhile is downloaded again.
    """
    name = followed(transfer, name)
    remote, manifest = manifest_at(transfer, name)
    for _ in range(_DOWNLOADS):
        if manifest is None or manifest.form != "file":
            target = folder / PurePosixPath(name).name
            _download_object(transfer, name, target, progress_bar)
            return target
        try:
            with progress_of("downloading a checkpoint", manifest.size_bytes, progress_bar) as progress:
                fetch_checkpoint(remote.place, manifest, Folder(folder), progress)
            return folder / manifest.name
        except CorruptCheckpointError:
            tried = manifest
            remote, manifest = manifest_at(transfer, name)
            if manifest is not None and manifest.id == tried.id:
                raise
    raise CorruptCheckpointError(
        f"checkpoint {transfer.store.get_uri(name)!r} was replaced {_DOWNLOADS} times while it was downloaded: load it "
        "when the program that saves it has ended, or have that program give each checkpoint a name of its own."
    )


def _download_object(transfer: Transfer, name: str, target: Path, progress_bar: bool) -> None:
    with download_bar(progress_bar) as tell:
        transfer.download(name, target, overwrite=True, callback=tell)


def _download_url(url: str, target: Path, progress_bar: bool) -> None:
    try:
        with download_bar(progress_bar) as tell:
            RetryPolicy().run(lambda: storage.download_url(url, target, tell), f"downloading {without_secrets(url)}")
    except FileNotFoundError as e:
        raise CheckpointNotFoundError(str(e)) from e


# ── progress bars ────────────────────────────────────────────────────────────────────────────────────────────────────
@contextlib.contextmanager
def progress_of(what: str, total_bytes: int, wanted: bool) -> Generator[OnBytes]:
    """Show a bar for ``total_bytes``, as :func:`download_bar` does; gives what is called with each number of bytes."""
    if not _is_shown(wanted) or total_bytes < _LARGE_BYTES:
        yield int
        return
    done = 0
    with download_bar(wanted, what) as tell:

        def progress(size: int) -> None:
            nonlocal done
            done += size
            tell(done, total_bytes)

        yield progress


@contextlib.contextmanager
def download_bar(wanted: bool, what: str = "downloading a checkpoint") -> Generator[Callable[[int, int], object]]:
    """Show a bar, on a terminal and for what takes long enough to be seen; only if it is ``wanted``.

    Yields a callback for one thread, to be called with (bytes received, total).
    """
    if not _is_shown(wanted):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with contextlib.ExitStack() as stack:
        bars: list[Bar] = []

        def tell(done: int, total: int) -> None:
            if total < _LARGE_BYTES:
                return
            if not bars:
                bars.append(stack.enter_context(Bar(console=Console(stderr=True), transient=True)))
                bars[0].add_task(what, total=total)
            bars[0].update(bars[0].task_ids[0], completed=done, total=total)

        yield tell


def _is_shown(wanted: bool) -> bool:
    return wanted and sys.stderr.isatty()
