"""Whatever the Checkpointer and ``save_state_dict`` accept is loaded as it was; all else is refused at the save."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import enum
import fractions
import pathlib
import random
import re
import tempfile
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from composerlite.checkpoint import Checkpointer, async_save_state_dict, load_keys, save_state_dict
from composerlite.errors import SaveError
from composerlite.types import items_of


class Pair(NamedTuple):
    a: int
    b: int


class Color(enum.Enum):
    RED = 1


class Number(int):
    pass


class Allowed:
    """What the script has allowed."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Allowed) and self.value == other.value

    def __hash__(self) -> int:
        return self.value


def holding_itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(300):
        found = [found]
    return found


LOADED: list[Any] = [
    *(
        None,
        True,
        -3,
        2**70,
        1.5,
        float("inf"),
        1j,
        "text",
        "\0",
        b"\xff",
        bytearray(b"a"),
        slice(1, 2),
        int,
        torch.float32,
    ),
    *(datetime.date(2020, 1, 1), datetime.timedelta(1), pathlib.Path("a/b"), frozenset({1}), {1, "a"}),
    *(
        collections.deque([1], 3),
        collections.OrderedDict(a=1),
        collections.Counter("aab"),
        collections.defaultdict(list),
    ),
    *(np.float32(1.5), np.zeros((0, 3)), np.array(["a", "bc"]), np.random.get_state()),
    *(
        np.asfortranarray(np.ones((2, 3))),
        np.random.default_rng(1).bit_generator.state,
    ),
    *(torch.ones(2), torch.ones(0, 3), torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.bfloat16), torch.Size([1])),
    *(random.getstate(), torch.get_rng_state(), torch.device("cpu"), nn.Parameter(torch.ones(2)), Allowed(3)),
]
REFUSED: list[Any] = [
    *(
        ...,
        NotImplemented,
        decimal.Decimal("1.5"),
        fractions.Fraction(1, 3),
        uuid.UUID(int=1),
        range(3),
        len,
        re.compile("a"),
    ),
    *(
        pathlib.PureWindowsPath("a"),
        array.array("i", [1]),
        Pair(1, 2),
        Number(3),
        Color.RED,
        types.SimpleNamespace(a=1),
    ),
    *(
        np.array([1, "a", None], dtype=object),
        np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]),
        np.datetime64("2020-01-01"),
        np.ma.array([1], mask=[False]),
        np.random.default_rng(1),
    ),
    *(
        torch.Generator(),
        nn.Linear(1, 1),
        ValueError("x"),
        lambda: 1,
        memoryview(b"a"),
        iter([1]),
        "x".upper,
        list[int],
        pathlib,
    ),
    *(holding_itself(), deep(), {"deep": [deep()]}),
]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype is b.dtype and torch.equal(a.to_dense(), b.to_dense())
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict | list | tuple | collections.deque):
        mine, others = list(items_of(a)), list(items_of(b))
        return (
            type(a) is type(b)
            and [k for k, _ in mine] == [k for k, _ in others]
            and all(same(x, y) for (_, x), (_, y) in zip(mine, others, strict=True))
        )
    return type(a) is type(b) and bool(a == b)


def has_refused(value: Any) -> bool:
    return any(value is one for one in REFUSED) or any(has_refused(inner) for _, inner in items_of(value))


@pytest.fixture(autouse=True, scope="module")
def allowed() -> Any:
    with torch.serialization.safe_globals([Allowed]):
        yield


KINDS = st.sampled_from([*LOADED, *LOADED, *REFUSED])
VALUES = st.recursive(
    KINDS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(collections.deque),
        st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=3),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=VALUES)
def test_whatever_is_saved_is_loaded_and_equal(value: Any) -> None:
    """A value is refused when it is saved, or comes back as it was."""
    model = nn.Linear(1, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            Checkpointer().save(path / "step1", model, {"kept": value})
        except SaveError:
            assert has_refused(value)
        else:
            loaded = Checkpointer().load(path / "step1", model)
            assert loaded is not None
            assert same(loaded["kept"], value)
        try:
            save_state_dict(path / "state", {"kept": [(value,)]})
        except SaveError:
            assert has_refused(value)
        else:
            (kept,) = load_keys(path / "state", ["kept"])
            assert same(kept, [(value,)])


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_what_would_not_be_loaded_is_refused_when_it_is_saved(tmp_path: Path, value: Any) -> None:
    """The error names the place of the value and what to keep in its place; there is no checkpoint then."""
    saves: list[Callable[[], object]] = [
        lambda: Checkpointer().save(tmp_path / "step", nn.Linear(1, 1), {"a": 1, "b": {"c": [value]}}),
        lambda: Checkpointer().save_async(tmp_path / "step", nn.Linear(1, 1), {"b": {"c": [value]}}).result(),
        lambda: save_state_dict(tmp_path / "state", {"b": {"c": (value,)}}),
        lambda: async_save_state_dict(tmp_path / "state", {"b": {"c": (value,)}}).result(),
    ]
    for save in saves:
        with pytest.raises(SaveError, match=r"b[/.]c|contains itself"):
            save()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("value", LOADED, ids=lambda value: type(value).__name__)
def test_plain_values_are_saved(value: Any) -> None:
    """What checkpoints of loops hold is not refused: numbers, times, paths, arrays, states of generators."""
    with tempfile.TemporaryDirectory() as folder:
        Checkpointer().save(Path(folder) / "step1", nn.Linear(1, 1), {"kept": value})
        loaded = Checkpointer().load(Path(folder) / "step1", nn.Linear(1, 1))
        assert loaded is not None
        assert same(loaded["kept"], value)
