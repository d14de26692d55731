"""Nodes with disks of their own save one sharded checkpoint: whole on all of them, or on none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint import disk_ranks
from tiny_training import saved_batches

from composerlite.checkpoint import Catalog, load_keys
from composerlite.errors import IncompatibleCheckpointError
from composerlite.testing import run_ranks, run_ranks_to_the_end


def test_each_node_keeps_what_its_ranks_write(tmp_path: Path) -> None:
    """Its folder has their files, the index and a record of all files; older checkpoints go on all. It is loaded as it
    was saved, in another topology, and where each node has the disk of the other: what is missing is sent."""
    for told in run_ranks(disk_ranks.saves_and_loads, 4, tmp_path):
        for kind in ("FSDP", "HSDP"):
            assert told[f"{kind} saved"] == ["ba2", "ba3"]
            assert [told[f"{kind} {how}"] for how in ("by hand", "latest", "moved")] == [True] * 3, kind
            assert told[f"{kind} found"] == f"{kind}/ba3"
    for node in (0, 1):
        folder = tmp_path / f"node{node}" / "FSDP"
        assert sorted(path.name for path in folder.iterdir()) == ["ba2", "ba3", "latest"]
        assert (folder / "latest").resolve().name == "ba3"
        files = [".metadata", f"__{2 * node}_0_ID.distcp", f"__{2 * node + 1}_0_ID.distcp"]
        assert [re.sub("_[0-9a-f]{16}", "_ID", path.name) for path in sorted((folder / "ba3").iterdir())] == files
        for manifest in Catalog(folder).manifests():
            assert (manifest.node, len(manifest.files)) == (node, 5)
            Catalog(folder).verify(manifest)


@pytest.mark.parametrize("saves", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_dies_in_a_save_changes_nothing(tmp_path: Path, rank: int, saves: int) -> None:
    """The other one has committed. It says which died, and the same nodes go on from the newest checkpoint that both
    have, or from none. Then they save again, and the older one goes from all disks."""
    outcomes = run_ranks_to_the_end(disk_ranks.save_and_be_killed, 2, tmp_path, rank, "commit", saves)
    assert isinstance(outcomes[rank].error, ChildProcessError)
    assert f"rank {rank}" in outcomes[1 - rank].value
    for told in run_ranks(disk_ranks.go_on, 2, tmp_path):
        assert told["found"] == (f"run/ba{saves - 1}" if saves > 1 else None)
        assert told["latest"] == (f"ba{saves - 1}" if saves > 1 else None)
        assert told["batch"] == saves - 1
        assert told["left"] == [f"ba{saves}", "latest"]


@pytest.mark.parametrize("small", [0, 1])
def test_a_full_disk_of_a_node_leaves_the_same_checkpoints_on_all(
    mount: Callable[[str], Path], tmp_path: Path, small: int
) -> None:
    """However many names the disk of a node has room for: both nodes have the same checkpoints, and ``latest`` leads to
    the newest of them."""
    room = range(6, 18)
    disks = [mount(f"size=1m,nr_inodes={names}") / "run" for names in room]
    run_ranks(disk_ranks.save_on_small_disks, 2, tmp_path, small, len(disks))
    found: set[int] = set()
    for number, (names, disk) in enumerate(zip(room, disks, strict=True)):
        other = tmp_path / f"node{1 - small}" / f"large{number}" / "run"
        kept = saved_batches(disk)
        assert saved_batches(other) == kept, f"nr_inodes={names}"
        for folder in (disk, other):
            links = {link.readlink().name for link in folder.glob("latest")}
            assert links == {f"ba{batch}" for batch in kept[-1:]}, f"nr_inodes={names}: {folder}"
        found.add(len(kept))
    assert len(found) > 2, "the disks were too small or too large to show it"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_deletion_that_fails_on_another_node_is_told_as_in_one_folder(tmp_path: Path, asynchronous: bool) -> None:
    """It is an error with the rank and the file, or a warning for each with the number in a row, where failures are
    tolerated; the newest checkpoint is there, and counts as saved."""
    for told in run_ranks(disk_ranks.fail_to_delete_on_the_second_node, 2, tmp_path / "few", asynchronous, 0):
        assert re.search(r"OSError: \[Errno 5\] .*ba1/(__1_0_\w+\.distcp|\.metadata).* rank 1", told["outcome"][0])
        assert told["saved"][-1] in ("ba2", "ba3")
    tolerated = run_ranks(disk_ranks.fail_to_delete_on_the_second_node, 2, tmp_path / "many", asynchronous, 10)
    for told in tolerated:
        assert told["outcome"] == [None, None]
        assert told["saved"] == ["ba3"]
    warnings = [line.partition(": OSError: [Errno 5]")[0] for line in tolerated[0]["warnings"]]
    said = "a checkpoint could not be deleted ({} in a row, save_failure_limit=10)"
    assert warnings == [said.format(number) for number in (1, 2)]


def test_what_one_node_has_lost_is_not_resumed_from(tmp_path: Path) -> None:
    """The newest that is whole on all disks is; what is damaged is set aside on all. Disks that have nothing of the run
    are an error, and so are fewer nodes than the checkpoint lies on: both name what is missing."""
    for rank, told in enumerate(run_ranks(disk_ranks.lose_parts, 2, tmp_path)):
        assert [told[name] for name in ("whole", "damaged", "gone")] == ["run/ba3", "run/ba2", "run/ba1"]
        assert "ba3.damaged" in told["damaged here"]
        assert rank == 1 or "ba2" in told["gone here"], "a part of a checkpoint is not damaged"
        assert "'ba2' is visible to rank 0 but not to the ranks [1]" in told["all gone"]
    with pytest.raises(
        IncompatibleCheckpointError, match=r"'__1_0_\w+\.distcp' was saved to the disk of node 1.*all nodes"
    ):
        list(load_keys(tmp_path / "node0" / "run" / "ba1", ["state.model.0.weight"]))
