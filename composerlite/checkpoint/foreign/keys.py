"""Keys in checkpoints of other systems: places of parts, and the names of weights in a run."""

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

KeyMap = Mapping[str, str]
"""Maps the key of a part of a run to a key of another program's checkpoint."""
PARTS = ("model", "optimizer", "scheduler", "epoch", "batch")
_NOTHING = object()
log = logging.getLogger(__name__)


def check_key_map(key_map: Any) -> KeyMap | None:
    """Return ``key_map`` as a dict; ``None`` for ``None``.

    Raises:
        ConfigError: ``key_map`` is no dict of texts, or names an unknown part.
    """
    if key_map is None:
        return None
    pairs = cast("Mapping[Any, Any]", key_map).items() if isinstance(key_map, Mapping) else None
    if not pairs or not all(isinstance(text, str) and text for pair in pairs for text in pair):
        raise ConfigError(f"load_key_map={key_map!r}: expected a dict such as {{'model': 'net.*', 'batch': 'step'}}.")
    for part, _ in pairs:
        if part not in PARTS:
            hint = did_you_mean(part, PARTS)
            raise ConfigError(f"load_key_map={key_map!r}: {part!r} is no part of a run.{hint} Want {', '.join(PARTS)}.")
    return dict(pairs)


def picked(contents: Any, key_map: KeyMap, source: str) -> dict[str, Any]:
    """Return the parts of a run by name, each from its key of ``key_map`` in ``contents``.

    Raises:
        ConfigError: a key is missing, or holds no weight for a model.
    """
    found: dict[str, Any] = {}
    for part, theirs in key_map.items():
        value = _found_at(contents, theirs)
        if value is _NOTHING:
            have = sorted({".".join(name.split(".")[:2]) for name, _ in itertools.islice(_leaves(contents), 1000)})
            raise ConfigError(f"load_key_map: {source} has nothing at {theirs!r}.{did_you_mean(theirs, have)}")
        found[part] = flat_weights(value, source) if part == "model" else value
        if part == "model" and not found[part]:
            raise ConfigError(f"load_key_map: {source}: {theirs!r} holds no weight.")
    return found


def _found_at(node: Any, path: str) -> Any:
    """Look up ``path``, keys joined by dots; with ``*`` at the end, a dict of all keys that begin so."""
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
        log.warning("%s: left out of the weights, since these are none: %s", source, ", ".join(left[:20]))
    return found


def is_weight(name: str, value: Any) -> bool:
    """Return true for an entry of a model's state: a tensor, or any value as extra state."""
    return isinstance(value, Tensor) or name.endswith(EXTRA_STATE)


def as_tensor(value: Any) -> Any:
    """Return an array of numbers as a tensor with memory of its own, and other values unchanged."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc" or value.dtype.char in "gG":
        return value  # torch has no numbers as long as "g" and "G"
    return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))


def tensors_of(weights: Mapping[str, Any], target: str) -> dict[str, Tensor]:
    """Select the tensors. A warning names other values, since ``target`` cannot hold them."""
    if left := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
        log.warning("%s: left out what is no tensor: %s", target, ", ".join(left[:20]))
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
    """Find the change of a prefix from the names ``saved`` to the names ``live``; an empty change if there is none.

    Args:
        saved: names in the checkpoint.
        live: names in the model.
        all_must: each new name must be a name of the model; otherwise the change with the most such names is taken.
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
    first, last = (min(names), max(names)) if names else ("", "")
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    return ["", *(first[: at + 1] for at in range(same) if first[at] == ".")]
