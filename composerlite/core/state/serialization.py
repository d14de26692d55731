"""State to checkpoint contents and back.

The shape is Composer's: a dict with the keys of ``State.serialized_attributes`` plus ``integrations`` and ``metadata``;
``model`` loads into the bare model, optimizer state is keyed by parameter name, schedulers, callbacks and algorithms by
class name (``EarlyStopper``, ``EarlyStopper:1``, …). Only plain types and tensors are produced here, so that
``torch.load(weights_only=True)`` opens the file anywhere.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from composerlite import dist
from composerlite.core.event import Event
from composerlite.core.state.metric_states import load_metric_states, metric_states
from composerlite.core.state.model_state import load_model, model_places, model_problems, model_state
from composerlite.core.state.optimizer_state import (
    load_named_optimizer_state,
    lost_parameters,
    named_optimizer_state,
    optimizer_places,
    optimizer_problems,
)
from composerlite.core.state.run_state import KeptAlgorithm, KeptCallback, RunState
from composerlite.core.time import Time, Timestamp
from composerlite.errors import CheckpointError, IncompatibleCheckpointError, SaveError, did_you_mean
from composerlite.on_demand import ALGORITHM_PACKAGES, ALGORITHMS
from composerlite.types import StateDict

__all__ = ["full_state", "load_full_state", "load_weights", "places_for", "rebuilt", "stable_names", "weights_state"]

log = logging.getLogger(__name__)
T = TypeVar("T")


@runtime_checkable
class Integrated(Protocol):
    """A model that has something to keep: every ``ComposerModel`` is one, and most keep nothing."""

    def integrations(self) -> StateDict:
        """What goes into checkpoints, under the name of each library: plain values. Called at every save."""
        ...

    def integration_problems(self, saved: StateDict, *, source: str) -> list[str]:
        """Why the rest of a checkpoint with ``saved`` in it must not be loaded. What only differs is logged.

        Called before anything of the checkpoint is loaded.
        """
        ...


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
def full_state(state: RunState) -> StateDict:
    """Everything a full checkpoint holds under ``state``. Tensors are those in use: copy them before training on."""
    position = state.data_position
    optimizers = _by_class(state.optimizers).items()
    ours: StateDict = {}
    if not state.deepspeed_enabled:  # which has both, and saves them in its own files
        for optimizer in state.optimizers:
            if lost := lost_parameters(optimizer, state.model):
                raise SaveError(
                    f"the optimizer trains what is not the model's and in no checkpoint: {'; '.join(lost)}. Make it a "
                    "parameter of the model before it is added to the optimizer."
                )
        ours = {
            "model": model_state(state.model),
            "optimizers": {name: named_optimizer_state(o, state.model) for name, o in optimizers},
        }
    return {
        **ours,
        "schedulers": {name: scheduler.state_dict() for name, scheduler in _by_class(state.schedulers).items()},
        "algorithms": [
            (name, _algorithm_state(algorithm, _own_state(state, algorithm)))
            for name, algorithm in stable_names((a.state_key, a) for a in state.algorithms).items()
        ],
        "callbacks": {
            name: _own_state(state, callback)
            for name, callback in stable_names((c.state_key, c) for c in state.callbacks).items()
        },
        "scaler": {} if state.scaler is None else {type(state.scaler).__qualname__: state.scaler.state_dict()},
        "timestamp": {"Timestamp": state.timestamp.plain()},
        "rank_zero_seed": state.rank_zero_seed,
        "train_metrics": metric_states(state.train_metrics) if state.save_metrics else {},
        "eval_metrics": (
            {label: metric_states(metrics) for label, metrics in state.eval_metrics.items()}
            if state.save_metrics
            else {}
        ),
        "run_name": state.run_name,
        "dataset_state": (
            state.dataset_state if position is None else {**state.dataset_state, "train": position.state_dict()}
        ),
        "integrations": _integrations(state.model),
        "metadata": _metadata(state),
    }


def weights_state(state: RunState) -> StateDict:
    """What a weights-only checkpoint holds under ``state``, and the algorithms without which the weights do not fit."""
    required = [(a.state_key, _algorithm_state(a, {})) for a in state.algorithms if a.required_on_load()]
    contents: StateDict = {
        "model": model_state(state.model),
        "integrations": _integrations(state.model),
        "metadata": _metadata(state),
    }
    return {**contents, "algorithms": required} if required else contents


def _own_state(state: RunState, part: KeptCallback) -> StateDict:
    noted = state.noted_states.get(id(part))
    return part.state_dict() if noted is None else noted


def _algorithm_state(algorithm: KeptAlgorithm, state: StateDict) -> StateDict:
    """``repr`` is for people: nothing evaluates it."""
    return {
        "repr": repr(algorithm),
        "required": algorithm.required_on_load(),
        "config": algorithm.config(),
        "state": state,
    }


def _integrations(model: nn.Module) -> StateDict:
    return model.integrations() if isinstance(model, Integrated) else {}


def _metadata(state: RunState) -> StateDict:
    metadata: StateDict = {
        "composerlite_version": _own_version(),
        "torch_version": str(torch.__version__),
        "device": state.device.type,
        "precision": state.precision.value,
        "world_size": state.world_size,
        "device_train_microbatch_size": state.device_train_microbatch_size,
        "fit_starts": [start.plain() for start in state.fit_starts],
        "evaluated_at": dict(state.evaluated_at),
        "learning_rates": list(state.learning_rates),
    }
    if state.interruption.evaluation is not None:
        event, labels = state.interruption.evaluation
        metadata["interrupted_evaluation"] = {"event": event.value, "labels": list(labels)}
    if state.fit_starts and state.max_duration is not None:
        metadata["max_duration"] = str(state.max_duration)
    if state.stopped is not None:
        metadata["stopped"] = str(state.stopped)
    batch_size = getattr(state.train_dataloader, "batch_size", None)
    return metadata if batch_size is None else {**metadata, "train_dataloader_batch_size": batch_size}


@functools.cache
def _own_version() -> str:
    return version("composerlite")


# ── restoring ────────────────────────────────────────────────────────────────────────────────────────────────────────
def places_for(
    state: RunState,
    contents: StateDict,
    *,
    weights_only: bool,
    strict: bool,
    exclude_algorithms: Sequence[str],
    source: str,
) -> StateDict:
    """Say everything that keeps ``contents`` from being loaded, or give the tensors that they are to be loaded into.

    Those are found under the same keys as in ``contents``. The numbers in the tensors of ``contents`` are not looked
    at. Algorithms that changed the structure of the saved model are applied; nothing else is changed.

    Raises:
        IncompatibleCheckpointError: names, shapes, kinds or groups of parameters differ, or the contents have another
            form than a checkpoint's; all of it is in the message.
    """
    _check_form(contents, source)
    with _restoring("algorithms", source):
        _apply_required_algorithms(state, contents, exclude_algorithms)
    problems: list[str] = []
    places: StateDict = {}
    if "model" in contents:
        problems += model_problems(state.model, contents["model"], strict=strict, source=source)
        places["model"] = model_places(state.model, contents["model"])
        if contents.get("integrations") and isinstance(state.model, Integrated):
            with _restoring("integrations", source):
                problems += state.model.integration_problems(contents["integrations"], source=source)
    if not weights_only and "optimizers" in contents:
        problems += _kind_problems(state, contents, source)
        places["optimizers"] = {}
        for name, optimizer in _by_class(state.optimizers).items():
            saved = contents["optimizers"].get(name)
            if saved is not None:
                problems += optimizer_problems(optimizer, state.model, saved, source=source)
                places["optimizers"][name] = {"state": optimizer_places(optimizer, state.model, saved["state"])}
    if problems:
        raise IncompatibleCheckpointError("\n".join(problems))
    if not weights_only and dist.any_distributed(state.model.parameters()):
        places |= _distributed_parts(state, contents, source)
    return places


def _distributed_parts(state: RunState, contents: StateDict, source: str) -> StateDict:
    """New tensors for those of algorithms and callbacks that are distributed over ranks."""
    algorithms = stable_names((a.state_key, a) for a in state.algorithms)
    callbacks = stable_names((c.state_key, c) for c in state.callbacks)
    made: StateDict = {"algorithms": [], "callbacks": {}}
    for name, saved in contents.get("algorithms", ()):
        like: Any = None
        if name in algorithms and "state" in saved:
            with _restoring(f"algorithms/{name}", source):
                like = {"state": algorithms[name].state_like(state)}
        made["algorithms"].append((name, dist.shards_like(saved, like)))
    for name, saved in contents.get("callbacks", {}).items():
        if name in callbacks and saved:
            with _restoring(f"callbacks/{name}", source):
                made["callbacks"][name] = dist.shards_like(saved, callbacks[name].state_dict())
    return made


def load_weights(
    state: RunState, contents: StateDict, *, strict: bool, exclude_algorithms: Sequence[str], source: str
) -> None:
    """Restore the model. Algorithms that changed its structure are applied first.

    Raises:
        IncompatibleCheckpointError: names or shapes differ; all differences are in the message. With ``strict=False``
            only shapes must agree.
    """
    _check_form(contents, source)
    with _restoring("algorithms", source):
        _apply_required_algorithms(state, contents, exclude_algorithms)
    if "model" not in contents:
        log.warning(
            "%s holds no model weights, or load_ignore_keys leaves them all out: the model stays as it is", source
        )
        return
    with _restoring("model", source):
        load_model(state.model, contents["model"], strict=strict, source=source)


def load_full_state(
    state: RunState, contents: StateDict, *, strict: bool, exclude_algorithms: Sequence[str], source: str
) -> None:
    """Restore the model and everything else that ``contents`` holds.

    What is there on one side only is said: a part that the checkpoint lacks stays as it is and is logged as a warning.

    Raises:
        IncompatibleCheckpointError: the model or an optimizer does not fit.
    """
    if not state.deepspeed_enabled:  # which has loaded them from its own files
        load_weights(state, contents, strict=strict, exclude_algorithms=exclude_algorithms, source=source)
        _load_optimizers(state, contents, source)
    _load_parts(state, contents, exclude_algorithms, source)
    with _restoring("timestamp", source):
        _load_time(state, contents)
    with _restoring("train_metrics", source):
        _load_metrics(state, contents)


def _load_optimizers(state: RunState, contents: StateDict, source: str) -> None:
    if problems := _kind_problems(state, contents, source):
        raise IncompatibleCheckpointError("\n".join(problems))
    if "optimizers" not in contents and state.optimizers:
        log.warning("%s holds no optimizer state: the optimizer starts fresh", source)
    for name, optimizer in _by_class(state.optimizers).items():
        if "optimizers" in contents:
            with _restoring(f"optimizers/{name}", source):
                load_named_optimizer_state(optimizer, state.model, contents["optimizers"][name], source=source)


def _load_parts(state: RunState, contents: StateDict, exclude_algorithms: Sequence[str], source: str) -> None:
    """Schedulers, algorithms, callbacks, scaler: whatever keeps a state of its own."""
    for saved, scheduler in _matching(_by_class(state.schedulers), contents, "schedulers", source):
        with _restoring(f"schedulers/{type(scheduler).__qualname__}", source):
            scheduler.load_state_dict(saved)
    algorithms = {
        name: saved for name, saved in contents.get("algorithms", ()) if name.split(":")[0] not in exclude_algorithms
    }
    own_algorithms = stable_names((a.state_key, a) for a in state.algorithms)
    rebuilt = [name for name, algorithm in own_algorithms.items() if algorithm.required_on_load()]
    for saved, algorithm in _matching(own_algorithms, {"algorithms": algorithms}, "algorithms", source, rebuilt):
        with _restoring(f"algorithms/{algorithm.state_key}", source):
            algorithm.load_state_dict(saved.get("state", saved))  # Composer stores the state itself
    own_callbacks = stable_names((c.state_key, c) for c in state.callbacks)
    for saved, callback in _matching(own_callbacks, contents, "callbacks", source):
        with _restoring(f"callbacks/{callback.state_key}", source):
            callback.load_state_dict(saved)
    if state.scaler is not None and contents.get("scaler"):
        with _restoring("scaler", source):
            state.scaler.load_state_dict(next(iter(contents["scaler"].values())))


def _load_time(state: RunState, contents: StateDict) -> None:
    """Where the run stands, and what belongs to that."""
    if "timestamp" in contents:
        state.timestamp = Timestamp.from_state_dict(contents["timestamp"]["Timestamp"])
        state.previous_timestamp = None
    if _goes_on(state, contents):  # its calls of fit count from where they did
        starts = contents.get("metadata", {}).get("fit_starts", ())
        state.fit_starts = [Timestamp.from_state_dict(start) for start in starts]
        state.resumed_learning_rates = tuple(map(float, contents.get("metadata", {}).get("learning_rates", ())))
        stopped = contents.get("metadata", {}).get("stopped")
        state.stopped = None if stopped is None else Time.from_input(stopped)
        evaluated = contents.get("metadata", {}).get("evaluated_at", {})
        state.evaluated_at = {str(label): int(batch) for label, batch in evaluated.items()}
        if evaluation := contents.get("metadata", {}).get("interrupted_evaluation"):
            state.interruption.evaluation = Event(evaluation["event"]), tuple(map(str, evaluation["labels"]))
    if "rank_zero_seed" in contents:
        state.rank_zero_seed = int(contents["rank_zero_seed"])
    if "dataset_state" in contents:
        state.dataset_state = contents["dataset_state"]
    if state.auto_microbatching and (size := contents.get("metadata", {}).get("device_train_microbatch_size")):
        state.device_train_microbatch_size = size


def _goes_on(state: RunState, contents: StateDict) -> bool:
    """Tell whether the run is that of the checkpoint: by its name or, where nobody has named it, by its training.

    A call of ``fit`` that was interrupted goes on; one that came to its end is followed by others.
    """
    if contents.get("run_name") == state.run_name:
        return True
    metadata = contents.get("metadata", {})
    if state.is_named or "timestamp" not in contents or "stopped" in metadata:
        return False
    if metadata.get("interrupted_evaluation"):
        return True
    end = metadata.get("max_duration")
    return end is not None and state.timestamp.get((until := Time.from_input(end)).unit) < until


@contextlib.contextmanager
def _restoring(part: str, source: str) -> Generator[None]:
    """Within it, an error that the saved ``part`` leads to names the part."""
    try:
        yield
    except (CheckpointError, OSError, MemoryError):
        raise
    except Exception as e:
        raise IncompatibleCheckpointError(
            f"{source}: its {part!r} cannot be restored: {type(e).__name__}: {e} It is damaged or of another version; "
            f"load_ignore_keys=['state/{part}'] leaves it out."
        ) from e


def _check_form(contents: StateDict, source: str) -> None:
    """That the parts which are read here are what they are in every checkpoint."""
    mappings = ("model", "optimizers", "schedulers", "callbacks", "scaler", "timestamp", "metadata", "integrations")
    wrong = [part for part in mappings if not isinstance(contents.get(part, {}), Mapping)]
    if not wrong:
        wrong += [f"optimizers/{n}" for n, saved in contents.get("optimizers", {}).items() if not _is_optimizer(saved)]
        wrong += ["model" for name in contents.get("model", ()) if not isinstance(name, str)][:1]
    algorithms: Any = contents.get("algorithms", ())
    if not isinstance(algorithms, list | tuple) or not all(map(_is_named_state, algorithms)):  # pyright: ignore[reportUnknownArgumentType]
        wrong.append("algorithms")
    if wrong:
        raise IncompatibleCheckpointError(
            f"{source} is damaged or of another kind: {', '.join(wrong)} in it is not what it is in a checkpoint."
        )


def _is_optimizer(saved: Any) -> bool:
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None  # pyright: ignore
    return (
        isinstance(groups, list)
        and isinstance(saved.get("state"), Mapping)
        and all(isinstance(group, dict) and _are_names(group.get("params")) for group in groups)  # pyright: ignore
        and _are_names(list(saved["state"]))
        and all(isinstance(value, Mapping) for value in saved["state"].values())
    )


def _are_names(names: Any) -> bool:
    return isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)  # pyright: ignore[reportUnknownVariableType]


def _is_named_state(item: Any) -> bool:
    return (
        isinstance(item, list | tuple)
        and len(item) == 2  # pyright: ignore[reportUnknownArgumentType]
        and isinstance(item[0], str)
        and isinstance(item[1], Mapping)
    )


def _kind_problems(state: RunState, contents: StateDict, source: str) -> list[str]:
    """An optimizer of another kind has nothing to take from the checkpoint's: say so rather than train on without."""
    have, saved = list(_by_class(state.optimizers)), list(contents.get("optimizers", ()))
    missing = [name for name in have if name not in saved]
    if "optimizers" not in contents or not missing:
        return []
    return [
        f"{source} was saved with the optimizer {', '.join(map(str, saved)) or 'none'} and the run has "
        f"{', '.join(missing)}. Use that optimizer, or load_ignore_keys=['state/optimizers', 'state/schedulers'] to "
        "start fresh."
    ]


def _matching(
    own: Mapping[str, T], contents: StateDict, part: str, source: str, may_lack: Sequence[str] = ()
) -> Iterable[tuple[Any, T]]:
    """(saved state, object) of each object that has a saved state; a warning for each thing that has no partner.

    None for objects named in ``may_lack``, which need no saved state.
    """
    if part not in contents:
        if own:
            log.warning("%s holds no %s: not restored: %s", source, part, ", ".join(own))
        return
    saved = contents[part]
    for name, thing in own.items():
        if name in saved:
            yield saved[name], thing
        elif name not in may_lack:
            log.warning("%s holds no state of %r in %s: it starts fresh", source, name, part)
    for name in saved:
        if name not in own and saved[name]:
            log.warning("%s holds state of %r in %s, which this run has not: not restored", source, name, part)


def _apply_required_algorithms(state: RunState, contents: StateDict, exclude: Sequence[str]) -> None:
    """Rebuild and apply the algorithms that changed the structure of the saved model and are not in this run."""
    present = {type(algorithm).__qualname__ for algorithm in state.algorithms}
    for name, saved in contents.get("algorithms", ()):
        name = name.split(":")[0]
        if name in present or name in exclude:
            continue
        if not saved.get("required", False):
            continue
        if state.deepspeed_enabled:
            raise IncompatibleCheckpointError(
                f"the checkpoint's model was changed by the algorithm {name!r}, and DeepSpeed has the model already: "
                f"pass it to the Trainer, algorithms=[{name}(…)]."
            )
        algorithm = rebuilt(name, saved.get("config", {}))
        algorithm.apply_before_load(state)
        state.algorithms.append(algorithm)
        log.info("the checkpoint's model was changed by %r: applied before loading", algorithm)


def rebuilt(name: str, config: dict[str, Any]) -> KeptAlgorithm:
    """The algorithm class ``name`` built with ``config``; no text is evaluated.

    Raises:
        IncompatibleCheckpointError: no algorithm of that name is known and required on load, or ``config`` does not
            fit it.
    """
    for package in ALGORITHM_PACKAGES:
        if name not in ALGORITHMS:
            importlib.import_module(package)
    known = {key: cls for key, cls in ALGORITHMS.items() if cls.required_on_load()}
    if name not in known:
        raise IncompatibleCheckpointError(
            f"the checkpoint needs the algorithm {name!r}, which is not known here.{did_you_mean(name, known)} "
            "Import the module that defines it, pass it as algorithms=[…], or leave it out with "
            f"load_exclude_algorithms=[{name!r}]."
        )
    try:
        return known[name](**config)
    except TypeError as e:
        raise IncompatibleCheckpointError(f"the checkpoint's algorithm {name!r} cannot be rebuilt: {e}") from e


def _load_metrics(state: RunState, contents: StateDict) -> None:
    saved_world_size = int(contents.get("metadata", {}).get("world_size", 1))
    ranks = {"rank": state.rank, "world_size": state.world_size, "saved_world_size": saved_world_size}
    load_metric_states(state.train_metrics, contents.get("train_metrics") or {}, **ranks)
    for label, saved in (contents.get("eval_metrics") or {}).items():
        load_metric_states(state.eval_metrics.get(label, {}), saved, **ranks)
    if state.train_metrics and int(state.timestamp.batch_in_epoch) and not contents.get("train_metrics"):
        log.warning("train metrics were not saved (save_metrics=False): those of this epoch count from the resume on")
