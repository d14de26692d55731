"""Checkpoints of Composer: those of older versions in the form of the current one, and ours in a form that it loads."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor

from composerlite.checkpoint.foreign.keys import Rename
from composerlite.checkpoint.foreign.taken import Run, optimizer_by_names
from composerlite.types import StateDict

__all__ = ["in_current_form", "make_loadable_in_composer"]

_DDP = Rename("module.")


def in_current_form(contents: StateDict, run: Callable[[], Run], *, weights_only: bool = False) -> StateDict:
    """``contents`` of a checkpoint of ours or Composer's, in the current form; most are.

    Before 0.4.1 the names of its parts began with an underscore, and before 0.6 those of weights with ``module.`` under
    DDP. Algorithms were a dict, parameters of optimizers had numbers, and metrics were pickled objects (to 0.13.5),
    which are left out.

    Args:
        contents: of the checkpoint; tensors need not have been read.
        run: gives the run that they are for.
        weights_only: the model stays as it was saved: with ``EMA`` that is the average, which Composer saves in the
            place of the weights that are trained.

    Raises:
        IncompatibleCheckpointError: an optimizer has no names for its parameters, and does not fit the run.
    """
    before = cast("StateDict", contents["state"])
    state: StateDict = {str(key).removeprefix("_"): value for key, value in before.items()}
    if isinstance(state.get("algorithms"), Mapping):
        state["algorithms"] = list(cast("StateDict", state["algorithms"]).items())
    for part in ("train_metrics", "eval_metrics"):
        if part in state and not _is_readable(state[part]):
            del state[part]
    names = list(cast("StateDict", state["model"])) if isinstance(state.get("model"), Mapping) else []
    if _are_of_ddp(names) and not set(names) & set(run().model):
        state["model"] = {_DDP.of(name): tensor for name, tensor in state["model"].items()}
    for kind, saved in _optimizers(state):
        listed = _parameters(saved)
        of_ddp = _are_of_ddp(listed) and not set(listed) & set(run().model)
        if of_ddp or any(isinstance(name, int) for name in listed):
            live = run()
            if kind in live.optimizers:
                renamed = optimizer_by_names(saved, live.optimizers[kind], _DDP if of_ddp else Rename(), live.source)
                state["optimizers"] = {**state["optimizers"], kind: renamed}
    if isinstance(state.get("algorithms"), list) and isinstance(state.get("model"), Mapping):
        state["algorithms"] = [(name, _average(saved, state, weights_only)) for name, saved in state["algorithms"]]
    return {**contents, "state": state}


def _average(saved: Any, state: StateDict, weights_only: bool) -> Any:
    """State of ``EMA`` or ``SWA`` as ours have it; what is of another algorithm, or unknown, as it is."""
    told: StateDict = cast("StateDict", saved) if isinstance(saved, Mapping) else {}
    model: StateDict = state["model"]
    if told.get("swa_started") and isinstance(told.get("swa_model"), Mapping) and told.get("swa_scheduler") is None:
        tensors = _fitting({name.removeprefix(_DDP.strip): value for name, value in told["swa_model"].items()}, model)
        clock: Any = state.get("timestamp")
        sampled_at = clock["Timestamp"]["batch"] if isinstance(clock, Mapping) else -1
        more = {"start_lrs": [], "sampled_at": sampled_at, "completed": bool(told.get("swa_completed"))}
        return {"state": {"count": told.get("step_counter", 1), "tensors": tensors, **more}}
    if not told.get("ema_started", True):
        return {"state": {"count": 0, "tensors": {}}}
    active = told.get("ema_weights_active")
    beside: Any = told.get("training_model" if active and "training_model" in told else "ema_model")
    if not isinstance(beside, Mapping):
        return saved
    parts = [cast("Any", beside).get(key, {}) for key in ("named_parameters_dict", "named_buffers_dict")]
    tensors = _fitting({**parts[0], **parts[1]} if any(parts) else dict(cast("StateDict", beside)), model)
    if active:  # the average is in the model, and the weights that are trained are beside it
        average = {name: model[name] for name in tensors}
        if not weights_only:
            state["model"] = {**model, **tensors}
        tensors = average
    return {"state": {"count": 1, "tensors": tensors}} if tensors else saved


def _fitting(tensors: StateDict, model: StateDict) -> StateDict:
    """Select those of ``tensors`` that are weights or buffers of floating-point numbers of ``model``, by its names."""
    named = {name if name in model else _DDP.of(name): tensor for name, tensor in tensors.items()}
    return {
        name: tensor
        for name, tensor in named.items()
        if name in model and isinstance(tensor, Tensor) and tensor.is_floating_point()
    }


def make_loadable_in_composer(contents: StateDict) -> None:
    """Change ``contents`` of a checkpoint of ours, in place, so that Composer loads it as well as we do.

    It wants times as ``timedelta``, a computed value beside the state of each metric, and other keys of SpeedMonitor.

    Args:
        contents: of the checkpoint, or a part of them; its dicts and lists are changed, its tensors are not.
    """
    state: StateDict = contents.get("state", {})
    time: StateDict = state.get("timestamp", {}).get("Timestamp", {})
    for key, value in time.items():
        if key.endswith("_wct") and not isinstance(value, datetime.timedelta):
            time[key] = datetime.timedelta(seconds=value)
    for metrics in (state.get("train_metrics") or {}, *(state.get("eval_metrics") or {}).values()):
        for metric in metrics.values():
            metric.setdefault("_computed", None)
    if "eval_seconds" in (speed := state.get("callbacks", {}).get("SpeedMonitor", {})):
        state["callbacks"]["SpeedMonitor"] = {"total_eval_wct": speed["eval_seconds"]}


def _optimizers(state: StateDict) -> list[tuple[str, Any]]:
    optimizers: Any = state.get("optimizers")
    return list(cast("StateDict", optimizers).items()) if isinstance(optimizers, Mapping) else []


def _parameters(saved: Any) -> list[Any]:
    """Return the names or numbers of the parameters in the groups of an optimizer."""
    groups: Any = cast("StateDict", saved).get("param_groups") if isinstance(saved, Mapping) else None
    listed = [cast("StateDict", group).get("params") for group in groups or () if isinstance(group, Mapping)]  # pyright: ignore
    return [name for names in listed if isinstance(names, list) for name in cast("list[Any]", names)]


def _are_of_ddp(names: list[Any]) -> bool:
    return bool(names) and all(isinstance(name, str) and name.startswith(_DDP.strip) for name in names)


def _is_readable(metrics: Any) -> bool:
    """Return true for states of metrics, by name or by label and name; false for pickled objects."""
    return isinstance(metrics, Mapping) and all(
        isinstance(value, Mapping) and "class" not in value for value in cast("StateDict", metrics).values()
    )
