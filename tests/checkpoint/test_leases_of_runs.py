"""Runs that would write the same files, and a folder that vanishes or goes read-only under a run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked, started
from tiny_training import saved_batches, train, trainer

from composerlite import Callback, Logger, State
from composerlite.checkpoint import Catalog
from composerlite.checkpoint.place.place import Folder
from composerlite.errors import RunInUseError, SaveError

FILES = "ep{epoch}-ba{batch}-rank{rank}.pt"
"""The default of save_filename, which the lease of a run is named after."""


class Wait(Callback):
    """Tells the number of the process after five batches, and waits until it may go on."""

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == 5:
            sys.stdout.write(f"{os.getpid()}\n")
            sys.stdout.flush()
            sys.stdin.readline()


def train_and_wait(folder: str) -> None:
    """Train, and stand in the middle of it."""
    torch.set_num_threads(1)
    with trainer(callbacks=[Wait()], save_folder=folder, save_interval="1ba") as run:
        run.fit()


@contextmanager
def another_launch(folder: Path) -> Generator[int]:
    """A program that trains, and stands in the middle of it until the block ends: its process."""
    with started(train_and_wait, str(folder)) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        _, said = process.communicate("\n", timeout=240)
        assert process.returncode == 0, said


def test_two_launches_without_autoresume_do_not_write_the_same_files(tmp_path: Path) -> None:
    """The second is refused before its first batch, with the process and the machine of the first."""
    with (
        another_launch(tmp_path) as first,
        trainer(save_folder=tmp_path, save_interval="1ba", save_overwrite=True) as run,
    ):
        with pytest.raises(
            RunInUseError, match=rf"run 'run': .* is written by another process, process {first} on .*another launch"
        ):
            run.fit()
        assert int(run.state.timestamp.batch) == 0
    assert saved_batches(tmp_path) == list(range(1, 13))
    train(save_folder=tmp_path, save_interval="1ba", save_overwrite=True)


def test_two_runs_whose_files_have_the_same_names_do_not_share_a_folder(tmp_path: Path) -> None:
    """They are told before the first batch; with the run's name in the names of its files both train."""
    with another_launch(tmp_path) as first:
        with (
            trainer(run_name="other", save_folder=tmp_path, save_overwrite=True) as run,
            pytest.raises(
                RunInUseError,
                match=rf"process {first} on .*replace each other's files.* its own save_folder or file names",
            ),
        ):
            run.fit()
        train(
            run_name="other",
            save_folder=tmp_path,
            save_filename="{run_name}-ep{epoch}.pt",
            save_latest_filename="{run_name}.pt",
        )
    assert len(saved_batches(tmp_path)) == 12 + 3


class At(Callback):
    """Does something at the end of one batch."""

    def __init__(self, batch: int, do: Callable[[], object]) -> None:
        self.batch, self.do = batch, do

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.batch:
            self.do()


# ── a folder that vanishes ───────────────────────────────────────────────────────────────────────────────────────────
def test_a_run_whose_folder_is_removed_ends_with_an_error(tmp_path: Path) -> None:
    """Nothing is saved to a new folder of that name."""
    folder = tmp_path / "saves"
    remove = At(6, lambda: shutil.rmtree(folder))
    with (
        trainer(callbacks=[remove], save_folder=folder, save_interval="1ba", save_async=False) as run,
        pytest.raises(SaveError, match="saves' was removed or replaced while this run saves to it"),
    ):
        run.fit()
    assert int(run.state.timestamp.batch) == 6
    assert not folder.exists()


def test_a_folder_that_another_launch_has_taken_is_left_to_it(tmp_path: Path) -> None:
    """The folder is removed in the last batch, and the run launched again: the first process saves nothing there."""
    folder = tmp_path / "saves"
    with contextlib.ExitStack() as stack:

        def take() -> None:
            shutil.rmtree(folder)
            other.append(stack.enter_context(another_launch(folder)))

        other: list[int] = []
        run = trainer(callbacks=[At(12, take)], save_folder=folder, save_async=False)
        with run, pytest.raises(SaveError, match="was removed or replaced"):
            run.fit()
        assert not [path for path in folder.rglob("*") if "ba12" in path.name]
        assert "ba12" not in str((folder / "latest-rank0.pt").readlink())
    assert other


def want(folder: str) -> None:
    """Print who has the lease of the run."""
    sys.stdout.write(Folder(folder).lock(FILES).try_to_take() or "")


def who_holds(folder: Path) -> str | None:
    """What another process is told that wants the lease of the run."""
    done = run_forked(want, str(folder), cwd=Path.cwd(), timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout or None


def test_two_trainers_of_a_process_share_a_lease(tmp_path: Path) -> None:
    """It is free when the last of both has given it back."""
    folder = tmp_path / "saves"
    leases = [Folder(folder).lock(FILES) for _ in range(2)]
    for lease in leases:
        assert lease.try_to_take() is None
    assert who_holds(folder) is not None
    leases[0].release()
    assert who_holds(folder) is not None, "the second trainer still saves here"
    leases[1].release()
    assert who_holds(folder) is None


# ── a disk that goes read-only ───────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("autoresume", [True, False])
def test_a_disk_that_goes_read_only_does_not_end_a_run_that_tolerates_failures(
    autoresume: bool, mount: Callable[[str], Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Nor does its end: the trainer closes, and the lease is free when the disk is writable again."""
    disk, folder = mount("size=4m"), tmp_path / "view"
    folder.mkdir()

    def view(how: str) -> None:
        for command in (
            ["mount", "--bind", str(disk), str(folder)],
            ["mount", "-o", f"remount,bind,{how}", str(folder)],
        ):
            subprocess.run(command, check=True)

    def leave() -> None:  # what is open stays open, as when the system goes read-only after an error
        subprocess.run(["umount", "-l", str(folder)], check=True)

    request.addfinalizer(lambda: subprocess.run(["umount", "-l", str(folder)], check=False))

    def go_read_only() -> None:
        leave()
        view("ro")

    view("rw")
    with trainer(
        callbacks=[At(6, go_read_only)],
        save_folder=folder,
        save_interval="1ba",
        save_failure_limit=100,
        autoresume=autoresume,
    ) as run:
        run.fit()
        assert int(run.state.timestamp.batch) == 12
    kept = saved_batches(disk)
    assert kept[-1] >= 4
    assert kept == list(range(1, kept[-1] + 1))
    leave()
    assert who_holds(disk) is None
    train(save_folder=disk, save_interval="1ba", autoresume=True)
    assert saved_batches(disk) == list(range(1, 13))


# ── a disk without an inode ──────────────────────────────────────────────────────────────────────────────────────────
def save_on_small_disks(root: str, how: str) -> None:
    """Six batches on each of the disks in ``root``, with a save at each."""
    torch.set_num_threads(1)
    for disk in Path(root).glob("disk*"):
        arguments: dict[str, Any] = {"save_interval": "1ba", "save_failure_limit": 100, "max_duration": "6ba"}
        with trainer(save_folder=disk, save_async=False, **arguments, **json.loads(how)) as run:
            run.fit()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="file"),
        pytest.param({"save_filename": "ba{batch}-rank{rank}.pt.gz"}, id="packed"),
        pytest.param({"parallelism_config": {"fsdp": {}}}, id="directory"),
        pytest.param({"deepspeed_config": {"zero_optimization": {"stage": 1}}}, id="archive"),
    ],
)
def test_latest_leads_to_a_whole_checkpoint_on_a_full_disk(
    mount: Callable[[str], Path], tmp_path: Path, how: dict[str, Any]
) -> None:
    """However many names a disk has room for. Where there was none for a new link, ``latest`` stays behind by one."""
    disks = {names: mount(f"size=2m,nr_inodes={names}") for names in range(4, 28)}
    done = run_forked(save_on_small_disks, str(tmp_path), json.dumps(how), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    newest: set[int] = set()
    for names, disk in disks.items():
        kept = saved_batches(disk)
        links = list(disk.glob("latest*"))
        assert len(links) == 1 or len(kept) < 2, names
        for link in links:
            found = Catalog(disk).manifest_of(str(link.readlink()))
            assert found is not None
            assert found.batch in kept[-2:], f"nr_inodes={names}: latest stays behind"
        newest.add(kept[-1] if kept else 0)
    assert len(newest) > 3, "the disks were too small or too large to show it"
