"""The import paths of Composer's documentation work under the name of this package, and cost nothing until used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from composerlite.composer_paths import PATHS


@pytest.mark.parametrize("path", sorted(PATHS))
def test_a_module_that_lies_elsewhere_gives_the_names_of_composers(path: str) -> None:
    """``from composerlite.<path> import <name>`` gives the very object that its home has."""
    module = importlib.import_module(f"composerlite.{path}")
    for home, names in PATHS[path].items():
        for name in names.split():
            assert getattr(module, name) is getattr(importlib.import_module(f"composerlite.{home}"), name)
    assert dir(module) == sorted(name for names in PATHS[path].values() for name in names.split())


def test_a_name_that_is_nowhere_is_an_import_error() -> None:
    """A typo fails as it does in any module, and a module that nobody has is not found."""
    with pytest.raises(ImportError, match="cannot import name 'StepSchedular'"):
        exec("from composerlite.optim.scheduler import StepSchedular")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'composerlite\.optim\.schedular'"):
        importlib.import_module("composerlite.optim.schedular")


def test_the_paths_cost_nothing_until_one_is_used() -> None:
    """``import composerlite`` reads no table, and a path imports no torch as long as none of its names is used."""
    program = (
        "import sys, composerlite; assert 'composerlite.composer_paths' not in sys.modules; "
        "import composerlite.loggers.file_logger; assert 'torch' not in sys.modules or 'composerlite.loggers.file' "
        "not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
