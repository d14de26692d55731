"""The file ``.metadata.json``, which makes the directory of a step a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import final

from composerlite.checkpoint.record.manifest import FileRecord
from composerlite.checkpoint.record.recorded import json_object, recorded
from composerlite.errors import CorruptCheckpointError

__all__ = ["CheckpointMetadata"]


def _version() -> str:
    from importlib.metadata import version  # not to list checkpoints

    return version("composerlite")


@final
@dataclass(frozen=True)
class CheckpointMetadata:
    """What ``.metadata.json`` says.

    Attributes:
        version: of composerlite, which saved it.
        ephemeral: it may be deleted as soon as there is a newer one.
        world_size: number of ranks that saved it; 0: another program has, and does not say.
        train: the files of the ranks, and what they must contain.
    """

    version: str = field(default_factory=_version)
    ephemeral: bool = False
    world_size: int = 0
    train: tuple[FileRecord, ...] = ()

    def to_json(self) -> bytes:
        """As it is written."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, source: str) -> CheckpointMetadata:
        """What was written, by this package or by OLMo-core.

        Raises:
            CorruptCheckpointError: it is nothing of that kind; names ``source``.
        """
        try:
            found = json_object(data)
            known = {name: found[name] for name in ("ephemeral", "world_size", "train") if name in found}
            return recorded(cls, {"version": str(found.get("version", "")), **known})
        except ValueError as e:
            raise CorruptCheckpointError(f"{source!r} is damaged, or does not describe a checkpoint: {e}") from e
