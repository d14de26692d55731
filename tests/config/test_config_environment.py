"""``${oc.env:NAME}``: values of the environment, which are used and never shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from composerlite.config import build_trainer, load_config
from composerlite.errors import ConfigError
from composerlite.loggers import InMemoryLogger

WriteRun = Callable[..., Path]

MORE = """\
seed: ${oc.decode:${oc.env:SEED_OF_TEST,4}}
run_name: ${variables.prefix}-x
variables:
  prefix: run-${oc.env:TOKEN_OF_TEST}
  logger: {filename: "${variables.prefix}.txt", flush_interval: 1}
  plain: 7
autoresume_timeout: ${variables.plain}
auto_log_hparams: true
loggers:
  file: ${variables.logger}
  in_memory:
"""
SECRET = "open-sesame"


@pytest.fixture
def file(write_run: WriteRun, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a secret in its name."""
    monkeypatch.setenv("TOKEN_OF_TEST", SECRET)
    file = write_run()
    file.write_text(file.read_text() + MORE)
    return file


def message_of(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(file, overrides)
    return str(error.value)


def test_variables_of_the_environment_are_filled_in(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, within text and through other values; with a value for want of one; ``oc.decode`` reads it as YAML."""
    run = load_config(file)
    assert run.trainer.run_name == f"run-{SECRET}-x"
    assert run.loggers[0].arguments["filename"] == f"run-{SECRET}.txt"
    assert run.trainer.seed == 4
    monkeypatch.setenv("SEED_OF_TEST", "5")
    assert load_config(file).trainer.seed == 5


def test_what_is_printed_has_them_as_they_are_written(file: Path, tmp_path: Path) -> None:
    """No secret is in the printed configuration, which gives the same run nevertheless."""
    run = load_config(file)
    for text in (run.resolved, run.annotated):
        assert SECRET not in text
        assert "run_name: ${variables.prefix}-x" in text
        assert "prefix: run-${oc.env:TOKEN_OF_TEST}" in text
        assert "autoresume_timeout: 7" in text, "what does not depend on the environment is filled in"
    again = tmp_path / "again.yaml"
    again.write_text(run.resolved)
    assert load_config(again).values == run.values


def test_what_is_logged_has_them_as_they_are_written(file: Path, tmp_path: Path) -> None:
    """``auto_log_hparams`` logs the whole configuration, by dotted names, and no secret."""
    overrides = [
        f"loggers.file.filename={tmp_path}/log.txt",
        "callbacks=[{speed_monitor: {window_size: 5}}, lr_monitor]",
    ]
    with build_trainer(load_config(file, overrides)) as trainer:
        logged = next(logger for logger in trainer.logger.destinations if isinstance(logger, InMemoryLogger))
    assert logged.hyperparameters["run_name"] == "${variables.prefix}-x"
    assert logged.hyperparameters["model.width"] == 8
    assert logged.hyperparameters["autoresume_timeout"] == 7
    assert logged.hyperparameters["save_interval"] == "1ep", "the Trainer's own default"
    assert SECRET not in json.dumps(logged.hyperparameters)
    assert logged.hyperparameters["callbacks.0.speed_monitor.window_size"] == 5
    assert logged.hyperparameters["callbacks.1"] == "lr_monitor"
    assert '"model.width": 8' in (tmp_path / "log.txt").read_text()


def test_an_error_shows_them_as_they_are_written(file: Path) -> None:
    """A value that is refused is not shown if it comes from the environment."""
    message = message_of(file, "seed=${oc.env:TOKEN_OF_TEST}")
    assert message.startswith(
        "override 'seed=${oc.env:TOKEN_OF_TEST}': seed='${oc.env:TOKEN_OF_TEST}': expected a whole"
    )
    assert "${oc.decode:${oc.env:NAME}} reads one as YAML" in message
    for override in (
        "algorithms=[[${oc.env:TOKEN_OF_TEST}]]",
        "callbacks={a: ${variables.prefix}}",
        "variables.plain=",
    ):
        assert SECRET not in message_of(file, override, "train_loader=${oc.env:TOKEN_OF_TEST}")


@pytest.mark.parametrize(
    "text",
    [
        "seed: ${oc.decode:${oc.env:BROKEN_OF_TEST}}",
        "seed: ${variables.${oc.env:TOKEN_OF_TEST}}",
        "seed: ${variables.prefix.${variables.prefix}}",
    ],
)
def test_a_value_that_cannot_be_filled_in_is_not_shown_either(
    file: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OmegaConf's own messages quote what they have read."""
    monkeypatch.setenv("BROKEN_OF_TEST", "${" + SECRET)
    file.write_text(file.read_text().replace("seed: ${oc.decode:${oc.env:SEED_OF_TEST,4}}", text))
    message = message_of(file)
    assert message.startswith(f"{file}:7: seed: {text.removeprefix('seed: ')!r} cannot be filled in: ")
    assert SECRET not in message


def test_text_that_only_looks_like_an_interpolation_stays(file: Path, tmp_path: Path) -> None:
    r"""``\${x}`` is text, and is printed so that it is text again."""
    file.write_text(file.read_text() + "save_folder: a\\${oc.env:X}\n")
    run = load_config(file)
    assert run.trainer.save_folder == "a${oc.env:X}"
    again = tmp_path / "again.yaml"
    again.write_text(run.resolved)
    assert load_config(again).trainer.save_folder == "a${oc.env:X}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("save_folder: s3://${oc.env:BUCKET_OF_TEST}/x",
         "run.yaml:18: save_folder: the environment has no variable 'BUCKET_OF_TEST'. Set it, or give a default: "
         "${oc.env:BUCKET_OF_TEST,VALUE}."),
        ("save_folder: ${env:HOME}", "run.yaml:18: save_folder: Unsupported interpolation type env. A variable of the "
         "environment is ${oc.env:NAME}, or"),
        ("save_folder: ${nothing}", "run.yaml:18: save_folder: Interpolation key 'nothing' not found"),
    ],
)  # fmt: skip
def test_a_variable_that_is_missing_is_named(file: Path, text: str, expected: str) -> None:
    """With the file and line that ask for it, and what to do."""
    assert file.read_text().count("\n") == 17
    file.write_text(file.read_text() + text + "\n")
    assert expected in message_of(file)


def test_a_missing_variable_is_told_where_it_is_asked_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not where a value is used that depends on it."""
    monkeypatch.delenv("TOKEN_OF_TEST")
    assert message_of(file).startswith(f"{file}:10: variables.prefix: the environment has no variable 'TOKEN_OF_TEST'.")
