"""The command line: ``composerlite train`` and ``composerlite checkpoint …``. Only what a command needs is imported."""

from composerlite.cli.app import main

__all__ = ["main"]
