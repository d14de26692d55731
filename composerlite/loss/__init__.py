"""Losses of Composer's models, for class numbers or probabilities."""

from composerlite.loss.loss import (
    binary_cross_entropy_with_logits,
    check_for_index_targets,
    ensure_targets_one_hot,
    infer_target_type,
    loss_registry,
)
from composerlite.models.classifier import soft_cross_entropy

__all__ = [
    "binary_cross_entropy_with_logits",
    "check_for_index_targets",
    "ensure_targets_one_hot",
    "infer_target_type",
    "loss_registry",
    "soft_cross_entropy",
]
