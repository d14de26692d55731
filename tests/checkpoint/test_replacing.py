"""A checkpoint that takes the place of another of the same name: there is the old one or the new one, always."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeoutError
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint.kill_points import at_event, refuse_exchange
from checkpoint.parts import save_batch, value_in
from forked import run_forked, started

from composerlite.checkpoint import (
    Catalog,
    RemoteFileSystemReader,
    load_keys,
    load_state_dict,
    save_state_dict,
)
from composerlite.checkpoint.load.restore import read_checkpoint
from composerlite.checkpoint.load.resume import RunBucket, RunPlace, choose
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.errors import CheckpointExistsError
from composerlite.storage import ObjectStore, Transfer
from composerlite.storage.stores.local import LocalObjectStore
from composerlite.testing import Fault, FaultyStore


@pytest.mark.parametrize("place", ["folder", "folder without exchange", "bucket"])
def test_who_reads_while_a_checkpoint_is_replaced_gets_the_old_one_or_the_new_one(tmp_path: Path, place: str) -> None:
    """Another process replaces it again and again: no load is told of damage, and none gets a part of each."""
    (tmp_path / "bucket").mkdir()
    (tmp_path / "go on").touch()
    _replace(tmp_path, place, 1)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run_forked, _replace_again_and_again, str(tmp_path), place, cwd=tmp_path)
        seen: set[float] = set()
        try:
            deadline, loads = time.monotonic() + 180, 0
            while (loads := loads + 1) <= 100 or (len(seen) < 10 and time.monotonic() < deadline):
                state = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
                load_state_dict(_place(tmp_path, place), state)
                (value,) = torch.cat([state["a"], state["b"]]).unique().tolist()
                seen.add(value)
        finally:
            (tmp_path / "go on").unlink()
        assert done.result().returncode == 0, done.result().stderr
    assert len(seen) >= 10


def test_a_checkpoint_that_gets_its_name_while_it_is_read_is_read_again_under_it(tmp_path: Path) -> None:
    """On a disk that exchanges no names it is found under another one until it has its own."""
    _replace(tmp_path, "folder", 7)
    path = tmp_path / "folder" / "c"
    between = path.with_name(f".c.saving-{0:016x}")
    old = between.with_name(f"{between.name}-old")
    path.rename(between)
    old.mkdir()
    state = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    reader = RemoteFileSystemReader(path)
    with contextlib.closing(reader):
        assert set(reader.read_metadata().state_dict_metadata) == {"a", "b"}
        between.rename(path)
        old.rmdir()
        assert reader.was_replaced()
        reader.reset()
        with pytest.warns(UserWarning, match="in a single process"):
            dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.cat([state["a"], state["b"]]).unique().tolist() == [7.0]


def test_of_two_that_replace_one_checkpoint_at_once_the_data_and_the_manifest_of_the_last_one_stay(
    tmp_path: Path,
) -> None:
    """One process is suspended when its data have the name and its manifest has not: the other waits for it."""
    _replace(tmp_path, "folder", 1)
    catalog = Catalog(tmp_path / "folder")
    with started(_replace_and_stop, str(tmp_path)) as first, ThreadPoolExecutor(1) as pool:
        assert first.stdout is not None
        number = int(first.stdout.readline())
        _wait_until_stopped(number)
        second = pool.submit(_replace, tmp_path, "folder", 3)
        with pytest.raises(FuturesTimeoutError):
            second.result(timeout=2)
        os.kill(number, signal.SIGCONT)
        second.result(timeout=60)
        assert first.wait(60) == 0
    (manifest,) = catalog.manifests()
    catalog.verify(manifest)
    state = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    load_state_dict(tmp_path / "folder" / "c", state)
    assert torch.cat([state["a"], state["b"]]).unique().tolist() == [3.0]
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == [".manifest", "c"]


def _replace_and_stop(root: str) -> None:
    def stop(_: str) -> None:
        sys.stdout.write(f"{os.getpid()}\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGSTOP)

    def is_manifest(event: str, arguments: tuple[Any, ...]) -> bool:
        return event == "os.rename" and str(arguments[1]).endswith("/c.json")

    at_event(root, 0, stop, is_manifest)
    _replace(Path(root), "folder", 2)


def _wait_until_stopped(number: int) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _place(root: Path, place: str) -> Any:
    return (
        ShardedDirectory.in_store(LocalObjectStore(root / "bucket"), "run/c")
        if place == "bucket"
        else root / "folder" / "c"
    )


def _replace(root: Path, place: str, value: int) -> None:
    state = {name: torch.full((1000,), float(value)) for name in ("a", "b")}
    save_state_dict(_place(root, place), state, save_overwrite=True, thread_count=2)


def _replace_again_and_again(root: str, place: str) -> None:
    if place == "folder without exchange":
        refuse_exchange()
    value = 1
    while (Path(root) / "go on").exists():
        _replace(Path(root), place, value := value + 1)


# ── buckets ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _publish(store: ObjectStore, folder: Path, value: int) -> None:
    """As the saver does with a file that it has committed."""
    save_batch(folder, value, template="c", latest=None)
    (manifest,) = Catalog(folder).manifests()
    with Transfer(store) as transfer:
        Catalog(Bucket(transfer, "run")).publish(manifest, [folder / "c"], link="run/latest", overwrite=True)


def _published(store: ObjectStore, folder: Path) -> float:
    """As a run does that resumes."""
    with Transfer(store) as transfer:
        buckets = [RunBucket(Catalog(Bucket(transfer, "run")), "run/latest")]
        choose([RunPlace(Catalog(folder), "c", buckets=buckets)], "run")
    return value_in(read_checkpoint(folder / "c"))


def _save_directory(store: ObjectStore, _: Path, value: int) -> None:
    """As the functions do with a URI."""
    with ShardedDirectory.in_store(store, "run/c") as folder:
        save_state_dict(folder, {"a": torch.full((1000,), float(value))}, save_overwrite=True)


def _saved_directory(store: ObjectStore, _: Path) -> float:
    with ShardedDirectory.in_store(store, "run/c") as folder:
        return next(load_keys(folder, ["a"])).unique().item()


_IN_BUCKETS: dict[str, tuple[Callable[[ObjectStore, Path, int], None], Callable[[ObjectStore, Path], float]]] = {
    "published": (_publish, _published),
    "directory": (_save_directory, _saved_directory),
}


@pytest.mark.parametrize("kind", list(_IN_BUCKETS))
def test_a_kill_while_a_checkpoint_in_a_bucket_is_replaced_leaves_the_old_or_the_new(tmp_path: Path, kind: str) -> None:
    """At whatever request it came. It is found and whole, and the same name is saved again."""
    save, value = _IN_BUCKETS[kind]
    values: set[float] = set()
    for number in range(100):
        bucket = tmp_path / f"bucket{number}"
        bucket.mkdir()
        store = LocalObjectStore(bucket)
        save(store, tmp_path / f"old{number}", 1)
        died = run_forked(
            _save_and_die, kind, str(bucket), str(tmp_path / f"new{number}"), str(number), cwd=tmp_path
        ).returncode
        values.add(found := value(LocalObjectStore(bucket), tmp_path / f"found{number}"))
        assert found in (1, 2), number
        save(LocalObjectStore(bucket), tmp_path / f"again{number}", 3)
        assert value(LocalObjectStore(bucket), tmp_path / f"last{number}") == 3, number
        left = [info.name for info in LocalObjectStore(bucket).list_objects()]
        assert not [name for name in left if name.endswith((".next", ".saving")) and "latest" not in name], number
        assert len([name for name in left if name.endswith(".distcp")]) == (kind == "directory"), number
        if not died:
            break
    assert values == {1, 2}
    assert number > 5


def _save_and_die(kind: str, bucket: str, folder: str, die_at: str) -> None:
    fault = Fault(after=int(die_at), error=None, first=lambda: os.kill(os.getpid(), signal.SIGKILL))
    _IN_BUCKETS[kind][0](FaultyStore(LocalObjectStore(Path(bucket)), fault), Path(folder), 2)


@pytest.mark.parametrize("overwrite", [True, False])
def test_of_two_that_save_one_name_to_a_bucket_at_once_neither_removes_what_the_other_has(
    tmp_path: Path, s3_server: Any, overwrite: bool
) -> None:
    """The checkpoint is that of one of them, whole; without overwriting, the other is told that there is one."""
    bucket = s3_server.new_bucket()
    for number in range(4):
        uri = f"s3://{bucket}/run/c{number}"
        if overwrite:
            with _in_environment(s3_server.environment):
                save_state_dict(uri, {"a": torch.zeros(1000)})
        with ThreadPoolExecutor(2) as pool:
            how = {"cwd": tmp_path, "environment": s3_server.environment}
            both = list(
                pool.map(lambda one: run_forked(_save_to, uri, one, "yes" if overwrite else "", **how), ("1", "2"))  # noqa: B023
            )
        told = [one.stdout for one in both]
        assert [one.returncode for one in both] == [0, 0], [one.stderr for one in both]
        assert sorted(told) == (["saved", "saved"] if overwrite else ["CheckpointExistsError", "saved"])
        with _in_environment(s3_server.environment):
            found = next(load_keys(uri, ["a"])).unique().item()
        assert found in (1, 2) if overwrite else found == 1 + told.index("saved")


def _save_to(uri: str, value: str, overwrite: str) -> None:
    try:
        save_state_dict(uri, {"a": torch.full((1000,), float(value))}, save_overwrite=bool(overwrite))
    except CheckpointExistsError as e:
        sys.stdout.write(type(e).__name__)
    else:
        sys.stdout.write("saved")


@contextlib.contextmanager
def _in_environment(variables: Mapping[str, str]) -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield
