"""Keys of any plain type come back as what they were, from directories that functions save."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_nested_state import assert_same
from torch import nn

from composerlite.checkpoint import load_keys, load_state_dict, save_state_dict
from composerlite.errors import SaveError
from composerlite.types import items_of, with_items

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
