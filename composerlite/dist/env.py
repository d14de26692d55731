"""Who this process is among the ranks of a run, as torchrun says in the environment, and which device it uses."""

from __future__ import annotations

import os

import torch

from composerlite.errors import ConfigError

__all__ = [
    "get_device",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_world_size",
]


def _from_environment(*names: str, default: int) -> int:
    for name in names:
        if (text := os.environ.get(name)) is not None:
            try:
                return int(text)
            except ValueError as e:
                raise ConfigError(
                    f"environment variable {name}={text!r}: want a whole number, as torchrun sets it."
                ) from e
    return default


def get_global_rank() -> int:
    """The number of this process among all of the run, from 0."""
    return _from_environment("RANK", default=0)


def get_world_size() -> int:
    """The number of processes of the run."""
    return _from_environment("WORLD_SIZE", default=1)


def get_local_rank() -> int:
    """The number of this process among those of its node, from 0."""
    return _from_environment("LOCAL_RANK", default=0)


def get_local_world_size() -> int:
    """The number of processes on this node."""
    return _from_environment("LOCAL_WORLD_SIZE", default=1)


def get_node_rank() -> int:
    """The number of this node, from 0."""
    return _from_environment("NODE_RANK", "GROUP_RANK", default=0)


_KINDS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps"}


def get_device(device: str | torch.device | None = None) -> torch.device:
    """The device this process trains on: ``'cpu'``, ``'gpu'`` (that of the local rank) or ``'mps'``.

    ``None`` takes the GPU if there is one.

    Raises:
        ConfigError: the name is unknown or there is no such device here.
    """
    if device is None:
        device = "gpu" if torch.cuda.is_available() else "cpu"
    name, _, index = str(device).lower().partition(":")
    kind = _KINDS.get(name)
    if kind is None or (index and not index.isdigit()):
        raise ConfigError(f"device={device!r} is not known. Known: {', '.join(sorted(_KINDS))}.")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device={device!r}: this machine has no CUDA device that torch can use. Use device='cpu'."
            )
        return torch.device("cuda", int(index) if index else get_local_rank())
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device='mps': this machine has no such device. Use device='cpu'.")
    return torch.device(kind)
