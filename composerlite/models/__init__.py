"""Models for the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composerlite.models.base import ComposerModel
from composerlite.models.classifier import ComposerClassifier, soft_cross_entropy
from composerlite.models.huggingface import HuggingFaceModel
from composerlite.on_demand import lazy_names

if TYPE_CHECKING:
    from composerlite.models.hf_export import (
        huggingface_contents,
        write_huggingface_pretrained_from_composer_checkpoint,
    )

__all__ = [
    "ComposerClassifier",
    "ComposerModel",
    "HuggingFaceModel",
    "huggingface_contents",
    "soft_cross_entropy",
    "write_huggingface_pretrained_from_composer_checkpoint",
]

__getattr__, __dir__ = lazy_names(__name__)  # these need what reads checkpoints
