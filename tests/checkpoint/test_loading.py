"""What a load restores, and what a load refuses."""

from __future__ import annotations

import collections
import datetime
import enum
import logging
import os
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parts import Remember, new_state, save_batch, value_in
from tiny_training import trainer
from torch import nn

from composerlite.checkpoint import (
    Catalog,
    IgnoreKeys,
    load_checkpoint,
    read_checkpoint,
    rng,
    safe_torch_load,
    save_checkpoint,
)
from composerlite.checkpoint.contents import check_ignore_keys, glob_filter, without
from composerlite.checkpoint.save.form import SaveRequest
from composerlite.checkpoint.save.save import save
from composerlite.core import State
from composerlite.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UntrustedCheckpointError,
)


def weights(state: State) -> float:
    return value_in({"state": {"model": state.model.state_dict()}})


# ── finding the file ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_missing_checkpoint_is_said_with_the_way_to_list_what_is_there(tmp_path: Path) -> None:
    """A typo in the path, a folder of checkpoints, and a missing folder."""
    save_batch(tmp_path, 1)
    for path in (tmp_path / "ba3.pt", tmp_path, tmp_path / "none" / "ba1.pt"):
        found = rf"no checkpoint file '{re.escape(str(path))}'\. 'composerlite checkpoint ls' lists"
        with pytest.raises(CheckpointNotFoundError, match=found):
            load_checkpoint(path, new_state())


def saved(folder: Path, *, weights_only: bool = False, ignore_keys: IgnoreKeys = None) -> Path:
    """A checkpoint of batch 5, whose optimizer has stepped and whose callback remembers something."""
    state = new_state(5, callbacks=[Remember("something")], value=2.0)
    state.model(torch.zeros(1, 2)).sum().backward()
    state.optimizers[0].step()
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.fill_(2.0)
    return save(
        SaveRequest(
            state=state,
            catalog=Catalog(folder),
            template="saved.pt",
            weights_only=weights_only,
            ignore_keys=ignore_keys,
        )
    )


def fresh() -> tuple[State, Remember]:
    callback = Remember("nothing")
    return new_state(callbacks=[callback]), callback


def has_momentum(state: State) -> bool:
    return bool(state.optimizers[0].state)


def test_a_full_checkpoint_restores_everything(tmp_path: Path) -> None:
    """Weights, optimizer, callbacks, time; and it gives the generators' states, one per rank, for later."""
    path = saved(tmp_path)
    before = torch.get_rng_state()
    state, callback = fresh()
    rng = load_checkpoint(path, state)
    assert (weights(state), int(state.timestamp.batch), callback.what) == (2, 5, "something")
    assert has_momentum(state)
    assert rng is not None
    assert len(rng) == 1
    assert torch.equal(rng[0]["torch"], before)


@pytest.mark.parametrize(("save_weights_only", "load_weights_only"), [(True, False), (False, True), (True, True)])
def test_weights_alone_restore_the_model_and_nothing_else(
    tmp_path: Path, save_weights_only: bool, load_weights_only: bool
) -> None:
    """Whether they were saved alone or are loaded alone: training starts afresh from them."""
    path = saved(tmp_path, weights_only=save_weights_only)
    state, callback = fresh()
    assert load_checkpoint(path, state, load_weights_only=load_weights_only) is None
    assert (weights(state), int(state.timestamp.batch), callback.what) == (2, 0, "nothing")
    assert not has_momentum(state)


def ignore_time(contents: dict[str, Any]) -> None:
    del contents["state"]["timestamp"]


Restored = tuple[float, int, str, bool]  # weights, batch, what the callback remembers, whether there is momentum
PARTS: list[tuple[IgnoreKeys, Restored]] = [
    (["state/model"], (0, 5, "something", True)),
    (["state/model/*"], (0, 5, "something", True)),
    (["state/optimizers"], (2, 5, "something", False)),
    (["state/optimizers/*"], (2, 5, "something", False)),
    (["state/callbacks/Remember"], (2, 5, "nothing", True)),
    (["state/timestamp"], (2, 0, "something", True)),
    (ignore_time, (2, 0, "something", True)),
    (["state/timestamp", "state/optimizers"], (2, 0, "something", False)),
]
ALL: list[tuple[IgnoreKeys, Restored]] = [([glob], (0, 0, "nothing", False)) for glob in ("state", "state/*", "*")]


@pytest.mark.parametrize(
    ("when", "ignore", "restored"),
    [*(("saving", *case) for case in PARTS), *(("loading", *case) for case in [*PARTS, *ALL])],
)
def test_ignored_keys_stay_as_they_are(tmp_path: Path, when: str, ignore: IgnoreKeys, restored: Restored) -> None:
    """Everything else is restored. What was left out when saving counts as what is left out when loading."""
    path = saved(tmp_path, ignore_keys=ignore if when == "saving" else None)
    state, callback = fresh()
    load_checkpoint(path, state, ignore_keys=ignore if when == "loading" else None)
    assert (weights(state), int(state.timestamp.batch), callback.what, has_momentum(state)) == restored


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_model_that_does_not_fit_is_refused_whole(tmp_path: Path, weights_only: bool) -> None:
    """Names missing on both sides and shapes in one message; not one weight is changed."""
    path = saved(tmp_path)
    state = new_state(width=3)
    state.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    state.model.register_parameter("bias", None)
    with pytest.raises(IncompatibleCheckpointError) as e:
        load_checkpoint(path, state, load_weights_only=weights_only)
    for part in ("extra", "bias", "weight: (2, 2) in the checkpoint, (2, 3) in the model"):
        assert part in str(e.value)
    assert weights(state) == 0


@pytest.mark.parametrize("weights_only", [False, True])
def test_strictness_is_honoured_on_every_load(tmp_path: Path, weights_only: bool) -> None:
    """Of a full checkpoint as of weights alone: strict refuses other names, not strict loads those that agree."""
    path = saved(tmp_path)
    state = new_state()
    state.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    arguments: dict[str, Any] = {"load_weights_only": weights_only, "ignore_keys": ["state/optimizers"]}
    with pytest.raises(IncompatibleCheckpointError, match="extra"):
        load_checkpoint(path, state, **arguments)
    load_checkpoint(path, state, strict_model_weights=False, **arguments)
    assert state.model.get_parameter("weight").unique().tolist() == [2.0]
    assert state.model.get_parameter("extra").item() == 0


def test_a_checkpoint_by_name_alone_is_loaded_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``save_checkpoint`` in the current folder, with Composer's default name."""
    monkeypatch.chdir(tmp_path)
    path = save_checkpoint(new_state(4, value=1.0))
    assert path == "ep0-ba4-rank0"
    assert value_in(read_checkpoint(path)) == 1


LARGE = 1 << 19  # numbers; 2 MiB, which are chunks of their own


def state_of(model: nn.Module, *, stepped: bool = False, **arguments: Any) -> State:
    """A state with ``model`` and AdamW, which has stepped once if ``stepped``."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    state = State(
        model, rank_zero_seed=1, run_name="run", device=torch.device("cpu"), optimizers=optimizer, **arguments
    )
    if stepped:
        for parameter in model.parameters():
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
    return state


def large() -> nn.Module:
    """Two weights of 2 MiB each."""
    return nn.Sequential(nn.Linear(1, LARGE, bias=False), nn.Linear(LARGE, 1, bias=False))


def saved_now(state: State, folder: Path) -> Path:
    """A checkpoint of ``state``."""
    return save(SaveRequest(state=state, catalog=Catalog(folder), template="saved.pt"))


def tensors_of(state: State) -> dict[str, torch.Tensor]:
    """Weights and optimizer state by name."""
    found = dict(state.model.state_dict())
    for number, kept in enumerate(state.optimizers[0].state.values()):
        found |= {f"{number}/{key}": value for key, value in kept.items()}
    return found


def test_a_load_reads_each_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the live tensors, and nowhere else; the chunks with the index are read twice."""
    state = state_of(large(), stepped=True)
    path = saved_now(state, tmp_path)
    read = 0
    real = os.preadv

    def counted(*arguments: Any) -> int:
        nonlocal read
        count = real(*arguments)
        read += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    load_checkpoint(path, state)
    assert path.stat().st_size * 0.9 < read < path.stat().st_size * 1.25


def test_weights_and_optimizer_state_stay_where_they_are(tmp_path: Path) -> None:
    """The tensors of a state that has stepped keep their memory; their numbers are those of the checkpoint."""
    source, target = state_of(large(), stepped=True), state_of(large(), stepped=True)
    before = {name: tensor.data_ptr() for name, tensor in tensors_of(target).items()}
    load_checkpoint(saved_now(source, tmp_path), target)
    after = tensors_of(target)
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == before
    for name, tensor in tensors_of(source).items():
        assert torch.equal(after[name], tensor), name


def test_what_is_ignored_is_not_read(tmp_path: Path) -> None:
    """Damage to a tensor that is left out is not even seen; otherwise it is, and says that the state is spoiled."""
    source = state_of(large(), stepped=True)
    path = saved_now(source, tmp_path)
    first = next(iter(source.optimizers[0].state.values()))["exp_avg"]
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(first.numpy().tobytes()) + first.numel() * 2] ^= 1
    path.write_bytes(damaged)
    target = state_of(large())
    load_checkpoint(path, target, ignore_keys=["state/optimizers"])
    assert torch.equal(target.model.get_parameter("0.weight"), source.model.get_parameter("0.weight"))
    load_checkpoint(path, target, load_weights_only=True)
    assert "optimizers" not in read_checkpoint(path, ignore_keys=["state/optimizers"])["state"]
    with pytest.raises(CorruptCheckpointError, match=r"differ from the saved bytes.*must not be used"):
        load_checkpoint(path, target)
    with pytest.raises(CorruptCheckpointError, match="differ from the saved bytes"):
        read_checkpoint(path)


class Tied(nn.Module):
    """Two names for one weight if ``tied``."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.two.weight = self.one.weight


class Form(nn.Module):
    """One weight, and a buffer that lies in its memory as ``view`` makes it."""

    def __init__(self, weight: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        if view is not None:
            self.register_buffer("view", view(self.weight.data))


def numbers(*shape: int) -> torch.Tensor:
    return torch.rand(shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "tied in both": (lambda: Tied(tied=True), lambda: Tied(tied=True)),
    "tied in the checkpoint": (lambda: Tied(tied=True), lambda: Tied(tied=False)),
    "transposed in the checkpoint": (lambda: Form(numbers(3, 4).t()), lambda: Form(numbers(4, 3))),
    "transposed in the model": (lambda: Form(numbers(4, 3)), lambda: Form(numbers(3, 4).t())),
    "transposed in both": (lambda: Form(numbers(3, 4).t()), lambda: Form(numbers(3, 4).t())),
    "channels last in both": (
        lambda: Form(numbers(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)),
        lambda: Form(numbers(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)),
    ),
    "part of a larger tensor": (lambda: Form(numbers(9, 4)[2:5]), lambda: Form(numbers(9, 4)[1:4])),
    "every other number": (lambda: Form(numbers(9, 4)[::2]), lambda: Form(numbers(9, 4)[::2])),
    "whole, into part of a larger one": (lambda: Form(numbers(3, 4)), lambda: Form(numbers(9, 4)[1:4])),
    "views of each other in both": (
        lambda: Form(numbers(3, 4), lambda weight: weight[1:]),
        lambda: Form(numbers(3, 4), lambda weight: weight[1:]),
    ),
    "one memory in two forms": (
        lambda: Form(numbers(4, 4), lambda weight: weight.t()),
        lambda: Form(numbers(4, 4), lambda weight: weight.t()),
    ),
    "views in the checkpoint alone": (
        lambda: Form(numbers(3, 4), lambda weight: weight[1:]),
        lambda: Form(numbers(3, 4), lambda weight: weight[1:].clone()),
    ),
    "sizes of one": (lambda: Form(numbers(1, 4, 1)), lambda: Form(numbers(1, 4, 1).as_strided((1, 4, 1), (9, 1, 7)))),
    "no numbers": (lambda: Form(numbers(0, 4)), lambda: Form(numbers(0, 4))),
    "a single number": (lambda: Form(torch.tensor(2.5)), lambda: Form(torch.tensor(0.0))),
    "another precision": (lambda: Form(numbers(3, 4).bfloat16()), lambda: Form(numbers(3, 4))),
    "complex": (lambda: Form(torch.rand(3, dtype=torch.complex64)), lambda: Form(torch.rand(3, dtype=torch.complex64))),
    "a module that was compiled": (
        lambda: nn.Sequential(torch.compile(nn.Linear(3, 3), backend="eager")),  # type: ignore[arg-type]
        lambda: nn.Sequential(nn.Linear(3, 3)),
    ),
}


@pytest.mark.parametrize("models", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("stepped", [False, True])
def test_every_form_of_tensor_gets_its_numbers(
    tmp_path: Path, models: tuple[Callable[[], nn.Module], Callable[[], nn.Module]], stepped: bool
) -> None:
    """Weights and optimizer state are those that were saved, however both lie in memory."""
    source, target = state_of(models[0](), stepped=stepped), state_of(models[1](), stepped=stepped)
    ignore = ["state/optimizers"] if models is MODELS["tied in the checkpoint"] else None
    before = {name: tensor.data_ptr() for name, tensor in target.model.state_dict().items()}
    path = saved_now(source, tmp_path)
    load_checkpoint(path, target, ignore_keys=ignore)
    expected = read_checkpoint(path)["state"]
    own = target.model.state_dict()
    for name, tensor in expected["model"].items():
        assert torch.equal(own[name], tensor.to(own[name].dtype)), name
    assert {name: tensor.data_ptr() for name, tensor in own.items()} == before
    if stepped and ignore is None:
        for saved, kept in zip(
            expected["optimizers"]["AdamW"]["state"].values(), target.optimizers[0].state.values(), strict=True
        ):
            for key, tensor in saved.items():
                assert torch.equal(kept[key], tensor.to(kept[key].dtype)), key


def test_numbers_of_another_byte_order_are_refused(tmp_path: Path) -> None:
    """A file of a machine whose bytes are the other way round. The error names both orders and the way out."""
    torch.save({"a": torch.arange(5.0)}, tmp_path / "archive.pt")
    other = b"big" if sys.byteorder == "little" else b"little"
    with zipfile.ZipFile(tmp_path / "archive.pt") as old, zipfile.ZipFile(tmp_path / "turned.pt", "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, other if info.filename.endswith("byteorder") else old.read(info))
    with pytest.raises(CorruptCheckpointError, match=rf"byte order {other!r}, and this machine has.*torch\.save"):
        safe_torch_load(tmp_path / "turned.pt")


ASKED: list[tuple[Path, object]] = []


def allow(path: Path, specs: object) -> bool:
    """A check that lets everything pass."""
    ASKED.append((path, specs))
    return True


def refuse(path: Path, specs: object) -> bool:
    """One that lets nothing pass."""
    return False


def refuse_the_newest(path: Path, specs: object) -> bool:
    """One that lets all pass but the second checkpoint."""
    return path.name != "ba2.pt"


def test_the_users_check_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``CHECKPOINT_VALIDATION_FUNCTION`` names a function of (path, specs); what it refuses is not loaded."""
    path = save_batch(tmp_path, 3)
    with monkeypatch.context() as patch:
        patch.setenv("CHECKPOINT_VALIDATION_FUNCTION", "test_loading.allow")
        load_checkpoint(path, new_state())
        assert [(path, None)] == sys.modules["test_loading"].ASKED
        patch.setenv("CHECKPOINT_VALIDATION_FUNCTION", "test_loading.refuse")
        path.write_bytes(b"not looked at")
        with pytest.raises(UntrustedCheckpointError, match=r"ba3\.pt' was refused by test_loading\.refuse"):
            load_checkpoint(path, new_state())
        for name in ("nothing", "no.such.module.check", "test_loading.absent", "test_loading.LARGE", "."):
            patch.setenv("CHECKPOINT_VALIDATION_FUNCTION", name)
            with pytest.raises(ConfigError, match="CHECKPOINT_VALIDATION_FUNCTION"):
                load_checkpoint(path, new_state())
    assert "CHECKPOINT_VALIDATION_FUNCTION" not in os.environ


def test_a_run_does_not_resume_from_an_older_checkpoint_if_the_users_check_refuses_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends with an error, and no file is renamed."""
    arguments: dict[str, Any] = {"save_folder": str(tmp_path), "save_filename": "ba{batch}.pt", "autoresume": True}
    with trainer(max_duration="2ba", save_interval="1ba", **arguments) as run:
        run.fit()
    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setenv("CHECKPOINT_VALIDATION_FUNCTION", "test_loading.refuse_the_newest")
    with pytest.raises(UntrustedCheckpointError, match=r"ba2\.pt' was refused"):
        trainer(max_duration="4ba", **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "contents",
    [
        torch.nn.Linear(2, 2).state_dict(),
        torch.ones(3),
        [1, 2],
        {},
        {"state": 1},
        {"model": {}, "epoch": 3},
        "text",
        None,
    ],
    ids=["weights", "tensor", "list", "empty", "other state", "other trainer", "text", "none"],
)
def test_a_torch_file_of_others_is_told_from_a_damaged_one(tmp_path: Path, contents: Any) -> None:
    """A good file, but no checkpoint of a run: the message says what it holds and how it may be loaded."""
    torch.save(contents, tmp_path / "foreign.pt")
    with pytest.raises(IncompatibleCheckpointError, match=r"is not a checkpoint of a run.*model\.load_state_dict"):
        read_checkpoint(tmp_path / "foreign.pt")


def everything(folder: Path) -> Path:
    """A checkpoint of a state with an optimizer that has stepped and a callback."""
    state = new_state(1, callbacks=[Remember({"count": 3})], value=0.5)
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizers[0].step()
    return save(SaveRequest(state=state, catalog=Catalog(folder), template="ba{batch}.pt"))


def test_our_files_open_with_torch_alone(tmp_path: Path) -> None:
    """``torch.load(path)`` as it is by default, in a process that has never heard of composerlite."""
    path = everything(tmp_path)
    program = (
        "import sys, torch; c = torch.load(sys.argv[1]); assert 'composerlite' not in sys.modules; "
        "m = torch.nn.Linear(2, 2); m.load_state_dict(c['state']['model']); print(list(c), list(c['state']))"
    )
    command = [sys.executable, "-P", "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    keys = [
        *("model", "optimizers", "schedulers", "algorithms", "callbacks", "scaler", "timestamp", "rank_zero_seed"),
        *("train_metrics", "eval_metrics", "run_name", "dataset_state", "integrations", "metadata"),
    ]
    assert done.stdout.strip() == f"{['state', 'rng']} {keys}"


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


@pytest.mark.parametrize(
    ("what", "name"),
    [
        (Mine(3), "test_loading.Mine"),
        (Color.RED, "test_loading.Color"),
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


def test_what_will_not_load_is_said_when_saving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not years later: the log of the first save names the type and what to do."""
    state = new_state(1, callbacks=[Remember(Mine(3))])
    save(SaveRequest(state=state, catalog=Catalog(tmp_path), template="ba{batch}.pt"))
    assert "test_loading.Mine" in caplog.text
    assert "add_safe_globals([Mine])" in caplog.text


def draw() -> tuple[object, ...]:
    """Something from every generator; normal numbers, too, of which two are drawn at a time."""
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_the_same_numbers_come_after_a_restore(tmp_path: Path) -> None:
    """Through a file that torch opens by itself; taking the states moves no generator."""
    draw()
    states = [rng.capture()]
    assert repr(rng.capture()) == repr(states[0])
    torch.save(states, tmp_path / "rng.pt")
    expected = [draw() for _ in range(3)]
    rng.restore(torch.load(tmp_path / "rng.pt"))
    assert [draw() for _ in range(3)] == expected


def test_every_rank_has_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """One that the saved run did not have goes on with its seed, and says so."""
    first = rng.capture()
    draw()
    states = [first, rng.capture()]
    expected = draw()
    rng.restore(states, rank=0)
    rng.restore(states, rank=1)
    assert draw() == expected
    before = rng.capture()
    rng.restore(states, rank=2)
    assert repr(rng.capture()) == repr(before)
    assert "generators for 2 ranks: rank 2 keeps its seed" in caplog.text


def test_the_states_of_composer_are_understood(tmp_path: Path) -> None:
    """There numpy's state is an array, and python's a tuple."""
    composer = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    torch.save({"rng": [composer]}, tmp_path / "theirs.pt")
    expected = draw()
    rng.restore(safe_torch_load(tmp_path / "theirs.pt")["rng"])
    assert draw() == expected


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_a_gpu_that_is_missing_is_said(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of a GPU goes on without one of its kind, with a warning; the other generators are restored."""
    if torch.accelerator.is_available():
        pytest.skip("this machine has a GPU")
    state = {**rng.capture(), kind: torch.zeros(16, dtype=torch.uint8)}
    expected = draw()
    rng.restore([state])
    assert draw() == expected
    assert f"its {kind.upper()} generator is not restored" in caplog.text


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


def test_the_filter_of_composer_is_such_a_function() -> None:
    """``glob_filter`` of the same globs leaves out the same, in place."""
    contents = example()
    glob_filter(["state/optimizers", "rng"])(contents)
    assert contents == without(example(), ["state/optimizers", "rng"])


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
