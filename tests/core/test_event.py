"""Event: the moments of training."""

from __future__ import annotations

import pytest

from composerlite.core import Callback, Event
from composerlite.errors import ConfigError

FIT = """INIT BEFORE_LOAD AFTER_LOAD FIT_START ITERATION_START EPOCH_START
BEFORE_DATALOADER AFTER_DATALOADER BATCH_START BEFORE_TRAIN_BATCH
BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD
AFTER_TRAIN_BATCH BATCH_END BATCH_CHECKPOINT EPOCH_END EPOCH_CHECKPOINT ITERATION_END ITERATION_CHECKPOINT FIT_END"""
EVAL = """EVAL_BEFORE_ALL EVAL_START EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END EVAL_END
EVAL_AFTER_ALL EVAL_STANDALONE_START EVAL_STANDALONE_END"""
PREDICT = """PREDICT_START PREDICT_BATCH_START PREDICT_BEFORE_FORWARD PREDICT_AFTER_FORWARD PREDICT_BATCH_END
PREDICT_END"""


def test_every_documented_event_is_there_in_order() -> None:
    """The events are those of the documentation, declared in the order in which they happen."""
    assert [event.name for event in Event] == f"{FIT} {EVAL} {PREDICT}".split()


@pytest.mark.parametrize("event", Event)
def test_every_event_is_a_method_of_callback(event: Event) -> None:
    """The value of an event is its name in lower case and the method that a callback overrides."""
    assert event.value == event.name.lower()
    assert callable(getattr(Callback, event.value))


def test_an_unknown_event_lists_the_known_ones() -> None:
    """A typo is an error that names the nearest event and all others."""
    with pytest.raises(ConfigError, match=r"event='batch_ende' does not exist.*mean 'batch_end'\?") as error:
        Event("batch_ende")
    assert all(event.value in str(error.value) for event in Event)


def test_events_know_their_pair() -> None:
    """Events that open and close a pair share a canonical name."""
    assert Event.BEFORE_FORWARD.is_before_event
    assert Event.AFTER_FORWARD.is_after_event
    assert Event.EPOCH_START.is_before_event
    assert Event.EPOCH_END.is_after_event
    assert Event.BEFORE_FORWARD.canonical_name == Event.AFTER_FORWARD.canonical_name == "forward"
    assert Event.EVAL_BEFORE_FORWARD.canonical_name == Event.EVAL_AFTER_FORWARD.canonical_name == "eval_forward"
    assert Event.EPOCH_START.canonical_name == Event.EPOCH_END.canonical_name == "epoch"


def test_evaluation_and_prediction_are_told_from_training() -> None:
    """``is_eval`` and ``is_predict`` tell the three families apart."""
    assert [e.name for e in Event if e.is_eval] == EVAL.split()
    assert [e.name for e in Event if e.is_predict] == PREDICT.split()
