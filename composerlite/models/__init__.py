"""Models that the trainer can train."""

from composerlite.models.base import ComposerModel
from composerlite.models.classifier import ComposerClassifier
from composerlite.models.loss import soft_cross_entropy

__all__ = ["ComposerClassifier", "ComposerModel", "soft_cross_entropy"]
