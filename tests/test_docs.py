"""Every example in README.md and docs/ runs as it stands.

The python blocks of a file run in order as one program, in an empty folder; the bash blocks in order, in a folder with
a copy of ``configs``, as in the root of the repository. Folder and bucket belong to that file and language alone:
nothing that other examples do, before or at the same time, is seen there. Three comments in a file change that::

    <!-- prelude: tests/docs_preludes/NAME.py -->    runs before the file's python blocks: a model, some data
    <!-- bucket: s3://NAME -->                       there is an empty bucket, on a service that the environment names;
                                                     in the examples, NAME becomes the name of that one
    <!-- not run: reason -->                         the block that follows is left out
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked import Launcher, run_forked

from composerlite.cli import main
from composerlite.utils import FSDPConfig, TPConfig

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"\s*```\s*(\w*)")
_NOT_RUN = re.compile(r"<!--\s*not run:\s*(.+?)\s*-->")
_PRELUDE = re.compile(r"<!--\s*prelude:\s*(\S+)\s*-->")
_BUCKET = re.compile(r"<!--\s*bucket:\s*s3://(\S+)\s*-->")


@dataclass(frozen=True)
class Block:
    """One example: its language, its code, the line of the document where the code starts, and why it is not run."""

    language: str
    code: str
    line: int
    not_run: str | None


def blocks_in(text: str) -> list[Block]:
    """The fenced blocks of a Markdown document."""
    blocks: list[Block] = []
    opened: tuple[str, int, str | None] | None = None
    before = ""  # the last line that was not blank
    lines = text.splitlines()
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is not None and opened is None:
            not_run = _NOT_RUN.search(before)
            opened = fence[1], number + 1, None if not_run is None else not_run[1]
        elif fence is not None and opened is not None:
            language, start, reason = opened
            code = textwrap.dedent("\n".join(lines[start:number]))
            blocks.append(Block(language, code, start + 1, reason))
            opened = None
        if line.strip():
            before = line
    return blocks


def with_its_bucket(
    document: Path, blocks: list[Block], request: pytest.FixtureRequest
) -> tuple[list[Block], dict[str, str]]:
    """The examples and their environment: with a running service and a bucket of their own, if the document has one."""
    bucket = _BUCKET.search(document.read_text())
    if bucket is None:
        return blocks, dict(os.environ)
    server = request.getfixturevalue("s3_server")
    name = re.compile(rf"(?<![\w-]){re.escape(bucket[1])}(?![\w-])")
    its_own = server.new_bucket()
    return [dataclasses.replace(block, code=name.sub(its_own, block.code)) for block in blocks], {
        **os.environ,
        **server.environment,
    }


def cases(language: str) -> list[object]:
    """A case for each document with blocks of ``language``, and a skipped one for each block that is not run."""
    found: list[object] = []
    for document in DOCUMENTS:
        name = str(document.relative_to(ROOT))
        blocks = [block for block in blocks_in(document.read_text()) if block.language == language]
        if runnable := [block for block in blocks if block.not_run is None]:
            found.append(pytest.param(document, runnable, id=name))
        for block in blocks:
            if block.not_run is not None:
                skip = pytest.mark.skip(reason=f"not run: {block.not_run}")
                found.append(pytest.param(document, [block], id=f"{name}:{block.line}", marks=skip))
    return found


def program_of(*files: str) -> None:
    """Run files one after the other as one program: what they define lives in ``__main__``, where workers find it."""
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    for file in files:
        exec(compile(Path(file).read_text(), file, "exec"), program.__dict__)


@pytest.mark.parametrize(("document", "blocks"), cases("python"))
def test_python_examples_run(
    document: Path, blocks: list[Block], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A reader can paste the python blocks of a page, one after the other, into a file and run it."""
    # Each block stands at its own line, so that the traceback names the line of the document.
    program = tmp_path / "programs" / document.name
    program.parent.mkdir()
    blocks, environment = with_its_bucket(document, blocks, request)
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    program.write_text("\n".join(lines) + "\n")
    prelude = _PRELUDE.search(document.read_text())
    files = [str(program)] if prelude is None else [str(ROOT / prelude[1]), str(program)]

    folder = tmp_path / "empty"
    folder.mkdir()
    result = run_forked(program_of, *files, cwd=folder, environment=environment)
    at = re.findall(rf'"{re.escape(str(program))}", line (\d+)', result.stderr)
    where = f"{document.relative_to(ROOT)}:{at[-1] if at else blocks[0].line}"
    assert result.returncode == 0, f"{where}\n{result.stdout}{result.stderr}"


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the command ``composerlite``, which need not import torch first."""
    folder = tmp_path_factory.mktemp("commands")
    with Launcher(composerlite) as launcher:
        command = folder / "composerlite"
        command.write_text(f'#!/bin/sh\nexec {shlex.join(launcher.command)} "$@"\n')
        command.chmod(0o755)
        yield folder


def composerlite(*_: str) -> None:
    """What the command does with the arguments of its process."""
    main()


@pytest.mark.parametrize(("document", "blocks"), cases("bash"))
def test_bash_examples_run(
    document: Path, blocks: list[Block], commands: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A reader can paste the commands of a page into a shell, in the root of the repository."""
    blocks, environment = with_its_bucket(document, blocks, request)
    shutil.copytree(ROOT / "configs", tmp_path / "configs", ignore=shutil.ignore_patterns("__pycache__"))
    path = f"{commands}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    for block in blocks:
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code],
            cwd=tmp_path,
            env={**environment, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        where = f"{document.relative_to(ROOT)}:{block.line}"
        assert result.returncode == 0, f"{where}\n{result.stdout}{result.stderr}"


def test_every_key_of_the_parallelism_config_is_in_its_table() -> None:
    """With the default that it has."""
    page = (ROOT / "docs/parallelism.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (needed|`[^`]*`) \|", page, re.MULTILINE))
    for field in [*dataclasses.fields(FSDPConfig), *dataclasses.fields(TPConfig)]:
        needed = field.default is dataclasses.MISSING
        assert rows[field.name] == ("needed" if needed else f"`{field.default!r}`")


OF_OTHERS = {"CUDA out of memory", "No space left on device"}
"""Messages on the troubleshooting page that torch and the operating system print."""


def texts_of_code() -> str:
    """Return all strings of the package, with ``…`` for filled-in values, and the names of its classes."""
    texts: list[str] = []
    for path in sorted((ROOT / "composerlite").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.ClassDef | ast.Name):
                texts.append(node.name if isinstance(node, ast.ClassDef) else node.id)
    return "\n".join(texts)


def test_messages_of_the_troubleshooting_page_exist() -> None:
    """Searching the page for part of an error message finds a message that the code raises."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.M)
    messages = {message for row in rows for message in re.findall(r"`([^`]+)`", row)} - OF_OTHERS
    code = texts_of_code()
    assert len(messages) > 25
    assert [m for m in messages if not re.search(".*".join(map(re.escape, m.split("…"))), code)] == []
