"""A folder of checkpoints holds files of others, too: none of them is changed, and none stops a run."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from test_candidates import TEMPLATE, save_batch

from composerlite.checkpoint import Catalog
from composerlite.checkpoint.load.candidates import RunPlace
from composerlite.checkpoint.load.resume import choose
from composerlite.checkpoint.place.commit import delete_checkpoint
from composerlite.checkpoint.place.place import Folder
from composerlite.checkpoint.tools.surveying import place_at, survey
from composerlite.errors import CheckpointError

LATEST = "latest.pt"


def resumed(folder: Path) -> object:
    return choose([RunPlace(Catalog(folder), TEMPLATE, LATEST)], "run").path


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def _link(path: Path) -> None:
    path.symlink_to("ba1.pt")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _text(path: Path) -> None:
    path.write_text("[" * 100_000)


ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "socket": _socket,
    "link": _link,
    "loop": _loop,
    "deep": _text,
    "empty": Path.touch,
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    "name", ["best/.metadata", "best/model.safetensors.index.json", ".ba1.pt.tmp-0123456789abcdef", "ba9.pt"]
)
def test_what_is_no_record_does_not_stop_a_run(kind: str, name: str, tmp_path: Path) -> None:
    """A pipe (which would keep a reader waiting for ever), a folder, a socket, a link or nonsense where a record, a
    temporary or a checkpoint may be: the run resumes, and listing, retention and cleaning up go on, too."""
    path = save_batch(tmp_path, 1)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    ODD[kind](tmp_path / name)
    with Folder(tmp_path) as place:
        place.sweep(timedelta(0))
    assert resumed(tmp_path) == path
    assert [manifest.name for manifest in Catalog(tmp_path).manifests()] == ["ba1.pt"]
    with place_at(str(tmp_path)) as place:
        assert "ba1.pt" in [found.name for found in survey(place)]


def test_a_link_of_somebody_else_is_neither_removed_nor_turned(tmp_path: Path) -> None:
    """A data set that is not mounted, the python of an environment, the latest of another saver: all stay as they are,
    whether there is a checkpoint or none."""
    links = {
        "data": "/not/mounted/imagenet",
        "venv/bin/python": "/gone/python3",
        "latest-other.pt": "epoch3.pt",
        "other/latest.pt": "ba1.pt",
        LATEST: "/elsewhere/ba1.pt",
    }
    for name, target in links.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(target)
    assert resumed(tmp_path) is None
    path = save_batch(tmp_path, 1, latest=None)
    assert resumed(tmp_path) == path
    assert {name: str((tmp_path / name).readlink()) for name in links} == links


def _snapshot(folder: Path, names: list[str]) -> list[object]:
    def one(path: Path) -> object:
        status = path.lstat()
        content = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        return path.name, status.st_ino, status.st_mode, content

    return [one(folder / name) for name in names]


def _planted(draw: random.Random, folder: Path, outside: Path) -> list[str]:
    """Files, links, pipes and folders of others, and their names."""
    names: list[str] = []
    for number in range(draw.randrange(1, 8)):
        parent = draw.choice(["", "notes/", ".hidden/", "ba1/", "venv/bin/"])
        stem = draw.choice(
            ["data", "best.pt", "latest-mine.pt", "x.json", "ba1.pt.bak", "ep1.pt", ".x.saving-1", "run.log"]
        )
        path = folder / f"{parent}{number}-{stem}"
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = draw.randrange(5)
        if kind == 0:
            path.write_bytes(draw.randbytes(10))
        elif kind == 1:
            path.symlink_to(draw.choice([outside / "file", outside, Path("ba1.pt"), Path("/gone"), Path("../up")]))
        elif kind == 2:
            os.mkfifo(path)
        elif kind == 3:
            path.mkdir()
            (path / "kept").write_text("kept")
        else:
            path.write_bytes((folder / "ba1.pt").read_bytes())
        names.append(str(path.relative_to(folder)))
    return names


def _check_folders(root: Path, seeds: range) -> None:
    outside = root / "outside"
    outside.mkdir()
    (outside / "file").write_text("outside")
    for seed in seeds:
        draw = random.Random(seed)
        folder = root / str(seed)
        folder.mkdir()
        template = root / "template"
        if not template.exists():
            for batch in (1, 2, 3):
                save_batch(template, batch)
        shutil.copytree(template, folder, symlinks=True, dirs_exist_ok=True)
        names = _planted(draw, folder, outside)
        before = _snapshot(folder, names)
        for batch in (1, 2, 3):
            path = folder / f"ba{batch}.pt"
            if draw.random() < 0.3:
                path.write_bytes(path.read_bytes()[: draw.randrange(100)])
            elif draw.random() < 0.2:
                path.unlink()
        catalog = Catalog(folder)
        catalog.place.sweep(timedelta(0))
        with contextlib.suppress(CheckpointError):  # all are damaged
            resumed(folder)
        for manifest in catalog.manifests():
            if draw.random() < 0.5:
                delete_checkpoint(catalog.place, manifest)
        with place_at(str(folder)) as place:
            survey(place)
        assert _snapshot(folder, names) == before, seed
        assert (outside / "file").read_text() == "outside"
        assert len(list(outside.iterdir())) == 1
        shutil.rmtree(folder)


def test_no_file_of_others_is_ever_changed_or_removed(tmp_path: Path) -> None:
    """In 200 folders with planted files, links, pipes and folders, and with damaged checkpoints: resumes, sweeps,
    quarantine, retention and listing leave all that the run did not make, inside and outside."""
    _check_folders(tmp_path, range(200))


@pytest.mark.soak
def test_no_file_of_others_is_ever_changed_or_removed_in_more_folders(tmp_path: Path) -> None:
    """The same in 1,000 others."""
    _check_folders(tmp_path, range(1000, 2000))
