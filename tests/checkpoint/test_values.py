"""Values and tensors of every kind are restored exactly, or refused."""

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
from tensor_kinds_parts import refused
from test_nested_state import assert_same
from test_tensor_kinds import Keeps, With
from tiny_training import Record, trainer
from torch import nn

from composerlite.checkpoint import Checkpointer, async_save_state_dict, load_keys, load_state_dict, save_state_dict
from composerlite.errors import ConfigError, SaveError
from composerlite.types import items_of, with_items

pytestmark = pytest.mark.filterwarnings("ignore:.*")


@pytest.mark.parametrize("name", list(refused()))
def test_a_model_with_such_a_buffer_does_not_start(tmp_path: Path, name: str) -> None:
    """The message says which one, of which kind, and what to do; nothing is trained, and left out it is trained."""
    record = Record()
    how: dict[str, Any] = {"save_folder": tmp_path, "save_interval": "1ba", "max_duration": "1ep"}
    with (
        trainer(model=With(refused()[name]), callbacks=[record], **how) as run,
        pytest.raises(ConfigError, match=r"'state/model/kept': a .*tensor"),
    ):
        run.fit()
    assert record.batches == []
    ignoring = ["state/model/kept"]
    with trainer(
        model=With(refused()[name]), **{**how, "save_folder": tmp_path / "2"}, save_ignore_keys=ignoring
    ) as run:
        run.fit()


@pytest.mark.parametrize("name", list(refused()))
def test_a_callback_that_keeps_one_ends_the_run_at_the_first_batch(tmp_path: Path, name: str) -> None:
    """Not an hour later, when a checkpoint is due."""
    record = Record()
    with trainer(callbacks=[record, Keeps(refused()[name])], save_folder=tmp_path, save_interval="100ba") as run:  # noqa: SIM117
        with pytest.raises(ConfigError, match=r"'state/callbacks/Keeps/itself': a .*tensor"):
            run.fit()
    assert record.batches == [1]


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
def with_allowed_types() -> Any:
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


KEYS = st.one_of(
    st.text("ab.*0", min_size=1, max_size=3),
    st.integers(0, 12),
    st.booleans(),
    st.none(),
    st.floats(-2, 2, width=16),
    st.tuples(st.integers(0, 1), st.text("a.", max_size=2)),
)
LEAVES = st.one_of(
    st.integers(), st.text(max_size=3), st.none(), st.integers(0, 3).map(lambda n: torch.arange(n) + 0.5)
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, min_size=1, max_size=4),
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=8,
)


def other_than(value: Any) -> Any:
    """The same containers with other numbers: what is to be loaded into."""
    if isinstance(value, torch.Tensor):
        return value - 9
    if isinstance(value, int | str) or value is None:
        return "to be replaced"
    return with_items(value, lambda _, inner: other_than(inner))


def texts_differ(value: Any) -> bool:
    """Whether no two keys of a dict are the same as text, nor two paths when they are joined."""
    joined: set[str] = set()

    def visit(node: Any, path: str) -> bool:
        is_new = path not in joined
        joined.add(path)
        inner = [visit(item, f"{path}.{key}") for key, item in items_of(node)]
        return is_new and all(inner)

    return visit(value, "")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text("ab", min_size=1, max_size=2), STATES, min_size=1, max_size=3))
def test_every_key_comes_back_as_itself(state: dict[str, Any]) -> None:
    """Numbers, truth values, tuples, text with dots: below their own keys, and nothing beside them; or the save says
    that two keys cannot be told apart."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state")
        try:
            save_state_dict(path, state)
        except SaveError:
            assert not texts_differ(state)
            return
        loaded = other_than(state)
        load_state_dict(path, loaded)
        assert_same(loaded, state)
        assert_same(dict(zip(state, load_keys(path, list(state)), strict=True)), state)


def test_python_values_below_numbers_are_replaced_where_they_are(tmp_path: Path) -> None:
    """The state of an optimizer that counts its steps in a Python number is loaded in place, with no second set of
    keys."""
    save_state_dict(tmp_path / "state", {"optim": {"state": {0: {"step": 7, "avg": torch.ones(2)}}, "epoch": {3: 4}}})
    loaded: dict[str, Any] = {"optim": {"state": {0: {"step": 0, "avg": torch.zeros(2)}}, "epoch": {3: 0}}}
    load_state_dict(tmp_path / "state", loaded)
    assert_same(loaded, {"optim": {"state": {0: {"step": 7, "avg": torch.ones(2)}}, "epoch": {3: 4}}})


def test_the_state_of_an_optimizer_is_loaded_as_it_is(tmp_path: Path) -> None:
    """``optimizer.state_dict()`` itself, numbers for keys, a Python number for steps."""

    def stepped(steps: int) -> torch.optim.Optimizer:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        for state in optimizer.state.values():
            state["step"] = int(state["step"])
        return optimizer

    saved = stepped(3)
    save_state_dict(tmp_path / "optim", {"optim": saved})
    loaded = stepped(1)
    load_state_dict(tmp_path / "optim", {"optim": loaded})
    for mine, theirs in zip(loaded.state.values(), saved.state.values(), strict=True):
        assert int(mine["step"]) == theirs["step"] == 3
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])


@pytest.mark.parametrize("keys", [(1, "1"), (True, "True"), (1.5, "1.5"), (None, "None")])
def test_keys_that_are_the_same_as_text_are_refused_when_they_are_saved(tmp_path: Path, keys: tuple[Any, Any]) -> None:
    """Nothing is left behind, and the message names the key and the dict."""
    one, other = keys
    with pytest.raises(SaveError, match=rf"two keys at 'part' that both become '{one}'"):
        save_state_dict(tmp_path / "state", {"part": {one: {"a": torch.ones(1)}, other: {"b": torch.ones(1)}}})
    assert not (tmp_path / "state").exists()
