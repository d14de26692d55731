"""What is asked of tensors that may be distributed over ranks. Every rank that has a part calls these together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from composerlite.dist.shards import is_distributed_tensor

__all__ = ["any_distributed", "full_tensor", "total_norm"]


def any_distributed(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any is distributed. Waits for nobody."""
    return any(is_distributed_tensor(tensor) for tensor in tensors)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of ``tensor``; itself if it is not distributed."""
    spread: Any = tensor
    return spread.full_tensor() if is_distributed_tensor(tensor) else tensor


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of ``tensors`` as one vector, each as a whole; they may be distributed in different ways."""
    norms = [full_tensor(torch.linalg.vector_norm(tensor.detach())) for tensor in tensors]
    device = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))
