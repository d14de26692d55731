"""Callback: what third parties write to take part in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composerlite.core.event import Event

if TYPE_CHECKING:
    from composerlite.core.logger import Logger
    from composerlite.core.state import State

__all__ = ["Callback"]


class Callback:
    """Something that happens at events of training. Override the methods of the events you need.

    Each method gets the :class:`State` and the :class:`Logger` and may read and change the state. An exception leaves
    ``fit``. The engine calls only methods that a subclass overrides. Progress worth keeping goes into
    :meth:`state_dict`; it is saved in every full checkpoint and given back on resume.
    """

    @property
    def state_key(self) -> str:
        """The name under which :meth:`state_dict` is saved. Further callbacks of the same name get ``:1``, ``:2``, …"""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Progress to save: tensors and plain values."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Call the method of ``event``. Override this one to be called at every event."""
        getattr(self, event.value)(state, logger)

    def init(self, state: State, logger: Logger) -> None:
        """The trainer is being built; model and optimizer are there, data are not, nothing is loaded."""

    def before_load(self, state: State, logger: Logger) -> None:
        """Before a checkpoint is looked for and loaded."""

    def after_load(self, state: State, logger: Logger) -> None:
        """After a checkpoint was loaded, or none was asked for."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """``fit`` was called."""

    def iteration_start(self, state: State, logger: Logger) -> None:
        """Before the first batch of an iteration."""

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Before the first batch of an epoch; not called again where an epoch is resumed in its middle."""

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Before the next batch is asked of the loader."""

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """``state.batch`` is there, on the CPU."""

    def batch_start(self, state: State, logger: Logger) -> None:
        """``state.batch`` is on the device."""

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Before the first microbatch; gradients are zero."""

    def before_forward(self, state: State, logger: Logger) -> None:
        """Before the model is called on a microbatch."""

    def after_forward(self, state: State, logger: Logger) -> None:
        """``state.outputs`` is there."""

    def before_loss(self, state: State, logger: Logger) -> None:
        """Before the loss is computed."""

    def after_loss(self, state: State, logger: Logger) -> None:
        """``state.loss`` is there."""

    def before_backward(self, state: State, logger: Logger) -> None:
        """Before the backward pass."""

    def after_backward(self, state: State, logger: Logger) -> None:
        """After the backward pass of a microbatch."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """All gradients are there, unscaled; the optimizer has not stepped."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """The optimizer has stepped and ``state.timestamp`` counts the batch."""

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """After ``batch_end`` and evaluation: the moment to save."""

    def epoch_end(self, state: State, logger: Logger) -> None:
        """The epoch is over and ``state.timestamp`` counts it."""

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """After ``epoch_end`` and evaluation: the moment to save."""

    def iteration_end(self, state: State, logger: Logger) -> None:
        """The iteration is over and ``state.timestamp`` counts it."""

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """After ``iteration_end``: the moment to save."""

    def fit_end(self, state: State, logger: Logger) -> None:
        """Training is over."""

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Before the first of several evaluators."""

    def eval_start(self, state: State, logger: Logger) -> None:
        """Before the first batch of an evaluator."""

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """An evaluation batch is on the device."""

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        """Before the model is called on an evaluation batch."""

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """``state.outputs`` is there."""

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Metrics count the evaluation batch."""

    def eval_end(self, state: State, logger: Logger) -> None:
        """``state.eval_metric_values`` is there."""

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """After the last of several evaluators."""

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        """``Trainer.eval`` was called."""

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """``Trainer.eval`` is over."""

    def predict_start(self, state: State, logger: Logger) -> None:
        """``Trainer.predict`` was called."""

    def predict_batch_start(self, state: State, logger: Logger) -> None:
        """A prediction batch is on the device."""

    def predict_before_forward(self, state: State, logger: Logger) -> None:
        """Before the model is called on a prediction batch."""

    def predict_after_forward(self, state: State, logger: Logger) -> None:
        """``state.outputs`` is there."""

    def predict_batch_end(self, state: State, logger: Logger) -> None:
        """A prediction batch is done."""

    def predict_end(self, state: State, logger: Logger) -> None:
        """``Trainer.predict`` is over."""

    def close(self, state: State, logger: Logger) -> None:
        """The trainer is closing: release what you hold. Called once, also after an exception in training."""

    def post_close(self) -> None:
        """After the :meth:`close` of every callback. Not called if the own :meth:`close` raised."""
