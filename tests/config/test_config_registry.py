"""Names in YAML, and what a wrong one is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch

from composerlite import algorithms, callbacks, loggers, optim
from composerlite.config import build_trainer, load_config
from composerlite.config.origin import Origin
from composerlite.config.registry import Family, find, registered
from composerlite.config.schema import Component
from composerlite.errors import ConfigError

WriteRun = Callable[..., Path]


def message_of(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        build_trainer(load_config(file, overrides))
    return str(error.value)


@pytest.mark.parametrize(
    ("family", "name", "cls"),
    [
        ("optimizer", "decoupled_adamw", optim.DecoupledAdamW),
        ("optimizer", "decoupled_sgdw", optim.DecoupledSGDW),
        ("scheduler", "cosine_with_warmup", optim.CosineAnnealingWithWarmupScheduler),
        ("scheduler", "cosine_warm_restarts", optim.CosineAnnealingWarmRestartsScheduler),
        ("scheduler", "multi_step", optim.MultiStepScheduler),
        ("algorithm", "gradient_clipping", algorithms.GradientClipping),
        ("algorithm", "ema", algorithms.EMA),
        ("callback", "speed_monitor", callbacks.SpeedMonitor),
        ("callback", "lr_monitor", callbacks.LRMonitor),
        ("callback", "nan_monitor", callbacks.NaNMonitor),
        ("callback", "checkpoint_saver", callbacks.CheckpointSaver),
        ("logger", "tensorboard", loggers.TensorboardLogger),
        ("logger", "in_memory", loggers.InMemoryLogger),
        ("logger", "mlflow", loggers.MLFlowLogger),
        ("logger", "wandb", loggers.WandBLogger),
        ("logger", "jsonl", loggers.JSONLLogger),
        ("logger", "csv", loggers.CSVLogger),
    ],
)
def test_a_class_is_named_in_snake_case(family: Family, name: str, cls: type) -> None:
    """The name is that of the class, without 'Annealing', 'Scheduler' and 'Logger'."""
    assert registered(family)[name] is cls


def test_base_classes_have_no_name() -> None:
    """What cannot be used is not offered."""
    names = {name for family in get_args(Family) for name in registered(family)}
    assert names.isdisjoint({"composer", "algorithm", "callback", "logger", "logger_destination", "destination"})


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer={name: decoupled_adam}", "there is no optimizer 'decoupled_adam'. Did you mean 'decoupled_adamw'?"),
        ("callbacks.speed_monitr=null", "there is no callback 'speed_monitr'. Did you mean 'speed_monitor'?"),
        ("model.name=net", "'net': expected 'module:attr'"),
        ("model.name=no_such_module:net", "there is no module 'no_such_module'"),
        ("model.name=torch.no_such_module:net", "there is no module 'torch.no_such_module'"),
        ("model.name=torch:", "model.name={'torch': None}: expected text, such as 'module:attr'"),
        ("model.name=:net", "':net': expected 'module:attr'"),
        ("train_loader.collate_fn=torch:no_such_function", "train_loader.collate_fn: 'torch:no_such_function'"),
    ],
)
def test_a_name_that_does_not_exist_is_told_with_its_place(write_run: WriteRun, override: str, expected: str) -> None:
    """The message says which name, where it stands, and what there is."""
    message = message_of(write_run(), override)
    assert message.startswith(f"override {override!r}: ")
    assert expected in message


def test_a_module_without_the_attribute_is_told_its_nearest_name(write_run: WriteRun) -> None:
    """'my_task:nett' is answered with 'net'."""
    file = write_run()
    file.write_text(file.read_text().replace(":net,", ":nett,"))
    message = message_of(file)
    assert message.startswith(f"{file}:1: model: ")
    assert "has no 'nett'. Did you mean 'net'?" in message


def test_something_that_cannot_be_called_is_refused(write_run: WriteRun) -> None:
    """A name must be that of a class or a function."""
    file = write_run()
    file.write_text(file.read_text().replace(":net, width: 8", ":NUMBER"))
    assert "is a int and cannot be called" in message_of(file)


def test_a_task_that_needs_a_missing_package_is_told_which(write_run: WriteRun) -> None:
    """The package is named, not the module that imports it."""
    file = write_run(task="import no_such_package\n")
    assert "imports 'no_such_package', which is not installed" in message_of(file)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.widht=3", "model.widht: 'my_task:net' has no argument 'widht'. Did you mean 'width'?"),
        ("train_loader.dataset.sizes=3", "has no argument 'sizes'. Did you mean 'size'?"),
        ("callbacks.speed_monitor.windowsize=3", "'speed_monitor' has no argument 'windowsize'. Did you mean 'window_"),
        ("optimizer={name: decoupled_adamw, learning_rate: 1}", "no argument 'learning_rate'"),
        ("algorithms=[{gradient_clipping: {clipping_type: norm}}]", "needs clipping_threshold"),
    ],
)
def test_wrong_arguments_are_told_with_their_place_and_the_known_ones(
    write_run: WriteRun, override: str, expected: str
) -> None:
    """An argument that the class does not have, or needs and does not get, is found before anything is built."""
    file = write_run()
    message = message_of(file, override)
    assert message.startswith(f"override {override!r}: ")
    assert expected in message


def test_a_value_that_a_class_refuses_is_told_with_its_place(write_run: WriteRun) -> None:
    """The message of the class gets the line of the YAML in front."""
    file = write_run()
    file.write_text(
        file.read_text() + "algorithms:\n  gradient_clipping:\n    {clipping_type: x, clipping_threshold: 1}\n"
    )
    assert message_of(file).startswith(f"{file}:8: algorithms.gradient_clipping: ")


@pytest.mark.parametrize("name", ["adamw", "sgd", "AdamW", "rmsprop", "RAdam"])
def test_optimizers_of_torch_have_names(name: str) -> None:
    """Any of ``torch.optim``, in small letters or as the class is written, with the class's own arguments."""
    origin = Origin((Path("run.yaml"),), {}, {}, {})
    make = find(Component(name, {"lr": 0.25}, ("optimizer",)), "optimizer", origin, positional=1)
    optimizer = make([torch.nn.Parameter(torch.zeros(1))])
    assert type(optimizer).__name__.lower() == name.lower()
    assert optimizer.param_groups[0]["lr"] == 0.25
    with pytest.raises(ConfigError, match=f"{name!r} has no argument 'learning_rate'"):
        find(Component(name, {"learning_rate": 0.1}, ("optimizer",)), "optimizer", origin, positional=1)


def test_a_module_of_another_run_is_not_taken_for_ones_own(write_run: WriteRun, tmp_path: Path) -> None:
    """Two YAML files in one process, each with a module of the same name beside it: the second is told of the first."""
    with build_trainer(load_config(write_run())):
        pass
    other = tmp_path / "other"
    other.mkdir()
    for name in ("run.yaml", "my_task.py"):
        (other / name).write_text((tmp_path / name).read_text())
    with pytest.raises(ConfigError, match=r"my_task' is .*other/my_task.py' here, and this process has loaded"):
        build_trainer(load_config(other / "run.yaml"))
    with build_trainer(load_config(tmp_path / "run.yaml")):
        pass
