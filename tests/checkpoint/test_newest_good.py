"""Which checkpoint a run goes on from: the newest of its own that is sound."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from parts import save_batch
from sealed_files import DAMAGES, damage

from composerlite.checkpoint import Catalog
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.errors import CheckpointError

TEMPLATE = "ba{batch}.pt"


def test_it_is_the_newest_by_batch(tmp_path: Path) -> None:
    """Of all folders, whatever the order of saving."""
    for folder, batch in (("a", 10), ("b", 12), ("a", 11)):
        save_batch(tmp_path / folder, batch)
    places = [RunPlace(Catalog(tmp_path / name)) for name in ("a", "b")]
    assert choose(places, "run").path == tmp_path / "b" / "ba12.pt"
    assert choose(places[::-1], "run").path == tmp_path / "b" / "ba12.pt"


def test_it_is_one_of_the_run_and_whole(tmp_path: Path) -> None:
    """Not of another run, not weights alone."""
    save_batch(tmp_path, 1)
    save_batch(tmp_path, 2, run_name="other")
    save_batch(tmp_path, 3, weights_only=True)
    assert choose([RunPlace(Catalog(tmp_path))], "run").path == tmp_path / "ba1.pt"


def test_a_damaged_one_is_passed_over_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However a file was damaged, the next older one is taken."""
    for batch, how in enumerate(DAMAGES, 2):
        damage(save_batch(tmp_path, batch), how)
    good = save_batch(tmp_path, 1)
    assert choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run").path == good
    for batch, how in enumerate(DAMAGES, 2):
        assert how == "no record" or f"ba{batch}.pt" in caplog.text, how
        assert (tmp_path / f"ba{batch}.pt").exists() == (how == "no record"), how
        assert (tmp_path / f"ba{batch}.pt.damaged").exists() == (how != "no record"), how


def test_there_may_be_none(tmp_path: Path) -> None:
    """No folder, or an empty one."""
    assert choose([], "run").path is None
    assert choose([RunPlace(Catalog(tmp_path)), RunPlace(Catalog(tmp_path / "none"))], "run").path is None


@pytest.mark.parametrize("how", DAMAGES)
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(tmp_path: Path, how: str) -> None:
    """The error names each and the way out, and nothing is changed. A good one is resumed from."""
    for batch in (1, 2):
        damage(save_batch(tmp_path, batch), how)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"none can be loaded.*ba[12]\.pt.*ba[12]\.pt.*load_path"):
            choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    good = save_batch(tmp_path, 0)
    assert choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run").path == good
    end = "" if how == "no record" else ".damaged"
    assert {path.name for path in tmp_path.glob("ba*")} == {"ba0.pt", f"ba1.pt{end}", f"ba2.pt{end}"}
    assert (tmp_path / "latest.pt").readlink() == Path("ba0.pt")


def test_what_cannot_be_read_and_is_not_of_the_run_is_no_damage(tmp_path: Path) -> None:
    """Damaged checkpoints of names that the run does not write keep no run from its beginning."""
    damage(save_batch(tmp_path, 1, template="xx{batch}.pt", latest=None), "tail")
    (tmp_path / ".manifest").mkdir()
    (tmp_path / ".manifest" / "other.json").write_text("{")
    assert choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run").path is None


def test_a_whole_one_comes_before_newer_parts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was saved without its optimizer would start that afresh: it is taken only where there is nothing else."""
    part = save_batch(tmp_path, 2, ignore_keys=["state/optimizers"])
    assert choose([RunPlace(Catalog(tmp_path))], "run").path == part
    assert "saved without ('state/optimizers',)" in caplog.text
    whole = save_batch(tmp_path, 1)
    assert choose([RunPlace(Catalog(tmp_path))], "run").path == whole
    whole.unlink()
    assert choose([RunPlace(Catalog(tmp_path))], "run").path == part


# ── files that are no checkpoints of the run ─────────────────────────────────────────────────────────────────────────
def test_a_copy_made_by_hand_is_neither_resumed_nor_moved(tmp_path: Path) -> None:
    """Its record names the checkpoint that it is a copy of."""
    good = save_batch(tmp_path, 1)
    shutil.copy(good, tmp_path / "ba9.pt")
    assert choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run").path == good
    good.unlink()
    assert choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run").path is None
    assert (tmp_path / "ba9.pt").exists()


def test_what_is_not_of_the_run_is_left_alone(tmp_path: Path) -> None:
    """Of another run, weights alone, or something that torch has saved: it is neither taken nor moved."""
    good = save_batch(tmp_path, 1)
    left = [save_batch(tmp_path, 2, run_name="other"), save_batch(tmp_path, 3, weights_only=True)]
    left.append(tmp_path / "ba4.pt")
    torch.save({"state": {"some": "thing"}}, left[-1])
    assert choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run").path == good
    assert all(path.exists() for path in left)
