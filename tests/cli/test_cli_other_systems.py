"""``composerlite checkpoint …`` on what Composer and OLMo-core have written."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import composerlite

DATA = Path(__file__).parents[1] / "data"
NAMES = ["composer/ep1-ba6-rank0.pt", "composer/packed.tar.bz2", "composer/ep2-ba6", "olmo_core/step6"]


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_of_other_systems_are_inspected_converted_and_compared(name: str, tmp_path: Path) -> None:
    """Their weights are listed, converted to safetensors and equal to these; verify says that nothing verifies them."""
    source, target = DATA / name, tmp_path / "weights.safetensors"
    shown = composerlite("checkpoint", "inspect", source, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "body.weight" in shown.stdout
    assert "unverified" in composerlite("checkpoint", "verify", source, cwd=tmp_path).stdout
    converted = composerlite("checkpoint", "convert", source, target, cwd=tmp_path)
    assert converted.returncode == 0, converted.stderr
    compared = composerlite("checkpoint", "diff", source, target, cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    assert "4 equal, 0 changed" in compared.stdout
