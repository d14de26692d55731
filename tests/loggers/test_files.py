"""FileLogger, JSONLLogger, CSVLogger and InMemoryLogger: the form of what they keep."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint.tiny_training import trainer

from composerlite.core import LoggerDestination, State
from composerlite.errors import ConfigError
from composerlite.loggers import CSVLogger, FileLogger, InMemoryLogger, JSONLLogger
from composerlite.types import CheckpointNews


def records(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record. A word that JSON does not have is an error."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def kinds(path: Path) -> list[tuple[str, Any]]:
    return [(line["kind"], line["batch"]) for line in records(path)]


def batches(path: Path) -> list[int]:
    """Return the batches of the rows of a table, or of the metrics in a log file."""
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return [int(row["batch"]) for row in csv.DictReader(file)]
    return [int(line.split("=")[1].split("]")[0]) for line in path.read_text().splitlines() if "[metric]" in line]


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_line_for_each_logged_value(run, tmp_path):
    """The brackets have the kind and the batch; the rest is JSON, also of tensors."""
    path = tmp_path / "log.txt"
    logged = run(FileLogger(str(path)))
    logged.logger.log_hyperparameters({"lr": 0.1, "where": Path("a")})
    logged.batches(1)
    logged.logger.log_metrics({"vector": torch.tensor([1.0, 2.0]), "nested": {"a": [torch.tensor(3)]}})
    logged.logger.log_table(["name"], [["a"]], name="names", step=1)
    logged.finish()
    assert path.read_text().splitlines() == [
        '[start][batch=0] "fox"',
        '[hyperparameters] {"lr": 0.1, "where": "a"}',
        '[metric][batch=1] {"loss/train/total": 1.0, "time/batch": 1}',
        '[metric][batch=1] {"vector": [1.0, 2.0], "nested": {"a": [3]}}',
        '[table][batch=1] {"name": "names", "columns": ["name"], "rows": [["a"]]}',
    ]


def test_lines_arrive_at_the_flush_interval(run, tmp_path, monkeypatch):
    """Every ``flush_interval`` batches, and after an evaluation. The default name has the run's name and the rank."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "fox" / "logs-rank0.txt"
    logged = run(FileLogger(flush_interval=2)).batches(3)
    assert batches(path) == [1, 2]
    logged.evaluate(acc=0.5)
    assert batches(path) == [1, 2, 3, 3]


def test_the_file_of_an_earlier_launch(run, tmp_path):
    """A resumed run always appends. A run from its beginning appends, or replaces the file with ``overwrite``."""
    path = tmp_path / "log.txt"
    run(FileLogger(str(path))).batches(3).finish()
    run(FileLogger(str(path), overwrite=True), resume_at=2).batches(1).finish()
    assert '[resume][batch=2] "fox"' in path.read_text()
    run(FileLogger(str(path))).batches(1).finish()
    assert batches(path) == [1, 2, 3, 3, 1]
    run(FileLogger(str(path), overwrite=True)).batches(1).finish()
    assert batches(path) == [1]


def test_captured_output(run, tmp_path, capsys):
    """With ``capture_stdout`` the prints of the program are lines, and still reach the terminal."""
    path = tmp_path / "log.txt"
    before = sys.stdout
    logged = run(FileLogger(str(path), capture_stdout=True))
    sys.stdout.write("half a line")
    sys.stdout.write(", and the rest\n")
    logged.finish()
    assert sys.stdout is before
    assert capsys.readouterr().out == "half a line, and the rest\n"
    assert path.read_text().splitlines()[-1] == '[stdout] "half a line, and the rest"'


class Folder(LoggerDestination):
    """A destination that copies files into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def can_upload_files(self) -> bool:
        return True

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        target = self.folder / remote_file_name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file_path, target)


def test_upload_of_the_file(run, tmp_path):
    """Loggers that upload files get the file after each epoch and when the trainer closes."""
    logger = FileLogger(str(tmp_path / "log.txt"), remote_file_name="{run_name}/rank{rank}.txt")
    logged = run(Folder(tmp_path / "remote"), logger).epoch()
    copy = tmp_path / "remote" / "fox" / "rank0.txt"
    assert len(batches(copy)) == 5
    logged.batches(1).engine.close()
    assert len(batches(copy)) == 6


# ── the record ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_record_of_all_events(run, tmp_path):
    """Start, metrics, evaluations, checkpoints and the end, each with time and batch."""
    path = tmp_path / "record.jsonl"
    logged = run(JSONLLogger(path), max_duration="2ba")
    logged.logger.log_hyperparameters({"lr": 0.1, "where": Path("a")})
    logged.batches(1)
    cost = {"size_bytes": 3, "seconds": {"stall": 0.5}}
    logged.logger.log_checkpoint(CheckpointNews(what="committed", name="ba1.pt", where="runs", batch=1, at=1e9, **cost))
    logged.batches(1).evaluate(accuracy=0.5).finish()
    assert kinds(path) == [
        ("start", 0),
        ("hyperparameters", 0),
        ("metrics", 1),
        ("checkpoint", 1),
        ("metrics", 2),
        ("metrics", 2),
        ("evaluation", 2),
        ("fit_end", 2),
        ("end", 2),
    ]
    start, settings, metrics, checkpoint, *_, evaluation, _, end = records(path)
    assert (start["run_name"], start["versions"]["torch"]) == ("fox", torch.__version__)
    assert settings["hyperparameters"] == {"lr": 0.1, "where": "a"}
    assert metrics["metrics"] == {"loss/train/total": 1.0, "time/batch": 1}
    assert checkpoint["at"] == "2001-09-09T01:46:40.000+00:00"
    assert checkpoint.items() >= {"what": "committed", "name": "ba1.pt", **cost}.items()
    assert (evaluation["label"], end["how"]) == ("eval", "finished")


def test_numbers_that_json_does_not_have_are_texts(run, tmp_path):
    """NaN and infinity do not make the record unreadable, and a text that looks like a number stays a text."""
    logged = run(JSONLLogger(tmp_path / "record.jsonl"))
    logged.logger.log_metrics({"a": math.nan, "b": torch.tensor([math.inf, 1.0]), "c": -math.inf, "d": "NaN"})
    logged.finish()
    assert records(tmp_path / "record.jsonl")[1]["metrics"] == {"a": "nan", "b": ["inf", 1.0], "c": "-inf", "d": "NaN"}


def test_a_record_after_a_kill(run, tmp_path):
    """A line that a kill cut off stays, and the next launch begins a new line, also with ``overwrite``."""
    path = tmp_path / "record.jsonl"
    run(JSONLLogger(path)).batches(3).finish()
    path.write_text(path.read_text() + '{"at": "20')
    run(JSONLLogger(path, overwrite=True), resume_at=2).batches(1)
    text = path.read_text().splitlines()
    assert text.count('{"at": "20') == 1
    assert json.loads(text[-1])["kind"] == "resume"
    run(JSONLLogger(path, overwrite=True)).finish()
    assert kinds(path) == [("start", 0), ("fit_end", 0), ("end", 0)]


@pytest.mark.parametrize(
    ("error", "how", "code"),
    [(ValueError("no such word"), "error", None), (SystemExit(143), "interrupted", 143), (None, "closed", None)],
)
def test_the_end_in_the_record(run, tmp_path, error, how, code):
    """A trainer that is closed by an exception records the exception."""
    path = tmp_path / "record.jsonl"
    logged = run(JSONLLogger(path)).batches(2)
    if error is None:
        logged.engine.close()
    else:
        with pytest.raises(type(error)), contextlib.closing(logged.engine):
            raise error
    *_, before, end = records(path)
    assert (end["kind"], end["how"], end["exit_code"]) == ("end", how, code)
    assert before.get("error") == ("ValueError: no such word" if how == "error" else None)


@pytest.mark.parametrize(("logger", "name"), [(JSONLLogger, "record.jsonl"), (CSVLogger, "metrics.csv")])
def test_the_default_place_is_beside_the_checkpoints(run, tmp_path, monkeypatch, logger, name):
    """A report finds the file there. Without checkpoints the file is in a folder named after the run."""
    monkeypatch.chdir(tmp_path)
    with trainer(run_name="owl", save_folder="kept/{run_name}", loggers=logger()):
        pass
    assert (tmp_path / "kept" / "owl" / name).is_file()
    run(logger()).finish()
    assert (tmp_path / "fox" / name).is_file()


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_row_for_each_batch(run, tmp_path):
    """A metric that appears later gets a column at the right; cells of other batches are empty."""
    path = tmp_path / "metrics.csv"
    logged = run(CSVLogger(path, flush_seconds=0)).batches(2)
    assert batches(path) == [1, 2]
    logged.evaluate(accuracy=0.5)
    logged.logger.log_metrics({"note": 'said "a, b"', "vector": [1, 2]})
    logged.batches(1).finish()
    assert path.read_text().splitlines() == [
        "batch,epoch,loss/train/total,metrics/eval/accuracy,note",
        "1,0,1.0,,",
        '2,0,0.5,0.5,"said ""a, b"""',
        "3,0,0.3333333432674408,,",
    ]


def test_a_resumed_table(run, tmp_path):
    """Rows after the checkpoint, and a row that a kill cut off, are removed. A run from its beginning replaces all."""
    path = tmp_path / "metrics.csv"
    run(CSVLogger(path, flush_seconds=0)).batches(5)
    path.write_text(path.read_text() + "6,1,0.1")
    logged = run(CSVLogger(path, flush_seconds=0), resume_at=3)
    assert batches(path) == [1, 2, 3]
    logged.logger.log_metrics({"late": 1.5})  # at the batch of the checkpoint
    logged.batches(2).finish()
    rows = path.read_text().splitlines()
    assert [row.rsplit(",", 1)[1] for row in rows] == ["late", "", "", "1.5", "", ""]
    run(CSVLogger(path)).batches(1).finish()
    assert batches(path) == [1]


def test_another_table_is_not_overwritten(run, tmp_path):
    """A table of another program stays unchanged."""
    path = tmp_path / "metrics.csv"
    path.write_text("name,age\nfox,3\n")
    with pytest.raises(ConfigError, match="is another table: the first columns of this logger are 'batch' and 'epoch'"):
        run(CSVLogger(path))
    assert path.read_text() == "name,age\nfox,3\n"


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_values_in_memory(run):
    """Each value has its timestamp, and a metric comes as arrays of values and times."""
    memory = InMemoryLogger()
    logger = run(memory).epoch().batches(1).logger
    last = [(int(time.epoch), int(time.batch), round(v, 3)) for time, v in memory.data["loss/train/total"][-2:]]
    assert last == [(0, 5, 0.2), (1, 6, 0.167)]
    assert memory.most_recent_values["time/batch"] == memory.most_recent_timestamps["time/batch"].batch == 6
    logger.log_metrics({"late": 1}, step=1)
    assert memory.most_recent_timestamps["late"].batch == 1
    series = memory.get_timeseries("time/batch")
    assert series["time/batch"].tolist() == series["batch"].tolist() == [1, 2, 3, 4, 5, 6]
    assert series["sample"].tolist() == [8, 16, 24, 32, 40, 48]
    assert series["total_wct"].tolist() == [0.0] * 6
    with pytest.raises(ConfigError, match="Did you mean 'time/batch'"):
        memory.get_timeseries("time/batches")


def test_values_in_memory_do_not_change(run):
    """Tensors of one element become numbers; larger tensors are copied, since training changes them in place."""
    memory = InMemoryLogger()
    weights, array = torch.ones(2), np.ones(2)
    logged = {"one": torch.tensor([3.0]), "numpy": np.float32(0.5), "many": weights, "array": array}
    run(memory).logger.log_metrics(logged)
    weights += 1
    array += 1
    values = memory.most_recent_values
    assert (values["one"], values["numpy"]) == (3.0, 0.5)
    assert values["many"].tolist() == values["array"].tolist() == [1.0, 1.0]


def test_settings_tables_and_traces_in_memory(run):
    """Hyperparameters and the last table of each name are kept; traces only on request."""
    memory, tracing = InMemoryLogger(), InMemoryLogger(log_traces=True)
    logger = run(memory, tracing).logger
    logger.log_hyperparameters({"lr": 0.1})
    logger.log_table(["name"], [["a"]], name="names")
    logger.log_traces({"EMA/batch_end": 1})
    assert memory.hyperparameters == {"lr": 0.1}
    assert memory.tables == {"names": (["name"], [["a"]])}
    assert memory.traces == {}
    assert [value for _, value in tracing.traces["EMA/batch_end"]] == [1]
