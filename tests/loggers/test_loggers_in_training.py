"""The loggers in a real training: with an error, and resumed."""

from __future__ import annotations

import io
import json
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite.core import Callback, LoggerDestination
from composerlite.loggers import FileLogger
from composerlite.models import ComposerClassifier
from composerlite.trainer import Trainer


class InterruptedRunError(Exception):
    """What ends a run in these tests."""


class InterruptAt(Callback):
    """Fails at the end of a batch, as a machine does."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_end(self, state, logger):
        if state.timestamp.batch == self.batch:
            raise InterruptedRunError


def build(**arguments):
    """A trainer of two epochs of five batches that evaluates after each."""
    data = TensorDataset(torch.randn(40, 6), torch.randint(4, (40,)))
    model = ComposerClassifier(nn.Linear(6, 4), num_classes=4)
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=8),
        eval_dataloader=DataLoader(data, batch_size=20),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="2ep",
        run_name="fox",
        device="cpu",
        **arguments,
    )


def test_output_where_there_is_no_terminal(capsys):
    """By default a training that writes to a file writes a line per epoch and one per evaluation to stderr."""
    with build() as trainer:
        trainer.fit()
    out, err = capsys.readouterr()
    lines = err.splitlines()

    assert out == ""
    assert [line.split(":")[0] for line in lines] == [
        "[train] epoch 1/2, batch 5/10",
        "[eval] batch 5",
        "[train] epoch 2/2, batch 10/10",
        "[eval] batch 10",
    ]
    assert re.fullmatch(
        r"\[train\] epoch 1/2, batch 5/10: loss \S+, lr 0.1, \S+ batches/s, 0:0\d left, MulticlassAccuracy \S+",
        lines[0],
    )
    assert re.fullmatch(r"\[eval\] batch 5: loss \S+, MulticlassAccuracy \S+, CrossEntropy \S+", lines[1])


def test_an_error_leaves_the_terminal_clean(monkeypatch):
    """The traceback of an error in training begins on a line of its own, whether or not the trainer is closed."""
    monkeypatch.setenv("TERM", "xterm")
    shown = io.StringIO()
    shown.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", shown)
    trainer = build(callbacks=InterruptAt(3))
    with pytest.raises(InterruptedRunError):
        trainer.fit()
    left = shown.getvalue()
    trainer.close()

    assert "epoch 1/2" in left
    assert left.replace("\x1b[?25h", "").endswith("\n")


def test_output_at_an_interval(capsys):
    """With log_to_console there is a line per interval, and the training metrics at the end, with and without bars."""
    for progress_bar in (True, False):
        with build(log_to_console=True, console_log_interval="2ba", progress_bar=progress_bar) as trainer:
            trainer.fit(duration="4ba")
        assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == [
            "[train] epoch 1, batch 2/4",
            "[train] epoch 1, batch 4/4",
            "[eval] batch 4",
            "[train] epoch 1, batch 4/4",
        ]


def test_log_file_of_an_interrupted_and_resumed_run(tmp_path):
    """The log is complete up to the error, goes on where the run resumes, and has all batches."""
    path = tmp_path / "log.txt"
    settings = {"save_folder": tmp_path / "ckpt", "save_interval": "3ba", "autoresume": True, "progress_bar": False}
    with (
        build(loggers=FileLogger(str(path)), callbacks=InterruptAt(5), **settings) as first,
        pytest.raises(InterruptedRunError),
    ):
        first.fit()
    with build(loggers=FileLogger(str(path)), **settings) as second:
        second.fit()

    lines = path.read_text().splitlines()
    assert lines[0] == '[start][batch=0] "fox"'
    resumed = lines.index('[resume][batch=3] "fox"')
    assert _batches(lines[:resumed]) == [1, 2, 3, 4, 5]
    assert _batches(lines[resumed:]) == [4, 5, 6, 7, 8, 9, 10]


def _batches(lines):
    metrics = [json.loads(line.split("] ", 1)[1]) for line in lines if line.startswith("[metric]")]
    return [values["time/batch"] for values in metrics if "time/batch" in values]


def test_settings_are_logged_before_the_run_is_built(tmp_path):
    """auto_log_hparams reaches the log file although it comes before everything else."""
    path = tmp_path / "log.txt"
    with build(loggers=FileLogger(str(path)), auto_log_hparams=True, progress_bar=False, seed=3):
        pass

    settings = next(line for line in path.read_text().splitlines() if line.startswith("[hyperparameters]"))
    assert json.loads(settings.split("] ", 1)[1])["seed"] == 3


def test_a_destination_that_fails_keeps_a_file_from_no_other(tmp_path):
    """All destinations get a file before what one of them raises is raised; several errors are raised together."""

    class Keeps(LoggerDestination):
        def __init__(self, error: Exception | None) -> None:
            self.error = error
            self.files: list[str] = []

        def can_upload_files(self) -> bool:
            return True

        def upload_file(self, state, remote_file_name, file_path, *, overwrite):
            self.files.append(remote_file_name)
            if self.error is not None:
                raise self.error

    first, second, third = Keeps(PermissionError("first")), Keeps(None), Keeps(OSError("third"))
    with build(loggers=[first, second, third], progress_bar=False) as trainer:
        (tmp_path / "a").write_text("")
        with pytest.raises(ExceptionGroup, match=r"upload_file\(.*several loggers failed") as error:
            trainer.logger.upload_file("a", tmp_path / "a")
        third.error = None
        with pytest.raises(PermissionError, match="first"):
            trainer.logger.upload_file("a", tmp_path / "a")
        with pytest.raises(FileNotFoundError, match="missing"):
            trainer.logger.upload_file("b", tmp_path / "missing")

    assert [str(one) for one in error.value.exceptions] == ["first", "third"]
    assert first.files == second.files == third.files == ["a", "a"]
