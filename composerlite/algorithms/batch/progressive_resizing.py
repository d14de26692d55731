"""ProgressiveResizing: train on small images first."""

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
        scale_factor: of height and width; 1 and more leaves the images as they are.
        mode: ``'resize'`` takes the nearest pixels, ``'crop'`` a part of the image, at a place that is drawn.
        resize_targets: make the targets smaller in the same way.

    Returns:
        Images and targets.

    Raises:
        ConfigError: another mode, or targets without height and width.
        TrainingError: ``input`` has no height and width.
    """
    image_size(input, who="ProgressiveResizing")
    if mode not in _MODES:
        raise ConfigError(f"mode={mode!r} does not exist.{did_you_mean(mode, _MODES)}")
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
    """Trains on small images first (`Howard & Gugger 2020 <https://arxiv.org/abs/2002.04688>`_, fastai).

    The size grows linearly from ``delay_fraction`` of training on, and is the full one for the last
    ``finetune_fraction``. The model must take images of any size. Logged are ``progressive_resizing/height``,
    ``progressive_resizing/width`` and ``progressive_resizing/scale_factor``.

    Args:
        mode: ``'resize'`` takes the nearest pixels, ``'crop'`` a part of the image, at a place that is drawn.
        initial_scale: height and width at first, as fractions of the full ones.
        finetune_fraction: part of training, at its end, with images of full size.
        delay_fraction: part of training, at its start, with images of the first size.
        size_increment: widths are multiples of this number of pixels.
        resize_targets: make the targets smaller in the same way: masks, for example.
        input_key: where the images are in a batch: an index, a key, an attribute's name, or a pair of functions, of
            which the first gets a batch and the second a batch and new images and returns the new batch.
        target_key: where the targets are.

    Raises:
        ConfigError: values that mean nothing.
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
            raise ConfigError(f"ProgressiveResizing(mode={mode!r}) does not exist.{did_you_mean(mode, _MODES)}")
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
                "together they are more than the whole of training."
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
        """Make the images of the batch as small as they are to be now.

        Raises:
            TrainingError: the inputs are no images, or the targets no tensor.
        """
        images = self._input.tensor(state, who="ProgressiveResizing")
        targets = self._target.tensor(state, who="ProgressiveResizing")
        scale = self.scale(span(_TRAINING, state).fraction)
        _, width = image_size(images, who="ProgressiveResizing")
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
        """Scale of height and width when this fraction of training is ``done``."""
        growing = 1 - self.finetune_fraction - self.delay_fraction
        if done < self.delay_fraction:
            return self.initial_scale
        grown = min((done - self.delay_fraction) / growing, 1.0) if growing > 0 else 1.0
        return self.initial_scale + (1 - self.initial_scale) * grown


def _shrunk(images: Tensor, scale: float) -> Tensor:
    """Return images or masks of the nearest pixels."""
    size = [max(1, int(side * scale + 1e-6)) for side in images.shape[-2:]]  # 1e-6: 0.7 of 10 is 7
    flat = images if images.ndim == 4 else images.reshape(-1, 1, *images.shape[-2:])
    shrunk = F.interpolate(flat.float(), size=size, mode="nearest").to(images.dtype)
    return shrunk.reshape(*images.shape[:-2], *size)


def _cropped(images: Tensor, scale: float, places: list[float]) -> Tensor:
    """Return a part of images or masks, whose first row and column are given by ``places``, from 0 to 1."""
    cuts: list[slice] = []
    for side, place in zip(images.shape[-2:], places, strict=True):
        length = max(1, int(side * scale + 1e-6))
        first = int(place * (side - length + 1))
        cuts.append(slice(first, first + length))
    return images[..., cuts[0], cuts[1]]
