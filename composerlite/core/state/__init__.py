"""Everything that training changes, and what checkpoints hold of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composerlite.on_demand import lazy_names

if TYPE_CHECKING:
    from composerlite.core.state.state import State

__all__ = ["State"]

__getattr__, __dir__ = lazy_names(__name__)
