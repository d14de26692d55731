"""Record of a Hugging Face model in a checkpoint: the config and the tokenizer files.

The format is Composer's: ``{'model': {'config': {'file_extension', 'content', 'class'}}, 'tokenizer': {name:
{'file_extension', 'content'}}}``. Additions under ``'model'``: ``'generation_config'``, and ``'tied_weights'``: the
first name of a weight by its second name.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any, cast

from composerlite.errors import ConfigError
from composerlite.types import StateDict

LARGEST_PARSED_BYTES = 1 << 18
"""Larger JSON files are stored as text: a million small objects would slow down every save."""

_OF_NO_WEIGHT = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}


def library(name: str, *, wanted_by: str) -> Any:
    """Import the optional package ``transformers`` or ``peft``.

    Args:
        name: name of the package.
        wanted_by: feature that needs the package, for the error.

    Returns:
        The package.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise ConfigError(f"{wanted_by}: cannot import {name}: {e}. pip install 'composerlite[huggingface]'") from e


def as_json(config: Any) -> StateDict:
    """Return a config of transformers as plain values."""
    return json.loads(config.to_json_string())


def config_record(config: Any, model_class: str, generation: Any, tied: dict[str, str]) -> StateDict:
    """Return the record of a model.

    Args:
        config: config of the model.
        model_class: full name of the class.
        generation: generation config, or ``None``.
        tied: first name of each tied weight by its second name.
    """
    record: StateDict = {"config": {"file_extension": ".json", "content": as_json(config), "class": model_class}}
    if generation is not None:
        record["generation_config"] = {"file_extension": ".json", "content": as_json(generation)}
    return {**record, "tied_weights": tied} if tied else record


def tokenizer_record(tokenizer: Any) -> StateDict:
    """Return the record of a tokenizer: its files by name."""
    with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {
            path.relative_to(folder).as_posix(): {"file_extension": path.suffix, "content": _content(path)}
            for path in files
        }


def _content(path: Path) -> Any:
    """Read a file in the form of Composer: parsed JSON, lines of ``.txt``, other text, or bytes."""
    data = path.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data
    if path.suffix == ".json":
        return json.loads(text) if len(data) <= LARGEST_PARSED_BYTES else text
    return text.split("\n") if path.suffix == ".txt" else text


def differences(saved: Any, own: StateDict) -> list[str]:
    """List differences between the ``saved`` config and the current config that affect weights."""
    if not isinstance(saved, dict):
        return []
    then = cast("StateDict", saved)
    keys = [key for key in {**then, **own} if key not in _OF_NO_WEIGHT and then.get(key) != own.get(key)]
    return [f"{key}: {then.get(key)!r} in the checkpoint, {own.get(key)!r} now" for key in keys]
