"""A run with an algorithm resumes bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from combinations import covering
from resumed_training import LanguageModel, Sequences, assert_resumes_bit_for_bit
from short_run import BATCHES, assert_resumes_exactly

from composerlite.algorithms import (
    EMA,
    SAM,
    SWA,
    ChannelsLast,
    CutMix,
    CutOut,
    LayerFreezing,
    LowPrecisionGroupNorm,
    LowPrecisionLayerNorm,
    MixUp,
    ProgressiveResizing,
    SeqLengthWarmup,
    StochasticDepth,
)
from composerlite.core import Algorithm

MIXED = {"precision": "amp_bf16", "device_train_microbatch_size": 3}
RUNS: dict[str, tuple[Callable[[], list[Algorithm]], dict[str, Any]]] = {
    "CutMix": (lambda: [CutMix()], {}),
    "CutMix, mixed precision": (lambda: [CutMix()], MIXED),
    "CutOut": (lambda: [CutOut(num_holes=2)], MIXED),
    "MixUp": (lambda: [MixUp(alpha=0.5)], {}),
    "MixUp, mixed precision": (lambda: [MixUp(alpha=0.5)], MIXED),
    "resize": (lambda: [ProgressiveResizing("resize", 0.5, 0.2, 0.2, 1)], {"device_train_microbatch_size": 3}),
    "crop": (lambda: [ProgressiveResizing("crop", 0.5, 0.2, 0.2, 1)], {"device_train_microbatch_size": 3}),
    "truncate": (lambda: [SeqLengthWarmup(0.9, 3, 16, 1)], {"model": LanguageModel, "data": Sequences}),
    "split": (lambda: [SeqLengthWarmup(0.9, 3, 16, 1, False)], {"model": LanguageModel, "data": Sequences}),
    "LayerFreezing": (lambda: [LayerFreezing(0.0, 0.9)], {"at": (2, 4, 5, 7), "max_duration": "3ep"}),
    "LayerFreezing, mixed precision": (
        lambda: [LayerFreezing(0.0, 0.9)],
        {"at": (2, 4, 5, 7), "max_duration": "3ep", **MIXED},
    ),
    "SAM": (lambda: [SAM(rho=0.3, interval=2), MixUp()], {}),
    "SAM, mixed precision": (lambda: [SAM(rho=0.3, interval=2), MixUp()], MIXED),
    "ChannelsLast": (lambda: [ChannelsLast()], {"precision": "amp_bf16"}),
    "LowPrecisionLayerNorm": (lambda: [LowPrecisionLayerNorm()], MIXED),
    "LowPrecisionGroupNorm": (lambda: [LowPrecisionGroupNorm()], MIXED),
    "StochasticDepth by block": (
        lambda: [StochasticDepth("ResNetBottleneck", "block", drop_rate=0.5, drop_warmup="5ba")],
        {"device_train_microbatch_size": 3},
    ),
    "StochasticDepth by sample": (lambda: [StochasticDepth("ResNetBottleneck", "sample", drop_rate=0.5)], {}),
}
AVERAGES: dict[str, Callable[[], list[Algorithm]]] = {
    "EMA in batches": lambda: [EMA(half_life="3ba")],
    "EMA every other batch": lambda: [EMA(half_life="3ba", update_interval="2ba")],
    "EMA in epochs": lambda: [EMA(half_life="1ep")],
    "EMA from half of training": lambda: [EMA(half_life=None, smoothing=0.7, ema_start="0.5dur")],
    "two EMAs": lambda: [EMA(half_life="2ba"), EMA(half_life="8ba")],
    "SWA in epochs": lambda: [SWA(swa_start="1ep", swa_end="3ep")],
    "SWA in batches": lambda: [SWA(swa_start="0.2dur", swa_end="0.7dur", update_interval="2ba")],
    "SWA with learning rate": lambda: [SWA("0.2dur", "1dur", "1ba", True, "cos", swa_lr=0.5)],
}


@pytest.mark.parametrize("name", RUNS)
def test_run_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    """A run of the Trainer, interrupted inside and at the end of epochs."""
    make, arguments = RUNS[name]
    assert_resumes_bit_for_bit(make, tmp_path, **arguments)


@pytest.mark.parametrize(("name", "at"), covering(1, [*AVERAGES], range(BATCHES + 1)))
def test_average_resumes_bit_for_bit(name: str, at: int) -> None:
    """Weights and averages, interrupted after each batch."""
    assert_resumes_exactly(AVERAGES[name], at)
