"""Progress bars of long reads and downloads."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator

__all__ = ["Progress", "in_steps", "progress_of"]

_LARGE_BYTES = 1 << 28
Progress = Callable[[int], object]
"""Is told of each so many bytes."""


@contextlib.contextmanager
def progress_of(what: str, total_bytes: int, wanted: bool) -> Generator[Progress]:
    """A bar for ``total_bytes``, on a terminal and where it takes long enough to be seen; only if it is ``wanted``."""
    if not wanted or total_bytes < _LARGE_BYTES or not sys.stderr.isatty():
        yield int
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda done: bar.advance(task, done)


def in_steps(progress: Progress) -> Callable[[int, int], object]:
    """``progress`` as object stores tell theirs: how many bytes of how many so far."""
    told = 0

    def tell(done: int, _: int) -> None:
        nonlocal told
        progress(done - told)
        told = done

    return tell
