"""Which checkpoint a run goes on from: the newest of its own that is sound."""

from __future__ import annotations

from pathlib import Path

import pytest
from parts import save_batch

from composerlite.checkpoint import Catalog, newest_good


def test_it_is_the_newest_by_batch(tmp_path: Path) -> None:
    """Of all folders, whatever the order of saving."""
    for folder, batch in (("a", 10), ("b", 12), ("a", 11)):
        save_batch(tmp_path / folder, batch)
    catalogs = [Catalog(tmp_path / name) for name in ("a", "b")]
    assert newest_good(catalogs, "run") == tmp_path / "b" / "ba12.pt"
    assert newest_good(catalogs[::-1], "run") == tmp_path / "b" / "ba12.pt"


def test_it_is_one_of_the_run_and_whole(tmp_path: Path) -> None:
    """Not of another run, not weights alone."""
    save_batch(tmp_path, 1)
    save_batch(tmp_path, 2, run_name="other")
    save_batch(tmp_path, 3, weights_only=True)
    assert newest_good([Catalog(tmp_path)], "run") == tmp_path / "ba1.pt"


def test_a_damaged_one_is_passed_over_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Truncated, changed, gone, or with a damaged manifest: the next older one is taken."""
    paths = {batch: save_batch(tmp_path, batch) for batch in range(1, 6)}
    (tmp_path / ".manifest" / "ba5.pt.json").write_text("{}")
    paths[4].unlink()
    paths[3].write_bytes(paths[3].read_bytes()[:-1])
    paths[2].write_bytes(b"\0" * paths[2].stat().st_size)
    assert newest_good([Catalog(tmp_path)], "run") == paths[1]
    for reason in ("ba5.pt.json", "ba4.pt' is gone", "ba3.pt' has", "bytes of"):
        assert reason in caplog.text


def test_there_may_be_none(tmp_path: Path) -> None:
    """No folder, an empty one, or nothing but damage."""
    assert newest_good([], "run") is None
    assert newest_good([Catalog(tmp_path), Catalog(tmp_path / "none")], "run") is None
    save_batch(tmp_path, 1).unlink()
    assert newest_good([Catalog(tmp_path)], "run") is None


def test_a_whole_one_comes_before_newer_parts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was saved without its optimizer would start that afresh: it is taken only where there is nothing else."""
    part = save_batch(tmp_path, 2, ignore_keys=["state/optimizers"])
    assert newest_good([Catalog(tmp_path)], "run") == part
    assert "saved without ('state/optimizers',)" in caplog.text
    whole = save_batch(tmp_path, 1)
    assert newest_good([Catalog(tmp_path)], "run") == whole
    whole.unlink()
    assert newest_good([Catalog(tmp_path)], "run") == part
