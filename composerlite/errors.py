"""The exceptions that composerlite raises on purpose.

::

    ComposerliteError
    ├── ConfigError (ValueError)               the user asked for something that cannot be done; raised before training
    │   └── UnknownArgumentError (TypeError)   an argument, key or name that does not exist; lists those that do
    ├── TrainingError (RuntimeError)           the training loop cannot continue
    ├── RunInUseError (RuntimeError)           another process has this run
    ├── RankError (RuntimeError)               a rank failed: names it and the cause, on every rank
    │   └── LateRankError (TimeoutError)       a wait ended before every rank had come: names those that are late
    ├── ObjectStoreError (RuntimeError)        an object store failed: names the object, the operation and the cause
    │   └── ObjectStoreTransientError          the same operation may succeed when it is tried again
    └── CheckpointError (RuntimeError)
        ├── CheckpointNotFoundError (FileNotFoundError)   there is no checkpoint under that name
        ├── CheckpointExistsError (FileExistsError)       saving would overwrite a checkpoint
        ├── CorruptCheckpointError                        the bytes differ from the saved bytes
        ├── IncompatibleCheckpointError                   a good checkpoint of something else
        ├── UntrustedCheckpointError                      it contains a type that may run code, or was refused
        └── SaveError                                     a checkpoint could not be written

    SystemExit
    └── Preempted                              the run was terminated from outside, has saved, and can be launched again

Errors of the operating system (no space, no permission) keep their own type, with the path in the message. Object
stores use those types too: ``FileNotFoundError``, ``FileExistsError`` and ``PermissionError``.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import ParamSpec, TypeVar

from composerlite.other_trainers import way_here

__all__ = [
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ComposerliteError",
    "ConfigError",
    "CorruptCheckpointError",
    "IncompatibleCheckpointError",
    "LateRankError",
    "ObjectStoreError",
    "ObjectStoreTransientError",
    "Preempted",
    "RankError",
    "RunInUseError",
    "SaveError",
    "TrainingError",
    "UnknownArgumentError",
    "UntrustedCheckpointError",
    "bytes_text",
    "check_takes",
    "checked_arguments",
    "did_you_mean",
    "naming",
    "raise_all",
]

P = ParamSpec("P")
R = TypeVar("R")


class ComposerliteError(Exception):
    """Base of every exception of composerlite."""


class ConfigError(ComposerliteError, ValueError):
    """An invalid request of the user. The message names the value, the rule and the way out."""


class UnknownArgumentError(ConfigError, TypeError):
    """A name that does not exist where it was given. The message lists those that do."""


class TrainingError(ComposerliteError, RuntimeError):
    """The training loop cannot continue."""


class RunInUseError(ComposerliteError, RuntimeError):
    """Another process, which is alive, trains this run. The message names it."""


class RankError(ComposerliteError, RuntimeError):
    """Raised when ranks failed. The message names them and the causes.

    Attributes:
        ranks: those that failed.
        everywhere: every rank raises this error, or will when it reaches the same point.
        causes: what those ranks raised, where that is known: the same on every rank.
    """

    def __init__(self, message: str, ranks: Iterable[int] = (), *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.everywhere = everywhere
        self.causes: tuple[BaseException, ...] = ()


class LateRankError(RankError, TimeoutError):
    """A wait ended before every rank had come. ``ranks`` are those that are late; the message says where they are."""


class ObjectStoreError(ComposerliteError, RuntimeError):
    """An object store failed. The message names the object, the operation and the cause."""


class ObjectStoreTransientError(ObjectStoreError):
    """An object store failed in a way that may pass: too many requests, a lost connection, a time out."""


class CheckpointError(ComposerliteError, RuntimeError):
    """Base of everything that can be wrong with a checkpoint."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Raised when there is no checkpoint of the requested name."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """Saving would overwrite a checkpoint that exists."""


class CorruptCheckpointError(CheckpointError):
    """The bytes differ from the saved bytes: truncated, changed, or not a checkpoint at all."""


class IncompatibleCheckpointError(CheckpointError):
    """A good checkpoint, but of another model, optimizer or run."""


class UntrustedCheckpointError(CheckpointError):
    """The checkpoint holds a type that is not known to be safe to load, or your own check refused it."""


class SaveError(CheckpointError):
    """A checkpoint could not be written. Every older one is as it was."""


class Preempted(SystemExit):
    """The run was preempted. It has saved what there was time for, and resumes when it is launched again.

    Not an error: code that handles errors does not see it. Where nobody catches it the process ends with its ``code``.

    Attributes:
        code: of the process's end: 128 and the number of the signal, by default.
        checkpoint: what the run resumes from: path or URI; ``None`` if there is nothing.
    """

    def __init__(self, code: int, checkpoint: str | None) -> None:
        super().__init__(code)
        self.checkpoint = checkpoint


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence for an error about an unknown ``name``: the nearest known one, if any is near, and all of them.

    Args:
        name: the unknown name.
        known: all valid names.

    Returns:
        The sentences, after a space.
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{hint} Known: {', '.join(known)}."


@contextlib.contextmanager
def naming(argument: str, value: object) -> Generator[None]:
    """Within it, a :class:`ConfigError` about ``value`` names the ``argument`` that it was given as.

    Args:
        argument: name of the argument.
        value: its value.
    """
    try:
        yield
    except ConfigError as e:
        raise ConfigError(f"{argument}={value!r}: {e}") from e


def check_takes(function: Callable[..., object], *names: str) -> None:
    """Check that ``function`` can be called with as many arguments as there are ``names``, where it says so.

    Args:
        function: of a user.
        names: what it is called with.

    Raises:
        ConfigError: it takes fewer, or needs more.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*names)
    except TypeError as e:
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(f"{name}{signature}: expected a function ({', '.join(names)}).") from e


def raise_all(errors: Sequence[Exception], message: str) -> None:
    """Raise the one of ``errors``, or an ``ExceptionGroup`` of several, with ``message``; nothing if there are none.

    Args:
        errors: to be raised.
        message: of the group.
    """
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup(message, errors)


def checked_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``function`` so that an unknown keyword argument raises :class:`UnknownArgumentError`.

    Python's own message names the unknown argument only; this one says what an argument of another trainer is called
    here, or names the nearest and lists all.
    """
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "self"]

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                owner = function.__qualname__.removesuffix(".__init__")
                if (way := way_here(owner.partition(".")[0], name)) is not None:
                    raise UnknownArgumentError(f"{owner} has no argument {name!r}: here it is {way}.")
                raise UnknownArgumentError(f"{owner} has no argument {name!r}.{did_you_mean(name, known)}")
        return function(*args, **kwargs)

    return wrapper


def bytes_text(size_bytes: float) -> str:
    """A size for people: ``'1.5 MB'``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" or size_bytes >= 100 else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"
