"""Machines that give no more threads or no more memory: checkpoints are saved all the same, and nothing hangs."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from scarce import forbid_threads
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import Callback, ComposerModel, Logger, State, Trainer
from composerlite.checkpoint import Catalog, async_save_model_and_optim_state, load_model_and_optim_state
from composerlite.storage import Transfer, open_store

WIDE = 6 << 20  # 24 MB in one weight, and as much of momentum


class Model(ComposerModel):
    """One large weight."""

    def __init__(self, width: int, frozen: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.kept = nn.Parameter(torch.zeros(frozen), requires_grad=False)

    def forward(self, batch: Any) -> torch.Tensor:
        return batch[0] * self.weight[:4].sum()

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return ((outputs - batch[1]) ** 2).mean()


class At(Callback):
    """Calls a function at the end of a batch."""

    def __init__(self, batch: int, what: Any) -> None:
        self.batch, self.what = batch, what

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.batch:
            self.what()


def trainer(folder: Path, *callbacks: Callback, batches: int = 6, frozen: int = 0, **arguments: Any) -> Trainer:
    """A run that saves each batch."""
    inputs = torch.linspace(-1, 1, 24)[:, None]
    model = Model(WIDE, frozen)
    how: dict[str, Any] = {
        "save_folder": str(folder),
        "save_interval": "1ba",
        "save_filename": "ba{batch}.pt",
        "autoresume": True,
        **arguments,
    }
    return Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False),
        train_dataloader=DataLoader(TensorDataset(inputs, inputs), batch_size=4),
        max_duration=f"{batches}ba",
        run_name="run",
        callbacks=list(callbacks),
        progress_bar=False,
        **how,
    )


def batches(folder: Path) -> list[int]:
    """The batch counts of the committed checkpoints, each verified."""
    manifests = Catalog(folder).manifests()
    for manifest in manifests:
        Catalog(folder).verify(manifest)
    return [manifest.batch for manifest in manifests]


def a_run_without_threads(folder: str, when: str, options: str) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    torch.set_num_threads(1)
    how: dict[str, Any] = {
        "file": {},
        "packed": {"save_filename": "ba{batch}.pt.gz"},
        "ring": {"save_staging_bytes": 0},
    }[options]
    callbacks = [At(int(when), forbid_threads)] if int(when) else []
    if not callbacks:
        forbid_threads()
    with trainer(Path(folder) / "run", *callbacks, **how) as run:
        run.fit()


@pytest.mark.parametrize(("when", "options"), [("0", "file"), ("1", "packed"), ("4", "ring")])
def test_a_run_that_gets_no_more_threads_saves_every_checkpoint(tmp_path: Path, when: str, options: str) -> None:
    """The limit of processes is reached before the run, with its first save, or later: said once, nothing is lost."""
    done = run_forked(a_run_without_threads, str(tmp_path), when, options, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert batches(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    assert done.stderr.count("could not be started") == 1
    assert not list((tmp_path / "run").rglob("*.lease"))


def a_run_that_is_killed(folder: str) -> None:
    torch.set_num_threads(1)
    with trainer(Path(folder) / "run", At(4, functools.partial(os.kill, os.getpid(), signal.SIGKILL))) as run:
        run.fit()


@pytest.mark.parametrize("cached", [True, False])
def test_a_killed_run_that_gets_no_threads_resumes(tmp_path: Path, cached: bool) -> None:
    """The next launch reads the checkpoint in one thread, from the page cache or past it, and trains to the end."""
    assert run_forked(a_run_that_is_killed, str(tmp_path), cwd=tmp_path, timeout=120).returncode == -signal.SIGKILL
    before = Catalog(tmp_path / "run").manifests()
    for path in [] if cached else (tmp_path / "run").glob("*.pt"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    done = run_forked(a_run_without_threads, str(tmp_path), "0", "file", cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert batches(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    assert before
    assert Catalog(tmp_path / "run").manifests()[: len(before)] == before
    assert done.stderr.count("could not be started") == 1


def a_run_in_a_bucket(uri: str, how: str) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    torch.set_num_threads(1)
    callbacks: list[Callback] = []

    def die() -> None:
        with Transfer(open_store(uri)) as transfer:
            while not transfer.exists("run/ba2.pt"):
                time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

    if how == "dies":
        callbacks = [At(3, die)]
    elif how == "gets no threads":
        forbid_threads()
    with trainer(Path("unused"), *callbacks, save_folder=f"{uri}/run", save_interval="2ba") as run:
        run.fit()


def test_a_run_in_a_bucket_that_gets_no_threads_says_so_before_it_trains(tmp_path: Path, s3_server: Any) -> None:
    """It could not renew its lease. Nothing is lost: the launch after it resumes."""
    uri = f"s3://{s3_server.new_bucket()}"
    ends: list[Any] = []
    for how in ("dies", "gets no threads", "trains"):
        folder = tmp_path / how
        folder.mkdir()
        run: list[Any] = [a_run_in_a_bucket, uri, how]
        ends.append(run_forked(*run, cwd=folder, environment=s3_server.environment, timeout=200))
    killed, refused, resumed = ends
    assert killed.returncode == -signal.SIGKILL
    assert refused.returncode == 1
    assert "no thread can be started to renew the lease: raise the limit (ulimit -u)" in refused.stderr
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    names = [item["Key"] for item in s3_server.client().list_objects_v2(Bucket=uri.removeprefix("s3://"))["Contents"]]
    assert {"run/ba2.pt", "run/ba4.pt", "run/ba6.pt"} <= set(names)
    assert not [name for name in names if name.endswith(".lease")]


def functions_without_threads(folder: str) -> None:
    torch.set_num_threads(1)
    model = Model(WIDE)
    optimizer = torch.optim.Adam(model.parameters())
    forbid_threads()
    nn.init.constant_(model.weight, 3.0)
    future = async_save_model_and_optim_state(Path(folder) / "saved", model, optimizer)
    nn.init.constant_(model.weight, 4.0)
    future.result(60)


def test_functions_save_without_threads(tmp_path: Path) -> None:
    """Before they return, then."""
    done = run_forked(functions_without_threads, str(tmp_path), cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    model = Model(WIDE)
    load_model_and_optim_state(tmp_path / "saved", model, torch.optim.Adam(model.parameters()))
    assert float(model.weight.detach()[-1]) == 3.0


def forbid_memory(spare: int) -> None:
    """Only so much memory more, for good."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + spare
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def a_run_without_memory(folder: str, when: str) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX: else each thread that allocates takes 64 MB of addresses
    spare = 300 << 20  # for steps and writing; 430 MB are to be copied
    callbacks = [At(int(when), functools.partial(forbid_memory, spare))] if int(when) else []
    with trainer(Path(folder), *callbacks, batches=3, frozen=16 * WIDE) as run:
        if not callbacks:
            forbid_memory(spare + (50 << 20))
        run.fit()


@pytest.mark.parametrize("when", ["0", "1"])
def test_a_run_that_gets_no_memory_for_the_copy_saves_every_checkpoint(tmp_path: Path, when: str) -> None:
    """Training waits while they are written, as a warning says once."""
    done = run_forked(a_run_without_memory, str(tmp_path), when, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert batches(tmp_path) == [1, 2, 3]
    assert done.stderr.count("no memory for a copy") == 1
