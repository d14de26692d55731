"""What ``composerlite checkpoint convert`` and ``unshard`` do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import typer

from composerlite.checkpoint import Manifest, UnshardStrategy, unshard_checkpoint
from composerlite.checkpoint.format.packing import format_of
from composerlite.checkpoint.tools import (
    is_huggingface_folder,
    model_directory,
    pointed,
    whole_contents,
    write_directory,
    write_file,
    write_safetensors,
)
from composerlite.cli.inspection import the_one
from composerlite.cli.output import print_json
from composerlite.errors import CheckpointExistsError, ConfigError, CorruptCheckpointError
from composerlite.models import huggingface_contents, write_huggingface_pretrained_from_composer_checkpoint
from composerlite.storage import is_uri, parse_uri

__all__ = ["Cut", "convert", "unshard"]


@final
@dataclass(frozen=True)
class Cut:
    """How files are cut: into one, into one for each tensor, or into several of about one size.

    Raises:
        ConfigError: two ways are asked for.
    """

    per_tensor: bool
    chunk_bytes: int | None

    def __post_init__(self) -> None:
        if self.per_tensor and self.chunk_bytes is not None:
            raise ConfigError(f"--per-tensor --chunk-bytes {self.chunk_bytes}: want one of them.")

    @property
    def strategy(self) -> UnshardStrategy:
        """As ``unshard_checkpoint`` takes it."""
        if self.chunk_bytes is not None:
            return UnshardStrategy.chunks(self.chunk_bytes)
        return UnshardStrategy.one_file_per_tensor() if self.per_tensor else UnshardStrategy.one_file()


def unshard(
    text: str, folder: str, cut: Cut, *, safetensors: bool, optim: bool | None, overwrite: bool, as_json: bool
) -> None:
    """Write the model, and the optimizer, of a sharded checkpoint to files; of one of DeepSpeed the model, to one.

    Raises:
        ConfigError: it is no directory, or see ``unshard_checkpoint``.
        CheckpointError: see there.
    """
    with pointed(text) as target:
        found = the_one(target, text)
        if found.manifest is not None and found.manifest.kind == "deepspeed":
            directory = target.place.uri(found.name)
        else:
            directory = model_directory(target.place, found)
        if directory is None:
            raise ConfigError(f"{text!r} is one file already: 'convert' writes it in another form.")
        model, optimizer = unshard_checkpoint(
            directory,
            folder,
            optim=optim,
            save_overwrite=overwrite,
            use_safetensors=safetensors,
            unshard_strategy=cut.strategy,
            quiet=True,
        )
    written = {"model": str(model), "optim": None if optimizer is None else str(optimizer)}
    if as_json:
        print_json(written)
    else:
        for path in filter(None, written.values()):
            typer.echo(f"wrote {path}")


def convert(text: str, target: str, *, to: str | None, dtype: str | None, overwrite: bool, as_json: bool) -> None:
    """Write a checkpoint in the form that the end of the name ``target`` tells, or ``to``.

    Raises:
        ConfigError: the name promises what is not written, or is a URI; ``to`` or ``dtype`` is none, or one forbids the
            other.
        CheckpointExistsError: there is something, and ``overwrite`` is false.
        CheckpointError: the checkpoint is not there, damaged, or holds what is not known to be safe or no model.
    """
    if is_uri(target):
        raise ConfigError(f"convert … {target}: want a path of this machine. 'push' or 'cp' copies it then.")
    path = Path(parse_uri(target)[2])
    form = _form(path, to)
    if dtype is not None and form != "huggingface":
        raise ConfigError(f"--dtype {dtype}: other forms keep the numbers as they are; want --to huggingface.")
    if not overwrite and path.exists() and (form != "huggingface" or path.is_file()):
        raise CheckpointExistsError(f"{target!r} is there already. Give another name, or --overwrite to replace it.")
    if form == "huggingface":
        source = text
        write_huggingface_pretrained_from_composer_checkpoint(text, path, dtype=dtype, overwrite=overwrite)
    elif not is_uri(text) and is_huggingface_folder(Path(parse_uri(text)[2])):
        source = text
        _write(huggingface_contents(parse_uri(text)[2]), path, form, None, source=text, overwrite=overwrite)
    else:
        source = _convert(text, path, form, overwrite=overwrite)
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    if as_json:
        print_json({"source": source, "target": target, "form": form, "size_bytes": size})
    else:
        typer.echo(f"wrote {target}")


def _convert(text: str, path: Path, form: str, *, overwrite: bool) -> str:
    """One form of ours from another; what it was made of."""
    with pointed(text) as source:
        found = the_one(source, text)
        if found.manifest is not None and found.faults:
            raise CorruptCheckpointError(f"{text!r} is torn: {'; '.join(found.faults[:3])}.")
        contents = whole_contents(source.place, found, weights_only=form == "safetensors")
        _write(contents, path, form, found.manifest, source=text, overwrite=overwrite)
        return source.place.uri(found.name)


def _write(contents: Any, path: Path, form: str, manifest: Manifest | None, *, source: str, overwrite: bool) -> None:
    if form == "safetensors":
        write_safetensors(contents, path, overwrite=overwrite, source=source)
    elif form == "directory":
        write_directory(contents, path, manifest, overwrite=overwrite)
    else:
        write_file(contents, path, manifest, overwrite=overwrite)


def _form(path: Path, to: str | None) -> str:
    """``'huggingface'``, ``'safetensors'``, ``'file'`` or ``'directory'``; ConfigError."""
    if to is not None:
        if to != "huggingface":
            raise ConfigError(f"--to {to}: want huggingface; other forms are told by the end of TARGET's name.")
        return to
    if path.name.endswith(".safetensors"):
        return "safetensors"
    return "file" if format_of(path.name).suffix else "directory"
