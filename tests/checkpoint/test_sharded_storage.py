"""Directories of sharded checkpoints: others read them, we read theirs, what is read is verified, saves are atomic."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import pickle
import random
import re
import shutil
import stat
import sys
import types
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint import sharded_ranks
from checkpoint.kill_points import kill_at_every_step
from checkpoint.parts import tree
from checkpoint.sharded_parts import same, small_model, states, trained
from forked import run_forked
from storage.local_store import LocalObjectStore
from storage.servers.seaweedfs import S3Server
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composerlite.checkpoint import (
    Catalog,
    RemoteFileSystemReader,
    RemoteFileSystemWriter,
    async_save_state_dict,
    get_checkpoint_metadata,
    load_keys,
    load_model_and_optim_state,
    load_state_dict,
    save_model_and_optim_state,
    save_state_dict,
    unshard_checkpoint,
)
from composerlite.checkpoint.load import sharded
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.place.directory import SaveHandle, ShardedDirectory
from composerlite.checkpoint.record.record import unseal_index
from composerlite.checkpoint.save import sharded_plan, sharded_writer
from composerlite.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    ObjectStoreError,
    SaveError,
    UntrustedCheckpointError,
)
from composerlite.storage import ObjectStore
from composerlite.storage.object_store import ObjectRange
from composerlite.testing import run_ranks
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


# ── others ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("threads", [1, 3])
def test_plain_dcp_reads_ours(tmp_path: Path, threads: int) -> None:
    """Whoever has torch can load what we saved."""
    state = _state(rows=18_000)
    save_state_dict(tmp_path / "c", state, thread_count=threads)
    assert len(list((tmp_path / "c").glob("*.distcp"))) == threads
    empty = _empty(state)
    dcp.load(empty, storage_reader=dcp.FileSystemReader(tmp_path / "c"), no_dist=True)
    assert same(empty, state)


def test_plain_dcp_writes_and_reads_with_our_storage(tmp_path: Path) -> None:
    """The reader and the writer are ones that torch's own functions take."""
    state = _state()
    dcp.save(state, storage_writer=RemoteFileSystemWriter(tmp_path / "c"), no_dist=True)
    empty = _empty(state)
    dcp.load(empty, storage_reader=RemoteFileSystemReader(tmp_path / "c"), no_dist=True)
    assert same(empty, state)
    assert Catalog(tmp_path).manifest_of("c") is not None


def test_a_planner_that_caches_plans_saves_again(tmp_path: Path) -> None:
    """The planner of torch gives the plan of the first save to each later one; the directory has the last state."""
    for number in (1.0, 2.0, 3.0):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        writer = RemoteFileSystemWriter(tmp_path / "c", overwrite=True)
        dcp.save({"weight": torch.full((3,), number)}, storage_writer=writer, planner=planner, no_dist=True)
        loaded = {"weight": torch.zeros(3)}
        dcp.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)
        assert loaded["weight"].tolist() == [number] * 3


def test_what_plain_dcp_wrote_is_read_and_called_unverified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Large and small tensors, turned ones, values; a warning says that there is nothing to verify them with."""
    state = _state(rows=3000)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "c", thread_count=2), no_dist=True)
    empty = _empty(state)
    with caplog.at_level(logging.WARNING):
        load_state_dict(tmp_path / "c", empty)
    assert same(empty, state)
    assert "has no record: loading it unverified" in caplog.text


def test_an_index_of_olmo_core_is_read(tmp_path: Path) -> None:
    """It says where data are in a class of its own, which need not be installed."""
    dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "c"), no_dist=True)
    index = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    name = "olmo_core.distributed.checkpoint.filesystem"
    theirs = type("_StorageInfo", (), {"__module__": name})
    module = types.ModuleType(name)
    module._StorageInfo = theirs  # type: ignore[attr-defined]
    parents = ["olmo_core", "olmo_core.distributed", "olmo_core.distributed.checkpoint"]
    sys.modules.update({parent: types.ModuleType(parent) for parent in parents} | {name: module})
    try:
        for key, place in metadata.storage_data.items():
            made = theirs()
            made.__dict__ = {n: getattr(place, n) for n in ("relative_path", "offset", "length")}
            metadata.storage_data[key] = made
        index.write_bytes(pickle.dumps(metadata))
    finally:
        for module_name in [*parents, name]:
            del sys.modules[module_name]
    assert next(load_keys(tmp_path / "c", ["a"])).tolist() == [1, 1, 1]


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


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.complex128, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("writer", ["ours", "dcp"])
@pytest.mark.parametrize("count", [10, 400_000])
def test_numbers_of_all_types_come_back(tmp_path: Path, dtype: torch.dtype, writer: str, count: int) -> None:
    """Large ones are read in place, small ones as a whole, and those have other names for their storages."""
    tensor = torch.randint(0, 2, (count,)).to(dtype)
    if writer == "ours":
        save_state_dict(tmp_path / "c", {"a": tensor})
    else:
        dcp.save({"a": tensor}, storage_writer=dcp.FileSystemWriter(tmp_path / "c"), no_dist=True)
    (found,) = load_keys(tmp_path / "c", ["a"])
    assert found.dtype is dtype
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


# ── trust ────────────────────────────────────────────────────────────────────────────────────────────────────────────
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


def test_the_module_of_the_index_of_dcp_has_classes_of_data_alone() -> None:
    """All its public names may be in an index: a new one in another torch is looked at before it is trusted."""
    known = {"BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"}
    assert set(dcp.metadata.__all__) == known | {"TensorProperties", "TensorStorageMetadata"}
    assert all(dataclasses.is_dataclass(getattr(dcp.metadata, name)) for name in dcp.metadata.__all__)


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


def test_damaged_indexes_are_errors_of_ours(tmp_path: Path) -> None:
    """Whatever bytes it has: never another exception."""
    save_state_dict(tmp_path / "c", _state())
    index = tmp_path / "c" / ".metadata"
    good, _ = unseal_index("c/.metadata", index.read_bytes(), str)  # as another program writes it, without a record
    chance = random.Random(0)
    refused = 0
    for _ in range(60):
        data = bytearray(good)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        index.write_bytes(data)
        try:
            load_state_dict(tmp_path / "c", _empty(_state()))
        except (CorruptCheckpointError, UntrustedCheckpointError, IncompatibleCheckpointError):
            refused += 1
    assert refused > 30


# ── verified ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_commit_record_is_one_of_the_catalogs(tmp_path: Path) -> None:
    """It is listed, verified and deleted as every checkpoint is."""
    save_state_dict(tmp_path / "c", _state())
    catalog = Catalog(tmp_path)
    (manifest,) = catalog.manifests()
    assert (manifest.name, manifest.kind, manifest.run.world_size) == ("c", "sharded", 1)
    assert {file.path for file in manifest.files} == {"c/.metadata", f"c/__0_0_{manifest.id}.distcp"}
    catalog.verify(manifest)
    delete_checkpoint(catalog.place, manifest)
    assert not (tmp_path / "c").exists()


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    """In data, in frames, in the index: what is loaded is what was saved, or there is an error."""
    state = _state(rows=3000)
    save_state_dict(tmp_path / "c", state)
    chance = random.Random(0)
    for path in sorted((tmp_path / "c").iterdir()):
        good = path.read_bytes()
        for _ in range(12):
            data = bytearray(good)
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
            with pytest.raises(CorruptCheckpointError, match=r"'.*/c['/]"):
                load_state_dict(tmp_path / "c", _empty(state))
        path.write_bytes(good[:-1])
        with pytest.raises(CorruptCheckpointError):
            load_state_dict(tmp_path / "c", _empty(state))
        path.write_bytes(good)
    load_state_dict(tmp_path / "c", _empty(state))


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


# ── saves that fail ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_full_disk_leaves_the_checkpoint_that_was_there(mount: Callable[[str], Path]) -> None:
    """With save_overwrite the old one stays until the new one is whole; space is given back."""
    disk = mount("size=3m")
    save_state_dict(disk / "c", {"a": torch.ones(1 << 17)})
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            save_state_dict(disk / "c", {"a": torch.zeros(1 << 20)}, save_overwrite=True)
        assert next(load_keys(disk / "c", ["a"])).sum() == 1 << 17
        assert len(list((disk / "c").iterdir())) == 2
    save_state_dict(disk / "c", {"a": torch.zeros(1 << 17)}, save_overwrite=True)
    assert next(load_keys(disk / "c", ["a"])).sum() == 0


def test_an_index_that_cannot_be_written_fails_the_save(tmp_path: Path) -> None:
    """There is no checkpoint then, and when the way is free the same directory is saved to."""
    index = tmp_path / "c" / ".metadata"
    index.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        save_state_dict(tmp_path / "c", {"a": 1}, save_overwrite=True)
    assert list((tmp_path / "c").iterdir()) == [index]
    index.rmdir()
    save_state_dict(tmp_path / "c", {"a": 1})


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


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_lost_answer_to_the_commit_in_a_bucket_leaves_the_checkpoint_whole(bucket: Path, overwrite: bool) -> None:
    """The save fails, but the index is in the bucket by then: the data stay."""
    store = FaultyStore(LocalObjectStore(bucket))
    if overwrite:
        save_state_dict(ShardedDirectory.in_store(store, "run/c"), {"a": torch.zeros(5)})
    store.faults = [Fault("put*", "*.metadata", error=_refused, lost_answer=True)]
    with pytest.raises(ObjectStoreError, match="no more room"):
        save_state_dict(ShardedDirectory.in_store(store, "run/c"), {"a": torch.ones(5)}, save_overwrite=overwrite)
    assert next(load_keys(ShardedDirectory.in_store(store, "run/c"), ["a"])).sum() == 5


def test_values_that_cannot_be_pickled_fail_the_save(tmp_path: Path) -> None:
    """The caller hears of it, and of which key, and nothing is left."""
    with pytest.raises(SaveError, match="'a' cannot be written"):
        save_state_dict(tmp_path / "c", {"a": lambda: 0})
    assert list(tmp_path.iterdir()) == []


def test_of_two_saves_at_once_one_is_told(tmp_path: Path) -> None:
    """Whichever commits later hears that there is a checkpoint, and leaves it as it is."""
    first, second = ShardedDirectory.of(tmp_path / "c"), ShardedDirectory.of(tmp_path / "c")
    for folder in (first, second):
        folder.begin(SaveHandle(overwrite=False))
    record = sharded_writer.record_of_directory("c", 1)
    first.commit(b"first", {}, record)
    with pytest.raises(CheckpointExistsError):
        second.commit(b"second", {}, record)
    second.abandon()
    assert first.described()[0] == b"first"
    assert [path.name for path in (tmp_path / "c").iterdir()] == [".metadata"]


def test_what_a_killed_save_left_is_swept_unless_it_lives(tmp_path: Path) -> None:
    """By the next save to the same directory: data files once they are a day old, or the temporary file of a process
    that lives."""
    save_state_dict(tmp_path / "c", {"a": 1})
    alive = ShardedDirectory.of(tmp_path / "c")
    handle = SaveHandle(overwrite=True)
    alive.begin(handle)
    living, dead, new = (f"__0_0_{number}.distcp" for number in (handle.id, "0" * 16, "1" * 16))
    for name in (living, dead, new):
        (tmp_path / "c" / name).write_bytes(b"x")
    for name in (living, dead):
        os.utime(tmp_path / "c" / name, (0, 0))
    save_state_dict(tmp_path / "c", {"a": 2}, save_overwrite=True)
    assert [(tmp_path / "c" / name).exists() for name in (living, dead, new)] == [True, False, True]
    alive.abandon()
    assert list(load_keys(tmp_path / "c", ["a"])) == [2]


def listed() -> Any:
    """A tensor of which the index lists the parts."""
    return torch.full((1000,), 2.0)


def by_rule() -> Any:
    """One that is distributed, over the only rank that there is, and of which the index has a rule."""
    sharded_plan.MOST_LISTED = 0
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return distribute_tensor(listed(), init_device_mesh("cpu", (1,)), [Shard(0)])


def kill_first_saves(root: str) -> None:
    """Save a tensor of which the index has a rule, killed at every step."""
    torch.set_num_threads(1)
    save_state_dict(Path(root, "warm"), {"a": listed()})
    kill_at_every_step(Path(root), lambda folder: save_state_dict(folder / "c", {"a": by_rule()}))


def test_a_kill_at_any_step_leaves_a_checkpoint_or_nothing(tmp_path: Path) -> None:
    """Never half of one; and the same directory is saved to again, after which nothing is left behind."""
    done = run_forked(kill_first_saves, str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    values: list[float] = []
    for line in done.stdout.splitlines():
        folder = tmp_path / line.partition("\t")[0]
        try:
            value = next(load_keys(folder / "c", ["a"])).unique().item()
        except CheckpointNotFoundError:
            value = 0.0
        values.append(value)
        for path in folder.rglob("*"):
            os.utime(path, (0, 0))
        save_state_dict(folder / "c", {"a": torch.full((5,), 3.0)}, save_overwrite=value != 0)
        assert next(load_keys(folder / "c", ["a"])).tolist() == [3.0] * 5
        (manifest,) = Catalog(folder).manifests()
        assert {file.path for file in manifest.files} == set(tree(folder))
    assert set(values) == {0.0, 2.0}
    assert values == sorted(values)
    assert len(values) > 4


# ── object stores ────────────────────────────────────────────────────────────────────────────────────────────────────
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


def test_a_bucket_keeps_a_checkpoint_as_a_folder_does(bucket: Path) -> None:
    """The same layout, verified in the same way."""
    store = LocalObjectStore(bucket)
    model = small_model()
    optim = trained(model)
    save_model_and_optim_state(ShardedDirectory.in_store(store, "run/step1"), model, optim)
    (path,) = (bucket / "run/step1").glob("*.distcp")
    assert _objects(store) == ["run/step1/.metadata", f"run/step1/{path.name}"]
    other = small_model(seed=1)
    other_optim = trained(other)
    load_model_and_optim_state(ShardedDirectory.in_store(store, "run/step1"), other, other_optim)
    assert same(states(other, other_optim), states(model, optim))
    with pytest.raises(CheckpointExistsError):
        save_state_dict(ShardedDirectory.in_store(store, "run/step1"), {"a": 1})
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="differ from the saved bytes"):
        load_model_and_optim_state(ShardedDirectory.in_store(store, "run/step1"), other, other_optim)


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


@pytest.mark.parametrize(("verb", "name"), [("upload*", "*.distcp"), ("put*", "*.metadata")])
def test_replacing_in_a_bucket_keeps_the_old_one_until_the_new_one_is_there(bucket: Path, verb: str, name: str) -> None:
    """New data have names of their own; the old go when the new index is there."""
    store = FaultyStore(LocalObjectStore(bucket))
    save_state_dict(ShardedDirectory.in_store(store, "run/c"), {"a": torch.ones(5)})
    before = _objects(store)
    store.faults = [Fault(verb, name, error=_refused)]
    with pytest.raises(ObjectStoreError, match="no more room"):
        save_state_dict(ShardedDirectory.in_store(store, "run/c"), {"a": torch.zeros(5)}, save_overwrite=True)
    assert _objects(store) == before
    assert next(load_keys(ShardedDirectory.in_store(store, "run/c"), ["a"])).sum() == 5
    store.faults = []
    save_state_dict(ShardedDirectory.in_store(store, "run/c"), {"a": torch.zeros(5)}, save_overwrite=True)
    assert next(load_keys(ShardedDirectory.in_store(store, "run/c"), ["a"])).sum() == 0
    assert len(_objects(store)) == 2


def test_what_is_downloaded_first_is_kept_for_this_checkpoint_only(bucket: Path, tmp_path: Path) -> None:
    """work_dir never mixes two: neither of two places, nor of two saves at one place."""
    store, work = FaultyStore(LocalObjectStore(bucket)), tmp_path / "work"
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_state_dict(ShardedDirectory.in_store(store, f"run/{name}"), {"w": torch.full((5,), value)})
    for name, value in (("a", 1.0), ("b", 2.0), ("a", 1.0)):
        (w,) = load_keys(ShardedDirectory.in_store(store, f"run/{name}"), ["w"], pre_download=True, work_dir=work)
        assert w.tolist() == [value] * 5
    data_reads = [name for verb, name in store.calls if verb == "read_range" and name.endswith("distcp")]
    assert [name.partition("__")[0] for name in data_reads] == ["run/a/", "run/b/"]
    save_state_dict(ShardedDirectory.in_store(store, "run/a"), {"w": torch.full((5,), 3.0)}, save_overwrite=True)
    (w,) = load_keys(ShardedDirectory.in_store(store, "run/a"), ["w"], pre_download=True, work_dir=work)
    assert w.tolist() == [3.0] * 5


def test_a_bucket_itself_is_no_directory(bucket: Path) -> None:
    """Names of other objects would be those of its files."""
    with pytest.raises(ConfigError, match="Give another name"):
        save_state_dict(ShardedDirectory.in_store(LocalObjectStore(bucket), "/"), {"a": 1})
    assert list(bucket.iterdir()) == []


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────────
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


# ── a real service, real ranks ───────────────────────────────────────────────────────────────────────────────────────
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


@pytest.mark.parametrize("count", [2])
def test_ranks_save_and_load_together(tmp_path: Path, count: int) -> None:
    """What one process saved two load, sharded by rows and by columns; what two saved one loads, and plain DCP."""
    model = small_model(width=64)
    optim = trained(model)
    save_model_and_optim_state(tmp_path / "one", model, optim)
    save_state_dict(tmp_path / "grid", {"w": torch.arange(640_000.0).reshape(800, 800)})
    run_ranks(sharded_ranks.main, count, tmp_path, timeout=120)
    assert (manifest := Catalog(tmp_path).manifest_of("two")) is not None
    assert manifest.run.world_size == count
    other = small_model(width=64, seed=1)
    other_optim = trained(other)
    load_model_and_optim_state(tmp_path / "two", other, other_optim)
    assert same(states(other, other_optim), states(model, optim))
    weights = {"model": {key: torch.zeros_like(value) for key, value in model.state_dict().items()}}
    dcp.load(weights, storage_reader=dcp.FileSystemReader(tmp_path / "two"), no_dist=True)
    assert same(weights["model"], dict(model.state_dict()))
    assert not (tmp_path / "failed").exists()


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


@pytest.mark.parametrize("cut", ["views", "padded"])
def test_the_copy_of_a_directory_has_each_storage_once(cut: str, tmp_path: Path) -> None:
    """Views of one storage take no more memory than the storage, and a padded shard is copied with its storage."""
    base = torch.zeros(1 << 10, 8)
    tensors = dict(enumerate(base.chunk(8, 1))) if cut == "views" else {0: base[:-1]}
    contents = {f"w{number}": tensor for number, tensor in tensors.items()}
    writer = sharded_writer.ShardWriter(lambda: contents, ShardedDirectory.of(tmp_path / "d"), overwrite=False)
    assert writer.size_bytes == base.nbytes
    assert [copy.storage.data_ptr() for copy in writer.storages] == [base.untyped_storage().data_ptr()]
    writer.close(may_be_committed=False)
