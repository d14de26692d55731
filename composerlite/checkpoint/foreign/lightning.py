"""Files of Lightning: a ``.ckpt`` of ``torch.save`` with contents documented by Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from composerlite.checkpoint.foreign.taken import Counts, Taken
from composerlite.types import StateDict

_TAKEN = ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step", "pytorch-lightning_version")


def is_lightning(contents: StateDict) -> bool:
    """Return true for a checkpoint of Lightning's Trainer."""
    return "pytorch-lightning_version" in contents and isinstance(contents.get("state_dict"), Mapping)


def taken_from_lightning(contents: StateDict, source: str) -> Taken:
    """Take weights, the first optimizer and its scheduler, epoch and step."""
    optimizers, schedulers = (_listed(contents.get(key)) for key in ("optimizer_states", "lr_schedulers"))
    left = [key for key in contents if key not in _TAKEN and contents[key]]
    more = [f"{key}[1:]" for key in _TAKEN[1:3] if len(_listed(contents.get(key))) > 1]
    return Taken(
        contents["state_dict"],
        optimizers[0] if optimizers else None,
        schedulers[0] if schedulers else None,
        _progress(contents),
        left=[*left, *more],
    )


def _listed(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _progress(contents: StateDict) -> Counts | None:
    """Return completed epochs and steps. Lightning keeps the batch count of an epoch after the epoch's end."""
    if "epoch" not in contents or "global_step" not in contents:
        return None
    batches: Any = contents.get("loops")
    for key in ("fit_loop", "epoch_loop.batch_progress"):
        batches = cast("StateDict", batches).get(key) if isinstance(batches, Mapping) else None
    progress = Counts(contents["global_step"], contents["epoch"])
    try:
        done, in_all = batches["current"]["processed"], batches["total"]["processed"]
        if not done or batches["is_last_batch"]:
            return progress._replace(epoch=progress.epoch + bool(done), batch_in_epoch=0)
        return progress._replace(batch_in_epoch=done * progress.batch // in_all)  # several batches may make a step
    except (KeyError, TypeError, ArithmeticError):
        return progress
