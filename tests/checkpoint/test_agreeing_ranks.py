"""Ranks that differ in their clocks, disks and luck save the same checkpoints at the same batches, or say why not."""

from __future__ import annotations

from pathlib import Path

import agreeing_ranks

from composerlite.checkpoint import Catalog
from composerlite.testing import run_ranks, run_ranks_to_the_end


def test_ranks_that_differ_save_the_same(tmp_path: Path) -> None:
    """Where an interval is a function or a clock, what rank 0 says holds for all. A rank that writes for longer than
    ranks are waited for, and lives, fails no save. Each rank knows before its first save what memory it takes. A folder
    that is another one on each machine is refused for directories, with the way out; for files rank 0 has its own."""
    first, second = run_ranks(agreeing_ranks.all_agree, 2, tmp_path)
    assert first["intervals"] == second["intervals"]
    assert first["intervals"]["function"] == [f"ba{batch}.pt" for batch in (2, 4, 6, 8, 10, 12)]
    assert len(first["intervals"]["1s"]) >= 11
    assert 1 <= len(first["intervals"]["auto:1%"]) < 11
    assert first["slow"] == second["slow"] == ["ba1"]
    (manifest,) = Catalog(tmp_path / "slow").manifests()
    Catalog(tmp_path / "slow").verify(manifest)
    for expected, needed in (first["expects"], second["expects"]):
        assert abs(expected - needed) < 8192 < needed / 10
    assert first["apart"]["sharded"] == second["apart"]["sharded"]
    assert "'run' of rank 0 is not that of the ranks [1]" in first["apart"]["sharded"]
    assert "state_dict_type='full'" in first["apart"]["sharded"]
    assert first["apart"]["full"] == second["apart"]["full"] == ["run/ep1-ba2-rank0.pt"]
    assert first["apart"]["DDP"] == second["apart"]["DDP"] == ["ddp/ep1-ba2-rank0.pt"]
    files = [f"{folder}/{name}-rank0.pt" for folder in ("ddp", "run") for name in ("ep1-ba2", "latest")]
    assert (first["apart"]["files"], second["apart"]["files"]) == (files, [])


def test_a_rank_does_not_save_alone_for_long(tmp_path: Path) -> None:
    """Where one fails in training while the other comes to save, that one raises what the first failed with and closes,
    long before its time is up, and no checkpoint is found."""
    first, second = run_ranks_to_the_end(agreeing_ranks.save_alone, 2, tmp_path)
    assert isinstance(second.error, OSError)
    raised, seconds = first.value
    assert "rank 1 failed: OSError: the data of this rank are gone" in raised
    assert seconds < 10
    assert Catalog(tmp_path).manifests() == []
