"""A resume reads a checkpoint once, and verifies it meanwhile. Late damage costs the steps since the one before."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.parts import new_state, save_batch, save_directory
from resume import read_once_ranks
from resume.read_once_ranks import SAVED, resume, save
from resume.small_run import Trace, differences
from storage.local_store import LocalObjectStore

from composerlite.algorithms import BlurPool
from composerlite.checkpoint import Catalog
from composerlite.checkpoint.load import resume as resume_module
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.checkpoint.place.bucket import Bucket
from composerlite.checkpoint.place.commit import commit_sent, delete_checkpoint, send_files
from composerlite.errors import CheckpointError, IncompatibleCheckpointError
from composerlite.storage import Transfer
from composerlite.testing import run_ranks

OLDER, NEWEST = SAVED


def flip_last_tensor(path: Path) -> None:
    """Flip a bit of the last large tensor in a file, in no chunk that has to be read to see what the file holds."""
    with zipfile.ZipFile(path) as archive:
        last = max((one for one in archive.infolist() if one.file_size > 1 << 20), key=lambda one: one.header_offset)
    flip(path, last.header_offset + (1 << 19))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def copy(folder: Path, target: Path) -> Path:
    return shutil.copytree(folder, target, symlinks=True)


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["batch"] == expected["batch"] == OLDER
    assert found["steps"] == expected["steps"]
    assert differences(found["state"], expected["state"]) == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints of a run on one rank."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    save(folder)
    return folder


def test_a_resume_reads_a_file_once(tmp_path: Path) -> None:
    """Also the parts that the run leaves as they are in the file."""
    save(tmp_path, width=400_000)
    size = Catalog(tmp_path).manifests()[-1].size_bytes
    for batch in (NEWEST, 8):  # the first time more is imported
        found = resume(tmp_path, width=400_000)
        assert found["batch"] == batch
    assert size <= found["read"] <= 1.3 * size


def test_damage_that_shows_after_tensors_were_read_is_passed_over(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on from the older checkpoint, bit for bit as if there was no other, and the damaged one goes."""
    direct, folder = copy(saved, tmp_path / "direct"), copy(saved, tmp_path / "run")
    (direct / f"ba{NEWEST}.pt").unlink()
    flip_last_tensor(folder / f"ba{NEWEST}.pt")
    with caplog.at_level(logging.WARNING):
        found = resume(folder)
    check_same(found, resume(direct))
    assert "has partly overwritten the training state" in caplog.text
    assert (folder / f"ba{NEWEST}.pt.damaged").exists()


def test_nothing_is_trained_if_all_are_damaged(saved: Path, tmp_path: Path) -> None:
    """Weights of both were read by then: the run neither starts over nor continues with them, and no file changes."""
    folder = copy(saved, tmp_path / "run")
    for batch in SAVED:
        flip_last_tensor(folder / f"ba{batch}.pt")
    before, trace, model = sorted(folder.iterdir()), Trace(), read_once_ranks.Wide(read_once_ranks.WIDTH)
    fresh = [weight.clone() for weight in model.parameters()]
    with pytest.raises(
        CheckpointError, match=r"none can be loaded.*ba4\.pt.*partly overwritten.*ba2\.pt.*partly overwritten"
    ):
        read_once_ranks.build(folder, trace, model=model)
    assert not all(map(torch.equal, fresh, model.parameters())), "damage was found before a weight was read"
    assert trace.steps == []
    assert sorted(folder.iterdir()) == before


def test_damage_beside_what_a_run_needs_is_found(saved: Path, tmp_path: Path) -> None:
    """Padding between tensors is verified, too, though no tensor is read from there."""
    folder = copy(saved, tmp_path / "run")
    path = folder / f"ba{NEWEST}.pt"
    with zipfile.ZipFile(path) as archive:
        offset = max(info.header_offset for info in archive.infolist() if info.filename.endswith("version"))
    flip(path, offset + 30)  # the name in a local header
    assert resume(folder)["batch"] == OLDER


def test_no_older_checkpoint_is_restored_into_a_model_that_was_changed_for_a_damaged_one(tmp_path: Path) -> None:
    """An algorithm that the script does not pass changes the model to load the newest: passing it is the way out."""
    folder = tmp_path / "run"
    save(folder, model=read_once_ranks.Convolution(read_once_ranks.WIDTH), algorithms=[BlurPool(min_channels=1)])
    flip_last_tensor(folder / f"ba{NEWEST}.pt")
    model = read_once_ranks.Convolution(read_once_ranks.WIDTH)
    with pytest.raises(IncompatibleCheckpointError, match=r"newer checkpoint could not be read.*BlurPool.*ba2\.pt"):
        resume(folder, model=model, algorithms=[])
    model = read_once_ranks.Convolution(read_once_ranks.WIDTH)
    assert resume(folder, model=model, algorithms=[BlurPool(min_channels=1)])["batch"] == OLDER


def test_parts_of_a_damaged_checkpoint_are_not_kept_beside_one_that_lacks_them(tmp_path: Path) -> None:
    """The only other one was saved without its model: what was read of the newest must not be trained on. If all are
    saved without it, nothing of it was read."""
    whole = save_batch(tmp_path / "same", 1, width=1_000_000, ignore_keys=["rng"])
    flip_last_tensor(save_batch(tmp_path / "same", 2, width=1_000_000, ignore_keys=["rng"]))
    same = RunPlace(Catalog(tmp_path / "same"), "ba{batch}.pt")
    assert choose([same], "run", new_state(width=1_000_000)).path == whole
    save_batch(tmp_path, 1, width=1_000_000, ignore_keys=["state/model"])
    damaged = save_batch(tmp_path, 2, width=1_000_000)
    flip_last_tensor(damaged)
    with pytest.raises(IncompatibleCheckpointError, match=r"ba1\.pt.*without.*state/model.*ba2\.pt.*delete"):
        choose([RunPlace(Catalog(tmp_path), "ba{batch}.pt")], "run", new_state(width=1_000_000))
    damaged.unlink()
    assert choose([RunPlace(Catalog(tmp_path), "ba{batch}.pt")], "run", new_state(width=1_000_000)).path is not None


def test_a_damaged_directory_in_a_bucket_is_passed_over(tmp_path: Path) -> None:
    """It is read from there, and damage shows while it is."""
    (tmp_path / "bucket").mkdir()
    state, store = new_state(width=1000), LocalObjectStore(tmp_path / "bucket")
    with Transfer(store) as transfer:
        remote = Catalog(Bucket(transfer, "run"))
        for batch in (1, 2):
            save_directory(tmp_path / "here", batch, width=1000)
            manifest = Catalog(tmp_path / "here").manifests()[-1]
            files = {file.path: tmp_path / "here" / file.path for file in manifest.files}
            there = send_files(remote.place, manifest, files)
            commit_sent(remote.place, manifest, files[manifest.files[0].path], there, {"run/latest": manifest.name})
        (part,) = (tmp_path / "bucket" / "run" / "ba2").glob("*.distcp")
        flip(part, part.stat().st_size // 2)

        places = [RunPlace(Catalog(tmp_path / "empty"), "", None, [RunPlace(remote, link="run/latest")])]
        choice = choose(places, "run", state, [store])
    assert str(choice.path).endswith("run/ba1")
    assert choice.loaded is not None
    choice.loaded.restore()
    assert int(state.timestamp.batch) == 1
    assert all((weight == 1).all() for weight in state.model.parameters())


def test_memory_that_fails_while_it_is_read_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state may be changed by then: the run ends with the error of the system, and does not start over."""

    def fail(name: str, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    save_batch(tmp_path, 1)
    monkeypatch.setattr(resume_module, "read_in_place", fail)
    with pytest.raises(OSError, match=r"Input/output error.*ba1\.pt"):
        choose([RunPlace(Catalog(tmp_path), "ba{batch}.pt", in_memory=True)], "run", new_state())


def test_a_directory_is_read_once_by_all_ranks_together(tmp_path: Path) -> None:
    """Each byte by one of them. Damage in the part of one is passed over by all."""
    run_ranks(read_once_ranks.save_shards, 2, tmp_path / "run")
    size = Catalog(tmp_path / "run").manifests()[-1].size_bytes
    direct = copy(tmp_path / "run", tmp_path / "direct")
    damaged = copy(tmp_path / "run", tmp_path / "damaged")
    delete_checkpoint(Catalog(direct).place, Catalog(direct).manifests()[-1])
    run_ranks(read_once_ranks.resume_shards, 2, copy(tmp_path / "run", tmp_path / "first"))  # more is imported
    whole = run_ranks(read_once_ranks.resume_shards, 2, copy(tmp_path / "run", tmp_path / "whole"))
    assert [told["batch"] for told in whole] == [NEWEST, NEWEST]
    assert size <= sum(told["read"] for told in whole) <= 1.3 * size
    (part,) = (damaged / f"ba{NEWEST}").glob("__1_0_*.distcp")
    flip(part, part.stat().st_size * 3 // 4)
    expected = run_ranks(read_once_ranks.resume_shards, 2, direct)
    for one, other in zip(run_ranks(read_once_ranks.resume_shards, 2, damaged), expected, strict=True):
        check_same(one, other)
    assert (damaged / f"ba{NEWEST}.damaged").exists()
