"""MemoryMonitor: how much memory training takes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch

from composerlite.core import Callback
from composerlite.errors import ConfigError, checked_arguments, did_you_mean

if TYPE_CHECKING:
    from composerlite.core import Logger, State

__all__ = ["MemoryMonitor"]

_GIGABYTE = 1e9
_DEFAULT_KEYS = {
    "allocated_bytes.all.current": "current_allocated_mem",
    "active_bytes.all.current": "current_active_mem",
    "inactive_split_bytes.all.current": "current_inactive_mem",
    "reserved_bytes.all.current": "current_reserved_mem",
    "allocated_bytes.all.peak": "peak_allocated_mem",
    "active_bytes.all.peak": "peak_active_mem",
    "inactive_split_bytes.all.peak": "peak_inactive_mem",
    "reserved_bytes.all.peak": "peak_reserved_mem",
    "num_alloc_retries": "alloc_retries",
}
_STATM = Path("/proc/self/statm")
_MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


@final
class MemoryMonitor(Callback):
    """Logs the memory of this process after each batch, in GB (10⁹ bytes).

    ``memory/rss`` is the resident set size, where the system has ``/proc`` to tell it; ``memory/peak_rss`` is its
    maximum so far. On CUDA there is also what ``torch.cuda.memory_stats`` says.

    Args:
        memory_keys: keys of ``torch.cuda.memory_stats`` and the names to log them under, after ``memory/``. Byte
            counts become GB, other counts stay as they are. By default current and peak memory and allocation retries.

    Raises:
        ConfigError: at the first batch on CUDA, a key that does not exist.
    """

    @checked_arguments
    def __init__(self, memory_keys: Mapping[str, str] | None = None) -> None:
        self._keys = dict(_DEFAULT_KEYS if memory_keys is None else memory_keys)

    def batch_end(self, state: State, logger: Logger) -> None:
        metrics = _process_memory()
        if state.device.type == "cuda":
            metrics.update(self._cuda_memory(state.device))
        logger.log_metrics(metrics)

    def _cuda_memory(self, device: torch.device) -> dict[str, float]:
        stats = torch.cuda.memory_stats(device)
        metrics: dict[str, float] = {}
        for key, name in self._keys.items():
            if key not in stats:
                raise ConfigError(f"MemoryMonitor(memory_keys=…): {key!r} does not exist.{did_you_mean(key, stats)}")
            metrics[f"memory/{name}"] = stats[key] / _GIGABYTE if "bytes" in key else stats[key]
        return metrics


def _process_memory() -> dict[str, float]:
    import resource  # there is none on Windows, where the rest of this package must still import

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT_BYTES
    metrics = {"memory/peak_rss": peak / _GIGABYTE}
    if _STATM.exists():
        pages = int(_STATM.read_text().split()[1])
        metrics["memory/rss"] = pages * resource.getpagesize() / _GIGABYTE
    return metrics
