"""A save in the background makes few calls: training, in the same interpreter, waits at each of them (decision 106)."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite import ComposerModel, Trainer

NUMBERS, TENSORS = 4_000_000, 8  # 128 MB
MEGABYTES = 4 * NUMBERS * TENSORS // 1_000_000


class Large(ComposerModel):
    """A layer, and weights that nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.kept = nn.ParameterList(
            nn.Parameter(torch.randn(NUMBERS), requires_grad=number == 0) for number in range(TENSORS)
        )

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0]) + 0 * self.kept[0][0]

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


def calls_beside(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls, of Python and of C, that threads of checkpoints make which ``work`` starts.

    What is collected as garbage meanwhile would add the finalizers of tests before this one.
    """
    calls, run, turns = Counter[str](), threading.Thread.run, threading.Lock()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event in {"call", "c_call"}:
            calls[f"{getattr(argument, '__qualname__', '')} in {frame.f_code.co_qualname}"] += 1

    def counted(thread: threading.Thread) -> None:
        if thread.name.startswith("checkpoint-"):
            with turns:  # Python raises in the second of two threads that are profiled from the same moment
                sys.setprofile(note)
        run(thread)

    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "run", counted)
            work()
    finally:
        gc.enable()
    return calls


def test_what_a_trainer_saves_is_written_in_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed, searched for values that are not finite and written in pieces of 32 MiB."""
    data = DataLoader(TensorDataset(torch.randn(12, 2), torch.randint(2, (12,))), batch_size=2)

    def train() -> None:
        with Trainer(
            model=Large(),
            train_dataloader=data,
            max_duration="6ba",
            save_folder=str(tmp_path),
            save_interval="3ba",
            save_filename="ba{batch}",
            progress_bar=False,
        ) as trainer:
            trainer.fit()

    calls = calls_beside(train, monkeypatch)
    assert {path.name for path in tmp_path.glob("ba*")} == {"ba3", "ba6"}
    # 28 when this was written, 85 with pieces of 512 KiB.
    assert calls.total() / (2 * MEGABYTES) < 50, calls.most_common(20)
