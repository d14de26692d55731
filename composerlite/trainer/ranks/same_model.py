"""Whether all ranks train the same model."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from composerlite import dist
from composerlite.errors import ConfigError

__all__ = ["check_same_model"]

_SHOWN = 3


def check_same_model(model: nn.Module) -> None:
    """Check that the tensors of ``model`` have the same names, shapes and kinds on every rank. Every rank calls it.

    Raises:
        ConfigError: they differ. The message names the first rank with another model and the first differences.
    """
    own = _description(model)
    digests = dist.get_group().gather(hashlib.sha256(repr(own).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    first = dist.get_group().broadcast(own)
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    differences = dist.get_group().gather(_differences(first, own))[others[0]]
    shown = "; ".join(differences[:_SHOWN])
    more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    raise ConfigError(
        f"rank {others[0]} has another model than rank 0: {shown}{more}. Build the same model on every rank."
    )


def _description(model: nn.Module) -> list[tuple[str, str]]:
    """Name and kind of every tensor, in order: it is the order in which the ranks exchange them."""
    parameters = [(name, f"{_kind(p)}{'' if p.requires_grad else ', frozen'}") for name, p in model.named_parameters()]
    return [*parameters, *((name, _kind(buffer)) for name, buffer in model.named_buffers())]


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of an unknown shape" if is_lazy(tensor) else f"{tensor.dtype} {tuple(tensor.shape)}"


def _differences(first: list[tuple[str, str]], own: list[tuple[str, str]]) -> list[str]:
    """What this rank has other than rank 0."""
    theirs, mine = dict(first), dict(own)
    found = [
        f"{name!r} is {mine[name]} and not {theirs[name]}"
        for name in theirs
        if mine.get(name, theirs[name]) != theirs[name]
    ]
    found += [f"it has no {name!r}" for name in theirs if name not in mine]
    found += [f"it has {name!r}, which rank 0 has not" for name in mine if name not in theirs]
    return found or (["the order of its parameters differs"] if first != own else [])
