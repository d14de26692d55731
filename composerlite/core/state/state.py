"""State: everything that training changes, and how it is saved and restored."""

from __future__ import annotations

from collections.abc import Sequence

from composerlite.core.state import serialization
from composerlite.core.state.run_state import RunState
from composerlite.types import StateDict

__all__ = ["State"]


class State(RunState):
    """Everything that training changes. Algorithms, callbacks and loggers read and write it.

    It has the attributes of :class:`RunState` and adds how they are saved in checkpoints and restored.
    """

    def state_dict(self) -> StateDict:
        """Everything a full checkpoint holds of this state. Tensors are not copied."""
        return serialization.full_state(self)

    def weights_state_dict(self) -> StateDict:
        """What a weights-only checkpoint holds: model, integrations, metadata. Tensors are not copied."""
        return serialization.weights_state(self)

    def places_for(
        self,
        state_dict: StateDict,
        *,
        weights_only: bool = False,
        strict: bool = True,
        exclude_algorithms: Sequence[str] = (),
        source: str = "state",
    ) -> StateDict:
        """The tensors that ``state_dict`` is to be loaded into, after all that does not fit has been said.

        See :func:`composerlite.core.state.serialization.places_for`.
        """
        return serialization.places_for(
            self,
            state_dict,
            weights_only=weights_only,
            strict=strict,
            exclude_algorithms=exclude_algorithms,
            source=source,
        )

    def load_state_dict(
        self,
        state_dict: StateDict,
        *,
        strict: bool = True,
        exclude_algorithms: Sequence[str] = (),
        source: str = "state",
    ) -> None:
        """Restore what :meth:`state_dict` gave; see :func:`composerlite.core.state.serialization.load_full_state`."""
        serialization.load_full_state(
            self, state_dict, strict=strict, exclude_algorithms=exclude_algorithms, source=source
        )

    def load_model_state(
        self,
        state_dict: StateDict,
        *,
        strict: bool = True,
        exclude_algorithms: Sequence[str] = (),
        source: str = "state",
    ) -> None:
        """Restore the weights only; see :func:`composerlite.core.state.serialization.load_weights`."""
        serialization.load_weights(
            self, state_dict, strict=strict, exclude_algorithms=exclude_algorithms, source=source
        )
