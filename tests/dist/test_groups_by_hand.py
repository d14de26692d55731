"""A process group that exists says who the ranks are, whatever the environment does."""

from __future__ import annotations

import ast
import socket
from pathlib import Path
from typing import Any

import made_by_hand
import pytest
import torch

from composerlite.testing import run_ranks


def expected(rank: int, ranks: int) -> list[Any]:
    """What a rank tells that is one of so many on this machine."""
    who = {"rank": rank, "world_size": ranks, "local_rank": rank, "local_world_size": ranks, "node_rank": 0}
    return [who, who, 8 * ranks, (rank, ranks), [f"ba2-0of{ranks}-0of{ranks}-0.pt"]]


@pytest.mark.parametrize("kind", list(made_by_hand.ENVIRONMENTS))
def test_a_group_made_by_hand_says_who_the_ranks_are(tmp_path: Path, kind: str) -> None:
    """With no variables of a launcher, those of another job, half of them or none that can be read: the trainer trains
    on the data of all ranks, saves one checkpoint under the names of these ranks, and functions save and load."""
    assert run_ranks(made_by_hand.train, 2, tmp_path, kind, dist_timeout=None) == [expected(0, 2), expected(1, 2)]


def test_where_nobody_has_made_a_group_the_launcher_says_it(tmp_path: Path) -> None:
    """As before."""
    told = run_ranks(made_by_hand.train, 2, tmp_path, "of this job", False, dist_timeout=None)
    assert told == [expected(0, 2), expected(1, 2)]


def test_a_group_of_one_in_the_environment_of_many_is_one_process(tmp_path: Path) -> None:
    """A tool that is started within a job, and connects by itself."""
    assert run_ranks(made_by_hand.train, 1, tmp_path, "of another job", dist_timeout=None) == [expected(0, 1)]


def test_a_group_by_hand_over_several_machines_needs_the_variables(tmp_path: Path) -> None:
    """Nothing else says which ranks share a machine: all ranks raise."""
    for raised in run_ranks(made_by_hand.on_two_machines, 2, tmp_path, dist_timeout=None):
        assert raised.startswith("the ranks of the process group are on several machines, such as node")
        assert "Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun does." in raised


def test_processes_of_spawn_train_together(tmp_path: Path) -> None:
    """``torch.multiprocessing.spawn`` sets no variable at all."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torch.multiprocessing.spawn(made_by_hand.spawned, args=(2, str(tmp_path), port), nprocs=2)
    told = [ast.literal_eval((tmp_path / f"told{rank}").read_text()) for rank in range(2)]
    assert told == [expected(0, 2), expected(1, 2)]
