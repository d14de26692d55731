"""All that a checkpoint holds, with its numbers, whatever form it has: for tools, which compare and convert."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from composerlite.checkpoint import rng
from composerlite.checkpoint.download import fetched
from composerlite.checkpoint.formats.directory import CheckpointFolder
from composerlite.checkpoint.reading import opened
from composerlite.checkpoint.tools.inspecting import model_directory
from composerlite.checkpoint.tools.local_place import LocalPlace
from composerlite.checkpoint.tools.places import Place
from composerlite.checkpoint.tools.surveying import Found
from composerlite.errors import CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError
from composerlite.types import StateDict

__all__ = ["weights_of", "whole_contents"]

_MODELS = ("model.", "state.model.")


def whole_contents(place: Place, found: Found, *, weights_only: bool = False) -> Any:
    """What the checkpoint holds, verified where it has a manifest. Of a step, its model and optimizer.

    Args:
        place: has the checkpoint.
        found: the checkpoint.
        weights_only: leave all but the model out; it is not read.

    Raises:
        CheckpointNotFoundError: its files are gone.
        CorruptCheckpointError: the bytes are not those that were saved.
        UntrustedCheckpointError: it holds a type that is not known to be safe.
        ConfigError: it takes a library that is not installed.
    """
    if not found.files:
        raise CheckpointNotFoundError(f"{place.uri(found.name)!r}: its files are gone.")
    directory = model_directory(place, found)
    if directory is not None:
        return _directory(directory, weights_only=weights_only)
    if isinstance(place, LocalPlace):
        return _file(place.path_of(found.name), weights_only=weights_only)
    with fetched(place.uri(found.name)) as path:
        return _file(path, weights_only=weights_only)


def _directory(folder: CheckpointFolder, *, weights_only: bool) -> Any:
    from composerlite.checkpoint.directory_loading import as_in_a_file  # slow to import, and most are files
    from composerlite.checkpoint.formats import sharded
    from composerlite.checkpoint.state_keys import nested

    with sharded.RemoteFileSystemReader(folder) as reader:
        metadata = reader.read_metadata()
        keys = [key for key in metadata.state_dict_metadata if not weights_only or key.startswith(_MODELS)]
        contents = nested(metadata, "", keys, sharded.load_flat(reader, keys))
    if not isinstance(contents, dict):
        return contents
    contents = as_in_a_file(cast("StateDict", contents))
    generators = contents.get("rng")
    if isinstance(generators, list):  # each a row of bytes there
        listed = cast("list[Any]", generators)
        contents["rng"] = [rng.unpacked(one) if isinstance(one, Tensor) else one for one in listed]
    return contents


def _file(path: Path, *, weights_only: bool) -> Any:
    if path.name.endswith(".safetensors"):
        return _safetensors(path)
    with opened(path) as (file, progress):
        if weights_only:
            file.contents = _model_in(file.contents)
        file.read(progress=progress)
        return file.contents


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        library = importlib.import_module("safetensors.torch")
    except ImportError as e:
        raise ConfigError(
            f"{str(path)!r}: safetensors is not installed: pip install 'composerlite[safetensors]'"
        ) from e
    return cast("dict[str, Tensor]", library.load_file(path))


def _model_in(contents: Any) -> Any:
    """The model in what a checkpoint holds; what holds none is taken for one."""
    for keys in (("state", "model"), ("model",)):
        inner = contents
        for key in keys:
            inner = cast("Mapping[Any, Any]", inner).get(key) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping):
            return cast("Any", inner)
    return contents


def weights_of(contents: Any, source: str) -> dict[str, Tensor]:
    """The tensors of the model in ``contents``, by name.

    Raises:
        IncompatibleCheckpointError: there are none. ``source`` is named in the message.
    """
    found: dict[str, Tensor] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            found[path] = value
        elif isinstance(value, Mapping):
            for key, inner in cast("Mapping[Any, Any]", value).items():
                visit(inner, f"{path}.{key}" if path else str(key))

    visit(_model_in(contents), "")
    if not found:
        raise IncompatibleCheckpointError(f"{source!r} holds no model: 'composerlite checkpoint inspect' shows what.")
    return found
