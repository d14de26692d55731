"""SpeedMonitor: throughput and wall-clock time. RuntimeEstimator: remaining time of training."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from typing import Any, NamedTuple, final

import torch

from composerlite.core import Callback, Logger, Precision, State
from composerlite.core.progress import span
from composerlite.errors import ConfigError, checked_arguments, did_you_mean

log = logging.getLogger(__name__)
_SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
_PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200 NVL": 835.5,
    "H200": 989.5,
    "GH200": 989.5,
    "H100 NVL": 835.5,
    "H100 PCIE": 756.5,
    "H100 HBM3": 989.5,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
    "V100": 125.0,
    "T4": 65.0,
}
"""Words in the name of a GPU, and its 10^12 operations per second in dense products of 16-bit matrices. From the data
sheets at https://www.nvidia.com/en-us/data-center/: most of these have the double values of sparse products."""
_WITHOUT_BF16 = ("V100", "T4")


def peak_flops(name: str, precision: Precision) -> float | None:
    """Return the largest number of floating-point operations per second of a GPU; ``None`` if unknown.

    Args:
        name: name in torch, such as ``'NVIDIA H100 80GB HBM3'``.
        precision: precision of training. Numbers are known for 16-bit precisions only.
    """
    if precision not in (Precision.AMP_BF16, Precision.AMP_FP16):
        return None
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    for gpu, tflops in _PEAK_TFLOPS.items():
        if set(gpu.split()) <= words:
            return None if precision is Precision.AMP_BF16 and gpu in _WITHOUT_BF16 else tflops * 1e12
    return None


def _seconds_per(time_unit: str, *, owner: str) -> int:
    if time_unit not in _SECONDS:
        raise ConfigError(f"{owner}(time_unit={time_unit!r}): no such unit.{did_you_mean(str(time_unit), _SECONDS)}")
    return _SECONDS[time_unit]


class _Point(NamedTuple):
    """Totals at the end of a batch."""

    seconds: float
    batches: int
    samples: int
    tokens: int
    device_flops: float


@final
class SpeedMonitor(Callback):
    """Logs throughput and wall time of training after each batch.

    ===================================  ==============================================================================
    ``throughput/batches_per_sec``       mean over the last ``window_size`` batches of this process, without
                                         evaluation, from the second batch on
    ``throughput/samples_per_sec``       samples per second
    ``throughput/tokens_per_sec``        tokens per second, if the batches have tokens
    ``throughput/flops_per_sec``         operations per second, if the model has a method ``flops_per_batch(batch)``
    ``throughput/device/flops_per_sec``  operations per second of one device
    ``throughput/device/mfu``            operations per second divided by ``gpu_flops_available``
    ``wall_clock/train``                 time spent on training, in ``time_unit``; a resumed run continues the count
    ``wall_clock/val``                   time spent on evaluation
    ``wall_clock/total``                 time spent on both
    ===================================  ==============================================================================

    Args:
        window_size: number of batches for the mean.
        gpu_flops_available: largest number of floating-point operations per second of a device. ``None``: the number
            in the data sheet of common NVIDIA GPUs, if training computes in bfloat16 or float16.
        time_unit: ``'seconds'``, ``'minutes'``, ``'hours'`` or ``'days'``.

    Raises:
        ConfigError: an argument is invalid.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=SpeedMonitor(window_size=50))
    """

    @checked_arguments
    def __init__(
        self, window_size: int = 100, gpu_flops_available: float | None = None, time_unit: str = "hours"
    ) -> None:
        if window_size < 1:
            raise ConfigError(f"SpeedMonitor(window_size={window_size}): expected a number of batches, 1 or more.")
        if gpu_flops_available is not None and gpu_flops_available <= 0:
            raise ConfigError(
                f"SpeedMonitor(gpu_flops_available={gpu_flops_available}): expected a positive number, such as 312e12."
            )
        self._gpu_flops_available = gpu_flops_available
        self._unit_seconds = _seconds_per(time_unit, owner="SpeedMonitor")
        self._points: deque[_Point] = deque(maxlen=window_size + 1)
        self._device_limit = gpu_flops_available
        self._counts_flops = False
        self._device_flops = 0.0
        self._eval_seconds = 0.0
        self._eval_began = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"eval_seconds": self._eval_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._eval_seconds = float(
            state_dict.get("eval_seconds", state_dict.get("total_eval_wct", 0.0))
        )  # Composer's name

    def fit_start(self, state: State, logger: Logger) -> None:
        self._points.clear()
        self._counts_flops = hasattr(state.model, "flops_per_batch")
        self._device_limit = self._gpu_flops_available
        if self._device_limit is None and state.device.type == "cuda":
            self._device_limit = peak_flops(torch.cuda.get_device_name(state.device), state.precision)
        if self._gpu_flops_available is not None and not self._counts_flops:
            log.warning(
                "SpeedMonitor(gpu_flops_available=…): %s has no method flops_per_batch(batch), so "
                "throughput/device/mfu is not logged",
                type(state.model).__qualname__,
            )

    def batch_start(self, state: State, logger: Logger) -> None:
        if self._counts_flops:
            model: Any = state.model
            self._device_flops += float(model.flops_per_batch(state.batch))

    def batch_end(self, state: State, logger: Logger) -> None:
        now = state.timestamp
        train_seconds = now.total_wct.total_seconds()
        point = _Point(train_seconds, int(now.batch), int(now.sample), int(now.token), self._device_flops)
        self._points.append(point)
        logger.log_metrics(
            {
                **self._throughput(self._points[0], point, state.world_size),
                "wall_clock/train": train_seconds / self._unit_seconds,
                "wall_clock/val": self._eval_seconds / self._unit_seconds,
                "wall_clock/total": (train_seconds + self._eval_seconds) / self._unit_seconds,
            }
        )

    def eval_start(self, state: State, logger: Logger) -> None:
        self._eval_began = time.monotonic()

    def eval_end(self, state: State, logger: Logger) -> None:
        self._eval_seconds += time.monotonic() - self._eval_began

    def _throughput(self, first: _Point, last: _Point, world_size: int) -> dict[str, float]:
        seconds = last.seconds - first.seconds
        if seconds <= 0:
            return {}
        metrics = {
            "throughput/batches_per_sec": (last.batches - first.batches) / seconds,
            "throughput/samples_per_sec": (last.samples - first.samples) / seconds,
        }
        if last.tokens > first.tokens:
            metrics["throughput/tokens_per_sec"] = (last.tokens - first.tokens) / seconds
        if last.device_flops > first.device_flops:
            device_flops_per_sec = (last.device_flops - first.device_flops) / seconds
            metrics["throughput/flops_per_sec"] = device_flops_per_sec * world_size
            metrics["throughput/device/flops_per_sec"] = device_flops_per_sec
            if self._device_limit is not None:
                metrics["throughput/device/mfu"] = device_flops_per_sec / self._device_limit
        return metrics


@final
class RuntimeEstimator(Callback):
    """Logs ``wall_clock/remaining_estimate`` after each batch: the remaining time of training and evaluation.

    The estimate extrapolates the time of training and evaluation in this process to the end. Nothing is logged before
    the first measured batch, or without ``max_duration``. If ``max_duration`` counts epochs and the loader has no
    length, only whole epochs are measured.

    Args:
        skip_batches: batches at the start of ``fit`` to skip, since startup is slow.
        time_unit: ``'seconds'``, ``'minutes'``, ``'hours'`` or ``'days'``.

    Raises:
        ConfigError: an argument is invalid.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=RuntimeEstimator(time_unit="minutes"))
    """

    @checked_arguments
    def __init__(self, skip_batches: int = 1, time_unit: str = "hours") -> None:
        if skip_batches < 0:
            raise ConfigError(
                f"RuntimeEstimator(skip_batches={skip_batches}): expected a number of batches, 0 or more."
            )
        self._skip_batches = skip_batches
        self._unit_seconds = _seconds_per(time_unit, owner="RuntimeEstimator")
        self._begin(0.0, 0.0)
        self._batches_to_skip = skip_batches

    def fit_start(self, state: State, logger: Logger) -> None:
        self._batches_to_skip = self._skip_batches
        self._begin(_fraction_done(state), state.timestamp.total_wct.total_seconds())

    def batch_end(self, state: State, logger: Logger) -> None:
        self._done = _fraction_done(state)
        seconds = state.timestamp.total_wct.total_seconds()
        if self._batches_to_skip > 0:
            self._batches_to_skip -= 1
            self._begin(self._done, seconds)
        if self._done <= self._first_done:
            return
        whole_seconds = (seconds - self._first_seconds) / (self._done - self._first_done)
        if self._eval_done > self._first_done:
            whole_seconds += self._eval_seconds / (self._eval_done - self._first_done)
        left = max(0.0, 1.0 - self._done) * whole_seconds
        logger.log_metrics({"wall_clock/remaining_estimate": left / self._unit_seconds})

    def eval_start(self, state: State, logger: Logger) -> None:
        self._eval_began = time.monotonic()

    def eval_end(self, state: State, logger: Logger) -> None:
        self._eval_seconds += time.monotonic() - self._eval_began
        self._eval_done = self._done

    def _begin(self, done: float, seconds: float) -> None:
        """Measure from here: a fraction ``done`` of training, after ``seconds`` of training."""
        self._first_done = self._done = self._eval_done = done
        self._first_seconds = seconds
        self._eval_seconds = self._eval_began = 0.0


def _fraction_done(state: State) -> float:
    return 0.0 if state.max_duration is None else span(state.max_duration, state).fraction
