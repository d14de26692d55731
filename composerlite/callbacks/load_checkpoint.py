"""LoadCheckpoint: load a checkpoint at an event."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

from composerlite.checkpoint import IgnoreKeys, load_checkpoint
from composerlite.checkpoint.contents import check_ignore_keys
from composerlite.core import Callback, Event, Logger, State
from composerlite.errors import checked_arguments


@final
class LoadCheckpoint(Callback):
    """Loads a checkpoint at an event, once per run: a resumed run does not load the checkpoint again.

    For a model that is built from two checkpoints: a base with this callback, and the rest with the trainer's
    ``load_path``, which loads after ``BEFORE_LOAD``.

    Args:
        load_path: the checkpoint; ``{run_name}`` and the variables of ranks are filled in.
        load_weights_only: load the model only.
        strict_model_weights: the names of parameters must agree exactly.
        ignore_keys: globs of keys to ignore, or a function that changes the dict.
        event: the event.

    Raises:
        CheckpointError: at the event the checkpoint is missing, damaged or does not fit.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=LoadCheckpoint("base/ep1.pt", load_weights_only=True))
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
        self._loaded: list[str] | None = None  # name of the run and path of the checkpoint

    def state_dict(self) -> dict[str, Any]:
        return {"loaded": self._loaded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict.get("loaded")  # Composer saves nothing

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Load at the event, if this run has not loaded the checkpoint yet."""
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
