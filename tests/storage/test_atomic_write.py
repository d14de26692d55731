"""A file is there whole, or as it was before: after an exception, a kill, a full disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from composerlite.storage import StagedFile, atomic_write
from composerlite.storage.disk.files import abandoned_temporaries


def python(program: str, *arguments: object) -> list[str]:
    """The command that runs ``program``, a text, in a process of its own."""
    return [sys.executable, "-c", program, *map(str, arguments)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that was written before."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_when_the_block_ends(file: Path) -> None:
    """Until then whoever reads sees the old bytes, from then on all of the new ones, and nothing else is left."""
    with atomic_write(file) as new:
        new.write(b"new")
        new.flush()
        assert file.read_bytes() == b"old"
    assert file.read_bytes() == b"new"
    assert names(file.parent) == ["file"]


def test_an_exception_leaves_the_old_file_and_nothing_else(file: Path) -> None:
    """What went wrong is raised; the bytes written so far are gone."""

    def write() -> None:
        with atomic_write(file) as new:
            new.write(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert file.read_bytes() == b"old"
    assert names(file.parent) == ["file"]


def test_a_file_that_is_not_published_is_thrown_away(file: Path) -> None:
    """A staged file that nobody gave its name to leaves nothing behind."""
    with StagedFile(file) as staged:
        staged.file.write(b"new")
        staged.flush()
    assert file.read_bytes() == b"old"
    assert names(file.parent) == ["file"]


def test_two_writers_of_one_file_do_not_mix(file: Path) -> None:
    """Each writes a file of its own; the one that ends last is there in the end."""
    with atomic_write(file) as slow:
        slow.write(b"slow, ")
        with atomic_write(file) as fast:
            fast.write(b"fast")
        assert file.read_bytes() == b"fast"
        slow.write(b"and last")
    assert file.read_bytes() == b"slow, and last"
    assert names(file.parent) == ["file"]


KILLED = """
import os, signal, sys
from pathlib import Path
from composerlite.storage import atomic_write
with atomic_write(Path(sys.argv[1])) as file:
    file.write(b"x" * 100_000)
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_in_the_middle_leaves_the_old_file(file: Path) -> None:
    """SIGKILL while the bytes are written: the old file is as it was, and what was begun is found as abandoned."""
    done = subprocess.run(python(KILLED, file), check=False)
    assert done.returncode == -signal.SIGKILL
    assert file.read_bytes() == b"old"
    (abandoned,) = abandoned_temporaries(file.parent)
    assert abandoned.read_bytes() == b"x" * 100_000
    assert names(file.parent) == [abandoned.name, "file"]


TOO_LARGE = """
import resource, sys
from pathlib import Path
from composerlite.storage import atomic_write
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    with atomic_write(Path(sys.argv[1])) as file:
        for _ in range(100):
            file.write(b"x" * 1000)
except OSError as e:
    print(e.errno, e.filename)
"""


def test_bytes_that_do_not_fit_leave_the_old_file(file: Path) -> None:
    """The error of the system names the file, which is as it was, and the space is given back."""
    done = subprocess.run(python(TOO_LARGE, file), capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(errno.EFBIG), str(file)]
    assert file.read_bytes() == b"old"
    assert names(file.parent) == ["file"]


WAITS = """
import sys
from pathlib import Path
from composerlite.storage import atomic_write
with atomic_write(Path(sys.argv[1])) as file:
    file.write(b"new")
    file.flush()
    print("writing", flush=True)
    sys.stdin.readline()
"""


def test_what_a_live_process_writes_is_not_abandoned(file: Path) -> None:
    """As long as its process lives a temporary belongs to it; after a kill it is found."""
    live = subprocess.Popen(python(WAITS, file), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    killed = subprocess.Popen(python(WAITS, file), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with live, killed:
        assert live.stdout is not None
        assert killed.stdout is not None
        assert live.stdout.readline() == killed.stdout.readline() == "writing\n"
        assert list(abandoned_temporaries(file.parent)) == []
        killed.kill()
        killed.wait()
        (abandoned,) = abandoned_temporaries(file.parent)
        abandoned.unlink()
        live.communicate("go on\n")
    assert live.returncode == 0
    assert file.read_bytes() == b"new"
    assert names(file.parent) == ["file"]


def test_sweeping_what_is_abandoned_never_takes_a_live_file(quick_folder: Path) -> None:
    """One thread writes file after file, another removes all that is abandoned: every file is there in the end."""
    done = threading.Event()
    swept: list[Path] = []

    def sweep() -> None:
        while not done.is_set():
            for temporary in abandoned_temporaries(quick_folder):
                temporary.unlink(missing_ok=True)
                swept.append(temporary)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for number in range(200):
            with atomic_write(quick_folder / f"{number}") as file:
                file.write(b"whole")
    finally:
        done.set()
        sweeper.join()
    assert {path.name for path in quick_folder.iterdir()} == {str(number) for number in range(200)}
    assert {path.read_bytes() for path in quick_folder.iterdir()} == {b"whole"}


@pytest.mark.parametrize(
    "name", ["file.tmp-0123456789abcdef", ".file.tmp-0123", ".file.tmp-0123456789ABCDEF", ".tmp-0123456789abcdef"]
)
def test_files_of_others_are_never_taken_for_abandoned(tmp_path: Path, name: str) -> None:
    """Only names that composerlite gives to its temporaries count."""
    (tmp_path / name).touch()
    assert list(abandoned_temporaries(tmp_path)) == []


def test_a_folder_that_does_not_exist_holds_nothing_abandoned(tmp_path: Path) -> None:
    """There is nothing to clean up where nothing was ever written."""
    assert list(abandoned_temporaries(tmp_path / "none")) == []


def test_storage_does_not_import_torch() -> None:
    """Whoever lists a bucket does not wait for torch."""
    program = "import sys, composerlite.storage; sys.exit('torch' in sys.modules)"
    assert subprocess.run(python(program), env={**os.environ}, check=False).returncode == 0
