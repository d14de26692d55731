"""A folder as ``save_pretrained`` of transformers writes it, from what a checkpoint holds. Needs no transformers.

Nothing in a checkpoint is run or followed: the config and the tokenizer's files are data that are written down, under
names that cannot leave the folder.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from composerlite.checkpoint.foreign.keys import Rename, tensors_of
from composerlite.checkpoint.foreign.outgoing import accelerate_files, taken_of, transformers_files
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.save.plain_file import write_safetensors, write_torch
from composerlite.checkpoint.save.safetensors_writer import LARGEST_FILE_BYTES
from composerlite.checkpoint.tools.whole import weights_of
from composerlite.errors import (
    CheckpointExistsError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UntrustedCheckpointError,
)
from composerlite.storage import atomic_write, make_folder
from composerlite.types import StateDict

__all__ = [
    "is_huggingface_folder",
    "kept_by_huggingface",
    "write_accelerate_folder",
    "write_huggingface",
    "write_tokenizer",
    "write_trainer_folder",
]

log = logging.getLogger(__name__)

_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"
TRAINER_STATE = "trainer_state.json"
_TRAINER_FILES = ("optimizer.pt", "scheduler.pt")
_ACCELERATE_FILES = ("optimizer*.bin", "scheduler*.bin", "random_states_*.pkl")
_GENERATION_CONFIG = "generation_config.json"
_MODEL, _ADAPTER = "model", "adapter_model"
_OURS = re.compile(r"(config|adapter_config|generation_config)\.json|(model|adapter_model)[-.].*", re.IGNORECASE)
_TOKENIZER_FILE = re.compile(
    r"(additional_chat_templates/)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
    r"\.(json|txt|model|jinja|bpe|codes|vocab|spm|tiktoken)"
)
_PREFIX = "model."


def is_huggingface_folder(path: Path) -> bool:
    """Return true if ``path`` is a folder with a model or adapters as ``save_pretrained`` writes them."""
    has_weights = any(any(path.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))
    is_model = (path / _ADAPTER_CONFIG).is_file() or ((path / _CONFIG).is_file() and has_weights)
    return is_model and not (path / TRAINER_STATE).is_file()  # that is a checkpoint, with an optimizer


def has_config(contents: Any) -> bool:
    """Return true for contents that a ``HuggingFaceModel`` was saved with."""
    try:
        kept_by_huggingface(contents, "")
    except IncompatibleCheckpointError:
        return False
    return True


def kept_by_huggingface(contents: Any, source: str) -> StateDict:
    """Return a ``HuggingFaceModel``'s entries in a checkpoint: ``'model'`` with a ``'config'``, and ``'tokenizer'``.

    Raises:
        IncompatibleCheckpointError: it was not saved by one.
    """
    found: Any = contents
    for key in ("state", "integrations", "huggingface"):
        found = cast("StateDict", found).get(key) if isinstance(found, Mapping) else None
    model: Any = cast("StateDict", found).get("model") if isinstance(found, Mapping) else None
    has_adapters = isinstance(model, Mapping) and "peft_config" in model
    if not isinstance(_content(model, "config"), dict) or (
        has_adapters and not isinstance(_content(model, "peft_config"), dict)
    ):
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
    """Make ``folder`` one that ``from_pretrained`` of transformers loads, or, of adapters, that of PEFT.

    The config is written last, and gone first where a folder is replaced: without it a folder is not loaded.

    Args:
        contents: of a checkpoint, with the model and the integrations.
        folder: to write.
        source: the checkpoint, for messages.
        dtype: of all weights that are floating-point numbers; by default as they are.
        largest_file_bytes: of weights in a file; a larger model has several, and an index.
        overwrite: replace what is written here; other files stay.

    Raises:
        CheckpointExistsError: the folder is not empty, and ``overwrite`` is false.
        IncompatibleCheckpointError: the checkpoint was not saved by a HuggingFaceModel, or has no model.
        UntrustedCheckpointError: a file of its tokenizer has a name that is none of one.
        ConfigError: the number of bytes or the type is none.
    """
    if largest_file_bytes < 1:
        raise ConfigError(f"largest file of {largest_file_bytes} bytes: expected a positive number of bytes.")
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype}: expected a type of floating-point numbers, such as bfloat16.")
    kept = kept_by_huggingface(contents, source)
    model = cast("StateDict", kept["model"])
    tokenizer = _files_of_tokenizer(kept.get("tokenizer"), source)
    weights = _without_prefix(tensors_of(weights_of(contents, source), str(folder)))
    peft = model.get("peft_config")
    if isinstance(peft, dict):
        adapter = cast("StateDict", peft)
        weights = _of_adapter(weights, adapter, source)
        stem, config_name = _ADAPTER, _ADAPTER_CONFIG
        config = {**cast("StateDict", _content(model, "peft_config")), "inference_mode": True}
    else:
        weights = _each_once(weights, model.get("tied_weights"))
        stem, config_name = _MODEL, _CONFIG
        config = _config(model, weights, dtype)
    _check_empty(folder, overwrite=overwrite)
    make_folder(folder)
    _clear(folder)
    files = list(_cut(weights, dtype, largest_file_bytes if stem == _MODEL else None))
    _write_weights(folder, stem, files, dtype)
    for name, data in tokenizer.items():
        _put(folder / name, data)
    generation = _content(model, "generation_config")
    if stem == _MODEL and isinstance(generation, dict):
        _put(folder / _GENERATION_CONFIG, _json(generation, source))
    _put(folder / config_name, _json(config, source))


def write_trainer_folder(
    contents: Any, folder: Path, *, source: str, rename: Rename | None = None, overwrite: bool = False
) -> None:
    """Make ``folder`` a ``checkpoint-N`` that the Trainer of transformers continues from.

    With the config and the tokenizer of a ``HuggingFaceModel``, whose weights have the names of that model. What tells
    how far training was is written last, and gone first where a folder is replaced.

    Args:
        contents: of a checkpoint of any system.
        folder: to write.
        source: the checkpoint, for messages.
        rename: of the weights, where they are of no ``HuggingFaceModel``.
        overwrite: replace what is written here; other files stay.

    Raises:
        CheckpointExistsError: the folder is not empty, and ``overwrite`` is false.
        IncompatibleCheckpointError: the checkpoint has no model.
        ConfigError: ``rename`` gives two weights one name or changes none, or the weights are of a
            ``HuggingFaceModel``, whose names its config needs.
        UntrustedCheckpointError: as :func:`write_huggingface`.
    """
    if rename not in (None, Rename()) and has_config(contents):
        raise ConfigError(
            f"--rename {rename.strip}={rename.add}: {source!r} is of a HuggingFaceModel, whose weights keep the "
            "names that transformers gives them. Leave --rename out."
        )
    taken = taken_of(contents, source, rename or Rename())
    files, state = transformers_files(taken, contents)
    _check_empty(folder, overwrite=overwrite)
    make_folder(folder)
    for path in (folder / TRAINER_STATE, *folder.glob("rng_state*.pth"), *(folder / name for name in _TRAINER_FILES)):
        path.unlink(missing_ok=True)
    if has_config(contents):
        write_huggingface(contents, folder, source=source, overwrite=True)
    else:
        _clear(folder)
        _write_weights(folder, _MODEL, list(_cut(tensors_of(taken.model, str(folder)), None, LARGEST_FILE_BYTES)), None)
    for name, saved in files.items():
        write_torch(folder / name, saved)
    _put(folder / TRAINER_STATE, _json(state, source))
    if taken.left:
        log.info("%s: not written for transformers: %s", source, ", ".join(map(str, taken.left)))


def write_accelerate_folder(
    contents: Any, folder: Path, *, source: str, rename: Rename | None = None, overwrite: bool = False
) -> None:
    """Make ``folder`` one that ``Accelerator.load_state`` loads. Arguments and errors as :func:`write_trainer_folder`.

    It has no place for how far training was: the log says it.
    """
    taken = taken_of(contents, source, rename or Rename())
    _check_empty(folder, overwrite=overwrite)
    make_folder(folder)
    for path in [path for pattern in _ACCELERATE_FILES for path in folder.glob(pattern)]:
        path.unlink()
    _clear(folder)
    _write_weights(folder, _MODEL, [tensors_of(taken.model, str(folder))], None)  # it loads one file alone
    for name, saved in accelerate_files(taken).items():
        write_torch(folder / name, saved)
    counts = taken.progress
    told = [] if counts is None else [f"epoch {counts.epoch or 0}, batch {counts.batch}, which its loop counts itself"]
    if left := [*taken.left, *told]:
        log.info("%s: not written for accelerate: %s", source, ", ".join(map(str, left)))


def write_tokenizer(kept: StateDict, folder: Path, *, source: str) -> bool:
    """Write the files of the tokenizer into ``folder``; whether there are any. Raises as :func:`write_huggingface`."""
    files = _files_of_tokenizer(kept.get("tokenizer"), source)
    for name, data in files.items():
        _put(folder / name, data)
    return bool(files)


# ── configs ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _content(record: Any, part: str) -> Any:
    entry = cast("StateDict", record).get(part) if isinstance(record, Mapping) else None
    return cast("StateDict", entry).get("content") if isinstance(entry, Mapping) else None


def _config(model: StateDict, weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> StateDict:
    """Return the checkpoint's configuration, with the model's class and the number type of the files."""
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


# ── the tokenizer ────────────────────────────────────────────────────────────────────────────────────────────────────
def _files_of_tokenizer(record: Any, source: str) -> dict[str, bytes]:
    """The files, by name. All names are looked at before anything is written."""
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
        files[name] = _as_bytes(content, extension, source)
    return files


def _as_bytes(content: Any, extension: str, source: str) -> bytes:
    if isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode()
    if extension == ".txt" and isinstance(content, list):
        return "\n".join(map(str, cast("list[Any]", content))).encode()
    return _json(content, source)


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _without_prefix(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of ``HuggingFaceModel.model`` by their names in that model of transformers."""
    return {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items() if name.startswith(_PREFIX)}


def _of_adapter(weights: Mapping[str, Tensor], adapter: StateDict, source: str) -> dict[str, Tensor]:
    """Return the weights of the adapter, by the names that PEFT has in its files."""
    names: Any = adapter.get("files")
    if not isinstance(names, Mapping):  # Composer's: what has the name of the adapter in it
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
    """Weights without those that share memory with another one, which transformers ties again."""
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


def _cut(
    weights: Mapping[str, Tensor], dtype: torch.dtype | None, largest_bytes: int | None
) -> Iterator[dict[str, Tensor]]:
    """The weights of each file."""
    group, size = dict[str, Tensor](), 0
    for name, tensor in weights.items():
        own = tensor.numel() * (dtype.itemsize if dtype is not None and tensor.is_floating_point() else tensor.itemsize)
        if group and largest_bytes is not None and size + own > largest_bytes:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += own
    yield group


def _write_weights(folder: Path, stem: str, files: list[dict[str, Tensor]], dtype: torch.dtype | None) -> None:
    if len(files) == 1:
        write_safetensors(folder / f"{stem}.safetensors", _as_type(files[0], dtype))
        return
    places: dict[str, str] = {}
    size = 0
    for number, group in enumerate(files, 1):
        name = f"{stem}-{number:05}-of-{len(files):05}.safetensors"
        tensors = _as_type(group, dtype)
        write_safetensors(folder / name, tensors)
        places |= dict.fromkeys(group, name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    _put(folder / f"{stem}.safetensors.index.json", _json(index, str(folder)))


def _as_type(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {
        name: tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
        for name, tensor in tensors.items()
    }


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _check_empty(folder: Path, *, overwrite: bool) -> None:
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if Catalog(folder.parent).manifest_of(folder.name) is not None:  # its record would not describe what comes
        raise CheckpointExistsError(f"{str(folder)!r} is a checkpoint, which this would damage. Give another folder.")
    if not overwrite:
        raise CheckpointExistsError(f"{str(folder)!r} is not empty. Give another folder, or overwrite it.")


def _clear(folder: Path) -> None:
    """Take away what would be loaded, the configs first."""
    for name in (_CONFIG, _ADAPTER_CONFIG, _GENERATION_CONFIG):
        (folder / name).unlink(missing_ok=True)
    for stem in (_MODEL, _ADAPTER):
        for pattern in (f"{stem}.safetensors*", f"{stem}-*-of-*.safetensors"):
            for path in folder.glob(pattern):
                path.unlink()


def _put(path: Path, data: bytes) -> None:
    make_folder(path.parent)
    with atomic_write(path) as file:
        file.write(data)
