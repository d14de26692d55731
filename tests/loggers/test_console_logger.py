"""ConsoleLogger: lines of text."""

from __future__ import annotations

import io
import itertools
from datetime import timedelta

import pytest
import torch
from torch import nn

from composerlite.loggers import ConsoleLogger


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def test_a_line_per_interval(run, out):
    """Every two batches a line has epoch and batch, each of how many, and the latest values."""
    run(ConsoleLogger("2ba", stream=out)).batches(5)
    assert out.getvalue().splitlines() == [
        "[train] epoch 1/3, batch 2/15: loss 0.5",
        "[train] epoch 1/3, batch 4/15: loss 0.25",
    ]


def test_a_line_per_epoch_with_its_metrics(run, out):
    """With an interval of an epoch, a line has the last loss and the metrics of the epoch. The end adds no line."""
    run(ConsoleLogger("1ep", stream=out), max_duration="2ep").epoch(acc=0.75).epoch(acc=0.875).finish()
    assert out.getvalue().splitlines() == [
        "[train] epoch 1/2, batch 5/10: loss 0.2, acc 0.75",
        "[train] epoch 2/2, batch 10/10: loss 0.1, acc 0.875",
    ]


def test_evaluations_and_the_rest_at_the_end(run, out):
    """An evaluation has a line with all its metrics. The end of training writes the remaining values."""
    many = {f"a-metric-{number}": number / 4 for number in range(12)}
    run(ConsoleLogger("4ba", stream=out), max_duration="6ba").epoch().evaluate(**many).batches(1).finish()
    assert out.getvalue().splitlines() == [
        "[train] epoch 1, batch 4/6: loss 0.25",
        "[eval] batch 5: " + ", ".join(f"{name} {value:.4g}" for name, value in many.items()),
        "[train] epoch 2, batch 6/6: loss 0.1667",
    ]


def test_interval_in_iterations_and_as_a_function(run, out):
    """Other units and functions are intervals, too."""
    training = run(ConsoleLogger("2iter", stream=out)).epoch().epoch()
    training.state.previous_timestamp = training.state.timestamp
    training.state.timestamp = training.state.timestamp.copy(iteration=2)
    training.engine.run_event("iteration_end")
    run(ConsoleLogger(lambda state, event: state.timestamp.batch == 3, stream=out)).batches(5)
    assert out.getvalue().splitlines() == [
        "[train] epoch 2/3, batch 10/15: loss 0.1",
        "[train] epoch 1/3, batch 3/15: loss 0.3333",
    ]


def test_a_training_line_has_at_most_120_characters(run, out):
    """The loss is first, metrics are next, and the line counts the values that do not fit."""
    training = run(ConsoleLogger("2ba", stream=out)).batches(1)
    training.logger.log_metrics({f"my/number-{i}": float(i) for i in range(20)})
    training.logger.log_metrics({"metrics/train/acc": 0.5, "loss/train/regularization": 0.25})
    training.batches(1)
    assert out.getvalue().splitlines() == [
        "[train] epoch 1/3, batch 2/15: loss 0.5, loss/regularization 0.25, acc 0.5, my/number-0 0, my/number-1 1, +18"
    ]


def test_costs_of_the_run_are_on_no_line(run, out):
    """Costs of checkpoints, speeds and times go to other loggers, and cause no line."""
    costs = (
        "checkpoint/stall_seconds",
        "throughput/batches_per_sec",
        "wall_clock/train",
        "lr-SGD/group0",
        "time/token",
    )
    training = run(ConsoleLogger("2ba", stream=out)).batches(1)
    training.logger.log_metrics(dict.fromkeys(costs, 1.5))
    training.batches(1)
    training.logger.log_metrics(dict.fromkeys(costs, 2.5))
    training.finish()
    assert out.getvalue() == "[train] epoch 1/3, batch 2/15: loss 0.5\n"


def test_learning_rate_speed_and_time_left(run, out, monkeypatch):
    """A line has the learning rates, batches per second since the last line, and the time left."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    training = run(ConsoleLogger("5ba", stream=out))
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.01, 0.01, 0.002)]
    training.state.optimizers = [torch.optim.SGD(groups)]
    training.run_events(["fit_start"]).batches(4)
    now = 110.0
    training.state.timestamp = training.state.timestamp.copy(total_wct=timedelta(seconds=8))
    training.batches(1)
    line = "[train] epoch 1/3, batch 5/15: loss 0.2, lr 0.01/0.002, 0.625 batches/s, 0:20 left\n"
    assert out.getvalue() == line


def test_a_long_evaluation_writes_lines(run, out, monkeypatch):
    """An evaluation writes a line every 30 seconds."""
    seconds = itertools.count(0.0, 20.0)
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    run(ConsoleLogger("1ep", stream=out)).batches(3).evaluate(batches=4, acc=0.5)
    assert out.getvalue().splitlines() == [
        "[eval] batch 3: evaluated 0/4 batches",
        "[eval] batch 3: evaluated 0/4 batches",
        "[eval] batch 3: acc 0.5",
    ]


@pytest.mark.parametrize("log_traces", [False, True])
def test_settings_tables_and_traces(run, out, log_traces):
    """Hyperparameters and tables are written at once; traces only with ``log_traces``."""
    logger = run(ConsoleLogger(stream=out, log_traces=log_traces)).logger
    logger.log_hyperparameters({"lr": 0.1})
    logger.log_table(["name", "size"], [["a", 1]], name="sizes")
    logger.log_traces({"EMA/batch_end": 1})
    expected = '[config] {"lr": 0.1}\n[table] sizes\n    name | size\n    a | 1\n'
    assert out.getvalue() == expected + ('[trace] {"EMA/batch_end": 1}\n' if log_traces else "")


def test_named_streams(run, capsys):
    """'stdout' and 'stderr' are the streams of the program."""
    run(ConsoleLogger("1ba", stream="stdout"), ConsoleLogger("1ba", stream="stderr")).batches(1)
    out, err = capsys.readouterr()
    assert out == err == "[train] epoch 1/3, batch 1/15: loss 1\n"
