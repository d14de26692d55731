"""What the examples of the documentation leave out: a small model and its data."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite.models import ComposerClassifier

torch.manual_seed(0)
_x = torch.randn(64, 8)
_data = TensorDataset(_x, (_x[:, 0] > 0).long())


def make_model() -> ComposerClassifier:
    return ComposerClassifier(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), num_classes=2)


model = make_model()
train_dataloader = DataLoader(_data, batch_size=16, shuffle=True)
eval_dataloader = DataLoader(_data, batch_size=32)
