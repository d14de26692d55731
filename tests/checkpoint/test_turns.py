"""Throttled saves: one thread or process of a machine at a time uploads."""

from __future__ import annotations

import contextlib
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from composerlite.checkpoint.save import sharded_writer


def test_one_at_a_time_has_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that ended is free, however it ended, also while a process lives that was forked during it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sharded_writer, "_TURN_SECONDS", 0.1)
    turn = sharded_writer._turn_of_this_node
    with contextlib.suppress(ZeroDivisionError), turn():
        hears, says = os.pipe()
        if (child := os.fork()) == 0:
            os.close(says)
            os.read(hears, 1)
            os._exit(0)
        os.close(hears)
        with ThreadPoolExecutor(1) as pool, pytest.raises(TimeoutError, match=f"{tmp_path}.*turn"):
            pool.submit(turn().__enter__).result()
        with turn():
            raise ZeroDivisionError  # as in a handler of a signal that saves in the middle of a save
    with turn():
        os.kill(child, 0)  # it lives
    os.close(says)
    assert os.waitpid(child, 0)[1] == 0
