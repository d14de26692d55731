"""``${oc.env:NAME}``: values from the environment are used but never shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from composerlite.config import build_trainer, load_config
from composerlite.loggers import InMemoryLogger

WriteRun = Callable[..., Path]
ErrorOf = Callable[..., str]

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


def test_environment_variables_are_resolved(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, within text, through other values, and with a default; ``oc.decode`` parses the value as YAML."""
    run = load_config(file)
    assert run.trainer.run_name == f"run-{SECRET}-x"
    assert run.components["loggers"][0].arguments["filename"] == f"run-{SECRET}.txt"
    assert run.trainer.seed == 4
    monkeypatch.setenv("SEED_OF_TEST", "5")
    assert load_config(file).trainer.seed == 5


def test_secrets_are_not_printed(file: Path) -> None:
    """All ``${…}`` are printed unresolved; the printed text is the same run."""
    run = load_config(file)
    for text in (run.resolved, run.annotated):
        assert SECRET not in text
        assert "run_name: ${variables.prefix}-x" in text
        assert "prefix: run-${oc.env:TOKEN_OF_TEST}" in text
    file.write_text(run.resolved)
    assert load_config(file).values == run.values


def test_secrets_are_not_logged(file: Path, tmp_path: Path) -> None:
    """``auto_log_hparams`` logs the whole configuration by dotted names, with ``${…}`` unresolved."""
    overrides = [
        f"loggers.file.filename={tmp_path}/log.txt",
        "callbacks=[{speed_monitor: {window_size: 5}}, lr_monitor]",
    ]
    with build_trainer(load_config(file, overrides)) as trainer:
        logged = next(logger for logger in trainer.logger.destinations if isinstance(logger, InMemoryLogger))
    assert logged.hyperparameters["run_name"] == "${variables.prefix}-x"
    assert logged.hyperparameters["model.width"] == 8
    assert logged.hyperparameters["callbacks.0.speed_monitor.window_size"] == 5
    assert logged.hyperparameters["save_interval"] == "1ep", "the Trainer's own default"
    assert SECRET not in json.dumps(logged.hyperparameters)
    assert logged.hyperparameters["callbacks.1"] == "lr_monitor"
    assert '"model.width": 8' in (tmp_path / "log.txt").read_text()


def test_secrets_are_not_in_errors(file: Path, error_of: ErrorOf) -> None:
    """A value of a wrong type is quoted unresolved."""
    override = "seed=${oc.env:TOKEN_OF_TEST}"
    message = error_of(file, override)
    assert message == f"override '{override}': seed='${{oc.env:TOKEN_OF_TEST}}': expected integer or null."
    for override in ("algorithms=[[${oc.env:TOKEN_OF_TEST}]]", "loggers=[{file: '${variables.prefix}'}]"):
        assert SECRET not in error_of(file, override)


@pytest.mark.parametrize(
    "value",
    [
        "${oc.decode:${oc.env:BROKEN_OF_TEST}}",
        "${variables.${oc.env:TOKEN_OF_TEST}}",
        "${variables.prefix.${variables.prefix}}",
        "${env:HOME}",
        "${nothing}",
    ],
)
def test_an_unresolvable_value_is_quoted_unresolved(
    file: Path, value: str, monkeypatch: pytest.MonkeyPatch, error_of: ErrorOf
) -> None:
    """The messages of OmegaConf quote secrets."""
    monkeypatch.setenv("BROKEN_OF_TEST", "${" + SECRET)
    file.write_text(file.read_text() + f"save_folder: {value}\n")
    assert error_of(file) == f"{file}:18: save_folder: {value!r} cannot be resolved."


def test_a_missing_environment_variable_is_named(file: Path, error_of: ErrorOf) -> None:
    """With its line, and the ways to fix the error."""
    file.write_text(file.read_text() + "save_folder: s3://${oc.env:BUCKET_OF_TEST}/x\n")
    fix = "Set it, or give a default: ${oc.env:BUCKET_OF_TEST,VALUE}."
    assert error_of(file) == f"{file}:18: save_folder: the environment has no variable 'BUCKET_OF_TEST'. {fix}"


def test_an_escaped_interpolation_is_text(file: Path) -> None:
    r"""``\${x}`` is text, and is printed as ``\${x}``."""
    file.write_text(file.read_text() + "save_folder: a\\${oc.env:X}\n")
    run = load_config(file)
    assert run.trainer.save_folder == "a${oc.env:X}"
    file.write_text(run.resolved)
    assert load_config(file).trainer.save_folder == "a${oc.env:X}"
