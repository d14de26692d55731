"""CutMix and CutOut, which draw their boxes alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from short_run import ShortRun
from torch import Tensor

from composerlite.algorithms import CutMix, CutOut, cutmix_batch, cutout_batch
from composerlite.core import Event
from composerlite.errors import TrainingError

X = torch.arange(4.0).reshape(4, 1, 1, 1).expand(4, 2, 8, 6).clone()  # image i is i everywhere
Y = torch.tensor([0, 1, 2, 1])
OTHERS = torch.tensor([1, 2, 3, 0])


def test_a_piece_of_another_image_is_put_in() -> None:
    """What is in the box is the other image's, the rest is its own, and the area left is counted in pixels."""
    mixed, targets, remaining, box = cutmix_batch(X, Y, bbox=(2, 1, 6, 4), indices=OTHERS)
    expected = X.clone()
    expected[:, :, 2:6, 1:4] = X[OTHERS][:, :, 2:6, 1:4]
    assert torch.equal(mixed, expected)
    assert torch.equal(targets, Y[OTHERS])
    assert remaining == 1 - 4 * 3 / 48
    assert box == (2, 1, 6, 4)
    assert torch.equal(X[0], torch.zeros(2, 8, 6))  # what was given is not changed


def test_length_is_that_of_the_box() -> None:
    """A length of a half is half the height and half the width, where no edge cuts it off."""
    sizes = set()
    for _ in range(200):
        *_, (top, left, bottom, right) = cutmix_batch(X, Y, length=0.5)
        assert 0 <= top <= bottom <= 8
        assert 0 <= left <= right <= 6
        sizes.add((bottom - top, right - left))
    assert max(sizes) == (4, 3)


@pytest.mark.parametrize(("alpha", "side"), [(1e9, 45), (0.0, 64)])
def test_the_area_left_is_that_of_the_distribution(alpha: float, side: int) -> None:
    """A box that no edge cuts off leaves λ, up to whole pixels: a half where α is large, and nothing at its limit 0."""
    images, sizes = torch.zeros(1, 1, 64, 64), set()
    for _ in range(100):
        _, _, left, (top, first, bottom, last) = cutmix_batch(images, torch.zeros(1), alpha=alpha)
        sizes.add(bottom - top)
        assert left == 1 - (bottom - top) * (last - first) / 64**2
    assert max(sizes) == side


@pytest.mark.parametrize("uniform", [False, True])
def test_uniform_sampling_gives_every_pixel_the_same_chance(uniform: bool) -> None:
    """Without it, as in the paper, pixels at the edge are in the box less often."""
    torch.manual_seed(3)
    image, hits = torch.ones(1, 12, 12), torch.zeros(12, 12)
    for _ in range(4000):
        hits += 1 - cutout_batch(image, length=0.5, uniform_sampling=uniform)[0]
    edge, middle = hits[0, 0] / 4000, hits[6, 6] / 4000
    assert (edge / middle).item() == pytest.approx(1.0 if uniform else 0.44, abs=0.1)


def around_the_loss(algorithm: CutMix, labels: Tensor, logits: Tensor) -> tuple[ShortRun, Tensor]:
    """The run after the loss, and the loss."""
    run = ShortRun([algorithm])
    state = run.state
    state.batch, state.outputs = (X, labels), logits
    torch.manual_seed(1)
    run.engine.run_event(Event.BEFORE_FORWARD)
    run.engine.run_event(Event.BEFORE_LOSS)
    state.loss = F.cross_entropy(logits, state.batch[1])
    run.engine.run_event(Event.AFTER_LOSS)
    return run, state.loss


@pytest.mark.parametrize("interpolate_loss", [False, True])
def test_the_loss_is_weighted_by_area(interpolate_loss: bool) -> None:
    """The part of the pixels that each of the two images has is the weight of its target."""
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
    algorithm = CutMix(interpolate_loss=interpolate_loss)
    run, loss = around_the_loss(algorithm, Y, logits)
    top, left, bottom, right = algorithm._box
    area = (bottom - top) * (right - left) / 48
    assert 0 < area < 1
    own, other = F.cross_entropy(logits, Y), F.cross_entropy(logits, Y[algorithm._partners])
    torch.testing.assert_close(loss, (1 - area) * own + area * other)
    assert run.state.batch == (X, Y)


def test_masks_get_the_piece_of_the_other_mask() -> None:
    """Targets of the images' height and width are cut as the images are; a mean of their losses is refused."""
    masks, logits = X[:, 0].long(), torch.zeros(4, 5, 8, 6)
    run = ShortRun([algorithm := CutMix()])
    run.state.batch, run.state.outputs = (X, masks), logits
    torch.manual_seed(1)
    run.engine.run_event(Event.BEFORE_FORWARD)
    mixed = run.state.batch[0]
    run.engine.run_event(Event.BEFORE_LOSS)
    assert torch.equal(run.state.batch[1], mixed[:, 0].long())
    assert torch.equal(masks, X[:, 0].long())
    assert algorithm._share > 0
    with pytest.raises(TrainingError, match="Remove interpolate_loss"):
        around_the_loss(CutMix(interpolate_loss=True), masks, logits)


def test_holes_are_zero_and_the_rest_is_untouched() -> None:
    """As many holes as asked for, in images with and without a batch."""
    torch.manual_seed(0)
    images = torch.ones(3, 2, 10, 10)
    cut = cutout_batch(images, num_holes=2, length=0.3)
    assert {float(value) for value in cut.unique()} == {0.0, 1.0}
    assert torch.equal(cut[0], cut[2])
    assert 0 < int((cut[0, 0] == 0).sum()) <= 18
    assert torch.equal(images, torch.ones(3, 2, 10, 10))
    assert cutout_batch(images[0], length=0.0).equal(images[0])


def test_a_batch_that_the_loader_gives_again_has_no_old_holes() -> None:
    """A list of batches is a loader, too: what it holds is not changed."""
    batch = {"x": torch.ones(2, 1, 8, 8)}
    run = ShortRun([CutOut(input_key="x")])
    run.state.batch = batch
    run.engine.run_event(Event.AFTER_DATALOADER)
    assert float(run.state.batch["x"].min()) == 0
    assert float(batch["x"].min()) == 1
