"""Algorithm: a change to training, applied at events of its choice."""

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

    Algorithms that change the structure of the model (surgery) must return true from :meth:`required_on_load`. A
    checkpoint of such a run fits only a model with the same change. So a load rebuilds the algorithm from the class
    name and :meth:`config`, and applies the algorithm before the weights are loaded. Import the module of your own
    class before the load, or add its package to :data:`composerlite.on_demand.ALGORITHM_PACKAGES`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ALGORITHMS[cls.__qualname__] = cls

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={_shown(value)}" for name, value in self._arguments().items())
        return f"{type(self).__name__}({given})"

    def _arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments that have attributes of the same name."""
        own = vars(self)
        return {name: own[name] for name in inspect.signature(type(self)).parameters if name in own}

    @abstractmethod
    def match(self, event: Event, state: State) -> bool:
        """Return true to have :meth:`apply` called at ``event``."""

    @abstractmethod
    def apply(self, event: Event, state: State, logger: Logger) -> int | None:
        """Change ``state``. The trace keeps the returned code."""

    def perturbed(self, state: State) -> AbstractContextManager[object] | None:
        """Return a context with other weights at which the gradients of this batch are computed; ``None`` for none.

        Called before each batch. The context is entered after a first backward pass at the original weights. Inside the
        context the batch is trained on again, with the same random numbers, and the optimizer uses these gradients.
        The context must restore the weights. Losses, metrics and buffers keep the values of the first pass.
        """
        return None

    @property
    def find_unused_parameters(self) -> bool:
        """Return true if parameters may get no gradient in a batch. DDP needs this setting."""
        return False

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints. Further algorithms with the same key get ``:1``, ``:2``, …"""
        return type(self).__qualname__

    @staticmethod
    def required_on_load() -> bool:
        """Return true if checkpoints of a run with this algorithm fit only a model changed by this algorithm."""
        return False

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments as plain data, to rebuild an algorithm that is required on load."""
        return {}

    def apply_before_load(self, state: State) -> None:
        """Change ``state.model`` to the structure of the checkpoint, before the weights are loaded."""
        self.apply(Event.INIT, state, Logger(state))

    def state_dict(self) -> dict[str, Any]:
        """Return the progress to save: tensors and plain values."""
        return {}

    def state_like(self, state: State) -> dict[str, Any]:
        """Return tensors whose distribution over ranks the loaded tensors with the same keys get.

        By default the current state. Tensors without a key here are loaded whole on each rank.
        """
        return self.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`."""


def _shown(value: Any) -> str:
    """Return ``value`` as source text; functions are shown as ``…``, since their text has an address."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shown, cast('Sequence[Any]', value)))})"
    if callable(value):
        return "…"
    return repr(value if value is None or isinstance(value, int | float) else str(value))
