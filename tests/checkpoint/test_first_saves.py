"""The first saves of a run and of a process: synchronous until memory for a copy is ready."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from forked import run_forked
from parts import Saves, new_state, temporaries
from torch import nn

from composerlite.checkpoint import (
    Catalog,
    Checkpointer,
    async_save_model_and_optim_state,
    load_keys,
    load_model_and_optim_state,
    read_checkpoint,
)
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.checkpoint.save.snapshot import StagingMemory, shared_staging
from composerlite.core import State
from composerlite.errors import SaveError

LAYERS, SIZE = 4, 10 << 20  # 160 MB of weights, and as much of momentum
Save = Callable[[Path, nn.Module, torch.optim.Optimizer], Future[None]]


class Layers(nn.Module):
    """Weights in storages of their own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.rand(size)) for _ in range(LAYERS)])


def trained(size: int = SIZE) -> tuple[Layers, torch.optim.Optimizer]:
    """A model and its optimizer, which has its momentum."""
    model = Layers(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for weight in model.parameters():
        weight.grad = torch.ones(1).expand(size)
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


def counted_copies(where: str, way: str) -> None:
    """The first save of a process, and one after memory was got ready."""
    copies: list[bool] = []
    take = StagingMemory.take

    def counted(*arguments: Any, **keywords: Any) -> Any:
        if (snapshot := take(*arguments, **keywords)) is not None:
            copies.append(True)
        return snapshot

    StagingMemory.take = counted
    model, optimizer = trained(SIZE // 8)
    for number, expected in enumerate((0, 1)):
        WAYS[way](Path(where) / f"step{number}", model, optimizer).result(100)
        assert shared_staging.wait_until_prepared()
        assert len(copies) == expected


@pytest.mark.parametrize("way", WAYS)
def test_the_first_save_of_a_function_is_synchronous(tmp_path: Path, way: str) -> None:
    """The state itself is written while the caller waits. Memory is prepared meanwhile: the next save copies."""
    done = run_forked(counted_copies, str(tmp_path), way, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]


def test_an_interrupted_first_save_commits_nothing(tmp_path: Path) -> None:
    """Ctrl-C while the caller waits: the state may change from then on, so that what was read is not of one moment."""
    done = run_forked(an_interrupted_save, str(tmp_path), cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("way", ["functions", "checkpointer", "saves"])
def test_a_process_that_is_forked_during_a_save_saves_its_own(tmp_path: Path, way: str) -> None:
    """It is told that the save is its parent's, trains on, and saves; the parent's checkpoint is complete."""
    done = run_forked(forks_during_a_save, str(tmp_path), way, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]


def forks_during_a_save(where: str, way: str) -> None:
    torch.set_num_threads(1)
    state = training("file", SIZE // 2)
    (optimizer,) = state.optimizers
    folder, checkpointer, saves = Path(where), Checkpointer(), Saves()

    def save(name: str) -> Callable[[], object]:
        if way == "saves":
            return saves.save(SaveRequest(state=state, catalog=Catalog(folder), template=name)).wait
        if way == "functions":
            return async_save_model_and_optim_state(folder / name, state.model, optimizer).result
        return checkpointer.save_async(folder / name, state.model, {}).result

    for name in ("first.pt", "second.pt"):
        save(name)()
        optimizer.step()
    result = save("parent.pt")
    if (child := os.fork()) == 0:
        with pytest.raises(SaveError, match=r"parent\.pt': the process that this one was forked from saves it"):
            result()
        optimizer.step()
        save("child.pt")()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    result()
    assert {"first.pt", "second.pt", "parent.pt", "child.pt"} <= {path.name for path in folder.iterdir()}


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


class Sharded(State):
    """One rank of FSDP, as far as its checkpoints are concerned."""

    sharding = "sharded"


TEMPLATES = {"file": "ba{batch}.pt", "tar": "ba{batch}.tar", "sharded": "ba{batch}"}


def training(form: str, size: int) -> State:
    """The state of a run that saves checkpoints of such a form."""
    state = new_state(1)
    if form == "sharded":
        state.__class__ = Sharded
    state.model, optimizer = trained(size)
    state.optimizers = [optimizer]
    return state


def change(state: State) -> None:
    """Write to everything that a checkpoint holds, as the optimizer's step does, and at once."""
    for kept in (*state.model.parameters(), *(one["momentum_buffer"] for one in state.optimizers[0].state.values())):
        kept.data.add_(1.0)
    state.timestamp = state.timestamp.to_next_batch(4)


def assert_holds(path: Path, state: State, value: float) -> None:
    """Fail unless the weights in ``path`` are those of ``state``, at the moment at which the last one was ``value``."""
    names = [name for name, _ in state.model.named_parameters()]
    if path.is_dir():
        found = [*load_keys(path, [f"state.model.{name}" for name in names])]
    else:
        found = [read_checkpoint(path)["state"]["model"][name] for name in names]
    assert float(found[-1][-1]) == value
    for saved, weight in zip(found, state.model.parameters(), strict=True):
        difference = weight.detach() - saved
        assert float(difference.max() - difference.min()) < 1e-3  # the same everywhere: one moment


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("prepares", [False, True], ids=["unprepared", "being prepared"])
def test_the_first_save_of_a_run_waits_for_no_memory(tmp_path: Path, form: str, prepares: bool) -> None:
    """It is synchronous, also while memory is being prepared; the next are copied, all are of one moment."""
    state, saves = training(form, SIZE // 8), Saves()
    expected: dict[Path, float] = {}
    copied: list[bool] = []
    try:
        if prepares:
            saves.prepare(SaveRequest(state=state, catalog=Catalog(tmp_path), template=TEMPLATES["file"]))
        for _ in range(3):
            value = float([*state.model.parameters()][-1].detach()[-1])
            pending = saves.save(SaveRequest(state=state, catalog=Catalog(tmp_path), template=TEMPLATES[form]))
            change(state)
            report = pending.wait(100)
            expected[report.path] = value
            copied.append(report.seconds["snapshot"] > 0)
            assert saves.prepared()
    finally:
        saves.close()
    assert copied[1:] == [True, True]
    assert prepares or not copied[0]  # where memory was got ready quickly, the first is a copy, too
    for path, value in expected.items():
        assert_holds(path, state, value)
    assert temporaries(tmp_path) == []


def test_memory_is_prepared_again_after_the_end(tmp_path: Path) -> None:
    """A save after :meth:`Saves.close` copies, too, if memory was prepared again."""
    state, saves = training("file", SIZE // 8), Saves()
    for _ in range(2):
        saves.prepare(SaveRequest(state=state, catalog=Catalog(tmp_path), template=TEMPLATES["file"]))
        assert saves.prepared()
        pending = saves.save(SaveRequest(state=state, catalog=Catalog(tmp_path), template=TEMPLATES["file"]))
        saves.close()
        assert pending.wait(100).seconds["snapshot"] > 0
        change(state)


@pytest.mark.parametrize("form", TEMPLATES)
def test_an_interrupted_first_save_of_a_run_commits_one_moment_or_nothing(tmp_path: Path, form: str) -> None:
    """Ctrl-C while training waits for its first save, at some point of it; another run goes on in the same process."""
    done = run_forked(interrupted_saves_of_runs, str(tmp_path), form, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]


def interrupted_saves_of_runs(where: str, form: str) -> None:
    torch.set_num_threads(1)
    for number, seconds in enumerate((0.02, 0.05, 0.1, 0.2)):
        state, saves = training(form, SIZE // 2), Saves()
        folder = Path(where) / f"run{number}"
        value = float([*state.model.parameters()][-1].detach()[-1])
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        with contextlib.suppress(KeyboardInterrupt):
            saves.save(SaveRequest(state=state, catalog=Catalog(folder), template=TEMPLATES[form]))
        signal.setitimer(signal.ITIMER_REAL, 0)
        change(state)
        saves.close()
        for found in Catalog(folder).manifests():
            assert_holds(folder / found.name, state, value)
        Catalog(folder).place.sweep(timedelta())  # an interrupt may come right after a temporary is made
        assert temporaries(folder) == []


@pytest.mark.timeout(200)
@pytest.mark.parametrize("form", ["file", "sharded"])
def test_a_save_that_is_interrupted_at_any_call_while_it_is_started_keeps_nobody_waiting(
    tmp_path: Path, form: str
) -> None:
    """Ctrl-C from where what is written is known until the call returns: the run can be closed, and saved again."""
    state, calls, came = training(form, 1000), 0, True
    while came:
        folder, saves = tmp_path / f"{form}{calls}", Saves()
        request = SaveRequest(state=state, catalog=Catalog(folder), template=TEMPLATES[form])
        came = interrupt(partial(saves.save, request), calls, after="SaveTask._start")
        saves.close()
        saves.save(replace(request, overwrite=True)).wait(100)
        saves.close()
        Catalog(folder).place.sweep(timedelta())
        assert [found.name for found in Catalog(folder).manifests()] == [TEMPLATES[form].format(batch=1)]
        assert temporaries(folder) == []
        calls += 1
    assert calls > 10


def interrupt(act: Callable[[], object], number: int, *, after: str) -> bool:
    """Interrupt ``act`` at call ``number`` of a Python function, counted from ``after``; return whether it came."""
    seen, ended = -1, False

    def see(frame: FrameType, event: str, _: object) -> None:
        nonlocal seen
        if event == "call" and not ended and (seen >= 0 or frame.f_code.co_qualname == after):
            seen += 1
            if seen == number:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(see)
    try:
        act()
        ended = True
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False
