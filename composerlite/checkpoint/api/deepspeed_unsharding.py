"""A checkpoint of DeepSpeed as one file with the weights of the model, whole and in fp32."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from composerlite import dist
from composerlite.checkpoint.format.deepspeed_weights import merged_weights
from composerlite.checkpoint.load.deepspeed_archives import find_archives
from composerlite.checkpoint.load.reading import readable
from composerlite.checkpoint.save.plain_files import file_writer
from composerlite.errors import CheckpointExistsError, ConfigError
from composerlite.storage import is_uri, make_folder, parse_uri

__all__ = ["unshard_zero"]

log = logging.getLogger(__name__)
_SAFETENSORS = ".safetensors"


def unshard_zero(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    use_safetensors: bool | None = None,
    save_overwrite: bool = False,
    quiet: bool = False,
) -> Path:
    """Write the weights that the ranks of DeepSpeed saved to one file: the model's state dict, parameters in fp32.

    DeepSpeed need not be installed. All weights are in memory at once, twice for a moment.

    Args:
        path: path or URI of the archive of rank 0, or of a link to it; where it has no manifest, as those of Composer,
            with ``{rank}`` in the name.
        target: the file.
        use_safetensors: write a safetensors file; ``None``: if ``target`` ends with ``.safetensors``.
        save_overwrite: replace what is there.
        quiet: do not log what is written.

    Returns:
        The file.

    Raises:
        CheckpointExistsError: a FileExistsError: ``target`` is there, and ``save_overwrite`` is false.
        ConfigError: ``target`` is a URI; safetensors is not installed; the archives of other ranks are not known.
        RuntimeError: there are several ranks.
        CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError, UntrustedCheckpointError: as
            :func:`load_checkpoint`.
    """
    if dist.get_world_size() > 1:
        raise RuntimeError("unshard_zero works in one process: call it where there are no other ranks.")
    if is_uri(os.fspath(target)):
        raise ConfigError(f"target={os.fspath(target)!r}: want a file of this machine; upload it then.")
    file = Path(parse_uri(os.fspath(target))[2])
    write = file_writer(use_safetensors=file.suffix == _SAFETENSORS if use_safetensors is None else use_safetensors)
    if file.exists() and not save_overwrite:
        raise CheckpointExistsError(f"{str(file)!r} exists: give another name, or save_overwrite=True.")
    archives = find_archives(os.fspath(path), "", None, argument="path")
    with archives.all_opened(None) as every, readable(Path(archives.names[0])):
        weights = merged_weights(every)
    make_folder(file.parent)
    write(file, weights)
    if not quiet:
        log.info("wrote %s", file)
    return file
