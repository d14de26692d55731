"""The first save behind training, where memory for a copy would be new: it goes to the file as it was."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from torch import nn

from composerlite.checkpoint import (
    Checkpointer,
    async_save_model_and_optim_state,
    load_keys,
    load_model_and_optim_state,
)
from composerlite.storage import StreamWriter, verify_file
from composerlite.storage.addresses import address_of

LAYERS, SIZE = 4, 10 << 20  # 160 MB of weights, and as much of momentum
Save = Callable[[Path, nn.Module, torch.optim.Optimizer], Future[None]]


class Layers(nn.Module):
    """Weights in storages of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.rand(SIZE)) for _ in range(LAYERS)])


def trained() -> tuple[Layers, torch.optim.Optimizer]:
    """A model and its optimizer, which has its momentum."""
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for weight in model.parameters():
        weight.grad = torch.ones(1).expand(SIZE)
    optimizer.step()
    return model, optimizer


def by_function(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Future[None]:
    return async_save_model_and_optim_state(folder, model, optimizer)


def by_checkpointer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Future[None]:
    return Checkpointer().save_async(folder, (model, optimizer), {"kept": next(iter(model.parameters())).data[:1000]})


WAYS: dict[str, Save] = {"function": by_function, "checkpointer": by_checkpointer}


def saves_in_a_row(where: str, way: str, limit: str) -> None:
    """Three, of which each is followed at once by a change of everything; then all are loaded."""
    ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX: else each thread that allocates takes 64 MB of addresses
    torch.set_num_threads(1)
    model, optimizer = trained()
    if limit == "limited":  # no memory for a copy, ever
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), resource.RLIM_INFINITY))
    expected: list[float] = []
    futures: list[Future[None]] = []
    for number in range(3):
        expected.append(float(model.weights[-1].detach()[-1]))
        futures.append(WAYS[way](Path(where) / f"step{number}", model, optimizer))
        for kept in (*model.parameters(), *(one["momentum_buffer"] for one in optimizer.state.values())):
            kept.data.add_(1.0)
    for future in futures:
        future.result(100)
    if limit == "limited":
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for number, value in enumerate(expected):
        last = [weight.detach().clone() for weight in model.parameters()]
        folder = Path(where) / f"step{number}"
        if way == "function":
            load_model_and_optim_state(folder, model, optimizer)
        else:
            Checkpointer().load(folder, (model, optimizer))
        assert float(model.weights[-1].detach()[-1]) == value
        for weight, before_load in zip(model.parameters(), last, strict=True):
            difference = (before_load - weight.detach()).abs()
            assert float(difference.max() - difference.min()) < 1e-3  # the same everywhere: one moment


@pytest.mark.parametrize("limit", ["free", "limited"])
@pytest.mark.parametrize("way", WAYS)
def test_the_first_saves_of_a_process_are_those_of_the_call(tmp_path: Path, way: str, limit: str) -> None:
    """Whether there is memory for a copy by then or never."""
    done = run_forked(saves_in_a_row, str(tmp_path), way, limit, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("size", [0, 1000, 9 << 20, (40 << 20) + 5])
def test_a_ring_that_grows_writes_the_same_file(tmp_path: Path, size: int) -> None:
    """However many windows it takes, and in whichever order they come back."""
    data = bytearray(torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes())
    path = tmp_path / "file"
    path.touch()
    arguments: dict[str, Any] = {"ring_bytes": 2 << 20}
    with StreamWriter(path, size, **arguments) as writer:
        writer.may_grow = True
        if size:
            writer.copy(address_of(data), size)
        digest = writer.finish()
    assert path.read_bytes() == data
    verify_file(path, digest)


def test_an_interrupted_first_save_commits_nothing(tmp_path: Path) -> None:
    """Ctrl-C while the caller waits: the state may change from then on, so that what was read is not of one moment."""
    done = run_forked(an_interrupted_save, str(tmp_path), cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]


def an_interrupted_save(where: str) -> None:
    torch.set_num_threads(1)
    model, optimizer = trained()
    folder = Path(where) / "saved"
    for seconds in (0.05, 0.1, 0.2):
        before = float(model.weights[0].detach()[-1])
        signal.setitimer(signal.ITIMER_REAL, seconds)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            async_save_model_and_optim_state(folder, model, optimizer, save_overwrite=True)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for weight in model.parameters():
            weight.data.add_(1.0)
        for thread in threading.enumerate():
            if thread.name == "checkpoint-save":
                thread.join(60)
        if (folder / ".metadata").exists():
            (saved,) = load_keys(folder, ["model.weights.0"])
            first, last = float(saved[0]), float(saved[-1])
            assert last <= before
            now = model.weights[0].detach()
            assert abs((float(now[0]) - first) - (float(now[-1]) - last)) < 1e-3  # one moment
