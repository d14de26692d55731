"""The page that lists everything a run's YAML may say. ``docs/configuration-reference.md`` is what this makes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from composerlite.config.reference.settings import (
    NEEDED,
    Setting,
    evaluator_settings,
    families,
    loader_settings,
    trainer_settings,
)
from composerlite.config.registry import Family
from composerlite.config.schema import OF_THE_FILE, PARTS

__all__ = ["reference_page"]

_TOP = """\
<!-- Written by `make reference` from the docstrings and signatures of the code: change those, and run it again. -->

# Configuration reference

Every key of a run's YAML file, and every name that composerlite has. How they are used is in
[A run as a YAML file](configuration.md). `composerlite config schema` prints this page, with `--json` a JSON Schema.

## The file
"""
_YOUR_OWN = """
Models, data sets and loaders have no names here: `name: module:attr` is a class or function of any module, and what
stands beside `name` are its arguments.
"""
_TITLES: Mapping[Family, str] = {
    "optimizer": "Optimizers",
    "scheduler": "Schedulers",
    "algorithm": "Algorithms",
    "callback": "Callbacks",
    "logger": "Loggers",
}


def reference_page() -> str:
    """The page as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _TOP
    yield from ("| key | what it holds |", "|---|---|")
    yield from (f"| `{key}` | {_cell(meaning)} |" for key, meaning in {**OF_THE_FILE, **PARTS}.items())
    yield "| all others | [arguments of the Trainer](#the-trainer) |"
    yield _YOUR_OWN
    yield "## The Trainer\n\n`max_duration` is needed.\n"
    yield from _table(trainer_settings())
    yield "\n## Loaders\n\nBeside `dataset`, in `train_loader` and `eval_loader`:\n"
    yield from _table(loader_settings())
    yield "\nIn `eval_loader` besides:\n"
    yield from _table(evaluator_settings())
    for family, classes in families().items():
        yield f"\n## {_TITLES[family]}"
        for named in classes:
            yield f"\n### `{named.name}`\n\n{named.summary}"
            if named.settings:
                yield ""
                yield from _table(named.settings)


def _table(settings: Iterable[Setting]) -> Iterator[str]:
    yield from ("| name | type | default | meaning |", "|---|---|---|---|")
    for setting in settings:
        default = "needed" if setting.default is NEEDED else f"`{json.dumps(setting.default, ensure_ascii=False)}`"
        yield f"| `{setting.name}` | {setting.words} | {_cell(default)} | {_cell(setting.meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
