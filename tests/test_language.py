"""The documentation uses one word per thing: those of docs/glossary.md, and none that docs/glossary.toml forbids."""

from __future__ import annotations

import ast
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOSSARY = tomllib.loads((ROOT / "docs" / "glossary.toml").read_text(encoding="utf-8"))
EXCEPTIONS: dict[str, str] = GLOSSARY["exceptions"]
FORBIDDEN: dict[str, str] = {word: entry["use"] for entry in GLOSSARY["forbidden"] for word in entry["words"]}
DOCS_ONLY = {word for entry in GLOSSARY["forbidden"] if entry.get("docs_only") for word in entry["words"]}

CHECKED = ["README.md", "CONTRIBUTING.md", "docs/**/*.md", "configs/**/*.md", "composerlite/**/*.py"]
"""Files whose text is checked, as globs. Folders of code join here: of a Python file the whole text is checked."""

_PATTERN = re.compile(
    r"(?<![\w-])(?:" + "|".join(r"\s+".join(map(re.escape, word.split())) for word in FORBIDDEN) + r")(?![\w-])", re.I
)
_CODE = re.compile(r"^([ \t]*)(```|~~~).*?^\1?[ \t]*\2|<!--.*?-->|`[^`\n]*(?:\n[^`\n]+)?`|\]\([^)\s]*\)", re.M | re.S)


def prose_of(text: str) -> str:
    """The text of a Markdown page without its code, comments and link targets, each line where it was."""
    return _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)


def forbidden_in(text: str) -> list[tuple[int, str]]:
    """Line and word of each forbidden word in ``text``."""
    return [(text.count("\n", 0, m.start()) + 1, " ".join(m[0].lower().split())) for m in _PATTERN.finditer(text)]


def checked_files() -> list[Path]:
    """The files of :data:`CHECKED` that are no exception."""
    paths = sorted({path for pattern in CHECKED for path in ROOT.glob(pattern)})
    return [path for path in paths if not any(fnmatch(str(path.relative_to(ROOT)), glob) for glob in EXCEPTIONS)]


def test_forbidden_words_do_not_occur() -> None:
    """A reader of torch's, Lightning's and Composer's documentation meets the words of the field here, too."""
    found: list[str] = []
    for path in checked_files():
        text = path.read_text(encoding="utf-8")
        is_page = path.suffix == ".md"
        for line, word in forbidden_in(prose_of(text) if is_page else text):
            if is_page or word not in DOCS_ONLY:
                found.append(f"{path.relative_to(ROOT)}:{line}: {word!r}; write: {FORBIDDEN[word]}")
    assert found == []


def test_exceptions_are_needed() -> None:
    """An exception that stands for no file is removed from the list."""
    files = [str(path.relative_to(ROOT)) for pattern in CHECKED for path in ROOT.glob(pattern)]
    assert [glob for glob in EXCEPTIONS if not any(fnmatch(file, glob) for file in files)] == []


def test_the_check_reads_prose_and_not_code() -> None:
    """A forbidden word is found across a line break and in any case, and left alone in code, links and comments."""
    page = "The run Goes\non.\n\n```text\nit goes on\n```\n`goes on` [link](goes-on) <!-- goes on -->\nIt is torn.\n"
    assert forbidden_in(prose_of(page)) == [(1, "goes on"), (8, "torn")]


OF_OTHERS = {"CUDA out of memory", "No space left on device"}
"""Messages on the page on troubleshooting that torch and the operating system give."""


def texts_of_code() -> str:
    """All strings of the package, with ``…`` for what is filled in, and the names of its exceptions."""
    texts: list[str] = []
    for path in sorted((ROOT / "composerlite").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.ClassDef | ast.Name):
                texts.append(node.name if isinstance(node, ast.ClassDef) else node.id)
    return "\n".join(texts)


def test_messages_of_the_troubleshooting_page_exist() -> None:
    """Whoever searches the page for a part of an error message finds the message that the code raises."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page, re.M)
    messages = {message for row in rows for message in re.findall(r"`([^`]+)`", row)} - OF_OTHERS
    code = texts_of_code()
    missing = [message for message in messages if not re.search(".*".join(map(re.escape, message.split("…"))), code)]
    assert len(messages) > 25
    assert missing == []
