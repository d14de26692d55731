"""Writing a sharded checkpoint as plain files: a single file, a file for each tensor, or files of similar size."""

from __future__ import annotations

import enum
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from composerlite.checkpoint.api.state_dict import WorkDir
from composerlite.checkpoint.format.packing import is_tar
from composerlite.checkpoint.format.sharded_index import nested
from composerlite.checkpoint.load import sharded
from composerlite.checkpoint.place.directory import PathOrUri
from composerlite.checkpoint.save.plain_file import write_safetensors, write_torch
from composerlite.dist import is_initialized
from composerlite.errors import CheckpointExistsError, ConfigError, IncompatibleCheckpointError
from composerlite.storage import atomic_write, is_uri, parse_uri

log = logging.getLogger(__name__)


class UnshardStrategyType(enum.StrEnum):
    """Rule to split the model, or the optimizer, into files."""

    one_file = "one_file"
    """A file for the model and a file for the optimizer. The contents of a file are in memory as a whole."""

    one_file_per_tensor = "one_file_per_tensor"
    """A file for each key."""

    chunks = "chunks"
    """Files with several keys each."""


@final
@dataclass
class UnshardStrategy:
    """Rule of :func:`unshard_checkpoint` to split the state into files.

    Attributes:
        name: of the strategy.
        chunk_size_bytes: approximate largest size of a file, in bytes; for ``chunks`` only.

    Raises:
        ConfigError: a ValueError: ``name`` is unknown; or ``chunk_size_bytes`` is missing, not positive, or given for
            another strategy.
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
        """Return the strategy of a file for the model and a file for the optimizer."""
        return cls(UnshardStrategyType.one_file)

    @classmethod
    def one_file_per_tensor(cls) -> UnshardStrategy:
        """Return the strategy of a file for each key."""
        return cls(UnshardStrategyType.one_file_per_tensor)

    @classmethod
    def chunks(cls, chunk_size_in_bytes: int) -> UnshardStrategy:
        """Return the strategy of files of about ``chunk_size_in_bytes`` bytes."""
        return cls(UnshardStrategyType.chunks, chunk_size_in_bytes)


def unshard_checkpoint(
    dir: PathOrUri,
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
    """Write the model, and the optimizer, of a sharded checkpoint to files for ``torch.load`` or safetensors.

    A single file is ``model.pt``, with the model's state dict. Several files are in the folder ``model``; each file
    holds a dict, and the index ``model.pt.index.json`` names the file of each key. Names of safetensors files end with
    ``.safetensors``. Files of the optimizer are ``optim.pt`` or in ``optim``. A single ``.pt`` file keeps the saved
    nesting of dicts.

    Each file gets a name once the file is whole and durable. The index is written last. With ``save_overwrite`` an old
    index, or an ``optim.pt`` to replace, is removed first: after a kill no index names a file of another checkpoint.

    Args:
        dir: path or URI of a checkpoint of :func:`save_model_and_optim_state`, or of the Trainer. From a checkpoint of
            the Trainer the model is written.
        target_dir: a folder of this machine.
        optim: write the optimizer; ``None``: write the optimizer if the checkpoint has one and the format is torch's.
        save_overwrite: replace the files of these names; otherwise none may exist. Other files in ``target_dir`` stay.
        use_safetensors: write safetensors files. Such files hold tensors only.
        unshard_strategy: ``None``: a single file.
        pre_download: first download the checkpoint's files to ``work_dir``.
        work_dir: folder for the download; ``None``: a temporary folder.
        quiet: do not log the paths.

    Returns:
        The file or folder of the model, and of the optimizer or ``None``.

    Raises:
        CheckpointExistsError: a FileExistsError: ``target_dir`` has a file or folder of the same name, and
            ``save_overwrite`` is false.
        ConfigError: ``target_dir`` is a URI; safetensors cannot hold an optimizer; ``dir`` is an archive of DeepSpeed:
            use :func:`unshard_zero`.
        RuntimeError: ``torch.distributed`` is in use.
        IncompatibleCheckpointError: the checkpoint has no model, or no optimizer although ``optim`` is true.
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
    if is_uri(os.fspath(target_dir)):
        raise ConfigError(f"target_dir={target_dir!r}: expected a local folder. Upload the result afterwards.")
    target = Path(parse_uri(os.fspath(target_dir))[2])
    strategy = unshard_strategy or UnshardStrategy.one_file()
    suffix = ".safetensors" if use_safetensors else ".pt"
    is_one_file = strategy.name is UnshardStrategyType.one_file
    prefixes: dict[Path, str] = {}
    with sharded.RemoteFileSystemReader(dir, pre_download=pre_download, work_dir=work_dir) as reader:
        stored = reader.read_metadata().state_dict_metadata
        if optim is None:
            optim = not use_safetensors and any(key.startswith("optim.") for key in stored)
        for part in ("model", "optim") if optim else ("model",):
            # A checkpoint of a run has the model below the key ``state``.
            found = [start for start in (f"{part}.", f"state.{part}.") if any(key.startswith(start) for key in stored)]
            if not found:
                raise IncompatibleCheckpointError(f"checkpoint {reader.uri!r} has no {part}.")
            prefixes[target / (part + suffix if is_one_file else part)] = found[0]
        paths = list(prefixes)
        for path in () if save_overwrite else paths:
            if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
                raise CheckpointExistsError(
                    f"{str(path)!r} exists already: pass another folder, or save_overwrite=True."
                )
        # After a kill, no old index and no old optimizer are beside new files.
        for old in paths[1:] if is_one_file else [_index_of(path, suffix) for path in paths]:
            old.unlink(missing_ok=True)
        for path, prefix in prefixes.items():
            _write_part(reader, path, prefix, strategy, suffix)
    if not quiet:
        log.info("wrote %s", " and ".join(map(str, paths)))
    return paths[0], paths[1] if optim else None


def _write_part(
    reader: sharded.RemoteFileSystemReader, path: Path, prefix: str, strategy: UnshardStrategy, suffix: str
) -> None:
    """Write the values of all keys that begin with ``prefix`` to the file or the folder ``path``."""
    metadata = reader.read_metadata()
    is_one_file = strategy.name is UnshardStrategyType.one_file
    keys = [key for key in metadata.state_dict_metadata if key.startswith(prefix)]
    unread = sharded.unread(metadata, keys, device="meta")
    sizes = {key: 0 if tensor is None else tensor.nbytes for key, tensor in unread.items()}
    files = {path: keys} if is_one_file else _files(path, sizes, prefix, strategy.chunk_size_bytes, suffix)
    for file, keys in files.items():
        values = sharded.load_flat(reader, keys)
        if is_one_file and suffix == ".pt":
            write_torch(file, nested(metadata, prefix[:-1], keys, values))
        else:
            write = write_safetensors if suffix == ".safetensors" else write_torch
            write(file, {key.removeprefix(prefix): value for key, value in values.items()})
        del values  # before the next file is read
    if not is_one_file:
        places = {key.removeprefix(prefix): file.name for file, keys in files.items() for key in keys}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        with atomic_write(_index_of(path, suffix)) as out:
            out.write(json.dumps(index, indent=1).encode())


def _index_of(folder: Path, suffix: str) -> Path:
    return folder / f"{folder.name}{suffix}.index.json"


def _files(
    folder: Path, sizes: Mapping[str, int], prefix: str, chunk_bytes: int | None, suffix: str
) -> dict[Path, list[str]]:
    """Return the keys of each file. No two names differ in case alone.

    Args:
        folder: of the files.
        sizes: size in bytes by key, of the model or the optimizer.
        prefix: of the keys, left out in names of files.
        chunk_bytes: about the size of a file; ``None``: a file for each key.
        suffix: of the files.
    """
    files: dict[Path, list[str]] = {}
    taken: set[str] = set()
    name, size = "", 0
    for key, own in sizes.items():
        size += own
        if chunk_bytes is None:
            name = re.sub(r"[^A-Za-z0-9_-]", "-", key.removeprefix(prefix))[:200]
            name += f"~{len(files)}" if name.lower() in taken else ""
            taken.add(name.lower())
        elif not files or size > chunk_bytes:
            name, size = f"chunk-{len(files):05}", own
        files.setdefault(folder / (name + suffix), []).append(key)
    return files
