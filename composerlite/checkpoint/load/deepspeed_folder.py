"""Folders saved by DeepSpeed's engine, recognized by the names of files, and read as one checkpoint.

Such a folder has a folder for each save, and a file ``latest`` with the name of the newest save.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from pathlib import Path

import torch

from composerlite.checkpoint.foreign.deepspeed import Piece, merged_contents
from composerlite.checkpoint.format.archive import stand_ins
from composerlite.checkpoint.format.torch_reader import TorchFile
from composerlite.checkpoint.format.weight_files import MODEL_STATES
from composerlite.checkpoint.load.reader import readable, validate
from composerlite.checkpoint.place.place import Place
from composerlite.errors import CorruptCheckpointError, IncompatibleCheckpointError
from composerlite.types import StateDict

log = logging.getLogger(__name__)

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MOST_RANKS = 1 << 16


def merged_file(place: Place, folder: str, target: Path, *, trust: bool = False) -> Path:
    """Write the contents of one save to a new ``.pt`` file in the folder ``target``, and return the path of the file.

    Arguments and errors are those of :func:`deepspeed_contents`.
    """
    path = target / f"{folder.rpartition('/')[2]}.pt"
    torch.save(deepspeed_contents(place, folder, trust=trust), path)
    return path


def deepspeed_contents(place: Place, folder: str, *, trust: bool = False) -> StateDict:
    """Return the contents of one save in ``folder``, with weights and optimizer merged from all ranks.

    All contents are in memory at once, twice for a moment.

    Args:
        place: the place with the folder.
        folder: path of the folder in that place.
        trust: load any type, **running any code in the files**.

    Raises:
        CorruptCheckpointError: a file is missing or damaged, or the files do not fit together.
        IncompatibleCheckpointError: layers or experts are split over ranks.
        UntrustedCheckpointError: a file holds a type that is not known to be safe.
    """
    uri = place.uri(folder)
    names = place.names(folder)
    models, optimizers = (_by_rank(names, pattern, uri) for pattern in (MODEL_STATES, _OPTIMIZER))
    if 0 not in models:
        raise CorruptCheckpointError(f"checkpoint {uri!r}: the model states of its first rank are missing.")

    def read(name: str) -> StateDict:
        return _contents(place, f"{folder}/{name}", trust=trust)

    first = read(models[0])
    ranks = first.get("dp_world_size") if optimizers else 1
    if type(ranks) is not int or not 1 <= ranks <= _MOST_RANKS:
        raise CorruptCheckpointError(f"checkpoint {uri!r} does not say the number of ranks that saved it.")
    parts = len(optimizers) if optimizers else 1
    if missing := [rank for rank in range(max(ranks, parts)) if optimizers and rank not in optimizers]:
        raise CorruptCheckpointError(f"checkpoint {uri!r} is not whole: the files of ranks {missing[:8]} are missing.")
    pieces = [
        Piece(
            first if rank == 0 else read(models[rank]) if rank in models else {},
            read(optimizers[rank]) if optimizers else {},
        )
        for rank in range(parts)
    ]
    try:
        contents = merged_contents(pieces)
    except CorruptCheckpointError as e:
        raise CorruptCheckpointError(f"checkpoint {uri!r}: {e}") from e
    log.info("checkpoint %s of DeepSpeed: merged what %d ranks have saved", uri, parts)
    return contents


def _by_rank(names: Collection[str], pattern: re.Pattern[str], uri: str) -> dict[int, str]:
    """Return the names that match ``pattern``, by data-parallel rank.

    Raises:
        IncompatibleCheckpointError: layers or experts are split over ranks.
    """
    found: dict[int, str] = {}
    for name in names:
        if (match := pattern.fullmatch(name)) is None:
            continue
        rank = int(match[1] or 0)
        if int(match[2]) or rank in found or len(match[1] or "") > 6:
            raise IncompatibleCheckpointError(
                f"checkpoint {uri!r} has {name!r}: models whose layers or experts are split over ranks cannot be read. "
                "Convert it with DeepSpeed's own tools."
            )
        found[rank] = name
    return found


def _contents(place: Place, path: str, *, trust: bool) -> StateDict:
    """Return the dict in a torch file. Without ``trust``, placeholders replace objects of DeepSpeed's classes."""
    uri, here = place.uri(path), place.path_of(path)
    if here is not None:
        validate(here)
    with readable(Path(uri) if here is None else here), place.opened(path, None, threads=1) as source:
        types = None if trust else stand_ins()
        file = TorchFile(source, place.size(path), trust=trust, check_sums=True, types=types)
        file.read()
    if not isinstance(file.contents, dict):
        raise CorruptCheckpointError(f"checkpoint {uri!r} holds {type(file.contents).__name__} and no dict.")
    return file.contents
