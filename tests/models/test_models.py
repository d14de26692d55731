"""ComposerModel, ComposerClassifier and their loss and metrics."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composerlite.core import Logger, State
from composerlite.errors import ConfigError, TrainingError
from composerlite.models import ComposerClassifier, ComposerModel, soft_cross_entropy


class Regression(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, batch: Any) -> Tensor:
        return self.layer(batch[0])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])


def batch_of(size: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=generator), torch.randint(classes, (size,), generator=generator)


def test_model_needs_forward_and_loss() -> None:
    """A model without a loss cannot be built: the error names the missing method."""

    class NoLoss(ComposerModel):
        def forward(self, batch: Any) -> Any:
            return batch

    with pytest.raises(TypeError, match="loss"):
        NoLoss()  # type: ignore[abstract]


def test_model_has_no_metrics_unless_it_says_so() -> None:
    """By default there is nothing to measure; metrics without update_metric raise an error that says what to write."""
    from torchmetrics import MeanMetric

    model = Regression()
    assert model.get_metrics(is_train=True) == {}
    with pytest.raises(TrainingError, match="override update_metric"):
        model.update_metric(None, None, MeanMetric())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_leave_the_logger_out(duplicate: Any) -> None:
    """A copy of a model in training does not take the trainer along."""
    model = Regression()
    state = State(model, rank_zero_seed=0, run_name="run", device=torch.device("cpu"))
    model.logger = Logger(state)
    twin = duplicate(model)
    assert twin.logger is None
    assert model.logger is not None
    assert torch.equal(twin.layer.weight, model.layer.weight)


def test_default_metrics_count_every_sample() -> None:
    """Accuracy and cross entropy are means over samples, also over batches of different sizes."""
    model = ComposerClassifier(nn.Linear(4, 3), num_classes=3)
    assert list(model.get_metrics(is_train=True)) == ["MulticlassAccuracy"]
    metrics = model.get_metrics(is_train=False)
    batches = [batch_of(5), batch_of(2)]
    for batch in batches:
        for metric in metrics.values():
            model.update_metric(batch, model(batch), metric)
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    logits = model((inputs, targets))
    assert metrics["MulticlassAccuracy"].compute() == (logits.argmax(1) == targets).float().mean()
    torch.testing.assert_close(metrics["CrossEntropy"].compute(), F.cross_entropy(logits, targets))


def test_metrics_are_fresh_and_not_saved_with_the_weights() -> None:
    """Two evaluators never share a metric, and a checkpoint of the model holds weights only."""
    from torchmetrics import MeanMetric

    model = ComposerClassifier(nn.Linear(4, 3), num_classes=3, val_metrics=MeanMetric())
    first, second = model.get_metrics(is_train=False), model.get_metrics(is_train=False)
    assert list(first) == ["MeanMetric"]
    assert first["MeanMetric"] is not second["MeanMetric"]
    assert list(model.state_dict()) == ["module.weight", "module.bias"]


def test_given_metrics_keep_their_names() -> None:
    """A dict or a MetricCollection names the metrics."""
    from torchmetrics import MeanMetric, MetricCollection, SumMetric

    collection = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()})
    model = ComposerClassifier(nn.Linear(4, 3), train_metrics=collection, val_metrics={"my": MeanMetric()})
    assert sorted(model.get_metrics(is_train=True)) == ["mean", "sum"]
    assert list(model.get_metrics(is_train=False)) == ["my"]


def test_number_of_classes_comes_from_the_module() -> None:
    """A module that knows its classes need not be told again; else the error says what to pass."""
    module = nn.Linear(4, 3)
    with pytest.raises(ConfigError, match="num_classes=…"):
        ComposerClassifier(module)
    module.num_classes = 3  # type: ignore[assignment]
    assert ComposerClassifier(module).num_classes == 3


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 2)])
def test_soft_cross_entropy_takes_classes_probabilities_and_one_hot(shape: tuple[int, ...]) -> None:
    """Class numbers and the same classes as probabilities or integers give one loss."""
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    target = torch.randint(3, (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(2))
    one_hot = F.one_hot(target, 3).movedim(-1, 1)
    expected = F.cross_entropy(logits, target)
    torch.testing.assert_close(soft_cross_entropy(logits, target), expected)
    torch.testing.assert_close(soft_cross_entropy(logits, one_hot), expected)
    torch.testing.assert_close(soft_cross_entropy(logits, one_hot.double()), expected)


def test_cross_entropy_metric_takes_soft_and_ignored_targets() -> None:
    """Soft labels count as one target per sample; ignored ones do not count."""
    from composerlite.models.cross_entropy import CrossEntropy

    logits, soft = torch.randn(4, 3, 2), torch.softmax(torch.randn(4, 3, 2), dim=1)
    metric = CrossEntropy()
    metric.update(logits, soft)
    torch.testing.assert_close(metric.compute(), F.cross_entropy(logits, soft))

    metric = CrossEntropy()
    target = torch.tensor([0, -100, 2, 1])
    metric.update(logits[..., 0], target)
    torch.testing.assert_close(metric.compute(), F.cross_entropy(logits[..., 0], target))
