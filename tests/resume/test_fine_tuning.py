"""A fine-tuning script that is restarted resumes its own state, whatever it leaves out of the one it began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.tiny_training import Classifier, CrashError, StopAt, train, trainer
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from trainer.trainer_parts import At

from composerlite import Event
from composerlite.algorithms import EMA


def without_model(contents: dict[str, Any]) -> None:
    """Leave out the weights."""
    del contents["state"]["model"]


FILTERS: list[dict[str, Any]] = [
    {"load_ignore_keys": ["state/model/*"], "load_strict_model_weights": False},
    {"load_ignore_keys": ["state/optimizers*"]},
    {"load_ignore_keys": ["*"], "load_strict_model_weights": False},
    {"load_ignore_keys": ["state/timestamp"]},
    {"load_ignore_keys": without_model, "load_strict_model_weights": False},
    {"load_weights_only": True},
    {"load_exclude_algorithms": ["EMA"]},
    {"load_strict_model_weights": False},
]


def tuning(base: Path, folder: Path, filters: dict[str, Any], *callbacks: Any) -> Any:
    """The script: what it launches the first time, and every time after that."""
    torch.manual_seed(9)
    return trainer(
        model=Classifier(),
        callbacks=callbacks,
        algorithms=[EMA(half_life="2ba")],
        run_name="tuned",
        load_path=base / "latest-rank0.pt",
        save_folder=folder,
        save_interval="1ba",
        max_duration="6ep",
        autoresume=True,
        **filters,
    )


@pytest.mark.parametrize("filters", FILTERS, ids=lambda filters: "-".join(map(str, filters)))
def test_a_restarted_fine_tuning_ends_as_if_it_had_not_stopped(filters: dict[str, Any], tmp_path: Path) -> None:
    """Weights, averages and optimizer are bit for bit those of the script that was left alone."""
    train(save_folder=tmp_path / "base", algorithms=[EMA(half_life="2ba")], run_name="base")
    with tuning(tmp_path / "base", tmp_path / "whole", filters) as whole:
        whole.fit()
    stops_at = int(whole.state.timestamp.batch) - 3
    with pytest.raises(CrashError), tuning(tmp_path / "base", tmp_path / "cut", filters, StopAt(stops_at)) as cut:
        cut.fit()
    with tuning(tmp_path / "base", tmp_path / "cut", filters) as resumed:
        assert int(resumed.state.timestamp.batch) == stops_at
        resumed.fit()
    expected, found = whole.state.state_dict(), resumed.state.state_dict()
    for part in ("model", "optimizers", "algorithms"):
        assert str(found[part]) == str(expected[part]), part
        for one, other in zip(_tensors(found[part]), _tensors(expected[part]), strict=True):
            assert torch.equal(one, other), part


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("run_name", ["base", "tuned"])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_without_its_time_a_run_begins_an_epoch(kind: Any, run_name: str, tmp_path: Path) -> None:
    """All batches of it, whatever has saved its own position, and under whatever name."""

    def two_calls(stops_at: int | None, **arguments: Any) -> Any:
        numbers = torch.arange(16)
        data = kind(TensorDataset(torch.randn(16, 4), numbers % 2, numbers), batch_size=4, shuffle=True)
        seen: list[int] = []
        note = At(Event.BATCH_START, lambda state: seen.extend(state.batch[2].tolist()))
        with trainer(
            model=Classifier(),
            train_dataloader=data,
            callbacks=[note, *([] if stops_at is None else [StopAt(stops_at)])],
            save_folder=tmp_path / str(stops_at),
            save_interval="1ba",
            **arguments,
        ) as run:
            run.fit(duration="1ba")
            after_first = len(seen)
            run.fit(duration="1ep")
        return after_first, sorted(seen)

    with pytest.raises(CrashError):
        two_calls(3, run_name="base")
    loaded: dict[str, Any] = {"load_path": tmp_path / "3/latest-rank0.pt", "load_ignore_keys": ["state/timestamp"]}
    assert two_calls(None, run_name=run_name, **loaded) == (4, list(range(16)))


def _tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in it, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]
