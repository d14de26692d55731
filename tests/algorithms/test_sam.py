"""SAM."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_training import new_trainer, trained
from short_run import assert_same
from torch import Tensor, nn

from composerlite import Callback, ComposerModel, Logger, State
from composerlite.algorithms import SAM, GradientClipping, MixUp
from composerlite.models import ComposerClassifier


def plain_model(factor: float = 1.0) -> ComposerModel:
    """Without batch norm and dropout: gradients of microbatches add up to those of the batch."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Flatten(), nn.Linear(128, 6), nn.Tanh(), nn.Linear(6, 3))
    return ComposerClassifier(
        net, num_classes=3, loss_fn=lambda logits, target: factor * nn.functional.cross_entropy(logits, target)
    )


def by_hand(rho: float, interval: int, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Algorithm 1 of the paper in a loop of its own."""
    model = plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for number, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        model.loss(model(batch), batch).backward()
        if number % interval == 0:
            elsewhere = copy.deepcopy(model)
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()  # type: ignore[union-attr]
            with torch.no_grad():
                for there, here in zip(elsewhere.parameters(), model.parameters(), strict=True):
                    there += rho * here.grad / norm  # type: ignore[operator]
            elsewhere.zero_grad()
            elsewhere.loss(elsewhere(batch), batch).backward()
            for there, here in zip(elsewhere.parameters(), model.parameters(), strict=True):
                here.grad = there.grad
        optimizer.step()
    return dict(model.state_dict())


class Batches(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.losses: list[float] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self.seen.append(state.batch)

    def batch_end(self, state: State, logger: Logger) -> None:
        self.losses.append(float(state.loss.detach()))


@pytest.mark.parametrize("microbatch", [None, 3, "auto"])
@pytest.mark.parametrize("interval", [1, 2])
def test_the_steps_are_those_of_the_paper(microbatch: int | str | None, interval: int) -> None:
    """Also where the batch is cut into microbatches, whose gradients are added up before the weights are moved."""
    batches = Batches()
    trainer = new_trainer(
        [SAM(rho=0.5, interval=interval)],
        model=plain_model,
        callbacks=[batches],
        device_train_microbatch_size=microbatch,
    )
    contents = trained(trainer)
    expected = by_hand(0.5, interval, batches.seen)
    assert contents["model"].keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(contents["model"][name], weight)
    without = trained(new_trainer([], model=plain_model))["model"]
    assert not torch.allclose(without["module.1.weight"], expected["module.1.weight"])


def test_a_distance_of_zero_trains_as_without_it() -> None:
    """To the last bit: dropout, mixing, batch norm and metrics are those of the first pass, and count it once."""
    runs = []
    for extra in ([], [SAM(rho=0.0)]):
        batches = Batches()
        runs.append((trained(new_trainer([MixUp(), *extra], callbacks=[batches])), batches.losses))
    (plain, losses), (sam, sam_losses) = runs
    assert losses == sam_losses
    for name in ("model", "optimizers", "train_metrics"):
        assert_same(sam[name], plain[name])


def test_what_is_logged_is_of_the_weights_themselves() -> None:
    """The first batch has the loss and the metrics that a run without SAM has, however far the distance."""
    losses = []
    for algorithms in ([], [SAM(rho=5.0)]):
        batches = Batches()
        with new_trainer(algorithms, callbacks=[batches], max_duration="1ba") as trainer:
            trainer.fit()
            buffers = {name: buffer.clone() for name, buffer in trainer.state.model.named_buffers()}
        losses.append((batches.losses, dict(trainer.state.train_metric_values), buffers))
    assert_same(losses[0], losses[1])


def test_clipping_sees_the_gradients_that_are_stepped_with() -> None:
    """Once a batch, after the second pass."""

    class Norms(Callback):
        def __init__(self) -> None:
            self.norms: list[float] = []

        def after_train_batch(self, state: State, logger: Logger) -> None:
            gradients = [p.grad.flatten() for p in state.model.parameters() if p.grad is not None]
            self.norms.append(float(torch.cat(gradients).norm()))

    norms = Norms()
    trained(new_trainer([SAM(rho=0.5), GradientClipping("norm", 0.01)], callbacks=[norms]))
    assert norms.norms == pytest.approx([0.01] * 6, rel=1e-3)


def test_a_checkpoint_is_that_of_the_optimizer_that_was_given(tmp_path: Path) -> None:
    """It loads into a run without SAM, and one without into a run with it."""
    trained(new_trainer([SAM(rho=0.3)], tmp_path / "sam"))
    trained(new_trainer([], tmp_path / "plain"))
    for folder, algorithms in (("sam", []), ("plain", [SAM(rho=0.3)])):
        again = new_trainer(algorithms, load_path=tmp_path / folder / "ba3.pt")
        assert int(again.state.timestamp.batch) == 3
        assert type(again.state.optimizers[0]) is torch.optim.SGD
        trained(again)


def scaled(scale: float, loss: float = 1.0) -> tuple[dict[str, Any], float]:
    """What a run ends with whose loss is scaled, as amp_fp16 does on a GPU, and the scale then."""
    trainer = new_trainer([SAM(rho=0.5)], model=lambda: plain_model(loss))
    trainer.state.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    contents = trained(trainer)
    assert trainer.state.scaler is not None
    return contents, trainer.state.scaler.get_scale()


def test_the_scale_of_the_loss_cancels_out() -> None:
    """The direction uphill is the same whatever the scale, and steps are taken with unscaled gradients."""
    plain = trained(new_trainer([SAM(rho=0.5)], model=plain_model))
    contents, scale = scaled(1024.0)
    assert scale == 1024.0
    for name, weight in plain["model"].items():
        torch.testing.assert_close(contents["model"][name], weight)


def test_a_batch_whose_gradients_overflow_is_passed_over() -> None:
    """The scale is halved until they do not, and the weights are never moved by what is no number."""
    contents, scale = scaled(2.0**127, loss=1000.0)
    assert scale < 2.0**127
    assert all(bool(weight.isfinite().all()) for weight in contents["model"].values())


def test_weights_are_put_back_where_the_second_pass_fails() -> None:
    """Whoever catches the error, or saves after it, has the weights of before the batch."""

    class Failing(Callback):
        passes = 0

        def after_forward(self, state: State, logger: Logger) -> None:
            self.passes += 1
            if self.passes == 4:  # of the second batch, the second
                raise KeyError("a failure")

    with new_trainer([SAM(rho=0.5)], callbacks=[Failing()]) as trainer, pytest.raises(KeyError, match="a failure"):
        trainer.fit()
    with new_trainer([SAM(rho=0.5)], max_duration="1ba") as other:
        other.fit()
    assert_same(
        {name: weight.detach() for name, weight in trainer.state.model.named_parameters()},
        {name: weight.detach() for name, weight in other.state.model.named_parameters()},
    )
