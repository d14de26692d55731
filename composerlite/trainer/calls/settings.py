"""Settings of a run that are on its state or its model, where callbacks may change them: what the script gave, and
what holds.

A checkpoint has both: what the script gave is in ``state/metadata/settings/run``, what held in ``state/metadata``.
Where the script that resumes the run gives the same, what held then holds again; else what it gives now.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, final

from composerlite.core import Precision, State
from composerlite.core.state.model_state import frozen_parameters, set_frozen_parameters
from composerlite.trainer.differences import ChangedSetting
from composerlite.types import StateDict

__all__ = ["RunSettings"]

log = logging.getLogger(__name__)
_SIZE = "device_train_microbatch_size"
_FROZEN = "frozen"


@final
class RunSettings:
    """Settings as the script gives them: to the constructor, to ``fit``, or on the state between two calls.

    Args:
        state: of the run, as the constructor of the trainer has built it, before a checkpoint is loaded.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._left = _now(state)
        state.script.settings = {**state.script.settings, "run": self._left}

    def take(self, **arguments: object) -> None:
        """Record the settings that the script gave since the end of the last call of ``fit``.

        Args:
            arguments: those of the call by the names of the settings; ``None`` is none. They are on the state.
        """
        now, state = _now(self._state), self._state
        given = {
            name: value for name, value in now.items() if value != self._left[name] or arguments.get(name) is not None
        }
        state.script.settings = {**state.script.settings, "run": {**state.script.settings["run"], **given}}
        self._left = now

    def leave(self) -> None:
        """Record that the constructor or a call of ``fit`` ends: what is changed from here on is the script's."""
        self._left = _now(self._state)

    def resume(self) -> list[ChangedSetting]:
        """Restore the settings that held when ``fit`` was interrupted, where the script gives what it gave then.

        Returns:
            Where it gives something else: what held is lost.
        """
        state, metadata = self._state, self._state.resumed.metadata
        now: StateDict = state.script.settings["run"]
        before: Mapping[str, Any] = metadata.get("settings", {}).get("run", {})
        differences: list[ChangedSetting] = []
        for name, held in _held(metadata).items():
            if name not in before:  # an older checkpoint
                if name == _SIZE and held and state.auto_microbatching:
                    state.device_train_microbatch_size = held
            elif now[name] == before[name]:
                _restore(state, name, held)
            elif (changed := self._difference(name, before[name], held)) is not None:
                differences.append(changed)
        self._left = _now(state)
        return differences

    def _difference(self, name: str, given: object, held: object) -> ChangedSetting | None:
        now = getattr(self._state, name) if name == _SIZE else _now(self._state)[name]
        if held == now or name == "precision":  # which is compared whoever changed it
            return None
        if name == _FROZEN:
            way_out = "it holds from here on; to continue as before, freeze the same ones before the Trainer is built"
            return ChangedSetting("list of frozen parameters", held, now, way_out)
        what = name
        if name == "max_duration":
            if held == given:  # a later end is how a run is trained longer
                return None
            what = f"max_duration, which was given as {given!r} and changed during training,"
        return ChangedSetting(what, held, now, f"it holds from here on; to continue as before give {name}={given!r}")


def _now(state: State) -> StateDict:
    return {
        "max_duration": None if state.max_duration is None else str(state.max_duration),
        _SIZE: "auto" if state.auto_microbatching else state.device_train_microbatch_size,
        "precision": state.precision.value,
        "iteration_length": str(state.iteration_length),
        _FROZEN: frozen_parameters(state.model),
    }


def _restore(state: State, name: str, held: Any) -> None:
    if name == _FROZEN:
        if state.rank == 0 and set(held) != set(frozen_parameters(state.model)):
            log.info(
                "%d parameters of the model are frozen, as when the checkpoint was saved, and not as in the script; to "
                "train others, set requires_grad in a callback, or take the weights alone with load_weights_only=True",
                len(held),
            )
        set_frozen_parameters(state.model, held)
    else:
        setattr(state, name, Precision(held) if name == "precision" else held)


def _held(metadata: StateDict) -> StateDict:
    """Return the settings that held when the checkpoint was saved; before the run was stopped, if it was."""
    names = ("max_duration", _SIZE, "precision", "iteration_length", _FROZEN)
    held = {name: metadata[name] for name in names if name in metadata}
    return {**held, "max_duration": metadata["stopped"]} if "stopped" in metadata else held
