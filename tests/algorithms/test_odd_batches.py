"""Batches that an algorithm cannot use: an error that names the shape, whatever the algorithm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from short_run import ShortRun
from torch import Tensor

from composerlite.algorithms import (
    CutMix,
    CutOut,
    LabelSmoothing,
    MixUp,
    ProgressiveResizing,
    cutmix_batch,
    cutout_batch,
    resize_batch,
    smooth_labels,
)
from composerlite.core import Algorithm, Event
from composerlite.errors import TrainingError

TABLE = torch.randn(8, 6)
CLASSES = torch.arange(8) % 3
MODES = ("resize", "crop")


@pytest.mark.parametrize(
    "algorithm", [CutMix(), CutOut(), *(ProgressiveResizing(mode) for mode in MODES)], ids=lambda a: type(a).__name__
)
def test_inputs_that_are_no_images_are_refused(algorithm: Algorithm) -> None:
    """A table of numbers is not cut as if its rows were an image: the error names the algorithm and the shape."""
    run = ShortRun([algorithm])
    run.state.batch = (TABLE, CLASSES)
    event = next(event for event in Event if algorithm.match(event, run.state))
    with pytest.raises(TrainingError, match=rf"{type(algorithm).__name__}: the inputs have the shape \(8, 6\)"):
        run.engine.run_event(event)
    assert run.state.batch[0] is TABLE


@pytest.mark.parametrize(
    "call",
    [
        lambda: cutmix_batch(TABLE, CLASSES),
        lambda: cutout_batch(TABLE),
        *(
            lambda mode=mode, scale=scale: resize_batch(TABLE, CLASSES, scale, mode)
            for mode in MODES
            for scale in (0.5, 1)
        ),
    ],
)
def test_functions_refuse_them_too(call: Callable[[], object]) -> None:
    """The same in a loop of one's own."""
    with pytest.raises(TrainingError, match=r"the inputs have the shape \(8, 6\)"):
        call()


@pytest.mark.parametrize("shape", [(4, 8, 8), (4, 3, 8, 8), (4, 5, 3, 8, 8)])
def test_any_number_of_dimensions_before_height_and_width(shape: tuple[int, ...]) -> None:
    """Gray images without channels, images and videos are made smaller; the type stays."""
    images = torch.randint(255, shape, dtype=torch.uint8)
    small, _ = resize_batch(images, CLASSES, 0.5)
    assert torch.equal(small, images[..., ::2, ::2])
    assert small.dtype == torch.uint8
    assert cutmix_batch(images, CLASSES[:4])[0].shape == shape


@pytest.mark.parametrize(
    ("outputs", "targets", "message"),
    [
        (torch.zeros(8), CLASSES, r"the outputs have the shape \(8,\)"),
        (torch.zeros(8, 3), torch.zeros(8), r"shape \(8,\) and the type torch.float32"),
        (torch.zeros(8, 3), torch.zeros(7, dtype=torch.long), r"shape \(7,\)"),
        (torch.zeros(8, 3), CLASSES.unsqueeze(1), r"shape \(8, 1\)"),
        (torch.zeros(8, 2), CLASSES, "the outputs have 2 classes"),
    ],
)
def test_targets_that_are_no_classes_are_refused(outputs: Tensor, targets: Tensor, message: str) -> None:
    """Outputs of a regression, numbers with a fraction, another number of targets, a class that does not exist."""
    with pytest.raises(TrainingError, match=message):
        smooth_labels(outputs, targets)
    for algorithm in (LabelSmoothing(), MixUp()):
        run = ShortRun([algorithm])
        run.state.batch = (TABLE, targets)
        run.engine.run_event(Event.BEFORE_FORWARD)
        run.state.outputs = outputs
        with pytest.raises(TrainingError, match="outputs"):
            run.engine.run_event(Event.BEFORE_LOSS)


def test_class_numbers_may_be_of_any_integer_type() -> None:
    """Bytes, as data sets of images have them, give what 64 bits give."""
    for dtype in (torch.uint8, torch.int32):
        assert torch.equal(
            smooth_labels(torch.zeros(8, 3), CLASSES.to(dtype)), smooth_labels(torch.zeros(8, 3), CLASSES)
        )
