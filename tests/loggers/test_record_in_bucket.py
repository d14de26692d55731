"""The record of a run whose checkpoints go to a bucket."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import recorded_in_bucket
from checkpoint.tiny_training import trainer
from forked import run_forked
from recorded_in_bucket import BATCHES

from composerlite.checkpoint.tools.surveying import place_at
from composerlite.loggers import JSONLLogger
from composerlite.report import collect_facts


@pytest.fixture
def uri(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Place of the checkpoints, on a service whose address is in the environment."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.new_bucket()}/run"


def launch(machine: Path, uri: str, until: str) -> Path:
    """Train on a machine, which has its own folder. Return the path of the record there."""
    record = JSONLLogger()
    saved: dict[str, Any] = {"save_folder": uri, "save_staging_folder": machine, "autoresume": True}
    with trainer(max_duration=until, loggers=record, save_interval="2ba", **saved) as run:
        run.fit()
    return record.path


def kinds(uri: str) -> list[tuple[str, int | None]]:
    """Return kind and batch of the main lines of the record in the bucket."""
    with place_at(uri) as place:
        data = place.read("record.jsonl")
    lines = [json.loads(line) for line in data.splitlines()]
    return [(line["kind"], line["batch"]) for line in lines if line["kind"] in ("start", "resume", "end", "note")]


def test_the_record_is_in_the_bucket_and_a_report_reads_it(tmp_path: Path, uri: str) -> None:
    """With the lines of all launches, also after a change of the machine and back: lines of both machines are kept."""
    first = launch(tmp_path / "a", uri, "1ep")
    assert kinds(uri) == [("start", 0), ("end", 4)]
    launch(tmp_path / "b", uri, "2ep")
    assert kinds(uri) == [("start", 0), ("end", 4), ("resume", 4), ("end", 8)]
    with first.open("a") as file:  # what the first machine had not uploaded when it was lost
        file.write(json.dumps({"at": "2026-01-01T00:00:00+00:00", "kind": "note", "batch": 4, "epoch": 1}) + "\n")
    launch(tmp_path / "a", uri, "3ep")
    history = [("start", 0), ("end", 4), ("note", 4), ("resume", 4), ("end", 8), ("resume", 8), ("end", 12)]
    assert kinds(uri) == history
    facts = collect_facts([uri])
    assert facts.record == f"{uri}/record.jsonl"
    assert [launch.first_batch for launch in facts.launches] == [0, 4, 8]


@pytest.mark.parametrize(
    ("dies_before", "machine"),
    [
        pytest.param(r"2:record\.jsonl", "b", id="record"),
        pytest.param(r"ep0-ba4-rank0\.pt", "b", id="data"),
        pytest.param(r"2:latest-rank0\.pt\.symlink", "b", id="link"),
        pytest.param(r"3:record\.jsonl", "b", id="next-record"),
        pytest.param(r"3:record\.jsonl", "a", id="next-record-same-machine"),
    ],
)
def test_a_kill_between_checkpoint_and_record(tmp_path: Path, uri: str, dies_before: str, machine: str) -> None:
    """Killed before an object of a checkpoint or its record is sent: the resumed run has each batch once."""
    killed = run_forked(recorded_in_bucket.main, str(tmp_path / "a"), uri, dies_before, cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    ended = run_forked(recorded_in_bucket.main, str(tmp_path / machine), uri, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    with place_at(uri) as place:
        lines = place.read("record.jsonl").decode().splitlines()
    assert len(set(lines)) == len(lines)
    facts = collect_facts([uri])
    assert [launch.end for launch in facts.launches] == ["killed", "finished"]
    (loss,) = [series for series in facts.metrics if series.name == "loss/train/total"]
    assert [batch for batch, _ in loss.kept] == list(range(1, BATCHES + 1))
    assert facts.launches[1].first_batch > 0, "it starts over"
    kept = [save for save in facts.saves if save.state == "committed" and save.is_uploaded]
    assert [save.batch for save in kept] == [2, 4, 6, 8]
    assert facts.faults == []


def test_a_record_with_another_name_is_not_uploaded(tmp_path: Path, uri: str) -> None:
    """Only the default file goes to the bucket by itself."""
    with trainer(
        max_duration="2ba", loggers=JSONLLogger(tmp_path / "mine.jsonl"), save_folder=uri, save_staging_folder=tmp_path
    ) as run:
        run.fit()
    with place_at(uri) as place:
        assert [path for path in place.files() if path.endswith(".jsonl")] == []
