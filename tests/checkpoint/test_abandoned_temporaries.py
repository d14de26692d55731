"""What killed processes leave where no trainer starts again: the next save there removes it, and nothing that lives."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint.kill_points import kill_at_every_step, refuse_exchange
from forked import run_forked

from composerlite.checkpoint import Catalog, Checkpointer, save_state_dict
from composerlite.checkpoint.tools.copying import copy
from composerlite.checkpoint.tools.pointing import place_at, target_at
from composerlite.checkpoint.tools.surveying import survey
from composerlite.errors import CheckpointExistsError

TEMPORARY = re.compile(r"\.(tmp|saving)-[0-9a-f]{16}")


def save(path: Path, value: float = 1.0) -> None:
    """A small state dict."""
    save_state_dict(path, {"x": torch.full((10,), value)}, save_overwrite=True)


def save_step(path: Path, value: float) -> None:
    """A step of a Checkpointer."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, value)
    Checkpointer(save_overwrite=True).save(path, model, {"value": value})


def write_beside(path: Path, value: float) -> None:
    """A file in a step, or the step if there is none yet."""
    if path.exists():
        Checkpointer(save_overwrite=True).write_file(path, "notes.txt", str(value))
    else:
        save_step(path, value)


KINDS: dict[str, Callable[[Path, float], None]] = {"function": save, "checkpointer": save_step, "file": write_beside}


def kill_replacing(root: str, kind: str) -> None:
    """Replace ``step1``, killed at every step."""
    torch.set_num_threads(1)
    KINDS[kind](Path(root, "template", "step1"), 1.0)
    kill_at_every_step(Path(root), lambda folder: KINDS[kind](folder / "step1", 2.0), template=Path(root, "template"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_any_step_leaves_nothing_for_good(kind: str, tmp_path: Path) -> None:
    """After the next save to a name beside it there is no temporary, and both checkpoints are whole."""
    done = run_forked(kill_replacing, str(tmp_path), kind, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    folders = [tmp_path / line.partition("\t")[0] for line in done.stdout.splitlines()]
    assert len(folders) > 2
    for folder in folders:
        KINDS[kind](folder / "step2", 3.0)
        found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
        assert not [name for name in found if TEMPORARY.search(name)], folder
        assert {"step1", "step2"} <= found
        for manifest in (catalog := Catalog(folder)).manifests():
            catalog.verify(manifest)


def kill_replacing_without_exchange(root: str, kind: str) -> None:
    """The same on a disk that cannot swap two names: there is a moment when neither checkpoint has its own."""
    refuse_exchange()
    kill_replacing(root, kind)


@pytest.mark.parametrize("kind", ["function", "checkpointer"])
def test_a_copy_does_not_replace_what_a_killed_save_left(kind: str, tmp_path: Path) -> None:
    """Without ``--overwrite`` the name is taken, wherever the kill came; the old checkpoint or the new one has it."""
    KINDS[kind](tmp_path / "source" / "step1", 3.0)
    done = run_forked(kill_replacing_without_exchange, str(tmp_path), kind, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    with place_at(str(tmp_path / "source")) as source:
        (other,) = survey(source)
        for line in done.stdout.splitlines():
            with target_at(str(tmp_path / line.partition("\t")[0])) as target:
                with pytest.raises(CheckpointExistsError):
                    copy(source, other, target)
                (found,) = survey(target)
                assert (found.name, found.faults) == ("step1", ()), line
                assert found.manifest is not None
                assert other.manifest is not None
                assert found.manifest.identity != other.manifest.identity, line


WRITER = """
import sys
from collections.abc import Callable
from pathlib import Path
from composerlite.checkpoint.place.directory import ShardedDirectory
from composerlite.storage import HardlinkPin, StagedFile
folder = Path(sys.argv[1])
claim = ShardedDirectory.on_disk(folder / "living").claim(overwrite=False)
second = HardlinkPin(folder / "data")
with StagedFile(folder / "notes.txt") as staged, StagedFile(folder / ".manifest" / "living.json") as intention:
    for file in (staged.file, intention.file):
        file.write(b"{}")
        file.flush()
    print("ready", flush=True)
    sys.stdin.read()
"""


BESIDE = """
import sys, torch
from composerlite.checkpoint import save_state_dict
save_state_dict(sys.argv[1], {"x": torch.ones(1)}, save_overwrite=True)
"""


def save_to(path: str) -> None:
    """A small state dict, by a program."""
    save(Path(path))


def left_by_a_writer(folder: Path, *, end: bool, environment: dict[str, str] | None = None) -> list[Path]:
    """The four temporaries of a process that writes; it is killed first, or at the end of a save beside it."""
    (folder / ".manifest").mkdir(parents=True)
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
        save_beside(folder, environment)
        found = [path for path in found if path.exists()]
        writer.kill()
    return found


def save_beside(folder: Path, environment: dict[str, str] | None) -> None:
    """Save to the same folder in a process of its own; a new interpreter if it is to load another library."""
    if environment is None:
        assert run_forked(save_to, str(folder / "beside"), cwd=folder).returncode == 0
        return
    command = [sys.executable, "-c", BESIDE, str(folder / "beside")]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, **environment})


def test_only_what_is_dead_is_removed(tmp_path: Path) -> None:
    """A process that writes keeps all that it writes to; when it is killed the next save removes all."""
    assert len(left_by_a_writer(tmp_path / "living", end=False)) == 4
    assert left_by_a_writer(tmp_path / "dead", end=True) == []


def test_what_only_looks_like_a_temporary_harms_no_save(tmp_path: Path) -> None:
    """A pipe that nobody opens, a folder, a link, a file of another user: the save ends, and they stay."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    folder = tmp_path / "folder"
    (folder / ".manifest").mkdir(parents=True)
    for place in (folder, folder / ".manifest"):
        os.mkfifo(place / f".pipe.tmp-{'0' * 16}")
        (place / f".folder.tmp-{'1' * 16}").mkdir()
        os.mkfifo(place / f".pipe.saving-{'2' * 16}")
        (place / f".link.saving-{'3' * 16}").symlink_to(tmp_path)
        (place / f".short.tmp-{'4' * 15}").touch()
    if os.geteuid() == 0:
        other = folder / f".theirs.tmp-{'5' * 16}"
        other.touch()
        os.chown(other, 12345, 12345)
    before = set(folder.rglob("*"))
    save(folder / "a")
    Checkpointer().save(folder / "step1", torch.nn.Linear(1, 1), {})
    assert before <= set(folder.rglob("*"))
    assert precious.read_text() == "precious"


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
    save_beside(folder, later(6.9))
    assert [path for path in left if path.exists()] == left
    save_beside(folder, later(7.1))
    assert [path for path in left if path.exists()] == []
