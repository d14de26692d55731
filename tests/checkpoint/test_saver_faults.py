"""What a training run meets: full disks, folders it may not write to, the remains of a killed run."""

from __future__ import annotations

import copy
import errno
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from parts import Remember, new_state, save_batch, temporaries, tree
from tiny_training import Classifier, CrashError, Record, StopAt, saved_batches, train, trainer

from composerlite.callbacks import CheckpointSaver, PreemptionHandler
from composerlite.checkpoint import Catalog, read_checkpoint
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.core import Callback, Logger, State
from composerlite.errors import CheckpointExistsError, ConfigError, SaveError
from composerlite.storage import StagedFile
from composerlite.storage.disk import files

Mount = Callable[[str], Path]


# ── a disk that is full ──────────────────────────────────────────────────────────────────────────────────────────────
def test_a_full_disk_stops_the_training_and_harms_nothing(mount: Mount) -> None:
    """The system's error, with the file; older checkpoints and ``latest`` stay, the space is given back."""
    disk = mount("size=512k")
    record = Record()
    run = trainer(model=Classifier(width=1000), callbacks=[record], save_folder=disk, save_interval="1ba")
    with run, pytest.raises(OSError, match="No space left on device") as e:
        run.fit()
    assert e.value.errno == errno.ENOSPC
    assert str(e.value.filename).startswith(str(disk))

    kept = saved_batches(disk)
    assert len(kept) >= 2
    assert kept == record.batches[: len(kept)]
    assert len(record.batches) <= len(kept) + 2, "training went on for more than a batch after a save had failed"
    assert f"ba{kept[-1]}-" in str((disk / "latest-rank0.pt").readlink())
    assert temporaries(disk) == []
    files = sum(-(-path.stat().st_size // 4096) * 4096 for path in disk.rglob("*") if path.is_file())
    assert shutil.disk_usage(disk).used <= files


def test_a_run_goes_on_when_there_is_space_again(mount: Mount) -> None:
    """From the newest checkpoint, to the same end."""
    disk = mount("size=512k")
    common: dict[str, Any] = {"save_folder": disk, "save_interval": "1ba", "max_duration": "9ba"}
    with trainer(model=Classifier(width=1000), **common) as run, pytest.raises(OSError, match="No space"):
        run.fit()
    newest = saved_batches(disk)[-1]
    for manifest in Catalog(disk).manifests()[:-1]:
        delete_checkpoint(Catalog(disk).place, manifest)
    record = Record()
    train(model=Classifier(width=1000), callbacks=[record], autoresume=True, save_num_checkpoints_to_keep=1, **common)
    assert record.batches == list(range(newest + 1, 10))
    assert saved_batches(disk) == [9]


class FillAndPreempt(Callback):
    """Fills a disk, and asks for the end of the run, at the end of the sixth batch."""

    def __init__(self, disk: Path, handler: PreemptionHandler) -> None:
        self.disk = disk
        self.handler = handler

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == 6:
            (self.disk / "other").write_bytes(bytes(shutil.disk_usage(self.disk).free))
            self.handler.preempt()


def test_a_preempted_run_saves_where_there_is_room(mount: Mount, tmp_path: Path) -> None:
    """Of two savers the first one's disk is full: the second saves where the run stands, and the error is raised."""
    disk, handler = mount("size=1m"), PreemptionHandler()
    savers = [CheckpointSaver(disk), CheckpointSaver(tmp_path / "room")]
    run = trainer(model=Classifier(width=1000), callbacks=[handler, FillAndPreempt(disk, handler), *savers])
    with run, pytest.raises(OSError, match="No space left on device"):
        run.fit()
    assert saved_batches(disk) == [4]
    assert saved_batches(tmp_path / "room") == [4, 6]


def test_whichever_file_cannot_be_made_a_save_is_whole_or_nothing(mount: Mount) -> None:
    """A disk that has no room for one more name: the file or the link fails."""
    outcomes: set[tuple[int, ...]] = set()
    for names in range(1, 12):
        disk = mount(f"size=1m,nr_inodes={names}")
        try:
            save_batch(disk, 1)
            save_batch(disk, 2)
        except OSError as e:
            assert e.errno == errno.ENOSPC  # noqa: PT017 - a save may succeed or fail, and both are looked at
        assert temporaries(disk) == []
        assert list(Catalog(disk).files()) == [manifest.name for manifest in Catalog(disk).manifests()]
        batches = tuple(saved_batches(disk))
        outcomes.add(batches)
        links = [str(path.readlink()) for path in disk.iterdir() if path.is_symlink()]
        assert links == [f"ba{batches[-1]}.pt" for _ in batches[:1]]
    assert outcomes == {(), (1,), (1, 2)}


@pytest.mark.parametrize("save_async", [True, False])
def test_a_save_whose_link_cannot_be_moved_stops_the_training(
    save_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the error, within a batch. What was saved stays, and the next start moves the link."""
    link = tmp_path / "latest-rank0.pt"
    moves: list[str] = []
    move = files._move_link

    def move_first(*arguments: Any) -> None:
        moves.append("")
        if len(moves) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(link))
        move(*arguments)

    monkeypatch.setattr(files, "_move_link", move_first)
    record = Record()
    how: dict[str, Any] = {"save_folder": tmp_path, "save_interval": "1ba", "save_async": save_async}
    with trainer(callbacks=[record], **how) as run, pytest.raises(OSError, match=r"latest-rank0\.pt"):
        run.fit()
    assert len(record.batches) <= 3
    assert saved_batches(tmp_path) == [1, 2]
    assert "ba1-" in str(link.readlink())
    assert temporaries(tmp_path) == []
    with trainer(autoresume=True, **how):
        assert "ba2-" in str(link.readlink())


class PutFile(Callback):
    """Puts a file in the place of a link when the second batch begins."""

    def __init__(self, link: Path) -> None:
        self.link = link

    def batch_start(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == 1:
            self.link.unlink()
            self.link.write_text("mine")


def test_a_file_that_takes_the_place_of_the_link_stops_the_training(tmp_path: Path) -> None:
    """It stays. The error says so, and nothing is saved that no link leads to."""
    link = tmp_path / "latest-rank0.pt"
    run = trainer(callbacks=[PutFile(link)], save_folder=tmp_path, save_interval="1ba", save_async=False)
    with run, pytest.raises(ConfigError, match=r"latest-rank0\.pt' is not a link"):
        run.fit()
    assert link.read_text() == "mine"
    assert saved_batches(tmp_path) == [1]
    assert temporaries(tmp_path) == []


# ── a folder that cannot be written to ───────────────────────────────────────────────────────────────────────────────
def test_a_folder_that_cannot_be_made_is_an_error_at_construction(tmp_path: Path) -> None:
    """Below a file, for one. The message names the folder; there is no training to lose."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"save_folder='.*/file/checkpoints' cannot be written to"):
        trainer(save_folder=tmp_path / "file" / "checkpoints")


def test_a_read_only_disk_is_an_error_at_construction(mount: Mount) -> None:
    """Whether the folder is there or not."""
    disk = mount("size=64k,ro")
    for folder in (disk, disk / "checkpoints"):
        with pytest.raises(ConfigError, match=r"cannot be written to: .*Read-only file system"):
            trainer(save_folder=folder)


def test_a_folder_that_can_be_written_to_is_left_empty(tmp_path: Path) -> None:
    """Finding out leaves nothing behind."""
    trainer(save_folder=tmp_path / "a" / "b").close()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_many_runs_may_start_in_one_folder_at_once(tmp_path: Path) -> None:
    """None is in the way of another."""
    errors: list[Exception] = []

    def start(number: int) -> None:
        state = new_state(run_name=f"run{number}")
        for _ in range(50):
            try:
                CheckpointSaver(tmp_path).init(state, Logger(state))
            except ConfigError as e:
                errors.append(e)

    threads = [threading.Thread(target=start, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(tmp_path.iterdir()) == []


# ── what is there already ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "filename",
    [
        "ep{epoch}-ba{batch}-rank{rank}.pt",
        "ep{epoch}.pt",
        "{run_name}-ba{batch}.pt",
        "ba{batch}-{total_wct}.pt",
        "{batch}/of/{run_name}.pt",
        "ep{epoch}-{batch_in_epoch}",
        "{sample}-{token}.ckpt",
    ],
)
def test_a_run_does_not_start_over_other_checkpoints(tmp_path: Path, filename: str) -> None:
    """The error comes before the first batch, whatever the names are made of, and nothing is changed."""
    train(save_folder=tmp_path, save_filename=filename, save_latest_filename=None)
    before = tree(tmp_path)
    record = Record()
    run = trainer(callbacks=[record], save_folder=tmp_path, save_filename=filename)
    with run, pytest.raises(CheckpointExistsError, match="save_overwrite=True"):
        run.fit()
    assert record.batches == []
    assert tree(tmp_path) == before


def test_a_run_starts_over_other_checkpoints_when_told_to(tmp_path: Path) -> None:
    """It writes what it would have written into an empty folder."""
    train(save_folder=tmp_path)
    run = train(save_folder=tmp_path, save_overwrite=True)
    assert run.saved_checkpoints == [str(tmp_path / f"ep{n}-ba{4 * n}-rank0.pt") for n in (1, 2, 3)]
    assert saved_batches(tmp_path) == [4, 8, 12]


def test_a_run_that_starts_over_keeps_what_it_saves(tmp_path: Path) -> None:
    """Older checkpoints that are ahead of it do not count as newer: ``latest`` is there after every save."""
    common: dict[str, Any] = {"save_folder": tmp_path, "save_overwrite": True, "save_num_checkpoints_to_keep": 1}
    train(max_duration="3ep", **common)
    train(max_duration="3ba", save_interval="1ba", **common)
    latest = read_checkpoint(tmp_path / "latest-rank0.pt")
    assert latest["state"]["timestamp"]["Timestamp"]["batch"] == 3
    assert 3 in saved_batches(tmp_path)


def test_two_runs_share_a_folder_if_their_names_differ(tmp_path: Path) -> None:
    """Neither is in the way of the other, and neither deletes what is the other's."""
    common: dict[str, Any] = {
        "save_folder": tmp_path,
        "save_filename": "{run_name}-{batch}.pt",
        "save_num_checkpoints_to_keep": 1,
    }
    for name in ("a", "b"):
        train(run_name=name, **common)
    assert sorted(path.name for path in tmp_path.glob("*.pt") if not path.is_symlink()) == ["a-12.pt", "b-12.pt"]


def test_a_run_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    """Checkpoints up to where it stands are its own: no conflict."""
    train(save_folder=tmp_path, max_duration="2ep")
    train(save_folder=tmp_path, max_duration="3ep", load_path=tmp_path / "latest-rank0.pt")
    assert saved_batches(tmp_path) == [4, 8, 12]


# ── a run that crashed, was killed, or cannot be saved ───────────────────────────────────────────────────────────────
def test_retention_survives_a_resume(tmp_path: Path) -> None:
    """The checkpoints of before count: in the end there are so many, not so many of each start."""
    common: dict[str, Any] = {"save_folder": tmp_path, "save_interval": "1ba", "save_num_checkpoints_to_keep": 3}
    with trainer(callbacks=[StopAt(5)], **common) as run, pytest.raises(CrashError):
        run.fit()
    assert saved_batches(tmp_path) == [3, 4, 5]
    run = train(autoresume=True, max_duration="7ba", **common)
    assert saved_batches(tmp_path) == [5, 6, 7]
    assert [Path(path).name for path in run.saved_checkpoints] == [f"ep1-ba{n}-rank0.pt" for n in (5, 6, 7)]


def test_files_that_the_user_removed_are_no_error(tmp_path: Path) -> None:
    """Training goes on, and what is left to delete is deleted."""

    class Remove(Record):
        def batch_start(self, state: object, logger: object) -> None:
            for path in tmp_path.glob("ep*-ba2-*"):
                path.unlink()

    train(callbacks=[Remove()], save_folder=tmp_path, save_interval="1ba", save_num_checkpoints_to_keep=2)
    assert saved_batches(tmp_path) == [11, 12]


def test_what_cannot_be_saved_stops_the_training(tmp_path: Path) -> None:
    """At the save, with the reason; the checkpoints of before stay."""
    remember = Remember()
    record = Record()
    with trainer(callbacks=[remember, record], save_folder=tmp_path) as run:
        run.fit(duration="1ep")
        remember.what = lambda: None
        with pytest.raises(SaveError, match="ep2-ba8-rank0"):
            run.fit(duration="2ep")
    assert record.batches[-1] == 8
    assert saved_batches(tmp_path) == [4]
    assert temporaries(tmp_path) == []


class Huge(Remember):
    """Makes the checkpoint of batch 8 a large one, and kills the process while it is written."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == 8:
            self.what = torch.zeros(100_000_000)
            threading.Thread(target=self._kill_in_the_middle).start()

    def _kill_in_the_middle(self) -> None:
        while not any(self._folder.glob(".*ba8-*.tmp-*")):
            pass
        os.kill(os.getpid(), signal.SIGKILL)


def a_run_that_is_killed_as_it_writes(folder: str) -> None:
    def kill_at_the_end(event: str, arguments: tuple[object, ...]) -> None:  # if the thread was too slow
        if event == "os.link" and str(arguments[1]).endswith("ba8-rank0.pt"):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill_at_the_end)
    train(callbacks=[Huge(Path(folder))], save_folder=folder, save_interval="4ba")


def test_the_next_start_clears_up_after_a_kill(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SIGKILL while a checkpoint is written: its remains go, with a line in the log, and training resumes before it."""
    caplog.set_level(logging.INFO)
    killed = run_forked(a_run_that_is_killed_as_it_writes, str(tmp_path), cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert saved_batches(tmp_path) == [4]
    (left,) = temporaries(tmp_path)
    record = Record()
    train(callbacks=[record, Remember()], save_folder=tmp_path, save_interval="4ba", autoresume=True)
    assert record.batches == list(range(5, 13))
    assert saved_batches(tmp_path) == [4, 8, 12]
    assert temporaries(tmp_path) == []
    assert f"removed {tmp_path / left}, left by a killed process" in caplog.text


def test_a_run_in_the_same_folder_does_not_touch_a_save_in_progress(tmp_path: Path) -> None:
    """Another run starts, trains and saves there while a checkpoint of this one is being written."""
    with StagedFile(tmp_path / "this.pt") as in_progress:
        train(run_name="another", save_folder=tmp_path, save_filename="another{batch}.pt")
        assert temporaries(tmp_path) == [in_progress.temporary.name]
    assert saved_batches(tmp_path) == [4, 8, 12]


def test_training_is_the_same_with_and_without_checkpoints(tmp_path: Path) -> None:
    """Saving moves no random generator and changes no weight."""
    model = Classifier()
    plain = train(model=copy.deepcopy(model))
    saving = train(model=model, save_folder=tmp_path, save_interval="1ba")
    for a, b in zip(plain.state.model.parameters(), saving.state.model.parameters(), strict=True):
        assert torch.equal(a, b)
