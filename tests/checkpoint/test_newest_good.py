"""Which checkpoint a run goes on from: the newest of its own that is sound."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import new_state, save_batch

from composerlite.checkpoint import Catalog
from composerlite.checkpoint.load.resume import RunPlace, choose
from composerlite.checkpoint.save.job import save
from composerlite.checkpoint.save.run_folder import begin_attempt
from composerlite.errors import CheckpointError
from composerlite.types import Lineage

TEMPLATE = "ba{batch}.pt"


def test_it_is_the_newest_by_batch(tmp_path: Path) -> None:
    """Of all folders, whatever the order of saving."""
    for folder, batch in (("a", 10), ("b", 12), ("a", 11)):
        save_batch(tmp_path / folder, batch)
    places = [RunPlace(Catalog(tmp_path / name)) for name in ("a", "b")]
    assert choose(places, "run").place == tmp_path / "b" / "ba12.pt"
    assert choose(places[::-1], "run").place == tmp_path / "b" / "ba12.pt"


def test_it_is_one_of_the_run_and_whole(tmp_path: Path) -> None:
    """Not of another run, not weights alone."""
    save_batch(tmp_path, 1)
    save_batch(tmp_path, 2, run_name="other")
    save_batch(tmp_path, 3, weights_only=True)
    assert choose([RunPlace(Catalog(tmp_path))], "run").place == tmp_path / "ba1.pt"


def test_a_damaged_one_is_passed_over_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Truncated, changed, gone, or with a damaged manifest: the next older one is taken."""
    paths = {batch: save_batch(tmp_path, batch) for batch in range(1, 6)}
    (tmp_path / ".manifest" / "ba5.pt.json").write_text("{}")
    paths[4].unlink()
    paths[3].write_bytes(paths[3].read_bytes()[:-1])
    paths[2].write_bytes(b"\0" * paths[2].stat().st_size)
    assert choose([RunPlace(Catalog(tmp_path))], "run").place == paths[1]
    for reason in ("ba5.pt.json", "ba4.pt' is gone", "ba3.pt' has", "bytes of"):
        assert reason in caplog.text


def test_there_may_be_none(tmp_path: Path) -> None:
    """No folder, or an empty one."""
    assert choose([], "run").place is None
    assert choose([RunPlace(Catalog(tmp_path)), RunPlace(Catalog(tmp_path / "none"))], "run").place is None


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(tmp_path: Path) -> None:
    """The error names each with its reason and the way out; nothing is changed, so the next launch says the same."""
    save_batch(tmp_path, 1).unlink()
    path = save_batch(tmp_path, 2)
    path.write_bytes(b"\0" * path.stat().st_size)
    before = sorted(tmp_path.rglob("*"))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"none of them is good.*ba2\.pt.*ba1\.pt.*load_path"):
            choose([RunPlace(Catalog(tmp_path))], "run")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("manifests", ["flipped", "of another", "gone", "whole"])
@pytest.mark.parametrize("data", ["whole", "cut", "zeros"])
def test_checkpoints_that_cannot_be_read_are_no_reason_to_start_over(tmp_path: Path, manifests: str, data: str) -> None:
    """Whatever was damaged of all: the error names each, nothing is changed, and a good one is resumed from."""
    for batch in (1, 2):
        path = save_batch(tmp_path, batch)
        contents = path.read_bytes()
        path.write_bytes({"whole": contents, "cut": contents[:-1], "zeros": bytes(len(contents))}[data])
        record = tmp_path / ".manifest" / f"{path.name}.json"
        text = record.read_bytes()
        record.write_bytes({"flipped": b"X" + text[1:], "of another": text.replace(b"ba", b"bb")}.get(manifests, text))
        if manifests == "gone":
            record.unlink()
    if manifests in ("gone", "whole") and data == "whole":
        assert choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run").place == tmp_path / "ba2.pt"
        return
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"none of them is good.*ba[12]\.pt.*ba[12]\.pt.*load_path"):
            choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    good = save_batch(tmp_path, 0)
    assert choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run").place == good
    assert {path.name for path in tmp_path.glob("ba*")} == {"ba0.pt", "ba1.pt.damaged", "ba2.pt.damaged"}
    assert (tmp_path / "latest.pt").readlink() == Path("ba0.pt")


def test_what_cannot_be_read_and_is_not_of_the_run_is_no_damage(tmp_path: Path) -> None:
    """Manifests of names that the run does not write, of others or planted, keep no run from its beginning."""
    save_batch(tmp_path, 1).rename(tmp_path / "copy.pt")
    (tmp_path / ".manifest" / "ba1.pt.json").rename(tmp_path / ".manifest" / "copy.pt.json")
    (tmp_path / ".manifest" / "other.json").write_text("{")
    assert choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run").place is None


def test_a_whole_one_comes_before_newer_parts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was saved without its optimizer would start that afresh: it is taken only where there is nothing else."""
    part = save_batch(tmp_path, 2, ignore_keys=["state/optimizers"])
    assert choose([RunPlace(Catalog(tmp_path))], "run").place == part
    assert "saved without ('state/optimizers',)" in caplog.text
    whole = save_batch(tmp_path, 1)
    assert choose([RunPlace(Catalog(tmp_path))], "run").place == whole
    whole.unlink()
    assert choose([RunPlace(Catalog(tmp_path))], "run").place == part


# ── without a manifest ───────────────────────────────────────────────────────────────────────────────────────────────
def unlisted_batch(folder: Path, batch: int, **arguments: Any) -> Path:
    """A checkpoint whose manifest was lost."""
    path = save_batch(folder, batch, **arguments)
    (folder / ".manifest" / f"{path.name}.json").unlink()
    return path


def test_one_that_lost_its_manifest_is_taken_unverified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is the newest and whole: it is taken, and the log says that only its own checksums agree."""
    save_batch(tmp_path, 1)
    path = unlisted_batch(tmp_path, 2)
    assert choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run").place == path
    assert "its own checksums only" in caplog.text
    assert choose([RunPlace(Catalog(tmp_path))], "run").place == tmp_path / "ba1.pt"


def test_one_without_a_manifest_never_comes_before_an_attempt_that_began(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing says whether it was abandoned: what began here is resumed, and nothing else where that is damaged."""
    unlisted_batch(tmp_path, 50)
    catalog = Catalog(tmp_path)
    place = RunPlace(catalog, TEMPLATE)
    state = new_state(4, value=4.0)
    state.lineage = begin_attempt([catalog], [], "run")
    path = save(state, catalog=catalog, template=TEMPLATE)
    choice = choose([place], "run")
    assert (choice.place, choice.lineage) == (path, state.lineage)
    assert "skipped: 'ba50.pt'" in caplog.text
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(CheckpointError, match=r"none of them is good.*ba4\.pt"):
        choose([place], "run")


def test_those_of_a_run_that_lost_all_manifests_are_resumed_from(tmp_path: Path) -> None:
    """Whatever attempt they were of: the newest by its contents, and what is saved after it comes before it."""
    catalog = Catalog(tmp_path)
    for batch in (1, 2):
        state = new_state(batch, value=float(batch))
        state.lineage = Lineage(7, "lost")
        save(state, catalog=catalog, template=TEMPLATE)
    shutil.rmtree(tmp_path / ".manifest")
    choice = choose([RunPlace(catalog, TEMPLATE)], "run")
    assert choice.place == tmp_path / "ba2.pt"
    state = new_state(3, value=3.0)
    state.lineage = choice.lineage
    path = save(state, catalog=catalog, template=TEMPLATE)
    assert choose([RunPlace(catalog, TEMPLATE)], "run") == (path, choice.lineage)


@pytest.mark.parametrize("damage", ["flipped", "shorter", "foreign"])
def test_a_damaged_one_without_a_manifest_is_passed_over(tmp_path: Path, damage: str) -> None:
    """It is set aside, so that the run can write that name again."""
    good, bad = save_batch(tmp_path, 1), unlisted_batch(tmp_path, 2)
    data = bytearray(bad.read_bytes())
    data[data.index(struct.pack("<f", 2.0))] ^= 1  # a weight
    bad.write_bytes({"flipped": bytes(data), "shorter": bytes(data[:-30]), "foreign": b"something else"}[damage])
    assert choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run").place == good
    assert not bad.exists()
    assert bad.with_name("ba2.pt.damaged").exists()


def test_what_is_not_of_the_run_is_left_alone(tmp_path: Path) -> None:
    """Of another run, weights alone, or something that torch has saved: it is neither taken nor moved."""
    good = save_batch(tmp_path, 1)
    left = [unlisted_batch(tmp_path, 2, run_name="other"), unlisted_batch(tmp_path, 3, weights_only=True)]
    left.append(tmp_path / "ba4.pt")
    torch.save({"state": {"some": "thing"}}, left[-1])
    assert choose([RunPlace(Catalog(tmp_path), TEMPLATE)], "run").place == good
    assert all(path.exists() for path in left)
