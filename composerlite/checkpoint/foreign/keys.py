"""Names in checkpoints of others: where a part lies, and how its weights are called here."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast, final

import numpy as np
import torch
from torch import Tensor

from composerlite._torch_compat import EXTRA_STATE
from composerlite.errors import ConfigError, IncompatibleCheckpointError, did_you_mean
from composerlite.types import StateDict

__all__ = [
    "PARTS",
    "KeyMap",
    "Rename",
    "as_tensor",
    "check_key_map",
    "common_rename",
    "flat_weights",
    "is_weight",
    "picked",
    "tensors_of",
]

KeyMap = Mapping[str, str]
"""The key of a part here, by which a checkpoint of another program is asked for its own key."""
PARTS = ("model", "optimizer", "scheduler", "epoch", "batch")
_NOTHING = object()
log = logging.getLogger(__name__)


def check_key_map(key_map: Any) -> KeyMap | None:
    """``key_map`` if it can be used.

    Raises:
        ConfigError: it is no dict of texts, or names a part that there is not.
    """
    if key_map is None:
        return None
    pairs = cast("Mapping[Any, Any]", key_map).items() if isinstance(key_map, Mapping) else None
    if not pairs or not all(isinstance(text, str) and text for pair in pairs for text in pair):
        raise ConfigError(f"load_key_map={key_map!r}: expected a dict such as {{'model': 'net.*', 'batch': 'step'}}.")
    for ours, _ in pairs:
        part = ours.partition(".")[0]
        if part not in PARTS or (part != ours and part != "model"):
            raise ConfigError(
                f"load_key_map={key_map!r}: {ours!r} is no part of a run.{did_you_mean(part, PARTS)} Want 'model', "
                "'model.<name>' or 'model.<names>.*' for some of its weights, 'optimizer', 'scheduler', 'epoch' or "
                "'batch'."
            )
    return dict(pairs)


def picked(contents: Any, key_map: KeyMap, source: str) -> dict[str, Any]:
    """Parts of a run by their names here, each from where ``key_map`` says that it is in ``contents``.

    Raises:
        ConfigError: there is nothing, no weight where weights are to be, or a weight in two of the places.
    """
    found: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for ours, theirs in key_map.items():
        value = _found_at(contents, theirs)
        if value is _NOTHING:
            have = sorted({".".join(map(str, path[:2])) for path in itertools.islice(_paths(contents), 1000)})
            raise ConfigError(f"load_key_map: {source} has nothing at {theirs!r}.{did_you_mean(theirs, have)}")
        part, _, inner = ours.partition(".")
        if part != "model":
            found[part] = value
            continue
        prefix = inner.removesuffix("*")
        weights = {prefix + name: weight for name, weight in flat_weights(value, source).items()}
        if not weights:
            raise ConfigError(f"load_key_map: {source}: {theirs!r} holds no weight for {ours!r}.")
        for name in weights:
            if name in origin:
                raise ConfigError(f"load_key_map: {source}: {theirs!r} has {name!r}, which {origin[name]!r} has too.")
            origin[name] = theirs
        found["model"] = {**found.get("model", {}), **weights}
    return found


def _paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(node, Mapping) and len(path) < 2:
        for key, inner in cast("Mapping[Any, Any]", node).items():
            yield from _paths(inner, (*path, key))
    else:
        yield path


def _found_at(node: Any, path: str) -> Any:
    """Look up ``path``, keys joined by dots; with ``*`` at its end a dict of all whose keys begin so."""
    if path in ("", "*"):
        return node
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, Mapping):
        items = cast("Mapping[Any, Any]", node).items()
    elif isinstance(node, list | tuple):
        items = enumerate(cast("Sequence[Any]", node))
    flat: StateDict = {}
    for key, value in items:
        name = str(key)
        if name == path or path == f"{name}.*":
            return value
        if path.startswith(f"{name}.") and (found := _found_at(value, path[len(name) + 1 :])) is not _NOTHING:
            return found
        if path.endswith("*") and name.startswith(path[:-1]):
            flat[name[len(path) - 1 :]] = value
    return flat or _NOTHING


def flat_weights(node: Any, source: str) -> StateDict:
    """The weights in nested dicts, by their keys with dots between: tensors, arrays as tensors, extra state as it is.

    What is none of them is left out with a warning.

    Args:
        node: the dicts, or one weight, whose name is empty.
        source: the checkpoint, for messages.

    Raises:
        IncompatibleCheckpointError: two weights have one name.
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
        log.warning("%s: what is among its weights and is no weight is left out: %s", source, ", ".join(left[:20]))
    return found


def is_weight(name: str, value: Any) -> bool:
    """Return true for what a model has in its state: a tensor, and any value as extra state."""
    return isinstance(value, Tensor) or name.endswith(EXTRA_STATE)


def as_tensor(value: Any) -> Any:
    """An array of numbers as a tensor with memory of its own; other values as they are."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc" or value.dtype.char in "gG":
        return value  # of which the last are longer than any number of torch
    return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))


def tensors_of(weights: StateDict, target: str) -> dict[str, Tensor]:
    """Select the tensors; the rest, which ``target`` cannot hold, is named in a warning."""
    if left := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
        log.warning("%s: left out what is no tensor: %s", target, ", ".join(left[:20]))
    return {name: value for name, value in weights.items() if isinstance(value, Tensor)}


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(node, Mapping) or prefix.endswith(EXTRA_STATE):
        yield prefix, node
        return
    for key, value in cast("Mapping[Any, Any]", node).items():
        yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))


# ── the same weights under another prefix ────────────────────────────────────────────────────────────────────────────
@final
class Rename(NamedTuple):
    """Names that begin otherwise here: ``net.0.weight`` is ``module.0.weight``.

    Attributes:
        strip: how all of them begin there.
        add: how they begin here.
    """

    strip: str = ""
    add: str = ""

    def of(self, name: str) -> str:
        """Return the name here."""
        return self.add + name[len(self.strip) :] if name.startswith(self.strip) else name


def renamed(weights: Mapping[str, Any], rename: Rename) -> StateDict:
    """``weights`` under the names that the user has asked for with ``rename``.

    Raises:
        ConfigError: two weights would have one name, or none begins as ``rename`` says.
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
    """Find the change of one prefix that makes the names ``saved`` those that are ``live``; none if there is none.

    Args:
        saved: names in the checkpoint.
        live: names in the model.
        all_must: each name must be one of the model; otherwise the change counts that makes most of them so.
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
    """All that every one of ``names`` begins with, up to a dot; the shortest first."""
    first, last = (min(names), max(names)) if names else ("", "")
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    return ["", *(first[: at + 1] for at in range(same) if first[at] == ".")]
