"""Conversion between forms of a checkpoint: files, sharded directories, and files of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from composerlite.checkpoint.api.state_dict import save_safetensors, task_of
from composerlite.checkpoint.foreign.keys import Rename, renamed, tensors_of
from composerlite.checkpoint.format.archive import STATES
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.checkpoint.record.record import Manifest, SavedRun
from composerlite.checkpoint.save.form import FileWriter
from composerlite.checkpoint.save.plain_file import write_safetensors, write_torch
from composerlite.checkpoint.save.sharded_writer import ShardWriter
from composerlite.checkpoint.tools.reading import weights_of
from composerlite.devices import rng
from composerlite.dist import Group
from composerlite.types import StateDict

WEIGHT_FORMS = ("safetensors", "safetensors folder", "state_dict")
"""Forms that :func:`write_weights` writes."""


def write_file(contents: Any, path: Path, manifest: Manifest | None, *, overwrite: bool) -> None:
    """Write the checkpoint file ``path``, in the format of its suffix, with a record.

    Args:
        contents: contents of the checkpoint to convert.
        path: path of the file.
        manifest: record of the checkpoint to convert; ``None``: no record.
        overwrite: replace an existing file.

    Raises:
        CheckpointExistsError: ``path`` exists, and ``overwrite`` is false.
        ConfigError: the suffix names no known format, or a library for the compression is not installed.
    """
    is_model = isinstance(contents, Mapping) and not {"state", "optim"} & set(cast("StateDict", contents))
    record = _record(manifest, path.name, "weights" if is_model else "monolithic")
    images = {STATES: TorchImage(cast("Any", contents))}
    writer = FileWriter(images, Catalog(path.parent), name=path.name, overwrite=overwrite, record=record)
    task_of(record, path, writer, Group()).run()


def write_directory(contents: Any, path: Path, manifest: Manifest | None, *, overwrite: bool) -> None:
    """Write the directory ``path`` of a sharded checkpoint. A plain state dict counts as the state of a model.

    Arguments and errors as :func:`write_file`.
    """
    state: StateDict = contents
    folder = ShardedDirectory.of(path)
    record = _record(manifest, folder.name, "sharded")
    of_run = isinstance(state.get("state"), Mapping)  # if false, the functions on state dicts load the directory
    if not of_run and not isinstance(state.get("model"), Mapping):
        state = {"model": weights_of(contents, str(path))}
    if of_run and isinstance(state.get("rng"), list):
        state = {**state, "rng": {str(rank): rng.packed(one) for rank, one in enumerate(state["rng"])}}
    writer = ShardWriter(lambda: state, folder, overwrite=overwrite, of_run=of_run)
    task_of(record, path, writer, Group()).run()


def write_weights(
    contents: Any, path: Path, form: str, *, source: str, rename: Rename | None = None, overwrite: bool = False
) -> None:
    """Write the model in ``contents`` alone, without a record of the run.

    Args:
        contents: contents of a checkpoint of any system.
        path: path of the file or folder to write.
        form: ``'safetensors'``: one file. ``'safetensors folder'``: a folder with an index. ``'state_dict'``: a file
            for ``model.load_state_dict(torch.load(path))``.
        source: the checkpoint, for messages.
        rename: new names of weights.
        overwrite: replace an existing file, or weights in the folder.

    Raises:
        FileExistsError: ``path`` exists, and ``overwrite`` is false.
        IncompatibleCheckpointError: there is no model.
        ConfigError: ``rename`` gives two weights the same name, or changes no name.
    """
    weights = renamed(weights_of(contents, source), rename or Rename())
    if form == "safetensors folder":
        save_safetensors(path, tensors_of(weights, str(path)), save_overwrite=overwrite)
    elif form == "safetensors":
        write_safetensors(path, weights, overwrite=overwrite)
    else:
        write_torch(path, weights, overwrite=overwrite)


def _record(manifest: Manifest | None, name: str, kind: str) -> Manifest:
    """Return the record of the converted checkpoint, without files.

    The template is the name itself, since the user chose the name. So retention in the folder of a run ignores the
    converted checkpoint.
    """
    run, left_out = SavedRun(name="", timestamp={"batch": 0}), ()
    if manifest is not None and manifest.kind != "step":
        run, left_out = manifest.run, manifest.left_out
        kind = "weights" if manifest.kind == "weights" else kind
    return Manifest(name=name, kind=kind, template=name, run=run, files=(), left_out=left_out)
