"""What a folder of checkpoints says of itself, and how one comes and goes."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from parts import flip, save_batch, save_directory, tree, value_in
from sealed_files import damage

from composerlite.checkpoint import Catalog, read_checkpoint
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.place.place import Folder
from composerlite.errors import CheckpointExistsError, CorruptCheckpointError


def batches(folder: Path) -> list[int]:
    return [manifest.batch for manifest in Catalog(folder).manifests()]


def test_checkpoints_are_listed_oldest_first(tmp_path: Path) -> None:
    """By batch count, not by name nor by when they were saved."""
    for batch in (10, 9, 100):
        save_batch(tmp_path, batch)
    assert batches(tmp_path) == [9, 10, 100]


def test_checkpoints_of_one_batch_are_listed_in_the_order_of_saving(tmp_path: Path) -> None:
    """The later one is the newer one."""
    save_batch(tmp_path, 1, template="z.pt")
    save_batch(tmp_path, 1, template="sub/a.pt")
    assert [manifest.name for manifest in Catalog(tmp_path).manifests()] == ["z.pt", "sub/a.pt"]


def test_an_empty_folder_and_none_hold_no_checkpoints(tmp_path: Path) -> None:
    """It is no error to ask."""
    assert Catalog(tmp_path).manifests() == Catalog(tmp_path / "none").manifests() == []
    assert list(Catalog(tmp_path / "none").files()) == []
    assert tree(tmp_path) == {}


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


def test_a_file_without_a_record_is_no_checkpoint(tmp_path: Path) -> None:
    """The file is not listed as a checkpoint; it is a file that is there."""
    save_batch(tmp_path, 1)
    (tmp_path / "ba2.pt").write_bytes(b"of another program")
    assert batches(tmp_path) == [1]
    assert Catalog(tmp_path).manifest_of("ba2.pt") is None
    assert list(Catalog(tmp_path).files()) == ["ba1.pt", "ba2.pt"]


def test_files_are_those_that_may_be_checkpoints(tmp_path: Path) -> None:
    """Not links, not what is hidden, in subfolders too."""
    save_batch(tmp_path, 1, template="sub/ba{batch}.pt")
    (tmp_path / ".hidden").touch()
    (tmp_path / "sub" / ".cache").mkdir()
    (tmp_path / "sub" / ".cache" / "file").touch()
    assert list(Catalog(tmp_path).files()) == ["sub/ba1.pt"]


def test_a_folder_can_be_moved(tmp_path: Path) -> None:
    """Everything in it is relative: records, links, data."""
    save_batch(tmp_path / "here", 1, template="sub/ba{batch}.pt", latest="links/latest.pt")
    (tmp_path / "here").rename(tmp_path / "there")
    assert value_in(read_checkpoint(tmp_path / "there" / "links" / "latest.pt")) == 1
    (manifest,) = Catalog(tmp_path / "there").manifests()
    Catalog(tmp_path / "there").verify(manifest)


# ── verify ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_damage_is_told_apart(tmp_path: Path) -> None:
    """The data is gone, has another size, or other bytes: each is said, with the file."""
    path = save_batch(tmp_path, 1)
    (manifest,) = Catalog(tmp_path).manifests()
    data = path.read_bytes()
    Catalog(tmp_path).verify(manifest)

    flip(path, 0)
    with pytest.raises(CorruptCheckpointError, match=r"bytes of .*ba1\.pt' differ from the saved bytes"):
        Catalog(tmp_path).verify(manifest)
    path.write_bytes(data)
    flip(path, -1)
    with pytest.raises(CorruptCheckpointError, match=r"record of .*ba1\.pt' is not the saved record"):
        Catalog(tmp_path).verify(manifest)
    path.write_bytes(data[:-1])
    with pytest.raises(CorruptCheckpointError, match=rf"has {len(data) - 1} bytes and was saved with {len(data)}"):
        Catalog(tmp_path).verify(manifest)
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"No such file .*ba1\.pt'"):
        Catalog(tmp_path).verify(manifest)


def test_a_link_that_is_being_made_is_not_listed(tmp_path: Path) -> None:
    """Commands beside a run see the links that are there, and not the temporary one, which is gone a moment later."""
    place = Folder(tmp_path)
    with place.pointing({"latest": "ba1.pt"}):
        assert place.links() == {}
    assert place.links() == {"latest": "ba1.pt"}


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


def test_a_checkpoint_is_overwritten_when_asked(tmp_path: Path) -> None:
    """There is one checkpoint of that name, the new one."""
    for batch in (1, 2):
        save_batch(tmp_path, batch, template="fixed.pt", overwrite=True)
    assert batches(tmp_path) == [2]
    assert value_in(read_checkpoint(tmp_path / "fixed.pt")) == 2


def test_a_deleted_checkpoint_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The others are as they were; the log has a line, for debugging: it is routine."""
    caplog.set_level(logging.DEBUG, "composerlite")
    for batch in (1, 2):
        save_batch(tmp_path, batch)
    delete_checkpoint(Catalog(tmp_path).place, Catalog(tmp_path).manifests()[0])
    assert sorted(tree(tmp_path)) == ["ba2.pt", "latest.pt"]
    assert f"deleted checkpoint {tmp_path / 'ba1.pt'}" in caplog.text


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


# ── only a definite "not found" counts as absence ────────────────────────────────────────────────────────────────────
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


@pytest.mark.parametrize("hidden", ["sub", "."])
def test_files_that_cannot_be_listed_are_not_absent(folder: Path, hide: Callable[[str], None], hidden: str) -> None:
    """The check for conflicts fails rather than to overlook what it cannot see."""
    save_batch(folder, 1, template="sub/ba{batch}.pt")
    hide(hidden)
    with pytest.raises(PermissionError):
        list(Catalog(folder).files())
