"""Nodes with disks of their own save one sharded checkpoint: whole on all of them, or on none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint import disk_ranks
from checkpoint.kill_points import kill_at_every_step
from checkpoint.replacing import save_on_disks
from forked import run_forked
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
        assert sorted(path.name for path in folder.iterdir()) == [".manifest", "ba2", "ba3", "latest"]
        assert (folder / "latest").resolve().name == "ba3"
        files = {".metadata", f"__{2 * node}_0.distcp", f"__{2 * node + 1}_0.distcp"}
        assert {path.name for path in (folder / "ba3").iterdir()} == files
        for manifest in Catalog(folder).manifests():
            assert (manifest.node, len(manifest.files)) == (node, 5)
            Catalog(folder).verify(manifest)


def kill_first_saves(root: str) -> None:
    """Save on two disks, killed at every step."""
    torch.set_num_threads(1)
    kill_at_every_step(Path(root), lambda folder: save_on_disks(str(folder), 2, False))


def test_a_kill_at_any_step_leaves_the_same_on_all_disks(tmp_path: Path) -> None:
    """The next start finds on both what the first one has: the checkpoint or nothing, and no leftovers."""
    done = run_forked(kill_first_saves, str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    committed: list[bool] = []
    for line in done.stdout.splitlines():
        name = line.partition("\t")[0]
        first, second = (Catalog(tmp_path / name / f"node{number}") for number in (0, 1))
        first.recover()
        second.recover({manifest.name: manifest.identity for manifest in first.manifests()})
        found = [catalog.manifests() for catalog in (first, second)]
        assert [one.identity for one in found[0]] == [one.identity for one in found[1]], name
        for catalog, manifests in zip((first, second), found, strict=True):
            for manifest in manifests:
                catalog.verify(manifest)
            names = [path.name for path in catalog.folder.iterdir()] if catalog.folder.exists() else []
            assert set(names) <= {".manifest", "c"}, name
            assert ("c" in names) == bool(manifests)
            assert [path.name for path in catalog.folder.glob(".manifest/*")] == ["c.json"] * len(manifests), name
        committed.append(bool(found[0]))
    assert committed == sorted(committed), "none before a step, and one from there on"
    assert set(committed) == {False, True}
    assert len(committed) > 10


@pytest.mark.parametrize(("rank", "stage", "found"), [(0, "commit_part", 1), (1, "commit_part", 2)])
def test_a_node_that_dies_in_a_save_changes_nothing(tmp_path: Path, rank: int, stage: str, found: int) -> None:
    """The others say which, and the same nodes go on from the newest checkpoint that the first one committed: a part
    that was only prepared is completed, or removed. Then they save again, and the older one goes from all disks."""
    outcomes = run_ranks_to_the_end(disk_ranks.save_and_be_killed, 2, tmp_path, rank, stage)
    assert isinstance(outcomes[rank].error, ChildProcessError)
    assert f"rank {rank}" in outcomes[1 - rank].value
    for told in run_ranks(disk_ranks.go_on, 2, tmp_path):
        assert told["found"] == f"run/ba{found}"
        assert (told["latest"], told["batch"]) == (f"ba{found}", found)
        assert told["left"] == [".manifest", f"ba{found + 1}", "latest"]


@pytest.mark.parametrize("small", [0, 1])
def test_no_checkpoint_is_committed_without_its_latest_on_any_node(
    mount: Callable[[str], Path], tmp_path: Path, small: int
) -> None:
    """However many names the disk of a node has room for: both nodes have the same checkpoints, and ``latest`` leads to
    the newest on both."""
    room = range(11, 22)
    disks = [mount(f"size=1m,nr_inodes={names}") / "run" for names in room]
    run_ranks(disk_ranks.save_on_small_disks, 2, tmp_path, small, len(disks))
    found: set[int] = set()
    for number, (names, disk) in enumerate(zip(room, disks, strict=True)):
        other = tmp_path / f"node{1 - small}" / f"large{number}" / "run"
        kept = saved_batches(disk)
        assert saved_batches(other) == kept, f"nr_inodes={names}"
        for folder in (disk, other):
            links = [link.readlink().name for link in folder.glob("latest")]
            assert links == [f"ba{batch}" for batch in kept[-1:]], f"nr_inodes={names}: {folder}"
        found.add(len(kept))
    assert len(found) > 2, "the disks were too small or too large to show it"


def test_a_slow_deletion_on_another_node_does_not_hold_up_the_next_save(tmp_path: Path) -> None:
    """The third save begins while the first checkpoint is being deleted there; in the end all disks have the newest."""
    first, second = run_ranks(disk_ranks.delete_on_the_second_node, 2, tmp_path, "wait", True, 0)
    assert second["waited"] == [True, True], "the third save waited until the first checkpoint was deleted"
    assert first["saved"] == second["saved"] == ["ba3"]
    for node in (0, 1):
        folder = tmp_path / f"node{node}" / "run"
        assert sorted(path.name for path in folder.iterdir()) == [".manifest", "ba3", "latest"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_deletion_that_fails_on_another_node_is_told_as_in_one_folder(tmp_path: Path, asynchronous: bool) -> None:
    """It is an error with the rank and the file, or a warning for each with the number in a row, where failures are
    tolerated; the newest checkpoint is there, and counts as saved."""
    for told in run_ranks(disk_ranks.delete_on_the_second_node, 2, tmp_path / "few", "fail", asynchronous, 0):
        assert re.search(r"OSError: \[Errno 5\] .*ba1/__1_0\.distcp.* rank 1", told["outcome"][0])
        assert told["saved"][-1] in ("ba2", "ba3")
    tolerated = run_ranks(disk_ranks.delete_on_the_second_node, 2, tmp_path / "many", "fail", asynchronous, 10)
    for told in tolerated:
        assert told["outcome"] == [None, None]
        assert told["saved"] == ["ba3"]
    warnings = [line.partition(": OSError: [Errno 5]")[0] for line in tolerated[0]["warnings"]]
    said = "a checkpoint could not be deleted ({} in a row, save_failure_limit=10)"
    assert warnings == [said.format(number) for number in (1, 2)]


def test_what_one_node_has_lost_is_not_resumed_from(tmp_path: Path) -> None:
    """The newest that is whole on all disks is; what is not is set aside on all. Disks that have nothing of the run are
    an error, and so are fewer nodes than the checkpoint lies on: both name what is missing."""
    for rank, told in enumerate(run_ranks(disk_ranks.lose_parts, 2, tmp_path)):
        assert [told[name] for name in ("whole", "damaged", "gone")] == ["run/ba3", "run/ba2", "run/ba1"]
        assert "ba3.damaged" in told["damaged here"]
        assert rank == 1 or "ba2.damaged" in told["gone here"]
        assert "'ba1' is there for rank 0 and not for the ranks [1]" in told["all gone"]
    with pytest.raises(
        IncompatibleCheckpointError, match=r"'__1_0\.distcp' was saved to the disk of node 1.*all nodes"
    ):
        list(load_keys(tmp_path / "node0" / "run" / "ba1", ["state.model.0.weight"]))
