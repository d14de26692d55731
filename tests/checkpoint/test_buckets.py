"""Runs that save to a bucket."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import bucket_ranks
import pytest
import torch
from forked import run_forked, started
from tiny_training import CrashError, saved_batches, train, trainer

from composerlite import Callback, Logger, State
from composerlite.callbacks import CheckpointSaver, PreemptionHandler
from composerlite.checkpoint import CheckpointManager
from composerlite.checkpoint.place import lease
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.save import publish as publish_module
from composerlite.core import LoggerDestination
from composerlite.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    ObjectStoreTransientError,
    RunInUseError,
)
from composerlite.loggers import RemoteUploaderDownloader
from composerlite.storage import ObjectStore, Transfer, open_store
from composerlite.testing import Fault, FaultyStore, run_ranks
from composerlite.types import CheckpointNews


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: Any) -> None:  # pyright: ignore[reportUnusedFunction]
    """Staging is below the current folder; the service is found by the environment."""
    monkeypatch.chdir(tmp_path)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """A launch waits for another launch for a second; the lease of this process beats five times a second."""
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(CheckpointManager.take_leases, "__defaults__", (1.0,))


@pytest.fixture
def bucket(s3_server: Any) -> str:
    return f"s3://{s3_server.new_bucket()}"


@pytest.fixture
def store(bucket: str) -> Iterator[ObjectStore]:
    with open_store(bucket) as store:
        yield store


class Told(LoggerDestination):
    """Keeps the news of checkpoints: what, and its name."""

    def __init__(self) -> None:
        self.news: list[tuple[str, str]] = []

    def log_checkpoint(self, news: CheckpointNews) -> None:
        self.news.append((news.what, news.name))


class Do(Callback):
    """Does something at the end of one batch, after it waited until nothing is being saved or uploaded."""

    def __init__(self, batch: int, what: Any) -> None:
        self.batch = batch
        self.what = what

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.batch:
            for callback in state.callbacks:
                if isinstance(callback, CheckpointSaver):
                    if callback.manager.pending is not None:
                        callback.manager.pending.join()
                    for publisher in callback.manager.publishers:
                        assert publisher.uploader.wait(30)
            self.what()


def remove_bucket(s3_server: Any, bucket: str, store: ObjectStore) -> None:
    """Remove a bucket with all that is in it, and wait until the service knows."""
    for info in store.list_objects():
        store.delete_object(info.name)
    s3_server.client().delete_bucket(Bucket=bucket.removeprefix("s3://"))
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            store.put_bytes("is-it-there", b"")
        except FileNotFoundError:
            return
        except ObjectStoreTransientError:
            pass  # it is at it
        time.sleep(0.05)
    pytest.fail("the service keeps the bucket")


def names(store: ObjectStore) -> list[str]:
    return [info.name for info in store.list_objects() if not PurePosixPath(info.name).name.startswith(".")]


def test_a_bucket_that_cannot_be_written_is_an_error_at_construction(
    s3_server: Any, bucket: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing bucket, a wrong secret and a read-only key are told before training, with the bucket's name."""
    with pytest.raises(FileNotFoundError, match="no-such-bucket"):
        trainer(save_folder="s3://no-such-bucket/run")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(PermissionError, match=bucket):
        trainer(save_folder=f"{bucket}/run")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.read_only_access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.read_only_secret_key)
    with pytest.raises(PermissionError, match=bucket):
        trainer(save_folder=f"{bucket}/run")
    assert names(store) == []


def test_keeping_none_without_a_bucket_is_refused() -> None:
    """``save_num_checkpoints_to_keep=0`` would keep nothing anywhere."""
    with pytest.raises(ConfigError, match=r"num_checkpoints_to_keep=0.*RemoteUploaderDownloader"):
        trainer(save_folder="here", save_num_checkpoints_to_keep=0)


def test_one_name_for_all_in_the_bucket_is_refused_before_training(bucket: str, store: ObjectStore) -> None:
    """The second checkpoint would fail; a single one, or the newest alone, is fine."""
    how: dict[str, Any] = {"save_folder": f"{bucket}/run", "save_remote_file_name": "best.pt"}
    with trainer(**how) as run, pytest.raises(ConfigError, match=r"save_remote_file_name='best\.pt' is the same each"):
        run.fit()
    train(**how, save_interval="3ep")
    train(**{**how, "save_folder": f"{bucket}/other"}, save_overwrite=True)
    assert "best.pt" in names(store)


def test_a_run_does_not_start_where_it_would_overwrite_in_the_bucket(bucket: str, tmp_path: Path) -> None:
    """As in a folder: what is ahead of the run is not overwritten, and training does not begin."""
    train(save_folder=f"{bucket}/run", max_duration="2ep")
    (tmp_path / "run").rename(tmp_path / "away")
    with trainer(save_folder=f"{bucket}/run") as run, pytest.raises(CheckpointExistsError, match=f"{bucket}/run.*ep1"):
        run.fit()


def test_a_missing_checkpoint_is_named(bucket: str) -> None:
    """``load_path`` in a bucket that has no such object."""
    with pytest.raises(CheckpointNotFoundError, match=rf"{bucket}/run/ep9\.pt"):
        trainer(load_path=f"{bucket}/run/ep9.pt")


@pytest.mark.parametrize("folder", ["s3://bucket/x", ""])
def test_a_staging_folder_is_on_this_machine(bucket: str, folder: str) -> None:
    """A bucket is no folder to stage in, and an empty text no folder at all."""
    with pytest.raises(ConfigError, match=f"save_staging_folder='{folder}' .*: expected a local folder"):
        trainer(save_folder=f"{bucket}/run", save_staging_folder=folder)


def test_names_in_a_bucket_that_nothing_is_uploaded_to_are_refused(bucket: str) -> None:
    """A URI as the name of remote files says which bucket is meant: it is that one, or an error."""
    name, latest = "s3://elsewhere/run/ep{epoch}.pt", "s3://elsewhere/run/latest"
    refused = rf"remote_file_name='s3://elsewhere/run.*buckets of this run: {bucket}\)"
    for folder, buckets in ((f"{bucket}/run", []), ("run", [bucket])):
        with pytest.raises(ConfigError, match=refused):
            trainer(save_folder=folder, loggers=[*map(RemoteUploaderDownloader, buckets)], save_remote_file_name=name)
        loggers = [*map(RemoteUploaderDownloader, buckets)]
        with pytest.raises(ConfigError, match=refused):
            trainer(loggers=loggers, callbacks=[CheckpointSaver(folder, latest_remote_file_name=latest)])
    with pytest.raises(ConfigError, match=r"buckets of this run: none\)"):
        trainer(save_folder="run", save_remote_file_name=name)
    of_the_bucket = f"{bucket}/run/ep{{epoch}}.pt"
    trainer(save_folder="run", loggers=[RemoteUploaderDownloader(bucket)], save_remote_file_name=of_the_bucket).close()


def test_what_is_staged_for_another_bucket_is_not_resumed(s3_server: Any, bucket: str, tmp_path: Path) -> None:
    """Two projects with the same prefix and run name, in two buckets: neither goes on from the other's weights."""
    train(save_folder=f"{bucket}/run", run_name="mine", max_duration="1ep")
    other = f"s3://{s3_server.new_bucket()}"
    with pytest.raises(
        ConfigError, match=rf"checkpoints of the run 'mine' that were saved for {bucket}, not for {other}"
    ):
        trainer(save_folder=f"{other}/run", run_name="mine", autoresume=True)
    with open_store(other) as theirs:
        assert names(theirs) == []
    trainer(save_folder=f"{other}/run", run_name="theirs", autoresume=True).close()
    trainer(save_folder=f"{other}/run", run_name="mine", save_staging_folder="stage").close()
    with trainer(save_folder=f"{bucket}/run", run_name="mine", autoresume=True) as run:
        assert run.state.timestamp.epoch == 1
    for note in (tmp_path / "run").glob(".bucket-*"):  # the run has moved, says who removes it
        note.unlink()
    with trainer(save_folder=f"{other}/run", run_name="mine", autoresume=True) as run:
        assert run.state.timestamp.epoch == 1


def test_a_bucket_that_goes_away_ends_training_and_what_was_saved_is_here(
    s3_server: Any, bucket: str, store: ObjectStore, tmp_path: Path
) -> None:
    """The error is raised within training with the bucket's name; every checkpoint is on the local disk."""

    run = trainer(
        save_folder=f"{bucket}/run",
        save_interval="2ba",
        callbacks=[Do(3, lambda: remove_bucket(s3_server, bucket, store))],
    )
    with pytest.raises(FileNotFoundError, match=bucket):
        run.fit()
    with contextlib.suppress(FileNotFoundError, ExceptionGroup):  # of uploads after that one, if they had begun
        run.close()
    assert saved_batches(tmp_path / "run")[:2] == [2, 4]


def test_uploads_that_fail_are_tolerated_on_request(
    s3_server: Any, bucket: str, store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    """With ``save_failure_limit`` training goes on, with a warning for each."""

    run = train(
        save_folder=f"{bucket}/run",
        save_interval="2ba",
        save_failure_limit=100,
        callbacks=[Do(3, lambda: remove_bucket(s3_server, bucket, store))],
    )
    assert run.state.timestamp.batch == 12
    assert "save_failure_limit=100" in caplog.text


class CrashBehindUpload(Callback):
    """Raises in the third epoch, or asks for the end of the run, as the checkpoint of the second is saved and sent.

    That takes ``seconds``.
    """

    def __init__(self, seconds: float, *, signals: bool = False) -> None:
        self.seconds = seconds
        self.signals = signals

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.epoch) == 2:
            for saver in (callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)):
                for publisher in saver.manager.publishers:
                    publisher.before_each.append(lambda: time.sleep(self.seconds))

    def epoch_start(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.epoch) == 2:
            if not self.signals:
                raise CrashError
            os.kill(os.getpid(), signal.SIGTERM)


def a_run_that_crashes(folder: str) -> None:
    """As documented without ``with``: an error leaves out ``close``."""
    run = trainer(callbacks=[CrashBehindUpload(1.5)], save_folder=folder)
    run.fit()
    run.close()


def test_a_program_that_crashes_ends_when_its_uploads_have(bucket: str, store: ObjectStore, tmp_path: Path) -> None:
    """The save and the upload that training left behind are done before the process is gone."""
    done = run_forked(a_run_that_crashes, f"{bucket}/run", cwd=tmp_path)
    assert done.returncode == 1
    assert "CrashError" in done.stderr
    assert "run/ep2-ba8-rank0.pt" in names(store)


def a_run_that_is_preempted(folder: str, closes: str) -> None:
    run = trainer(
        callbacks=[CrashBehindUpload(60, signals=True), PreemptionHandler("1s")], save_folder=folder, autoresume=True
    )
    with run if closes else contextlib.nullcontext():
        run.fit()


@pytest.mark.parametrize("closes", ["", "closes"])
def test_a_program_that_is_preempted_does_not_outstay_its_grace_period(
    closes: str, bucket: str, tmp_path: Path
) -> None:
    """It waits no longer for an upload than it has, closed or not, and names what is not there, with the exit code of
    the signal.
    """
    started = time.monotonic()
    done = run_forked(a_run_that_is_preempted, f"{bucket}/run", closes, cwd=tmp_path)
    assert time.monotonic() - started < 50
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    told = "not finished at the end of the grace period" if closes else "without finishing"
    assert re.search(rf"{told}: .*/run/ep2-ba8-rank0\.pt", done.stderr)


def without_deletions(bucket: str, monkeypatch: pytest.MonkeyPatch, *, name: str = "*") -> FaultyStore:
    """A bucket where objects of ``name`` can be written and not deleted."""
    store = FaultyStore(open_store(bucket))
    denied = partial(PermissionError, "AccessDenied: not allowed to delete")
    store.faults = [Fault(verb="delete_object", name=name, error=denied, times=1000)]
    monkeypatch.setattr(publish_module, "open_store", lambda uri: store)
    return store


def test_a_deletion_that_fails_in_a_bucket_is_no_failure_of_the_upload(
    bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was published counts as that; the deletion is an error of its own, or is tolerated as one on the disk."""
    without_deletions(bucket, monkeypatch, name="*/ep1-*")
    told = Told()
    how: dict[str, Any] = {"save_folder": f"{bucket}/run", "save_num_remote_checkpoints_to_keep": 1}
    with pytest.raises(PermissionError, match="AccessDenied"), trainer(**how, loggers=[told]) as run:
        run.fit()
    assert ("uploaded", "ep2-ba8-rank0.pt") in told.news
    assert "upload failed" not in [what for what, _ in told.news]
    assert "could not be uploaded" not in caplog.text
    assert "could not be deleted" in caplog.text

    how["save_folder"] = f"{bucket}/other"
    train(**how, save_failure_limit=100)
    assert re.search(r"could not be deleted from a bucket \(\d in a row, save_failure_limit=100\)", caplog.text)


def test_the_bucket_keeps_as_many_as_it_is_told(bucket: str, store: ObjectStore) -> None:
    """``save_num_remote_checkpoints_to_keep`` deletes older ones; by default all stay."""
    train(save_folder=f"{bucket}/all", save_num_checkpoints_to_keep=1)
    assert len([name for name in names(store) if name.startswith("all/ep")]) == 3
    train(save_folder=f"{bucket}/two", save_num_remote_checkpoints_to_keep=2)
    assert [name for name in names(store) if name.startswith("two/ep")] == [
        "two/ep2-ba8-rank0.pt",
        "two/ep3-ba12-rank0.pt",
    ]


def test_keeping_none_here_holds_after_a_resume(bucket: str, tmp_path: Path) -> None:
    """What autoresume fetched goes as well, and so does what was not uploaded when the run died."""
    how: dict[str, Any] = {"save_folder": f"{bucket}/run", "save_num_checkpoints_to_keep": 0}
    train(**how, max_duration="2ep")
    train(**how, autoresume=True)
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_the_staging_folder_can_be_chosen(bucket: str, tmp_path: Path) -> None:
    """What is staged lies below it, and nothing but committed checkpoints and the link stays."""
    run = train(save_folder=f"{bucket}/run", save_staging_folder=tmp_path / "stage", save_num_checkpoints_to_keep=1)
    assert run.saved_checkpoints == [f"{tmp_path}/stage/run/ep3-ba12-rank0.pt"]
    torch.load(run.saved_checkpoints[-1], weights_only=True)
    left = sorted(str(path.relative_to(tmp_path / "stage")) for path in (tmp_path / "stage").rglob("*"))
    assert [path for path in left if "/." not in path] == [
        "run",
        "run/ep3-ba12-rank0.pt",
        "run/latest-rank0.pt",
    ]


def test_a_uri_and_a_logger_do_the_same(bucket: str, store: ObjectStore, tmp_path: Path) -> None:
    """The bucket has the same objects, whether ``save_folder`` is a URI or a logger uploads; so has every bucket."""
    train(save_folder=f"{bucket}/run")
    of_uri = [info.name for info in store.list_objects()]
    other = f"{bucket}/logger"
    train(save_folder="run", save_overwrite=True, loggers=[RemoteUploaderDownloader(other)])
    of_logger = [info.name for info in store.list_objects("logger/")]
    assert [name.removeprefix("logger/") for name in of_logger] == of_uri


def test_autoresume_reads_the_bucket_of_a_logger(bucket: str, tmp_path: Path) -> None:
    """A run on a new disk whose checkpoints a logger uploads goes on from them."""
    train(save_folder="run", max_duration="2ep", loggers=[RemoteUploaderDownloader(bucket)])
    (tmp_path / "run").rename(tmp_path / "away")
    run = train(save_folder="run", autoresume=True, loggers=[RemoteUploaderDownloader(bucket)])
    assert run.state.load_path == "run/ep2-ba8-rank0.pt"
    assert run.state.timestamp.epoch == 3


def test_a_saver_of_ones_own_may_have_a_uri(bucket: str, store: ObjectStore) -> None:
    """``CheckpointSaver(folder='s3://…')`` as a callback is the same as ``save_folder``, also for autoresume."""
    saver = CheckpointSaver(folder=f"{bucket}/mine", filename="ba{batch}.pt", save_interval="4ba")
    train(callbacks=[saver], max_duration="2ep")
    assert names(store) == ["mine/ba4.pt", "mine/ba8.pt", "mine/latest-rank0.pt.symlink"]
    Path("mine").rename("away")
    saver = CheckpointSaver(folder=f"{bucket}/mine", filename="ba{batch}.pt", save_interval="4ba")
    run = train(callbacks=[saver], autoresume=True)
    assert run.state.load_path == "mine/ba8.pt"


LONGER_THAN_A_HEARTBEAT = 1.5
LEASE = "run/.ep{epoch}-ba{batch}-rank{rank}.pt.lease"
"""The object of the lease of the default names of files, where save_folder is ``run``."""


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


def objects(store: ObjectStore) -> list[str]:
    """The names of all objects that are not about checkpoints."""
    return [info.name for info in store.list_objects() if not PurePosixPath(info.name).name.startswith(".")]


def leases(store: ObjectStore) -> list[str]:
    """The names of what is left of leases."""
    return [info.name for info in store.list_objects() if ".lease" in info.name]


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


def test_a_launch_that_takes_a_run_over_aborts_its_unfinished_uploads(
    bucket: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The silent holder may be suspended in the middle of an upload. Uploads of other runs go on."""
    monkeypatch.setattr(lease, "DEAD_SECONDS", 1.5)
    other = {"process": "process 1 on elsewhere", "id": "1-other"}
    for name in (LEASE, "run/.latest-rank0.pt.lease"):
        store.put_bytes(name, json.dumps(other).encode())
    for name in ("run/ep1-ba4-rank0.pt", "run/ep1-ba4-rank0.pt/file", "run/other-ba4.pt"):
        assert store.start_parts(name) is not None
    train(save_folder=f"{bucket}/run", autoresume=True)
    assert [upload.name for upload in store.unfinished_parts("")] == ["run/other-ba4.pt"]
    assert leases(store) == []


ID = re.compile("_[0-9a-f]{16}")


def names_below(store: ObjectStore, below: str) -> list[str]:
    return sorted(info.name.removeprefix(below) for info in store.list_objects(below))


def resumed(bucket: str, batches: int) -> dict[str, Any]:
    """What one process finds that goes on with the run."""
    how = {"save_folder": f"{bucket}/run", "save_filename": "ba{batch}.pt", "save_interval": "100ep"}
    return bucket_ranks.train(**how, autoresume=True, train_subset_num_batches=2, max_duration=f"{batches}ba")


def test_a_run_of_many_ranks_goes_on_from_its_bucket(
    bucket: str, store: ObjectStore, tmp_path: Path, s3_server: Any
) -> None:
    """Its folder lost, the same ranks go on bit for bit, and one process with the same weights. Each rank reads its
    part. The same where nodes have disks of their own to save to. As many checkpoints stay as were asked for. Uploads
    that fail are raised by every rank, or tolerated. Where a logger uploads, its settings hold for loading too."""
    told = run_ranks(bucket_ranks.runs, 2, bucket, s3_server.store_kwargs)
    for one in told:
        assert one["first"]["saved"] == ["ba3", "ba4"]
        assert one["resumed"]["loaded"] == f"{bucket}/run/ba4"
        assert one["resumed"]["saved"] == ["ba5", "ba6"]
        for name, tensor in one["whole"]["ended"].items():
            assert torch.equal(one["resumed"]["ended"][name], tensor)
        assert one["apart"]["loaded"] == f"{bucket}/apart/ba4"
        for name, tensor in one["whole"]["ended"].items():
            assert torch.equal(one["apart"]["ended"][name], tensor)
        assert one["tolerated"] == [f"ba{batch}" for batch in range(1, 5)]
        assert re.search(r"strict/ba2/__0_0_\w+\.distcp: there is no network", one["raised"])
        assert one["logged"] == f"{bucket}/logged/run/ba4"
    assert [[ID.sub("_ID", name) for name in one["apart"]["here"]] for one in told] == [
        [f"__{rank}_0_ID.distcp"] for rank in (0, 1)
    ]
    sizes = {name: store.get_object_size(name) for name in names_below(store, "") if name.endswith(".distcp")}
    of_two = sum(size for name, size in sizes.items() if "run/ba6/" in name and "logged" not in name)
    for rank, one in enumerate(told):
        assert sum(one["reads"].values()) < of_two * 0.75, rank
    files = (".metadata", "__0_0_ID.distcp", "__1_0_ID.distcp")
    saved = [f"ba{batch}/{file}" for batch in (4, 5, 6) for file in files]
    there = [ID.sub("_ID", name) for name in names_below(store, "run/")]
    assert sorted(there) == sorted([*saved, "latest.symlink"])
    assert store.read_range("run/latest.symlink", 0, 7) == b"run/ba6"
    assert not [name for name in names_below(store, "tolerant/") if "ba2" in name and not name.startswith("ba2/")]
    alone = resumed(bucket, 7)
    assert alone["loaded"] == f"{bucket}/run/ba6"
    for name, tensor in told[0]["whole"]["ended"].items():
        assert torch.equal(alone["began"][name], tensor)
