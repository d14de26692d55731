"""``composerlite checkpoint convert`` and ``unshard``. What takes torch is imported when they are run."""

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
@click.argument("folder", metavar="FOLDER", help="The folder to write to.")
@click.option("--safetensors", is_flag=True, help="Write safetensors, of the model alone.")
@click.option("--optim/--no-optim", default=None, help="Write the optimizer, too. If there is one, if not said.")
@click.option("--per-tensor", is_flag=True, help="A file for each tensor.")
@click.option("--chunk-bytes", type=click.IntRange(min=1), metavar="BYTES", help="Approximate size of a file.")
@click.option("--overwrite", is_flag=True, help="Write to a folder that is not empty.")
@options.as_json
def unshard(
    checkpoint: str,
    folder: str,
    safetensors: bool,
    optim: bool | None,
    per_tensor: bool,
    chunk_bytes: int | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the model, and the optimizer, of the sharded CHECKPOINT to files that torch.load or safetensors opens.

    Of one of DeepSpeed it is the model, in one file.
    """
    from composerlite.checkpoint import UnshardStrategy, unshard_checkpoint, unshard_zero
    from composerlite.checkpoint.tools.reading import model_directory

    if per_tensor and chunk_bytes is not None:
        raise ConfigError(f"--per-tensor --chunk-bytes {chunk_bytes}: expected one of them.")
    strategy = UnshardStrategy.one_file_per_tensor() if per_tensor else UnshardStrategy.one_file()
    if chunk_bytes is not None:
        strategy = UnshardStrategy.chunks(chunk_bytes)
    with pointed(checkpoint) as target:
        found = target.the_one()
        directory = model_directory(found)
        if found.kind == "deepspeed":
            if optim or per_tensor or chunk_bytes is not None:
                raise ConfigError("unshard: of a checkpoint of DeepSpeed the model alone is written, in one file.")
            file = Path(folder, "model.safetensors" if safetensors else "model.pt")
            written = unshard_zero(found.uri, file, save_overwrite=overwrite, quiet=True), None
        elif directory is None:
            raise ConfigError(f"{checkpoint!r} is one file already: 'convert' writes it in another form.")
        else:
            written = unshard_checkpoint(
                directory,
                folder,
                optim=optim,
                save_overwrite=overwrite,
                use_safetensors=safetensors,
                unshard_strategy=strategy,
                quiet=True,
            )
    if as_json:
        model, optimizer = written
        print_json({"model": str(model), "optim": None if optimizer is None else str(optimizer)})
    else:
        for path in filter(None, written):
            click.echo(f"wrote {path}")


@click.command()
@options.checkpoint
@click.argument("target", metavar="TARGET", help="The file, directory or folder to write.")
@click.option(
    "--to", type=click.Choice(("huggingface", "safetensors", "state_dict")), help="A form that no suffix selects."
)
@click.option("--dtype", metavar="TYPE", help="Of the weights, with --to huggingface: bfloat16.")
@click.option("--rename", metavar="FROM=TO", help="Names of weights that begin with FROM begin with TO: module.= .")
@options.overwrite
@options.as_json
def convert(
    checkpoint: str,
    target: str,
    to: str | None,
    dtype: str | None,
    rename: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write CHECKPOINT in another form, which the end of TARGET's name tells, or --to.

    .pt, .pt.zst, .tar.gz and the like: a file. None: a directory that any number of ranks loads. Both resume a run
    that was saved. .safetensors: the weights alone. --to huggingface: what a HuggingFaceModel has trained, as
    save_pretrained writes it; and CHECKPOINT can be such a folder, to load into a HuggingFaceModel. --to safetensors: a
    folder with an index. --to state_dict: a file of the weights for torch.load.
    """
    if is_uri(target):
        raise ConfigError(f"convert … {target}: expected a path of this machine. 'push' or 'cp' copies it then.")
    path = Path(parse_uri(target)[2])
    form = _form(path, to)
    if dtype is not None and form != "huggingface":
        raise ConfigError(f"--dtype {dtype}: other forms keep the numbers as they are; expected --to huggingface.")
    is_folder = form in ("directory", "huggingface", "safetensors folder")
    if os.path.lexists(path) and not (path.is_dir() if is_folder else path.is_file()):
        kind = "folder" if is_folder else "file"
        raise CheckpointExistsError(f"{target!r} exists already and is no {kind}, so it stays. Give another name.")
    if not overwrite and path.exists() and form != "huggingface":  # which refuses a folder with files
        raise CheckpointExistsError(f"{target!r} exists already. Give another name, or --overwrite to replace it.")
    source = _convert(checkpoint, path, form, dtype=dtype, rename=rename, overwrite=overwrite)
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    if as_json:
        print_json({"source": source, "target": target, "form": form, "size_bytes": size})
    else:
        click.echo(f"wrote {target}")


def _convert(text: str, path: Path, form: str, *, dtype: str | None, rename: str | None, overwrite: bool) -> str:
    """Write the form ``form`` of the checkpoint at ``text`` to ``path``, and return the URI of that checkpoint."""
    from composerlite.checkpoint.foreign.keys import Rename
    from composerlite.checkpoint.tools import converting
    from composerlite.checkpoint.tools.reading import whole_contents
    from composerlite.models import huggingface_contents, write_huggingface_pretrained_from_composer_checkpoint
    from composerlite.models.hf_folder import is_huggingface_folder

    old, is_given, new = (rename or "=").partition("=")
    if not is_given or (rename is not None and form not in converting.WEIGHT_FORMS):
        raise ConfigError(
            f"--rename {rename}: expected FROM=TO, of which one may be empty, and a form of weights alone: "
            f"{', '.join(converting.WEIGHT_FORMS)}."
        )
    if form == "huggingface":
        write_huggingface_pretrained_from_composer_checkpoint(text, path, dtype=dtype, overwrite=overwrite)
        return text
    manifest: Manifest | None = None
    uri = text
    if not is_uri(text) and is_huggingface_folder(Path(parse_uri(text)[2])):
        contents: Any = huggingface_contents(parse_uri(text)[2])
    else:
        with pointed(text) as source:
            found = source.the_one(whole=True)
            contents = whole_contents(found, weights_only=form in converting.WEIGHT_FORMS)
            manifest, uri = found.manifest, found.uri
    if form == "directory":
        converting.write_directory(contents, path, manifest, overwrite=overwrite)
    elif form == "file":
        converting.write_file(contents, path, manifest, overwrite=overwrite)
    else:
        converting.write_weights(contents, path, form, source=text, rename=Rename(old, new), overwrite=overwrite)
    return uri


def _form(path: Path, to: str | None) -> str:
    """Return the form to write: one of ``WEIGHT_FORMS``, ``'huggingface'``, ``'file'`` or ``'directory'``."""
    from composerlite.checkpoint.format.packing import format_of

    if to is not None:
        return f"{to} folder" if to == "safetensors" and not path.name.endswith(".safetensors") else to
    if path.name.endswith(".ckpt"):
        raise ConfigError(
            f"convert … {path}: no .ckpt of Lightning is written. --to state_dict writes weights that a "
            "LightningModule loads with load_state_dict; load_path reads a .ckpt."
        )
    if path.name.endswith(".safetensors"):
        return "safetensors"
    return "file" if format_of(path.name).suffix else "directory"
