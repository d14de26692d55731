"""A directory that is there already, and is used, where a checkpoint is to be saved that is a directory."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from composerlite.checkpoint import Checkpointer, load_state_dict, save_safetensors, save_state_dict


def function(path: str) -> None:
    save_state_dict(path, {"x": torch.ones(3)}, save_overwrite=True)


def step(path: str) -> None:
    Checkpointer(save_overwrite=True).save(path, torch.nn.Linear(2, 2), {"batch": 1})


def weights(path: str) -> None:
    save_safetensors(path, torch.nn.Linear(2, 2), save_overwrite=True)


SAVES = pytest.mark.parametrize("save", [function, step, weights])


@SAVES
def test_files_in_the_current_directory_stay(
    save: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a directory as any other: nothing takes its place, and every path of this process leads where it did."""
    (here := tmp_path / "above" / "here").mkdir(parents=True)
    (here / "mine").write_text("1")
    monkeypatch.chdir(here)
    number = here.stat().st_ino
    for path in (".", str(here)):
        save(path)
        assert (Path.cwd().stat().st_ino, Path("mine").read_text()) == (number, "1")
    save("below")
    assert (here / "below").is_dir()


@SAVES
def test_what_is_in_a_directory_stays_as_it_was(save: Callable[[str], None], tmp_path: Path) -> None:
    """Folders, empty ones too, links, programs and the mode of the directory: when a checkpoint is saved there, and
    when that is replaced."""
    target = tmp_path / "model"
    (target / ".git" / "refs").mkdir(parents=True)
    (target / ".git" / "HEAD").write_text("ref")
    (target / "empty").mkdir()
    (target / "train").mkdir()
    (target / "train" / "log.txt").write_text("log")
    (target / "data").symlink_to("/not/mounted")
    (target / "out").symlink_to(".git")
    (target / "run.sh").write_text("#!/bin/sh")
    (target / "run.sh").chmod(0o755)
    target.chmod(0o750)
    worker = os.open(target / ".git", os.O_RDONLY)
    before = {path.relative_to(target): path.lstat().st_ino for path in target.rglob("*") if path.name != "train"}
    for _ in range(2):
        save(str(target))
        assert {path: (target / path).lstat().st_ino for path in before} == before
        assert stat.S_IMODE(target.stat().st_mode) == 0o750
        assert os.listdir(worker) == os.listdir(target / ".git")  # noqa: PTH208 - of a descriptor
    os.close(worker)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    if save is function:
        load_state_dict(str(target), state := {"x": torch.zeros(3)})
        assert state["x"].tolist() == [1, 1, 1]
