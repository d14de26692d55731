"""Checkpoints of Composer: averages of weights in our form, and our checkpoints in a form for Composer."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from composerlite.checkpoint.foreign.keys import Rename
from composerlite.errors import IncompatibleCheckpointError
from composerlite.types import StateDict

_DDP = Rename("module.")


def in_current_form(contents: StateDict, *, source: str, weights_only: bool = False) -> StateDict:
    """Return ``contents`` of a checkpoint of Composer, with the averages of ``EMA`` and ``SWA`` in our form.

    Args:
        contents: of the checkpoint; tensors need not have been read.
        source: the checkpoint, for messages.
        weights_only: keep the model as Composer saved it: with ``EMA`` the model holds the average, not the weights
            that are trained.

    Raises:
        IncompatibleCheckpointError: Composer before 0.14 saved the checkpoint.
    """
    state = dict(cast("StateDict", contents["state"]))
    algorithms = state.get("algorithms")
    if isinstance(algorithms, Mapping) or any(str(key).startswith("_") for key in state):
        raise IncompatibleCheckpointError(
            f"{source} has the form of Composer before 0.14. Load it with Composer 0.14 to 0.32, save it there, and "
            "load that checkpoint."
        )
    if isinstance(algorithms, list) and isinstance(state.get("model"), Mapping):
        pairs = cast("list[tuple[str, Any]]", algorithms)
        state["algorithms"] = [(name, _average(saved, state, weights_only)) for name, saved in pairs]
    return {**contents, "state": state}


def _average(saved: Any, state: StateDict, weights_only: bool) -> Any:
    """Return the state of ``EMA`` or ``SWA`` in our form, and the state of any other algorithm unchanged."""
    average: StateDict = cast("StateDict", saved) if isinstance(saved, Mapping) else {}
    model: StateDict = state["model"]
    swa_model = average.get("swa_model")
    if average.get("swa_started") and isinstance(swa_model, Mapping) and average.get("swa_scheduler") is None:
        named = cast("StateDict", swa_model).items()
        tensors = _weights_in(model, {name.removeprefix(_DDP.strip): value for name, value in named})
        clock: Any = state.get("timestamp")
        sampled_at = clock["Timestamp"]["batch"] if isinstance(clock, Mapping) else -1
        more = {"start_lrs": [], "sampled_at": sampled_at, "completed": bool(average.get("swa_completed"))}
        return {"state": {"count": average.get("step_counter", 1), "tensors": tensors, **more}}
    if not average.get("ema_started", True):
        return {"state": {"count": 0, "tensors": {}}}
    active = average.get("ema_weights_active")
    beside: Any = average.get("ema_model")
    if not isinstance(beside, Mapping):
        return saved
    parts = [cast("Any", beside).get(key, {}) for key in ("named_parameters_dict", "named_buffers_dict")]
    tensors = _weights_in(model, {**parts[0], **parts[1]})
    if active:  # the model holds the average, and the trained weights are beside the model
        ema = {name: model[name] for name in tensors}
        if not weights_only:
            state["model"] = {**model, **tensors}
        tensors = ema
    return {"state": {"count": 1, "tensors": tensors}} if tensors else saved


def _weights_in(model: StateDict, tensors: StateDict) -> StateDict:
    """Select the ``tensors`` of floating-point numbers that ``model`` has, by the names in ``model``."""
    named = {name if name in model else _DDP.of(name): tensor for name, tensor in tensors.items()}
    return {
        name: tensor
        for name, tensor in named.items()
        if name in model and isinstance(tensor, Tensor) and tensor.is_floating_point()
    }


def make_loadable_in_composer(contents: StateDict) -> None:
    """Change ``contents`` of a checkpoint of ours, in place, so that Composer loads the checkpoint, too.

    Composer needs times as ``timedelta``, a computed value beside the state of each metric, and other keys of
    ``SpeedMonitor``.

    Args:
        contents: of the checkpoint, or a part of them. Dicts and lists are changed, tensors are not.
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
