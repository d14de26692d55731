"""DataSpec: counting, splitting and moving batches."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from composerlite.core import DataSpec, ensure_data_spec, move_to_device
from composerlite.core.data import count_samples, count_tokens, split_batch
from composerlite.errors import ConfigError


class Pair(NamedTuple):
    """A batch as a named tuple."""

    x: Any
    y: Any


def rows(count: int, width: int = 3) -> torch.Tensor:
    """A tensor of shape (count, width) in which every element is different."""
    return torch.arange(count * width).view(count, width)


@given(samples=st.integers(1, 50), size=st.integers(1, 60))
def test_microbatches_are_the_batch_in_order(samples: int, size: int) -> None:
    """Each microbatch has ``size`` samples but the last, which has the rest; put together they are the batch."""
    x, y = rows(samples), torch.arange(samples)
    parts = split_batch((x, y), size)
    assert [len(part[0]) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert 1 <= len(parts[-1][0]) <= size
    assert torch.equal(torch.cat([part[0] for part in parts]), x)
    assert torch.equal(torch.cat([part[1] for part in parts]), y)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.arange(3), [torch.arange(2), torch.tensor([2])]),
        ((torch.arange(3),), [(torch.arange(2),), (torch.tensor([2]),)]),
        (
            Pair(torch.arange(3), torch.arange(3)),
            [Pair(torch.arange(2), torch.arange(2)), Pair(*[torch.tensor([2])] * 2)],
        ),
        ({"b": torch.arange(3), "a": 1}, [{"b": torch.arange(2), "a": 1}, {"b": torch.tensor([2]), "a": 1}]),
        (["a", "b", "c"], [["a", "b"], ["c"]]),
    ],
)
def test_microbatches_have_the_type_of_the_batch(batch: Any, expected: Any) -> None:
    """Tensors, tuples, named tuples, mappings and lists of samples keep their type, names and order of keys."""
    parts = split_batch(batch, 2)
    assert [type(part) for part in parts] == [type(part) for part in expected]
    assert repr(list(parts)) == repr(expected)


def test_nested_batches_are_split() -> None:
    """Tuples in dicts in tuples are split all the way down."""
    batch = ({"ids": rows(4), "pair": (rows(4), [torch.arange(4)])}, Pair(torch.arange(4), ["a", "b", "c", "d"]))
    first, second = split_batch(batch, 3)
    assert first[0]["pair"][1][0].tolist() == [0, 1, 2]
    assert second[0]["ids"].tolist() == [[9, 10, 11]]
    assert (first[1].y, second[1].y) == (["a", "b", "c"], ["d"])


@pytest.mark.parametrize("labels", [2, 3, 5])
def test_parts_of_different_length_are_an_error(labels: int) -> None:
    """Four samples with fewer or more labels are refused, also where both would make two microbatches."""
    for batch in ((rows(4), torch.arange(labels)), {"x": rows(4), "y": torch.arange(labels)}):
        with pytest.raises(ConfigError, match=r"same first dimension.*split_batch"):
            split_batch(batch, 2)


@pytest.mark.parametrize("batch", [7, "text", object(), (rows(2), object()), {"x": 1}])
def test_what_cannot_be_split_is_an_error_that_says_how(batch: Any) -> None:
    """A batch with something else in it needs ``DataSpec(split_batch=…)``."""
    with pytest.raises(ConfigError, match=r"DataSpec\(loader, split_batch="):
        split_batch(batch, 1)


@pytest.mark.parametrize(
    "batch",
    [
        rows(4),
        (rows(4), 1),
        [rows(4)],
        {"x": rows(4)},
        Pair("a", rows(4)),
        ({"a": {"b": rows(4)}},),
        {"n": 1, "x": rows(4)},
    ],
)
def test_samples_are_counted_in_the_first_tensor(batch: Any) -> None:
    """The length of the first tensor is the number of samples, wherever in the batch it is."""
    assert count_samples(batch) == 4


def test_a_batch_without_a_tensor_cannot_be_counted() -> None:
    """Where there is no tensor the error says what to pass."""
    with pytest.raises(ConfigError, match="get_num_samples_in_batch"):
        count_samples(["a", "b"])


def test_tokens_are_counted_in_input_ids() -> None:
    """A batch with ``input_ids`` has as many tokens as these; any other has none."""
    assert count_tokens({"input_ids": rows(4, 16)}) == 64
    assert count_tokens(rows(4)) == count_tokens((rows(4), rows(4))) == count_tokens({"x": rows(4)}) == 0


def test_every_tensor_is_moved_and_nothing_else_changes() -> None:
    """Tensors at any depth land on the device; the rest of the batch is the same."""
    batch: Any = ({"x": rows(2), "name": "n"}, [rows(2)], Pair(rows(2), 3), OrderedDict(z=rows(1)))
    moved = move_to_device(batch, torch.device("meta"))
    assert {t.device.type for t in (moved[0]["x"], moved[1][0], moved[2].x, moved[3]["z"])} == {"meta"}
    assert (moved[0]["name"], moved[2].y) == ("n", 3)
    assert [type(part) for part in moved] == [dict, list, Pair, OrderedDict]


class Stream(IterableDataset[int]):
    """A data set that does not know its length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_the_number_of_samples_is_that_of_the_data_set() -> None:
    """A loader over a data set with a length knows the samples per epoch, another does not; it can be given."""
    loader = DataLoader(TensorDataset(rows(10)), batch_size=4)
    assert DataSpec(loader).num_samples == 10
    assert DataSpec(loader, num_samples=8).num_samples == 8
    assert DataSpec(DataLoader(Stream())).num_samples is None
    assert DataSpec([rows(4)]).num_samples is None


def test_a_spec_uses_what_it_is_given() -> None:
    """A user's functions replace the built-in ones."""
    spec = DataSpec(
        [["a", "b"]],
        split_batch=lambda batch, size: [batch],
        get_num_samples_in_batch=len,
        get_num_tokens_in_batch=lambda batch: 7,
    )
    assert spec.split_batch(["a", "b"], 1) == [["a", "b"]]
    assert (spec.get_num_samples_in_batch(["a", "b"]), spec.get_num_tokens_in_batch(["a", "b"])) == (2, 7)


def test_a_spec_comes_from_a_loader_a_dict_or_a_spec() -> None:
    """What a user may pass as data becomes a DataSpec."""
    loader = DataLoader(TensorDataset(rows(10)))
    spec = ensure_data_spec(loader)
    assert spec.dataloader is loader
    assert ensure_data_spec(spec) is spec
    assert ensure_data_spec({"dataloader": loader, "num_samples": 3}).num_samples == 3


@pytest.mark.parametrize("thing", [7, rows(4), "text", {"x": 1}.keys])
def test_what_is_no_data_loader_is_an_error(thing: Any) -> None:
    """A tensor, a string or a function in place of a loader is refused at construction."""
    with pytest.raises(ConfigError, match="Pass a DataLoader or any iterable of batches"):
        DataSpec(thing)


def test_a_misspelt_argument_is_an_error_that_names_the_right_one() -> None:
    """An unknown key in a dict of arguments lists the known ones."""
    with pytest.raises(ConfigError, match="num_samples"):
        ensure_data_spec({"dataloader": [rows(4)], "num_sample": 3})


@dataclasses.dataclass(frozen=True)
class Scene:
    """A batch of a user's own."""

    images: list[torch.Tensor]
    boxes: tuple[torch.Tensor, ...]
    name: str


def test_a_list_of_tensors_of_samples_is_split_between_samples() -> None:
    """Images and boxes of different shapes, one of each per sample: none is cut inside."""
    images, boxes = [torch.rand(3, 4 + i) for i in range(5)], tuple(torch.rand(i + 1, 4) for i in range(5))
    targets = [{"boxes": box, "label": torch.tensor([1])} for box in boxes]
    assert count_samples((images, targets)) == count_samples({"a": images, "b": targets}) == 5
    for parts in (split_batch((images, targets), 2), split_batch({"a": images, "b": targets}, 2)):
        found = [list(part.values()) if isinstance(part, dict) else list(part) for part in parts]
        assert [len(a) for a, _ in found] == [len(b) for _, b in found] == [2, 2, 1]
        assert [image for a, _ in found for image in a] == images
        assert [target for _, b in found for target in b] == targets
    scenes = split_batch(Scene(images, boxes, "night"), 3)
    assert [(len(scene.images), len(scene.boxes), scene.name) for scene in scenes] == [(3, 3, "night"), (2, 2, "night")]


def test_columns_in_a_batch_stay_columns() -> None:
    """Two inputs of one sample, as default collation gives them, are cut like the targets."""
    parts = split_batch([[rows(5), rows(5)], torch.arange(5)], 3)
    assert [(len(part[0]), len(part[0][0]), len(part[0][1]), len(part[1])) for part in parts] == [
        (2, 3, 3, 3),
        (2, 2, 2, 2),
    ]


@pytest.mark.parametrize("value", ["text", 3, 0.5, True, None, torch.tensor(2.0)])
def test_what_is_no_sample_is_repeated_in_each_microbatch(value: Any) -> None:
    """Text, numbers and None beside tensors, in mappings and in what these hold."""
    for part in split_batch({"x": rows(4), "more": {"value": value, "y": rows(4)}, "value": value}, 3):
        assert part["value"] is value
        assert part["more"]["value"] is value
    for part in split_batch((rows(4), value), 2):
        assert part[1] is value


def test_what_cannot_be_split_is_named() -> None:
    """The key and the type of what is no sample and no value, and samples that could be columns."""
    with pytest.raises(ConfigError, match=r"batch\['graph'\]\['inner'\] of type object into microbatches"):
        split_batch({"x": rows(4), "graph": {"inner": object()}}, 2)
    with pytest.raises(ConfigError, match="may be samples or columns"):
        split_batch([[rows(2), rows(2)], torch.arange(2)], 1)
    with pytest.raises(ConfigError, match="no part tells the number of samples"):
        split_batch({"a": 1, "b": None}, 1)
