"""Conversion of a checkpoint of another system to the state of a run: find parts, rename weights, convert counts."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor

from composerlite import dist
from composerlite._torch_compat import EXTRA_STATE
from composerlite.errors import ConfigError, IncompatibleCheckpointError, did_you_mean
from composerlite.types import StateDict, items_of

KeyMap = Mapping[str, str]
"""Maps the name of a part of a run, from :data:`PARTS`, to a key of another program's checkpoint."""
PARTS = ("model", "optimizer", "scheduler", "epoch", "batch")
NOTHING = object()
"""Result of :func:`found_at` for a missing key."""
log = logging.getLogger(__name__)


def check_key_map(key_map: Any) -> KeyMap | None:
    """Return ``key_map`` as a dict; ``None`` for ``None``.

    Raises:
        ConfigError: ``key_map`` is empty or no dict of strings, or names an unknown part.
    """
    if key_map is None:
        return None
    pairs = cast("Mapping[Any, Any]", key_map).items() if isinstance(key_map, Mapping) else None
    if not pairs or not all(isinstance(text, str) and text for pair in pairs for text in pair):
        raise ConfigError(f"load_key_map={key_map!r}: expected a dict such as {{'model': 'net.*', 'batch': 'step'}}.")
    for part, _ in pairs:
        if part not in PARTS:
            hint = did_you_mean(part, PARTS)
            raise ConfigError(f"load_key_map={key_map!r}: {part!r} is not a part of a run.{hint}")
    return dict(pairs)


def picked(contents: Any, key_map: KeyMap, source: str) -> dict[str, Any]:
    """Look up each part of ``key_map`` in ``contents``, and return the values by the name of the part.

    Raises:
        ConfigError: ``contents`` lacks a key, or the value of the part ``model`` has no weight.
    """
    found: dict[str, Any] = {}
    for part, theirs in key_map.items():
        value = found_at(contents, theirs)
        if value is NOTHING:
            have = sorted({".".join(name.split(".")[:2]) for name, _ in itertools.islice(_leaves(contents), 1000)})
            raise ConfigError(f"load_key_map: {source} has nothing at {theirs!r}.{did_you_mean(theirs, have)}")
        found[part] = flat_weights(value, source) if part == "model" else value
        if part == "model" and not found[part]:
            raise ConfigError(f"load_key_map: {source}: {theirs!r} holds no weight.")
    return found


def found_at(node: Any, path: str) -> Any:
    """Look up ``path`` in nested dicts and lists.

    Args:
        node: the outermost dict or list.
        path: keys joined by dots. A path ending in ``*`` selects all keys that begin with the text before ``*``:
            the result is a dict of these values, by the rest of the key.

    Returns:
        The value; ``NOTHING`` if there is none.
    """
    if path in ("", "*"):
        return node
    flat: StateDict = {}
    for key, value in items_of(node):
        name = str(key)
        if name == path or path == f"{name}.*":
            return value
        if path.startswith(f"{name}.") and (found := found_at(value, path[len(name) + 1 :])) is not NOTHING:
            return found
        if path.endswith("*") and name.startswith(path[:-1]):
            flat[name[len(path) - 1 :]] = value
    return flat or NOTHING


def flat_weights(node: Any, source: str) -> StateDict:
    """Return the weights in nested dicts, by keys joined by dots: tensors, arrays as tensors, and extra state.

    Other values are left out with a warning.

    Args:
        node: the dicts, or a single weight with the empty name.
        source: the checkpoint, for messages.

    Raises:
        IncompatibleCheckpointError: two weights have the same name.
    """
    found: StateDict = {}
    left: list[str] = []
    for name, value in _leaves(node):
        if not is_weight(name, weight := as_tensor(value)):
            left.append(name)
        elif name in found:
            raise IncompatibleCheckpointError(f"{source} has two weights of one name, {name!r}: nested and with dots.")
        else:
            found[name] = weight
    if left:
        log.warning("%s: not weights, left out: %s", source, ", ".join(left[:20]))
    return found


def is_weight(name: str, value: Any) -> bool:
    """Return true for an entry of a model's state: a tensor, or any value if ``name`` ends with ``EXTRA_STATE``."""
    return isinstance(value, Tensor) or name.endswith(EXTRA_STATE)


def as_tensor(value: Any) -> Any:
    """Return an array of numbers as a tensor with memory of its own, and other values unchanged."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc" or value.dtype.char in "gG":
        return value  # torch has no dtype for "g" and "G", long doubles
    return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))


def tensors_of(weights: Mapping[str, Any], target: str) -> dict[str, Tensor]:
    """Select the tensors. A warning names other values, since ``target`` cannot hold them."""
    if left := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
        log.warning("%s: not tensors, left out: %s", target, ", ".join(left[:20]))
    return {name: value for name, value in weights.items() if isinstance(value, Tensor)}


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(node, Mapping) or prefix.endswith(EXTRA_STATE):
        yield prefix, node
        return
    for key, value in cast("Mapping[Any, Any]", node).items():
        yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))


@final
class Rename(NamedTuple):
    """Change of a prefix of names: from ``net.0.weight`` to ``module.0.weight``.

    Attributes:
        strip: prefix of the old names.
        add: prefix of the new names.
    """

    strip: str = ""
    add: str = ""

    def of(self, name: str) -> str:
        """Return the new name. A name without the old prefix is unchanged."""
        return self.add + name[len(self.strip) :] if name.startswith(self.strip) else name


def renamed(weights: Mapping[str, Any], rename: Rename) -> StateDict:
    """Return ``weights`` under their new names, for the option ``--rename``.

    Raises:
        ConfigError: two weights would have the same name, or no name has the old prefix.
    """
    asked = f"--rename {rename.strip}={rename.add}"
    if rename.strip and not any(name.startswith(rename.strip) for name in weights):
        known = {name[: at + 1] for name in weights for at, char in enumerate(name) if char == "."}
        raise ConfigError(
            f"{asked}: no weight begins with {rename.strip!r}.{did_you_mean(rename.strip, sorted(known))}"
        )
    origin: dict[str, str] = {}
    for name in weights:
        if (other := origin.setdefault(new := rename.of(name), name)) != name:
            raise ConfigError(f"{asked}: {other!r} and {name!r} would both be {new!r}. Expected names that differ.")
    return {new: weights[name] for new, name in origin.items()}


def common_rename(saved: Collection[str], live: Collection[str], *, all_must: bool) -> Rename:
    """Find the change of prefix by which most names ``saved`` become names ``live``; an empty change if none helps.

    Args:
        saved: names in the checkpoint.
        live: names in the model.
        all_must: accept only a change by which all names ``saved`` become names ``live``.
    """
    wanted = set(live)
    best, most = Rename(), len(wanted & set(saved))
    for strip, add in itertools.product(_prefixes(saved), _prefixes(live)):
        rename = Rename(strip, add)
        count = sum(rename.of(name) in wanted for name in saved)
        if count > most and (count == len(saved) or not all_must):
            best, most = rename, count
    return best


def _prefixes(names: Collection[str]) -> list[str]:
    """Return the common prefixes of ``names`` that end with a dot, the shortest first, and the empty prefix."""
    first, last = min(names, default=""), max(names, default="")  # a prefix of both names is a prefix of all names
    begins = [first[: at + 1] for at, char in enumerate(first) if char == "."]
    return ["", *filter(last.startswith, begins)]


# ── the state of a run ───────────────────────────────────────────────────────────────────────────────────────────────
@final
class Run(NamedTuple):
    """Names and states of the run to load into.

    Attributes:
        model: live weights, by name.
        optimizers: live states by class name, with the names of parameters.
        schedulers: live states by class name.
        strict: all names must agree.
        source: the checkpoint, for messages.
    """

    model: StateDict
    optimizers: StateDict
    schedulers: StateDict
    strict: bool
    source: str


@final
class Counts(NamedTuple):
    """Counts of training: integers, or tensors with one element, which are read before :func:`settle_time`.

    If ``epoch`` or ``batch_in_epoch`` is ``None``, :func:`settle_time` computes both from ``batch``.

    Attributes:
        batch: optimizer steps.
        epoch: completed epochs.
        batch_in_epoch: optimizer steps since the last completed epoch.
        token: trained tokens.
    """

    batch: Any
    epoch: Any = None
    batch_in_epoch: Any = None
    token: Any = 0


@final
class Taken(NamedTuple):
    """Parts of a checkpoint of another system that a run continues from.

    Attributes:
        model: weights by name; keys of nested dicts are joined by dots.
        optimizer: state of ``torch.optim.Optimizer``, or a state by names of parameters, nested or flat.
        scheduler: state of a scheduler.
        progress: counts of training; ``None``: unknown, and the run starts at zero.
        rng: states of random generators, an entry for each rank.
        left: keys that are not loaded, for the log.
    """

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    progress: Counts | None = None
    rng: Sequence[StateDict] | None = None
    left: Sequence[str] = ()


def state_of(taken: Taken, run: Run, system: str) -> StateDict:
    """Return contents in the form of our checkpoints, with the names of ``run``. Logs the keys that are not loaded.

    Raises:
        IncompatibleCheckpointError: the run has another optimizer, or other groups.
    """
    weights: StateDict = {
        name.replace("_orig_mod.", ""): value for name, value in flat_weights(taken.model, run.source).items()
    }
    rename = common_rename(weights, run.model, all_must=run.strict)
    if rename != Rename():
        log.info("%s: loading its weights %r* as %r*", run.source, rename.strip, rename.add)
    weights = {rename.of(name): tensor for name, tensor in weights.items()}
    for names in dist.tied_names(run.model):  # some programs save a tied weight under a single name
        saved = [weights[name] for name in names if name in weights]
        weights |= {name: saved[0] for name in names if saved and name not in weights}
    state: StateDict = {"model": weights}
    left = list(taken.left)
    if taken.optimizer is not None and run.optimizers:
        kind, live = next(iter(run.optimizers.items()))
        try:
            state["optimizers"] = {kind: _by_names(taken.optimizer, live, rename, run.source)}
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise IncompatibleCheckpointError(
                f"{run.source}: its optimizer cannot be loaded: {e if type(e) is ValueError else repr(e)}. "
                "load_ignore_keys=['state/optimizers'] starts with a new one, load_weights_only=True loads the model."
            ) from e
    if isinstance(taken.scheduler, Mapping):
        fitting = [kind for kind, live in run.schedulers.items() if set(live) == set(taken.scheduler)]
        if len(fitting) == 1:
            state["schedulers"] = {fitting[0]: taken.scheduler}
        else:
            left.append("the scheduler, which is of another kind than that of the run")
    if taken.progress is None:
        log.warning("%s does not record the training time: time, data and callbacks start from zero", run.source)
    else:
        state["timestamp"] = {"Timestamp": taken.progress._asdict()}
    contents: StateDict = {"state": state}
    if taken.rng is not None:
        contents["rng"] = list(taken.rng)
    others = ", ".join(map(str, left)) or "nothing"
    log.info("%s is a checkpoint of %s. Loaded: %s. Not loaded: %s", run.source, system, ", ".join(state), others)
    return contents


def settle_time(state: StateDict, batches_per_epoch: int | None, source: str) -> None:
    """Convert ``state/timestamp`` to the timestamp of a run. Call after tensors in ``state/timestamp`` are read.

    Args:
        state: result of :func:`state_of`; changed in place.
        batches_per_epoch: of the run's data, to compute missing counts. ``None``: unknown, and missing counts are 0.
        source: the checkpoint, for messages.

    Raises:
        IncompatibleCheckpointError: the counts are not numbers from 0 to 2**62.
    """
    if "timestamp" not in state:
        return
    progress = Counts(**state["timestamp"]["Timestamp"])
    batch, epoch, batch_in_epoch, token = (
        value.item() if isinstance(value, Tensor) and value.numel() == 1 else value for value in progress
    )
    made = divmod(batch, batches_per_epoch) if batches_per_epoch and isinstance(batch, int) else (epoch or 0, 0)
    epoch, batch_in_epoch = made if epoch is None or batch_in_epoch is None else (epoch, batch_in_epoch)
    counts = {"batch": batch, "epoch": epoch, "batch_in_epoch": batch_in_epoch, "iteration": epoch, "token": token}
    if not all(isinstance(count, int) and 0 <= count < 1 << 62 for count in counts.values()):
        raise IncompatibleCheckpointError(
            f"{source}: its training counts are invalid: batch {batch!r}, epoch {epoch!r}, batch in the epoch "
            f"{batch_in_epoch!r}. load_ignore_keys=['state/timestamp'] starts at zero."
        )
    state["timestamp"] = {"Timestamp": counts}


def _by_names(state: Any, live: StateDict, rename: Rename, source: str) -> StateDict:
    """Return a saved state of an optimizer with the run's names of parameters and the saved settings of groups.

    Args:
        state: the saved state, with names or numbers of parameters, nested or flat.
        live: state of the run's optimizer.
        rename: from saved names to the run's names.
        source: the checkpoint, for messages.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: the optimizer is of another kind, or has other groups, or is
            damaged.
    """
    if "param_groups" not in state:
        back = Rename(rename.add, rename.strip)
        state = unflattened(state, [[back.of(name) for name in group["params"]] for group in live["param_groups"]])
    its: list[StateDict] = state["param_groups"]
    own: list[StateDict] = live["param_groups"]
    if not isinstance(its, list):  # pyright: ignore[reportUnnecessaryIsInstance] - from a file
        raise ValueError("it has no 'param_groups'")
    if odd := [key for group in its for key in group if not isinstance(key, str)]:  # pyright: ignore
        raise ValueError(f"{odd[0]!r} is not the name of a setting")
    if odd := [name for group in its for name in group["params"] if not isinstance(name, str | int)]:
        raise ValueError(f"{odd[0]!r} is neither a name nor a number of a parameter")
    if any(not isinstance(name, str) for group in its for name in group["params"]):
        named = _named(its, own, rename, source)
    else:
        named = [[rename.of(name) for name in group["params"]] for group in its]
    new_name: dict[Any, str] = {}
    made: list[StateDict] = []
    for number, (group, names) in enumerate(zip(its, named, strict=True)):
        here = own[number] if number < len(own) else {}
        lacks = [key for key, value in here.items() if key not in group and _is_setting(key, value)]
        if lacks:
            raise ValueError(f"its groups have no {', '.join(lacks)}: it was another kind of optimizer")
        new_name |= dict(zip(group["params"], names, strict=True))
        made.append({**here, **{key: value for key, value in group.items() if key != "param_names"}, "params": names})
    values: StateDict = state.get("state", {})  # none before the first step
    return {"state": {new_name[name]: value for name, value in values.items()}, "param_groups": made}


def _named(its: Sequence[StateDict], own: Sequence[StateDict], rename: Rename, source: str) -> list[list[str]]:
    """Return the run's names of the parameters in each group of an optimizer that numbers the parameters.

    The names are ``param_names`` of the groups. If ``param_names`` is missing or has no name of the run, the saved
    parameters are matched with the run's parameters by order.

    Raises:
        ValueError: parameters are matched by order, and the groups of the run have other numbers of parameters.
    """
    saved: list[Any] = [group.get("param_names") for group in its]
    if all(names is not None and len(names) == len(group["params"]) for names, group in zip(saved, its, strict=True)):
        named = [[str(name).replace("_orig_mod.", "") for name in names] for names in saved]
        every = [name for names in named for name in names]
        live = {name for group in own for name in group["params"]}
        for change in (rename, common_rename(every, live, all_must=True)):
            found = [[change.of(name) for name in names] for names in named]
            if live & (known := {name for names in found for name in names}) and len(known) == len(every):
                return found
        unknown = "%s: its optimizer names its parameters %r, …, which this run does not have: matching them by order"
        log.warning(unknown, source, every[0])
    have, want = ([len(group["params"]) for group in each] for each in (its, own))
    if have != want:
        raise ValueError(f"its groups have {have} parameters, and those of this run {want}")
    return [group["params"] for group in own]


def _is_setting(key: str, value: Any) -> bool:
    """Return true for a setting of a group that every version of an optimizer saves: a number or tuple of numbers."""
    is_number = isinstance(value, int | float | tuple) and not isinstance(value, bool)
    return is_number and key not in ("initial_lr", "params")


def unflattened(saved: Mapping[Any, Any], groups: Sequence[Sequence[str]]) -> StateDict:
    """Return an optimizer's state in groups, from keys ``state.<name>.<key>`` and ``param_groups.<name>.<setting>``.

    Args:
        saved: the flat state.
        groups: names of the parameters of each group; names that ``saved`` does not have are left out.
    """
    state: dict[str, StateDict] = {}
    settings: dict[str, StateDict] = {}
    for full, value in saved.items():
        kind, _, rest = str(full).partition(".")
        name, _, key = rest.rpartition(".")
        {"state": state, "param_groups": settings}.get(kind, {}).setdefault(name, {})[key] = value
    present = [[name for name in group if name in settings or name in state] for group in groups]
    made = [{**(settings.get(group[0], {}) if group else {}), "params": group} for group in present]
    return {"state": state, "param_groups": made if settings else None}
