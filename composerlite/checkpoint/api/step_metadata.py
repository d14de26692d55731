"""Metadata of a step in ``.metadata.json``, and the training state of each rank in ``train/``."""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass, field
from typing import cast, final

from composerlite.checkpoint.contents import versions
from composerlite.checkpoint.format import INDEX, MARKER, MODEL, TRAIN
from composerlite.checkpoint.load.reader import safe_torch_load
from composerlite.checkpoint.place.directory import RANK_FILE, StepFolder
from composerlite.checkpoint.place.place import local_copy
from composerlite.checkpoint.record.manifest import Count, Manifest, json_object, recorded
from composerlite.dist import Group
from composerlite.errors import CheckpointNotFoundError, CorruptCheckpointError
from composerlite.types import StateDict

__all__ = ["CheckpointMetadata", "FoundStep", "find_step", "metadata_of", "read_train_state"]

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class CheckpointMetadata:
    """The contents of ``.metadata.json``.

    Attributes:
        version: of the composerlite that saved the checkpoint.
        ephemeral: the checkpoint may be deleted as soon as a newer one exists.
        world_size: number of ranks that saved the checkpoint; 0: unknown, as another program saved it.
    """

    version: str = field(default_factory=lambda: versions()["composerlite"])
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
            CorruptCheckpointError: ``data`` is no metadata of a checkpoint; names ``source``.
        """
        try:
            found = json_object(data)
            known = {name: found[name] for name in ("ephemeral", "world_size") if name in found}
            return recorded(cls, {"version": str(found.get("version", "")), **known})
        except ValueError as e:
            raise CorruptCheckpointError(f"{source!r} is damaged, or does not describe a checkpoint: {e}") from e


@final
@dataclass(frozen=True)
class FoundStep:
    """A checkpoint of a step, as rank 0 found it.

    Attributes:
        is_bare: the directory has a model and its optimizer alone.
        metadata: of the checkpoint.
        record: of the checkpoint; ``None``: another program wrote the checkpoint.
        rank_files: ranks with a file in ``train/``; empty if no train state is loaded.
    """

    is_bare: bool
    metadata: CheckpointMetadata
    record: Manifest | None = None
    rank_files: frozenset[int] = frozenset()


def find_step(folder: StepFolder, load_trainer_state: bool | None) -> FoundStep:
    """Find the checkpoint to load.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or ``load_trainer_state`` is true and there is no train state.
    """
    if folder.has(INDEX) and not folder.has(MARKER):  # the model and the optimizer alone
        if load_trainer_state:
            raise CheckpointNotFoundError(
                f"load_trainer_state=True: {folder.uri!r} holds a model and an optimizer alone, without "
                f"'{TRAIN}/rank0.pt'. load_trainer_state=None loads what there is."
            )
        return FoundStep(True, CheckpointMetadata())
    if not folder.is_checkpoint():
        missing = [name for name in (MARKER, f"{MODEL}/{INDEX}", f"{TRAIN}/rank0.pt") if not folder.has(name)]
        raise CheckpointNotFoundError(
            f"{folder.uri!r} is no checkpoint, or one whose save did not end: it has no {', '.join(missing)}."
        )
    metadata = metadata_of(folder)
    record = folder.record()
    if record is not None and record.form != "step":
        record = None  # of a model that was saved alone
    for file in () if record is None else record.files:
        if file.path == folder.at(MARKER):
            folder.place.verify(file)
    if load_trainer_state is False:
        return FoundStep(False, metadata, record)
    if record is None:
        return FoundStep(False, metadata, None, frozenset(folder.rank_files()))
    names = [file.path.rpartition("/")[2] for file in record.files]
    matches = [match for name in names if (match := RANK_FILE.fullmatch(name)) is not None]
    return FoundStep(False, metadata, record, frozenset(int(match[1]) for match in matches))


def metadata_of(folder: StepFolder) -> CheckpointMetadata:
    """Return the contents of ``.metadata.json``. Raises CorruptCheckpointError if the file is damaged."""
    return CheckpointMetadata.from_json(folder.place.read(folder.at(MARKER)), f"{folder.uri}/{MARKER}")


def read_train_state(folder: StepFolder, found: FoundStep, group: Group) -> StateDict:
    """Return the training state that this rank saved, or rank 0's if this rank saved none."""
    saved = found.metadata.world_size or len(found.rank_files)
    rank = group.rank if group.rank in found.rank_files else 0
    if group.is_first and group.size != saved:
        what = f"ranks from {saved} on take the train state of rank 0"
        if group.size < saved:
            what = f"the train state of ranks from {group.size} on is not used"
        log.warning(
            "checkpoint %s was saved by %d ranks and is loaded by %d: %s. What is of each rank, such as random "
            "numbers, does not continue as it would have.",
            folder.uri,
            saved,
            group.size,
            what,
        )
    name = f"{TRAIN}/rank{rank}.pt"
    record = (
        None if found.record is None else next((f for f in found.record.files if f.path.endswith(f"/{name}")), None)
    )
    if record is None and found.record is not None:
        raise CorruptCheckpointError(f"checkpoint {folder.uri!r}: its record does not have the file {name!r}.")
    with local_copy(folder.place, folder.at(name), None if record is None else record.digest) as path:
        return cast("StateDict", safe_torch_load(path))
