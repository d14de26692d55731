"""Ranks are what the launcher says in the environment; devices are what the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from composerlite import dist
from composerlite.dist.connect import training_group_arguments
from composerlite.errors import ConfigError, LateRankError, RankError
from composerlite.testing.cluster import run_ranks, run_ranks_to_the_end
from composerlite.utils import dist as documented

LAUNCHER = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
RANKS = {
    "RANK": dist.get_global_rank,
    "WORLD_SIZE": dist.get_world_size,
    "LOCAL_RANK": dist.get_local_rank,
    "LOCAL_WORLD_SIZE": dist.get_local_world_size,
    "NODE_RANK": dist.get_node_rank,
    "GROUP_RANK": dist.get_node_rank,
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {**RANKS, **LAUNCHER}:
        monkeypatch.delenv(name, raising=False)


def test_a_process_by_itself_is_rank_0_of_1() -> None:
    """Without a launcher everything is said for one process."""
    assert [dist.get_global_rank(), dist.get_local_rank(), dist.get_node_rank()] == [0, 0, 0]
    assert [dist.get_world_size(), dist.get_local_world_size()] == [1, 1]


@pytest.mark.parametrize(("name", "rank"), RANKS.items())
def test_ranks_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch, name: str, rank: Callable[[], int]) -> None:
    """Each variable that torchrun sets is taken as it is."""
    monkeypatch.setenv(name, "3")
    assert rank() == 3


def test_the_rank_of_a_node_may_be_set_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """NODE_RANK, where it is set, says more than torchrun's GROUP_RANK."""
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.setenv("NODE_RANK", "1")
    assert dist.get_node_rank() == 1


@pytest.mark.parametrize("text", ["", "first", "1.5"])
@pytest.mark.parametrize(("name", "rank"), RANKS.items())
def test_a_rank_that_is_no_number_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, rank: Callable[[], int], text: str
) -> None:
    """The message names the variable and its text: nothing is guessed."""
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name}={text!r}"):
        rank()


def test_the_device_can_be_named() -> None:
    """By name in any case, or as torch has it."""
    cpu = torch.device("cpu")
    assert dist.get_device("cpu") == dist.get_device("CPU") == dist.get_device(cpu) == cpu


def test_the_device_is_the_gpu_if_there_is_one() -> None:
    """Without a name."""
    assert dist.get_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_an_unknown_device_lists_the_known_ones() -> None:
    """The message says which there are."""
    with pytest.raises(ConfigError, match=r"'tpu' is not known\. Known: cpu, cuda, gpu, mps, xpu"):
        dist.get_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["gpu", "cuda", "cuda:0"])
def test_a_gpu_that_is_not_there_is_an_error(name: str) -> None:
    """Before training, with the way out."""
    with pytest.raises(ConfigError, match=r"no CUDA device.*device='cpu'"):
        dist.get_device(name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_is_that_of_the_local_rank() -> None:
    """One process per device."""
    assert dist.get_device("gpu") == torch.device("cuda", 0)


@pytest.mark.parametrize(("local_rank", "visible", "number"), [(0, 8, 0), (3, 8, 3), (3, 1, 0), (0, 1, 0), (2, 2, 2)])
def test_a_process_that_sees_one_gpu_takes_it(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, visible: int, number: int
) -> None:
    """Slurm's ``--gpus-per-task`` shows each process its own, as number 0; else the number is the local rank."""
    gpus = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: visible)
    monkeypatch.setattr(torch, "get_device_module", lambda _: gpus)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    assert dist.get_device("gpu") == torch.device("cuda", number)


def test_one_process_connects_to_nobody() -> None:
    """initialize_dist and finalize_dist do nothing, as often as they are called."""
    for _ in range(2):
        dist.initialize_dist("cpu", 5)
        assert not dist.is_initialized()
    for _ in range(2):
        dist.finalize_dist()


def _group_of_one() -> tuple[int, int, bool]:
    for name in LAUNCHER:
        del os.environ[name]
    dist.initialize_dist("cpu", 5, min_world_size=1)
    tensor = torch.ones(1)
    torch.distributed.all_reduce(tensor)
    size = torch.distributed.get_world_size()
    dist.finalize_dist()
    return size, int(tensor.item()), dist.is_initialized()


def test_one_process_can_have_a_group() -> None:
    """For what needs one, without a launcher; it is gone afterwards."""
    assert run_ranks(_group_of_one, 1, dist_timeout=None) == [(1, 1, False)]


@pytest.mark.parametrize("missing", [name for name in LAUNCHER if name != "WORLD_SIZE"])
def test_half_an_environment_is_an_error(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """The message names what is missing, and the way out."""
    for name, text in LAUNCHER.items():
        if name != missing:
            monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=rf"but not {missing}\. Start the script with torchrun"):
        dist.initialize_dist("cpu", 5)


def test_a_rank_without_a_world_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also rank 0: it would train as if it were alone."""
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="sets RANK, but not WORLD_SIZE, LOCAL_RANK"):
        dist.initialize_dist("cpu", 5)


@pytest.mark.parametrize(("name", "text"), [("RANK", "2"), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "4")])
def test_an_environment_that_contradicts_itself_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """The message has all variables."""
    for key, value in {**LAUNCHER, name: text}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=rf"{name}={text}.* contradict each other: each rank must be below"):
        dist.initialize_dist("cpu", 5)


def test_ranks_that_were_not_connected_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of each going on by itself."""
    for name, text in LAUNCHER.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2, but the ranks are not connected: call initialize_dist\(\)"):
        dist.barrier()


def test_where_nobody_listens_the_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the timeout."""
    for name, text in {**LAUNCHER, "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(RankError, match=r"rank 1: no store at MASTER_ADDR:MASTER_PORT = 127\.0\.0\.1:1 "):
        dist.initialize_dist("cpu", 1)


def _start(late: int | None, bad_device: Collection[int], existing_group: bool) -> list[int]:
    rank = dist.get_global_rank()
    if rank == late:
        return []
    if existing_group:
        torch.distributed.init_process_group("gloo")
    dist.initialize_dist("tpu" if rank in bad_device else "cpu", 1.0 if late is not None else 20)
    gathered = dist.all_gather_object(rank)
    if existing_group:
        dist.finalize_dist()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return gathered


def test_a_rank_that_does_not_start_is_named() -> None:
    """By all that wait for it."""
    zero, one, two = run_ranks_to_the_end(_start, 3, 1, (), False, dist_timeout=None)
    assert one.error is None
    for outcome in (zero, two):
        assert isinstance(outcome.error, LateRankError)
        assert str(outcome.error) == "connecting the ranks: rank 1 has not arrived within 1 s."


def test_a_rank_that_cannot_start_stops_all() -> None:
    """All raise its error."""
    for outcome in run_ranks_to_the_end(_start, 2, None, (1,), False, dist_timeout=None):
        assert isinstance(outcome.error, ConfigError)
        assert str(outcome.error).startswith("device='tpu' is not known")


def test_a_group_that_exists_is_used() -> None:
    """And it is still there after finalize_dist: it is not ours."""
    assert run_ranks(_start, 2, None, (), True, dist_timeout=None) == [[0, 1]] * 2


_PROGRAM = """
import sys
from composerlite.utils import dist

dist.initialize_dist("cpu", 30)
told = dist.all_gather_object((dist.get_local_rank(), dist.get_node_rank(), dist.get_local_world_size()))
with open(f"{sys.argv[1]}/{dist.get_global_rank()}", "w") as file:
    file.write(repr(told))
dist.barrier()
"""


def test_torchrun_starts_ranks(tmp_path: Path) -> None:
    """As users do, and without a word about finalize_dist."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, str(program), str(tmp_path)], check=True, timeout=100)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["[(0, 0, 2), (1, 0, 2)]"] * 2


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sampler_gives_each_rank_its_share(shuffle: bool) -> None:
    """All samples, none twice where they go up evenly."""
    shares = [list(dist.get_sampler(range(10), shuffle=shuffle, num_replicas=2, rank=rank)) for rank in range(2)]
    assert [len(share) for share in shares] == [5, 5]
    assert sorted(shares[0] + shares[1]) == list(range(10))
    assert len(list(dist.get_sampler(range(10)))) == 10


def test_the_documented_path_has_all_names() -> None:
    """The same functions."""
    for name in documented.__all__:
        assert getattr(documented, name) is getattr(dist, name)


def test_nccl_waits_longer_than_our_own_group() -> None:
    """Its watchdog ends the process: the error that names the missing rank comes first. Gloo waits as long as we do."""
    waits = timedelta(seconds=300)
    device = torch.device("cuda:1")
    gpu = training_group_arguments(device, waits)
    assert gpu == {"backend": "cpu:gloo,cuda:nccl", "timeout": timedelta(seconds=900), "device_id": device}
    assert training_group_arguments(torch.device("cpu"), waits)["timeout"] == waits
