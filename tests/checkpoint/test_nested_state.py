"""Tensors in every part of the state, however deep, are in a sharded checkpoint, each rank's part, and come back."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import nested_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from composerlite.checkpoint import load_keys
from composerlite.testing import run_ranks


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Equal bit for bit, of the same types."""
    assert type(one) is type(other), (path, one, other)
    if isinstance(one, torch.Tensor):
        assert one.dtype is other.dtype, path
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert set(one) == set(other), path
        for key, value in one.items():
            assert_same(value, other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple | collections.deque):
        assert len(one) == len(other), path
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_same(mine, theirs, f"{path}/{number}")
    else:
        assert one == other, path


@pytest.mark.parametrize("spread", ["fsdp", "tp", "full"])
def test_averages_of_a_spread_model_are_resumed_bit_for_bit(tmp_path: Path, spread: str) -> None:
    """EMA, SWA, a callback and an optimizer with weights deep in dicts and lists: a resumed run on two ranks ends as a
    run that was not interrupted, also with dimensions that do not divide."""
    trained = run_ranks(nested_ranks.train, 2, tmp_path, spread, timeout=240)
    for before, after in zip(trained, run_ranks(nested_ranks.resume, 2, tmp_path, spread, timeout=240), strict=True):
        assert_same(after["loaded"], before["saved"])
        assert_same(after["resumed"], before["straight"])
        assert any(after["sharded"])


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_averages_are_loaded_on_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    """What two ranks have averaged one goes on with, and the other way round."""
    saved = run_ranks(nested_ranks.train, before, tmp_path, "fsdp" if before > 1 else "one", timeout=240)
    for loaded in run_ranks(
        nested_ranks.load, after, tmp_path / "resumed", "fsdp" if after > 1 else "one", timeout=240
    ):
        assert_same(loaded, saved[0]["saved"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_tensors_in_dicts_and_lists_are_saved_by_functions(tmp_path: Path) -> None:
    """Lists, keys that are no text: every rank's part is there, for other numbers of ranks, and for plain torch. In a
    tuple, a deque, a set or an object, a distributed tensor is refused when it is saved."""
    told = run_ranks(nested_ranks.save_nested, 2, tmp_path)
    for saved, loaded, refused in told:
        assert_same(loaded, saved)
        assert len(refused) == 6
        assert all("distributed over ranks" in one and "(7, 3)" in one and "in a list" in one for one in refused)
    for loaded in run_ranks(nested_ranks.load_nested, 3, tmp_path):
        assert_same(loaded, told[0][0])
    with torch.serialization.safe_globals([nested_ranks.Pair]):
        read = dict(zip(told[0][0], load_keys(tmp_path / "state", list(told[0][0])), strict=True))
    assert_same(read, told[0][0])
    dcp_to_torch_save(tmp_path / "state", tmp_path / "state.pt")
    foreign = torch.load(tmp_path / "state.pt", weights_only=False)
    assert torch.equal(foreign["list"][0], told[0][0]["list"][0])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_torch_reads_averages_of_a_spread_model(tmp_path: Path) -> None:
    """What others make of the directory of a run holds every number of the average."""
    ends = run_ranks(nested_ranks.train, 2, tmp_path, "fsdp", timeout=240)[0]
    (path,) = (tmp_path / "straight").glob("ep2*")
    expected = ends["straight"]["algorithms"][0]["tensors"]
    tensors = {f"state.algorithms.0.1.state.tensors.{name}": torch.empty_like(t) for name, t in expected.items()}
    dcp.load(tensors, storage_reader=FileSystemReader(path), no_dist=True)
    for name, tensor in expected.items():
        assert torch.equal(tensors[f"state.algorithms.0.1.state.tensors.{name}"], tensor)
    dcp_to_torch_save(path, tmp_path / "run.pt")
    assert torch.load(tmp_path / "run.pt", weights_only=False)["state"]["run_name"] == "run"
    (state,) = load_keys(path, ["state"])
    assert_same(state["algorithms"][0][1]["state"]["tensors"], expected)
