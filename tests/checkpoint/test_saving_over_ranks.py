"""Several ranks save one checkpoint: whole or not at all, and every rank knows how it went."""

from __future__ import annotations

import random
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import saving_ranks
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from composerlite.checkpoint import Catalog, rng
from composerlite.checkpoint.format.sharded_index import leaves
from composerlite.checkpoint.place.commit import garbage
from composerlite.testing import run_ranks, run_ranks_to_the_end


def test_a_run_of_many_ranks_saves_one_file(tmp_path: Path) -> None:
    """Rank 0 writes it under its own name with the generators of all; every rank knows the same checkpoints."""
    told = run_ranks(saving_ranks.a_run, 2, tmp_path)
    assert told[0]["saved"] == [f"{tmp_path}/ba{n}-rank0.pt" for n in (3, 4)]
    assert told[0]["saved"] == told[1]["saved"]
    assert [answer["stalls"] for answer in told] == [4, 4]
    assert (tmp_path / "latest-rank0.pt").resolve() == tmp_path / "ba4-rank0.pt"
    (manifest,) = Catalog(tmp_path).manifests()[-1:]
    assert manifest.run.world_size == 2
    Catalog(tmp_path).verify(manifest)
    contents = torch.load(tmp_path / "ba4-rank0.pt", weights_only=True)
    for rank, answer in enumerate(told):
        rng.restore(contents["rng"], rank)
        assert random.random() == answer["next"]


def _as_dcp_reads_it(folder: Path) -> dict[str, Any]:
    """Every tensor in the directory, read by torch's own reader."""
    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in stored.items()
        if isinstance(value, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("how", [{}, {"lazy": True}, {"staging_bytes": 0}, {"asynchronous": False}])
def test_each_rank_writes_its_part_of_a_directory(tmp_path: Path, how: dict[str, Any]) -> None:
    """Plain torch reads what the ranks had when they saved, however it was copied. A directory that a kill has left
    empty, before the first file, is not in the way."""
    (tmp_path / "ba2").mkdir()
    told = run_ranks(saving_ranks.a_sharded_run, 2, tmp_path, (), how)
    assert told[0]["saved"] == told[1]["saved"] == [f"{tmp_path}/ba{n}" for n in (2, 3)]
    assert (tmp_path / "latest").resolve() == tmp_path / "ba3"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ba2", "ba3", "latest"]
    for manifest in Catalog(tmp_path).manifests():
        Catalog(tmp_path).verify(manifest)
        assert {Path(file.path).name[:4] for file in manifest.files} == {".met", "__0_", "__1_"}
    tensors = _as_dcp_reads_it(tmp_path / "ba3")
    for key, expected in told[0]["whole"].items():
        assert torch.equal(tensors[key], torch.from_numpy(expected)), key
    for rank, answer in enumerate(told):
        rng.restore([tensors["rng.0"], tensors["rng.1"]], rank)
        assert random.random() == answer["next"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("rank", [0, 1])
def test_no_directory_of_two_moments_is_committed(tmp_path: Path, rank: int) -> None:
    """One of the ranks changes its shards right after each save, in a way that torch does not count: every checkpoint
    that was committed is its batch's on all ranks, at most one failed, and all agree on which."""
    told, others = run_ranks(saving_ranks.saves_before_a_write, 2, tmp_path, rank)
    assert told.keys() == others.keys()
    assert len(told) >= 5
    assert "ba6" in told
    for name, expected in told.items():
        tensors = _as_dcp_reads_it(tmp_path / name)
        torn = [key for key, value in expected.items() if not torch.equal(tensors[key], torch.from_numpy(value))]
        assert not torn, (name, torn)
    assert [manifest.name for manifest in Catalog(tmp_path).manifests()] == [*told]


def test_what_is_spread_over_ranks_is_gathered_in_one_file(tmp_path: Path) -> None:
    """With ``state_dict_type='full'`` there is a plain file with whole tensors, however it was copied."""
    told, others = run_ranks(saving_ranks.full_saves, 2, tmp_path)
    for number, expected in enumerate(told):
        contents = torch.load(tmp_path / str(number) / "ba1.pt", weights_only=True)
        tensors = leaves(contents, as_dcp=True).values
        assert len(contents["rng"]) == 2
        for key, value in expected.items():
            assert torch.equal(tensors[key], torch.from_numpy(value)), (number, key)
            assert torch.equal(tensors[key], torch.from_numpy(others[number][key])), (number, key)


@pytest.mark.parametrize(
    ("rank", "stage"),
    [
        pytest.param(1, "snapshot", marks=pytest.mark.soak),
        (1, "write"),
        pytest.param(0, "vote", marks=pytest.mark.soak),
        (0, "commit"),
        (0, "answer"),
    ],
)
def test_a_killed_rank_is_named_and_the_last_checkpoint_stands(tmp_path: Path, rank: int, stage: str) -> None:
    """At whatever stage of a save it dies, the other raises within the timeout, and nothing half is found."""
    outcomes = run_ranks_to_the_end(saving_ranks.save_and_be_killed, 2, tmp_path, rank, stage)
    assert isinstance(outcomes[rank].error, ChildProcessError)
    assert f"rank {rank}" in outcomes[1 - rank].value
    catalog = Catalog(tmp_path)
    catalog.place.sweep(timedelta())  # as the next start does, and this, too
    place = catalog.place
    place.delete(garbage(place, place.files(), re.compile(r"ba\d")), folders=True)
    found = [manifest.name for manifest in catalog.manifests()]
    assert found == (["ba1", "ba2"] if stage == "answer" else ["ba1"])
    for manifest in catalog.manifests():
        catalog.verify(manifest)
    left = [path.name for path in tmp_path.iterdir() if path.suffix != ".lease"]
    assert sorted(left) == sorted(["latest", *found])
    assert (tmp_path / "latest" / ".metadata").exists()


def test_a_rank_that_cannot_write_fails_the_save_on_all(tmp_path: Path) -> None:
    """All raise the same error, which names the rank; or go on, and count it, where that is tolerated."""
    told = run_ranks(saving_ranks.saves_that_fail, 2, tmp_path)
    assert told[0] == told[1]
    assert told[0]["saved 1"] == ["ba1", "ba3"]
    assert told[0]["saved 0"] == ["ba1"]
    assert "rank 1 failed: OSError: [Errno 28]" in told[0]["raised"]
    assert [manifest.name for manifest in Catalog(tmp_path / "0").manifests()] == ["ba1"]
    assert not list(tmp_path.rglob("*.tmp-*"))
