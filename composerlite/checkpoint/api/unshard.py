"""A sharded checkpoint as plain files: one for all, one for each tensor, or some of about the same size."""

from __future__ import annotations

import enum
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from composerlite.checkpoint.api.state_dict import WorkDir
from composerlite.checkpoint.format.packing import is_tar
from composerlite.checkpoint.format.sharded_index import nested
from composerlite.checkpoint.load import sharded
from composerlite.checkpoint.place.directory import PathOrUri
from composerlite.checkpoint.save.plain_file import write_safetensors, write_torch
from composerlite.dist import is_initialized
from composerlite.errors import CheckpointExistsError, ConfigError, IncompatibleCheckpointError
from composerlite.storage import atomic_write, is_uri, make_folder, parse_uri

__all__ = ["UnshardStrategy", "UnshardStrategyType", "unshard_checkpoint"]

log = logging.getLogger(__name__)
_INDEX = ".index.json"
_VALUE_BYTES = 1024
"""Bytes that a value which is no tensor takes in a file, about."""


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

    Each file gets its name when it is whole and durable; the index is written last. With ``save_overwrite`` an old
    index, and the old ``optim.pt``, are removed first: after a kill no index names a file of another checkpoint.

    Args:
        dir: path or URI of a checkpoint that :func:`save_model_and_optim_state` wrote. Of one of the Trainer the model
            is written.
        target_dir: a folder of this machine.
        optim: whether to write the optimizer; ``None``: if there is one and the format is torch's.
        save_overwrite: replace the files of these names; otherwise none may exist. Other files in ``target_dir`` stay.
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
        ConfigError: ``target_dir`` is a URI; safetensors cannot hold an optimizer; ``dir`` is an archive of DeepSpeed,
            which :func:`unshard_zero` takes.
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
    if isinstance(dir, str | os.PathLike) and is_tar(Path(os.fspath(dir))):
        raise ConfigError(f"dir={os.fspath(dir)!r}: unshard_zero writes the weights of an archive of DeepSpeed.")
    target = _local_folder(os.fspath(target_dir))
    strategy = unshard_strategy or UnshardStrategy.one_file()
    suffix = ".safetensors" if use_safetensors else ".pt"
    with sharded.RemoteFileSystemReader(dir, pre_download=pre_download, work_dir=work_dir) as reader:
        stored = reader.read_metadata().state_dict_metadata
        wants_optim = (
            not use_safetensors and any(key.startswith("optim.") for key in stored) if optim is None else optim
        )
        keys = {part: _keys_of(part, stored) for part in (["model", "optim"] if wants_optim else ["model"])}
        if lacks := [part for part, found in keys.items() if not found]:
            raise IncompatibleCheckpointError(f"checkpoint {reader.uri!r} has no {lacks[0]}.")
        is_one_file = strategy.name is UnshardStrategyType.one_file
        names = {part: part + suffix if is_one_file else part for part in keys}
        _check_free(target, names.values(), overwrite=save_overwrite)
        make_folder(target)
        for old in [*names.values()][1:] if is_one_file else [f"{part}/{part}{suffix}{_INDEX}" for part in keys]:
            (target / old).unlink(missing_ok=True)
        for part, found in keys.items():
            _write_part(reader, target / part, found, strategy, suffix)
    if not quiet:
        log.info("wrote %s to %s", " and ".join(names.values()), target)
    return target / names["model"], target / names["optim"] if "optim" in names else None


def _local_folder(target_dir: str) -> Path:
    if is_uri(target_dir):
        raise ConfigError(f"target_dir={target_dir!r}: expected a folder of this machine; upload it then.")
    return Path(parse_uri(target_dir)[2])


def _check_free(target: Path, names: Iterable[str], *, overwrite: bool) -> None:
    """Check that nothing in ``target`` has one of ``names``; an empty folder does not count."""
    for path in () if overwrite else [target / name for name in names]:
        if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
            raise CheckpointExistsError(f"{str(path)!r} exists already: pass another folder, or save_overwrite=True.")


def _keys_of(part: str, keys: Iterable[str]) -> dict[str, str]:
    """Map the keys of the model or the optimizer to names without a prefix. Runs have the model below ``state``."""
    for prefix in (f"{part}.", f"state.{part}."):
        if found := {key: key.removeprefix(prefix) for key in keys if key.startswith(prefix)}:
            return found
    return {}


def _write_part(
    reader: sharded.RemoteFileSystemReader, path: Path, keys: Mapping[str, str], strategy: UnshardStrategy, suffix: str
) -> None:
    """Write the model or the optimizer: the file ``path`` with ``suffix``, or the folder ``path`` with an index.

    Args:
        reader: of the checkpoint.
        path: of the file without its suffix, or of the folder.
        keys: in the index of the checkpoint, with the names below the model or the optimizer.
        strategy: how keys are divided into files.
        suffix: of the files.
    """
    metadata = reader.read_metadata()
    is_one_file = strategy.name is UnshardStrategyType.one_file
    sizes = {key: _size_bytes(metadata.state_dict_metadata[key]) for key in keys}
    folder = path.parent if is_one_file else path
    make_folder(folder)
    places: dict[str, str] = {}
    for name, group in (
        _files(keys, sizes, strategy, suffix).items() if not is_one_file else [(path.name + suffix, keys)]
    ):
        values = sharded.load_flat(reader, group)
        contents: Any = {keys[key]: values[key] for key in group}
        if suffix == ".safetensors":
            write_safetensors(folder / name, contents)
        else:
            first, *_ = group
            prefix = first.removesuffix(f".{keys[first]}")
            write_torch(folder / name, nested(metadata, prefix, list(group), values) if is_one_file else contents)
        places |= dict.fromkeys(contents, name)
    if not is_one_file:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        with atomic_write(folder / f"{path.name}{suffix}{_INDEX}") as file:
            file.write(json.dumps(index, indent=1).encode())


def _files(
    keys: Mapping[str, str], sizes: Mapping[str, int], strategy: UnshardStrategy, suffix: str
) -> dict[str, list[str]]:
    """Divide ``keys`` into files, by the names of the files. No two names differ in upper and lower case alone."""
    files: dict[str, list[str]] = {}
    if strategy.chunk_size_bytes is None:
        taken: set[str] = set()
        for key, name in keys.items():
            stem = file = re.sub(r"[^A-Za-z0-9_-]", "-", name)[:200]
            number = 1
            while file.lower() in taken:
                number += 1
                file = f"{stem}~{number}"
            taken.add(file.lower())
            files[file + suffix] = [key]
        return files
    size = 0
    for key in keys:
        if not files or size + sizes[key] > strategy.chunk_size_bytes:
            files[f"chunk-{len(files):05}{suffix}"] = []
            size = 0
        files[f"chunk-{len(files) - 1:05}{suffix}"].append(key)
        size += sizes[key]
    return files


def _size_bytes(stored: Any) -> int:
    if not isinstance(stored, sharded.TensorStorageMetadata):
        return _VALUE_BYTES
    return stored.size.numel() * stored.properties.dtype.itemsize
