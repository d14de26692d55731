"""Several ranks keep their checkpoints in a bucket: whole directories, which any number of ranks loads."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bucket_ranks
import pytest
import torch

from composerlite.storage import ObjectStore, open_store
from composerlite.testing import run_ranks, run_ranks_to_the_end

ID = re.compile("_[0-9a-f]{16}")


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


def names(store: ObjectStore, below: str) -> list[str]:
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
    sizes = {name: store.get_object_size(name) for name in names(store, "") if name.endswith(".distcp")}
    of_two = sum(size for name, size in sizes.items() if "run/ba6/" in name and "logged" not in name)
    for rank, one in enumerate(told):
        assert sum(one["reads"].values()) < of_two * 0.75, rank
    files = (".metadata", "__0_0_ID.distcp", "__1_0_ID.distcp")
    saved = [f"ba{batch}/{file}" for batch in (4, 5, 6) for file in files]
    there = [ID.sub("_ID", name) for name in names(store, "run/")]
    assert sorted(there) == sorted([*saved, "latest.symlink"])
    assert store.read_range("run/latest.symlink", 0, 7) == b"run/ba6"
    assert not [name for name in names(store, "tolerant/") if "ba2" in name and not name.startswith("ba2/")]
    alone = resumed(bucket, 7)
    assert alone["loaded"] == f"{bucket}/run/ba6"
    for name, tensor in told[0]["whole"]["ended"].items():
        assert torch.equal(alone["began"][name], tensor)


@pytest.mark.parametrize(("name", "found"), [("ba2/.metadata", 1), ("ba6/.metadata", 5)])
def test_a_kill_while_a_directory_is_published_leaves_the_one_before(
    bucket: str, store: ObjectStore, tmp_path: Path, name: str, found: int
) -> None:
    """The rank that uploads is killed, in training or at its end: the other names it soon, and does not wait as long as
    uploads may take. With the folder lost as well, a run goes on from the last that was published whole."""
    began = time.monotonic()
    outcomes = run_ranks_to_the_end(bucket_ranks.be_killed, 2, bucket, name)
    assert time.monotonic() - began < 30
    assert isinstance(outcomes[0].error, ChildProcessError)
    assert outcomes[1].error is None
    assert "rank 0" in outcomes[1].value
    shutil.rmtree(tmp_path / "run")
    assert resumed(bucket, 7)["loaded"] == f"{bucket}/run/ba{found}"
