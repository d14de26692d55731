"""Loading of a YAML file: valid configurations, and the message for each mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from composerlite.config import load_config

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


def test_overrides_set_values_of_any_depth(write_run: WriteRun) -> None:
    """Top-level keys, nested keys, list items, variables, and new arguments of a class; mappings are merged."""
    overrides = ["max_duration=5", "model.depth=3", "eval_loader[1].label=hardest", "variables.width=16"]
    run = load_config(
        write_run(GOOD), [*overrides, "optimizer={weight_decay: 2e-4}", "save_folder={run_name}/x", "dist_timeout=3"]
    )
    assert run.trainer.max_duration == 5
    assert run.components["model"][0].arguments == {"width": 16, "depth": 3}
    assert run.components["eval_loader"][1].arguments["label"] == "hardest"
    assert run.components["optimizer"][0].arguments == {"lr": 1e-3, "weight_decay": 2e-4}
    assert run.trainer.save_folder == "{run_name}/x", "a file name, not a YAML mapping"
    assert run.trainer.dist_timeout == 3, "a whole number for a number"


def test_the_resolved_text_is_the_same_run(write_run: WriteRun) -> None:
    """The output of ``--print-config`` is a configuration without interpolation."""
    run = load_config(write_run(GOOD), ["variables.width=16"])
    again = load_config(write_run(run.resolved))
    assert "${" not in run.resolved
    assert (again.components, again.trainer) == (run.components, run.trainer)


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
        (GOOD + "seed: x\n", "seed='x': expected integer or null"),
        (GOOD + "seed: true\n", "seed=True: expected integer or null"),
        (GOOD + "autoresume: 1\n", "autoresume=1: expected boolean"),
        (GOOD + "eval_interval: 1.5\n", "eval_interval=1.5: expected integer or string"),
        (GOOD + "run_name: 7\n", "run_name=7: expected string or null"),
        (GOOD + "save_ignore_keys: state/model\n", "expected array or null"),
        (GOOD + "save_ignore_keys: [1]\n", "expected array or null"),
        (GOOD + "compile_config: fast\n", "expected object or null"),
        (GOOD + "scheduler: cosine\n", "expected a mapping with a 'name:'"),
        (GOOD + "scheduler: {t_max: 1ep}\n", "expected a mapping with a 'name:'"),
        (GOOD + "loggers: 3\n", "expected 'name: {arguments}'"),
        (GOOD + "loggers: {file: x}\n", "expected arguments as 'key: value' lines"),
        ("", "expected 'key: value' lines"),
        ("- a\n- b\n", "expected 'key: value' lines"),
        ("seed: 1\nseed: 2\n", "run.yaml:2: not valid YAML: found duplicate key"),
        ("seed: 1\nsave_folder: {run_name}/x\n", "run.yaml:2: not valid YAML"),
        ("variables:\n  home: ${oc.env:HOME\n", "run.yaml:2: not valid YAML"),
    ],
)
def test_a_mistake_in_a_file_is_an_error_with_its_line(
    write_run: WriteRun, error_of: ErrorOf, text: str, expected: str
) -> None:
    """Unknown and missing keys, wrong types, undefined variables, broken YAML. The valid keys are listed once."""
    message = error_of(write_run(text))
    assert expected in message
    assert message.count("Known: ") <= 1
    assert not text.startswith(GOOD) or f"run.yaml:{NEXT_LINE}" in message


def test_a_missing_file_is_an_error(tmp_path: Path, error_of: ErrorOf) -> None:
    """Also a folder, and a path below a file."""
    for place in (tmp_path / "absent.yaml", tmp_path, Path(__file__) / "x"):
        assert error_of(place).startswith(f"{place}: cannot be read: ")


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
        ("model=null", "'model' is missing. Add a line such as 'model: {name: my_task:MyModel}'."),
        ("train_loader=null", "'train_loader' is missing. Add a line"),
        ("max_duration=null", "'max_duration' is missing. Add a line such as 'max_duration: 5ep'."),
        ("+seed=3", "unknown key '+seed'. Did you mean 'seed'?"),
        ("~optimizer=3", "unknown key '~optimizer'. Did you mean 'optimizer'?"),
        ("train_loader=3", "expected a mapping with 'dataset:'"),
        ("eval_loader=3", "expected a mapping with 'dataset:'"),
    ],
)
def test_a_wrong_override_is_named(write_run: WriteRun, error_of: ErrorOf, override: str, expected: str) -> None:
    """Wrong form, unknown keys and variables, and list items that do not exist."""
    message = error_of(write_run(GOOD), override)
    assert message.startswith(f"override {override!r}: ")
    assert expected in message
