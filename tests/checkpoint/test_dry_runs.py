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
from parts import save_archives, save_batch

from composerlite.checkpoint import Catalog, Checkpointer, load_state_dict, save_state_dict
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.cli.app import app
from composerlite.storage import Transfer, open_store

DEAD = "tmp-0123456789abcdef"
SAVING = "saving-0123456789abcdef"


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
def begun(folder: Path, name: str, kind: str = "json") -> Path:
    """Give the manifest of a checkpoint the name of a commit, or of a deletion, that did not end."""
    record = folder / f".manifest/{name}.json"
    ending = "json" if kind == "json" else "gone"
    return record.rename(record.with_name(f".{record.stem}.{ending}.{DEAD}"))


def a_temporary(folder: Path) -> None:
    (folder / f".ba9.pt.{DEAD}").write_bytes(b"half")


def a_commit_that_has_all(folder: Path) -> None:
    begun(folder, "ba1.pt")


def a_commit_in_a_folder_of_names(folder: Path) -> None:
    save_batch(folder, 3, template="sub/ba{batch}.pt", latest=None)
    begun(folder, "sub/ba3.pt")


def a_commit_that_has_no_name(folder: Path) -> None:
    begun(folder, "ba1.pt")
    (folder / "ba1.pt").rename(folder / f".ba1.pt.{DEAD}")


def a_commit_with_other_data(folder: Path) -> None:
    begun(folder, "ba1.pt")
    (folder / "ba1.pt").write_bytes(b"other")


def a_commit_that_cannot_be_read(folder: Path) -> None:
    begun(folder, "ba1.pt").write_bytes(b"{")


def a_commit_of_an_archive(folder: Path) -> None:
    """Of two files one is gone: the other is in the way."""
    save_archives(folder, 1)
    (manifest,) = (one for one in Catalog(folder).manifests() if len(one.files) > 1)
    begun(folder, manifest.name)
    (folder / manifest.files[-1].path).unlink()


def a_deletion(folder: Path) -> None:
    begun(folder, "ba1.pt", "gone")


def a_deletion_that_has_removed_the_data(folder: Path) -> None:
    begun(folder, "ba1.pt", "gone")
    (folder / "ba1.pt").unlink()


def a_deletion_of_a_step(folder: Path) -> None:
    Checkpointer().save(folder / "step1", torch.nn.Linear(1, 1), {"value": 1})
    begun(folder / "step1", "model_and_optim", "gone")


def a_staged_directory(folder: Path) -> None:
    save_state_dict(folder / "c", {"x": torch.ones(3)})
    begun(folder, "c")
    (folder / "c").rename(folder / f".c.{SAVING}")


def a_directory_between_two_names(folder: Path) -> None:
    save_state_dict(folder / "c", {"x": torch.ones(3)})
    (folder / "c").rename(folder / f".c.{SAVING}-old")
    save_state_dict(folder / "c", {"x": torch.zeros(3)}, save_overwrite=True)
    begun(folder, "c")
    (folder / "c").rename(folder / f".c.{SAVING}")


def an_old_directory(folder: Path) -> None:
    save_state_dict(folder / "c", {"x": torch.ones(3)})
    (folder / "c").rename(folder / f".c.{SAVING}-old")
    (folder / f".c.{SAVING}").mkdir()


def an_orphan(folder: Path) -> None:
    (folder / ".manifest/ba1.pt.json").unlink()


def a_part_in_a_checkpoint(folder: Path) -> None:
    save_state_dict(folder / "c", {"x": torch.ones(3)})
    (folder / "c/__9_0_abcdef12.distcp").write_bytes(b"left")


KINDS: dict[str, Callable[[Path], None]] = {
    plant.__name__.replace("_", " "): plant
    for plant in (
        a_temporary,
        a_commit_that_has_all,
        a_commit_in_a_folder_of_names,
        a_commit_that_has_no_name,
        a_commit_with_other_data,
        a_commit_that_cannot_be_read,
        a_commit_of_an_archive,
        a_deletion,
        a_deletion_that_has_removed_the_data,
        a_deletion_of_a_step,
        a_staged_directory,
        a_directory_between_two_names,
        an_old_directory,
        an_orphan,
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


@pytest.mark.parametrize("orphans", [[], ["--orphans", "--older-than", "0s"]], ids=["gc", "gc --orphans"])
@pytest.mark.parametrize("kind", KINDS)
def test_gc_does_what_its_dry_run_announces(kind: str, orphans: list[str], saved: Path, tmp_path: Path) -> None:
    """What is said to go is gone and nothing else is, and what is said to be completed is a whole checkpoint."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder, symlinks=True)
    KINDS[kind](folder)
    before = sizes(folder)
    announced = said("gc", folder, *orphans, "--dry-run")
    assert sizes(folder) == before
    done = said("gc", folder, *orphans)
    assert announced | {"dry_run": False} == done
    after = sizes(folder)
    assert [one["uri"] for one in done["removed"] if Path(one["uri"]).exists()] == []
    assert done["freed_bytes"] == sum(before.values()) - sum(after.values())
    listed = {one["name"]: one["state"] for one in said("ls", folder)["checkpoints"]}
    for one in done["completed"]:
        assert listed[str(Path(one["uri"]).relative_to(folder))] == "committed"
    again = {one["uri"] for one in said("gc", folder, *orphans, "--dry-run")["removed"]}
    assert again <= ({str(folder / "c")} if kind == "an old directory" else set[str]())


@pytest.mark.parametrize("kind", ["a commit in a folder of names", "a deletion of a step"])
def test_gc_below_a_run_leaves_what_it_does_not_decide(kind: str, saved: Path, tmp_path: Path) -> None:
    """A commit that the folder above would complete is no orphan in the folder below."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder, symlinks=True)
    KINDS[kind](folder)
    below = folder / ("sub" if (folder / "sub").exists() else "step1/train")
    before = sizes(folder)
    assert said("gc", below, "--orphans", "--older-than", "0s")["removed"] == []
    assert sizes(folder) == before


def test_gc_of_orphans_leaves_a_checkpoint_in_whose_directory_something_was_left(saved: Path, tmp_path: Path) -> None:
    """A part that a killed save has left in its directory is no checkpoint, whose removal takes all of it along."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder, symlinks=True)
    a_part_in_a_checkpoint(folder)
    said("gc", folder, "--orphans", "--older-than", "0s")
    state = {"x": torch.zeros(3)}
    load_state_dict(folder / "c", state)
    assert state["x"].tolist() == [1, 1, 1]
    assert [one["name"] for one in said("ls", folder)["checkpoints"]].count("c") == 1


# ── what may be left in a bucket ─────────────────────────────────────────────────────────────────────────────────────
def objects(bucket: str) -> dict[str, int]:
    """The names and sizes of all."""
    with open_store(bucket) as store:
        return {info.name: info.size_bytes for info in store.list_objects("")}


@pytest.mark.parametrize("orphans", [[], ["--orphans", "--older-than", "0s"]], ids=["gc", "gc --orphans"])
def test_gc_of_a_bucket_does_what_its_dry_run_announces(
    orphans: list[str], saved: Path, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, too: deletions that did not end, one that cannot be read, orphans, a part in a checkpoint."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = f"s3://{s3_server.new_bucket()}"
    place = f"{bucket}/run"
    said("push", saved, place, "--all")
    save_state_dict(f"{place}/c", {"x": torch.ones(3)})
    with open_store(bucket) as store, Transfer(store) as transfer, Bucket(transfer, "run") as here:
        record = here.read(".manifest/ba1.pt.json")
        here.put(".manifest/ba1.pt.json.gone", record)
        here.delete(".manifest/ba1.pt.json")
        here.put(".manifest/ba7.pt.json.gone", b"{")
        here.put("orphan.pt", b"data")
        here.put("c/__9_0_abcdef12.distcp", b"left")
    before = objects(bucket)
    announced = said("gc", place, *orphans, "--dry-run")
    assert objects(bucket) == before
    done = said("gc", place, *orphans)
    assert announced | {"dry_run": False} == done
    left = objects(bucket)
    assert done["freed_bytes"] == sum(before.values()) - sum(left.values())
    gone = {"run/ba1.pt", "run/.manifest/ba1.pt.json.gone"}
    others = {"run/orphan.pt"} if orphans else set[str]()
    assert {*before} - {*left} == gone | others


def test_prune_does_what_its_dry_run_announces(saved: Path, tmp_path: Path) -> None:
    """Beside all that may be left."""
    folder = tmp_path / "run"
    for batch in (1, 2, 3, 4):
        save_batch(folder, batch)
    save_state_dict(folder / "c", {"x": torch.ones(3)})
    for plant in (a_temporary, a_commit_in_a_folder_of_names, a_deletion):
        plant(folder)
    before = sizes(folder)
    announced = said("prune", folder, "--keep-last", 1, "--dry-run")
    assert sizes(folder) == before
    done = said("prune", folder, "--keep-last", 1)
    assert announced | {"dry_run": False} == done
    gone = {path for path in before if path not in sizes(folder)}
    assert {one["uri"] for one in done["removed"]} == {path for path in gone if ".manifest" not in path}
