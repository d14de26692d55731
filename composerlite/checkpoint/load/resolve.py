"""The checkpoint of a path or URI: a file on this machine, or a directory anywhere.

A checkpoint elsewhere that is one file is downloaded.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, NamedTuple, final

from composerlite import storage
from composerlite.checkpoint.format import INDEX, MODEL
from composerlite.checkpoint.format.packing import is_packed, is_tar, unpacked
from composerlite.checkpoint.format.weight_files import (
    WEIGHTS_SUFFIX,
    holds_model_states,
    holds_weights,
    is_safetensors,
)
from composerlite.checkpoint.load.progress import download_bar, progress_of
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import record_in
from composerlite.checkpoint.place.commit import fetch_checkpoint
from composerlite.checkpoint.place.directory import ShardedDirectory, StepFolder
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.place import LINK_SUFFIX, Place
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
    "download_checkpoint",
    "engine_folder",
    "fetched",
    "followed",
    "get_file",
    "is_read_in_place",
    "located",
    "resolved",
    "source_of",
    "transferring",
]

_MOST_LINKS, _MOST_LINK_BYTES = 8, 4096


@final
class Located(NamedTuple):
    """The place of a checkpoint.

    Attributes:
        name: the name given by the user.
        kind: ``'file'``: a file that is read as a whole. Each rank reads its part of the other kinds: ``'sharded'``, a
            directory; ``'step'``, a directory with the model and the optimizer in a directory below; ``'weights'``, a
            file of safetensors.
        path: path on this machine; ``None``: only rank 0 has the file, or the checkpoint is in a store.
        uri: URI, if the checkpoint is in a store.
        key: name in that store.
    """

    name: str
    kind: Literal["file", "sharded", "step", "weights"]
    path: Path | None = None
    uri: str = ""
    key: str = ""

    def folder(self, object_store: ObjectStore | None) -> ShardedDirectory:
        """Open the directory, or the folder of a file of weights; of a step, the directory of the model."""
        if self.kind == "step":
            return self.step_folder(object_store).model()
        if self.kind == "weights" and self.path is not None:
            path = Path(os.path.realpath(self.path))
            return ShardedDirectory(Folder(path.parent), "", path.name)
        if self.kind == "weights":
            store = open_store(self.uri) if object_store is None else object_store
            folder, _, file = self.key.rpartition("/")
            return ShardedDirectory(Bucket.of(store, closes=object_store is None), folder, file)
        if object_store is None or self.path is not None:
            return ShardedDirectory.of(self.path or self.uri)
        return ShardedDirectory.in_store(object_store, self.key)

    def step_folder(self, object_store: ObjectStore | None) -> StepFolder:
        """Open the directory of the step."""
        if object_store is None or self.path is not None:
            return StepFolder.of(self.path or self.uri)
        return StepFolder.in_store(object_store, self.key)


def source_of(name: str) -> str:
    """Return the name of a checkpoint in messages, without passwords."""
    return f"checkpoint {without_secrets(name)!r}"


@contextlib.contextmanager
def located(name: str, object_store: ObjectStore | None, *, progress_bar: bool, trust: bool) -> Generator[Located]:
    """Find the checkpoint ``name`` on rank 0, and yield its place on every rank. Collective.

    Rank 0 downloads a file; the download is deleted at the end of the block. A directory or a file of safetensors in a
    store is not downloaded: each rank reads its part. A folder of DeepSpeed is merged into one file.

    Args:
        name: a path, a URI, or a name in ``object_store``; the same on every rank.
        object_store: the store that ``name`` is a name in.
        progress_bar: show a progress bar on a terminal while a large file is downloaded.
        trust: for a folder of DeepSpeed: load any type, **running any code in the files**.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint. A missing local file raises this when it is read.
        ConfigError, PermissionError, ObjectStoreError: see :func:`~composerlite.checkpoint.load.resolve.fetched`.
    """
    from composerlite import dist  # imports torch, not needed for a listing

    group = dist.get_group()
    is_here = object_store is None and not is_uri(name)
    with contextlib.ExitStack() as stack:
        found: Located | None = None
        with group.all_or_none("finding the checkpoint"):
            if group.is_first and is_here:
                found = _find_here(stack, name, trust=trust)
            elif group.is_first:
                found = _find_elsewhere(stack, name, object_store, progress_bar=progress_bar, trust=trust)
        found = group.broadcast(found)
        assert found is not None
        is_download = not is_here and found.kind == "file"
        yield found._replace(path=None) if is_download and not group.is_first else found


def _find_here(stack: contextlib.ExitStack, name: str, *, trust: bool) -> Located:
    path = resolved(Path(parse_uri(name)[2]))
    if (path / MODEL / INDEX).is_file():
        return Located(name, "step", path)
    if is_read_in_place(path):
        return Located(name, "weights" if path.is_file() else "sharded", path)
    if (found := stack.enter_context(engine_folder(name, None))) is not None:
        return _merged(stack, name, *found, trust=trust)
    return Located(name, "file", path)


def _find_elsewhere(
    stack: contextlib.ExitStack, name: str, object_store: ObjectStore | None, *, progress_bar: bool, trust: bool
) -> Located:
    if object_store is None and parse_uri(name)[0] in ("http", "https"):
        path = stack.enter_context(fetched(name, progress_bar=progress_bar))
        return Located(without_secrets(name), "weights" if is_read_in_place(path) else "file", path)
    with transferring(name, object_store) as (transfer, wanted):
        key = followed(transfer, wanted).rstrip("/")
        uri = transfer.store.get_uri(key) if key else name
        if key and transfer.exists(key):
            if key.endswith(WEIGHTS_SUFFIX):
                return Located(name, "weights", uri=uri, key=key)
            path = _download(transfer, key, _temporary_folder(stack), progress_bar)
            return Located(without_secrets(name), "weights" if is_read_in_place(path) else "file", path)
        if key and transfer.exists(f"{key}/{MODEL}/{INDEX}"):
            return Located(name, "step", uri=uri, key=key)
        if key and transfer.exists(f"{key}/{INDEX}"):
            return Located(name, "sharded", uri=uri, key=key)
        if (found := stack.enter_context(engine_folder(name, object_store))) is not None:
            return _merged(stack, name, *found, trust=trust)
        if key and holds_weights(Bucket(transfer).names(key)):
            return Located(name, "sharded", uri=uri, key=key)
    raise CheckpointNotFoundError(f"there is no checkpoint {uri}: it is no object, and no directory of a checkpoint.")


def _merged(stack: contextlib.ExitStack, name: str, place: Place, save: str, *, trust: bool) -> Located:
    """Write one save of DeepSpeed's engine as one file."""
    from composerlite.checkpoint.load.deepspeed_folder import merged_file  # rarely needed

    return Located(name, "file", merged_file(place, save, _temporary_folder(stack), trust=trust))


def _temporary_folder(stack: contextlib.ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="composerlite-")))


@contextlib.contextmanager
def engine_folder(name: str, object_store: ObjectStore | None) -> Generator[tuple[Place, str] | None]:
    """Open the folder ``name`` of DeepSpeed's engine. Yield the place, and the folder with one save in that place.

    ``None``: ``name`` is something else.
    """
    with contextlib.ExitStack() as stack:
        place: Place | None = None
        folder = ""
        if object_store is None and not is_uri(name):
            path = Path(os.path.realpath(resolved(Path(parse_uri(name)[2]))))
            if path.is_dir():
                place, folder = Folder(path.parent), path.name
        elif object_store is not None or parse_uri(name)[0] not in ("http", "https"):
            transfer, wanted = stack.enter_context(transferring(name, object_store))
            above, _, folder = followed(transfer, wanted).rstrip("/").rpartition("/")
            place = Bucket(transfer, above) if folder else None
        save = None if place is None else deepspeed_save(place, folder)
        yield None if place is None or save is None else (place, save)


def deepspeed_save(place: Place, folder: str) -> str | None:
    """Return the folder with one save of DeepSpeed's engine: ``folder``, or the folder named in its file ``latest``.

    ``None``: there is no such save.
    """
    names = place.names(folder)
    if holds_model_states(names):
        return folder
    if "latest" not in names:
        return None
    try:
        tag = place.read(f"{folder}/latest").decode().strip()
    except (CorruptCheckpointError, UnicodeDecodeError, OSError):  # a folder of ours may have that name
        return None
    save = f"{folder}/{tag}"
    return save if tag in names and holds_model_states(place.names(save)) else None


def is_read_in_place(path: Path) -> bool:
    """Return true for a sharded directory, and for a file or a folder of safetensors."""
    if path.is_dir():
        return (path / INDEX).is_file() or holds_weights([one.name for one in path.iterdir()])
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return is_safetensors(file.read(9)) or path.suffix == WEIGHTS_SUFFIX


_PLAIN_NAME, _ARCHIVED_NAME = "rank0_checkpoint", "composer_states.pt"


@contextlib.contextmanager
def fetched(
    path: str | Path,
    object_store: ObjectStore | None = None,
    *,
    progress_bar: bool = False,
    near: Path | None = None,
) -> Generator[Path]:
    """Yield the checkpoint ``path`` as a file of this machine, which exists within the block.

    A local path is yielded as it is, links followed. Anything else is downloaded to a temporary folder, and verified if
    it has a record.

    Args:
        path: a path, a URI, or a name in ``object_store``.
        object_store: the store that ``path`` is a name in.
        progress_bar: show a progress bar on a terminal while a large file is downloaded.
        near: make the temporary folder in this folder; ``None``: in the system's.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        CorruptCheckpointError: the bytes are not those that were saved.
        ConfigError: the URI names no store, or a package for the store is not installed.
        PermissionError, ObjectStoreError: the store denies access, or fails.
    """
    text = str(path)
    if object_store is None and not is_uri(text):
        yield resolved(Path(parse_uri(text)[2]))
        return
    with tempfile.TemporaryDirectory(prefix="composerlite-", dir=near) as folder:
        if object_store is None and parse_uri(text)[0] in ("http", "https"):
            target = Path(folder) / (PurePosixPath(text.partition("?")[0]).name or "checkpoint.pt")
            what = f"downloading {without_secrets(text)}"
            try:
                with download_bar(progress_bar) as update:
                    RetryPolicy().run(lambda: storage.download_url(text, target, update), what)
            except FileNotFoundError as e:
                raise CheckpointNotFoundError(str(e)) from e
        else:
            with transferring(path, object_store) as (transfer, name):
                try:
                    target = _download(transfer, followed(transfer, name), Path(folder), progress_bar)
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
    """Make the file ``path`` available as ``destination``: a symbolic link to a file of this machine, else a download.

    A file whose name ends with ``.symlink`` contains the name of another file, which is taken instead; also if there is
    no ``path``, but a ``path.symlink``.

    Args:
        path: a path, a URI, or a name in ``object_store``.
        destination: a free path in an existing folder.
        object_store: the store that ``path`` is a name in.
        overwrite: replace the file at ``destination``.
        progress_bar: show a progress bar on a terminal while a large file is downloaded.

    Raises:
        CheckpointNotFoundError: there is no such file.
        FileNotFoundError: there is no folder for ``destination``.
        FileExistsError: ``destination`` exists, and ``overwrite`` is false.
        ConfigError: the URI names no store, or a package for the store is not installed.
        PermissionError, ObjectStoreError: the store denies access, or fails.
    """
    target = Path(destination)
    if not overwrite and (target.is_symlink() or target.exists()):
        raise FileExistsError(f"{str(target)!r} exists: give another destination, or overwrite=True.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{str(target)!r}: there is no folder {str(target.parent)!r}: make it first.")
    with fetched(path, object_store, progress_bar=progress_bar, near=target.parent) as source:
        if not source.is_file():
            raise CheckpointNotFoundError(f"there is no file {str(path)!r}")
        if object_store is None and not is_uri(str(path)):
            replace_symlink(target, str(source.resolve()))
        else:
            source.replace(target)


def download_checkpoint(
    path: str | Path,
    node_checkpoint_folder: str | Path,
    object_store: ObjectStore | None = None,
    progress_bar: bool = True,
    fsdp_sharded_state_dict_enabled: bool = False,
    deepspeed_sharded_checkpoint: bool = False,
) -> tuple[str, str | None, bool]:
    """Make the checkpoint ``path`` a file in ``node_checkpoint_folder``, unpacked, for ``safe_torch_load``.

    A file of this machine that is not packed is linked, not copied.

    Args:
        path: a path, a URI, or a name in ``object_store``, of a checkpoint in any format.
        node_checkpoint_folder: a folder.
        object_store: the store that ``path`` is a name in.
        progress_bar: show a progress bar on a terminal while a large file is downloaded.
        fsdp_sharded_state_dict_enabled: must be false: sharded checkpoints are read in place.
        deepspeed_sharded_checkpoint: must be false, too.

    Returns:
        The path of the ``.pt`` file; the folder with the extracted archive, ``None`` if there was no archive; and
        False: the archive of another rank is never extracted.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        CorruptCheckpointError: the bytes are not those that were saved, or cannot be unpacked.
        ConfigError: the URI names no store, a package for the store is not installed, or an argument says that the
            checkpoint is sharded.
        PermissionError, ObjectStoreError: the store denies access, or fails.
    """
    if fsdp_sharded_state_dict_enabled or deepspeed_sharded_checkpoint:
        raise ConfigError(f"{str(path)!r}: sharded checkpoints are not downloaded yet; load them from where they are")
    folder = Path(node_checkpoint_folder)
    with fetched(path, object_store, progress_bar=progress_bar, near=folder) as source:
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
            source.replace(target)
    return str(target), None if extracted is None else str(extracted), False


# ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def resolved(path: Path) -> Path:
    """Return ``path``, or the target of ``path`` if it is a ``.symlink`` file."""
    for _ in range(_MOST_LINKS):
        if path.suffix != LINK_SUFFIX or not path.is_file():
            if path.exists() or not (link := path.with_name(path.name + LINK_SUFFIX)).is_file():
                return path
            path = link
        with path.open("rb") as file:
            target = file.read(_MOST_LINK_BYTES).decode(errors="replace").strip()
        # In a copy of a bucket, the folder of the link has the object without the folders before its name.
        found, beside = path.parent / target, path.parent / PurePosixPath(target).name
        path = found if found.exists() or not Path(target).name else beside
    raise CorruptCheckpointError(f"{str(path)!r} leads to a loop of links.")


def followed(transfer: Transfer, name: str) -> str:
    """Return ``name``, or the target if ``name`` is a link or there is only a link ``name.symlink``."""
    for _ in range(_MOST_LINKS):
        if not name.endswith(LINK_SUFFIX):
            if transfer.exists(name) or not transfer.exists(name + LINK_SUFFIX):
                return name
            name += LINK_SUFFIX
        target = transfer.read_all(name, most_bytes=_MOST_LINK_BYTES).decode(errors="replace").strip()
        folder = name.rpartition("/")[0]
        name = target if "/" in target or not folder else f"{folder}/{target}"
    raise CorruptCheckpointError(f"{transfer.store.get_uri(name)} leads to a loop of links.")


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
    """Download the object ``name`` to ``folder``, verified by its record if there is a record."""
    above, _, last = name.rpartition("/")
    remote = Bucket(transfer, above)
    record = record_in(remote, last)
    if record is None or record.form != "file":
        with download_bar(progress_bar) as update:
            transfer.download(name, folder / last, overwrite=True, callback=update)
        return folder / last
    manifest = record.lying_at(last) or replace(record, name=last)
    with progress_of("downloading a checkpoint", manifest.size_bytes, progress_bar) as progress:
        fetch_checkpoint(remote, manifest, Folder(folder), progress)
    return folder / manifest.name
