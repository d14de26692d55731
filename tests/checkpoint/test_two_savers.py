"""Two savers of one trainer: none replaces the files or the link of the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_training import saved_batches, train, trainer

from composerlite.callbacks import CheckpointSaver
from composerlite.errors import ConfigError


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {}),
        ({"latest_filename": "latest-rank0.pt"}, {}),
        ({"latest_filename": "{run_name}.pt"}, {"latest_filename": "run.pt"}),
        ({"latest_filename": "inner/last.pt"}, {"folder": "saves/inner", "latest_filename": "last.pt"}),
        ({}, {"folder": "./saves/"}),
        ({}, {"folder": "other/../saves"}),
        ({}, {"folder": "same"}),
        ({"latest_filename": "a.pt"}, {"latest_filename": "b.pt", "filename": "full/ep{epoch}.pt"}),
    ],
)
def test_two_savers_never_share_a_link_or_a_file(
    first: dict[str, Any], second: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the folder is written: the trainer is not built, and the message names both ways out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saves").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "same").symlink_to("saves")
    savers = [
        CheckpointSaver(**{"folder": "saves", "filename": "full/ep{epoch}.pt", **first}),
        CheckpointSaver(**{"folder": "saves", "filename": "weights/ep{epoch}.pt", "weights_only": True, **second}),
    ]
    with pytest.raises(ConfigError, match=r"two CheckpointSavers, .* Give one of them another .*, or another folder"):
        trainer(callbacks=savers)


def test_two_savers_with_links_of_their_own_share_a_folder(tmp_path: Path) -> None:
    """Each link leads to the newest of its own saver, and a resume goes on from the whole state."""
    folder = tmp_path / "saves"

    def savers() -> list[CheckpointSaver]:
        return [
            CheckpointSaver(folder, filename="full/ep{epoch}.pt", latest_filename="latest.pt"),
            CheckpointSaver(
                folder,
                filename="weights/ba{batch}.pt",
                latest_filename="weights.pt",
                save_interval="2ba",
                weights_only=True,
            ),
            CheckpointSaver(folder, filename="third/ba{batch}.pt", latest_filename=None, save_interval="6ba"),
        ]

    train(callbacks=savers(), max_duration="1ep", autoresume=True, save_folder=tmp_path / "main")
    train(callbacks=savers(), max_duration="3ep", autoresume=True, save_folder=tmp_path / "main")
    assert str((folder / "latest.pt").readlink()) == "full/ep3.pt"
    assert str((folder / "weights.pt").readlink()) == "weights/ba12.pt"
    assert len(saved_batches(folder)) == 3 + 6 + 3


def test_the_same_names_in_another_folder_are_no_conflict(tmp_path: Path) -> None:
    """A copy on another disk is what two savers are for."""
    savers = [CheckpointSaver(tmp_path / "a"), CheckpointSaver(tmp_path / "b")]
    train(callbacks=savers, max_duration="1ep")
    assert saved_batches(tmp_path / "a") == saved_batches(tmp_path / "b") == [4]
