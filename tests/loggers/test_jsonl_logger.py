"""JSONLLogger."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from composerlite import Trainer
from composerlite.errors import ConfigError
from composerlite.loggers import CSVLogger, JSONLLogger
from composerlite.models import ComposerClassifier
from composerlite.types import CheckpointNews


def lines(path: Path) -> list[dict[str, Any]]:
    """What is in the record; a word that JSON does not have is an error."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def kinds(path: Path) -> list[tuple[str, Any]]:
    """(kind, batch) of each line."""
    return [(line["kind"], line["batch"]) for line in lines(path)]


def test_a_line_for_all_that_happens(run, tmp_path):
    """Start, metrics of each batch as one line, evaluations, checkpoints and the end, each with time and place."""
    path = tmp_path / "record.jsonl"
    logged = run(JSONLLogger(path), max_duration="5ba")
    logged.logger.log_hyperparameters({"lr": 0.1, "where": Path("a")})
    logged.batches(1)
    logged.logger.log_checkpoint(
        CheckpointNews(
            what="committed", name="ba1.pt", where="runs", batch=1, at=1e9, size_bytes=3, seconds={"stall": 0.5}
        )
    )
    logged.batches(4).evaluate(accuracy=0.5).finish()
    assert kinds(path) == [
        ("start", 0),
        ("hyperparameters", 0),
        ("metrics", 1),
        ("checkpoint", 1),
        *(("metrics", batch) for batch in (2, 3, 4, 5, 5)),
        ("evaluation", 5),
        ("fit_end", 5),
        ("end", 5),
    ]
    told = lines(path)
    assert told[0]["run_name"] == "fox"
    assert told[0]["versions"]["torch"] == torch.__version__
    assert told[1]["hyperparameters"] == {"lr": 0.1, "where": "a"}
    assert told[2]["metrics"] == {"loss/train/total": 1.0, "time/batch": 1}
    assert told[3]["at"] == "2001-09-09T01:46:40.000+00:00"
    assert {name: told[3][name] for name in ("what", "name", "size_bytes", "seconds")} == {
        "what": "committed",
        "name": "ba1.pt",
        "size_bytes": 3,
        "seconds": {"stall": 0.5},
    }
    assert told[9]["label"] == "eval"
    assert told[-1]["how"] == "finished"


def test_numbers_that_json_does_not_have_are_texts(run, tmp_path):
    """A loss of NaN does not make the record unreadable, nor does a text that looks like it change."""
    path = tmp_path / "record.jsonl"
    logged = run(JSONLLogger(path))
    logged.logger.log_metrics({"a": math.nan, "b": torch.tensor([math.inf, 1.0]), "c": -math.inf, "d": "NaN"})
    logged.finish()
    assert lines(path)[1]["metrics"] == {"a": "nan", "b": ["inf", 1.0], "c": "-inf", "d": "NaN"}


def test_a_resumed_run_goes_on_behind_a_torn_line(run, tmp_path):
    """What a kill has left stays as it is, and the next launch begins a line of its own."""
    path = tmp_path / "record.jsonl"
    run(JSONLLogger(path)).batches(3).finish()
    path.write_text(path.read_text() + '{"at": "20')
    run(JSONLLogger(path, overwrite=True), resume_at=2).batches(1)
    text = path.read_text().splitlines()
    assert text.count('{"at": "20') == 1
    assert [json.loads(line)["kind"] for line in text if line != '{"at": "20'][-1] == "resume"
    run(JSONLLogger(path, overwrite=True)).finish()
    assert kinds(path) == [("start", 0), ("fit_end", 0), ("end", 0)], "a run from the beginning overwrites if asked to"


def test_what_is_logged_up_to_a_checkpoint_is_there_before_it(run, tmp_path):
    """Lines may wait, but not for longer than a checkpoint: the run that goes on from it misses nothing."""
    path = tmp_path / "record.jsonl"
    logged = run(JSONLLogger(path, flush_seconds=1e9)).batches(4)
    assert kinds(path) == [("start", 0)]
    logged.logger.log_checkpoint(CheckpointNews(what="begun", name="ba4.pt", where="runs", batch=4, at=1e9))
    assert [batch for kind, batch in kinds(path) if kind == "metrics"] == [1, 2, 3, 4]


def test_with_no_time_to_wait_every_batch_is_there(run, tmp_path):
    """With flush_seconds=0 SIGKILL between two batches loses nothing."""
    path = tmp_path / "record.jsonl"
    run(JSONLLogger(path, flush_seconds=0)).batches(3)
    assert [batch for kind, batch in kinds(path) if kind == "metrics"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("error", "how"), [(ValueError("no such word"), "error"), (SystemExit(143), "interrupted"), (None, "closed")]
)
def test_the_end_says_how_it_came(run, tmp_path, error, how):
    """A trainer that is closed while an exception passes says which."""
    path = tmp_path / "record.jsonl"
    logged = run(JSONLLogger(path)).batches(2)
    if error is None:
        logged.engine.close()
    else:
        with pytest.raises(type(error)), contextlib.closing(logged.engine):
            raise error
    end = lines(path)[-1]
    assert (end["kind"], end["how"]) == ("end", how)
    assert end["exit_code"] == (143 if how == "interrupted" else None)
    if how == "error":
        assert lines(path)[-2]["error"] == "ValueError: no such word"


def test_traces_if_asked_for(run, tmp_path):
    """With log_traces the record also says which algorithms ran."""
    for wanted in (False, True):
        path = tmp_path / f"{wanted}.jsonl"
        logged = run(JSONLLogger(path, log_traces=wanted))
        logged.logger.log_traces({"EMA/batch_end": 1})
        logged.finish()
        assert ("traces" in [kind for kind, _ in kinds(path)]) is wanted


def test_wrong_arguments_are_errors_at_once(run, tmp_path):
    """Before training, with the value and the way out."""
    with pytest.raises(ConfigError, match=r"flush_seconds=-1"):
        JSONLLogger(flush_seconds=-1)
    with pytest.raises(ConfigError, match="epoch"):
        JSONLLogger("{epoch}.jsonl")
    with pytest.raises(ConfigError, match="no logger of this run keeps files"):
        run(JSONLLogger(tmp_path / "record.jsonl", remote_file_name="record.jsonl"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        run(JSONLLogger(tmp_path / "file" / "record.jsonl"))


@pytest.mark.parametrize(("logger", "name"), [(JSONLLogger, "record.jsonl"), (CSVLogger, "metrics.csv")])
def test_the_file_lies_beside_the_checkpoints(run, tmp_path, monkeypatch, logger, name):
    """Without a filename it is where a report looks for it; without checkpoints in a folder named after the run."""
    monkeypatch.chdir(tmp_path)
    model = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
    with Trainer(model=model, run_name="owl", save_folder="kept/{run_name}", loggers=logger()):
        pass
    assert (tmp_path / "kept" / "owl" / name).is_file()
    run(logger()).finish()
    assert (tmp_path / "fox" / name).is_file()
