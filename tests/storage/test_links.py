"""A link points to the old target or to the new one, at every moment."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from composerlite.storage.disk.files import abandoned_temporaries, staged_symlink


def replace_symlink(link: Path, target: str) -> None:
    with staged_symlink(link, target):
        pass


WATCHER = """
import os, sys
link = sys.argv[1]
print("watching", flush=True)
changes, last = 0, None
while changes < 100:
    target = os.readlink(link)
    assert target in ("a", "b"), target
    changes += target != last
    last = target
"""


def test_a_link_is_never_absent_while_it_is_replaced(quick_folder: Path) -> None:
    """A process that looks at it all the time finds it through a thousand changes, with one target or the other."""
    link = quick_folder / "latest"
    replace_symlink(link, "a")
    command = [sys.executable, "-c", WATCHER, str(link)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "watching\n"
        number = 0
        while number < 1000 or watcher.poll() is None:
            number += 1
            replace_symlink(link, "ab"[number % 2])
        _, errors = watcher.communicate()
    assert watcher.returncode == 0, errors
    assert [path.name for path in quick_folder.iterdir()] == ["latest"]


def test_a_link_takes_the_place_of_a_broken_one(tmp_path: Path) -> None:
    """It does not matter where the old link pointed."""
    (tmp_path / "latest").symlink_to("gone")
    (tmp_path / "new").touch()
    replace_symlink(tmp_path / "latest", "new")
    assert (tmp_path / "latest").resolve() == (tmp_path / "new").resolve()


def test_a_link_that_cannot_be_placed_leaves_nothing(tmp_path: Path) -> None:
    """A folder is in the way: an error, and no temporary link."""
    (tmp_path / "latest").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_symlink(tmp_path / "latest", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_a_link_that_was_left_behind_is_abandoned(tmp_path: Path) -> None:
    """A kill between making a link and giving it its name: it is found and can be removed."""
    temporary = tmp_path / ".latest.tmp-0123456789abcdef"
    temporary.symlink_to("new")
    assert list(abandoned_temporaries(tmp_path)) == [temporary]


def test_a_sweep_never_makes_a_live_link_fail(quick_folder: Path) -> None:
    """Another run that starts in the folder, and removes what was abandoned there, does not disturb this one."""
    done = threading.Event()

    def sweep() -> None:
        while not done.is_set():
            for temporary in abandoned_temporaries(quick_folder):
                temporary.unlink(missing_ok=True)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for number in range(500):
            replace_symlink(quick_folder / "latest", str(number))
            assert (quick_folder / "latest").readlink() == Path(str(number))
    finally:
        done.set()
        sweeper.join()
