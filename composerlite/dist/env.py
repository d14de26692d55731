"""The rank, the device and the data sampler of this process."""

from __future__ import annotations

import os
from collections.abc import Sized
from typing import Any

import torch
import torch.distributed
from torch.utils.data import DistributedSampler

from composerlite.errors import ConfigError

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_DEVICES = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps", "xpu": "xpu"}


def is_available() -> bool:
    """Return true if torch was built with ``torch.distributed``."""
    return torch.distributed.is_available()


def is_initialized() -> bool:
    """Return true if this process has a process group."""
    return torch.distributed.is_initialized()


def env_int(name: str, default: int) -> int:
    """Return the number in the environment variable ``name``; ``default`` if the variable is not set.

    Raises:
        ConfigError: the value is no number.
    """
    text = os.environ.get(name)
    try:
        return default if text is None else int(text)
    except ValueError as e:
        raise ConfigError(f"environment variable {name}={text!r}: expected a whole number, as torchrun sets it.") from e


def get_global_rank() -> int:
    """Return the number of this process in the run, from 0."""
    return torch.distributed.get_rank() if is_initialized() else env_int("RANK", default=0)


def get_world_size() -> int:
    """Return the number of processes of the run."""
    return torch.distributed.get_world_size() if is_initialized() else env_int("WORLD_SIZE", default=1)


def get_local_rank() -> int:
    """Return the number of this process on its node, from 0.

    Read from the environment if the environment matches the process group, as with torchrun. Otherwise, for example
    with ``mp.spawn``, all processes must be on one node: :func:`initialize_dist` checks this.
    """
    return env_int("LOCAL_RANK", default=0) if environment_counts() else get_global_rank()


def get_local_world_size() -> int:
    """Return the number of processes on this node; see :func:`get_local_rank`."""
    return env_int("LOCAL_WORLD_SIZE", default=1) if environment_counts() else get_world_size()


def get_node_rank() -> int:
    """Return the number of this node, from 0; see :func:`get_local_rank`."""
    return env_int("NODE_RANK", default=env_int("GROUP_RANK", default=0)) if environment_counts() else 0


def environment_counts() -> bool:
    """Return true if the variables of a launcher are valid for this process.

    True without a process group. With a process group, RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE must be set,
    and agree with the ranks of the group.
    """
    if not is_initialized():
        return True
    texts = [os.environ.get(name, "") for name in _NEEDED[:4]]
    if not all(text.isdecimal() for text in texts):
        return False
    rank, world_size, local_rank, local_world_size = map(int, texts)
    is_same = (rank, world_size) == (torch.distributed.get_rank(), torch.distributed.get_world_size())
    return is_same and local_rank < local_world_size <= world_size


def check_environment() -> None:
    """Check the variables that a launcher sets.

    Raises:
        ConfigError: variables are missing, or contradict each other.
    """
    missing = [name for name in _NEEDED if name not in os.environ]
    several = get_world_size() > 1 or get_global_rank() > 0 or ("RANK" in os.environ and "WORLD_SIZE" in missing)
    if several and missing and not is_initialized():
        present = ", ".join(name for name in _NEEDED if name in os.environ)
        raise ConfigError(
            f"the environment sets {present}, but not {', '.join(missing)}. Start the script with torchrun, or set "
            "all of them, or, for one process, none of them."
        )
    rank, size, local_size = get_global_rank(), get_world_size(), get_local_world_size()
    if not (rank < size and get_local_rank() < local_size <= size):
        raise ConfigError(
            f"RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={get_local_rank()}, LOCAL_WORLD_SIZE={local_size} "
            "contradict each other: each rank must be below the number of ranks. Start the script with torchrun."
        )


# ── devices ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def get_device(device: str | torch.device | None = None) -> torch.device:
    """Return the device that this process trains on.

    Args:
        device: ``'cpu'``, ``'gpu'`` (the GPU of the local rank), ``'mps'``, ``'xpu'``, or the name of a device
            of another package, registered with torch. A number selects another device, as in ``'cuda:1'``.
            ``None``: the CUDA GPU if there is one, else the CPU.

    Raises:
        ConfigError: the name is unknown, or this machine has no such device.
    """
    if device is None:
        device = "gpu" if torch.cuda.is_available() else "cpu"
    name, _, index = str(device).lower().partition(":")
    registered = torch.accelerator.current_accelerator()
    known = _DEVICES if registered is None else {**_DEVICES, registered.type: registered.type}
    kind = known.get(name)
    if kind is None or (index and not index.isdigit()):
        raise ConfigError(f"device={device!r} is not known. Known: {', '.join(sorted(known))}.")
    module = torch.get_device_module(kind)
    if not module.is_available():
        raise ConfigError(
            f"device={device!r}: this machine has no {kind.upper()} device that torch can use. Use device='cpu'."
        )
    if kind in ("cpu", "mps"):  # a machine has a single device of this kind
        return torch.device(kind)
    own = 0 if module.device_count() == 1 else get_local_rank()  # a single GPU is visible with --gpus-per-task of Slurm
    return torch.device(kind, int(index) if index else own)


def claim_device(device: torch.device) -> None:
    """Make ``device`` the current device of this process and its threads.

    Raises:
        ConfigError: the device does not exist.
    """
    if device.type in ("cpu", "mps"):
        return
    module = torch.get_device_module(device)
    count = module.device_count()
    if device.index >= count:
        raise ConfigError(
            f"device='{device}': this process sees {count} GPUs (its local rank is {get_local_rank()}). Start at "
            "most as many processes per node, or give an index from 0."
        )
    module.set_device(device)


def backend_of(device: torch.device) -> str:
    """Return the name of the backend of ``torch.distributed`` for tensors on ``device``."""
    return torch.distributed.Backend.default_device_backend_map.get(device.type, "gloo")


# ── data ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def get_sampler(
    dataset: Sized,
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
) -> DistributedSampler[Any]:
    """Make a sampler for this rank's share of ``dataset``.

    The trainer does not need a sampler: samples of a plain ``DataLoader`` are divided among the ranks. The trainer
    keeps the order of an existing sampler.

    Args:
        dataset: with a length.
        drop_last: leave out the last samples if the length is no multiple of the number of shares. Otherwise some
            samples are in two shares.
        shuffle: shuffle, in an order depending only on the epoch.
        num_replicas: number of shares; by default the number of ranks.
        rank: number of the share; by default the rank of this process.

    Returns:
        The sampler.
    """
    return DistributedSampler(
        dataset,  # pyright: ignore[reportArgumentType] - torch uses the length only
        num_replicas=get_world_size() if num_replicas is None else num_replicas,
        rank=get_global_rank() if rank is None else rank,
        shuffle=shuffle,
        drop_last=drop_last,
    )
