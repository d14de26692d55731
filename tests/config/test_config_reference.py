"""The arguments in YAML are those of the code, and the JSON Schema accepts the same files as composerlite."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.utils.data import DataLoader

from composerlite import Evaluator, Trainer
from composerlite.config import json_schema, load_config
from composerlite.config.arguments import arguments_of
from composerlite.config.schema import COMPONENTS, data_loader, evaluator_arguments, trainer_arguments

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
OBJECTS = {*COMPONENTS, "algorithm_passes", "load_object_store", "optimizers", "profiler", "schedulers"}
"""Arguments for objects and functions, besides loaders."""


@pytest.mark.parametrize(("cls", "known"), [(Trainer, trainer_arguments()), (Evaluator, evaluator_arguments())])
def test_every_plain_argument_is_a_key(cls: type, known: dict[str, inspect.Parameter]) -> None:
    """With the same default. A new argument of the Trainer is a new key."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}
    assert {name: argument.default for name, argument in known.items()} == {
        name: default for name, default in defaults.items() if name not in OBJECTS and not name.endswith("dataloader")
    }


def test_the_keys_of_a_loader_are_arguments_of_dataloader() -> None:
    """With the same meaning if left out."""
    known = inspect.signature(DataLoader).parameters
    for name, argument in arguments_of(data_loader).items():
        assert name in known
        assert name in ("batch_size", "shuffle") or argument.default == known[name].default


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """The schema as printed, checked to be of draft 7."""
    jsonschema = pytest.importorskip("jsonschema", reason="a dependency of moto, the S3 service of other tests")
    made = json.loads(json.dumps(json_schema(), default=str))
    jsonschema.Draft7Validator.check_schema(made)
    return made


def errors(schema: dict[str, Any], values: Any) -> list[str]:
    from jsonschema import Draft7Validator

    return [error.json_path for error in Draft7Validator(schema).iter_errors(values)]


def test_arguments_have_types_defaults_and_meanings(schema: dict[str, Any]) -> None:
    """From signatures and docstrings; the ``save_`` arguments from CheckpointSaver. Functions are left out."""
    trainer = schema["properties"]
    assert trainer["seed"]["description"]
    assert trainer["save_overwrite"]["description"]
    assert trainer["save_interval"]["default"] == "1ep"
    classes = trainer["callbacks"]["anyOf"][0]["anyOf"][0]["properties"]
    assert "patience" in classes["early_stopper"]["anyOf"][0]["properties"]
    loggers = trainer["loggers"]["anyOf"][0]["anyOf"][0]["properties"]
    slack = loggers["slack"]["anyOf"][0]["properties"]
    assert "channel_id" in slack
    assert "formatter_func" not in slack


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_the_schema_accepts_the_examples(file: Path, schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, and merged and resolved."""
    monkeypatch.setenv("BUCKET", "bucket")
    assert errors(schema, yaml.safe_load(file.read_text())) == []
    assert errors(schema, load_config(file).values) == []


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("max_durration: 5ep", ["$"]),
        ("seed: x", ["$.seed"]),
        ("optimizer: {name: decoupled_adam}", ["$.optimizer"]),
        ("train_loader: {dataset: {name: 'a:b'}, batchsize: 3}", ["$.train_loader"]),
        ("callbacks: {speed_monitr: }", ["$.callbacks"]),
        ("callbacks: [speed_monitr]", ["$.callbacks"]),
        ("callbacks: {speed_monitor: {window: 3}}", ["$.callbacks"]),
        ("defaults: base", ["$.defaults"]),
        ("{defaults: [base, {model: gpt}, _self_], seed: '???', callbacks: {'my:Own': {x: 1}}}", []),
        ("{seed: '${variables.seed}', train_loader: '${variables.loader}', callbacks: [lr_monitor, {my:Own: }]}", []),
        ("{train_loader: {name: 'my:loader', shards: 3}, optimizer: {name: 'torch.optim:SGD', lr: 1}}", []),
    ],
)  # fmt: skip
def test_the_schema_finds_mistakes(text: str, places: list[str], schema: dict[str, Any]) -> None:
    """Unknown keys, names and arguments, and wrong types; not parts of a run, your own names and interpolation."""
    assert errors(schema, yaml.safe_load(text)) == places
