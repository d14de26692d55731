"""Models, optimizers and what compares them, for the tests of sharded checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer


def small_model(width: int = 8, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 4))


def trained(model: nn.Module, groups: int = 1, steps: int = 2) -> Optimizer:
    """An AdamW that has stepped; its groups differ in their learning rates."""
    parameters = list(model.parameters())
    size = -(-len(parameters) // groups)
    optim = AdamW(
        [{"params": parameters[n * size : (n + 1) * size], "lr": 0.01 * (n + 1)} for n in range(groups)],
        betas=(0.8, 0.9),
    )
    for _ in range(steps):
        width = parameters[0].shape[1]
        model(torch.randn(4, width)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    return optim


def states(model: nn.Module, optim: Optimizer | None = None) -> dict[str, Any]:
    """A copy of both states."""
    return copy.deepcopy({"model": model.state_dict(), "optim": {} if optim is None else optim.state_dict()})


def same(a: Any, b: Any) -> bool:
    """Whether two nests of tensors and values are equal, bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype is b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
