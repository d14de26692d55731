"""From YAML to a Trainer that trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from composerlite import Trainer
from composerlite.callbacks import CheckpointSaver
from composerlite.config import build_trainer, load_config
from composerlite.errors import ConfigError
from composerlite.loggers import InMemoryLogger

WriteRun = Callable[..., Path]

MORE = """
model: {name: my_task:net, width: 8}
train_loader:
  dataset: {name: my_task:data, size: 8}
  batch_size: 4
  shuffle: true
  collate_fn: my_task:together
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


def test_a_run_is_built_and_trained(write_run: WriteRun, tmp_path: Path) -> None:
    """Every part of the YAML takes part in training, a repeated callback as often as it is listed."""
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


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.state.model.parameters()])


def test_one_seed_gives_one_run(write_run: WriteRun) -> None:
    """The first weights are drawn from the seed as everything after them is."""
    file = write_run()

    def trained(seed: int) -> torch.Tensor:
        with build_trainer(load_config(file, [f"seed={seed}"])) as trainer:
            trainer.fit()
        return weights(trainer)

    assert torch.equal(trained(5), trained(5))
    assert not torch.equal(trained(5), trained(6))


def test_a_model_of_the_wrong_kind_is_refused(write_run: WriteRun) -> None:
    """A bare torch module is not a ComposerModel; the message says how to make one of it."""
    file = write_run()
    file.write_text(file.read_text().replace("my_task:net, width: 8", "my_task:plain_module"))
    with pytest.raises(
        ConfigError, match=r"run.yaml:1: model: 'my_task:plain_module' made a Linear. .*ComposerClassifier"
    ):
        build_trainer(load_config(file))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train_loader.prefetch_factor=2", r"run.yaml:2: train_loader: prefetch_factor"),
        ("optimizer={name: torch.optim:SGD, lr: -1}", r"override '.*': optimizer: Invalid learning rate: -1"),
    ],
)
def test_what_torch_refuses_is_told_with_its_place(write_run: WriteRun, override: str, expected: str) -> None:
    """torch's own rules for loaders and optimizers come out as errors of the configuration."""
    with pytest.raises(ConfigError, match=expected):
        build_trainer(load_config(write_run(), [override]))


def test_a_mistake_in_the_last_line_is_found_before_the_data_is_loaded(write_run: WriteRun) -> None:
    """Names and arguments are checked first: nobody waits for a data set to be told of a typo."""
    task = "def net():\n    raise AssertionError('built')\n\n\ndef data(size):\n    raise AssertionError('loaded')\n"
    file = write_run(task=task)
    file.write_text(file.read_text().replace(", width: 8", "") + "callbacks: {lr_monitr: null}\n")
    with pytest.raises(ConfigError, match="lr_monitr"):
        build_trainer(load_config(file))
