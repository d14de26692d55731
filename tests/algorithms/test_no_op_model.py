"""NoOpModel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from short_run import ShortRun, batch_of

from composerlite.algorithms import NoOpModel
from composerlite.optim import DecoupledAdamW


@pytest.mark.parametrize("batch", [batch_of(0), {"input_ids": torch.ones(2, 3)}, ["text", "more text"]])
def test_takes_any_batch_and_learns_nothing(batch: Any) -> None:
    """Steps of training leave the one weight as it is, whatever the batches are."""
    run = ShortRun([NoOpModel()])
    model: Any = run.state.model
    optimizer = DecoupledAdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    loss = model.loss(model(batch), batch)
    loss.backward()
    optimizer.step()
    assert loss.item() == 0.0
    assert model.weight.item() == 1.0
    assert model.get_metrics(is_train=False) == {}
    assert model.eval_forward(batch).item() == 0.0


def test_optimizer_gets_the_new_parameters() -> None:
    """The optimizer lets go of the old model and keeps its groups and settings."""
    run = ShortRun([NoOpModel()])
    groups = run.state.optimizers[0].param_groups
    assert [p for group in groups for p in group["params"]] == list(run.state.model.parameters())
    assert groups[0]["momentum"] == 0.9


def test_whole_run_works_and_can_be_saved() -> None:
    """A run with it trains to its end and saves checkpoints; loading one without it is not forced to use it."""
    run = ShortRun([NoOpModel()]).train()
    saved = run.save()
    assert saved["model"].keys() == {"weight"}
    assert saved["algorithms"][0][1]["required"] is False
