"""ProgressiveResizing: start training with small images."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from composerlite.algorithms.batch.items import BatchItem, image_size
from composerlite.core import Algorithm, Event, Logger, State, Time, TimeUnit, span
from composerlite.errors import ConfigError, checked_arguments, did_you_mean

_MODES = ("crop", "resize")
_TRAINING = Time(1.0, TimeUnit.DURATION)


def resize_batch(
    input: Tensor,  # noqa: A002 - Composer's name
    target: Tensor,
    scale_factor: float,
    mode: str = "resize",
    resize_targets: bool = False,
) -> tuple[Tensor, Tensor]:
    """Make images smaller (progressive resizing of `Howard & Gugger 2020 <https://arxiv.org/abs/2002.04688>`_).

    Args:
        input: images of shape (N, C, H, W).
        target: shape (N, …); masks of shape (N, H', W') or (N, C', H', W') with ``resize_targets``.
        scale_factor: factor for height and width; 1 or more changes nothing.
        mode: ``'resize'`` takes the nearest pixels, ``'crop'`` a random part of the image.
        resize_targets: resize the targets, too.

    Returns:
        Images and targets.

    Raises:
        ConfigError: the mode is unknown, or the targets have no height and width.
        TrainingError: ``input`` has no height and width.
    """
    image_size(input, owner="ProgressiveResizing")
    if mode not in _MODES:
        raise ConfigError(f"mode={mode!r} is unknown.{did_you_mean(mode, _MODES)}")
    if resize_targets and target.ndim < 3:
        raise ConfigError(
            f"resize_targets=True: the targets, of shape {tuple(target.shape)}, have no height and width."
        )
    if scale_factor >= 1:
        return input, target
    if mode == "resize":
        return _shrunk(input, scale_factor), _shrunk(target, scale_factor) if resize_targets else target
    places = [float(torch.rand(())), float(torch.rand(()))]
    return _cropped(input, scale_factor, places), _cropped(target, scale_factor, places) if resize_targets else target


@final
class ProgressiveResizing(Algorithm):
    """Starts training with small images (`Howard & Gugger 2020 <https://arxiv.org/abs/2002.04688>`_, fastai).

    The size grows linearly after ``delay_fraction`` of training, up to the full size for the last
    ``finetune_fraction``. The model must accept images of any size. Logs ``progressive_resizing/height``,
    ``progressive_resizing/width`` and ``progressive_resizing/scale_factor``.

    Args:
        mode: ``'resize'`` takes the nearest pixels, ``'crop'`` a random part of the image.
        initial_scale: first height and width, as a fraction of the full size.
        finetune_fraction: fraction of training at the end with full images.
        delay_fraction: fraction of training at the start with images of the first size.
        size_increment: widths are multiples of this number of pixels.
        resize_targets: resize the targets (masks), too.
        input_key: the images in a batch: an index, a key, the name of an attribute, or a pair of functions
            ``get(batch)`` and ``set(batch, images)``; ``set`` returns the new batch.
        target_key: the targets in a batch, like ``input_key``.

    Raises:
        ConfigError: a value is out of range.
    """

    @checked_arguments
    def __init__(
        self,
        mode: str = "resize",
        initial_scale: float = 0.5,
        finetune_fraction: float = 0.2,
        delay_fraction: float = 0.5,
        size_increment: int = 4,
        resize_targets: bool = False,
        input_key: Any = 0,
        target_key: Any = 1,
    ) -> None:
        if mode not in _MODES:
            raise ConfigError(f"ProgressiveResizing(mode={mode!r}) is unknown.{did_you_mean(mode, _MODES)}")
        for name, value in (
            ("initial_scale", initial_scale),
            ("finetune_fraction", finetune_fraction),
            ("delay_fraction", delay_fraction),
        ):
            if not 0 <= value <= 1:
                raise ConfigError(f"ProgressiveResizing({name}={value}): expected a number from 0 to 1.")
        if delay_fraction + finetune_fraction > 1:
            raise ConfigError(
                f"ProgressiveResizing(delay_fraction={delay_fraction}, finetune_fraction={finetune_fraction}): "
                "expected a sum of at most 1."
            )
        if size_increment < 1:
            raise ConfigError(
                f"ProgressiveResizing(size_increment={size_increment}): expected a number of pixels, 1 or more."
            )
        self.mode = mode
        self.initial_scale = initial_scale
        self.finetune_fraction = finetune_fraction
        self.delay_fraction = delay_fraction
        self.size_increment = size_increment
        self.resize_targets = resize_targets
        self.input_key = input_key
        self.target_key = target_key
        self._input = BatchItem("input_key", input_key)
        self._target = BatchItem("target_key", target_key)

    def match(self, event: Event, state: State) -> bool:
        """Run at ``AFTER_DATALOADER``."""
        return event is Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Resize the images of the batch.

        Raises:
            TrainingError: the inputs are not images, or the targets not a tensor.
        """
        images = self._input.tensor(state, owner="ProgressiveResizing")
        targets = self._target.tensor(state, owner="ProgressiveResizing")
        scale = self.scale(span(_TRAINING, state).fraction)
        _, width = image_size(images, owner="ProgressiveResizing")
        whole = max(1, round(width * scale / self.size_increment)) * self.size_increment
        images, resized = resize_batch(images, targets, whole / width, self.mode, self.resize_targets)
        self._input.replace(state, images)
        if resized is not targets:
            self._target.replace(state, resized)
        height, width = images.shape[-2:]
        logger.log_metrics(
            {
                "progressive_resizing/height": height,
                "progressive_resizing/width": width,
                "progressive_resizing/scale_factor": scale,
            }
        )

    def scale(self, done: float) -> float:
        """Return the scale of height and width after the fraction ``done`` of training."""
        growing = 1 - self.finetune_fraction - self.delay_fraction
        if done < self.delay_fraction:
            return self.initial_scale
        grown = min((done - self.delay_fraction) / growing, 1.0) if growing > 0 else 1.0
        return self.initial_scale + (1 - self.initial_scale) * grown


def _shrunk(images: Tensor, scale: float) -> Tensor:
    """Resize images or masks to the nearest pixels."""
    size = [max(1, int(side * scale + 1e-6)) for side in images.shape[-2:]]  # 1e-6: 0.7 of 10 is 7
    flat = images if images.ndim == 4 else images.reshape(-1, 1, *images.shape[-2:])
    shrunk = F.interpolate(flat.float(), size=size, mode="nearest").to(images.dtype)
    return shrunk.reshape(*images.shape[:-2], *size)


def _cropped(images: Tensor, scale: float, places: list[float]) -> Tensor:
    """Crop images or masks. ``places`` gives the first row and column as fractions."""
    cuts: list[slice] = []
    for side, place in zip(images.shape[-2:], places, strict=True):
        length = max(1, int(side * scale + 1e-6))
        first = int(place * (side - length + 1))
        cuts.append(slice(first, first + length))
    return images[..., cuts[0], cuts[1]]
