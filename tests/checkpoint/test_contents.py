"""What is taken out of a checkpoint, and that nothing else is touched."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import Remember, new_state

from composerlite.checkpoint import IgnoreKeys
from composerlite.checkpoint.contents import check_ignore_keys, glob_filter, without
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.errors import ConfigError

WEIGHT = torch.ones(2)


def example() -> dict[str, Any]:
    return {
        "state": {
            "model": {"body.weight": WEIGHT, "head.weight": WEIGHT, "head.bias": WEIGHT},
            "optimizers": {"SGD": {"state": {0: {"momentum": WEIGHT}}, "param_groups": [{"lr": 0.1}, {"lr": 0.2}]}},
            "algorithms": [("EMA", {"state": {}})],
            "callbacks": {"Empty": {}, "Full": {"count": 3}},
        },
        "rng": [{"torch": WEIGHT}],
    }


def paths(node: Any, prefix: str = "") -> set[str]:
    """The '/'-joined path of everything in nested dicts and lists."""
    if not isinstance(node, dict | list):
        return {prefix}
    items = node.items() if isinstance(node, dict) else enumerate(node)
    return {prefix}.union(*(paths(value, f"{prefix}/{key}" if prefix else str(key)) for key, value in items))


@pytest.mark.parametrize(
    ("globs", "left_out"),
    [
        (["rng"], {"rng", "rng/0", "rng/0/torch"}),
        (["state/model/head.*"], {"state/model/head.weight", "state/model/head.bias"}),
        (["state/model/*.weight"], {"state/model/body.weight", "state/model/head.weight"}),
        (["state/callbacks/Full/count"], {"state/callbacks/Full", "state/callbacks/Full/count"}),
        (["state/callbacks/Full"], {"state/callbacks/Full", "state/callbacks/Full/count"}),
        (
            ["state/model/body.weight", "state/model/head.*"],
            {"state/model", "state/model/body.weight", "state/model/head.weight", "state/model/head.bias"},
        ),
        (["*/lr"], {f"state/optimizers/SGD/param_groups/{i}/lr" for i in (0, 1)}),
        (["state/model/?ody.weight", "rng/[0-9]/torch"], {"state/model/body.weight", "rng/0/torch"}),
        (["state/model"], {p for p in paths(example()) if p.startswith("state/model")}),
        (["state/optimizers/*"], {p for p in paths(example()) if p.startswith("state/optimizers")}),
        (["*"], paths(example()) - {""}),
        ([], set[str]()),
    ],
)
def test_globs_leave_out_branches_and_leaves(globs: list[str], left_out: set[str]) -> None:
    """A star also matches '/'; what has nothing left in it goes as well; all the rest stays."""
    kept = without(example(), globs)
    gone = paths(example()) - paths(kept)
    # Items of lists keep their place: an emptied item of a list stays as an empty one.
    assert gone == left_out


def test_an_item_of_a_list_is_left_out_by_its_number() -> None:
    """The second parameter group goes, the first stays."""
    kept = without(example(), ["state/optimizers/SGD/param_groups/1"])
    assert kept["state"]["optimizers"]["SGD"]["param_groups"] == [{"lr": 0.1}]


def test_what_is_empty_by_itself_stays() -> None:
    """A callback without progress was not left out by anybody."""
    assert without(example(), ["rng"])["state"]["callbacks"]["Empty"] == {}


def test_a_function_takes_out_what_it_likes() -> None:
    """It gets the whole dict and changes it in place."""

    def ignore(contents: dict[str, Any]) -> None:
        del contents["state"]["model"]["body.weight"]
        contents["state"]["optimizers"].clear()

    kept = without(example(), ignore)
    assert list(kept["state"]["model"]) == ["head.weight", "head.bias"]
    assert kept["state"]["optimizers"] == {}


def test_the_filter_of_composer_is_such_a_function() -> None:
    """``glob_filter`` of the same globs leaves out the same, in place."""
    contents = example()
    glob_filter(["state/optimizers", "rng"])(contents)
    assert contents == without(example(), ["state/optimizers", "rng"])


def destroy(contents: Any) -> None:
    """As thorough as an ignoring function can be: every dict and list is emptied, from the innermost on."""
    if isinstance(contents, dict | list):
        for value in list(contents.values()) if isinstance(contents, dict) else contents:
            destroy(value)
        contents.clear()


@pytest.mark.parametrize("ignore", [["*"], ["state/*", "rng/0/*"], destroy, glob_filter(["*"])])
def test_the_live_state_is_never_changed(ignore: IgnoreKeys) -> None:
    """Whatever is ignored when saving: the training goes on with all of it, and no tensor is copied."""
    remember = Remember({"list": [1, 2], "dict": {"a": 1}})
    state = new_state(3, callbacks=[remember])
    before = copy.deepcopy(state.state_dict())
    request = SaveRequest(state=state, catalog=Catalog(Path()), template="x.pt", ignore_keys=ignore)
    contents = request.gathered(state.state_dict())
    assert not contents.get("state")
    after = state.state_dict()
    assert paths(before) == paths(after)
    assert before["timestamp"] == after["timestamp"]
    assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])
    assert remember.what == {"list": [1, 2], "dict": {"a": 1}}


@pytest.mark.parametrize("ignore", [None, ["rng"], lambda contents: None])  # pyright: ignore[reportUnknownLambdaType]
def test_tensors_are_shared_not_copied(ignore: IgnoreKeys) -> None:
    """Leaving something out costs no memory."""
    contents = example()
    assert without(contents, ignore)["state"]["model"]["body.weight"] is WEIGHT


def test_a_glob_that_matches_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A typo in it would otherwise go unnoticed; one that matches is not mentioned."""
    without(example(), ["state/modle/*", "rng"])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "'state/modle/*' matches nothing" in caplog.text


@pytest.mark.parametrize("ignore", ["state/model", b"rng", 5, [1], [None], True])
def test_what_are_no_globs_is_refused(ignore: Any) -> None:
    """A single text above all: its letters are no globs. The message shows a list."""
    with pytest.raises(ConfigError, match=r"save_ignore_keys=.*\['state/optimizers/\*'\]"):
        check_ignore_keys(ignore, argument="save_ignore_keys")


def test_globs_may_come_in_any_sequence() -> None:
    """Tuples, as from YAML, too."""
    assert check_ignore_keys(("rng", "state/model"), argument="x") == ["rng", "state/model"]
    assert check_ignore_keys(None, argument="x") is None
    function: Callable[[dict[str, Any]], None] = destroy
    assert check_ignore_keys(function, argument="x") is destroy
