"""Arguments of algorithms and of their functions: errors at construction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from composerlite import algorithms
from composerlite.errors import ConfigError

X, Y = torch.ones(4, 3, 8, 6), torch.tensor([0, 1, 2, 1])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("BlurPool", {"replace_convs": False, "replace_maxpools": False}, "has no effect"),
        ("CutMix", {"alpha": -1}, "alpha=-1"),
        ("CutOut", {"num_holes": -1}, "num_holes=-1"),
        ("CutOut", {"length": 1.5}, r"length=1\.5"),
        ("cutmix_batch", {"input": X, "target": Y, "length": 0.5, "bbox": (0, 0, 1, 1)}, "pass one of them"),
        ("cutmix_batch", {"input": X, "target": Y, "length": 2.0}, r"length=2\.0"),
        ("EMA", {"half_life": None}, "pass one of them"),
        ("EMA", {"smoothing": 0.9}, "half_life=None"),
        ("EMA", {"half_life": None, "smoothing": 1.0}, r"\[0, 1\)"),
        ("EMA", {"half_life": "100tok"}, "batches or epochs"),
        ("EMA", {"half_life": "10ba", "update_interval": "1ep"}, "both must count batches"),
        ("EMA", {"ema_start": "-1ba"}, "zero or more"),
        ("EMA", {"halflife": "10ba"}, "Did you mean 'half_life'"),
        ("GradientClipping", {"clipping_type": "norms", "clipping_threshold": 1.0}, "Did you mean 'norm'"),
        ("GradientClipping", {"clipping_type": "norm", "clipping_threshold": 0}, "clipping_threshold=0"),
        ("GradientClipping", {"clipping_type": "norm", "threshold": 1.0}, "Did you mean 'clipping_threshold'"),
        ("LabelSmoothing", {"smoothing": 1.5}, r"smoothing=1\.5"),
        ("LabelSmoothing", {"smooting": 0.1}, "Did you mean 'smoothing'"),
        ("LayerFreezing", {"freeze_start": 1.0}, r"freeze_start=1\.0"),
        (
            "freeze_layers",
            {"model": nn.Linear(2, 2), "optimizers": None, "current_duration": 0.5, "freeze_level": 1.5},
            r"freeze_level=1\.5",
        ),
        ("LowPrecisionLayerNorm", {"apply_at": "batch_end"}, "apply_at='batch_end'"),
        ("MixUp", {"alpha": -1}, "alpha=-1"),
        ("MixUp", {"alfa": 0.1}, "Did you mean 'alpha'"),
        ("mixup_batch", {"input": X, "target": Y, "mixing": 1.5}, r"mixing=1\.5"),
        ("ProgressiveResizing", {"mode": "reisze"}, "Did you mean 'resize'"),
        ("ProgressiveResizing", {"initial_scale": 2.0}, r"initial_scale=2\.0"),
        ("ProgressiveResizing", {"delay_fraction": 0.7, "finetune_fraction": 0.7}, "a sum of at most 1"),
        ("ProgressiveResizing", {"size_increment": 0}, "size_increment=0"),
        ("resize_batch", {"input": X, "target": Y, "scale_factor": 0.5, "resize_targets": True}, "no height and width"),
        ("SAM", {"rho": -1}, "rho=-1"),
        ("SAM", {"epsilon": 0}, "epsilon=0"),
        ("SAM", {"interval": 0}, "interval=0"),
        ("SeqLengthWarmup", {"duration": 2.0}, r"duration=2\.0"),
        ("SeqLengthWarmup", {"min_seq_length": 9, "max_seq_length": 8}, "at least the minimum"),
        ("SeqLengthWarmup", {"step_size": 0}, "step_size=0"),
        ("StochasticDepth", {"target_layer_name": "ResnetBottleneck"}, "Did you mean 'ResNetBottleneck'"),
        ("StochasticDepth", {"target_layer_name": "ResNetBottleneck", "stochastic_method": "blocks"}, "'block'"),
        ("StochasticDepth", {"target_layer_name": "ResNetBottleneck", "drop_distribution": "log"}, "='log'"),
        ("StochasticDepth", {"target_layer_name": "ResNetBottleneck", "drop_rate": 1.5}, r"drop_rate=1\.5"),
        ("SWA", {"swa_start": "0.9dur", "swa_end": "0.5dur"}, "start before the end"),
        ("SWA", {"swa_start": "1ep"}, "the same unit"),
        ("SWA", {"update_interval": "5tok"}, "batches or epochs"),
        ("SWA", {"anneal_strategy": "cosinus"}, "Did you mean 'cosine'"),
        ("SWA", {"anneal_steps": 0}, "anneal_steps=0"),
        ("SWA", {"swa_strat": "0.5dur"}, "Did you mean 'swa_start'"),
    ],
)
def test_bad_arguments(name: str, arguments: dict[str, Any], message: str) -> None:
    """The error has the argument, and the right name of a misspelt argument."""
    with pytest.raises(ConfigError, match=message):
        getattr(algorithms, name)(**arguments)
