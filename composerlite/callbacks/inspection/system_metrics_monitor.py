"""SystemMetricsMonitor: how busy the machine and its GPUs are."""

from __future__ import annotations

import importlib
import os
from typing import Any, final

import torch

from composerlite import dist
from composerlite.core import Callback, Logger, State
from composerlite.errors import ConfigError, checked_arguments
from composerlite.storage.sdk import importing_sdk


@final
class SystemMetricsMonitor(Callback):
    """Logs processor, memory, disk and network of this machine, and the GPUs of all ranks, when a batch begins.

    ====================================  ============================================================================
    ``cpu_percentage``                    use of all processors since the batch before, from 0 to 100
    ``cpu_memory_<…>``                    what psutil says of memory: ``total``, ``available``, ``percent``, …, in bytes
    ``disk_memory_<…>``                   the same of the root file system
    ``network_<…>``                       counters since the machine started: ``bytes_sent``, ``bytes_recv``, …
    ``gpu_percentage``                    part of the time in which a kernel ran
    ``memory_percentage``                 part of the time in which memory was read or written
    ``gpu_temperature_C``                 in °C. ``gpu_power_usage_W``: in watts
    ====================================  ============================================================================

    Of the GPUs the smallest and the largest value are logged, as ``min_<name>_rank_<rank>`` and ``max_<name>_rank_…``.
    Needs psutil, and on CUDA nvidia-ml-py: ``pip install 'composerlite[system]'``.

    Args:
        log_all_data: log the values of the GPUs of all ranks, as ``<name>_rank_<rank>``.
        batch_log_interval: batches between two logs.

    Raises:
        ConfigError: a package is not installed.
    """

    @checked_arguments
    def __init__(self, log_all_data: bool = False, batch_log_interval: int = 1) -> None:
        if batch_log_interval < 1:
            raise ConfigError(
                f"SystemMetricsMonitor(batch_log_interval={batch_log_interval}): expected a number of batches, 1 or "
                "more."
            )
        with importing_sdk("psutil, which SystemMetricsMonitor needs,", extra="system", packages=()):
            import psutil
        self._psutil: Any = psutil
        self._all = log_all_data
        self._interval = batch_log_interval
        psutil.cpu_percent()  # the first call gives 0: it counts from here

    def batch_start(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) % self._interval:
            return
        metrics = self._machine()
        if state.device.type == "cuda":
            values = dist.get_group().gather(_gpu(state.device))
            metrics |= _of_all(values) if self._all else _extremes(values)
        logger.log_metrics(metrics)

    def _machine(self) -> dict[str, float]:
        psutil = self._psutil
        found: dict[str, float] = {"cpu_percentage": psutil.cpu_percent()}
        for name, values in (
            ("cpu_memory", psutil.virtual_memory()),
            ("disk_memory", psutil.disk_usage(os.sep)),
            ("network", psutil.net_io_counters()),
        ):
            found |= {f"{name}_{key}": value for key, value in values._asdict().items()}
        return found


def _gpu(device: Any) -> dict[str, float]:
    with importing_sdk("nvidia-ml-py, which SystemMetricsMonitor needs on CUDA,", extra="system", packages=()):
        importlib.import_module("pynvml")  # torch uses it
    return {
        "gpu_percentage": torch.cuda.utilization(device),
        "memory_percentage": torch.cuda.memory_usage(device),
        "gpu_temperature_C": torch.cuda.temperature(device),
        "gpu_power_usage_W": torch.cuda.power_draw(device) / 1000,
    }


def _of_all(values: list[dict[str, float]]) -> dict[str, float]:
    return {f"{name}_rank_{rank}": value for rank, own in enumerate(values) for name, value in own.items()}


def _extremes(values: list[dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in values[0]:
        of_ranks = [own[name] for own in values]
        for word, value in (("min", min(of_ranks)), ("max", max(of_ranks))):
            found[f"{word}_{name}_rank_{of_ranks.index(value)}"] = value
    return found
