"""A run of two ranks of which one is killed, or both, at any file event of a save: it goes on from the newest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import two_ranks
from forked import run_forked

RUNS = [
    *[("save", "copies", mode, 0) for mode in ("sync", "async")],  # rank 1 of copies changes no file
    *[("save", "shards", mode, rank) for mode in ("sync", "async") for rank in (0, 1)],
    ("load", "copies", "sync", 0),
    *[("load", "shards", "sync", rank) for rank in (0, 1)],
]
Run = tuple[str, str, str, int]


def kill(folder: Path, run: Run, most: int, record_property: Callable[[str, object], None]) -> int:
    """Kill it at so many events: how many they were."""
    done = run_forked(two_ranks.main, str(folder), *map(str, run), str(most), cwd=folder, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    kills = done.stdout.splitlines()
    events = kills[0].split("\t")[1].split("/")[1]
    record_property("count", f"two ranks, {', '.join(map(str, run))}: {len(kills)} kills at {events} file events")
    return len(kills)


@pytest.mark.parametrize("run", [("save", "shards", "async", 1), ("load", "copies", "sync", 0)], ids=str)
def test_a_killed_rank_costs_no_checkpoint(
    run: Run, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The other rank raises and names it; what was committed is whole; the run ends with the very same bits."""
    assert kill(tmp_path, run, 2, record_property) == 2


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_rank_may_be_killed_at_every_file_event(
    run: Run, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Alone, or together with the other, at each of them."""
    assert kill(tmp_path, run, 1000, record_property) >= 5
