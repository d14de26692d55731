"""Arguments that the functions and the Checkpointer do not take: one error of composerlite, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composerlite.checkpoint import (
    Checkpointer,
    async_save_model_and_optim_state,
    async_save_state_dict,
    get_checkpoint_metadata,
    load_model_and_optim_state,
    load_state_dict,
    save_model_and_optim_state,
    save_safetensors,
    save_state_dict,
)
from composerlite.errors import CheckpointNotFoundError, ConfigError

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


@pytest.mark.parametrize("function", SAVES)
def test_the_longest_name_is_saved_replaced_and_found(tmp_path: Path, function: str) -> None:
    """A name of 233 bytes has room for what is added to it while it is saved."""
    place = str(tmp_path / ("x" * 233))
    SAVES[function](place)
    if function.startswith("Checkpointer"):
        Checkpointer(save_overwrite=True).save(place, nn.Linear(2, 2), {})
        assert Checkpointer.dir_is_checkpoint(place)
    else:
        save_state_dict(place, {"b": torch.ones(2)}, save_overwrite=True)
        assert list(get_checkpoint_metadata(place).state_dict_metadata) == ["b"]


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


def test_a_model_on_meta_is_loaded_once_it_has_memory(folder: Path) -> None:
    """The way out that the error names is one."""
    model = nn.Linear(3, 2, device="meta").to_empty(device="cpu")
    optimizer = Adam(model.parameters())
    Checkpointer().load(folder / "there", (model, optimizer))
    assert float(optimizer.state[model.weight]["step"]) == 1


def test_several_optimizers_are_saved_each_with_its_part(tmp_path: Path) -> None:
    """The way out for a list of optimizers is one, too."""
    model = nn.ModuleDict({"one": nn.Linear(3, 2), "two": nn.Linear(3, 2)})
    for name, part in model.items():
        save_model_and_optim_state(tmp_path / name, part, stepped(part))
    for name, part in model.items():
        optimizer = Adam(part.parameters())
        load_model_and_optim_state(tmp_path / name, part, optimizer)
        assert len(optimizer.state) == 2


def test_a_name_with_control_characters_has_no_checkpoint(tmp_path: Path) -> None:
    """Looking for one is no error but that it is not there."""
    with pytest.raises(CheckpointNotFoundError):
        load_state_dict(tmp_path / "two\nlines", {"a": 1})
