"""Runs of models of transformers that are killed end as if nothing had happened."""

from __future__ import annotations

import signal
from pathlib import Path

import hf_run
import pytest
import torch
from relaunch import run
from small_run import differences

pytest.importorskip("peft", reason="the extra huggingface is not installed")


@pytest.mark.parametrize("kind", ["weights", "adapters"])
def test_kills_change_nothing(kind: str, tmp_path: Path) -> None:
    """SIGKILL in a batch and before a save, with dropout: losses, weights and the optimizer's state are those of a run
    that was never killed. Of adapters the checkpoints have these alone."""

    def launch(folder: str, die: str) -> tuple[int, dict[int, str]]:
        ended = run(hf_run.main, [str(tmp_path / folder), kind, die], {}, fork=True)
        return ended.code, ended.said

    code, whole = launch("whole", "")
    assert (code, sorted(whole)) == (0, list(range(1, 13)))
    for die in ("after_backward:4", "batch_checkpoint:9"):
        code, said = launch("killed", die)
        assert code == -signal.SIGKILL
        assert said.items() <= whole.items()
    code, said = launch("killed", "")
    assert code == 0
    assert said.items() <= whole.items()
    final = [torch.load(tmp_path / folder / "final.pt", weights_only=True) for folder in ("whole", "killed")]
    assert differences(*final) == []
    assert len(final[0]["model"]) == (8 if kind == "adapters" else 29)
