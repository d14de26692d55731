"""Replicas of checkpoints in memory: each node has that of another, and what a node has lost is brought to it."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint import replica_ranks
from checkpoint.replica_ranks import file_of, own, replicas

from composerlite.checkpoint import Catalog
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.testing import run_ranks, run_ranks_to_the_end


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Memory of three nodes with a sharded checkpoint, of batch 3, that is replicated; the disk has batch 1."""
    nodes = tmp_path_factory.mktemp("saved")
    for told in run_ranks(replica_ranks.saves, 3, nodes, [2, 3], timeout=120):
        assert told[2] == ["", ""]
    for node in range(3):
        delete_checkpoint(own(nodes, node).place, own(nodes, node).manifests()[0])  # as retention does
        assert replica_ranks.state_of(nodes, node) == ([("ba3", node)], [("ba3", (node - 1) % 3)])
    replica_ranks.save(nodes / "scratch", 0, 0, 1)
    (nodes / "scratch" / "node0" / "run").rename(nodes / "disk")
    return nodes


def _lose(nodes: Path, *lost: int) -> None:
    for node in lost:
        shutil.rmtree(nodes / f"node{node}")


def _damage(catalog: Catalog, node: int) -> None:
    path = catalog.folder / "ba3" / file_of(node, 3)
    path.write_bytes(b"?" + path.read_bytes()[1:])


def _lose_node(nodes: Path) -> None:
    _lose(nodes, 1)


def _lose_first(nodes: Path) -> None:
    _lose(nodes, 0)


def _damage_own(nodes: Path) -> None:
    _damage(own(nodes, 2), 2)


def _newer_without_replica(nodes: Path) -> None:
    for node in range(3):
        replica_ranks.save(nodes, node, 3, 4)
    _lose(nodes, 2)


def _newer_of_another_run(nodes: Path) -> None:
    for node in range(3):
        replica_ranks.save(nodes, node, 3, 4, run="another")
    _lose(nodes, 2)


def _damage_replica(nodes: Path) -> None:
    _lose(nodes, 1)
    _damage(replicas(nodes, 2), 1)


def _cut_replica(nodes: Path) -> None:
    _lose(nodes, 0)
    path = replicas(nodes, 1).folder / "ba3" / file_of(0, 3)
    path.write_bytes(path.read_bytes()[:-1])


def _lose_neighbours(nodes: Path) -> None:
    _lose(nodes, 0, 1)


def _lose_neighbours_but_first(nodes: Path) -> None:
    _lose(nodes, 1, 2)


@pytest.mark.parametrize("harm", [_lose_node, _lose_first, _damage_own, _newer_without_replica, _newer_of_another_run])
def test_a_part_that_is_lost_comes_from_its_replica(tmp_path: Path, saved: Path, harm: Callable[[Path], None]) -> None:
    """The node with the replica keeps that part, too; a node that is new, or whose own part is damaged, gets the index.
    What is newer, but incomplete or of another run, is skipped by all.
    """
    nodes = shutil.copytree(saved, tmp_path / "nodes")
    harm(nodes)
    told = run_ranks(replica_ranks.resumes, 3, nodes, [0, 1, 2])
    assert [rank["place"] for rank in told] == ["run/ba3"] * 3
    assert all(".metadata" in rank["files"] for rank in told)
    data = [[name for name in rank["files"] if name != ".metadata"] for rank in told]
    assert sorted(data, key=len) in (
        [[], [file_of(2, 3)], [file_of(0, 3), file_of(1, 3)]],
        [[], [file_of(0, 3)], [file_of(1, 3), file_of(2, 3)]],
        [[], [file_of(1, 3)], [file_of(0, 3), file_of(2, 3)]],
    )


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (_damage_replica, "the part of node 1"),
        (_cut_replica, "the part of node 0"),
        (_lose_neighbours, ""),
        (_lose_neighbours_but_first, "visible to rank 0 but not to the ranks [1, 2]"),
    ],
)
def test_what_is_lost_with_its_replica_is_not_resumed_from(
    tmp_path: Path, saved: Path, harm: Callable[[Path], None], reason: str
) -> None:
    """All ranks take the next source, the disk, and the log says why the newer checkpoint is skipped."""
    nodes = shutil.copytree(saved, tmp_path / "nodes")
    harm(nodes)
    told = run_ranks(replica_ranks.resumes, 3, nodes, [0, 1, 2])
    assert [rank["place"] for rank in told] == ["disk/ba1"] * 3
    assert reason in " ".join(told[0]["skipped"])


def test_a_part_that_is_damaged_on_its_way_costs_no_intact_part(tmp_path: Path, saved: Path) -> None:
    """All ranks take the next source, the disk, and nothing of the newer checkpoint is deleted."""
    nodes = shutil.copytree(saved, tmp_path / "nodes")
    _lose_node(nodes)
    told = run_ranks(replica_ranks.resumes_with_damaged_arrivals, 3, nodes, [0, 1, 2])
    assert [rank["place"] for rank in told] == ["disk/ba1"] * 3
    assert "was damaged on its way" in " ".join(told[0]["skipped"])
    assert replica_ranks.state_of(nodes, 0) == ([("ba3", 0)], [("ba3", 2)])
    assert replica_ranks.state_of(nodes, 2) == ([("ba3", 2)], [("ba3", 1)])
    assert [path for path in nodes.rglob("*") if ".tmp-" in path.name] == []


def test_a_run_whose_only_checkpoint_was_lost_with_a_node_starts_over(tmp_path: Path, saved: Path) -> None:
    """As one does whose memory was lost altogether; the log says what is there, and for which ranks it is not."""
    nodes = shutil.copytree(saved, tmp_path / "nodes")
    _lose_neighbours_but_first(nodes)
    shutil.rmtree(nodes / "disk")
    told = run_ranks(replica_ranks.resumes, 3, nodes, [0, 1, 2])
    assert [rank["place"] for rank in told] == ["None"] * 3
    assert "visible to rank 0 but not to the ranks [1, 2]" in " ".join(told[0]["skipped"])


def test_another_number_of_nodes_has_all_parts(tmp_path: Path, saved: Path) -> None:
    """The part of the lost node stays with its replica; new nodes get the index, in whatever order nodes come."""
    fewer = shutil.copytree(saved, tmp_path / "fewer")
    _lose(fewer, 1)
    told = run_ranks(replica_ranks.resumes, 2, fewer, [2, 0])
    assert [rank["place"] for rank in told] == ["run/ba3"] * 2
    assert [rank["own"] for rank in told] == [[("ba3", 1)], [("ba3", 0)]]  # the first of the parts that are there
    assert told[0]["files"] == [".metadata", file_of(1, 3), file_of(2, 3)]
    (both,) = own(fewer, 2).manifests()
    delete_checkpoint(own(fewer, 2).place, both)
    assert not (own(fewer, 2).folder / "ba3").exists()
    more = shutil.copytree(saved, tmp_path / "more")
    _lose(more, 1)
    told = run_ranks(replica_ranks.resumes, 4, more, [0, 5, 6, 2])
    assert [rank["place"] for rank in told] == ["run/ba3"] * 4
    assert [rank["own"] for rank in told] == [[("ba3", number)] for number in (0, 3, 3, 1)]


def test_a_file_is_brought_to_the_first_rank(tmp_path: Path) -> None:
    """The checkpoint of a replicated model is in the memory of one node and a replica; large files come in pieces."""
    saves = functools.partial(replica_ranks.saves, sharded=False, size_bytes=replica_ranks.SIZE_BYTES)
    for rank, told in enumerate(run_ranks(saves, 3, tmp_path, [2])):
        assert told == [[("ba2", None)] if rank == 0 else [], [("ba2", None)] if rank == 1 else [], [""]]
    moved = run_ranks(replica_ranks.resumes, 2, shutil.copytree(tmp_path, tmp_path.with_name("moved")), [2, 0])
    assert [told["own"] for told in moved] == [[("ba2", None)]] * 2
    _lose(tmp_path, 0)
    for rank, told in enumerate(run_ranks(replica_ranks.resumes, 3, tmp_path, [0, 1, 2])):
        assert told["place"] == "run/ba2"
        assert told["own"] == ([("ba2", None)] if rank == 0 else [])


def test_no_more_is_sent_than_the_network_is_to_carry(tmp_path: Path) -> None:
    """More than 2,005 bytes at 4,010 bytes per second take half a second at least, however fast the machine is."""
    assert all(seconds >= 0.5 for seconds in run_ranks(replica_ranks.saves_slowly, 2, tmp_path, 4010.0))


@pytest.mark.parametrize(("victim", "method"), [(1, "verify"), (1, "adopt"), (0, "delete")])
def test_a_kill_while_a_replica_comes_leaves_the_one_before(tmp_path: Path, victim: int, method: str) -> None:
    """A node that dies when all has come, before it is verified, before it counts, or before the old one is removed
    has a whole replica, and no leftovers after the next start."""
    outcomes = run_ranks_to_the_end(replica_ranks.saves_and_dies, 2, tmp_path, victim, method)
    assert "was killed by SIGKILL" in str(outcomes[victim].error)
    there = [m.batch for m in replicas(tmp_path, victim).manifests()]
    assert there == ([1, 2] if method == "delete" else [1])
    for told in run_ranks(replica_ranks.resumes, 2, tmp_path, [0, 1]):
        assert told["place"] == "run/ba2"
    assert [path for path in tmp_path.rglob("*") if ".tmp-" in path.name] == []


def test_a_replica_that_cannot_be_kept_is_nobody_elses_failure(tmp_path: Path) -> None:
    """Its node says why, the others have theirs, and the next one comes again."""
    told = run_ranks(functools.partial(replica_ranks.saves, in_the_way="ba2"), 2, tmp_path, [2, 3])
    assert told[0] == [[("ba2", 0), ("ba3", 0)], [("ba3", 1)], ["", ""]]
    assert told[1][1] == [("ba3", 0)]
    assert "NotADirectoryError" in told[1][2][0]
    assert told[1][2][1] == ""
