"""The page for those who come from Composer says of every public name of Composer what became of it, and it is so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_site"))

import composer_names as names  # noqa: E402 - what makes the page lies beside the site

COMPOSERS = names.COMPOSERS
REASONS = names.REASONS


def test_the_page_is_that_of_the_two_packages() -> None:
    """What the page says of each name is what the code of today says."""
    text = names.PAGE.read_text()
    assert names.page(text) == text, "the page is out of date: run `make migration` and commit what changes"


@pytest.mark.parametrize("module", [m for m in COMPOSERS if m.count(".") < 2 or not m.startswith("algorithms")])
def test_a_name_of_composer_is_imported_from_its_module_or_left_out_with_a_reason(module: str) -> None:
    """``from composer.<module> import <name>`` works with the package renamed, for every name that is not left out."""
    missing = [name for name in COMPOSERS[module] if names.here(module, name) is None]
    assert [name for name in missing if name not in REASONS] == []


def test_what_is_said_to_be_left_out_is() -> None:
    """No name has a reason that can be imported, and no reason or difference is of a name that Composer has not."""
    every = {name for listed in COMPOSERS.values() for name in listed}
    here = {name for module, listed in COMPOSERS.items() for name in listed if names.here(module, name) is not None}
    functions_of_state = {"get_model_state_dict", "get_optim_state_dict"}
    assert sorted(set(REASONS) & here - functions_of_state) == []
    assert sorted((set(REASONS) | set(names.DIFFERS)) - every) == []
    assert sorted(set(names.DIFFERS) - here) == []
