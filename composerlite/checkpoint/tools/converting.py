"""Conversion between forms of a checkpoint: files, directories that several ranks read, safetensors."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from composerlite.checkpoint.api.state_dict import save_safetensors
from composerlite.checkpoint.contents import versions
from composerlite.checkpoint.foreign.keys import Rename, renamed, tensors_of
from composerlite.checkpoint.foreign.outgoing import lightning_contents, taken_of
from composerlite.checkpoint.format.archive import STATES
from composerlite.checkpoint.format.packing import format_of
from composerlite.checkpoint.format.torch_file import TorchImage
from composerlite.checkpoint.place.catalog import Catalog
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.checkpoint.record.manifest import Manifest, new_id
from composerlite.checkpoint.save import plain_file
from composerlite.checkpoint.save.form import FileWriter, RankWriter
from composerlite.checkpoint.save.plain_file import write_torch
from composerlite.checkpoint.save.save import SaveTask
from composerlite.checkpoint.save.sharded_writer import ShardWriter
from composerlite.checkpoint.tools.whole import weights_of
from composerlite.devices import rng
from composerlite.dist import SingleProcess
from composerlite.errors import CheckpointExistsError
from composerlite.storage import make_folder
from composerlite.types import StateDict

__all__ = [
    "write_directory",
    "write_file",
    "write_lightning",
    "write_safetensors",
    "write_safetensors_folder",
    "write_state_dict",
]

log = logging.getLogger(__name__)


def write_file(contents: Any, path: Path, manifest: Manifest | None, *, overwrite: bool) -> None:
    """Make ``contents`` the checkpoint file ``path``, in the format that its name asks for, with a manifest.

    Args:
        contents: as a file or a directory has them.
        path: of the file.
        manifest: of what it is made of: of which run and moment it is. ``None``: nobody knows.
        overwrite: replace what is there.

    Raises:
        CheckpointExistsError: there is something, and ``overwrite`` is false.
        ConfigError: the name promises a format that is not written, or what compresses it is not installed.
    """
    format_of(path.name).check()
    _check_free(path, overwrite=overwrite)
    catalog = Catalog(path.parent)
    record = _record(manifest, path.name, "weights" if _is_model(contents) else "monolithic")
    images = {STATES: TorchImage(contents)}
    writer = FileWriter(images, catalog, name=path.name, template=path.name, overwrite=overwrite, record=record)
    _save(writer, record, path)


def write_directory(contents: Any, path: Path, manifest: Manifest | None, *, overwrite: bool) -> None:
    """Make ``contents`` the directory ``path`` of a sharded checkpoint. As :func:`write_file`; a state dict alone is
    taken for that of a model.
    """
    state = cast("StateDict", contents)
    make_folder(path.parent)
    folder = ShardedDirectory.of(path)
    record = _record(manifest, folder.name, "sharded")
    of_run = isinstance(state.get("state"), Mapping)  # else it is as the functions on state dicts save it
    if not of_run and not isinstance(state.get("model"), Mapping):
        state = {"model": weights_of(contents, str(path))}
    generators = state.get("rng")
    if of_run and isinstance(generators, list):
        own = enumerate(cast("list[Any]", generators))
        state = {**state, "rng": {str(rank): rng.packed(one) for rank, one in own}}
    _save(ShardWriter(lambda: state, folder, overwrite=overwrite, of_run=of_run, reuse_plan=of_run), record, path)


def _save(writer: RankWriter, record: Manifest, path: Path) -> None:
    group = SingleProcess()
    SaveTask(manifest=record, path=path, writer=writer, votes=[group.vote(f"writing {str(path)!r}")], group=group).run()


def write_safetensors(contents: Any, path: Path, *, overwrite: bool, source: str, rename: Rename | None = None) -> None:
    """Write the model in ``contents`` as a file of the safetensors library. Raises as :func:`write_file`, and:

    Raises:
        IncompatibleCheckpointError: there is no model.
        ConfigError: ``rename`` gives two weights one name, or changes none.
    """
    weights = renamed(weights_of(contents, source), rename or Rename())
    _write_plain(plain_file.write_safetensors, path, weights, overwrite=overwrite)


def write_safetensors_folder(
    contents: Any, path: Path, *, overwrite: bool, source: str, rename: Rename | None = None
) -> None:
    """Write the model in ``contents`` as a folder of safetensors with an index. Raises as :func:`write_safetensors`."""
    make_folder(path.parent)
    weights = renamed(weights_of(contents, source), rename or Rename())
    save_safetensors(path, tensors_of(weights, str(path)), save_overwrite=overwrite)


def write_state_dict(contents: Any, path: Path, *, overwrite: bool, source: str, rename: Rename | None = None) -> None:
    """Write the model in ``contents`` as a file that ``model.load_state_dict(torch.load(path))`` takes. Raises as
    :func:`write_safetensors`.
    """
    weights = renamed(weights_of(contents, source), rename or Rename())
    _write_plain(write_torch, path, weights, overwrite=overwrite)


def write_lightning(contents: Any, path: Path, *, overwrite: bool, source: str, rename: Rename | None = None) -> None:
    """Write ``contents`` as a ``.ckpt`` of Lightning, with optimizer, scheduler and how far training was.

    Raises:
        CheckpointExistsError: there is something, and ``overwrite`` is false.
        IncompatibleCheckpointError: there is no model, or an optimizer that is none.
    """
    taken = taken_of(contents, source, rename or Rename())
    written = lightning_contents(taken)
    _write_plain(write_torch, path, written, overwrite=overwrite)
    if taken.left:
        log.info("%s: not written for Lightning: %s", source, ", ".join(map(str, taken.left)))


def _write_plain(write: Callable[..., None], path: Path, contents: StateDict, *, overwrite: bool) -> None:
    """Write a file without a record. Raises as :func:`_check_free`, also for a file that appears meanwhile."""
    _check_free(path, overwrite=overwrite)
    try:
        write(path, contents, overwrite=overwrite)
    except FileExistsError as e:
        raise CheckpointExistsError(f"{str(path)!r} was written by another process meanwhile, and stays.") from e


def _check_free(path: Path, *, overwrite: bool) -> None:
    """See that the file ``path`` may be written, and make its folder.

    Raises:
        CheckpointExistsError: there is something, and ``overwrite`` is false, or it is a folder.
    """
    if path.is_dir():
        raise CheckpointExistsError(f"{str(path)!r} is a folder, and a file does not replace it. Give another name.")
    if not overwrite and path.exists():
        raise CheckpointExistsError(f"{str(path)!r} exists already. Give another name, or --overwrite.")
    make_folder(path.parent)


def _is_model(contents: Any) -> bool:
    """Return true if there are weights in it, and nothing else."""
    return isinstance(contents, Mapping) and not {"state", "optim"} & set(cast("StateDict", contents))


def _record(manifest: Manifest | None, name: str, kind: str) -> Manifest:
    """Return the record of a checkpoint under another name, without its files.

    The name is the user's, of no template: in the folder of a run no retention counts or deletes it.
    """
    if manifest is None or manifest.kind == "step":
        return Manifest(
            name=name, kind=kind, template=name, run_name="", timestamp={"batch": 0}, files=(), versions=versions()
        )
    kind = "weights" if manifest.kind == "weights" else kind
    return dataclasses.replace(
        manifest,
        name=name,
        template=name,
        kind=kind,
        form="file",
        files=(),
        node=None,
        unpacked_bytes=0,
        also={},
        id=new_id(),
    )
