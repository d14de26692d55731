"""A run that saves each batch and resumes by itself, as a program that a test kills, and as one of two ranks."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpu_parts import build

from composerlite import Callback, Logger, State

SHARED = "cuda:0"
"""The GPU that two ranks have together."""


class Told(Callback):
    """Prints each batch, and gives a test the time to kill the run."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """Print it."""
        sys.stdout.write(f"batch {int(state.timestamp.batch)}\n")
        sys.stdout.flush()
        time.sleep(0.1)


def train_together(folder: str, device: str) -> list[str]:
    """One of several ranks that share a device, over gloo; the sums of its weights."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    how: dict[str, Any] = {"load_path": str(Path(folder) / "ba3.pt")} if (Path(folder) / "ba3.pt").exists() else {}
    if how:
        how["save_overwrite"] = True
    with build(Path(folder), device=SHARED if device == "cuda" else device, **how) as trainer:
        trainer.fit()
        return [str(float(parameter.double().sum())) for parameter in trainer.state.model.parameters()]


if __name__ == "__main__":
    with build(Path(sys.argv[1]), run_name="killed", autoresume=True, callbacks=Told()) as trainer:
        trainer.fit()
