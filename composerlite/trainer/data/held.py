"""Generators, states and counters that loaders, samplers and data sets hold themselves, and on which the data depend.

They are looked for where whatever wraps whatever keeps them: in attributes, dicts and lists. No code of the user's runs
for that; to save and load, what has ``state_dict`` and ``load_state_dict`` is asked.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import random
import types
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from composerlite._torch_compat import OWN_OF_LOADERS, forget_workers
from composerlite.trainer.data.states import (
    NotPlainError,
    generator_state,
    native,
    portable,
    same,
    set_generator_state,
)
from composerlite.types import StateDict, Stateful, items_of

__all__ = [
    "Held",
    "apart",
    "draws_from_generators_alone",
    "held_by",
    "held_by_data",
    "held_by_order",
    "is_streaming",
    "put_back",
    "shared_states",
    "tell_of_lacking",
]

log = logging.getLogger(__name__)

_DEPTH = 8
_OBJECTS = 500
_ITEMS = 64
_NAMED = 3
_LONGEST = 200
_PARTS = ("sampler", "batch_sampler", "dataset", "datasets")
_PLAIN = (bool, int, float, str)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_CLOSED = (torch.Tensor, np.ndarray, nn.Module, torch.optim.Optimizer, type, types.ModuleType, *_GENERATORS)
_OF_LOADERS = frozenset(inspect.signature(DataLoader).parameters)

Pairs = Sequence[Sequence[Any]]
"""Values by place, as a checkpoint holds them: ``[place, value]`` each."""


@final
@dataclass(frozen=True, slots=True)
class _Found:
    """Something that was found: its ``place``, as in ``'batch_sampler.sampler'``, and whether it is a part of a loader.

    Attributes:
        covered: something around it has a state, which is its affair.
    """

    place: str
    value: Any
    is_part: bool
    covered: bool
    depth: int


@final
class Held:
    """Generators, states and counters held by some objects and by what they hold, found when this is built.

    Attributes:
        generators: each once, in an order that is the same in every process. Not those of Python, numpy and torch
            that everybody draws from.
        first: how many of them are held by a loader and its samplers themselves: all that older checkpoints have.
        kinds: names of the classes of samplers and data sets that are not torch's own.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        *,
        leave_out: Iterable[Any] = (),
        first: Sequence[Any] = (),
        asks: bool = True,
    ) -> None:
        """``asks``: what has a state is asked for it."""
        found = list(_walk(roots, {id(one) for one in leave_out}))
        self.generators = list({id(one): one for one in (*first, *_generators_among(found))}.values())
        self.first = len(first)
        parts = [one for one in found if one.is_part]
        own = [(one.place, one.value) for one in parts if not one.covered]
        self._stateful = [(place, value) for place, value in own if asks and _can_be_asked(value)]
        self._counting = [(place, value) for place, value in own if not _has_state(value)]
        kinds = (type(one.value) for one in parts)
        self.kinds = list(dict.fromkeys(kind.__name__ for kind in kinds if _is_users(kind)))
        self._counts = dict(self._counters())
        self._refused: set[str] = set()
        self._loaded: list[list[Any]] = []

    # ── generators ───────────────────────────────────────────────────────────────────────────────────────────────────
    def generator_states(self) -> list[Any]:
        """States of the generators."""
        return [generator_state(generator) for generator in self.generators]

    # ── what has a state ─────────────────────────────────────────────────────────────────────────────────────────────
    def states(self) -> list[list[Any]]:
        """The state of whatever has one, by place, as plain values that nobody changes any more."""
        states: list[list[Any]] = []
        for place, one in self._stateful:
            try:
                states.append([place, portable(one.state_dict())])
            except NotPlainError as e:
                if place not in self._refused:
                    self._refused.add(place)
                    log.warning(
                        "the state_dict() of %s has a %s in it, which is not kept in checkpoints: a resume does not "
                        "restore it. Make it of numbers, text, tensors and arrays, in dicts and lists.",
                        type(one).__name__,
                        e,
                    )
        return states

    def load(self, states: Pairs) -> None:
        """Give its state back to whatever has one; to who has none before its first pass, it would be one of a pass."""
        given = _by_place(states)
        for place, one in self._stateful:
            if given.get(place) is not None and one.state_dict() is not None:
                one.load_state_dict(native(given[place]))
        self._loaded = self.states()

    def differs_from(self, states: Pairs) -> bool:
        """Return true if what has a state has another one."""
        return not same(self.states(), list(states))

    def state_dict(self) -> StateDict:
        """:meth:`states` and :meth:`counts`, where there are any."""
        found = {"states": self.states(), "counts": self.counts()}
        return {name: value for name, value in found.items() if value}

    # ── what counts without having a state ───────────────────────────────────────────────────────────────────────────
    def counts(self) -> list[list[Any]]:
        """Numbers and names, kept as attributes of samplers and data sets, that have changed since this was built."""
        return [[place, value] for place, value in self._counters() if self._counts.get(place) != value]

    def are_set(self, saved: StateDict) -> bool:
        """Return true if somebody else sets what the loader holds: now, or when the ``saved`` counts were restored."""
        counts, now = _by_place(saved.get("counts", ())), dict(self._counters())
        were_restored = bool(counts) and all(now.get(place) == value for place, value in counts.items())
        return were_restored or now != self._counts or not same(self.states(), self._loaded)

    def lacking(self, saved: StateDict, generators: Sequence[Any]) -> list[str]:
        """Names of classes with a state of which none was ``saved``, and a count of such generators."""
        places = _by_place(saved.get("states", ()))
        lacking = [type(one).__name__ for place, one in self._stateful if place not in places]
        if count := max(0, len(self.generators) - len(generators)):
            lacking.append(f"{count} generators that are not held by the loader and its samplers themselves")
        return list(dict.fromkeys(lacking))

    def not_restored(self, saved: Pairs) -> list[str]:
        """The ``saved`` counts that nobody has restored: they are here as they were when this was built."""
        now, kinds = dict(self._counters()), {place: type(one).__name__ for place, one in self._counting}
        return [
            f"{kinds[owner]}.{name} was {value!r} and is {now[place]!r}"
            for place, value in saved
            for owner, _, name in [place.rpartition(".")]
            if place in now and now[place] != value and now[place] == self._counts.get(place)
        ]

    def suspects(self, saved: StateDict) -> str:
        """Text for an error: who may keep what no checkpoint has, ``saved`` being what it was; and what to do."""
        if not self.kinds:
            return ""
        lost = "; ".join(self.not_restored(saved.get("counts", ()))[:_NAMED])
        return (
            f" Or {', '.join(self.kinds[:_NAMED])} keeps something that no checkpoint has"
            f"{f' ({lost})' if lost else ''}: give it state_dict() and load_state_dict()."
        )

    def tell_of_counts(self, saved: StateDict) -> None:
        """Warn of the counts among ``saved`` that nobody has restored."""
        if lost := self.not_restored(saved.get("counts", ())):
            log.warning(
                "%s in this process, and nothing restores that. If the data depend on it, this is not the run that was "
                "interrupted: give the class state_dict() and load_state_dict().",
                "; ".join(lost[:_NAMED]),
            )

    def _counters(self) -> Iterator[tuple[str, Any]]:
        for place, one in self._counting:
            of_torch = _OF_LOADERS if isinstance(one, DataLoader) else ()
            for name, value in _attributes(one):
                if (
                    type(value) in _PLAIN
                    and name not in of_torch
                    and not (type(value) is str and len(value) > _LONGEST)
                ):
                    yield f"{place}.{name}", value


def tell_of_lacking(held: Held, saved: StateDict, generators: Sequence[Any]) -> None:
    """Warn of what is ``held`` and is neither among what a checkpoint has ``saved`` nor among its ``generators``."""
    if lacking := held.lacking(saved, generators):
        log.warning(
            "the checkpoint has no state of %s: it is an older one, or that was not there then. The data may be others "
            "from here on.",
            ", ".join(lacking),
        )


def held_by(loader: Any, *, asks: bool = True) -> Held:
    """Everything that ``loader`` holds, with its data set. ``asks``: also the states of what has one."""
    return Held([("", loader)], first=_generators_of(loader), asks=asks)


def held_by_order(loader: DataLoader[Any]) -> Held:
    """Holdings of ``loader``, over a map-style data set, on which the order of indices may depend."""
    return Held([("", loader)], leave_out=[loader.dataset, loader.collate_fn], first=_generators_of(loader))


def held_by_data(loader: DataLoader[Any], order: Held) -> Held:
    """Holdings of the data set and of ``collate_fn``, on which samples may depend."""
    return Held([("dataset", loader.dataset), ("collate_fn", loader.collate_fn)], leave_out=order.generators)


def draws_from_generators_alone(loader: DataLoader[Any]) -> bool:
    """Return true if the order of ``loader`` is one of torch's, of which we know that it has no other state."""
    known = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) in known or isinstance(loader.dataset, MapDataPipe)


def is_streaming(dataset: Any) -> bool:
    """Return true if ``dataset`` restores itself by sample count, as MosaicML's StreamingDataset does."""
    state_dict = getattr(dataset, "state_dict", None)
    if not callable(state_dict) or not callable(getattr(dataset, "load_state_dict", None)):
        return False
    return {"num_samples", "from_beginning"} <= inspect.signature(state_dict).parameters.keys()


def shared_states(loader: Any, other: Any) -> list[Any]:
    """Loaders, samplers and iterable data sets of both, whose state changes when either is iterated over.

    A data set that workers of ``other`` copy is none, nor is a map-style one, which is no place in a pass; nor is a
    loader that can be iterated over :func:`apart`.
    """
    kept: list[list[Any]] = []
    for one in (loader, other):
        found = [part.value for part in _walk([("", one)], set()) if part.is_part]
        parts = [part for part in found if isinstance(part, DataLoader) or _has_state(part)]
        kept.append([part for part in parts if isinstance(part, Stateful) and not _is_restartable(part)])
    copied = not is_streaming(getattr(other, "dataset", None)) and getattr(other, "num_workers", 0) > 0
    return [
        part
        for part in kept[0]
        if any(part is same_one for same_one in kept[1])
        and not (isinstance(part, Dataset) and (copied or not isinstance(part, IterableDataset)))
    ]


def apart(loader: Any) -> Any:
    """``loader``; of torchdata's a copy, since the original tells the state of the iterator that it has made last."""
    if not _is_restartable(loader):
        return loader
    own = copy.copy(loader)  # without workers that live on, which are the original's
    forget_workers(own)
    vars(own).update(next_iter_state=None, _initial_iter_for_state_dict=False, persistent_workers=False)
    return own


def _is_restartable(part: Any) -> bool:
    return isinstance(part, DataLoader) and "next_iter_state" in vars(part)


# ── looking for it ───────────────────────────────────────────────────────────────────────────────────────────────────
def _walk(roots: Iterable[tuple[str, Any]], seen: set[int]) -> Iterator[_Found]:
    """Objects that are reached from ``roots``, the nearest first, each once."""
    queue = deque(_Found(place, value, True, False, 0) for place, value in roots)
    seen |= {id(one.value) for one in queue}
    for _ in range(_OBJECTS):
        if not queue:
            return
        found = queue.popleft()
        yield found
        if isinstance(found.value, _CLOSED) or found.depth == _DEPTH:
            continue
        covered = found.covered or (found.is_part and _has_state(found.value))
        for name, value in _inside(found.value):
            if id(value) in seen or not _may_hold(value):
                continue
            seen.add(id(value))
            is_part = isinstance(value, Sampler | Dataset | DataLoader) or name in _PARTS
            if isinstance(value, list | tuple | dict):
                is_part = False
            place = f"{found.place}.{name}" if found.place else str(name)
            queue.append(_Found(place, value, is_part, covered, found.depth + 1))


def _inside(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict | list | tuple | deque):
        return list(items_of(cast("Any", value))) if len(cast("Any", value)) <= _ITEMS else ()
    return _attributes(value)


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Attributes of ``value``, read without a call of its code; a loader's iterator is left out."""
    try:
        own: Any = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = {}
    apart = OWN_OF_LOADERS if isinstance(value, DataLoader) else ()
    found = [(name, own[name]) for name in list(own) if name not in apart] if isinstance(own, dict) else []
    for kind in type(value).__mro__:
        for name, member in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # a slot that is not filled
                    found.append((name, member.__get__(value)))
    return found


def _may_hold(value: Any) -> bool:
    if value is None or isinstance(value, (*_PLAIN, bytes)):
        return False
    if isinstance(value, dict | list | tuple | deque):
        return True
    if type(value).__module__.startswith(("builtins", "composerlite.")) or inspect.isroutine(value):
        return False
    return isinstance(value, _GENERATORS) or not isinstance(value, _CLOSED)


def _is_users(kind: type) -> bool:
    return not kind.__module__.startswith(("torch.", "torchdata.", "builtins", "composerlite."))


def _has_state(part: Any) -> bool:
    """Return true for what says itself where it is, and for data pipes, in which torch counts."""
    if isinstance(part, IterDataPipe | MapDataPipe):
        return True
    if isinstance(part, DataLoader | nn.Module):
        return False
    return all(callable(getattr(type(part), name, None)) for name in ("state_dict", "load_state_dict"))


def _can_be_asked(part: Any) -> bool:
    """Return true if ``state_dict()`` of ``part`` can be called without knowing more."""
    if not _has_state(part) or isinstance(part, IterDataPipe | MapDataPipe):
        return False
    parameters = inspect.signature(type(part).state_dict).parameters.values()
    needed = [
        one for one in parameters if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    return len(needed) <= 1


def _generators_of(loader: Any) -> list[Any]:
    """The generators that ``loader`` and its samplers hold as attributes, each once."""
    found: dict[int, Any] = {}
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    for holder in holders:
        attributes: Mapping[str, Any] = getattr(holder, "__dict__", {})
        for value in attributes.values():
            if _is_generator(value):
                found[id(value)] = value
    return list(found.values())


def _is_generator(value: Any) -> bool:
    return isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom)


def _generators_among(found: Iterable[_Found]) -> list[Any]:
    """The generators in ``found``, without those that everybody draws from, which are saved in any case."""
    shared = [torch.default_generator, *(getattr(draw, "__self__", None) for draw in (np.random.random, random.random))]
    return [one.value for one in found if _is_generator(one.value) and all(one.value is not g for g in shared)]


# ── generators ───────────────────────────────────────────────────────────────────────────────────────────────────────
@contextlib.contextmanager
def put_back(loader: Any) -> Generator[None]:
    """Within it anybody may iterate over ``loader``: its generators stand afterwards as before."""
    before = [(generator, generator_state(generator)) for generator in held_by(loader).generators]
    try:
        yield
    finally:
        for generator, state in before:
            set_generator_state(generator, state)


def _by_place(pairs: Pairs) -> dict[str, Any]:
    return {str(place): value for place, value in pairs}
