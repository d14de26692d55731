"""The language of the code: docstrings that open with a verb or a noun, and one meaning for each class name."""

import ast
import collections
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import composerlite

_PACKAGE = Path(composerlite.__file__).parent
_RELATIVE = "What Whether Where Those That As Who Whom Whose How Which When Why"
_PARTICLES = "To By Of In With Without From Into About Before After At On For Have Has"
_OPENINGS = re.compile(
    rf"(?:{'|'.join([*_RELATIVE.split(), *_PARTICLES.split()])})\b"
    r"|\w+ (?:what|how|who|whom)\b"
    r"|(?:Return|Yield)s? (?:where|which|when|that|those|as|why|whose|whether)\b"
)
"""No verb and no noun, or a verb whose object is a clause: a reader learns what a thing is from neither."""


@functools.cache
def _trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(_PACKAGE.parent).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(_PACKAGE.rglob("*.py"))
    }


def _docstrings() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each docstring."""
    for path, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path}:{node.body[0].lineno}", text


def test_a_docstring_opens_with_a_verb_or_a_noun() -> None:
    """Somebody new reads first what a thing does or is: "Path of the manifest", not "Return where the manifest is"."""
    offenders = [f"{where}: {text.splitlines()[0]}" for where, text in _docstrings() if _OPENINGS.match(text)]
    assert not offenders, "\n".join(["open with a verb in the imperative and its noun, or with a noun:", *offenders])


def test_a_class_name_stands_for_one_thing() -> None:
    """A name that somebody looks up leads to one class of the package."""
    places: dict[str, list[str]] = collections.defaultdict(list)
    for path, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice, f"rename all but one: {twice}"
