"""The command line: ``composerlite train``, ``eval``, ``checkpoint …``. Each command imports its own modules."""

from composerlite.cli.app import app as main

__all__ = ["main"]
