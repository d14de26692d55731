"""Reading of the whole contents of a checkpoint of any form, for tools that compare and convert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from composerlite.checkpoint.foreign.keys import flat_weights
from composerlite.checkpoint.foreign.systems import model_in, no_model_error
from composerlite.checkpoint.load.deepspeed_folder import deepspeed_contents
from composerlite.checkpoint.load.reader import opened
from composerlite.checkpoint.load.resolve import fetched, is_read_in_place
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.checkpoint.place.folder import Folder
from composerlite.checkpoint.place.place import Place
from composerlite.checkpoint.tools.inspecting import contents_of, deepspeed_in, model_directory
from composerlite.checkpoint.tools.pointing import pointed
from composerlite.checkpoint.tools.surveying import Found
from composerlite.devices import rng
from composerlite.errors import CheckpointNotFoundError
from composerlite.storage import is_uri, parse_uri
from composerlite.types import StateDict

__all__ = ["metadata_of", "model_and_integrations", "weights_of", "whole_contents"]

_MODELS = ("model.", "state.model.")


def whole_contents(place: Place, found: Found, *, weights_only: bool = False) -> Any:
    """Load the whole checkpoint, verified where it has a manifest. Of a step, its model and optimizer.

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
    return _read(place, found, _MODELS, model_in) if weights_only else _read(place, found, ("",), lambda whole: whole)


def model_and_integrations(text: str) -> StateDict:
    """The model in the checkpoint at the path, the URI or the address ``text``, with what belongs to it.

    Returns:
        ``{'state': {'model': …, 'integrations': …}}``, less what is not there.

    Raises:
        ConfigError: it is a folder of several checkpoints, or the URI names no store.
        CheckpointError: as :func:`whole_contents`.
    """
    if is_uri(text) and parse_uri(text)[0] in ("http", "https"):
        with fetched(text) as path:
            return _file(path, _model_and_integrations_in)
    with pointed(text) as target:
        keys = (*_MODELS, "state.integrations.")
        contents = _read(target.place, target.the_one(whole=True), keys, _model_and_integrations_in)
    return contents if isinstance(contents, dict) and "state" in contents else {"state": {"model": contents}}


def metadata_of(place: Place, found: Found) -> StateDict:
    """Return ``state/metadata`` of a run's checkpoint; no tensor is read. Empty if it has none.

    Archives of DeepSpeed are not looked into.
    """
    if found.kind == "deepspeed":
        return {}
    directory = model_directory(place, found)
    contents: Any = contents_of(place, found) if directory is None else _directory(directory, ("state.metadata.",))
    for key in ("state", "metadata"):
        contents = cast("Mapping[Any, Any]", contents).get(key) if isinstance(contents, Mapping) else None
    return cast("StateDict", contents) if isinstance(contents, dict) else {}


def _read(place: Place, found: Found, keys: tuple[str, ...], part: Callable[[Any], Any]) -> Any:
    """Read a part: of a directory what is below ``keys``, of a file what ``part`` takes of its contents."""
    if not found.files:
        raise CheckpointNotFoundError(f"{place.uri(found.name)!r}: its files are gone.")
    if (save := deepspeed_in(place, found)) is not None:
        return part(deepspeed_contents(place, save))
    directory = model_directory(place, found)
    if directory is not None:
        return _directory(directory, keys)
    if (here := place.path_of(found.name)) is not None:
        return _file(here, part)
    with fetched(place.uri(found.name)) as path:
        return _file(path, part)


def _directory(folder: ShardedDirectory, wanted: tuple[str, ...]) -> Any:
    from composerlite.checkpoint.format.sharded_index import nested
    from composerlite.checkpoint.load import sharded  # slow to import, and most are files

    with sharded.RemoteFileSystemReader(folder) as reader:
        metadata = reader.read_metadata()
        every = list(metadata.state_dict_metadata)
        keys = [key for key in every if f"{key}.".startswith(wanted)] or every
        contents = nested(metadata, "", keys, sharded.load_flat(reader, keys))
    if not isinstance(contents, dict):
        return contents
    contents = sharded.as_in_a_file(cast("StateDict", contents))
    generators = contents.get("rng")
    if isinstance(generators, list):  # each a row of bytes there
        listed = cast("list[Any]", generators)
        contents["rng"] = [rng.unpacked(one) if isinstance(one, Tensor) else one for one in listed]
    return contents


def _file(path: Path, part: Callable[[Any], Any]) -> Any:
    if is_read_in_place(path):
        return _directory(ShardedDirectory(Folder(path.parent), "", path.name), ("",))
    with opened(path) as (file, progress, _):
        file.contents = part(file.contents)
        file.read(progress=progress)
        return file.contents


def _model_and_integrations_in(contents: Any) -> StateDict:
    state: Any = contents.get("state") if isinstance(contents, Mapping) else None
    integrations = (
        {"integrations": state["integrations"]} if isinstance(state, Mapping) and "integrations" in state else {}
    )
    return {"state": {"model": model_in(contents), **integrations}}


def weights_of(contents: Any, source: str) -> StateDict:
    """The tensors and the extra state of the model in ``contents``, by name.

    Raises:
        IncompatibleCheckpointError: there are none. ``source`` is named in the message.
    """
    if found := flat_weights(model_in(contents), source):
        return found
    raise no_model_error(source)
