"""Uploads in the background: in order where order matters, and never lost without a word."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from storage.local_store import LocalObjectStore

from composerlite.errors import ComposerliteError, ObjectStoreError
from composerlite.storage import Transfer, Uploader

WAIT = 20.0


@pytest.fixture
def uploader(tmp_path: Path) -> Iterator[Uploader]:
    uploader = Uploader(Transfer(LocalObjectStore(tmp_path)), num_concurrent=3)
    yield uploader
    uploader.close()


def test_one_lane_keeps_its_order(uploader: Uploader) -> None:
    """What is submitted to one lane is done one after the other, whatever else runs."""
    done: list[int] = []
    running: list[int] = []

    def work(number: int) -> None:
        running.append(number)
        assert len(running) == 1
        time.sleep(0.002)
        done.append(number)
        running.remove(number)

    for number in range(20):
        uploader.submit(str(number), lambda number=number: work(number), lane="lane")
    assert uploader.wait(WAIT)
    uploader.raise_failures()
    assert done == list(range(20))


def test_other_lanes_do_not_wait(uploader: Uploader) -> None:
    """A slow upload holds up those of its lane alone."""
    go, done = threading.Event(), threading.Event()
    uploader.submit("slow", lambda: go.wait(WAIT), lane="slow")
    uploader.submit("behind slow", lambda: None, lane="slow")
    uploader.submit("quick", lambda: done.set(), lane="quick")
    assert done.wait(WAIT)
    assert uploader.wait(WAIT, lane="quick")
    assert uploader.pending == ["slow", "behind slow"]
    go.set()


def test_the_newest_of_a_name_wins(uploader: Uploader) -> None:
    """What waits is dropped for something newer; what has begun is done, before it."""
    go, began = threading.Event(), threading.Event()
    done: list[str] = []
    dropped: list[str] = []

    def first() -> None:
        began.set()
        go.wait(WAIT)
        done.append("a")

    uploader.submit("a", first, lane="name", replaces=True)
    assert began.wait(WAIT)
    for what in "bcd":
        uploader.submit(
            what,
            lambda what=what: done.append(what),
            lane="name",
            replaces=True,
            dropped=lambda what=what: dropped.append(what),
        )
    go.set()
    assert uploader.wait(WAIT)
    assert (done, dropped) == (["a", "d"], ["b", "c"])


def test_a_failure_is_raised_once_and_the_rest_goes_on(uploader: Uploader) -> None:
    """The error of an upload comes out at the next look; what came after it is done."""
    done: list[int] = []

    def fail() -> None:
        raise PermissionError("not allowed")

    uploader.submit("a", fail, lane="lane")
    uploader.submit("b", lambda: done.append(1), lane="lane")
    assert uploader.wait(WAIT)
    with pytest.raises(PermissionError, match="not allowed"):
        uploader.raise_failures()
    uploader.raise_failures()
    assert done == [1]


def test_closing_waits_and_then_says_what_did_not_arrive(tmp_path: Path) -> None:
    """``close`` waits as long as it is told to, and names what was not uploaded by then."""
    uploader, go = Uploader(Transfer(LocalObjectStore(tmp_path)), timeout=0.05), threading.Event()
    dropped: list[str] = []
    uploader.submit("first.pt", lambda: go.wait(WAIT), lane="lane")
    uploader.submit("second.pt", lambda: None, lane="lane", dropped=lambda: dropped.append("second.pt"))
    with pytest.raises(ObjectStoreError, match=r"not finished within 0 s: first\.pt, second\.pt"):
        uploader.close()
    go.set()
    assert dropped == ["second.pt"]
    with pytest.raises(ComposerliteError, match="closed"):
        uploader.submit("third.pt", lambda: None, lane="lane")


def test_closing_raises_what_failed(tmp_path: Path) -> None:
    """A failure that nobody has looked at is raised at the end; several are raised together."""
    uploader = Uploader(Transfer(LocalObjectStore(tmp_path)))

    def fail() -> None:
        raise OSError("no network")

    for number in range(2):
        uploader.submit(str(number), fail, lane="lane")
    with pytest.raises(ExceptionGroup, match="2 jobs failed"):
        uploader.close()
    uploader.close()
