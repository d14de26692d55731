"""SystemMetricsMonitor: load of the machine and of the GPUs."""

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
    """Logs processor, memory, disk and network of this machine, and the GPUs of all ranks, at the start of a batch.

    ====================================  ============================================================================
    ``cpu_percentage``                    use of all processors since the last batch, from 0 to 100
    ``cpu_memory_<…>``                    memory, as psutil names the values: ``total``, ``available``, …, in bytes
    ``disk_memory_<…>``                   the root file system, as psutil names the values
    ``network_<…>``                       counters since the machine started: ``bytes_sent``, ``bytes_recv``, …
    ``gpu_percentage``                    share of the time with a running kernel
    ``memory_percentage``                 share of the time with memory reads or writes
    ``gpu_temperature_C``                 in °C
    ``gpu_power_usage_W``                 in watts
    ====================================  ============================================================================

    Of the GPUs the smallest and the largest value are logged, as ``min_<name>_rank_<rank>`` and ``max_<name>_rank_…``.
    Needs psutil, and on CUDA nvidia-ml-py: ``pip install 'composerlite[system]'``.

    Args:
        log_all_data: log the GPU values of all ranks, as ``<name>_rank_<rank>``.
        batch_log_interval: batches between two logs.

    Raises:
        ConfigError: a package is not installed, or the interval is invalid.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=SystemMetricsMonitor(batch_log_interval=10))
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
        psutil.cpu_percent()  # the first call returns 0 and begins the count

    def batch_start(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) % self._interval:
            return
        metrics: dict[str, float] = {"cpu_percentage": self._psutil.cpu_percent()}
        for name, values in (
            ("cpu_memory", self._psutil.virtual_memory()),
            ("disk_memory", self._psutil.disk_usage(os.sep)),
            ("network", self._psutil.net_io_counters()),
        ):
            metrics |= {f"{name}_{key}": value for key, value in values._asdict().items()}
        if state.device.type == "cuda":
            metrics |= self._gpus(state.device)
        logger.log_metrics(metrics)

    def _gpus(self, device: Any) -> dict[str, float]:
        with importing_sdk("nvidia-ml-py, which SystemMetricsMonitor needs on CUDA,", extra="system", packages=()):
            importlib.import_module("pynvml")  # torch uses the package
        own = {
            "gpu_percentage": torch.cuda.utilization(device),
            "memory_percentage": torch.cuda.memory_usage(device),
            "gpu_temperature_C": torch.cuda.temperature(device),
            "gpu_power_usage_W": torch.cuda.power_draw(device) / 1000,
        }
        ranks = dist.get_group().gather(own)
        found: dict[str, float] = {}
        for name in own:
            values = [of_rank[name] for of_rank in ranks]
            if self._all:
                found |= {f"{name}_rank_{rank}": value for rank, value in enumerate(values)}
            else:
                found[f"min_{name}_rank_{values.index(min(values))}"] = min(values)
                found[f"max_{name}_rank_{values.index(max(values))}"] = max(values)
        return found
