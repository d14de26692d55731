"""ConsoleLogger."""

from __future__ import annotations

import io

import pytest
import torch

from composerlite.errors import ConfigError
from composerlite.loggers import ConsoleLogger


def test_a_line_per_interval(run):
    """Each two batches there is a line with epoch, batch and the latest values."""
    out = io.StringIO()
    run(ConsoleLogger("2ba", stream=out)).batches(5)

    assert out.getvalue().splitlines() == [
        "[train] epoch 1/3, batch 2: loss/train/total=0.5",
        "[train] epoch 1/3, batch 4: loss/train/total=0.25",
    ]


def test_a_line_per_epoch_with_its_metrics(run):
    """At an interval in epochs the line has the last loss and the training metrics of that epoch."""
    out = io.StringIO()
    run(ConsoleLogger("1ep", stream=out)).epoch(acc=0.75).epoch(acc=0.875)

    assert out.getvalue().splitlines() == [
        "[train] epoch 1/3, batch 5: loss/train/total=0.2 metrics/train/acc=0.75",
        "[train] epoch 2/3, batch 10: loss/train/total=0.1 metrics/train/acc=0.875",
    ]


def test_the_end_of_training_adds_no_line(run):
    """A training that ends with an epoch has one line for that epoch, not one more for the end."""
    out = io.StringIO()
    run(ConsoleLogger("1ep", stream=out), max_duration="5ba").epoch(acc=0.75).finish()

    assert out.getvalue() == "[train] epoch 1, batch 5/5: loss/train/total=0.2 metrics/train/acc=0.75\n"


def test_evaluations_and_what_is_left_at_the_end(run):
    """An evaluation has a line of its own; what no line has shown when training ends comes then, once."""
    out = io.StringIO()
    run(ConsoleLogger("4ba", stream=out), max_duration="6ba").epoch().evaluate(acc=0.5).batches(1).finish()

    assert out.getvalue().splitlines() == [
        "[train] epoch 1, batch 4/6: loss/train/total=0.25",
        "[eval] batch 5: metrics/eval/acc=0.5",
        "[train] epoch 2, batch 6/6: loss/train/total=0.166667",
    ]


def test_interval_in_iterations_and_as_a_function(run):
    """Intervals in iterations and functions of one's own work too."""
    out = io.StringIO()
    later = run(ConsoleLogger("2iter", stream=out)).epoch().epoch()
    later.state.previous_timestamp = later.state.timestamp
    later.state.timestamp = later.state.timestamp.copy(iteration=2)
    later.engine.run_event("iteration_end")
    assert out.getvalue() == "[train] epoch 2/3, batch 10: loss/train/total=0.1\n"

    out = io.StringIO()
    run(ConsoleLogger(lambda state, event: state.timestamp.batch == 3, stream=out)).batches(5)
    assert out.getvalue() == "[train] epoch 1/3, batch 3: loss/train/total=0.333333\n"


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

    assert out == err == "[train] epoch 1/3, batch 1: loss/train/total=1\n"


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
        ({"log_interval": "2bq"}, "'2bq' cannot be read"),
        ({"interval": "2ba"}, "Did you mean 'log_interval'"),
    ],
)
def test_bad_arguments(arguments, says):
    """A bad argument is an error at construction that says what is allowed."""
    with pytest.raises(ConfigError, match=says):
        ConsoleLogger(**arguments)
