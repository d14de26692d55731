"""The form of a run's checkpoints: one file, a directory of all ranks, or an archive of each rank.

:func:`form_of` chooses the form by how the model is sharded over ranks. A :class:`RankWriter` writes the part of a
rank: here files and archives, in ``sharded_writer`` directories.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn

from composerlite import dist
from composerlite._torch_compat import local_part, storage_id
from composerlite.checkpoint.contents import IgnoreKeys, TrainingState, gather
from composerlite.checkpoint.format.archive import DEEPSPEED, DEEPSPEED_TYPES, STATES, tar_bytes
from composerlite.checkpoint.format.packing import format_of
from composerlite.checkpoint.format.torch_file import StorageCopy, TorchImage
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import commit_file, delete_checkpoint
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.checkpoint.place.node_disks import Disks, disks_of
from composerlite.checkpoint.record.manifest import FileRecord, Manifest
from composerlite.checkpoint.record.naming import (
    FIRST_RANK,
    NamedState,
    archive_template,
    directory_template,
    format_name_with_dist_and_time,
)
from composerlite.checkpoint.record.retention import Retention
from composerlite.checkpoint.record.tail import seal, tail_room
from composerlite.devices import rng
from composerlite.errors import CheckpointExistsError, ConfigError, SaveError
from composerlite.storage import FileDigest, HostMemory, Sink, StagedFile, make_folder
from composerlite.storage.disk.files import fsync_folder
from composerlite.types import StateDict, with_items

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["AfterCommit", "FileWriter", "Form", "RankWriter", "SaveRequest", "first_name", "form_of", "names_of_ranks"]

_ALIGNMENT = 4096
"""Alignment of each file of an archive in the memory of a copy."""


# ── writers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class RankWriter(Protocol):
    """Writer of the part of this rank in a checkpoint.

    Attributes:
        gathers: :meth:`staged_in` and :meth:`write` are collective.
        size_bytes: size of the memory for a copy.
        seconds: time by activity of the threads that write, complete after :meth:`finish`.
    """

    size_bytes: int

    @property
    def gathers(self) -> bool: ...

    @property
    def seconds(self) -> Mapping[str, float]: ...

    def storages(self) -> Sequence[StorageCopy]:
        """Return the storages to copy before training changes them, each once, and the offset of each in the copy."""
        ...

    def staged_in(self, memory: HostMemory) -> None:
        """Read the bytes from the copy in ``memory`` from now on."""
        ...

    def write(self, memory: HostMemory | None) -> None:
        """Write all bytes. Threads may still write when this returns.

        Args:
            memory: the argument of :meth:`staged_in`; ``None`` to read from the tensors themselves.

        Raises:
            OSError: no space, no permission, and the like.
        """
        ...

    def finish(self, manifest: Manifest) -> Any:
        """Wait until the files of this rank are durable, and return facts about the files for rank 0.

        Args:
            manifest: the record so far. A checkpoint that is one file contains the record.

        Raises:
            OSError: no space, no permission, and the like.
        """
        ...

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Commit on rank 0, and return the record. ``parts``: the results of :meth:`finish` of all ranks."""
        ...

    def close(self, *, may_be_committed: bool) -> None:
        """Free all resources, and remove the files unless they are or may be committed. May be called twice."""
        ...


@final
class Gathering:
    """The distributed tensors in ``contents``. All ranks gather the tensors together, in the same order.

    Attributes:
        contents: the contents with an empty tensor of the same shape for each distributed tensor.
    """

    def __init__(self, contents: StateDict) -> None:
        from torch.distributed.tensor import DTensor  # slow to import

        self._kind = DTensor
        self._waiting: deque[DTensor] = deque()
        self._places: set[int] = set()
        self.contents: StateDict = self._with_places(contents)

    def _with_places(self, node: Any) -> Any:
        if isinstance(node, self._kind):
            place = torch.empty(node.shape, dtype=node.dtype)  # takes no memory before it is touched
            self._waiting.append(node)
            self._places.add(storage_id(place.untyped_storage()))
            return place
        return with_items(node, lambda _, value: self._with_places(value))

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return true if ``storage`` belongs to an empty tensor in :attr:`contents`."""
        return storage_id(storage) in self._places

    def storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return ``storage``; for an empty tensor gather the next tensor, and return that storage on the CPU.

        Collective, in the main thread.

        Raises:
            RuntimeError: a rank is gone. The other tensors are not gathered.
        """
        if not self.holds(storage):
            return storage
        try:
            return self._waiting.popleft().full_tensor().detach().cpu().contiguous().untyped_storage()
        except BaseException:
            self._waiting.clear()
            raise

    def finish(self) -> None:
        """Gather the remaining tensors for other ranks."""
        try:
            while self._waiting:
                self._waiting.popleft().full_tensor()
        finally:
            self._waiting.clear()


class NullWriter:
    """Writer of a rank without a file, and base of :class:`FileWriter`: the rank helps the others to gather.

    Args:
        gathering: the distributed tensors that all ranks gather for the file of rank 0.
    """

    def __init__(self, gathering: Gathering | None = None) -> None:
        self.gathers = gathering is not None
        self.size_bytes = 0
        self.seconds: Mapping[str, float] = {}
        self._gathering = gathering

    def storages(self) -> list[StorageCopy]:
        """Return the storages to copy."""
        return []

    def staged_in(self, memory: HostMemory) -> None:
        """Gather for the other ranks."""
        self._help()

    def write(self, memory: HostMemory | None) -> None:
        """Gather for the other ranks."""
        self._help()

    def _help(self) -> None:
        if self._gathering is not None:
            self._gathering.finish()

    def finish(self, manifest: Manifest) -> Any:
        """Return nothing: there is no file."""
        return None

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Fail: rank 0 has a file."""
        raise AssertionError("a rank that writes nothing does not commit")

    def close(self, *, may_be_committed: bool) -> None:
        """Gather the remaining tensors for the other ranks."""
        self._help()


class _Written(NamedTuple):
    """Facts about the file of a rank.

    Attributes:
        name: of the file.
        temporary: path until the commit.
        digest: of the file.
        unpacked_bytes: size of the file inside, if the file is compressed or an archive.
        not_finite: name of a weight in the file that is not finite.
    """

    name: str
    temporary: Path
    digest: FileDigest
    unpacked_bytes: int
    not_finite: str | None


@final
class FileWriter(NullWriter):
    """Writer of a file in the folder of ``catalog``: a whole checkpoint, or the archive of a rank.

    The file has a temporary name until the commit.

    Args:
        images: contents of the file: one, or several by their names in an archive.
        catalog: of the folder.
        name: of the file.
        template: of the name. The end of the template chooses the format.
        overwrite: replace a checkpoint of the same name.
        record: the record of the checkpoint, without files. A checkpoint of one file, and the archive of each other
            rank, contain the record when they are flushed. The archive of rank 0 gets the record of all at the commit.
        gathering: the distributed tensors of the image.
    """

    def __init__(
        self,
        images: Mapping[str, TorchImage],
        catalog: Catalog,
        *,
        name: str,
        template: str,
        overwrite: bool,
        record: Manifest,
        gathering: Gathering | None = None,
    ) -> None:
        super().__init__(gathering)
        self._format = format_of(template)
        self._images = dict(images)
        self._starts: dict[str, int] = {}
        for inner, image in self._images.items():
            self._starts[inner] = -(-self.size_bytes // _ALIGNMENT) * _ALIGNMENT
            self.size_bytes = self._starts[inner] + image.size_bytes
            image.stand_in = None if gathering is None else gathering.storage
        self._room: int | None = None
        if record.form == "file" and not self._format.archive:
            (image,) = self._images.values()
            self._room = image.comment_bytes = tail_room(record, self.size_bytes)
        self._catalog = catalog
        self._name = name
        self._overwrite = overwrite
        self._stack = ExitStack()  # closes the sink and removes the file, unless the file is committed
        self._sink: Sink | None = None
        self._data: StagedFile | None = None

    @property
    def _path(self) -> Path:
        return self._catalog.folder / self._name

    def storages(self) -> list[StorageCopy]:
        """Return the storages to copy before training changes them, except the storages of gathered tensors."""
        return [
            StorageCopy(storage, self._starts[name] + offset)
            for name, image in self._images.items()
            for storage, offset in image.storages()
            if self._gathering is None or not self._gathering.holds(storage)
        ]

    def staged_in(self, memory: HostMemory) -> None:
        """Read the bytes from ``memory`` from now on. Distributed tensors are gathered there."""
        for name, image in self._images.items():
            for storage, offset in () if self._gathering is None else image.storages():
                if self._gathering is not None and self._gathering.holds(storage):
                    whole: Any = self._gathering.storage(storage)
                    if whole.nbytes():
                        target = torch.frombuffer(memory.view(offset, whole.nbytes()), dtype=torch.uint8)
                        target.copy_(torch.empty(0, dtype=torch.uint8).set_(whole))
            image.staged_in(memory, self._starts[name])

    def write(self, memory: HostMemory | None) -> None:
        """Write all bytes. Distributed tensors are gathered when they are written, unless they are in ``memory``.

        After an error the file is removed.
        """
        with ExitStack() as stack:
            make_folder(self._path.parent)
            self._data = stack.enter_context(StagedFile(self._path))
            members = [(name, image.size_bytes) for name, image in self._images.items()]
            sink = self._format.open_sink(self._data.temporary, self.size_bytes, memory=memory, members=members)
            self._sink = stack.enter_context(sink)
            self.seconds = sink.seconds
            for image in self._images.values():
                image.write(sink)
            self._stack = stack.pop_all()

    def finish(self, manifest: Manifest) -> _Written:
        """Wait until the file is durable, and return facts about the file. After an error the file is removed."""
        assert self._sink is not None
        assert self._data is not None
        images = self._images.values()
        sizes = [image.size_bytes + image.comment_bytes for image in images]
        unpacked = tar_bytes(*sizes) if len(sizes) > 1 else sizes[0]
        not_finite = next((image.not_finite for image in images if image.not_finite is not None), None)
        timings = {**manifest.timings, **self._sink.seconds}
        record = dataclasses.replace(manifest, timings=timings, unpacked_bytes=unpacked).marked([not_finite])
        decides_for_all = record.form == "archives" and self._name == record.name
        with self._stack.pop_all() as stack:
            digest = self._sink.finish(None if decides_for_all else partial(seal, record, room=self._room))
            self._stack = stack.pop_all()
        return _Written(self._name, self._data.temporary, digest, unpacked, not_finite)

    def commit(self, manifest: Manifest, parts: Sequence[_Written | None]) -> Manifest:
        """Rename the files of all ranks, on rank 0; last the file of rank 0, which contains the record."""
        assert self._data is not None
        written = [part for part in parts if part is not None]
        records = [FileRecord.of(part.name, part.digest) for part in written]
        unpacked = max(part.unpacked_bytes for part in written)
        manifest = dataclasses.replace(manifest, files=tuple(records), unpacked_bytes=unpacked)
        manifest = manifest.marked([part.not_finite for part in written])
        try:
            with self._stack.pop_all() as stack:
                if manifest.form == "archives":
                    digest = self._append_record(dataclasses.replace(manifest, files=tuple(records[1:])), records[0])
                    manifest = dataclasses.replace(manifest, files=(FileRecord.of(self._name, digest), *records[1:]))
                    self._rename_others(written[1:])
                commit_file(self._data, overwrite=self._overwrite)
                self._stack = stack.pop_all()
        except FileExistsError as e:
            raise CheckpointExistsError(
                f"checkpoint {str(self._path)!r} was saved by another process meanwhile."
            ) from e
        return manifest

    def _append_record(self, record: Manifest, own: FileRecord) -> FileDigest:
        """Append the record to the archive of this rank, and return the new digest of the archive."""
        assert self._data is not None
        tail = self._format.frame(seal(record, own.digest))
        with self._data.temporary.open("ab") as file:
            file.write(tail)
            file.flush()
            os.fsync(file.fileno())
        return own.digest.with_tail(tail)

    def _rename_others(self, others: Sequence[_Written]) -> None:
        """Give the archives of the other ranks their names. The checkpoint that they replace is deleted first."""
        if self._overwrite and (old := self._catalog.manifest_of(self._name)) is not None:
            delete_checkpoint(self._catalog.place, old)
        for part in others:
            part.temporary.replace(self._catalog.folder / part.name)
        for folder in {(self._catalog.folder / part.name).parent for part in others}:
            fsync_folder(folder)  # these names are durable before the archive that decides about them

    def close(self, *, may_be_committed: bool) -> None:
        """Remove the file unless it is or may be committed. May be called twice."""
        if may_be_committed and self._data is not None:
            self._data.leave_behind()
        self._stack.close()
        self._help()


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class AfterCommit(NamedTuple):
    """Work that a run wants done after a commit.

    Attributes:
        publish: called after the commit, before older checkpoints are deleted, perhaps on another thread; on rank 0,
            or on all ranks if nodes have disks of their own.
        also: other names under which the same file is uploaded, each with the template of the name.
        retention: which older checkpoints of the same template are deleted after that; on rank 0.
        is_routine: log the save below INFO.
    """

    publish: Callable[[], object] | None = None
    also: Mapping[str, str] = {}
    retention: Retention | None = None
    is_routine: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Request of a run to save a checkpoint.

    Attributes:
        state: of the run.
        state_dict: contents of ``state``, or the weights; ``None``: ``state`` provides the contents.
        weights_only: save only the model.
        ignore_keys: keys to leave out.
        catalog: of the folder.
        template: name of the checkpoint, with format variables.
        latest: name of the symbolic link to the checkpoint, with format variables.
        overwrite: replace a checkpoint of the same name.
        disks: which ranks see the same folder; ``None``: all see the same folder.
        occasion: ``'regular'``; ``'ephemeral'``: deleted as soon as a newer checkpoint is committed; ``'crash'``: the
            state after an exception, which no run resumes from by itself.
        metrics: metric values for the record, by name. NaN and infinite values are left out.
        after_commit: work after the commit.
        how: ``'async'``: training continues when the state is copied; ``'lazy'``: training continues at once, and the
            next optimizer step waits for the copy of weights and optimizer state; ``'sync'``: training continues after
            the commit.
        started: start of gathering, in the seconds of ``time.perf_counter``; ``None``: now.
    """

    state: TrainingState
    state_dict: StateDict | None = None
    weights_only: bool = False
    ignore_keys: IgnoreKeys = None
    catalog: Catalog
    template: str
    latest: str | None = None
    overwrite: bool = False
    disks: Disks | None = None
    occasion: str = "regular"
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    after_commit: AfterCommit = field(default_factory=AfterCommit)
    how: str = "async"
    started: float | None = None

    def gathered(self, generators: Any = None) -> StateDict:
        """Return the contents of the checkpoint. ``generators``: states of the random generators of all ranks."""
        held = self.state_dict
        if held is None:
            held = self.state.weights_state_dict() if self.weights_only else self.state.state_dict()
        return gather(held, weights_only=self.weights_only, ignore_keys=self.ignore_keys, generators=generators)

    def gathered_of_all_ranks(self) -> StateDict:
        """Return the contents of the checkpoint with the random generators of all ranks. Collective."""
        if self.weights_only or dist.get_world_size() == 1:
            return self.gathered()
        states = dist.get_group().gather(bytes(rng.packed(rng.of_training()).numpy()))
        return self.gathered([rng.unpacked(torch.frombuffer(bytearray(one), dtype=torch.uint8)) for one in states])


# ── the forms of a checkpoint ────────────────────────────────────────────────────────────────────────────────────────
@final
class Form:
    """Form of a run's checkpoints.

    Args:
        sharding: as :attr:`TrainingState.sharding`.

    Attributes:
        kind: in records: ``'monolithic'``: a file of rank 0; ``'sharded'``: a directory of all ranks; ``'deepspeed'``:
            an archive of each rank.
        is_spread: the model is sharded over ranks.
        is_shared: several ranks write to the folder.
        has_names_of_ranks: each rank has a file and a link of its own.
        may_be_lazy: between optimizer steps nothing changes weights and optimizer state.
    """

    def __init__(self, sharding: str | None) -> None:
        self.kind = sharding if sharding in ("sharded", "deepspeed") else "monolithic"
        self.is_spread = sharding is not None
        self.is_shared = self.kind != "monolithic"
        self.has_names_of_ranks = self.kind == "deepspeed"
        self.may_be_lazy = self.kind != "deepspeed"

    def template(self, template: str, argument: str = "save_filename") -> str:
        """Return the template of names in this form for the template of a file; ``argument`` is for errors."""
        if self.kind == "sharded":
            return directory_template(template, argument=argument)
        return archive_template(template, argument=argument) if self.kind == "deepspeed" else template

    def names(self, template: str, state: TrainingState) -> list[str]:
        """Return the names of the files of a checkpoint: of all ranks if each writes a file, else of rank 0."""
        if self.has_names_of_ranks:
            return names_of_ranks(template, state, dist.get_world_size())
        return [first_name(template, state)]

    def check(self, *, weights_only: bool, ignore_keys: IgnoreKeys) -> None:
        """Raise ConfigError if checkpoints of this form cannot be saved with these options."""
        if self.kind != "deepspeed":
            return
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
        """Find out which ranks see the same ``folder``; ``None``: all ranks do. Collective.

        Raises:
            ConfigError: nodes have disks of their own, and DeepSpeed saves.
        """
        disks = disks_of(folder) if self.is_shared and dist.get_world_size() > 1 else None
        if disks is not None and self.kind == "deepspeed":
            raise ConfigError(
                f"the folder of checkpoints {str(folder)!r} is not the same on all nodes: rank 0 commits the files "
                "that the ranks of DeepSpeed write there. Choose a folder (with a URI: save_staging_folder) on a file "
                "system that all nodes mount."
            )
        return disks

    def expected_bytes(self, request: SaveRequest) -> int | None:
        """Estimate the memory for a copy on this rank, in bytes; ``None`` if that is unknown before a save."""
        if self.kind == "sharded":
            from composerlite.checkpoint.save.sharded_writer import expected_bytes  # slow to import

            return expected_bytes(request.gathered())
        if self.is_spread or dist.get_global_rank() != 0:
            return None
        return _image(request.gathered(), "checkpoint").size_bytes

    def writer(self, request: SaveRequest, record: Manifest, names: Sequence[str]) -> RankWriter:
        """Return the writer of this rank. Collective.

        Args:
            request: what to save.
            record: of the checkpoint, without files.
            names: of the files, the result of :meth:`names`.
        """
        if self.kind == "sharded":
            return _directory_writer(request, names[0])
        if self.kind == "deepspeed":
            return _archive_writer(request, record, names[dist.get_global_rank()])
        return _file_writer(request, record, names[0], gathers=self.is_spread)


def form_of(state: TrainingState) -> Form:
    """Return the form of the checkpoints of ``state``."""
    return Form(state.sharding)


def _file_writer(request: SaveRequest, record: Manifest, name: str, *, gathers: bool) -> RankWriter:
    contents = request.gathered_of_all_ranks()
    model: StateDict = contents.get("state", {}).get("model", {})
    trained, local = _trained_storages(request.state), {key: local_part(value) for key, value in model.items()}
    watched = [key for key, part in local.items() if _has_numbers(part) and _id_of(part) in trained]
    gathering = Gathering(contents) if gathers else None
    if gathering is not None:
        contents = gathering.contents
    if dist.get_global_rank() != 0:
        return NullWriter(gathering)
    image = _image(contents, f"checkpoint {str(request.catalog.folder / name)!r}")
    weights: StateDict = contents.get("state", {}).get("model", {})
    image.watch([(f"model/{key}", weights[key]) for key in watched])
    return FileWriter(
        {STATES: image},
        request.catalog,
        name=name,
        template=record.template,
        overwrite=request.overwrite,
        record=record,
        gathering=gathering,
    )


def _directory_writer(request: SaveRequest, name: str) -> RankWriter:
    from composerlite.checkpoint.save.sharded_writer import ShardWriter  # slow to import

    own = {str(dist.get_global_rank()): rng.packed(rng.of_training())}
    return ShardWriter(
        lambda: request.gathered(own),
        ShardedDirectory(request.catalog.place, name),
        overwrite=request.overwrite,
        disks=request.disks,
        of_run=True,
        watched=frozenset(_trained_storages(request.state)),
    )


def _archive_writer(request: SaveRequest, record: Manifest, name: str) -> RankWriter:
    engine = request.state.deepspeed
    assert engine is not None, "the engine exists before the first save"
    images = {STATES: TorchImage(request.gathered_of_all_ranks())}
    for file, contents in engine.saved().items():
        image = images[f"{DEEPSPEED}/{file}"] = TorchImage(contents, DEEPSPEED_TYPES)
        image.watch([(f"the weights in {file}", tensor) for tensor in _trained_storages(request.state).values()])
    return FileWriter(images, request.catalog, name=name, template=name, overwrite=request.overwrite, record=record)


def names_of_ranks(template: str, state: NamedState, world_size: int) -> list[str]:
    """Return ``template`` filled in for each of ``world_size`` ranks, in their order."""
    per_node = dist.get_local_world_size()
    return [
        format_name_with_dist_and_time(
            template,
            state.run_name,
            state.timestamp,
            rank=rank,
            local_rank=rank % per_node,
            node_rank=rank // per_node,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]


def first_name(template: str, state: NamedState) -> str:
    """Return the name that ``template`` gives now on rank 0."""
    return format_name_with_dist_and_time(template, state.run_name, state.timestamp, **FIRST_RANK)


def _trained_storages(state: TrainingState) -> dict[int, Tensor]:
    """Return the tensors that optimizers change, by storage; empty if the checkpoint is already marked not finite."""
    if getattr(state, "not_finite", ()):  # a loop of the user's own may have none
        return {}
    groups = (group for optimizer in state.optimizers for group in optimizer.param_groups)
    parts = (local_part(parameter) for group in groups for parameter in group["params"])
    return {_id_of(part): part for part in parts if _has_numbers(part)}


def _id_of(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _has_numbers(value: Any) -> bool:
    """Return true if ``value`` is a plain tensor, quickly: training waits."""
    return type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided


def _image(contents: StateDict, what: str) -> TorchImage:
    try:
        return TorchImage(contents)
    except (pickle.PickleError, AttributeError, TypeError, ValueError) as e:  # objects that cannot be pickled
        raise SaveError(f"{what}: its contents cannot be written: {e}") from e
