"""torchrun with a number of nodes that changes: the others go on without a lost one, and take a new one in."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import elastic_run
import psutil
import pytest
import torch
from forked import Launcher
from torch.distributed import TCPStore
from torch.distributed.run import main as torchrun

from composerlite.testing import run_ranks

SECONDS = 400.0
SOAK = 3600.0
"""An agent lives for as long as all the losses of a test take."""


def agent(*_: str) -> None:
    """``torchrun`` with the arguments of its process."""
    torchrun()


@dataclass(frozen=True)
class Cluster:
    """Agents of torchrun, each a node, that meet at a store which none of them holds: any of them may die."""

    folder: Path
    agents: list[str]
    program: list[str]
    nodes: dict[str, subprocess.Popen[str]]
    store: TCPStore
    memory: list[str]
    silence: int
    """Seconds after which an agent that says nothing is lost to the others; a busy one, too: few where few are lost."""

    def start(self, name: str) -> None:
        here = self.folder / name
        (here / "memory").mkdir(parents=True)
        settings = f"is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt={self.silence}"
        where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.store.port}", f"--rdzv-conf={settings}"]
        how = ["--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=50", "--monitor-interval=0.2", "--rdzv-id=run"]
        what = [*self.agents, *where, *how, "--local-addr=127.0.0.1", "--no-python", *self.program]
        with (self.folder / f"{name}.log").open("w") as log:
            self.nodes[name] = subprocess.Popen(
                [*what, str(self.folder), "100000", *self.memory],
                cwd=here,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def lose(self, name: str) -> None:
        """SIGKILL to all processes of a node, the agent's client, whose end ends the agent, and its rank; and the loss
        of its memory."""
        node = self.nodes.pop(name)
        for process in _processes_of(self.folder / f"{name}.log"):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        node.kill()
        node.wait(SECONDS)
        shutil.rmtree(self.folder / name)
        (self.folder / f"{name}.log").rename(self.folder / f"{name}-{time.monotonic_ns()}.log")

    def journal(self) -> list[dict[str, Any]]:
        path = self.folder / "journal.txt"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_until(self, what: Callable[[list[dict[str, Any]]], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not what(self.journal()):
            logs = "\n".join(path.read_text()[-3000:] for path in self.folder.glob("*.log"))
            assert time.monotonic() < end, f"not within {SECONDS:g} s:\n{logs}"
            assert all(node.poll() in (None, 0) for node in self.nodes.values()), logs
            time.sleep(0.02)


def _processes_of(log: Path) -> list[psutil.Process]:
    """The processes that write to ``log``: those of one node."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and Path(f"/proc/{process.pid}/fd/1").resolve() == log:
                found.append(process)
    return found


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = datasets.load_digits(return_X_y=True)
    pixels = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    torch.save([pixels, torch.tensor(labels)], tmp_path / "images.pt")
    folder = tmp_path / "run"
    folder.mkdir()
    silence = 10 if request.getfixturevalue("losses") == 1 else 15
    memory = ["memory"] if request.param == "memory" else []
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with Launcher(agent, SOAK) as agents, Launcher(elastic_run.main, SOAK) as programs, ExitStack() as stack:
        made = Cluster(folder, agents.command, programs.command, {}, store, memory, silence)
        stack.callback(lambda: [made.lose(name) for name in list(made.nodes)])
        yield made


def attempts(journal: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """From which batch on, and on how many ranks."""
    return [(line["begin"], line["ranks"]) for line in journal if "begin" in line]


def end_of(journal: list[dict[str, Any]]) -> tuple[int, str]:
    """The samples at the end of a run, and the digest of its state."""
    (end,) = [(line["end"], line["digest"]) for line in journal if "end" in line][-1:]
    return end


def images(journal: list[dict[str, Any]]) -> list[list[str]]:
    """The images of each batch, which attempts that repeat it must have in the same order."""
    seen: dict[int, list[str]] = {}
    for line in journal:
        if "batch" in line:
            assert seen.setdefault(line["batch"], line["images"]) == line["images"], "a batch was repeated with others"
    assert list(seen) == list(range(1, len(seen) + 1)), "a batch was left out"
    return list(seen.values())


def lose_and_replace(cluster: Cluster, losses: int) -> None:
    """Lose nodes, one after the other, that have trained a little, each replaced by another; then let the run end.

    Where checkpoints are in memory it is always the node of rank 0, which writes them.
    """
    draw = random.Random(losses)
    for number in range(3):
        cluster.start(f"node{number}")
    for number in range(losses):
        cluster.wait_until(trained(draw.randrange(4, 12), ranks=3))
        first = [line["node"] for line in cluster.journal() if "begin" in line][-1]
        cluster.lose(first if cluster.memory else draw.choice(sorted(cluster.nodes)))
        cluster.wait_until(trained(draw.randrange(2, 12), ranks=2))
        cluster.start(f"node{number + 3}")
    cluster.wait_until(trained(3, ranks=3))
    (cluster.folder / "enough").touch()
    cluster.wait_until(lambda journal: any("end" in line for line in journal))
    for node in cluster.nodes.values():
        assert node.wait(SECONDS) == 0


def trained(batches: int, ranks: int) -> Callable[[list[dict[str, Any]]], bool]:
    """Whether the newest attempt has so many ranks and has trained so many batches."""

    def is_so(journal: list[dict[str, Any]]) -> bool:
        count = 0
        for line in journal:
            count = 0 if "begin" in line else count + 1
        return count >= batches and attempts(journal)[-1][1] == ranks

    return is_so


def check(cluster: Cluster) -> None:
    """The batches and the state are those of an undisturbed run on those numbers of ranks, one after the other."""
    journal = cluster.journal()
    folder = cluster.folder.with_name("undisturbed")
    folder.mkdir()
    samples, digest = end_of(journal)
    stages = attempts(journal)
    ends = [*(begin for begin, _ in stages[1:]), samples // elastic_run.GLOBAL_BATCH]
    for (begin, ranks), end in zip(stages, ends, strict=True):
        if end > begin:
            run_ranks(elastic_run.main, ranks, str(folder), str(end), dist_timeout=None)
    undisturbed = [json.loads(line) for line in (folder / "journal.txt").read_text().splitlines()]
    assert images(undisturbed) == images(journal)
    assert end_of(undisturbed) == (samples, digest)


@pytest.mark.timeout(SOAK)
@pytest.mark.parametrize(
    ("cluster", "losses"),
    [("memory", 1), *(pytest.param(kept, 20, marks=pytest.mark.soak) for kept in ("disk", "memory"))],
    indirect=["cluster"],
)
def test_a_run_goes_on_without_a_node_that_is_lost_and_takes_another_in(cluster: Cluster, losses: int) -> None:
    """Nobody launches it again: the same samples in the same order, and at the end the state of a run that had those
    numbers of ranks by intention, bit for bit. With checkpoints in memory only, it goes on from the replica of that of
    the lost node.
    """
    lose_and_replace(cluster, losses)
    stages = attempts(cluster.journal())
    ranks = [ranks for _, ranks in stages]
    changes = [ranks[0], *(new for old, new in pairwise(ranks) if new != old)]
    assert changes[-2 * losses - 1 :] == [3, *([2, 3] * losses)], "a loss, or a new node, was not noticed"
    assert all(begin > 0 for (_, before), (begin, ranks) in pairwise(stages) if ranks < before)
    check(cluster)
