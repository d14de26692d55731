"""A save_folder in a bucket: what goes wrong there is told, early, and no progress is lost for it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from forked import run_forked
from tiny_training import Classifier, CrashError, StopAt, saved_batches, train, trainer

from composerlite.callbacks import CheckpointSaver, PreemptionHandler
from composerlite.checkpoint import Catalog
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.save import publish as publish_module
from composerlite.core import Callback, Logger, LoggerDestination, State
from composerlite.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    ObjectStoreTransientError,
    Preempted,
)
from composerlite.loggers import RemoteUploaderDownloader
from composerlite.storage import ObjectStore, open_store
from composerlite.testing import Fault, FaultyStore
from composerlite.types import CheckpointNews


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: Any) -> None:  # pyright: ignore[reportUnusedFunction]
    """Staging is below the current folder; the service is found by the environment."""
    monkeypatch.chdir(tmp_path)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)


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


# ── before training ──────────────────────────────────────────────────────────────────────────────────────────────────
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


def test_a_good_bucket_is_left_as_it_is_at_construction(bucket: str, store: ObjectStore) -> None:
    """The check leaves no object and no unfinished upload behind."""
    trainer(save_folder=f"{bucket}/run").close()
    assert list(store.list_objects()) == []
    assert list(store.unfinished_parts("")) == []


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


@pytest.mark.parametrize("folder", [Path("s3://bucket/run"), "s3:/bucket/run", " s3://bucket/run", "GS:/bucket/run"])
def test_what_is_nearly_a_uri_is_no_folder(folder: str | Path, tmp_path: Path) -> None:
    """A URI that went through ``pathlib``, or has a space before it: nothing is saved to a folder named ``s3:``."""
    for argument in ("save_folder", "load_path"):
        arguments: dict[str, Any] = {argument: folder}
        with pytest.raises(ConfigError, match=r"did you mean '(s3|GS)://bucket/run'"):
            trainer(**arguments)
    assert list(tmp_path.iterdir()) == []


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


def test_slashes_at_the_start_of_a_prefix_lead_nowhere_else(bucket: str, store: ObjectStore, tmp_path: Path) -> None:
    """``s3://bucket//run`` is staged in ``run``, as ``s3://bucket/run`` is, and not in a folder at the root."""
    train(save_folder=f"{bucket}//{tmp_path.name}", max_duration="1ep")
    assert not Path("/", tmp_path.name).exists()
    assert (tmp_path / tmp_path.name / "ep1-ba4-rank0.pt").exists()
    assert f"{tmp_path.name}/ep1-ba4-rank0.pt" in names(store)


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


# ── in training ──────────────────────────────────────────────────────────────────────────────────────────────────────
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


@pytest.mark.parametrize("way", ["uri", "logger"])
def test_uploads_that_fail_too_often_end_training(s3_server: Any, bucket: str, store: ObjectStore, way: str) -> None:
    """With ``save_failure_limit=1`` the second upload in a row that fails is raised, also where a logger uploads."""
    where: dict[str, Any] = {"save_folder": f"{bucket}/run"}
    if way == "logger":
        where = {"save_folder": "run", "loggers": [RemoteUploaderDownloader(bucket)]}
    run = trainer(
        **where,
        save_interval="2ba",
        save_failure_limit=1,
        callbacks=[Do(3, lambda: remove_bucket(s3_server, bucket, store))],
    )
    with pytest.raises(FileNotFoundError, match=bucket):
        run.fit()
    with contextlib.suppress(FileNotFoundError, ExceptionGroup):
        run.close()


def test_a_crash_loses_no_checkpoint_where_a_logger_uploads(bucket: str, store: ObjectStore) -> None:
    """The error of training is what comes out, and what was saved before it is in the bucket."""
    with (
        pytest.raises(CrashError),
        trainer(
            save_folder="run", save_interval="1ba", callbacks=[StopAt(5)], loggers=[RemoteUploaderDownloader(bucket)]
        ) as run,
    ):
        run.fit()
    assert "run/ep1-ba5-rank0.pt" in names(store)


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


class PreemptAt(Callback):
    """Asks for the end of the run at a batch, with a grace period of a moment."""

    def __init__(self, handler: PreemptionHandler, batch: int) -> None:
        self.handler = handler
        self.batch = batch

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.batch:
            self.handler.preempt(grace_period=0.1)


def test_a_grace_period_that_the_process_outlives_ends_with_the_next_trainer(bucket: str, store: ObjectStore) -> None:
    """As in a notebook where Ctrl-C has ended a run: the next one waits for its uploads, and has all of them, though
    its Trainer has no handler, or was built before."""
    handler = PreemptionHandler()
    before = trainer(save_folder=f"{bucket}/before", run_name="before")
    with trainer(callbacks=[handler, PreemptAt(handler, 2)], save_folder="saves") as run, pytest.raises(Preempted):
        run.fit()
    time.sleep(0.2)
    with before:
        before.fit()
    train(save_folder=f"{bucket}/after", run_name="after")
    assert {"before/ep3-ba12-rank0.pt", "after/ep3-ba12-rank0.pt"} <= set(names(store))


class Jam(Callback):
    """Uploads wait from the first batch to the fourth."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def batch_end(self, state: State, logger: Logger) -> None:
        (saver,) = (callback.manager for callback in state.callbacks if isinstance(callback, CheckpointSaver))
        (publisher,) = saver.publishers
        batch = int(state.timestamp.batch)
        for _ in range(2 if batch == 1 else 0):
            publisher.uploader.submit("a wait", self.over.wait, lane=publisher.bucket.uri())
        if batch == 4:
            self.over.set()
            assert publisher.uploader.wait(60)


def test_uploads_that_wait_too_long_do_not_keep_a_name_from_the_run(bucket: str, store: ObjectStore) -> None:
    """A save that fails behind its commit, where that is tolerated: the next of the same name replaces it."""
    saver = CheckpointSaver(
        f"{bucket}/run", filename="ep{epoch}.pt", save_interval="1ba", failure_limit=3, upload_timeout_in_seconds=2.0
    )
    train(callbacks=[Jam(), saver])
    assert saved_batches(Path("run")) == [4, 8, 12]
    assert {"run/ep1.pt", "run/ep2.pt"} <= set(names(store))


def test_the_end_of_fit_tells_of_the_last_upload(s3_server: Any, bucket: str, store: ObjectStore) -> None:
    """A file that a logger could not upload is an error of ``fit``, not only of ``close``."""
    logger = RemoteUploaderDownloader(bucket)

    class Upload(Callback):
        def fit_end(self, state: State, logger: Logger) -> None:
            remove_bucket(s3_server, bucket, store)
            logger.upload_file("log.txt", __file__)

    run = trainer(loggers=[logger], callbacks=[Upload()])
    with pytest.raises(FileNotFoundError, match=bucket):
        run.fit()
    run.close()


def test_a_run_that_crashes_leaves_no_broken_checkpoint_in_the_bucket(bucket: str) -> None:
    """Training that raises still publishes what was saved before, and every checkpoint in the bucket is whole."""
    with (
        pytest.raises(CrashError),
        trainer(save_folder=f"{bucket}/run", save_interval="1ba", callbacks=[StopAt(5)]) as run,
    ):
        run.fit()
    with Bucket.of(open_store(bucket), "run") as place:
        remote = Catalog(place)
        assert [manifest.batch for manifest in remote.manifests()] == [1, 2, 3, 4, 5]
        for manifest in remote.manifests():
            remote.verify(manifest)


def without_deletions(bucket: str, monkeypatch: pytest.MonkeyPatch, *, name: str = "*") -> FaultyStore:
    """A bucket where objects of ``name`` can be written and not deleted."""
    store = FaultyStore(open_store(bucket))
    denied = partial(PermissionError, "AccessDenied: not allowed to delete")
    store.faults = [Fault(verb="delete_object", name=name, error=denied, times=1000)]
    monkeypatch.setattr(publish_module, "open_store", lambda uri: store)
    return store


def test_who_may_not_delete_hears_of_it_before_training(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where older checkpoints are to go: the error says by which argument, and no checkpoint is begun."""
    store = without_deletions(bucket, monkeypatch)
    with pytest.raises(PermissionError, match="AccessDenied") as error:
        trainer(save_folder=f"{bucket}/run", save_num_remote_checkpoints_to_keep=1)
    assert error.value.__notes__[0].startswith("save_num_remote_checkpoints_to_keep=1: older checkpoints must be")
    assert f"{bucket}/run" in error.value.__notes__[0]
    assert names(store) == []


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


def test_a_slow_deletion_in_a_bucket_does_not_hold_up_the_next_save(
    bucket: str, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third epoch is saved, and the save of the fourth begun, while the bucket deletes the first checkpoint; in the
    end it has the newest alone."""
    is_deleting, fifth_epoch = threading.Event(), threading.Event()
    waited: list[bool] = []

    def delete() -> None:
        is_deleting.set()
        waited.append(fifth_epoch.wait(30))

    class Meet(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            if int(state.timestamp.batch) == 11:
                assert is_deleting.wait(60)
            elif int(state.timestamp.batch) == 17:
                fifth_epoch.set()

    slow = FaultyStore(open_store(bucket), Fault(verb="delete_object", name="*/ep1-*", error=None, first=delete))
    monkeypatch.setattr(publish_module, "open_store", lambda uri: slow)
    how: dict[str, Any] = {"save_folder": f"{bucket}/run", "save_num_remote_checkpoints_to_keep": 1}
    train(**how, callbacks=[Meet()], max_duration="5ep")
    assert waited == [True], "the save of the fourth epoch waited until the first checkpoint was deleted"
    assert [name for name in names(store) if name.startswith("run/ep")] == ["run/ep5-ba20-rank0.pt"]


# ── what stays where ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_bucket_keeps_as_many_as_it_is_told(bucket: str, store: ObjectStore) -> None:
    """``save_num_remote_checkpoints_to_keep`` deletes older ones; by default all stay."""
    train(save_folder=f"{bucket}/all", save_num_checkpoints_to_keep=1)
    assert len([name for name in names(store) if name.startswith("all/ep")]) == 3
    train(save_folder=f"{bucket}/two", save_num_remote_checkpoints_to_keep=2)
    assert [name for name in names(store) if name.startswith("two/ep")] == [
        "two/ep2-ba8-rank0.pt",
        "two/ep3-ba12-rank0.pt",
    ]


def test_ephemeral_checkpoints_go_in_the_bucket_too(bucket: str, store: ObjectStore) -> None:
    """Each is there until the next is; those that are to stay, stay."""
    train(save_folder=f"{bucket}/run", save_interval="1ep", save_ephemeral_interval="1ba")
    assert names(store) == [
        "run/ep1-ba4-rank0.pt",
        "run/ep2-ba8-rank0.pt",
        "run/ep3-ba12-rank0.pt",
        "run/latest-rank0.pt.symlink",
    ]


def test_keeping_none_here_holds_after_a_resume(bucket: str, tmp_path: Path) -> None:
    """What autoresume fetched goes as well, and so does what was not uploaded when the run died."""
    how: dict[str, Any] = {"save_folder": f"{bucket}/run", "save_num_checkpoints_to_keep": 0}
    train(**how, max_duration="2ep")
    train(**how, autoresume=True)
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_a_logger_that_only_loads_formats_names(bucket: str) -> None:
    """As ``load_object_store`` alone it knows the run's name."""

    def logger() -> RemoteUploaderDownloader:
        return RemoteUploaderDownloader(bucket, file_path_format_string="{run_name}/x/{remote_file_name}")

    train(save_folder="ck", save_filename="ep{epoch}.pt", loggers=[logger()], max_duration="1ep")
    with trainer(load_path="ck/ep1.pt", load_object_store=logger()) as run:
        assert run.state.timestamp.epoch == 1


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


@pytest.mark.parametrize("again", ["continues", "starts over"])
def test_a_run_whose_checkpoints_have_had_other_names_meanwhile_resumes_from_the_newest(
    bucket: str, again: str, tmp_path: Path
) -> None:
    """On a new disk, where the link of its names of now leads to what it saved before; the newest has another link."""
    first: dict[str, Any] = {"save_folder": f"{bucket}/run"}
    other = {"save_filename": "other-ba{batch}.pt", "save_latest_filename": "latest-of-other.pt"}
    train(**first, max_duration="2ep")
    how = {"autoresume": True} if again == "continues" else {"save_overwrite": True}
    train(**first, **other, **how, max_duration="10ba" if again == "continues" else "1ep")
    for number, names_of in enumerate([{}, other, {}]):
        new_disk = {"save_staging_folder": tmp_path / f"disk{number}"}
        with trainer(**first, **names_of, **new_disk, autoresume=True, max_duration="3ep") as run:
            assert run.state.timestamp.batch == (10 if again == "continues" else 4)


def test_weights_load_from_a_bucket(bucket: str) -> None:
    """``load_weights_only`` with a URI takes the model and leaves the clock at zero."""
    first = train(save_folder=f"{bucket}/run")
    with trainer(model=Classifier(), load_path=f"{bucket}/run/latest-rank0.pt", load_weights_only=True) as run:
        assert run.state.timestamp.batch == 0
        for name, weight in run.state.model.state_dict().items():
            assert torch.equal(weight, first.state.model.state_dict()[name])
