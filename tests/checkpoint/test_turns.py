"""Turns: one thread or process of a machine at a time works at a path."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from composerlite.checkpoint.place.turns import turn_at


@pytest.mark.parametrize("what", ["directory", "file"])
def test_one_at_a_time_has_a_turn_and_who_waits_too_long_is_told_where(what: str, tmp_path: Path) -> None:
    """A turn that ended is free, however it ended, also while a process lives that was forked during it."""
    path = tmp_path if what == "directory" else tmp_path / "file"
    brief = timedelta(seconds=0.1)
    with contextlib.suppress(ZeroDivisionError), turn_at(path):
        hears, says = os.pipe()
        if (child := os.fork()) == 0:
            os.close(says)
            os.read(hears, 1)
            os._exit(0)
        os.close(hears)
        with ThreadPoolExecutor(1) as pool, pytest.raises(TimeoutError, match=f"{path}.*hang"):
            pool.submit(turn_at(path, brief).__enter__).result()
        with turn_at(path, brief):
            raise ZeroDivisionError  # as in a handler of a signal that saves in the middle of a save
    with turn_at(path, brief):
        os.kill(child, 0)  # it lives
    os.close(says)
    assert os.waitpid(child, 0)[1] == 0
