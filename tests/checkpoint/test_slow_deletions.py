"""Deletions of older checkpoints that are slow, that fail, or that are cut off: the newest checkpoint is there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import Record, saved_batches, train, trainer

from composerlite.checkpoint import Catalog

UNLINK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
int unlink(const char *path) {
    const char *name = strrchr(path, '/'), *how = getenv("UNLINK");
    if (name && strncmp(name, "/ep", 3) == 0 && strstr(name, ".json") == NULL) {
        if (write(2, "deleting\\\\n", 9) < 0 || strcmp(how, "fail") == 0) { errno = EIO; return -1; }
        struct timespec left = {atol(how), 0};
        while (nanosleep(&left, &left) != 0) {}
    }
    return ((int (*)(const char *))dlsym(RTLD_NEXT, "unlink"))(path);
}
""".replace("\\\\n", "\\n")
PROGRAM = """
import sys, time, torch
sys.path.insert(0, sys.argv[1])
from tiny_training import trainer
from composerlite import Callback

class Times(Callback):
    def batch_start(self, state, logger):
        if int(state.timestamp.batch) in (8, 12):
            print(time.monotonic(), flush=True)

torch.manual_seed(7)
how = dict(max_duration="4ep", save_num_checkpoints_to_keep=1, save_failure_limit=int(sys.argv[3]))
with trainer(callbacks=[Times()], save_folder=sys.argv[2], **how) as run:
    run.fit()
    print("ended", flush=True)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes the deletion of a checkpoint's data take ``$UNLINK`` seconds, or fail."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("library")
    (folder / "unlink.c").write_text(UNLINK)
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "unlink.so"), str(folder / "unlink.c"), "-ldl"]
    subprocess.run(command, check=True)
    return folder / "unlink.so"


def launch(library: Path, folder: Path, how: str, failures: int = 0) -> subprocess.Popen[str]:
    """A training of four epochs that saves each and keeps one checkpoint."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(folder), str(failures)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LD_PRELOAD": str(library), "UNLINK": how},
    )


def test_a_slow_deletion_does_not_hold_up_the_next_save(library: Path, tmp_path: Path) -> None:
    """It goes on for four seconds behind the save that follows; when training has ended only the newest is there."""
    with launch(library, tmp_path, "4") as run:
        out, err = run.communicate(timeout=240)
    assert run.returncode == 0, err
    before, after = (float(line) for line in out.split()[:2])
    assert after - before < 2, "the save of the third epoch waited until the first checkpoint was deleted"
    assert saved_batches(tmp_path) == [16]
    assert [path.name for path in tmp_path.glob("ep*")] == ["ep4-ba16-rank0.pt"]


def test_a_deletion_that_fails_is_an_error_and_the_newest_is_there(library: Path, tmp_path: Path) -> None:
    """The system's error, with the file, as for a save that fails."""
    with launch(library, tmp_path, "fail") as run:
        out, err = run.communicate(timeout=240)
    assert run.returncode == 1
    assert "ended" not in out
    assert "OSError: [Errno 5] Input/output error" in err
    assert "ep1-ba4-rank0.pt" in err
    newest = saved_batches(tmp_path)[-1]
    assert newest >= 8
    assert f"ba{newest}-" in str((tmp_path / "latest-rank0.pt").readlink())


def test_deletions_that_fail_are_counted_where_failures_are_tolerated(library: Path, tmp_path: Path) -> None:
    """A warning for each with the number in a row, and training ends; one too many in a row is an error."""
    with launch(library, tmp_path / "many", "fail", failures=10) as run:
        out, err = run.communicate(timeout=240)
    assert run.returncode == 0, err
    assert "ended" in out
    for number in (1, 2, 3):
        assert f"a checkpoint could not be deleted ({number} in a row, save_failure_limit=10): OSError" in err
    assert saved_batches(tmp_path / "many") == [16]
    with launch(library, tmp_path / "few", "fail", failures=1) as run:
        out, err = run.communicate(timeout=240)
    assert run.returncode == 1
    assert "a checkpoint could not be deleted (1 in a row, save_failure_limit=1)" in err


@pytest.mark.parametrize("number", [1, 2])
def test_a_kill_during_a_deletion_loses_nothing(number: int, library: Path, tmp_path: Path) -> None:
    """The newest checkpoint is whole, ``latest`` leads to it, and the relaunch goes on from there to the same end."""
    with launch(library, tmp_path, "60" if number == 1 else "1") as run:
        assert run.stderr is not None
        for _ in range(number):
            while "deleting" not in (line := run.stderr.readline()):
                assert line, "the run ended before it had deleted so many"
        run.send_signal(signal.SIGKILL)
        run.wait(60)
    kept = saved_batches(tmp_path)
    assert kept[-1] >= 4 * (number + 1)
    link = Catalog(tmp_path).manifest_of(str((tmp_path / "latest-rank0.pt").readlink()))
    assert link is not None
    assert link.batch == kept[-1]
    record = Record()
    how: dict[str, Any] = {"max_duration": "4ep", "save_num_checkpoints_to_keep": 1, "save_overwrite": True}
    with trainer(callbacks=[record], save_folder=tmp_path, autoresume=True, **how) as again:
        again.fit()
    assert record.batches == list(range(kept[-1] + 1, 17))
    assert saved_batches(tmp_path) == [16]
    torch.manual_seed(7)
    whole = train(save_folder=tmp_path / "whole", **how)
    mine, theirs = again.state.model.state_dict(), whole.state.model.state_dict()
    assert all(mine[key].equal(theirs[key]) for key in mine)
