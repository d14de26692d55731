"""``composerlite eval`` and ``predict``: use the weights of a checkpoint with the data of a run's YAML file.

No file of the run is changed. Modules with torch are imported when a command runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from composerlite.cli import options
from composerlite.cli.output import print_json
from composerlite.errors import CheckpointNotFoundError, ConfigError
from composerlite.storage import make_folder

if TYPE_CHECKING:
    from composerlite.checkpoint.tools.surveying import Found
    from composerlite.config import RunConfig
    from composerlite.trainer import Trainer


@click.command("eval")
@options.evaluated_run
@options.as_json
def evaluate(as_json: bool, **selection: Any) -> None:
    """Evaluate a checkpoint on each eval_loader of its run.

    Prints a line for each eval_loader with the loss and all metrics. Nothing is trained or saved.

    Exit status: 0 for success; 2 if the configuration or the command is wrong; 1 for any other error.
    """
    from composerlite.core import metric_values
    from composerlite.loggers.values import shown

    config, found = _select(**selection)
    with _build_trainer(config, found) as trainer:
        trainer.eval()
        state = trainer.state
        values = {one.label: metric_values(state.eval_metrics[one.label]) for one in state.evaluators}
    if state.rank == 0 and as_json:
        print_json({**_position(found), "metrics": values})
    elif state.rank == 0:
        for label, metrics in values.items():
            parts = shown({f"metrics/{label}/{name}": value for name, value in metrics.items()})
            click.echo(f"{label}: {', '.join(parts)}")


@click.command()
@options.evaluated_run
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    help="New file to write: a list of the outputs of each batch, for torch.load. With several ranks, a name with "
    "{rank}: each rank writes the outputs of its part of the data.",
)
@click.option("--data", metavar="LABEL", help="Label of the eval_loader, if there are several.")
def predict(output: str, data: str | None, **selection: Any) -> None:
    """Write the outputs of a checkpoint's model for each batch of an eval_loader of its run.

    Nothing is trained or saved. All outputs are in memory until they are written.

    Exit status: 0 for success; 2 if the configuration or the command is wrong; 1 for any other error.
    """
    from composerlite import dist
    from composerlite.checkpoint.record.naming import format_name_with_dist
    from composerlite.checkpoint.save.plain_file import write_torch

    if dist.get_world_size() > 1 and "{rank}" not in output:
        raise ConfigError(
            f"--output {output}: each rank writes a file. Expected a name with {{rank}}, such as preds-rank{{rank}}.pt."
        )
    path = Path(format_name_with_dist(output, ""))
    if path.exists():
        raise ConfigError(f"--output {path}: the file exists already. Pass another name.")
    config, found = _select(**selection)
    labels = [evaluator.arguments["label"] for evaluator in config.components["eval_loader"]]
    if data is None and len(labels) > 1:
        raise ConfigError(f"there are several eval_loaders: {', '.join(labels)}. Pass --data LABEL.")
    if data is not None and data not in labels:
        raise ConfigError(f"--data {data}: there is no such eval_loader. Expected one of {', '.join(labels)}.")
    label = labels[0] if data is None else data
    with _build_trainer(config, found) as trainer:
        evaluator = next(one for one in trainer.state.evaluators if one.label == label)
        limit = evaluator.subset_num_batches
        outputs = trainer.predict(evaluator.dataloader, -1 if limit is None else limit)
        make_folder(path.parent)
        write_torch(path, _plain(outputs), overwrite=False)
    click.echo(f"wrote {path}")


def _select(
    *, source: str, overrides: Sequence[str], checkpoint: str | None, trust_config: bool
) -> tuple[RunConfig, Found]:
    """Return the configuration and the checkpoint that the arguments select."""
    from composerlite.config import load_config

    if checkpoint is None and not source.lower().endswith((".yaml", ".yml")):
        found = _find(source)
        config = _saved_config(found, source, overrides, trust_config)
    else:
        config = load_config(source, overrides)
        if any(override.startswith("load_path=") for override in overrides):
            path = config.trainer.load_path
            raise ConfigError(f"load_path={path!r} is for training. To evaluate it pass --checkpoint {path}.")
        found = _find_newest(config) if checkpoint is None else _find(checkpoint)
    if not config.components["eval_loader"]:
        raise ConfigError(f"{config.origin.where()}: there is no eval_loader, so there is nothing to evaluate.")
    return config, found


def _find_newest(config: RunConfig) -> Found:
    """Return the newest good checkpoint in the ``save_folder`` of a run."""
    from composerlite.checkpoint.record.naming import format_name_with_dist
    from composerlite.trainer.build import resolve_run_name

    folder = config.trainer.save_folder
    if folder is None:
        raise ConfigError(f"{config.origin.where()}: there is no save_folder. Pass --checkpoint PLACE.")
    name, is_named = resolve_run_name(config.trainer.run_name, autoresume=config.trainer.autoresume)
    if "{run_name}" in folder and not is_named:
        fix = "Pass run_name=NAME, or --checkpoint PLACE"
        raise config.origin.value_error(("save_folder",), folder, f"the run has no name. {fix}.")
    try:
        return _find(format_name_with_dist(folder, name), name if is_named else None)
    except CheckpointNotFoundError as e:
        e.add_note("This is the save_folder of the run. To evaluate another checkpoint pass --checkpoint PLACE.")
        raise


def _saved_config(found: Found, source: str, overrides: Sequence[str], trust_config: bool) -> RunConfig:
    """Return the configuration in a checkpoint of ``composerlite train``."""
    from composerlite.checkpoint.tools.reading import metadata_of
    from composerlite.checkpoint.tools.surveying import pointed
    from composerlite.config import load_kept

    with pointed(found.uri) as target:
        settings = metadata_of(target.the_one()).get("settings")
    kept = cast("Mapping[str, Any]", settings).get("config") if isinstance(settings, Mapping) else None
    config = load_kept(kept, overrides)
    alternative = f"'composerlite eval CONFIG --checkpoint {source}' with the YAML file of the run"
    if config is None:
        raise ConfigError(
            f"{found.uri!r} has no configuration, since it was not saved by 'composerlite train', or it is a DeepSpeed "
            f"archive. Use {alternative}."
        )
    if not trust_config:
        model = config.components["model"][0].name
        raise ConfigError(
            f"the configuration in {found.uri!r} names code to run, such as {model!r}. If you trust the "
            f"author of the checkpoint, pass --trust-config; otherwise use {alternative}."
        )
    return config


def _find(text: str, run_name: str | None = None) -> Found:
    """Return the checkpoint at a path or URI, or the newest good checkpoint in a folder.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CorruptCheckpointError: the checkpoint is incomplete.
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
                f"no good checkpoint{of_run} in {text}. 'composerlite checkpoint ls' lists all."
            )
        return found


def _position(found: Found) -> dict[str, Any]:
    """Return URI, run, epoch and batch of a checkpoint."""
    time = {} if found.manifest is None else found.manifest.timestamp
    run = {"checkpoint": found.uri, "run_name": found.run_name}
    return {**run, "epoch": time.get("epoch"), "batch": time.get("batch")}


def _build_trainer(config: RunConfig, found: Found) -> Trainer:
    """Build the trainer with the weights of a checkpoint, and print the position of the checkpoint on stderr."""
    from composerlite.config import build_trainer

    logging.getLogger("composerlite").setLevel(logging.WARNING)
    trainer = build_trainer(config, evaluates=found.uri)
    if trainer.state.rank == 0:
        known = [
            f"{name.replace('_name', '')} {value}" for name, value in _position(found).items() if value is not None
        ]
        click.echo(", ".join(known), err=True)
    return trainer


def _plain(value: Any) -> Any:
    """Convert nested outputs to types that ``torch.load`` opens without running code."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.clone()  # torch.save would write the whole storage of a view
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in cast("Sequence[Any]", value)]
    raise ConfigError(
        f"the model returned a {type(value).__qualname__}: expected tensors, numbers and text in dicts and lists. "
        "Write an eval_forward that returns these types, or use Trainer.predict in Python."
    )
