"""``composerlite report``: the facts of runs that were killed, in folders and in a bucket."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import run_forked
from recorded_run import launch, train, train_beside_a_slow_disk

from composerlite import Callback, Logger, State
from composerlite.cli import main
from composerlite.report import facts_of, sentences
from composerlite.testing import run_ranks


def composerlite(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command, with its output."""
    return run_forked(command, *map(str, arguments), cwd=cwd)


def command(*_: str) -> None:
    """What the command does with the arguments of its process."""
    main()


def facts(*arguments: object, cwd: Path) -> dict[str, Any]:
    """What the command answers a program that asks for JSON."""
    done = composerlite("report", *arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ── what it tells ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_run_that_was_killed_twice(killed_run: Path, tmp_path: Path) -> None:
    """Each launch from where to where, which work was done twice, each save, and a page that says so."""
    told = facts(killed_run, cwd=tmp_path)
    assert told["run_name"] == "tiny"
    assert told["status"] == "finished"
    launches = [(one["first_batch"], one["last_batch"], one["end"], one["lost_batches"]) for one in told["launches"]]
    assert launches == [(0, 6, "killed", 2), (4, 13, "killed", 1), (12, 24, "finished", 0)]
    assert (told["kills"], told["lost_batches"], told["last_batch"]) == (2, 3, 24)
    assert [(save["batch"], save["state"]) for save in told["saves"]] == [
        (batch, "committed") for batch in (4, 8, 12, 16, 20, 24)
    ]
    assert all(save["stall_seconds"] > 0 and save["committed_at"] >= save["begun_at"] for save in told["saves"])
    assert [one["batch"] for one in told["stored"]] == [4, 8, 12, 16, 20, 24]
    assert told["metrics"]["loss/train/total"]["count"] == 24 + 3
    assert told["metrics"]["metrics/eval/MulticlassAccuracy"]["last_batch"] == 24
    assert told["hyperparameters"]["max_duration"] == "3ep"
    assert told["wall_seconds"] == pytest.approx(sum(told["seconds"].values()))
    assert 0 < told["goodput"] < 1

    done = composerlite("report", killed_run, "-o", "pages/tiny.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "It took 3 launches: 2 were killed; the last reached its end." in done.stdout
    assert done.stdout.splitlines()[-1] == "report: pages/tiny.html"
    assert "3 were killed" not in (tmp_path / "pages" / "tiny.html").read_text()


def test_a_rank_that_holds_up_saves_is_named(tmp_path: Path) -> None:
    """Which rank, in how many saves, and how much longer it wrote; the time that training waited for it is no stall of
    saves in general."""
    run_ranks(train_beside_a_slow_disk, 2, str(tmp_path), dist_timeout=None)
    told = facts(tmp_path, cwd=tmp_path)
    assert [(save["slowest_rank"], save["is_held_up"]) for save in told["saves"]] == [(1, True)] * 2
    assert all(save["straggler_seconds"] > 0 for save in told["saves"])
    (line,) = [line for line in sentences(facts_of([str(tmp_path)])) if "held up" in line]
    assert line.startswith("Rank 1 held up 2 of 2 saves: it wrote up to ")
    assert told["seconds"]["straggler"] > 0
    assert told["wall_seconds"] == pytest.approx(sum(told["seconds"].values()))


def test_a_slow_rank_of_a_save_in_the_background_costs_what_the_next_save_waits_for_it(tmp_path: Path) -> None:
    """A record in which rank 3 writes 8 s longer than the others, and the next save waits 5 s; its stall is longest on
    another rank than 0."""
    seconds = [
        {"stall": 0.1, "longest_stall": 0.2, "straggler": 8.0, "waiting": 0.0, "total": 9.0},
        {"stall": 5.1, "longest_stall": 6.0, "straggler": 0.0, "waiting": 5.0, "total": 12.0},
    ]
    lines: list[dict[str, Any]] = [
        {"kind": "start", "format": 1, "run_name": "tiny", "batch": 0, "launched_at": "2026-01-01T00:00:00+00:00"},
        {"kind": "fit_start", "batch": 0},
        *({"kind": "checkpoint", "what": "committed", "name": f"ba{4 * n}", "where": "runs", "batch": 4 * n,
           "slowest_rank": 3, "seconds": taken} for n, taken in enumerate(seconds, 1)),
        {"kind": "metrics", "batch": 9, "metrics": {"time/batch": 9}},
        {"kind": "fit_end", "batch": 9},
    ]  # fmt: skip
    record = tmp_path / "record.jsonl"
    record.write_text(
        "".join(
            f"{json.dumps({'at': f'2026-01-01T00:00:{10 * n:02}+00:00', **line})}\n" for n, line in enumerate(lines)
        )
    )
    told = facts(record, cwd=tmp_path)
    assert told["seconds"]["straggler"] == pytest.approx(5.0)
    assert told["seconds"]["saving"] == pytest.approx(0.2 + 1.0)
    assert [save["is_held_up"] for save in told["saves"]] == [True, False]


def test_a_run_in_a_bucket(tmp_path: Path, s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on on another machine, and dies there, has one record in the bucket, and the report reads it."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"s3://{s3_server.new_bucket()}"
    assert launch(tmp_path / "a", "0", "1ep", bucket, environment=s3_server.environment) == 0
    assert launch(tmp_path / "b", "13", "3ep", bucket, environment=s3_server.environment) == -signal.SIGKILL
    assert launch(tmp_path / "b", "0", "3ep", bucket, environment=s3_server.environment) == 0
    told = facts(f"{bucket}/tiny", cwd=tmp_path)
    assert told["record"] == f"{bucket}/tiny/record.jsonl"
    launches = [(one["first_batch"], one["end"]) for one in told["launches"]]
    assert launches == [(0, "finished"), (8, "killed"), (12, "finished")]
    assert {one["where"] for one in told["stored"]} == {"remote"}
    saves = {save["batch"]: save for save in told["saves"]}
    assert sorted(saves) == [4, 8, 12, 16, 20, 24]
    assert all(save["is_uploaded"] for save in saves.values())
    assert saves[24]["uploaded_at"] >= saves[24]["committed_at"]
    both = facts(f"{bucket}/tiny", tmp_path / "b", cwd=tmp_path)
    assert {one["where"] for one in both["stored"]} == {"local", "remote"}
    assert len(both["saves"]) == 6, "a checkpoint in two places is one save"


class NoFolder(Callback):
    """The folder of checkpoints is a file between two batches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == 11:
            self.folder.rename(self.folder.with_suffix(".away"))
            self.folder.touch()
        elif int(state.timestamp.batch) == 14:
            self.folder.unlink()
            self.folder.with_suffix(".away").rename(self.folder)


def test_saves_that_failed_and_checkpoints_that_went(tmp_path: Path) -> None:
    """A save that failed is told with its error, and a checkpoint that was given up as deleted."""
    folder = tmp_path / "run" / "checkpoints"
    settings = {"save_num_checkpoints_to_keep": 2, "save_failure_limit": 1, "autoresume": False}
    train(tmp_path / "run", save_folder=str(folder), callbacks=[NoFolder(folder)], **settings)
    told = facts_of([str(tmp_path / "run")])
    assert [(save.batch, save.state) for save in told.saves] == [
        (4, "deleted"),
        (8, "deleted"),
        (12, "failed"),
        (16, "deleted"),
        (20, "committed"),
        (24, "committed"),
    ]
    assert "Error" in (told.saves[2].error or "")
    assert all(save.deleted_at is not None for save in told.saves if save.state == "deleted")
    assert "1 save failed" in " ".join(sentences(told))


# ── what is damaged or missing ───────────────────────────────────────────────────────────────────────────────────────
def test_a_torn_record_of_the_run_and_a_damaged_one_of_a_checkpoint(run_copy: Path, tmp_path: Path) -> None:
    """What cannot be read is said, and all the rest is told."""
    record, checkpoint = run_copy / "record.jsonl", run_copy / "ep0-ba4-rank0.pt"
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(lines[:3]) + lines[3][:20] + "\n" + "".join(lines[4:]) + '{"at": "2026-11-2')
    checkpoint.write_bytes(checkpoint.read_bytes().replace(b'"tiny"', b'"tony"'))
    told = facts(run_copy, cwd=tmp_path)
    assert any("lines 4, " in fault and "cannot be read" in fault for fault in told["faults"])
    assert any("ep0-ba4-rank0.pt" in fault and "digest does not match" in fault for fault in told["faults"])
    assert [one["end"] for one in told["launches"]] == ["killed", "killed", "finished"]
    assert [one["state"] for one in told["stored"]].count("incomplete") == 1


def test_a_record_alone_and_checkpoints_alone(run_copy: Path, tmp_path: Path) -> None:
    """Either is enough: the record knows launches, manifests know saves."""
    alone = facts(run_copy / "record.jsonl", cwd=tmp_path)
    assert (alone["kills"], alone["stored"]) == (2, [])
    (run_copy / "record.jsonl").unlink()
    without = facts(run_copy, cwd=tmp_path)
    assert (without["status"], without["launches"], without["record"]) == ("unknown", [], None)
    assert [save["batch"] for save in without["saves"]] == [4, 8, 12, 16, 20, 24]
    assert without["goodput"] is None


def test_of_several_runs_one_is_meant(run_copy: Path, tmp_path: Path) -> None:
    """The report is of the run that was active last, and --run names another."""
    other = tmp_path / "other"
    other.mkdir()
    text = (run_copy / "record.jsonl").read_text().replace('"tiny"', '"older"').replace('"at": "20', '"at": "19')
    (other / "record.jsonl").write_text(text)
    told = facts(run_copy, other, cwd=tmp_path)
    assert (told["run_name"], told["other_runs"]) == ("tiny", ["older"])
    assert facts(run_copy, other, "--run", "older", cwd=tmp_path)["run_name"] == "older"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nowhere"], 1, "'nowhere' does not exist"),
        (["nothing.jsonl"], 1, "there is no file 'nothing.jsonl'"),
        (["."], 1, "there is no run in ."),
        (["run", "--run", "tinny"], 2, "--run tinny: no run of that name in run. There are: tiny."),
        (["http://127.0.0.1/run"], 2, "is no address in an object store"),
    ],
)
def test_what_is_not_there_is_one_line(
    arguments: list[str], status: int, message: str, killed_run: Path, tmp_path: Path
) -> None:
    """A wrong place or name ends with a status and a line that says what is wrong."""
    if arguments[0] == "run":
        (tmp_path / "run").symlink_to(killed_run)
    done = composerlite("report", *arguments, cwd=tmp_path)
    assert done.returncode == status
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "report.html").exists()


def test_a_report_does_not_import_torch(killed_run: Path, tmp_path: Path) -> None:
    """A page is there at once, on a machine without torch, too."""
    program = (
        "import sys\nfrom composerlite.cli import main\n"
        f"sys.argv = ['composerlite', 'report', {str(killed_run)!r}]\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").is_file()
