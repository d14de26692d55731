"""Building of a Trainer from a checked configuration."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from composerlite.config.arguments import Component, arguments_of, check_types
from composerlite.config.origin import Origin, dotted, walk
from composerlite.config.registry import find, is_library
from composerlite.config.schema import COMPONENTS, RunConfig
from composerlite.errors import ConfigError

if TYPE_CHECKING:
    from composerlite.trainer import Trainer


def build_trainer(config: RunConfig, *, evaluates: str | None = None) -> Trainer:
    """Build the Trainer of a configuration, ready to ``fit``. Checkpoints of the Trainer contain ``config``.

    Names and arguments are checked before the first object is built. ``seed`` is set before the model is built, so
    the initial weights are reproducible. The folders of the YAML files and the current directory are put first on
    ``sys.path`` and stay there.

    Args:
        config: the configuration of the run.
        evaluates: path or URI of a checkpoint to evaluate. The trainer then has the weights of the checkpoint and the
            state of algorithms for evaluation, such as an average, but no training data, callbacks, loggers and saves.

    Returns:
        The Trainer.

    Raises:
        ConfigError: a name, an argument or a value is wrong. The message names the place in the YAML.
        CheckpointError: the checkpoint of ``evaluates`` or ``load_path`` cannot be loaded.

    Example::

        with build_trainer(load_config("configs/digits.yaml")) as trainer:
            trainer.fit()
    """
    if evaluates is not None:
        config = _for_evaluation(config, evaluates)
    origin = config.origin
    for folder in (Path.cwd(), *(file.parent.resolve() for file in reversed(origin.files))):
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        sys.path.insert(0, str(folder))
    for components in config.components.values():
        for component in components:
            find(component, origin)

    from composerlite.core import seed_all
    from composerlite.models import ComposerModel
    from composerlite.trainer import Trainer

    if config.trainer.seed is not None:
        seed_all(config.trainer.seed)
    model_component = config.components["model"][0]
    model = _build(model_component, origin)
    if not isinstance(model, ComposerModel):
        kind, wrapper = type(model).__name__, "ComposerClassifier wraps a torch module for classification"
        raise origin.error(("model",), f"{model_component.name!r} made a {kind}, not a ComposerModel. {wrapper}.")
    built: dict[str, list[Any]] = {}
    for key in COMPONENTS[1:]:
        first = [model.parameters()] if key == "optimizer" else []
        built[key] = [_build(component, origin, *first) for component in config.components.get(key, [])]
    plain: dict[str, Any] = {**vars(config.trainer), "auto_log_hparams": False}  # the Trainer knows less to log
    trainer = Trainer(
        model=model,
        train_dataloader=built["train_loader"][0] if built["train_loader"] else None,
        eval_dataloader=built["eval_loader"] or None,
        optimizers=built["optimizer"] or None,
        schedulers=built["scheduler"],
        algorithms=built["algorithms"],
        callbacks=built["callbacks"],
        loggers=built["loggers"],
        **plain,
    )
    if config.trainer.auto_log_hparams:
        trainer.logger.log_hyperparameters(_hyperparameters(config))
    kept = {"yaml": config.resolved, "files": [str(file.resolve()) for file in origin.files]}  # for load_kept
    trainer.state.script.settings = {**trainer.state.script.settings, "config": kept}
    return trainer


def _hyperparameters(config: RunConfig) -> dict[str, Any]:
    """Return every setting by dotted name. Values from the environment are unresolved: loggers may publish settings."""
    values = {key: value for key, value in {**vars(config.trainer), **config.values}.items() if key != "variables"}
    settings = walk(config.origin.shown((), values))
    return {dotted(path): value for path, value in settings if path and not isinstance(value, dict | list)}


def _for_evaluation(config: RunConfig, checkpoint: str) -> RunConfig:
    """Return ``config`` without training and saves, and with the weights of ``checkpoint``."""
    from composerlite.checkpoint.contents import WEIGHTS_ONLY

    def without_training(contents: dict[str, Any]) -> None:
        for key in contents["state"].keys() - {*WEIGHTS_ONLY, "timestamp"}:
            del contents["state"][key]

    kept = {k: v for k, v in vars(config.trainer).items() if not k.startswith(("save_", "autoresume"))}
    is_deepspeed = config.trainer.deepspeed_config is not None  # DeepSpeed's files always contain the whole state
    kept["load_path"], kept["load_weights_only"] = checkpoint, is_deepspeed
    kept["load_ignore_keys"] = None if is_deepspeed else without_training
    placeholder = Component("decoupled_sgdw", {"lr": 0.1}, ("optimizer",), "optimizer")  # a Trainer needs an optimizer
    used = {key: config.components[key] for key in ("model", "eval_loader", "algorithms")}
    trainer, components = SimpleNamespace(**kept), {**used, "optimizer": [placeholder]}
    return dataclasses.replace(config, components=components, trainer=trainer)


def _build(component: Component, origin: Origin, *positional: Any) -> Any:
    """Build ``component``, nested components first.

    Raises:
        ConfigError: a class of composerlite or torch refuses a value, or another class an argument of a wrong type.
            Other errors of your own code are passed on.
    """
    target = find(component, origin)
    arguments = {k: _build(v, origin) if isinstance(v, Component) else v for k, v in component.arguments.items()}
    try:
        return target(*positional, **arguments)
    except ConfigError as e:
        raise origin.error(component.path, str(e)) from e
    except (TypeError, ValueError) as e:
        if is_library(target):
            raise origin.error(component.path, f"{type(e).__name__}: {e}") from e
        check_types(arguments_of(target), component.arguments, component.path, origin)
        raise
