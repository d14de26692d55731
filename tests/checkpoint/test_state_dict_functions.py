"""The functional API: save, load, strictness, layouts of optimizers, renames, parts."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.sharded_parts import same, small_model, states, trained
from forked import run_forked
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from composerlite.checkpoint import (
    Checkpointer,
    async_save_model_and_optim_state,
    async_save_state_dict,
    get_checkpoint_metadata,
    load_keys,
    load_model_and_optim_state,
    load_state_dict,
    merge_state_dicts,
    prune_state_dict,
    save_model_and_optim_state,
    save_state_dict,
    swap_param_keys,
)
from composerlite.errors import CheckpointExistsError, CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("flatten", [False, True])
def test_a_model_and_its_optimizer_come_back_bit_for_bit(tmp_path: Path, flatten: bool, groups: int) -> None:
    """Both layouts are saved, and each is found out at the load, whatever the argument says."""
    model = small_model()
    optim = trained(model, groups)
    save_model_and_optim_state(tmp_path / "c", model, optim, flatten_optimizer_state=flatten)
    other = small_model(seed=1)
    other_optim = trained(other, groups, steps=1)
    load_model_and_optim_state(tmp_path / "c", other, other_optim)
    assert same(states(other, other_optim), states(model, optim))


def test_a_fresh_optimizer_takes_the_state_of_one_that_has_stepped(tmp_path: Path) -> None:
    """What a new process has: an optimizer without a state."""
    model = small_model()
    optim = trained(model)
    save_model_and_optim_state(tmp_path / "c", model, optim)
    other = small_model(seed=1)
    other_optim = AdamW(other.parameters())
    load_model_and_optim_state(tmp_path / "c", other, other_optim)
    assert same(states(other, other_optim), states(model, optim))


def falling(optim: AdamW, last_epoch: int = -1) -> LRScheduler:
    """A schedule that is a function of the step."""
    return LambdaLR(optim, lambda step: 1 / (1 + step), last_epoch)


def cycle(optim: AdamW, last_epoch: int = -1) -> LRScheduler:
    """A schedule that keeps its rates in the groups, and changes betas."""
    return OneCycleLR(optim, max_lr=0.1, total_steps=8, last_epoch=last_epoch)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize("made", ["before the load", "after the load", "never before"])
@pytest.mark.parametrize("schedule", [falling, cycle])
def test_a_scheduler_may_be_made_before_a_load_or_after_it(
    tmp_path: Path, schedule: Callable[..., LRScheduler], made: str, rate: Any, flatten: bool, strict: bool
) -> None:
    """A loop that makes its scheduler after the load, with ``last_epoch``, continues with the same rates, as does one
    that makes it before; a scheduler that is new with the resume is no difference."""

    def begun() -> tuple[nn.Module, AdamW]:
        model = small_model()
        return model, AdamW(model.parameters(), lr=rate.clone() if isinstance(rate, torch.Tensor) else rate)

    def step(model: nn.Module, optim: AdamW, scheduler: LRScheduler | None) -> None:
        model(torch.ones(2, model.get_parameter("0.weight").shape[1])).sum().backward()
        optim.step()
        optim.zero_grad()
        if scheduler is not None:
            scheduler.step()

    model, optim = begun()
    scheduler = None if made == "never before" else schedule(optim)
    for _ in range(3):
        step(model, optim, scheduler)
    save_model_and_optim_state(tmp_path / "c", model, optim, flatten_optimizer_state=flatten)
    other, other_optim = begun()
    other_scheduler = None if made == "after the load" else schedule(other_optim)
    load_model_and_optim_state(tmp_path / "c", other, other_optim, strict=strict)
    if scheduler is None:
        assert all("initial_lr" in group for group in other_optim.param_groups)
        assert float(other_optim.param_groups[0]["lr"]) == float(optim.param_groups[0]["lr"])
        return
    if other_scheduler is None:
        assert other_optim.param_groups[0].keys() == optim.param_groups[0].keys()
        other_scheduler = schedule(other_optim, last_epoch=scheduler.last_epoch - 1)
    other_scheduler.load_state_dict(scheduler.state_dict())
    for _ in range(3):
        step(model, optim, scheduler)
        step(other, other_optim, other_scheduler)
    assert same(states(other, other_optim), states(model, optim))


def test_the_model_alone_loads_from_a_checkpoint_with_an_optimizer(tmp_path: Path) -> None:
    """Strict means strict about what is loaded: no optimizer is asked for."""
    model = small_model()
    save_model_and_optim_state(tmp_path / "c", model, trained(model))
    other = small_model(seed=1)
    load_model_and_optim_state(tmp_path / "c", other)
    assert same(states(other), states(model))


def test_values_of_all_kinds_come_back(tmp_path: Path) -> None:
    """Scalars, empty and odd tensors, views of larger ones, nests of values: all in place."""
    base = torch.arange(24.0).reshape(4, 6)
    state: dict[str, Any] = {
        "column": base[:, 1:3],
        "turned": base.t(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 5),
        "half": torch.randn(5).bfloat16(),
        "flags": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "nested": {"step": 7, "name": "x", "list": [1, 2], "tensors": [torch.ones(2), torch.zeros(3)]},
        "config.json": {"a": 1},
    }
    save_state_dict(tmp_path / "c", state)
    empty: dict[str, Any] = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()
    }
    empty["nested"] = {"step": 0, "name": "", "list": [], "tensors": [torch.zeros(2), torch.ones(3)]}
    empty["config.json"] = {"a": 0}
    column = empty["column"]
    load_state_dict(tmp_path / "c", empty)
    assert same(empty, state)
    assert empty["column"] is column


def test_none_stands_for_whatever_there_is(tmp_path: Path) -> None:
    """One key can be loaded without knowing what it is."""
    save_state_dict(tmp_path / "c", {"a": torch.ones(3), "b": {"lr": 0.5, "w": torch.zeros(2)}})
    wanted: dict[str, Any] = {"b": {"lr": None, "w": None}}
    load_state_dict(tmp_path / "c", wanted)
    assert same(wanted, {"b": {"lr": 0.5, "w": torch.zeros(2)}})


def test_what_has_a_state_dict_is_asked_for_it(tmp_path: Path) -> None:
    """A model or a loader can be given itself."""
    model = small_model()
    save_state_dict(tmp_path / "c", {"net": model, "step": 3})
    other = small_model(seed=1)
    load_state_dict(tmp_path / "c", {"net": other, "step": 0})
    assert same(states(other), states(model))


# ── strictness ───────────────────────────────────────────────────────────────────────────────────────────────────────
class _Net(nn.Module):
    def __init__(self, **shapes: Any) -> None:
        super().__init__()
        for name, shape in shapes.items():
            dtype = torch.float32
            if isinstance(shape, torch.dtype):
                shape, dtype = (2,), shape
            self.register_parameter(name, nn.Parameter(torch.ones(shape, dtype=dtype)))


def test_one_error_lists_every_difference_and_nothing_is_loaded(tmp_path: Path) -> None:
    """Missing, unexpected, of another shape, of another type: all at once, by name, before anything changes."""
    saved = _Net(a=(2,), gone=(3,), shape=(4,), kind=torch.float64)
    save_model_and_optim_state(tmp_path / "c", saved)
    model = _Net(a=(2,), new=(3,), shape=(5,), kind=torch.float32)
    nn.init.zeros_(model.a)
    with pytest.raises(IncompatibleCheckpointError) as raised:
        load_model_and_optim_state(tmp_path / "c", model)
    text = str(raised.value)
    for part in (
        "missing in the checkpoint: model.new",
        "unexpected: model.gone",
        "model.shape: (4,) in the checkpoint, (5,) here",
        "model.kind: torch.float64 in the checkpoint, torch.float32 here",
    ):
        assert part in text
    assert model.a.tolist() == [0, 0]


class Tied(nn.Module):
    """Two layers, which may have one weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if tied:
            self.head.weight = self.body.weight


@pytest.mark.parametrize("how", ["model", "state dict", "Checkpointer"])
def test_two_weights_are_not_loaded_into_one(how: str, tmp_path: Path) -> None:
    """A checkpoint of a model whose weights are not tied, loaded into one where they are: the error names both. Equal
    ones are loaded, also with what is no number in them."""

    def load(path: Path, model: nn.Module) -> None:
        if how == "model":
            load_model_and_optim_state(path / "model_and_optim", model)
        elif how == "state dict":
            load_state_dict(path / "model_and_optim", {"model": model.state_dict()})
        else:
            Checkpointer().load(path, (model, AdamW(model.parameters())))

    model = Tied(tied=False)
    Checkpointer().save(tmp_path / "different", model, {})
    with pytest.raises(IncompatibleCheckpointError, match=r"one tensor here: model\.body\.weight, model\.head\.weight"):
        load(tmp_path / "different", Tied(tied=True))
    with torch.no_grad():
        model.body.weight[0, 0] = float("nan")
        model.head.weight.copy_(model.body.weight)
    Checkpointer().save(tmp_path / "equal", model, {})
    tied = Tied(tied=True)
    load(tmp_path / "equal", tied)
    assert tied.head.weight is tied.body.weight
    assert torch.equal(tied.head.weight.nan_to_num(7), model.body.weight.nan_to_num(7))


def test_not_strict_loads_what_both_have(tmp_path: Path) -> None:
    """The rest stays as it is, of the model and of the optimizer; numbers are converted."""
    saved = _Net(a=(2,), gone=(3,), kind=torch.float64)
    saved_optim = AdamW([saved.a, saved.kind])
    save_model_and_optim_state(tmp_path / "c", saved, saved_optim)
    model = _Net(a=(2,), new=(3,), kind=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5)
    load_model_and_optim_state(tmp_path / "c", model, strict=False)
    assert model.a.tolist() == [1, 1]
    assert model.new.tolist() == [5, 5, 5]
    assert model.kind.tolist() == [1, 1]


def test_not_strict_keeps_settings_that_only_the_optimizer_has(tmp_path: Path) -> None:
    """A setting that is new since the save does not keep the rest from being loaded."""
    model = small_model()
    save_model_and_optim_state(tmp_path / "c", model, trained(model))
    other = small_model(seed=1)
    optim = AdamW(other.parameters(), lr=9.0)
    optim.param_groups[0]["new"] = 3
    with pytest.raises(IncompatibleCheckpointError, match=r"missing in the checkpoint: optim.param_groups.0.new"):
        load_model_and_optim_state(tmp_path / "c", other, optim)
    load_model_and_optim_state(tmp_path / "c", other, optim, strict=False)
    assert optim.param_groups[0]["lr"] == 0.01
    assert optim.param_groups[0]["new"] == 3


@pytest.mark.parametrize("flatten", [False, True])
def test_not_strict_loads_the_optimizer_of_the_parameters_that_both_have(tmp_path: Path, flatten: bool) -> None:
    """One that is new, or gone, and a group of new ones: the state and the settings of the others are loaded."""
    saved = _Net(a=(2,), gone=(3,))
    saved_optim = AdamW(saved.parameters(), lr=0.5)
    saved.a.grad, saved.gone.grad = torch.ones(2), torch.ones(3)
    saved_optim.step()
    save_model_and_optim_state(tmp_path / "c", saved, saved_optim, flatten_optimizer_state=flatten)
    model = _Net(a=(2,), new=(4,), head=(5,))
    optim = AdamW([{"params": [model.a, model.new]}, {"params": [model.head], "lr": 0.25}])
    with pytest.raises(IncompatibleCheckpointError, match="missing in the checkpoint"):
        load_model_and_optim_state(tmp_path / "c", model, optim)
    load_model_and_optim_state(tmp_path / "c", model, optim, strict=False)
    assert same(model.a.data, saved.a.data)
    assert same(optim.state[model.a], saved_optim.state[saved.a])
    assert [group["lr"] for group in optim.param_groups] == [0.5, 0.25]
    assert [len(group["params"]) for group in optim.param_groups] == [2, 1]
    assert not optim.state.get(model.new), "it has made no step"
    model.a.grad, model.new.grad, model.head.grad = torch.ones(2), torch.ones(4), torch.ones(5)
    optim.step()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("flatten", [False, True])
def test_other_parameter_groups_are_an_error(tmp_path: Path, flatten: bool, strict: bool) -> None:
    """Two groups never become one in silence, in neither layout."""
    model = small_model()
    save_model_and_optim_state(tmp_path / "c", model, trained(model, 2), flatten_optimizer_state=flatten)
    other = small_model()
    optim = trained(other, 1)
    before = states(other, optim)
    with pytest.raises(IncompatibleCheckpointError, match=r"param_groups|parameter groups"):
        load_model_and_optim_state(tmp_path / "c", other, optim, strict=strict)
    assert same(states(other, optim), before)


def test_a_parameter_in_another_group_is_an_error(tmp_path: Path) -> None:
    """As many groups are not the same groups."""
    model = small_model()
    a, b, *rest = model.parameters()
    save_model_and_optim_state(tmp_path / "c", model, SGD([{"params": [a, b]}, {"params": rest}], lr=0.1))
    with pytest.raises(IncompatibleCheckpointError, match=r"0\.bias.* in group 1 here were saved in another group"):
        load_model_and_optim_state(tmp_path / "c", model, SGD([{"params": [a]}, {"params": [b, *rest]}], lr=0.1))


def test_another_optimizer_is_an_error(tmp_path: Path) -> None:
    """The state of AdamW is nothing for SGD."""
    model = small_model()
    save_model_and_optim_state(tmp_path / "c", model, trained(model))
    with pytest.raises(IncompatibleCheckpointError, match="unexpected"):
        load_model_and_optim_state(tmp_path / "c", model, SGD(model.parameters(), lr=0.1, momentum=0.9))


def test_what_is_missing_for_a_state_dict_is_listed(tmp_path: Path) -> None:
    """A state dict asks for what it has; the checkpoint may have more, but not less."""
    save_state_dict(tmp_path / "c", {"a": torch.ones(3), "b": 1})
    with pytest.raises(IncompatibleCheckpointError, match=r"1 missing in the checkpoint: x.*a: \(3,\) in the checkp"):
        load_state_dict(tmp_path / "c", {"a": torch.ones(4), "x": 1})


# ── directories ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_checkpoint_is_replaced_only_when_asked_for(tmp_path: Path) -> None:
    """Without save_overwrite the error is a FileExistsError; with it the new one is there, and what was beside it."""
    place = tmp_path / "c"
    save_state_dict(place, {"a": torch.ones(3)})
    (place / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointExistsError, match="save_overwrite=True"):
        save_state_dict(place, {"a": torch.zeros(3)})
    with pytest.raises(FileExistsError):
        async_save_state_dict(place, {"a": torch.zeros(3)})
    save_state_dict(place, {"b": torch.zeros(3)}, save_overwrite=True)
    assert next(load_keys(place, ["b"])).tolist() == [0, 0, 0]
    assert (place / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_a_folder_with_something_else_in_it_is_not_taken(tmp_path: Path) -> None:
    """As documented: non-empty is an error; empty is fine."""
    (tmp_path / "c").mkdir()
    save_state_dict(tmp_path / "c", {"a": 1})
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").touch()
    with pytest.raises(FileExistsError, match="'x'"):
        save_state_dict(tmp_path / "d", {"a": 1})


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    """The error says which directory of a step can be loaded."""
    save_state_dict(tmp_path / "step1" / "model_and_optim", {"a": 1})
    with pytest.raises(CheckpointNotFoundError, match=r"no sharded checkpoint '.*step1'.*'model_and_optim'"):
        load_state_dict(tmp_path / "step1", {"a": 0})
    with pytest.raises(FileNotFoundError, match=r"no sharded checkpoint '.*nothing'"):
        get_checkpoint_metadata(tmp_path / "nothing")


def test_counts_are_checked(tmp_path: Path) -> None:
    """Zero threads is a mistake, said at once."""
    with pytest.raises(ConfigError, match="thread_count=0"):
        save_state_dict(tmp_path / "c", {"a": 1}, thread_count=0)
    assert list(tmp_path.iterdir()) == []


# ── async ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_asynchronous_save_has_the_values_of_the_call(tmp_path: Path) -> None:
    """Training may change everything as soon as the call returns."""
    model = small_model(width=512)
    optim = trained(model)
    before = states(model, optim)
    future = async_save_model_and_optim_state(tmp_path / "c", model, optim)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for state in optim.state.values():
            state["exp_avg"].zero_()
    assert future.result(60) is None
    load_model_and_optim_state(tmp_path / "c", model, optim)
    assert same(states(model, optim), before)


def a_program_that_waits_for_nothing(folder: str) -> None:
    """Start a save, whose commit takes a moment."""

    def wait(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("os.link", "os.rename") and threading.current_thread() is not threading.main_thread():
            time.sleep(0.1)

    sys.addaudithook(wait)
    async_save_state_dict(Path(folder) / "c", {"a": torch.ones(3)})


def test_a_program_that_ends_waits_for_its_asynchronous_save(tmp_path: Path) -> None:
    """Nobody has to ask the future."""
    done = run_forked(a_program_that_waits_for_nothing, str(tmp_path), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert next(load_keys(tmp_path / "c", ["a"])).tolist() == [1, 1, 1]


def test_a_failed_asynchronous_save_leaves_nothing_and_can_be_repeated(
    mount: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The disk's error is in the log and comes out of the future, there is no checkpoint, and the same directory is
    saved to again."""
    disk = mount("size=512k")
    future = async_save_state_dict(disk / "c", {"a": torch.ones(1 << 18)})
    with pytest.raises(OSError, match="No space left"):
        future.result(60)
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert line.startswith(f"could not save checkpoint '{disk / 'c'}': OSError: ")
    assert [path.name for path in disk.iterdir()] == []
    async_save_state_dict(disk / "c", {"a": torch.ones(2)}).result(60)
    assert next(load_keys(disk / "c", ["a"])).tolist() == [1, 1]


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_keys_are_loaded_in_their_order(tmp_path: Path) -> None:
    """One may come twice; what comes before several gives a dict; what is not there is an error at the call."""
    model = small_model()
    optim = trained(model)
    save_model_and_optim_state(tmp_path / "c", model, optim)
    bias, lr, again = load_keys(tmp_path / "c", ["model.0.bias", "optim.param_groups.0.lr", "model.0.bias"])
    assert same(bias, model.state_dict()["0.bias"])
    assert lr == 0.01
    assert same(again, bias)
    (whole,) = load_keys(tmp_path / "c", ["model"])
    assert same(whole, dict(model.state_dict()))
    (groups,) = load_keys(tmp_path / "c", ["optim.param_groups"])
    assert groups[0]["params"][0] == "0.weight"
    with pytest.raises(IncompatibleCheckpointError, match=r"no key 'model.0.bais'. Did you mean 'model.0.bias'"):
        load_keys(tmp_path / "c", ["model.0.bais"])


def test_the_metadata_says_what_there_is(tmp_path: Path) -> None:
    """Keys, shapes and types, without reading data."""
    save_state_dict(tmp_path / "c", {"a": {"w": torch.ones(3, 2).half(), "n": 1}})
    stored = get_checkpoint_metadata(tmp_path / "c").state_dict_metadata
    assert set(stored) == {"a.w", "a.n"}
    assert tuple(stored["a.w"].size) == (3, 2)


@pytest.mark.parametrize("flatten", [False, True])
def test_parameters_with_other_names_are_found(tmp_path: Path, flatten: bool) -> None:
    """key_mapping: names in the checkpoint by present names, of the model and its optimizer; two may change places."""
    saved = _Net(a=(2,), b=(2,), old=(3,))
    with torch.no_grad():
        saved.a.fill_(2)
        saved.old.fill_(3)
    optim = AdamW(saved.parameters())
    saved.old.grad = torch.ones(3)
    saved.a.grad, saved.b.grad = torch.ones(2), torch.ones(2)
    optim.step()
    save_model_and_optim_state(tmp_path / "c", saved, optim, flatten_optimizer_state=flatten)
    model = _Net(b=(2,), a=(2,), new=(3,))
    new_optim = AdamW(model.parameters())
    mapping = {"a": "b", "b": "a", "new": "old", "absent": "nowhere"}
    load_model_and_optim_state(tmp_path / "c", model, new_optim, key_mapping=mapping)
    assert same([model.b.data, model.a.data, model.new.data], [saved.a.data, saved.b.data, saved.old.data])
    assert same(new_optim.state[model.new], optim.state[saved.old])


def test_swap_prune_and_merge_work_in_place() -> None:
    """The three that people use for loads of their own."""
    state: dict[str, Any] = {"model": {"a": 1, "b": 2}, "optim": {"state.a.step": 1, "param_groups.a.lr": 2}}
    swap_param_keys(state, {"a": "z"}, quiet=True)
    assert state == {"model": {"z": 1, "b": 2}, "optim": {"state.z.step": 1, "param_groups.z.lr": 2}}
    swap_param_keys(state, {"a": "z"}, reverse=True, quiet=True)
    assert state["model"] == {"a": 1, "b": 2}
    nested = {"model": {"a": 1}, "optim": {"state": {"a": {"step": 1, "avg": 2}}, "param_groups": [{"lr": 1, "x": 2}]}}
    whole = {"model": {"a": 1}, "optim": {"state": {"a": {"step": 1, "avg": 2}}, "param_groups": [{"lr": 1, "x": 2}]}}
    removed = prune_state_dict(nested, {"model.a", "optim.state.a.avg", "optim.param_groups.0.lr"})
    assert removed == {"optim.state.a.step", "optim.param_groups.0.x"}
    assert nested == {"model": {"a": 1}, "optim": {"state": {"a": {"avg": 2}}, "param_groups": [{"lr": 1}]}}
    merge_state_dicts(nested, whole)
    assert nested == whole


def test_the_package_does_not_import_dcp_until_it_is_asked_for() -> None:
    """torch.distributed.checkpoint takes its time: who does not save shards does not wait for it."""
    program = (
        "import sys, composerlite.checkpoint as c; assert 'torch.distributed.checkpoint' not in sys.modules; "
        "assert 'save_state_dict' in dir(c); c.save_state_dict; assert 'torch.distributed.checkpoint' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
