"""Whether all ranks see one folder, or each machine has its own under the same name."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from composerlite import dist
from composerlite.checkpoint.together import from_first_rank
from composerlite.storage import StagedFile

__all__ = ["ranks_without"]

_APPEARS_SECONDS = 5.0
"""A network file system may show a new file on other machines a moment later."""
_PAUSE_SECONDS = 0.1


def ranks_without(folder: Path) -> list[int]:
    """The ranks that do not see what rank 0 writes to ``folder``, the same on every rank. Every rank calls it.

    Raises:
        OSError: rank 0 cannot write to it; on every rank.
    """
    with contextlib.ExitStack() as stack:
        name = from_first_rank(
            "writing to the folder of checkpoints",
            lambda: stack.enter_context(StagedFile(folder / "seen-by-all")).temporary.name,
        )
        sees = dist.all_gather_object(_appears(folder, name))
    return [rank for rank, seen in enumerate(sees) if not seen]


def _appears(folder: Path, name: str) -> bool:
    until = time.monotonic() + _APPEARS_SECONDS
    while True:
        with contextlib.suppress(OSError):  # whatever the reason, it is not seen
            if name in os.listdir(folder):  # noqa: PTH208 - asks a network file system anew, where exists() may not
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(_PAUSE_SECONDS)
