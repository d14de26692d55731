"""What loggers do behind training is done in order, or is raised."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from composerlite.errors import ComposerliteError
from composerlite.storage import Background
from composerlite.storage.workers import StagedFiles


def test_everything_is_done_in_order():
    """One after the other, in the order in which it came; the end waits for all of it."""
    done: list[int] = []
    background = Background("MyLogger")
    for number in range(50):
        background.submit("counting", lambda number=number: done.append(number))
    background.close()

    assert done == list(range(50))


def test_what_fails_is_raised_and_the_rest_is_done():
    """An error is raised once, with a note of what it was; what comes after it is done all the same."""
    done: list[str] = []
    background = Background("MyLogger")
    background.submit("dividing", lambda: 1 / 0)
    background.submit("going on", lambda: done.append("on"))
    assert background.wait(30)
    with pytest.raises(ZeroDivisionError) as error:
        background.raise_failures()
    background.raise_failures()
    background.close()

    assert done == ["on"]
    assert error.value.__notes__ == ["MyLogger failed in the background: dividing."]


def test_several_failures_are_raised_together():
    """None is lost, also at the end."""
    background = Background("MyLogger")
    background.submit("dividing", lambda: 1 / 0)
    background.submit("looking up", lambda: {}["x"])
    with pytest.raises(ExceptionGroup, match="2 jobs failed") as error:
        background.close()

    assert [type(one) for one in error.value.exceptions] == [ZeroDivisionError, KeyError]


def test_of_one_name_the_newest_is_done():
    """What waits under a name is dropped when something newer comes, and its owner hears of it."""
    may_go, done, dropped = threading.Event(), [], []
    background = Background("MyLogger")
    background.submit("waiting", lambda: may_go.wait(30))
    for number in range(3):
        background.submit(
            "uploading",
            lambda number=number: done.append(number),
            lane="a",
            replaces=True,
            dropped=lambda number=number: dropped.append(number),
        )
    may_go.set()
    background.close()

    assert (done, dropped) == ([2], [0, 1])


def test_the_end_does_not_wait_for_ever():
    """What is not done in time is named, and what has not begun is dropped."""
    may_go, began, dropped = threading.Event(), threading.Event(), []
    background = Background("MyLogger")
    background.submit("hanging", lambda: began.set() or may_go.wait(30))
    background.submit("never", lambda: None, dropped=lambda: dropped.append("never"))
    assert began.wait(30)
    background.timeout = 0.01
    with pytest.raises(TimeoutError, match="MyLogger: not finished within 0 s: hanging, never"):
        background.close()
    may_go.set()
    background.close()

    assert dropped == ["never"]
    with pytest.raises(ComposerliteError, match="MyLogger: cannot start more"):
        background.submit("more", lambda: None)


def test_a_folder_of_copies_that_was_removed_is_made_again(tmp_path):
    """As what tidies temporary files up does, in a training of weeks."""
    (tmp_path / "a").write_text("text")
    files = StagedFiles(tmp_path / "staged")
    files.copy(tmp_path / "a", "b.txt")
    shutil.rmtree(tmp_path / "staged")

    assert files.copy(tmp_path / "a", "b.txt").read_text() == "text"
    files.remove()
    assert list((tmp_path / "staged").iterdir()) == []


def test_copies_are_nobody_elses(tmp_path):
    """A staged file is as it was, whatever becomes of the original; nothing is left in the end."""
    (tmp_path / "a").write_text("old")
    files = StagedFiles()
    first = files.copy(tmp_path / "a", "b.txt")
    (tmp_path / "a").write_text("new")
    second = files.copy(tmp_path / "a", "b.txt")

    assert (first.name, first.read_text(), second.read_text()) == ("b.txt", "old", "new")
    files.give_back(first)
    with pytest.raises(FileNotFoundError):
        files.copy(tmp_path / "missing", "c")
    assert not first.parent.exists()
    files.remove()
    assert not second.parent.exists()


# ── the end of the program ───────────────────────────────────────────────────────────────────────────────────────────
BEGIN = """
import atexit, logging, multiprocessing, os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from composerlite.storage import Background, leave_by

signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests in the background ignores it
logging.basicConfig(format="%(levelname)s %(message)s")
pool = ThreadPoolExecutor(1)

def upload(what, seconds=0.3):
    pool.submit(time.sleep, seconds).result()
    print(what, flush=True)

uploader = Background("MyUploader", timeout=20)
"""


def program(text: str) -> subprocess.Popen[str]:
    """Start a program with an ``uploader`` that it does not close."""
    command = [sys.executable, "-c", BEGIN + textwrap.dedent(text)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("text", "code", "done"),
    [
        ("uploader.submit('a', lambda: upload('a')); uploader.submit('b', lambda: upload('b')); 1 / 0", 1, "a b"),
        (
            """
            def train():
                threading.main_thread().join()
                uploader.submit('late', lambda: print('late'))

            threading.Thread(target=train).start()
            """,
            0,
            "late",
        ),
        (
            """
            def rank():
                uploader.submit('of the child', lambda: upload('of-the-child'))

            child = multiprocessing.get_context('fork').Process(target=rank)
            child.start()
            child.join()
            """,
            0,
            "of-the-child",
        ),
        (
            """
            uploader.submit('a', lambda: upload('a', 1))
            if os.fork() == 0:
                leave_by(time.monotonic() + 5)  # it would say that it has not uploaded
                sys.exit()
            print('child', os.waitstatus_to_exitcode(os.wait()[1]))
            """,
            0,
            "child 0 a",
        ),
        (
            """
            atexit.register(lambda: uploader.submit('late', lambda: time.sleep(0.3) or print('late')))
            uploader.submit('a', lambda: upload('a'))
            """,
            0,
            "a late",
        ),
    ],
    ids=[
        "an error",
        "a thread that outlives the main one",
        "a process of multiprocessing",
        "a forked child",
        "a handler of atexit",
    ],
)
def test_a_program_that_ends_waits_for_what_is_pending(text: str, code: int, done: str):
    """However it ends, and with executors that the work needs; a forked child waits for its own work only."""
    with program(text) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out.split()) == (code, done.split()), err
    assert "without finishing" not in err


def test_what_is_not_done_as_the_program_ends_is_named():
    """When the time is over, or less is left of a grace period; what hangs is named, and the exit code stays."""
    for limit in ("uploader.timeout = 0.3", "leave_by(time.monotonic() + 0.3)"):
        text = "; uploader.submit('a.pt', lambda: time.sleep(30)); uploader.submit('b.pt', print); sys.exit(7)"
        started = time.monotonic()
        with program(limit + text) as process:
            _, err = process.communicate(timeout=60)
        assert time.monotonic() - started < 20
        assert process.returncode == 7
        assert re.search(r"ERROR the program ends after \d+ s without finishing: a.pt, b.pt", err)


def test_ctrl_c_ends_the_wait_at_the_end_of_the_program():
    """Who does not want to wait any longer reads what is missing."""
    with program("uploader.submit('a.pt', lambda: time.sleep(30)); 1 / 0") as process:
        assert process.stderr is not None
        while "waiting before exit (Ctrl-C stops the wait) for: a.pt" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=15)
    assert process.returncode == 1
    assert "because of Ctrl-C without finishing: a.pt" in err
