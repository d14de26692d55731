"""CutOut: train on images with holes."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from composerlite.algorithms.batch.cutmix import draw_box
from composerlite.algorithms.batch.items import BatchItem, image_size
from composerlite.core import Algorithm, Event, Logger, State
from composerlite.errors import ConfigError, checked_arguments


def cutout_batch(
    input: Tensor,  # noqa: A002 - Composer's name
    num_holes: int = 1,
    length: float = 0.5,
    uniform_sampling: bool = False,
) -> Tensor:
    """Cut square holes into images (`DeVries & Taylor 2017 <https://arxiv.org/abs/1708.04552>`_).

    The places of the holes are the same in all images of a batch.

    Args:
        input: an image of shape (C, H, W) or images of shape (N, C, H, W).
        num_holes: number of holes.
        length: side of a hole, as a fraction of the shorter side of the image.
        uniform_sampling: every pixel has the same probability to be in a hole. Otherwise the center of a hole is drawn,
            as in the paper, and the hole is cropped to the image.

    Returns:
        A copy with zeros in the holes.

    Raises:
        ConfigError: a value is out of range.
        TrainingError: ``input`` has no height and width.
    """
    _check("cutout_batch", num_holes, length)
    height, width = image_size(input, owner="CutOut")
    side = int(min(height, width) * length)
    cut = input.clone()
    for _ in range(num_holes):
        top, left, bottom, right = draw_box(height, width, side, side, uniform=uniform_sampling)
        cut[..., top:bottom, left:right] = 0
    return cut


@final
class CutOut(Algorithm):
    """Trains on images with square holes (`DeVries & Taylor 2017 <https://arxiv.org/abs/1708.04552>`_).

    The places of the holes are drawn for each batch from the loader.

    Args:
        num_holes: number of holes in each image.
        length: side of a hole, as a fraction of the shorter side of the image.
        uniform_sampling: every pixel has the same probability to be in a hole. Otherwise the center of a hole is drawn,
            as in the paper.
        input_key: the images in a batch: an index, a key, the name of an attribute, or a pair of functions
            ``get(batch)`` and ``set(batch, images)``; ``set`` returns the new batch.

    Raises:
        ConfigError: a value is out of range.
    """

    @checked_arguments
    def __init__(
        self, num_holes: int = 1, length: float = 0.5, uniform_sampling: bool = False, input_key: Any = 0
    ) -> None:
        _check("CutOut", num_holes, length)
        self.num_holes = num_holes
        self.length = length
        self.uniform_sampling = uniform_sampling
        self.input_key = input_key
        self._input = BatchItem("input_key", input_key)

    def match(self, event: Event, state: State) -> bool:
        """Run at ``AFTER_DATALOADER``."""
        return event is Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Cut the holes.

        Raises:
            TrainingError: the inputs are not images.
        """
        images = self._input.tensor(state, owner="CutOut")
        self._input.replace(state, cutout_batch(images, self.num_holes, self.length, self.uniform_sampling))


def _check(owner: str, num_holes: int, length: float) -> None:
    if num_holes < 0:
        raise ConfigError(f"{owner}(num_holes={num_holes}): expected a number of holes, 0 or more.")
    if not 0 <= length <= 1:
        raise ConfigError(f"{owner}(length={length}): expected a number from 0 to 1, such as 0.5.")
