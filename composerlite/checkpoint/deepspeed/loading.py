"""Loading a checkpoint into a run that DeepSpeed trains.

Each rank reads its own archive, and rank 0 what is the same for all. Where other ranks had saved it, DeepSpeed converts
it. Of weights alone rank 0 makes whole ones, and sends them to the others.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor

from composerlite import dist
from composerlite.checkpoint.contents import RestorePlan, check_kind, half_loaded
from composerlite.checkpoint.deepspeed.archives import (
    MODEL_STATES,
    Archives,
    RankFiles,
    find_archives,
    holds_deepspeed,
    the_file,
)
from composerlite.checkpoint.deepspeed.weights import pieces_of
from composerlite.checkpoint.foreign.deepspeed import merged_weights, untrained
from composerlite.checkpoint.foreign.keys import common_rename
from composerlite.checkpoint.format.torch_reader import item_contents
from composerlite.checkpoint.load.deepspeed_folder import deepspeed_contents
from composerlite.checkpoint.load.reader import RawFile, opened, readable, spread_file
from composerlite.checkpoint.load.resolve import engine_folder, fetched
from composerlite.checkpoint.record.naming import FIRST_RANK, format_name_with_dist
from composerlite.errors import ConfigError
from composerlite.storage import ObjectStore
from composerlite.types import StateDict

__all__ = ["DeepSpeedEngine", "load_archives"]

log = logging.getLogger(__name__)


class DeepSpeedEngine(Protocol):
    """The engine of DeepSpeed, as far as it loads files. Every rank calls these together."""

    def check_fits(self, model: StateDict, *, source: str) -> None:
        """Compare the model of a checkpoint with the one that is trained.

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
        """Convert the files of all ranks in ``folder`` for :meth:`load_converted`. On one rank.

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
    engine: DeepSpeedEngine, template: str, plan: RestorePlan, object_store: ObjectStore | None, *, trust: bool
) -> list[dict[str, Any]] | None:
    """Restore a state that DeepSpeed trains, on every rank; the states of the random generators, if any.

    The weights alone may be of a checkpoint that any number of ranks saved, or of one that is a file.

    Args:
        engine: trains the state.
        template: the name of the archive of rank 0, or of all with ``{rank}`` in it.
        plan: what to restore.
        object_store: the store that ``template`` is a name in.
        trust: load any type, **running whatever code the files hold**.

    Raises:
        ConfigError: what is to be left out is in the files of DeepSpeed.
        CheckpointError: as :func:`composerlite.checkpoint.load_checkpoint`, on every rank.
    """
    with contextlib.ExitStack() as stack:
        load = _Load(engine, template, plan, object_store, trust, stack)
        return load.weights() if plan.weights_only else load.everything()


@final
@dataclass(frozen=True)
class _Load:
    """One load; every rank calls its methods. For the fields see :func:`load_archives`."""

    engine: DeepSpeedEngine
    template: str
    plan: RestorePlan
    object_store: ObjectStore | None
    trust: bool
    stack: contextlib.ExitStack
    group: dist.Group = field(default_factory=dist.get_group)

    @property
    def source(self) -> str:
        """The checkpoint, for messages."""
        return self.plan.source

    def _find(self) -> Archives:
        return find_archives(self.template, self.plan.state.run_name, self.object_store, argument="load_path")

    def everything(self) -> list[dict[str, Any]] | None:
        """Restore the state; the states of the random generators."""
        self._check_parts()
        archives = self.group.from_first("looking for the checkpoint", self._find)
        is_own = len(archives.names) == self.group.size
        wanted = self._load_own(archives) if is_own else self._load_converted(archives)
        with self.group.all_or_none("restoring the run"):
            return self.plan.load(wanted)

    def _check_parts(self) -> None:
        """See that what is left out is not in the files of DeepSpeed.

        Raises:
            ConfigError: it is.
        """
        ignore_keys = self.plan.ignore_keys
        for glob in () if ignore_keys is None or callable(ignore_keys) else ignore_keys:
            if glob.startswith(("state/model", "state/optimizers")):
                raise ConfigError(
                    f"load_ignore_keys: {glob!r} is in the files of DeepSpeed, which loads weights and optimizer as a "
                    "whole. Leave it out, or load the weights alone: load_weights_only=True."
                )

    # ── saved by the same number of ranks ────────────────────────────────────────────────────────────────────────
    def _load_own(self, archives: Archives) -> StateDict:
        """Load model and optimizer; what of the rest is wanted."""
        with self.group.all_or_none(f"opening {self.source}"):
            own = self.stack.enter_context(archives.opened(self.group.rank, self.object_store))
        wanted = self._states(own)
        files = self._files(own)
        with self.group.all_or_none("restoring the run"), half_loaded(True):
            self.engine.load(files, source=self.source)
        return wanted

    def _files(self, archive: RankFiles) -> dict[str, StateDict]:
        """Read the files of DeepSpeed that this rank needs: its own, and those of rank 0 that no other has."""
        everywhere = self.group.gather(archive.names)
        shared = [name for name in everywhere[0] if name.startswith("mp_rank_") and len(everywhere) > 1]
        files = {name: self._of_first(archive, name) for name in shared}
        with self.group.all_or_none(f"reading {self.source}"), readable(archive.path):
            for name in archive.names:
                if name not in files:
                    files[name] = archive.contents(name, self.engine.types, trust=self.trust)
        return files

    def _of_first(self, archive: RankFiles | None, name: str) -> StateDict:
        """Read a file that rank 0 has, on every rank."""
        raw = None
        if self.group.is_first:
            assert archive is not None
            member = archive.member(name)
            raw = RawFile(member, member.size_bytes, member.read, archive.check_sums)
        return spread_file(raw, f"{name} of {self.source}", trust=self.trust)

    # ── saved by another number of ranks ─────────────────────────────────────────────────────────────────────────
    def _load_converted(self, archives: Archives) -> StateDict:
        """Do as :meth:`_load_own`. The first rank of each node converts, for all that it has."""
        is_first = dist.get_local_rank() == 0
        every: list[RankFiles] = []
        with self.group.all_or_none(f"opening {self.source}"):
            if is_first:
                every = self.stack.enter_context(archives.all_opened(self.object_store))
        first = every[0] if every else None
        wanted = self._states(first)
        name = self.group.broadcast("" if first is None else the_file(first, MODEL_STATES))
        model = {name: self._of_first(first, name)}
        with self.group.all_or_none("comparing the checkpoint with the run"):
            self.engine.check_fits(model[name], source=self.source)
        log.info("%s was saved by %d ranks: converting it for %d", self.source, len(archives.names), self.group.size)
        folder: str | None = None
        with self.group.all_or_none(f"converting {self.source}"):
            if is_first:
                folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="composerlite-"))
                self._save_files(every, Path(folder))
                self.engine.convert(Path(folder), source=self.source)
        folders = self.group.gather((dist.get_node_rank(), folder))
        mine = next(path for node, path in folders if node == dist.get_node_rank() and path is not None)
        with self.group.all_or_none("restoring the run"), half_loaded(True):
            self.engine.load_converted(Path(mine), model, source=self.source)
        self._set_weights(lambda: untrained(pieces_of(every)), strict=False)
        return wanted

    def _save_files(self, every: Sequence[RankFiles], folder: Path) -> None:
        """Write the files of all ranks as they were read here: DeepSpeed runs whatever code is in what it reads."""
        for archive in every:
            with readable(archive.path):
                for name in archive.names:
                    torch.save(archive.contents(name, self.engine.types, trust=self.trust), folder / name)

    # ── weights alone ────────────────────────────────────────────────────────────────────────────────────────────
    def weights(self) -> None:
        """Restore the weights alone."""
        self._check_parts()
        self._set_weights(self._read_weights, strict=self.plan.strict)
        log.debug("loaded the weights of %s", self.source)

    def _set_weights(self, read: Callable[[], dict[str, Tensor]], *, strict: bool) -> None:
        """Set tensors of the model to those that rank 0 reads."""
        weights: dict[str, Tensor] | None = None
        with self.group.all_or_none(f"reading {self.source}"):
            if self.group.is_first:
                weights = read()
        self.engine.load_weights(weights, strict=strict, source=self.source)

    def _read_weights(self) -> dict[str, Tensor]:
        """The state dict of the model. On rank 0."""
        first = format_name_with_dist(self.template, self.plan.state.run_name, **FIRST_RANK)
        with engine_folder(first, self.object_store) as folder:
            if folder is not None:
                found: dict[str, Tensor] = deepspeed_contents(*folder, trust=self.trust)["module"]
                rename = common_rename(found, self.plan.state.get_model_state_dict(), all_must=self.plan.strict)
                return {rename.of(name): tensor for name, tensor in found.items()}
        with fetched(first, self.object_store) as path:
            if not holds_deepspeed(path):
                with opened(path, trust=self.trust) as (file, *_):
                    check_kind(file.contents, f"checkpoint {first!r}")
                    file.contents = {"model": file.contents["state"].get("model", {})}
                    file.read()
                    return file.contents["model"]
        with self._find().all_opened(self.object_store) as every, readable(Path(first)):
            return merged_weights(pieces_of(every))

    # ── what is the same for all ─────────────────────────────────────────────────────────────────────────────────
    def _states(self, archive: RankFiles | None) -> StateDict:
        """Read the requested parts of ``composer_states.pt`` on rank 0, which has the ``archive``."""

        def packed() -> bytes:
            assert archive is not None
            with readable(archive.path):
                buffer = io.BytesIO()
                torch.save(archive.states(trust=self.trust), buffer)
                return buffer.getvalue()

        data = self.group.from_first(f"reading {self.source}", packed)
        contents = torch.load(io.BytesIO(data), weights_only=False) if self.trust else item_contents(data)
        with self.group.all_or_none("comparing the checkpoint with the run"):
            wanted = self.plan.wanted(contents)
            self.plan.places(wanted)
        return wanted
