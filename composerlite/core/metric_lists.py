"""Metrics that keep lists, over ranks of which some have nothing in theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from composerlite import dist

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["lists_of_all_ranks"]


@contextlib.contextmanager
def lists_of_all_ranks(metrics: Sequence[Metric]) -> Generator[None]:
    """Within it ``metrics`` can be computed on every rank, also where their lists are not alike on the ranks.

    torchmetrics gathers list states tensor by tensor: a rank that has seen no sample has none, or one of another kind,
    and the ranks wait for each other or abort. Such metrics have the states of all ranks here, and their own again
    afterwards. Every rank calls it with the same metrics.
    """
    parts = [part for metric in metrics for part in _that_keep_lists(metric)] if dist.get_world_size() > 1 else []
    described = dist.all_gather_object([_form(part) for part in parts]) if parts else []
    uneven = [part for number, part in enumerate(parts) if any(of[number] != described[0][number] for of in described)]
    own = [{name: getattr(part, name) for name in _reductions(part)} for part in uneven]
    try:
        if uneven:
            every = dist.all_gather_object([_on_cpu(states) for states in own])
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
    """What has to be the same on every rank."""
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
