"""What a model of another library keeps in checkpoints beside its weights."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from composerlite.types import StateDict

__all__ = ["Integrated"]


@runtime_checkable
class Integrated(Protocol):
    """A model that has something to keep: every ``ComposerModel`` is one, and most keep nothing."""

    def integrations(self) -> StateDict:
        """What goes into checkpoints, under the name of each library: plain values. Called at every save."""
        ...

    def integration_problems(self, saved: StateDict, *, source: str) -> list[str]:
        """Why the rest of a checkpoint with ``saved`` in it must not be loaded. What only differs is logged.

        Called before anything of the checkpoint is loaded.
        """
        ...
