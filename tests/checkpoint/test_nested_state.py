"""Tensors in every part of the state, however deep, are in a sharded checkpoint, each rank's part, and come back."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import nested_ranks
import pytest
import torch
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
