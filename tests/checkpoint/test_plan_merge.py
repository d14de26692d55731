"""Merging the pieces of all ranks: each is written once, all ranks write about as much, and nothing is missing."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from composerlite.checkpoint.format.sharded_layout import StatePiece
from composerlite.checkpoint.save.sharded_plan import merge_pieces


def _part(key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> StatePiece:
    return StatePiece(key, shape, torch.float32, offsets, sizes)


def _pieces(rank: int, wholes: int = 3) -> list[StatePiece]:
    """Rows, a quarter of a grid, values and tensors that all ranks have, and a value of each rank."""
    rows = _part("rows", (2 * rank, 0), (2, 5), (8, 5))
    quarter = _part("grid", (rank // 2 * 3, rank % 2 * 2), (3, 2), (6, 4))
    common = [_part(f"whole{number}", (0,), (7,), (7,)) for number in range(wholes)]
    return [rows, quarter, *common, StatePiece("value"), StatePiece(f"own{rank}")]


def _as_dcp(piece: StatePiece) -> WriteItem:
    if piece.shape is None:
        return WriteItem(piece.metadata_index, WriteItemType.BYTE_IO)
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size(piece.shape))
    kind = WriteItemType.TENSOR if piece.sizes == piece.shape else WriteItemType.SHARD
    return WriteItem(MetadataIndex(piece.key, chunk.offsets), kind, tensor_data=data)


def test_the_merged_index_is_the_one_that_dcp_makes() -> None:
    """Rows, quarters and values that each rank has of its own: the same keys, shapes, types and parts."""
    ranks = [_pieces(rank) for rank in range(4)]
    _, entries = merge_pieces(pickle.loads(pickle.dumps(ranks)))
    plans = [SavePlan([_as_dcp(piece) for piece in pieces]) for pieces in ranks]
    _, theirs = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    assert entries == theirs.state_dict_metadata


def test_each_piece_is_written_once_and_all_ranks_write_about_as_much() -> None:
    """Eight tensors that all four ranks have whole: each rank writes two of them, and its own parts."""
    ranks = [_pieces(rank, wholes=8) for rank in range(4)]
    written, _ = merge_pieces(ranks)
    keys = [[ranks[rank][number] for number in numbers] for rank, numbers in enumerate(written)]
    every = [(piece.key, piece.offsets) for pieces in keys for piece in pieces]
    assert len(every) == len(set(every)) == len({(piece.key, piece.offsets) for pieces in ranks for piece in pieces})
    assert [sum(piece.key.startswith("whole") for piece in pieces) for pieces in keys] == [2] * 4


@pytest.mark.parametrize(
    ("offsets", "sizes", "what"),
    [
        ((3, 0), (1, 4), "another size"),  # a row is missing
        ((1, 0), (2, 4), "overlap"),
        ((0, 2), (4, 1), "overlap"),
        ((1, 0), (3, 4), "another size"),  # a row is there twice
    ],
)
def test_parts_that_do_not_make_up_the_whole_are_refused(
    offsets: tuple[int, int], sizes: tuple[int, int], what: str
) -> None:
    """Two ranks with numbers that both have, or that none has: no checkpoint that would miss something."""
    first = (2, 4) if sizes != (4, 1) else (3, 4)
    with pytest.raises(ValueError, match=rf"'w' .*{what}"):
        merge_pieces([[_part("w", (0, 0), first, (4, 4))], [_part("w", offsets, sizes, (4, 4))]])
