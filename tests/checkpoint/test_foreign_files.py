"""Damaged files, files of others, and that ours are everybody's."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parts import Remember, new_state, save_batch

from composerlite.checkpoint import Catalog, read_checkpoint, safe_torch_load
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.checkpoint.save.save import save
from composerlite.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UntrustedCheckpointError,
)


def test_a_truncated_file_is_called_damaged(tmp_path: Path) -> None:
    """At every length, with its record or without; the message never advises to trust the file."""
    whole = save_batch(tmp_path, 1).read_bytes()
    cut = tmp_path / "cut.pt"
    for length in [*range(0, 300, 7), *range(300, len(whole), 211), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CorruptCheckpointError, match=r"cut\.pt' cannot be read.*(damaged|its digest)") as e:
            read_checkpoint(cut)
        assert "weights_only" not in str(e.value)


@given(data=st.binary(max_size=400) | st.binary(max_size=400).map(lambda data: b"PK\x03\x04" + data))
def test_garbage_is_called_damaged(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Any bytes, those of a broken zip file too: one error, and no other."""
    path = tmp_path_factory.getbasetemp() / "garbage.pt"
    path.write_bytes(data)
    with pytest.raises((CorruptCheckpointError, IncompatibleCheckpointError, UntrustedCheckpointError)):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "contents",
    [
        torch.nn.Linear(2, 2).state_dict(),
        torch.ones(3),
        [1, 2],
        {},
        {"state": 1},
        {"model": {}, "epoch": 3},
        "text",
        None,
    ],
    ids=["weights", "tensor", "list", "empty", "other state", "other trainer", "text", "none"],
)
def test_a_torch_file_of_others_is_told_from_a_damaged_one(tmp_path: Path, contents: Any) -> None:
    """A good file, but no checkpoint of a run: the message says what it holds and how it may be loaded."""
    torch.save(contents, tmp_path / "foreign.pt")
    with pytest.raises(IncompatibleCheckpointError, match=r"is not a checkpoint of a run.*model\.load_state_dict"):
        read_checkpoint(tmp_path / "foreign.pt")


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    """Nor is a folder a file."""
    for path in (tmp_path / "none.pt", tmp_path):
        with pytest.raises(CheckpointNotFoundError):
            safe_torch_load(path)


# ── our files are everybody's ────────────────────────────────────────────────────────────────────────────────────────
def everything(folder: Path) -> Path:
    """A checkpoint of a state with an optimizer that has stepped and a callback."""
    state = new_state(1, callbacks=[Remember({"count": 3})], value=0.5)
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizers[0].step()
    return save(SaveRequest(state=state, catalog=Catalog(folder), template="ba{batch}.pt"))


def test_our_files_open_with_torch_alone(tmp_path: Path) -> None:
    """``torch.load(path)`` as it is by default, in a process that has never heard of composerlite."""
    path = everything(tmp_path)
    program = (
        "import sys, torch; c = torch.load(sys.argv[1]); assert 'composerlite' not in sys.modules; "
        "m = torch.nn.Linear(2, 2); m.load_state_dict(c['state']['model']); print(list(c), list(c['state']))"
    )
    command = [sys.executable, "-P", "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    keys = [
        *("model", "optimizers", "schedulers", "algorithms", "callbacks", "scaler", "timestamp", "rank_zero_seed"),
        *("train_metrics", "eval_metrics", "run_name", "dataset_state", "integrations", "metadata"),
    ]
    assert done.stdout.strip() == f"{['state', 'rng']} {keys}"


def test_our_files_are_sound_zip_files(tmp_path: Path) -> None:
    """Every record has the checksum that the archive says."""
    data = everything(tmp_path).read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert any(name.endswith("data.pkl") for name in archive.namelist())
