"""Saving behind training: what is saved is the moment of the call, whatever training does meanwhile."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import Remember, Saves, new_state, temporaries, value_in
from torch import nn

from composerlite.checkpoint import Catalog, read_checkpoint, safe_torch_load
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.core import State
from composerlite.errors import SaveError

WIDE = 600_000  # 20 MB of weights and momentum: more than one buffer, written past the page cache


def save(saves: Saves, state: State, folder: Path, how: str = "async", **arguments: Any) -> Any:
    """Begin to save ``ba<batch>.pt``."""
    return saves.save(SaveRequest(state=state, catalog=Catalog(folder), template="ba{batch}.pt", **arguments), how)


def step(state: State) -> None:
    """An optimizer step: every weight becomes another."""
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizers[0].step()
    state.timestamp = state.timestamp.to_next_batch(4)


@pytest.fixture
def saves() -> Any:
    """Closed at the end."""
    saves = Saves()
    yield saves
    saves.close()


@pytest.mark.parametrize("how", ["async", "sync"])
@pytest.mark.parametrize("width", [2, WIDE])
def test_a_checkpoint_is_that_of_the_call(saves: Saves, tmp_path: Path, width: int, how: str) -> None:
    """Weights change right after; the file holds what they were, each save anew in the same memory."""
    state = new_state(1, width=width)
    expected: list[float] = []
    for _ in range(3):
        expected.append(float(next(state.model.parameters()).detach().flatten()[0]))
        save(saves, state, tmp_path, how=how)
        step(state)
    saves.close()
    found = [value_in(read_checkpoint(tmp_path / f"ba{batch}.pt")) for batch in (1, 2, 3)]
    assert found == expected
    assert len(set(found)) == 3


def test_values_that_are_no_tensors_are_those_of_the_call(saves: Saves, tmp_path: Path) -> None:
    """Lists and dicts that callbacks go on changing."""
    remember = Remember([1, {"a": 2}])
    pending = save(saves, new_state(1, callbacks=[remember]), tmp_path)
    remember.what.append(3)
    remember.what[1]["a"] = 4
    contents = safe_torch_load(pending.wait().path)
    assert contents["state"]["callbacks"]["Remember"]["what"] == [1, {"a": 2}]


@pytest.mark.parametrize("how", ["async", "sync"])
def test_shared_memory_is_saved_once_and_shared_again(tmp_path: Path, saves: Saves, how: str) -> None:
    """Tied weights, views and transposed tensors; one storage in the file for each in memory."""
    base = torch.arange(100_000.0)
    tensors = {"base": base, "again": base, "view": base[10:20], "strided": base.view(100, 1000).t(), "empty": base[:0]}
    pending = save(saves, new_state(1, callbacks=[Remember(tensors)]), tmp_path, how=how)
    base_then = base.clone()
    path = pending.wait().path
    loaded = torch.load(path, weights_only=True)["state"]["callbacks"]["Remember"]["what"]
    loaded["base"][10] = -1.0
    assert loaded["again"][10] == -1.0
    assert loaded["view"][0] == -1.0
    assert torch.equal(loaded["strided"].reshape(-1)[:3], base_then.view(100, 1000).t().reshape(-1)[:3])
    assert loaded["empty"].numel() == 0
    assert path.stat().st_size < 2 * base.nbytes


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_of_tensor_is_saved(saves: Saves, tmp_path: Path, dtype: torch.dtype) -> None:
    """torch reads it as it was: types, shapes, strides, requires_grad, conjugates, parameters."""
    plain = torch.arange(12).to(dtype).view(3, 4)
    tensors: dict[str, Any] = {"plain": plain, "strided": plain[:, ::2], "scalar": plain[0, 1]}
    if dtype.is_complex:
        tensors["conjugate"] = plain.conj()
    if dtype is torch.float32:
        tensors["parameter"] = nn.Parameter(plain.clone())
        tensors["grad"] = plain.clone().requires_grad_()
        tensors["sparse"] = plain.to_sparse()
    path = save(saves, new_state(1, callbacks=[Remember(tensors)]), tmp_path).wait().path
    loaded = torch.load(path, weights_only=True)["state"]["callbacks"]["Remember"]["what"]
    for name, tensor in tensors.items():
        found = loaded[name]
        assert (found.dtype, found.shape, type(found)) == (tensor.dtype, tensor.shape, type(tensor))
        assert found.requires_grad == tensor.requires_grad
        assert str(found) == str(tensor)
        if found.layout is torch.strided:
            assert found.stride() == tensor.stride()


def test_memory_that_has_two_types_is_refused(saves: Saves, tmp_path: Path) -> None:
    """The format cannot say it; nothing is left behind."""
    base = torch.zeros(4)
    state = new_state(1, callbacks=[Remember([base, base.view(torch.int32)])])
    with pytest.raises(SaveError, match=r"two tensors share memory with the dtypes torch.float32 and torch.int32"):
        save(saves, state, tmp_path)
    assert temporaries(tmp_path) == []


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("staging_bytes", [0, 1 << 20, 1 << 24, 1 << 30])
def test_any_limit_of_memory_gives_the_same_file(tmp_path: Path, staging_bytes: int) -> None:
    """What does not fit goes through a smaller buffer, and training waits for that."""
    saves = Saves(staging_bytes)
    state = new_state(1, width=WIDE, value=3.0)
    pending = save(saves, state, tmp_path)
    step(state)
    assert value_in(read_checkpoint(pending.wait().path)) == 3.0
    saves.close()


def test_the_memory_is_used_again(tmp_path: Path) -> None:
    """Ten saves need no more than one."""
    saves = Saves()
    state = new_state(1, width=4 * WIDE)
    save(saves, state, tmp_path).wait()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10):
        state.timestamp = state.timestamp.to_next_batch(4)
        save(saves, state, tmp_path).wait()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 38 << 10  # KiB; a checkpoint is 77 MB
    saves.close()


def test_a_state_that_grows_is_saved_whole(saves: Saves, tmp_path: Path) -> None:
    """The memory of the first save is too small for the next ones."""
    remember = Remember(torch.zeros(10))
    state = new_state(1, callbacks=[remember])
    for size in (10, 5_000_000, 9_000_000, 10):
        remember.what = torch.full((size,), float(size))
        path = save(saves, state, tmp_path, overwrite=True).wait().path
        assert torch.equal(safe_torch_load(path)["state"]["callbacks"]["Remember"]["what"], remember.what)


# ── reports ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_report_says_what_was_done(saves: Saves, tmp_path: Path) -> None:
    """The path, the size, the seconds by name; those known before the commit are in the manifest too."""
    report = save(saves, new_state(3, width=WIDE), tmp_path).wait()
    assert (report.path, report.batch) == (tmp_path / "ba3.pt", 3)
    assert report.size_bytes == report.path.stat().st_size
    assert {"stall", "snapshot", "waiting", "hash", "write", "flush", "commit", "total"} <= set(report.seconds)
    assert all(seconds >= 0 for seconds in report.seconds.values())
    (manifest,) = Catalog(tmp_path).manifests()
    assert set(manifest.timings) == set(report.seconds) - {"commit", "total"}


def test_metrics_and_what_is_ephemeral_are_in_the_manifest(saves: Saves, tmp_path: Path) -> None:
    """For retention to decide by, in any later process."""
    save(saves, new_state(3), tmp_path, metrics={"eval/accuracy": 0.5}, occasion="ephemeral").wait()
    (manifest,) = Catalog(tmp_path).manifests()
    assert (manifest.run.metrics, manifest.ephemeral) == ({"eval/accuracy": 0.5}, True)


def test_other_programs_open_the_file(saves: Saves, tmp_path: Path) -> None:
    """``torch.load`` with and without mmap, and unzip."""
    path = save(saves, new_state(1, width=WIDE, value=2.0), tmp_path, how="lazy").wait().path
    for mmap in (False, True):
        assert value_in(torch.load(path, weights_only=True, mmap=mmap)) == 2.0
    assert subprocess.run(["unzip", "-tq", str(path)], check=False).returncode == 0
