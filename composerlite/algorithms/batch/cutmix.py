"""CutMix: train on images with a piece of another one in each."""

from __future__ import annotations

import math
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from composerlite.algorithms.batch.items import image_size
from composerlite.algorithms.batch.mixing import Mixing, draw_coefficient, draw_permutation
from composerlite.core import State
from composerlite.errors import ConfigError, TrainingError, checked_arguments

Box: TypeAlias = "tuple[int, int, int, int]"
"""First row, first column, last row and last column of a part of an image; the last ones are not in it."""


def draw_box(height: int, width: int, box_height: int, box_width: int, *, uniform: bool) -> Box:
    """Draw where a box of this size is, and cut off what of it is not in the image.

    Args:
        height, width: of the image. box_height, box_width: of the box.
        uniform: every pixel is as likely to be in the box; else the box's center is at every pixel as likely, and those
            near the middle of the image are in the box more often.
    """
    corners: list[tuple[int, int]] = []
    for size, box in ((height, box_height), (width, box_width)):
        low, high = (1 - box, size) if uniform else (-(box // 2), size - box // 2)
        first = int(torch.randint(low, max(high, low + 1), ()))
        corners.append((max(first, 0), min(first + box, size)))
    (top, bottom), (left, right) = corners
    return top, left, bottom, right


def cutmix_batch(
    input: Tensor,  # noqa: A002 - Composer's name
    target: Tensor,
    length: float | None = None,
    alpha: float = 1.0,
    bbox: Box | None = None,
    indices: Tensor | None = None,
    uniform_sampling: bool = False,
) -> tuple[Tensor, Tensor, float, Box]:
    """Put a piece of another image into each (`Yun et al. 2019 <https://arxiv.org/abs/1905.04899>`_).

    The piece is at the same place in all images of the batch.

    Args:
        input: images of shape (N, C, H, W).
        target: shape (N, …).
        length: height and width of the piece, as fractions of those of the image. By default the area that is left of
            the first image is drawn from Beta(alpha, alpha).
        alpha: of that distribution.
        bbox: the piece itself: its first row and column, and the row and the column behind its last ones.
        indices: number of the other image, of each; drawn by default.
        uniform_sampling: every pixel is as likely to be in the piece; else the center of the piece is drawn, as in the
            paper, and what is outside of the image cut off.

    Returns:
        The images, ``target[indices]``, the fraction of the area that is left of the first image, and the piece.

    Raises:
        ConfigError: both ``length`` and ``bbox``, or values that mean nothing.
        TrainingError: ``input`` has no height and width.
    """
    if bbox is not None and length is not None:
        raise ConfigError(f"length={length}, bbox={bbox}: give one of them.")
    if length is not None and not 0 <= length <= 1:
        raise ConfigError(f"length={length}: expected a number from 0 to 1.")
    height, width = image_size(input, who="CutMix")
    if indices is None:
        indices = draw_permutation(input)
    if bbox is None:
        side = math.sqrt(1 - draw_coefficient(alpha)) if length is None else length
        bbox = draw_box(height, width, int(height * side), int(width * side), uniform=uniform_sampling)
    top, left, bottom, right = bbox
    mixed = input.clone()
    mixed[..., top:bottom, left:right] = input[indices, ..., top:bottom, left:right]
    remaining = 1 - (bottom - top) * (right - left) / (height * width)
    return mixed, target[indices], remaining, bbox


@final
class CutMix(Mixing):
    """Trains on images with a piece of another one in each (`Yun et al. 2019 <https://arxiv.org/abs/1905.04899>`_).

    Every microbatch draws an area from Beta(alpha, alpha), a place and an order of its samples. Targets of classes are
    weighted by area; those that have the image's height and width, as masks have, get the piece of the other one. The
    model's loss must take probabilities or be interpolated. Metrics see the targets of the first images.

    Args:
        alpha: of the distribution of the area that is left of the first image; 1 is the uniform one, as in the paper.
        interpolate_loss: mix the losses against the targets of both rather than the targets. It is the same where the
            loss is linear in the targets, as cross entropy is.
        uniform_sampling: every pixel is as likely to be in the piece; else its center is drawn, as in the paper.
        input_key: where the images are in a batch: an index, a key, an attribute's name, or a pair of functions, of
            which the first gets a batch and the second a batch and new images and returns the new batch.
        target_key: where the targets are.

    Raises:
        ConfigError: ``alpha`` is negative.
    """

    @checked_arguments
    def __init__(
        self,
        alpha: float = 1.0,
        interpolate_loss: bool = False,
        uniform_sampling: bool = False,
        input_key: Any = 0,
        target_key: Any = 1,
    ) -> None:
        if not alpha >= 0:
            raise ConfigError(f"CutMix(alpha={alpha}): expected a number, 0 or more, such as 1.0.")
        super().__init__(interpolate_loss, input_key, target_key)
        self.alpha = alpha
        self.uniform_sampling = uniform_sampling
        self._box: Box = (0, 0, 0, 0)
        self._size: tuple[int, ...] = ()

    def mix_input(self, input: Tensor) -> tuple[Tensor, Tensor, float]:  # noqa: A002
        """Return the images, the numbers of the second ones and the part of the area that they have."""
        numbers = torch.arange(len(input), device=input.device)
        mixed, partners, remaining, self._box = cutmix_batch(
            input, numbers, alpha=self.alpha, uniform_sampling=self.uniform_sampling
        )
        self._size = tuple(input.shape[-2:])
        return mixed, partners, 1 - remaining

    def mix_target(self, state: State, target: Tensor) -> Tensor:
        """Return ``target`` weighted by area, or with the piece of the other image.

        Args:
            state: of the run.
            target: of the second batch.

        Returns:
            The mixed target.
        """
        if not self._is_map(target):
            return super().mix_target(state, target)
        top, left, bottom, right = self._box
        mixed = target.clone()
        mixed[..., top:bottom, left:right] = target[self._partners, ..., top:bottom, left:right]
        return mixed

    def check_interpolation(self, target: Tensor) -> None:
        """Refuse maps: each of their places has one target or the other.

        Raises:
            TrainingError: the targets are maps.
        """
        if self._is_map(target):
            raise TrainingError(
                f"CutMix(interpolate_loss=True): the targets, of shape {tuple(target.shape)}, have the height and "
                "width of the images, and get the piece of the other one: leave interpolate_loss out."
            )

    def _is_map(self, target: Tensor) -> bool:
        return target.ndim > 2 and tuple(target.shape[-2:]) == self._size
