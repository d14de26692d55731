"""Building of a Trainer from a checked configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composerlite.config.loading import kept_config
from composerlite.config.origin import Origin, YamlPath, dotted
from composerlite.config.registry import Family, find, import_attribute
from composerlite.config.schema import Component, Loader, RunConfig
from composerlite.errors import ConfigError

if TYPE_CHECKING:
    from composerlite.models import ComposerModel
    from composerlite.trainer import Trainer


def hyperparameters(config: RunConfig) -> dict[str, Any]:
    """Every setting by its name, such as ``'optimizer.lr'``, and the Trainer's own defaults.

    What depends on the environment is as the file writes it, ``${oc.env:NAME}``: loggers send what they get to others.
    """
    defaults = {name: value for name, value in vars(config.trainer).items() if value is not None}
    shown = {key: config.origin.shown((key,), value) for key, value in config.values.items() if key != "variables"}
    return {**{name: value for name, value in defaults.items() if name not in shown}, **dict(_flat(shown, ()))}


def _flat(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Values without parts of their own, and lists of such, by their dotted names."""
    parts = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        parts = enumerate(value)
    if not parts:
        yield dotted(path), value
    for key, inner in parts:
        yield from _flat(inner, (*path, str(key)))


def build_trainer(config: RunConfig, *, evaluates: str | None = None) -> Trainer:
    """The Trainer that ``config`` describes, ready to ``fit``. Its checkpoints keep ``config``.

    Every name and every argument is checked before the first object is built. ``seed`` is set before the model is
    built, so that its first weights are the same each time. The folders of the YAML files and the current directory
    are put first on ``sys.path`` and stay there.

    Args:
        config: the run.
        evaluates: a checkpoint. The trainer is for ``eval`` and ``predict`` alone, with the weights in it and what the
            algorithms need to evaluate them, such as an average. It has neither training data nor callbacks, loggers
            and checkpoints.

    Returns:
        The Trainer.

    Raises:
        ConfigError: a name, an argument or a value is wrong; the message names its place in the YAML.
        CheckpointError: the checkpoint to evaluate, or that of ``load_path``, cannot be loaded.
    """
    if evaluates is not None:
        config = _for_evaluation(config, evaluates)
    origin = config.origin
    for folder in (Path.cwd(), *(file.parent.resolve() for file in reversed(origin.files))):
        _make_importable(folder)

    make_model = find(config.model, None, origin)
    make_train_loader = _find_loader(config.train_loader, origin) if evaluates is None else lambda: None
    make_eval_loaders = [_find_loader(evaluation.loader, origin) for evaluation in config.eval_loaders]
    make_optimizer = None if config.optimizer is None else find(config.optimizer, "optimizer", origin, positional=1)
    make_schedulers = _find_all([] if config.scheduler is None else [config.scheduler], "scheduler", origin)
    make_algorithms = _find_all(config.algorithms, "algorithm", origin)
    make_callbacks = _find_all(config.callbacks, "callback", origin)
    make_loggers = _find_all(config.loggers, "logger", origin)

    from composerlite.core import Evaluator, seed_all
    from composerlite.trainer import Trainer

    if config.trainer.seed is not None:
        seed_all(config.trainer.seed)
    model = _checked_model(make_model(), config)
    evaluators = [
        Evaluator(dataloader=make(), **vars(evaluation.arguments))
        for make, evaluation in zip(make_eval_loaders, config.eval_loaders, strict=True)
    ]
    optimizer = None
    if make_optimizer is not None:
        with _rules_of_torch(("optimizer",), origin):
            optimizer = make_optimizer(model.parameters())
    trainer = Trainer(
        model=model,
        train_dataloader=make_train_loader(),
        eval_dataloader=evaluators or None,
        optimizers=optimizer,
        schedulers=[make() for make in make_schedulers],
        algorithms=[make() for make in make_algorithms],
        callbacks=[make() for make in make_callbacks],
        loggers=[make() for make in make_loggers],
        **vars(dataclasses.replace(config.trainer, auto_log_hparams=False)),
    )
    if config.trainer.auto_log_hparams:  # all of the configuration, and with the environment's secrets left out
        trainer.logger.log_hyperparameters(hyperparameters(config))
    trainer.state.script.settings = {**trainer.state.script.settings, "config": kept_config(config)}
    return trainer


def _for_evaluation(config: RunConfig, checkpoint: str) -> RunConfig:
    """``config`` with what trains and saves taken out, and the weights of ``checkpoint``."""
    from composerlite.checkpoint.contents import WEIGHTS_ONLY

    def leave_out_training(contents: dict[str, Any]) -> None:
        for key in contents["state"].keys() - {*WEIGHTS_ONLY, "timestamp"}:
            del contents["state"][key]

    nothing = {
        field.name: field.default
        for field in dataclasses.fields(config.trainer)
        if field.name.startswith(("save_", "autoresume"))
    }
    of_deepspeed = config.trainer.deepspeed_config is not None  # its files have what is left out, too
    trainer = dataclasses.replace(
        config.trainer,
        **nothing,
        load_path=checkpoint,
        load_weights_only=of_deepspeed,
        load_ignore_keys=None if of_deepspeed else leave_out_training,
    )
    stands_by = Component("decoupled_sgdw", {"lr": 0.1}, ("optimizer",))  # a Trainer has one: it holds no state
    return dataclasses.replace(config, optimizer=stands_by, scheduler=None, callbacks=[], loggers=[], trainer=trainer)


def _make_importable(folder: Path) -> None:
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))


def _find_all(components: Iterable[Component], family: Family, origin: Origin) -> list[Callable[[], Any]]:
    return [find(component, family, origin) for component in components]


def _find_loader(loader: Loader | Component, origin: Origin) -> Callable[[], Any]:
    """Return a function that builds the loader; names and arguments are checked now."""
    if isinstance(loader, Component):
        return find(loader, None, origin)
    make_dataset = find(loader.dataset, None, origin)
    arguments: dict[str, Any] = vars(loader.arguments).copy()
    if loader.arguments.collate_fn is not None:
        try:
            arguments["collate_fn"] = import_attribute(loader.arguments.collate_fn)
        except ConfigError as e:
            place = (*loader.path, "collate_fn")
            raise ConfigError(f"{origin.where(place)}: {dotted(place)}: {e}") from e

    def make() -> Any:
        from torch.utils.data import DataLoader

        dataset = make_dataset()
        with _rules_of_torch(loader.path, origin):
            return DataLoader(dataset, **arguments)

    return make


@contextlib.contextmanager
def _rules_of_torch(path: YamlPath, origin: Origin) -> Generator[None]:
    """Turn errors of torch (a negative learning rate, a batch of no samples) into errors of the configuration."""
    try:
        yield
    except ConfigError:
        raise  # it has its place already
    except ValueError as e:
        raise ConfigError(f"{origin.where(path)}: {dotted(path)}: {e}") from e


def _checked_model(model: Any, config: RunConfig) -> ComposerModel:
    from composerlite.models import ComposerModel

    if not isinstance(model, ComposerModel):
        raise ConfigError(
            f"{config.origin.where(('model',))}: model: {config.model.name!r} made a {type(model).__name__}: expected "
            "a ComposerModel; ComposerClassifier wraps a torch module that classifies."
        )
    return model
