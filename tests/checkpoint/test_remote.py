"""Checkpoints in a bucket: published whole or not at all, found in three requests, fetched verified."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from parts import save_batch
from sent_files import publish_files
from storage.local_store import LocalObjectStore
from storage.memory_store import MemoryStore
from storage.servers.moto import moto_server  # noqa: F401
from storage.servers.seaweedfs import S3Server

from composerlite.checkpoint import Catalog, Manifest
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.errors import (
    CheckpointExistsError,
    ObjectStoreTransientError,
)
from composerlite.storage import RetryPolicy, Transfer
from composerlite.testing import Fault, FaultyStore

LINK = "run/latest.pt"


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    (tmp_path / "bucket").mkdir()
    return FaultyStore(LocalObjectStore(tmp_path / "bucket"))


@pytest.fixture
def remote(store: FaultyStore) -> Iterator[Catalog]:
    with Transfer(store, retry=RetryPolicy(attempts=1)) as transfer:
        yield Catalog(Bucket(transfer, "run"))


def saved(tmp_path: Path, batch: int, **arguments: object) -> tuple[Manifest, Path]:
    """A checkpoint on the local disk."""
    path = save_batch(tmp_path / "local", batch, **arguments)
    manifest = Catalog(tmp_path / "local").manifest_of(path.name)
    assert manifest is not None
    return manifest, path


def publish(remote: Catalog, tmp_path: Path, *batches: int) -> list[Manifest]:
    manifests: list[Manifest] = []
    for batch in batches:
        manifest, path = saved(tmp_path, batch)
        publish_files(remote, manifest, {manifest.name: path}, link=LINK)
        manifests.append(manifest)
    return manifests


def elsewhere(remote: Catalog, tmp_path: Path) -> Path | None:
    """What a new machine, with an empty disk, resumes from."""
    catalog = Catalog(tmp_path / "elsewhere")
    return choose([RunPlace(catalog, buckets=[RunPlace(remote, link=LINK)])], "run").path


def test_a_published_checkpoint_is_found_and_whole(remote: Catalog, tmp_path: Path) -> None:
    """The newest is fetched with its bytes and committed, as if it had been saved there."""
    publish(remote, tmp_path, 1, 2, 10)
    assert [manifest.batch for manifest in remote.manifests()] == [1, 2, 10]
    found = elsewhere(remote, tmp_path)
    assert found == tmp_path / "elsewhere" / "ba10.pt"
    assert found.read_bytes() == (tmp_path / "local" / "ba10.pt").read_bytes()
    assert [manifest.batch for manifest in Catalog(tmp_path / "elsewhere").manifests()] == [10]


def test_the_link_is_an_object_that_composer_reads(remote: Catalog, store: FaultyStore, tmp_path: Path) -> None:
    """``latest….symlink`` holds the full name of the newest object and nothing else."""
    publish(remote, tmp_path, 1)
    assert store.read_range(f"{LINK}.symlink", 0, 100) == b"run/ba1.pt"


def test_another_checkpoint_of_that_name_is_not_replaced(remote: Catalog, tmp_path: Path) -> None:
    """One of another run is left as it is, unless it is to be overwritten; one of the same moment of the run is not."""
    publish(remote, tmp_path, 1)
    other, path = saved(tmp_path / "other", 1, run_name="other")
    with pytest.raises(CheckpointExistsError, match=r"ba1\.pt.*run 'run' at batch 1.*overwrite=True"):
        publish_files(remote, other, {other.name: path}, link=LINK)
    assert [manifest.run_name for manifest in remote.manifests()] == ["run"]
    publish_files(remote, other, {other.name: path}, link=LINK, overwrite=True)
    assert [manifest.run_name for manifest in remote.manifests()] == ["other"]
    again, path = saved(tmp_path / "again", 1, run_name="other")
    publish_files(remote, again, {again.name: path}, link=LINK)


def test_three_requests_find_the_newest_of_any_number(remote: Catalog, store: FaultyStore, tmp_path: Path) -> None:
    """Where ``latest`` is good nothing is listed, however many checkpoints there are."""
    publish(remote, tmp_path, *range(1, 30))
    store.calls.clear()
    newest = remote.latest(LINK, "run")
    assert newest is not None
    assert newest.batch == 29
    assert len(store.calls) <= 3


@pytest.mark.parametrize("damage", ["flipped", "shorter", "gone", "record", "link"])
def test_a_damaged_newest_is_passed_over(
    remote: Catalog, store: FaultyStore, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong with the newest, the one before it is taken. The log says why if the file is there."""
    publish(remote, tmp_path, 1, 2)
    data = bytearray(store.read_range("run/ba2.pt", 0, 1 << 20))
    data[-100 if damage == "record" else len(data) // 2] ^= 1
    if damage in ("flipped", "record"):
        store.put_bytes("run/ba2.pt", bytes(data))
    elif damage == "shorter":
        store.put_bytes("run/ba2.pt", bytes(data[:-1]))
    elif damage == "gone":
        store.delete_object("run/ba2.pt")
    else:
        store.delete_object(f"{LINK}.symlink")
    found = elsewhere(remote, tmp_path)
    assert found == tmp_path / "elsewhere" / ("ba2.pt" if damage == "link" else "ba1.pt")
    if damage not in ("link", "gone"):
        assert "ba2.pt" in caplog.text


@pytest.mark.parametrize("error", [PermissionError("no"), ObjectStoreTransientError("away")])
def test_a_bucket_that_cannot_be_read_is_not_empty(
    remote: Catalog, store: FaultyStore, tmp_path: Path, error: Exception
) -> None:
    """Only "not found" is absence: anything else ends the search with its own error, and no run starts afresh."""
    publish(remote, tmp_path, 1)
    store.faults = [Fault(error=lambda: error, times=99)]
    with pytest.raises(type(error)):
        elsewhere(remote, tmp_path)


@pytest.mark.parametrize("part_bytes", [None, 4000], ids=["whole", "in parts"])
def test_one_of_two_runs_gets_a_name(store: FaultyStore, tmp_path: Path, part_bytes: int | None) -> None:
    """Two runs without a lease publish one name at the same time: the later one is told, and the first one's stays."""
    both = [saved(tmp_path / name, 1, run_name=name) for name in ("a", "b")]
    store = store if part_bytes is None else FaultyStore(MemoryStore())
    sending = threading.Barrier(2)
    verb = "upload_object" if part_bytes is None else "complete"
    store.faults = [Fault(verb=verb, error=None, times=2, first=lambda: sending.wait(20))]

    def try_it(one: tuple[Manifest, Path]) -> str:
        manifest, path = one
        with Transfer(store, part_bytes=part_bytes) as transfer:
            try:
                publish_files(Catalog(Bucket(transfer, "run")), manifest, {manifest.name: path}, link=LINK)
            except CheckpointExistsError as e:
                return str(e)
        return manifest.run_name

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(try_it, both))
    (first,) = {"a", "b"} & set(told)
    (later,) = set(told) - {first}
    assert re.search(rf"ba1\.pt.*of run '{first}' at batch 1.*overwrite=True", later)
    with Transfer(store) as transfer:
        remote = Catalog(Bucket(transfer, "run"))
        (manifest,) = remote.manifests()
        remote.verify(manifest)
        assert remote.latest(LINK, first) == manifest
    assert list(store.unfinished_parts("")) == []


def test_new_names_take_no_right_to_delete(remote: Catalog, store: FaultyStore, tmp_path: Path) -> None:
    """A key that may write and not delete publishes whatever has a name of its own."""
    store.faults = [Fault(verb="delete_object", error=lambda: PermissionError("no"), times=99)]
    publish(remote, tmp_path, 1, 2)
    assert [manifest.batch for manifest in remote.manifests()] == [1, 2]


def test_objects_whose_names_cannot_be_ours_are_not_seen(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A bucket has keys of others with ``//`` or ``..`` in them, wherever: nothing stops at them, and they stay."""
    boto3 = pytest.importorskip("boto3", reason="the package boto3 is not installed: pip install boto3")
    from composerlite.storage.stores.s3 import S3ObjectStore

    server: S3Server = request.getfixturevalue("moto_server")
    bucket = server.new_bucket()
    with S3ObjectStore(bucket, **server.store_kwargs) as store, Bucket.of(store, "run", closes=False) as place:
        remote = Catalog(place)
        (manifest,) = publish(remote, tmp_path, 1)
        content = store.read_range("run/ba1.pt", 0, 1 << 20)
        keys = {
            f"run/{folder}{key}"
            for folder in ("", "b//", "a/../", "./")
            for key in ("/x.pt", "/x.symlink", "//.metadata", "../x.pt", "./x.pt")
        }
        client = boto3.client(
            "s3",
            endpoint_url=server.endpoint_url,
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
            region_name=server.region,
        )
        for key in keys:
            client.put_object(Bucket=bucket, Key=key, Body=content)
        assert remote.manifests() == [manifest]
        assert remote.names() == ["ba1.pt"]
        assert {*remote.place.links().values()} == {"ba1.pt"}
        assert place.sweep(timedelta(), dry_run=True) == []
        place.sweep(timedelta())
        delete_checkpoint(place, manifest)
        left = {one["Key"] for one in client.list_objects_v2(Bucket=bucket, Prefix="run/")["Contents"]}
    assert keys <= left
