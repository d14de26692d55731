"""RemoteUploaderDownloader: files of a run in an object store, on a real service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from composerlite.core import Logger, State
from composerlite.errors import ConfigError
from composerlite.loggers import RemoteUploaderDownloader
from composerlite.models import ComposerModel
from composerlite.storage import ObjectStore, open_store


class Nothing(ComposerModel):
    """A model that is not trained here."""

    def forward(self, batch: Any) -> Any:
        return batch

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return torch.zeros(())


@pytest.fixture
def state() -> State:
    return State(Nothing(), rank_zero_seed=0, run_name="my-run", device=torch.device("cpu"))


@pytest.fixture
def bucket(s3_server: Any) -> str:
    return f"s3://{s3_server.new_bucket()}"


@pytest.fixture
def store(s3_server: Any, bucket: str) -> Iterator[ObjectStore]:
    with open_store(bucket, **s3_server.store_kwargs) as store:
        yield store


def started(uri: str, s3_server: Any, state: State, **arguments: Any) -> RemoteUploaderDownloader:
    logger = RemoteUploaderDownloader(uri, backend_kwargs=s3_server.store_kwargs, **arguments)
    logger.init(state, Logger(state, logger))
    return logger


def test_a_file_may_go_as_soon_as_it_is_handed_over(
    s3_server: Any, bucket: str, store: ObjectStore, state: State, tmp_path: Path
) -> None:
    """What is uploaded is what the file was when ``upload_file`` was called."""
    logger = started(bucket, s3_server, state)
    assert logger.place == bucket
    (tmp_path / "a").write_bytes(b"content")
    logger.upload_file(state, "{run_name}/a.txt", tmp_path / "a", overwrite=False)
    (tmp_path / "a").write_bytes(b"something else")
    logger.post_close()
    assert store.read_range("my-run/a.txt", 0, 100) == b"content"


def test_a_relative_staging_folder_stays_where_it_was(
    s3_server: Any, bucket: str, store: ObjectStore, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that changes its working directory between two files uploads both."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    logger = started(bucket, s3_server, state, upload_staging_folder="staging")
    for number in range(2):
        (tmp_path / "a").write_text(str(number))
        logger.upload_file(state, f"{number}.txt", tmp_path / "a", overwrite=False)
        monkeypatch.chdir(tmp_path / "elsewhere")
    logger.post_close()
    assert [store.read_range(f"{number}.txt", 0, 100) for number in range(2)] == [b"0", b"1"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_newest_content_of_a_name_is_what_is_there(
    s3_server: Any, bucket: str, store: ObjectStore, state: State, tmp_path: Path
) -> None:
    """However often a name is uploaded, and by how many threads: the last content wins."""
    logger = started(bucket, s3_server, state, num_concurrent_uploads=4)
    for number in range(30):
        (tmp_path / "a").write_text(str(number))
        logger.upload_file(state, "a.txt", tmp_path / "a", overwrite=True)
    logger.post_close()
    assert store.read_range("a.txt", 0, 100) == b"29"


def test_the_end_of_fit_waits_for_files(
    s3_server: Any, bucket: str, store: ObjectStore, state: State, tmp_path: Path
) -> None:
    """And not for checkpoints: who saves those waits for them, on all ranks together."""
    logger = started(bucket, s3_server, state, num_concurrent_uploads=2)
    done = threading.Event()
    logger.uploader.submit("a checkpoint", lambda: done.wait(30), lane="checkpoints")
    (tmp_path / "a").write_bytes(b"content")
    logger.upload_file(state, "a.txt", tmp_path / "a", overwrite=False)
    logger.fit_end(state, Logger(state, logger))
    assert list(logger.uploader.pending) == ["a checkpoint"]
    assert store.read_range("a.txt", 0, 100) == b"content"
    done.set()
    logger.post_close()


def test_names_are_formatted(s3_server: Any, bucket: str, store: ObjectStore, state: State, tmp_path: Path) -> None:
    """A folder in the URI and ``file_path_format_string`` stand before every name, for downloads, too."""
    logger = started(
        f"{bucket}/all", s3_server, state, file_path_format_string="{run_name}/rank{rank}/{remote_file_name}"
    )
    (tmp_path / "a").write_bytes(b"content")
    logger.upload_file(state, "a.txt", tmp_path / "a", overwrite=False)
    assert logger.uploader.wait(20)
    assert [info.name for info in store.list_objects()] == ["all/my-run/rank0/a.txt"]
    logger.download_file("a.txt", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"content"
    with pytest.raises(FileExistsError):
        logger.download_file("a.txt", tmp_path / "copy")
    logger.post_close()


def test_what_exists_is_not_overwritten_and_training_hears_of_it(
    s3_server: Any, bucket: str, store: ObjectStore, state: State, tmp_path: Path
) -> None:
    """Without ``overwrite`` a name that is taken is an error at the next batch; the object stays as it was."""
    store.put_bytes("a.txt", b"old")
    logger = started(bucket, s3_server, state)
    (tmp_path / "a").write_bytes(b"new")
    logger.upload_file(state, "a.txt", tmp_path / "a", overwrite=False)
    assert logger.uploader.wait(20)
    with pytest.raises(FileExistsError, match=r"a\.txt exists"):
        logger.batch_end(state, Logger(state))
    logger.post_close()
    assert store.read_range("a.txt", 0, 100) == b"old"


def test_nothing_is_left_on_the_disk(s3_server: Any, bucket: str, state: State, tmp_path: Path) -> None:
    """The staging folder holds what waits and is empty in the end."""
    logger = started(bucket, s3_server, state, upload_staging_folder=tmp_path / "staging")
    (tmp_path / "a").write_bytes(bytes(100_000))
    for number in range(5):
        logger.upload_file(state, f"{number}.bin", tmp_path / "a", overwrite=True)
    logger.post_close()
    assert list((tmp_path / "staging").rglob("*")) == []


def test_a_bucket_that_cannot_be_written_is_an_error_before_training(
    s3_server: Any, bucket: str, store: ObjectStore, state: State
) -> None:
    """A read-only key, a wrong secret and a missing bucket are told at INIT, and nothing is left in the bucket."""
    for kwargs, error in (
        (s3_server.read_only_kwargs, PermissionError),
        ({**s3_server.store_kwargs, "aws_secret_access_key": "wrong"}, PermissionError),
    ):
        logger = RemoteUploaderDownloader(bucket, backend_kwargs=kwargs)
        with pytest.raises(error, match=bucket.removeprefix("s3://")):
            logger.init(state, Logger(state))
    with pytest.raises(FileNotFoundError, match="no-such-bucket"):
        started("s3://no-such-bucket", s3_server, state)
    assert list(store.list_objects()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bucket_uri": "folder"}, "bucket_uri='folder'"),
        ({"bucket_uri": "s3://b", "num_concurrent_uploads": 0}, "num_concurrent_uploads=0"),
        ({"bucket_uri": "s3://b", "num_attempts": 0}, "num_attempts=0"),
        ({"bucket_uri": "s3://b", "num_attempts": "3"}, "num_attempts='3': expected a whole number, 1 or more"),
        ({"bucket_uri": "s3://b", "file_path_format_string": "name"}, "file_path_format_string='name'"),
        ({"bucket_uri": "s9://b"}, "unknown scheme 's9'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    """The error names the argument and its value."""
    with pytest.raises(ConfigError, match=message):
        RemoteUploaderDownloader(**arguments)


def test_a_staging_folder_that_cannot_be_is_an_error_before_training(
    s3_server: Any, bucket: str, state: State, tmp_path: Path
) -> None:
    """Not when the first file is to be uploaded."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"upload_staging_folder='.*file/x' cannot be used"):
        started(bucket, s3_server, state, upload_staging_folder=tmp_path / "file" / "x")


def test_a_logger_that_was_closed_is_refused_by_the_next_trainer(s3_server: Any, bucket: str, state: State) -> None:
    """It takes no more files, which would be found out in the middle of training."""
    logger = started(bucket, s3_server, state)
    logger.post_close()
    with pytest.raises(ConfigError, match=f"RemoteUploaderDownloader\\('{bucket}'\\) was closed.*one of its own"):
        logger.init(state, Logger(state))
