"""A kill at any instruction leaves the newest committed checkpoint readable and found."""

from __future__ import annotations

import shutil
from pathlib import Path

import kill_points
import pytest
from forked import run_forked
from parts import save_batch, temporaries, tree, value_in

from composerlite.checkpoint import Catalog, read_checkpoint
from composerlite.checkpoint.load.resume import RunPlace, choose
from composerlite.storage import StagedFile

Attempts = list[tuple[Path, str]]
"""The folders in which a process died, and where it did."""


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Attempts]:
    """What the killed processes left, by scenario; the last attempt at each step survived."""
    root = tmp_path_factory.mktemp("kills")
    done = run_forked(kill_points.main, str(root), cwd=root)
    assert done.returncode == 0, done.stderr
    kills: dict[str, Attempts] = {}
    for line in done.stdout.splitlines():
        what, name, how = line.split("\t")
        kills.setdefault(what, []).append((root / what / name, how))
    return kills


@pytest.fixture(params=["first", "next", "overwrite", "recover"])
def what(request: pytest.FixtureRequest) -> str:
    """The scenario: what was being done."""
    return request.param


@pytest.fixture
def killed(kills: dict[str, Attempts], what: str, tmp_path: Path) -> Attempts:
    """The attempts of the scenario, as copies that a test may change."""
    copies: Attempts = []
    for folder, how in kills[what]:
        if folder.exists():
            shutil.copytree(folder, tmp_path / folder.name, symlinks=True)
        copies.append((tmp_path / folder.name, how))
    return copies


def test_the_kills_hit_every_part_of_a_save(killed: Attempts, what: str) -> None:
    """There are kills before the data is named, between data and manifest, before the link, and none at last."""
    where = "\n".join(how for _, how in killed)
    assert "not at all" in where
    if what == "recover":
        assert (where.count("os.rename"), where.count("os.remove")) == (1, 2)
    else:
        assert where.count("os.rename") == 3 + (what == "next")  # data, manifest, link; what is deleted
        assert where.count("at byte") == 6
    if what == "next":
        assert where.count("os.remove") >= 2


def test_the_latest_can_be_read_at_once(killed: Attempts, what: str) -> None:
    """Nobody has cleaned up yet: ``latest`` is there if there was a checkpoint, and is the old or the new one whole."""
    for folder, how in killed:
        if what == "first" and not (folder / "latest.pt").is_symlink():
            continue
        contents = read_checkpoint(folder / "latest.pt")
        assert value_in(contents) == contents["state"]["timestamp"]["Timestamp"]["batch"], how
        assert value_in(contents) in ((3,) if what in ("first", "recover") else (2, 3)), how


def test_the_link_points_to_what_is_committed(killed: Attempts, what: str) -> None:
    """Never to a file without a manifest."""
    for folder, how in killed:
        if (link := folder / "latest.pt").is_symlink():
            assert Catalog(folder).manifest_of(str(link.readlink())) is not None, how


def test_a_run_goes_on_from_the_newest(killed: Attempts, what: str) -> None:
    """After what the next start of the run does: the old or the new checkpoint is found, and everything is sound."""
    for folder, how in killed:
        catalog = Catalog(folder)
        catalog.recover()
        for manifest in catalog.manifests():
            catalog.verify(manifest)
        found = choose([RunPlace(catalog)], "run").place
        if what == "first" and found is None:
            continue
        assert found is not None, how
        assert value_in(read_checkpoint(found)) in ((3,) if what in ("first", "recover") else (2, 3)), how


def test_nothing_is_left_over(killed: Attempts, what: str) -> None:
    """The next start completes or removes what was unfinished. What is there has a manifest."""
    for folder, how in killed:
        catalog = Catalog(folder)
        catalog.recover()
        assert temporaries(folder) == [], how
        assert set(catalog.files()) == {manifest.name for manifest in catalog.manifests()}, how


def test_no_checkpoint_is_deleted_before_a_newer_one_is_committed(kills: dict[str, Attempts]) -> None:
    """With two to keep there are two at every moment."""
    assert {len(Catalog(folder).manifests()) for folder, _ in kills["next"]} == {2, 3}


def test_a_commit_that_had_named_its_data_is_completed(killed: Attempts, what: str) -> None:
    """The new checkpoint is whole then: it is not thrown away for want of its manifest."""
    named = 0
    for folder, how in killed:
        catalog = Catalog(folder)
        (data,) = {"first": ["ba3.pt"], "next": ["ba3.pt"]}.get(what, ["fixed.pt"])
        if (folder / data).exists() and value_in(read_checkpoint(folder / data)) == 3:
            named += 1
            catalog.recover()
            assert 3 in [manifest.batch for manifest in catalog.manifests()], how
    assert named >= 2


# ── states that are made by hand ─────────────────────────────────────────────────────────────────────────────────────
def test_what_a_live_process_writes_is_left_alone(tmp_path: Path) -> None:
    """Another run that starts in the folder: the save goes on, and is committed."""
    save_batch(tmp_path, 1)
    (manifest,) = Catalog(tmp_path).manifests()
    with StagedFile(tmp_path / "live.pt") as data:
        data.file.write(b"live")
        data.flush()
        with StagedFile(tmp_path / ".manifest" / "live.pt.json") as intention:
            intention.file.write(manifest.to_json())
            intention.flush()
            before = tree(tmp_path)
            Catalog(tmp_path).recover()
            assert tree(tmp_path) == before
            data.publish()
            Catalog(tmp_path).recover()
            intention.publish()
    assert (tmp_path / "live.pt").read_bytes() == b"live"
    assert temporaries(tmp_path) == []


@pytest.mark.parametrize("damage", ["data gone", "data damaged", "manifest cut off", "manifest edited"])
def test_a_commit_that_is_not_whole_is_forgotten(tmp_path: Path, damage: str) -> None:
    """Its intention goes, no manifest appears, and what was committed before stays."""
    save_batch(tmp_path, 1)
    before = tree(tmp_path)
    data = save_batch(tmp_path, 2, latest=None)
    left = (tmp_path / ".manifest" / "ba2.pt.json").rename(tmp_path / ".manifest" / ".ba2.pt.json.tmp-0123456789abcdef")
    if damage == "data gone":
        data.unlink()
    elif damage == "data damaged":
        data.write_bytes(b"damaged")
    elif damage == "manifest cut off":
        left.write_bytes(left.read_bytes()[:100])
    else:
        left.write_bytes(left.read_bytes().replace(b'"run"', b'"other"'))
    Catalog(tmp_path).recover()
    data.unlink(missing_ok=True)
    assert tree(tmp_path) == before


def test_recovering_again_changes_nothing(tmp_path: Path) -> None:
    """Nor does it touch files of others, hidden ones included."""
    save_batch(tmp_path, 1)
    for name in (".hidden", "notes.txt", ".x.tmp-1"):
        (tmp_path / name).write_text("mine")
    before = tree(tmp_path)
    for _ in range(2):
        Catalog(tmp_path).recover()
        assert tree(tmp_path) == before
