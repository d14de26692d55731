"""Evaluator: a data set to evaluate on, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composerlite.core import DataSpec, Evaluator, Event, State, Time, Timestamp, ensure_evaluator
from composerlite.errors import ConfigError

LOADER = [(torch.zeros(2, 2), torch.zeros(2))]


def test_an_evaluator_holds_its_data_and_its_label() -> None:
    """The loader becomes a DataSpec; what is not given is left to the trainer."""
    evaluator = Evaluator(label="test", dataloader=LOADER, metric_names=("Accuracy",))
    assert isinstance(evaluator.dataloader, DataSpec)
    assert (evaluator.label, evaluator.metric_names) == ("test", ["Accuracy"])
    assert (evaluator.subset_num_batches, evaluator.eval_interval) == (None, None)


@pytest.mark.parametrize(
    ("interval", "event"),
    [("2ba", Event.BATCH_END), (2, Event.EPOCH_END), (Time.from_epoch(2), Event.EPOCH_END)],
)
def test_evaluation_is_due_at_the_end_events(state: State, interval: Any, event: Event) -> None:
    """An interval is looked at when a batch or an epoch ends, before checkpoints are saved."""
    due = Evaluator(label="test", dataloader=LOADER, eval_interval=interval).eval_interval
    assert due is not None
    state.previous_timestamp, state.timestamp = Timestamp(epoch=1, batch=1), Timestamp(epoch=2, batch=2)
    assert [e for e in Event if due(state, e)] == [event]


def test_the_trainer_fills_in_what_was_left(state: State) -> None:
    """An evaluator's own settings win over the trainer's."""
    plain = Evaluator(label="a", dataloader=LOADER).with_defaults(subset_num_batches=3, eval_interval="1ba")
    assert plain.subset_num_batches == 3
    own = Evaluator(label="b", dataloader=LOADER, subset_num_batches=5, eval_interval=0)
    own.with_defaults(subset_num_batches=3, eval_interval="1ba")
    state.previous_timestamp, state.timestamp = Timestamp(), Timestamp(batch=1)
    assert own.subset_num_batches == 5
    assert plain.eval_interval is not None
    assert plain.eval_interval(state, Event.BATCH_END)
    assert own.eval_interval is not None
    assert not own.eval_interval(state, Event.BATCH_END)


@pytest.mark.parametrize("number", [0, -2])
def test_a_subset_of_no_batches_is_an_error(number: int) -> None:
    """Evaluating on nothing is refused at construction."""
    with pytest.raises(ConfigError, match=f"subset_num_batches={number}"):
        Evaluator(label="test", dataloader=LOADER, subset_num_batches=number)


def test_a_bare_loader_is_labelled_eval() -> None:
    """A loader, a DataSpec or its arguments become an evaluator with the label ``eval``."""
    evaluator = Evaluator(label="test", dataloader=LOADER)
    assert ensure_evaluator(evaluator) is evaluator
    for data in (LOADER, DataSpec(LOADER), {"dataloader": LOADER}):
        assert ensure_evaluator(data).label == "eval"
