"""One save: write, commit, point ``latest``."""

from __future__ import annotations

import logging
import pickle
import platform
import time
from importlib.metadata import version
from pathlib import Path

import torch

from composerlite import dist
from composerlite.checkpoint.catalog import Catalog
from composerlite.checkpoint.contents import IgnoreKeys, TrainingState, gather
from composerlite.checkpoint.formats import torch_file
from composerlite.checkpoint.manifest import FileRecord, Manifest, plain_timestamp
from composerlite.checkpoint.naming import check_template, format_name_with_dist_and_time
from composerlite.errors import SaveError
from composerlite.storage import StagedFile

__all__ = ["save", "save_checkpoint"]

log = logging.getLogger(__name__)


def save(
    state: TrainingState,
    *,
    catalog: Catalog,
    template: str,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
    overwrite: bool = False,
    latest: str | None = None,
) -> Path:
    """Save a checkpoint of ``state`` and return its path.

    When this returns the checkpoint is durable and committed. After an exception or a kill at any point there is either
    the whole checkpoint or none of it, and ``latest`` points to the newest whole one.

    Args:
        catalog: the folder it goes to.
        template: its name, with format variables.
        weights_only: leave out everything but the model.
        ignore_keys: leave out these keys.
        overwrite: replace a checkpoint of the same name.
        latest: name of the symbolic link to point to it, with format variables.

    Raises:
        CheckpointExistsError: there is one of that name and ``overwrite`` is false.
        SaveError: its contents cannot be written.
        OSError: no space, no permission, and the like.
    """
    start = time.perf_counter()
    name = format_name_with_dist_and_time(template, state.run_name, state.timestamp)
    path = catalog.reserve(name, overwrite=overwrite)
    contents = gather(state, weights_only=weights_only, ignore_keys=ignore_keys)
    with StagedFile(path) as data:
        try:
            size_bytes, digest = torch_file.write(contents, data.temporary)
        except (pickle.PickleError, AttributeError, TypeError, ValueError) as e:  # what cannot be pickled raises any
            raise SaveError(f"checkpoint {str(path)!r}: its contents cannot be written: {e}") from e
        manifest = Manifest(
            name=name,
            kind="weights" if weights_only else "monolithic",
            template=template,
            run_name=state.run_name,
            timestamp=plain_timestamp(state.timestamp.state_dict()),
            fit_calls=len(state.fit_starts),
            world_size=dist.get_world_size(),
            files=(FileRecord(path=name, size_bytes=size_bytes, xxh3_128=digest),),
            left_out=("<function>",) if callable(ignore_keys) else tuple(ignore_keys or ()),
            versions={
                "composerlite": version("composerlite"),
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
        )
        catalog.commit(manifest, data)
    if latest is not None:
        link = format_name_with_dist_and_time(latest, state.run_name, state.timestamp)
        if link != name:
            catalog.point_latest(link, name)
    seconds = time.perf_counter() - start
    log.info("saved checkpoint %s (%.1f MB in %.2f s)", path, size_bytes / 1e6, seconds)
    return path


def save_checkpoint(
    state: TrainingState,
    filename: str | Path = "ep{epoch}-ba{batch}-rank{rank}",
    *,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
) -> str:
    """Save a checkpoint of ``state`` to ``filename``, replacing what is there, and return its path.

    ``filename`` may contain the format variables ``{run_name} {rank} {epoch} {batch}`` … and folders.
    See :func:`save` for what is guaranteed and raised.
    """
    template = check_template(Path(filename).name, argument="filename")
    folder = format_name_with_dist_and_time(str(Path(filename).parent), state.run_name, state.timestamp)
    path = save(
        state,
        catalog=Catalog(folder),
        template=template,
        weights_only=weights_only,
        ignore_keys=ignore_keys,
        overwrite=True,
    )
    return str(path)
