"""A checkpoint that takes the place of another of the same name: kills, readers, and other savers at any moment."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from forked import run_forked
from parts import new_state, save_batch
from replacing import killed, overtaken
from tiny_training import train

from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import Checkpointer, load_state_dict, save_state_dict
from composerlite.cli.app import app
from composerlite.core import Logger
from composerlite.storage import open_store

pytestmark = pytest.mark.timeout(900)
STEP_PARTS = ("/step1", "/step1/train")
Told = list[dict[str, Any]]
_STRIDES = {"sharded run": "2", "file": "2", "archive": "3", "bucket": "2", "step, bucket": "5"}
"""Where a save takes long, not every event."""


def told_by(main: Any, place: str, *arguments: str, s3: Any = None) -> Told:
    """What the program found."""
    environment = {} if s3 is None else s3.environment
    with tempfile.TemporaryDirectory(prefix="replacing-", dir=Path("/dev/shm")) as folder:
        root = place if place else f"{folder}/x"
        done = run_forked(main, root, *arguments, cwd=Path(folder), environment=environment, timeout=800)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


# ── kills ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("file", "folder"),
        pytest.param("archive", "folder", marks=pytest.mark.soak),
        pytest.param("sharded run", "folder", marks=pytest.mark.soak),
        ("function", "folder"),
        ("step", "folder"),
        ("disks", "folder"),
        ("archives", "folder"),
        pytest.param("sharded run", "no exchange", marks=pytest.mark.soak),
        ("function", "no exchange"),
        ("step", "no exchange"),
        ("disks", "no exchange"),
        ("archives", "no exchange"),
        ("copied file", "folder"),
        ("copied function", "folder"),
        ("copied step", "folder"),
        ("copied function", "no exchange"),
        pytest.param("file", "bucket", marks=pytest.mark.soak),
        pytest.param("sharded run", "bucket", marks=pytest.mark.soak),
        ("function", "bucket"),
        ("step", "bucket"),
    ],
)
def test_a_kill_while_one_is_replaced_leaves_the_old_or_the_new(kind: str, where: str, s3_server: Any) -> None:
    """The next start finds it, verified, and can save again under that name. Then nothing is left over, and the files
    that the user keeps in its directory, and in folders of that, are there."""
    place = f"s3://{s3_server.new_bucket()}/x" if where == "bucket" else ""
    names = [f"{kind}, {where}", where if where == "bucket" else kind]
    stride = next((_STRIDES[name] for name in names if name in _STRIDES), "1")
    for told in (found := told_by(killed, place, kind, where, stride, s3=s3_server)):
        assert (told["found"], told["then"]) in ((1, 3), (2, 3)), told
        assert told["left"] == [], told
        assert set(told["own"]) <= {"{}"}, told
    assert {told["found"] for told in found} == {1, 2}


@pytest.mark.parametrize(
    ("kind", "where", "what"),
    [
        ("file", "folder, each third event", "read while it is replaced"),
        pytest.param("file", "folder, every event", "read while it is replaced", marks=pytest.mark.soak),
        ("file", "folder", "replaced while it is read"),
        ("function", "folder", "read while it is replaced"),
        ("function", "folder", "replaced while it is read"),
        ("step", "folder", "read while it is replaced"),
        ("step", "folder", "replaced while it is read"),
        ("function", "no exchange", "read while it is replaced"),
        ("function", "no exchange", "replaced while it is read"),
        ("step", "no exchange", "read while it is replaced"),
        ("step", "no exchange", "replaced while it is read"),
        *(
            pytest.param(kind, f"bucket, {events} event", what, marks=[pytest.mark.soak] if events == "every" else [])
            for kind, some in (("function", "third"), ("step", "seventh"))
            for what in ("read while it is replaced", "replaced while it is read")
            for events in ("every", f"each {some}")
        ),
    ],
)
def test_a_reader_sees_the_old_or_the_new(kind: str, where: str, what: str, s3_server: Any) -> None:
    """Whenever it looks while another process replaces a checkpoint, and wherever it is overtaken by one."""
    where, _, events = where.partition(", ")
    place = f"s3://{s3_server.new_bucket()}/x" if where == "bucket" else ""
    stride = {"each third event": "3", "each seventh event": "7"}.get(events, "1")
    for told in told_by(overtaken, place, kind, what, where, stride, s3=s3_server):
        read = told["second" if what == "read while it is replaced" else "first"]
        assert read in (1, 2, None), told
        assert told["found"] in (1, 2), told


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("function", "folder"),
        ("step", "folder"),
        ("function", "no exchange"),
        ("step", "no exchange"),
    ],
)
def test_of_two_savers_of_one_name_one_is_told_that_it_was_late(kind: str, where: str) -> None:
    """What is there is, whole and verified, that of the one that was told that it saved."""
    for told in told_by(overtaken, "", kind, "save twice", where):
        both = [told["first"], told["second"]]
        if told["second"] is not None:
            assert sorted(str(one).partition(":")[0] for one in both) == ["CheckpointExistsError", "saved"], told
        assert told["found"] == 1 + both.index("saved"), told


# ── tools ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def command(*arguments: object) -> None:
    """``composerlite checkpoint …``."""
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert done.exit_code == 0, done.output


@pytest.fixture
def place(where: str, tmp_path: Path, s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder, or a bucket and a name in it."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return str(tmp_path / "run") if where == "folder" else f"s3://{s3_server.new_bucket()}/run"


def uploaded(folder: Path, place: str) -> None:
    """The same below ``place``."""
    with open_store(place) as store:
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
            store.put_bytes(f"run/{path.relative_to(folder)}", path.read_bytes())


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_gc_of_orphans_below_a_run_removes_no_file(where: str, place: str, tmp_path: Path) -> None:
    """``gc --orphans`` is given a folder of the run's: what is committed is so by a record above it."""
    path = save_batch(tmp_path / "run", 1, template="sub/ba{batch}.pt", latest=None)
    if where == "bucket":
        uploaded(tmp_path / "run", place)
    command("gc", f"{place}/sub", "--orphans", "--older-than", "0s")
    command("verify", f"{place}/sub/{path.name}")


@pytest.mark.parametrize("where", ["folder", "bucket"])
@pytest.mark.parametrize("below", ["", "/sub", "/sub/c"])
def test_gc_of_orphans_removes_no_sharded_checkpoint(where: str, below: str, place: str) -> None:
    """Whichever folder it is given: that of the run, one in it, the checkpoint's own."""
    save_state_dict(f"{place}/sub/c", {"x": torch.ones(3)})
    command("gc", f"{place}{below}", "--orphans", "--older-than", "0s")
    state = {"x": torch.zeros(3)}
    load_state_dict(f"{place}/sub/c", state)
    assert state["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("where", ["folder", "bucket"])
@pytest.mark.parametrize("below", ["", *STEP_PARTS])
def test_gc_of_orphans_removes_no_part_of_a_step(where: str, below: str, place: str) -> None:
    """``train/rank0.pt`` has no record of its own and is a part of the step."""
    model = torch.nn.Linear(1, 1)
    Checkpointer().save(f"{place}/step1", model, {"value": 5})
    command("gc", f"{place}{below}", "--orphans", "--older-than", "0s")
    assert Checkpointer().load(f"{place}/step1", model, load_trainer_state=True) == {"value": 5}


@pytest.mark.parametrize("sweep", ["retention", "prune"])
@pytest.mark.parametrize("name", ["export.pt", "export.pt.gz", "ba1-copy.pt", "export"])
def test_what_is_converted_into_the_folder_of_a_run_is_kept(name: str, sweep: str, tmp_path: Path) -> None:
    """It is the user's: neither the run's retention nor ``prune`` counts or removes it."""
    for batch in (1, 2, 3):
        save_batch(tmp_path, batch)
    command("convert", tmp_path / "ba1.pt", tmp_path / name)
    before = sorted(str(path) for path in (tmp_path / name, *(tmp_path / name).rglob("*")))
    if sweep == "prune":
        command("prune", tmp_path, "--keep-last", "1")
    else:
        state = new_state(4)
        saver = CheckpointSaver(tmp_path, "ba{batch}.pt", latest_filename="latest.pt", num_checkpoints_to_keep=1)
        saver.init(state, Logger(state))
        saver.save(state)
        saver.close(state, Logger(state))
    assert sorted(str(path) for path in (tmp_path / name, *(tmp_path / name).rglob("*")) if path.exists()) == before
    assert len(list(tmp_path.glob("ba?.pt"))) == 1


@pytest.mark.parametrize("where", ["bucket"])
@pytest.mark.parametrize("sweep", ["retention", "prune"])
@pytest.mark.parametrize("name", ["export.pt", "export.pt.gz", "export"])
def test_what_is_converted_and_copied_to_the_bucket_of_a_run_is_kept(
    where: str, name: str, sweep: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, too, neither the run's retention nor ``prune`` counts or removes it."""
    monkeypatch.chdir(tmp_path)
    keeps = {} if sweep == "prune" else {"save_num_remote_checkpoints_to_keep": 1}
    train(save_folder=place, max_duration="2ep", **keeps)
    command("convert", f"{place}/latest-rank0.pt", tmp_path / "exports" / name)
    command("cp", tmp_path / "exports" / name, place)
    if sweep == "prune":
        command("prune", place, "--keep-last", "1")
    else:
        train(save_folder=place, autoresume=True, max_duration="3ep", **keeps)
    command("verify", f"{place}/{name}")
    told = CliRunner().invoke(app, ["checkpoint", "ls", place, "--json"])
    assert len([one for one in json.loads(told.output)["checkpoints"] if one["name"].startswith("ep")]) == 1
