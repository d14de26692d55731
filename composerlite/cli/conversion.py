"""``composerlite checkpoint convert`` and ``unshard``. What takes torch is imported when they are run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from composerlite.checkpoint import Manifest
from composerlite.checkpoint.tools.pointing import pointed
from composerlite.cli import options
from composerlite.cli.output import print_json
from composerlite.errors import CheckpointExistsError, ConfigError
from composerlite.storage import is_uri, parse_uri

_FORMS = ("huggingface", "safetensors", "state_dict", "lightning", "transformers", "accelerate")
_OF_WEIGHTS = ("safetensors", "safetensors folder", "state_dict")
_FOLDERS = ("huggingface", "transformers", "accelerate")
_RENAMING = (*_OF_WEIGHTS, "lightning", "transformers", "accelerate")


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
@click.option("--to", metavar="FORM", help=f"Another form: {', '.join(_FORMS)}.")
@click.option("--dtype", metavar="TYPE", help="Of the weights, with --to huggingface: bfloat16.")
@click.option("--rename", metavar="FROM=TO", help="Names of weights that begin with FROM begin with TO: net.=module.")
@options.overwrite
@options.as_json
def convert(
    checkpoint: str,
    target: str | None,
    output: str | None,
    to: str | None,
    dtype: str | None,
    rename: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write CHECKPOINT in another form, which the end of TARGET's name tells, or --to.

    .pt, .pt.zst, .tar.gz and the like: a file. None: a directory that any number of ranks loads. Both resume a run
    that was saved. .safetensors: the weights alone. .ckpt: for Lightning. --to huggingface: what a HuggingFaceModel has
    trained, as save_pretrained writes it; and CHECKPOINT can be such a folder, to load into a HuggingFaceModel. --to
    transformers: a folder checkpoint-N that its Trainer continues from. --to accelerate: a folder that
    Accelerator.load_state loads. --to safetensors: a folder with an index. --to
    state_dict: a file of the weights for torch.load.
    """
    if (target is None) is (output is None):
        given = "neither" if target is None else f"{target} and --output {output}"
        raise ConfigError(f"convert: expected TARGET or --output TARGET, and got {given}.")
    target = str(output) if target is None else target
    if is_uri(target):
        raise ConfigError(f"convert … {target}: expected a path of this machine. 'push' or 'cp' copies it then.")
    path = Path(parse_uri(target)[2])
    form = _form(path, to)
    if dtype is not None and form != "huggingface":
        raise ConfigError(f"--dtype {dtype}: other forms keep the numbers as they are; expected --to huggingface.")
    if rename is not None and ("=" not in rename or form not in _RENAMING):
        raise ConfigError(
            f"--rename {rename}: expected FROM=TO, of which one may be empty, and a form that names weights for other "
            f"programs: {', '.join(_RENAMING)}."
        )
    if not overwrite and path.exists() and (form not in _FOLDERS or path.is_file()):
        raise CheckpointExistsError(f"{target!r} exists already. Give another name, or --overwrite to replace it.")
    if os.path.lexists(path) and not (path.is_file() or path.is_dir()):
        raise CheckpointExistsError(f"{target!r} is neither a file nor a folder, and stays. Give another name.")
    source = _convert(checkpoint, path, form, dtype=dtype, rename=rename, overwrite=overwrite)
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    if as_json:
        print_json({"source": source, "target": target, "form": form, "size_bytes": size})
    else:
        click.echo(f"wrote {target}")


def _convert(text: str, path: Path, form: str, *, dtype: str | None, rename: str | None, overwrite: bool) -> str:
    """Write the form ``form`` of the checkpoint at ``text`` to ``path``, and return what it was made of."""
    from composerlite.checkpoint.tools.huggingface import is_huggingface_folder
    from composerlite.checkpoint.tools.whole import whole_contents
    from composerlite.models import huggingface_contents, write_huggingface_pretrained_from_composer_checkpoint

    if form == "huggingface":
        write_huggingface_pretrained_from_composer_checkpoint(text, path, dtype=dtype, overwrite=overwrite)
        return text
    if not is_uri(text) and is_huggingface_folder(Path(parse_uri(text)[2])):
        _write(
            huggingface_contents(parse_uri(text)[2]), path, form, None, source=text, rename=rename, overwrite=overwrite
        )
        return text
    with pointed(text) as source:
        found = source.the_one(whole=True)
        contents = whole_contents(source.place, found, weights_only=form in _OF_WEIGHTS)
        _write(contents, path, form, found.manifest, source=text, rename=rename, overwrite=overwrite)
        return source.place.uri(found.name)


def _write(
    contents: Any,
    path: Path,
    form: str,
    manifest: Manifest | None,
    *,
    source: str,
    rename: str | None,
    overwrite: bool,
) -> None:
    from composerlite.checkpoint.foreign.keys import Rename
    from composerlite.checkpoint.tools import converting
    from composerlite.checkpoint.tools.huggingface import write_accelerate_folder, write_trainer_folder

    if form == "directory":
        converting.write_directory(contents, path, manifest, overwrite=overwrite)
        return
    if form == "file":
        converting.write_file(contents, path, manifest, overwrite=overwrite)
        return
    writers = {
        "safetensors": converting.write_safetensors,
        "safetensors folder": converting.write_safetensors_folder,
        "state_dict": converting.write_state_dict,
        "lightning": converting.write_lightning,
        "transformers": write_trainer_folder,
        "accelerate": write_accelerate_folder,
    }
    old, _, new = (rename or "=").partition("=")
    writers[form](contents, path, source=source, rename=Rename(old, new), overwrite=overwrite)


def _form(path: Path, to: str | None) -> str:
    """One of ``_FORMS``, ``'safetensors folder'``, ``'file'`` or ``'directory'``; ConfigError."""
    from composerlite.checkpoint.format.packing import format_of

    if to is not None:
        if to not in _FORMS:
            forms = ", ".join(_FORMS)
            raise ConfigError(f"--to {to}: expected one of {forms}; the suffix of TARGET selects any other form.")
        return f"{to} folder" if to == "safetensors" and not path.name.endswith(".safetensors") else to
    if path.name.endswith(".safetensors"):
        return "safetensors"
    if path.name.endswith(".ckpt"):
        return "lightning"
    return "file" if format_of(path.name).suffix else "directory"
