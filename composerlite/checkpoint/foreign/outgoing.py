"""Files of Lightning, the Trainer of transformers and accelerate, from the contents of a checkpoint of any system."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor

from composerlite.checkpoint.foreign.keys import Rename, flat_weights, renamed
from composerlite.checkpoint.foreign.systems import no_model_error, system_of
from composerlite.checkpoint.foreign.taken import Counts, Taken, unflattened
from composerlite.errors import IncompatibleCheckpointError
from composerlite.types import StateDict

__all__ = ["accelerate_files", "lightning_contents", "taken_of", "transformers_files"]

_LIGHTNING = "2.0.0"
"""The oldest whose layout it is: newer ones read it as that."""
_OURS = ("model", "optimizers", "schedulers", "timestamp")


def taken_of(contents: Any, source: str, rename: Rename) -> Taken:
    """Parts of a checkpoint of any system, ours and Composer's among them, with the optimizer's parameters in numbers.

    Args:
        contents: whole.
        source: the checkpoint, for messages.
        rename: of its weights.

    Raises:
        IncompatibleCheckpointError: it holds no model, or an optimizer that is none.
        ConfigError: ``rename`` gives two weights one name, or changes none.
    """
    state: Any = contents.get("state") if isinstance(contents, Mapping) else None
    ours = cast("StateDict", state) if isinstance(state, Mapping) else {}
    if isinstance(ours.get("model"), Mapping):
        found = _of_ours(ours, contents.get("rng"))
    elif (system := system_of(contents)) is not None:
        found = system.take(cast("StateDict", contents), source)
    else:
        raise no_model_error(source)
    saved = flat_weights(found.model, source)
    weights = renamed(saved, rename)
    optimizer = None if found.optimizer is None else _numbered(found.optimizer, list(saved), rename, source)
    counts = None if found.progress is None else Counts(*map(_number, found.progress))
    return Taken(weights, optimizer, found.scheduler, counts, found.rng, found.left)


def _number(count: Any) -> Any:
    return count.item() if isinstance(count, Tensor) and count.numel() == 1 else count


def _of_ours(state: StateDict, rng: Any) -> Taken:
    optimizers, schedulers = (state.get(key) or {} for key in ("optimizers", "schedulers"))
    clocks: Any = state.get("timestamp")
    clocks = clocks.get("Timestamp", clocks) if isinstance(clocks, Mapping) else None
    counts = None
    if isinstance(clocks, Mapping) and "batch" in clocks:
        told = cast("StateDict", clocks)
        counts = Counts(told["batch"], told.get("epoch", 0), told.get("batch_in_epoch", 0))
    left = [f"state/{key}" for key in state if key not in _OURS and state[key]]
    first, scheduler = (next(iter(parts.values()), None) for parts in (optimizers, schedulers))
    return Taken(state["model"], first, scheduler, counts, rng if isinstance(rng, list) else None, left)


# ── optimizers ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _numbered(saved: Any, names: Sequence[str], rename: Rename, source: str) -> StateDict:
    """State of an optimizer as ``torch.optim.Optimizer`` gives it, from that or from one by names, nested or flat."""
    state = cast("Mapping[Any, Any]", saved) if isinstance(saved, Mapping) else {}
    if state and "param_groups" not in state:
        state = unflattened(state, None, names)
    groups, values = state.get("param_groups"), state.get("state")
    if not isinstance(groups, list) or not isinstance(values, Mapping):
        raise IncompatibleCheckpointError(f"{source!r}: its optimizer has no 'state' and no 'param_groups'.")
    its = [_with_names(group, rename) for group in cast("list[StateDict]", groups)]
    return _counted_anew(its, cast("StateDict", values))


def _with_names(group: StateDict, rename: Rename) -> StateDict:
    """``group`` with the ``param_names`` that it has, if it has any, in the order of its parameters."""
    told: Any = group.get("param_names", [])
    if told and all(isinstance(name, str) for name in group["params"]):  # which has kept their order
        told = group["params"]
    others = {key: value for key, value in group.items() if key != "param_names"}
    named = isinstance(told, list) and len(told) == len(group["params"]) > 0  # pyright: ignore[reportUnknownArgumentType]
    return {**others, "param_names": [rename.of(str(name)) for name in cast("list[Any]", told)]} if named else others


def _counted_anew(groups: Sequence[StateDict], values: Mapping[Any, Any]) -> StateDict:
    """State of an optimizer with these groups, whose parameters get numbers in their order."""
    number = {name: count for count, name in enumerate(name for group in groups for name in group["params"])}
    made = [{**group, "params": [number[name] for name in group["params"]]} for group in groups]
    return {"state": {number[name]: value for name, value in values.items()}, "param_groups": made}


# ── Lightning ────────────────────────────────────────────────────────────────────────────────────────────────────────
def lightning_contents(taken: Taken) -> StateDict:
    """Contents of a ``.ckpt`` that ``Trainer.fit(ckpt_path=...)`` of Lightning continues from."""
    counts = taken.progress or Counts(0)
    epoch, in_epoch = counts.epoch or 0, counts.batch_in_epoch or 0
    steps = _progress(counts.batch, in_epoch)
    batches = _progress(counts.batch, in_epoch, "started", "processed")
    epochs = _progress(epoch, epoch, "started", "processed")
    for count in (epochs["total"], epochs["current"]) if in_epoch else ():
        count["ready"] = count["started"] = epoch + 1
    zero_grad = _progress(counts.batch, in_epoch, "started")
    none = _progress(0, 0, "started", "processed")
    loop = "epoch_loop.automatic_optimization"
    fit = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": counts.batch},
        "epoch_loop.batch_progress": {**batches, "is_last_batch": False},
        "epoch_loop.scheduler_progress": steps,
        f"{loop}.state_dict": {},
        f"{loop}.optim_progress": {"optimizer": {"step": steps, "zero_grad": zero_grad}},
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": _progress(0, 0),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": {**none, "is_last_batch": False},
        "epoch_progress": epochs,
    }
    return {
        "epoch": epoch,
        "global_step": counts.batch,
        "pytorch-lightning_version": _LIGHTNING,
        "state_dict": taken.model,
        "loops": {"fit_loop": fit},
        "callbacks": {},
        "optimizer_states": [] if taken.optimizer is None else [taken.optimizer],
        "lr_schedulers": [] if taken.scheduler is None else [taken.scheduler],
    }


def _progress(total: int, current: int, *more: str) -> dict[str, dict[str, int]]:
    """Counts as Lightning has them: in all, and since the epoch began."""
    return {"total": _counted(total, more), "current": _counted(current, more)}


def _counted(count: int, more: Iterable[str]) -> dict[str, int]:
    return dict.fromkeys(("ready", "completed", *more), count)


# ── transformers ─────────────────────────────────────────────────────────────────────────────────────────────────────
def transformers_files(taken: Taken, contents: Any) -> tuple[dict[str, Any], StateDict]:
    """Files of a ``checkpoint-N`` besides the weights: by name what torch saves in each, and ``trainer_state.json``.

    Its Trainer has weights of two dimensions in a first group, which decay, and all others in a second. An optimizer of
    one group is divided so. What is no ``LambdaLR`` leaves the rate to its own schedule, at the same step.
    """
    counts = taken.progress or Counts(0)
    files: dict[str, Any] = {}
    if taken.optimizer is not None:
        files["optimizer.pt"] = optimizer = _in_two_groups(cast("StateDict", taken.optimizer))
        files["scheduler.pt"] = _schedule(taken.scheduler, optimizer["param_groups"], counts.batch)
    ranks = taken.rng or ()
    for rank, state in enumerate(ranks):
        files["rng_state.pth" if len(ranks) == 1 else f"rng_state_{rank}.pth"] = _generators(state)
    epoch, rest = counts.epoch or 0, counts.batch_in_epoch or 0
    length = (counts.batch - rest) // epoch if epoch else 0
    told = {"epoch": epoch + (rest / length if length else 0.0), "global_step": counts.batch, "log_history": []}
    return files, {**told, "train_batch_size": _batch_size(contents)}


def _batch_size(contents: Any) -> int:
    """Size of a batch, which its Trainer compares with its own; 1 where the checkpoint does not say it."""
    for keys in (("state", "metadata", "train_dataloader_batch_size"), ("trainer_state.json", "train_batch_size")):
        found = contents
        for key in keys:
            found = cast("StateDict", found).get(key) if isinstance(found, Mapping) else None
        if isinstance(found, int):
            return found
    return 1


def _in_two_groups(optimizer: StateDict) -> StateDict:
    groups, values = optimizer["param_groups"], optimizer["state"]
    if len(groups) != 1:
        return optimizer
    keys = [key for key in ("params", "param_names") if key in groups[0]]
    halves: list[StateDict] = [{**groups[0], **{key: [] for key in keys}} for _ in range(2)]
    for number, name in enumerate(groups[0]["params"]):
        half = halves[0 if _dimensions(values.get(name)) > 1 else 1]
        for key in keys:
            half[key].append(groups[0][key][number])
    return _counted_anew([half for half in halves if half["params"]], values)


def _dimensions(state: Any) -> int:
    tensors = state.values() if isinstance(state, Mapping) else ()
    return max((tensor.ndim for tensor in tensors if isinstance(tensor, Tensor)), default=0)


def _schedule(saved: Any, groups: Sequence[StateDict], step: int) -> StateDict:
    """State of a ``LambdaLR`` for ``groups``."""
    count = len(groups)
    if isinstance(saved, Mapping) and "lr_lambdas" in saved:
        state = copy.copy(dict(cast("StateDict", saved)))
        for key in ("base_lrs", "_last_lr", "lr_lambdas"):
            if isinstance(state.get(key), list) and len(state[key]) == 1:
                state[key] = state[key] * count
        return {**state, "lr_lambdas": [one or {} for one in state["lr_lambdas"]]}
    return {
        "base_lrs": [group.get("initial_lr", group["lr"]) for group in groups],
        "last_epoch": step,
        "_step_count": step + 1,
        "_last_lr": [group["lr"] for group in groups],
        "lr_lambdas": [{} for _ in groups],
    }


def _generators(state: StateDict) -> StateDict:
    """The generators of a rank, as transformers has them."""
    version, internal, gauss_next = state["python"]
    kind, keys, position, has_gauss, gauss = state["numpy"]
    found = {"python": (version, tuple(internal), gauss_next), "cpu": state["torch"]}
    found["numpy"] = (str(kind), np.asarray(keys, dtype=np.uint32), position, has_gauss, gauss)
    return {**found, "cuda": state["cuda"]} if "cuda" in state else found


# ── accelerate ───────────────────────────────────────────────────────────────────────────────────────────────────────
def accelerate_files(taken: Taken) -> dict[str, Any]:
    """Files of a folder of ``Accelerator.save_state`` besides the weights: by name what torch saves in each."""
    parts = {"optimizer.bin": taken.optimizer, "scheduler.bin": taken.scheduler}
    files: dict[str, Any] = {name: part for name, part in parts.items() if part is not None}
    for rank, state in enumerate(taken.rng or ()):
        own = _generators(state)
        files[f"random_states_{rank}.pkl"] = {
            "step": 0,  # micro-batches since the last optimizer step
            "random_state": own["python"],
            "numpy_random_seed": own["numpy"],
            "torch_manual_seed": own["cpu"],
            **({"torch_cuda_manual_seed": [own["cuda"]]} if "cuda" in own else {}),
        }
    return files
