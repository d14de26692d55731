"""Docstrings for the API pages, as an extension of griffe that mkdocs.yml names.

Docstrings are Markdown, but for what Python's own tools know and for habits of this code: roles, such as
``:class:`Time```, which become links where the site has what they name, and code elsewhere; ``::`` before a block of
text; names that share a description, as in ``first, second: as in the constructor``, each of which gets it; and two
arguments in one line, which get a line each.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(?P<short>~?)(?P<name>[\w.]+)`")
_SHARED = re.compile(r"(?m)^(?P<indent> +)(?P<names>\w+(?:,\s+\w+)+): (?P<text>.*(?:\n(?P=indent) +.*)*)")
_TWO = re.compile(r"(?m)^(?P<indent> +)(?P<first>\w+: .*?\.) (?P<name>\w+)(?=: )")
_LITERAL = re.compile(r"(?m)(?P<text>\S?)[ \t]*::$")


class Docstrings(griffe.Extension):
    """Rewrites every docstring of a package once all of it is known."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self._rewrite(pkg)

    def _rewrite(self, found: griffe.Object) -> None:
        if found.docstring is not None:
            found.docstring.value = markdown_of(found.docstring.value, found)
        for member in found.members.values():
            if not member.is_alias:
                self._rewrite(member)


def markdown_of(text: str, where: griffe.Object) -> str:
    """The docstring ``text`` of ``where`` as Markdown."""

    def link(role: re.Match[str]) -> str:
        name = role["name"]
        shown = name.rpartition(".")[2] if role["short"] else name
        return f'<autoref identifier="{_path(name, where)}" optional><code>{shown}</code></autoref>'

    def each(shared: re.Match[str]) -> str:
        names = re.split(r",\s+", shared["names"])
        return "\n".join(f"{shared['indent']}{name}: {shared['text']}" for name in names)

    def apart(two: re.Match[str]) -> str:
        return f"{two['indent']}{two['first']}\n{two['indent']}{two['name']}" if two["name"] in names else two[0]

    names = _names_in(where)
    text = _TWO.sub(apart, _SHARED.sub(each, _ROLE.sub(link, text)))
    return _LITERAL.sub(lambda end: f"{end['text']}:" if end["text"] else "", text)


def _names_in(where: griffe.Object) -> set[str]:
    """What a docstring of ``where`` may describe: parameters, those of the constructor, and attributes."""
    found = {"__init__": where, **where.members}["__init__"]
    parameters = found.parameters if isinstance(found, griffe.Function) else ()
    return {*where.members, *(parameter.name for parameter in parameters)}


def _path(name: str, where: griffe.Object | None) -> str:
    """The full path of what is called ``name`` in the code around ``where``; ``name`` itself if there is none."""
    first, _, rest = name.partition(".")
    while where is not None:
        found = (where.all_members if where.is_class else where.members).get(first)
        if found is not None:
            return f"{_home(found)}{'.' + rest if rest else ''}"
        where = where.parent
    return name


def _home(found: griffe.Object | griffe.Alias) -> str:
    try:
        return found.canonical_path
    except griffe.AliasResolutionError as error:  # of another package
        return error.alias.target_path
