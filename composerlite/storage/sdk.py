"""Libraries of services: imported late, and kept away from the random numbers of training."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Generator, Sequence
from typing import final

from composerlite.errors import ConfigError


@contextlib.contextmanager
def importing_sdk(what: str, *, extra: str, packages: Sequence[str]) -> Generator[None]:
    """Wrap the imports of a library that not everybody has.

    Args:
        what: is imported, for the message, as in ``"boto3, which S3 needs,"``.
        extra: of composerlite, that has it.
        packages: that draw random numbers: see :func:`isolate_sdk_rng`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        yield
    except ImportError as e:
        raise ConfigError(f"{what} is not installed: pip install 'composerlite[{extra}]'") from e
    isolate_sdk_rng(*packages)


@final
class _SystemRandom(random.SystemRandom):
    """Stands in a library for the module ``random``."""

    Random = random.Random
    SystemRandom = random.SystemRandom


_system_random = _SystemRandom()


def isolate_sdk_rng(*packages: str) -> None:
    """Make the loaded modules of ``packages`` draw random numbers from the system, not from ``random``.

    Python has one generator for the whole process, which is seeded and is a part of what a resumed run restores. An
    upload that draws from it, for a separator or a pause, in another thread and at any time, makes two runs differ.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and getattr(module, "random", None) is random:
            module.random = _system_random  # type: ignore[attr-defined]
