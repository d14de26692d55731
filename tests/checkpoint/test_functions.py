"""The functional interface."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint.sharded_parts import same, small_model, states, trained
from forked import run_forked
from storage.local_store import LocalObjectStore
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _patch_model_state_dict,  # pyright: ignore[reportPrivateUsage]
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import composerlite.checkpoint as package
from composerlite.checkpoint import (
    Checkpointer,
    RemoteFileSystemWriter,
    async_save_model_and_optim_state,
    async_save_state_dict,
    get_checkpoint_metadata,
    load_keys,
    load_model_and_optim_state,
    load_state_dict,
    save_model_and_optim_state,
    save_safetensors,
    save_state_dict,
)
from composerlite.checkpoint.load import state_dicts
from composerlite.errors import CheckpointExistsError, CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError
from composerlite.utils.checkpoint import DistCPObjectStoreReader, FileSystemReaderWithValidation


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
    with pytest.raises(IncompatibleCheckpointError, match=r"one tied tensor: model\.body\.weight, model\.head\.weight"):
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


def test_another_optimizer_is_an_error(tmp_path: Path) -> None:
    """The state of AdamW is nothing for SGD."""
    model = small_model()
    save_model_and_optim_state(tmp_path / "c", model, trained(model))
    with pytest.raises(IncompatibleCheckpointError, match="unexpected"):
        load_model_and_optim_state(tmp_path / "c", model, SGD(model.parameters(), lr=0.1, momentum=0.9))


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


class TiedWithBuffers(nn.Module):
    """Two names for one weight, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("left_out", torch.arange(3.0), persistent=False)


class OwnState(nn.Linear):
    """Something in the state that is no tensor, and changes."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen = [0]

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}


class Renaming(nn.Module):
    """As modules of torchtune: a hook leaves a name out, and ``_fqn_modifiers`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_state_dict_post_hook(lambda _module, state, prefix, _: _leave_out(state, f"{prefix}inner."))

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "inner", "bias": "inner"}


def _leave_out(state: dict[str, Any], prefix: str) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        state[name.replace("inner.", "")] = state.pop(name)


def module_named_module() -> nn.Module:
    return nn.ModuleDict({"module": nn.Linear(2, 2), "modules_": nn.Linear(2, 2)})


def recomputed() -> nn.Module:
    return nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))


def compiled() -> nn.Module:
    model: Any = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    return model


def compiled_inside() -> nn.Module:
    inner: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    return nn.Sequential(inner, nn.Linear(2, 2))


def of_a_subclass() -> nn.Module:
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.zeros(2, 2)))
    return model


def patched() -> nn.Module:
    """``state_dict`` gathers what is split."""
    model = fsdp2()
    _patch_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return model


def ddp() -> nn.Module:
    return DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))


def ddp_inside() -> nn.Module:
    return nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2))


def fsdp2() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


MODELS: list[Callable[[], nn.Module]] = [
    TiedWithBuffers, OwnState, Renaming, module_named_module, recomputed, compiled, compiled_inside, of_a_subclass, ddp,
    ddp_inside, fsdp2, patched,
]  # fmt: skip


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_names_and_values_are_those_of_torch(make: Callable[[], nn.Module]) -> None:
    """The same names in the same order, and of each the same tensor and not a copy."""
    model = make()
    expected = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    state = state_dicts.model_state(model)
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert type(state[name]) is type(value)
        if isinstance(value, Tensor) and type(value) is Tensor:
            assert state[name].data_ptr() == value.data_ptr()
            assert torch.equal(state[name], value)
        elif not isinstance(value, Tensor):
            assert state[name] == value


Adam = torch.optim.Adam


def stepped(model: nn.Module, *more: nn.Parameter) -> Adam:
    optimizer = Adam([*model.parameters(), *more])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def of_other_parameters() -> tuple[Any, Any]:
    return nn.Linear(3, 2), stepped(nn.Linear(3, 2))


def of_one_more_parameter() -> tuple[Any, Any]:
    model = nn.Linear(3, 2)
    return model, stepped(model, nn.Parameter(torch.ones(5)))


def with_a_key_of_text() -> tuple[Any, Any]:
    model = nn.Linear(3, 2)
    optimizer = stepped(model)
    optimizer.state["global"] = {"steps": 3}  # type: ignore[index]
    return model, optimizer


def with_a_function_in_a_group() -> tuple[Any, Any]:
    model = nn.Linear(3, 2)
    optimizer = stepped(model)
    optimizer.param_groups[0]["rule"] = torch.sqrt
    return model, optimizer


def in_a_list() -> tuple[Any, Any]:
    model = nn.Linear(3, 2)
    return model, [Adam([model.weight]), Adam([model.bias])]


def a_scheduler() -> tuple[Any, Any]:
    model = nn.Linear(3, 2)
    return model, torch.optim.lr_scheduler.ConstantLR(Adam(model.parameters()))


def on_meta() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, device="meta"))
    return model, Adam(model.parameters())


def the_wrong_way_round() -> tuple[Any, Any]:
    model = nn.Linear(3, 2)
    return Adam(model.parameters()), model


MODELS_AND_OPTIMIZERS = [
    (of_other_parameters, r"Adam: 2 of its 2 parameters are not those of the model.*\(2, 3\)"),
    (of_one_more_parameter, r"Adam: 1 of its 3 parameters are not those of the model.*\(5,\)"),
    (with_a_key_of_text, "key 'global'.*param_groups"),
    (with_a_function_in_a_group, "its state cannot be saved: .*builtin_function_or_method"),
    (in_a_list, "list"),
    (a_scheduler, "ConstantLR"),
    (on_meta, r"no values in 2 of its tensors, '1\.weight', for example.*to_empty"),
    (the_wrong_way_round, "Adam.*(model|Module)"),
    (lambda: ([nn.Linear(3, 2)], None), r"list.*(model|Module)"),
    (lambda: (nn.Linear(3, 2).state_dict(), None), r"OrderedDict.*(model|Module)"),
    (lambda: (nn.Linear, None), r"type.*(model|Module)"),
    (lambda: (None, None), r"NoneType.*(model|Module)"),
]
FUNCTIONS: dict[str, Callable[[Path, Any, Any], object]] = {
    "save": lambda path, model, optim: save_model_and_optim_state(path / "new", model, optim),
    "save flat": lambda path, model, optim: save_model_and_optim_state(
        path / "new", model, optim, flatten_optimizer_state=True
    ),
    "save async": lambda path, model, optim: async_save_model_and_optim_state(path / "new", model, optim).result(),
    "load": lambda path, model, optim: load_model_and_optim_state(path / "there/model_and_optim", model, optim),
    "load what both have": lambda path, model, optim: load_model_and_optim_state(
        path / "there/model_and_optim", model, optim, strict=False
    ),
    "Checkpointer.save": lambda path, model, optim: Checkpointer().save(path / "new", (model, optim), {}),
    "Checkpointer.save_async": lambda path, model, optim: (
        Checkpointer().save_async(path / "new", (model, optim), {}).result()
    ),
    "Checkpointer.load": lambda path, model, optim: Checkpointer().load(path / "there", (model, optim)),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = nn.Linear(3, 2)
    Checkpointer().save(tmp_path / "there", (model, stepped(model)), {})
    return tmp_path


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.name != ".manifest")


@pytest.mark.parametrize(("make", "message"), MODELS_AND_OPTIMIZERS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_model_or_an_optimizer_that_cannot_be_saved_is_an_error_that_says_why(
    folder: Path, function: str, make: Callable[[], tuple[Any, Any]], message: str
) -> None:
    """The error names the value and the way out, before a byte is written or read into the model."""
    model, optimizer = make()
    before = files(folder)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        FUNCTIONS[function](folder, model, optimizer)
    assert files(folder) == before


@pytest.mark.parametrize("function", ["save", "save_async", "load"])
@pytest.mark.parametrize("given", ["three", "one", "none", "list", "dict"])
def test_the_checkpointer_says_what_it_saves(folder: Path, function: str, given: str) -> None:
    """A model, a model and one optimizer, or an object that says itself what is saved of it: the error lists them."""
    model = nn.Linear(3, 2)
    optimizer = Adam(model.parameters())
    module: Any = {
        "three": (model, optimizer, optimizer),
        "one": (model,),
        "none": (),
        "list": [model, optimizer],
        "dict": {"model": model},
    }[given]
    checkpointer: Any = Checkpointer()
    arguments = (folder / "there", module) if function == "load" else (folder / "new", module, {})
    before = files(folder)
    with pytest.raises(ConfigError, match=r"train_module is .*\(model, optimizer\).*state_dict_to_save\(\)"):
        getattr(checkpointer, function)(*arguments)
    assert files(folder) == before


@pytest.mark.parametrize("given", [None, [1], nn.Linear(3, 2), torch.ones(2), "text"], ids=lambda given: str(given)[:4])
@pytest.mark.parametrize("function", [save_state_dict, async_save_state_dict, load_state_dict])
def test_a_state_dict_is_a_dict(folder: Path, function: Callable[..., Any], given: Any) -> None:
    """A model itself, or a list, is no state dict: the error says how to give it."""
    place = folder / ("there/model_and_optim" if function is load_state_dict else "new")
    before = files(folder)
    with pytest.raises(ConfigError, match=rf"state_dict is of the type {type(given).__name__}: expected a dict"):
        function(place, given)
    assert files(folder) == before


SAVES: dict[str, Callable[[str], object]] = {
    "save_state_dict": lambda place: save_state_dict(place, {"a": torch.ones(2)}),
    "async_save_state_dict": lambda place: async_save_state_dict(place, {"a": torch.ones(2)}).result(),
    "save_model_and_optim_state": lambda place: save_model_and_optim_state(place, nn.Linear(2, 2)),
    "save_safetensors": lambda place: save_safetensors(place, nn.Linear(2, 2)),
    "Checkpointer.save": lambda place: Checkpointer().save(place, nn.Linear(2, 2), {}),
    "Checkpointer.save_async": lambda place: Checkpointer().save_async(place, nn.Linear(2, 2), {}).result(),
}


@pytest.mark.parametrize("function", SAVES)
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("x" * 234, "the name has 234 bytes, of at most 233"),
        ("x" * 240, "the name has 240 bytes"),
        ("ü" * 120, "the name has 240 bytes"),
        ("x" * 300, "255 bytes"),
        ("two\nlines", "control characters"),
        ("a\tb", "control characters"),
        ("\x7f", "control characters"),
    ],
)
def test_a_name_that_no_checkpoint_can_have_is_refused_before_a_save(
    tmp_path: Path, function: str, name: str, rule: str
) -> None:
    """What is saved under a name can be loaded, replaced and listed by it; any other name is an error at once."""
    with pytest.raises(ConfigError, match=f"{rule}.*Give another name"):
        SAVES[function](str(tmp_path / name))
    assert files(tmp_path) == []


@pytest.mark.parametrize("place", [None, 3, [], {"dir": "a"}], ids=str)
def test_a_place_is_a_path_or_a_uri(place: Any) -> None:
    """Whatever else is given is named, by each function."""
    model = nn.Linear(2, 2)
    calls: list[Callable[[], object]] = [
        lambda: save_state_dict(place, {"a": 1}),
        lambda: load_state_dict(place, {"a": 1}),
        lambda: save_model_and_optim_state(place, model),
        lambda: load_model_and_optim_state(place, model),
        lambda: save_safetensors(place, model),
        lambda: get_checkpoint_metadata(place),
        lambda: Checkpointer().save(place, model, {}),
        lambda: Checkpointer().load(place, model),
        lambda: list(Checkpointer.find_checkpoints(place)),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="expected a path or a URI"):
            call()


SAVING = "process_group=None, save_overwrite=False"
WRITING = "thread_count=None, process_count=None, throttle_uploads=False, enable_plan_caching=False"
DOCUMENTED = {
    "save_state_dict": f"dir, state_dict, *, {SAVING}, {WRITING}",
    "async_save_state_dict": f"dir, state_dict, *, {SAVING}, {WRITING}",
    "load_state_dict": ("dir, state_dict, *, process_group=None, pre_download=False, work_dir=None, thread_count=None"),
    "save_model_and_optim_state": f"dir, model, optim=None, *, {SAVING}, flatten_optimizer_state=False, {WRITING}",
    "async_save_model_and_optim_state": (
        f"dir, model, optim=None, *, {SAVING}, flatten_optimizer_state=False, {WRITING}"
    ),
    "load_model_and_optim_state": (
        "dir, model, optim=None, *, process_group=None, key_mapping=None, pre_download=False, work_dir=None, "
        "strict=True, flatten_optimizer_state=False, thread_count=None"
    ),
    "unshard_checkpoint": (
        "dir, target_dir, *, optim=None, save_overwrite=False, use_safetensors=False, unshard_strategy=None, "
        "pre_download=False, work_dir=None, quiet=False"
    ),
    "load_keys": "dir, keys, *, pre_download=False, work_dir=None",
    "get_checkpoint_metadata": "dir",
}


@pytest.mark.parametrize("name", list(DOCUMENTED))
def test_signatures_are_the_documented_ones(name: str) -> None:
    """Names, order, defaults, and which arguments are by name only."""
    signature = inspect.signature(getattr(package, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == f"({DOCUMENTED[name]})"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, Optimizer]:
    model = small_model()
    optim = trained(model)
    place = tmp_path_factory.mktemp("documented") / "step1"
    assert save_model_and_optim_state(place, model, optim, process_count=2, thread_count=2) is None
    return place, model, optim


def refuse_data(path: Path, specs: Any) -> bool:
    """A check of one's own: no data file is good enough."""
    return not path.name.endswith(".distcp")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["folder", "store"])
def test_readers_with_composers_names_work_with_dcp(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They verify what they read, ask the function of the environment first, and keep files for this checkpoint."""
    state = {"w": torch.arange(6.0), "n": 3}
    dcp.save(state, storage_writer=RemoteFileSystemWriter(tmp_path / "bucket" / "c"), no_dist=True)

    def reader() -> Any:
        if kind == "folder":
            return FileSystemReaderWithValidation(str(tmp_path / "bucket" / "c"))
        return DistCPObjectStoreReader("c", str(tmp_path / "here"), LocalObjectStore(tmp_path / "bucket"), None)

    for _ in range(2):
        wanted = {"w": torch.zeros(6), "n": 0}
        dcp.load(wanted, storage_reader=reader(), no_dist=True)
        assert same(wanted, state)
    monkeypatch.setenv("CHECKPOINT_VALIDATION_FUNCTION", f"{__name__}.refuse_data")
    with pytest.raises(dcp.api.CheckpointException, match="refused by"):
        dcp.load({"w": torch.zeros(6), "n": 0}, storage_reader=reader(), no_dist=True)
    monkeypatch.delenv("CHECKPOINT_VALIDATION_FUNCTION")
    save_state_dict(tmp_path / "bucket" / "c", {"w": torch.ones(6), "n": 4}, save_overwrite=True)
    wanted = {"w": torch.zeros(6), "n": 0}
    dcp.load(wanted, storage_reader=reader(), no_dist=True)
    assert same(wanted, {"w": torch.ones(6), "n": 4})
