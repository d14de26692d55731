"""A resumed run sees exactly the batches that the interrupted one would have seen, whatever loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from data_kinds import KINDS
from trainer_parts import Seen, Step, build, same, weights


# torchdata asks torch for it; torch 2.13 says that nobody should.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def run(loader: Any, **arguments: Any) -> tuple[list[Step], dict[str, torch.Tensor]]:
    """Train three epochs with dropout; what was seen, and the weights at the end."""
    seen = Seen()
    defaults: dict[str, Any] = {"max_duration": "3ep", "run_name": "run", "dropout": 0.5}
    with build(train_dataloader=loader, callbacks=seen, **{**defaults, **arguments}) as trainer:
        trainer.fit()
        return seen.steps, weights(trainer)


def checkpoints(folder: Path) -> dict[int, Path]:
    """The files of a run that saved every batch, by batch count."""
    return {int(path.name.split("ba")[1].split("-")[0]): path for path in folder.glob("ep*.pt")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_sees_the_rest_of_the_batches(kind: str, tmp_path: Path) -> None:
    """In the middle of the first and the second epoch and between them: the batches, and the weights at the end."""
    steps, end = run(KINDS[kind](), save_folder=tmp_path, save_interval="1ba")
    per_epoch = len(steps) // 3
    saved = checkpoints(tmp_path)
    for batch in (2, per_epoch, per_epoch + 3):
        torch.load(saved[batch], weights_only=True)  # what any torch opens
        rest, weights_of_rest = run(KINDS[kind](), load_path=saved[batch])
        assert rest == steps[batch:], f"the batches differ after a resume at batch {batch}"
        assert same(weights_of_rest, end)
