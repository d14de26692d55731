"""An index that is a rule: what was saved is loaded in any layout, and nothing of it is believed unchecked."""

from __future__ import annotations

import itertools
from pathlib import Path

import layout_ranks
import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from composerlite.checkpoint import RemoteFileSystemReader
from composerlite.checkpoint.format.sharded_layout import is_layout
from composerlite.testing import run_ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of four ranks, one for each way to split tensors."""
    folder = tmp_path_factory.mktemp("layouts")
    run_ranks(layout_ranks.save, 4, folder, timeout=120)
    return folder


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_what_a_rule_places_is_loaded_by_any_number_of_ranks_in_any_layout(saved: Path, ranks: int) -> None:
    """Rows, columns, grids, replicas, shards that are uneven or empty: every number comes back."""
    run_ranks(layout_ranks.load, ranks, saved, timeout=120)


def test_the_index_is_a_rule_and_reads_like_a_list(saved: Path) -> None:
    """Each part of each tensor is in it once, in a place of its own, and together they are the whole."""
    for name in layout_ranks.LAYOUTS:
        assert is_layout((saved / name / ".metadata").read_bytes()), name
        with RemoteFileSystemReader(saved / name) as reader:
            found = reader.read_metadata()
        places = dict(found.storage_data)
        for number, shape in enumerate(layout_ranks.SHAPES):
            seen = torch.zeros(shape, dtype=torch.int64)
            stored = found.state_dict_metadata[f"w{number}"]
            assert isinstance(stored, TensorStorageMetadata)
            for chunk in stored.chunks:
                part = seen
                for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                    part = part.narrow(dim, start, size)
                part += 1
                assert sum(i.fqn == f"w{number}" and i.offset == chunk.offsets for i in places) == 1
            assert torch.equal(seen, torch.ones_like(seen)), (name, number)
        spans = sorted((place.relative_path, place.offset, place.length) for place in places.values())
        for (file, start, size), (next_file, next_start, _) in itertools.pairwise(spans):
            assert file != next_file or start + size == next_start


def test_a_rank_plans_what_dcp_plans() -> None:
    """Each tensor in the same part, also where the part was worked out for another tensor of its shape."""
    run_ranks(layout_ranks.plan_as_dcp, 4, timeout=120)


def test_ranks_that_differ_make_a_list(tmp_path: Path) -> None:
    """Where one rank has what others have not, the index is one of DCP, with all of it."""
    run_ranks(layout_ranks.save_differing, 2, tmp_path, timeout=120)
    assert not is_layout((tmp_path / "differing" / ".metadata").read_bytes())
    with RemoteFileSystemReader(tmp_path / "differing") as reader:
        assert {"own0", "own1", "w0", "plain0"} <= set(reader.read_metadata().state_dict_metadata)
