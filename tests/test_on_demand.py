"""Names of packages that are imported when they are first used."""

from __future__ import annotations

import importlib
import py_compile
import sys
from pathlib import Path

import pytest

_INIT = """
from __future__ import annotations

from typing import TYPE_CHECKING

from composerlite.on_demand import lazy_names

if TYPE_CHECKING:
    from {name} import inner
    from {name}.inner import first, second
    from {name}.other import third

__all__ = ["first", "inner", "second", "third"]

__getattr__, __dir__ = lazy_names(__name__)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with lazy names, and a module that says so when it is imported."""
    folder = tmp_path / f"lazy_{tmp_path.name.strip('_')}"
    folder.mkdir()
    (folder / "__init__.py").write_text(_INIT.format(name=folder.name))
    (folder / "inner.py").write_text("first, second = 1, 2\n")
    (folder / "other.py").write_text("third = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_what_is_imported_for_types_is_imported_when_used(package: Path) -> None:
    """A name that a package imports for type checkers can be used; its module is imported then, and no other."""
    module = importlib.import_module(package.name)
    assert f"{package.name}.inner" not in sys.modules
    assert (module.first, module.second, module.inner.first) == (1, 2, 1)
    assert f"{package.name}.other" not in sys.modules
    assert dir(module) == ["first", "inner", "second", "third"]
    with pytest.raises(AttributeError, match=f"module {package.name!r} has no attribute 'fourth'"):
        _ = module.fourth


def test_a_package_without_sources_says_what_is_missing(package: Path) -> None:
    """Where only compiled files were installed, the error says that the sources are needed."""
    py_compile.compile(str(package / "__init__.py"), cfile=str(package / "__init__.pyc"))
    (package / "__init__.py").unlink()
    module = importlib.import_module(package.name)
    with pytest.raises(ImportError, match=rf"^{package.name} has no source file, which says where its names are: "):
        _ = module.first
