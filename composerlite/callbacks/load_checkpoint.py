"""LoadCheckpoint: loads a checkpoint at an event of choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

from composerlite.checkpoint import IgnoreKeys, load_checkpoint
from composerlite.checkpoint.contents import check_ignore_keys
from composerlite.core import Callback, Event, Logger, State
from composerlite.errors import checked_arguments


@final
class LoadCheckpoint(Callback):
    """Loads a checkpoint when ``event`` happens first in the run: a run that is resumed has what it loaded already.

    For a model that is built from two checkpoints: a base through this callback, the rest through the trainer's
    ``load_path``, which loads later than ``BEFORE_LOAD``.

    Args:
        load_path: the checkpoint; ``{run_name}`` and the variables of ranks are filled in.
        load_weights_only: load the model alone.
        strict_model_weights: parameter names must agree exactly.
        ignore_keys: globs, or a function of the dict, of what is not loaded.
        event: when.

    Raises:
        CheckpointError: at the event, if the checkpoint is missing, damaged or does not fit.
    """

    @checked_arguments
    def __init__(
        self,
        load_path: str | Path,
        load_weights_only: bool = False,
        strict_model_weights: bool = True,
        ignore_keys: IgnoreKeys = None,
        event: Event | str = Event.BEFORE_LOAD,
    ) -> None:
        self.load_path = str(load_path)
        self.load_weights_only = load_weights_only
        self.strict_model_weights = strict_model_weights
        self.ignore_keys = check_ignore_keys(ignore_keys, argument="ignore_keys")
        self.event = Event(event)
        self._loaded: list[str] | None = None
        """The run, and what was loaded into it."""

    def state_dict(self) -> dict[str, Any]:
        return {"loaded": self._loaded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict.get("loaded")  # checkpoints of older versions do not tell

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Load if this is the event and nothing was loaded yet."""
        own = [state.run_name, self.load_path]
        if event is self.event and self._loaded != own:
            generators = load_checkpoint(
                self.load_path,
                state,
                load_weights_only=self.load_weights_only,
                strict_model_weights=self.strict_model_weights,
                ignore_keys=self.ignore_keys,
            )
            self._loaded = own
            if generators is not None:
                state.resumed.generators = generators
