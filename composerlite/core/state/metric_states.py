"""States of metrics in checkpoints: saving, loading, and conversion to another number of ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from composerlite.types import StateDict

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["load_metric_states", "merged_state", "metric_states"]

log = logging.getLogger(__name__)


def metric_states(metrics: Mapping[str, Metric]) -> StateDict:
    """Return the states of ``metrics`` on this rank, by name."""
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
    """Restore ``metrics`` from the states of all ranks of the saved run.

    With the same number of ranks, each rank restores its own states. With another number, sums and lists of all saved
    ranks go to rank 0, so that totals stay the same.

    Args:
        metrics: metrics of this rank, by name.
        saved: results of :func:`metric_states` by name; with several ranks, a list of results in ``per_rank``.
        rank, world_size: of this run.
        saved_world_size: number of ranks of the saved run.
    """
    for name, metric in metrics.items():
        if name not in saved:
            continue
        every: list[Any] = list(saved[name].get("per_rank") or [saved[name]])
        if len(every) == 1 < saved_world_size and rank == 0:
            log.warning("metric %r: the checkpoint has only the state of rank 0 of %d", name, saved_world_size)
        own = every[rank] if len(every) == world_size else _merged(name, metric, every, rank)
        if own is not None:
            _load(metric, own)


def _parts(metric: Metric) -> dict[str, Metric]:
    """Return ``metric`` and its submetrics, by the prefix of their keys in the state dict."""
    from torchmetrics import Metric

    return {f"{name}." if name else "": part for name, part in metric.named_modules() if isinstance(part, Metric)}


@contextlib.contextmanager
def _persistent(parts: Sequence[Metric]) -> Generator[None]:
    """Include the states in ``state_dict()`` inside the block. Outside, the state dict of the model omits them."""
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
    counts = saved.get("update_counts") or [saved.get("update_count", 1)] * len(parts)  # Composer saves no count
    for part, count in zip(parts, counts, strict=True):
        part._update_count = count  # pyright: ignore[reportPrivateUsage]


def _copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_copied(item, device) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


def merged_state(part: Any, name: str, values: Sequence[Any]) -> Any:
    """Merge the ``values`` of several ranks of state ``name`` of the metric ``part``: a longer list, or a tensor."""
    if isinstance(part._defaults[name], list):
        lists: list[list[Any]] = [value if isinstance(value, list) else [value] for value in values]
        return [_copied(item, part.device) for items in lists for item in items]
    stacked, reduction = torch.stack([*values]).to(part.device), part._reductions[name]
    return stacked if reduction is None else reduction(stacked)


def _merged(name: str, metric: Metric, every: Sequence[Any], rank: int) -> StateDict | None:
    """Return the state of ``rank`` that gives the totals of ``every`` saved rank; ``None`` to start fresh."""
    from torchmetrics.utilities import dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

    merged: StateDict = dict(every[0]["state_dict"])  # entries that are not states are the same on all ranks
    part: Any
    for prefix, part in _parts(metric).items():
        for attribute, default in part._defaults.items():
            state = merged_state(part, attribute, [saved["state_dict"][prefix + attribute] for saved in every])
            if isinstance(default, list):
                state = state if rank == 0 else []
            elif part._reductions[attribute] is dim_zero_sum:
                state = state if rank == 0 else default
            elif part._reductions[attribute] not in (dim_zero_max, dim_zero_min, dim_zero_mean):
                if rank == 0:
                    log.warning(
                        "metric %r starts fresh: its state %r cannot be merged from the %d ranks of the checkpoint",
                        name,
                        attribute,
                        len(every),
                    )
                return None
            merged[prefix + attribute] = state
    count = sum(saved.get("update_count", 1) for saved in every) if rank == 0 else 0
    return {"state_dict": merged, "update_count": count}
