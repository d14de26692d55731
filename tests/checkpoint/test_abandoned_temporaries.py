"""What killed processes leave where no trainer starts again: ``gc`` removes it, and nothing that lives."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint.kill_points import kill_at_every_step
from checkpoint.parts import tree
from forked import run_forked

from composerlite.checkpoint import Checkpointer, save_state_dict
from composerlite.cli.app import app

TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}")


def kill_writing(root: str) -> None:
    """Write a file into a step, killed at every step."""
    torch.set_num_threads(1)
    Checkpointer().save(Path(root, "template", "step1"), torch.nn.Linear(1, 1), {})
    checkpointer = Checkpointer(save_overwrite=True)
    kill_at_every_step(
        Path(root),
        lambda folder: checkpointer.write_file(folder / "step1", "notes.txt", "mine"),
        template=Path(root, "template"),
    )


def test_a_kill_while_a_file_is_written_into_a_step_leaves_the_step(tmp_path: Path) -> None:
    """The file is there or not, and ``gc`` leaves nothing else of it."""
    done = run_forked(kill_writing, str(tmp_path), cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    before, found = set(tree(tmp_path / "template")), list[set[str]]()
    for line in done.stdout.splitlines():
        folder = tmp_path / line.partition("\t")[0]
        collect(str(folder))
        found.append(set(tree(folder)) - before)
        assert Checkpointer().load(folder / "step1", torch.nn.Linear(1, 1)) == {}
    assert found[0] == set()
    assert found[-1] == {"step1/notes.txt"}
    assert all(names in (found[0], found[-1]) for names in found)


def collect(folder: str) -> None:
    """``composerlite checkpoint gc``."""
    app(["checkpoint", "gc", folder], standalone_mode=False)


WRITER = """
import sys
from collections.abc import Callable
from pathlib import Path
from composerlite.checkpoint.place.directory import SaveHandle, ShardedDirectory
from composerlite.storage import StagedFile
from composerlite.storage.disk.files import pinned_file
folder = Path(sys.argv[1])
directory = ShardedDirectory.of(folder / "living")
handle = SaveHandle(overwrite=False)
directory.begin(handle)
names = folder / "notes.txt", folder / "sub" / "living.json"
with pinned_file(folder / "data", folder), StagedFile(names[0]) as staged, StagedFile(names[1]) as other:
    for file in (staged.file, other.file):
        file.write(b"{}")
        file.flush()
    print("ready", flush=True)
    sys.stdin.read()
"""


COLLECT = """
import sys
from composerlite.cli.app import app
app(["checkpoint", "gc", sys.argv[1]], standalone_mode=False)
"""


def left_by_a_writer(folder: Path, *, end: bool, environment: dict[str, str] | None = None) -> list[Path]:
    """The four temporaries of a process that writes, after ``gc``; the process is killed before that, or at the end."""
    (folder / "sub").mkdir(parents=True)
    (folder / "data").write_bytes(b"data")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        found = [path for path in folder.rglob(".*") if TEMPORARY.search(path.name)]
        if end:
            writer.kill()
            writer.wait(60)
        collect_apart(folder, environment)
        found = [path for path in found if path.exists()]
        writer.kill()
    return found


def collect_apart(folder: Path, environment: dict[str, str] | None) -> None:
    """Run ``gc`` in a process of its own; a new interpreter if it is to load another library."""
    if environment is None:
        done = run_forked(collect, str(folder), cwd=folder)
        assert done.returncode == 0, done.stderr
        return
    command = [sys.executable, "-c", COLLECT, str(folder)]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, **environment})


def test_only_what_is_dead_is_removed(tmp_path: Path) -> None:
    """A process that writes keeps all that it writes to; when it is killed ``gc`` removes all."""
    assert len(left_by_a_writer(tmp_path / "living", end=False)) == 4
    assert left_by_a_writer(tmp_path / "dead", end=True) == []


def test_what_only_looks_like_a_temporary_harms_no_save(tmp_path: Path) -> None:
    """A pipe that nobody opens, a folder, a short name, a file of another user: saves and ``gc`` end, and they stay."""
    folder = tmp_path / "folder"
    (folder / "step1").mkdir(parents=True)
    for place in (folder, folder / "step1"):
        os.mkfifo(place / f".pipe.tmp-{'0' * 16}")
        (place / f".folder.tmp-{'1' * 16}").mkdir()
        (place / f".short.tmp-{'4' * 15}").touch()
    if os.geteuid() == 0:
        other = folder / f".theirs.tmp-{'5' * 16}"
        other.touch()
        os.chown(other, 12345, 12345)
    before = set(folder.rglob("*"))
    save_state_dict(folder / "a", {"x": torch.ones(3)})
    Checkpointer().save(folder / "step1", torch.nn.Linear(1, 1), {})
    assert before <= set(folder.rglob("*"))
    collect(str(folder))
    left = before - set(folder.rglob("*"))
    assert {path.name for path in left} <= {f".theirs.tmp-{'5' * 16}"}, "root may remove that of another user"


NO_LOCKS = """
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int flock(int file, int how) { errno = EOPNOTSUPP; return -1; }
int clock_gettime(clockid_t clock, struct timespec *now) {
    int done = syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += atol(getenv("LATER"));
    return done;
}
"""


def test_without_locks_age_tells_what_is_dead(tmp_path: Path) -> None:
    """Where a file system has none: what somebody wrote to lately stays, and what is more than a week old goes."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "without.c").write_text(NO_LOCKS)
    library = tmp_path / "without.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "without.c")], check=True)
    folder = tmp_path / "saves"

    def later(days: float) -> dict[str, str]:
        return {"LD_PRELOAD": str(library), "LATER": str(int(days * 24 * 3600))}

    left = left_by_a_writer(folder, end=True, environment=later(0))
    assert len(left) == 4, "nobody knows that it is dead"
    collect_apart(folder, later(6.9))
    assert [path for path in left if path.exists()] == left
    collect_apart(folder, later(7.1))
    assert [path for path in left if path.exists()] == []
