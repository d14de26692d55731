"""TensorboardLogger: the event files are read back with TensorBoard's own reader."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from forked import run_forked
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from composerlite.core import Callback, Engine
from composerlite.errors import ConfigError
from composerlite.loggers import TensorboardLogger


class LogsWhileClosing(Callback):
    """A callback whose last words come when it closes."""

    def close(self, state, logger):
        logger.log_metrics({"last": 1})


def read(folder: Path) -> EventAccumulator:
    """What TensorBoard shows of a run."""
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def steps(folder: Path, name: str = "loss/train/total") -> list[int]:
    """The steps at which TensorBoard shows a metric."""
    return [event.step for event in read(folder).Scalars(name)]


def test_metrics_in_a_folder_of_the_run(run, tmp_path):
    """Metrics are in a folder named after the run, at the batch they were logged at."""
    run(TensorboardLogger(tmp_path)).epoch(acc=0.75).finish()

    losses = read(tmp_path / "fox").Scalars("loss/train/total")
    assert [event.step for event in losses] == [1, 2, 3, 4, 5]
    assert [event.value for event in losses] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])
    assert steps(tmp_path / "fox", "metrics/train/acc") == [5]


def test_folder_names(run, tmp_path, monkeypatch):
    """By default the folder is tensorboard_logs; {run_name} may be anywhere in log_dir; ranks can have their own."""
    monkeypatch.chdir(tmp_path)
    run(TensorboardLogger()).batches(1).finish()
    run(TensorboardLogger("{run_name}/curves", rank_zero_only=False)).batches(1).finish()

    assert steps(tmp_path / "tensorboard_logs" / "fox") == [1]
    assert steps(tmp_path / "fox" / "curves" / "rank0") == [1]


def test_steps_after_the_resume_point_are_not_doubled(run, tmp_path):
    """A run killed after batch 4 and resumed from batch 2 shows each step once, with the values of the resumed run."""
    killed = run(TensorboardLogger(tmp_path)).batches(4)
    killed.logger.log_metrics({"only before": 1})
    killed.engine.close()
    run(TensorboardLogger(tmp_path), resume_at=2).batches(4).finish()

    assert steps(tmp_path / "fox") == [1, 2, 3, 4, 5, 6]
    assert steps(tmp_path / "fox", "only before") == []


def test_a_run_that_starts_again_replaces_its_earlier_attempt(run, tmp_path):
    """A run killed before its first checkpoint starts from the beginning, and shows no step twice."""
    run(TensorboardLogger(tmp_path)).batches(4).finish()
    run(TensorboardLogger(tmp_path)).batches(2).finish()

    assert steps(tmp_path / "fox") == [1, 2]


def test_flush_interval(run, tmp_path):
    """Every flush_interval batches the curves can be seen while training goes on."""
    going_on = run(TensorboardLogger(tmp_path, flush_interval=2)).batches(3)
    assert set(steps(tmp_path / "fox")) >= {1, 2}

    going_on.evaluate(acc=0.5)
    assert steps(tmp_path / "fox", "metrics/eval/acc") == [3]
    going_on.finish()


def test_text_tables_and_images(run, tmp_path):
    """Settings and tables show as text, images as images."""
    logged = run(TensorboardLogger(tmp_path))
    logged.logger.log_hyperparameters({"lr": 0.1})
    logged.logger.log_table(["name"], [["a"]], name="names")
    logged.logger.log_images(torch.zeros(2, 3, 4, 4), name="drawn")
    logged.logger.log_images(torch.zeros(2, 4, 4, 3), name="painted", channels_last=True)
    logged.finish()

    shown = read(tmp_path / "fox")
    assert shown.Tensors("hyperparameters/lr/text_summary")[0].tensor_proto.string_val == [b"0.1"]
    assert b"| a |" in shown.Tensors("names/text_summary")[0].tensor_proto.string_val[0]
    assert {tag.split("/")[0] for tag in shown.Tags()["images"]} == {"drawn", "painted"}


def test_what_is_logged_before_the_checkpoint_is_loaded(run, tmp_path):
    """Settings and images of before it is known where the run goes on are shown at the batch where it does."""
    logger = TensorboardLogger(tmp_path)
    logger.log_hyperparameters({"lr": 0.1})
    logger.log_images(torch.zeros(1, 3, 4, 4), name="drawn")
    run(logger, resume_at=3).finish()

    shown = read(tmp_path / "fox")
    settings = shown.Tensors("hyperparameters/lr/text_summary")
    assert [(event.step, event.tensor_proto.string_val) for event in settings] == [(3, [b"0.1"])]
    assert [event.step for event in shown.Images("drawn")] == [3]


def test_closing_after_an_error_and_twice(run, tmp_path):
    """What was logged before an error is in the files after close; closing again is harmless."""
    logged = run(TensorboardLogger(tmp_path)).batches(1)
    logger = logged.state.callbacks[0]
    for _ in range(2):
        logger.close(logged.state, logged.logger)
        logger.post_close()

    assert steps(tmp_path / "fox") == [1]


def test_last_words_of_other_callbacks(run, tmp_path):
    """What other callbacks log while the trainer closes is in the files as well."""
    logged = run(TensorboardLogger(tmp_path))
    logged.state.callbacks.append(LogsWhileClosing())
    Engine(logged.state, logged.logger).close()

    assert steps(tmp_path / "fox", "last") == [0]


def test_closing_before_anything_happened(run, tmp_path):
    """A trainer that fails while it is built can still be closed, and leaves no files."""
    logger = TensorboardLogger(tmp_path)
    logger.close(run().state, run().logger)
    logger.post_close()

    assert list(tmp_path.iterdir()) == []


def test_only_rank_zero_writes(run, tmp_path, monkeypatch):
    """With several processes one of them writes."""
    monkeypatch.setenv("RANK", "1")
    logged = run(TensorboardLogger(tmp_path)).epoch()
    logged.logger.log_images(torch.zeros(2, 3, 4, 4))
    logged.finish()

    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder(run, tmp_path):
    """A folder that cannot be made is an error when the trainer is built, and names it."""
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="file/fox' cannot be made"):
        run(TensorboardLogger(tmp_path / "file"))


def without_tensorboard():
    """What a program says that makes the logger where tensorboard is not there."""
    sys.modules["tensorboard"] = None
    try:
        TensorboardLogger()
    except ValueError as e:
        sys.stdout.write(str(e))


def test_tensorboard_not_installed(tmp_path):
    """Without tensorboard the error says what to install."""
    assert "pip install 'composerlite[tensorboard]'" in run_forked(without_tensorboard, cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"flush_interval": 0}, "flush_interval=0"),
        ({"log_dir": "{run_nam}"}, "Did you mean 'run_name'"),
        ({"logdir": "x"}, "Did you mean 'log_dir'"),
    ],
)
def test_bad_arguments(arguments, says):
    """A bad argument is an error at construction that says what there is."""
    with pytest.raises(ConfigError, match=says):
        TensorboardLogger(**arguments)
