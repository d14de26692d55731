"""``composerlite checkpoint convert`` and ``unshard``. Modules with torch are imported when a command runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from composerlite.checkpoint import Manifest
from composerlite.checkpoint.tools.surveying import pointed
from composerlite.cli import options
from composerlite.cli.output import print_json
from composerlite.errors import CheckpointExistsError, ConfigError
from composerlite.storage import is_uri, parse_uri


@click.command()
@options.checkpoint
@click.argument("folder", metavar="FOLDER", help="Target folder.")
@click.option("--safetensors", "use_safetensors", is_flag=True, help="Write the model as safetensors.")
@click.option("--optim/--no-optim", default=None, help="Write the optimizer. Default: if the checkpoint has one.")
@click.option("--per-tensor", is_flag=True, help="Write a file for each tensor.")
@click.option("--chunk-bytes", type=click.IntRange(min=1), metavar="BYTES", help="Approximate size of a file.")
@click.option("--overwrite", "save_overwrite", is_flag=True, help="Write to a folder that is not empty.")
@options.as_json
def unshard(checkpoint: str, folder: str, per_tensor: bool, chunk_bytes: int | None, as_json: bool, **how: Any) -> None:
    """Write model and optimizer of the sharded CHECKPOINT to files for torch.load or safetensors.

    Of a DeepSpeed checkpoint only the model is written, to one file.
    """
    from composerlite.checkpoint import UnshardStrategy, unshard_checkpoint, unshard_zero
    from composerlite.checkpoint.tools.reading import model_directory

    if per_tensor and chunk_bytes is not None:
        raise ConfigError(f"--per-tensor --chunk-bytes {chunk_bytes}: expected one of them.")
    strategy = UnshardStrategy.one_file_per_tensor() if per_tensor else UnshardStrategy.one_file()
    if chunk_bytes is not None:
        strategy = UnshardStrategy.chunks(chunk_bytes)
    optimizer = None
    with pointed(checkpoint) as target:
        found = target.the_one()
        directory = model_directory(found)
        if found.kind == "deepspeed":
            if how["optim"] or per_tensor or chunk_bytes is not None:
                raise ConfigError("unshard: of a DeepSpeed checkpoint only the model is written, to one file.")
            file = Path(folder, "model.safetensors" if how["use_safetensors"] else "model.pt")
            model = unshard_zero(found.uri, file, save_overwrite=how["save_overwrite"], quiet=True)
        elif directory is None:
            raise ConfigError(f"{checkpoint!r} is one file already: 'convert' writes another format.")
        else:
            model, optimizer = unshard_checkpoint(directory, folder, unshard_strategy=strategy, quiet=True, **how)
    if as_json:
        print_json({"model": str(model), "optim": None if optimizer is None else str(optimizer)})
    else:
        for path in filter(None, (model, optimizer)):
            click.echo(f"wrote {path}")


@click.command()
@options.checkpoint
@click.argument("target", metavar="TARGET", help="File or folder to write.")
@click.option(
    "--to", type=click.Choice(("huggingface", "safetensors", "state_dict")), help="A format without its own suffix."
)
@click.option("--dtype", metavar="TYPE", help="Type of the weights, with --to huggingface: bfloat16.")
@click.option("--rename", metavar="FROM=TO", help="Replace the prefix FROM in the names of weights: module.= .")
@options.overwrite
@options.as_json
def convert(
    checkpoint: str, target: str, to: str | None, dtype: str | None, rename: str | None, overwrite: bool, as_json: bool
) -> None:
    """Convert CHECKPOINT to the format of TARGET's suffix, or of --to.

    Runs resume from .pt, .pt.zst, .tar.gz, … (one file) and from a name without suffix (a sharded directory).
    .safetensors has the weights only. --to huggingface writes the folder of save_pretrained, for a checkpoint of a
    HuggingFaceModel; CHECKPOINT can be such a folder. --to safetensors writes a folder with an index; --to state_dict a
    file of weights for torch.load.
    """
    from composerlite.checkpoint.foreign.keys import Rename
    from composerlite.checkpoint.tools import converting
    from composerlite.checkpoint.tools.reading import whole_contents
    from composerlite.models import huggingface_contents, write_huggingface_pretrained_from_composer_checkpoint
    from composerlite.models.hf_folder import is_huggingface_folder

    if is_uri(target):
        raise ConfigError(f"convert … {target}: expected a local path. Upload the result with 'push' or 'cp'.")
    path, source = Path(parse_uri(target)[2]), checkpoint
    form = _form(path, to)
    if dtype is not None and form != "huggingface":
        raise ConfigError(f"--dtype {dtype}: only --to huggingface converts the type of the weights.")
    old, is_given, new = (rename or "=").partition("=")
    if not is_given or (rename is not None and form not in converting.WEIGHT_FORMS):
        raise ConfigError(
            f"--rename {rename}: expected FROM=TO, and a format of weights: {', '.join(converting.WEIGHT_FORMS)}."
        )
    is_folder = form in ("directory", "huggingface", "safetensors folder")
    if os.path.lexists(path) and not (path.is_dir() if is_folder else path.is_file()):
        kind = "folder" if is_folder else "file"
        raise CheckpointExistsError(f"{target!r} exists and is no {kind}. Pass another name.")
    if not overwrite and path.exists() and form != "huggingface":  # checked where the folder is written
        raise CheckpointExistsError(f"{target!r} exists already. Pass another name, or --overwrite to replace it.")
    if form == "huggingface":
        write_huggingface_pretrained_from_composer_checkpoint(checkpoint, path, dtype=dtype, overwrite=overwrite)
    else:
        manifest: Manifest | None = None
        if not is_uri(checkpoint) and is_huggingface_folder(Path(parse_uri(checkpoint)[2])):
            contents: Any = huggingface_contents(parse_uri(checkpoint)[2])
        else:
            with pointed(checkpoint) as place:
                found = place.the_one(whole=True)
                contents = whole_contents(found, weights_only=form in converting.WEIGHT_FORMS)
                manifest, source = found.manifest, found.uri
        if form == "directory":
            converting.write_directory(contents, path, manifest, overwrite=overwrite)
        elif form == "file":
            converting.write_file(contents, path, manifest, overwrite=overwrite)
        else:
            renamed = Rename(old, new)
            converting.write_weights(contents, path, form, source=checkpoint, rename=renamed, overwrite=overwrite)
    if as_json:
        size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
        print_json({"source": source, "target": target, "form": form, "size_bytes": size})
    else:
        click.echo(f"wrote {target}")


def _form(path: Path, to: str | None) -> str:
    """Return the format to write: one of ``WEIGHT_FORMS``, ``'huggingface'``, ``'file'`` or ``'directory'``."""
    from composerlite.checkpoint.format.packing import format_of

    if to is not None:
        return f"{to} folder" if to == "safetensors" and not path.name.endswith(".safetensors") else to
    if path.name.endswith(".ckpt"):
        raise ConfigError(
            f"convert … {path}: Lightning's .ckpt is not written. --to state_dict writes weights that a "
            "LightningModule loads with load_state_dict."
        )
    if path.name.endswith(".safetensors"):
        return "safetensors"
    return "file" if format_of(path.name).suffix else "directory"
