"""Settings of the script, and the parts of a loaded checkpoint that are needed after the load."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch.optim.lr_scheduler import LRScheduler

from composerlite.errors import CheckpointError, IncompatibleCheckpointError
from composerlite.types import StateDict

__all__ = ["LoadedSchedulers", "Resumed", "Script", "restoring"]


@contextlib.contextmanager
def restoring(part: str, *, source: str) -> Generator[None]:
    """Name the saved ``part`` and the checkpoint in errors of the block.

    Args:
        part: key below ``state`` in the checkpoint.
        source: path or URI of the checkpoint.

    Raises:
        IncompatibleCheckpointError: the block raised, except for errors of checkpoints and of the operating system.
    """
    try:
        yield
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as e:
        raise IncompatibleCheckpointError(
            f"{source}: cannot restore {part!r}: {type(e).__name__}: {e} The checkpoint is damaged or from another "
            f"version. Skip this part with load_ignore_keys=['state/{part}']."
        ) from e


@final
@dataclass(slots=True)
class LoadedSchedulers:
    """State of the schedulers in a checkpoint. Kept until the call of ``fit`` that passes the schedulers.

    Attributes:
        saved: states by class name.
        source: path or URI of the checkpoint.
        restored: schedulers with a restored state.
    """

    saved: StateDict
    source: str
    restored: list[LRScheduler] = field(default_factory=list[LRScheduler])

    def restore(self, own: Mapping[str, LRScheduler]) -> list[LRScheduler]:
        """Restore and return the schedulers in ``own`` that have a saved state and are not restored yet."""
        new = {
            name: scheduler
            for name, scheduler in own.items()
            if name in self.saved and not any(scheduler is other for other in self.restored)
        }
        for name, scheduler in new.items():
            with restoring(f"schedulers/{name}", source=self.source):
                scheduler.load_state_dict(self.saved[name])
        self.restored += new.values()
        return list(new.values())

    def unmatched(self, own: Mapping[str, LRScheduler]) -> list[str]:
        """Describe the schedulers in ``own`` without a saved state, and the saved states without a scheduler."""
        fresh = [name for name in own if name not in self.saved]
        left = [name for name, saved in self.saved.items() if name not in own and saved]
        return [
            *(f"the checkpoint has no state of {name!r} in schedulers: {name} starts fresh" for name in fresh),
            *(f"the checkpoint has a state of {name!r} in schedulers, and the run has no {name}" for name in left),
        ]


@final
@dataclass
class Resumed:
    """Parts of the loaded checkpoint that are needed after the load.

    Attributes:
        metadata: ``metadata`` of the checkpoint; empty if the run does not continue a checkpoint.
        schedulers: states of schedulers, until the next call of ``fit``; else ``None``.
        generators: states of the random generators by rank, for the start of the next ``fit``; ``None``: keep the
            current states.
    """

    metadata: StateDict = field(default_factory=dict[str, Any])
    schedulers: LoadedSchedulers | None = None
    generators: list[dict[str, Any]] | None = None


@final
@dataclass
class Script:
    """Settings of the script that a resume needs.

    Attributes:
        names_run: the script gave ``run_name``. A generated name does not identify the run of a checkpoint.
        schedulers_in_fit: a call of ``fit`` may replace the schedulers that exist during the load.
        learning_rates: learning rates of the optimizer's groups at construction.
        settings: plain values, saved in checkpoints and compared on resume.
    """

    names_run: bool = True
    schedulers_in_fit: bool = False
    learning_rates: tuple[float, ...] = ()
    settings: StateDict = field(default_factory=dict[str, Any])
