"""Composer's import paths work under the name of this package, and every name that is left out has a reason."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from composerlite.composer_paths import PATHS

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "_site"))

import composer_names as names


@pytest.mark.parametrize("path", sorted(PATHS))
def test_a_module_of_composer_gives_the_names_of_its_home(path: str) -> None:
    """``from composerlite.<path> import <name>`` gives the object of the module that defines it."""
    module = importlib.import_module(f"composerlite.{path}")
    for home, listed in PATHS[path].items():
        for name in listed.split():
            assert getattr(module, name) is getattr(importlib.import_module(f"composerlite.{home}"), name)


def test_a_typo_is_an_import_error() -> None:
    """A wrong name and a wrong module fail as in any package."""
    with pytest.raises(ImportError, match="cannot import name 'StepSchedular'"):
        exec("from composerlite.optim.scheduler import StepSchedular")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'composerlite\.optim\.schedular'"):
        importlib.import_module("composerlite.optim.schedular")


def test_the_paths_cost_nothing_until_one_is_used() -> None:
    """``import composerlite`` reads no table, and a path imports no module of its names."""
    program = (
        "import sys, composerlite; assert 'composerlite.composer_paths' not in sys.modules; "
        "import composerlite.loggers.file_logger; assert 'composerlite.loggers.file' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_name_of_composer_is_there_or_left_out_with_a_reason() -> None:
    """Names that the migration page lists as supported can be imported, and no reason is given for them."""
    every = {name for listed in names.COMPOSERS.values() for name in listed}
    modules = [m for m in names.COMPOSERS if m.count(".") < 2 or not m.startswith("algorithms")]
    missing = {name for module in modules for name in names.COMPOSERS[module] if names.here(module, name) is None}
    assert missing - set(names.REASONS) == set()
    here = {name for module, listed in names.COMPOSERS.items() for name in listed if names.here(module, name)}
    functions_of_state = {"get_model_state_dict", "get_optim_state_dict"}
    assert set(names.REASONS) & here - functions_of_state == set()
    assert (set(names.REASONS) | set(names.DIFFERS)) - every == set()
    assert set(names.DIFFERS) - here == set()
