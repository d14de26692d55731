"""Folders saved by DeepSpeed's engine, recognized by the names of files, and read as one checkpoint.

Such a folder has a folder for each save, and a file ``latest`` with the name of the newest save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from composerlite.checkpoint.foreign.deepspeed import merged_contents, read_pieces
from composerlite.checkpoint.format.archive import stand_ins
from composerlite.checkpoint.format.torch_reader import TorchFile
from composerlite.checkpoint.load.reader import readable, validate
from composerlite.checkpoint.place.place import Place
from composerlite.errors import CorruptCheckpointError
from composerlite.types import StateDict

log = logging.getLogger(__name__)


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

    def read(name: str, prune: Callable[[StateDict], StateDict]) -> StateDict:
        path = f"{folder}/{name}"
        here = place.path_of(path)
        if here is not None:
            validate(here)
        shown = Path(place.uri(path)) if here is None else here
        with readable(shown), place.opened(path, None, threads=1) as source:
            file = TorchFile(source, place.size(path), trust=trust, check_sums=True, types=stand_ins())
            return read_states(file, prune)

    pieces = read_pieces(place.names(folder), read, f"checkpoint {uri!r}")
    try:
        contents = merged_contents(pieces)
    except CorruptCheckpointError as e:
        raise CorruptCheckpointError(f"checkpoint {uri!r}: {e}") from e
    log.info("checkpoint %s of DeepSpeed: merged what %d ranks have saved", uri, len(pieces))
    return contents


def read_states(file: TorchFile, prune: Callable[[StateDict], StateDict] | None = None) -> StateDict:
    """Read a file of DeepSpeed and return the dict in the file; ``prune`` selects the parts to read.

    Raises:
        CorruptCheckpointError: the bytes are damaged, or hold no dict.
    """
    if not isinstance(file.contents, dict):
        raise CorruptCheckpointError(f"it holds {type(file.contents).__name__} and no dict")
    file.contents = file.contents if prune is None else prune(file.contents)
    file.read()
    return file.contents
