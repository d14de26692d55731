"""Record of a model of Hugging Face in a checkpoint, beside its weights: its config and the files of its tokenizer.

The shape is Composer's: ``{'model': {'config': {'file_extension', 'content', 'class'}}, 'tokenizer': {name:
{'file_extension', 'content'}}}``. Added under ``'model'``: ``'generation_config'``, and ``'tied_weights'``, what a
weight is a second name of.
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
"""A larger file of JSON is kept as text: a million small objects would hold up every save."""

_OF_NO_WEIGHT = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}


def library(name: str, *, wanted_by: str) -> Any:
    """The package ``transformers`` or ``peft``, which are optional and imported when they are used.

    Raises:
        ConfigError: it is not installed. ``wanted_by`` is named in the message.
    """
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise ConfigError(
            f"{wanted_by}: {name} cannot be imported: {e}. pip install 'composerlite[huggingface]'"
        ) from e


def as_json(config: Any) -> StateDict:
    """A config of transformers, as JSON has it."""
    return json.loads(config.to_json_string())


def config_record(config: Any, model_class: str, generation: Any, tied: dict[str, str]) -> StateDict:
    """Record of the model.

    Args:
        config: of the model.
        model_class: its full name.
        generation: its settings of generation, or ``None``.
        tied: names of weights that are another's, by their names.
    """
    record: StateDict = {"config": {"file_extension": ".json", "content": as_json(config), "class": model_class}}
    if generation is not None:
        record["generation_config"] = {"file_extension": ".json", "content": as_json(generation)}
    return {**record, "tied_weights": tied} if tied else record


def tokenizer_record(tokenizer: Any) -> StateDict:
    """Record of the tokenizer: the files that it writes, by name."""
    with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {
            path.relative_to(folder).as_posix(): {"file_extension": path.suffix, "content": _content(path)}
            for path in files
        }


def _content(path: Path) -> Any:
    """Content as Composer has it: JSON parsed, lines of ``.txt``, else text; bytes of what is no text."""
    data = path.read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data
    if path.suffix == ".json":
        return json.loads(text) if len(data) <= LARGEST_PARSED_BYTES else text
    return text.split("\n") if path.suffix == ".txt" else text


def differences(saved: Any, own: StateDict) -> list[str]:
    """Differences between the ``saved`` config and one's ``own`` that matter to the weights."""
    if not isinstance(saved, dict):
        return []
    then = cast("StateDict", saved)
    keys = [key for key in {**then, **own} if key not in _OF_NO_WEIGHT and then.get(key) != own.get(key)]
    return [f"{key}: {then.get(key)!r} in the checkpoint, {own.get(key)!r} now" for key in keys]
