"""The command line: ``composerlite train``, ``eval``, ``checkpoint …``. Only what a command needs is imported."""

from composerlite.cli.app import main

__all__ = ["main"]
