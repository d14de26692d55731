"""A kill at any instruction leaves the newest committed checkpoint readable and found."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from kill_points import attempt, die_at_size, kill_at_every_step
from parts import new_state, save_batch, temporaries, tree, value_in

from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import Catalog, read_checkpoint
from composerlite.checkpoint.load.resume import RunPlace, choose
from composerlite.core import Logger, State
from composerlite.storage import StagedFile


# ── what is done ─────────────────────────────────────────────────────────────────────────────────────────────────────
def two_batches(folder: Path) -> None:
    """A run that keeps two checkpoints and has saved both."""
    for batch in (1, 2):
        save_batch(folder, batch)


def a_fixed_name(folder: Path) -> None:
    """A run that saves to one name."""
    save_batch(folder, 2, template="fixed.pt", overwrite=True)


def saver(folder: Path, **arguments: Any) -> tuple[CheckpointSaver, State]:
    """A saver at batch 3 of the run."""
    state = new_state(3, value=3.0)
    saver = CheckpointSaver(folder=folder, latest_filename="latest.pt", **arguments)
    saver.init(state, Logger(state))
    return saver, state


def first(folder: Path) -> None:
    """The first save of a run."""
    new, state = saver(folder, filename="ba{batch}.pt")
    new.save(state)


def next_with_retention(folder: Path) -> None:
    """A save after which the oldest checkpoint goes."""
    new, state = saver(folder, filename="ba{batch}.pt", num_checkpoints_to_keep=2)
    new.save(state)


def overwrite(folder: Path) -> None:
    """A save in place of an older checkpoint of the same name."""
    new, state = saver(folder, filename="fixed.pt", overwrite=True)
    new.save(state)


def recover(folder: Path) -> None:
    """What a run does with the remains of a killed one."""
    Catalog(folder).recover()


def killed_commit(folder: Path) -> None:
    """The remains of a run that was killed after its data got its name and before its manifest did."""
    a_fixed_name(folder)
    (manifest,) = (folder / ".manifest").iterdir()
    old = manifest.read_bytes()
    save_batch(folder, 3, template="fixed.pt", overwrite=True)
    manifest.rename(folder / ".manifest" / ".fixed.pt.json.tmp-0123456789abcdef")
    manifest.write_bytes(old)
    (folder / ".unrelated.pt.tmp-0123456789abcdef").write_bytes(b"half of it")
    (folder / ".latest.pt.tmp-0123456789abcdef").symlink_to("fixed.pt")


SCENARIOS: dict[str, tuple[Callable[[Path], None] | None, Callable[[Path], None]]] = {
    "first": (None, first),
    "next": (two_batches, next_with_retention),
    "overwrite": (a_fixed_name, overwrite),
    "recover": (killed_commit, recover),
}
SIZES = (0, 64, 500, 1000, 4000, 8000)


def killed_runs(root: str) -> None:
    """Kill each scenario at every step, and while files grow beyond each size."""
    torch.set_num_threads(1)  # processes are forked
    new_state()  # torch imports half of itself for the first optimizer: not in every process
    for what, (prepare, act) in SCENARIOS.items():
        sys.stdout.write(f"{what}\n")
        template = None if prepare is None else Path(root, what, "template")
        if prepare is not None and template is not None:
            prepare(template)
        kill_at_every_step(Path(root, what), act, template=template)
        for size_bytes in () if what == "recover" else SIZES:
            folder = Path(root, what, f"size{size_bytes}")
            if template is not None:
                shutil.copytree(template, folder, symlinks=True)
            code, how = attempt(act, folder, lambda _, size_bytes=size_bytes: die_at_size(size_bytes))  # type: ignore[misc]
            assert code == -signal.SIGXFSZ, (folder, code, how)
            sys.stdout.write(f"{folder.name}\tat byte {size_bytes}\n")


# ── what there is then ───────────────────────────────────────────────────────────────────────────────────────────────
Attempts = list[tuple[Path, str]]
"""The folders in which a process died, and where it did."""


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Attempts]:
    """What the killed processes left, by scenario; the last attempt at each step survived."""
    root = tmp_path_factory.mktemp("kills")
    done = run_forked(killed_runs, str(root), cwd=root)
    assert done.returncode == 0, done.stderr
    kills: dict[str, Attempts] = {}
    what = ""
    for line in done.stdout.splitlines():
        name, _, how = line.partition("\t")
        if name in SCENARIOS:
            kills[what := name] = []
        else:
            kills[what].append((root / what / name, how))
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
    assert [how for _, how in killed].count("") == 1, "the last one is not killed"
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
