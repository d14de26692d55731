"""``composerlite checkpoint …``: the commands and their options. What a command does is imported when it is run."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from composerlite.cli.output import chosen, one_line_errors
from composerlite.errors import ConfigError

__all__ = ["checkpoint_app"]

checkpoint_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Places = Annotated[
    list[str], typer.Argument(help="Folders of checkpoints, or their URIs: s3://bucket/run.", metavar="PLACE")
]
Checkpoint = Annotated[
    str, typer.Argument(help="The path or the URI of a checkpoint, or of a link to one.", metavar="CHECKPOINT")
]
Run = Annotated[str | None, typer.Option("--run", help="Only checkpoints of the run of this name.", metavar="NAME")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Tell what would be done, and do nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@checkpoint_app.callback()
def _group() -> None:  # pyright: ignore[reportUnusedFunction]  (typer calls it)
    """List, verify, copy, compare, convert and remove checkpoints, in folders and buckets.

    Exit status of every command: 0; 1 if something is wrong with a checkpoint or a store; 2 if the command is.
    """


@checkpoint_app.command("ls")
def ls(
    places: Places,
    run: Run = None,
    sort: Annotated[str, typer.Option("--sort", help="age, name, size or saved.")] = "age",
    as_json: Json = False,
) -> None:
    """List the checkpoints in PLACE: whether each is whole, of which moment, how large.

    No data file is opened: 'verify' reads them.
    """
    with one_line_errors():
        from composerlite.cli.listing import Order, list_checkpoints

        list_checkpoints(places, run=run, sort=chosen(Order, sort, "--sort"), as_json=as_json)


@checkpoint_app.command("latest")
def latest(places: Places, run: Run = None, as_json: Json = False) -> None:
    """Print the path or the URI of the newest committed checkpoint in PLACE. Exit status 1: there is none."""
    with one_line_errors():
        from composerlite.cli.listing import print_latest

        print_latest(places, run=run, as_json=as_json)


@checkpoint_app.command("inspect")
def inspect(
    checkpoint: Checkpoint,
    depth: Annotated[int | None, typer.Option("--depth", help="Show so many levels of keys.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Show the keys in CHECKPOINT, with shapes, types and bytes.

    Nothing in it is run, and the bytes of its tensors are read only where it is compressed.
    """
    with one_line_errors():
        from composerlite.cli.inspection import inspect as show

        show(checkpoint, depth=depth, as_json=as_json)


@checkpoint_app.command("verify")
def verify(
    targets: Annotated[
        list[str], typer.Argument(help="Checkpoints, or folders or URIs of such.", metavar="CHECKPOINT")
    ],
    run: Run = None,
    as_json: Json = False,
) -> None:
    """Read CHECKPOINT, or all in a folder, and compare every byte with the manifest.

    Exit status 1: something is damaged; what, is listed. What has no manifest is told to be unverified.
    """
    with one_line_errors():
        from composerlite.cli.verification import verify as compare

        compare(targets, run=run, as_json=as_json)


@checkpoint_app.command("prune")
def prune(
    places: Places,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", help="The newest so many stay.", min=1, metavar="N")
    ] = None,
    keep_every: Annotated[
        str | None,
        typer.Option("--keep-every", help="The first at or after each multiple stays: 10ep, 5000ba.", metavar="TIME"),
    ] = None,
    best_k: Annotated[
        int | None, typer.Option("--best-k", help="The best so many by --best-metric stay.", min=1, metavar="K")
    ] = None,
    best_metric: Annotated[str | None, typer.Option("--best-metric", help="As 'ls' shows it.", metavar="NAME")] = None,
    best_mode: Annotated[str, typer.Option("--best-mode", help="max or min: which values are better.")] = "max",
    abandoned: Annotated[
        bool, typer.Option("--abandoned", help="Remove what runs left behind that were started over, too.")
    ] = False,
    run: Run = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Remove the checkpoints in PLACE that no rule keeps. Each run and each file name template counts by itself.

    The newest always stays, and so does what is torn. A run that was started over has left the checkpoints of the
    attempt before: they count for nothing, and stay without --abandoned. Ephemeral checkpoints go, but for the newest.
    """
    with one_line_errors():
        from composerlite.checkpoint.record.retention import retention_policy
        from composerlite.cli.sweeping import Sweep
        from composerlite.cli.sweeping import prune as remove
        from composerlite.core import Time

        if keep_last is None and keep_every is None and best_k is None and best_metric is None and not abandoned:
            raise ConfigError("prune: which are to stay? Give --keep-last, --keep-every, --best-k or --abandoned.")
        if (best_k is None) != (best_metric is None):
            raise ConfigError("prune: --best-k 3 and --best-metric NAME go together; 'ls' shows the metrics there are.")
        policy = retention_policy(
            -1 if keep_last is None else keep_last,
            keep_every=None if keep_every is None else Time.from_timestring(keep_every),
            best_k=best_k,
            best_metric=best_metric,
            best_mode=best_mode,
        )
        sweep = Sweep(dry_run=dry_run, as_json=as_json)
        remove(places, policy, run=run, with_abandoned=abandoned, sweep=sweep)


@checkpoint_app.command("gc")
def gc(
    places: Places,
    orphans: Annotated[
        bool,
        typer.Option("--orphans", help="Remove data without a manifest, too: also what other programs have saved."),
    ] = False,
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than", help="Orphans, and parts of uploads, go if they are as old as that.", metavar="TIME"
        ),
    ] = "24h",
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Remove what processes that died have left in PLACE: temporary files, parts of uploads. No checkpoint goes.

    What a process that lives is writing on this machine's disks stays.
    """
    with one_line_errors():
        from composerlite.cli.sweeping import Sweep, collect

        collect(places, orphans=orphans, older_than=age(older_than), sweep=Sweep(dry_run=dry_run, as_json=as_json))


Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace another checkpoint of the same name, which goes first.")
]
Link = Annotated[
    str | None,
    typer.Option("--link", help="Have this link lead to it then, as latest-rank0.pt.", metavar="NAME"),
]
Names = Annotated[
    list[str] | None, typer.Argument(help="As 'ls' names them; the newest if none is given.", metavar="NAME")
]
All = Annotated[bool, typer.Option("--all", help="All that are committed.")]


@checkpoint_app.command("cp")
def cp(
    source: Checkpoint,
    target: Annotated[str, typer.Argument(help="The folder, or the URI, that gets it.", metavar="PLACE")],
    overwrite: Overwrite = False,
    link: Link = None,
    as_json: Json = False,
) -> None:
    """Copy CHECKPOINT to PLACE under its name: between folders and buckets, every byte verified, its manifest last.

    A copy that was interrupted goes on where it was.
    """
    with one_line_errors():
        from composerlite.cli.copies import Copying, copy_one

        copy_one(source, target, Copying(overwrite=overwrite, link=link, as_json=as_json))


@checkpoint_app.command("push")
def push(
    folder: Annotated[str, typer.Argument(help="A folder of checkpoints.", metavar="FOLDER")],
    target: Annotated[str, typer.Argument(help="Where to: s3://bucket/run.", metavar="URI")],
    names: Names = None,
    everything: All = False,
    overwrite: Overwrite = False,
    link: Link = None,
    as_json: Json = False,
) -> None:
    """Copy checkpoints of FOLDER to a bucket, as 'cp' does: the newest, those that are named, or all."""
    with one_line_errors():
        from composerlite.cli.copies import Copying, copy_many, local, remote

        copying = Copying(overwrite=overwrite, link=link, as_json=as_json)
        copy_many(local(folder, "push"), remote(target, "push"), names or (), everything=everything, copying=copying)


@checkpoint_app.command("pull")
def pull(
    source: Annotated[str, typer.Argument(help="Where from: s3://bucket/run.", metavar="URI")],
    folder: Annotated[str, typer.Argument(help="The folder that gets them.", metavar="FOLDER")],
    names: Names = None,
    everything: All = False,
    overwrite: Overwrite = False,
    link: Link = None,
    as_json: Json = False,
) -> None:
    """Copy checkpoints from a bucket to FOLDER, as 'cp' does: the newest, those that are named, or all."""
    with one_line_errors():
        from composerlite.cli.copies import Copying, copy_many, local, remote

        copying = Copying(overwrite=overwrite, link=link, as_json=as_json)
        copy_many(remote(source, "pull"), local(folder, "pull"), names or (), everything=everything, copying=copying)


@checkpoint_app.command("diff")
def diff(
    a: Annotated[str, typer.Argument(help="A checkpoint.", metavar="A")],
    b: Annotated[str, typer.Argument(help="Another.", metavar="B")],
    everything: Annotated[
        bool, typer.Option("--all", help="Compare all that they hold, and not the weights alone.")
    ] = False,
    top: Annotated[int, typer.Option("--top", help="Show so many of the largest changes.", min=0)] = 20,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit status 1 if they differ.")] = False,
    as_json: Json = False,
) -> None:
    """Show how A and B differ: keys that only one has, shapes and types, and by how much the numbers changed.

    They may be in different places and of different forms. Both are read into memory.
    """
    with one_line_errors():
        from composerlite.cli.inspection import diff as compare

        compare(a, b, everything=everything, top=top, exit_code=exit_code, as_json=as_json)


@checkpoint_app.command("unshard")
def unshard(
    checkpoint: Checkpoint,
    folder: Annotated[str, typer.Argument(help="The folder to write to.", metavar="FOLDER")],
    safetensors: Annotated[bool, typer.Option("--safetensors", help="Write safetensors, of the model alone.")] = False,
    optim: Annotated[
        bool | None, typer.Option("--optim/--no-optim", help="Write the optimizer, too. If there is one, if not said.")
    ] = None,
    per_tensor: Annotated[bool, typer.Option("--per-tensor", help="A file for each tensor.")] = False,
    chunk_bytes: Annotated[
        int | None, typer.Option("--chunk-bytes", help="Files of about so many bytes.", min=1, metavar="BYTES")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write to a folder that is not empty.")] = False,
    as_json: Json = False,
) -> None:
    """Write the model, and the optimizer, of the sharded CHECKPOINT to files that torch.load or safetensors opens."""
    with one_line_errors():
        from composerlite.cli.conversion import Cut
        from composerlite.cli.conversion import unshard as write

        cut = Cut(per_tensor=per_tensor, chunk_bytes=chunk_bytes)
        write(checkpoint, folder, cut, safetensors=safetensors, optim=optim, overwrite=overwrite, as_json=as_json)


@checkpoint_app.command("convert")
def convert(
    checkpoint: Checkpoint,
    target: Annotated[
        str | None, typer.Argument(help="The file or directory to write.", metavar="TARGET", show_default=False)
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Another way to say TARGET.", metavar="TARGET")
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="huggingface: a folder for from_pretrained.", metavar="FORM")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of the weights, with --to huggingface: bfloat16.", metavar="TYPE")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write CHECKPOINT in another form, which the end of TARGET's name tells, or --to.

    .pt, .pt.zst, .tar.gz and the like: a file. None: a directory that any number of ranks loads. Both resume a run
    that was saved. .safetensors: the weights alone. --to huggingface: what a HuggingFaceModel has trained, as
    save_pretrained writes it; and CHECKPOINT can be such a folder, to load into a HuggingFaceModel.
    """
    with one_line_errors():
        from composerlite.cli.conversion import convert as write

        write(checkpoint, one_target(target, output), to=to, dtype=dtype, overwrite=overwrite, as_json=as_json)


def one_target(target: str | None, output: str | None) -> str:
    """What of the two was given.

    Raises:
        ConfigError: both were, or none.
    """
    if (target is None) is (output is None):
        given = "neither" if target is None else f"{target} and --output {output}"
        raise ConfigError(f"convert: want TARGET or --output TARGET, and got {given}.")
    return target if target is not None else str(output)


def age(text: str) -> timedelta:
    """The time that ``--older-than`` gives.

    Raises:
        ConfigError: it is none.
    """
    from composerlite.core import Time, TimeUnit

    time = Time.from_timestring(text)
    if time.unit is not TimeUnit.SECOND or time.value < 0:
        raise ConfigError(f"--older-than {text}: want a time by the clock, as '24h', '90m' or '0s'.")
    return timedelta(seconds=float(time.value))
