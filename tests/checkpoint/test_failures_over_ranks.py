"""Whatever fails on whatever rank in a save or a load: all know, what was committed stands, and a run can go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint.failing_ranks import STAGES, THEIRS, all_failures

from composerlite.testing import run_ranks


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What both ranks say of all failures: the same."""
    folder = tmp_path_factory.mktemp("failures")
    first, second = run_ranks(all_failures, 2, folder)
    assert first == second
    return folder, first


@pytest.mark.parametrize("kind", ["copies", "shards"])
def test_every_rank_raises_what_one_failed_with(told: tuple[Path, dict[str, Any]], kind: str) -> None:
    """From planning to retention: the error names the rank and the cause, and the next save succeeds."""
    stages, _ = told[1][kind]
    assert list(stages) == [stage for stage, *_ in STAGES[kind]]
    for (stage, rank, *_), (raised, there, name, next_one) in zip(STAGES[kind], stages.values(), strict=True):
        assert f"rank {rank}" in raised, (stage, raised)
        assert "No space left on device" in raised, (stage, raised)
        assert len(there) == (2 if stage in ("latest", "retention") else 1), (stage, there)
        assert next_one == name, stage


@pytest.mark.parametrize("kind", ["copies", "shards"])
def test_two_runs_that_write_to_one_folder_are_told(told: tuple[Path, dict[str, Any]], kind: str) -> None:
    """The one that comes second names the rank and the file, on every rank, and leaves what is there."""
    folder = told[0] / f"{kind} of two runs"
    name, raised = told[1][kind][1]
    assert raised.startswith(f"RankError: checkpoint '{name}': rank 0 failed: "), raised
    assert "CheckpointExistsError" in raised
    assert str(folder / name) in raised
    there = folder / name if kind == "copies" else folder / name / ".metadata"
    assert there.read_bytes() == THEIRS
    assert not [path.name for path in folder.iterdir() if ".tmp-" in path.name or "saving" in path.name]


def test_a_file_system_that_shows_one_rank_less_fails_the_load_on_all(told: tuple[Path, dict[str, Any]]) -> None:
    """A file that rank 1 does not see, or a directory: every rank names it, and the rank."""
    views = told[1]["views"]
    assert "__1_0_" in views["file"], views
    assert "ba1" in views["directory"], views
    assert all("rank 1" in said for said in views.values()), views
