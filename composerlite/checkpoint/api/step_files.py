"""Files of a step: a checkpoint directory with the model, the optimizer, and the training state of each rank.

The file ``.metadata.json`` has the metadata. :class:`StepWriter` writes the files of a rank.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import xxhash

from composerlite._version import VERSION
from composerlite.checkpoint.format import INDEX, MARKER, MODEL, TRAIN
from composerlite.checkpoint.format.torch_file import StorageCopy, TorchImage
from composerlite.checkpoint.load.reader import safe_torch_load
from composerlite.checkpoint.place.directory import RANK_FILE, StepFolder
from composerlite.checkpoint.place.place import NewFile, local_copy
from composerlite.checkpoint.record.record import Count, FileRecord, Manifest, json_object, recorded
from composerlite.checkpoint.save.form import RankWriter
from composerlite.checkpoint.save.sharded_writer import ShardWriter
from composerlite.dist import Group
from composerlite.errors import CheckpointNotFoundError, CorruptCheckpointError, ObjectStoreError
from composerlite.storage import FileDigest, HostMemory, chunk_bytes_for
from composerlite.types import StateDict

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class CheckpointMetadata:
    """The contents of ``.metadata.json``.

    Attributes:
        version: version of composerlite that saved the checkpoint.
        ephemeral: the checkpoint may be deleted once a newer checkpoint exists.
        world_size: number of ranks that saved the checkpoint; 0: unknown, since another program saved the checkpoint.
    """

    version: str = VERSION
    ephemeral: bool = False
    world_size: Count = 0

    def to_json(self) -> bytes:
        """Return the contents of the file."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, source: str) -> CheckpointMetadata:
        """Parse ``.metadata.json`` as written by this package or by OLMo-core.

        Args:
            data: content of the file.
            source: path or URI of the file, for errors.

        Returns:
            The metadata.

        Raises:
            CorruptCheckpointError: ``data`` is no metadata of a checkpoint. The message names ``source``.
        """
        try:
            return recorded(cls, {"version": "", **json_object(data)})
        except ValueError as e:
            raise CorruptCheckpointError(f"{source!r} is damaged or does not describe a checkpoint: {e}") from e


def find_step(folder: StepFolder, load_trainer_state: bool | None) -> Mapping[int, FileDigest | None] | None:
    """Check that ``folder`` holds a checkpoint to load, and return the digests of the train states.

    Returns:
        Digests of the files in ``train/``, by rank; empty if ``load_trainer_state`` is false. A digest is ``None`` if
        another program wrote the file. ``None``: the directory has a model and an optimizer alone.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or ``load_trainer_state`` is true and there is no train state.
        CorruptCheckpointError: ``.metadata.json`` is damaged.
    """
    if folder.has(INDEX) and not folder.has(MARKER):  # the model and the optimizer alone
        if load_trainer_state:
            raise CheckpointNotFoundError(
                f"load_trainer_state=True: {folder.uri!r} holds only a model and an optimizer, without "
                f"'{TRAIN}/rank0.pt'. load_trainer_state=None loads a train state only if the checkpoint has one."
            )
        return None
    if missing := [name for name in (MARKER, f"{MODEL}/{INDEX}", f"{TRAIN}/rank0.pt") if not folder.has(name)]:
        raise CheckpointNotFoundError(f"{folder.uri!r} is not a complete checkpoint: it has no {', '.join(missing)}.")
    metadata_of(folder)  # raises if the file is damaged
    record = folder.record()
    if record is None or record.form != "step":  # a step of another program, or the record of a model alone
        files: Mapping[int, FileDigest | None] = dict.fromkeys(folder.rank_files())
    else:
        by_name = {file.path.rpartition("/")[2]: file for file in record.files}
        if MARKER in by_name:
            folder.place.verify(by_name[MARKER])
        files = {int(found[1]): by_name[name].digest for name in by_name if (found := RANK_FILE.fullmatch(name))}
    return {} if load_trainer_state is False else files


def metadata_of(folder: StepFolder) -> CheckpointMetadata:
    """Return the contents of ``.metadata.json``. Raises CorruptCheckpointError if the file is damaged."""
    return CheckpointMetadata.from_json(folder.place.read(folder.at(MARKER)), f"{folder.uri}/{MARKER}")


def read_train_state(folder: StepFolder, files: Mapping[int, FileDigest | None], group: Group) -> StateDict:
    """Return the training state saved by this rank; the state of rank 0 if this rank saved no state.

    Args:
        folder: of the step.
        files: result of :func:`find_step`.
        group: the ranks of the load.
    """
    if group.is_first and group.size != len(files):
        log.warning(
            "checkpoint %s was saved by %d ranks and is loaded by %d: a new rank takes the train state of rank 0, "
            "and the train states of missing ranks are not used. State of each rank, such as random numbers, does "
            "not continue exactly.",
            folder.uri,
            len(files),
            group.size,
        )
    rank = group.rank if group.rank in files else 0
    name = f"{TRAIN}/rank{rank}.pt"
    if rank not in files:
        raise CorruptCheckpointError(f"checkpoint {folder.uri!r}: its record does not have the file {name!r}.")
    with local_copy(folder.place, folder.at(name), files[rank]) as path:
        return cast("StateDict", safe_torch_load(path))


@final
class StepWriter(RankWriter):
    """Writer of this rank's files of a step: the file in ``train/``, and shards of the model and the optimizer.

    Args:
        folder: of the step.
        shards: writer of the model and the optimizer.
        train: train state of this rank.
        rank: this rank.
    """

    def __init__(self, folder: StepFolder, shards: ShardWriter, train: TorchImage, rank: int) -> None:
        self._start = shards.size_bytes  # aligned for any type
        self.size_bytes = self._start + train.size_bytes
        self._folder = folder
        self._shards = shards
        self._train = train
        self._path = folder.at(f"{TRAIN}/rank{rank}.pt")
        copies = (StorageCopy(storage, self._start + offset) for storage, offset in train.storages)
        self.storages = [*shards.storages, *copies]

    def write(self, manifest: Manifest, memory: HostMemory | None = None) -> tuple[FileRecord, Any]:
        """Write train state and shards, durably. Return for rank 0 the train file's record, and facts on the shards."""
        if memory is not None:
            self.storages = []  # frees tensors that training has replaced
        size = self._train.size_bytes
        fill = functools.partial(self._train.write, memory=memory, start=self._start)
        digest = self._folder.place.write(NewFile(self._path, size, fill, chunk_bytes_for(size)))
        return FileRecord(self._path, **dataclasses.asdict(digest)), self._shards.write(manifest, memory)

    def commit(self, manifest: Manifest, parts: Sequence[tuple[FileRecord, Any]]) -> Manifest:
        """Commit the directory of the model, then the step."""
        path = self._folder.at(MARKER)
        marker = CheckpointMetadata(ephemeral=manifest.ephemeral, world_size=manifest.run.world_size).to_json()
        marker_record = FileRecord(path, len(marker), xxhash.xxh3_128_hexdigest(marker))
        record = dataclasses.replace(manifest, files=(*(record for record, _ in parts), marker_record))
        committed = self._shards.commit(record, [results for _, results in parts])
        self._folder.place.put(path, marker)
        return committed

    def close(self, *, may_be_committed: bool) -> None:
        """Remove the files written so far, unless the step is or may be committed."""
        self._shards.close(may_be_committed=may_be_committed)
        if not may_be_committed:
            try:
                if not self._folder.has(MARKER):  # the commit may have succeeded in spite of an error
                    self._folder.place.delete([self._path], folders=True)
            except (OSError, ObjectStoreError) as e:  # the error of the save is raised instead
                log.warning("%s: could not remove the files of a failed save: %s", self._folder.uri, e)
        self._folder.close()
