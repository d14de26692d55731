"""Schedulers of a run: those of the constructor, or of the last call of ``fit`` with schedulers."""

from __future__ import annotations

import copy
import logging
from typing import Any, final

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from composerlite._torch_compat import mark_as_stepped
from composerlite.core import State
from composerlite.core.measured import check_metric_exists
from composerlite.core.state.run_state import by_class
from composerlite.errors import ConfigError
from composerlite.optim import ComposerScheduler, compile_composer_scheduler
from composerlite.trainer.checks import as_list
from composerlite.trainer.settings import rebase

__all__ = ["Schedules"]

log = logging.getLogger(__name__)

_SCHEDULED = (
    *("lr", "initial_lr", "min_lr", "max_lr", "swa_lr"),
    *("momentum", "betas", "base_momentum", "max_momentum"),
)
"""Values of the optimizer's groups that schedulers change."""


@final
class Schedules:
    """The script's schedulers, and the torch schedulers in ``state`` that are built from them.

    A checkpoint is loaded before ``fit`` gets schedulers. The checkpoint's schedulers are restored when the interrupted
    call of ``fit``, or the constructor, has passed its schedulers.

    Args:
        state: training state.
        given: schedulers of the constructor.
    """

    def __init__(self, state: State, given: object) -> None:
        self._state = state
        self._given: list[Any] = as_list(given, LRScheduler, ComposerScheduler, argument="schedulers")
        self._must_build = False
        self._loaded_values: list[dict[str, Any]] | None = None
        state.script.schedulers_in_fit = True

    @property
    def need_no_end(self) -> bool:
        """True if all schedulers can be built without ``max_duration``."""
        return all(isinstance(scheduler, LRScheduler) for scheduler in self._given)

    def step_every_batch(self) -> bool:
        """Return the default of ``step_schedulers_every_batch``: true unless a scheduler is torch's."""
        return not any(isinstance(s, LRScheduler) and not isinstance(s, ReduceLROnPlateau) for s in self._given)

    def record_loaded(self) -> None:
        """Copy the loaded values of the optimizer's groups: torch's schedulers change the groups when built."""
        if int(self._state.timestamp.batch) > 0:
            mark_as_stepped(self._state.optimizers[0])
        if self._state.resumed.schedulers is not None:
            groups = self._state.optimizers[0].param_groups
            self._loaded_values = [copy.deepcopy({n: group[n] for n in _SCHEDULED if n in group}) for group in groups]

    def give(self, given: object, ratio: float | None) -> None:
        """Record the schedulers and ``scale_schedule_ratio`` of a call of ``fit``."""
        if given is not None:
            self._given = as_list(given, LRScheduler, ComposerScheduler, argument="schedulers")
        self._must_build = self._must_build or given is not None or ratio is not None

    def build(self, ratio: float, *, keep_rates: bool) -> None:
        """Build torch schedulers.

        Args:
            ratio: ``scale_schedule_ratio``.
            keep_rates: restore the current learning rates after the build.

        Raises:
            ConfigError: a torch scheduler of another optimizer.
        """
        state, optimizer = self._state, self._state.optimizers[0]
        rates = [group["lr"] for group in optimizer.param_groups]
        built: list[LRScheduler] = []
        for scheduler in self._given:
            if not isinstance(scheduler, LRScheduler):
                built.append(compile_composer_scheduler(scheduler, state, ratio))
            elif scheduler.optimizer is not optimizer:
                raise ConfigError(f"schedulers: {type(scheduler).__name__} was built for another optimizer.")
            else:
                built.append(scheduler)
        state.schedulers = built
        self._must_build = False
        if keep_rates:
            mark_as_stepped(optimizer)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def begin(self, ratio: float, *, begun_before: bool, are_given: bool) -> None:
        """Put the schedulers of a call of ``fit`` into the state, and restore the checkpoint's states.

        Args:
            ratio: ``scale_schedule_ratio``.
            begun_before: the call was interrupted, in this process or in another process.
            are_given: the call has schedulers.
        """
        state = self._state
        was_built = self._must_build
        if self._must_build or len(state.schedulers) < len(self._given):
            self.build(ratio, keep_rates=begun_before)
        loaded, state.resumed.schedulers, state.script.schedulers_in_fit = state.resumed.schedulers, None, False
        if loaded is None:
            return
        if are_given and not begun_before:  # a new call: the checkpoint's schedulers are those of earlier calls
            unmatched = loaded.unmatched(by_class(loaded.restored))
        else:
            own = by_class(state.schedulers)
            restored = loaded.restore(own)
            before = tuple(state.resumed.metadata.get("learning_rates", ()))
            if before and before != tuple(state.script.learning_rates):
                rebase(restored, state.script.learning_rates)
            unmatched = loaded.unmatched(own)
        if begun_before and was_built and self._loaded_values is not None:
            for group, values in zip(state.optimizers[0].param_groups, self._loaded_values, strict=False):
                group.update(values)
        self._loaded_values = None
        if unmatched:
            log.warning("%s does not match the run in all its parts: %s", loaded.source, "; ".join(unmatched))

    def check_plateau(self) -> None:
        """Check that each ``ReduceLROnPlateau`` has a metric, and that no other scheduler sets the learning rate.

        Raises:
            ConfigError: no evaluator computes the metric, or another scheduler would undo the reduction.
        """
        state = self._state
        followed = [getattr(s, "metric", None) for s in state.schedulers if isinstance(s, ReduceLROnPlateau)]
        if not followed:
            return
        if not state.evaluators:
            raise ConfigError(
                "schedulers: ReduceLROnPlateau follows the loss of the first evaluator, and there is no evaluator. "
                "Pass eval_dataloader."
            )
        for name in filter(None, followed):
            check_metric_exists(name, state, argument="ReduceLROnPlateau: metric")
            if name.startswith("train/") and all(evaluator.label != "train" for evaluator in state.evaluators):
                raise ConfigError(
                    f"ReduceLROnPlateau(metric={name!r}): expected a metric of evaluation, such as 'eval/loss'."
                )
        label = state.evaluators[0].label
        if None in followed and "loss" not in state.eval_metrics.get(label, {}):
            raise ConfigError(
                f"schedulers: ReduceLROnPlateau follows the loss of the evaluator {label!r}, which does not compute a "
                f"loss. Pass Evaluator(label={label!r}, metric_names=['loss', …])."
            )
        if any(isinstance(scheduler, LambdaLR) for scheduler in state.schedulers):
            raise ConfigError(
                "schedulers: ReduceLROnPlateau and a schedule that sets the learning rate at each step contradict each "
                "other: the schedule would undo the reduction. Pass one of them."
            )
