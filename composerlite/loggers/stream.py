"""Streams that people read: stderr, stdout, or any object with ``write`` and ``flush``."""

from __future__ import annotations

import os
import sys
from typing import Protocol, TypeAlias, final

from composerlite import dist
from composerlite.errors import ConfigError, did_you_mean

__all__ = ["StreamInput", "TextStream", "is_terminal", "open_stream"]


class TextStream(Protocol):
    """What is written to: any text file will do."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


StreamInput: TypeAlias = "TextStream | str"
"""A stream, or ``'stderr'`` or ``'stdout'``."""


@final
class _Silence:
    """The stream of the ranks that have nothing to say."""

    def write(self, text: str, /) -> object:
        return len(text)

    def flush(self) -> object:
        return None


def open_stream(stream: StreamInput) -> TextStream:
    """``stream`` on global rank 0; a stream that drops everything on the other ranks, so that lines come once.

    Raises:
        ConfigError: a name other than ``'stderr'`` and ``'stdout'``.
    """
    named: dict[str, TextStream] = {"stderr": sys.stderr, "stdout": sys.stdout}
    if isinstance(stream, str):
        if stream not in named:
            raise ConfigError(f"stream={stream!r}: want an open text file or a name.{did_you_mean(stream, named)}")
        stream = named[stream]
    return stream if dist.get_global_rank() == 0 else _Silence()


def is_terminal(stream: TextStream) -> bool:
    """Whether ``stream`` is a terminal that can redraw a line."""
    isatty = getattr(stream, "isatty", None)  # a stream of one's own may have write and flush only
    return isatty is not None and isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
