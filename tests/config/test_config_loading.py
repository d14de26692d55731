"""Reading a YAML file: what is accepted, and what a mistake is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from composerlite.config import load_config
from composerlite.config.schema import Component, Loader
from composerlite.errors import ConfigError

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


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a text to ``run.yaml`` and gives its path."""

    def write_text(text: str) -> Path:
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return file

    return write_text


Write = Callable[[str], Path]


def message_of(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(file, overrides)
    return str(error.value)


# ── what is accepted ─────────────────────────────────────────────────────────────────────────────────────────────
def test_every_part_of_a_run_is_read(write: Write) -> None:
    """Models, loaders, optimizers, algorithms and callbacks come out as names with their arguments."""
    run = load_config(write(GOOD))
    assert run.model == Component("my_task:Net", {"width": 8}, ("model",))
    assert isinstance(run.train_loader, Loader)
    assert run.train_loader.dataset.arguments == {"size": 100}
    assert (run.train_loader.arguments.batch_size, run.train_loader.arguments.shuffle) == (4, True)
    assert [evaluation.arguments.label for evaluation in run.eval_loaders] == ["easy", "hard"]
    assert isinstance(run.eval_loaders[1].loader, Component)
    assert run.eval_loaders[1].arguments.subset_num_batches == 3
    assert run.optimizer == Component("decoupled_adamw", {"lr": 1e-3}, ("optimizer",))
    assert run.scheduler is None
    assert run.algorithms[0].arguments == {"clipping_type": "norm", "clipping_threshold": 1.0}
    assert [callback.name for callback in run.callbacks] == ["checkpoint_saver", "checkpoint_saver", "lr_monitor"]
    assert run.trainer.max_duration == "2ep"


def test_overrides_replace_values_of_any_depth(write: Write) -> None:
    """``KEY=VALUE`` sets top-level keys, nested keys, list items and variables, and new arguments of a class."""
    run = load_config(
        write(GOOD),
        ["max_duration=5", "model.depth=3", "eval_loader[1].label=hardest", "variables.width=16", "optimizer.lr=2e-4"],
    )
    assert run.trainer.max_duration == 5
    assert run.model.arguments == {"width": 16, "depth": 3}
    assert run.eval_loaders[1].arguments.label == "hardest"
    assert run.optimizer is not None
    assert run.optimizer.arguments == {"lr": 2e-4}


def test_a_format_variable_needs_no_quotes_on_the_command_line(write: Write) -> None:
    """``save_folder={run_name}/x`` is text although YAML would see a mapping."""
    assert load_config(write(GOOD), ["save_folder={run_name}/x"]).trainer.save_folder == "{run_name}/x"


def test_the_resolved_text_gives_the_same_run(write: Write, tmp_path: Path) -> None:
    """What ``--print-config`` prints is a configuration itself, free of interpolation."""
    run = load_config(write(GOOD), ["variables.width=16"])
    again_file = tmp_path / "again.yaml"
    again_file.write_text(run.resolved)
    again = load_config(again_file)
    assert "${" not in run.resolved
    assert again.model == run.model
    assert again.train_loader == run.train_loader
    assert again.trainer == run.trainer


# ── unknown keys ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_unknown_key_is_told_with_file_line_and_nearest_key(write: Write) -> None:
    """A misspelt key never passes in silence."""
    file = write(GOOD.replace("max_duration: 2ep", "max_durration: 2ep"))
    assert f"{file}:7: unknown key 'max_durration'. Did you mean 'max_duration'?" in message_of(file)


def test_all_unknown_keys_are_told_at_once(write: Write) -> None:
    """Two misspelt keys need one look, not two, and what is known is listed once."""
    message = message_of(write(GOOD + "sede: 3\nsave_foldr: x\n"))
    assert f"run.yaml:{NEXT_LINE}: unknown key 'sede'. Did you mean 'seed'?" in message
    assert f"run.yaml:{NEXT_LINE + 1}: unknown key 'save_foldr'. Did you mean 'save_folder'?" in message
    assert message.count("Known: ") == 1


def test_a_key_of_another_trainer_is_told_by_its_name_here(write: Write) -> None:
    """As the Trainer tells it in Python."""
    file = write(GOOD + "max_epochs: 3\n")
    assert f"run.yaml:{NEXT_LINE}: unknown key 'max_epochs'. Here it is max_duration='90ep'." in message_of(file)


def test_an_unknown_key_of_a_loader_is_told_with_its_line(write: Write) -> None:
    """Nested keys are checked as the top level is."""
    message = message_of(write(GOOD.replace("  shuffle: true", "  shufle: true")))
    assert "run.yaml:11: unknown key 'shufle' in 'train_loader'. Did you mean 'shuffle'?" in message


def test_an_unknown_override_is_named(write: Write) -> None:
    """The message quotes the override, not a line that has nothing to do with it."""
    file = write(GOOD)
    assert message_of(file, "sav_folder=x").startswith("override 'sav_folder=x': unknown key 'sav_folder'.")
    assert message_of(file, "train_loader.batchsize=3").startswith("override 'train_loader.batchsize=3': unknown key")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("max_duration", "expected KEY=VALUE"),
        ("=3", "expected KEY=VALUE"),
        ("variables.widht=3", "the file has no variable 'widht'. Did you mean 'width'?"),
        ("callbacks=[a", "not valid YAML"),
        ("eval_loader[7].label=x", "cannot be set"),
        ("eval_loader.first.label=x", "cannot be set"),
        ("max_duration[0]=1", "max_duration is of the type str, and has no item '0'. Set it as a whole: max_duration="),
        ("max_duration.epochs=1", "max_duration is of the type str, and has no item 'epochs'"),
        ("variables.width[0]=1", "variables.width is of the type int, and has no item '0'"),
        ("eval_loader[0].label.x=1", "eval_loader.0.label is of the type str, and has no item 'x'"),
        ("loggers[0].name=x", "loggers is no list, and has no item 0. Set it as a whole: loggers=[VALUE"),
    ],
)
def test_an_override_that_cannot_be_applied_is_named(write: Write, override: str, expected: str) -> None:
    """Malformed overrides, unknown variables, list items that are not there, and items of what is a single value."""
    message = message_of(write(GOOD), override)
    assert message.startswith(f"override {override!r}: ")
    assert expected in message


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("seed: x", "seed='x': expected a whole number or null"),
        ("seed: true", "seed=True: expected a whole number or null"),
        ("autoresume: 1", "autoresume=1: expected true or false"),
        ("eval_interval: 1.5", "eval_interval=1.5: expected a whole number or text"),
        (
            "run_name: 7",
            "run_name=7: expected text or null. For text that YAML reads as something else, write run_name: ",
        ),
        ("save_ignore_keys: state/model", "expected a list of text or null"),
        ("save_ignore_keys: [1]", "expected a list of text or null"),
        ("compile_config: fast", "expected a mapping or null"),
        ("scheduler: cosine", "expected a mapping with 'name: module:attr'"),
        ("scheduler: {t_max: 1ep}", "expected a mapping with 'name: module:attr'"),
        ("loggers: 3", "expected 'name: {arguments}'"),
        ("loggers: {file: x}", "expected arguments as 'key: value' lines"),
    ],
)
def test_a_value_of_the_wrong_type_is_told_with_its_line_and_what_is_wanted(
    write: Write, line: str, expected: str
) -> None:
    """The message names line, key, value and rule."""
    message = message_of(write(GOOD + line + "\n"))
    assert f"run.yaml:{NEXT_LINE}: " in message
    assert expected in message


@pytest.mark.parametrize("key", ["model", "train_loader", "max_duration"])
def test_a_run_without_an_essential_part_is_refused(write: Write, key: str) -> None:
    """A run needs a model, data and an end."""
    message = message_of(write(GOOD), f"{key}=null")
    assert f"{key!r} is missing" in message


def test_a_loader_without_its_essentials_is_refused(write: Write) -> None:
    """A loader needs a data set and a batch size."""
    assert "has no 'dataset'" in message_of(write(GOOD.replace("  dataset: ${variables.data}\n", "")))
    assert "train_loader has no 'batch_size'" in message_of(
        write(GOOD.replace("  batch_size: 4\n  shuffle", "  shuffle"))
    )
    assert "expected a mapping with 'dataset:'" in message_of(write(GOOD), "train_loader=3")


def test_variables_are_a_mapping(write: Write) -> None:
    """Anything else gives no names to refer to."""
    file = write("variables: 3\n")
    assert message_of(file) == f"{file}:1: variables=3: expected a mapping from names to values."
    assert "the file has no variable 'x'" in message_of(file, "variables.x=3")


def test_two_loaders_of_one_label_are_refused(write: Write) -> None:
    """Their metrics would overwrite each other."""
    assert "have the label 'easy'" in message_of(write(GOOD), "eval_loader[1].label=easy")


def test_an_undefined_variable_is_told_with_its_line_and_the_nearest(write: Write) -> None:
    """The line is that of the value that uses the variable."""
    message = message_of(write(GOOD.replace("${variables.width}", "${variables.widht}")))
    assert "run.yaml:6: model.width: " in message
    assert "Did you mean 'width'?" in message


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected 'key: value' lines"),
        ("- a\n- b\n", "expected 'key: value' lines"),
        ("seed: 1\nseed: 2\n", "run.yaml:2: not valid YAML: found duplicate key"),
        ("seed: 1\nsave_folder: {run_name}/x\n", "run.yaml:2: not valid YAML"),
        ("seed: [1\n", "run.yaml:2: not valid YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(write: Write, text: str, expected: str) -> None:
    """Broken YAML is told with its line."""
    assert expected in message_of(write(text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """The message names the path."""
    assert "absent.yaml: there is no such file" in message_of(tmp_path / "absent.yaml")
    assert "is not a YAML file" in message_of(tmp_path)


def test_what_cannot_be_read_is_refused(write: Write) -> None:
    """A path through a file, and interpolations that do not end, in a file and in an override."""
    file = write("variables:\n  home: ${oc.env:HOME\n")
    with pytest.raises(ConfigError, match=r"yaml:2: variables.home: not a valid interpolation"):
        load_config(file)
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(file / "x")
    for override in ("run_name=${oc.env:HOME", "run_name={a ${oc.env:HOME"):
        with pytest.raises(ConfigError, match=r"override 'run_name=.*not a valid interpolation"):
            load_config(write(GOOD), [override])
    for override in (".model=1", "model.=1", "model..name=1"):
        with pytest.raises(ConfigError, match="expected KEY=VALUE"):
            load_config(write(GOOD), [override])
