"""Metrics of Composer's models. Metrics and torchmetrics are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composerlite.on_demand import lazy_names

if TYPE_CHECKING:
    from composerlite.metrics.metrics import (
        BinaryF1Score,
        Dice,
        LanguageCrossEntropy,
        LanguagePerplexity,
        LossMetric,
        MaskedAccuracy,
        MIoU,
    )
    from composerlite.models.cross_entropy import CrossEntropy

__all__ = [
    "BinaryF1Score",
    "CrossEntropy",
    "Dice",
    "LanguageCrossEntropy",
    "LanguagePerplexity",
    "LossMetric",
    "MIoU",
    "MaskedAccuracy",
]

__getattr__, __dir__ = lazy_names(__name__)
