"""The form of a checkpoint: a file, a directory of all ranks or an archive of each, and what a rank writes of it.

Which one a run has follows from how the model is sharded over ranks: :func:`form_of`, and nothing else in this package,
asks for that.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from composerlite.storage import FileDigest, HostMemory, Sink, StagedFile, fsync_folder, make_folder
from composerlite.types import StateDict, with_items

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["AfterCommit", "FileWriter", "Form", "RankWriter", "SaveRequest", "first_name", "form_of", "names_of_ranks"]

_ALIGNMENT = 4096
"""Of what is one of several in memory."""


# ── what a rank writes ───────────────────────────────────────────────────────────────────────────────────────────────
class RankWriter(Protocol):
    """Writer of this rank's part of a checkpoint: its bytes, and their place in the commit.

    Attributes:
        size_bytes: of memory for a copy.
        gathers: the ranks need each other for :meth:`staged_in` and :meth:`write`, which are called on all, or none.
        seconds: spent by name, complete after :meth:`finish`.
        weights_crc: CRC-32 of each storage of the model, after :meth:`write`.
    """

    size_bytes: int
    weights_crc: Sequence[int]

    @property
    def gathers(self) -> bool: ...

    @property
    def seconds(self) -> Mapping[str, float]: ...

    def storages(self) -> Sequence[StorageCopy]:
        """Return the storages to copy before training changes them, each once, and the destination of each."""
        ...

    def staged_in(self, memory: HostMemory) -> None:
        """Read the bytes from ``memory`` from now on, which holds each storage at its offset."""
        ...

    def write(self, memory: HostMemory | None) -> None:
        """Hand all bytes to those who write them, and who may still be writing when this returns.

        Args:
            memory: what :meth:`staged_in` was given; ``None`` to read from the tensors themselves.

        Raises:
            OSError: no space, no permission, and the like.
        """
        ...

    def finish(self, manifest: Manifest) -> Any:
        """Wait until everything is durable, and return what rank 0 needs to know of it, which can be pickled.

        Args:
            manifest: the record so far. A checkpoint that is one file contains it.

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


# ── a file, with what is sharded over ranks gathered for it ──────────────────────────────────────────────────────────
@final
class Gathering:
    """The distributed tensors in ``contents``, to be gathered one after the other, on every rank in the same order.

    Attributes:
        contents: the same with a tensor without contents in the place of each of them.
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
        """Return true if ``storage`` belongs to a tensor without contents."""
        return storage_id(storage) in self._places

    def next(self) -> Tensor:
        """Gather the next one, together with all ranks, in the main thread; the whole of it in this machine's memory.

        Raises:
            RuntimeError: a rank is gone. Nothing is left to be gathered then.
        """
        try:
            return self._waiting.popleft().full_tensor().detach().cpu().contiguous()
        except BaseException:
            self._waiting.clear()
            raise

    def finish(self) -> None:
        """Take part in gathering the remaining tensors, which other ranks need."""
        while self._waiting:
            self.next()


@final
class NullWriter:
    """The part of a rank that votes and helps to gather, and no more."""

    def __init__(self, gathering: Gathering | None = None) -> None:
        self.gathers = gathering is not None
        self._gathering = gathering
        self.size_bytes = 0
        self.seconds: dict[str, float] = {}
        self.weights_crc: Sequence[int] = ()

    def storages(self) -> list[StorageCopy]:
        """Return an empty list."""
        return []

    def staged_in(self, memory: HostMemory) -> None:
        """The other ranks' part of gathering."""
        self._gather()

    def write(self, memory: HostMemory | None) -> None:
        """The same, where it is gathered as it is written."""
        self._gather()

    def _gather(self) -> None:
        if self._gathering is not None:
            self._gathering.finish()

    def finish(self, manifest: Manifest) -> None:
        """Do nothing: there is no file to make durable."""

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Rank 0 has something to write."""
        raise AssertionError("unreachable")

    def close(self, *, may_be_committed: bool) -> None:
        """Take part in gathering the remaining tensors."""
        self._gather()


class _Written(NamedTuple):
    """Facts about a rank's file that rank 0 needs for the record.

    Attributes:
        name: of the file.
        temporary: its path until the commit.
        digest: of the file.
        unpacked_bytes: size of the file inside, if it is compressed or in an archive.
        not_finite: name of a weight in it that is not finite.
        timings: seconds by name, until the file was written.
    """

    name: str
    temporary: Path
    digest: FileDigest
    unpacked_bytes: int
    not_finite: str | None
    timings: Mapping[str, float]


@final
class FileWriter:
    """A rank's file of a checkpoint in the folder of ``catalog``: the whole of it, or an archive of what the rank has.

    It has a temporary name until the commit.

    Args:
        images: what is in it: one, or several by their names in an archive.
        name: of the file. template: of the name, which tells the format.
        overwrite: replace what has the names of the checkpoint.
        record: the record of the checkpoint, without files. If it is one file, that contains the record when it is
            flushed. So does the archive of another rank, to tell which checkpoint it is a part of; that of the first
            rank gets the record of all at the commit.
        weights: tensors of the first image whose checksums are wanted.
        gathering: of what is sharded over ranks; the image has places for it.
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
        weights: Iterable[Any] = (),
        gathering: Gathering | None = None,
    ) -> None:
        self._format = format_of(template)
        self.weights_crc: Sequence[int] = ()
        self.size_bytes = 0
        self._images = dict(images)
        self._starts: dict[str, int] = {}
        for inner, image in self._images.items():
            self._starts[inner] = -(-self.size_bytes // _ALIGNMENT) * _ALIGNMENT
            self.size_bytes = self._starts[inner] + image.size_bytes
        self._room: int | None = None
        if record.form == "file" and not self._format.archive:
            self._room = tail_room(record, self.size_bytes)
            for image in self._images.values():
                image.comment_bytes = self._room
        self._weights = next(iter(self._images.values())).numbers_of(weights)
        self._gathering = gathering
        self._catalog = catalog
        self._name = name
        self._overwrite = overwrite
        self._stack = ExitStack()
        self._sink: Sink | None = None
        self._data: StagedFile | None = None

    @property
    def gathers(self) -> bool:
        """True if the ranks need each other for :meth:`staged_in` and :meth:`write`."""
        return self._gathering is not None

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by name, of the threads that write."""
        return {} if self._sink is None else self._sink.seconds

    @property
    def _path(self) -> Path:
        return self._catalog.folder / self._name

    def storages(self) -> list[StorageCopy]:
        """Return the storages to copy before training changes them, except those that are gathered."""
        return [
            StorageCopy(storage, self._starts[name] + offset)
            for name, image in self._images.items()
            for storage, offset in image.storages()
            if self._gathering is None or not self._gathering.holds(storage)
        ]

    def staged_in(self, memory: HostMemory) -> None:
        """Read the bytes from ``memory`` from now on. Sharded tensors are gathered there."""
        for name, image in self._images.items():
            for storage, offset in () if self._gathering is None else image.storages():
                whole = self._gathered(storage)
                if whole is not storage and whole.nbytes():
                    torch.frombuffer(memory.view(offset, whole.nbytes()), dtype=torch.uint8).copy_(_bytes_of(whole))
            image.staged_in(memory, self._starts[name])

    def _gathered(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if self._gathering is None or not self._gathering.holds(storage):
            return storage
        return self._gathering.next().untyped_storage()

    def write(self, memory: HostMemory | None) -> None:
        """Hand all bytes to what writes the file. What is sharded over ranks is gathered as it comes, if it is not yet.

        After an error nothing is left.
        """
        with ExitStack() as stack:
            make_folder(self._path.parent)
            self._data = stack.enter_context(StagedFile(self._path))
            path = self._data.temporary
            if len(self._images) > 1:
                members = [(name, image.size_bytes) for name, image in self._images.items()]
                sink = self._format.open_archive(path, members)
            else:
                sink = self._format.open_sink(path, self.size_bytes, memory=memory)
            self._sink = stack.enter_context(sink)
            with self._named():
                crcs: list[list[int]] = []
                for image in self._images.values():
                    image.stand_in = None if self._gathering is None else self._gathered
                    crcs.append(image.write(sink))
            self.weights_crc = [crcs[0][number] for number in self._weights]
            self._stack = stack.pop_all()

    def finish(self, manifest: Manifest) -> _Written:
        """Wait until the file is durable, and return what rank 0 needs to know of it."""
        assert self._sink is not None
        assert self._data is not None
        images = self._images.values()
        sizes = [image.size_bytes + image.comment_bytes for image in images]
        unpacked = tar_bytes(*sizes) if len(sizes) > 1 else sizes[0]
        not_finite = next((image.not_finite for image in images if image.not_finite is not None), None)
        timings = {**manifest.timings, **self._sink.seconds}
        record = dataclasses.replace(manifest, timings=timings, unpacked_bytes=unpacked).marked([not_finite])
        try:
            with self._named():
                decides_for_all = record.form == "archives" and self._name == record.name
                digest = self._sink.finish(None if decides_for_all else partial(seal, record, room=self._room))
        except BaseException as e:
            self._leave(e)
            raise
        return _Written(self._name, self._data.temporary, digest, unpacked, not_finite, timings)

    def commit(self, manifest: Manifest, parts: Sequence[_Written | None]) -> Manifest:
        """Give the files of all ranks their names, that of rank 0 last: it contains the record. On rank 0."""
        assert self._data is not None
        written = [one for one in parts if one is not None]
        records = [FileRecord.of(one.name, one.digest) for one in written]
        manifest = dataclasses.replace(
            manifest, files=tuple(records), unpacked_bytes=max(one.unpacked_bytes for one in written)
        ).marked([one.not_finite for one in written])
        try:
            if manifest.form == "archives":
                others = dataclasses.replace(manifest, files=tuple(records[1:]))
                digest = self._append_record(seal(others, records[0].digest), records[0].digest)
                manifest = dataclasses.replace(manifest, files=(FileRecord.of(self._name, digest), *records[1:]))
                self._name_others(written[1:])
            commit_file(self._data, overwrite=self._overwrite)
        except FileExistsError as e:
            self._leave(e)
            raise CheckpointExistsError(
                f"checkpoint {str(self._path)!r} was saved by another process meanwhile."
            ) from e
        except BaseException as e:
            self._leave(e)
            raise
        return manifest

    def _append_record(self, tail: bytes, digest: FileDigest) -> FileDigest:
        """Append the tail to this rank's archive, which is written to its end, and return the new digest."""
        assert self._data is not None
        tail = self._format.frame(tail)
        with self._data.temporary.open("ab") as file:
            file.write(tail)
            file.flush()
            os.fsync(file.fileno())
        return digest.with_tail(tail)

    def _name_others(self, others: Sequence[_Written]) -> None:
        """Give the archives of the other ranks their names. The checkpoint that they replace is deleted first."""
        if self._overwrite:
            old = self._catalog.manifest_of(self._name)
            if old is not None:
                delete_checkpoint(self._catalog.place, old)
        for one in others:
            one.temporary.replace(self._catalog.folder / one.name)
        for folder in {(self._catalog.folder / one.name).parent for one in others}:
            fsync_folder(folder)  # they have their names before the archive that decides about them

    def close(self, *, may_be_committed: bool) -> None:
        """Remove the file unless it has its name, or may have: then the next start finds out. May be called twice."""
        if may_be_committed and self._data is not None:
            self._data.leave_behind()
        self._leave()
        if self._gathering is not None:
            self._gathering.finish()

    def _leave(self, error: BaseException | None = None) -> None:
        stack, self._stack = self._stack, ExitStack()
        stack.__exit__(None if error is None else type(error), error, None if error is None else error.__traceback__)

    @contextmanager
    def _named(self) -> Generator[None]:
        """Name the checkpoint in an error of what compresses it."""
        try:
            yield
        except SaveError as e:
            raise SaveError(f"checkpoint {str(self._path)!r}: {e}") from e


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # pyright: ignore[reportArgumentType]


# ── the forms that a checkpoint may have ─────────────────────────────────────────────────────────────────────────────
@final
class AfterCommit(NamedTuple):
    """Work that a run wants done after a commit.

    Attributes:
        publish: is called after the commit, before anything is given up, perhaps on another thread. On rank 0; where
            there are several disks on all.
        also: other names under which the same file is uploaded, each with its template.
        retention: which older checkpoints of the same template are deleted after that. On rank 0.
        is_routine: the line of the save in the log is below INFO.
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
        state_dict: what it holds, or its weights; ``None``: ``state`` is asked for that.
        weights_only: save nothing but the model.
        ignore_keys: leave out these keys.
        catalog: the folder.
        template: name of the checkpoint, with format variables.
        latest: name of the symbolic link to point to it, with format variables.
        overwrite: replace a checkpoint of the same name.
        disks: which ranks see the same folder, where all write to it and not all see one.
        occasion: ``'regular'``; ``'ephemeral'``: given up as soon as a newer one is committed; ``'crash'``: the state
            is that in which an exception left it, and nobody resumes from it unasked.
        metrics: metric values to keep in the record, by name; those that are no finite numbers are left out.
        after_commit: work after the commit.
        how: ``'async'``: training continues when the state is copied; ``'lazy'``: before weights and optimizer state
            are copied, and the next step of an optimizer waits for that; ``'sync'``: when the checkpoint is committed.
        started: when gathering began, as ``time.perf_counter`` counts; ``None``: now.
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

    def gathered(self, **generators: Any) -> StateDict:
        """Gather the contents of the checkpoint; ``generators`` are those of all ranks, in some form."""
        held = self.state_dict
        if held is None:
            held = self.state.weights_state_dict() if self.weights_only else self.state.state_dict()
        return gather(held, weights_only=self.weights_only, ignore_keys=self.ignore_keys, **generators)


class Form(ABC):
    """Layout of a run's checkpoints in their folder.

    Attributes:
        kind: as records say it.
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
    def expected_bytes(self, request: SaveRequest) -> int | None:
        """Return about how much memory a copy takes on this rank; ``None`` where that is not known before a save."""

    @abstractmethod
    def writer(self, request: SaveRequest, record: Manifest, names: Sequence[str]) -> RankWriter:
        """Return the writer of this rank; all ranks call it.

        Args:
            request: what to save.
            record: of the checkpoint, without its files.
            names: of the files, as :meth:`names` gives them.
        """


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

    def expected_bytes(self, request: SaveRequest) -> int | None:
        if self._gathers or dist.get_global_rank() != 0:
            return None
        return _image(request.gathered(), "checkpoint").size_bytes

    def writer(self, request: SaveRequest, record: Manifest, names: Sequence[str]) -> RankWriter:
        contents = request.gathered(generators=_generators(request.weights_only))
        trained = _trained_names(contents.get("state", {}).get("model", {}), request.state)
        gathering = Gathering(contents) if self._gathers else None
        if gathering is not None:
            contents = gathering.contents
        if dist.get_global_rank() != 0:
            return NullWriter(gathering)
        image = _image(contents, f"checkpoint {str(request.catalog.folder / names[0])!r}")
        weights: StateDict = contents.get("state", {}).get("model", {})
        image.watch([(f"model/{name}", weights[name]) for name in trained])
        return FileWriter(
            {STATES: image},
            request.catalog,
            name=names[0],
            template=record.template,
            overwrite=request.overwrite,
            record=record,
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

    def expected_bytes(self, request: SaveRequest) -> int | None:
        from composerlite.checkpoint.save.sharded_writer import expected_bytes  # slow to import

        return expected_bytes(request.gathered())

    def writer(self, request: SaveRequest, record: Manifest, names: Sequence[str]) -> RankWriter:
        from composerlite.checkpoint.save.sharded_writer import ShardWriter  # as slow

        own = {str(dist.get_global_rank()): rng.packed(rng.of_training())}
        return ShardWriter(
            lambda: request.gathered(generators=own),
            ShardedDirectory(request.catalog.place, names[0]),
            overwrite=request.overwrite,
            disks=request.disks,
            of_run=True,
            watched=frozenset(_trained_storages(request.state)),
        )


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
        return names_of_ranks(template, state, dist.get_world_size())

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
        if dist.get_world_size() > 1 and disks_of(folder) is not None:
            raise ConfigError(
                f"the folder of checkpoints {str(folder)!r} is not the same on all nodes: rank 0 commits the files "
                "that the ranks of DeepSpeed write there. Choose a folder (with a URI: save_staging_folder) on a file "
                "system that all nodes mount."
            )
        return None

    def expected_bytes(self, request: SaveRequest) -> int | None:
        return None

    def writer(self, request: SaveRequest, record: Manifest, names: Sequence[str]) -> RankWriter:
        engine = request.state.deepspeed
        assert engine is not None, "it is made before anything is saved"
        images = {STATES: TorchImage(request.gathered(generators=_generators(request.weights_only)))}
        for name, contents in engine.saved().items():
            image = images[f"{DEEPSPEED}/{name}"] = TorchImage(contents, DEEPSPEED_TYPES)
            image.watch([(f"the weights in {name}", tensor) for tensor in _trained_storages(request.state).values()])
        own = names[dist.get_global_rank()]
        return FileWriter(images, request.catalog, name=own, template=own, overwrite=request.overwrite, record=record)


def first_name(template: str, state: NamedState) -> str:
    """Return the name that ``template`` gives now on rank 0."""
    return format_name_with_dist_and_time(template, state.run_name, state.timestamp, **FIRST_RANK)


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
