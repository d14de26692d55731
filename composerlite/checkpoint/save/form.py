"""The form of a run's checkpoints: one file, a directory of all ranks, or an archive of each rank.

:class:`Form` is chosen by how the model is sharded over ranks. A :class:`RankWriter` writes the part of a rank. The
writer of files and archives is in this module, the writer of directories in ``sharded_writer``.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn

from composerlite import dist
from composerlite._torch_compat import local_part, storage_id
from composerlite.checkpoint.contents import IgnoreKeys, TrainingState, without
from composerlite.checkpoint.format.archive import DEEPSPEED, STATES, tar_bytes, tar_header
from composerlite.checkpoint.format.packing import format_of
from composerlite.checkpoint.format.torch_file import StorageCopy, TorchImage
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.commit import commit_file, delete_checkpoint
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.checkpoint.place.node_disks import Disks, disks_of
from composerlite.checkpoint.record.history import RetentionPolicy
from composerlite.checkpoint.record.naming import archive_template, directory_template
from composerlite.checkpoint.record.record import FileRecord, Manifest, seal, tail_room
from composerlite.devices import rng
from composerlite.errors import CheckpointExistsError, ConfigError, SaveError
from composerlite.storage import FileDigest, HostMemory, StagedFile, make_folder
from composerlite.storage.disk.files import fsync_folder
from composerlite.types import StateDict, with_items

_ALIGNMENT = 4096
"""Alignment of each file of an archive in the memory of a copy."""


# ── writers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class RankWriter(Protocol):
    """Writer of the part of this rank in a checkpoint.

    The calls: :meth:`write`, on rank 0 :meth:`commit`, and always :meth:`close`.

    Attributes:
        size_bytes: size of the memory for a copy; 0: training changes none of the bytes to write.
        storages: storages to copy before training changes them, each once, and the offset of each in the copy.
        seconds: time by activity of the threads that write, complete after :meth:`write`.
        not_finite: after :meth:`write`, name of a weight in the files of this rank with a NaN or infinite value.
    """

    size_bytes: int = 0
    storages: Sequence[StorageCopy] = ()
    seconds: Mapping[str, float] = MappingProxyType({})
    not_finite: str | None = None

    def write(self, manifest: Manifest, memory: HostMemory | None = None) -> Any:
        """Write the files of this rank, durably, and return facts about the files for rank 0.

        Args:
            manifest: the record so far. A checkpoint that is one file contains the record.
            memory: the copy of the storages; ``None``: the storages themselves are written.

        Raises:
            OSError: no space, no permission, and the like.
        """
        ...

    def commit(self, manifest: Manifest, parts: Sequence[Any]) -> Manifest:
        """Commit on rank 0, and return the record. ``parts``: the results of :meth:`write`, by rank."""
        ...

    def close(self, *, may_be_committed: bool) -> None:
        """Free all resources, and remove the files unless they are or may be committed. May be called twice."""
        ...


class _Written(NamedTuple):
    """Facts about the file of a rank.

    Attributes:
        name: of the file.
        temporary: path until the commit.
        digest: of the file.
        unpacked_bytes: size before compression: of the ``.pt`` file, or of an archive of several files.
    """

    name: str
    temporary: Path
    digest: FileDigest
    unpacked_bytes: int


@final
class FileWriter(RankWriter):
    """Writer of a file in the folder of ``catalog``: a whole checkpoint, or the archive of a rank.

    The file has a temporary name until the commit.

    Args:
        images: contents of the file: a single image, or the images of an archive by their names there.
        catalog: of the folder.
        name: of the file.
        overwrite: replace a checkpoint of the same name.
        record: the record of the checkpoint, without files. The suffix of ``record.template`` chooses the format.
            :meth:`write` adds the record to a checkpoint of one file, and to the archive of a rank other than 0.
            :meth:`commit` adds the record of all archives to the archive of rank 0.
        is_copy: the images are a copy already: training changes no tensor there.
    """

    def __init__(
        self,
        images: Mapping[str, TorchImage],
        catalog: Catalog,
        *,
        name: str,
        overwrite: bool,
        record: Manifest,
        is_copy: bool = False,
    ) -> None:
        self._format = format_of(record.template)
        self._images = dict(images)
        self._starts: dict[str, int] = {}
        self._data_bytes = 0
        self.storages = []
        for inner, image in self._images.items():
            start = self._starts[inner] = -(-self._data_bytes // _ALIGNMENT) * _ALIGNMENT
            self._data_bytes = start + image.size_bytes
            self.storages += [StorageCopy(storage, start + offset) for storage, offset in image.storages]
        self.size_bytes = 0 if is_copy else self._data_bytes
        self._room: int | None = None
        if record.form == "file" and not self._format.archive:
            (image,) = self._images.values()
            self._room = image.comment_bytes = tail_room(record, self._data_bytes)
        self._catalog = catalog
        self._path = catalog.folder / name
        self._name = name
        self._overwrite = overwrite
        self._data: StagedFile | None = None

    def write(self, manifest: Manifest, memory: HostMemory | None = None) -> _Written:
        """Write the file under a temporary name, durably, and return facts about the file."""
        if memory is not None:
            self.storages = []  # frees tensors that training has replaced
        images, is_archive = self._images.values(), self._format.archive
        sizes = [image.size_bytes + image.comment_bytes for image in images]
        size, file_copy = (tar_bytes(*sizes), None) if is_archive else (self._data_bytes, memory)
        unpacked = size if len(sizes) > 1 else sizes[0]
        with ExitStack() as stack:  # after an error: removes the file, and adds the path to the error
            make_folder(self._path.parent)
            self._data = stack.enter_context(StagedFile(self._path))
            path = self._data.temporary
            with self._format.open_sink(path, size, file_copy) as sink:
                self.seconds = sink.seconds
                for name, image in self._images.items():
                    if is_archive:
                        sink.write(tar_header(name, image.size_bytes, at=sink.size_bytes))
                    image.write(sink, memory, self._starts[name])
                if is_archive:
                    sink.write(bytes(size - sink.size_bytes))
                self.not_finite = next((image.not_finite for image in images if image.not_finite), None)
                timings, run = {**manifest.timings, **sink.seconds}, manifest.run
                if self.not_finite is not None and not run.not_finite:
                    run = dataclasses.replace(run, not_finite=(self.not_finite,))
                record = dataclasses.replace(manifest, run=run, timings=timings, unpacked_bytes=unpacked)
                decides_for_all = record.form == "archives" and self._name == record.name
                digest = sink.finish(None if decides_for_all else partial(seal, record, room=self._room))
            stack.pop_all()
        return _Written(self._name, path, digest, unpacked)

    def commit(self, manifest: Manifest, parts: Sequence[_Written | None]) -> Manifest:
        """Rename the files of all ranks, on rank 0; last the file of rank 0, which contains the record."""
        assert self._data is not None
        written = [part for part in parts if part is not None]
        records = [FileRecord(part.name, **dataclasses.asdict(part.digest)) for part in written]
        unpacked = max(part.unpacked_bytes for part in written)
        manifest = dataclasses.replace(manifest, files=tuple(records), unpacked_bytes=unpacked)
        if manifest.form == "archives":
            own, *others = records
            tail = self._format.frame(seal(dataclasses.replace(manifest, files=tuple(others)), own.digest))
            with self._data.temporary.open("ab") as file:
                file.write(tail)
                file.flush()
                os.fsync(file.fileno())
            own = FileRecord(self._name, **dataclasses.asdict(own.digest.with_tail(tail)))
            manifest = dataclasses.replace(manifest, files=(own, *others))
            # Several fixed names cannot be replaced at one instant: delete the existing checkpoint first.
            if self._overwrite and (old := self._catalog.manifest_of(self._name)) is not None:
                delete_checkpoint(self._catalog.place, old)
            for part in written[1:]:
                part.temporary.replace(self._catalog.folder / part.name)
            for folder in {(self._catalog.folder / part.name).parent for part in written[1:]}:
                fsync_folder(folder)  # durable before the archive of rank 0: that archive makes the checkpoint valid
        try:
            commit_file(self._data, overwrite=self._overwrite)
        except FileExistsError as e:
            raise CheckpointExistsError(
                f"checkpoint {str(self._path)!r} was saved by another process meanwhile."
            ) from e
        return manifest

    def close(self, *, may_be_committed: bool) -> None:
        """Remove the file unless the file is or may be committed. May be called twice."""
        if self._data is not None:
            self._data.stays |= may_be_committed
            self._data.__exit__(None, None, None)


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Request of a run to save a checkpoint.

    Attributes:
        state: of the run.
        weights_only: save only the model.
        ignore_keys: keys to leave out.
        catalog: of the folder.
        template: name of the checkpoint in this ``form``, with format variables.
        form: form of the checkpoint; ``None``: the form for ``state``.
        latest: name of the symbolic link to the checkpoint, with format variables.
        overwrite: replace a checkpoint of the same name.
        occasion: ``'regular'``; ``'ephemeral'``: deleted as soon as a newer checkpoint is committed; ``'crash'``: the
            state after an exception, which no run resumes from by itself.
        metrics: metric values for the record, by name. NaN and infinite values are left out.
        publish: called after the commit, before older checkpoints are deleted, perhaps on another thread; on rank 0,
            or on all ranks if nodes have disks of their own.
        also: other names under which the checkpoint is uploaded, each with the template of the name.
        retention: chooses the older checkpoints of the same template to delete; on rank 0.
        is_routine: log the save below INFO.
    """

    state: TrainingState
    weights_only: bool = False
    ignore_keys: IgnoreKeys = None
    catalog: Catalog
    template: str
    form: Form | None = None
    latest: str | None = None
    overwrite: bool = False
    occasion: str = "regular"
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    publish: Callable[[], object] | None = None
    also: Mapping[str, str] = field(default_factory=dict[str, str])
    retention: RetentionPolicy | None = None
    is_routine: bool = False

    def gathered(self, held: StateDict, generators: Any = None) -> StateDict:
        """Return the contents of the checkpoint: ``{'state': …, 'rng': …}``, or ``{'state': …}`` with the weights.

        The contents have live tensors: copy or write these before training continues.

        Args:
            held: the state of the run, or the weights, with live tensors.
            generators: states of the random generators: a list of all ranks; or a dict with this rank alone, by the
                number of the rank, for a directory. If given, the call is collective, and gathers the metrics and
                positions of all ranks. ``None``: the state of this rank's generators.
        """
        contents: StateDict = {"state": held}
        if not self.weights_only:
            if generators is not None:
                contents["state"] = _with_all_ranks(held)
            contents["rng"] = generators or [rng.of_training()]
        return contents if self.ignore_keys is None else without(contents, self.ignore_keys)

    def gathered_of_all_ranks(self, held: StateDict) -> StateDict:
        """Return the contents of the checkpoint with the random generators of all ranks. Collective."""
        if self.weights_only or dist.get_world_size() == 1:
            return self.gathered(held)
        return self.gathered(held, _of_all_ranks(rng.of_training()))


def _with_all_ranks(contents: StateDict) -> StateDict:
    """Return ``contents`` with the metric states of all ranks, and the positions in the data if the ranks differ.

    Collective. The list ``per_rank`` of the position in ``contents`` has only the entries of this rank; each entry
    names a share of the data. In a loop without a Trainer, the list ``ranks`` has the states of this rank.
    """
    dataset_state = contents.get("dataset_state") or {}
    position: Any = dataset_state.get("train")
    positions: list[StateDict] = position.get("per_rank", []) if isinstance(position, dict) else []
    train_metrics, eval_metrics = contents.get("train_metrics") or {}, contents.get("eval_metrics") or {}
    ranks: list[StateDict] = contents.get("ranks") or []
    if dist.get_world_size() == 1 or not (positions or train_metrics or eval_metrics or ranks):
        return contents
    every = _of_all_ranks((positions, train_metrics, eval_metrics, ranks))
    contents = dict(contents)
    if ranks:
        contents["ranks"] = [own for *_, of_rank in every for own in of_rank]
    if positions:
        by_share = {tuple(entry["share"]): entry for entries, *_ in every for entry in entries}
        in_order = [by_share[share] for share in sorted(by_share)]
        contents["dataset_state"] = {**dataset_state, "train": {**position, "per_rank": in_order}}
    if train_metrics or eval_metrics:
        contents["train_metrics"] = _with_ranks([train for _, train, _, _ in every])
        labels = every[0][2]
        contents["eval_metrics"] = {label: _with_ranks([evals[label] for _, _, evals, _ in every]) for label in labels}
    return contents


def _with_ranks(metrics: Sequence[StateDict]) -> StateDict:
    """Return the metric states of rank 0, each with the states of all ranks."""
    return {name: {**state, "per_rank": [one[name] for one in metrics]} for name, state in metrics[0].items()}


def _of_all_ranks(own: Any) -> list[Any]:
    """Gather ``own`` of every rank, with tensors on the CPU. Collective."""
    data = io.BytesIO()
    torch.save(own, data)  # tensors of some types cannot be pickled otherwise
    # Not the restricted unpickler: these bytes are from ranks of this run, and a loader may have any state.
    return [
        torch.load(io.BytesIO(of_rank), weights_only=False, map_location="cpu")
        for of_rank in dist.get_group().gather(data.getvalue())
    ]


# ── the forms of a checkpoint ────────────────────────────────────────────────────────────────────────────────────────
@final
class Form:
    """Form of a run's checkpoints.

    Args:
        state: state of the run.

    Attributes:
        kind: in records: ``'monolithic'``: a file of rank 0; ``'sharded'``: a directory of all ranks; ``'deepspeed'``:
            an archive of each rank.
        is_spread: the model is sharded over ranks.
        disks: after :meth:`find_disks`, which ranks see the same folder; ``None``: all see the same folder.
    """

    def __init__(self, state: TrainingState) -> None:
        self.kind = state.sharding if state.sharding in ("sharded", "deepspeed") else "monolithic"
        self.is_spread = state.sharding is not None
        self.disks: Disks | None = None

    def template(self, template: str, argument: str = "save_filename") -> str:
        """Convert the ``template`` of a file name to this form. ``argument``: name of the option, for errors."""
        if self.kind == "sharded":
            return directory_template(template, argument=argument)
        return archive_template(template, argument=argument) if self.kind == "deepspeed" else template

    def check(self, *, weights_only: bool, ignore_keys: IgnoreKeys) -> None:
        """Raise ConfigError if checkpoints of this form cannot be saved with these options."""
        globs = () if ignore_keys is None or callable(ignore_keys) else ignore_keys
        left_out = [glob for glob in globs if glob.startswith(("state/model", "state/optimizers"))]
        if self.kind == "deepspeed" and (weights_only or left_out):
            given = f"save_ignore_keys={left_out}"
            if weights_only:
                given = "weights_only=True (save_weights_only=True in the Trainer)"
            raise ConfigError(
                f"{given}: DeepSpeed saves weights and optimizer together. Save complete checkpoints, and write "
                "the weights of one to a file with composerlite.checkpoint.unshard_zero."
            )

    def find_disks(self, folder: Path) -> None:
        """Find out which ranks see the same ``folder``. Collective.

        Raises:
            ConfigError: nodes have disks of their own, and the form is ``'deepspeed'``.
        """
        self.disks = disks_of(folder) if self.kind != "monolithic" and dist.get_world_size() > 1 else None
        if self.disks is not None and self.kind == "deepspeed":
            raise ConfigError(
                f"the folder of checkpoints {str(folder)!r} is not the same on all nodes: rank 0 commits the files "
                "that the ranks of DeepSpeed write there. Choose a folder (with a URI: save_staging_folder) on a file "
                "system that all nodes mount."
            )

    def expected_bytes(self, contents: StateDict) -> int | None:
        """Estimate the memory for a copy of ``contents`` on this rank, in bytes; ``None``: unknown, or no copy."""
        if self.kind == "sharded":
            from composerlite.checkpoint.save.sharded_writer import expected_bytes  # slow to import

            return expected_bytes(contents)
        if self.is_spread or dist.get_global_rank() != 0:
            return None
        return _image(contents, "checkpoint").size_bytes

    def writer(
        self, request: SaveRequest, held: StateDict, record: Manifest, names: Sequence[str]
    ) -> RankWriter | None:
        """Return the writer of this rank; ``None``: the rank has no file. Collective.

        Args:
            request: what to save.
            held: the state of the run, or the weights.
            record: of the checkpoint, without files.
            names: names of the archives, by rank; for the other forms, the name of the file or directory comes first.
        """
        rank, catalog, overwrite = dist.get_global_rank(), request.catalog, request.overwrite
        if self.kind == "sharded":
            from composerlite.checkpoint.save.sharded_writer import ShardWriter  # slow to import

            own = {str(rank): rng.packed(rng.of_training())}
            return ShardWriter(
                lambda: request.gathered(held, own),
                ShardedDirectory(catalog.place, names[0]),
                overwrite=overwrite,
                disks=self.disks,
                of_run=True,
                watched=frozenset(_trained_storages(request.state)),
            )
        if self.kind == "monolithic":
            return _file_writer(request, held, record, names[0], gathers=self.is_spread)
        engine, name = request.state.deepspeed, names[rank]
        assert engine is not None, "the engine does not exist before the first save"
        images = {STATES: TorchImage(request.gathered_of_all_ranks(held))}
        weights = _trained_storages(request.state).values()
        for file, contents in engine.saved().items():
            watched = [(f"the weights in {file}", tensor) for tensor in weights]
            images[f"{DEEPSPEED}/{file}"] = TorchImage(contents, watched=watched)
        return FileWriter(images, catalog, name=name, overwrite=overwrite, record=record)


def _file_writer(
    request: SaveRequest, held: StateDict, record: Manifest, name: str, *, gathers: bool
) -> RankWriter | None:
    what = f"checkpoint {str(request.catalog.folder / name)!r}"
    contents = request.gathered_of_all_ranks(held)
    model: StateDict = contents.get("state", {}).get("model", {})
    trained, local = _trained_storages(request.state), {key: local_part(value) for key, value in model.items()}
    watched = [
        key for key, part in local.items() if _has_numbers(part) and storage_id(part.untyped_storage()) in trained
    ]
    if gathers:
        contents = _copy_on_first(contents, what)
    if dist.get_global_rank() != 0:
        return None
    weights: StateDict = contents.get("state", {}).get("model", {})
    image = _image(contents, what, [(f"model/{key}", weights[key]) for key in watched])
    return FileWriter(
        {STATES: image}, request.catalog, name=name, overwrite=request.overwrite, record=record, is_copy=gathers
    )


def _copy_on_first(contents: StateDict, what: str) -> StateDict:
    """Return a copy of ``contents`` on rank 0, with distributed tensors gathered on the CPU. Collective.

    The tensors are gathered one after the other, in the same order on all ranks.

    Raises:
        SaveError: a value cannot be copied.
    """
    whole: dict[int, Tensor] = {}

    def gathered(node: Any) -> Any:
        if not dist.is_distributed_tensor(node):
            return with_items(node, lambda _, value: gathered(value))
        tensor = node.full_tensor()
        if dist.get_global_rank() == 0:
            tensor = tensor.detach().to("cpu", copy=True)
            whole[id(tensor)] = tensor
            return tensor
        return None

    contents = gathered(contents)
    if dist.get_global_rank() != 0:
        return contents
    try:
        return copy.deepcopy(contents, {**whole})  # copies all tensors except the gathered tensors
    except (RuntimeError, TypeError, ValueError) as e:
        raise SaveError(f"{what}: its state cannot be copied: {e}") from e


def _trained_storages(state: TrainingState) -> dict[int, Tensor]:
    """Return the tensors that optimizers change, by storage; empty if the checkpoint is already marked not finite."""
    if state.not_finite:
        return {}
    groups = (group for optimizer in state.optimizers for group in optimizer.param_groups)
    parts = (local_part(parameter) for group in groups for parameter in group["params"])
    return {storage_id(part.untyped_storage()): part for part in parts if _has_numbers(part)}


def _has_numbers(value: Any) -> bool:
    """Return true if ``value`` is a plain strided tensor or parameter. Must be fast, since training waits."""
    return type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided


def _image(contents: StateDict, what: str, watched: Sequence[tuple[str, Tensor]] = ()) -> TorchImage:
    try:
        return TorchImage(contents, watched=watched)
    except (pickle.PickleError, AttributeError, TypeError, ValueError) as e:  # objects that cannot be pickled
        raise SaveError(f"{what}: its state cannot be written: {e}") from e
