"""Export of a checkpoint in the format of ``save_pretrained`` of transformers, without transformers.

No code of a checkpoint is run: the config and the tokenizer's files are data, and their names cannot leave the folder.
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
"""Names that a tokenizer's file must not have."""
_TOKENIZER_FILE = re.compile(
    r"(additional_chat_templates/)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
    r"\.(json|txt|model|jinja|bpe|codes|vocab|spm|tiktoken)"
)
_PREFIX = "model."
"""Start of the names of weights in a ``HuggingFaceModel``, before the name that transformers gives."""


def is_huggingface_folder(path: Path) -> bool:
    """Return true for a folder of ``save_pretrained`` with a model or adapters."""
    has_weights = any(any(path.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))
    is_model = (path / _ADAPTER_CONFIG).is_file() or ((path / _CONFIG).is_file() and has_weights)
    return is_model and not (path / "trainer_state.json").is_file()  # a checkpoint of a Trainer, with an optimizer


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
            f"{source!r} holds no config of transformers: it was not saved by a HuggingFaceModel. Load it into the "
            "model that it is of, and save_pretrained that."
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
    """Write a folder that ``from_pretrained`` of transformers loads; of a model with adapters, one that PEFT loads.

    The config is written last, and removed first where a folder is replaced: without a config no program loads it.

    Args:
        contents: of a checkpoint, with the model and the integrations.
        folder: to write.
        source: the checkpoint, for messages.
        dtype: of floating-point weights; ``None``: unchanged.
        largest_file_bytes: of weights in a file; a larger model has several files, and an index.
        overwrite: replace the files of an earlier export; other files stay.

    Raises:
        CheckpointExistsError: the folder is not empty, and ``overwrite`` is false.
        IncompatibleCheckpointError: the checkpoint was not saved by a ``HuggingFaceModel``, or has no model.
        UntrustedCheckpointError: a file of the tokenizer has a name of another kind of file.
        ConfigError: ``largest_file_bytes`` or ``dtype`` is wrong, or huggingface_hub is not installed.
    """
    with importing_sdk("huggingface_hub, which writes the weights,", extra="huggingface", packages=()):
        from huggingface_hub import save_torch_state_dict
    if largest_file_bytes < 1:
        raise ConfigError(f"largest file of {largest_file_bytes} bytes: expected a positive number of bytes.")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype}: expected a type of floating-point numbers, such as bfloat16.")
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
        weights = {name: one.to(dtype) if one.is_floating_point() else one for name, one in weights.items()}
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
    """Write the tokenizer's files into ``folder``. Returns false if there are none.

    Raises:
        UntrustedCheckpointError: a file has a name of another kind of file.
    """
    files = _tokenizer_files(kept.get("tokenizer"), source)
    for name, data in files.items():
        _put(folder / name, data)
    return bool(files)


def _content(record: Any, part: str) -> Any:
    entry = cast("StateDict", record).get(part) if isinstance(record, Mapping) else None
    return cast("StateDict", entry).get("content") if isinstance(entry, Mapping) else None


def _model_config(model: StateDict, weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> StateDict:
    """Return the checkpoint's config, with the model's class and the number type of the files."""
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
        raise CorruptCheckpointError(f"{source!r}: a config in it is no JSON: {e}") from e


def _tokenizer_files(record: Any, source: str) -> dict[str, bytes]:
    """Return the tokenizer's files by name. All names are checked before any file is written."""
    files: dict[str, bytes] = {}
    for key, entry in (cast("StateDict", record) if isinstance(record, Mapping) else {}).items():
        if not isinstance(entry, Mapping) or not {"file_extension", "content"} <= set(cast("StateDict", entry)):
            raise CorruptCheckpointError(f"{source!r}: what it has of the tokenizer's file {key!r} is no file.")
        extension, content = str(entry["file_extension"]), cast("Any", entry["content"])
        name = str(key) if str(key).endswith(extension) else f"{key}{extension}"  # older Composers leave it out
        if name.endswith(".py"):
            log.warning("%s: the tokenizer's program %s is not written: nothing from a checkpoint is run", source, name)
            continue
        if not _TOKENIZER_FILE.fullmatch(name) or _OURS.fullmatch(name):
            raise UntrustedCheckpointError(
                f"{source!r}: a file of its tokenizer has the name {name!r}, which no tokenizer gives: nothing was "
                "written. load_ignore_keys=['state/integrations'] loads its weights into a model of your own."
            )
        if extension == ".txt" and isinstance(content, list):
            content = "\n".join(map(str, cast("list[Any]", content)))
        if isinstance(content, str):
            content = content.encode()
        files[name] = content if isinstance(content, bytes) else _json(content, source)
    return files


def _adapter_weights(weights: Mapping[str, Tensor], adapter: StateDict, source: str) -> dict[str, Tensor]:
    """Return the weights of the adapter, by the names in files of PEFT."""
    names: Any = adapter.get("files")
    if not isinstance(names, Mapping):  # Composer's: the weights with the name of the adapter in theirs
        names = {name: name.replace(".default", "", 1) for name in weights if ".default" in name}
    wanted = cast("Mapping[str, str]", names)
    if missing := sorted(set(wanted) - set(weights)):
        raise IncompatibleCheckpointError(
            f"{source!r}: of its adapters there are no weights: {', '.join(missing[:8])}."
        )
    if len(weights) > len(wanted):
        log.info("%s: the weights of the base model are not written: a folder of PEFT has adapters alone", source)
    return {str(wanted[name]): weights[name] for name in wanted}


def _each_once(weights: Mapping[str, Tensor], tied: Any) -> dict[str, Tensor]:
    """Leave out second names of tied weights: transformers ties the weights when loading."""
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
    if Catalog(folder.parent).manifest_of(folder.name) is not None:  # the record would not describe the new files
        raise CheckpointExistsError(f"{str(folder)!r} is a checkpoint, which this would damage. Give another folder.")
    if not overwrite:
        raise CheckpointExistsError(f"{str(folder)!r} is not empty. Give another folder, or overwrite it.")


def _put(path: Path, data: bytes) -> None:
    make_folder(path.parent)
    with atomic_write(path) as file:
        file.write(data)
