"""``composerlite checkpoint convert`` and ``unshard``. What takes torch is imported when they are run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from composerlite.checkpoint.tools.pointing import pointed
from composerlite.cli import options
from composerlite.cli.output import print_json
from composerlite.errors import CheckpointExistsError, ConfigError
from composerlite.storage import is_uri, parse_uri

if TYPE_CHECKING:
    from composerlite.checkpoint import Manifest

__all__ = ["convert", "unshard"]


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
    from composerlite.checkpoint import UnshardStrategy, unshard_checkpoint
    from composerlite.checkpoint.tools.inspecting import model_directory

    if per_tensor and chunk_bytes is not None:
        raise ConfigError(f"--per-tensor --chunk-bytes {chunk_bytes}: expected one of them.")
    strategy = UnshardStrategy.one_file_per_tensor() if per_tensor else UnshardStrategy.one_file()
    if chunk_bytes is not None:
        strategy = UnshardStrategy.chunks(chunk_bytes)
    with pointed(checkpoint) as target:
        found = target.the_one()
        if found.kind == "deepspeed":
            directory = target.place.uri(found.name)
        else:
            directory = model_directory(target.place, found)
        if directory is None:
            raise ConfigError(f"{checkpoint!r} is one file already: 'convert' writes it in another form.")
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
@click.argument("target", metavar="[TARGET]", required=False, help="The file or directory to write.")
@click.option("-o", "--output", metavar="TARGET", help="Another way to say TARGET.")
@click.option("--to", metavar="FORM", help="huggingface: a folder for from_pretrained.")
@click.option("--dtype", metavar="TYPE", help="Of the weights, with --to huggingface: bfloat16.")
@options.overwrite
@options.as_json
def convert(
    checkpoint: str,
    target: str | None,
    output: str | None,
    to: str | None,
    dtype: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write CHECKPOINT in another form, which the end of TARGET's name tells, or --to.

    .pt, .pt.zst, .tar.gz and the like: a file. None: a directory that any number of ranks loads. Both resume a run
    that was saved. .safetensors: the weights alone. --to huggingface: what a HuggingFaceModel has trained, as
    save_pretrained writes it; and CHECKPOINT can be such a folder, to load into a HuggingFaceModel.
    """
    if (target is None) is (output is None):
        given = "neither" if target is None else f"{target} and --output {output}"
        raise ConfigError(f"convert: expected TARGET or --output TARGET, and got {given}.")
    target = target or str(output)
    if is_uri(target):
        raise ConfigError(f"convert … {target}: expected a path of this machine. 'push' or 'cp' copies it then.")
    path = Path(parse_uri(target)[2])
    form = _form(path, to)
    if dtype is not None and form != "huggingface":
        raise ConfigError(f"--dtype {dtype}: other forms keep the numbers as they are; expected --to huggingface.")
    if not overwrite and path.exists() and (form != "huggingface" or path.is_file()):
        raise CheckpointExistsError(f"{target!r} exists already. Give another name, or --overwrite to replace it.")
    source = _convert(checkpoint, path, form, dtype=dtype, overwrite=overwrite)
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    if as_json:
        print_json({"source": source, "target": target, "form": form, "size_bytes": size})
    else:
        click.echo(f"wrote {target}")


def _convert(text: str, path: Path, form: str, *, dtype: str | None, overwrite: bool) -> str:
    """Write the form ``form`` of the checkpoint at ``text`` to ``path``, and return what it was made of."""
    from composerlite.checkpoint.tools.huggingface import is_huggingface_folder
    from composerlite.checkpoint.tools.whole import whole_contents
    from composerlite.models import huggingface_contents, write_huggingface_pretrained_from_composer_checkpoint

    if form == "huggingface":
        write_huggingface_pretrained_from_composer_checkpoint(text, path, dtype=dtype, overwrite=overwrite)
        return text
    if not is_uri(text) and is_huggingface_folder(Path(parse_uri(text)[2])):
        _write(huggingface_contents(parse_uri(text)[2]), path, form, None, source=text, overwrite=overwrite)
        return text
    with pointed(text) as source:
        found = source.the_one(whole=True)
        contents = whole_contents(source.place, found, weights_only=form == "safetensors")
        _write(contents, path, form, found.manifest, source=text, overwrite=overwrite)
        return source.place.uri(found.name)


def _write(contents: Any, path: Path, form: str, manifest: Manifest | None, *, source: str, overwrite: bool) -> None:
    from composerlite.checkpoint.tools.converting import write_directory, write_file, write_safetensors

    if form == "safetensors":
        write_safetensors(contents, path, overwrite=overwrite, source=source)
    elif form == "directory":
        write_directory(contents, path, manifest, overwrite=overwrite)
    else:
        write_file(contents, path, manifest, overwrite=overwrite)


def _form(path: Path, to: str | None) -> str:
    """``'huggingface'``, ``'safetensors'``, ``'file'`` or ``'directory'``; ConfigError."""
    from composerlite.checkpoint.format.packing import format_of

    if to is not None:
        if to != "huggingface":
            raise ConfigError(f"--to {to}: expected huggingface; the suffix of TARGET selects any other form.")
        return to
    if path.name.endswith(".safetensors"):
        return "safetensors"
    return "file" if format_of(path.name).suffix else "directory"
