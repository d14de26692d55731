"""A checkpoint that takes the place of another of the same name: there is the old one or the new one, always."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from storage.local_store import LocalObjectStore

from composerlite.checkpoint import Checkpointer, load_keys, load_state_dict, save_state_dict
from composerlite.checkpoint.api.step_files import find_step
from composerlite.checkpoint.place.directory import ShardedDirectory, StepFolder
from composerlite.errors import CheckpointExistsError, CorruptCheckpointError


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_who_reads_while_a_checkpoint_is_replaced_gets_the_old_one_or_the_new_one(tmp_path: Path, place: str) -> None:
    """Another process replaces it again and again: no load gets a part of each. A load that is overtaken says so."""
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
                try:
                    load_state_dict(_place(tmp_path, place), state)
                except CorruptCheckpointError as e:
                    assert "If another process replaced the checkpoint meanwhile, load it again" in str(e)  # noqa: PT017
                    continue
                (value,) = torch.cat([state["a"], state["b"]]).unique().tolist()
                seen.add(value)
        finally:
            (tmp_path / "go on").unlink()
        assert done.result().returncode == 0, done.result().stderr
    assert len(seen) >= 10


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
    value = 1
    while (Path(root) / "go on").exists():
        _replace(Path(root), place, value := value + 1)


# ── buckets ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_files_of_a_killed_save_of_more_ranks_are_no_part_of_a_step(tmp_path: Path) -> None:
    """The record says which ranks have a file."""
    (tmp_path / "step1" / "train").mkdir(parents=True)
    (tmp_path / "step1" / "train" / "rank1.pt").write_bytes(b"half of it")
    Checkpointer().save(tmp_path / "step1", torch.nn.Linear(1, 1), {"value": 1})
    with StepFolder.of(tmp_path / "step1") as folder:
        assert set(find_step(folder, None) or ()) == {0}


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
