"""State to checkpoint contents and back.

The shape is Composer's: a dict with the keys of ``State.serialized_attributes`` plus ``integrations`` and ``metadata``;
``model`` loads into the bare model, optimizer state is keyed by parameter name, schedulers, callbacks and algorithms by
class name (``EarlyStopper``, ``EarlyStopper:1``, …). Only plain types and tensors are produced here, so that
``torch.load(weights_only=True)`` opens the file anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from composerlite.core.algorithm import Algorithm
from composerlite.core.event import Event
from composerlite.core.logger import Logger
from composerlite.core.optimizer_state import clean_name, load_named_optimizer_state, named_optimizer_state
from composerlite.core.time import Timestamp
from composerlite.errors import IncompatibleCheckpointError
from composerlite.types import StateDict

if TYPE_CHECKING:
    from torchmetrics import Metric

    from composerlite.core.state import State

__all__ = ["full_state", "load_full_state", "load_weights", "stable_names", "weights_state"]

log = logging.getLogger(__name__)
T = TypeVar("T")


def stable_names(items: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Name each item: the first of a name keeps it, the next ones get ``:1``, ``:2``, … in order."""
    named: dict[str, T] = {}
    count: dict[str, int] = {}
    for name, item in items:
        number = count.get(name, 0)
        count[name] = number + 1
        named[name if number == 0 else f"{name}:{number}"] = item
    return named


def _by_class(items: Iterable[T]) -> dict[str, T]:
    return stable_names((type(item).__qualname__, item) for item in items)


# ── saving ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def full_state(state: State) -> StateDict:
    """Everything a full checkpoint holds under ``state``. Tensors are those in use: copy them before training on."""
    position = state.data_position
    return {
        "model": _model_state(state.model),
        "optimizers": {name: named_optimizer_state(o, state.model) for name, o in _by_class(state.optimizers).items()},
        "schedulers": {name: scheduler.state_dict() for name, scheduler in _by_class(state.schedulers).items()},
        "algorithms": [
            (name, _algorithm_state(algorithm, algorithm.state_dict()))
            for name, algorithm in stable_names((a.state_key, a) for a in state.algorithms).items()
        ],
        "callbacks": {
            name: callback.state_dict()
            for name, callback in stable_names((c.state_key, c) for c in state.callbacks).items()
        },
        "scaler": {} if state.scaler is None else {type(state.scaler).__qualname__: state.scaler.state_dict()},
        "timestamp": {"Timestamp": state.timestamp.plain()},
        "rank_zero_seed": state.rank_zero_seed,
        "train_metrics": _metric_states(state.train_metrics) if state.save_metrics else {},
        "eval_metrics": (
            {label: _metric_states(metrics) for label, metrics in state.eval_metrics.items()}
            if state.save_metrics
            else {}
        ),
        "run_name": state.run_name,
        "dataset_state": (
            state.dataset_state if position is None else {**state.dataset_state, "train": position.state_dict()}
        ),
        "integrations": {},
        "metadata": _metadata(state),
    }


def weights_state(state: State) -> StateDict:
    """What a weights-only checkpoint holds under ``state``, and the algorithms without which the weights do not fit."""
    required = [(a.state_key, _algorithm_state(a, {})) for a in state.algorithms if a.required_on_load()]
    contents: StateDict = {"model": _model_state(state.model), "integrations": {}, "metadata": _metadata(state)}
    return {**contents, "algorithms": required} if required else contents


def _algorithm_state(algorithm: Algorithm, state: StateDict) -> StateDict:
    """``repr`` is for people: nothing evaluates it."""
    return {
        "repr": repr(algorithm),
        "required": algorithm.required_on_load(),
        "config": algorithm.config(),
        "state": state,
    }


def _model_state(model: nn.Module) -> StateDict:
    return {clean_name(name): value for name, value in model.state_dict().items()}


def _metadata(state: State) -> StateDict:
    metadata: StateDict = {
        "composerlite_version": version("composerlite"),
        "torch_version": str(torch.__version__),
        "device": state.device.type,
        "precision": state.precision.value,
        "world_size": state.world_size,
        "device_train_microbatch_size": state.device_train_microbatch_size,
        "fit_starts": [start.plain() for start in state.fit_starts],
    }
    batch_size = getattr(state.train_dataloader, "batch_size", None)
    return metadata if batch_size is None else {**metadata, "train_dataloader_batch_size": batch_size}


def _metric_states(metrics: Mapping[str, Metric]) -> StateDict:
    states: StateDict = {}
    for name, metric in metrics.items():
        metric.persistent(True)  # torchmetrics leaves its state out of state_dict() unless told otherwise
        states[name] = {"state_dict": metric.state_dict(), "update_count": metric.update_count}
    return states


# ── restoring ────────────────────────────────────────────────────────────────────────────────────────────────────────
def load_weights(
    state: State, contents: StateDict, *, strict: bool, exclude_algorithms: Sequence[str], source: str
) -> None:
    """Restore the model. Algorithms that changed its structure are applied first.

    Raises:
        IncompatibleCheckpointError: names or shapes differ; all differences are in the message. With ``strict=False``
            only shapes must agree.
    """
    _apply_required_algorithms(state, contents, exclude_algorithms)
    if "model" not in contents:
        log.warning(
            "%s holds no model weights, or load_ignore_keys leaves them all out: the model stays as it is", source
        )
        return
    _load_model(state.model, contents["model"], strict=strict, source=source)


def load_full_state(
    state: State, contents: StateDict, *, strict: bool, exclude_algorithms: Sequence[str], source: str
) -> None:
    """Restore the model and everything else that ``contents`` holds.

    What is there on one side only is said: a part that the checkpoint lacks stays as it is and is logged as a warning.

    Raises:
        IncompatibleCheckpointError: the model or an optimizer does not fit.
    """
    load_weights(state, contents, strict=strict, exclude_algorithms=exclude_algorithms, source=source)

    _check_optimizers(state, contents, source)
    for name, optimizer in _by_class(state.optimizers).items():
        if "optimizers" in contents:
            load_named_optimizer_state(optimizer, state.model, contents["optimizers"][name], source=source)
    for saved, scheduler in _matching(_by_class(state.schedulers), contents, "schedulers", source):
        scheduler.load_state_dict(saved)
    algorithms = {
        name: saved for name, saved in contents.get("algorithms", ()) if name.split(":")[0] not in exclude_algorithms
    }
    own_algorithms = stable_names((a.state_key, a) for a in state.algorithms)
    for saved, algorithm in _matching(own_algorithms, {"algorithms": algorithms}, "algorithms", source):
        algorithm.load_state_dict(saved.get("state", saved))  # Composer stores the state itself
    own_callbacks = stable_names((c.state_key, c) for c in state.callbacks)
    for saved, callback in _matching(own_callbacks, contents, "callbacks", source):
        callback.load_state_dict(saved)
    if state.scaler is not None and contents.get("scaler"):
        state.scaler.load_state_dict(next(iter(contents["scaler"].values())))
    if "timestamp" in contents:
        state.timestamp = Timestamp.from_state_dict(contents["timestamp"]["Timestamp"])
        state.previous_timestamp = None
    if contents.get("run_name") == state.run_name:  # the same run goes on: its calls of fit count from where they did
        starts = contents.get("metadata", {}).get("fit_starts", ())
        state.fit_starts = [Timestamp.from_state_dict(start) for start in starts]
    if "rank_zero_seed" in contents:
        state.rank_zero_seed = int(contents["rank_zero_seed"])
    if "dataset_state" in contents:
        state.dataset_state = contents["dataset_state"]
    if state.auto_microbatching and (size := contents.get("metadata", {}).get("device_train_microbatch_size")):
        state.device_train_microbatch_size = size
    _load_metrics(state, contents)


def _load_model(model: nn.Module, saved: StateDict, *, strict: bool, source: str) -> None:
    """Load ``saved`` or say everything that does not fit, before a single weight is changed."""
    own = {clean_name(name): (name, value) for name, value in model.state_dict().items()}
    saved = {clean_name(name): value for name, value in saved.items()}
    missing = [name for name in own if name not in saved]
    unexpected = [name for name in saved if name not in own]
    shapes = [
        f"{name}: {tuple(value.shape)} in the checkpoint, {tuple(own[name][1].shape)} in the model"
        for name, value in saved.items()
        if name in own
        and isinstance(value, torch.Tensor)
        and isinstance(own[name][1], torch.Tensor)
        and value.shape != own[name][1].shape
        and not is_lazy(own[name][1])
    ]
    problems: list[str] = []
    if missing and strict:
        problems.append(f"missing in the checkpoint ({len(missing)}): {', '.join(missing)}")
    if unexpected and strict:
        problems.append(f"not in the model ({len(unexpected)}): {', '.join(unexpected)}")
    if shapes:
        problems.append(f"of another shape ({len(shapes)}): {'; '.join(shapes)}")
    if problems:
        way_out = (
            "Build the model of that run, or pass load_strict_model_weights=False to load the names that agree."
            if strict and not shapes
            else "Build the model of that run, or leave keys out with load_ignore_keys=['state/model/<name>'] and "
            "load_strict_model_weights=False."
        )
        raise IncompatibleCheckpointError(f"{source} does not fit the model.\n  {chr(10).join(problems)}\n{way_out}")
    if missing or unexpected:
        log.warning(
            "%s: loaded without strictness; stays as it is: %s; not used: %s",
            source,
            ", ".join(missing) or "nothing",
            ", ".join(unexpected) or "nothing",
        )
    model.load_state_dict({own[name][0]: value for name, value in saved.items() if name in own}, strict=False)


def _check_optimizers(state: State, contents: StateDict, source: str) -> None:
    """An optimizer of another kind has nothing to take from the checkpoint's: say so rather than train on without."""
    if "optimizers" not in contents:
        if state.optimizers:
            log.warning("%s holds no optimizer state: the optimizer starts fresh", source)
        return
    have, saved = list(_by_class(state.optimizers)), list(contents["optimizers"])
    if missing := [name for name in have if name not in saved]:
        raise IncompatibleCheckpointError(
            f"{source} was saved with the optimizer {', '.join(saved) or 'none'} and the run has {', '.join(missing)}. "
            "Use that optimizer, or load_ignore_keys=['state/optimizers', 'state/schedulers'] to start fresh."
        )


def _matching(own: Mapping[str, T], contents: StateDict, part: str, source: str) -> Iterable[tuple[Any, T]]:
    """(saved state, object) of each object that has a saved state; a warning for each thing that has no partner."""
    if part not in contents:
        if own:
            log.warning("%s holds no %s: not restored: %s", source, part, ", ".join(own))
        return
    saved = contents[part]
    for name, thing in own.items():
        if name in saved:
            yield saved[name], thing
        elif not isinstance(thing, Algorithm) or not thing.required_on_load():
            log.warning("%s holds no state of %r in %s: it starts fresh", source, name, part)
    for name in saved:
        if name not in own and saved[name]:
            log.warning("%s holds state of %r in %s, which this run has not: not restored", source, name, part)


def _apply_required_algorithms(state: State, contents: StateDict, exclude: Sequence[str]) -> None:
    """Rebuild and apply the algorithms that changed the structure of the saved model and are not in this run."""
    present = {type(algorithm).__qualname__ for algorithm in state.algorithms}
    for name, saved in contents.get("algorithms", ()):
        name = name.split(":")[0]
        if name in present or name in exclude:
            continue
        if not saved.get("required", False):
            continue
        algorithm = Algorithm.rebuild(name, saved.get("config", {}))
        algorithm.apply(Event.INIT, state, Logger(state))
        state.algorithms.append(algorithm)
        log.info("the checkpoint's model was changed by %r: applied before loading", algorithm)


def _load_metrics(state: State, contents: StateDict) -> None:
    _load_metric_group(state.train_metrics, contents.get("train_metrics") or {})
    for label, saved in (contents.get("eval_metrics") or {}).items():
        _load_metric_group(state.eval_metrics.get(label, {}), saved)
    if state.train_metrics and int(state.timestamp.batch_in_epoch) and not contents.get("train_metrics"):
        log.warning("train metrics were not saved (save_metrics=False): those of this epoch count from the resume on")


def _load_metric_group(metrics: Mapping[str, Metric], saved: Mapping[str, Any]) -> None:
    for name, metric in metrics.items():
        if name in saved:
            metric.persistent(True)
            metric.load_state_dict(saved[name]["state_dict"])
            metric._update_count = saved[name].get("update_count", 1)  # pyright: ignore[reportPrivateUsage]
            metric._computed = None  # pyright: ignore[reportPrivateUsage]
