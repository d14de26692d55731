"""CheckpointManager in a loop without a Trainer: kills, damage, events, errors, several ranks."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import manager_ranks
from forked import run_forked
from parts import flip
from torch import nn

from composerlite.checkpoint import CheckpointManager
from composerlite.errors import CheckpointError, ConfigError, IncompatibleCheckpointError
from composerlite.testing import run_ranks

STEPS, EVERY = 14, 3


class Loop:
    """A small training: dropout draws random numbers, and the data depend on the position."""

    def __init__(self, width: int = 8) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(width, 16), nn.Dropout(0.2), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.9)
        self.position = {"seen": 0}
        self.width = width

    @property
    def parts(self) -> dict[str, Any]:
        """What is saved."""
        names = "model", "optimizer", "scheduler", "position"
        return {name: getattr(self, name) for name in names}

    def step(self) -> None:
        """One optimizer step, on the data of the position."""
        self.position["seen"] += 4
        data = torch.randn(4, self.width, generator=torch.Generator().manual_seed(self.position["seen"]))
        self.model(data).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def train(self, folder: Path, *, kill_at: int | None = None, **arguments: Any) -> list[str]:
        """Train to the end, or to a kill; returns the events."""
        events: list[str] = []
        with CheckpointManager(folder, **arguments, **self.parts) as checkpoints:
            for step in range(checkpoints.restore() + 1, STEPS + 1):
                self.step()
                if step % EVERY == 0:
                    checkpoints.save(step)
                if step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                events += [f"{event.what} {event.name}" for event in checkpoints.poll()]
        return events

    def numbers(self) -> list[torch.Tensor]:
        """All that training has changed, and the next random number."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        rates = torch.tensor([*self.scheduler.get_last_lr(), self.position["seen"]], dtype=torch.float64)
        return [*self.model.parameters(), *moments, rates, torch.rand(1)]


def killed_loop(folder: str, at: str) -> None:
    """Train until SIGKILL."""
    torch.set_num_threads(1)
    Loop().train(Path(folder), kill_at=int(at))


def test_a_killed_loop_ends_with_the_same_bits(tmp_path: Path) -> None:
    """SIGKILL at several steps, also right after a save has begun; the last process ends as if nothing had happened."""
    for at in (2, 3, 7, 9, 13):
        done = run_forked(killed_loop, str(tmp_path / "killed"), str(at), cwd=tmp_path)
        assert done.returncode == -signal.SIGKILL, done.stderr
    found: list[list[torch.Tensor]] = []
    for name in ("killed", "undisturbed"):
        loop = Loop()
        loop.train(tmp_path / name)
        found.append(loop.numbers())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_finished_loop_restores_its_end_and_damage_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest is restored; a damaged one is skipped, with a warning, for the one before."""
    Loop().train(tmp_path, keep=2)
    assert {path.name for path in tmp_path.glob("step*.pt")} == {"step9.pt", "step12.pt"}
    flip(tmp_path / "step12.pt", 3000)
    with CheckpointManager(tmp_path, **Loop().parts) as checkpoints:
        assert checkpoints.restore() == 9
    assert "step12.pt" in caplog.text
    contents = torch.load(tmp_path / "step9.pt", weights_only=True)["state"]
    Loop().model.load_state_dict(contents["model"])


def test_an_ephemeral_checkpoint_is_deleted_when_there_is_a_newer_one(tmp_path: Path) -> None:
    """Also in a loop that keeps all others."""
    loop = Loop()
    with CheckpointManager(tmp_path, **loop.parts) as checkpoints:
        checkpoints.restore()
        for step in (1, 2, 3):
            checkpoints.save(step, ephemeral=step == 2)
    assert sorted(path.name for path in tmp_path.glob("step*")) == ["step1.pt", "step3.pt"]


@pytest.mark.parametrize("left", ["none", "older"])
def test_the_link_to_the_newest_never_leads_to_a_file_that_is_gone(left: str, tmp_path: Path) -> None:
    """The next start leads it to the checkpoint before, or removes it."""
    latest, progress = tmp_path / "latest-rank0.pt", {"seen": 1}
    with CheckpointManager(tmp_path, progress=progress) as checkpoints:
        for step in range(checkpoints.restore() + 1, 3 if left == "older" else 2):
            checkpoints.save(step)
    latest.resolve().unlink()
    with CheckpointManager(tmp_path, progress=progress) as checkpoints:
        assert checkpoints.restore() == (1 if left == "older" else 0)
        assert latest.exists() == latest.is_symlink() == (left == "older")


def test_a_failed_save_is_raised_in_the_loop(tmp_path: Path) -> None:
    """With the next call; or tolerated, with an event and a warning."""
    loop = Loop()
    parts: dict[str, Any] = {**loop.parts, "more": {"what": lambda: None}}  # cannot be pickled

    def save_once() -> None:
        with CheckpointManager(tmp_path / "a", **parts) as checkpoints:
            checkpoints.restore()
            checkpoints.save(1)

    with pytest.raises(CheckpointError):
        save_once()
    with CheckpointManager(tmp_path / "b", options={"failure_limit": 1}, **parts) as checkpoints:
        checkpoints.restore()
        checkpoints.save(1)
        assert [event.what for event in checkpoints.poll()] == ["begun", "failed"]


def test_an_error_of_the_loop_is_the_error(tmp_path: Path) -> None:
    """The block waits for the save in flight, and the error of the loop is raised."""
    loop = Loop()

    def fail() -> None:
        with CheckpointManager(tmp_path, **loop.parts) as checkpoints:
            checkpoints.restore()
            checkpoints.save(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with CheckpointManager(tmp_path, **loop.parts) as checkpoints:
        assert checkpoints.restore() == 1


def test_parts_that_differ_are_listed(tmp_path: Path) -> None:
    """Before anything is restored."""
    Loop().train(tmp_path)
    other = Loop(width=4)
    before = next(other.model.parameters()).detach().clone()
    parts: dict[str, Any] = {**other.parts, "averages": {}}
    del parts["position"]
    with CheckpointManager(tmp_path, **parts) as checkpoints, pytest.raises(IncompatibleCheckpointError) as raised:
        checkpoints.restore()
    for said in (
        "'averages' is missing in the checkpoint",
        "'position' of the checkpoint",
        "(16, 8) there and (16, 4)",
    ):
        assert said in str(raised.value)
    assert torch.equal(before, next(other.model.parameters()))


def test_misuse_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    """Options, parts, and the order of calls."""
    loop = Loop()
    with pytest.raises(ConfigError, match=r"no option 'overwite'.*overwrite"):
        CheckpointManager(tmp_path, options={"overwite": True})
    with pytest.raises(ConfigError, match=r"the part 'model' is of the type int"):
        CheckpointManager(tmp_path, model=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"the part 'timestamp'"):
        CheckpointManager(tmp_path, timestamp=loop.position)
    with pytest.raises(ConfigError, match=r"give folder, filename and keep as arguments"):
        CheckpointManager(tmp_path, options={"filename": "ep{epoch}.pt"}, **loop.parts)
    with pytest.raises(ConfigError, match=r"Leave out in_memory, replication and on_exception, which need a Trainer"):
        CheckpointManager(tmp_path, options={"in_memory": True}, **loop.parts)
    with pytest.raises(ConfigError, match=re.escape("call restore() before the first save")):
        CheckpointManager(tmp_path, **loop.parts).save(1)
    with pytest.raises(ConfigError, match=re.escape("call restore() before the first save")):
        CheckpointManager(tmp_path / "{run_name}", **loop.parts).take_leases()
    with CheckpointManager(tmp_path, **loop.parts) as checkpoints:
        checkpoints.restore()
        with pytest.raises(ConfigError, match=re.escape("save(None): expected the number of steps")):
            checkpoints.save()


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_restore_the_same_step_and_their_own_parts(tmp_path: Path, sharded: bool) -> None:
    """Two ranks, with a replicated or a sharded model; each has its own position in the data."""
    first = run_ranks(manager_ranks.a_loop, 2, tmp_path, 4, sharded)
    second = run_ranks(manager_ranks.a_loop, 2, tmp_path, 7, sharded)
    undisturbed = run_ranks(manager_ranks.a_loop, 2, tmp_path / "undisturbed", 7, sharded)
    assert [one["restored"] for one in first] == [0, 0]
    assert [one["restored"] for one in second] == [4, 4]
    assert [one["seen"] for one in second] == [[0, 7], [1, 7]]
    assert [one["numbers"] for one in second] == [one["numbers"] for one in undisturbed]
