"""Loading a checkpoint into a run that DeepSpeed trains.

Each rank reads its own archive, and rank 0 what is the same for all. Where other ranks had saved it, DeepSpeed converts
it. Of weights alone rank 0 makes whole ones, and sends them to the others.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composerlite import dist
from composerlite.checkpoint.format.deepspeed import RankFiles, holds_deepspeed
from composerlite.checkpoint.format.deepspeed_weights import merged_weights, model_file, untrained
from composerlite.checkpoint.format.stored_item import item_contents
from composerlite.checkpoint.load.deepspeed_archives import Archives, find_archives
from composerlite.checkpoint.load.download import fetched
from composerlite.checkpoint.load.reading import RawFile, opened, readable
from composerlite.checkpoint.load.restoring import Restoring, check_kind, half_loaded
from composerlite.checkpoint.load.shared_file import spread_file
from composerlite.checkpoint.record.contents import EngineFiles, IgnoreKeys, TrainingState
from composerlite.checkpoint.record.naming import format_name_with_dist
from composerlite.errors import ConfigError
from composerlite.storage import ObjectStore
from composerlite.types import StateDict

__all__ = ["check_parts", "load_archives", "load_weights"]

log = logging.getLogger(__name__)


def load_archives(
    template: str, state: TrainingState, restoring: Restoring, object_store: ObjectStore | None, *, trust: bool
) -> list[dict[str, Any]] | None:
    """Restore ``state``, which DeepSpeed trains, on every rank; the states of the random generators, if any.

    Args:
        template: the name of the archive of rank 0, or of all with ``{rank}`` in it.
        state: what to restore. restoring: how.
        object_store: the store that ``template`` is a name in.
        trust: load any type, **running whatever code the files hold**.

    Raises:
        CheckpointError: as :func:`composerlite.checkpoint.load_checkpoint`, on every rank.
    """
    group = dist.get_group()
    engine = _engine_of(state)
    archives = group.from_first(
        "looking for the checkpoint",
        lambda: find_archives(template, state.run_name, object_store, argument="load_path"),
    )
    with contextlib.ExitStack() as stack:
        if len(archives.names) == group.size:
            wanted = _load_own(stack, archives, engine, restoring, object_store, trust=trust)
        else:
            wanted = _load_converted(stack, archives, engine, restoring, object_store, trust=trust)
    with group.all_or_none("restoring the run"):
        return restoring.load(wanted)


def load_weights(
    template: str,
    state: TrainingState,
    restoring: Restoring,
    object_store: ObjectStore | None,
    *,
    strict: bool,
    trust: bool,
) -> None:
    """Load the weights alone: of a checkpoint of DeepSpeed that any number of ranks saved, or of one that is a file.

    Args:
        strict: parameter names must agree exactly.
        template, state, restoring, object_store, trust: see :func:`load_archives`.

    Raises:
        CheckpointError: as :func:`composerlite.checkpoint.load_checkpoint`, on every rank.
    """
    weights: dict[str, Tensor] | None = None
    with dist.get_group().all_or_none(f"reading {restoring.source}"):
        if dist.get_global_rank() == 0:
            weights = _weights(template, state.run_name, object_store, trust=trust)
    _engine_of(state).load_weights(weights, strict=strict, source=restoring.source)
    log.info("loaded the weights of %s", restoring.source)


def check_parts(ignore_keys: IgnoreKeys) -> None:
    """See that what is left out is not in the files of DeepSpeed.

    Raises:
        ConfigError: it is.
    """
    for glob in () if ignore_keys is None or callable(ignore_keys) else ignore_keys:
        if glob.startswith(("state/model", "state/optimizers")):
            raise ConfigError(
                f"load_ignore_keys: {glob!r} is in the files of DeepSpeed, which loads weights and optimizer as a "
                "whole. Leave it out, or load the weights alone: load_weights_only=True."
            )


def _engine_of(state: TrainingState) -> EngineFiles:
    assert state.deepspeed is not None, "its engine is made before anything is loaded"
    return state.deepspeed


# ── saved by as many ranks ───────────────────────────────────────────────────────────────────────────────────────────
def _load_own(
    stack: contextlib.ExitStack,
    archives: Archives,
    engine: EngineFiles,
    restoring: Restoring,
    object_store: ObjectStore | None,
    *,
    trust: bool,
) -> StateDict:
    """Load model and optimizer; what of the rest is wanted."""
    group = dist.get_group()
    with group.all_or_none(f"opening {restoring.source}"):
        own = stack.enter_context(archives.opened(group.rank, object_store))
    wanted = _states(own, restoring, trust=trust)
    files = _files(own, restoring.source, engine.types, trust=trust)
    with group.all_or_none("restoring the run"), half_loaded(True):
        engine.load(files, source=restoring.source)
    return wanted


def _files(archive: RankFiles, source: str, types: dict[str, type], *, trust: bool) -> dict[str, StateDict]:
    """What DeepSpeed's files hold that this rank needs: its own, and those of rank 0 that no other has."""
    everywhere = dist.get_group().gather(archive.names)
    shared = [name for name in everywhere[0] if name.startswith("mp_rank_") and len(everywhere) > 1]
    files = {name: _of_rank_0(archive, name, source, trust=trust) for name in shared}
    with dist.get_group().all_or_none(f"reading {source}"), readable(archive.path):
        for name in archive.names:
            if name not in files:
                files[name] = archive.contents(name, types, trust=trust)
    return files


def _of_rank_0(archive: RankFiles | None, name: str, source: str, *, trust: bool) -> StateDict:
    """What a file holds that rank 0 has, on every rank."""
    raw = None
    if dist.get_global_rank() == 0:
        assert archive is not None
        member = archive.member(name)
        raw = RawFile(member, member.size_bytes, member.read, archive.check_sums)
    return spread_file(raw, f"{name} of {source}", trust=trust)


# ── saved by another number of ranks ─────────────────────────────────────────────────────────────────────────────────
def _load_converted(
    stack: contextlib.ExitStack,
    archives: Archives,
    engine: EngineFiles,
    restoring: Restoring,
    object_store: ObjectStore | None,
    *,
    trust: bool,
) -> StateDict:
    """As :func:`_load_own`. The first rank of each node converts, for all that it has."""
    group = dist.get_group()
    source = restoring.source
    is_first = dist.get_local_rank() == 0
    every: list[RankFiles] = []
    with group.all_or_none(f"opening {source}"):
        if is_first:
            every = stack.enter_context(archives.all_opened(object_store))
    wanted = _states(every[0] if every else None, restoring, trust=trust)
    first = every[0] if every else None
    name = group.broadcast("" if first is None else model_file(first))
    model = {name: _of_rank_0(first, name, source, trust=trust)}
    with group.all_or_none("comparing the checkpoint with the run"):
        engine.check_fits(model[name], source=source)
    log.info("%s was saved by %d ranks: converting it for %d", source, len(archives.names), group.size)
    folder: str | None = None
    with group.all_or_none(f"converting {source}"):
        if is_first:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="composerlite-"))
            _save_files(every, Path(folder), engine.types, trust=trust)
            engine.convert(Path(folder), source=source)
    folders = group.gather((dist.get_node_rank(), folder))
    mine = next(path for node, path in folders if node == dist.get_node_rank() and path is not None)
    with group.all_or_none("restoring the run"), half_loaded(True):
        engine.load_converted(Path(mine), model, source=source)
    rest: dict[str, Tensor] | None = None
    with group.all_or_none(f"reading {source}"):
        if group.is_first:
            rest = untrained(every)
    engine.load_weights(rest, strict=False, source=source)
    return wanted


def _save_files(every: Sequence[RankFiles], folder: Path, types: dict[str, type], *, trust: bool) -> None:
    """Write the files of all ranks, as they were read here: DeepSpeed runs whatever code the files that it reads "
    "hold."""
    for archive in every:
        with readable(archive.path):
            for name in archive.names:
                torch.save(archive.contents(name, types, trust=trust), folder / name)


# ── weights alone ────────────────────────────────────────────────────────────────────────────────────────────────────
def _weights(template: str, run_name: str, object_store: ObjectStore | None, *, trust: bool) -> dict[str, Tensor]:
    """The state dict of a model. On rank 0."""
    first = format_name_with_dist(template, run_name, rank=0, local_rank=0, node_rank=0)
    with fetched(first, object_store) as path:
        if not holds_deepspeed(path):
            with opened(path, trust=trust) as (file, _):
                check_kind(file.contents, f"checkpoint {first!r}")
                file.contents = {"model": file.contents["state"].get("model", {})}
                file.read()
                return file.contents["model"]
    archives = find_archives(template, run_name, object_store, argument="load_path")
    with archives.all_opened(object_store) as every, readable(Path(first)):
        return merged_weights(every)


# ── what is the same for all ─────────────────────────────────────────────────────────────────────────────────────────
def _states(archive: RankFiles | None, restoring: Restoring, *, trust: bool) -> StateDict:
    """What of ``composer_states.pt`` is wanted; read by rank 0, which has the ``archive``."""

    group = dist.get_group()

    def packed() -> bytes:
        assert archive is not None
        with readable(archive.path):
            buffer = io.BytesIO()
            torch.save(archive.states(trust=trust), buffer)
            return buffer.getvalue()

    data = group.from_first(f"reading {restoring.source}", packed)
    contents = torch.load(io.BytesIO(data), weights_only=False) if trust else item_contents(data)
    with group.all_or_none("comparing the checkpoint with the run"):
        wanted = restoring.wanted(contents)
        restoring.places(wanted)
    return wanted
