"""Merging the plans of all ranks: the same as DCP makes of them, and what several ranks have is spread over them."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from composerlite.checkpoint.save.sharded_plan import PackedPlan, merge_plans

PARTS, WHOLE = WriteItemType.SHARD, WriteItemType.TENSOR


def _tensor(key: str, kind: WriteItemType, offset: list[int], sizes: list[int], shape: list[int]) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size(shape))
    return WriteItem(MetadataIndex(key, torch.Size(offset)), kind, tensor_data=data)


def _plan(rank: int, *, wholes: int = 0) -> SavePlan:
    """Of one of four ranks, which have rows of one tensor, quarters of another, and the same whole ones."""
    items = [
        WriteItem(MetadataIndex(f"rng.{rank}"), WriteItemType.BYTE_IO),
        _tensor("rows", PARTS, [rank * 2, 0], [2, 5], [8, 5]),
        *(_tensor(f"whole{number}", WHOLE, [0], [100], [100]) for number in range(wholes)),
        _tensor("quarters", PARTS, [rank // 2 * 3, rank % 2 * 4], [3, 4], [6, 8]),
    ]
    return SavePlan(items, planner_data={item.index.fqn: (item.index.fqn,) for item in items})


def _travelled(plans: list[SavePlan]) -> list[PackedPlan]:
    return [pickle.loads(pickle.dumps(PackedPlan.of(plan))) for plan in plans]


def test_the_merged_plan_is_the_one_that_dcp_makes() -> None:
    """Rows, quarters and values that each rank has of its own: the same index, and each rank writes the same items."""
    plans = [_plan(rank) for rank in range(4)]
    shares, metadata = merge_plans(_travelled(plans))
    theirs, their_metadata = DefaultSavePlanner().create_global_plan(plans)
    assert metadata == their_metadata
    for share, plan, wanted in zip(shares, plans, theirs, strict=True):
        items = {item.index: item for item in share.of(plan).items}
        assert items == {item.index: item for item in wanted.items}
        assert {index: index.index for index in items} == {item.index: item.index.index for item in wanted.items}


def test_what_all_ranks_have_is_written_once_and_by_all_about_as_much() -> None:
    """Eight tensors that all four ranks have whole: each rank writes two of them."""
    plans = [_plan(rank, wholes=8) for rank in range(4)]
    shares, metadata = merge_plans(_travelled(plans))
    written = [
        sorted(item.index.fqn for item in share.of(plan).items if item.type is WHOLE)
        for share, plan in zip(shares, plans, strict=True)
    ]
    assert [len(keys) for keys in written] == [2] * 4
    every = [key for keys in written for key in keys]
    assert sorted(every) == [f"whole{number}" for number in range(8)]
    assert {key for key in metadata.state_dict_metadata if key.startswith("whole")} == set(every)


@pytest.mark.parametrize(
    ("second", "what"),
    [
        (([3, 0], [1, 4]), "another size"),  # a row is missing
        (([1, 0], [2, 4]), "overlap"),
        (([0, 2], [4, 1]), "overlap"),
        (([1, 0], [3, 4]), "another size"),  # a row is there twice
    ],
)
def test_parts_that_do_not_make_up_the_whole_are_refused(second: tuple[list[int], list[int]], what: str) -> None:
    """Two ranks with numbers that both have, or that none has: no checkpoint that would miss something."""
    first_sizes = [2, 4] if second[1] != [4, 1] else [3, 4]
    items = [_tensor("w", PARTS, [0, 0], first_sizes, [4, 4]), _tensor("w", PARTS, *second, [4, 4])]
    with pytest.raises(ValueError, match=rf"'w' .*{what}"):
        merge_plans(_travelled([SavePlan([item], planner_data={"w": ("w",)}) for item in items]))
