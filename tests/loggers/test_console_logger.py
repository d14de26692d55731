"""ConsoleLogger."""

from __future__ import annotations

import io
import itertools
from datetime import timedelta

import pytest
import torch
from torch import nn

from composerlite.errors import ConfigError
from composerlite.loggers import ConsoleLogger


def test_a_line_per_interval(run):
    """Each two batches there is a line with epoch and batch, each of how many, and the latest values."""
    out = io.StringIO()
    run(ConsoleLogger("2ba", stream=out)).batches(5)

    assert out.getvalue().splitlines() == [
        "[train] epoch 1/3, batch 2/15: loss 0.5",
        "[train] epoch 1/3, batch 4/15: loss 0.25",
    ]


def test_a_line_per_epoch_with_its_metrics(run):
    """At an interval in epochs the line has the last loss and the training metrics of that epoch."""
    out = io.StringIO()
    run(ConsoleLogger("1ep", stream=out)).epoch(acc=0.75).epoch(acc=0.875)

    assert out.getvalue().splitlines() == [
        "[train] epoch 1/3, batch 5/15: loss 0.2, acc 0.75",
        "[train] epoch 2/3, batch 10/15: loss 0.1, acc 0.875",
    ]


def test_the_end_of_training_adds_no_line(run):
    """A training that ends with an epoch has one line for that epoch, not one more for the end."""
    out = io.StringIO()
    run(ConsoleLogger("1ep", stream=out), max_duration="5ba").epoch(acc=0.75).finish()

    assert out.getvalue() == "[train] epoch 1, batch 5/5: loss 0.2, acc 0.75\n"


def test_evaluations_and_what_is_left_at_the_end(run):
    """An evaluation has a line of its own; what no line has shown when training ends comes then, once."""
    out = io.StringIO()
    run(ConsoleLogger("4ba", stream=out), max_duration="6ba").epoch().evaluate(acc=0.5).batches(1).finish()

    assert out.getvalue().splitlines() == [
        "[train] epoch 1, batch 4/6: loss 0.25",
        "[eval] batch 5: acc 0.5",
        "[train] epoch 2, batch 6/6: loss 0.1667",
    ]


def test_interval_in_iterations_and_as_a_function(run):
    """Intervals in iterations and functions of one's own work too."""
    out = io.StringIO()
    later = run(ConsoleLogger("2iter", stream=out)).epoch().epoch()
    later.state.previous_timestamp = later.state.timestamp
    later.state.timestamp = later.state.timestamp.copy(iteration=2)
    later.engine.run_event("iteration_end")
    assert out.getvalue() == "[train] epoch 2/3, batch 10/15: loss 0.1\n"

    out = io.StringIO()
    run(ConsoleLogger(lambda state, event: state.timestamp.batch == 3, stream=out)).batches(5)
    assert out.getvalue() == "[train] epoch 1/3, batch 3/15: loss 0.3333\n"


def test_a_line_is_at_most_120_characters(run):
    """However much is logged, a line stays on one line of a terminal: the loss first, and how many more there were."""
    out = io.StringIO()
    training = run(ConsoleLogger("2ba", stream=out)).batches(1)
    training.logger.log_metrics({f"my/number-{i}": float(i) for i in range(20)})
    training.logger.log_metrics({"metrics/train/acc": 0.5, "loss/train/regularization": 0.25})
    training.batches(1)

    assert out.getvalue().splitlines() == [
        "[train] epoch 1/3, batch 2/15: loss 0.5, loss/regularization 0.25, acc 0.5, my/number-0 0, my/number-1 1, +18"
    ]


def test_what_the_run_costs_is_on_no_line(run):
    """Costs of checkpoints, speeds and times go to the other loggers: no line has them, none comes because of them."""
    out = io.StringIO()
    training = run(ConsoleLogger("2ba", stream=out)).batches(1)
    costs = (
        "checkpoint/total_seconds",
        "throughput/batches_per_sec",
        "wall_clock/train",
        "lr-SGD/group0",
        "time/token",
    )
    training.logger.log_metrics(dict.fromkeys(costs, 1.5))
    training.batches(1)
    training.logger.log_metrics(dict.fromkeys(costs, 2.5))
    training.finish()

    assert out.getvalue() == "[train] epoch 1/3, batch 2/15: loss 0.5\n"


def test_every_metric_of_an_evaluation_is_shown(run):
    """An evaluation of many metrics takes more lines, none of them longer than 120 characters."""
    out = io.StringIO()
    run(ConsoleLogger("1ep", stream=out)).evaluate(**{f"a-metric-{i}": i / 4 for i in range(12)})
    lines = out.getvalue().splitlines()

    assert lines[0].startswith("[eval] batch 0: a-metric-0 0, a-metric-1 0.25, ")
    assert lines[1].startswith("    a-metric-")
    assert max(map(len, lines)) <= 120
    assert sum(line.count("a-metric-") for line in lines) == 12


def test_learning_rate_speed_and_time_left(run, monkeypatch):
    """A line says the learning rate, batches per second since the last line, and how long training will still take."""
    seconds = iter([100.0, *[110.0] * 20])
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    out = io.StringIO()
    training = run(ConsoleLogger("5ba", stream=out))
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.01, 0.01, 0.002)]
    training.state.optimizers = [torch.optim.SGD(groups)]
    training.run_events(["fit_start"]).batches(4)
    training.state.timestamp = training.state.timestamp.copy(total_wct=timedelta(seconds=8))
    training.batches(1)

    assert out.getvalue() == ("[train] epoch 1/3, batch 5/15: loss 0.2, lr 0.01/0.002, 0.625 batches/s, 0:20 left\n")


def test_a_long_evaluation_is_not_silent(run, monkeypatch):
    """While an evaluation runs there is a line every 30 seconds."""
    seconds = itertools.count(0.0, 20.0)
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    out = io.StringIO()
    training = run(ConsoleLogger("1ep", stream=out)).batches(3)
    training.evaluate(batches=4, acc=0.5)

    assert out.getvalue().splitlines() == [
        "[eval] batch 3: evaluated 0/4 batches",
        "[eval] batch 3: evaluated 0/4 batches",
        "[eval] batch 3: acc 0.5",
    ]


def test_settings_tables_and_traces(run):
    """Hyperparameters and tables are written at once; traces only if asked for."""
    out = io.StringIO()
    logger = run(ConsoleLogger(stream=out)).logger
    logger.log_hyperparameters({"lr": 0.1})
    logger.log_table(["name", "size"], [["a", 1]], name="sizes")
    logger.log_traces({"EMA/batch_end": 1})
    assert out.getvalue() == '[config] {"lr": 0.1}\n[table] sizes\n    name | size\n    a | 1\n'

    out = io.StringIO()
    run(ConsoleLogger(stream=out, log_traces=True)).logger.log_traces({"EMA/batch_end": 1})
    assert out.getvalue() == '[trace] {"EMA/batch_end": 1}\n'


def test_named_streams(run, capsys):
    """'stdout' and 'stderr' are the program's streams."""
    run(ConsoleLogger("1ba", stream="stdout"), ConsoleLogger("1ba", stream="stderr")).batches(1)
    out, err = capsys.readouterr()

    assert out == err == "[train] epoch 1/3, batch 1/15: loss 1\n"


def test_only_rank_zero_writes(run, monkeypatch):
    """With several processes each line comes once."""
    monkeypatch.setenv("RANK", "1")
    out = io.StringIO()
    run(ConsoleLogger(stream=out)).epoch(acc=torch.tensor(1.0)).finish()

    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"stream": "stdrr"}, "Did you mean 'stderr'"),
        ({"log_interval": "2bq"}, "invalid time '2bq'"),
        ({"interval": "2ba"}, "Did you mean 'log_interval'"),
    ],
)
def test_bad_arguments(arguments, says):
    """A bad argument is an error at construction that says what is allowed."""
    with pytest.raises(ConfigError, match=says):
        ConsoleLogger(**arguments)
