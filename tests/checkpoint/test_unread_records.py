"""Files that cannot be read here, or whose record is of a newer version: what a run takes them for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from parts import save_batch
from sealed_files import damage, rewrite_record
from tiny_training import Record, trainer

from composerlite.checkpoint import Catalog
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.errors import IncompatibleCheckpointError

TEMPLATE = "ba{batch}.pt"


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
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder where permissions count, as they do not for root: it is made without what makes root an exception."""
    if os.getuid() == 0:
        capabilities(lambda effective: effective & ~_OF_ROOT)
    yield tmp_path / "run"
    if os.getuid() == 0:
        capabilities(lambda effective: effective | _OF_ROOT)


def look(folder: Path) -> dict[str, tuple[int, int]]:
    """What there is, and whether it was written."""
    return {str(path): (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def test_one_that_cannot_be_read_is_skipped_and_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint before it is resumed from, in a new attempt; a damaged one is quarantined, it is not."""
    good, unread, damaged = (save_batch(folder, batch) for batch in (1, 2, 3))
    damaged.write_bytes(bytes(damaged.stat().st_size))
    unread.chmod(0)
    before = look(folder)
    choice = choose([RunPlace(Catalog(folder), TEMPLATE, "latest.pt")], "run")
    assert (choice.path, choice.lineage.attempt) == (good, 1)
    assert choice.lineage.ancestors[-1].passed_over
    assert "ba2.pt" in caplog.text
    after = look(folder)
    assert after[str(unread)] == before[str(unread)]
    assert not damaged.exists()


@pytest.mark.parametrize("other", ["nothing", "a damaged one"])
def test_one_that_cannot_be_read_is_no_reason_to_start_over(folder: Path, other: str) -> None:
    """Where nothing is good the run ends with the error of the system, and nothing is changed."""
    if other == "a damaged one":
        damage(save_batch(folder, 1), "tail")
    save_batch(folder, 2).chmod(0)
    before = look(folder)
    for _ in range(2):
        with pytest.raises(PermissionError, match=r"ba2\.pt"):
            choose([RunPlace(Catalog(folder), TEMPLATE, "latest.pt")], "run")
    assert look(folder) == before


def test_one_of_a_name_that_the_run_does_not_give_keeps_no_run_from_its_beginning(folder: Path) -> None:
    """It is somebody else's, who does not let this user read it."""
    save_batch(folder, 1, template="other{batch}.pt").chmod(0)
    assert choose([RunPlace(Catalog(folder), TEMPLATE, "latest.pt")], "run").path is None


@pytest.mark.parametrize("unread", ["other3.pt", "ba8.pt"])
def test_a_run_beside_one_that_cannot_be_read_trains_to_its_end(folder: Path, unread: str) -> None:
    """A relaunch resumes from the newest that can be read, saves, and deletes older ones, as it does without it."""
    arguments: dict[str, Any] = {
        "save_folder": str(folder),
        "save_filename": TEMPLATE,
        "save_interval": "1ba",
        "save_num_checkpoints_to_keep": 5,
        "autoresume": True,
    }
    with trainer(max_duration="2ep", **arguments) as first:
        first.fit()
    if unread == "other3.pt":
        save_batch(folder, 3, template="other{batch}.pt", latest=None)
    (folder / unread).chmod(0)
    batches = Record()
    with trainer(max_duration="3ep", callbacks=[batches], **arguments) as second:
        second.fit()
    assert batches.batches == list(range(9 if unread == "other3.pt" else 8, 13))
    names = {manifest.name for manifest in Catalog(folder).manifests()}
    assert names == {f"ba{batch}.pt" for batch in range(8, 13)}, "it has saved the skipped one again"
    assert (folder / unread).exists()


def test_a_newer_one_of_the_run_ends_it(folder: Path) -> None:
    """It may be the newest, and this version cannot read it."""
    save_batch(folder, 1)
    rewrite_record(save_batch(folder, 2), version=2)
    with pytest.raises(IncompatibleCheckpointError, match=r"ba2\.pt.*update"):
        choose([RunPlace(Catalog(folder), TEMPLATE)], "run")


def test_a_newer_one_of_another_run_is_left_alone(folder: Path) -> None:
    """It stops nobody."""
    good = save_batch(folder, 1)
    other = save_batch(folder, 2, template="other{batch}.pt", latest=None)
    rewrite_record(other, version=2, run={"name": "other"})
    before = look(folder)
    assert choose([RunPlace(Catalog(folder), TEMPLATE)], "run").path == good
    assert look(folder) == before


def test_a_run_beside_one_of_a_newer_version_trains_to_its_end(folder: Path) -> None:
    """Two runs share a folder, and only the other's script was updated."""
    rewrite_record(save_batch(folder, 3, run_name="other", template="other{batch}.pt", latest=None), version=2)
    with trainer(
        save_folder=str(folder),
        save_filename=TEMPLATE,
        save_interval="1ba",
        save_num_checkpoints_to_keep=2,
        autoresume=True,
    ) as run:
        run.fit()
    assert (folder / "ba12.pt").exists()
    assert (folder / "other3.pt").exists()
