"""Progress bars of long reads and downloads."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator

__all__ = ["Progress", "download_bar", "progress_of"]

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


@contextlib.contextmanager
def download_bar(wanted: bool) -> Generator[Callable[[int, int], object]]:
    """What is to be told how many bytes of how many are there: it shows a bar as :func:`progress_of` does."""
    if not wanted or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with contextlib.ExitStack() as stack:
        bars: list[Bar] = []

        def tell(done: int, total: int) -> None:
            if total < _LARGE_BYTES:
                return
            if not bars:
                bars.append(stack.enter_context(Bar(console=Console(stderr=True), transient=True)))
                bars[0].add_task("downloading a checkpoint", total=total)
            bars[0].update(bars[0].task_ids[0], completed=done, total=total)

        yield tell
