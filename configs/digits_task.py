"""Handwritten digits: the 1797 real images of 8x8 pixels that scikit-learn ships, and a small network for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from composerlite.errors import ConfigError
from composerlite.models import ComposerClassifier

__all__ = ["DigitsNet", "digits"]


def digits(split: str = "train", test_fraction: float = 0.2) -> TensorDataset:
    """Images, float32 of shape (1, 8, 8) from 0 to 1, and labels from 0 to 9.

    The images are split once and for all: the same ones are in ``'train'`` and in ``'test'`` in every run.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as e:
        raise ConfigError("the digits come with scikit-learn, which is not installed: pip install scikit-learn.") from e

    if split not in ("train", "test"):
        raise ConfigError(f"split={split!r}: expected 'train' or 'test'.")
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    test_size = int(len(images) * test_fraction)
    chosen = order[:test_size] if split == "test" else order[test_size:]
    pixels = torch.tensor(images[chosen] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return TensorDataset(pixels, torch.tensor(labels[chosen], dtype=torch.int64))


class DigitsNet(ComposerClassifier):
    """Two convolutions with batch normalisation, and a linear layer.

    Args:
        width: channels of the first convolution; the second has twice as many.
        dropout: the share of features that is dropped before the linear layer.
    """

    def __init__(self, width: int = 16, dropout: float = 0.1) -> None:
        network = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width * 4, 10),
        )
        super().__init__(network, num_classes=10)
