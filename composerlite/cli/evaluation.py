"""``composerlite eval`` and ``predict``: the weights of a checkpoint on the data that a run's YAML file names.

Nothing is trained, saved or deleted, and no file of the run is changed. torch is imported when they are run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import click

from composerlite.cli import options
from composerlite.cli.output import print_json, readable_errors
from composerlite.errors import CheckpointNotFoundError, ConfigError
from composerlite.storage import make_folder

if TYPE_CHECKING:
    from composerlite.checkpoint.tools.surveying import Found
    from composerlite.config import RunConfig
    from composerlite.core import Evaluator
    from composerlite.trainer import Trainer

F = TypeVar("F", bound=Callable[..., Any])


def _of_a_run(command: F) -> F:
    """Give ``command`` the arguments that say what is evaluated."""
    for argument in (
        click.option("--traceback", is_flag=True, help="Show where in the code an error was raised."),
        click.option(
            "--trust-config",
            is_flag=True,
            help="Use the configuration that CHECKPOINT keeps. Whatever code it names is run.",
        ),
        click.option(
            "--checkpoint",
            metavar="PLACE",
            help="The weights: a checkpoint, or a folder or URI of such, of which it is the newest good one. Without "
            "it, the newest good one in the save_folder of CONFIG, of its run_name if it has one.",
        ),
        click.argument(
            "overrides", metavar="[KEY=VALUE]...", nargs=-1, help="Values that replace those of the configuration."
        ),
        click.argument(
            "source",
            metavar="CONFIG|CHECKPOINT",
            help="The YAML file of a run; or a checkpoint of 'composerlite train', or a folder or URI of such, which "
            "keeps its configuration.",
        ),
    ):
        command = argument(command)
    return command


@click.command("eval")
@_of_a_run
@options.as_json
def evaluate(traceback: bool, as_json: bool, **what: Any) -> None:
    """Evaluate a checkpoint on each eval_loader of its run.

    Prints a line for each, with the loss and all metrics. Nothing is trained or saved.

    Exit status: 0; 2 if the configuration or the command is wrong; 1 if anything else is.
    """
    with readable_errors(traceback=traceback):
        chosen = _chosen(**what)
        with _trainer(chosen) as trainer:
            from composerlite.core import metric_values

            trainer.eval()
            state = trainer.state
            values = {one.label: metric_values(state.eval_metrics[one.label]) for one in state.evaluators}
        if state.rank == 0 and as_json:
            print_json({**chosen.described(), "metrics": values})
        elif state.rank == 0:
            from composerlite.loggers.values import shown

            for label, measured in values.items():
                parts = shown({f"metrics/{label}/{name}": value for name, value in measured.items()})
                click.echo(f"{label}: {', '.join(parts)}")


@click.command()
@_of_a_run
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    help="The file to write, which must not be there: a list of the outputs of each batch, for torch.load. "
    "With several ranks a name with {rank}, and each writes the outputs of its part of the data.",
)
@click.option("--data", metavar="LABEL", help="The eval_loader of this label, where there are several.")
def predict(traceback: bool, output: str, data: str | None, **what: Any) -> None:
    """Write the outputs of a checkpoint's model for each batch of an eval_loader of its run.

    Nothing is trained or saved. The outputs are in memory until they are written.

    Exit status: 0; 2 if the configuration or the command is wrong; 1 if anything else is.
    """
    with readable_errors(traceback=traceback):
        from composerlite.checkpoint.save.plain_file import write_torch

        path = _path_to_write(output)
        chosen = _chosen(**what)
        label = _label(chosen.config, data)
        with _trainer(chosen) as trainer:
            evaluator: Evaluator = next(one for one in trainer.state.evaluators if one.label == label)
            limit = evaluator.subset_num_batches
            outputs = trainer.predict(evaluator.dataloader, -1 if limit is None else limit)
            make_folder(path.parent)
            write_torch(path, _plain(outputs), overwrite=False)
        click.echo(f"wrote {path}")


# ── what is evaluated ────────────────────────────────────────────────────────────────────────────────────────────────
class _Chosen(NamedTuple):
    """A run, and the checkpoint of it that is evaluated."""

    config: RunConfig
    checkpoint: Found

    def described(self) -> dict[str, Any]:
        """The checkpoint as JSON has it. What is not known is ``null``."""
        found = self.checkpoint
        time = {} if found.manifest is None else found.manifest.timestamp
        counts = {"epoch": time.get("epoch"), "batch": time.get("batch")}
        return {"checkpoint": found.uri, "run_name": found.run_name, **counts}


def _chosen(*, source: str, overrides: Sequence[str], checkpoint: str | None, trust_config: bool) -> _Chosen:
    from composerlite.config import load_config

    if checkpoint is not None or source.lower().endswith((".yaml", ".yml")):
        config = load_config(source, overrides)
        if ("load_path",) in config.origin.overrides:
            path = config.trainer.load_path
            raise ConfigError(
                f"load_path={path!r} is what training begins with. To evaluate it pass --checkpoint {path}."
            )
        chosen = _Chosen(config, _of_config(config) if checkpoint is None else _found(checkpoint))
    else:
        chosen = _keeping(source, overrides, trust_config)
    if not chosen.config.eval_loaders:
        raise ConfigError(f"{chosen.config.origin.where()}: there is no eval_loader, and nothing to evaluate on.")
    return chosen


def _of_config(config: RunConfig) -> Found:
    """The newest good checkpoint of the run."""
    from composerlite.checkpoint.record.naming import format_name_with_dist
    from composerlite.trainer.build import resolve_run_name

    folder = config.trainer.save_folder
    if folder is None:
        raise ConfigError(f"{config.origin.where()}: there is no save_folder. Pass --checkpoint PLACE.")
    name, is_named = resolve_run_name(config.trainer.run_name, autoresume=config.trainer.autoresume)
    if "{run_name}" in folder and not is_named:
        raise ConfigError(
            f"{config.origin.says(('save_folder',), folder)}: nothing says which run is meant. Pass run_name=NAME, or "
            "--checkpoint PLACE."
        )
    try:
        return _found(format_name_with_dist(folder, name), name if is_named else None)
    except CheckpointNotFoundError as e:
        e.add_note("It is the save_folder of the run: --checkpoint PLACE evaluates another checkpoint.")
        raise


def _keeping(source: str, overrides: Sequence[str], trust_config: bool) -> _Chosen:
    """The checkpoint at ``source`` and the configuration that it keeps."""
    from composerlite.checkpoint.tools.reading import metadata_of
    from composerlite.checkpoint.tools.surveying import pointed
    from composerlite.config import load_kept

    found = _found(source)
    with pointed(found.uri) as target:
        settings = metadata_of(target.the_one()).get("settings")
    kept = cast("Mapping[str, Any]", settings).get("config") if isinstance(settings, Mapping) else None
    config = load_kept(kept, overrides)
    way = f"'composerlite eval CONFIG --checkpoint {source}', with the YAML file of the run"
    if config is None:
        raise ConfigError(
            f"{found.uri!r} keeps no configuration that could be read: it is of an earlier version, not of "
            f"'composerlite train', or an archive of DeepSpeed. Run {way}."
        )
    if not trust_config:
        raise ConfigError(
            f"{found.uri!r} keeps the configuration of its run, which names code that would be run, such as "
            f"{config.model.name!r}. If you trust whoever made the checkpoint, add --trust-config; else run {way}."
        )
    return _Chosen(config, found)


def _found(text: str, run_name: str | None = None) -> Found:
    """Find the checkpoint at ``text``, or the newest good checkpoint in that place.

    Raises:
        CheckpointNotFoundError: there is none.
        CorruptCheckpointError: it is incomplete.
    """
    from composerlite.checkpoint.tools.surveying import newest, pointed

    with pointed(text) as target:
        if target.name is not None:
            return target.the_one(whole=True)
        listed = [one for one in target.found() if run_name in (None, one.run_name)]
        found = newest(one for one in listed if one.manifest is None or not one.manifest.run.not_finite)
        if found is None:
            of_run = "" if run_name is None else f" of run {run_name!r}"
            raise CheckpointNotFoundError(
                f"no good checkpoint{of_run} in {text}: 'composerlite checkpoint ls' shows what is there."
            )
        return found


def _trainer(chosen: _Chosen) -> Trainer:
    """The trainer with the weights, which says nothing but what is wrong; and the checkpoint, on stderr."""
    from composerlite.config import build_trainer

    logging.getLogger("composerlite").setLevel(logging.WARNING)
    trainer = build_trainer(chosen.config, evaluates=chosen.checkpoint.uri)
    if trainer.state.rank == 0:
        parts = (
            f"{name.replace('_name', '')} {value}" for name, value in chosen.described().items() if value is not None
        )
        click.echo(", ".join(parts), err=True)
    return trainer


# ── what is written ──────────────────────────────────────────────────────────────────────────────────────────────────
def _path_to_write(output: str) -> Path:
    from composerlite import dist
    from composerlite.checkpoint.record.naming import format_name_with_dist

    if dist.get_world_size() > 1 and "{rank}" not in output:
        raise ConfigError(
            f"--output {output}: each rank writes a file. Expected a name with {{rank}}, such as preds-rank{{rank}}.pt."
        )
    path = Path(format_name_with_dist(output, ""))
    if path.exists():
        raise ConfigError(f"--output {path}: the file exists already. Pass another name.")
    return path


def _label(config: RunConfig, wanted: str | None) -> str:
    labels = [one.arguments.label for one in config.eval_loaders]
    if wanted is None and len(labels) > 1:
        raise ConfigError(f"there are several eval_loader: {', '.join(labels)}. Pass one of them as --data LABEL.")
    if wanted is not None and wanted not in labels:
        raise ConfigError(f"--data {wanted}: there is no such eval_loader. Expected one of {', '.join(labels)}.")
    return labels[0] if wanted is None else wanted


def _plain(value: Any) -> Any:
    """``value`` of tensors, numbers and texts in dicts and lists: what torch.load opens without running code."""
    import torch

    if isinstance(value, torch.Tensor):
        is_part = value.untyped_storage().nbytes() > value.numel() * value.element_size()
        return value.clone() if is_part else value  # a part would be written with the whole
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in cast("Sequence[Any]", value)]
    raise ConfigError(
        f"the model gives a {type(value).__qualname__}, and a file has tensors, numbers and texts in dicts and "
        "lists. Write an eval_forward that returns such, or use Trainer.predict in Python."
    )
