"""Bars: drawn on a terminal, in the output of a notebook, or nowhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO, cast, final

from composerlite.loggers.console import is_terminal
from composerlite.loggers.values import clock, fitting, lines_of, speed

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

    from composerlite.loggers.console import TextStream

_SECONDS_BETWEEN_DRAWS = 0.1
_NOTEBOOK_WIDTH = 100


class Bars:
    """A stack of progress bars, for where there is no terminal: it shows nothing.

    Evaluation opens a bar on top of that of training. Text goes above them.
    """

    def open(self, title: str, total: int | None, completed: int = 0) -> None:
        """Put a bar on top. ``total`` is ``None`` where it is not known."""

    def advance(self, values: Callable[[], list[str]]) -> None:
        """Count one more on the top bar. ``values`` are asked for when it is drawn."""

    def finish(self, values: list[str], *, whole: bool = False) -> None:
        """Take the top bar off; it stays visible as it is, if ``whole`` with all values, on more lines where needed."""

    def stop(self) -> None:
        """Take all bars off and leave the terminal as it was. Safe to call at any time."""


@dataclass(slots=True)
class _Bar:
    title: str
    total: int | None
    completed: int
    values: list[str] = field(default_factory=list[str])
    is_finished: bool = False
    is_whole: bool = False
    first: int = field(init=False)
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.first, self.began = self.completed, time.monotonic()

    def text(self, width: int) -> str:
        """The bar on a line of ``width``: title, bar, count, speed, elapsed time, time left and values, in this order.

        What does not fit is left out whole, the last first; of a bar that is whole it is on the lines below.
        """
        elapsed, done = time.monotonic() - self.began, self.completed - self.first
        parts = [f"{self.completed}/{'?' if self.total is None else self.total}"]
        if done and elapsed > 0.0:
            parts.append(f"{speed(done, elapsed)}/s")
        parts.append(clock(elapsed))
        if done and self.total is not None and not self.is_finished:
            parts.append(f"{clock(elapsed / done * max(0, self.total - self.completed))} left")
        head = f"{self.title} {self._drawn(20 if width >= 100 else 10)} "
        parts += self.values
        if self.is_whole:
            return "\n".join(lines_of(head, parts, width))
        return head + fitting(parts, width - len(head))

    def _drawn(self, length: int) -> str:
        done = self.is_finished or not self.total
        full = length if done else min(length, length * self.completed // (self.total or 1))
        return "━" * full + "─" * (length - full)


class _DrawnBars(Bars, ABC):
    """Bars that are seen, drawn at most ten times a second and on the calling thread: nothing runs between two draws.

    It is a text stream too: what is written appears above the bars.
    """

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._bars: list[_Bar] = []
        self._next_draw = 0.0
        self._redirection = contextlib.ExitStack()

    def open(self, title: str, total: int | None, completed: int = 0) -> None:
        self._bars.append(_Bar(title, total, completed))
        self._draw_now()

    def advance(self, values: Callable[[], list[str]]) -> None:
        if not self._bars:
            return
        self._bars[-1].completed += 1
        if time.monotonic() >= self._next_draw:
            self._bars[-1].values = values()
            self._draw_now()

    def finish(self, values: list[str], *, whole: bool = False) -> None:
        if not self._bars:
            return
        bar = self._bars[-1]
        bar.values, bar.is_finished, bar.is_whole = values, True, whole
        self._leave(bar)

    def flush(self) -> object:
        return self._stream.flush()

    def _draw_now(self) -> None:
        self._draw()
        self._next_draw = time.monotonic() + _SECONDS_BETWEEN_DRAWS

    @abstractmethod
    def write(self, text: str, /) -> object: ...

    @abstractmethod
    def _draw(self) -> None:
        """Draw the bars as they are."""

    @abstractmethod
    def _leave(self, bar: _Bar) -> None:
        """Take the top bar off and leave its text behind for good."""


@final
class LiveBars(_DrawnBars):
    """Bars on a terminal, drawn with rich below what the program prints and logs."""

    def __init__(self, stream: TextStream) -> None:
        super().__init__(stream)
        self._live: Live | None = None

    def stop(self) -> None:
        if self._live is not None:
            self._redirection.close()
            self._live.stop()
        self._live = None
        self._bars.clear()

    def write(self, text: str, /) -> object:
        if self._live is None:
            return self._stream.write(text)
        return self._live.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def _draw(self) -> None:
        if self._live is None:
            before = sys.stderr
            self._live = _live_display(self._stream, self._group)
            self._redirection.enter_context(_handlers_moved(before, sys.stderr))
        self._live.refresh()

    def _leave(self, bar: _Bar) -> None:
        assert self._live is not None
        if len(self._bars) == 1:
            self._live.refresh()
            self.stop()
            return
        # Bars below continue: print this one above them for good, so that the moving part stays small.
        self._bars.pop()
        self._live.console.print(bar.text(self._width()), markup=False, highlight=False, no_wrap=True, overflow="crop")
        self._live.refresh()

    def _group(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        width = self._width()
        return Group(*(Text(bar.text(width), no_wrap=True, overflow="crop") for bar in self._bars))

    def _width(self) -> int:
        return 80 if self._live is None else self._live.console.width


def _live_display(stream: TextStream, draw: Callable[[], Group]) -> Live:
    """A display that draws only when told to, and that a crash leaves harmless: the cursor stays visible."""
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream)  # type: ignore[arg-type]  # it needs no more than write and flush
    live = Live(
        get_renderable=draw,
        console=console,
        auto_refresh=False,
        # What the program prints goes above the bars. Where it is sent to a file, it must arrive there.
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    )
    live.start()
    console.show_cursor(True)
    return live


@contextlib.contextmanager
def _handlers_moved(before: Any, after: Any) -> Generator[None]:
    """Within it handlers of logging that had taken ``sys.stderr`` when they were made write to what it is now."""
    moved = [
        handler
        for logger in (logging.root, logging.getLogger("composerlite"))
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is before  # pyright: ignore
    ]
    for handler in moved:
        handler.setStream(after)
    try:
        yield
    finally:
        for handler in moved:
            handler.setStream(before)


@final
class NotebookBars(_DrawnBars):
    """Bars where a carriage return rewrites the last line and nothing else moves, as in the output of a notebook.

    The top bar is seen; the one below it comes back when it is off. While there is one, it stands for ``sys.stderr``,
    so that what is written there has a line of its own.
    """

    def __init__(self, stream: TextStream) -> None:
        super().__init__(stream)
        self._drawn = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def stop(self) -> None:
        self._redirection.close()
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()
        self._drawn = 0
        self._bars.clear()

    def write(self, text: str, /) -> object:
        self._rewrite(text)
        self._drawn = 0  # what comes next has a line of its own
        return len(text)

    def _draw(self) -> None:
        if sys.stderr is self._stream:
            self._redirection.enter_context(contextlib.redirect_stderr(cast("TextIO", self)))
            self._redirection.enter_context(_handlers_moved(self._stream, self))
        self._rewrite(self._bars[-1].text(_NOTEBOOK_WIDTH))

    def _leave(self, bar: _Bar) -> None:
        self._bars.pop()
        self.write(bar.text(_NOTEBOOK_WIDTH) + "\n")
        if not self._bars:
            self._redirection.close()

    def _rewrite(self, text: str) -> None:
        line, newline, rest = text.partition("\n")
        drawn, self._drawn = self._drawn, len(line)
        self._stream.write(("\r" if drawn else "") + line.ljust(drawn) + newline + rest)
        self._stream.flush()


def bars_on(stream: TextStream) -> LiveBars | NotebookBars | None:
    """Bars, where ``stream`` can show any."""
    if is_terminal(stream):
        return LiveBars(stream)
    return NotebookBars(stream) if type(stream).__module__.startswith("ipykernel.") else None
