"""Checkpoints in memory that survive their node: another one has a replica, and the run resumes from it."""

from __future__ import annotations

import functools
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import preempted_ranks
import pytest
import torch
from small_run import Cell, build

from composerlite.errors import ConfigError
from composerlite.testing import run_ranks, run_ranks_to_the_end

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no folder in memory")


@pytest.fixture
def nodes() -> Iterator[Path]:
    """A folder with the memory of each of several nodes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], list[dict[str, Any]]]:
    """What each rank of the run says that nothing interrupts, of DDP or FSDP."""

    @functools.cache
    def run(fsdp: bool) -> list[dict[str, Any]]:
        train = functools.partial(preempted_ranks.train, fsdp=fsdp)
        return run_ranks(train, 2, tmp_path_factory.mktemp("whole"), None, dist_timeout=None)

    return run


def replicated(nodes: Path, *, fsdp: bool = False, replication: float = 1.0, waits: bool = True) -> Callable[..., Any]:
    return functools.partial(
        preempted_ranks.train,
        memory="memory",
        nodes=nodes,
        replication=replication,
        waits=waits,
        fsdp=fsdp,
        signalled=signal.SIGKILL,
    )


def lose(nodes: Path, lost: int, *, renumbered: bool) -> None:
    """The memory of one of two nodes is gone; ``renumbered``: a new node has the rank of the other one, and that one
    the rank of the lost one, as torchrun may give them."""
    shutil.rmtree(nodes / f"node{lost}")
    if renumbered:
        (nodes / f"node{1 - lost}").rename(nodes / f"node{lost}")


@pytest.mark.parametrize(
    ("lost", "fsdp", "renumbered"),
    [
        pytest.param(0, False, False, marks=pytest.mark.soak),
        (0, False, True),
        (0, True, False),
        pytest.param(0, True, True, marks=pytest.mark.soak),
        pytest.param(1, True, False, marks=pytest.mark.soak),
    ],
)
def test_a_lost_node_costs_what_was_not_replicated_yet(
    tmp_path: Path, nodes: Path, uninterrupted: Any, lost: int, fsdp: bool, renumbered: bool
) -> None:
    """A node is gone with its memory: the run resumes from the other's, newer than the disk, to the same end, bit for
    bit, also where the other one has the rank of the lost one now. Then the memory of all nodes is free."""
    died = run_ranks_to_the_end(
        replicated(nodes, fsdp=fsdp), 2, tmp_path / "run", (lost, "batch_end", 6, 1), dist_timeout=None
    )
    assert "was killed by SIGKILL" in str(died[lost].error)
    lose(nodes, lost, renumbered=renumbered)
    ended = run_ranks(replicated(nodes, fsdp=fsdp), 2, tmp_path / "run", None, dist_timeout=None)
    for rank, alone in zip(ended, uninterrupted(fsdp), strict=True):
        assert rank["first"] == 4, "the disk has batch 3"
        assert rank["seen"] == alone["seen"][4:]
        assert all(torch.equal(rank["weights"][name], tensor) for name, tensor in alone["weights"].items())
    assert [*nodes.rglob("*.json"), *nodes.rglob("*.pt"), *nodes.rglob("*.distcp")] == []


@pytest.mark.soak
def test_fewer_nodes_resume_from_the_replica_of_the_lost_one(tmp_path: Path, nodes: Path) -> None:
    """Two of three nodes resume at once, bit for bit as two ranks do that three ranks have left a checkpoint for."""
    three = functools.partial(preempted_ranks.train, fsdp=True, last=4)
    run_ranks(three, 3, tmp_path / "reference", None, dist_timeout=None)
    two = run_ranks(
        functools.partial(preempted_ranks.train, fsdp=True), 2, tmp_path / "reference", None, dist_timeout=None
    )
    train = replicated(nodes, fsdp=True)
    died = run_ranks_to_the_end(train, 3, tmp_path / "run", (1, "batch_end", 6, 1), dist_timeout=None)
    assert "was killed by SIGKILL" in str(died[1].error)
    shutil.rmtree(nodes / "node1")
    (nodes / "node2").rename(nodes / "node1")
    for rank, alone in zip(run_ranks(train, 2, tmp_path / "run", None, dist_timeout=None), two, strict=True):
        assert (rank["first"], alone["first"]) == (4, 4)
        assert rank["seen"] == alone["seen"]
        assert all(torch.equal(rank["weights"][name], tensor) for name, tensor in alone["weights"].items())


def test_training_does_not_wait_for_a_slow_network(tmp_path: Path, nodes: Path) -> None:
    """With less bandwidth than a replica takes in the whole run, each batch but the first is trained meanwhile."""
    for rank in run_ranks(replicated(nodes, replication=1e-6, waits=False), 2, tmp_path, None, dist_timeout=None):
        assert rank["last"] == preempted_ranks.LAST
        assert rank["meanwhile"] >= preempted_ranks.LAST - 3


@pytest.mark.parametrize("seed", [11, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(100, 120))])
def test_nodes_are_lost_at_random(tmp_path: Path, nodes: Path, uninterrupted: Any, seed: int) -> None:
    """A process is killed at a random moment, whatever is being replicated then, and a random node loses its memory:
    the run ends bit for bit as without that."""
    chosen = random.Random(seed)
    fsdp, lost = chosen.random() < 0.5, chosen.randrange(2)
    event = chosen.choice(["batch_start", "after_forward", "after_backward", "batch_end", "batch_checkpoint"])
    at = (chosen.randrange(2), event, chosen.randrange(1, preempted_ranks.LAST), 1)
    train = replicated(nodes, fsdp=fsdp, replication=chosen.choice([1.0, 1e-3, 1e-4]), waits=False)
    died = run_ranks_to_the_end(train, 2, tmp_path, at, dist_timeout=15)  # a save waits so long for a killed rank
    assert "was killed by SIGKILL" in str(died[at[0]].error)
    lose(nodes, lost, renumbered=chosen.random() < 0.5)
    for rank, alone in zip(run_ranks(train, 2, tmp_path, None, dist_timeout=None), uninterrupted(fsdp), strict=True):
        assert rank["seen"] == alone["seen"][rank["first"] :]
        assert all(torch.equal(rank["weights"][name], tensor) for name, tensor in alone["weights"].items())


def test_what_would_be_of_no_use_is_refused(tmp_path: Path) -> None:
    """A rate that is none, and replicas of checkpoints that are not made, are errors before training."""
    wanted: dict[str, Any] = {"save_folder": tmp_path, "autoresume": True, "run_name": "run"}
    with pytest.raises(ConfigError, match=r"save_memory_replication=0: expected more than zero"):
        build(Cell(), save_memory_interval="1ba", save_memory_replication=0, **wanted)
    with pytest.raises(ConfigError, match=r"save_memory_replication=1.0.*give save_memory_interval"):
        build(Cell(), save_memory_replication=1.0, **wanted)
