"""Errors of composerlite as one message and an exit status."""

from __future__ import annotations

import contextlib
import enum
import gc
import traceback as tracebacks
from collections.abc import Generator
from typing import TypeVar

import typer

from composerlite.errors import ComposerliteError, ConfigError, did_you_mean

__all__ = ["chosen", "one_line_errors", "readable_errors"]

E = TypeVar("E", bound=enum.Enum)


@contextlib.contextmanager
def readable_errors(*, traceback: bool) -> Generator[None]:
    """End the program with status 2 on a :class:`ConfigError` and with 1 on another error of composerlite.

    The message goes to stderr, with the traceback in front of it if ``traceback``. Other exceptions are bugs, of the
    user's code or ours, and pass with their traceback.
    """
    if not gc.isenabled():  # see main()
        gc.freeze()
        gc.enable()
    try:
        yield
    except ComposerliteError as e:
        if traceback:
            typer.echo("".join(tracebacks.format_exception(e)), err=True, nl=False)
        typer.echo(f"composerlite: error: {e}", err=True)
        raise typer.Exit(2 if isinstance(e, ConfigError) else 1) from e


@contextlib.contextmanager
def one_line_errors() -> Generator[None]:
    """As :func:`readable_errors`, also of what the system and the stores raise: a file or a right is missing."""
    try:
        with readable_errors(traceback=False):
            yield
    except BrokenPipeError:  # who reads the output has seen enough
        raise
    except OSError as e:
        typer.echo(f"composerlite: error: {_one_line(e)}", err=True)
        raise typer.Exit(1) from e


def _one_line(error: OSError) -> str:
    if error.strerror is None or error.filename is None:
        return " ".join(str(error).split())
    return f"{str(error.filename)!r}: {error.strerror}"


def chosen(kind: type[E], value: str, option: str) -> E:
    """The member of ``kind`` that ``option`` asks for.

    Raises:
        ConfigError: there is none.
    """
    known = {str(member.value): member for member in kind}
    if value not in known:
        raise ConfigError(f"{option} {value}: no such choice.{did_you_mean(value, known)}")
    return known[value]
