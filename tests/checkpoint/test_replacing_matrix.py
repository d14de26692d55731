"""Checkpoints of every form are saved, replaced and deleted: kills, readers, and other savers at any moment."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from forked import run_forked
from parts import new_state, save_batch
from replacing import KINDS, Kind, extra, killed, overtaken
from tiny_training import train

from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import Checkpointer, load_state_dict, save_state_dict
from composerlite.checkpoint.api.step_files import find_step
from composerlite.checkpoint.place.directory import StepFolder
from composerlite.cli.app import app
from composerlite.core import Logger
from composerlite.storage import open_store

pytestmark = pytest.mark.timeout(900)
STEP_PARTS = ("/step1", "/step1/train", "/step1/model_and_optim")
Told = list[dict[str, Any]]


def told_by(main: Any, *arguments: str) -> Told:
    """What the program found."""
    with tempfile.TemporaryDirectory(prefix="replacing-", dir=Path("/dev/shm")) as folder:
        done = run_forked(main, folder, *arguments, cwd=Path(folder), timeout=800)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


CELLS = [
    (kind, where)
    for kind, one in KINDS.items()
    for where in ("folder", "bucket")
    if where == "folder" or (one.in_buckets and not kind.startswith("copied"))
]


def _check_kills(kind: str, where: str, operation: str, every: int) -> None:
    """Check what each kill leaves, and print how many kills there were."""
    one = KINDS[kind]
    old, new = {"new": (None, 2), "replace": (1, 2), "delete": (1, None)}[operation]
    may_be = {old, new, None} if one.may_be_lost and operation == "replace" else {old, new}
    found = told_by(killed, kind, where, operation, str(every))
    second_kills = 0
    for told in found:
        _check_kill(one, told, told, may_be, operation)
        for again in told["second"]:
            second_kills += again["killed"]
            saved = {3, None} if one.may_be_lost else {3}
            _check_kill(one, told, again, may_be | (saved if again["in"] == "save" else set()), operation)
    assert found[0]["found"] == old
    assert found[-1]["found"] == new
    assert found[-1]["survived"]
    sys.stdout.write(f"\n{kind}, {where}, {operation}: {len(found) - 1} kills, {second_kills} second kills\n")


def _check_kill(
    one: Kind, told: dict[str, Any], after: dict[str, Any], may_be: set[int | None], operation: str
) -> None:
    """See what one kill has left: what was found, what a start left of that, and what came of the next save."""
    assert after["found"] in may_be, after
    assert after["started"] in ({after["found"], None} if one.may_be_lost else {after["found"]}), after
    whole: list[str] = told["before" if operation == "delete" else "after"]
    if after["started"] is None and not one.may_be_lost:
        assert after["left"] == [], after
    assert extra(after["left"], whole) == [], after
    assert after["then"] == 3, after
    assert after["last"] == whole, after
    assert after["users"], after


KILLS = [
    *((kind, where, "new") for kind, where in [*CELLS, ("file", "NFS"), ("function", "NFS"), ("disks", "NFS")]),
    *((kind, where, "replace") for kind, where in CELLS),
    *((kind, where, "delete") for kind, where in CELLS if not kind.startswith("copied")),
]


@pytest.mark.parametrize(("kind", "where", "operation"), KILLS)
def test_a_kill_leaves_the_old_checkpoint_or_the_new_one(kind: str, where: str, operation: str) -> None:
    """A first save, a save that replaces a checkpoint, and a deletion are killed before every third step.

    A killed replacement of a step, of archives of ranks or of disks of nodes may leave no checkpoint, and never parts
    of both. The next start removes what the kill has left, and the next save gets the name; a kill of that start or of
    that save is harmless, too. Files of the user stay.
    """
    _check_kills(kind, where, operation, every=3)


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "where", "operation"), KILLS)
def test_a_kill_at_every_step_leaves_the_old_checkpoint_or_the_new_one(kind: str, where: str, operation: str) -> None:
    """Kill before every step."""
    _check_kills(kind, where, operation, every=1)


def _name_of(error: Any) -> str:
    return str(error).partition(":")[0]


@pytest.mark.parametrize("where", ["folder", "bucket"])
@pytest.mark.parametrize("kind", ["file", "function", "step"])
@pytest.mark.parametrize("what", ["read while it is replaced", "replaced while it is read"])
def test_a_reader_sees_the_old_or_the_new(kind: str, where: str, what: str) -> None:
    """Whenever it looks while another process replaces a checkpoint, and wherever it is overtaken by one. A step
    is deleted before it is replaced: then it may find none, or is told of damage, as with a file or a directory that is
    replaced while it is read."""
    for told in told_by(overtaken, kind, where, what):
        read = told["second" if what == "read while it is replaced" else "first"]
        if isinstance(read, list):
            assert read[0] in ((1, 2, None) if KINDS[kind].may_be_lost else (1, 2)), told
        elif read is not None:
            assert KINDS[kind].may_be_lost or what == "replaced while it is read", told
            assert _name_of(read) in ("CorruptCheckpointError", "FileNotFoundError", "CheckpointNotFoundError"), told
        assert told["found"] == 2 or told["second"] is None, told


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *itertools.product(["file", "function", "copied file", "copied function"], ["folder"]),
        *itertools.product(["function", "copied file", "copied function"], ["bucket"]),
    ],
)
def test_of_two_savers_of_one_name_one_is_told_that_it_was_late(kind: str, where: str) -> None:
    """What is there is, whole and verified, that of the one that was told that it saved."""
    for told in told_by(overtaken, kind, where, "save twice"):
        if told["second"] is not None:
            both = [told["first"], told["second"]]
            assert [_name_of(one) for one in both if one != [None]] == ["CheckpointExistsError"], told
            assert told["found"] == 2 + both.index([None]), told


@pytest.mark.parametrize("where", ["folder", "bucket"])
@pytest.mark.parametrize("kind", ["file", "function"])
def test_of_two_savers_that_replace_one_checkpoint_the_last_commit_wins(kind: str, where: str) -> None:
    """As a whole: neither removes a file of the other that counts."""
    found = [told for told in told_by(overtaken, kind, where, "replace twice") if told["second"] is not None]
    for told in found:
        assert (told["first"], told["second"]) == ([None], [None]), told
    values = [told["found"] for told in found]
    assert values == sorted(values), values
    assert set(values) == {2, 3}


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
def test_gc_below_a_run_removes_no_file(where: str, place: str, tmp_path: Path) -> None:
    """``gc`` is given a folder of the run's: what is committed is so by a record above it."""
    path = save_batch(tmp_path / "run", 1, template="sub/ba{batch}.pt", latest=None)
    if where == "bucket":
        uploaded(tmp_path / "run", place)
    command("gc", f"{place}/sub", "--older-than", "0s")
    command("verify", f"{place}/sub/{path.name}")


@pytest.mark.parametrize("where", ["folder", "bucket"])
@pytest.mark.parametrize("below", ["", "/sub", "/sub/c"])
def test_gc_removes_no_sharded_checkpoint(where: str, below: str, place: str) -> None:
    """Whichever folder it is given: that of the run, one in it, the checkpoint's own."""
    save_state_dict(f"{place}/sub/c", {"x": torch.ones(3)})
    command("gc", f"{place}{below}", "--older-than", "0s")
    state = {"x": torch.zeros(3)}
    load_state_dict(f"{place}/sub/c", state)
    assert state["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("where", ["folder", "bucket"])
@pytest.mark.parametrize("below", ["", *STEP_PARTS])
def test_gc_removes_no_part_of_a_step(where: str, below: str, place: str) -> None:
    """``train/rank0.pt`` has no record of its own and is a part of the step."""
    model = torch.nn.Linear(1, 1)
    Checkpointer().save(f"{place}/step1", model, {"value": 5})
    command("gc", f"{place}{below}", "--older-than", "0s")
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


def test_files_of_a_killed_save_of_more_ranks_are_no_part_of_a_step(tmp_path: Path) -> None:
    """The record says which ranks have a file."""
    (tmp_path / "step1" / "train").mkdir(parents=True)
    (tmp_path / "step1" / "train" / "rank1.pt").write_bytes(b"half of it")
    Checkpointer().save(tmp_path / "step1", torch.nn.Linear(1, 1), {"value": 1})
    with StepFolder.of(tmp_path / "step1") as folder:
        assert set(find_step(folder, None) or ()) == {0}
