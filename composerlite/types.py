"""Types that several layers share. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

__all__ = ["JSON", "Batch", "StateDict", "Stateful"]

JSON: TypeAlias = "str | int | float | bool | Sequence[JSON] | Mapping[str, JSON] | None"
"""What ``json.dumps`` takes."""

Batch: TypeAlias = Any
"""What a data loader yields and a model takes: opaque to the trainer."""

StateDict: TypeAlias = dict[str, Any]
"""Nested dicts of tensors and plain values, as modules and optimizers give them."""


@runtime_checkable
class Stateful(Protocol):
    """Anything whose progress can be saved: modules, optimizers, schedulers, stateful data loaders, callbacks."""

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state_dict: StateDict, /) -> object: ...
