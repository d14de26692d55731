"""LayerFreezing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from resumed_training import new_trainer, trained
from torch import nn

from composerlite.algorithms import LayerFreezing, freeze_layers
from composerlite.loggers import InMemoryLogger


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))


def frozen(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


@pytest.mark.parametrize(
    ("done", "start", "level", "layers"),
    [(0.5, 0.5, 1.0, 0), (0.75, 0.5, 1.0, 1), (0.99, 0.5, 1.0, 2), (1.0, 0.5, 1.0, 3), (1.0, 0.0, 0.5, 1)],
)
def test_layers_are_frozen_from_the_first_on(done: float, start: float, level: float, layers: int) -> None:
    """Linearly from ``freeze_start`` on, up to ``freeze_level`` of all layers but the last."""
    model = net()
    names = ["0.weight", "0.bias", "2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"]
    depth, fraction = freeze_layers(model, None, done, start, level)
    assert depth == layers
    assert fraction == pytest.approx(max(0.0, level * (done - start) / (1 - start)))
    assert frozen(model) == names[: 2 * layers]


def test_a_weight_of_the_last_layer_is_never_frozen() -> None:
    """Also where the first one shares it."""
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2), nn.Linear(2, 3, bias=False))
    model[2].weight = model[0].weight
    assert freeze_layers(model, None, 1.0, 0.0)[0] == 2
    assert frozen(model) == ["1.weight", "1.bias"]


def test_frozen_weights_stay_in_training() -> None:
    """Momentum and weight decay do not move them either, and the log says how many they are."""
    log = InMemoryLogger()
    with new_trainer([LayerFreezing(0.0, 1.0)], loggers=[log]) as trainer:
        trainer.fit(duration="1ep")
        names = frozen(trainer.state.model)
        before = {name: weight.clone() for name, weight in trainer.state.model.named_parameters()}
        trainer.fit(duration="1ep")
        after = dict(trainer.state.model.named_parameters())
    assert 0 < len(names) < len(before)
    assert all(torch.equal(before[name], after[name]) for name in names)
    assert all(not torch.equal(before[name], after[name]) for name in before if name not in names)
    assert [value for _, value in log.data["layer_freezing/layers_frozen"]][-1] > 0


def test_a_longer_run_keeps_frozen_what_was(tmp_path: Path) -> None:
    """The schedule of the longer run says fewer layers, and none is thawed."""
    contents = trained(new_trainer([LayerFreezing(0.0, 0.9)], tmp_path))
    saved = dict(contents["algorithms"])["LayerFreezing"]["state"]["frozen"]
    longer = new_trainer([LayerFreezing(0.0, 0.9)], load_path=tmp_path / "ba6.pt", max_duration="20ep")
    assert frozen(longer.state.model) == saved or set(frozen(longer.state.model)) <= set(saved)
    assert frozen(longer.state.model)
    longer.close()
