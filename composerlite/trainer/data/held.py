"""Held: generators and states in the attributes of loaders, samplers and data sets."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import random
import types
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast, final

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from composerlite._torch_compat import OWN_OF_LOADERS, forget_workers
from composerlite.errors import IncompatibleCheckpointError
from composerlite.trainer.data.states import NotPlainError, generator_state, native, portable, set_generator_state
from composerlite.types import Stateful, items_of

__all__ = ["Held", "apart", "is_streaming", "put_back", "shared_states", "without_persistent_workers"]

log = logging.getLogger(__name__)

_DEPTH = 8
_OBJECTS = 500
_ITEMS = 64
_PARTS = ("sampler", "batch_sampler", "dataset", "datasets")
_CONTAINERS = (dict, list, tuple, deque)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LEAVES = (torch.Tensor, np.ndarray, nn.Module, torch.optim.Optimizer, type, types.ModuleType, *_GENERATORS)


class _Found(NamedTuple):
    """Object with its place, such as ``"batch_sampler.sampler"``, and whether it is a loader, sampler or data set."""

    place: str
    value: Any
    is_part: bool
    depth: int


@final
class Held:
    """Generators and states in the attributes of an object, and of all objects in these attributes.

    The search runs no code of the user. It enters attributes, dicts and lists. The states are results of
    ``state_dict()`` of samplers and data sets.

    Args:
        root: the object, or a dict of objects.
        leave_out: objects that are not searched.
        with_states: search for states, too.

    Attributes:
        generators: each generator once, in the same order in every process. The global generators of Python, NumPy and
            torch are left out, because each checkpoint has their states.
    """

    def __init__(self, root: Any, *, leave_out: Iterable[Any] = (), with_states: bool = True) -> None:
        found = list(_walk(root, {id(one) for one in leave_out}))
        draws = [getattr(draw, "__self__", None) for draw in (np.random.random, random.random)]
        shared = [torch.default_generator, *draws]
        self.generators = [
            one.value
            for one in found
            if isinstance(one.value, _GENERATORS)
            and not isinstance(one.value, random.SystemRandom)
            and all(one.value is not other for other in shared)
        ]
        parts = [one for one in found if with_states and one.is_part and _has_state(one.value)]
        self._stateful = [(one.place, one.value) for one in parts if not is_streaming(one.value)]
        self._refused: set[str] = set()

    def generator_states(self) -> list[Any]:
        """Return the states of all generators."""
        return [generator_state(generator) for generator in self.generators]

    def set_generators(self, states: Sequence[Any]) -> None:
        """Set the states of all generators.

        Raises:
            IncompatibleCheckpointError: there are more or fewer states than generators.
        """
        if len(states) != len(self.generators):
            raise IncompatibleCheckpointError(
                f"the checkpoint's data loader had {len(states)} generators of its own and this one has "
                f"{len(self.generators)}: build the loader as in that run."
            )
        for generator, state in zip(self.generators, states, strict=True):
            set_generator_state(generator, state)

    def states(self) -> list[list[Any]]:
        """Return ``[place, state]`` for each sampler and data set with a state. The states are copies."""
        states: list[list[Any]] = []
        for place, one in self._stateful:
            try:
                states.append([place, portable(one.state_dict())])
            except NotPlainError as e:
                if place not in self._refused:
                    self._refused.add(place)
                    log.warning(
                        "the state_dict() of %s contains a %s, which checkpoints do not hold: a resume does not "
                        "restore this state. Use numbers, text, tensors and arrays, in dicts and lists.",
                        type(one).__name__,
                        e,
                    )
        return states

    def load(self, states: Iterable[Any]) -> None:
        """Load states from :meth:`states`. An object with the state ``None`` is not loaded: no pass has begun."""
        given = dict(states)
        for place, one in self._stateful:
            if given.get(place) is not None and one.state_dict() is not None:
                one.load_state_dict(native(given[place]))


def is_streaming(dataset: Any) -> bool:
    """Return true if ``dataset`` restores itself by sample count, as MosaicML's StreamingDataset does."""
    if not _has_state(dataset):
        return False
    return {"num_samples", "from_beginning"} <= inspect.signature(dataset.state_dict).parameters.keys()


def without_persistent_workers(loader: Any) -> Any:
    """Return ``loader``, or a copy with workers that end after each epoch if its workers persist.

    A resume cannot repeat what a persistent worker keeps from earlier epochs.
    """
    if not isinstance(loader, DataLoader) or not loader.persistent_workers:
        return loader
    own = copy.copy(loader)
    forget_workers(own)
    vars(own)["persistent_workers"] = False
    return own


def apart(loader: Any) -> Any:
    """Return a copy of torchdata's loader for evaluation; any other ``loader`` itself.

    ``state_dict()`` of the original loader must stay the state of the training iterator.
    """
    if not _is_restartable(loader):
        return loader
    own = copy.copy(loader)
    forget_workers(own)
    vars(own).update(next_iter_state=None, _initial_iter_for_state_dict=False, persistent_workers=False)
    return own


def shared_states(loader: Any, other: Any) -> list[Any]:
    """Return the loaders, samplers and iterable data sets with a position that both loaders iterate over.

    Not returned: loaders that :func:`apart` copies, data sets that workers of ``other`` copy, and map-style data sets.
    """
    kept: list[list[Any]] = []
    for one in (loader, other):
        found = [part.value for part in _walk(one, set()) if part.is_part]
        kept.append([part for part in found if isinstance(part, Stateful) and not _is_restartable(part)])
    copied = not is_streaming(getattr(other, "dataset", None)) and getattr(other, "num_workers", 0) > 0
    return [
        part
        for part in kept[0]
        if any(part is same_one for same_one in kept[1])
        and not (isinstance(part, Dataset) and (copied or not isinstance(part, IterableDataset)))
    ]


@contextlib.contextmanager
def put_back(loader: Any) -> Generator[None]:
    """Restore the generators of ``loader`` at the end of the block."""
    held = Held(loader, with_states=False)
    before = held.generator_states()
    try:
        yield
    finally:
        held.set_generators(before)


def _is_restartable(part: Any) -> bool:
    return isinstance(part, DataLoader) and "next_iter_state" in vars(part)


def _has_state(part: Any) -> bool:
    if isinstance(part, DataLoader | nn.Module):
        return False
    return all(callable(getattr(type(part), name, None)) for name in ("state_dict", "load_state_dict"))


def _walk(root: Any, seen: set[int]) -> Iterator[_Found]:
    """Yield ``root`` and the objects within, nearest first, each once, at most 500."""
    queue = deque([_Found("", root, not isinstance(root, dict), 0)])
    seen.add(id(root))
    for _ in range(_OBJECTS):
        if not queue:
            return
        found = queue.popleft()
        yield found
        value = found.value
        if isinstance(value, _LEAVES) or found.depth == _DEPTH:
            continue
        if isinstance(value, _CONTAINERS):
            inside = list(items_of(cast("Any", value))) if len(cast("Any", value)) <= _ITEMS else []
        else:
            inside = _attributes(value)
        for name, item in inside:
            if id(item) not in seen and _may_hold(item):
                seen.add(id(item))
                is_part = isinstance(item, Sampler | Dataset | DataLoader) or name in _PARTS
                place = f"{found.place}.{name}" if found.place else str(name)
                is_part = is_part and not isinstance(item, _CONTAINERS)
                queue.append(_Found(place, item, is_part, found.depth + 1))


def _attributes(value: Any) -> list[tuple[Any, Any]]:
    """Return the attributes of ``value`` without calling its code. The iterator of a loader is left out."""
    try:
        own: Any = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = {}
    of_torch = OWN_OF_LOADERS if isinstance(value, DataLoader) else ()
    found = [(name, own[name]) for name in list(own) if name not in of_torch] if isinstance(own, dict) else []
    for kind in type(value).__mro__:
        for name, member in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # an empty slot
                    found.append((name, member.__get__(value)))
    return found


def _may_hold(value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return False
    if isinstance(value, _CONTAINERS):
        return True
    if type(value).__module__.startswith(("builtins", "composerlite.")) or inspect.isroutine(value):
        return False
    return isinstance(value, _GENERATORS) or not isinstance(value, _LEAVES)
