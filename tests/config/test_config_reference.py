"""What a run's YAML may say, as a page and as a schema: both are made of the code, and say what the code does."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from composerlite.config import json_schema, load_config, reference_page
from composerlite.config.reference import evaluator_settings, families, loader_settings, trainer_settings
from composerlite.config.registry import Family, registered
from composerlite.config.schema import OF_THE_FILE, PARTS, EvaluatorArguments, LoaderArguments, TrainerArguments

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration-reference.md"
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """The schema, which is one of draft 7."""
    jsonschema = pytest.importorskip("jsonschema", reason="moto, the S3 service of other tests, brings jsonschema")
    made = json_schema()
    jsonschema.Draft7Validator.check_schema(made)
    return made


def complaints(schema: dict[str, Any], values: Any) -> list[str]:
    """What an editor would underline."""
    from jsonschema import Draft7Validator

    return [error.json_path for error in Draft7Validator(schema).iter_errors(values)]


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_page_is_that_of_the_code() -> None:
    """docs/configuration-reference.md is what ``composerlite config schema`` prints."""
    assert PAGE.read_text() == reference_page(), "the page is out of date: run `make reference` and commit what changes"


def test_every_key_and_every_name_is_on_the_page() -> None:
    """Those of the top level, of loaders, and each class that has a name."""
    text = reference_page()
    schemas = (TrainerArguments, LoaderArguments, EvaluatorArguments)
    keys = [*PARTS, *OF_THE_FILE, *(field.name for schema in schemas for field in fields(schema))]
    names = [name for family in get_args(Family) for name in registered(family)]
    assert [key for key in keys if f"| `{key}` |" not in text] == []
    assert [name for name in names if f"### `{name}`" not in text] == []


def test_every_key_has_a_meaning_and_a_type() -> None:
    """The meaning is that of the docstring, whatever way the docstring tells it."""
    settings = {setting.name: setting for setting in (*trainer_settings(), *loader_settings(), *evaluator_settings())}
    assert [name for name, setting in settings.items() if not setting.meaning or not setting.words] == []
    assert settings["seed"].meaning == "of all random generators; a random one by default."
    assert settings["deterministic_mode"].meaning == "use deterministic kernels only."
    assert (
        settings["save_async"].meaning == "write in the background; else each save keeps training until it is durable."
    )
    assert "`save_best_metric`" in settings["save_best_k"].meaning
    assert settings["save_interval"].words == "a whole number or text"


def test_arguments_of_classes_are_listed_with_types_and_defaults() -> None:
    """As far as YAML can give them: functions and the model's parameters are not among them."""
    known = {named.name: {s.name: s for s in named.settings} for classes in families().values() for named in classes}
    assert list(known["decoupled_adamw"]) == ["lr", "betas", "eps", "weight_decay", "amsgrad"]
    assert known["decoupled_adamw"]["betas"].default == [0.9, 0.95]
    assert known["early_stopper"]["patience"].words == "text, a whole number or a number"
    assert "comp" not in known["early_stopper"], "a function"
    assert "clock" not in known["goodput_monitor"], "a function"


# ── the schema ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_editors_accept_what_composerlite_accepts(
    file: Path, schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example runs, as they are written and as they are when all is merged and filled in."""
    monkeypatch.setenv("BUCKET", "bucket")
    assert complaints(schema, yaml.safe_load(file.read_text())) == []
    assert complaints(schema, load_config(file).values) == []


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"max_durration": "5ep"}, "$"),
        ({"seed": "x"}, "$.seed"),
        ({"optimizer": {"name": "decoupled_adam"}}, "$.optimizer"),
        ({"optimizer": {"name": "decoupled_adamw", "learning_rate": 1.0}}, "$.optimizer"),
        ({"train_loader": {"dataset": {"name": "a:b"}, "batchsize": 3}}, "$.train_loader"),
        ({"callbacks": {"speed_monitr": None}}, "$.callbacks"),
        ({"callbacks": ["speed_monitr"]}, "$.callbacks"),
        ({"callbacks": {"speed_monitor": {"window": 3}}}, "$.callbacks"),
        ({"defaults": "base"}, "$.defaults"),
    ],
)
def test_editors_underline_what_composerlite_refuses(values: Any, place: str, schema: dict[str, Any]) -> None:
    """Unknown keys, names and arguments, and wrong types."""
    assert place in complaints(schema, values)


def test_editors_accept_parts_of_runs_and_interpolation(schema: dict[str, Any]) -> None:
    """A file may add one value to those that it starts from, and any value may be filled in later."""
    texts = (
        "{defaults: [base, {model: gpt}, _self_], optimizer: {lr: 3}, seed: '???', callbacks: {'my:Own': {x: 1}}}",
        "{seed: '${variables.seed}', train_loader: '${variables.loader}', callbacks: [lr_monitor, {my:Own: }]}",
        "{train_loader: {name: 'my:loader', shards: 3}, optimizer: {name: 'torch.optim:SGD', lr: 1}, variables: {}}",
    )
    for text in texts:
        assert complaints(schema, yaml.safe_load(text)) == []
