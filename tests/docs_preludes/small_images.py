"""A classifier of small images, an optimizer, and data to train and evaluate on."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composerlite.models import ComposerClassifier

net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
model = ComposerClassifier(net, num_classes=3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
samples = TensorDataset(torch.randn(32, 1, 8, 8), torch.randint(3, (32,)))
train_loader, eval_loader = DataLoader(samples, batch_size=8), DataLoader(samples, batch_size=16)
