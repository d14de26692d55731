"""Runs and savers that would write the same objects of a bucket, from machines with folders of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from forked import started
from tiny_training import Classifier, StopAt, saved_batches, train, trainer

from composerlite import Callback, Logger, State
from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import CheckpointManager
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.errors import ConfigError, RunInUseError
from composerlite.loggers import RemoteUploaderDownloader
from composerlite.storage import ObjectStore, Transfer, open_store

LONGER_THAN_A_HEARTBEAT = 7.0
LEASE = "run/.ep{epoch}-ba{batch}-rank{rank}.pt.lease"
"""The object of the lease of the default names of files, where save_folder is ``run``."""
OF_ITS_OWN: dict[str, Any] = {"save_filename": "{run_name}-ba{batch}.pt", "save_latest_filename": "{run_name}.pt"}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: Any) -> None:  # pyright: ignore[reportUnusedFunction]
    """The service is found by the environment."""
    monkeypatch.chdir(tmp_path)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(s3_server: Any) -> str:
    return f"s3://{s3_server.new_bucket()}"


@pytest.fixture
def store(bucket: str) -> Generator[ObjectStore]:
    with open_store(bucket) as store:
        yield store


class Wait(Callback):
    """Tells the number of the process after five batches, and waits until its input has a line."""

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == 5:
            sys.stdout.write(f"{os.getpid()}\n")
            sys.stdout.flush()
            sys.stdin.readline()


def train_and_wait(folder: str, staging: str, names: str) -> None:
    """Train, and stand in the middle of it."""
    torch.set_num_threads(1)
    with trainer(
        callbacks=[Wait()], save_folder=folder, save_staging_folder=staging, save_interval="2ba", **json.loads(names)
    ) as run:
        run.fit()


@contextmanager
def another_machine(folder: str, staging: Path, **names: Any) -> Generator[int]:
    """A launch of ``run`` that stages elsewhere, and stands in its middle until the block ends: its process."""
    with started(train_and_wait, folder, str(staging), json.dumps(names)) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        _, said = process.communicate("\n", timeout=240)
        assert process.returncode == 0, said


class Sleep(Callback):
    """Sleeps for longer than the time between two heartbeats of a lease, in the middle of training."""

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == 5:
            time.sleep(LONGER_THAN_A_HEARTBEAT)


def objects(store: ObjectStore) -> list[str]:
    """The names of all objects that are not about checkpoints."""
    return [info.name for info in store.list_objects() if not PurePosixPath(info.name).name.startswith(".")]


def leases(store: ObjectStore) -> list[str]:
    """The names of what is left of leases."""
    return [info.name for info in store.list_objects() if ".lease" in info.name]


# ── two savers of one trainer ────────────────────────────────────────────────────────────────────────────────────────
def test_two_savers_of_a_trainer_share_the_lease_of_the_run(bucket: str, store: ObjectStore) -> None:
    """Below one prefix, with names of their own: training is not ended by the other saver's heartbeat."""
    full = CheckpointSaver(f"{bucket}/run", filename="full/ep{epoch}.pt")
    weights = CheckpointSaver(
        f"{bucket}/run", filename="weights/ep{epoch}.pt", latest_filename="weights.pt", weights_only=True
    )
    train(callbacks=[Sleep(), full, weights])
    assert {"run/full/ep3.pt", "run/weights/ep3.pt"} <= set(objects(store))
    assert leases(store) == []


# ── two machines ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_second_launch_of_a_run_is_refused_before_it_writes(bucket: str, store: ObjectStore, tmp_path: Path) -> None:
    """Without autoresume, on another machine, even where it may overwrite: it is told by whom, before its first batch.

    The first trains on and has all that it saved.
    """
    folder = f"{bucket}/saves"
    with (
        another_machine(folder, tmp_path / "one") as first,
        trainer(save_folder=folder, save_staging_folder=tmp_path / "two", save_overwrite=True) as run,
    ):
        with pytest.raises(
            RunInUseError, match=rf"run 'run': .* is written by another process, process {first} on .*another launch"
        ):
            run.fit()
        assert int(run.state.timestamp.batch) == 0
    assert len([name for name in objects(store) if name.startswith("saves/ep")]) == 6
    assert leases(store) == []


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        ({"save_filename": "{run_name}-ba{batch}.pt"}, "latest-rank0.pt"),
        ({"save_latest_filename": "{run_name}.pt", "save_overwrite": True}, "ep{epoch}-ba{batch}-rank{rank}.pt"),
        ({"save_remote_file_name": "files/{run_name}/ba{batch}.pt"}, "latest-rank0.pt"),
        ({}, "ep{epoch}-ba{batch}-rank{rank}.pt"),
    ],
    ids=["link", "files", "link above files in folders of their own", "all"],
)
def test_two_runs_whose_objects_have_the_same_names_do_not_share_a_prefix(
    names: dict[str, Any], shared: str, bucket: str, store: ObjectStore, tmp_path: Path
) -> None:
    """On two machines, as in one folder: the second is told before its first batch, with the name and the way out."""
    folder = f"{bucket}/saves"
    with (
        another_machine(folder, tmp_path / "one", **names) as first,
        trainer(run_name="other", save_folder=folder, save_staging_folder=tmp_path / "two", **names) as run,
    ):
        holder = rf"{re.escape(f'{folder}/{shared}')}' is written by .* process {first} on "
        told = rf"{holder}.*its own save_folder or file names"
        with pytest.raises(RunInUseError, match=told):
            run.fit()
        assert int(run.state.timestamp.batch) == 0
    assert leases(store) == []


def test_two_runs_with_names_of_their_own_share_a_prefix(bucket: str, store: ObjectStore, tmp_path: Path) -> None:
    """Both train at the same time, and nothing is left of their leases."""
    folder = f"{bucket}/saves"
    with another_machine(folder, tmp_path / "one", **OF_ITS_OWN):
        train(run_name="other", save_folder=folder, save_staging_folder=tmp_path / "two", **OF_ITS_OWN)
    assert {"saves/run-ba12.pt", "saves/other-ba12.pt", "saves/run.pt.symlink", "saves/other.pt.symlink"} <= set(
        objects(store)
    )
    assert leases(store) == []


# ── two savers of one trainer with the same names ────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("second", "told"),
    [
        ({}, r"/run/checkpoints/(?:ep\{epoch\}-ba\{batch\}-rank\{rank\}|latest-rank0)\.pt"),
        ({"filename": "w{batch}.pt"}, r"/run/checkpoints/latest-rank0\.pt"),
        ({"latest_filename": "w.pt"}, r"/run/checkpoints/ep\{epoch\}-ba\{batch\}-rank\{rank\}\.pt"),
    ],
    ids=["all", "link", "files"],
)
def test_two_savers_never_share_an_object(
    second: dict[str, Any], told: str, bucket: str, store: ObjectStore, tmp_path: Path
) -> None:
    """Not from two folders either: the trainer is not built, and the message names both and the way out."""
    savers = [CheckpointSaver("a"), CheckpointSaver("b", weights_only=True, **second)]
    with pytest.raises(ConfigError, match=rf"two CheckpointSavers, of 'b' and of 'a', both write .*{told}.* Give one"):
        trainer(callbacks=savers, loggers=[RemoteUploaderDownloader(bucket)])
    savers = [CheckpointSaver(f"{bucket}/run", staging_folder=stage) for stage in ("a", "b")]
    with pytest.raises(ConfigError, match=r"two CheckpointSavers, .* Give one of them another"):
        trainer(callbacks=savers)
    assert objects(store) == []


def test_two_savers_with_remote_names_of_their_own_share_a_bucket(bucket: str, store: ObjectStore) -> None:
    """The way out that the message names: both publish, and neither is in the way of the other."""
    savers = [
        CheckpointSaver("a"),
        CheckpointSaver("b", weights_only=True, remote_file_name="w/{epoch}.pt", latest_remote_file_name="w/latest"),
    ]
    train(callbacks=savers, loggers=[RemoteUploaderDownloader(bucket)], max_duration="1ep")
    expected = ["run/checkpoints/ep1-ba4-rank0.pt", "run/checkpoints/latest-rank0.pt.symlink", "w/1.pt"]
    assert objects(store) == [*expected, "w/latest.symlink"]


# ── a run that another process has taken over ────────────────────────────────────────────────────────────────────────
class TakenOver(Callback):
    """Another process takes the run over at the end of the second epoch, or, with an upload that waits, of a batch of
    the third: this one was suspended."""

    def __init__(self, store: ObjectStore, *, uploads: bool) -> None:
        self.store, self.uploads = store, uploads
        self.may_upload = threading.Event()

    def epoch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.epoch) == 2 and self.uploads:
            saver = self._saver(state)
            if saver.pending is not None:
                saver.pending.join()
            (publisher,) = saver.publishers
            assert publisher.uploader.wait(60)
            publisher.uploader.submit("a wait", self.may_upload.wait, lane=publisher.bucket.uri())
        elif int(state.timestamp.epoch) == 2:
            self.take()

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == 9 and self.uploads:
            if self._saver(state).pending is not None:
                self._saver(state).pending.join()
            self.take()
            self.may_upload.set()
            assert self._saver(state).publishers[0].uploader.wait(60)

    def take(self) -> None:
        other = {"process": "process 1 on elsewhere", "id": "1-other"}
        self.store.put_bytes(LEASE, json.dumps(other).encode())
        time.sleep(LONGER_THAN_A_HEARTBEAT)

    def _saver(self, state: State) -> CheckpointManager:
        (saver,) = (callback.manager for callback in state.callbacks if isinstance(callback, CheckpointSaver))
        return saver


@pytest.mark.parametrize("uploads", [False, True], ids=["save", "upload"])
def test_who_lost_the_run_writes_nothing_more(bucket: str, store: ObjectStore, uploads: bool) -> None:
    """Neither the save after it, nor an upload that waited: the link stays on what the other process knows, and the
    error says that it has the run."""
    taken = TakenOver(store, uploads=uploads)
    how: dict[str, Any] = {"save_folder": f"{bucket}/run", "save_failure_limit": 100, "max_duration": "3ep"}
    with (
        pytest.raises(RunInUseError, match="process 1 on elsewhere has taken over this run"),
        trainer(callbacks=[taken], **how) as run,
    ):
        run.fit()
    there = [info.name for info in store.list_objects()]
    assert "run/ep1-ba4-rank0.pt" in there
    assert not [name for name in there if "ba8-rank0.pt.json" in name]
    with Transfer(store) as transfer:
        assert Bucket(transfer, "run").target_of("latest-rank0.pt") == "ep1-ba4-rank0.pt"
    assert saved_batches(Path("run")) == ([4, 8] if uploads else [4])


def test_a_launch_that_takes_a_run_over_aborts_its_unfinished_uploads(bucket: str, store: ObjectStore) -> None:
    """The silent holder may be suspended in the middle of an upload. Uploads of other runs go on."""
    other = {"process": "process 1 on elsewhere", "id": "1-other"}
    for name in (LEASE, "run/.latest-rank0.pt.lease"):
        store.put_bytes(name, json.dumps(other).encode())
    for name in ("run/ep1-ba4-rank0.pt", "run/ep1-ba4-rank0.pt/file", "run/other-ba4.pt"):
        assert store.start_parts(name) is not None
    train(save_folder=f"{bucket}/run", autoresume=True)
    assert [upload.name for upload in store.unfinished_parts("")] == ["run/other-ba4.pt"]
    assert leases(store) == []


class FullDisk(Callback):
    """Fills the disk before a save, while an upload takes a while, and notes the leases that are held at its end."""

    def __init__(self, disk: Path, store: ObjectStore) -> None:
        self.disk, self.store = disk, store
        self.held: list[str] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        (saver,) = (callback.manager for callback in state.callbacks if isinstance(callback, CheckpointSaver))
        if int(state.timestamp.batch) == 4:
            saver.publishers[0].uploader.submit("an upload", self.upload)
            (self.disk / "other").write_bytes(bytes(shutil.disk_usage(self.disk).free))

    def upload(self) -> None:
        time.sleep(3)
        self.held = leases(self.store)


def test_the_lease_is_held_until_the_last_upload_has_ended(
    bucket: str, store: ObjectStore, mount: Callable[[str], Path]
) -> None:
    """Training crashes and its last save fails on a full disk: no other launch begins while the upload of the one
    before goes on, from which it would have to resume."""
    disk = mount("size=1m")
    full = FullDisk(disk, store)
    how: dict[str, Any] = {"save_folder": f"{bucket}/run", "save_staging_folder": disk, "save_interval": "4ba"}
    with (
        pytest.raises(OSError, match="No space left on device"),
        trainer(callbacks=[full, StopAt(4)], model=Classifier(width=1000), **how) as run,
    ):
        run.fit()
    assert LEASE in full.held
    assert leases(store) == []
