"""Errors of composerlite as one message and an exit status."""

from __future__ import annotations

import contextlib
import traceback as tracebacks
from collections.abc import Generator

import typer

from composerlite.errors import ComposerliteError, ConfigError

__all__ = ["readable_errors"]


@contextlib.contextmanager
def readable_errors(*, traceback: bool) -> Generator[None]:
    """End the program with status 2 on a :class:`ConfigError` and with 1 on another error of composerlite.

    The message goes to stderr, with the traceback in front of it if ``traceback``. Other exceptions are bugs, of the
    user's code or ours, and pass with their traceback.
    """
    try:
        yield
    except ComposerliteError as e:
        if traceback:
            typer.echo("".join(tracebacks.format_exception(e)), err=True, nl=False)
        typer.echo(f"composerlite: error: {e}", err=True)
        raise typer.Exit(2 if isinstance(e, ConfigError) else 1) from e
