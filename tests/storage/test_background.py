"""What loggers do behind training is done in order, or is raised."""

from __future__ import annotations

import threading

import pytest

from composerlite.errors import ComposerliteError
from composerlite.storage import Background, StagedFiles


def test_everything_is_done_in_order():
    """One after the other, in the order in which it came; the end waits for all of it."""
    done: list[int] = []
    background = Background("MyLogger")
    for number in range(50):
        background.submit("counting", lambda number=number: done.append(number))
    background.close(30)

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
    background.close(30)

    assert done == ["on"]
    assert error.value.__notes__ == ["MyLogger failed in the background: dividing."]


def test_several_failures_are_raised_together():
    """None is lost, also at the end."""
    background = Background("MyLogger")
    background.submit("dividing", lambda: 1 / 0)
    background.submit("looking up", lambda: {}["x"])
    with pytest.raises(ExceptionGroup, match="2 things failed") as error:
        background.close(30)

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
    background.close(30)

    assert (done, dropped) == ([2], [0, 1])


def test_the_end_does_not_wait_for_ever():
    """What is not done in time is named, and what has not begun is dropped."""
    may_go, began, dropped = threading.Event(), threading.Event(), []
    background = Background("MyLogger")
    background.submit("hanging", lambda: began.set() or may_go.wait(30))
    background.submit("never", lambda: None, dropped=lambda: dropped.append("never"))
    assert began.wait(30)
    with pytest.raises(TimeoutError, match="MyLogger: not done within 0 s: hanging, never"):
        background.close(0.01)
    may_go.set()
    background.close(30)

    assert dropped == ["never"]
    with pytest.raises(ComposerliteError, match="MyLogger: more comes too late"):
        background.submit("more", lambda: None)


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
    assert list(first.parent.parent.iterdir()) == [second.parent]
    files.remove()
    assert not first.parent.parent.exists()
