"""The newest state in memory: a process that dies loses a batch or two, and not what it did since the last save."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import BATCHES, Cell, build, differences
from test_preemption import launch, whole

from composerlite.errors import ConfigError

__all__ = ["whole"]
pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no folder in memory")
OWN = Path(f"/dev/shm/composerlite-{os.getuid()}")
MEMORY: dict[str, Any] = {"memory": "/dev/shm", "interval": "25ba", "evaluate": "20ba"}


@pytest.fixture(autouse=True)
def _nothing_of_before() -> Iterator[None]:
    shutil.rmtree(OWN / "preempted", ignore_errors=True)
    yield
    shutil.rmtree(OWN / "preempted", ignore_errors=True)


def kept() -> list[str]:
    return sorted(path.name for path in (OWN / "preempted").rglob("*") if path.is_file() and path.suffix == ".pt")


@pytest.mark.parametrize("moment", [["after_backward", 18, 1], ["batch_end", 41, 1], ["eval_batch_end", 40, 2]])
def test_a_killed_process_loses_a_batch_at_most(tmp_path: Path, whole: Any, moment: list[Any]) -> None:
    """SIGKILL far from the last save on the disk: the same command goes on from memory, to the same end, and then the
    memory is free."""
    said, end = whole(evaluate="20ba")
    one = launch(tmp_path, at=moment, signals=["SIGKILL"], **MEMORY)
    assert one.code == -signal.SIGKILL
    assert kept()
    two = launch(tmp_path, **MEMORY)
    assert two.code == 0, two.log
    assert two.batches[0] in (one.batches[-1], one.batches[-1] + 1)
    assert two.batches[-1] == BATCHES
    assert [line for line in said if line not in two.said] == said[: len(said) - len(two.said)]
    assert differences(torch.load(tmp_path / "final.pt", weights_only=True), end) == []
    assert kept() == []


def test_memory_is_given_back_when_the_disk_has_as_much(tmp_path: Path) -> None:
    """A run that is asked to end saves to the disk."""
    one = launch(tmp_path, at=["after_forward", 18, 1], **MEMORY)
    assert one.code == 143
    assert kept() == []


def test_a_lost_machine_costs_no_more_than_without(tmp_path: Path, whole: Any) -> None:
    """With the memory gone the run goes on from the disk."""
    said, _ = whole(evaluate="20ba")
    launch(tmp_path, at=["batch_end", 51, 1], signals=["SIGKILL"], **MEMORY)
    shutil.rmtree(OWN / "preempted")
    two = launch(tmp_path, **MEMORY)
    assert two.batches[0] in (26, 51), "the save of batch 50 begins when that of batch 25 is there, and may be cut off"
    assert two.batches == list(range(two.batches[0], BATCHES + 1))
    assert two.said == said[-len(two.said) :]


def test_what_would_be_of_no_use_is_refused(tmp_path: Path) -> None:
    """Without autoresume, without another saver, without such a folder: an error before training."""
    for wrong in ({}, {"autoresume": True, "run_name": "r"}, {"save_folder": tmp_path}):
        with pytest.raises(ConfigError, match="give autoresume=True and a save_folder as well"):
            build(Cell(), save_memory_interval="1ba", **wrong)
    with pytest.raises(ConfigError, match="there is no such folder"):
        build(
            Cell(),
            save_memory_interval="1ba",
            save_memory_folder="/no/such",
            autoresume=True,
            save_folder=tmp_path,
            run_name="r",
        )
