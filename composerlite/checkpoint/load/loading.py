"""Loading: find the file, see what it holds, see that it fits, read its tensors to where they belong."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composerlite import dist
from composerlite.checkpoint.format.torch_reader import MapLocation, TorchFile
from composerlite.checkpoint.load.in_place import placed
from composerlite.checkpoint.load.locating import Located, located
from composerlite.checkpoint.load.progress import Progress
from composerlite.checkpoint.load.reading import opened, readable
from composerlite.checkpoint.load.restoring import Restoring, check_kind, half_loaded
from composerlite.checkpoint.record.contents import IgnoreKeys, TrainingState, check_ignore_keys, without
from composerlite.checkpoint.record.naming import format_name_with_dist
from composerlite.storage import ObjectStore
from composerlite.types import StateDict

__all__ = ["load_checkpoint", "read_checkpoint"]


def read_checkpoint(
    path: str | Path,
    *,
    trust_checkpoint: bool = False,
    progress_bar: bool = False,
    map_location: MapLocation = "cpu",
    ignore_keys: IgnoreKeys = None,
) -> StateDict:
    """The contents of the checkpoint file ``path``, verified against its manifest where it has one.

    Args:
        path: a file; compressed or in an archive, too.
        trust_checkpoint: load any type, **running whatever code the file holds**.
        progress_bar: show one on a terminal while a large file is read.
        map_location: where tensors go, as ``torch.load`` takes it.
        ignore_keys: leave these out; the bytes of their tensors are not read.

    Raises:
        CheckpointNotFoundError: there is no such file; the message lists what the folder has.
        CorruptCheckpointError: the bytes are not those that were saved.
        UntrustedCheckpointError: it holds a type that is not known to be safe.
        IncompatibleCheckpointError: a torch file, but not a checkpoint.
    """
    path = Path(path)
    ignore_keys = check_ignore_keys(ignore_keys, argument="ignore_keys")
    with opened(path, map_location=map_location, trust=trust_checkpoint, progress_bar=progress_bar) as (file, progress):
        check_kind(file.contents, str(path))
        file.contents = without(file.contents, ignore_keys)
        file.read(progress=progress)
        return file.contents


def load_checkpoint(
    path: str | Path,
    state: TrainingState,
    logger: object = None,
    object_store: ObjectStore | None = None,
    *,
    load_weights_only: bool = False,
    strict_model_weights: bool = True,
    progress_bar: bool = True,
    ignore_keys: IgnoreKeys = None,
    exclude_algorithms: Sequence[str] | None = None,
    trust_checkpoint: bool = False,
    monolith_rank0_only: bool = False,
) -> list[dict[str, Any]] | None:
    """Restore ``state`` from the checkpoint ``path`` and return the states of the random generators, one per rank.

    Every rank of a run calls it; what counts is what rank 0 finds under ``path``. A checkpoint that is one file is read
    by one rank of each node at most. Of a directory, as several ranks or ``torch.distributed.checkpoint`` save it, each
    rank reads what it needs, whatever ranks had saved it. If it cannot be loaded on one rank, all raise that error.

    The generators are not touched: apply them with ``composerlite.checkpoint.rng.restore`` when training starts.

    What does not fit is said, whole, before anything in ``state`` is changed. Tensors that are on the CPU and have the
    form of the saved ones are then read in place, and verified as they are: a file whose damage shows only there leaves
    ``state`` unusable, and the error says so. Autoresume verifies a file first.

    Args:
        path: a file or directory, a URI, or a name in ``object_store``; format variables of ranks (``{run_name}``,
            ``{rank}``) are filled in, links are followed. A file that is elsewhere is downloaded first.
        state: what to restore.
        logger: not used; accepted because Composer's function has it.
        object_store: the store that ``path`` is a name in.
        load_weights_only: restore the model alone.
        strict_model_weights: parameter names must agree exactly; shapes must agree in any case.
        progress_bar: show one on a terminal while a large file is downloaded or read.
        ignore_keys: leave these keys as they are in ``state``; the bytes of their tensors are not read.
        exclude_algorithms: names of algorithms whose state is not restored and which are not rebuilt.
        trust_checkpoint: load any type, **running whatever code the file holds**. Directories have only known types.
        monolith_rank0_only: no rank but the first reads a checkpoint that is one file.

    Returns:
        The generator states, or ``None`` where weights only were loaded or saved.

    Raises:
        CheckpointError: see :func:`read_checkpoint`; or the checkpoint does not fit, with all that differs.
    """
    group = dist.get_group()
    ignore_keys = check_ignore_keys(ignore_keys, argument="load_ignore_keys")
    name = group.from_first("naming the checkpoint", lambda: format_name_with_dist(str(path), state.run_name))
    restoring = Restoring(
        state,
        weights_only=load_weights_only,
        strict=strict_model_weights,
        ignore_keys=ignore_keys,
        exclude_algorithms=list(exclude_algorithms or ()),
        source=f"checkpoint {name!r}",
    )
    if state.sharding == "deepspeed":
        from composerlite.checkpoint.load.deepspeed import check_parts, load_archives, load_weights

        check_parts(ignore_keys)
        if load_weights_only:
            given: dict[str, Any] = {"strict": strict_model_weights, "trust": trust_checkpoint}
            return load_weights(str(path), state, restoring, object_store, **given)
        return load_archives(str(path), state, restoring, object_store, trust=trust_checkpoint)
    with located(name, object_store, progress_bar=progress_bar) as place:
        if place.is_directory:
            from composerlite.checkpoint.load.sharded.directory_loading import (
                load_directory,  # what takes long to import
            )

            return load_directory(place.folder(object_store), restoring)
        return _load_file(
            place, restoring, progress_bar=progress_bar, trust=trust_checkpoint, rank0_only=monolith_rank0_only
        )


def _load_file(
    place: Located, restoring: Restoring, *, progress_bar: bool, trust: bool, rank0_only: bool
) -> list[dict[str, Any]] | None:
    group = dist.get_group()
    with _opened(place, progress_bar=progress_bar, trust=trust, rank0_only=rank0_only) as (file, progress):
        with group.all_or_none("comparing the checkpoint with the run"):
            file.contents = restoring.wanted(file.contents)
            live = restoring.places(file.contents)
        _read_in_place(file, live, progress, place.path)
        contents = file.contents
    with group.all_or_none("restoring the run"):
        return restoring.load(contents)


def _opened(
    place: Located, *, progress_bar: bool, trust: bool, rank0_only: bool
) -> contextlib.AbstractContextManager[tuple[TorchFile, Progress]]:
    if dist.get_world_size() == 1:
        assert place.path is not None
        return opened(place.path, trust=trust, progress_bar=progress_bar)
    from composerlite.checkpoint.load.shared_file import opened_together  # a run of one process has no others

    return opened_together(place.path, place.name, trust=trust, progress_bar=progress_bar, rank0_only=rank0_only)


def _read_in_place(file: TorchFile, live: StateDict, progress: Progress, path: Path | None) -> None:
    """Read the tensors of ``file``, those that can into ``live`` ones, which then are in the contents instead."""
    file.contents, places = placed(file.contents, live, file.unread())
    with contextlib.nullcontext() if path is None else readable(path.resolve()), half_loaded(bool(places)):
        file.read(places=places.addresses, sieves=places.sieves, progress=progress)
