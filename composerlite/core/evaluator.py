"""Evaluator: a data set to evaluate on, and when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from composerlite.core.data import DataSpec, ensure_data_spec
from composerlite.core.interval import SchedulePredicate, create_interval_scheduler
from composerlite.core.time import TimeInput
from composerlite.errors import ConfigError, checked_arguments
from composerlite.types import Batch

__all__ = ["Evaluator", "ensure_evaluator"]


class Evaluator:
    """A data set to evaluate on.

    Args:
        label: names its metrics, ``metrics/<label>/<metric>``.
        dataloader: the batches, as a loader, a :class:`DataSpec` or its arguments as a dict.
        metric_names: which of the model's metrics to compute; all by default. Globs are allowed.
        subset_num_batches: stop after so many batches; -1 for all, ``None`` for the trainer's setting.
        eval_interval: when during training; ``None`` for the trainer's setting. An int counts epochs; 0 is never.
        device_eval_microbatch_size: samples per forward pass; a whole batch by default.
    """

    @checked_arguments
    def __init__(
        self,
        *,
        label: str,
        dataloader: DataSpec | Iterable[Batch] | Mapping[str, Any],
        metric_names: Sequence[str] | None = None,
        subset_num_batches: int | None = None,
        eval_interval: TimeInput | SchedulePredicate | None = None,
        device_eval_microbatch_size: int | None = None,
    ) -> None:
        if subset_num_batches is not None and (subset_num_batches == 0 or subset_num_batches < -1):
            raise ConfigError(
                f"Evaluator(subset_num_batches={subset_num_batches}): want a positive number, or -1 for all."
            )
        self.label = label
        self.dataloader = ensure_data_spec(dataloader)
        self.metric_names = list(metric_names) if metric_names is not None else None
        self.subset_num_batches = subset_num_batches
        self.device_eval_microbatch_size = device_eval_microbatch_size
        self.eval_interval: SchedulePredicate | None = None
        if eval_interval is not None:
            self.eval_interval = create_interval_scheduler(eval_interval, checkpoint_events=False)

    def with_defaults(self, *, subset_num_batches: int, eval_interval: TimeInput | SchedulePredicate) -> Evaluator:
        """This evaluator; what it does not set itself is taken from the arguments."""
        if self.subset_num_batches is None:
            self.subset_num_batches = subset_num_batches
        if self.eval_interval is None:
            self.eval_interval = create_interval_scheduler(eval_interval, checkpoint_events=False)
        return self


def ensure_evaluator(evaluator: Evaluator | DataSpec | Iterable[Batch] | Mapping[str, Any]) -> Evaluator:
    """``evaluator`` as an :class:`Evaluator`; a bare loader gets the label ``'eval'``."""
    return evaluator if isinstance(evaluator, Evaluator) else Evaluator(label="eval", dataloader=evaluator)
