"""The newest state in memory: a process that dies loses a batch at most, and not what it did since the last save."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import preempted_ranks
import pytest
import torch
from checkpoint.tiny_training import CrashError, Record, trainer
from small_run import BATCHES, Cell, build, differences
from test_preemption import launch, whole

from composerlite import Callback, Logger, State
from composerlite.checkpoint import Catalog
from composerlite.errors import ConfigError
from composerlite.loggers import RemoteUploaderDownloader
from composerlite.testing import run_ranks, run_ranks_to_the_end

__all__ = ["whole"]
pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no folder in memory")
ORDER: dict[str, Any] = {"interval": "25ba", "evaluate": "20ba"}


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory of this test's own: others run beside it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class CrashIn(Callback):
    """Raises at the end of a batch of one call of ``fit``."""

    def __init__(self, call: int, batch: int) -> None:
        self.moment = call, batch

    def batch_end(self, state: State, logger: Logger) -> None:
        if (len(state.fit_starts), int(state.timestamp.batch)) == self.moment:
            raise CrashError


def kept(memory: Path) -> list[str]:
    return sorted(path.name for path in memory.rglob("*") if path.suffix in (".pt", ".distcp", ".tmp-0123456789abcdef"))


def emptied(memory: Path) -> None:
    """See that something is there, and remove it."""
    (own,) = memory.iterdir()
    shutil.rmtree(own)


@pytest.mark.parametrize("moment", [["after_backward", 18, 1], ["batch_end", 41, 1], ["eval_batch_end", 40, 2]])
def test_a_killed_process_loses_a_batch_at_most(tmp_path: Path, memory: Path, whole: Any, moment: list[Any]) -> None:
    """SIGKILL far from the last save on the disk: the same command goes on from memory, to the same end, and then the
    memory is free."""
    said, end = whole(evaluate="20ba")
    one = launch(tmp_path, at=moment, signals=["SIGKILL"], memory=str(memory), **ORDER)
    assert one.code == -signal.SIGKILL
    assert kept(memory)
    two = launch(tmp_path, memory=str(memory), **ORDER)
    assert two.code == 0, two.log
    assert two.batches[0] in (one.batches[-1], one.batches[-1] + 1)
    assert two.batches[-1] == BATCHES
    assert [line for line in said if line not in two.said] == said[: len(said) - len(two.said)]
    assert differences(torch.load(tmp_path / "final.pt", weights_only=True), end) == []
    assert kept(memory) == []


def test_memory_that_is_slower_than_training_costs_time_and_no_batch(tmp_path: Path, memory: Path) -> None:
    """Where a save takes several batches, a process that is killed at the end of one has lost that one alone."""
    for moment in (["batch_end", 11, 1], ["eval_batch_end", 20, 2]):
        folder = tmp_path / str(moment[1])
        one = launch(folder, at=moment, signals=["SIGKILL"], slow_memory=0.03, memory=str(memory), **ORDER)
        assert one.code == -signal.SIGKILL
        two = launch(folder, at=["batch_end", moment[1] + 1, 1], signals=["SIGKILL"], memory=str(memory), **ORDER)
        assert one.batches[-1] == moment[1]
        assert two.batches[0] == moment[1]
        emptied(memory)


@pytest.mark.parametrize("fsdp", [False, True], ids=["DDP", "FSDP"])
def test_a_killed_rank_loses_a_batch_at_most(tmp_path: Path, memory: Path, fsdp: bool) -> None:
    """All ranks go on from memory, where the disk has an older checkpoint, to the same end."""
    train = functools.partial(preempted_ranks.train, fsdp=fsdp)
    whole = run_ranks(train, 2, tmp_path / "whole", None, dist_timeout=None)
    kept_in_memory = functools.partial(train, memory=str(memory), signalled=signal.SIGKILL)
    died = run_ranks_to_the_end(kept_in_memory, 2, tmp_path / "run", (1, "batch_end", 5, 1), dist_timeout=None)
    assert "was killed by SIGKILL" in str(died[1].error)
    assert [manifest.batch for manifest in Catalog(tmp_path / "run").manifests()] == [3]
    assert kept(memory)
    ended = run_ranks(kept_in_memory, 2, tmp_path / "run", None, dist_timeout=None)
    assert [(rank["first"], rank["last"]) for rank in ended] == [(4, preempted_ranks.LAST)] * 2
    for rank, alone in zip(ended, whole, strict=True):
        assert rank["seen"] == alone["seen"][4:]
        assert all(torch.equal(rank["weights"][name], tensor) for name, tensor in alone["weights"].items())
    assert kept(memory) == []


def test_memory_is_given_back_when_the_disk_has_as_much(tmp_path: Path, memory: Path) -> None:
    """A preempted run saves to the disk, also where a kill has left a part of a file in memory."""
    zero = launch(tmp_path, at=["after_forward", 12, 1], signals=["SIGKILL"], memory=str(memory), **ORDER)
    assert zero.code == -signal.SIGKILL
    left = next(memory.rglob("*-rank0.pt"))
    left.with_name(".ep0-ba3-rank0.pt.tmp-0123456789abcdef").write_bytes(left.read_bytes()[:100])
    one = launch(tmp_path, at=["after_forward", 18, 1], memory=str(memory), **ORDER)
    assert one.code == 143
    assert kept(memory) == []


def test_memory_that_counts_anew_is_kept_until_the_disk_has_it(tmp_path: Path, memory: Path) -> None:
    """A call of ``fit`` with ``reset_time`` fails before it saves to the disk, where one of an earlier call has
    more batches: the run resumes from memory, and does no batch of that call again but the last."""
    how: dict[str, Any] = {
        "save_folder": tmp_path,
        "save_interval": "8ba",
        "save_overwrite": True,
        "save_memory_interval": "1ba",
        "save_memory_folder": memory,
        "max_duration": "8ba",
        "autoresume": True,
    }
    crash = CrashIn(call=2, batch=6)
    with trainer(callbacks=[crash], **how) as run:
        run.fit()
        with pytest.raises(CrashError):
            run.fit(duration="8ba", reset_time=True)
    resumed = Record()
    with trainer(callbacks=[resumed], **how) as run:
        run.fit()
        run.fit(duration="8ba", reset_time=True)
    assert resumed.batches in ([6, 7, 8], [7, 8])
    assert kept(memory) == []


def test_a_lost_machine_costs_no_more_than_without(tmp_path: Path, memory: Path, whole: Any) -> None:
    """With the memory gone the run goes on from the disk."""
    said, _ = whole(evaluate="20ba")
    launch(tmp_path, at=["batch_end", 51, 1], signals=["SIGKILL"], memory=str(memory), **ORDER)
    emptied(memory)
    two = launch(tmp_path, memory=str(memory), **ORDER)
    assert two.batches[0] in (26, 51), "the save of batch 50 begins when that of batch 25 is there, and may be cut off"
    assert two.batches == list(range(two.batches[0], BATCHES + 1))
    assert two.said == said[-len(two.said) :]


def test_what_would_be_of_no_use_is_refused(tmp_path: Path) -> None:
    """Without autoresume, without another saver, without such a folder: an error before training."""
    for wrong in ({}, {"autoresume": True, "run_name": "r"}, {"save_folder": tmp_path}):
        with pytest.raises(ConfigError, match="needs autoresume=True and a save_folder"):
            build(Cell(), save_memory_interval="1ba", **wrong)
    with pytest.raises(ConfigError, match="no such folder"):
        build(
            Cell(),
            save_memory_interval="1ba",
            save_memory_folder="/no/such",
            autoresume=True,
            save_folder=tmp_path,
            run_name="r",
        )


# ── whose memory it is ───────────────────────────────────────────────────────────────────────────────────────────────
def test_a_run_of_the_same_name_in_another_folder_starts_with_its_own_weights(tmp_path: Path, memory: Path) -> None:
    """Neither another project, nor the same one after its folder was emptied, nor a copy of it, goes on from what a
    killed run left in memory. The run itself does go on from it."""
    a, b = tmp_path / "a", tmp_path / "b"
    assert launch(a, at=["batch_end", 4, 1], signals=["SIGKILL"], memory=str(memory), **ORDER).code == -signal.SIGKILL
    assert kept(memory)
    shutil.copytree(a, tmp_path / "copy", symlinks=True)
    for folder in (b, tmp_path / "copy"):
        other = launch(folder, at=["batch_end", 2, 1], signals=["SIGKILL"], memory=str(memory), **ORDER)
        assert other.batches[0] == 1
    again = launch(a, at=["batch_end", 6, 1], signals=["SIGKILL"], memory=str(memory), **ORDER)
    assert again.batches[0] in (4, 5)
    shutil.rmtree(a)
    emptied_folder = launch(a, at=["batch_end", 2, 1], signals=["SIGKILL"], memory=str(memory), **ORDER)
    assert emptied_folder.batches[0] == 1


def test_an_emptied_bucket_is_another_one(tmp_path: Path, memory: Path, s3_server: Any) -> None:
    """A run that was killed before its first upload resumes from memory, also when its staging folder is gone; where
    the objects of its prefix were removed since, it starts with its own weights."""
    bucket = s3_server.new_bucket()
    order: dict[str, Any] = {"save_folder": f"s3://{bucket}/run", "memory": str(memory), **ORDER}
    environment = dict(s3_server.environment)
    for batch, first in ((4, [1]), (6, [4, 5])):
        one = launch(tmp_path, environment, at=["batch_end", batch, 1], signals=["SIGKILL"], **order)
        assert one.code == -signal.SIGKILL, one.log
        assert one.batches[0] in first
    client = s3_server.client()
    for info in client.list_objects_v2(Bucket=bucket)["Contents"]:
        client.delete_object(Bucket=bucket, Key=info["Key"])
    one = launch(tmp_path, environment, at=["batch_end", 2, 1], signals=["SIGKILL"], **order)
    assert one.batches[0] == 1
    shutil.rmtree(tmp_path / "staged")  # what tells one bucket from another is not there
    one = launch(tmp_path, environment, at=["batch_end", 4, 1], signals=["SIGKILL"], **order)
    assert one.batches[0] in (2, 3)


def test_checkpoints_in_memory_are_not_uploaded(
    tmp_path: Path, memory: Path, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A logger uploads those of the save folder alone: one of each batch would cost time and room in the bucket."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = s3_server.new_bucket()
    arguments: dict[str, Any] = {"save_folder": tmp_path / "save", "autoresume": True, "run_name": "run"}
    arguments |= {"save_interval": "25ba", "save_memory_interval": "20ba", "save_memory_folder": memory}
    with build(Cell(), loggers=[RemoteUploaderDownloader(f"s3://{bucket}")], **arguments) as trainer:
        trainer.fit()
    names = [info["Key"] for info in s3_server.client().list_objects_v2(Bucket=bucket)["Contents"]]
    assert names
    assert [name for name in names if not name.startswith(f"{tmp_path}/save/".lstrip("/"))] == []


def _link(own: Path) -> None:
    (own.parent / "planted").mkdir()
    own.symlink_to("planted")


def _writable(own: Path) -> None:
    own.mkdir()
    own.chmod(0o777)


def _of_another(own: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    own.mkdir(mode=0o700)
    os.chown(own, 12345, 12345)


@pytest.mark.parametrize("plant", [_link, _writable, _of_another, Path.touch])
@pytest.mark.parametrize("level", ["user", "run"])
def test_memory_that_another_user_may_have_filled_is_refused(
    tmp_path: Path, memory: Path, plant: Callable[[Path], None], level: str
) -> None:
    """Its name is predictable: a folder that is a link, of somebody else, or writable by others is an error before
    training that says why, and is not touched."""
    arguments: dict[str, Any] = {"save_folder": tmp_path / "save", "autoresume": True, "run_name": "run"}
    arguments |= {"save_memory_interval": "1ba", "save_memory_folder": memory}
    with build(Cell(), **arguments):
        (user,) = memory.iterdir()
        (run,) = user.iterdir()
        assert [path.stat().st_mode & 0o777 for path in (user, run)] == [0o700, 0o700]
    target = user if level == "user" else run
    shutil.rmtree(target)
    plant(target)
    with pytest.raises(ConfigError, match=r"save_memory_folder.*is refused"):
        build(Cell(), **arguments)
    assert list(target.iterdir() if target.is_dir() else []) == []
