"""Bars that grow on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

from composerlite.loggers.values import to_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from composerlite.loggers.stream import TextStream

__all__ = ["Bars", "LiveBars", "NoBars"]

_SECONDS_BETWEEN_DRAWS = 0.1


class Bars(Protocol):
    """A stack of progress bars: evaluation opens one on top of that of training. Text goes above them."""

    def open(self, title: str, total: int | None, completed: int = 0) -> None:
        """Put a bar on top. ``total`` is ``None`` where it is not known."""
        ...

    def advance(self, values: Mapping[str, Any]) -> None:
        """Count one more on the top bar."""
        ...

    def finish(self, values: Mapping[str, Any]) -> None:
        """Take the top bar off; it stays visible as it is."""
        ...

    def stop(self) -> None:
        """Take all bars off and leave the terminal as it was. Safe to call at any time."""
        ...


@final
class NoBars:
    """The bars where there is no terminal."""

    def open(self, title: str, total: int | None, completed: int = 0) -> None:
        pass

    def advance(self, values: Mapping[str, Any]) -> None:
        pass

    def finish(self, values: Mapping[str, Any]) -> None:
        pass

    def stop(self) -> None:
        pass


@dataclass(slots=True)
class _Bar:
    task: TaskID
    completed: int


@final
class LiveBars:
    """Bars drawn with rich, at most ten times a second and on the calling thread: nothing runs between two draws.

    It is a text stream too: what is written appears above the bars.
    """

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._progress: Progress | None = None
        self._bars: list[_Bar] = []
        self._next_draw = 0.0

    def open(self, title: str, total: int | None, completed: int = 0) -> None:
        if self._progress is None:
            self._progress = _start(self._stream)
        task = self._progress.add_task(title, total=total, completed=completed, values="")
        self._bars.append(_Bar(task, completed))
        self._draw({})

    def advance(self, values: Mapping[str, Any]) -> None:
        if not self._bars:
            return
        self._bars[-1].completed += 1
        if time.monotonic() >= self._next_draw:
            self._draw(values)

    def finish(self, values: Mapping[str, Any]) -> None:
        if self._progress is None:
            return
        self._draw(values)
        task = self._bars.pop().task
        if not self._bars:
            self.stop()
            return
        # Bars below go on: print this one above them for good, so that the moving part stays small.
        self._progress.print(self._progress.make_tasks_table([t for t in self._progress.tasks if t.id == task]))
        self._progress.remove_task(task)
        self._progress.refresh()

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._bars.clear()

    def write(self, text: str, /) -> object:
        if self._progress is None:
            return self._stream.write(text)
        return self._progress.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def flush(self) -> object:
        return self._stream.flush()

    def _draw(self, values: Mapping[str, Any]) -> None:
        if self._progress is not None:
            bar = self._bars[-1]
            self._progress.update(bar.task, completed=bar.completed, values=to_text(values))
            self._progress.refresh()
            self._next_draw = time.monotonic() + _SECONDS_BETWEEN_DRAWS


def _start(stream: TextStream) -> Progress:
    """A display that draws only when told to, and that a crash leaves harmless: the cursor stays visible."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    one_line = Column(no_wrap=True, overflow="ellipsis")
    console = Console(file=stream)  # type: ignore[arg-type]  # it needs no more than write and flush
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[values]}", markup=False, table_column=one_line),
        console=console,
        auto_refresh=False,
        # What the program prints goes above the bars. Where it is sent to a file, it must arrive there.
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    )
    progress.start()
    console.show_cursor(True)
    return progress
