"""The schema holds what the Trainer takes, no more and no less."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import pytest
from torch.utils.data import DataLoader

from composerlite import Evaluator, Trainer
from composerlite.config.schema import EvaluatorArguments, LoaderArguments, TrainerArguments

OBJECTS = {
    "model",
    "train_dataloader",
    "eval_dataloader",
    "optimizers",
    "schedulers",
    "algorithms",
    "algorithm_passes",  # functions: from Python only
    "callbacks",
    "loggers",
    "profiler",  # an object, with a schedule that is a function
    "load_object_store",  # an object: a URI as load_path says the same
}


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name != "self"}


def test_every_plain_argument_of_the_trainer_is_a_key_with_the_same_default() -> None:
    """An argument that is added to the Trainer can be written in YAML, and means the same there when left out."""
    of_trainer = {name: default for name, default in defaults_of(Trainer).items() if name not in OBJECTS}
    assert {field.name: field.default for field in fields(TrainerArguments)} == of_trainer


@pytest.mark.parametrize(("schema", "target"), [(LoaderArguments, DataLoader), (EvaluatorArguments, Evaluator)])
def test_the_keys_of_loaders_are_arguments_of_their_classes(schema: type[Any], target: Callable[..., Any]) -> None:
    """Every key reaches the class under its own name, and means the same when left out."""
    known = defaults_of(target)
    for field in fields(schema):
        assert field.name in known
        if field.default is not MISSING and field.name not in ("shuffle", "label"):
            assert field.default == known[field.name]
