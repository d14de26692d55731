"""Weights of a model, whole and in fp32, from the archives of the ranks of DeepSpeed."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from composerlite import dist
from composerlite.checkpoint.deepspeed.archives import RankFiles, find_archives
from composerlite.checkpoint.foreign.deepspeed import merged_weights, read_pieces
from composerlite.checkpoint.load.reader import readable
from composerlite.checkpoint.save.plain_file import write_safetensors, write_torch
from composerlite.errors import CheckpointExistsError, ConfigError
from composerlite.storage import is_uri, make_folder, parse_uri

log = logging.getLogger(__name__)


def weights_in(archives: Sequence[RankFiles]) -> dict[str, Tensor]:
    """Return the state dict of the model in the archives of all ranks, parameters in fp32.

    Raises:
        CorruptCheckpointError: a file is missing, or the files do not fit together.
        IncompatibleCheckpointError: the model has experts, or layers that are split over ranks.
    """
    archive_of = {name: archive for archive in archives for name in archive.names}
    pieces = read_pieces(
        archive_of,
        lambda name, prune: archive_of[name].contents(name, prune=prune),
        f"checkpoint {str(archives[0].path)!r}",
        weights_only=True,
    )
    return merged_weights(pieces)


def unshard_zero(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    save_overwrite: bool = False,
    quiet: bool = False,
) -> Path:
    """Write the weights that the ranks of DeepSpeed saved to one file: the model's state dict, parameters in fp32.

    DeepSpeed need not be installed. All weights are in memory at once, twice for a moment.

    Args:
        path: path or URI of the archive of rank 0, or of a link to that archive; archives without a record, as
            Composer saves them, need ``{rank}`` in the name.
        target: the file. The suffix ``.safetensors`` means safetensors, any other suffix torch.
        save_overwrite: replace a file of that name.
        quiet: do not log the name of the file.

    Returns:
        The file.

    Raises:
        CheckpointExistsError: a FileExistsError: ``target`` exists, and ``save_overwrite`` is false.
        ConfigError: ``target`` is a URI; the archives of other ranks are not known.
        RuntimeError: there are several ranks.
        CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError, UntrustedCheckpointError: as
            :func:`load_checkpoint`.
    """
    if dist.get_world_size() > 1:
        raise RuntimeError("unshard_zero works in one process: call it where there are no other ranks.")
    if is_uri(os.fspath(target)):
        raise ConfigError(f"target={os.fspath(target)!r}: expected a file of this machine; upload it then.")
    file = Path(parse_uri(os.fspath(target))[2])
    write = write_safetensors if file.suffix == ".safetensors" else write_torch
    if file.exists() and not save_overwrite:
        raise CheckpointExistsError(f"{str(file)!r} exists: give another name, or save_overwrite=True.")
    archives = find_archives(os.fspath(path), "", None, argument="path")
    with archives.all_opened(None) as every, readable(Path(archives.names[0])):
        weights = weights_in(every)
    make_folder(file.parent)
    write(file, weights)
    if not quiet:
        log.info("wrote %s", file)
    return file
