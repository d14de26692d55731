"""Export of a checkpoint in the format of ``save_pretrained`` of transformers, without transformers.

No code from a checkpoint is run. The config and the tokenizer files are data, and their names stay in the folder.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from composerlite.checkpoint.foreign.keys import tensors_of
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.save.safetensors_writer import LARGEST_FILE_BYTES
from composerlite.checkpoint.tools.reading import weights_of
from composerlite.errors import (
    CheckpointExistsError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UntrustedCheckpointError,
)
from composerlite.storage import atomic_write, make_folder
from composerlite.storage.sdk import importing_sdk
from composerlite.types import StateDict

__all__ = ["is_huggingface_folder", "kept_by_huggingface", "write_huggingface", "write_tokenizer"]

log = logging.getLogger(__name__)

_CONFIG, _ADAPTER_CONFIG, _GENERATION_CONFIG = "config.json", "adapter_config.json", "generation_config.json"
_OURS = re.compile(r"(config|adapter_config|generation_config)\.json|(model|adapter_model)[-.].*", re.IGNORECASE)
"""Forbidden names of tokenizer files."""
_TOKENIZER_FILE = re.compile(
    r"(additional_chat_templates/)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
    r"\.(json|txt|model|jinja|bpe|codes|vocab|spm|tiktoken)"
)
_PREFIX = "model."
"""Prefix of the names of weights in a ``HuggingFaceModel``, before the name in transformers."""


def is_huggingface_folder(path: Path) -> bool:
    """Return true for a folder of ``save_pretrained`` with a model or adapters."""
    has_weights = any(any(path.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))
    is_model = (path / _ADAPTER_CONFIG).is_file() or ((path / _CONFIG).is_file() and has_weights)
    return is_model and not (path / "trainer_state.json").is_file()  # a checkpoint of transformers' Trainer


def kept_by_huggingface(contents: Any, source: str) -> StateDict:
    """Return a ``HuggingFaceModel``'s entries in a checkpoint: ``'model'`` with a ``'config'``, and ``'tokenizer'``.

    Raises:
        IncompatibleCheckpointError: the checkpoint was not saved by a ``HuggingFaceModel``.
    """
    found: Any = contents
    for key in ("state", "integrations", "huggingface"):
        found = cast("StateDict", found).get(key) if isinstance(found, Mapping) else None
    model: Any = cast("StateDict", found).get("model") if isinstance(found, Mapping) else None
    has_adapters = isinstance(model, Mapping) and "peft_config" in model
    configs = [_content(model, "config"), *([_content(model, "peft_config")] if has_adapters else [])]
    if not all(isinstance(config, dict) for config in configs):
        raise IncompatibleCheckpointError(
            f"{source!r} has no config of transformers: the checkpoint was not saved by a HuggingFaceModel. Load the "
            "checkpoint into its model, and call save_pretrained of that model."
        )
    return cast("StateDict", found)


def write_huggingface(
    contents: Any,
    folder: Path,
    *,
    source: str,
    dtype: torch.dtype | None = None,
    largest_file_bytes: int = LARGEST_FILE_BYTES,
    overwrite: bool = False,
) -> None:
    """Write a folder for ``from_pretrained`` of transformers; for a model with adapters, a folder for PEFT.

    The config is written last, and removed first when a folder is replaced: no program loads a folder without a config.

    Args:
        contents: contents of a checkpoint, with the model and the integrations.
        folder: folder to write.
        source: path or URI of the checkpoint, for messages.
        dtype: type of the floating-point weights; ``None`` to keep the types.
        largest_file_bytes: largest size of a file; a larger model gets several files and an index.
        overwrite: replace the files of an earlier export and keep other files.

    Raises:
        CheckpointExistsError: the folder is not empty, and ``overwrite`` is false.
        IncompatibleCheckpointError: the checkpoint was not saved by a ``HuggingFaceModel``, or has no model.
        UntrustedCheckpointError: a tokenizer file has a forbidden name.
        ConfigError: ``largest_file_bytes`` or ``dtype`` is invalid, or huggingface_hub is not installed.
    """
    with importing_sdk("huggingface_hub, which writes the weights,", extra="huggingface", packages=()):
        from huggingface_hub import save_torch_state_dict
    if largest_file_bytes < 1:
        raise ConfigError(f"largest file of {largest_file_bytes} bytes: expected a positive number of bytes.")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype}: expected a floating-point type, such as bfloat16.")
    kept = kept_by_huggingface(contents, source)
    model = cast("StateDict", kept["model"])
    tokenizer = _tokenizer_files(kept.get("tokenizer"), source)
    saved = tensors_of(weights_of(contents, source), str(folder))
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in saved.items() if name.startswith(_PREFIX)}
    generation = _content(model, "generation_config")
    configs: StateDict = {_GENERATION_CONFIG: generation} if isinstance(generation, dict) else {}
    if isinstance(model.get("peft_config"), dict):
        weights = _adapter_weights(weights, cast("StateDict", model["peft_config"]), source)
        pattern = "adapter_model{suffix}.safetensors"
        largest_file_bytes = 1 << 62  # PEFT loads one file
        configs = {_ADAPTER_CONFIG: {**_content(model, "peft_config"), "inference_mode": True}}
    else:
        weights = _each_once(weights, model.get("tied_weights"))
        pattern = "model{suffix}.safetensors"
        configs[_CONFIG] = _model_config(model, weights, dtype)
    if dtype is not None:
        weights = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
    texts = {name: _json(config, source) for name, config in configs.items()}
    _check_empty(folder, overwrite=overwrite)
    make_folder(folder)
    for name in (_CONFIG, _ADAPTER_CONFIG, _GENERATION_CONFIG):
        (folder / name).unlink(missing_ok=True)
    save_torch_state_dict(weights, folder, filename_pattern=pattern, max_shard_size=largest_file_bytes)
    for path in folder.glob(pattern.format(suffix="*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for name, data in {**tokenizer, **texts}.items():
        _put(folder / name, data)


def write_tokenizer(kept: StateDict, folder: Path, *, source: str) -> bool:
    """Write the tokenizer files into ``folder``. Return false if the checkpoint has none.

    Raises:
        UntrustedCheckpointError: a tokenizer file has a forbidden name.
    """
    files = _tokenizer_files(kept.get("tokenizer"), source)
    for name, data in files.items():
        _put(folder / name, data)
    return bool(files)


def _content(record: Any, part: str) -> Any:
    entry = cast("StateDict", record).get(part) if isinstance(record, Mapping) else None
    return cast("StateDict", entry).get("content") if isinstance(entry, Mapping) else None


def _model_config(model: StateDict, weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> StateDict:
    """Return the config of the checkpoint, with the class of the model and the type of the weights."""
    config = {key: value for key, value in _content(model, "config").items() if key != "torch_dtype"}
    package, _, name = str(model["config"].get("class", "")).rpartition(".")
    if not config.get("architectures") and package.startswith("transformers."):
        config["architectures"] = [name]
    first = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), None)
    if (used := dtype or first) is not None:
        config["dtype"] = str(used).removeprefix("torch.")
    return config


def _json(content: Any, source: str) -> bytes:
    try:
        return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    except (TypeError, ValueError) as e:
        raise CorruptCheckpointError(f"{source!r}: a config is not JSON: {e}") from e


def _tokenizer_files(record: Any, source: str) -> dict[str, bytes]:
    """Return the tokenizer's files by name. All names are checked before any file is written."""
    files: dict[str, bytes] = {}
    for key, entry in (cast("StateDict", record) if isinstance(record, Mapping) else {}).items():
        if not isinstance(entry, Mapping) or not {"file_extension", "content"} <= set(cast("StateDict", entry)):
            raise CorruptCheckpointError(f"{source!r}: the entry of the tokenizer file {key!r} is not a file.")
        extension, content = str(entry["file_extension"]), cast("Any", entry["content"])
        name = str(key) if str(key).endswith(extension) else f"{key}{extension}"  # older Composers omit the extension
        if name.endswith(".py"):
            log.warning("%s: skipped the tokenizer program %s: no code from a checkpoint is run", source, name)
            continue
        if not _TOKENIZER_FILE.fullmatch(name) or _OURS.fullmatch(name):
            raise UntrustedCheckpointError(
                f"{source!r}: the tokenizer file {name!r} has a forbidden name. Nothing was written. Use "
                "load_ignore_keys=['state/integrations'] to load the weights into a model of your own."
            )
        if extension == ".txt" and isinstance(content, list):
            content = "\n".join(map(str, cast("list[Any]", content)))
        if isinstance(content, str):
            content = content.encode()
        files[name] = content if isinstance(content, bytes) else _json(content, source)
    return files


def _adapter_weights(weights: Mapping[str, Tensor], adapter: StateDict, source: str) -> dict[str, Tensor]:
    """Return the weights of the adapter, by their names in PEFT files."""
    names: Any = adapter.get("files")
    if not isinstance(names, Mapping):  # Composer: names of weights contain the name of the adapter
        names = {name: name.replace(".default", "", 1) for name in weights if ".default" in name}
    wanted = cast("Mapping[str, str]", names)
    if missing := sorted(set(wanted) - set(weights)):
        raise IncompatibleCheckpointError(f"{source!r}: weights of adapters are missing: {', '.join(missing[:8])}.")
    if len(weights) > len(wanted):
        log.info("%s: skipped the weights of the base model: a PEFT folder has adapters only", source)
    return {str(wanted[name]): weights[name] for name in wanted}


def _each_once(weights: Mapping[str, Tensor], tied: Any) -> dict[str, Tensor]:
    """Drop second names of tied weights; transformers ties the weights again when loading."""
    other_of = {
        str(name).removeprefix(_PREFIX): str(other).removeprefix(_PREFIX)
        for name, other in (cast("StateDict", tied).items() if isinstance(tied, Mapping) else ())
    }
    kept: dict[str, Tensor] = {}
    places: set[tuple[object, ...]] = set()
    for name, tensor in weights.items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        other = weights.get(other_of.get(name, ""))
        if (tensor.numel() and place in places) or (other is not None and torch.equal(tensor, other)):
            continue
        places.add(place)
        kept[name] = tensor
    return kept


def _check_empty(folder: Path, *, overwrite: bool) -> None:
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if Catalog(folder.parent).manifest_of(folder.name) is not None:  # the record would not match the new files
        raise CheckpointExistsError(f"{str(folder)!r} is a checkpoint. Give another folder.")
    if not overwrite:
        raise CheckpointExistsError(f"{str(folder)!r} is not empty. Give another folder, or overwrite it.")


def _put(path: Path, data: bytes) -> None:
    make_folder(path.parent)
    with atomic_write(path) as file:
        file.write(data)
