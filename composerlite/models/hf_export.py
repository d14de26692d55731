"""Conversion between checkpoints and Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from composerlite.checkpoint.tools.reading import model_and_integrations
from composerlite.core import clean_name
from composerlite.errors import ConfigError, IncompatibleCheckpointError
from composerlite.models.hf_folder import write_huggingface
from composerlite.models.hf_loading import kept_at, model_class_of
from composerlite.models.hf_record import library
from composerlite.models.huggingface import HuggingFaceModel
from composerlite.types import StateDict

_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


def write_huggingface_pretrained_from_composer_checkpoint(
    checkpoint_path: str | Path,
    output_folder: str | Path,
    local_checkpoint_save_location: str | Path | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    largest_file_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> None:
    """Write the model of a checkpoint of a ``HuggingFaceModel`` in the format of ``save_pretrained``.

    For a model with adapters the folder has the adapters in the format of PEFT. Works without transformers.

    Args:
        checkpoint_path: path or URI of a checkpoint.
        output_folder: local folder, empty or new.
        local_checkpoint_save_location: path for a local copy of a checkpoint in a single file.
        dtype: type of the weights, such as ``'bfloat16'``; by default unchanged.
        largest_file_bytes: largest size of a file; a larger model gets several files and an index.
        overwrite: replace the files in the folder.

    Raises:
        CheckpointExistsError: the folder is not empty, and ``overwrite`` is false.
        IncompatibleCheckpointError: the checkpoint was not saved by a ``HuggingFaceModel``.
        UntrustedCheckpointError: the checkpoint has unknown types, or names of files outside of the folder.
        CheckpointError: the checkpoint does not exist or is damaged.
        ConfigError: ``dtype`` is not a type.
    """
    source = kept_at(str(checkpoint_path), local_checkpoint_save_location)
    write_huggingface(
        model_and_integrations(source),
        Path(output_folder),
        source=source,
        dtype=dtype_of(dtype),
        largest_file_bytes=largest_file_bytes,
        overwrite=overwrite,
    )


def huggingface_contents(folder: str | Path, *, base_model: Any = None) -> StateDict:
    """Return checkpoint contents for a Hugging Face folder: weights, config and tokenizer.

    Args:
        folder: folder of ``save_pretrained``, with a model or adapters.
        base_model: base model of the adapters. By default the base model in their config.

    Returns:
        Contents of a checkpoint.

    Raises:
        ConfigError: transformers is not installed, or has no class for the model.
        IncompatibleCheckpointError: transformers cannot load the folder.
    """
    path = Path(folder)
    transformers = library("transformers", wanted_by=f"{path} is a folder of Hugging Face")
    try:
        if (path / "adapter_config.json").is_file():
            model = _with_adapters(transformers, path, base_model)
        else:
            model = _class_of(transformers, path).from_pretrained(path, dtype="auto", trust_remote_code=False)
        has_tokenizer = any((path / name).is_file() for name in _TOKENIZER_FILES)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False) if has_tokenizer else None
    except (OSError, ValueError, KeyError, RuntimeError) as e:
        if isinstance(e, ConfigError | FileNotFoundError):
            raise
        raise IncompatibleCheckpointError(f"{str(path)!r}: transformers cannot load the folder: {e}") from e
    ours = HuggingFaceModel(model, tokenizer)
    weights = {clean_name(name): tensor for name, tensor in ours.state_dict().items()}
    return {"state": {"model": weights, "integrations": ours.integrations(), "metadata": {}}}


def dtype_of(name: torch.dtype | str | None) -> torch.dtype | None:
    """Return the torch type with the name ``name``, such as ``'bfloat16'``.

    Raises:
        ConfigError: there is no such type.
    """
    found = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else name
    if found is None and name is None:
        return None
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype={name!r}: expected a type of torch, such as 'bfloat16'.")
    return found


def _class_of(transformers: Any, path: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    if (found := model_class_of(transformers, map(str, config.architectures or ()))) is None:
        raise ConfigError(
            f"{str(path)!r}: 'architectures' in the config is {config.architectures!r}, not a class of transformers. "
            "Load the model with its own class, and save a checkpoint of HuggingFaceModel(model)."
        )
    return found


def _with_adapters(transformers: Any, path: Path, base_model: Any) -> Any:
    peft = library("peft", wanted_by=f"{path} is a folder of adapters")
    if base_model is None:
        name = peft.PeftConfig.from_pretrained(path).base_model_name_or_path
        if not name or not Path(name).is_dir():
            raise ConfigError(
                f"{str(path)!r} has adapters, and their base model {name!r} is not a local folder. Set the path as "
                "base_model_name_or_path in adapter_config.json."
            )
        base_model = _class_of(transformers, Path(name)).from_pretrained(name, dtype="auto", trust_remote_code=False)
    return peft.PeftModel.from_pretrained(base_model, path, is_trainable=True)
