"""One item of a batch, as the arguments ``input_key`` and ``target_key`` name it."""

from __future__ import annotations

import copy
from typing import Any, final

from torch import Tensor

from composerlite.core import State
from composerlite.errors import TrainingError


@final
class BatchItem:
    """An item of ``state.batch``, to read and to replace.

    Args:
        argument: what the user gives the key as, for messages.
        key: an index, a key, an attribute's name, or a pair of functions, of which the first gets a batch and the
            second a batch and a new item and returns the new batch.
    """

    def __init__(self, argument: str, key: Any) -> None:
        self.argument = argument
        self.key = key
        self._get, self._set = key if _is_pair_of_functions(key) else (key, key)

    def read(self, state: State) -> Any:
        """Return the item."""
        return state.batch_get_item(self._get)

    def tensor(self, state: State, *, who: str) -> Tensor:
        """Return the item, which is a tensor.

        Raises:
            TrainingError: it is no tensor; ``who`` needs one.
        """
        value = self.read(state)
        if not isinstance(value, Tensor):
            raise TrainingError(
                f"{who} needs batch[{self.key!r}] to be a tensor, and it is a {type(value).__name__}: pass another "
                f"{self.argument}?"
            )
        return value

    def replace(self, state: State, value: Tensor) -> None:
        """Give ``state`` a batch with another item. The batch that it has, which others may hold, stays as it is."""
        state.batch = copy.copy(state.batch)
        state.batch_set_item(self._set, value)


def image_size(images: Tensor, *, who: str) -> tuple[int, int]:
    """Return height and width of ``images``, of shape (…, C, H, W) or (N, H, W).

    Raises:
        TrainingError: they have fewer than three dimensions; ``who`` needs images.
    """
    if images.ndim < 3:
        raise TrainingError(
            f"{who}: the inputs have the shape {tuple(images.shape)}: expected images, (N, C, H, W). Leave {who} out "
            "for other inputs, or name the images with input_key."
        )
    return images.shape[-2], images.shape[-1]


def _is_pair_of_functions(key: Any) -> bool:
    return isinstance(key, tuple | list) and len(key) == 2 and all(callable(part) for part in key)
