"""Reading a checkpoint runs no code of it, and takes what ordinary runs hold."""

from __future__ import annotations

import collections
import datetime
import enum
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parts import Remember, new_state

from composerlite.checkpoint import Catalog, load_checkpoint, read_checkpoint, safe_torch_load
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.checkpoint.save.save import save
from composerlite.errors import (
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    SaveError,
    UntrustedCheckpointError,
)


class Malice:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)  # pyright: ignore[reportDeprecated]


class Color(enum.Enum):
    RED = 1


class Mine:
    """A class of the user's."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mine) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


def through_a_file(what: Any, folder: Path) -> Any:
    """``what``, saved as the progress of a callback and loaded into another."""
    path = save(
        SaveRequest(state=new_state(1, callbacks=[Remember(what)]), catalog=Catalog(folder), template="ba{batch}.pt")
    )
    loaded = Remember()
    load_checkpoint(path, new_state(callbacks=[loaded]))
    return loaded.what


ORDINARY: dict[str, Any] = {
    "plain": {
        "none": None,
        "true": True,
        "int": 2**70,
        "float": 0.1,
        "inf": float("inf"),
        "text": "ünï",
        "bytes": [b"\0", b""],
    },
    "containers": [(1, "a"), {1, 2}, frozenset({3}), {"nested": [{"deep": ()}]}, {1: "int key", (1, 2): "tuple key"}],
    "slice": slice(1, None, 2),
    "complex": 1 + 2j,
    "timedelta": datetime.timedelta(days=1, microseconds=5),
    "datetime": datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC),
    "date": datetime.date(2026, 1, 2),
    "path": Path("runs/ep1.pt"),
    "deque": collections.deque([1, 2, 3], maxlen=3),
    "empty deque": collections.deque[int](),
    "defaultdict": collections.defaultdict(list, {"a": [1]}),
    "nested defaultdict": {"counts": collections.defaultdict(int, {"a": collections.Counter("ab")})},
    "Counter": collections.Counter("aab"),
    "OrderedDict": collections.OrderedDict([("b", 1), ("a", 2)]),
    "numpy scalars": [np.float32(0.1), np.float64(0.2), np.int64(3), np.bool_(True), np.uint8(255), np.float16(0.5)],
    "numpy dtype": np.dtype("float32"),
}


@pytest.mark.parametrize("what", ORDINARY.values(), ids=ORDINARY)
def test_what_ordinary_callbacks_hold_is_restored(what: Any, tmp_path: Path) -> None:
    """The same value of the same type, without any trust."""
    loaded = through_a_file(what, tmp_path)
    assert loaded == what
    assert type(loaded) is type(what)


def test_containers_keep_what_makes_them_special(tmp_path: Path) -> None:
    """A deque its length, a defaultdict its factory."""
    deque = through_a_file(collections.deque([1, 2], maxlen=2), tmp_path / "1")
    deque.append(3)
    assert list(deque) == [2, 3]
    counts = through_a_file(collections.defaultdict(list), tmp_path / "2")
    counts["new"].append(1)
    assert counts == {"new": [1]}


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.eye(3)),
        np.array(["a", "bc"]),
        np.array([], dtype=np.int64),
        np.array([True, False]),
        np.array([1 + 2j]),
    ],
    ids=str,
)
def test_numpy_arrays_are_restored(array: np.ndarray[Any, Any], tmp_path: Path) -> None:
    """Values, shape and dtype."""
    loaded = through_a_file(array, tmp_path)
    assert loaded.dtype == array.dtype
    np.testing.assert_array_equal(loaded, array)


@pytest.mark.parametrize("array", [np.zeros(2, dtype=[("a", "<i4")]), np.array(["2026-01-01"], dtype="datetime64[D]")])
def test_numpy_arrays_of_rare_types_are_refused_when_saved(array: np.ndarray[Any, Any], tmp_path: Path) -> None:
    """A load would need ``trust_checkpoint``."""
    with pytest.raises(SaveError, match="Keep the fields, or integers or text"):
        through_a_file(array, tmp_path)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, float("nan")], dtype=torch.bfloat16),
        torch.eye(3).t()[1:],
        torch.tensor(3),
        torch.empty(0, 5),
        torch.tensor([1 + 2j]),
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["bfloat16 with nan", "view", "scalar", "empty", "complex", "sparse", "parameter"],
)
def test_tensors_of_any_kind_are_restored(tensor: torch.Tensor, tmp_path: Path) -> None:
    """Values and dtype; tensors that share memory share it afterwards."""
    loaded = through_a_file([tensor, tensor], tmp_path)
    assert loaded[0].dtype == tensor.dtype
    torch.testing.assert_close(loaded[0], tensor, rtol=0, atol=0, equal_nan=True)
    assert loaded[0] is loaded[1]


# ── malice ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def malicious(folder: Path) -> tuple[Path, Path]:
    """A checkpoint file that makes a file when it is trusted, and that file."""
    made = folder / "made"
    path = folder / "evil.pt"
    torch.save({"state": {"model": {}, "callbacks": Malice(f"touch {made}")}, "rng": []}, path)
    return path, made


def test_a_checkpoint_that_runs_code_is_refused(tmp_path: Path) -> None:
    """Nothing of it is run, and the message names the function that it wanted to call."""
    path, made = malicious(tmp_path)
    for load in (safe_torch_load, read_checkpoint, lambda p: load_checkpoint(p, new_state())):  # pyright: ignore[reportUnknownVariableType, reportUnknownLambdaType]
        with pytest.raises(UntrustedCheckpointError, match=r"evil\.pt' holds posix\.system"):
            load(path)
    assert not made.exists()


def test_a_checkpoint_runs_code_only_for_who_trusts_it(tmp_path: Path) -> None:
    """``trust_checkpoint=True``, by name."""
    path, made = malicious(tmp_path)
    read_checkpoint(path, trust_checkpoint=True)
    assert made.exists()


@pytest.mark.parametrize("load_weights_only", [False, True])
def test_no_text_of_a_checkpoint_is_evaluated(tmp_path: Path, load_weights_only: bool) -> None:
    """An algorithm is rebuilt from its name and data: what its ``repr`` says, and a name that is code, are text."""
    made = tmp_path / "made"
    code = f"__import__('pathlib').Path({str(made)!r}).touch()"
    algorithm = {"repr": code, "required": True, "config": {}, "state": {}}
    torch.save({"state": {**new_state().state_dict(), "algorithms": [(code, algorithm)]}}, tmp_path / "evil.pt")
    with pytest.raises(IncompatibleCheckpointError, match="no such class is imported"):
        load_checkpoint(tmp_path / "evil.pt", new_state(), load_weights_only=load_weights_only)
    assert not made.exists()


@pytest.mark.parametrize("protocol", [0, 1, 2])
def test_a_bare_pickle_runs_no_code_either(tmp_path: Path, protocol: int) -> None:
    """A file that is no torch file at all, under the name of one."""
    made = tmp_path / "made"
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Malice(f"touch {made}"), protocol=protocol))
    with pytest.raises((UntrustedCheckpointError, CorruptCheckpointError)):
        read_checkpoint(tmp_path / "evil.pt")
    assert not made.exists()


@pytest.mark.parametrize(
    ("what", "name"),
    [
        (Mine(3), "test_trust.Mine"),
        (Color.RED, "test_trust.Color"),
        (range(1, 3), "builtins.range"),  # a file calls it __builtin__.xrange, and the next UserList.UserList
        (collections.UserList([1, 2]), "collections.UserList"),
    ],
)
def test_a_type_of_the_users_is_refused_by_name_until_allowed(tmp_path: Path, what: Any, name: str) -> None:
    """The message names it, and both calls that it shows make the file load."""
    path = tmp_path / "mine.pt"
    torch.save({"state": {"mine": what}}, path)
    with pytest.raises(UntrustedCheckpointError) as e:
        read_checkpoint(path)
    kind = name.split(".")[1]
    assert f"holds {name}," in str(e.value)
    assert f"torch.serialization.add_safe_globals([{kind}])" in str(e.value)
    assert "trust_checkpoint=True" in str(e.value)
    with torch.serialization.safe_globals([type(what), getattr]):
        assert read_checkpoint(path)["state"]["mine"] == what
    assert read_checkpoint(path, trust_checkpoint=True)["state"]["mine"] == what


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_containers_in_the_form_of_others_are_restored(tmp_path: Path, protocol: int) -> None:
    """``torch.save`` writes deques and defaultdicts element by element, and may use any protocol."""
    what = list(ORDINARY.values())
    torch.save({"state": {"last": what}}, tmp_path / "theirs.pt", pickle_protocol=protocol)
    assert read_checkpoint(tmp_path / "theirs.pt")["state"]["last"] == what


def test_what_will_not_load_is_said_when_saving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not years later: the log of the first save names the type and what to do."""
    state = new_state(1, callbacks=[Remember(Mine(3))])
    save(SaveRequest(state=state, catalog=Catalog(tmp_path), template="ba{batch}.pt"))
    assert "test_trust.Mine" in caplog.text
    assert "add_safe_globals([Mine])" in caplog.text


def test_ordinary_contents_are_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No word about what loads by itself."""
    through_a_file(list(ORDINARY.values()), tmp_path)
    assert "add_safe_globals" not in caplog.text
