"""``--dry-run`` of ``gc`` and ``prune`` announces what the same command without it does, whatever was left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from parts import save_archives, save_batch, value_in
from sealed_files import remove_record

from composerlite.checkpoint import Catalog, Checkpointer, load_state_dict, read_checkpoint, save_state_dict
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.cli.app import app
from composerlite.storage import Transfer, open_store

DEAD = "tmp-0123456789abcdef"
PART = "__9_0_0123456789abcdef.distcp"


def said(*arguments: object) -> Any:
    """What a command answers."""
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def sizes(folder: Path) -> dict[str, int]:
    """The files below a folder."""
    return {
        str(path): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()
    }


# ── what may be left in a folder ─────────────────────────────────────────────────────────────────────────────────────
def a_temporary(folder: Path) -> None:
    (folder / f".ba9.pt.{DEAD}").write_bytes(b"half")


def a_whole_file_without_its_name(folder: Path) -> None:
    (folder / "ba1.pt").rename(folder / f".ba1.pt.{DEAD}")


def a_directory_before_its_commit(folder: Path) -> None:
    save_state_dict(folder / "c", {"x": torch.ones(3)})
    (folder / "c/.metadata").rename(folder / f"c/..metadata.{DEAD}")


def a_directory_in_a_folder_of_names(folder: Path) -> None:
    save_state_dict(folder / "sub/c", {"x": torch.ones(3)})
    (folder / "sub/c/.metadata").unlink()


def a_directory_whose_index_is_damaged(folder: Path) -> None:
    save_state_dict(folder / "c", {"x": torch.ones(3)})
    (folder / "c/.metadata").write_bytes(b"other")


def a_deletion_of_archives(folder: Path) -> None:
    save_archives(folder, 1)
    (manifest,) = (one for one in Catalog(folder).manifests() if one.form == "archives")
    (folder / manifest.name).unlink()


def a_deletion_of_a_step(folder: Path) -> None:
    Checkpointer().save(folder / "step1", torch.nn.Linear(1, 1), {"value": 1})
    (folder / "step1/.metadata.json").unlink()


def a_file_without_a_record(folder: Path) -> None:
    remove_record(folder / "ba1.pt")


def a_part_in_a_checkpoint(folder: Path) -> None:
    save_state_dict(folder / "c", {"x": torch.ones(3)})
    (folder / "c" / PART).write_bytes(b"left")


KINDS: dict[str, Callable[[Path], None]] = {
    plant.__name__.replace("_", " "): plant
    for plant in (
        a_temporary,
        a_whole_file_without_its_name,
        a_directory_before_its_commit,
        a_directory_in_a_folder_of_names,
        a_directory_whose_index_is_damaged,
        a_deletion_of_archives,
        a_deletion_of_a_step,
        a_file_without_a_record,
        a_part_in_a_checkpoint,
    )
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints. Not to be changed."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    for batch in (1, 2):
        save_batch(folder, batch)
    return folder


@pytest.mark.parametrize("age", ["24h", "0s"])
@pytest.mark.parametrize("kind", KINDS)
def test_gc_does_what_its_dry_run_announces(kind: str, age: str, saved: Path, tmp_path: Path) -> None:
    """What is said to go is gone and nothing else is; the checkpoints are there."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder, symlinks=True)
    KINDS[kind](folder)
    before = sizes(folder)
    announced = said("gc", folder, "--older-than", age, "--dry-run")
    assert sizes(folder) == before
    done = said("gc", folder, "--older-than", age)
    assert announced | {"dry_run": False} == done
    after = sizes(folder)
    assert [one["uri"] for one in done["removed"] if Path(one["uri"]).exists()] == []
    assert done["freed_bytes"] == sum(before.values()) - sum(after.values())
    assert said("gc", folder, "--older-than", age, "--dry-run")["removed"] == []
    assert value_in(read_checkpoint(folder / "ba2.pt")) == 2


def test_gc_in_a_step_leaves_its_parts(saved: Path, tmp_path: Path) -> None:
    """Files of a step stay, also where ``gc`` is given a folder in the step."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder, symlinks=True)
    Checkpointer().save(folder / "step1", torch.nn.Linear(1, 1), {"value": 1})
    before = sizes(folder)
    assert said("gc", folder / "step1/train", "--older-than", "0s")["removed"] == []
    assert sizes(folder) == before


def test_gc_leaves_a_checkpoint_in_whose_directory_something_was_left(saved: Path, tmp_path: Path) -> None:
    """A part that a killed save has left in its directory is no checkpoint, whose removal takes all of it along."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder, symlinks=True)
    a_part_in_a_checkpoint(folder)
    said("gc", folder, "--older-than", "0s")
    state = {"x": torch.zeros(3)}
    load_state_dict(folder / "c", state)
    assert state["x"].tolist() == [1, 1, 1]
    assert [one["name"] for one in said("ls", folder)["checkpoints"]].count("c") == 1


# ── what may be left in a bucket ─────────────────────────────────────────────────────────────────────────────────────
def objects(bucket: str) -> dict[str, int]:
    """The names and sizes of all."""
    with open_store(bucket) as store:
        return {info.name: info.size_bytes for info in store.list_objects("")}


@pytest.mark.parametrize("age", ["24h", "0s"])
def test_gc_of_a_bucket_does_what_its_dry_run_announces(
    age: str, saved: Path, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, too: a deletion and a save that did not end, a file without a record, a part in a checkpoint."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"s3://{s3_server.new_bucket()}"
    place = f"{bucket}/run"
    said("push", saved, place, "--all")
    for name in ("c", "d"):
        save_state_dict(f"{place}/{name}", {"x": torch.ones(3)})
    with open_store(bucket) as store, Transfer(store) as transfer, Bucket(transfer, "run") as here:
        here.delete(["d/.metadata"])
        here.put("other.pt", b"data")
        here.put(f"c/{PART}", b"left")
    before = objects(bucket)
    announced = said("gc", place, "--older-than", age, "--dry-run")
    assert objects(bucket) == before
    done = said("gc", place, "--older-than", age)
    assert announced | {"dry_run": False} == done
    left = objects(bucket)
    assert done["freed_bytes"] == sum(before.values()) - sum(left.values())
    gone = {f"run/c/{PART}", *(name for name in before if name.startswith("run/d/"))} if age == "0s" else set[str]()
    assert {*before} - {*left} == gone


def test_prune_does_what_its_dry_run_announces(saved: Path, tmp_path: Path) -> None:
    """Beside all that may be left."""
    folder = tmp_path / "run"
    for batch in (1, 2, 3, 4):
        save_batch(folder, batch)
    save_state_dict(folder / "c", {"x": torch.ones(3)})
    for plant in (a_temporary, a_directory_in_a_folder_of_names, a_deletion_of_archives):
        plant(folder)
    before = sizes(folder)
    announced = said("prune", folder, "--keep-last", 1, "--dry-run")
    assert sizes(folder) == before
    done = said("prune", folder, "--keep-last", 1)
    assert announced | {"dry_run": False} == done
    gone = {path for path in before if path not in sizes(folder)}
    assert {one["uri"] for one in done["removed"]} == gone
