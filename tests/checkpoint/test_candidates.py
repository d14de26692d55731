"""Which checkpoint a run resumes from."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint.sharded_parts import small_model
from combinations import covering
from parts import save_archives, save_batch, save_directory, tree
from sealed_files import DAMAGES, damage, rewrite_record
from sent_files import publish_files
from storage.local_store import LocalObjectStore
from tiny_training import Record, trainer

from composerlite.checkpoint import Catalog, Checkpointer, Manifest
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    ObjectStoreError,
)
from composerlite.storage import Transfer

TEMPLATE = "ba{batch}.pt"


def test_it_is_the_newest_by_batch(tmp_path: Path) -> None:
    """Of all folders, whatever the order of saving."""
    for folder, batch in (("a", 10), ("b", 12), ("a", 11)):
        save_batch(tmp_path / folder, batch)
    places = [RunPlace(Catalog(tmp_path / name)) for name in ("a", "b")]
    assert choose(places, "run").path == tmp_path / "b" / "ba12.pt"
    assert choose(places[::-1], "run").path == tmp_path / "b" / "ba12.pt"


def test_it_is_one_of_the_run_and_whole(tmp_path: Path) -> None:
    """Not of another run, not weights alone."""
    save_batch(tmp_path, 1)
    save_batch(tmp_path, 2, run_name="other")
    save_batch(tmp_path, 3, weights_only=True)
    assert choose([RunPlace(Catalog(tmp_path))], "run").path == tmp_path / "ba1.pt"


@pytest.mark.parametrize("how", DAMAGES)
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(tmp_path: Path, how: str) -> None:
    """The error names each and the way out, and nothing is changed. A good one is resumed from."""
    for batch in (1, 2):
        damage(save_batch(tmp_path, batch), how)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"none can be loaded.*ba[12]\.pt.*ba[12]\.pt.*load_path"):
            choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    good = save_batch(tmp_path, 0)
    assert choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run").path == good
    end = "" if how == "no record" else ".damaged"
    assert {path.name for path in tmp_path.glob("ba*")} == {"ba0.pt", f"ba1.pt{end}", f"ba2.pt{end}"}
    assert (tmp_path / "latest.pt").readlink() == Path("ba0.pt")


def test_what_cannot_be_read_and_is_not_of_the_run_is_no_damage(tmp_path: Path) -> None:
    """Damaged checkpoints of names that the run does not write keep no run from its beginning."""
    damage(save_batch(tmp_path, 1, template="xx{batch}.pt", latest=None), "tail")
    (tmp_path / ".manifest").mkdir()
    (tmp_path / ".manifest" / "other.json").write_text("{")
    assert choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run").path is None


def test_a_whole_one_comes_before_newer_parts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was saved without its optimizer would start that afresh: it is taken only where there is nothing else."""
    part = save_batch(tmp_path, 2, ignore_keys=["state/optimizers"])
    assert choose([RunPlace(Catalog(tmp_path))], "run").path == part
    assert "saved without ('state/optimizers',)" in caplog.text
    whole = save_batch(tmp_path, 1)
    assert choose([RunPlace(Catalog(tmp_path))], "run").path == whole
    whole.unlink()
    assert choose([RunPlace(Catalog(tmp_path))], "run").path == part


def test_a_copy_made_by_hand_is_neither_resumed_nor_moved(tmp_path: Path) -> None:
    """Its record names the checkpoint that it is a copy of."""
    good = save_batch(tmp_path, 1)
    shutil.copy(good, tmp_path / "ba9.pt")
    assert choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run").path == good
    good.unlink()
    assert choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run").path is None
    assert (tmp_path / "ba9.pt").exists()


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


def make_unreadable(path: Path) -> None:
    """The system refuses to open it, for every user: it is a link to itself."""
    path.unlink()
    path.symlink_to(path.name)


FAULTS: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": leave_empty,
    "cut": cut,
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


def batches(folder: Path) -> list[int]:
    return [manifest.batch for manifest in Catalog(folder).manifests()]


def test_checkpoints_are_listed_oldest_first(tmp_path: Path) -> None:
    """By batch count, not by name nor by when they were saved."""
    for batch in (10, 9, 100):
        save_batch(tmp_path, batch)
    assert batches(tmp_path) == [9, 10, 100]


def test_a_damaged_record_hides_its_checkpoint_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other checkpoints are listed, and the log says which checkpoint was left out and why."""
    for batch in (1, 2, 3):
        save_batch(tmp_path, batch)
    save_directory(tmp_path, 4)
    damage(tmp_path / "ba2.pt", "tail")
    damage(tmp_path / "ba4" / ".metadata", "tail")
    assert batches(tmp_path) == [1, 3]
    for name, source in (("ba2.pt", r"ba2\.pt"), ("ba4", r"ba4/\.metadata")):
        assert re.search(rf"left out: .*{source}", caplog.text)
        with pytest.raises(CorruptCheckpointError, match=source):
            Catalog(tmp_path).manifest_of(name)


# ── reserve, delete ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_checkpoint_is_not_overwritten_unasked(tmp_path: Path) -> None:
    """Neither one of ours nor a file of somebody else: nothing changes, and the message says what to do."""
    save_batch(tmp_path, 1)
    (tmp_path / "ba2.pt").write_bytes(b"of another program")
    before = tree(tmp_path)
    for batch in (1, 2):
        with pytest.raises(CheckpointExistsError, match=r"overwrite=True.*save_overwrite=True"):
            save_batch(tmp_path, batch)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("gone", ["ba1.pt", "ba1/.metadata", "ba1/*.distcp"])
def test_what_the_user_deleted_is_no_error(tmp_path: Path, gone: str) -> None:
    """Deleting a checkpoint of which files were removed by hand removes the rest."""
    if gone == "ba1.pt":
        save_batch(tmp_path, 1, latest=None)
    else:
        save_directory(tmp_path, 1)
    (manifest,) = Catalog(tmp_path).manifests()
    for path in list(tmp_path.glob(gone)):
        path.unlink()
    delete_checkpoint(Catalog(tmp_path).place, manifest)
    assert tree(tmp_path) == {}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can reach, as those of pytest are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.fixture
def hide(folder: Path) -> Iterator[Callable[[str], None]]:
    """Takes the rights to a folder away from everybody but root, and from there on the test is not root."""
    hidden: list[Path] = []

    def hide(name: str) -> None:
        hidden.append(folder / name)
        hidden[-1].chmod(0)
        if os.getuid() == 0:
            os.seteuid(65534)

    yield hide
    if os.getuid() == 0:
        os.seteuid(0)
    for path in hidden:
        path.chmod(0o777)


@pytest.mark.parametrize("hidden", ["sub", "."])
def test_a_folder_that_cannot_be_read_is_not_an_empty_one(
    folder: Path, hide: Callable[[str], None], hidden: str
) -> None:
    """No permission: an error. Taken for "no checkpoints", a run would start from scratch."""
    save_batch(folder, 1, template="sub/ba{batch}.pt")
    hide(hidden)
    with pytest.raises(PermissionError):
        Catalog(folder).manifests()


_CAPABILITIES = ctypes.c_uint32 * 6  # effective, permitted, inheritable; twice
_OF_ROOT = 1 << 1 | 1 << 2  # to read and write whatever the permissions are


def capabilities(change: Callable[[int], int]) -> None:
    """Change which this thread, and those that it starts, make use of."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    found = _CAPABILITIES()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, found) == 0
    found[0] = change(found[0])
    assert libc.capset(header, found) == 0


@pytest.fixture
def own_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder where permissions count, as they do not for root: it is made without what makes root an exception."""
    if os.getuid() == 0:
        capabilities(lambda effective: effective & ~_OF_ROOT)
    yield tmp_path / "run"
    if os.getuid() == 0:
        capabilities(lambda effective: effective | _OF_ROOT)


def look(own_folder: Path) -> dict[str, tuple[int, int]]:
    """What there is, and whether it was written."""
    return {str(path): (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in sorted(own_folder.rglob("*"))}


def test_one_that_cannot_be_read_is_skipped_and_left_alone(own_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint before it is resumed from, in a new attempt; a damaged one is quarantined, it is not."""
    good, unread, damaged = (save_batch(own_folder, batch) for batch in (1, 2, 3))
    damaged.write_bytes(bytes(damaged.stat().st_size))
    unread.chmod(0)
    before = look(own_folder)
    choice = choose([RunPlace(Catalog(own_folder), TEMPLATE, "latest.pt")], "run")
    assert (choice.path, choice.lineage.attempt) == (good, 1)
    assert choice.lineage.ancestors[-1].passed_over
    assert "ba2.pt" in caplog.text
    after = look(own_folder)
    assert after[str(unread)] == before[str(unread)]
    assert not damaged.exists()


@pytest.mark.parametrize("other", ["nothing", "a damaged one"])
def test_one_that_cannot_be_read_is_no_reason_to_start_over(own_folder: Path, other: str) -> None:
    """Where nothing is good the run ends with the error of the system, and nothing is changed."""
    if other == "a damaged one":
        damage(save_batch(own_folder, 1), "tail")
    save_batch(own_folder, 2).chmod(0)
    before = look(own_folder)
    for _ in range(2):
        with pytest.raises(PermissionError, match=r"ba2\.pt"):
            choose([RunPlace(Catalog(own_folder), TEMPLATE, "latest.pt")], "run")
    assert look(own_folder) == before


@pytest.mark.parametrize("unread", ["other3.pt", "ba8.pt"])
def test_a_run_beside_one_that_cannot_be_read_trains_to_its_end(own_folder: Path, unread: str) -> None:
    """A relaunch resumes from the newest that can be read, saves, and deletes older ones, as it does without it."""
    arguments: dict[str, Any] = {
        "save_folder": str(own_folder),
        "save_filename": TEMPLATE,
        "save_interval": "1ba",
        "save_num_checkpoints_to_keep": 5,
        "autoresume": True,
    }
    with trainer(max_duration="2ep", **arguments) as first:
        first.fit()
    if unread == "other3.pt":
        save_batch(own_folder, 3, template="other{batch}.pt", latest=None)
    (own_folder / unread).chmod(0)
    batches = Record()
    with trainer(max_duration="3ep", callbacks=[batches], **arguments) as second:
        second.fit()
    assert batches.batches == list(range(9 if unread == "other3.pt" else 8, 13))
    names = {manifest.name for manifest in Catalog(own_folder).manifests()}
    assert names == {f"ba{batch}.pt" for batch in range(8, 13)}, "it has saved the skipped one again"
    assert (own_folder / unread).exists()


def test_a_newer_one_of_the_run_ends_it(own_folder: Path) -> None:
    """It may be the newest, and this version cannot read it."""
    save_batch(own_folder, 1)
    rewrite_record(save_batch(own_folder, 2), version=2)
    with pytest.raises(IncompatibleCheckpointError, match=r"ba2\.pt.*update"):
        choose([RunPlace(Catalog(own_folder), TEMPLATE)], "run")


def test_a_newer_one_of_another_run_is_left_alone(own_folder: Path) -> None:
    """It stops nobody."""
    good = save_batch(own_folder, 1)
    other = save_batch(own_folder, 2, template="other{batch}.pt", latest=None)
    rewrite_record(other, version=2, run={"name": "other"})
    before = look(own_folder)
    assert choose([RunPlace(Catalog(own_folder), TEMPLATE)], "run").path == good
    assert look(own_folder) == before
