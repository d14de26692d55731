"""Settings that differ between a checkpoint and the script that resumes from the checkpoint.

A checkpoint holds the settings of the script under ``state/metadata/settings``: ``optimizer`` (hyperparameters by name,
a value per group), ``run`` (settings that callbacks may change on the state) and ``samples`` (length of the training
dataset). Comparing scripts, instead of current values, leaves out the changes of schedulers and callbacks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from composerlite._torch_compat import scheduler_parts
from composerlite.core import Precision, State
from composerlite.core.data import length_of
from composerlite.core.state.model_state import frozen_parameters, set_frozen_parameters
from composerlite.types import StateDict

__all__ = [
    "RunSettings",
    "changed_run",
    "optimizer_settings",
    "rebase",
    "reconcile_optimizer",
    "record_samples",
    "warn_of_changes",
]

log = logging.getLogger(__name__)

_MICROBATCH = "device_train_microbatch_size"
_HELD = ("max_duration", _MICROBATCH, "precision", "iteration_length", "frozen")
_OWN_NAMES = ("params", "param_names", "lr", "initial_lr")
_LONGEST = 60

_USED = "the new value is used; to continue as before give {}"
_DATA_USED = f"{_USED}. Within an epoch the run stops with an error if the rest of the epoch depends on this setting"
_KEPT = "the checkpoint's value is used; autoresume=True uses the script's value"
_KEPT_WITH_STATE = (
    "the checkpoint's value is used, because {} depend on this setting; to use the new value, start another run_name "
    "with load_path={!r} and load_ignore_keys={}"
)
_OPTIMIZER_KEYS = "['state/optimizers', 'state/schedulers']"


def warn_of_changes(state: State, changes: Sequence[str]) -> None:
    """Log one warning with all changed settings, on rank 0."""
    if changes and state.rank == 0:
        settings = "1 setting" if len(changes) == 1 else f"{len(changes)} settings"
        head = f"run {state.run_name!r} resumes at batch {int(state.timestamp.batch)} with {settings} changed:"
        log.warning("%s", "\n  ".join([head, *changes]))


def _changed(name: str, before: object, now: object, verdict: str) -> str:
    """Describe one changed setting: both values, which value is used, and how to get the other value."""
    return f"the {name} was {_short(before)} in the interrupted run and is {_short(now)} now: {verdict}"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def optimizer_settings(optimizer: torch.optim.Optimizer) -> StateDict:
    """Return the plain hyperparameters of ``optimizer`` by name, a value per group, without learning rates."""
    names = dict.fromkeys(name for group in optimizer.param_groups for name in group if name not in _OWN_NAMES)
    settings: StateDict = {}
    for name in names:
        values = [group.get(name) for group in optimizer.param_groups]
        values = [list(value) if isinstance(value, tuple) else value for value in values]
        if all(_is_plain(value) for value in values):
            settings[name] = values
    return settings


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in cast("list[Any]", value))
    return value is None or isinstance(value, bool | int | float | str)


def record_samples(state: State) -> None:
    """Record the length of the training dataset in the script's settings, if the dataset has a length."""
    samples = length_of(getattr(state.train_dataloader, "dataset", None))
    state.script.settings = {**state.script.settings, "samples": samples}


def reconcile_optimizer(state: State, *, script_wins: bool) -> list[str]:
    """Choose between the optimizer settings of the checkpoint and of the script, and describe the differences.

    Args:
        state: state with a loaded checkpoint.
        script_wins: use the script's learning rates and numbers. The checkpoint's values remain for settings that the
            state of the optimizer or of a scheduler depends on.
    """
    if not state.optimizers or not state.resumed.metadata:
        return []
    return [*_reconcile_rates(state, script_wins), *_reconcile_hyperparameters(state, script_wins)]


def _reconcile_rates(state: State, script_wins: bool) -> list[str]:
    before, now = list(map(float, state.resumed.metadata.get("learning_rates", ()))), list(state.script.learning_rates)
    if len(before) != len(now) or before == now:
        return []
    own = [type(scheduler).__name__ for scheduler in _flat(state.schedulers) if _has_own_rates(scheduler)]
    if script_wins and not own:
        for group, old, new in zip(state.optimizers[0].param_groups, before, now, strict=True):
            group["lr"] = group["lr"] * new / old if old else new
            if "initial_lr" in group:
                group["initial_lr"] = new
        rebase(state.schedulers, now)
        verdict = f"the new value is used, scaled by the schedule; to continue as before give lr={_common(before)!r}"
    else:
        state.script.learning_rates = tuple(before)
        verdict = _KEPT
        if script_wins:
            verdict = _KEPT_WITH_STATE.format(f"the rates of {own[0]}", state.load_path, _OPTIMIZER_KEYS)
    return [_changed("learning rate", tuple(before), tuple(now), verdict)]


def _flat(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Yield ``schedulers`` and the schedulers inside them."""
    for scheduler in schedulers:
        yield scheduler
        yield from _flat(scheduler_parts(scheduler))


def _has_own_rates(scheduler: Any) -> bool:
    """Return true if ``scheduler`` has learning rates besides the base rates: a peak as in CyclicLR, or a floor."""
    derived = ("base_lrs", "_last_lr", "min_lrs", "final_lr")
    values = [value for name, value in vars(scheduler).items() if "lr" in name and name not in derived]
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]  # pyright: ignore[reportUnknownVariableType]
    return any(isinstance(item, float | torch.Tensor) for item in flat) or bool(getattr(scheduler, "eta_min", 0.0))


def rebase(schedulers: Iterable[LRScheduler], rates: Sequence[float]) -> None:
    """Set the base rates of ``schedulers``, one for each group."""
    for scheduler in _flat(schedulers):
        if len(getattr(scheduler, "base_lrs", ())) == len(rates):
            scheduler.base_lrs = list(rates)


def _reconcile_hyperparameters(state: State, script_wins: bool) -> Iterator[str]:
    groups = state.optimizers[0].param_groups
    given = state.script.settings.get("optimizer", {})
    saved = state.resumed.metadata.get("settings", {}).get("optimizer", {})
    used = dict(given)
    for name, now in given.items():
        before = saved.get(name)
        if before is None or before == now or len(before) != len(groups):
            continue
        # A flag, or momentum from or to 0, decides which tensors the optimizer's state has.
        is_number = not any(isinstance(value, bool | str | None) for value in (*before, *now))
        if script_wins and is_number and (name != "momentum" or list(map(bool, before)) == list(map(bool, now))):
            for group, value in zip(groups, now, strict=True):
                group[name] = tuple(cast("list[Any]", value)) if isinstance(value, list) else value
            verdict = _USED.format(f"{name}={_short(_common(before))}")
        else:
            used[name] = before
            verdict = _KEPT
            if script_wins:
                verdict = _KEPT_WITH_STATE.format("tensors of the optimizer", state.load_path, _OPTIMIZER_KEYS)
        yield _changed(name, _common(before), _common(now), verdict)
    state.script.settings = {**state.script.settings, "optimizer": used}


def _common(values: Sequence[Any]) -> Any:
    """Return the value of all groups, or the list of values if they differ."""
    if any(value != values[0] for value in values):
        return values
    return tuple(values[0]) if isinstance(values[0], list) else values[0]


def changed_run(state: State, *, seed: int | None) -> list[str]:
    """Describe differences of precision, ranks, training data and seed.

    Args:
        state: state with a loaded checkpoint and the script's training data.
        seed: seed of the script; ``None`` if the script gave no seed.
    """
    before = state.resumed.metadata
    if not before:
        return []
    size, samples = getattr(state.train_dataloader, "batch_size", None), state.script.settings.get("samples")
    compared = [
        ("precision", before.get("precision"), state.precision.value, _USED.format("precision={!r}")),
        ("number of ranks", before.get("world_size"), state.world_size, "the new number is used"),
        ("batch size", before.get("train_dataloader_batch_size"), size, _DATA_USED.format("batch_size={}")),
        (
            "number of training samples",
            before.get("settings", {}).get("samples"),
            samples,
            _DATA_USED.format("a dataset of {} samples"),
        ),
    ]
    found = [
        _changed(name, old, new, verdict.format(old))
        for name, old, new, verdict in compared
        if old is not None and new is not None and old != new
    ]
    if seed is not None and seed != state.rank_zero_seed:
        keys = "['state/rank_zero_seed', 'state/dataset_state', 'rng']"
        verdict = _KEPT_WITH_STATE.format("the random generators", state.load_path, keys)
        found.append(_changed("seed", state.rank_zero_seed, seed, verdict))
    return found


@final
class RunSettings:
    """Settings on the state that callbacks may change during training, and the script between two calls of ``fit``.

    A checkpoint holds the script's value and the current value. A resumed run uses the current value of the checkpoint
    if the script gives the same value as before, and otherwise the new value of the script.

    Args:
        state: state as the trainer's constructor has built it, before a checkpoint is loaded.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._last = _values(state)
        state.script.settings = {**state.script.settings, "run": self._last}

    def record_given(self, **arguments: object) -> None:
        """Record the settings that the script gave since the last call of ``fit``.

        Args:
            arguments: arguments of ``fit`` by the names of the settings, already on the state. ``None``: not given.
        """
        now, settings = _values(self._state), self._state.script.settings
        given = {n: value for n, value in now.items() if value != self._last[n] or arguments.get(n) is not None}
        self._state.script.settings = {**settings, "run": {**settings["run"], **given}}
        self._last = now

    def end_call(self) -> None:
        """End the constructor or a call of ``fit``: from now on the script changes the settings, not a callback."""
        self._last = _values(self._state)

    def restore(self) -> list[str]:
        """Restore the checkpoint's values if the script is unchanged. Return descriptions of the other settings."""
        state, metadata = self._state, self._state.resumed.metadata
        given = metadata.get("settings", {}).get("run", {})
        held = {name: metadata[name] for name in _HELD if name in metadata and name in given}
        if "max_duration" in held and "stopped" in metadata:
            held["max_duration"] = metadata["stopped"]  # max_duration before stop_training
        changes: list[str] = []
        for name, value in held.items():
            now = _values(state)[name]
            if now == given[name]:
                if name == "frozen":
                    set_frozen_parameters(state.model, value)
                else:
                    setattr(state, name, Precision(value) if name == "precision" else value)
            # A later max_duration is how a run is trained longer; changed_run() compares the precision.
            elif value != now and name != "precision" and (name != "max_duration" or value != given[name]):
                way = f"{name}={given[name]!r}"
                if name == "frozen":
                    way = "the same frozen parameters to the Trainer"
                label = "list of frozen parameters" if name == "frozen" else name
                changes.append(_changed(label, value, now, _USED.format(way)))
        self._last = _values(state)
        return changes


def _values(state: State) -> StateDict:
    """Return the settings as the script gives them."""
    return {
        "max_duration": None if state.max_duration is None else str(state.max_duration),
        _MICROBATCH: "auto" if state.auto_microbatching else state.device_train_microbatch_size,
        "precision": state.precision.value,
        "iteration_length": str(state.iteration_length),
        "frozen": frozen_parameters(state.model),
    }
