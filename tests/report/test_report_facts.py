"""``composerlite report``: facts about runs that were killed, in folders and in a bucket."""

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
from composerlite.report import collect_facts, summarize, to_json
from composerlite.testing import run_ranks


def report(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_forked(command, "report", *map(str, arguments), cwd=cwd)


def command(*_: str) -> None:
    main()


def facts(*places: object, run: str | None = None) -> dict[str, Any]:
    return to_json(collect_facts([str(place) for place in places], run))


def test_run_killed_twice(killed_run: Path, tmp_path: Path) -> None:
    """The JSON has the batches and the end of each launch, lost work, saves, metrics; the terminal has a summary."""
    found = json.loads(report(killed_run, "--json", cwd=tmp_path).stdout)
    assert (found["run_name"], found["status"]) == ("tiny", "finished")
    launches = [(one["first_batch"], one["last_batch"], one["end"], one["lost_batches"]) for one in found["launches"]]
    assert launches == [(0, 6, "killed", 2), (4, 13, "killed", 1), (12, 24, "finished", 0)]
    assert (found["kills"], found["lost_batches"], found["last_batch"]) == (2, 3, 24)
    batches = [4, 8, 12, 16, 20, 24]
    assert [(save["batch"], save["state"]) for save in found["saves"]] == [(batch, "committed") for batch in batches]
    assert all(save["stall_seconds"] > 0 and save["committed_at"] >= save["begun_at"] for save in found["saves"])
    assert [one["batch"] for one in found["stored"]] == batches
    assert found["metrics"]["loss/train/total"]["count"] == 24 + 3
    assert found["metrics"]["metrics/eval/MulticlassAccuracy"]["last_batch"] == 24
    assert found["hyperparameters"]["max_duration"] == "3ep"
    assert found["wall_seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert 0 < found["goodput"] < 1

    done = report(killed_run, "-o", "pages/tiny.html", cwd=tmp_path)
    assert "There were 3 launches: 2 killed, 1 finished." in done.stdout
    assert done.stdout.splitlines()[-1] == "report: pages/tiny.html"
    assert "2 killed" in (tmp_path / "pages" / "tiny.html").read_text()


def test_slow_rank_is_named(tmp_path: Path) -> None:
    """The summary names the rank that held up saves, the number of saves and the delay."""
    run_ranks(train_beside_a_slow_disk, 2, str(tmp_path), dist_timeout=None)
    found = collect_facts([str(tmp_path)])
    assert [(save.slowest_rank, save.is_held_up) for save in found.saves] == [(1, True)] * 2
    (line,) = [line for line in summarize(found) if "held up" in line]
    assert line.startswith("Rank 1 held up 2 of 2 saves: its writes took up to ")


def test_run_in_bucket(tmp_path: Path, s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that moves to another machine and is killed there has one record in the bucket."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"s3://{s3_server.new_bucket()}"
    assert launch(tmp_path / "a", "0", "1ep", bucket, environment=s3_server.environment) == 0
    assert launch(tmp_path / "b", "13", "3ep", bucket, environment=s3_server.environment) == -signal.SIGKILL
    assert launch(tmp_path / "b", "0", "3ep", bucket, environment=s3_server.environment) == 0
    found = facts(f"{bucket}/tiny")
    assert found["record"] == f"{bucket}/tiny/record.jsonl"
    launches = [(one["first_batch"], one["end"]) for one in found["launches"]]
    assert launches == [(0, "finished"), (8, "killed"), (12, "finished")]
    assert {one["where"] for one in found["stored"]} == {"remote"}
    saves = {save["batch"]: save for save in found["saves"]}
    assert sorted(saves) == [4, 8, 12, 16, 20, 24]
    assert all(save["is_uploaded"] for save in saves.values())
    assert saves[24]["uploaded_at"] >= saves[24]["committed_at"]
    both = facts(f"{bucket}/tiny", tmp_path / "b")
    assert {one["where"] for one in both["stored"]} == {"local", "remote"}
    assert len(both["saves"]) == 6, "a checkpoint in two places is one save"


class FolderMissing(Callback):
    """Replace the folder of checkpoints by a file during the save of batch 12."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == 11:
            self.folder.rename(self.folder.with_suffix(".away"))
            self.folder.touch()
        elif int(state.timestamp.batch) == 14:
            self.folder.unlink()
            self.folder.with_suffix(".away").rename(self.folder)


def test_failed_saves_and_deleted_checkpoints(tmp_path: Path) -> None:
    """A failed save has its error, and a checkpoint removed by retention is listed as deleted."""
    folder = tmp_path / "run" / "checkpoints"
    settings = {"save_num_checkpoints_to_keep": 2, "save_failure_limit": 1, "autoresume": False}
    train(tmp_path / "run", save_folder=str(folder), callbacks=[FolderMissing(folder)], **settings)
    found = collect_facts([str(tmp_path / "run")])
    states = {4: "deleted", 8: "deleted", 12: "failed", 16: "deleted", 20: "committed", 24: "committed"}
    assert {save.batch: save.state for save in found.saves} == states
    assert "Error" in (found.saves[2].error or "")
    assert "1 failed" in " ".join(summarize(found))


def test_damaged_record_and_checkpoint(run_copy: Path) -> None:
    """Damaged parts are listed as faults; all other facts stay."""
    record, checkpoint = run_copy / "record.jsonl", run_copy / "ep0-ba4-rank0.pt"
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(lines[:3]) + lines[3][:20] + "\n" + "".join(lines[4:]) + '{"at": "2026-11-2')
    checkpoint.write_bytes(checkpoint.read_bytes().replace(b'"tiny"', b'"tony"'))
    found = facts(run_copy)
    assert any("lines 4, " in fault and "cannot be read" in fault for fault in found["faults"])
    assert any("ep0-ba4-rank0.pt" in fault and "digest does not match" in fault for fault in found["faults"])
    assert [one["end"] for one in found["launches"]] == ["killed", "killed", "finished"]
    assert [one["state"] for one in found["stored"]].count("incomplete") == 1


def test_record_alone_and_checkpoints_alone(run_copy: Path) -> None:
    """A record is enough for launches, and checkpoints are enough for saves."""
    alone = facts(run_copy / "record.jsonl")
    assert (alone["kills"], alone["stored"]) == (2, [])
    (run_copy / "record.jsonl").unlink()
    without = facts(run_copy)
    assert (without["status"], without["launches"], without["record"]) == ("unknown", [], None)
    assert [save["batch"] for save in without["saves"]] == [4, 8, 12, 16, 20, 24]
    assert without["goodput"] is None


def test_one_of_several_runs(run_copy: Path, tmp_path: Path) -> None:
    """The report is about the run that was active last; ``--run`` selects another run, in the same file, too."""
    text = (run_copy / "record.jsonl").read_text()
    (tmp_path / "record.jsonl").write_text(text.replace('"tiny"', '"older"').replace('"at": "20', '"at": "19') + text)
    for places in ([run_copy, tmp_path / "record.jsonl"], [tmp_path / "record.jsonl"]):
        found = facts(*places)
        assert (found["run_name"], found["other_runs"]) == ("tiny", ["older"])
        older = facts(*places, run="older")
        assert (older["run_name"], older["last_batch"]) == ("older", 24)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nowhere"], 1, "'nowhere' does not exist"),
        (["nothing.jsonl"], 1, "there is no file 'nothing.jsonl'"),
        (["."], 1, "there is no run in ."),
        (["run", "--run", "tinny"], 2, "--run tinny: no run has this name in run. Runs: tiny."),
        (["http://127.0.0.1/run"], 2, "not an object store"),
    ],
)
def test_errors(arguments: list[str], status: int, message: str, killed_run: Path, tmp_path: Path) -> None:
    """A wrong place or name ends with an exit status and one line."""
    if arguments[0] == "run":
        (tmp_path / "run").symlink_to(killed_run)
    done = report(*arguments, cwd=tmp_path)
    assert done.returncode == status
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "report.html").exists()


def test_report_does_not_import_torch(killed_run: Path, tmp_path: Path) -> None:
    """The command works on a machine without torch."""
    program = (
        "import sys\nfrom composerlite.cli import main\n"
        f"sys.argv = ['composerlite', 'report', {str(killed_run)!r}]\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").is_file()
