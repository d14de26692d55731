"""A program that changes its directory while it trains: its checkpoints stay together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tiny_training import Record, saved_batches, train, trainer

from composerlite import Callback, Logger, State
from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import Catalog


class Leave(Callback):
    """Goes to another folder at one batch, as Hydra does, or code that works with files of its own."""

    def __init__(self, folder: Path, batch: int) -> None:
        self.folder, self.batch = folder, batch

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == self.batch:
            os.chdir(self.folder)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("name", ["saves", "./saves", "{run_name}/saves"])
@pytest.mark.parametrize("batch", [1, 5])
def test_checkpoints_stay_in_one_folder(
    name: str, batch: int, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the process goes, and whatever is saved at that moment: all are in the folder that it began with."""
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    start.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(start)
    how: dict[str, Any] = {
        "save_folder": name,
        "save_interval": "1ba",
        "save_num_checkpoints_to_keep": 3,
        "save_async": asynchronous,
    }
    train(callbacks=[Leave(elsewhere, batch)], max_duration="2ep", **how)
    assert list(elsewhere.iterdir()) == []
    folder = start / name.format(run_name="run")
    assert saved_batches(folder) == [6, 7, 8]
    assert (folder / "latest-rank0.pt").resolve() == folder / "ep1-ba8-rank0.pt"
    assert not list(folder.rglob("*.lease")), "the lease was given back in the wrong place"

    monkeypatch.chdir(start)
    record = Record()
    with trainer(callbacks=[record], autoresume=True, **how) as run:
        os.chdir(elsewhere)  # between construction and training
        run.fit()
        assert run.saved_checkpoints[-1].endswith("saves/ep2-ba12-rank0.pt")
    assert record.batches == [9, 10, 11, 12]
    assert saved_batches(folder) == [10, 11, 12]
    assert list(elsewhere.iterdir()) == []


def test_a_checkpoint_in_the_background_gets_to_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process leaves between the copy and the commit, at every batch."""
    places = [tmp_path / name for name in ("start", "a", "b")]
    for place in places:
        place.mkdir()
    monkeypatch.chdir(places[0])
    leaves = [Leave(places[1 + batch % 2], batch) for batch in range(1, 13)]
    train(callbacks=leaves, save_folder="saves", save_interval="1ba", save_staging_folder=None)
    assert [manifest.batch for manifest in Catalog(places[0] / "saves").manifests()] == list(range(1, 13))
    assert [list(place.iterdir()) for place in places[1:]] == [[], []]


def test_what_tells_memory_from_others_is_in_the_folder_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process leaves between the saver and the Trainer: with checkpoints in memory nothing is made elsewhere."""
    start, elsewhere, memory = (tmp_path / name for name in ("start", "elsewhere", "memory"))
    for folder in (start, elsewhere, memory):
        folder.mkdir()
    monkeypatch.chdir(start)
    saver = CheckpointSaver("saves")
    os.chdir(elsewhere)
    train(
        callbacks=[saver],
        autoresume=True,
        save_memory_interval="1ba",
        save_memory_folder=memory,
        save_memory_replication=1.0,
    )
    assert list(elsewhere.iterdir()) == []
    assert (start / "saves" / ".memory-id").is_file()


def test_a_working_directory_that_is_removed_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an absolute save_folder, checkpoints need no working directory."""

    class Remove(Callback):
        """Removes the working directory."""

        def batch_end(self, state: State, logger: Logger) -> None:
            if int(state.timestamp.batch) == 1:
                Path.cwd().rmdir()

    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    how: dict[str, Any] = {"save_interval": "2ba", "max_duration": "4ba", "save_num_checkpoints_to_keep": 1}
    run = trainer(save_folder=tmp_path / "saves", callbacks=[Remove()], **how)
    try:
        run.fit()
        run.close()
    finally:
        monkeypatch.chdir(tmp_path)
    assert saved_batches(tmp_path / "saves") == [4]
