"""What ``composerlite config schema`` does."""

from __future__ import annotations

import json

import typer

from composerlite.config import json_schema, reference_page

__all__ = ["print_reference", "print_schema"]


def print_reference() -> None:
    """Print every key and name, as Markdown."""
    typer.echo(reference_page(), nl=False)


def print_schema() -> None:
    """Print the JSON Schema of a run's YAML."""
    typer.echo(json.dumps(json_schema(), indent=1, ensure_ascii=False))
