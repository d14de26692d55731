"""Directories of sharded checkpoints: others read them, we read theirs, what is read is verified, saves are atomic."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import pickle
import re
import shutil
import stat
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint.sharded_parts import same
from storage.local_store import LocalObjectStore
from storage.servers.seaweedfs import S3Server

from composerlite.checkpoint import (
    RemoteFileSystemReader,
    async_save_state_dict,
    get_checkpoint_metadata,
    load_keys,
    load_state_dict,
    save_state_dict,
    unshard_checkpoint,
)
from composerlite.checkpoint.load import sharded
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    ObjectStoreError,
    UntrustedCheckpointError,
)
from composerlite.storage import ObjectStore
from composerlite.storage.object_store import ObjectRange
from composerlite.testing.faulty_store import Fault, FaultyStore

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning", "ignore:TypedStorage is deprecated:UserWarning"
)


def _state(rows: int = 300) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "large": torch.randn(rows, 1000),
        "turned": torch.randn(1000, rows).t(),
        "small": torch.randn(7),
        "whole": torch.arange(5),
        "nest": {"step": 3, "names": ["a", "b"]},
    }


def _empty(state: dict[str, Any]) -> dict[str, Any]:
    made = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    return {**made, "nest": {"step": 0, "names": []}}


@pytest.mark.parametrize("threads", [1, 3])
def test_plain_dcp_reads_ours(tmp_path: Path, threads: int) -> None:
    """Whoever has torch can load what we saved."""
    state = _state(rows=18_000)
    save_state_dict(tmp_path / "c", state, thread_count=threads)
    assert len(list((tmp_path / "c").glob("*.distcp"))) == threads
    empty = _empty(state)
    dcp.load(empty, storage_reader=dcp.FileSystemReader(tmp_path / "c"), no_dist=True)
    assert same(empty, state)


def test_what_plain_dcp_wrote_is_read_and_called_unverified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Large and small tensors, turned ones, values; a warning says that there is nothing to verify them with."""
    state = _state(rows=3000)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "c", thread_count=2), no_dist=True)
    empty = _empty(state)
    with caplog.at_level(logging.WARNING):
        load_state_dict(tmp_path / "c", empty)
    assert same(empty, state)
    assert "has no record: loading it unverified" in caplog.text


def test_data_that_were_transformed_are_refused(tmp_path: Path) -> None:
    """DCP can compress; that is said, and not taken for damage."""
    dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "c"), no_dist=True)
    index = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["stream.zstd"]
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(IncompatibleCheckpointError, match=r"stream\.zstd"):
        list(load_keys(tmp_path / "c", ["a"]))


class _Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_hostile_index_runs_no_code(tmp_path: Path) -> None:
    """What it names is refused by name."""
    save_state_dict(tmp_path / "c", {"a": 1})
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(_Hostile(tmp_path / "ran")))
    for read in (get_checkpoint_metadata, lambda place: load_state_dict(place, {"a": 0})):
        with pytest.raises(UntrustedCheckpointError, match=r"posix\.system"):
            read(tmp_path / "c")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("loader", ["ours", "dcp's"])
def test_a_hostile_value_runs_no_code(tmp_path: Path, loader: str) -> None:
    """Nor does one that hides among the data, also where torch's own planner would run it."""
    dcp.save({"a": _Hostile(tmp_path / "ran")}, storage_writer=dcp.FileSystemWriter(tmp_path / "c"), no_dist=True)

    def load() -> None:
        if loader == "ours":
            load_state_dict(tmp_path / "c", {"a": 0})
        else:
            dcp.load({"a": 0}, storage_reader=RemoteFileSystemReader(tmp_path / "c"), no_dist=True)

    with pytest.raises(BaseException, match=r"posix\.system") as raised:
        load()
    assert isinstance(raised.value, UntrustedCheckpointError | dcp.api.CheckpointException)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", "a/../../secret"])
def test_data_outside_of_the_directory_are_refused(tmp_path: Path, name: str) -> None:
    """An index may not have other files read."""
    dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "c"), no_dist=True)
    index = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = name
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match="which is not in its directory"):
        list(load_keys(tmp_path / "c", ["a"]))


def test_missing_swapped_and_edited_files_are_found(tmp_path: Path) -> None:
    """A file that is gone, one of another save, a record that was changed: each is named."""
    for name in ("c", "d"):
        save_state_dict(tmp_path / name, {"a": torch.full((9,), float(ord(name)))})
    (data,), (other,) = ((tmp_path / name).glob("*.distcp") for name in ("c", "d"))
    good = data.read_bytes()
    data.write_bytes(other.read_bytes())
    with pytest.raises(CorruptCheckpointError, match=re.escape(data.name)):
        list(load_keys(tmp_path / "c", ["a"]))
    data.unlink()
    with pytest.raises(CorruptCheckpointError, match=f"'{data.name}' is missing"):
        list(load_keys(tmp_path / "c", ["a"]))
    data.write_bytes(good)
    index = tmp_path / "c" / ".metadata"
    index.write_bytes(index.read_bytes().replace(b'"world_size": 1', b'"world_size": 2'))
    with pytest.raises(CorruptCheckpointError, match=r"c/\.metadata"):
        list(load_keys(tmp_path / "c", ["a"]))
    shutil.copy(tmp_path / "d" / ".metadata", index)
    with pytest.raises(CorruptCheckpointError, match=f"'{other.name}' is missing"):
        list(load_keys(tmp_path / "c", ["a"]))


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_error_after_the_commit_leaves_the_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """A folder that cannot be flushed fails the save, but its checkpoint has its name by then: the data stay."""
    index, flush = tmp_path / "c/.metadata", os.fsync
    if overwrite:
        save_state_dict(tmp_path / "c", {"a": torch.zeros(5)})
    before = index.stat().st_ino if overwrite else None

    def broken(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode) and index.exists() and index.stat().st_ino != before:
            raise OSError(errno.EIO, "Input/output error")
        flush(file)

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        save_state_dict(tmp_path / "c", {"a": torch.ones(5)}, save_overwrite=overwrite)
    assert next(load_keys(tmp_path / "c", ["a"])).sum() == 5


class _CountingStore(LocalObjectStore):  # type: ignore[misc]  # final, but for a test that counts
    read_bytes = 0

    def open_range(self, name: str, offset: int, size: int) -> ObjectRange:
        found = super().open_range(name, offset, size)
        return dataclasses.replace(found, pieces=self._counted(name, found.pieces))

    def _counted(self, name: str, pieces: Generator[bytes]) -> Generator[bytes]:
        for piece in pieces:
            if name.endswith(".distcp"):
                self.read_bytes += len(piece)
            yield piece


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    folder = tmp_path / "bucket"
    folder.mkdir()
    return folder


def _objects(store: ObjectStore) -> list[str]:
    return [info.name for info in store.list_objects()]


@pytest.mark.parametrize("name", ["*.distcp", "*.metadata"])
def test_a_failed_save_to_a_bucket_leaves_nothing(bucket: Path, name: str) -> None:
    """Whatever object cannot be written: no other stays, and the same name is saved to again."""
    store = FaultyStore(LocalObjectStore(bucket), Fault("*put*", name, times=99, error=_refused))
    store.faults = [*store.faults, Fault("upload*", name, times=99, error=_refused)]
    with pytest.raises(ObjectStoreError, match="no more room"):
        save_state_dict(ShardedDirectory.in_store(store, "run/c"), {"a": torch.ones(5)})
    assert _objects(store) == []
    store.faults = []
    save_state_dict(ShardedDirectory.in_store(store, "run/c"), {"a": torch.ones(5)})
    assert next(load_keys(ShardedDirectory.in_store(store, "run/c"), ["a"])).sum() == 5


def _refused() -> Exception:
    return ObjectStoreError("no more room (a fault on purpose)")


def _layers(count: int = 20) -> dict[str, Any]:
    return {f"layer{n}": {"w": torch.randn(1024, 1024), "b": torch.randn(1024)} for n in range(count)}


@pytest.mark.parametrize("place", ["folder", "bucket"])
@pytest.mark.parametrize("writer", ["ours", "dcp"])
@pytest.mark.parametrize("pick", [slice(0, 2), slice(3, None, 10)])
def test_a_tenth_of_the_keys_costs_a_tenth_of_the_bytes(bucket: Path, place: str, writer: str, pick: slice) -> None:
    """At most 1.05 times what the keys have (P9), wherever they lie, verified or not."""
    if writer == "ours":
        save_state_dict(bucket / "c", _layers(), thread_count=2)
    else:
        dcp.save(_layers(), storage_writer=dcp.FileSystemWriter(bucket / "c"), no_dist=True)
    store = _CountingStore(bucket)
    wanted = {name: {k: torch.zeros_like(v) for k, v in layer.items()} for name, layer in list(_layers().items())[pick]}
    needed = sum(tensor.nbytes for layer in wanted.values() for tensor in layer.values())
    with RemoteFileSystemReader(bucket / "c" if place == "folder" else ShardedDirectory.in_store(store, "c")) as reader:
        sharded.load(reader, wanted)
    assert needed <= reader.bytes_read <= 1.05 * needed
    if place == "bucket":
        assert needed <= store.read_bytes <= 1.05 * needed


def test_a_uri_is_as_good_as_a_path(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Save, load, keys, unshard and replace at s3://, with settings from the environment."""
    monkeypatch.setenv("S3_ENDPOINT_URL", s3_server.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    place = f"s3://{s3_server.new_bucket()}/run/step1"
    with pytest.raises(CheckpointNotFoundError, match="no sharded checkpoint"):
        get_checkpoint_metadata(place)
    state = _state(rows=6000)
    async_save_state_dict(place, {"model": state}).result(60)
    empty = {"model": _empty(state)}
    load_state_dict(place, empty)
    assert same(empty, {"model": state})
    with pytest.raises(CheckpointExistsError):
        save_state_dict(place, {"a": 1})
    model_path, _ = unshard_checkpoint(place, tmp_path / "out", pre_download=True)
    assert same(torch.load(model_path)["large"], state["large"])
    save_state_dict(place, {"a": 5}, save_overwrite=True)
    assert list(load_keys(place, ["a"])) == [5]


def test_a_copy_made_by_hand_takes_nothing_from_the_checkpoint(bucket: Path) -> None:
    """It is replaced: what its record speaks of is there still."""
    store = LocalObjectStore(bucket)
    a, b = ShardedDirectory.in_store(store, "run/a"), ShardedDirectory.in_store(store, "run/b")
    save_state_dict(a, {"w": torch.ones(5)})
    shutil.copytree(bucket / "run/a", bucket / "run/b")
    save_state_dict(b, {"w": torch.zeros(5)}, save_overwrite=True)
    assert next(load_keys(ShardedDirectory.in_store(store, "run/a"), ["w"])).sum() == 5
    assert next(load_keys(ShardedDirectory.in_store(store, "run/b"), ["w"])).sum() == 0
    assert len(_objects(store)) == 4
