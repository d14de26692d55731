"""Events of training, at which algorithms, callbacks and loggers are called."""

from __future__ import annotations

from enum import StrEnum

from composerlite.errors import ConfigError, did_you_mean

__all__ = ["Event"]


class Event(StrEnum):
    """An event of training. The value is the name of the :class:`Callback` method to call.

    One training batch runs ``BEFORE_DATALOADER, AFTER_DATALOADER, BATCH_START, BEFORE_TRAIN_BATCH``, then for each
    microbatch ``BEFORE_FORWARD, AFTER_FORWARD, BEFORE_LOSS, AFTER_LOSS, BEFORE_BACKWARD, AFTER_BACKWARD``, then
    ``AFTER_TRAIN_BATCH`` (the gradients are complete, the optimizer has not stepped), the optimizer step,
    ``BATCH_END`` (the timestamp counts the batch), evaluation, ``BATCH_CHECKPOINT``.
    """

    INIT = "init"
    BEFORE_LOAD = "before_load"
    AFTER_LOAD = "after_load"
    FIT_START = "fit_start"

    ITERATION_START = "iteration_start"

    EPOCH_START = "epoch_start"

    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"

    BATCH_START = "batch_start"

    BEFORE_TRAIN_BATCH = "before_train_batch"

    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"

    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"

    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"

    AFTER_TRAIN_BATCH = "after_train_batch"

    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"

    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"

    ITERATION_END = "iteration_end"
    ITERATION_CHECKPOINT = "iteration_checkpoint"

    FIT_END = "fit_end"

    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"

    EVAL_STANDALONE_START = "eval_standalone_start"
    EVAL_STANDALONE_END = "eval_standalone_end"

    PREDICT_START = "predict_start"
    PREDICT_BATCH_START = "predict_batch_start"
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    PREDICT_BATCH_END = "predict_batch_end"
    PREDICT_END = "predict_end"

    @classmethod
    def _missing_(cls, value: object) -> Event:
        name = str(value)
        found = next((event for event in cls if name.lower() == event.value), None)
        if found is None:
            raise ConfigError(f"event={value!r} does not exist.{did_you_mean(name.lower(), [e.value for e in cls])}")
        return found

    @property
    def is_before_event(self) -> bool:
        """Return true if the event opens a pair, as ``BEFORE_FORWARD`` and ``EPOCH_START`` do."""
        return "before_" in self.value or self.value.endswith("_start")

    @property
    def is_after_event(self) -> bool:
        """Return true if the event closes a pair, as ``AFTER_FORWARD`` and ``EPOCH_END`` do."""
        return "after_" in self.value or self.value.endswith("_end")

    @property
    def canonical_name(self) -> str:
        """The name of the pair: ``forward`` for both ``BEFORE_FORWARD`` and ``AFTER_FORWARD``."""
        name = self.value.replace("before_", "").replace("after_", "")
        return name.removesuffix("_start").removesuffix("_end")

    @property
    def is_eval(self) -> bool:
        """Return true if the event belongs to evaluation."""
        return self.value.startswith("eval_")

    @property
    def is_predict(self) -> bool:
        """Return true if the event belongs to prediction."""
        return self.value.startswith("predict_")
