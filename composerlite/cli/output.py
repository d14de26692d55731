"""Print JSON, tables and errors."""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, cast

import click

from composerlite.errors import ComposerliteError, ConfigError

_NOT_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
"""JSON has no such numbers: print text."""
_STORAGE_MODULES = ("composerlite.storage.", "composerlite.checkpoint.", "composerlite.loggers.")
_USER_CODE = ("train", "eval", "predict")
"""Commands that run code of the user."""


class CommandGroup(click.Group):
    """A group of commands. Prints an expected error as one message, without a traceback.

    Exit status: 2 for :class:`ConfigError`, 1 for other errors of composerlite and of the operating system. All other
    exceptions are bugs and keep the traceback.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except Exception as e:
            messages = error_messages(e, all_os_errors=ctx.invoked_subcommand not in _USER_CODE)
            if messages is None:
                raise
            if ctx.meta.get("traceback"):
                click.echo("".join(traceback.format_exception(e)), err=True, nl=False)
            for message in messages:
                click.echo(f"composerlite: error: {message}", err=True)
            raise click.exceptions.Exit(2 if isinstance(e, ConfigError) else 1) from e


def error_messages(error: Exception, *, all_os_errors: bool) -> list[str] | None:
    """Return the messages of an expected error; ``None`` for a bug.

    Args:
        error: the error, or a group of errors.
        all_os_errors: every ``OSError`` is expected. Otherwise an ``OSError`` is expected only from the storage modules
            of composerlite, since code of the user may raise others.
    """
    if isinstance(error, ExceptionGroup):
        messages: list[str] = []
        for part in cast("ExceptionGroup[Exception]", error).exceptions:
            found = error_messages(part, all_os_errors=all_os_errors)
            if found is None:
                return None
            messages += found
        return messages
    text = str(error)
    if isinstance(error, OSError) and not isinstance(error, ComposerliteError):
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        is_storage = any(module.startswith(_STORAGE_MODULES) for module in modules)
        if isinstance(error, BrokenPipeError) or not (all_os_errors or is_storage):
            return None
        text = " ".join(text.split())
        if error.strerror is not None and error.filename is not None:
            text = f"{str(error.filename)!r}: {error.strerror}"
    elif not isinstance(error, ComposerliteError):
        return None
    return ["\n".join([text, *getattr(error, "__notes__", ())])]


def print_json(result: object) -> None:
    """Print JSON on stdout. Numbers that are not finite become ``'nan'``, ``'inf'`` and ``'-inf'``."""
    plain = json.loads(json.dumps(result), parse_constant=_NOT_FINITE.__getitem__)
    click.echo(json.dumps(plain, indent=1))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = (), spare: Sequence[str] = ()
) -> None:
    """Print a table on stdout. Empty columns are left out.

    Args:
        columns: headings.
        rows: cells.
        right: headings of columns aligned to the right.
        spare: headings of columns to leave out on a narrow terminal, least important first.
    """
    listed = [[str(cell) for cell in row] for row in rows]
    shown = [at for at in range(len(columns)) if any(row[at] for row in listed)]
    widths = {at: max(len(columns[at]), *(len(row[at]) for row in listed)) for at in shown}
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for at in [columns.index(heading) for heading in spare]:
        if at in shown and sum(widths[other] + 2 for other in shown) > room:
            shown.remove(at)
    for row in [columns, *listed]:
        texts = [row[at].rjust(widths[at]) if columns[at] in right else row[at].ljust(widths[at]) for at in shown]
        line = "  ".join(texts).rstrip()
        click.echo(click.style(line, fg="red") if row[-1].startswith(("incomplete", "damaged")) else line)
