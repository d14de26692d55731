"""InMemoryLogger."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from composerlite.errors import ConfigError
from composerlite.loggers import InMemoryLogger


def test_values_with_their_timestamps(run):
    """Each value is there with the moment it was logged at, and the last one by name."""
    memory = InMemoryLogger()
    run(memory).epoch().batches(1)

    assert [(int(t.epoch), int(t.batch), round(v, 3)) for t, v in memory.data["loss/train/total"][-2:]] == [
        (0, 5, 0.2),
        (1, 6, 0.167),
    ]
    assert memory.most_recent_values["time/batch"] == 6
    assert memory.most_recent_timestamps["time/batch"].batch == 6


def test_timeseries(run):
    """A metric comes as arrays: its values and every field of time."""
    memory = InMemoryLogger()
    run(memory).batches(3)
    series = memory.get_timeseries("time/batch")

    assert series["time/batch"].tolist() == series["batch"].tolist() == [1, 2, 3]
    assert series["sample"].tolist() == [8, 16, 24]
    assert series["total_wct"].tolist() == [0.0, 0.0, 0.0]


def test_unknown_metric(run):
    """Asking for a metric that was not logged is an error that names the nearest."""
    memory = InMemoryLogger()
    run(memory).batches(1)

    with pytest.raises(ConfigError, match="Did you mean 'time/batch'"):
        memory.get_timeseries("time/batches")


def test_values_are_kept_as_they_were(run):
    """Tensors of one element become numbers; larger ones do not change when training changes them in place."""
    memory = InMemoryLogger()
    weights, array = torch.ones(2), np.ones(2)
    logger = run(memory).logger
    logger.log_metrics({"one": torch.tensor([3.0]), "numpy": np.float32(0.5), "many": weights, "array": array})
    weights += 1
    array += 1

    assert memory.most_recent_values["one"] == 3.0
    assert memory.most_recent_values["numpy"] == 0.5
    assert memory.most_recent_values["many"].tolist() == [1.0, 1.0]
    assert memory.most_recent_values["array"].tolist() == [1.0, 1.0]


def test_an_explicit_step(run):
    """A metric logged for another batch than the present one is kept at that batch."""
    memory = InMemoryLogger()
    run(memory).batches(2).logger.log_metrics({"late": 1}, step=1)

    assert memory.most_recent_timestamps["late"].batch == 1


def test_settings_tables_and_traces(run):
    """Hyperparameters and the last table of each name are kept; traces only if asked for."""
    memory, tracing = InMemoryLogger(), InMemoryLogger(log_traces=True)
    logger = run(memory, tracing).logger
    logger.log_hyperparameters({"lr": 0.1})
    logger.log_table(["name"], [["a"]], name="names")
    logger.log_traces({"EMA/batch_end": 1})

    assert memory.hyperparameters == {"lr": 0.1}
    assert memory.tables == {"names": (["name"], [["a"]])}
    assert memory.traces == {}
    assert [value for _, value in tracing.traces["EMA/batch_end"]] == [1]
