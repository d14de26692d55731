"""Gathering what is spread over ranks for a checkpoint that is one file: one tensor at a time, so memory is bounded."""

from __future__ import annotations

from collections import deque
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composerlite._torch_compat import storage_id
from composerlite.types import StateDict, with_items

__all__ = ["Gathering"]


@final
class Gathering:
    """The distributed tensors in ``contents``, to be gathered one after the other, on every rank in the same order.

    Attributes:
        contents: the same with a tensor without contents in the place of each of them.
    """

    def __init__(self, contents: StateDict) -> None:
        self._waiting: deque[DTensor] = deque()
        self._places: set[int] = set()
        self.contents: StateDict = self._with_places(contents)

    def _with_places(self, node: Any) -> Any:
        if isinstance(node, DTensor):
            place = torch.empty(node.shape, dtype=node.dtype)  # takes no memory before it is touched
            self._waiting.append(node)
            self._places.add(storage_id(place.untyped_storage()))
            return place
        return with_items(node, lambda _, value: self._with_places(value))

    @property
    def count(self) -> int:
        """How many are left."""
        return len(self._waiting)

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``storage`` is that of a tensor without contents."""
        return storage_id(storage) in self._places

    def next(self) -> Tensor:
        """Gather the next one, together with all ranks, in the main thread; the whole of it in this machine's memory.

        Raises:
            RuntimeError: a rank is gone. Nothing is left to be gathered then.
        """
        try:
            return self._waiting.popleft().full_tensor().detach().cpu().contiguous()
        except BaseException:
            self._waiting.clear()
            raise

    def finish(self) -> None:
        """Gather what is left, for the other ranks: here it is not wanted."""
        while self._waiting:
            self.next()
