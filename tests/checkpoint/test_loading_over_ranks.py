"""All ranks of a run load the same checkpoint, or all raise the same error."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.loading_ranks import (
    load_all_kinds,
    load_and_die,
    load_copies_of_shards,
    on_nodes_of_their_own,
    resume,
    train_with_an_interruption,
)
from checkpoint.parts import save_batch, save_directory

from composerlite.checkpoint import Catalog
from composerlite.errors import RankError
from composerlite.testing.cluster import run_ranks, run_ranks_to_the_end


def _data_file(directory: Path) -> Path:
    return next(directory.glob("*.distcp"))


def test_all_ranks_load_the_same_or_raise_the_same_error(tmp_path: Path) -> None:
    """A good file, one that is not there, a damaged one, one that does not fit one rank; a directory with a hole."""
    save_batch(tmp_path / "good", 5)
    damaged = save_batch(tmp_path / "damaged", 5)
    damaged.write_bytes(damaged.read_bytes()[:-7] + b"\0" * 7)
    _data_file(save_directory(tmp_path, 1).rename(tmp_path / "gone")).unlink()
    torch.save({"state": {"model": os.system}}, tmp_path / "untrusted.pt")
    first, second = run_ranks(load_all_kinds, 2, tmp_path)
    assert first == second
    assert (first["generators"], first["value"], first["batch"]) == (1, 5.0, 5)
    assert first["missing"].startswith("CheckpointNotFoundError: there is no checkpoint file")
    assert "none.pt" in first["missing"]
    assert first["damaged"].startswith("CorruptCheckpointError")
    assert "damaged/ba5.pt" in first["damaged"]
    assert "rank 0" in first["damaged"]
    assert first["untrusted"].startswith("UntrustedCheckpointError")
    assert "untrusted.pt' holds posix.system" in first["untrusted"]
    assert first["other model"].startswith("IncompatibleCheckpointError")
    assert "weight: (2, 2) in the checkpoint, (2, 3) in the model" in first["other model"]
    assert "rank 1" in first["other model"]
    assert first["file gone"].startswith("CorruptCheckpointError")
    assert re.search(r"its file '__0_0_\w+\.distcp' is missing", first["file gone"])


def test_all_ranks_go_on_from_the_same_checkpoint(tmp_path: Path) -> None:
    """The newest that is good: files and directories, verified together; damage is set aside by one rank."""
    for batch in (1, 2):
        save_batch(tmp_path / "files", batch)
    (tmp_path / "files" / "ba2.pt").write_bytes(b"damaged")
    good = [save_directory(tmp_path / "directories", batch) for batch in (3, 4, 5)]
    damaged = _data_file(good[-1])
    damaged.write_bytes(damaged.read_bytes()[:-9] + b"unchanged")
    save_directory(tmp_path / "unseen", 6)
    first, second = run_ranks(resume, 2, tmp_path)
    assert first == second
    assert first["files"] == tmp_path / "files" / "ba1.pt"
    assert first["directories"] == good[1]
    assert first["none"] is None
    assert [m.name for m in Catalog(tmp_path / "directories").manifests()] == ["ba3", "ba4"]
    assert "is visible to rank 0 but not to the ranks [1]" in first["unseen"]
    assert [m.name for m in Catalog(tmp_path / "unseen").manifests()] == ["ba6"], "what is not seen is not damaged"


def test_rank_0_reads_a_file_for_all_nodes(tmp_path: Path) -> None:
    """What other nodes have under that path, or do not have, makes no difference."""
    for node in ("node0", "node1"):
        (tmp_path / node / "absent").mkdir(parents=True)
    save_batch(tmp_path / "node0" / "same", 5)
    shutil.copytree(tmp_path / "node0" / "same", tmp_path / "node1" / "same")
    shutil.copytree(tmp_path / "node0" / "same", tmp_path / "node0" / "other")
    shutil.copytree(tmp_path / "node0" / "same", tmp_path / "node0" / "absent", dirs_exist_ok=True)
    save_batch(tmp_path / "node1" / "other", 4).rename(tmp_path / "node1" / "other" / "ba5.pt")
    first, second = run_ranks(on_nodes_of_their_own, 2, tmp_path, dist_timeout=None)
    assert set(first.values()) == {(5.0, True)}
    assert set(second.values()) == {(5.0, False)}


def test_what_several_ranks_want_one_of_them_reads(tmp_path: Path) -> None:
    """Two copies of a model cost the bytes of one (P9), to which all ranks add alike; those of a node read its own.

    Who wants what follows from placements, and only ranks that read other files send each other what they want.
    """
    found = run_ranks(load_copies_of_shards, 4, tmp_path)
    needed = sum(ranks["needed"][1] for ranks in found) / 2
    assert all(good for ranks in found for good, _ in ranks.values())
    for way in ("trainer_loads", "function_loads"):
        read = [ranks[way][1] for ranks in found]
        assert sum(read) <= 1.05 * needed, (way, read)
        assert max(read) <= 1.3 * min(read), (way, read)
    for node in (found[:2], found[2:]):
        assert needed / 3 <= sum(ranks["apart"][1] for ranks in node) <= 1.2 * needed / 3


@pytest.mark.parametrize(
    "stage", ["exchange", "restore", *(pytest.param(stage, marks=pytest.mark.soak) for stage in ("compare", "read"))]
)
def test_a_rank_that_dies_is_named_by_the_others(tmp_path: Path, stage: str) -> None:
    """They do not wait longer than the timeout, wherever in a load it dies; the checkpoint stays as it was."""
    path = save_directory(tmp_path, 5) if stage == "exchange" else save_batch(tmp_path, 5)
    outcomes = run_ranks_to_the_end(load_and_die, 2, path, stage)
    assert isinstance(outcomes[1].error, ChildProcessError)
    assert isinstance(outcomes[0].error, RankError), outcomes[0]
    assert "rank 1" in str(outcomes[0].error)
    Catalog(tmp_path).verify(Catalog(tmp_path).manifests()[0])


@pytest.mark.parametrize("config", [None, {"fsdp": {}}], ids=["copies", "shards"])
def test_a_run_of_two_ranks_goes_on_as_if_it_had_not_been_interrupted(
    tmp_path: Path, config: dict[str, Any] | None
) -> None:
    """Autoresume finds the newest checkpoint on both, and the run ends with the same weights; so does a path."""
    first, second = run_ranks(train_with_an_interruption, 2, tmp_path, config)
    assert first == second == {"same": True, "first": 5, "loaded": 4, "from": True}
