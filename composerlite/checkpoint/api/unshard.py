"""A sharded checkpoint as plain files: one for all, one for each tensor, or some of about the same size."""

from __future__ import annotations

import contextlib
import enum
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

from composerlite.checkpoint.api.state_dict import WorkDir
from composerlite.checkpoint.deepspeed.weights import unshard_zero
from composerlite.checkpoint.format.packing import is_tar
from composerlite.checkpoint.format.sharded_index import nested
from composerlite.checkpoint.load import sharded
from composerlite.checkpoint.place.directory import PathOrUri
from composerlite.checkpoint.save.plain_file import plain_writer, write_torch
from composerlite.dist import is_initialized
from composerlite.errors import CheckpointExistsError, ConfigError, IncompatibleCheckpointError
from composerlite.storage import atomic_write, fsync_folder, is_abandoned, is_uri, make_folder, parse_uri

__all__ = ["UnshardStrategy", "UnshardStrategyType", "unshard_checkpoint"]

log = logging.getLogger(__name__)
_INDEX = ".index.json"


class UnshardStrategyType(enum.StrEnum):
    """Rule by which unsharded files are split."""

    one_file = "one_file"
    """One file for the model and one for the optimizer. All of each is in memory at once."""

    one_file_per_tensor = "one_file_per_tensor"
    """A file for each key."""

    chunks = "chunks"
    """Files with several keys each."""


@final
@dataclass
class UnshardStrategy:
    """Rule by which :func:`unshard_checkpoint` splits the state into files.

    Attributes:
        name: of the strategy.
        chunk_size_bytes: about how large a file is at most; for ``chunks``, and only for that.

    Raises:
        ConfigError: a ValueError: ``chunk_size_bytes`` is missing, not positive, or given where it means nothing.
    """

    name: UnshardStrategyType = UnshardStrategyType.one_file
    chunk_size_bytes: int | None = None

    def __post_init__(self) -> None:
        try:
            self.name = UnshardStrategyType(self.name)
        except ValueError as e:
            names = ", ".join(UnshardStrategyType)
            raise ConfigError(f"UnshardStrategy(name={str(self.name)!r}): expected one of {names}") from e
        if self.name is UnshardStrategyType.chunks:
            if self.chunk_size_bytes is None or self.chunk_size_bytes < 1:
                raise ConfigError(f"chunk_size_bytes={self.chunk_size_bytes}: 'chunks' needs a number of bytes")
        elif self.chunk_size_bytes is not None:
            raise ConfigError(f"chunk_size_bytes={self.chunk_size_bytes}: {self.name.value!r} has no chunks")

    @classmethod
    def one_file(cls) -> UnshardStrategy:
        """Return the strategy of one file for the model and one for the optimizer."""
        return cls(UnshardStrategyType.one_file)

    @classmethod
    def one_file_per_tensor(cls) -> UnshardStrategy:
        """A file for each key."""
        return cls(UnshardStrategyType.one_file_per_tensor)

    @classmethod
    def chunks(cls, chunk_size_in_bytes: int) -> UnshardStrategy:
        """Return the strategy of files of about ``chunk_size_in_bytes`` bytes."""
        return cls(UnshardStrategyType.chunks, chunk_size_in_bytes)


def unshard_checkpoint(
    dir: PathOrUri,  # noqa: A002 - OLMo-core's name
    target_dir: str | os.PathLike[str],
    *,
    optim: bool | None = None,
    save_overwrite: bool = False,
    use_safetensors: bool = False,
    unshard_strategy: UnshardStrategy | None = None,
    pre_download: bool = False,
    work_dir: WorkDir = None,
    quiet: bool = False,
) -> tuple[Path, Path | None]:
    """Write the model, and the optimizer, of a sharded checkpoint to files that ``torch.load`` or safetensors opens.

    One file is ``model.pt``, with the model's state dict. Several are in the folder ``model``, with an index
    ``model.pt.index.json`` that says which key is in which file; each holds a dict. With safetensors they end with
    ``.safetensors``. The optimizer's are ``optim.pt`` or in ``optim``; in one file it has the layout it was saved in.

    They get their names when all are written, and durable; after an error or a kill none has. Where a folder is
    replaced, its index is away until the rest has been.

    Args:
        dir: path or URI of a checkpoint that :func:`save_model_and_optim_state` wrote. Of one of the Trainer the model
            is written; of an archive of DeepSpeed, as :func:`unshard_zero` takes it, the model in one file.
        target_dir: a folder of this machine.
        optim: whether to write the optimizer; ``None``: if there is one and the format is torch's.
        save_overwrite: replace what this writes; else none of it may be there. Other files in ``target_dir`` stay.
        use_safetensors: write safetensors files, which hold tensors only.
        unshard_strategy: ``None``: one file.
        pre_download: first bring the checkpoint's files to this machine.
        work_dir: where to. ``None``: to a temporary folder.
        quiet: do not log what is written.

    Returns:
        The file or folder of the model, and that of the optimizer or ``None``.

    Raises:
        CheckpointExistsError: a FileExistsError: ``target_dir`` has a file or folder that this writes, and
            ``save_overwrite`` is false.
        ConfigError: ``target_dir`` is a URI; safetensors cannot hold an optimizer, or is not installed.
        RuntimeError: ``torch.distributed`` is in use.
        IncompatibleCheckpointError: the checkpoint has no model, or no optimizer.
        CheckpointNotFoundError, CorruptCheckpointError, UntrustedCheckpointError: as :func:`load_state_dict`.
    """
    if is_initialized():
        raise RuntimeError("unshard_checkpoint works in one process: call it where torch.distributed is not used.")
    if use_safetensors and optim:
        raise ConfigError(
            "use_safetensors=True, optim=True: safetensors holds tensors only; write the optimizer as .pt"
        )
    if is_uri(os.fspath(target_dir)):
        raise ConfigError(f"target_dir={os.fspath(target_dir)!r}: expected a folder of this machine; upload it then.")
    target = Path(parse_uri(os.fspath(target_dir))[2])
    strategy = unshard_strategy or UnshardStrategy.one_file()
    write = plain_writer(use_safetensors=use_safetensors)
    suffix = ".safetensors" if use_safetensors else ".pt"
    if isinstance(dir, str | os.PathLike) and is_tar(Path(os.fspath(dir))):
        _check_free(target, [f"model{suffix}"], overwrite=save_overwrite)
        return _unshard_archives(os.fspath(dir), target / f"model{suffix}", strategy, optim=optim), None
    with sharded.RemoteFileSystemReader(dir, pre_download=pre_download, work_dir=work_dir) as reader:
        keys = reader.read_metadata().state_dict_metadata
        wants_optim = not use_safetensors and any(key.startswith("optim.") for key in keys) if optim is None else optim
        parts = ["model", "optim"] if wants_optim else ["model"]
        for part in parts:
            if not _keys_of(part, keys):
                raise IncompatibleCheckpointError(f"checkpoint {reader.uri!r} has no {part}.")
        names = [part + suffix if strategy.name is UnshardStrategyType.one_file else part for part in parts]
        _check_free(target, names, overwrite=save_overwrite)
        make_folder(target)
        with _staging_folder(target) as staging:
            job = _OutputFile(reader, staging, suffix, write, strategy)
            for part in parts:
                job.run(part)
            _check_free(target, names, overwrite=save_overwrite)
            for name in names:
                _give_name(staging / name, target / name)
            fsync_folder(target)
    if not quiet:
        log.info("wrote %s to %s", " and ".join(names), target)
    return target / names[0], target / names[1] if wants_optim else None


def _check_free(target: Path, names: Iterable[str], *, overwrite: bool) -> None:
    """See that nothing in ``target`` has one of ``names``; an empty folder is nothing."""
    for path in () if overwrite else [target / name for name in names]:
        if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
            raise CheckpointExistsError(f"{str(path)!r} exists already: pass another folder, or save_overwrite=True.")


@contextlib.contextmanager
def _staging_folder(target: Path) -> Generator[Path]:
    """A folder in ``target`` for what has yet to be written; those of dead processes are removed."""
    for path in target.glob(".unshard.tmp-*"):
        with is_abandoned(path) as dead:
            if dead:
                shutil.rmtree(path)
    folder = target / f".unshard.tmp-{secrets.token_hex(8)}"
    folder.mkdir()
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: nothing is removed there before a week
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder)
        os.close(lock)


def _give_name(staged: Path, path: Path) -> None:
    """Move a file or a folder to where it belongs; of a folder that is there, what has other names stays."""
    if not (staged.is_dir() and path.is_dir()):
        staged.replace(path)
        return
    *files, index = sorted(staged.iterdir(), key=lambda file: file.name.endswith(_INDEX))
    (path / index.name).unlink(missing_ok=True)
    fsync_folder(path)
    for file in (*files, index):
        file.replace(path / file.name)
    fsync_folder(path)


def _unshard_archives(path: str, file: Path, strategy: UnshardStrategy, *, optim: bool | None) -> Path:
    if optim:
        raise ConfigError("optim=True: of a checkpoint of DeepSpeed the model alone is written.")
    if strategy.name is not UnshardStrategyType.one_file:
        raise ConfigError(f"unshard_strategy={strategy.name.value!r}: of one of DeepSpeed a single file is written.")
    return unshard_zero(path, file, save_overwrite=True)


class _Key(NamedTuple):
    """A key of the index, by its name below ``model`` or ``optim``."""

    full: str
    name: str
    size_bytes: int


@final
@dataclass(frozen=True)
class _OutputFile:
    """One output file, and its contents."""

    reader: sharded.RemoteFileSystemReader
    target: Path
    suffix: str
    write: Callable[[Path, Any], None]
    strategy: UnshardStrategy

    def run(self, part: str) -> None:
        """Write the model or the optimizer: its file or folder."""
        metadata = self.reader.read_metadata()
        names = _keys_of(part, metadata.state_dict_metadata)
        keys = [_Key(full, name, _size_bytes(metadata.state_dict_metadata[full])) for full, name in names.items()]
        prefix = keys[0].full.removesuffix(f".{keys[0].name}")
        if self.strategy.name is UnshardStrategyType.one_file:
            values = sharded.load_flat(self.reader, [key.full for key in keys])
            is_tree = self.write is write_torch
            contents = nested(metadata, prefix, list(values), values) if is_tree else _named(keys, values)
            self.write(self.target / f"{part}{self.suffix}", contents)
            return
        folder = self.target / part
        make_folder(folder)
        places: dict[str, str] = {}
        for name, group in self._groups(keys):
            values = sharded.load_flat(self.reader, [key.full for key in group])
            self.write(folder / name, _named(group, values))
            places |= {key.name: name for key in group}
        index = {"metadata": {"total_size": sum(key.size_bytes for key in keys)}, "weight_map": places}
        with atomic_write(folder / f"{part}{self.suffix}{_INDEX}") as file:
            file.write(json.dumps(index, indent=1).encode())

    def _groups(self, keys: Sequence[_Key]) -> Iterator[tuple[str, list[_Key]]]:
        """The names of the files, and what each holds."""
        if self.strategy.chunk_size_bytes is None:
            taken: set[str] = set()
            for key in keys:
                yield _file_name(key.name, self.suffix, taken), [key]
            return
        number, group, size = 0, list[_Key](), 0
        for key in keys:
            if group and size + key.size_bytes > self.strategy.chunk_size_bytes:
                yield f"chunk-{number:05}{self.suffix}", group
                number, group, size = number + 1, [], 0
            group.append(key)
            size += key.size_bytes
        if group:
            yield f"chunk-{number:05}{self.suffix}", group


def _keys_of(part: str, keys: Iterable[str]) -> dict[str, str]:
    """The keys of the model or the optimizer, with their names in it: the Trainer has the model in its state."""
    for prefix in (f"{part}.", f"state.{part}."):
        if found := {key: key.removeprefix(prefix) for key in keys if key.startswith(prefix)}:
            return found
    return {}


def _named(keys: Sequence[_Key], values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.name: values[key.full] for key in keys}


def _size_bytes(stored: Any) -> int:
    if not isinstance(stored, sharded.TensorStorageMetadata):
        return 1024  # about what a value takes in a file
    return stored.size.numel() * stored.properties.dtype.itemsize


def _file_name(key: str, suffix: str, taken: set[str]) -> str:
    """A name for the file of ``key`` that is no other's, also where upper and lower case are the same."""
    stem = re.sub(r"[^A-Za-z0-9_-]", "-", key)[:200]
    name, number = stem, 1
    while name.lower() in taken:
        number += 1
        name = f"{stem}~{number}"
    taken.add(name.lower())
    return name + suffix
