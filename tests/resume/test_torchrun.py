"""The same run in one process, under torchrun and Ray Train, and on two nodes with disks of their own: kills change
nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import digits_run
import pytest
import torch
from forked import Launcher, run_forked
from ports import reserved_port
from torch.distributed.run import main as torchrun

from composerlite.cli import main as composerlite
from composerlite.testing import run_ranks

ROOT = Path(__file__).parents[2]
INTERVAL, GLOBAL_BATCH = 4, 48
SECONDS = 200.0
CONFIG = """
seed: 17
max_duration: 14ba
run_name: digits
autoresume: true
dist_timeout: 10
model:
  name: digits_run:Net
train_loader:
  dataset:
    name: digits_run:images
    path: {images}
  batch_size: 24
  shuffle: true
optimizer:
  name: decoupled_adamw
  lr: 5.0e-3
callbacks:
  "digits_run:Diary":
    folder: {folder}
  "digits_run:DieAt":
    folder: {folder}
    rank: {rank}
    batch: {batch}
    asks: {asks}
parallelism_config: {parallelism}
save_folder: {checkpoints}
save_interval: 4ba
progress_bar: false
"""

Ended = list[tuple[int, str]]
"""How each process that was started ended, and what it and its ranks said."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of real images of digits."""
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = datasets.load_digits(return_X_y=True)
    path = tmp_path_factory.mktemp("digits") / "images.pt"
    torch.save([torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)], path)
    return path


def configured(
    folder: Path,
    images: Path,
    *,
    parallelism: str = "null",
    die: tuple[int, int] = (-1, -1),
    checkpoints: str = "",
    asks: bool = False,
) -> str:
    """The file that describes a run in ``folder``, in which a rank is killed when it has a batch done."""
    path = folder.with_name(f"{folder.name}-{die[0]}.yaml")
    (rank, batch), checkpoints = die, checkpoints or f"{folder}/checkpoints"
    text = CONFIG.format(
        folder=folder,
        images=images,
        parallelism=parallelism,
        rank=rank,
        batch=batch,
        checkpoints=checkpoints,
        asks=str(asks).lower(),
    )
    path.write_text(text)
    return str(path)


def run(*commands: Sequence[str], folders: Sequence[Path] = (), seconds: float = SECONDS, **variables: str) -> Ended:
    """Start processes at once, each in its folder if there are any, and wait until all have ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent), **variables}
    processes = [
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, folder in zip(commands, folders or [ROOT] * len(commands), strict=True)
    ]
    try:
        said = [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


@dataclass(frozen=True)
class Commands:
    """How to start an agent of torchrun, and what it starts. Neither need import torch first."""

    agent: list[str]
    program: list[str]


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Launcher(agent) as agents, Launcher(program) as programs:
        yield Commands(agents.command, ["--no-python", *programs.command])


def agent(*_: str) -> None:
    """``torchrun`` with the arguments of its process."""
    torchrun()


def program(*_: str) -> None:
    """``composerlite`` with the arguments of its process."""
    composerlite()


def two_nodes(commands: Commands, *configs: str, folders: Sequence[Path] = ()) -> Ended:
    """Two agents with a rank each, which trains as ``composerlite train`` does; relative paths are in ``folders``."""
    with reserved_port() as port:
        where = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
        nodes = [
            [*commands.agent, *where, "--node-rank", str(node), *commands.program, "train", config]
            for node, config in enumerate(configs)
        ]
        return run(*nodes, folders=folders)


def diary(folder: Path, rank: int) -> dict[str, str]:
    """What a rank wrote down: the images of each batch, and the digest at the end."""
    kept: dict[str, str] = {}
    for line in (folder / f"rank{rank}.txt").read_text().splitlines():
        batch, rest = line.split(" ", 1)
        assert kept.setdefault(batch, rest) == rest, "a batch was repeated with other images"
    return kept


def order(*diaries: dict[str, str]) -> list[str]:
    """The images in the order in which a run saw them."""
    batches = sorted(int(batch) for batch in diaries[0] if batch != "end")
    return [image for batch in batches for diary in diaries for image in diary[str(batch)].split()]


def check(ended: Ended) -> None:
    """All ended well."""
    assert [code for code, _ in ended] == [0] * len(ended), "\n".join(said for _, said in ended)


def check_death(ended: Ended) -> None:
    """Rank 1 was killed, and every process ended with an error that says so."""
    assert all(code != 0 for code, _ in ended), ended
    assert "composerlite: error: " in ended[0][1], ended[0][1]
    assert "rank 1" in ended[0][1]
    assert "SIGKILL" in ended[1][1]


def test_a_node_that_dies_changes_nothing(tmp_path: Path, images: Path, commands: Commands) -> None:
    """A rank on one of two nodes, whose disks are their own, is killed. The same commands go on from the newest
    checkpoint and end bit for bit as two ranks of one node do; one process goes on with the same images.
    """
    whole = tmp_path / "whole"
    run_ranks(digits_run.main, 2, configured(whole, images), dist_timeout=None)
    undisturbed = [diary(whole, rank) for rank in (0, 1)]

    nodes = [tmp_path / "node0", tmp_path / "node1"]
    check_death(two_nodes(commands, *(configured(node, images, die=(1, 10)) for node in nodes)))
    assert sorted((nodes[0] / "checkpoints").glob("*.pt"))
    assert not list(tmp_path.glob("node1/checkpoints/*.pt"))
    alone = tmp_path / "alone"
    shutil.copytree(nodes[0], alone, symlinks=True)
    (alone / "rank0.txt").unlink()

    check(two_nodes(commands, *(configured(node, images) for node in nodes)))
    assert [diary(node, rank) for rank, node in enumerate(nodes)] == undisturbed

    assert run_forked(digits_run.main, configured(alone, images), cwd=ROOT).returncode == 0
    seen, expected = order(diary(alone, 0)), order(*undisturbed)
    start = expected.index(seen[0])
    assert start in (INTERVAL * GLOBAL_BATCH, 2 * INTERVAL * GLOBAL_BATCH)
    length = min(len(seen), len(expected) - start)
    assert seen[:length] == expected[start : start + length]


def test_torchrun_restarts_a_run_whose_rank_is_killed(tmp_path: Path, images: Path, commands: Commands) -> None:
    """With --max-restarts nobody has to do anything: the run ends well, bit for bit as one that was left alone."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_ranks(digits_run.main, 2, configured(whole, images), dist_timeout=None)
    restarting = ["--nproc-per-node", "2", "--max-restarts", "1", "--standalone", *commands.program]
    check(run([*commands.agent, *restarting, "train", configured(cut, images, die=(1, 10))]))
    assert [diary(cut, rank) for rank in (0, 1)] == [diary(whole, rank) for rank in (0, 1)]


def test_ray_train_restarts_a_run_whose_worker_is_killed(tmp_path: Path, images: Path) -> None:
    """The recipe on a Ray cluster of one node: a worker gets SIGKILL, Ray Train starts both again, and the run ends bit
    for bit as one that was left alone."""
    if importlib.util.find_spec("ray") is None:  # importing it changes the environment
        pytest.skip("Ray is not installed: pip install 'ray[train]'")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_ranks(digits_run.main, 2, configured(whole, images), dist_timeout=None)
    config = configured(cut, images, die=(1, 10))
    recipe = [sys.executable, str(ROOT / "configs" / "recipes" / "ray_train.py")]
    ended = run(recipe, CONFIG=config, RANKS="2", RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="120")
    check(ended)
    assert (cut / "died").exists()
    assert "resumed run 'digits' from" in ended[0][1]
    assert [diary(cut, rank) for rank in (0, 1)] == [diary(whole, rank) for rank in (0, 1)]


@pytest.mark.timeout(1200)
def test_ray_train_saves_before_a_node_goes(tmp_path: Path, images: Path) -> None:
    """The recipe on a Ray cluster, one node of which is drained: the run saves, though no interval says so, and Ray
    Train starts it on another node, where it trains on from the next batch, bit for bit."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'ray[train]'")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, pace in ((whole, 0.0), (cut, 0.1)):
        config = Path(configured(folder, images))
        text = config.read_text().replace("14ba", "400ba").replace("save_interval: 4ba", "save_interval: 1000ba")
        config.write_text(text.replace("callbacks:\n", f'callbacks:\n  "digits_run:Paced":\n    seconds: {pace}\n'))
    run_ranks(digits_run.main, 2, str(config.with_name("whole--1.yaml")), dist_timeout=None)
    recipe = str(ROOT / "configs" / "recipes" / "ray_train.py")
    nodes = [sys.executable, str(Path(__file__).with_name("ray_nodes.py")), recipe, str(cut / "rank0.txt")]
    ended = run(nodes, seconds=900, CONFIG=str(config), RANKS="2", RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S="0.2")
    check(ended)
    assert "Ray drains a node: the run ends after batch" in ended[0][1], ended[0][1]
    assert "resumed run 'digits' from" in ended[0][1], ended[0][1]
    for rank in (0, 1):
        assert diary(cut, rank) == diary(whole, rank)
        assert len((cut / f"rank{rank}.txt").read_text().splitlines()) == 401, "batches were lost and repeated"


def test_torchrun_that_is_asked_to_end_leaves_a_checkpoint_for_any_number_of_ranks(
    tmp_path: Path, images: Path
) -> None:
    """SIGTERM to torchrun, which passes it on: all ranks end after the same batch, with a checkpoint of it. One process
    goes on with the next images, in the order of the run that was left alone."""
    whole, asked = tmp_path / "whole", tmp_path / "asked"
    run_ranks(digits_run.main, 2, configured(whole, images), dist_timeout=None)
    program = [str(Path(digits_run.__file__)), configured(asked, images, die=(0, 6), asks=True)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    ((code, said),) = run([*torchrun, *program])
    assert code != 0
    assert "kept" in said, said
    done = [len(diary(asked, rank)) for rank in (0, 1)]
    assert 6 <= done[0] == done[1] < 14  # torchrun passes the signal on while they train
    (asked / "rank1.txt").unlink()
    (asked / "rank0.txt").rename(asked / "before.txt")
    assert run_forked(digits_run.main, configured(asked, images), cwd=ROOT).returncode == 0
    expected = order(*[diary(whole, rank) for rank in (0, 1)])[done[0] * GLOBAL_BATCH :]
    seen = order(diary(asked, 0))
    length = min(len(seen), len(expected))
    assert seen[:length] == expected[:length]
    assert length > 0


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("disks", [("disk", "disk"), ("disk0", "disk1")])
def test_a_sharded_run_on_two_nodes_goes_on_after_a_kill(
    tmp_path: Path, images: Path, disks: tuple[str, str], commands: Commands
) -> None:
    """Two agents that share a folder, or have disks of their own; one rank is killed; the same commands end with the
    very same bits.
    """
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    sharded = "{fsdp: {}}"
    folders = [tmp_path / disk for disk in disks]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    run_ranks(digits_run.main, 2, configured(whole, images, parallelism=sharded), dist_timeout=None)
    dies = configured(cut, images, parallelism=sharded, die=(1, 10), checkpoints="checkpoints")
    check_death(two_nodes(commands, dies, dies, folders=folders))
    lives = configured(cut, images, parallelism=sharded, checkpoints="checkpoints")
    check(two_nodes(commands, lives, lives, folders=folders))
    for folder in folders:
        assert (folder / "checkpoints" / "latest" / ".metadata").exists()
    assert [diary(cut, rank) for rank in (0, 1)] == [diary(whole, rank) for rank in (0, 1)]
