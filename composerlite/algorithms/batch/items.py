"""Read and replace an item of a batch, by ``input_key`` or ``target_key``."""

from __future__ import annotations

import copy
from typing import Any, final

from torch import Tensor

from composerlite.core import State
from composerlite.errors import TrainingError


@final
class BatchItem:
    """An item of ``state.batch``.

    Args:
        argument: name of the user's argument, for messages.
        key: an index, a key, the name of an attribute, or a pair of functions ``get(batch)`` and ``set(batch, item)``;
            ``set`` returns the new batch.
    """

    def __init__(self, argument: str, key: Any) -> None:
        self.argument = argument
        self.key = key
        self._get, self._set = key if _is_pair_of_functions(key) else (key, key)

    def read(self, state: State) -> Any:
        """Return the item."""
        return state.batch_get_item(self._get)

    def tensor(self, state: State, *, owner: str) -> Tensor:
        """Return the item.

        Raises:
            TrainingError: the item is not a tensor. The message names the ``owner``.
        """
        value = self.read(state)
        if not isinstance(value, Tensor):
            raise TrainingError(
                f"{owner}: batch[{self.key!r}] is a {type(value).__name__}, expected a tensor. Pass another "
                f"{self.argument}."
            )
        return value

    def replace(self, state: State, value: Tensor) -> None:
        """Replace ``state.batch`` by a copy with another item."""
        state.batch = copy.copy(state.batch)
        state.batch_set_item(self._set, value)


def image_size(images: Tensor, *, owner: str) -> tuple[int, int]:
    """Return height and width of ``images``, of shape (…, C, H, W) or (N, H, W).

    Raises:
        TrainingError: there are fewer than three dimensions. The message names the ``owner``.
    """
    if images.ndim < 3:
        raise TrainingError(
            f"{owner}: the inputs have the shape {tuple(images.shape)}, expected images (N, C, H, W). Select the "
            f"images with input_key, or remove {owner}."
        )
    return images.shape[-2], images.shape[-1]


def _is_pair_of_functions(key: Any) -> bool:
    return isinstance(key, tuple | list) and len(key) == 2 and all(callable(part) for part in key)
