"""Loading a checkpoint into a run that DeepSpeed trains.

Each rank reads the archive of the rank, and rank 0 the files for all ranks. If another number of ranks saved the
checkpoint, DeepSpeed converts the files. For weights alone, rank 0 merges and sends the weights.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from composerlite import dist
from composerlite.checkpoint.contents import DeepSpeedEngine, RestorePlan, check_kind, half_loaded
from composerlite.checkpoint.deepspeed.archives import Archives, RankFiles, find_archives, opened_archive
from composerlite.checkpoint.deepspeed.weights import weights_in
from composerlite.checkpoint.foreign.keys import common_rename
from composerlite.checkpoint.format.archive import STATES
from composerlite.checkpoint.format.packing import is_packed
from composerlite.checkpoint.load.deepspeed_folder import deepspeed_contents
from composerlite.checkpoint.load.reader import RawFile, opened, readable, shared_file
from composerlite.checkpoint.load.resolve import engine_folder, fetched
from composerlite.checkpoint.record.naming import FIRST_RANK, format_name_with_dist
from composerlite.errors import ConfigError, IncompatibleCheckpointError
from composerlite.storage import ObjectStore
from composerlite.types import StateDict

log = logging.getLogger(__name__)


def load_archives(
    engine: DeepSpeedEngine, template: str, plan: RestorePlan, object_store: ObjectStore | None, *, trust: bool
) -> list[dict[str, Any]] | None:
    """Restore a state that DeepSpeed trains, on every rank, and return the states of the random generators, if any.

    For weights alone, any number of ranks may have saved the checkpoint, also without DeepSpeed.

    Args:
        engine: trains the state.
        template: the name of the archive of rank 0, or of all archives with ``{rank}`` in the name.
        plan: parts of the state to restore.
        object_store: the store with the archives; ``None``: ``template`` is a path or a URI.
        trust: load any type, **running any code in the files**.

    Raises:
        ConfigError: ``load_ignore_keys`` excludes a part of DeepSpeed's files.
        CheckpointError: as :func:`composerlite.checkpoint.load_checkpoint`, on every rank.
    """
    ignored = () if plan.ignore_keys is None or callable(plan.ignore_keys) else plan.ignore_keys
    for glob in ignored:
        if glob.startswith(("state/model", "state/optimizers")):
            raise ConfigError(
                f"load_ignore_keys: {glob!r} is in the files of DeepSpeed, which loads weights and optimizer as a "
                "whole. Leave it out, or load the weights alone: load_weights_only=True."
            )
    with contextlib.ExitStack() as stack:
        load = _Load(engine, template, plan, object_store, trust, stack)
        if plan.weights_only:
            load.set_weights(load.read_weights, strict=plan.strict)
            log.debug("loaded the weights of %s", plan.source)
            return None
        archives = load.group.from_first("looking for the checkpoint", load.find)
        is_own = len(archives.names) == load.group.size
        plan.contents = load.from_own_archive(archives) if is_own else load.from_other_ranks(archives)
        return plan.restore()


@final
@dataclass(frozen=True)
class _Load:
    """One load. Methods are collective. For the fields see :func:`load_archives`."""

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

    def find(self) -> Archives:
        """Find the archives of all ranks. On rank 0."""
        return find_archives(self.template, self.plan.state.run_name, self.object_store, argument="load_path")

    def from_own_archive(self, archives: Archives) -> StateDict:
        """Load model and optimizer from this rank's archive, and return the rest of the state to restore."""
        with self.group.all_or_none(f"opening {self.source}"):
            own = self.stack.enter_context(archives.opened(self.group.rank, self.object_store))
        wanted = self._states(own)
        everywhere = self.group.gather(own.names)
        shared = [name for name in everywhere[0] if name.startswith("mp_rank_") and len(everywhere) > 1]
        files = {name: self._of_first(own, name) for name in shared}  # rank 0 alone has them
        with self.group.all_or_none(f"reading {self.source}"), readable(own.path):
            for name in own.names:
                if name not in files:
                    files[name] = own.contents(name, self.engine.types, trust=self.trust)
        with self.group.all_or_none("restoring the run"), half_loaded(True):
            self.engine.load(files, source=self.source)
        return wanted

    def from_other_ranks(self, archives: Archives) -> StateDict:
        """Load model and optimizer that another number of ranks saved, and return the rest of the state to restore.

        The first rank of each node converts the files for all ranks of the node.
        """
        is_first = dist.get_local_rank() == 0
        every: list[RankFiles] = []
        with self.group.all_or_none(f"opening {self.source}"):
            if is_first:
                every = self.stack.enter_context(archives.all_opened(self.object_store))
        first = every[0] if every else None
        wanted = self._states(first)
        name = self.group.broadcast("" if first is None else first.model_states)
        model = {name: self._of_first(first, name)}
        with self.group.all_or_none("comparing the checkpoint with the run"):
            self.engine.check_fits(model[name], source=self.source)
        log.info("%s was saved by %d ranks: converting it for %d", self.source, len(archives.names), self.group.size)
        folder: str | None = None
        with self.group.all_or_none(f"converting {self.source}"):
            if is_first:
                folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="composerlite-"))
                for archive in every:  # saved again as they were read: DeepSpeed runs any code in a file
                    with readable(archive.path):
                        for file in archive.names:
                            contents = archive.contents(file, self.engine.types, trust=self.trust)
                            torch.save(contents, Path(folder, file))
                self.engine.convert(Path(folder), source=self.source)
        folders = self.group.gather((dist.get_node_rank(), folder))
        mine = next(path for node, path in folders if node == dist.get_node_rank() and path is not None)
        with self.group.all_or_none("restoring the run"), half_loaded(True):
            self.engine.load_converted(Path(mine), model, source=self.source)
        self.set_weights(lambda: weights_in(every), strict=False)  # also buffers and frozen parameters
        return wanted

    def set_weights(self, read: Callable[[], dict[str, Tensor]], *, strict: bool) -> None:
        """Set tensors of the model to the result of ``read`` on rank 0."""
        weights: dict[str, Tensor] | None = None
        with self.group.all_or_none(f"reading {self.source}"):
            if self.group.is_first:
                weights = read()
        self.engine.load_weights(weights, strict=strict, source=self.source)

    def read_weights(self) -> dict[str, Tensor]:
        """Read the state dict of the model. On rank 0."""
        first = format_name_with_dist(self.template, self.plan.state.run_name, **FIRST_RANK)
        with engine_folder(first, self.object_store) as folder:
            if folder is not None:
                found: dict[str, Tensor] = deepspeed_contents(*folder, trust=self.trust)["module"]
                rename = common_rename(found, self.plan.state.get_model_state_dict(), all_must=self.plan.strict)
                return {rename.of(name): tensor for name, tensor in found.items()}
        with fetched(first, self.object_store) as path:
            is_of_deepspeed = False
            if is_packed(path):
                with contextlib.suppress(IncompatibleCheckpointError), opened_archive(path):
                    is_of_deepspeed = True
            if not is_of_deepspeed:
                with opened(path, trust=self.trust) as file:
                    check_kind(file.contents, f"checkpoint {first!r}")
                    file.contents = {"model": file.contents["state"].get("model", {})}
                    file.read()
                    return file.contents["model"]
        with self.find().all_opened(self.object_store) as every, readable(Path(first)):
            return weights_in(every)

    def _of_first(self, archive: RankFiles | None, name: str) -> StateDict:
        """Read a file in the ``archive`` of rank 0, on every rank."""
        raw: RawFile | None = None
        with self.group.all_or_none(f"reading {self.source}"):
            if self.group.is_first:
                assert archive is not None
                member = archive.member(name)
                raw = RawFile(member, member.size_bytes, archive.check_sums)
        file = shared_file(raw, f"{name} of {self.source}", trust=self.trust)
        file.read()
        return file.contents

    def _states(self, archive: RankFiles | None) -> StateDict:
        """Read the parts of ``composer_states.pt`` to restore from the ``archive`` of rank 0, on every rank."""
        contents = self._of_first(archive, STATES)
        with self.group.all_or_none("comparing the checkpoint with the run"):
            wanted, _ = self.plan.matched(contents)
        return wanted
