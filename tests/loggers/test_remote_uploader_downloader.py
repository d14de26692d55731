"""RemoteUploaderDownloader: files of a run in an object store, on a real service."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composerlite.core import Logger, State
from composerlite.errors import ConfigError
from composerlite.loggers import RemoteUploaderDownloader
from composerlite.storage import ObjectStore, open_store

STATE = State(nn.Linear(1, 1), rank_zero_seed=0, run_name="my-run", device=torch.device("cpu"))


@pytest.fixture
def bucket(s3_server: Any) -> str:
    return f"s3://{s3_server.new_bucket()}"


@pytest.fixture
def store(s3_server: Any, bucket: str) -> Iterator[ObjectStore]:
    with open_store(bucket, **s3_server.store_kwargs) as store:
        yield store


@pytest.fixture
def started(s3_server: Any, bucket: str) -> Callable[..., RemoteUploaderDownloader]:
    """Builds a logger to the bucket, after ``INIT``."""

    def start(uri: str = bucket, **arguments: Any) -> RemoteUploaderDownloader:
        logger = RemoteUploaderDownloader(uri, **{"backend_kwargs": s3_server.store_kwargs, **arguments})
        logger.init(STATE, Logger(STATE, logger))
        return logger

    return start


def upload(logger: RemoteUploaderDownloader, name: str, content: str, folder: Path, *, overwrite: bool = False) -> None:
    """Upload a file that changes as soon as ``upload_file`` has returned."""
    file = folder / "a"
    file.write_text(content)
    logger.upload_file(STATE, name, file, overwrite=overwrite)
    file.write_text("another content")


def test_an_upload_has_the_content_at_the_call(started: Any, bucket: str, store: ObjectStore, tmp_path: Path) -> None:
    """The file may change at once, and a script may change its working directory. No copy stays on the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        logger = started(upload_staging_folder="staging")
        assert logger.place == bucket
        upload(logger, "{run_name}/0.txt", "zero", tmp_path)
        (tmp_path / "elsewhere").mkdir()
        patch.chdir(tmp_path / "elsewhere")
        upload(logger, "1.txt", "one", tmp_path)
        logger.post_close()
    assert store.read_range("my-run/0.txt", 0, 100) == b"zero"
    assert store.read_range("1.txt", 0, 100) == b"one"
    assert list((tmp_path / "elsewhere").iterdir()) == list((tmp_path / "staging").rglob("*")) == []


def test_the_newest_content_of_a_name_wins(started: Any, store: ObjectStore, tmp_path: Path) -> None:
    """Also with several threads."""
    logger = started(num_concurrent_uploads=4)
    for number in range(30):
        upload(logger, "a.txt", str(number), tmp_path, overwrite=True)
    logger.post_close()
    assert store.read_range("a.txt", 0, 100) == b"29"


def test_the_end_of_fit_waits_for_files(started: Any, store: ObjectStore, tmp_path: Path) -> None:
    """But not for checkpoints: savers wait for their own, on all ranks together."""
    logger = started(num_concurrent_uploads=2)
    done = threading.Event()
    logger.uploader.submit("a checkpoint", lambda: done.wait(30), lane="checkpoints")
    upload(logger, "a.txt", "content", tmp_path)
    logger.fit_end(STATE, Logger(STATE, logger))
    assert list(logger.uploader.pending) == ["a checkpoint"]
    assert store.read_range("a.txt", 0, 100) == b"content"
    done.set()
    logger.post_close()


def test_names_of_objects(started: Any, bucket: str, store: ObjectStore, tmp_path: Path) -> None:
    """The folder of the URI and ``file_path_format_string`` are in each name, for downloads, too."""
    logger = started(f"{bucket}/all", file_path_format_string="{run_name}/rank{rank}/{remote_file_name}")
    upload(logger, "a.txt", "content", tmp_path)
    assert logger.uploader.wait(20)
    assert [info.name for info in store.list_objects()] == ["all/my-run/rank0/a.txt"]
    logger.download_file("a.txt", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"content"
    with pytest.raises(FileExistsError):
        logger.download_file("a.txt", tmp_path / "copy")
    logger.post_close()


def test_a_taken_name_is_an_error_at_the_next_batch(started: Any, store: ObjectStore, tmp_path: Path) -> None:
    """Without ``overwrite`` the object stays unchanged."""
    store.put_bytes("a.txt", b"old")
    logger = started()
    upload(logger, "a.txt", "new", tmp_path)
    assert logger.uploader.wait(20)
    with pytest.raises(FileExistsError, match=r"a\.txt exists"):
        logger.batch_end(STATE, Logger(STATE))
    logger.post_close()
    assert store.read_range("a.txt", 0, 100) == b"old"


def test_errors_before_training(started: Any, s3_server: Any, bucket: str, store: ObjectStore, tmp_path: Path) -> None:
    """A read-only key, a wrong secret, a missing bucket, a bad staging folder, a closed logger; nothing is uploaded."""
    wrong = {**s3_server.store_kwargs, "aws_secret_access_key": "wrong"}
    for kwargs in (s3_server.read_only_kwargs, wrong):
        with pytest.raises(PermissionError, match=bucket.removeprefix("s3://")):
            started(backend_kwargs=kwargs)
    with pytest.raises(FileNotFoundError, match="no-such-bucket"):
        started("s3://no-such-bucket")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"upload_staging_folder='.*file/x' cannot be used"):
        started(upload_staging_folder=tmp_path / "file" / "x")
    assert list(store.list_objects()) == []
    logger = started()
    logger.post_close()
    with pytest.raises(ConfigError, match=f"RemoteUploaderDownloader\\('{bucket}'\\) was closed by an earlier Trainer"):
        logger.init(STATE, Logger(STATE))
