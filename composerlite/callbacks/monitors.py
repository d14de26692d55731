"""OptimizerMonitor, NaNMonitor, LRMonitor and MemoryMonitor."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch

from composerlite import dist
from composerlite.core import Callback, Logger, State
from composerlite.core.measured import warn_not_finite
from composerlite.core.state.run_state import by_class
from composerlite.devices import Device
from composerlite.errors import ConfigError, TrainingError, checked_arguments, did_you_mean

_ALL = "l2_norm/grad/global"


@final
class OptimizerMonitor(Callback):
    """Logs L2 norms, every ``batch_log_interval`` batches.

    ====================================  ============================================================================
    ``l2_norm/grad/<parameter>``          the gradient of the step, after clipping
    ``l2_norm/grad/global``               all gradients as one vector
    ``l2_norm/param/<parameter>``         the parameter after the step
    ``l2_norm/moment/<parameter>``        the first moment or momentum buffer, if the optimizer has one
    ``l2_norm/second_moment_sqrt/<…>``    the square root of the second moment, if the optimizer has one
    ====================================  ============================================================================

    Args:
        log_optimizer_metrics: log all norms; ``False``: the gradients only.
        batch_log_interval: batches between two logs.

    Raises:
        ConfigError: the interval is invalid.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=OptimizerMonitor(batch_log_interval=100))
    """

    @checked_arguments
    def __init__(self, log_optimizer_metrics: bool = True, batch_log_interval: int = 10) -> None:
        if batch_log_interval < 1:
            raise ConfigError(
                f"OptimizerMonitor(batch_log_interval={batch_log_interval}): expected a number of batches, 1 or more."
            )
        self._all = log_optimizer_metrics
        self._interval = batch_log_interval
        self._norms: dict[str, torch.Tensor] = {}

    def after_train_batch(self, state: State, logger: Logger) -> None:
        # At BATCH_END the gradients may be cleared.
        self._norms.clear()
        if (int(state.timestamp.batch) + 1) % self._interval != 0:
            return
        for name, parameter in state.model.named_parameters():
            if parameter.grad is not None:
                self._norms[f"l2_norm/grad/{name}"] = _norm(parameter.grad)
        if self._norms:
            self._norms[_ALL] = _stack(self._norms).norm()

    def batch_end(self, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) % self._interval != 0:
            return
        if self._all:
            self._add_optimizer_norms(state)
        if self._norms:
            norms = dict(zip(self._norms, _stack(self._norms).tolist(), strict=True))
            logger.log_metrics(norms)
            if state.scaler is None and _ALL in norms:  # a scaler skips steps with overflows
                state.not_finite += warn_not_finite(state, {_ALL: norms[_ALL]})
            self._norms.clear()

    def _add_optimizer_norms(self, state: State) -> None:
        moments: dict[torch.Tensor, Mapping[str, object]] = {
            parameter: kept for optimizer in state.optimizers for parameter, kept in optimizer.state.items()
        }
        for name, parameter in state.model.named_parameters():
            self._norms[f"l2_norm/param/{name}"] = _norm(parameter)
            kept = moments.get(parameter, {})
            for key in ("exp_avg", "momentum_buffer"):
                if isinstance(first := kept.get(key), torch.Tensor):
                    self._norms[f"l2_norm/moment/{name}"] = _norm(first)
            if isinstance(second := kept.get("exp_avg_sq"), torch.Tensor):
                self._norms[f"l2_norm/second_moment_sqrt/{name}"] = dist.shards.full_tensor(
                    second.detach().sum(dtype=torch.float32)
                ).sqrt()


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    return dist.shards.full_tensor(torch.linalg.vector_norm(tensor, dtype=torch.float32))


def _stack(norms: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Stack all ``norms`` in one tensor on one device, so that one wait for a GPU is enough."""
    device = next(iter(norms.values())).device
    return torch.stack([norm.to(device) for norm in norms.values()])


@final
class NaNMonitor(Callback):
    """Ends training with an error at the first NaN in the loss, before the gradients and weights become NaN.

    Training on a GPU waits for each forward pass. Infinite losses are no error.

    Raises:
        TrainingError: at ``AFTER_LOSS``. The weights are from the end of the last batch.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=NaNMonitor())
    """

    def after_loss(self, state: State, logger: Logger) -> None:
        losses: Any = {"total": state.loss}
        if isinstance(state.loss, Mapping):
            losses = state.loss
        elif isinstance(state.loss, Sequence):
            losses = {f"loss{index}": loss for index, loss in enumerate(state.loss)}
        for name, loss in losses.items():
            if bool(torch.isnan(torch.as_tensor(loss)).any()):
                batch, epoch = int(state.timestamp.batch) + 1, int(state.timestamp.epoch) + 1
                raise TrainingError(
                    f"loss/train/{name} is NaN in batch {batch} (epoch {epoch}, rank {state.rank}). The weights are "
                    "from the end of the last batch. Check this batch for NaN and infinity, or resume from a "
                    "checkpoint with a lower learning rate or with GradientClipping."
                )


@final
class LRMonitor(Callback):
    """Logs ``lr-<Optimizer>/group<i>`` for each parameter group: the learning rate of the batch.

    A second optimizer of the same class is called ``<Optimizer>:1``, and so on.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=LRMonitor())
    """

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def after_train_batch(self, state: State, logger: Logger) -> None:
        # At BATCH_END the schedulers have set the rates of the next batch.
        for name, optimizer in by_class(state.optimizers).items():
            for index, group in enumerate(optimizer.param_groups):
                self._rates[f"lr-{name}/group{index}"] = float(group["lr"])

    def batch_end(self, state: State, logger: Logger) -> None:
        logger.log_metrics(self._rates)


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

    ``memory/rss`` is the resident set size, on systems with ``/proc``; ``memory/peak_rss`` is the largest size so far.
    On CUDA the values of ``torch.cuda.memory_stats`` are logged, too.

    Args:
        memory_keys: keys of ``torch.cuda.memory_stats`` and their names in the log, after ``memory/``. Byte counts
            become GB. By default current and peak memory and allocation retries.
        dist_aggregate_batch_interval: batches between logs of mean, minimum and maximum over all ranks, as ``_avg``,
            ``_min`` and ``_max`` after the name. Must be the same on all ranks.

    Raises:
        ConfigError: the interval is invalid; at the first batch on CUDA a key does not exist.

    Example:
        .. code-block:: python

            Trainer(model=model, callbacks=MemoryMonitor())
    """

    @checked_arguments
    def __init__(
        self, memory_keys: Mapping[str, str] | None = None, dist_aggregate_batch_interval: int | None = None
    ) -> None:
        if dist_aggregate_batch_interval is not None and dist_aggregate_batch_interval < 1:
            raise ConfigError(
                f"MemoryMonitor(dist_aggregate_batch_interval={dist_aggregate_batch_interval}): expected a number of "
                "batches, 1 or more."
            )
        self._keys = dict(_DEFAULT_KEYS if memory_keys is None else memory_keys)
        self._interval = dist_aggregate_batch_interval

    def batch_end(self, state: State, logger: Logger) -> None:
        metrics = _process_memory()
        if state.device.type == "cuda":
            metrics.update(self._cuda_memory(state.device))
        if self._interval is not None and int(state.timestamp.batch) % self._interval == 0:
            every = dist.get_group().gather(metrics)
            for name in list(metrics):
                values = [of_rank[name] for of_rank in every if name in of_rank]
                metrics[f"{name}_avg"] = sum(values) / len(values)
                metrics[f"{name}_min"], metrics[f"{name}_max"] = min(values), max(values)
        logger.log_metrics(metrics)

    def _cuda_memory(self, device: Device) -> dict[str, float]:
        stats = torch.cuda.memory_stats(device)
        metrics: dict[str, float] = {}
        for key, name in self._keys.items():
            if key not in stats:
                raise ConfigError(f"MemoryMonitor(memory_keys=…): {key!r} does not exist.{did_you_mean(key, stats)}")
            metrics[f"memory/{name}"] = stats[key] / _GIGABYTE if "bytes" in key else stats[key]
        return metrics


def _process_memory() -> dict[str, float]:
    import resource  # missing on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT_BYTES
    metrics = {"memory/peak_rss": peak / _GIGABYTE}
    if _STATM.exists():
        pages = int(_STATM.read_text().split()[1])
        metrics["memory/rss"] = pages * resource.getpagesize() / _GIGABYTE
    return metrics
