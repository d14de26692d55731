"""Copies in memory: the file holds the moment of the save, however large the memory is."""

from __future__ import annotations

import ctypes
import io
import logging
import math
import os
import subprocess
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from parts import Remember, Saves, new_state, temporaries, value_in
from torch import nn

from composerlite.checkpoint import (
    Catalog,
    Checkpointer,
    async_save_model_and_optim_state,
    load_keys,
    load_model_and_optim_state,
    read_checkpoint,
    safe_torch_load,
)
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.checkpoint.save.snapshot import StagingMemory
from composerlite.core import State
from composerlite.errors import SaveError
from composerlite.storage import FileDigest, HostMemory
from composerlite.storage.disk.memory import available_memory

MIB = 1 << 20
STAGED = 40 * MIB


@pytest.fixture
def staging() -> Iterator[StagingMemory]:
    """Closed at the end."""
    staging = StagingMemory()
    yield staging
    staging.close()


def prepared(staging: StagingMemory, size: int = STAGED) -> HostMemory:
    """Memory for a copy of ``size`` bytes, lent."""
    staging.prepare(size)
    assert staging.wait_until_prepared(60)
    memory = staging.reserve(size)
    assert memory is not None
    return memory


def test_a_limit_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """No memory beyond it, and no warning: the user has chosen it."""
    staging = StagingMemory(MIB)
    with caplog.at_level(logging.WARNING):
        staging.prepare(STAGED)
        assert staging.reserve(STAGED) is None
        assert staging.reserve(2 * MIB) is None
    assert staging.reserve(MIB) is not None
    assert caplog.text == ""


def test_too_little_memory_is_said_once(staging: StagingMemory, caplog: pytest.LogCaptureFixture) -> None:
    """With the way to choose another size."""
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            staging.prepare(available_memory())
            assert staging.reserve(available_memory()) is None
    assert caplog.text.count("save_staging_bytes limits the size of the copy") == 1


LAYERS, SIZE = 6, 1 << 19  # 12 MB of weights, and as much of momentum
Writer = Callable[[list[nn.Parameter], State], None]


class Layers(nn.Module):
    """Weights in storages of their own."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.rand(size)) for _ in range(LAYERS)])


def state_at(batch: int, size: int = SIZE) -> State:
    """Of :class:`Layers`, whose optimizer has its momentum."""
    state = new_state(batch)
    state.model = Layers(size)
    state.optimizers = [torch.optim.SGD(state.model.parameters(), lr=0.1, momentum=0.9)]
    step(state)
    return state


def step(state: State) -> None:
    """An optimizer step: every weight becomes another."""
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizers[0].step()
    state.timestamp = state.timestamp.to_next_batch(4)


def nobody(weights: list[nn.Parameter], state: State) -> None:
    """Nothing is changed."""


def in_place(weights: list[nn.Parameter], state: State) -> None:
    with torch.no_grad():
        for weight in weights:
            weight.mul_(0.5)


def data_dense(weights: list[nn.Parameter], state: State) -> None:
    for weight in weights:
        weight.data.clamp_(-0.01, 0.01)


def storage_set(weights: list[nn.Parameter], state: State) -> None:
    with torch.no_grad():
        for weight in weights:
            weight.set_(torch.zeros(SIZE))  # pyright: ignore[reportArgumentType]


def numpy_view(weights: list[nn.Parameter], state: State) -> None:
    for weight in weights:
        weight.detach().numpy()[SIZE // 3 :] = 7.0


def momentum(weights: list[nn.Parameter], state: State) -> None:
    for kept in state.optimizers[0].state.values():
        kept["momentum_buffer"].data.zero_()


WRITERS: list[Writer] = [nobody, in_place, data_dense, storage_set, numpy_view, momentum]


def bytes_of(state: State) -> dict[str, torch.Tensor]:
    """Copies of the weights and of what the optimizer keeps."""
    kept = state.optimizers[0].state
    weights = dict(state.model.named_parameters())
    return {
        **{f"weight {name}": weight.detach().clone() for name, weight in weights.items()},
        **{f"momentum {name}": kept[weight]["momentum_buffer"].clone() for name, weight in weights.items()},
    }


def bytes_in(path: Path) -> dict[str, torch.Tensor]:
    """The same of a checkpoint."""
    saved = safe_torch_load(path)["state"]
    (optimizer,) = saved["optimizers"].values()
    return {
        **{f"weight {name}": weight for name, weight in saved["model"].items()},
        **{f"momentum {name}": one["momentum_buffer"] for name, one in optimizer["state"].items()},
    }


def save_as_it_is(saves: Saves, state: State, folder: Path, way: str, write: Writer) -> None:
    """Save, let somebody write, step: every byte of the checkpoint must be that of the save."""
    expected = bytes_of(state)
    pending = saves.save(SaveRequest(state=state, catalog=Catalog(folder), template="ba{batch}.pt"), way)
    write([*state.model.parameters()], state)
    step(state)
    found = bytes_in(pending.wait().path)
    assert found.keys() == expected.keys()
    torn = [key for key, value in expected.items() if not torch.equal(found[key], value)]
    assert not torn, f"{way}, {write.__name__}: a checkpoint of two moments was committed: {torn}"


@pytest.fixture
def saves() -> Iterator[Saves]:
    """Closed at the end."""
    saves = Saves()
    yield saves
    saves.close()


@pytest.mark.parametrize("way", ["async", "sync"])
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_no_checkpoint_of_two_moments_is_committed(saves: Saves, tmp_path: Path, write: Writer, way: str) -> None:
    """Saves that are each followed at once by a write, without a copy and with one."""
    state = state_at(0)
    for _ in range(3):
        save_as_it_is(saves, state, tmp_path, way, write)
        assert saves.prepared()
    assert temporaries(tmp_path) == []


def a_run_whose_weights_are_replaced(where: str) -> None:
    folder = Path(where)
    saves = Saves()
    size = 10 << 20  # what is that large, malloc gives back to the system at once
    state = state_at(0, size)
    for batch in range(12):
        pending = saves.save(SaveRequest(state=state, catalog=Catalog(folder), template="ba{batch}.pt"))
        for weight in state.model.parameters() if batch else ():
            weight.data = torch.ones(1)  # nothing of the user's refers to the memory that was there
        for weight in state.model.parameters():
            weight.data = torch.full((size,), float(batch))
        step(state)
        pending.wait()
    saves.close()


def test_a_model_that_replaces_its_weights_does_not_kill_the_process(tmp_path: Path) -> None:
    """``p.data = new`` right after a save frees memory that is being copied: it must stay until it is copied."""
    done = run_forked(a_run_whose_weights_are_replaced, str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(Catalog(tmp_path).manifests()) == 12


LARGE_LAYERS, LARGE = 4, 2 << 20  # 32 MB of weights, and as much of momentum
Save = Callable[[Path, nn.Module, torch.optim.Optimizer], Future[None]]


class LargeLayers(nn.Module):
    """Weights in storages of their own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.rand(size)) for _ in range(LARGE_LAYERS)])


def trained(size: int = LARGE) -> tuple[LargeLayers, torch.optim.Optimizer]:
    """A model and its optimizer, which has its momentum."""
    model = LargeLayers(size)
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


def saves_in_a_row(where: str, way: str) -> None:
    """Three, of which each is followed at once by a change of everything; then all are loaded."""
    torch.set_num_threads(1)
    model, optimizer = trained()
    expected: list[float] = []
    futures: list[Future[None]] = []
    for number in range(3):
        expected.append(float(model.weights[-1].detach()[-1]))
        futures.append(WAYS[way](Path(where) / f"step{number}", model, optimizer))
        for kept in (*model.parameters(), *(one["momentum_buffer"] for one in optimizer.state.values())):
            kept.data.add_(1.0)
    for future in futures:
        future.result(100)
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


@pytest.mark.parametrize("way", WAYS)
def test_the_first_saves_of_a_process_are_those_of_the_call(tmp_path: Path, way: str) -> None:
    """Each is followed at once by a change of everything."""
    done = run_forked(saves_in_a_row, str(tmp_path), way, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("way", ["functions", "checkpointer", "saves"])
def test_a_process_that_is_forked_during_a_save_saves_its_own(tmp_path: Path, way: str) -> None:
    """It is told that the save is its parent's, trains on, and saves; the parent's checkpoint is complete."""
    done = run_forked(forks_during_a_save, str(tmp_path), way, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]


def forks_during_a_save(where: str, way: str) -> None:
    torch.set_num_threads(1)
    state = training("file", 2 * LARGE)
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
        with pytest.raises(SaveError, match=r"parent\.pt': the parent process saves it"):
            result()
        optimizer.step()
        save("child.pt")()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    result()
    assert {"first.pt", "second.pt", "parent.pt", "child.pt"} <= {path.name for path in folder.iterdir()}


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
    state, saves = training(form, LARGE // 8), Saves()
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


WIDE = 600_000  # 20 MB of weights and momentum: more than one buffer, written past the page cache


def save(saving: Saves, state: State, folder: Path, how: str = "async", **arguments: Any) -> Any:
    """Begin to save ``ba<batch>.pt``."""
    return saving.save(SaveRequest(state=state, catalog=Catalog(folder), template="ba{batch}.pt", **arguments), how)


@pytest.fixture
def saving() -> Any:
    """Closed at the end."""
    saving = Saves()
    yield saving
    saving.close()


@pytest.mark.parametrize("how", ["async", "sync"])
def test_shared_memory_is_saved_once_and_shared_again(tmp_path: Path, saving: Saves, how: str) -> None:
    """Tied weights, views and transposed tensors; one storage in the file for each in memory."""
    base = torch.arange(100_000.0)
    tensors = {"base": base, "again": base, "view": base[10:20], "strided": base.view(100, 1000).t(), "empty": base[:0]}
    pending = save(saving, new_state(1, callbacks=[Remember(tensors)]), tmp_path, how=how)
    base_then = base.clone()
    path = pending.wait().path
    loaded = torch.load(path, weights_only=True)["state"]["callbacks"]["Remember"]["what"]
    loaded["base"][10] = -1.0
    assert loaded["again"][10] == -1.0
    assert loaded["view"][0] == -1.0
    assert torch.equal(loaded["strided"].reshape(-1)[:3], base_then.view(100, 1000).t().reshape(-1)[:3])
    assert loaded["empty"].numel() == 0
    assert path.stat().st_size < 2 * base.nbytes


@pytest.mark.parametrize("staging_bytes", [0, 1 << 20, 1 << 24, 1 << 30])
def test_any_limit_of_memory_gives_the_same_file(tmp_path: Path, staging_bytes: int) -> None:
    """What does not fit goes through a smaller buffer, and training waits for that."""
    saving = Saves(staging_bytes)
    state = new_state(1, width=WIDE, value=3.0)
    pending = save(saving, state, tmp_path)
    step(state)
    assert value_in(read_checkpoint(pending.wait().path)) == 3.0
    saving.close()


def test_a_report_says_what_was_done(saving: Saves, tmp_path: Path) -> None:
    """The path, the size, the seconds by name; those known before the commit are in the manifest too."""
    report = save(saving, new_state(3, width=WIDE), tmp_path).wait()
    assert (report.path, report.batch) == (tmp_path / "ba3.pt", 3)
    assert report.size_bytes == report.path.stat().st_size
    assert {"stall", "snapshot", "waiting", "hash", "write", "flush", "commit", "total"} <= set(report.seconds)
    assert all(seconds >= 0 for seconds in report.seconds.values())
    (manifest,) = Catalog(tmp_path).manifests()
    assert set(manifest.timings) == set(report.seconds) - {"commit", "total"}


def test_other_programs_open_the_file(saving: Saves, tmp_path: Path) -> None:
    """``torch.load`` with and without mmap, and unzip."""
    path = save(saving, new_state(1, width=WIDE, value=2.0), tmp_path, how="lazy").wait().path
    for mmap in (False, True):
        assert value_in(torch.load(path, weights_only=True, mmap=mmap)) == 2.0
    assert subprocess.run(["unzip", "-tq", str(path)], check=False).returncode == 0


PIECE = 16 * 32_000
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


class Bytes:
    """A file in memory."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        self.size_bytes = 0
        self.piece_bytes = PIECE
        self.seconds: dict[str, float] = {}

    def write(self, data: bytes) -> None:
        self.size_bytes += self.file.write(data)

    def copy(self, address: int, size: int, crc: int | None = 0) -> int:
        data = ctypes.string_at(address, size)
        self.write(data)
        return zlib.crc32(data, crc or 0)

    def finish(self) -> FileDigest:
        raise NotImplementedError

    def __enter__(self) -> Bytes:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def written(contents: dict[str, Any], **watched: torch.Tensor) -> tuple[bytes, str | None]:
    """The file of ``contents``, and the name of the tensor that is not finite."""
    image, sink = TorchImage(contents, watched=watched.items()), Bytes()
    image.write(sink)
    return sink.file.getvalue(), image.not_finite


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_of_many_is_found_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    """At the ends of the tensor and of each piece that is looked at, in each type; the file is the same."""
    count = 3 * PIECE // dtype.itemsize + 5
    a_piece = PIECE // dtype.itemsize
    good = torch.ones(count, dtype=dtype)
    assert written({"x": good}, x=good)[1] is None
    for place in (0, 31_999, 32_000, a_piece - 1, a_piece, 2 * a_piece + 17, count - 1):
        bad = good.clone()
        bad[place] = value
        file, found = written({"a": good, "x": bad}, a=good, x=bad)
        assert found == "x", place
        assert written({"a": good, "x": bad}) == (file, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_large_values_are_finite(dtype: torch.dtype) -> None:
    """Their sum is not."""
    largest = torch.full((70_000,), torch.finfo(dtype).max, dtype=dtype)
    assert written({"x": largest}, x=largest)[1] is None
    largest[-1] = math.inf
    assert written({"x": largest}, x=largest)[1] == "x"
