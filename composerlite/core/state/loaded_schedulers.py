"""State of schedulers between the load of a checkpoint and the call of ``fit`` that brings the schedulers."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import final

from torch.optim.lr_scheduler import LRScheduler

from composerlite.errors import CheckpointError, IncompatibleCheckpointError
from composerlite.types import StateDict

__all__ = ["LoadedSchedulers", "restoring"]


@contextlib.contextmanager
def restoring(part: str, *, source: str) -> Generator[None]:
    """Within it, an error that the saved ``part`` leads to names the part and the checkpoint.

    Raises:
        IncompatibleCheckpointError: in place of what another error than of a checkpoint or the system says.
    """
    try:
        yield
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as e:
        raise IncompatibleCheckpointError(
            f"{source}: its {part!r} cannot be restored: {type(e).__name__}: {e} It is damaged or of another "
            f"version; load_ignore_keys=['state/{part}'] leaves it out."
        ) from e


@final
@dataclass(slots=True)
class LoadedSchedulers:
    """State of the schedulers in a checkpoint.

    Attributes:
        saved: by class name.
        source: the checkpoint, for messages.
        restored: the schedulers that have taken theirs.
    """

    saved: StateDict
    source: str
    restored: list[LRScheduler] = field(default_factory=list[LRScheduler])

    def restore(self, own: Mapping[str, LRScheduler]) -> list[LRScheduler]:
        """Restore those of the run's ``own`` that have a saved state and have not taken it yet; return these."""
        taking = {
            name: scheduler
            for name, scheduler in own.items()
            if name in self.saved and not any(scheduler is one for one in self.restored)
        }
        for name, scheduler in taking.items():
            with restoring(f"schedulers/{name}", source=self.source):
                scheduler.load_state_dict(self.saved[name])
        self.restored += taking.values()
        return list(taking.values())

    def unmatched(self, own: Mapping[str, LRScheduler]) -> list[str]:
        """Say which of the run's ``own`` have no saved state, and which states no scheduler."""
        fresh = [name for name in own if name not in self.saved]
        left = [name for name, saved in self.saved.items() if name not in own and saved]
        return [
            *(f"it holds no state of {name!r} in schedulers, which starts fresh" for name in fresh),
            *(f"it holds state of {name!r} in schedulers, which this run has not" for name in left),
        ]
