"""Several ranks save and load together."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import agreeing_ranks
import foreign_ranks
import pytest
import torch
from checkpoint import disk_ranks, saving_ranks
from checkpoint.conversion_ranks import KINDS, load_into_kinds, save_kinds
from checkpoint.failing_ranks import STAGES, THEIRS, all_failures
from checkpoint.loading_ranks import (
    load_all_kinds,
    load_and_die,
    on_nodes_of_their_own,
    resume,
    train_with_an_interruption,
)
from checkpoint.parts import save_batch, save_directory
from foreign_ranks import FSDP
from test_other_systems import DATA, WHOLE
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from composerlite.checkpoint import Catalog, load_keys, rng
from composerlite.checkpoint.format.sharded_index import leaves
from composerlite.checkpoint.place.commit import garbage
from composerlite.errors import IncompatibleCheckpointError, RankError
from composerlite.testing import run_ranks, run_ranks_to_the_end


def test_a_run_of_many_ranks_saves_one_file(tmp_path: Path) -> None:
    """Rank 0 writes it under its own name with the generators of all; every rank knows the same checkpoints."""
    told = run_ranks(saving_ranks.a_run, 2, tmp_path)
    assert told[0]["saved"] == [f"{tmp_path}/ba{n}-rank0.pt" for n in (3, 4)]
    assert told[0]["saved"] == told[1]["saved"]
    assert [answer["stalls"] for answer in told] == [4, 4]
    assert (tmp_path / "latest-rank0.pt").resolve() == tmp_path / "ba4-rank0.pt"
    (manifest,) = Catalog(tmp_path).manifests()[-1:]
    assert manifest.run.world_size == 2
    Catalog(tmp_path).verify(manifest)
    contents = torch.load(tmp_path / "ba4-rank0.pt", weights_only=True)
    for rank, answer in enumerate(told):
        rng.restore(contents["rng"], rank)
        assert random.random() == answer["next"]


def _as_dcp_reads_it(folder: Path) -> dict[str, Any]:
    """Every tensor in the directory, read by torch's own reader."""
    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in stored.items()
        if isinstance(value, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("how", [{}, {"lazy": True}, {"staging_bytes": 0}, {"asynchronous": False}])
def test_each_rank_writes_its_part_of_a_directory(tmp_path: Path, how: dict[str, Any]) -> None:
    """Plain torch reads what the ranks had when they saved, however it was copied. A directory that a kill has left
    empty, before the first file, is not in the way."""
    (tmp_path / "ba2").mkdir()
    told = run_ranks(saving_ranks.a_sharded_run, 2, tmp_path, (), how)
    assert told[0]["saved"] == told[1]["saved"] == [f"{tmp_path}/ba{n}" for n in (2, 3)]
    assert (tmp_path / "latest").resolve() == tmp_path / "ba3"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ba2", "ba3", "latest"]
    for manifest in Catalog(tmp_path).manifests():
        Catalog(tmp_path).verify(manifest)
        assert {Path(file.path).name[:4] for file in manifest.files} == {".met", "__0_", "__1_"}
    tensors = _as_dcp_reads_it(tmp_path / "ba3")
    for key, expected in told[0]["whole"].items():
        assert torch.equal(tensors[key], torch.from_numpy(expected)), key
    for rank, answer in enumerate(told):
        rng.restore([tensors["rng.0"], tensors["rng.1"]], rank)
        assert random.random() == answer["next"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("rank", [0, 1])
def test_no_directory_of_two_moments_is_committed(tmp_path: Path, rank: int) -> None:
    """One of the ranks changes its shards right after each save, in a way that torch does not count: every checkpoint
    that was committed is its batch's on all ranks, at most one failed, and all agree on which."""
    told, others = run_ranks(saving_ranks.saves_before_a_write, 2, tmp_path, rank)
    assert told.keys() == others.keys()
    assert len(told) >= 5
    assert "ba6" in told
    for name, expected in told.items():
        tensors = _as_dcp_reads_it(tmp_path / name)
        torn = [key for key, value in expected.items() if not torch.equal(tensors[key], torch.from_numpy(value))]
        assert not torn, (name, torn)
    assert [manifest.name for manifest in Catalog(tmp_path).manifests()] == [*told]


def test_what_is_spread_over_ranks_is_gathered_in_one_file(tmp_path: Path) -> None:
    """With ``state_dict_type='full'`` there is a plain file with whole tensors, however it was copied."""
    told, others = run_ranks(saving_ranks.full_saves, 2, tmp_path)
    for number, expected in enumerate(told):
        contents = torch.load(tmp_path / str(number) / "ba1.pt", weights_only=True)
        tensors = leaves(contents, as_dcp=True).values
        assert len(contents["rng"]) == 2
        for key, value in expected.items():
            assert torch.equal(tensors[key], torch.from_numpy(value)), (number, key)
            assert torch.equal(tensors[key], torch.from_numpy(others[number][key])), (number, key)


@pytest.mark.parametrize(
    ("rank", "stage"),
    [
        pytest.param(1, "snapshot", marks=pytest.mark.soak),
        (1, "write"),
        pytest.param(0, "vote", marks=pytest.mark.soak),
        (0, "commit"),
        (0, "answer"),
    ],
)
def test_a_killed_rank_is_named_and_the_last_checkpoint_stands(tmp_path: Path, rank: int, stage: str) -> None:
    """At whatever stage of a save it dies, the other raises within the timeout, and nothing half is found."""
    outcomes = run_ranks_to_the_end(saving_ranks.save_and_be_killed, 2, tmp_path, rank, stage)
    assert isinstance(outcomes[rank].error, ChildProcessError)
    assert f"rank {rank}" in outcomes[1 - rank].value
    catalog = Catalog(tmp_path)
    catalog.place.sweep(timedelta())  # as the next start does, and this, too
    place = catalog.place
    place.delete(garbage(place, place.files(), re.compile(r"ba\d")), folders=True)
    found = [manifest.name for manifest in catalog.manifests()]
    assert found == (["ba1", "ba2"] if stage == "answer" else ["ba1"])
    for manifest in catalog.manifests():
        catalog.verify(manifest)
    left = [path.name for path in tmp_path.iterdir() if path.suffix != ".lease"]
    assert sorted(left) == sorted(["latest", *found])
    assert (tmp_path / "latest" / ".metadata").exists()


def test_a_rank_that_cannot_write_fails_the_save_on_all(tmp_path: Path) -> None:
    """All raise the same error, which names the rank; or go on, and count it, where that is tolerated."""
    told = run_ranks(saving_ranks.saves_that_fail, 2, tmp_path)
    assert told[0] == told[1]
    assert told[0]["saved 1"] == ["ba1", "ba3"]
    assert told[0]["saved 0"] == ["ba1"]
    assert "rank 1 failed: OSError: [Errno 28]" in told[0]["raised"]
    assert [manifest.name for manifest in Catalog(tmp_path / "0").manifests()] == ["ba1"]
    assert not list(tmp_path.rglob("*.tmp-*"))


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


@pytest.mark.parametrize("system", ["Lightning", "transformers", "accelerate", "torchtitan", "DeepSpeed, stage 2"])
def test_two_ranks_of_fsdp_continue_as_the_system_itself(system: str) -> None:
    """Weights, moments, scheduler and step are in their places: the losses are those that the system had."""
    name = WHOLE[system][0]
    expected = json.loads((DATA / name.partition("/")[0] / "expected.json").read_text())["losses"]
    for losses in run_ranks(foreign_ranks.losses_of, 2, system, str(DATA / name), FSDP):
        assert losses == pytest.approx(expected, rel=1e-4)


def test_ranks_that_differ_save_the_same(tmp_path: Path) -> None:
    """Where an interval is a function or a clock, what rank 0 says holds for all. A rank that writes for longer than
    ranks are waited for, and lives, fails no save. A folder that is
    another one on each machine is refused for directories, with the way out; for files rank 0 has its own."""
    first, second = run_ranks(agreeing_ranks.all_agree, 2, tmp_path)
    assert first["intervals"] == second["intervals"]
    assert first["intervals"]["function"] == [f"ba{batch}.pt" for batch in (2, 4, 6, 8, 10, 12)]
    assert len(first["intervals"]["1s"]) >= 11
    assert 1 <= len(first["intervals"]["auto:1%"]) < 11
    assert first["slow"] == second["slow"] == ["ba1"]
    (manifest,) = Catalog(tmp_path / "slow").manifests()
    Catalog(tmp_path / "slow").verify(manifest)
    assert first["apart"]["sharded"] == second["apart"]["sharded"]
    assert "'run' of rank 0 is not the folder of the ranks [1]" in first["apart"]["sharded"]
    assert "state_dict_type='full'" in first["apart"]["sharded"]
    assert first["apart"]["full"] == second["apart"]["full"] == ["run/ep1-ba2-rank0.pt"]
    assert first["apart"]["DDP"] == second["apart"]["DDP"] == ["ddp/ep1-ba2-rank0.pt"]
    files = [f"{folder}/{name}-rank0.pt" for folder in ("ddp", "run") for name in ("ep1-ba2", "latest")]
    assert (first["apart"]["files"], second["apart"]["files"]) == (files, [])


def test_a_rank_does_not_save_alone_for_long(tmp_path: Path) -> None:
    """Where one fails in training while the other comes to save, that one raises what the first failed with and closes,
    long before its time is up, and no checkpoint is found."""
    first, second = run_ranks_to_the_end(agreeing_ranks.save_alone, 2, tmp_path)
    assert isinstance(second.error, OSError)
    raised, seconds = first.value
    assert "rank 1 failed: OSError: the data of this rank are gone" in raised
    assert seconds < 10
    assert Catalog(tmp_path).manifests() == []


def test_every_kind_of_run_goes_on_from_every_kind_of_checkpoint(tmp_path: Path) -> None:
    """Weights, buffers and the optimizer are the same to the bit, also where the optimizer had not stepped yet."""
    by_count = {count: [kind for kind in KINDS if KINDS[kind] == count] for count in (1, 2, 4)}
    save_kinds(tmp_path, by_count[1])
    for count in (2, 4):
        run_ranks(save_kinds, count, tmp_path, by_count[count])
    assert load_into_kinds(tmp_path, by_count[1]) == []
    for count in (4, 2):
        assert run_ranks(load_into_kinds, count, tmp_path, by_count[count]) == [[]] * count


def test_each_node_keeps_what_its_ranks_write(tmp_path: Path) -> None:
    """Its folder has their files, the index and a record of all files; older checkpoints go on all. It is loaded as it
    was saved, in another topology, and where each node has the disk of the other: what is missing is sent."""
    for told in run_ranks(disk_ranks.saves_and_loads, 4, tmp_path):
        for kind in ("FSDP", "HSDP"):
            assert told[f"{kind} saved"] == ["ba2", "ba3"]
            assert [told[f"{kind} {how}"] for how in ("by hand", "latest", "moved")] == [True] * 3, kind
            assert told[f"{kind} found"] == f"{kind}/ba3"
    for node in (0, 1):
        folder = tmp_path / f"node{node}" / "FSDP"
        assert sorted(path.name for path in folder.iterdir()) == ["ba2", "ba3", "latest"]
        assert (folder / "latest").resolve().name == "ba3"
        files = [".metadata", f"__{2 * node}_0_ID.distcp", f"__{2 * node + 1}_0_ID.distcp"]
        assert [re.sub("_[0-9a-f]{16}", "_ID", path.name) for path in sorted((folder / "ba3").iterdir())] == files
        for manifest in Catalog(folder).manifests():
            assert (manifest.node, len(manifest.files)) == (node, 5)
            Catalog(folder).verify(manifest)


@pytest.mark.parametrize("saves", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_dies_in_a_save_changes_nothing(tmp_path: Path, rank: int, saves: int) -> None:
    """The other one has committed. It says which died, and the same nodes go on from the newest checkpoint that both
    have, or from none. Then they save again, and the older one goes from all disks."""
    outcomes = run_ranks_to_the_end(disk_ranks.save_and_be_killed, 2, tmp_path, rank, "commit", saves)
    assert isinstance(outcomes[rank].error, ChildProcessError)
    assert f"rank {rank}" in outcomes[1 - rank].value
    for told in run_ranks(disk_ranks.go_on, 2, tmp_path):
        assert told["found"] == (f"run/ba{saves - 1}" if saves > 1 else None)
        assert told["latest"] == (f"ba{saves - 1}" if saves > 1 else None)
        assert told["batch"] == saves - 1
        assert told["left"] == [f"ba{saves}", "latest"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_deletion_that_fails_on_another_node_is_told_as_in_one_folder(tmp_path: Path, asynchronous: bool) -> None:
    """It is an error with the rank and the file, or a warning for each with the number in a row, where failures are
    tolerated; the newest checkpoint is there, and counts as saved."""
    for told in run_ranks(disk_ranks.fail_to_delete_on_the_second_node, 2, tmp_path / "few", asynchronous, 0):
        assert re.search(r"OSError: \[Errno 5\] .*ba1/(__1_0_\w+\.distcp|\.metadata).* rank 1", told["outcome"][0])
        assert told["saved"][-1] in ("ba2", "ba3")
    tolerated = run_ranks(disk_ranks.fail_to_delete_on_the_second_node, 2, tmp_path / "many", asynchronous, 10)
    for told in tolerated:
        assert told["outcome"] == [None, None]
        assert told["saved"] == ["ba3"]
    warnings = [line.partition(": OSError: [Errno 5]")[0] for line in tolerated[0]["warnings"]]
    said = "a checkpoint could not be deleted ({} in a row, save_failure_limit=10)"
    assert warnings == [said.format(number) for number in (1, 2)]


def test_what_one_node_has_lost_is_not_resumed_from(tmp_path: Path) -> None:
    """The newest that is whole on all disks is; what is damaged is set aside on all. Disks that have nothing of the run
    are an error, and so are fewer nodes than the checkpoint lies on: both name what is missing."""
    for rank, told in enumerate(run_ranks(disk_ranks.lose_parts, 2, tmp_path)):
        assert [told[name] for name in ("whole", "damaged", "gone")] == ["run/ba3", "run/ba2", "run/ba1"]
        assert "ba3.damaged" in told["damaged here"]
        assert rank == 1 or "ba2" in told["gone here"], "a part of a checkpoint is not damaged"
        assert "'ba2' is visible to rank 0 but not to the ranks [1]" in told["all gone"]
    with pytest.raises(
        IncompatibleCheckpointError, match=r"'__1_0_\w+\.distcp' was saved to the disk of node 1.*all nodes"
    ):
        list(load_keys(tmp_path / "node0" / "run" / "ba1", ["state.model.0.weight"]))
