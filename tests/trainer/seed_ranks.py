"""What a rank does in the test of large seeds."""

from __future__ import annotations

import random
from typing import Any

import torch
from trainer_parts import At, build

from composerlite import Event

__all__ = ["train"]


def train(seed: int) -> tuple[list[Any], int]:
    """What the generators of this rank give in the first batch, and the seed of the rank."""
    drawn: list[Any] = []
    note = At(Event.BATCH_END, lambda state: drawn.append((random.random(), torch.rand(()).item())))
    with build(seed=seed, max_duration="1ba", callbacks=note) as trainer:
        trainer.fit()
        return drawn, trainer.state.seed
