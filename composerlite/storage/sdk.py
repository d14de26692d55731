"""Imports of optional libraries, isolated from the random numbers of training."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Generator, Sequence
from typing import final

from composerlite.errors import ConfigError


@contextlib.contextmanager
def importing_sdk(what: str, *, extra: str, packages: Sequence[str]) -> Generator[None]:
    """Raise ConfigError if an import in the block fails. After the block, isolate the library's random numbers.

    Args:
        what: name in the message, such as ``"boto3, which S3 needs,"``.
        extra: extra of composerlite with the library.
        packages: names of packages that draw random numbers, for :func:`isolate_sdk_rng`.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        yield
    except ImportError as e:
        raise ConfigError(f"{what} is not installed: pip install 'composerlite[{extra}]'") from e
    isolate_sdk_rng(*packages)


@final
class _SystemRandom(random.SystemRandom):
    """Replacement for the module ``random`` in a library: functions and classes, with numbers from the system."""

    Random = random.Random
    SystemRandom = random.SystemRandom


_system_random = _SystemRandom()


def isolate_sdk_rng(*packages: str) -> None:
    """Make the loaded modules of ``packages`` draw random numbers from the system, not from ``random``.

    Training seeds the generator of ``random``, and a resumed run restores the state of the generator. An upload
    that draws a number, for a separator or a pause, would make two runs differ.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and getattr(module, "random", None) is random:
            module.random = _system_random  # type: ignore[attr-defined]
