"""Models that the trainer can train."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from composerlite.models.base import ComposerModel
from composerlite.models.classifier import ComposerClassifier
from composerlite.models.huggingface import HuggingFaceModel
from composerlite.models.loss import soft_cross_entropy

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

_LATER = ("huggingface_contents", "write_huggingface_pretrained_from_composer_checkpoint")


def __getattr__(name: str) -> Any:
    if name not in _LATER:  # these need what reads checkpoints
        raise AttributeError(f"module 'composerlite.models' has no attribute {name!r}")
    return getattr(importlib.import_module("composerlite.models.hf_export"), name)


def __dir__() -> list[str]:
    return __all__
