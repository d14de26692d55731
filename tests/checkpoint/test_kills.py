"""A kill at any instruction leaves the newest committed checkpoint readable and found."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from kill_points import attempt, die_at_size, kill_at_every_step, refuse_new_names
from parts import new_state, save_batch, temporaries, tree, value_in

from composerlite.callbacks import CheckpointSaver
from composerlite.checkpoint import Catalog, read_checkpoint
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.checkpoint.place.place import Folder
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


def first_by_link(folder: Path) -> None:
    """The same on a file system that renames to any name only: the file gets its name as a hard link."""
    refuse_new_names()
    first(folder)


def next_with_retention(folder: Path) -> None:
    """A save after which the oldest checkpoint goes."""
    new, state = saver(folder, filename="ba{batch}.pt", num_checkpoints_to_keep=2)
    new.save(state)


def overwrite(folder: Path) -> None:
    """A save in place of an older checkpoint of the same name."""
    new, state = saver(folder, filename="fixed.pt", overwrite=True)
    new.save(state)


def clean_up(folder: Path) -> None:
    """Do what a run does with the remains of a killed one when it starts."""
    with Folder(folder) as place:
        place.sweep(timedelta(0))


def killed_saves(folder: Path) -> None:
    """The remains of runs that were killed while they saved: a whole file and half of one, and a link."""
    a_fixed_name(folder)
    whole = save_batch(folder, 3, template="whole.pt", latest=None)
    whole.rename(folder / ".fixed.pt.tmp-0123456789abcdef")
    (folder / ".unrelated.pt.tmp-0123456789abcdef").write_bytes(b"half of it")
    (folder / ".latest.pt.tmp-0123456789abcdef").symlink_to("fixed.pt")


SCENARIOS: dict[str, tuple[Callable[[Path], None] | None, Callable[[Path], None]]] = {
    "first": (None, first),
    "first by link": (None, first_by_link),
    "next": (two_batches, next_with_retention),
    "overwrite": (a_fixed_name, overwrite),
    "clean up": (killed_saves, clean_up),
}
SIZES = (0, 64, 500, 1000, 4000, 8000, 14_500, 16_000)
"""Of the file at which a process is killed: in its data, in its directory, and in its record."""


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
        for size_bytes in () if what == "clean up" else SIZES:
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


@pytest.fixture(params=["first", "first by link", "next", "overwrite", "clean up"])
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
    """There are kills while the file is written, before its rename, before that of the link, and none at last."""
    where = "\n".join(how for _, how in killed)
    assert [how for _, how in killed].count("") == 1, "the last one is not killed"
    if what == "clean up":
        assert (where.count("os.rename"), where.count("os.remove")) == (0, 3)
    else:
        assert where.count("os.rename") == 2  # the file and the link
        assert where.count("at byte") == len(SIZES)
        assert where.count("os.remove") == (what in ("next", "first by link"))
        assert where.count("os.link") == (what == "first by link")


VALUES = {"first": (3,), "first by link": (3,), "next": (2, 3), "overwrite": (2, 3), "clean up": (2,)}
"""The batches of the newest checkpoint after a kill, by scenario: the old one or the new one."""


def test_the_latest_can_be_read_at_once(killed: Attempts, what: str) -> None:
    """Nobody has cleaned up yet: ``latest`` is there if there was a checkpoint, and is the old or the new one whole."""
    for folder, how in killed:
        if what.startswith("first") and not (folder / "latest.pt").is_symlink():
            continue
        contents = read_checkpoint(folder / "latest.pt")
        assert value_in(contents) == contents["state"]["timestamp"]["Timestamp"]["batch"], how
        assert value_in(contents) in VALUES[what], how


def test_the_link_points_to_what_is_committed(killed: Attempts, what: str) -> None:
    """Never to a file without a record, and never to nothing."""
    for folder, how in killed:
        if (link := folder / "latest.pt").is_symlink():
            assert str(link.readlink()) in [manifest.name for manifest in Catalog(folder).manifests()], how


def test_a_run_goes_on_from_the_newest(killed: Attempts, what: str) -> None:
    """After what the next start of the run does: the old or the new checkpoint is found, and everything is sound."""
    for folder, how in killed:
        catalog = Catalog(folder)
        clean_up(folder)
        for manifest in catalog.manifests():
            catalog.verify(manifest)
        found = choose([RunPlace(catalog)], "run").path
        if what.startswith("first") and found is None:
            continue
        assert found is not None, how
        assert value_in(read_checkpoint(found)) in VALUES[what], how


def test_nothing_is_left_over(killed: Attempts, what: str) -> None:
    """The next start removes unfinished files. Every other file is a checkpoint."""
    for folder, how in killed:
        catalog = Catalog(folder)
        clean_up(folder)
        assert temporaries(folder) == [], how
        assert set(catalog.files()) == {manifest.name for manifest in catalog.manifests()}, how


def test_no_checkpoint_is_deleted_before_a_newer_one_is_committed(kills: dict[str, Attempts]) -> None:
    """With two to keep there are two at every moment."""
    assert {len(Catalog(folder).manifests()) for folder, _ in kills["next"]} == {2, 3}


@pytest.mark.parametrize("what", ["first", "first by link", "next", "overwrite"])
def test_a_file_that_has_its_name_is_committed(killed: Attempts, what: str) -> None:
    """Its rename is the commit: the checkpoint is listed at once, whole, with no start in between."""
    named = 0
    for folder, how in killed:
        path = folder / ("fixed.pt" if what == "overwrite" else "ba3.pt")
        if path.exists() and value_in(read_checkpoint(path)) == 3:
            named += 1
            manifest = next(one for one in Catalog(folder).manifests() if one.name == path.name)
            assert manifest.batch == 3, how
            Catalog(folder).verify(manifest)
    assert named >= 2


# ── states that are made by hand ─────────────────────────────────────────────────────────────────────────────────────
def test_what_a_live_process_writes_is_left_alone(tmp_path: Path) -> None:
    """Another run that starts in the folder: the save goes on, and is committed."""
    content = save_batch(tmp_path / "elsewhere", 1, template="live.pt").read_bytes()
    folder = tmp_path / "here"
    save_batch(folder, 2)
    with StagedFile(folder / "live.pt") as data:
        data.file.write(content)
        data.flush()
        before = tree(folder)
        clean_up(folder)
        assert tree(folder) == before
        data.publish()
    clean_up(folder)
    assert [manifest.name for manifest in Catalog(folder).manifests()] == ["live.pt", "ba2.pt"]
    assert temporaries(folder) == []


def test_cleaning_up_again_changes_nothing(tmp_path: Path) -> None:
    """Nor does it touch files of others, hidden ones included."""
    save_batch(tmp_path, 1)
    for name in (".hidden", "notes.txt", ".x.tmp-1"):
        (tmp_path / name).write_text("mine")
    before = tree(tmp_path)
    for _ in range(2):
        clean_up(tmp_path)
        assert tree(tmp_path) == before
