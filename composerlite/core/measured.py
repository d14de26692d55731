"""Metric values by the names they are logged under, and of which moment they are."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from composerlite import dist
from composerlite.core.state.loss_reading import LossReading
from composerlite.core.state.state import State
from composerlite.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = [
    "MeasuredMetrics",
    "check_metric_exists",
    "gives_one_value",
    "metric_values",
    "note_not_finite",
    "note_unread_losses",
    "read_losses",
]

log = logging.getLogger(__name__)

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
            numbers = value.detach().flatten().tolist() if isinstance(value, torch.Tensor) else [float(value)]
            if len(numbers) == 1:
                values[str(key)] = float(numbers[0])
            else:  # one value per class, say
                values.update({f"{key}/{i}": float(number) for i, number in enumerate(numbers)})
    return values


def _updated(metrics: Sequence[Metric]) -> list[bool]:
    """Tell of each metric whether it has seen a batch on any rank: only those can be computed, and by all ranks."""
    counts = dist.get_group().max([metric.update_count for metric in metrics]) if metrics else []
    for metric, count in zip(metrics, counts, strict=True):
        if count and metric.update_count == 0:  # it would warn, and the others have something for it
            metric._update_count = 1  # pyright: ignore[reportPrivateUsage] - torchmetrics has no other way
    return [count > 0 for count in counts]


def gives_one_value(metric: Metric) -> bool:
    """Return true if ``metric`` declares that it computes a tensor. Others may give a dict, whose keys come with it."""
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
        """The last measurements, and when they were made; empty if there are none."""
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
    """Check that evaluation or training will measure ``name``, as far as that is known before.

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


def note_not_finite(state: State, values: Mapping[str, float]) -> tuple[str, ...]:
    """Return the names of ``values`` that are not finite; rank 0 warns of the first ones after a finite batch.

    Args:
        state: whose ``timestamp`` is behind the batch that the values are of, and which knows what was found before.
        values: losses and norms of that batch, the same on every rank.

    Returns:
        Names of the values that are not finite.
    """
    found = tuple(name for name, value in values.items() if not math.isfinite(value))
    if found and not state.not_finite and state.rank == 0:
        first = found[0]
        log.warning(
            "%s is %s at batch %d, which is not finite: checkpoints are marked from here on until it is finite again. "
            "autoresume and save_best_k skip them.",
            first,
            values[first],
            int(state.timestamp.batch),
        )
    return found


def read_losses(state: State) -> dict[str, Any]:
    """Return the losses of this rank's last batch as numbers."""
    reading = state.loss_reading or LossReading()
    return {name: reading.value(loss) for name, loss in state.total_loss_dict.items()}


def note_unread_losses(state: State) -> None:
    """Note which losses of the last batch are not finite, where no logger has read them. Every rank calls it."""
    if any(isinstance(loss, torch.Tensor) for loss in state.total_loss_dict.values()):
        state.not_finite = note_not_finite(state, dist.get_group().broadcast(read_losses(state)))


def _moment(state: State) -> tuple[int, int]:
    return len(state.fit_starts), int(state.timestamp.batch)


@contextlib.contextmanager
def lists_of_all_ranks(metrics: Sequence[Metric]) -> Generator[None]:
    """Within it ``metrics`` can be computed on every rank, also where their lists are not alike on the ranks.

    torchmetrics gathers list states tensor by tensor: a rank that has seen no sample has none, or one of another kind,
    and the ranks wait for each other or abort. Such metrics have the states of all ranks here, and their own again
    afterwards. Every rank calls it with the same metrics.
    """
    parts = [part for metric in metrics for part in _that_keep_lists(metric)] if dist.get_world_size() > 1 else []
    described = dist.get_group().gather([_form(part) for part in parts]) if parts else []
    uneven = [part for number, part in enumerate(parts) if any(of[number] != described[0][number] for of in described)]
    own = [{name: getattr(part, name) for name in _reductions(part)} for part in uneven]
    try:
        if uneven:
            every = dist.get_group().gather([_on_cpu(states) for states in own])
            for number, part in enumerate(uneven):
                _set(part, [of[number] for of in every])
        yield
    finally:
        for part, states in zip(uneven, own, strict=True):
            part._to_sync = part.sync_on_compute  # pyright: ignore[reportPrivateUsage]
            for name, value in states.items():
                setattr(part, name, value)


def _reductions(part: Metric) -> dict[str, Any]:
    return part._reductions  # pyright: ignore[reportPrivateUsage] - torchmetrics has no other way


def _that_keep_lists(metric: Metric) -> list[Metric]:
    """The parts of ``metric`` whose lists torchmetrics would gather."""
    from torchmetrics import Metric

    return [
        part
        for part in metric.modules()
        if isinstance(part, Metric)
        and part._computed is None  # pyright: ignore[reportPrivateUsage] - else it gathers nothing
        and part._to_sync  # pyright: ignore[reportPrivateUsage]
        and part.process_group is None
        and type(part)._sync_dist is Metric._sync_dist  # pyright: ignore[reportPrivateUsage] - some gather by themselves
        and any(isinstance(default, list) for default in part._defaults.values())  # pyright: ignore[reportPrivateUsage]
    ]


def _form(part: Metric) -> list[Any]:
    """The form of lists that has to be the same on every rank."""
    from torchmetrics.utilities import dim_zero_cat

    forms: list[Any] = []
    for name, reduction in _reductions(part).items():
        value = getattr(part, name)
        if not isinstance(value, list):
            continue
        tensors: list[Any] = [(str(one.dtype), one.ndim) for one in value if isinstance(one, torch.Tensor)]  # pyright: ignore
        forms.append(tensors[:1] if reduction is dim_zero_cat else tensors)  # these are made one before they are sent
    return forms


def _on_cpu(states: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [one.detach().cpu() if isinstance(one, torch.Tensor) else one for one in value]
        if isinstance(value, list)
        else value.detach().cpu()
        for name, value in states.items()
    }


def _set(part: Metric, every: Sequence[dict[str, Any]]) -> None:
    """Give ``part`` the states of ``every`` rank, reduced as torchmetrics does, and have it gather nothing itself."""
    for name, reduction in _reductions(part).items():
        values = [states[name] for states in every]
        together: Any
        if isinstance(values[0], list):
            together = [one.to(part.device) for value in values for one in value]
            reduced = reduction(together) if reduction is not None and together else together
        else:
            together = torch.stack(values).to(part.device)
            reduced = together if reduction is None else reduction(together)
        setattr(part, name, reduced)
    part._to_sync = False  # pyright: ignore[reportPrivateUsage]
