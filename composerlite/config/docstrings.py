"""What docstrings say, for pages and editors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection

__all__ = ["meanings", "summary"]

_OF_YAML = {"None": "null", "True": "true", "False": "false"}


def summary(documented: object) -> str:
    """The first paragraph of a docstring, as Markdown."""
    return _markdown((inspect.getdoc(documented) or "").split("\n\n")[0])


def meanings(documented: object, names: Collection[str]) -> dict[str, str]:
    """What the section ``Args:`` says of each of ``names``, as Markdown; or which other one's text names it.

    Those that it does not know are left out.
    """
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(documented) or "", re.MULTILINE | re.DOTALL)
    if section is None:
        return {}
    entries = re.split(r"^ {4}(?=\w)", section[1], flags=re.MULTILINE)
    any_name = "|".join(map(re.escape, names))
    begins = re.compile(rf"(?:^|(?<=\. ))((?:(?:{any_name}), )*(?:{any_name})): ")
    found: dict[str, str] = {}
    for entry in entries:
        parts = begins.split(" ".join(entry.split()))[1:]  # one line may tell of several
        for several, text in zip(parts[::2], parts[1::2], strict=True):
            found |= dict.fromkeys(several.split(", "), _markdown(text))
    for name in names:
        teller = next((other for other, text in found.items() if f"`{name}`" in text), None)
        if name not in found and teller is not None:
            found[name] = f"see `{teller}`."
    return found


def _markdown(text: str) -> str:
    text = " ".join(text.split())
    text = re.sub(r"`([^`<]+?)\s*<([^`>]+)>`_+", r"[\1](\2)", text)
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    text = text.replace("``", "`").strip()
    return re.sub(r"`(None|True|False)`", lambda found: f"`{_OF_YAML[found[1]]}`", text)
