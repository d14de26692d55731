"""Find the checkpoint of a path, a URI of an object store, or an address (``http://``, ``https://``).

A checkpoint of one file in a store or at an address is downloaded. A directory, or a file of safetensors in a store, is
read in place.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, final

from composerlite.checkpoint.format import INDEX, MODEL
from composerlite.checkpoint.format.packing import is_packed, is_tar, unpacked
from composerlite.checkpoint.format.weight_files import (
    MOST_HEADER_BYTES,
    WEIGHTS_SUFFIX,
    holds_model_states,
    holds_weights,
)
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.catalog import record_in
from composerlite.checkpoint.place.directory import ShardedDirectory, StepFolder
from composerlite.checkpoint.place.place import LINK_SUFFIX, Folder, Place
from composerlite.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from composerlite.storage import ObjectStore, RetryPolicy, atomic_write, is_uri, open_store, parse_uri, without_secrets
from composerlite.storage.disk.files import staged_symlink
from composerlite.storage.progress import download_bar, progress_of
from composerlite.storage.uri import download_url

_MOST_LINKS = 8


@final
class Located(NamedTuple):
    """Location of a checkpoint.

    Attributes:
        name: the name given by the user.
        kind: ``'file'``: a file, read as a whole. Each rank reads its part of the other kinds: ``'sharded'``, a
            directory; ``'step'``, a directory with the model and the optimizer in a directory below; ``'weights'``, a
            file of safetensors.
        path: path on this machine; ``None``: the checkpoint is in a store. Only rank 0 has a downloaded file.
        key: name in the store, for a checkpoint that is read in place.
    """

    name: str
    kind: Literal["file", "sharded", "step", "weights"]
    path: Path | None = None
    key: str = ""

    def opened(self, object_store: ObjectStore | None) -> tuple[ShardedDirectory, StepFolder | None]:
        """Open a checkpoint of any kind except ``'file'``.

        Args:
            object_store: the store of ``key``; ``None``: open the store of the URI ``name``.

        Returns:
            The directory, or the file of weights; and the step, ``None`` for other kinds. The directory of a step has
            the model and the optimizer. The caller closes the step if there is a step, otherwise the directory.
        """
        kind = StepFolder if self.kind == "step" else ShardedDirectory
        if self.path is not None:
            found = kind.of(self.path)
        else:
            store = open_store(self.name) if object_store is None else object_store
            found = kind.in_store(store, self.key, closes=object_store is None)
        if isinstance(found, StepFolder):
            return found.model(), found
        return ShardedDirectory(found.place, "", found.name) if self.kind == "weights" else found, None


def find_checkpoint(
    stack: contextlib.ExitStack, name: str, object_store: ObjectStore | None, *, progress_bar: bool, trust: bool
) -> Located:
    """Find the checkpoint ``name``, and download a checkpoint of one file. Call on one rank.

    A directory or a file of safetensors in a store is not downloaded: each rank reads its part. A folder of DeepSpeed
    is merged into one file.

    Args:
        stack: deletes downloaded and merged files when the stack is closed.
        name: a path, a URI, or a name in ``object_store``.
        object_store: the store that ``name`` is a name in.
        progress_bar: show a progress bar on a terminal while a large file is downloaded.
        trust: for a folder of DeepSpeed: load any type, **running any code in the files**.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint. For a missing local file, the later read raises the error.
        ConfigError, PermissionError, ObjectStoreError: see :func:`~composerlite.checkpoint.load.resolve.fetched`.
    """
    if _is_address(name, object_store):
        path = stack.enter_context(fetched(name, progress_bar=progress_bar))
        return Located(without_secrets(name), "weights" if is_read_in_place(path) else "file", path)
    with place_of(name, object_store) as (place, last):
        # Symbolic links in ``path`` are kept: each rank follows symbolic links on its own disk.
        path = _resolved(name) if _is_local(name, object_store) else None
        if not last:
            raise CheckpointNotFoundError(f"there is no checkpoint {place.uri()}: it is a disk or a bucket.")
        key = place.name_of(last) if path is None else ""
        if place.exists(last):
            if path is None and not last.endswith(WEIGHTS_SUFFIX):
                name, path = without_secrets(name), _download(place, last, _temporary_folder(stack), progress_bar)
            return Located(name, "weights" if path is None or is_read_in_place(path) else "file", path, key)
        if place.exists(f"{last}/{MODEL}/{INDEX}"):
            return Located(name, "step", path, key)
        if place.exists(f"{last}/{INDEX}") or holds_weights(place.names(last)):
            return Located(name, "sharded", path, key)
        if (save := deepspeed_save(place, last)) is not None:
            import torch  # not needed for a listing

            from composerlite.checkpoint.load.reader import deepspeed_contents

            path = _temporary_folder(stack) / f"{save.rpartition('/')[2]}.pt"
            torch.save(deepspeed_contents(place, save, trust=trust), path)
        if path is not None:
            return Located(name, "file", path)  # the read raises the error if there is no file
        raise CheckpointNotFoundError(
            f"there is no checkpoint {place.uri(last)}: it is neither an object nor a directory of a checkpoint."
        )


def _temporary_folder(stack: contextlib.ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="composerlite-")))


def _is_local(name: str, object_store: ObjectStore | None) -> bool:
    return object_store is None and not is_uri(name)


def _is_address(name: str, object_store: ObjectStore | None) -> bool:
    return object_store is None and parse_uri(name)[0] in ("http", "https")


@contextlib.contextmanager
def place_of(name: str, object_store: ObjectStore | None) -> Generator[tuple[Place, str]]:
    """Open the place with the checkpoint ``name``: a folder or a part of a bucket. Yield the place, and the name there.

    Links are followed. The checkpoint may be missing.

    Args:
        name: a path, a URI of a store, or a name in ``object_store``.
        object_store: the store that ``name`` is a name in.
    """
    if _is_local(name, object_store):
        path = Path(os.path.realpath(_resolved(name)))
        yield Folder(path.parent), path.name
        return
    store = open_store(name) if object_store is None else object_store
    with Bucket.of(store, closes=object_store is None) as bucket:
        key = followed(bucket, (parse_uri(name)[2] if object_store is None else name).rstrip("/"))
        above, _, last = key.rpartition("/")
        yield bucket.inside(above), last


def deepspeed_save(place: Place, folder: str) -> str | None:
    """Return the folder with one save of DeepSpeed's engine: ``folder``, or the folder that the file ``latest`` names.

    ``None``: there is no such save.
    """
    names = place.names(folder)
    if holds_model_states(names):
        return folder
    if "latest" not in names:
        return None
    try:
        tag = place.read(f"{folder}/latest").decode().strip()
    except (CorruptCheckpointError, UnicodeDecodeError, OSError):  # ``latest`` may be a folder of ours
        return None
    save = f"{folder}/{tag}"
    return save if tag in names and holds_model_states(place.names(save)) else None


def is_read_in_place(path: Path) -> bool:
    """Return true for a file of safetensors, by the suffix or by the first bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        beginning = file.read(9)
    has_header = beginning[8:] == b"{" and int.from_bytes(beginning[:8], "little") <= MOST_HEADER_BYTES
    return path.suffix == WEIGHTS_SUFFIX or (has_header and not beginning.startswith(b"PK"))


_PLAIN_NAME, _ARCHIVED_NAME = "rank0_checkpoint", "composer_states.pt"


@contextlib.contextmanager
def fetched(
    path: str | Path, object_store: ObjectStore | None = None, *, progress_bar: bool = False, near: Path | None = None
) -> Generator[Path]:
    """Yield the path of the checkpoint ``path`` on this machine. A downloaded file exists only within the block.

    A local path is yielded without a check whether the file exists; ``.symlink`` files are followed. Other files are
    downloaded to a temporary folder, which is deleted at the end of the block. A file in a store is verified if there
    is a record.

    Args:
        path: a path, a URI, or a name in ``object_store``.
        object_store: the store that ``path`` is a name in.
        progress_bar: show a progress bar on a terminal while a large file is downloaded.
        near: make the temporary folder in this folder; ``None``: in the system's.

    Raises:
        CheckpointNotFoundError: the store or the address has no such file.
        CorruptCheckpointError: the bytes differ from the saved bytes, or ``.symlink`` files form a loop.
        ConfigError: the URI names no store, or a package for the store is not installed.
        PermissionError, ObjectStoreError: the store denies access, or fails.
    """
    text = str(path)
    if _is_local(text, object_store):
        yield _resolved(text)
        return
    with tempfile.TemporaryDirectory(prefix="composerlite-", dir=near) as folder:
        try:
            if _is_address(text, object_store):
                target = Path(folder) / (PurePosixPath(text.partition("?")[0]).name or "checkpoint.pt")
                what = f"downloading {without_secrets(text)}"
                with download_bar(progress_bar) as update:
                    RetryPolicy().run(lambda: download_url(text, target, update), what)
            else:
                with place_of(text, object_store) as (place, name):
                    target = _download(place, name, Path(folder), progress_bar)
        except FileNotFoundError as e:
            raise CheckpointNotFoundError(f"there is no checkpoint {without_secrets(text)}: {e}") from e
        yield target


def get_file(
    path: str | Path,
    destination: str | Path,
    object_store: ObjectStore | None = None,
    overwrite: bool = False,
    progress_bar: bool = True,
) -> None:
    """Make the file ``path`` available as ``destination``: a symbolic link to a file of this machine, else a download.

    A file whose name ends with ``.symlink`` contains the name of another file, and the other file is used instead. If
    ``path`` does not exist and ``path.symlink`` exists, ``path.symlink`` is used.

    Args:
        path: a path, a URI, or a name in ``object_store``.
        destination: a free path in an existing folder.
        object_store: the store that ``path`` is a name in.
        overwrite: replace the file at ``destination``.
        progress_bar: show a progress bar on a terminal while a large file is downloaded.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: the bytes of a checkpoint with a record differ from the saved bytes.
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
        _put(source, target, is_local=_is_local(str(path), object_store))


def download_checkpoint(
    path: str | Path,
    node_checkpoint_folder: str | Path,
    object_store: ObjectStore | None = None,
    progress_bar: bool = True,
    fsdp_sharded_state_dict_enabled: bool = False,
    deepspeed_sharded_checkpoint: bool = False,
) -> tuple[str, str | None, bool]:
    """Link, download or unpack the checkpoint ``path`` into ``node_checkpoint_folder``, for ``safe_torch_load``.

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
        CorruptCheckpointError: the bytes differ from the saved bytes, or cannot be unpacked.
        ConfigError: the URI names no store, a package for the store is not installed, or an argument says that the
            checkpoint is sharded.
        PermissionError, ObjectStoreError: the store denies access, or fails.
    """
    if fsdp_sharded_state_dict_enabled or deepspeed_sharded_checkpoint:
        raise ConfigError(f"{str(path)!r}: sharded checkpoints cannot be downloaded. Load the checkpoint from its URI.")
    folder = Path(node_checkpoint_folder)
    with fetched(path, object_store, progress_bar=progress_bar, near=folder) as source:
        extracted = folder / "checkpoint" if is_tar(source) else None
        target = folder / _PLAIN_NAME if extracted is None else extracted / _ARCHIVED_NAME
        target.parent.mkdir(exist_ok=True)
        if source.is_file() and is_packed(source):
            with unpacked(source) as inner, atomic_write(target) as file:
                for start in range(0, inner.size_bytes, 1 << 20):
                    file.write(inner.read(start, min(1 << 20, inner.size_bytes - start)))
        else:
            _put(source, target, is_local=_is_local(str(path), object_store))
    return str(target), None if extracted is None else str(extracted), False


def _put(source: Path, target: Path, *, is_local: bool) -> None:
    """Make the file ``source`` available as ``target``: link to a file of this machine, or move a download.

    Raises:
        CheckpointNotFoundError: there is no such file.
    """
    if not source.is_file():
        raise CheckpointNotFoundError(f"there is no file {str(source)!r}")
    if is_local:
        with staged_symlink(target, str(source.resolve())):
            pass
    else:
        source.replace(target)


# ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def followed(place: Place, name: str) -> str:
    """Return ``name``, or the target of the link if ``name`` is a ``.symlink`` file, or only ``name.symlink`` exists.

    Raises:
        CorruptCheckpointError: the links form a loop.
    """
    for _ in range(_MOST_LINKS):
        link = name if name.endswith(LINK_SUFFIX) else name + LINK_SUFFIX
        if not name or (link != name and place.exists(name)) or not place.exists(link):
            return name
        target = place.read(link).decode(errors="replace").strip()
        folder = PurePosixPath(link).parent
        name = str(folder / target)
        if (here := place.path_of(name)) is None:
            name = target if "/" in target else name
        elif not here.exists():  # in a local copy of a bucket, the target is in the folder of the link
            name = str(folder / PurePosixPath(target).name)
    raise CorruptCheckpointError(f"{place.uri(name)!r} leads to a loop of links.")


def _resolved(text: str) -> Path:
    return Path(followed(Folder(""), parse_uri(text)[2]))


def _download(place: Place, name: str, folder: Path, progress_bar: bool) -> Path:
    """Download the file ``name`` of a bucket to ``folder``, verified by its record if there is a record."""
    record = record_in(place, name)
    with progress_of("downloading a checkpoint", place.size(name), progress_bar) as progress:
        place.fetch(name, folder / name, None if record is None else record.files[0].digest, progress)
    return folder / name
