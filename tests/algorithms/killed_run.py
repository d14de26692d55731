"""A program that trains with many algorithms, and kills itself in the forward pass that it is told."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path

import torch
from resumed_training import new_trainer, trained

from composerlite import Callback, Logger, State
from composerlite.algorithms import (
    EMA,
    SAM,
    ChannelsLast,
    CutMix,
    CutOut,
    LabelSmoothing,
    LayerFreezing,
    LowPrecisionGroupNorm,
    LowPrecisionLayerNorm,
    MixUp,
    ProgressiveResizing,
    StochasticDepth,
)

__all__ = ["main"]


class Killed(Callback):
    """Ends the process in a forward pass, without a word, as soon as there is a checkpoint to go on from."""

    def __init__(self, number: int, checkpoint: Path) -> None:
        self._left = number
        self._checkpoint = checkpoint

    def after_forward(self, state: State, logger: Logger) -> None:
        self._left -= 1
        if self._left == 0:
            until = time.monotonic() + 60
            while not self._checkpoint.exists() and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, kill_in: str) -> None:
    """Train in ``folder`` and write down a digest of what there is at the end."""
    algorithms = [
        ChannelsLast(),
        LowPrecisionLayerNorm(),
        LowPrecisionGroupNorm(),
        StochasticDepth("ResNetBottleneck", drop_rate=0.4, drop_warmup="0.5dur"),
        ProgressiveResizing(delay_fraction=0.1, size_increment=1),
        CutOut(length=0.3),
        MixUp(alpha=0.4),
        CutMix(interpolate_loss=False),
        LabelSmoothing(0.1),
        LayerFreezing(0.0, 0.8),
        SAM(rho=0.1, interval=2),
        EMA(half_life="3ba"),
    ]
    trainer = new_trainer(
        algorithms,
        Path(folder) / "checkpoints",
        run_name="killed",
        autoresume=True,
        max_duration="3ep",
        precision="amp_bf16",
        device_train_microbatch_size=3,
        callbacks=[Killed(int(kill_in), Path(folder) / "checkpoints" / "latest-rank0.pt")],
    )
    begun = int(trainer.state.timestamp.batch)
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors(trained(trainer)).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    (Path(folder) / "end.txt").write_text(f"{begun} {digest.hexdigest()}")


def _tensors(value: object, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {name: value.detach().reshape(-1)}
    found: dict[str, torch.Tensor] = {}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        found |= _tensors(item, f"{name}/{key}")
    return found
