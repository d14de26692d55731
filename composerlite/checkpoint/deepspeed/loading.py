"""Loading a checkpoint into a run that DeepSpeed trains.

Each rank reads its own archive, and rank 0 what is the same for all. Where other ranks had saved it, DeepSpeed converts
it. Of weights alone rank 0 makes whole ones, and sends them to the others.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from composerlite import dist
from composerlite.checkpoint.deepspeed.archives import Archives, RankFiles, find_archives, holds_deepspeed, model_file
from composerlite.checkpoint.deepspeed.weights import merged_weights, untrained
from composerlite.checkpoint.format.torch_reader import item_contents
from composerlite.checkpoint.load.reader import RawFile, opened, readable, spread_file
from composerlite.checkpoint.load.resolve import fetched
from composerlite.checkpoint.record.contents import IgnoreKeys, Restoring, check_kind, half_loaded
from composerlite.checkpoint.record.naming import format_name_with_dist
from composerlite.errors import ConfigError
from composerlite.storage import ObjectStore
from composerlite.types import StateDict

__all__ = ["Engine", "load_archives"]

log = logging.getLogger(__name__)


class Engine(Protocol):
    """The engine of DeepSpeed, as far as it loads files. Every rank calls these together."""

    def check_fits(self, model: StateDict, *, source: str) -> None:
        """Compare what a checkpoint says of its model with the one that is trained.

        Args:
            model: what a file of model states holds.
            source: the checkpoint, for messages.

        Raises:
            IncompatibleCheckpointError: names or shapes of what is trained differ; all of it is in the message.
        """
        ...

    def load(self, files: Mapping[str, StateDict], *, source: str) -> None:
        """Restore the model and the optimizer from what this rank's files hold, by name, with classes of ``types``.

        Raises:
            IncompatibleCheckpointError: as :meth:`check_fits`.
        """
        ...

    def convert(self, folder: Path, *, source: str) -> None:
        """Make what :meth:`load_converted` wants of the files of all ranks in ``folder``. On one rank.

        Raises:
            IncompatibleCheckpointError: DeepSpeed cannot.
        """
        ...

    def load_converted(self, folder: Path, files: Mapping[str, StateDict], *, source: str) -> None:
        """Restore trained weights and the optimizer from what :meth:`convert` made; ``files`` are model states."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor] | None, *, strict: bool, source: str) -> None:
        """Set the tensors of the model, which rank 0 has, by name; the others give ``None``.

        Raises:
            IncompatibleCheckpointError: names differ and ``strict`` is true, or shapes differ; all of it is in the
                message.
        """
        ...

    @property
    def types(self) -> dict[str, type]:
        """The classes that its files hold, by full name."""
        ...


def load_archives(
    engine: Engine, template: str, restoring: Restoring, object_store: ObjectStore | None, *, trust: bool
) -> list[dict[str, Any]] | None:
    """Restore a state that DeepSpeed trains, on every rank; the states of the random generators, if any.

    The weights alone may be of a checkpoint that any number of ranks saved, or of one that is a file.

    Args:
        engine: trains the state.
        template: the name of the archive of rank 0, or of all with ``{rank}`` in it.
        restoring: what to restore.
        object_store: the store that ``template`` is a name in.
        trust: load any type, **running whatever code the files hold**.

    Raises:
        ConfigError: what is to be left out is in the files of DeepSpeed.
        CheckpointError: as :func:`composerlite.checkpoint.load_checkpoint`, on every rank.
    """
    _check_parts(restoring.ignore_keys)
    if restoring.weights_only:
        return _load_weights(engine, template, restoring, object_store, trust=trust)
    group = dist.get_group()
    archives = group.from_first(
        "looking for the checkpoint",
        lambda: find_archives(template, restoring.state.run_name, object_store, argument="load_path"),
    )
    with contextlib.ExitStack() as stack:
        if len(archives.names) == group.size:
            wanted = _load_own(stack, archives, engine, restoring, object_store, trust=trust)
        else:
            wanted = _load_converted(stack, archives, engine, restoring, object_store, trust=trust)
    with group.all_or_none("restoring the run"):
        return restoring.load(wanted)


def _load_weights(
    engine: Engine, template: str, restoring: Restoring, object_store: ObjectStore | None, *, trust: bool
) -> None:
    weights: dict[str, Tensor] | None = None
    with dist.get_group().all_or_none(f"reading {restoring.source}"):
        if dist.get_global_rank() == 0:
            weights = _weights(template, restoring.state.run_name, object_store, trust=trust)
    engine.load_weights(weights, strict=restoring.strict, source=restoring.source)
    log.info("loaded the weights of %s", restoring.source)


def _check_parts(ignore_keys: IgnoreKeys) -> None:
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


# ── saved by as many ranks ───────────────────────────────────────────────────────────────────────────────────────────
def _load_own(
    stack: contextlib.ExitStack,
    archives: Archives,
    engine: Engine,
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
    engine: Engine,
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
