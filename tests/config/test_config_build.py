"""From YAML to a Trainer: names, arguments, and training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from composerlite import algorithms, callbacks, loggers, optim
from composerlite.callbacks import CheckpointSaver
from composerlite.config import build_trainer, load_config
from composerlite.config.registry import known_classes
from composerlite.errors import ConfigError
from composerlite.loggers import InMemoryLogger

WriteRun = Callable[..., Path]
ErrorOf = Callable[..., str]

MORE = """
model: {name: my_task:net, width: 8}
train_loader:
  dataset: {name: my_task:data, size: 8}
  batch_size: 4
  shuffle: true
  collate_fn: my_task:collate
eval_loader:
  - label: small
    dataset: {name: my_task:data, size: 4}
    batch_size: 2
  - label: whole
    name: my_task:loader
    size: 6
    metric_names: [MulticlassAccuracy]
max_duration: 2ba
optimizer: {name: decoupled_adamw, lr: 1e-2}
scheduler: {name: linear}
algorithms:
  gradient_clipping: {clipping_type: norm, clipping_threshold: 1.0}
callbacks:
  - checkpoint_saver: {folder: FOLDER/a, save_interval: 1ba}
  - checkpoint_saver: {folder: FOLDER/b}
loggers:
  in_memory:
seed: 3
progress_bar: false
"""


def test_every_part_of_a_run_is_built_and_trained(write_run: WriteRun, tmp_path: Path) -> None:
    """A callback with two list items is used twice."""
    config = load_config(write_run(MORE.replace("FOLDER", str(tmp_path))))
    with build_trainer(config) as trainer:
        trainer.fit()
        trainer.eval()
    assert trainer.state.timestamp == "2ba"
    assert [evaluator.label for evaluator in trainer.state.evaluators] == ["small", "whole"]
    assert trainer.state.optimizers[0].param_groups[0]["initial_lr"] == 1e-2
    assert sum(isinstance(callback, CheckpointSaver) for callback in trainer.state.callbacks) == 2
    assert len(list((tmp_path / "a").glob("ep*-ba*.pt"))) == 2
    assert any(isinstance(callback, InMemoryLogger) for callback in trainer.state.callbacks)


def test_the_seed_sets_the_initial_weights(write_run: WriteRun) -> None:
    """Runs with the same seed have the same weights."""

    def initial(seed: int) -> torch.Tensor:
        with build_trainer(load_config(write_run(), [f"seed={seed}"])) as trainer:
            return next(trainer.state.model.parameters()).detach()

    assert torch.equal(initial(5), initial(5))
    assert not torch.equal(initial(5), initial(6))


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("optimizer", {"decoupled_adamw": optim.DecoupledAdamW, "rmsprop": torch.optim.RMSprop}),
        ("scheduler", {"cosine_with_warmup": optim.CosineAnnealingWithWarmupScheduler, "step": optim.StepScheduler}),
        ("algorithms", {"ema": algorithms.EMA, "cutmix": algorithms.CutMix, "blur_pool": algorithms.BlurPool}),
        ("callbacks", {"lr_monitor": callbacks.LRMonitor, "nan_monitor": callbacks.NaNMonitor}),
        ("loggers", {"mlflow": loggers.MLFlowLogger, "wandb": loggers.WandBLogger, "jsonl": loggers.JSONLLogger}),
    ],
)
def test_a_class_is_named_in_snake_case(family: str, names: dict[str, type]) -> None:
    """Without 'Annealing', 'Scheduler' and 'Logger'; optimizers of torch in lower case. Base classes have no name."""
    known = known_classes(family)
    assert {name: known[name] for name in names} == names
    assert known.keys().isdisjoint({"composer", "algorithm", "callback", "logger_destination", "destination"})


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer={name: decoupled_adam}", "there is no optimizer 'decoupled_adam'. Did you mean 'decoupled_adamw'?"),
        ("callbacks.speed_monitr=null", "there is no callback 'speed_monitr'. Did you mean 'speed_monitor'?"),
        ("model.name=net", "'net': expected 'module:attr'"),
        ("model.name=:net", "':net': expected 'module:attr'"),
        ("model.name=torch.no_such_module:net", "No module named 'torch.no_such_module'. Modules are searched for"),
        ("model.name=my_task:nett", "has no attribute 'nett'. Did you mean 'net'?"),
        ("model={name: my_task:NUMBER}", "'my_task:NUMBER' is a int. Name a class or a function."),
        ("model={name: [a]}", "expected a mapping with a 'name:', such as 'module:attr'"),
        ("model.widht=3", "unknown key 'widht' in 'model'. Did you mean 'width'?"),
        ("train_loader.dataset.sizes=3", "unknown key 'sizes' in 'train_loader.dataset'. Did you mean 'size'?"),
        ("callbacks.speed_monitor.windowsize=3", "unknown key 'windowsize' in 'callbacks.speed_monitor'. Did you mean"),
        ("algorithms=[{gradient_clipping: {clipping_type: norm}}]", "clipping_threshold is missing. Known: "),
        ("callbacks={speed_monitor: {window_size: x}}", "callbacks.speed_monitor.window_size='x': expected integer."),
        ("algorithms={gradient_clipping: {clipping_type: x, clipping_threshold: 1}}", "algorithms.gradient_clipping: "),
        ("optimizer={name: adamw, betas: 3}", "optimizer.betas=3: expected array."),
        ("optimizer={name: torch.optim:SGD, lr: -1}", "optimizer: ValueError: Invalid learning rate: -1"),
        ("train_loader.prefetch_factor=2", "train_loader: ValueError: prefetch_factor"),
        ("train_loader.collate_fn=torch:no_such_function", "train_loader: 'torch:no_such_function': module 'to"),
        ("optimizer={name: AdamW, learning_rate: 0.1}", "unknown key 'learning_rate' in 'optimizer'"),
        ("model.width=abc", "model.width='abc': expected integer."),
    ],
)
def test_a_wrong_name_or_argument_is_an_error_with_its_place(
    write_run: WriteRun, error_of: ErrorOf, override: str, expected: str
) -> None:
    """The message has the override or the line, the name and the valid names."""
    message = error_of(write_run(), override, build=True)
    assert message.startswith((f"override {override!r}: ", str(write_run())))
    assert expected in message


def test_a_model_of_the_wrong_type_is_an_error(write_run: WriteRun, error_of: ErrorOf) -> None:
    """The message names the class for wrapping a torch module."""
    file = write_run()
    file.write_text(file.read_text().replace("my_task:net, width: 8", "my_task:plain_module"))
    message = error_of(file, build=True)
    assert message.startswith(f"{file}:1: model: 'my_task:plain_module' made a Linear, not a ComposerModel. ")
    assert "ComposerClassifier wraps a torch module" in message


@pytest.mark.parametrize("task", ["import no_such_package\n", "def net(width):\n    raise TypeError('a bug')\n"])
def test_errors_of_user_code_are_not_hidden(write_run: WriteRun, task: str) -> None:
    """A missing package is named; a bug in a constructor is raised as it is."""
    with pytest.raises((ConfigError, TypeError), match=r"No module named 'no_such_package'|^a bug$"):
        build_trainer(load_config(write_run(task=task), ["train_loader.dataset.name=torch:ones"]))


def test_a_mistake_is_found_before_anything_is_built(write_run: WriteRun, error_of: ErrorOf) -> None:
    """Names and arguments are checked first."""
    task = "def net():\n    raise AssertionError('built')\n\n\ndef data(size):\n    raise AssertionError('loaded')\n"
    file = write_run(task=task)
    file.write_text(file.read_text().replace(", width: 8", "") + "callbacks: {lr_monitr: null}\n")
    assert "lr_monitr" in error_of(file, build=True)


def test_a_module_of_another_run_is_an_error(write_run: WriteRun, error_of: ErrorOf, tmp_path: Path) -> None:
    """Two runs in one process, each with a module of the same name beside its YAML file."""
    with build_trainer(load_config(write_run())):
        pass
    other = tmp_path / "other"
    other.mkdir()
    for name in ("run.yaml", "my_task.py"):
        (other / name).write_text((tmp_path / name).read_text())
    assert "other/my_task.py' here, but this process has loaded" in error_of(other / "run.yaml", build=True)
