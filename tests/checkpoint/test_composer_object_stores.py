"""What Composer's documentation of checkpointing shows with object stores runs with the package renamed.

Each test is a script as a reader of that documentation would write it, with a bucket of a service on this machine.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from tiny_training import Classifier
from torch.utils.data import DataLoader, TensorDataset

from composerlite.loggers import RemoteUploaderDownloader
from composerlite.storage import open_store
from composerlite.trainer import Trainer
from composerlite.utils import LibcloudObjectStore

SCHEMES = {"s3": "s3", "oci": "oci", "gcs": "gs"}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """The scripts write below the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model() -> Classifier:
    return Classifier()


@pytest.fixture
def train_dataloader() -> DataLoader[Any]:
    """Two batches in an epoch."""
    return DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,))), batch_size=4)


@pytest.fixture(params=SCHEMES)
def bucket_uri(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of each service, which the environment makes reachable."""
    server = request.getfixturevalue(f"{request.param}_server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"{SCHEMES[request.param]}://{server.new_bucket()}"


def names(uri: str) -> list[str]:
    """The objects in a bucket, less those that Composer does not have."""
    with open_store(uri) as store:
        return [info.name for info in store.list_objects() if not PurePosixPath(info.name).name.startswith(".")]


def test_a_uri_as_save_folder_uploads_and_leaves_nothing_here(
    bucket_uri: str, model: Classifier, train_dataloader: DataLoader[Any]
) -> None:
    """``save_folder='s3://…'``, ``'oci://…'``, ``'gs://…'``: the checkpoints are in the bucket and not on the disk."""
    trainer = Trainer(
        model=model,
        train_dataloader=train_dataloader,
        max_duration="3ep",
        save_folder=f"{bucket_uri}/checkpoints",
        save_interval="1ep",
        save_overwrite=True,
        save_filename="ep{epoch}.pt",
        save_num_checkpoints_to_keep=0,  # delete all checkpoints locally
    )
    trainer.fit()
    trainer.close()
    assert names(bucket_uri) == [
        "checkpoints/ep1.pt",
        "checkpoints/ep2.pt",
        "checkpoints/ep3.pt",
        "checkpoints/latest-rank0.pt.symlink",
    ]
    assert [path for path in Path().rglob("*") if path.is_file() or path.is_symlink()] == []


def test_a_uri_as_load_path_resumes_from_the_bucket(
    bucket_uri: str, model: Classifier, train_dataloader: DataLoader[Any]
) -> None:
    """``load_path='s3://…/ep1.pt'`` resumes training in the second epoch."""
    with Trainer(
        model=model,
        train_dataloader=train_dataloader,
        max_duration="2ep",
        save_folder=f"{bucket_uri}/checkpoints",
        save_filename="ep{epoch}.pt",
    ) as trainer:
        trainer.fit()
    new_trainer = Trainer(
        model=Classifier(),
        train_dataloader=train_dataloader,
        max_duration="3ep",
        load_path=f"{bucket_uri}/checkpoints/ep1.pt",
    )
    assert new_trainer.state.timestamp.epoch == 1
    new_trainer.fit()
    new_trainer.close()
    assert new_trainer.state.timestamp.epoch == 3


def test_names_in_the_bucket_can_be_chosen(
    model: Classifier, train_dataloader: DataLoader[Any], s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``save_remote_file_name`` is what checkpoints are called in the bucket."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    uri = f"s3://{s3_server.new_bucket()}"
    with Trainer(
        model=model,
        train_dataloader=train_dataloader,
        max_duration="1ep",
        run_name="named",
        save_folder=f"{uri}/checkpoints",
        save_remote_file_name="{run_name}/at-batch/{batch}-rank{rank}.pt",
    ) as trainer:
        trainer.fit()
    assert names(uri) == ["checkpoints/latest-rank0.pt.symlink", "named/at-batch/2-rank0.pt"]


def libcloud_arguments(root: Path) -> dict[str, Any]:
    """A container of libcloud's local driver, with the arguments that the documentation shows."""
    (root / "checkpoint-debugging").mkdir(parents=True)
    return {
        "provider": "local",
        "container": "checkpoint-debugging",
        "provider_kwargs": {"key": str(root)},
    }


def test_a_logger_uploads_to_what_has_no_uri(
    model: Classifier, train_dataloader: DataLoader[Any], tmp_path: Path
) -> None:
    """``loggers=[RemoteUploaderDownloader(…)]`` does the same; the logger and the store are a ``load_object_store``."""
    arguments = libcloud_arguments(tmp_path / "cloud")
    remote_uploader_downloader = RemoteUploaderDownloader(
        bucket_uri="libcloud://checkpoint-debugging", backend_kwargs=arguments
    )
    trainer = Trainer(
        model=model,
        train_dataloader=train_dataloader,
        max_duration="2ep",
        save_folder="checkpoints",
        save_interval="1ep",
        save_overwrite=True,
        save_filename="ep{epoch}.pt",
        save_num_checkpoints_to_keep=0,  # delete all checkpoints locally
        loggers=[remote_uploader_downloader],
    )
    trainer.fit()
    trainer.close()
    assert [path for path in Path("checkpoints").rglob("*") if not path.is_dir()] == []
    object_store = LibcloudObjectStore(**arguments)
    for store in (object_store, RemoteUploaderDownloader("libcloud://checkpoint-debugging", backend_kwargs=arguments)):
        new_trainer = Trainer(
            model=Classifier(),
            train_dataloader=train_dataloader,
            max_duration="3ep",
            load_path="checkpoints/ep1.pt",
            load_object_store=store,
        )
        assert new_trainer.state.timestamp.epoch == 1
        new_trainer.fit()
        new_trainer.close()
