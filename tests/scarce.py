"""Limits of the system for a process of a test, for good."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from pathlib import Path

import pytest

__all__ = ["forbid_threads"]

_FIRST_USER, _SYS_ADMIN, _SYS_RESOURCE = 50_000, 21, 24


def forbid_threads(spare: int = 0) -> None:
    """Let this thread start ``spare`` threads and processes more, for good; root becomes somebody whom the limit holds,
    and who may read files.
    """
    if os.getuid() == 0:
        os.setresuid(_FIRST_USER + os.getpid() % 10_000, 0, 0)
        libc = ctypes.CDLL(None)
        header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # capabilities(7), version 3
        assert libc.capget(header, sets) == 0
        for at in (0, 1):  # what is in effect, and what may be
            sets[at] &= ~(1 << _SYS_ADMIN | 1 << _SYS_RESOURCE)
        assert libc.capset(header, sets) == 0
    limit = spare + len(list(Path("/proc/self/task").iterdir()))
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit) if spare else (1, 1))
    if not spare:
        with pytest.raises(RuntimeError):
            threading.Thread(target=print).start()
