"""Values of metrics and losses: computation over ranks, values of the current model, NaN and infinity."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import torch

from composerlite import dist
from composerlite.core.state.loss_reading import LossReading
from composerlite.core.state.metric_states import merged_state
from composerlite.core.state.state import State
from composerlite.errors import ConfigError, did_you_mean
from composerlite.types import with_items

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = [
    "MeasuredMetrics",
    "check_metric_exists",
    "metric_values",
    "read_losses",
    "returns_tensor",
    "update_not_finite",
    "warn_not_finite",
]

log = logging.getLogger(__name__)

_TRAIN = "train"


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Compute ``metrics`` over the batches of all ranks. Collective.

    Args:
        metrics: metrics by name, the same on every rank.

    Returns:
        Values by name. A dict gives a value for each of its keys, a vector gives ``<name>/0``, ``<name>/1``, …, and a
        metric without a batch on any rank gives no value.
    """
    group, values = dist.get_group(), dict[str, float]()
    is_new = [metric._computed is None for metric in metrics.values()]  # pyright: ignore[reportPrivateUsage]
    known = group.max([metric.update_count for metric in metrics.values()] + [*map(int, is_new)]) if metrics else []
    for number, (name, metric) in enumerate(metrics.items()):
        if not known[number]:
            continue
        is_stale = bool(known[len(metrics) + number])
        computed: Any = _compute_over_ranks(metric, group) if group.size > 1 and is_stale else metric.compute()
        for key, value in computed.items() if isinstance(computed, dict) else [(name, computed)]:
            numbers = value.detach().flatten().tolist() if isinstance(value, torch.Tensor) else [float(value)]
            if len(numbers) == 1:
                values[str(key)] = float(numbers[0])
            else:
                values.update({f"{key}/{i}": float(number) for i, number in enumerate(numbers)})
    return values


def _compute_over_ranks(metric: Metric, group: dist.Group) -> Any:
    """Compute ``metric`` from the states of all ranks. Afterwards the metric has the states of this rank again.

    torchmetrics gathers list states tensor by tensor, and hangs if a rank has no sample. So the states are gathered
    here, except those of a metric that overrides the synchronization or has a process group.
    """
    from torchmetrics import Metric

    parts: list[Any] = [  # Any: torchmetrics has no public names for these attributes
        part
        for part in metric.modules()
        if isinstance(part, Metric)
        and part._to_sync  # pyright: ignore[reportPrivateUsage]
        and part.process_group is None
        and type(part)._sync_dist is Metric._sync_dist  # pyright: ignore[reportPrivateUsage]
    ]
    own = [(part._update_count, {name: getattr(part, name) for name in part._reductions}) for part in parts]
    every = group.gather([with_items(states, _to_cpu) for _, states in own])
    metric._computed = None  # pyright: ignore[reportPrivateUsage]
    try:
        for number, part in enumerate(parts):
            part._computed, part._to_sync, part._update_count = None, False, max(1, part._update_count)
            for name, reduction in part._reductions.items():
                state = merged_state(part, name, [states[number][name] for states in every])
                setattr(part, name, reduction(state) if isinstance(state, list) and state and reduction else state)
        return metric.compute()
    finally:
        for part, (count, states) in zip(parts, own, strict=True):
            part._to_sync, part._update_count = part.sync_on_compute, count
            vars(part).update(states)


def _to_cpu(key: object, value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else with_items(value, _to_cpu)


def returns_tensor(metric: Metric) -> bool:
    """Return true if ``metric`` declares a tensor as result. Other metrics may return a dict with unknown keys."""
    returns = getattr(type(metric).compute, "__annotations__", {}).get("return")
    return returns in (torch.Tensor, "Tensor", "torch.Tensor")


@final
class MeasuredMetrics:
    """Metric values of the current model: the values since the last optimizer step.

    Older values describe another model, and must not rank the checkpoint of the current model. Names are
    ``<label>/<name>``, as in logs without ``metrics/``.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._moment = (-1, -1)

    def after_evaluation(self, state: State) -> None:
        """Add the values of an evaluator. Call at ``EVAL_END``."""
        label = str(state.dataloader_label)
        self._add(state, label, state.eval_metrics.get(label, {}))

    def after_epoch(self, state: State) -> None:
        """Add the values of training in this epoch. Call at ``EPOCH_END``."""
        self._add(state, _TRAIN, state.train_metrics)

    def now(self, state: State) -> dict[str, float]:
        """Return the values of this batch count; empty if the last evaluation was at another batch count."""
        return dict(self._values) if self._moment == _moment(state) else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the last values with their batch count; empty without values."""
        return {"values": dict(self._values), "moment": list(self._moment)} if self._values else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a result of :meth:`state_dict`, with the first values of an interrupted evaluation."""
        fit, batch = state_dict.get("moment", (-1, -1))
        self._values, self._moment = dict(state_dict.get("values", {})), (int(fit), int(batch))

    def _add(self, state: State, label: str, metrics: Mapping[str, Metric]) -> None:
        if self._moment != _moment(state):
            self._values, self._moment = {}, _moment(state)
        self._values.update({f"{label}/{name}": value for name, value in metric_values(metrics).items()})


def check_metric_exists(name: str, state: State, *, argument: str) -> None:
    """Check that evaluation or training computes the metric ``name``. Accepts names that may be keys of a dict.

    Args:
        name: ``<label>/<name>``, such as ``'eval/MulticlassAccuracy'``; ``'<label>/<name>/3'`` for a vector.
        state: state with the metrics.
        argument: argument of the user, for the error.

    Raises:
        ConfigError: there is no such metric. The message lists the existing metrics.
    """
    groups = {evaluator.label: state.eval_metrics.get(evaluator.label, {}) for evaluator in state.evaluators}
    groups[_TRAIN] = state.train_metrics
    known = [f"{label}/{metric}" for label, metrics in groups.items() for metric in metrics]
    if any(name == metric or name.startswith(f"{metric}/") for metric in known):
        return
    for label, metrics in groups.items():  # keys of a dict are unknown before the first computation
        if name.startswith(f"{label}/") and not all(returns_tensor(metric) for metric in metrics.values()):
            return
    hint = did_you_mean(name, known) if known else " There is none: give an eval_dataloader and Model.get_metrics()."
    raise ConfigError(f"{argument}={name!r}: there is no such metric.{hint}")


def warn_not_finite(state: State, values: Mapping[str, float]) -> tuple[str, ...]:
    """Return the names of ``values`` that are NaN or infinite. Rank 0 logs a warning after a finite batch.

    Args:
        state: state after the batch; ``not_finite`` has the names of the batch before.
        values: losses and norms of the batch, the same on every rank.

    Returns:
        Names of the values that are not finite.
    """
    found = tuple(name for name, value in values.items() if not math.isfinite(value))
    if found and not state.not_finite and state.rank == 0:
        first = found[0]
        log.warning(
            "%s is %s at batch %d, not finite. Checkpoints are marked until the value is finite again; autoresume and "
            "save_best_k skip marked checkpoints.",
            first,
            values[first],
            int(state.timestamp.batch),
        )
    return found


def read_losses(state: State) -> dict[str, Any]:
    """Return the losses of this rank's last batch as numbers."""
    reading = state.loss_reading or LossReading()
    return {name: reading.value(loss) for name, loss in state.total_loss_dict.items()}


def update_not_finite(state: State) -> None:
    """Update ``state.not_finite`` if no logger has read the losses of the last batch. Collective."""
    if any(isinstance(loss, torch.Tensor) for loss in state.total_loss_dict.values()):
        state.not_finite = warn_not_finite(state, dist.get_group().broadcast(read_losses(state)))


def _moment(state: State) -> tuple[int, int]:
    return len(state.fit_starts), int(state.timestamp.batch)
