"""What runs on each of several ranks whose checkpoints are directories in a bucket."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from tiny_training import Classifier, trainer

from composerlite import dist
from composerlite.errors import ObjectStoreError, RankError
from composerlite.loggers import RemoteUploaderDownloader
from composerlite.storage import Transfer, parse_uri

WIDTH = 16384
"""Large enough that the parts of two ranks are not in one chunk of a file."""
HOW: dict[str, Any] = {
    "parallelism_config": {"fsdp": {}},
    "save_filename": "ba{batch}.pt",
    "save_interval": "1ba",
    "train_subset_num_batches": 2,
}


def train(**arguments: Any) -> dict[str, Any]:
    """Train, and what one can see of it."""
    torch.manual_seed(dist.get_global_rank())
    with trainer(model=Classifier(WIDTH), **arguments) as run:
        began = {name: dist.shards.full_tensor(t).clone() for name, t in run.state.model.state_dict().items()}
        run.fit()
        ended = {name: dist.shards.full_tensor(t).clone() for name, t in run.state.model.state_dict().items()}
    return {
        "loaded": run.state.load_path,
        "began": began,
        "ended": ended,
        "saved": [Path(path).name for path in run.saved_checkpoints],
    }


def lose_folder() -> None:
    """The folder is gone, for all ranks."""
    dist.barrier()
    if dist.get_global_rank() == 0:
        shutil.rmtree("run")
    dist.barrier()


@contextlib.contextmanager
def counting(reads: dict[str, int]) -> Generator[None]:
    """Add up the bytes that this rank reads of each object with data."""
    real = Transfer.read_into

    def read_into(self: Transfer, name: str, targets: Any, *rest: Any) -> None:
        if name.endswith(".distcp"):
            reads[name] = reads.get(name, 0) + sum(size for _, _, size in targets)
        real(self, name, targets, *rest)

    setattr(Transfer, "read_into", read_into)  # noqa: B010 - pyright: it takes less
    try:
        yield
    finally:
        Transfer.read_into = real


@contextlib.contextmanager
def failing_uploads(name: str) -> Generator[None]:
    """The network is gone for the objects with ``name`` in theirs."""
    real = Transfer.upload

    def upload(self: Transfer, object_name: str, *arguments: Any, **more: Any) -> Any:
        if name in object_name:
            raise ObjectStoreError(f"{object_name}: there is no network")
        return real(self, object_name, *arguments, **more)

    setattr(Transfer, "upload", upload)  # noqa: B010 - pyright: it takes less
    try:
        yield
    finally:
        Transfer.upload = real


def runs(bucket: str, own_settings: dict[str, str]) -> dict[str, Any]:
    """A run, the same interrupted and resumed without its folder, and others that go less well."""
    told: dict[str, Any] = {"whole": train(**HOW)}
    how = {**HOW, "save_folder": f"{bucket}/run", "save_num_checkpoints_to_keep": 2}
    how["save_num_remote_checkpoints_to_keep"] = 3
    told["first"] = train(**how, max_duration="2ep")
    lose_folder()
    told["reads"] = {}
    with counting(told["reads"]):
        told["resumed"] = train(**how, autoresume=True)
    told["apart"] = with_folders_apart(f"{bucket}/apart")
    told["tolerated"] = with_failing_uploads(f"{bucket}/tolerant", save_failure_limit=1)
    lose_folder()
    with without_settings():
        for autoresume in (False, True):
            logger = RemoteUploaderDownloader(f"{bucket}/logged", backend_kwargs=own_settings)
            how = {**HOW, "save_folder": "run", "loggers": [logger], "autoresume": autoresume}
            told["logged"] = train(**how, max_duration="3ep" if autoresume else "2ep")["loaded"]
            lose_folder()
    try:
        with_failing_uploads(f"{bucket}/strict")
    except (ObjectStoreError, RankError) as e:  # the last: a rank that failed does not meet others any more
        told["raised"] = str(e)
    return told


def with_folders_apart(folder: str) -> dict[str, Any]:
    """A run on nodes that have disks of their own to make checkpoints on, and the same one when those are lost."""
    there, rank = Path.cwd(), dist.get_global_rank()
    mine = Path(f"disk{rank}")
    mine.mkdir()
    os.chdir(mine)
    before = dict(os.environ)
    os.environ.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)})
    how = {**HOW, "save_folder": folder, "save_num_checkpoints_to_keep": 1}
    try:
        train(**how, max_duration="2ep")
        here = sorted(path.name for path in Path().glob("**/__*.distcp"))
        shutil.rmtree(parse_uri(folder)[2])
        return {**train(**how, autoresume=True), "here": here}
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.chdir(there)


def with_failing_uploads(folder: str, **arguments: Any) -> list[str]:
    """Four batches, and what is saved, where the second checkpoint cannot be published."""
    with failing_uploads("/ba2/"):
        return train(**HOW, save_folder=folder, max_duration="2ep", **arguments)["saved"]


@contextlib.contextmanager
def without_settings() -> Generator[None]:
    """The environment does not say where the service is."""
    taken = {name: os.environ.pop(name) for name in ("S3_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    try:
        yield
    finally:
        os.environ.update(taken)
