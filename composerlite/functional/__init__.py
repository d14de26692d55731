"""Algorithms as functions, for your own training loop.

::

    from composerlite import functional as cf

    cf.apply_blurpool(model)
    images, other_labels, mixing = cf.mixup_batch(images, labels)
"""

from composerlite.algorithms import (
    apply_blurpool,
    apply_channels_last,
    apply_gradient_clipping,
    apply_low_precision_groupnorm,
    apply_low_precision_layernorm,
    apply_stochastic_depth,
    compute_ema,
    cutmix_batch,
    cutout_batch,
    freeze_layers,
    mixup_batch,
    resize_batch,
    set_batch_sequence_length,
    smooth_labels,
)

__all__ = [
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
