"""Algorithms that change training: ``Trainer(algorithms=[EMA(), BlurPool()])``."""

from composerlite.algorithms.batch.cutmix import CutMix, cutmix_batch
from composerlite.algorithms.batch.cutout import CutOut, cutout_batch
from composerlite.algorithms.batch.label_smoothing import LabelSmoothing, smooth_labels
from composerlite.algorithms.batch.mixup import MixUp, mixup_batch
from composerlite.algorithms.batch.progressive_resizing import ProgressiveResizing, resize_batch
from composerlite.algorithms.batch.seq_length_warmup import SeqLengthWarmup, set_batch_sequence_length
from composerlite.algorithms.ema import EMA, compute_ema
from composerlite.algorithms.gradient_clipping import GradientClipping, apply_gradient_clipping
from composerlite.algorithms.layer_freezing import LayerFreezing, freeze_layers
from composerlite.algorithms.sam import SAM
from composerlite.algorithms.surgery.blurpool import BlurConv2d, BlurMaxPool2d, BlurPool, apply_blurpool
from composerlite.algorithms.surgery.channels_last import ChannelsLast, apply_channels_last
from composerlite.algorithms.surgery.low_precision_norms import (
    LowPrecisionGroupNorm,
    LowPrecisionLayerNorm,
    LPGroupNorm,
    LPLayerNorm,
    apply_low_precision_groupnorm,
    apply_low_precision_layernorm,
)
from composerlite.algorithms.surgery.no_op_model import NoOpModel
from composerlite.algorithms.surgery.stochastic_depth import StochasticDepth, apply_stochastic_depth
from composerlite.algorithms.swa import SWA

__all__ = [
    "EMA",
    "SAM",
    "SWA",
    "BlurConv2d",
    "BlurMaxPool2d",
    "BlurPool",
    "ChannelsLast",
    "CutMix",
    "CutOut",
    "GradientClipping",
    "LPGroupNorm",
    "LPLayerNorm",
    "LabelSmoothing",
    "LayerFreezing",
    "LowPrecisionGroupNorm",
    "LowPrecisionLayerNorm",
    "MixUp",
    "NoOpModel",
    "ProgressiveResizing",
    "SeqLengthWarmup",
    "StochasticDepth",
    "apply_blurpool",
    "apply_channels_last",
    "apply_gradient_clipping",
    "apply_low_precision_groupnorm",
    "apply_low_precision_layernorm",
    "apply_stochastic_depth",
    "compute_ema",
    "cutmix_batch",
    "cutout_batch",
    "freeze_layers",
    "mixup_batch",
    "resize_batch",
    "set_batch_sequence_length",
    "smooth_labels",
]
