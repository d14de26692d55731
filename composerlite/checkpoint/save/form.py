"""The form of a checkpoint: a file, a directory of all ranks or an archive of each, and what a rank writes of it.

Which one a run has follows from how the model is sharded over ranks: :func:`form_of`, and nothing else in this package,
asks for that.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from composerlite import dist
from composerlite._torch_compat import local_part, storage_id
from composerlite.checkpoint.format.archive import DEEPSPEED, DEEPSPEED_TYPES, STATES
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.directory import FinalizedManifest, ShardedDirectory
from composerlite.checkpoint.place.node_disks import Disks, check_one_disk, disks_of
from composerlite.checkpoint.record.contents import IgnoreKeys, TrainingState, gather
from composerlite.checkpoint.record.manifest import Manifest
from composerlite.checkpoint.record.naming import (
    FIRST_RANK,
    archive_template,
    directory_template,
    format_name_with_dist_and_time,
    names_of_ranks,
)
from composerlite.checkpoint.save.file_writer import Gathering, NullWriter, RankArchiveWriter, SingleFileWriter
from composerlite.checkpoint.save.staging import Stageable
from composerlite.devices import rng
from composerlite.errors import ConfigError, SaveError
from composerlite.storage import HostMemory
from composerlite.types import StateDict

__all__ = ["DiskWriter", "Form", "RankWriter", "SaveRequest", "first_name", "form_of", "gathering"]


# ── what a rank writes ───────────────────────────────────────────────────────────────────────────────────────────────
class RankWriter(Stageable, Protocol):
    """Writer of this rank's part of a checkpoint: its bytes, and their place in the commit.

    Attributes:
        gathers: the ranks need each other for :meth:`staged_in` and :meth:`write`, which are called on all, or none.
        may_stream: the bytes may be written as they are while the caller waits: that takes no longer than to copy them.
        seconds: spent by name, complete after :meth:`finish`.
        weights_crc: CRC-32 of each storage of the model, after :meth:`write`.
    """

    gathers: bool
    may_stream: bool
    seconds: dict[str, float]
    weights_crc: Sequence[int]

    def write(self, memory: HostMemory | None, ring_bytes: int, *, may_grow: bool = False) -> None:
        """Hand all bytes to those who write them, and who may still be writing when this returns.

        Args:
            memory: what :meth:`staged_in` was given; ``None`` to read from the tensors themselves.
            ring_bytes: memory to write with in that case.
            may_grow: take more in that case, rather than wait for the disk.

        Raises:
            OSError: no space, no permission, and the like.
        """
        ...

    def finish(self) -> Any:
        """Wait until everything is durable; what rank 0 needs to know of it, which can be pickled.

        Raises:
            OSError: no space, no permission, and the like.
        """
        ...

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Commit on rank 0, and return the manifest. ``parts``: the results of :meth:`finish` of all ranks."""
        ...

    def close(self, *, may_be_committed: bool) -> None:
        """Release everything, and remove what was written unless it is committed or may be. Twice is fine."""
        ...


class DiskWriter(RankWriter, Protocol):
    """The same where nodes have disks of their own: how the part of each becomes a part of the whole."""

    def seal(self, manifest: Manifest, parts: Sequence[Any]) -> FinalizedManifest:
        """Build the index and the record of all files, on rank 0."""
        ...

    def prepare(self, sealed: FinalizedManifest) -> None:
        """Make this disk's part durable, so that nothing is left but to rename it."""
        ...

    def complete(self) -> None:
        """Give this disk's part its name and its commit record."""
        ...


# ── the forms that a checkpoint may have ─────────────────────────────────────────────────────────────────────────────
Gathered = Callable[..., StateDict]
"""Gives what is saved; ``generators`` are those of all ranks, in some form."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Request of a run to save a checkpoint.

    Attributes:
        state: of the run. gathered: makes what is saved of it.
        path: of the checkpoint.
        catalog: the folder. names: of the files of the checkpoint, as :meth:`Form.names` gives them.
        template: of these names.
        weights_only: nothing but the model is saved.
        overwrite: replace what has these names.
        disks: which ranks see the same folder, where not all see one.
    """

    state: TrainingState
    gathered: Gathered
    path: Path
    catalog: Catalog
    names: Sequence[str]
    template: str
    weights_only: bool
    overwrite: bool
    disks: Disks | None


class Form(ABC):
    """Layout of a run's checkpoints in their folder.

    Attributes:
        kind: as manifests say it.
        may_be_lazy: nothing but its optimizers' steps changes the state that is saved.
        is_spread: the model is sharded over ranks. is_shared: several ranks write to the folder.
        has_names_of_ranks: each rank has a file, and a link, with a name of its own.
    """

    kind: str
    may_be_lazy = True
    is_spread = True
    is_shared = False
    has_names_of_ranks = False

    def template(self, template: str, argument: str = "save_filename") -> str:
        """Return the template of names in this form for that of a file; ``argument`` is for errors."""
        return template

    def names(self, template: str, state: TrainingState) -> list[str]:
        """Return the names of the files of a checkpoint, that of rank 0 first; of all ranks where each writes one."""
        return [first_name(template, state)]

    def check(self, *, weights_only: bool, ignore_keys: IgnoreKeys) -> None:
        """See that what is to be saved can be; ConfigError."""

    def disks(self, folder: Path) -> Disks | None:
        """Find out which ranks see the same ``folder``; ``None``: all see one. Every rank calls it."""
        return None

    @abstractmethod
    def expected_bytes(self, gathered: Gathered) -> int | None:
        """Return about how much memory a copy takes on this rank; ``None`` where that is not known before a save."""

    @abstractmethod
    def writer(self, request: SaveRequest) -> RankWriter:
        """Return the writer of this rank; all ranks call it."""


def form_of(state: TrainingState) -> Form:
    """Return the form of the checkpoints of ``state``."""
    if state.sharding == "sharded":
        return _Directory()
    if state.sharding == "deepspeed":
        return _Archives()
    return _File(gathers=state.sharding == "full")


@final
class _File(Form):
    """One file, which rank 0 writes.

    Args:
        gathers: what is sharded over ranks is gathered for it.
    """

    kind = "monolithic"

    def __init__(self, *, gathers: bool) -> None:
        self._gathers = self.is_spread = gathers

    def expected_bytes(self, gathered: Gathered) -> int | None:
        if self._gathers or dist.get_global_rank() != 0:
            return None
        return _image(gathered(), "checkpoint").size_bytes

    def writer(self, request: SaveRequest) -> RankWriter:
        contents = request.gathered(generators=_generators(request.weights_only))
        trained = _trained_names(contents.get("state", {}).get("model", {}), request.state)
        gathering = Gathering(contents) if self._gathers else None
        if gathering is not None:
            contents = gathering.contents
        if dist.get_global_rank() != 0:
            return NullWriter(gathering)
        image = _image(contents, f"checkpoint {str(request.path)!r}")
        weights: StateDict = contents.get("state", {}).get("model", {})
        image.watch((f"model/{name}", weights[name]) for name in trained)
        return SingleFileWriter(
            image,
            request.catalog,
            name=request.names[0],
            template=request.template,
            overwrite=request.overwrite,
            weights=weights.values(),
            gathering=gathering,
        )


@final
class _Directory(Form):
    """A directory, to which all ranks write."""

    kind = "sharded"
    is_shared = True

    def template(self, template: str, argument: str = "save_filename") -> str:
        return directory_template(template, argument=argument)

    def disks(self, folder: Path) -> Disks | None:
        return disks_of(folder) if dist.get_world_size() > 1 else None

    def expected_bytes(self, gathered: Gathered) -> int | None:
        from composerlite.checkpoint.save.sharded_writer import expected_bytes  # slow to import

        return expected_bytes(gathered())

    def writer(self, request: SaveRequest) -> RankWriter:
        from composerlite.checkpoint.save.sharded_writer import ShardWriter  # as slow

        own = {str(dist.get_global_rank()): rng.packed(rng.of_training())}
        return ShardWriter(
            lambda: request.gathered(generators=own),
            ShardedDirectory.on_disk(request.path, request.catalog.folder),
            overwrite=request.overwrite,
            disks=request.disks,
            of_run=True,
            reuse_plan=True,
            watched=frozenset(_trained_storages(request.state)),
        )


@final
class _Archives(Form):
    """An archive for each rank, with the files of DeepSpeed."""

    kind = "deepspeed"
    may_be_lazy = False  # the engine changes more than its optimizer's step does
    is_shared = True
    has_names_of_ranks = True

    def template(self, template: str, argument: str = "save_filename") -> str:
        return archive_template(template, argument=argument)

    def names(self, template: str, state: TrainingState) -> list[str]:
        return names_of_ranks(template, state.run_name, state.timestamp, dist.get_world_size())

    def check(self, *, weights_only: bool, ignore_keys: IgnoreKeys) -> None:
        if weights_only:
            raise ConfigError(
                "weights_only=True (save_weights_only=True in the Trainer): DeepSpeed has the weights in pieces, with "
                "the state of the optimizer, and saves both. Save whole checkpoints, and make a file of the weights of "
                "one with composerlite.checkpoint.unshard_zero."
            )
        for glob in () if ignore_keys is None or callable(ignore_keys) else ignore_keys:
            if glob.startswith(("state/model", "state/optimizers")):
                raise ConfigError(
                    f"save_ignore_keys: {glob!r} is in the files of DeepSpeed, which saves "
                    "weights and optimizer as a whole. Leave it out."
                )

    def disks(self, folder: Path) -> Disks | None:
        if dist.get_world_size() > 1:
            check_one_disk(folder)
        return None

    def expected_bytes(self, gathered: Gathered) -> int | None:
        return None

    def writer(self, request: SaveRequest) -> RankWriter:
        engine = request.state.deepspeed
        assert engine is not None, "it is made before anything is saved"
        images = {STATES: TorchImage(request.gathered(generators=_generators(request.weights_only)))}
        for name, contents in engine.saved().items():
            image = images[f"{DEEPSPEED}/{name}"] = TorchImage(contents, DEEPSPEED_TYPES)
            image.watch((f"the weights in {name}", tensor) for tensor in _trained_storages(request.state).values())
        return RankArchiveWriter(
            images, request.catalog, names=request.names, rank=dist.get_global_rank(), overwrite=request.overwrite
        )


def first_name(template: str, state: TrainingState) -> str:
    """Return the name that ``template`` gives now on rank 0."""
    return format_name_with_dist_and_time(template, state.run_name, state.timestamp, **FIRST_RANK)


def gathering(
    state: TrainingState, state_dict: StateDict | None, *, weights_only: bool, ignore_keys: IgnoreKeys
) -> Gathered:
    """Function that gathers a checkpoint of ``state_dict``; for ``None``, of ``state`` when it is called."""

    def gathered(**generators: Any) -> StateDict:
        held = state_dict
        if held is None:
            held = state.weights_state_dict() if weights_only else state.state_dict()
        return gather(held, weights_only=weights_only, ignore_keys=ignore_keys, **generators)

    return gathered


def _trained_storages(state: TrainingState) -> dict[int, Tensor]:
    """Return the tensors that the optimizers change, by storage; none where the checkpoint is marked anyway."""
    if getattr(state, "not_finite", ()):  # a loop of the user's own may have none
        return {}
    groups = (group for optimizer in state.optimizers for group in optimizer.param_groups)
    parts = (local_part(parameter) for group in groups for parameter in group["params"])
    return {storage_id(part.untyped_storage()): part for part in parts if _has_numbers(part)}


def _trained_names(model: StateDict, state: TrainingState) -> list[str]:
    """Return the names in ``model`` of the tensors of :func:`_trained_storages`."""
    trained = _trained_storages(state)
    parts = ((name, local_part(value)) for name, value in model.items())
    return [name for name, part in parts if _has_numbers(part) and storage_id(part.untyped_storage()) in trained]


def _has_numbers(value: Any) -> bool:
    """Return true if ``value`` is a plain tensor, quickly: training waits."""
    return type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided


def _generators(weights_only: bool) -> list[dict[str, Any]] | None:
    """Return the random generators of all ranks; ``None`` where there is one, or they are not saved."""
    if weights_only or dist.get_world_size() == 1:
        return None
    states = dist.get_group().gather(bytes(rng.packed(rng.of_training()).numpy()))
    return [rng.unpacked(torch.frombuffer(bytearray(state), dtype=torch.uint8)) for state in states]


def _image(contents: StateDict, what: str) -> TorchImage:
    try:
        return TorchImage(contents)
    except (pickle.PickleError, AttributeError, TypeError, ValueError) as e:  # what cannot be pickled raises any
        raise SaveError(f"{what}: its contents cannot be written: {e}") from e
