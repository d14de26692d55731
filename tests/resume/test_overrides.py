"""What a script changes between two launches of a run: it holds from there on, and the log says so."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.tiny_training import Classifier, trainer

from composerlite.errors import IncompatibleCheckpointError
from composerlite.optim import LinearScheduler


def launch(folder: Path, batches: int, rate: float, *, scheduler: str = "") -> Any:
    """Train up to so many batches; the trainer, which is closed."""
    torch.manual_seed(1)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedulers: Any = None
    if scheduler == "composer":
        schedulers = LinearScheduler(alpha_f=0.0, t_max="10ba")
    elif scheduler == "torch":
        schedulers = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    with trainer(
        model=model,
        optimizers=optimizer,
        schedulers=schedulers,
        step_schedulers_every_batch=True,
        max_duration=f"{batches}ba",
        save_folder=folder,
        save_interval="1ba",
        autoresume=True,
    ) as run:
        run.fit()
        return run


@pytest.mark.parametrize("scheduler", ["", "composer", "torch"])
def test_another_learning_rate_holds_from_there_on(
    tmp_path: Path, scheduler: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Scaled by where the schedule stands, once and not again at the next resume."""
    launch(tmp_path, 4, 0.1, scheduler=scheduler)
    with caplog.at_level(logging.WARNING):
        changed = launch(tmp_path, 5, 0.02, scheduler=scheduler)
    assert "the learning rate was (0.1,) in the interrupted run and is (0.02,) now" in caplog.text
    expected = 0.02 * (0.5 if scheduler else 1)
    assert changed.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(expected)
    caplog.clear()
    again = launch(tmp_path, 6, 0.02, scheduler=scheduler)
    assert again.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.02 * (0.4 if scheduler else 1))
    assert "learning rate was" not in caplog.text


def test_the_same_learning_rate_changes_nothing(tmp_path: Path) -> None:
    """Bit for bit, with a schedule."""
    whole = launch(tmp_path / "whole", 6, 0.1, scheduler="composer")
    launch(tmp_path / "cut", 3, 0.1, scheduler="composer")
    cut = launch(tmp_path / "cut", 6, 0.1, scheduler="composer")
    for one, other in zip(whole.state.model.parameters(), cut.state.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_of_another_kind_is_told_the_way_out(tmp_path: Path) -> None:
    """Filters do not apply to a run that resumes: what the error says to do instead works."""
    launch(tmp_path / "run", 2, 0.1)

    def other(**arguments: Any) -> Any:
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keys = ["state/optimizers", "state/schedulers"]
        given = {"model": model, "optimizers": optimizer, "load_ignore_keys": keys, "autoresume": True}
        return trainer(save_interval="1ba", max_duration="3ba", **given, **arguments)

    with pytest.raises(IncompatibleCheckpointError) as error:
        other(save_folder=tmp_path / "run")
    assert "the load_… arguments apply to load_path alone" in str(error.value)
    found = re.search(r"another run_name with load_path='(.*)'\.$", str(error.value))
    assert found is not None
    with other(save_folder=tmp_path / "other", run_name="other", load_path=found[1]) as run:
        assert int(run.state.timestamp.batch) == 2
