"""CutMix: train on images with a piece of another image."""

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
"""Part of an image: first row, first column, end row (exclusive), end column (exclusive)."""


def draw_box(height: int, width: int, box_height: int, box_width: int, *, uniform: bool) -> Box:
    """Draw the place of a box, and crop the box to the image.

    Args:
        height, width: size of the image. box_height, box_width: size of the box.
        uniform: every pixel has the same probability to be in the box. Otherwise every pixel has the same probability
            to be the center.
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
        length: height and width of the piece, as a fraction of the image. By default the remaining area of the first
            image is drawn from Beta(alpha, alpha).
        alpha: parameter of the distribution.
        bbox: the piece: first row, first column, end row and end column (exclusive).
        indices: index of the other image, for each image; drawn by default.
        uniform_sampling: every pixel has the same probability to be in the piece. Otherwise the center of the piece is
            drawn, as in the paper, and the piece is cropped to the image.

    Returns:
        The images, ``target[indices]``, the remaining area of the first image as a fraction, and the piece.

    Raises:
        ConfigError: both ``length`` and ``bbox`` are given, or a value is out of range.
        TrainingError: ``input`` has no height and width.
    """
    if bbox is not None and length is not None:
        raise ConfigError(f"length={length}, bbox={bbox}: pass one of them.")
    if length is not None and not 0 <= length <= 1:
        raise ConfigError(f"length={length}: expected a number from 0 to 1.")
    height, width = image_size(input, owner="CutMix")
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
    """Trains on images with a piece of another image (`Yun et al. 2019 <https://arxiv.org/abs/1905.04899>`_).

    For each microbatch, an area from Beta(alpha, alpha), a place and a permutation are drawn. Class targets are
    weighted by area; targets with the height and width of the image (masks) get the piece of the other target. The loss
    must accept probabilities, or ``interpolate_loss`` must be true. Metrics see the targets of the first images.

    Args:
        alpha: parameter of the distribution of the remaining area of the first image; 1 is uniform, as in the paper.
        interpolate_loss: mix the losses of both targets instead of the targets. The result is the same for losses
            linear in the targets, such as cross entropy.
        uniform_sampling: every pixel has the same probability to be in the piece. Otherwise the center of the piece is
            drawn, as in the paper.
        input_key: the images in a batch: an index, a key, the name of an attribute, or a pair of functions
            ``get(batch)`` and ``set(batch, images)``; ``set`` returns the new batch.
        target_key: the targets in a batch, like ``input_key``.

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
        """Return the mixed images, the indices of the second images and their share of the area."""
        numbers = torch.arange(len(input), device=input.device)
        mixed, partners, remaining, self._box = cutmix_batch(
            input, numbers, alpha=self.alpha, uniform_sampling=self.uniform_sampling
        )
        self._size = tuple(input.shape[-2:])
        return mixed, partners, 1 - remaining

    def mix_target(self, state: State, target: Tensor) -> Tensor:
        """Return ``target`` weighted by area, or with the piece of the other image.

        Args:
            state: training state with the outputs of the model.
            target: targets of a batch: classes (N,), or maps (N, …, H, W).

        Returns:
            Targets of the mixed batch.
        """
        if not self._is_map(target):
            return super().mix_target(state, target)
        top, left, bottom, right = self._box
        mixed = target.clone()
        mixed[..., top:bottom, left:right] = target[self._partners, ..., top:bottom, left:right]
        return mixed

    def check_interpolation(self, target: Tensor) -> None:
        """Check that the targets are classes.

        Raises:
            TrainingError: the targets are maps.
        """
        if self._is_map(target):
            raise TrainingError(
                f"CutMix(interpolate_loss=True): the targets, of shape {tuple(target.shape)}, are maps of the images. "
                "Remove interpolate_loss: maps are mixed by area."
            )

    def _is_map(self, target: Tensor) -> bool:
        return target.ndim > 2 and tuple(target.shape[-2:]) == self._size
