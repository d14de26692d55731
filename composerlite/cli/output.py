"""JSON and tables on stdout; errors as one message on stderr and an exit status."""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
import sys
import traceback as tracebacks
from collections.abc import Generator, Iterable, Sequence
from typing import cast

import click

from composerlite.errors import ComposerliteError, ConfigError

_NOT_FINITE = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
"""Texts for numbers that JSON does not have, by the constants of Python's encoder."""


def print_json(result: object) -> None:
    """``result`` as JSON on stdout. Numbers that JSON does not have become ``'nan'``, ``'inf'`` and ``'-inf'``."""
    plain = json.loads(json.dumps(result), parse_constant=_NOT_FINITE.__getitem__)
    click.echo(json.dumps(plain, indent=1))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = (), spare: Sequence[str] = ()
) -> None:
    """A table on stdout, as wide as it needs to be; on a terminal without the columns that it has no room for.

    Args:
        columns: headings. One that has nothing in any row is left out.
        rows: a text for each.
        right: headings of those that hold numbers.
        spare: headings of those that a narrow terminal can do without, the first first.
    """
    listed = [[str(cell) for cell in row] for row in rows]
    shown = [place for place in range(len(columns)) if any(row[place] for row in listed)]
    widths = {place: max(len(columns[place]), *(len(row[place]) for row in listed)) for place in shown}
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for place in [columns.index(head) for head in spare]:
        if place in shown and sum(widths[at] + 2 for at in shown) > room:
            shown.remove(place)
    for row in [columns, *listed]:
        texts = [row[at].rjust(widths[at]) if columns[at] in right else row[at].ljust(widths[at]) for at in shown]
        line = "  ".join(texts).rstrip()
        is_bad = row[-1].startswith(("incomplete", "damaged"))
        click.echo(click.style(line, fg="red") if is_bad else line)


@contextlib.contextmanager
def readable_errors(*, traceback: bool = False, of_system: bool = False) -> Generator[None]:
    """End the program with status 2 on a :class:`ConfigError` and with 1 on another error that is no bug.

    Those are the errors of composerlite, and what the system raises where checkpoints and records are read or written:
    a bucket, a credential or a right is missing, a disk is full. The message goes to stderr, with the traceback in
    front of it if ``traceback``. Other exceptions are bugs, of the user's code or ours, and pass with their traceback.

    Args:
        traceback: show it, too.
        of_system: no code of the user's runs: every OSError is printed as a message, wherever it was raised.
    """
    if not gc.isenabled():  # see main()
        gc.freeze()
        gc.enable()
    try:
        yield
    except Exception as e:
        told = _told(e, of_system=of_system)
        if told is None:
            raise
        if traceback:
            click.echo("".join(tracebacks.format_exception(e)), err=True, nl=False)
        for text in told:
            click.echo(f"composerlite: error: {text}", err=True)
        raise click.exceptions.Exit(2 if isinstance(e, ConfigError) else 1) from e


def _told(error: Exception, *, of_system: bool) -> list[str] | None:
    """Return the messages of ``error``, which has several if it is a group; ``None`` for a bug."""
    if isinstance(error, ExceptionGroup):
        parts = [_told(one, of_system=of_system) for one in cast("ExceptionGroup[Exception]", error).exceptions]
        return None if None in parts else [text for part in parts for text in part or ()]
    if isinstance(error, OSError) and not isinstance(error, ComposerliteError):
        if isinstance(error, BrokenPipeError) or not (of_system or _is_of_storage(error)):  # the reader has seen enough
            return None
        text = _one_line(error)
    elif isinstance(error, ComposerliteError):
        text = str(error)
    else:
        return None
    return ["\n".join([text, *getattr(error, "__notes__", ())])]


def _is_of_storage(error: OSError) -> bool:
    """Check whether it was raised while composerlite stored or read something, and not in code of the user's."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in tracebacks.walk_tb(error.__traceback__))
    return any(module.startswith(_STORING) for module in modules)


_STORING = ("composerlite.storage.", "composerlite.checkpoint.", "composerlite.loggers.")


def _one_line(error: OSError) -> str:
    if error.strerror is None or error.filename is None:
        return " ".join(str(error).split())
    return f"{str(error.filename)!r}: {error.strerror}"
