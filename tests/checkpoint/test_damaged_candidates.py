"""Whatever becomes of a file of the newest checkpoint, a resume takes the one before and says why."""

from __future__ import annotations

import logging
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint.sharded_parts import small_model
from combinations import covering
from parts import save_archives, save_batch, save_directory
from sent_files import publish_files
from storage.local_store import LocalObjectStore
from storage.servers.seaweedfs import S3Server

from composerlite.checkpoint import Catalog, Checkpointer, Manifest
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.commit import garbage
from composerlite.errors import CheckpointError, CorruptCheckpointError, ObjectStoreError
from composerlite.storage import Transfer, open_store


def archives_of_ranks(folder: Path, batch: int) -> Manifest:
    """A checkpoint of two ranks, with an archive of each."""
    return save_archives(folder, batch, template=f"ba{batch}-rank{{rank}}.tar", batch=batch)


KINDS = {"file": save_batch, "sharded": save_directory, "archives": archives_of_ranks}
TEMPLATES = {"file": "ba{batch}.pt", "sharded": "ba{batch}", "archives": "ba{batch}-rank{rank}.tar"}


def leave_empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    """Cut off the record, and some bytes before it."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


def put_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_a_full_directory(path: Path) -> None:
    put_a_directory(path)
    (path / "file").write_bytes(b"of somebody")


def make_unreadable(path: Path) -> None:
    """The system refuses to open it, for every user: it is a link to itself."""
    path.unlink()
    path.symlink_to(path.name)


FAULTS: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": leave_empty,
    "cut": cut,
    "a directory": put_a_directory,
    "a full directory": put_a_full_directory,
    "unreadable": make_unreadable,
}


def saved(kind: str, folder: Path) -> list[Manifest]:
    """Two checkpoints of a run, oldest first."""
    for batch in (1, 2):
        KINDS[kind](folder, batch)
    return Catalog(folder).manifests()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_folder(kind: str, fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each of its files in turn. What is no file with a record is no checkpoint of the run: there is nothing to say."""
    one, two = saved(kind, tmp_path / "before")
    for number, path in enumerate(file.path for file in two.files):
        folder = tmp_path / f"after{number}"
        shutil.copytree(tmp_path / "before", folder, symlinks=True)
        FAULTS[fault](folder / path)
        caplog.clear()
        place = choose([RunPlace(Catalog(folder), TEMPLATES[kind])], "run").path
        assert place == folder / one.name, path
        decides = path == two.files[0].path
        is_gone = decides and fault not in ("empty", "cut")  # a damaged file is there, and something is to be said
        assert is_gone or two.name in caplog.text, path


@pytest.mark.parametrize("fault", ["empty", "cut"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(kind: str, fault: str, tmp_path: Path) -> None:
    """The error says that none is good, and a sweep of leftovers deletes no data of a damaged directory."""
    manifests = saved(kind, tmp_path)
    for manifest in manifests:
        FAULTS[fault](tmp_path / manifest.files[0].path)
    place = Catalog(tmp_path).place
    assert garbage(place, place.files(), re.compile(".*")) == []
    with pytest.raises(CheckpointError, match="none can be loaded"):
        choose([RunPlace(Catalog(tmp_path), TEMPLATES[kind])], "run")
    data = [file for manifest in manifests for file in manifest.files[1:]]
    left = Counter(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink())
    assert Counter(file.size_bytes for file in data) <= left, "data of a damaged checkpoint are kept"


@pytest.mark.parametrize(("kind", "fault", "state"), covering(2, [*KINDS], [*FAULTS], ["listed", "linked"]))
def test_in_a_bucket(kind: str, fault: str, state: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Found by its link or in the list.

    A folder in the place of an object is none. A bucket that does not answer is no damage: the run ends, with its name.
    """
    caplog.set_level(logging.INFO)
    one, two = saved(kind, tmp_path / "before")
    link = "run/latest" if state == "linked" else None
    for number, path in enumerate(file.path for file in two.files):
        bucket = tmp_path / f"bucket{number}"
        (bucket / "run").mkdir(parents=True)
        with LocalObjectStore(bucket) as store, Transfer(store) as transfer:
            remote = Catalog(Bucket(transfer, "run"))
            for manifest in (one, two):
                files = {file.path: tmp_path / "before" / file.path for file in manifest.files}
                publish_files(remote, manifest, files, link=link)
            FAULTS[fault](bucket / "run" / path)
            caplog.clear()
            places = [RunPlace(Catalog(tmp_path / f"here{number}"), "", None, [RunPlace(remote, link=link)])]
            decides = path == two.files[0].path
            if fault == "unreadable" and (not decides or state == "linked"):  # the list leaves it out
                with pytest.raises(ObjectStoreError, match=path):
                    choose(places, "run")
                continue
            place = choose(places, "run").path
        assert Path(str(place)).name == one.name, path
        # No template names files in this bucket: a file without a record is none of the run's.
        is_gone = decides and (fault not in ("empty", "cut") or kind != "sharded")
        assert is_gone or two.name in caplog.text, path


@pytest.mark.parametrize("fault", FAULTS)
def test_among_steps(fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A step whose marker is damaged is skipped; one without a file that it needs is no checkpoint."""
    for step in (1, 2):
        Checkpointer().save(tmp_path / "before" / f"step{step}", small_model(), {"step": step})
    for number, path in enumerate([".metadata.json", "model_and_optim/.metadata", "train/rank0.pt"]):
        folder = tmp_path / f"after{number}"
        shutil.copytree(tmp_path / "before", folder)
        FAULTS[fault](folder / "step2" / path)
        caplog.clear()
        found = [step for step, _ in Checkpointer.find_checkpoints(folder)]
        assert found == ([1, 2] if fault in ("empty", "cut") and path != ".metadata.json" else [1]), path
        assert ("step2" in caplog.text) == (fault in ("empty", "cut") and path == ".metadata.json")
        assert Checkpointer.latest_checkpoint(folder) == str(folder / f"step{found[-1]}")
        if found == [1, 2]:
            with pytest.raises(CorruptCheckpointError, match="step2"):
                Checkpointer().load(folder / "step2", small_model())


def test_among_steps_in_a_bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, where there are no folders."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    run = f"s3://{s3_server.new_bucket()}/run"
    for step in (1, 2):
        Checkpointer().save(f"{run}/step{step}", small_model(), {"step": step})
    with open_store(run) as store, Transfer(store) as transfer:
        transfer.put_bytes("run/step2/.metadata.json", b"")
        assert Checkpointer.latest_checkpoint(run) == f"{run}/step1"
        transfer.put_bytes("run/step1/.metadata.json", b"")
    check_that_none_is_good(run)


def test_a_loop_whose_steps_are_all_damaged_is_not_told_to_start_over(tmp_path: Path) -> None:
    """Where no marker can be read there are checkpoints, and an error that lists them; files of others are none."""
    for step in (1, 2):
        Checkpointer().save(tmp_path / f"step{step}", small_model(), {"step": step})
        (tmp_path / f"step{step}" / ".metadata.json").write_bytes(b"{")
    check_that_none_is_good(str(tmp_path))
    Checkpointer().save(tmp_path / "step0", small_model(), {"step": 0}, ephemeral=True)
    assert Checkpointer.latest_checkpoint(tmp_path) == str(tmp_path / "step0")
    assert list(Checkpointer.find_checkpoints(tmp_path, ephemeral=False)) == []


def check_that_none_is_good(run: str) -> None:
    for look in (
        Checkpointer.latest_checkpoint,
        Checkpointer.contains_checkpoint,
        lambda folder: list(Checkpointer.find_checkpoints(folder)),
    ):
        with pytest.raises(CorruptCheckpointError, match=r"none can be read.*step1.*step2.*another machine"):
            look(run)
