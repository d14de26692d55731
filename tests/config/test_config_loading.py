"""Loading of a YAML file: valid configurations, and the message for each mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from composerlite.config import load_config
from composerlite.config.arguments import Component

ErrorOf = Callable[..., str]
WriteRun = Callable[..., Path]

GOOD = """\
variables:
  width: 8
  data: {name: my_task:data, size: 100}
model:
  name: my_task:Net
  width: ${variables.width}
max_duration: 2ep
train_loader:
  dataset: ${variables.data}
  batch_size: 4
  shuffle: true
eval_loader:
  - label: easy
    dataset: {name: my_task:data, size: 10}
    batch_size: 4
  - label: hard
    name: my_task:loader
    subset_num_batches: 3
optimizer: {name: decoupled_adamw, lr: 1e-3}
algorithms:
  gradient_clipping: {clipping_type: norm, clipping_threshold: 1.0}
callbacks:
  - checkpoint_saver: {folder: a}
  - checkpoint_saver: {folder: b}
  - lr_monitor
"""
NEXT_LINE = GOOD.count("\n") + 1


# ── valid configurations ─────────────────────────────────────────────────────────────────────────────────────────
def test_every_part_of_a_run_is_read(write_run: WriteRun) -> None:
    """Models, loaders, optimizers, algorithms and callbacks become names with arguments."""
    run = load_config(write_run(GOOD))
    parts = run.components
    assert parts["model"] == [Component("my_task:Net", {"width": 8}, ("model",))]
    loader = parts["train_loader"][0].arguments
    assert loader["dataset"].arguments == {"size": 100}
    assert (loader["batch_size"], loader["shuffle"]) == (4, True)
    easy, hard = (evaluator.arguments for evaluator in parts["eval_loader"])
    assert (easy["label"], hard["label"], hard["subset_num_batches"]) == ("easy", "hard", 3)
    assert hard["dataloader"].name == "my_task:loader"
    assert parts["optimizer"] == [Component("decoupled_adamw", {"lr": 1e-3}, ("optimizer",), "optimizer")]
    assert parts["scheduler"] == []
    assert parts["algorithms"][0].arguments == {"clipping_type": "norm", "clipping_threshold": 1.0}
    assert [callback.name for callback in parts["callbacks"]] == ["checkpoint_saver", "checkpoint_saver", "lr_monitor"]
    assert (run.trainer.max_duration, run.trainer.save_interval) == ("2ep", "1ep")


def test_overrides_set_values_of_any_depth(write_run: WriteRun) -> None:
    """Top-level keys, nested keys, list items, variables, and new arguments of a class; mappings are merged."""
    overrides = ["max_duration=5", "model.depth=3", "eval_loader[1].label=hardest", "variables.width=16"]
    run = load_config(write_run(GOOD), [*overrides, "optimizer={weight_decay: 2e-4}", "save_folder={run_name}/x"])
    assert run.trainer.max_duration == 5
    assert run.components["model"][0].arguments == {"width": 16, "depth": 3}
    assert run.components["eval_loader"][1].arguments["label"] == "hardest"
    assert run.components["optimizer"][0].arguments == {"lr": 1e-3, "weight_decay": 2e-4}
    assert run.trainer.save_folder == "{run_name}/x", "a file name, not a YAML mapping"


def test_the_resolved_text_is_the_same_run(write_run: WriteRun) -> None:
    """The output of ``--print-config`` is a configuration without interpolation."""
    run = load_config(write_run(GOOD), ["variables.width=16"])
    again = load_config(write_run(run.resolved))
    assert "${" not in run.resolved
    assert (again.components, again.trainer) == (run.components, run.trainer)


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD.replace("max_dur", "max_durr"), ":7: unknown key 'max_durration'. Did you mean 'max_duration'?"),
        (GOOD.replace("shuffle", "shufle"), ":11: unknown key 'shufle' in 'train_loader'. Did you mean 'shuffle'?"),
        (GOOD + "sede: 3\nsave_foldr: x\n", f":{NEXT_LINE}: unknown key 'sede'. Did you mean 'seed'?"),
        (GOOD + "sede: 3\nsave_foldr: x\n", f":{NEXT_LINE + 1}: unknown key 'save_foldr'. Did you mean 'save_folder'?"),
        (GOOD + "max_epochs: 3\n", f":{NEXT_LINE}: unknown key 'max_epochs'. Here it is max_duration='90ep'."),
        (GOOD + "3: x\n", f":{NEXT_LINE}: unknown key '3'."),
        (GOOD.replace("  batch_size: 4\n  sh", "  sh"), ":8: train_loader: batch_size is missing. Known: "),
        (GOOD.replace("  dataset: ${variables.data}\n", ""), ":8: train_loader: dataset is missing."),
        (GOOD.replace("width}", "widht}"), ":6: model.width: Interpolation key 'variables.widht' not found. Did you"),
        ("", "expected 'key: value' lines"),
        ("- a\n- b\n", "expected 'key: value' lines"),
        ("seed: 1\nseed: 2\n", "run.yaml:2: not valid YAML: found duplicate key"),
        ("seed: 1\nsave_folder: {run_name}/x\n", "run.yaml:2: not valid YAML"),
        ("variables:\n  home: ${oc.env:HOME\n", "run.yaml:2: not valid YAML"),
    ],
)
def test_a_wrong_key_or_file_is_an_error_with_its_line(
    write_run: WriteRun, load_error: ErrorOf, text: str, expected: str
) -> None:
    """Unknown and missing keys, undefined variables, broken YAML. The valid keys are listed once."""
    message = load_error(write_run(text))
    assert expected in message
    assert message.count("Known: ") <= 1


@pytest.mark.parametrize("key", ["model", "train_loader", "max_duration"])
def test_a_run_needs_a_model_data_and_an_end(write_run: WriteRun, load_error: ErrorOf, key: str) -> None:
    """The message has an example."""
    assert f"{key!r} is missing. Add a line such as '{key}: " in load_error(write_run(GOOD), f"{key}=null")


def test_a_missing_file_is_an_error(tmp_path: Path, load_error: ErrorOf) -> None:
    """Also a folder, and a path below a file."""
    for place in (tmp_path / "absent.yaml", tmp_path, Path(__file__) / "x"):
        assert load_error(place).startswith(f"{place}: cannot be read: ")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("max_duration", "expected KEY=VALUE"),
        ("=3", "expected KEY=VALUE"),
        ("model..name=1", "expected KEY=VALUE"),
        ("variables.widht=3", "the file has no variable 'widht'. Did you mean 'width'?"),
        ("callbacks=[a", "not valid YAML"),
        ("run_name=${oc.env:HOME", "not valid YAML"),
        ("eval_loader[7].label=x", "cannot be set"),
        ("eval_loader.first.label=x", "cannot be set"),
        ("sav_folder=x", "unknown key 'sav_folder'."),
        ("train_loader.batchsize=3", "unknown key 'batchsize'"),
        ("defaults=[base]", "unknown key 'defaults'"),
        ("train_loader=3", "expected a mapping with 'dataset:'"),
        ("eval_loader=3", "expected a mapping with 'dataset:'"),
    ],
)
def test_a_wrong_override_is_named(write_run: WriteRun, load_error: ErrorOf, override: str, expected: str) -> None:
    """Wrong form, unknown keys and variables, and list items that do not exist."""
    message = load_error(write_run(GOOD), override)
    assert message.startswith(f"override {override!r}: ")
    assert expected in message


# ── types ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("seed: x", "seed='x': expected integer or null"),
        ("seed: true", "seed=True: expected integer or null"),
        ("autoresume: 1", "autoresume=1: expected boolean"),
        ("eval_interval: 1.5", "eval_interval=1.5: expected integer or string"),
        ("run_name: 7", "run_name=7: expected string or null"),
        ("save_ignore_keys: state/model", "expected array or null"),
        ("save_ignore_keys: [1]", "expected array or null"),
        ("compile_config: fast", "expected object or null"),
        ("scheduler: cosine", "expected a mapping with a 'name:'"),
        ("scheduler: {t_max: 1ep}", "expected a mapping with a 'name:'"),
        ("loggers: 3", "expected 'name: {arguments}'"),
        ("loggers: {file: x}", "expected arguments as 'key: value' lines"),
    ],
)
def test_a_wrong_type_is_an_error_with_its_line(
    write_run: WriteRun, load_error: ErrorOf, line: str, expected: str
) -> None:
    """The message has the line, the key, the value and the expected type."""
    message = load_error(write_run(GOOD + line + "\n"))
    assert f"run.yaml:{NEXT_LINE}: " in message
    assert expected in message


@pytest.mark.parametrize("line", ["save_folder: x", "load_ignore_keys: [a]", "dist_timeout: 3", "device: cpu"])
def test_right_types_are_accepted(write_run: WriteRun, line: str) -> None:
    """Text for a path, a list for a sequence, a whole number for a number."""
    run = load_config(write_run(f"{GOOD}{line}\n"))
    ((key, value),) = yaml.safe_load(line).items()
    assert getattr(run.trainer, key) == value
