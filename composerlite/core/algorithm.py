"""Algorithm: a change to how a model trains, applied at events it chooses."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from composerlite.core.callback import Logger
from composerlite.core.event import Event
from composerlite.core.state.state import State
from composerlite.on_demand import ALGORITHMS

__all__ = ["Algorithm"]


class Algorithm(ABC):
    """A change to training. At each event the engine asks :meth:`match` and, if true, calls :meth:`apply`.

    Algorithms that change the structure of the model (surgery) return true from :meth:`required_on_load`: a checkpoint
    of such a run fits only a model that was changed the same way, so the algorithm is rebuilt from its class name and
    :meth:`config` and applied before the weights are loaded. A class of your own must have been imported for that, or
    its package be named in :data:`composerlite.on_demand.ALGORITHM_PACKAGES`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ALGORITHMS[cls.__qualname__] = cls

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={_shown(value)}" for name, value in self._arguments().items())
        return f"{type(self).__name__}({given})"

    def _arguments(self) -> dict[str, Any]:
        """The constructor's arguments, as far as there are attributes of the same names."""
        own = vars(self)
        return {name: own[name] for name in inspect.signature(type(self)).parameters if name in own}

    @abstractmethod
    def match(self, event: Event, state: State) -> bool:
        """Return true if :meth:`apply` is to be called at ``event``."""

    @abstractmethod
    def apply(self, event: Event, state: State, logger: Logger) -> int | None:
        """Change ``state``. The returned code, if any, is kept in the trace."""

    def perturbed(self, state: State) -> AbstractContextManager[object] | None:
        """A context in which the weights are where the gradients of this batch are to be computed, if not where they
        are.

        Asked before each batch, and entered when the gradients at the weights themselves are there. Within it the batch
        is trained on once more, with the same random numbers: the optimizer steps with those gradients. After the
        context the weights are what they were, and so are losses, metrics and buffers.
        """
        return None

    @property
    def find_unused_parameters(self) -> bool:
        """Return true if parameters that require gradients may get none in a batch, which ranks need to know."""
        return False

    @property
    def state_key(self) -> str:
        """The name under which the state is saved. Further algorithms of the same name get ``:1``, ``:2``, …"""
        return type(self).__qualname__

    @staticmethod
    def required_on_load() -> bool:
        """Return true if a checkpoint of a run with this algorithm fits only a model that it was applied to."""
        return False

    def config(self) -> dict[str, Any]:
        """The constructor's arguments as plain data, for an algorithm that is required on load."""
        return {}

    def apply_before_load(self, state: State) -> None:
        """Change ``state.model`` to what the weights that are about to be loaded fit. Called after :meth:`config`."""
        self.apply(Event.INIT, state, Logger(state))

    def state_dict(self) -> dict[str, Any]:
        """Progress to save: tensors and plain values."""
        return {}

    def state_like(self, state: State) -> dict[str, Any]:
        """Tensors that are distributed over ranks as those of a state to be loaded are to be, under the same keys.

        By default those of the state that the algorithm has now. What is not among them is loaded whole on each rank.
        """
        return self.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""


def _shown(value: Any) -> str:
    """``value`` as the user would write it; of a function, which has an address, nothing."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shown, cast('Sequence[Any]', value)))})"
    if callable(value):
        return "…"
    return repr(value if value is None or isinstance(value, int | float) else str(value))
