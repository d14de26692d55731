"""Progress bars of downloads and reads of large files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator

_LARGE_BYTES = 1 << 28
"""Size from which a progress bar is shown."""


@contextlib.contextmanager
def progress_of(what: str, total_bytes: int, wanted: bool) -> Generator[Callable[[int], object]]:
    """Show a progress bar for ``total_bytes`` bytes as :func:`download_bar` does, with the text ``what``.

    Yields a callback for one thread, to be called with the number of bytes since the last call.
    """
    with download_bar(wanted, what) as update:
        yield summed(update, total_bytes)


def summed(callback: Callable[[int, int], object] | None, total: int) -> Callable[[int], None]:
    """Return a function that adds up numbers of bytes and calls ``callback`` with (sum, ``total``)."""
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if callback is not None:
            callback(done, total)

    return progress


@contextlib.contextmanager
def download_bar(wanted: bool, what: str = "downloading a checkpoint") -> Generator[Callable[[int, int], object]]:
    """Show a progress bar on a terminal if ``wanted`` is true and the total is 256 MiB or more.

    Yields a callback for one thread, to be called with (bytes received so far, total bytes).
    """
    if not (wanted and sys.stderr.isatty()):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, visible=False)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=total >= _LARGE_BYTES)

        yield update
