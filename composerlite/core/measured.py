"""Metric values by the names they are logged under, and of which moment they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from composerlite import dist
from composerlite.core.metric_lists import lists_of_all_ranks
from composerlite.core.state import State
from composerlite.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["MeasuredMetrics", "check_metric_exists", "gives_one_value", "metric_values"]

_TRAIN = "train"


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The values of ``metrics`` by name, over what all ranks have seen. Every rank calls it.

    A metric that computes a dict gives one value per key, one that computes a vector ``<name>/0``, ``<name>/1``, …; one
    that has seen no batch gives none.
    """
    values: dict[str, float] = {}
    updated = _updated(list(metrics.values()))
    # Without those where no rank has seen a batch: resumed behind the last one of an epoch, or an empty loader.
    known = {name: metric for (name, metric), has_values in zip(metrics.items(), updated, strict=True) if has_values}
    for name, metric in known.items():
        with lists_of_all_ranks([metric]):
            computed: Any = metric.compute()
        for key, value in computed.items() if isinstance(computed, dict) else [(name, computed)]:
            if isinstance(value, torch.Tensor) and value.numel() != 1:  # one value per class, say
                values.update({f"{key}/{i}": float(item) for i, item in enumerate(value.flatten())})
            else:
                values[str(key)] = float(value)
    return values


def _updated(metrics: Sequence[Metric]) -> list[bool]:
    """Which of them have seen a batch on any rank: only those can be computed, and by all ranks."""
    counts = torch.tensor([metric.update_count for metric in metrics], dtype=torch.int64)
    if metrics and dist.get_world_size() > 1:
        dist.all_reduce(counts, "MAX")
        for metric, count in zip(metrics, counts.tolist(), strict=True):
            if count and metric.update_count == 0:  # it would warn, and the others have something for it
                metric._update_count = 1  # pyright: ignore[reportPrivateUsage] - torchmetrics has no other way
    return [count > 0 for count in counts.tolist()]


def gives_one_value(metric: Metric) -> bool:
    """Whether ``metric`` says that it computes a tensor. Others may give a dict, whose keys are known once computed."""
    returns = getattr(type(metric).compute, "__annotations__", {}).get("return")
    return returns in (torch.Tensor, "Tensor", "torch.Tensor")


@final
class MeasuredMetrics:
    """The metric values of the model as it stands: those measured since the last optimizer step.

    What was measured some batches ago is true of another model; a checkpoint that is judged by it is judged wrongly.
    Names are ``<label>/<name>``: what the loggers show, without ``metrics/``.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._moment = (-1, -1)

    def after_evaluation(self, state: State) -> None:
        """Take up the values of an evaluator. Call it at ``EVAL_END``."""
        label = str(state.dataloader_label)
        self._add(state, label, state.eval_metrics.get(label, {}))

    def after_epoch(self, state: State) -> None:
        """Take up the values of training in this epoch. Call it at ``EPOCH_END``."""
        self._add(state, _TRAIN, state.train_metrics)

    def now(self, state: State) -> dict[str, float]:
        """The values measured at this batch count; none if the last evaluation was at another."""
        return dict(self._values) if self._moment == _moment(state) else {}

    def state_dict(self) -> dict[str, Any]:
        """What was measured last, and when; empty if nothing was."""
        return {"values": dict(self._values), "moment": list(self._moment)} if self._values else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave: an evaluation that was interrupted has values already."""
        fit, batch = state_dict.get("moment", (-1, -1))
        self._values, self._moment = dict(state_dict.get("values", {})), (int(fit), int(batch))

    def _add(self, state: State, label: str, metrics: Mapping[str, Metric]) -> None:
        if self._moment != _moment(state):
            self._values, self._moment = {}, _moment(state)
        self._values.update({f"{label}/{name}": value for name, value in metric_values(metrics).items()})


def check_metric_exists(name: str, state: State, *, argument: str) -> None:
    """Check that evaluation or training will measure ``name``, as far as that can be told before it does.

    Args:
        name: ``<label>/<name>``, such as ``'eval/MulticlassAccuracy'``; ``'<label>/<name>/3'`` of a vector.
        argument: what the user gave it as.

    Raises:
        ConfigError: there is no such metric. The message lists those that exist.
    """
    groups = {evaluator.label: state.eval_metrics.get(evaluator.label, {}) for evaluator in state.evaluators}
    groups[_TRAIN] = state.train_metrics
    known = [f"{label}/{metric}" for label, metrics in groups.items() for metric in metrics]
    if any(name == one or name.startswith(f"{one}/") for one in known):
        return
    for label, metrics in groups.items():  # keys of a dict are known once it was computed
        if name.startswith(f"{label}/") and not all(gives_one_value(metric) for metric in metrics.values()):
            return
    hint = did_you_mean(name, known) if known else " There are none: give an eval_dataloader and Model.get_metrics()."
    raise ConfigError(f"{argument}={name!r}: nothing measures that.{hint}")


def _moment(state: State) -> tuple[int, int]:
    return len(state.fit_starts), int(state.timestamp.batch)
