"""State: how long, which batch, which loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
from torch.utils.data import DataLoader, IterableDataset

from composerlite.core import State, Time, Timestamp
from composerlite.errors import ConfigError


def test_max_duration_is_any_time(state: State) -> None:
    """A number counts epochs; strings and times are taken; ``None`` is no end."""
    for given, expected in ((3, Time.from_epoch(3)), ("5ba", Time.from_batch(5)), ("90m", Time(5400, "sec"))):
        state.max_duration = given
        assert state.max_duration == expected
    state.max_duration = None
    assert state.max_duration is None


def test_max_duration_is_no_fraction(state: State) -> None:
    """Half of itself is no end: refused with the reason."""
    with pytest.raises(ConfigError, match=r"max_duration='0.5dur'.*fraction of max_duration itself"):
        state.max_duration = "0.5dur"
    assert state.max_duration == "10ep"


@pytest.mark.parametrize(
    ("end", "stamp", "fraction"),
    [
        ("10ep", Timestamp(epoch=5), 0.5),
        ("10ba", Timestamp(epoch=5, batch=3), 0.3),
        ("100sp", Timestamp(sample=25), 0.25),
        ("100tok", Timestamp(token=100), 1.0),
        ("10s", Timestamp(total_wct=timedelta(seconds=2.5)), 0.25),
    ],
)
def test_the_fraction_of_training_that_is_done(state: State, end: str, stamp: Timestamp, fraction: float) -> None:
    """It is counted in the unit of max_duration, and training is over when it is 1."""
    state.max_duration, state.timestamp = end, stamp
    assert state.get_elapsed_duration() == Time.from_duration(fraction)
    assert state.training_is_over == (fraction >= 1)


@pytest.mark.parametrize("end", ["10ep", "100ba", "90m", "1e9tok"])
def test_a_callback_can_stop_training(state: State, end: str) -> None:
    """``stop_training`` ends the run after the batch, in whichever unit its end was."""
    state.max_duration, state.timestamp = end, Timestamp(epoch=1, batch=7)
    assert not state.training_is_over
    state.stop_training()
    assert state.training_is_over
    assert state.max_duration == "7ba"


class Pair(NamedTuple):
    """A batch as a named tuple."""

    x: Any
    y: Any


@dataclass
class Record:
    """A batch as an object with attributes."""

    x: Any
    y: Any


@pytest.mark.parametrize(
    ("batch", "key"),
    [
        ((1, 2), 1),
        ([1, 2], 1),
        (Pair(1, 2), 1),
        ({"x": 1, "y": 2}, "y"),
        (Record(1, 2), "y"),
    ],
)
def test_an_item_of_the_batch_is_read_and_replaced(state: State, batch: Any, key: Any) -> None:
    """By index, key or attribute: what was set is what is got, and the batch keeps its type and its other items."""
    state.batch = batch
    assert state.batch_get_item(key) == 2
    state.batch_set_item(key, 5)
    assert state.batch_get_item(key) == 5
    assert type(state.batch) is type(batch)
    first: Any = 0 if key == 1 else "x"
    assert state.batch_get_item(first) == 1


def test_an_item_is_whatever_a_function_says(state: State) -> None:
    """Functions reach into batches of any shape."""
    state.batch = {"deep": [1, {"x": 2}]}
    assert state.batch_get_item(lambda batch: batch["deep"][1]["x"]) == 2
    state.batch_set_item(lambda batch, value: {**batch, "new": value}, 3)
    assert state.batch_get_item("new") == 3


class Stream(IterableDataset[int]):
    """A data set without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_the_length_of_the_loader(state: State) -> None:
    """It is the loader's, or the subset's if that is shorter, or unknown."""
    for loader, subset, expected in (
        ([0] * 10, None, 10),
        ([0] * 10, -1, 10),
        ([0] * 10, 4, 4),
        ([0] * 10, 40, 10),
        (DataLoader(Stream()), None, None),
        (DataLoader(Stream()), 4, 4),
        (None, None, None),
    ):
        state.set_dataloader(loader, "train", subset)
        assert state.dataloader_len == (None if expected is None else Time.from_batch(expected))
    state.set_dataloader([0], "test")
    assert (state.dataloader, state.dataloader_label) == ([0], "test")
