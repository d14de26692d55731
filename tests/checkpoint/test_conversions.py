"""A checkpoint of any run goes into any other: one process, copies, shards, copies of shards; a file or a directory."""

from __future__ import annotations

from pathlib import Path

from checkpoint.conversion_ranks import KINDS, load_into_kinds, save_kinds

from composerlite.testing.cluster import run_ranks


def test_every_kind_of_run_goes_on_from_every_kind_of_checkpoint(tmp_path: Path) -> None:
    """Weights, buffers and the optimizer are the same to the bit, also where the optimizer had not stepped yet."""
    by_count = {count: [kind for kind in KINDS if KINDS[kind] == count] for count in (1, 2, 4)}
    save_kinds(tmp_path, by_count[1])
    for count in (2, 4):
        run_ranks(save_kinds, count, tmp_path, by_count[count])
    assert load_into_kinds(tmp_path, by_count[1]) == []
    for count in (4, 2):
        assert run_ranks(load_into_kinds, count, tmp_path, by_count[count]) == [[]] * count
