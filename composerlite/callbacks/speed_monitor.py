"""SpeedMonitor: throughput and wall-clock time. RuntimeEstimator: how long training will still take."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import torch

from composerlite.core import Batch, Callback, Logger, Precision, State, span
from composerlite.errors import ConfigError, checked_arguments, did_you_mean

_SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}


def _seconds_per(time_unit: str, *, owner: str) -> int:
    """Seconds in one ``time_unit``: ``'seconds'``, ``'minutes'``, ``'hours'`` or ``'days'``.

    Raises:
        ConfigError: another unit. The message names ``owner``.
    """
    if time_unit not in _SECONDS:
        raise ConfigError(f"{owner}(time_unit={time_unit!r}): no such unit.{did_you_mean(str(time_unit), _SECONDS)}")
    return _SECONDS[time_unit]


log = logging.getLogger(__name__)

_PEAK_TFLOPS: list[tuple[frozenset[str], float, bool]] = [
    (frozenset(words.split()), tflops, has_bf16)
    for words, tflops, has_bf16 in (
        ("B200", 2250.0, True),
        ("H200 NVL", 835.5, True),
        ("H200", 989.5, True),
        ("GH200", 989.5, True),
        ("H100 NVL", 835.5, True),
        ("H100 PCIE", 756.5, True),
        ("H100 HBM3", 989.5, True),
        ("A100", 312.0, True),
        ("L40S", 362.0, True),
        ("L4", 121.0, True),
        ("A10", 125.0, True),
        ("V100", 125.0, False),
        ("T4", 65.0, False),
    )
]
"""Words of a GPU's name, 10^12 operations a second in dense products of 16-bit matrices, and whether it has bfloat16.
From the data sheets at https://www.nvidia.com/en-us/data-center/, most of which give twice as many, for sparse ones."""


def peak_flops(name: str, precision: Precision) -> float | None:
    """Return floating-point operations per second that a GPU can do at most; ``None`` where that is not known.

    Args:
        name: as torch tells it, ``'NVIDIA H100 80GB HBM3'``.
        precision: of training; known are those that compute with 16 bits.
    """
    if precision not in (Precision.AMP_BF16, Precision.AMP_FP16):
        return None
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    for wanted, tflops, has_bf16 in _PEAK_TFLOPS:
        if wanted <= words:
            return tflops * 1e12 if has_bf16 or precision is Precision.AMP_FP16 else None
    return None


@runtime_checkable
class _CountsFlops(Protocol):
    """A model that knows how many floating-point operations it trains a batch with, forward and backward."""

    def flops_per_batch(self, batch: Batch, /) -> float: ...


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
    ``throughput/batches_per_sec``       over the last ``window_size`` batches of this process, evaluation not counted;
    ``throughput/samples_per_sec``       from the second batch on, so that starting up does not count either
    ``throughput/tokens_per_sec``        the same, where the batches have tokens
    ``throughput/flops_per_sec``         the same, where the model has a method ``flops_per_batch(batch)``
    ``throughput/device/flops_per_sec``  that of one device
    ``throughput/device/mfu``            that as a part of ``gpu_flops_available``, where that is given or known
    ``wall_clock/train``                 time spent training, ``wall_clock/val`` evaluating, ``wall_clock/total`` both,
                                         in ``time_unit``; a resumed run continues counting
    ===================================  ==============================================================================

    Args:
        window_size: batches to take the mean over.
        gpu_flops_available: floating-point operations per second that one device can do at most. ``None``: what the
            data sheets of NVIDIA's common GPUs say, where training computes in bfloat16 or float16.
        time_unit: ``'seconds'``, ``'minutes'``, ``'hours'`` or ``'days'``.
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
        self._model: _CountsFlops | None = None
        self._device_flops = 0.0
        self._eval_seconds = 0.0
        self._eval_began = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"eval_seconds": self._eval_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._eval_seconds = float(state_dict.get("eval_seconds", state_dict.get("total_eval_wct", 0.0)))  # Composer's

    def fit_start(self, state: State, logger: Logger) -> None:
        self._points.clear()
        self._model = state.model if isinstance(state.model, _CountsFlops) else None
        self._device_limit = self._gpu_flops_available
        if self._device_limit is None and state.device.type == "cuda":
            self._device_limit = peak_flops(torch.cuda.get_device_name(state.device), state.precision)
        if self._gpu_flops_available is not None and self._model is None:
            log.warning(
                "SpeedMonitor(gpu_flops_available=…): %s has no method flops_per_batch(batch), so the share of it that "
                "is used is not logged",
                type(state.model).__qualname__,
            )

    def batch_start(self, state: State, logger: Logger) -> None:
        if self._model is not None:
            self._device_flops += float(self._model.flops_per_batch(state.batch))

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
    """Logs ``wall_clock/remaining_estimate`` after each batch: the time that training and evaluation will still take.

    It is what training has taken in this process for a part of ``max_duration``, and what evaluation has taken up to
    the last one, drawn out to the end. Nothing is logged while less than a batch was measured, or without a
    ``max_duration``; where that counts epochs and the loader has no length, only whole epochs are measured.

    Args:
        skip_batches: batches at the start of ``fit`` that are not measured, since starting up takes long.
        time_unit: ``'seconds'``, ``'minutes'``, ``'hours'`` or ``'days'``.
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
        if self._batches_to_skip > 0:
            self._batches_to_skip -= 1
            self._begin(self._done, state.timestamp.total_wct.total_seconds())
        if self._done <= self._first_done:
            return
        per_training = (state.timestamp.total_wct.total_seconds() - self._first_seconds) / (
            self._done - self._first_done
        )
        if self._eval_done > self._first_done:
            per_training += self._eval_seconds / (self._eval_done - self._first_done)
        remaining_seconds = max(0.0, 1.0 - self._done) * per_training
        logger.log_metrics({"wall_clock/remaining_estimate": remaining_seconds / self._unit_seconds})

    def eval_start(self, state: State, logger: Logger) -> None:
        self._eval_began = time.monotonic()

    def eval_end(self, state: State, logger: Logger) -> None:
        self._eval_seconds += time.monotonic() - self._eval_began
        self._eval_done = self._done

    def _begin(self, done: float, seconds: float) -> None:
        """Measure from here: ``done`` of the training done after ``seconds`` of it."""
        self._first_done = self._done = self._eval_done = done
        self._first_seconds = seconds
        self._eval_seconds = 0.0
        self._eval_began = 0.0


def _fraction_done(state: State) -> float:
    """Fraction of training that is done, exact to the batch where possible. Ask while training, not evaluating."""
    end = state.max_duration
    return 0.0 if end is None else span(end, state).fraction
