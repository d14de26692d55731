"""The state of metrics in checkpoints: that of each rank, and its conversion to another number of ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from composerlite.types import StateDict

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["load_metric_states", "metric_states"]

log = logging.getLogger(__name__)


def metric_states(metrics: Mapping[str, Metric]) -> StateDict:
    """The states of ``metrics`` on this rank, by name."""
    states: StateDict = {}
    for name, metric in metrics.items():
        parts = list(_parts(metric).values())
        with _persistent(parts):
            states[name] = {"state_dict": dict(metric.state_dict()), "update_count": metric.update_count}
        if len(parts) > 1:
            states[name]["update_counts"] = [part.update_count for part in parts]
    return states


def load_metric_states(
    metrics: Mapping[str, Metric], saved: Mapping[str, Any], *, rank: int, world_size: int, saved_world_size: int
) -> None:
    """Restore ``metrics`` from what all ranks of the saved run had.

    On the same number of ranks each gets its own back. On another number, their total is
    as it was: what is added up or collected goes to rank 0.

    Args:
        metrics: of this rank.
        saved: what :func:`metric_states` gave, by name, with ``per_rank`` in it where there were several ranks.
        rank, world_size: of this run. saved_world_size: of the saved one.
    """
    for name, metric in metrics.items():
        if name not in saved:
            continue
        every: list[Any] = list(saved[name].get("per_rank") or [saved[name]])
        if len(every) == 1 < saved_world_size and rank == 0:
            log.warning("metric %r: the checkpoint has what rank 0 of %d counted, and no more", name, saved_world_size)
        own = every[rank] if len(every) == world_size else _merged(name, metric, every, rank, world_size)
        if own is not None:
            _load(metric, own)


def _parts(metric: Metric) -> dict[str, Metric]:
    """``metric`` and the metrics that it is made of, by the prefix of their keys in its state."""
    from torchmetrics import Metric

    return {f"{name}." if name else "": part for name, part in metric.named_modules() if isinstance(part, Metric)}


@contextlib.contextmanager
def _persistent(parts: Sequence[Metric]) -> Generator[None]:
    """Include their states in ``state_dict()`` for a moment: else they were also in that of the model that has them."""
    before = [dict(part._persistent) for part in parts]  # pyright: ignore[reportPrivateUsage]
    for part in parts:
        part.persistent(True)
    try:
        yield
    finally:
        for part, persistent in zip(parts, before, strict=True):
            part._persistent.update(persistent)  # pyright: ignore[reportPrivateUsage]


def _load(metric: Metric, saved: Mapping[str, Any]) -> None:
    parts = list(_parts(metric).values())
    for part in parts:
        part._computed = None  # pyright: ignore[reportPrivateUsage] - torchmetrics has no other way
    with _persistent(parts):
        metric.load_state_dict({key: _copied(value, metric.device) for key, value in saved["state_dict"].items()})
    counts = saved.get("update_counts") or [saved.get("update_count", 1)] * len(parts)
    for part, count in zip(parts, counts, strict=True):
        part._update_count = count  # pyright: ignore[reportPrivateUsage]


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_copied(one, device) for one in value]  # pyright: ignore[reportUnknownVariableType]
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


def _merged(name: str, metric: Metric, every: Sequence[Any], rank: int, world_size: int) -> StateDict | None:
    """State that ``rank`` of ``world_size`` starts from, merged from that of ``every`` saved rank; ``None``: afresh."""
    from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

    first = rank == 0
    merged: StateDict = dict(every[0]["state_dict"])  # what is no state, as weights of a metric, is the same on each
    for prefix, part in _parts(metric).items():
        for attribute, reduction in part._reductions.items():  # pyright: ignore[reportPrivateUsage]
            values: list[Any] = [of_rank["state_dict"][prefix + attribute] for of_rank in every]
            default: Any = part._defaults[attribute]  # pyright: ignore[reportPrivateUsage]
            same_on_all = {dim_zero_max, dim_zero_min, dim_zero_mean} & {reduction}
            if same_on_all and not isinstance(values[0], list):
                value = same_on_all.pop()(torch.stack(values))
            elif reduction is dim_zero_sum and not isinstance(values[0], list):
                value = dim_zero_sum(torch.stack(values)) if first else default
            elif reduction is dim_zero_cat or (reduction is None and isinstance(default, list)):
                lists: list[list[Any]] = [value if isinstance(value, list) else [value] for value in values]  # pyright: ignore
                value = [one for of_rank in lists for one in of_rank] if first else []
            elif world_size > len(every):
                value = values[rank] if rank < len(every) else default
            else:
                if first:
                    log.warning(
                        "metric %r: values of %d ranks cannot be converted to %d (its state %r is reduced in a way of "
                        "its own): it counts from the resume on",
                        name,
                        len(every),
                        world_size,
                        attribute,
                    )
                return None
            merged[prefix + attribute] = value
    count = sum(of_rank.get("update_count", 1) for of_rank in every) if first else 0
    return {"state_dict": merged, "update_count": count}
