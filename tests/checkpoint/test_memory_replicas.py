"""Replicas of checkpoints in memory: each node has that of another, and what a node has lost is brought to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint import replica_ranks
from checkpoint.replica_ranks import file_of, own, replicas

from composerlite.checkpoint import Catalog
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.testing import run_ranks


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
