"""CSVLogger."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from composerlite.errors import ConfigError
from composerlite.loggers import CSVLogger
from composerlite.types import CheckpointNews


def rows(path: Path) -> list[dict[str, str]]:
    """The table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def batches(path: Path) -> list[int]:
    """Of which batches there are rows."""
    return [int(row["batch"]) for row in rows(path)]


def test_a_row_for_each_batch(run, tmp_path):
    """Batch and epoch, then the metrics; what was not logged at a batch is empty there."""
    path = tmp_path / "metrics.csv"
    logged = run(CSVLogger(path)).batches(5).evaluate(accuracy=0.5)
    logged.logger.log_metrics({"note": 'said "a, b"', "vector": [1, 2]})
    logged.epoch().batches(1).finish()
    assert path.read_text().splitlines() == [
        "batch,epoch,loss/train/total,metrics/eval/accuracy,note",
        "1,0,1.0,,",
        "2,0,0.5,,",
        "3,0,0.3333333432674408,,",
        "4,0,0.25,,",
        '5,0,0.20000000298023224,0.5,"said ""a, b"""',
        "6,1,0.1666666716337204,,",
    ]


def test_a_column_that_comes_later_is_there_for_all_rows(run, tmp_path):
    """A metric that appears in the middle of a run gets a column at the right, and no row is lost for it."""
    path = tmp_path / "metrics.csv"
    logged = run(CSVLogger(path, flush_seconds=0)).batches(3)
    assert batches(path) == [1, 2, 3]
    logged.logger.log_metrics({"late": 1.5})
    logged.batches(1).finish()
    assert [(row["batch"], row["loss/train/total"][:4], row["late"]) for row in rows(path)] == [
        ("1", "1.0", ""),
        ("2", "0.5", ""),
        ("3", "0.33", "1.5"),
        ("4", "0.25", ""),
    ]


def test_a_resumed_run_goes_on_with_the_table(run, tmp_path):
    """Rows after the checkpoint go, every batch is there once, and new columns stand behind the old ones."""
    path = tmp_path / "metrics.csv"
    run(CSVLogger(path, flush_seconds=0)).batches(5)
    path.write_text(path.read_text() + "6,1,0.1")  # torn by a kill
    logged = run(CSVLogger(path, flush_seconds=0), resume_at=3)
    assert batches(path) == [1, 2, 3]
    logged.logger.log_metrics({"late": 1.5})  # of the batch that it was resumed from
    logged.batches(2).finish()
    assert batches(path) == [1, 2, 3, 4, 5]
    assert [row["late"] for row in rows(path)] == ["", "", "1.5", "", ""]
    run(CSVLogger(path)).batches(1).finish()
    assert batches(path) == [1], "a run from the beginning has a table of its own"


def test_what_is_logged_up_to_a_checkpoint_is_there_before_it(run, tmp_path):
    """Rows may wait, but not for longer than a checkpoint."""
    path = tmp_path / "metrics.csv"
    logged = run(CSVLogger(path, flush_seconds=1e9)).batches(4)
    assert path.read_text() == ""
    logged.logger.log_checkpoint(CheckpointNews(what="begun", name="ba4.pt", where="runs", batch=4, at=1e9))
    assert batches(path) == [1, 2, 3, 4]


def test_another_table_is_not_overwritten(run, tmp_path):
    """A file that this logger has not written stays as it is."""
    path = tmp_path / "metrics.csv"
    path.write_text("name,age\nfox,3\n")
    with pytest.raises(ConfigError, match="whose first columns are 'batch' and 'epoch'"):
        run(CSVLogger(path))
    assert path.read_text() == "name,age\nfox,3\n"


def test_wrong_arguments_are_errors_at_once(run, tmp_path):
    """Before training, with the value and the way out."""
    with pytest.raises(ConfigError, match=r"flush_seconds=-1"):
        CSVLogger(flush_seconds=-1)
    with pytest.raises(ConfigError, match="no logger of this run keeps files"):
        run(CSVLogger(tmp_path / "metrics.csv", remote_file_name="metrics.csv"))
