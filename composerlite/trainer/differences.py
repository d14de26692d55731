"""Differences between the settings that an interrupted run had and those of the script that resumes it.

What a checkpoint says of them is under ``state/metadata``: ``settings`` has the hyperparameters of the optimizer as the
script gave them (a scheduler's changes are none) and a record of the training data. Older checkpoints have no such
entry; what is not known is not compared.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
import xxhash
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Subset, TensorDataset

from composerlite._torch_compat import scheduler_in_charge, scheduler_parts
from composerlite.core import State
from composerlite.core.data import length_of
from composerlite.trainer.data.digests import sampled, spread

__all__ = [
    "ChangedSetting",
    "data_settings",
    "differences_of_run",
    "optimizer_settings",
    "rebase",
    "reconcile_optimizer",
    "tell",
]

log = logging.getLogger(__name__)

_APART = ("params", "param_names", "lr", "initial_lr")
_LONGEST = 60
_NO_RATE = re.compile("base|last|min|final|end")


@final
@dataclass(frozen=True, slots=True)
class ChangedSetting:
    """One setting: its value before and now, and which of the two holds, with the way to the other."""

    what: str
    before: object
    now: object
    verdict: str

    def __str__(self) -> str:
        before, now = _short(self.before), _short(self.now)
        return f"the {self.what} was {before} in the interrupted run and is {now} now: {self.verdict}"


def tell(state: State, differences: Sequence[ChangedSetting]) -> None:
    """Warn of all ``differences`` at once, on rank 0."""
    if differences and state.rank == 0:
        settings = "1 setting" if len(differences) == 1 else f"{len(differences)} settings"
        head = f"run {state.run_name!r} resumes at batch {int(state.timestamp.batch)} with {settings} changed:"
        log.warning("%s", "\n  ".join([head, *map(str, differences)]))


# ── what is recorded ─────────────────────────────────────────────────────────────────────────────────────────────────
def optimizer_settings(optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """Hyperparameters of the groups of ``optimizer`` by name, learning rates apart: one value where all agree."""
    names = dict.fromkeys(name for group in optimizer.param_groups for name in group if name not in _APART)
    settings: dict[str, list[Any]] = {}
    for name in names:
        values = [_plain(group.get(name)) for group in optimizer.param_groups]
        if _UNKNOWN not in values:
            settings[name] = values[:1] if all(value == values[0] for value in values) else values
    return settings


def data_settings(loader: object) -> dict[str, Any]:
    """Kind, length and identity of the data set of ``loader``, as far as they are known without reading samples.

    The identity is a digest of some values of a ``TensorDataset`` and of some indices of a ``Subset``, or what the data
    set itself has as its ``fingerprint`` (OLMo-core) or ``_fingerprint`` (Hugging Face).
    """
    dataset: Any = getattr(loader, "dataset", None)
    if dataset is None:
        return {}
    record: dict[str, Any] = {}
    if (length := length_of(dataset)) is not None:
        record["samples"] = length
    kinds: list[str] = []
    digest = xxhash.xxh3_64()
    while isinstance(dataset, Subset):
        kinds.append("Subset of a ")
        indices: Sequence[int] = dataset.indices
        digest.update(repr([int(indices[at]) for at in spread(len(indices))]).encode())
        dataset = cast("Any", dataset.dataset)
    record["kind"] = "".join(kinds) + type(dataset).__qualname__
    own = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
    if isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            digest.update(sampled(tensor))
    elif isinstance(own, str):
        digest.update(own.encode())
    elif not kinds:
        return record
    return {**record, "digest": digest.hexdigest()}


class _Unknown:
    """Stands for a value that is not plain."""


_UNKNOWN = _Unknown()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in cast("Sequence[Any]", value)]
        return _UNKNOWN if _UNKNOWN in items else items
    return _UNKNOWN


# ── what differs ─────────────────────────────────────────────────────────────────────────────────────────────────────
def reconcile_optimizer(state: State, *, script_holds: bool) -> list[ChangedSetting]:
    """Compare the optimizer's settings, have those hold that are to, and note them in ``state`` as the run's.

    Learning rates and numbers of the script hold, if ``script_holds``; of the others the state that the optimizer was
    saved with is made.
    """
    if not state.optimizers or not state.resumed.metadata:
        return []
    return [*_reconcile_rates(state, script_holds), *_reconcile_hyperparameters(state, script_holds)]


def _reconcile_rates(state: State, script_holds: bool) -> Iterator[ChangedSetting]:
    before, now = list(map(float, state.resumed.metadata.get("learning_rates", ()))), list(state.script.learning_rates)
    if len(before) != len(now) or before == now:
        return
    if not script_holds:
        state.script.learning_rates = tuple(before)
        yield ChangedSetting("learning rate", tuple(before), tuple(now), _OLD_HOLDS)
        return
    groups, schedulers = state.optimizers[0].param_groups, list(_flat(state.schedulers))
    apart = [type(one).__name__ for one in schedulers if _keeps_rates(one)]
    if apart:
        state.script.learning_rates = tuple(before)
        verdict = _SCHEDULE_HOLDS.format(name=apart[0], path=state.load_path, rate=_one(before))
        yield ChangedSetting("learning rate", tuple(before), tuple(now), verdict)
        return
    floor = _floor(state.schedulers[0]) if len(state.schedulers) == 1 else 0.0
    for group, old, new in zip(groups, before, now, strict=True):
        group["lr"] = floor + (group["lr"] - floor) * (new - floor) / (old - floor) if old != floor else new
        if "initial_lr" in group:
            group["initial_lr"] = new
    rebase(state.schedulers, now)
    verdict = f"it holds from here on, scaled by the schedule; to continue as before give lr={_one(before)!r}"
    yield ChangedSetting("learning rate", tuple(before), tuple(now), verdict)


def _flat(schedulers: Iterable[Any]) -> Iterator[Any]:
    """``schedulers``, and those that they are made of."""
    for scheduler in schedulers:
        yield scheduler
        yield from _flat(scheduler_parts(scheduler))


def _keeps_rates(scheduler: Any) -> bool:
    """Return true if ``scheduler`` has numbers that are rates, apart from those that it scales and from lowest ones."""
    named = {name: value for name, value in vars(scheduler).items() if "lr" in name and not _NO_RATE.search(name)}
    return any(_are_numbers(value) for value in named.values())


def _are_numbers(value: Any) -> bool:
    values: list[Any] = list(cast("Any", value)) if isinstance(value, list | tuple) else [value]
    return bool(values) and all(
        isinstance(one, int | float | torch.Tensor) and not isinstance(one, bool) for one in values
    )


def _floor(scheduler: Any) -> float:
    """The rate from which ``scheduler`` scales where it stands: of the difference to that, and not of the whole."""
    return float(getattr(scheduler_in_charge(scheduler), "eta_min", 0.0))


def rebase(schedulers: Iterable[LRScheduler], rates: Sequence[float]) -> None:
    """Make ``rates``, one for each group, those that ``schedulers`` scale, and those that they are made of."""
    for scheduler in _flat(schedulers):
        if len(getattr(scheduler, "base_lrs", ())) == len(rates):
            scheduler.base_lrs = list(rates)


def _reconcile_hyperparameters(state: State, script_holds: bool) -> Iterator[ChangedSetting]:
    groups = state.optimizers[0].param_groups
    given = state.script.settings.get("optimizer", {})
    saved: Mapping[str, list[Any]] | None = state.resumed.metadata.get("settings", {}).get("optimizer")
    if saved is None:  # an older checkpoint: what it has holds, and is what the next one will have been given
        state.script.settings = {**state.script.settings, "optimizer": optimizer_settings(state.optimizers[0])}
        return
    holding = dict(given)
    for name in given:
        before, now = saved.get(name), given[name]
        if before is None or before == now:
            continue
        if script_holds and all(map(_may_change, [name] * len(groups), _each(before, groups), _each(now, groups))):
            for group, value in zip(groups, _each(now, groups), strict=True):
                group[name] = tuple(value) if isinstance(value, list) else value
            verdict = f"it holds from here on; to continue as before give {name}={_short(_one(before))}"
        else:
            holding[name] = before
            verdict = _STATE_HOLDS.format(path=state.load_path) if script_holds else _OLD_HOLDS
        yield ChangedSetting(name, _one(before), _one(now), verdict)
    state.script.settings = {**state.script.settings, "optimizer": holding}


def _may_change(name: str, before: Any, now: Any) -> bool:
    """Return true if the state that an optimizer has serves it with another value: momentum comes with a buffer."""
    if name == "momentum" and bool(before) != bool(now):
        return False
    if isinstance(before, list) and isinstance(now, list):
        pairs = list(itertools.zip_longest(cast("list[Any]", before), cast("list[Any]", now)))
    else:
        pairs = [(before, now)]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for pair in pairs for value in pair)


def differences_of_run(state: State, *, seed: int | None) -> list[ChangedSetting]:
    """Compare settings other than the optimizer's. The script's values apply, but for the seed.

    Args:
        state: of the run, with the training data that it continues with.
        seed: that the script gave; ``None``: it left that to us.
    """
    before = state.resumed.metadata
    if not before:
        return []
    data, now = before.get("settings", {}).get("train_data", {}), state.script.settings.get("train_data", {})
    size = getattr(state.train_dataloader, "batch_size", None)
    compared = [
        ("precision", before.get("precision"), state.precision.value, "give precision={!r}"),
        ("number of ranks", before.get("world_size"), state.world_size, "launch {} ranks"),
        ("batch size of the train_dataloader", before.get("train_dataloader_batch_size"), size, "give batch_size={}"),
        ("number of training samples", data.get("samples"), now.get("samples"), "give a data set of {} samples"),
        ("kind of the training data", data.get("kind"), now.get("kind"), "give a data set of that kind"),
    ]
    if data.get("samples") == now.get("samples") and data.get("kind") == now.get("kind"):
        compared.append(
            ("digest of the training data", data.get("digest"), now.get("digest"), "give the same data set")
        )
    found = [
        ChangedSetting(what, old, new, _verdict(what, state).format(way.format(old)))
        for what, old, new, way in compared
        if old is not None and new is not None and old != new
    ]
    if seed is not None and seed != state.rank_zero_seed:
        found.append(ChangedSetting("seed", state.rank_zero_seed, seed, _SEED_HOLDS.format(path=state.load_path)))
    return found


def _verdict(what: str, state: State) -> str:
    """Return the verdict on the script's value of ``what``: within an epoch, data may not lead to where the run was."""
    is_of_data = "training" in what or "train_dataloader" in what
    return _HOLDS_IF_FOUND if is_of_data and int(state.timestamp.batch_in_epoch) else _NEW_HOLDS


_NEW_HOLDS = "it holds from here on; to continue as before {}"
_HOLDS_IF_FOUND = (
    "it holds from here on if the rest of this epoch can be found with it, and otherwise the run stops with an error; "
    "to continue as before {}"
)
_OLD_HOLDS = "the checkpoint's holds; autoresume=True takes that of the script"
_SCHEDULE_HOLDS = (
    "the checkpoint's holds, since {name} keeps rates of its own, which are restored with it; to continue as before "
    "give lr={rate!r}, to begin with the other, start another run_name with load_path={path!r} and "
    "load_ignore_keys=['state/optimizers', 'state/schedulers']"
)
_STATE_HOLDS = (
    "the checkpoint's holds, with which the optimizer's state was made; to begin with the other, start another "
    "run_name with load_path={path!r} and load_ignore_keys=['state/optimizers', 'state/schedulers']"
)
_SEED_HOLDS = (
    "the checkpoint's holds, with its random generators; to continue with the other, start another run_name with "
    "load_path={path!r} and load_ignore_keys=['state/rank_zero_seed', 'state/dataset_state', 'rng']"
)


def _each(values: list[Any], groups: Sequence[object]) -> list[Any]:
    return values * len(groups) if len(values) == 1 else values


def _one(values: list[Any]) -> Any:
    if len(values) != 1:
        return values
    return tuple(cast("list[Any]", values[0])) if isinstance(values[0], list) else values[0]


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
