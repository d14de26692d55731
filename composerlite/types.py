"""Types that several layers share. Nothing here imports torch."""

from __future__ import annotations

import collections
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, cast, final, runtime_checkable

T = TypeVar("T")

__all__ = [
    "JSON",
    "Ancestor",
    "Batch",
    "CheckpointNews",
    "CheckpointStep",
    "Closing",
    "Lineage",
    "Piece",
    "StateDict",
    "Stateful",
    "batches",
    "items_of",
    "with_items",
]

JSON: TypeAlias = "str | int | float | bool | Sequence[JSON] | Mapping[str, JSON] | None"
"""What ``json.dumps`` takes."""

Batch: TypeAlias = Any
"""What a data loader yields and a model takes: opaque to the trainer."""

Piece: TypeAlias = tuple[int, int, int]
"""Part of a file and its destination: offset in the file, address in memory, bytes."""

StateDict: TypeAlias = dict[str, Any]
"""Nested dicts of tensors and plain values, as modules and optimizers give them."""


class Closing(ABC):
    """Base of objects that are used as a context manager, or until :meth:`close`."""

    @abstractmethod
    def close(self) -> None:
        """Free the resources. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@runtime_checkable
class Stateful(Protocol):
    """An object whose progress can be saved: module, optimizer, scheduler, stateful data loader, callback."""

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state_dict: StateDict, /) -> object: ...


def batches(items: Iterable[T], most: int, size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield ``items`` in batches with sizes that add up to ``most`` at most, or of a single larger item."""
    batch: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if batch and total + size > most:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def items_of(value: object) -> Iterable[tuple[Any, Any]]:
    """The keys or numbers, and the items, of a dict, list, tuple, named tuple or deque; nothing of anything else."""
    if isinstance(value, dict):
        return cast("dict[Any, Any]", value).items()
    is_sequence = type(value) is tuple or isinstance(value, list | collections.deque) or _is_named_tuple(value)
    return enumerate(cast("Sequence[Any]", value)) if is_sequence else ()


def with_items(value: Any, replace: Callable[[Any, Any], Any]) -> Any:
    """A new container like ``value`` with ``replace(key, item)`` in the place of each of its :func:`items_of`.

    What is no container is given back itself.
    """
    if type(value) in (list, tuple, dict):  # most are
        items = [replace(key, item) for key, item in items_of(value)]
        return dict(zip(value, items, strict=True)) if type(value) is dict else type(value)(items)
    if _is_named_tuple(value):
        return type(value)._make(replace(key, item) for key, item in items_of(value))
    if not isinstance(value, dict | list | collections.deque):
        return value
    made: Any = copy.copy(cast("Any", value))
    for key, item in items_of(cast("object", value)):
        made[key] = replace(key, item)
    return made


def _is_named_tuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_make")


@final
@dataclass(frozen=True, slots=True)
class Ancestor:
    """An attempt that a later one started from.

    Attributes:
        attempt: its number. id: tells it from another of the same number.
        until: calls of ``fit`` and optimizer steps of the checkpoint that the later one started from. Later checkpoints
            of this attempt do not belong to the later one.
        passed_over: there were later ones, which autoresume could not use: the later attempt may replace them.
    """

    attempt: int
    id: str
    until: tuple[int, int]
    passed_over: bool = False


@final
@dataclass(frozen=True, slots=True)
class Lineage:
    """The attempt of a run that saves a checkpoint, and the attempts that it came from.

    A run that is resumed from its newest checkpoint continues its attempt. One that starts from scratch, from an older
    checkpoint or from elsewhere begins a new one.

    Attributes:
        attempt: its number; 0 for checkpoints of versions that had none.
        id: random, so that attempts which began at the same time differ.
        ancestors: the attempts that it came from, oldest first.
        origin: name of the checkpoint of this run that it started from; empty if there is none.
    """

    attempt: int = 0
    id: str = ""
    ancestors: tuple[Ancestor, ...] = ()
    origin: str = ""


CheckpointStep: TypeAlias = Literal[
    "begun", "committed", "uploaded", "replicated", "deleted", "failed", "upload failed", "deletion failed"
]
"""``begun``: training has handed it over. ``committed``: it exists, in the folder. ``uploaded``: in a bucket, too."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNews:
    """News of a checkpoint, passed to loggers on rank 0, on the training thread, perhaps some batches later.

    Attributes:
        what: happened to it.
        name: of the checkpoint, below ``where``.
        where: the folder, or the URI.
        batch: optimizer steps done when it was saved; ``None`` where that is not at hand.
        at: when that was, in seconds since 1970.
        size_bytes: of its data; ``None``: not known (yet).
        seconds: what it cost, by name: of ``'committed'`` as in ``SaveReport``; ``'upload'``.
        slowest_rank: of ``'committed'`` the rank that was the last to write, as in ``SaveReport``.
        ephemeral: it goes as soon as a newer one is committed.
        error: why it failed.
        metrics: numbers to log, by name.
    """

    what: CheckpointStep
    name: str
    where: str
    batch: int | None = None
    at: float
    size_bytes: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    slowest_rank: int | None = None
    ephemeral: bool = False
    error: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
