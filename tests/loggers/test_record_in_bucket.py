"""The record of a run whose checkpoints go to a bucket: it is there, too, whichever machine the run is on."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import recorded_in_bucket
from checkpoint.tiny_training import CrashError, data, trainer
from forked import run_forked
from recorded_in_bucket import BATCHES

from composerlite import Callback, Logger, State
from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint.tools.surveying import place_at
from composerlite.loggers import JSONLLogger
from composerlite.loggers.run_file import _joined  # pyright: ignore[reportPrivateUsage]
from composerlite.report import collect_facts


@pytest.fixture
def uri(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where checkpoints go, on a service that the environment names."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3_server.new_bucket()}/run"


def launch(machine: Path, uri: str, until: str) -> Path:
    """Train until then on a machine with a folder of its own; the file of the record there."""
    record = JSONLLogger()
    saved: dict[str, Any] = {"save_folder": uri, "save_staging_folder": machine, "autoresume": True}
    with trainer(max_duration=until, loggers=record, save_interval="2ba", **saved) as run:
        run.fit()
    return record.path


def kinds(uri: str) -> list[tuple[str, int | None]]:
    """Kind and batch of the lines in the bucket that say what became of the run."""
    with place_at(uri) as place:
        data = place.read("record.jsonl")
    lines = [json.loads(line) for line in data.splitlines()]
    return [(line["kind"], line["batch"]) for line in lines if line["kind"] in ("start", "resume", "end", "note")]


def test_the_record_is_in_the_bucket_and_a_report_reads_it(tmp_path: Path, uri: str) -> None:
    """Without a word about it: with the whole history, also when the machine was replaced, and again."""
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


class Look(Callback):
    """What the bucket has before a batch, when all that was to be uploaded is."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.seen: list[tuple[str, int | None]] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        (saver,) = (one for one in state.callbacks if isinstance(one, CheckpointSaver))
        (publisher,) = saver.manager.publishers
        assert publisher.uploader.wait(60.0)
        if int(state.timestamp.batch) == 8:
            self.seen = kinds(self.uri)
            raise CrashError


def test_the_record_is_there_with_each_checkpoint(tmp_path: Path, uri: str) -> None:
    """In the middle of an epoch: a machine that is lost takes what came after the last checkpoint with it."""
    look = Look(uri)
    how: dict[str, Any] = {"save_folder": uri, "save_staging_folder": tmp_path, "save_interval": "2ba"}
    loader = data(64)
    with (
        pytest.raises(CrashError),
        trainer(train_dataloader=loader, loggers=JSONLLogger(), callbacks=[look], **how) as run,
    ):
        run.fit()
    assert look.seen == [("start", 0)]


@pytest.mark.parametrize("machine", ["the same machine", "another machine"])
@pytest.mark.parametrize(
    "dies_before",
    [
        pytest.param(r"2:record\.jsonl", id="record"),
        pytest.param(r"ep0-ba4-rank0\.pt", id="data"),
        pytest.param(r"2:latest-rank0\.pt\.symlink", id="link"),
        pytest.param(r"3:record\.jsonl", id="next-record"),
    ],
)
def test_a_kill_between_checkpoint_and_record_leaves_a_whole_history(
    tmp_path: Path, uri: str, dies_before: str, machine: str
) -> None:
    """Killed before any of the objects of a checkpoint and its record is sent: no batch is missing, none is twice."""
    first, second = tmp_path / "a", tmp_path / ("a" if machine == "the same machine" else "b")
    killed = run_forked(recorded_in_bucket.main, str(first), uri, dies_before, cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    ended = run_forked(recorded_in_bucket.main, str(second), uri, cwd=tmp_path)
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


def test_a_name_of_ones_own_keeps_the_record_here(tmp_path: Path, uri: str) -> None:
    """A file elsewhere is not uploaded unless that is asked for."""
    with trainer(
        max_duration="2ba", loggers=JSONLLogger(tmp_path / "mine.jsonl"), save_folder=uri, save_staging_folder=tmp_path
    ) as run:
        run.fit()
    with place_at(uri) as place:
        assert [path for path in place.files() if path.endswith(".jsonl")] == []


@pytest.mark.parametrize(
    ("here", "there", "joined"),
    [
        (b"", b"1\n2\n", b"1\n2\n"),
        (b"1\n2\n", b"1\n", b"1\n2\n"),
        (b"1\n", b"1\n2\n", b"1\n2\n"),
        (b"1\n23\n", b"1\n24\n", b"1\n23\n24\n"),
        (b"1\n2", b"1\n34\n", b"1\n2\n34\n"),
    ],
)
def test_no_line_is_lost_where_two_machines_have_lines(here: bytes, there: bytes, joined: bytes) -> None:
    """What one has more than the other stays, in the order in which it was written."""
    assert _joined(here, there) == joined
