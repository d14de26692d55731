"""Leases: only a single process at a time writes the checkpoint files and the link of a run.

:func:`take_leases` takes all leases of a run, or raises an error with the name of the holder. In a folder a lease is a
locked file, in a bucket an object, rewritten every few seconds by the holder. Each such write is a beat. Leases of the
same file or object in a process share the file or object. Both classes have the attributes ``uri``, the path or URI of
the file or object, and ``lost_to``, a description of the process that has taken the lease over; ``None``: no process
has, as always in a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composerlite.errors import ObjectStoreError, RunInUseError
from composerlite.storage import Transfer, make_folder
from composerlite.storage.workers import seconds_left
from composerlite.threads import start_threads

log = logging.getLogger(__name__)
BEAT_SECONDS = 5.0
"""Seconds between two beats of the holder of a lease in a bucket."""
DEAD_SECONDS = 20.0
"""Seconds without a beat after which another process takes the lease. All processes must use the same value."""


@functools.cache
def this_process(pid: int) -> dict[str, Any]:
    """Return the description of this process that a lease contains. ``pid`` is the number of this process.

    The result is cached by ``pid``, so a forked child has another id.
    """
    try:  # process numbers are unique within one boot and one process namespace (container)
        boot = f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux, or hidden: treat each process as on its own machine
        boot = uuid.uuid4().hex
    return {"id": uuid.uuid4().hex, "process": f"process {pid} on {os.uname().nodename}", "pid": pid, "boot": boot}


def _parse(data: bytes) -> dict[str, Any]:
    """Return the description of the holder of a lease. Unreadable content gives a holder without a name."""
    nameless = {"id": "", "process": "an unnamed process", "pid": 0, "boot": ""}
    try:
        return {**nameless, **json.loads(data)}
    except (ValueError, TypeError):
        return nameless


def _is_own_or_gone(holder: Mapping[str, Any]) -> bool:
    """Return true if the holder is this process, or ran on this machine and no longer exists."""
    own = this_process(os.getpid())
    if holder["boot"] != own["boot"]:
        return False
    try:
        os.getpgid(holder["pid"])
    except ProcessLookupError:
        return True
    return holder["pid"] == own["pid"]  # this process, or an earlier process with the same number


def lease_name(name: str) -> str:
    """Return the file name of the lease that protects ``name``, a path or a template of paths."""
    return f".{name.replace('/', '%2F')}.lease"


def take_leases(leases: Mapping[str, Lease], what: str, timeout: float) -> None:
    """Take all leases. Wait until other holders release the leases, or are dead.

    Args:
        leases: leases by the protected path or URI.
        what: the run, for messages.
        timeout: seconds to wait in total.

    Raises:
        RunInUseError: another process still holds a lease after ``timeout``. No lease is held then.
        OSError: no thread can be started for a lease in a bucket.
    """
    until = time.monotonic() + timeout
    last_holder = ""
    with contextlib.ExitStack() as on_error:
        for uri, lease in leases.items():
            on_error.callback(lease.release)
            while (holder := lease.try_to_take()) is not None:
                if time.monotonic() > until:
                    raise RunInUseError(
                        f"{what}: {uri!r} is written by another process, {holder}, which is still alive after "
                        f"{timeout:.0f} s. Stop that process if it is another launch of this run. Another run "
                        "would replace these files: give this run its own save_folder or file names."
                    )
                if holder != last_holder:
                    log.warning("%s: %r belongs to %s: waiting up to %.0f s", what, uri, holder, timeout)
                    last_holder = holder
                for other in leases.values():  # the waits for several dead holders overlap
                    if isinstance(other, HeartbeatLease) and other not in _held:
                        other.observe()
                time.sleep(0.5)
        on_error.pop_all()


class FileLease:
    """Lease in a folder: a lock on the file ``path``. The kernel releases the lock when the process ends.

    On a file system without locks every process gets the lease, and a warning is logged.
    """

    def __init__(self, path: Path) -> None:
        self.uri = os.path.abspath(path)  # noqa: PTH100 - a link in the path must not be resolved
        self.lost_to: str | None = None

    def try_to_take(self) -> str | None:
        """Return ``None`` if this process holds the lease now, otherwise a description of the holder.

        Raises:
            PermissionError: this process may not write the file.
        """
        try:
            while not self._is_locked():  # retry if the previous holder deletes the file between open and lock
                _unlock(self.uri)
                make_folder(Path(self.uri).parent)
                descriptor = os.open(self.uri, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                with os.fdopen(descriptor, "r+b", buffering=0) as file:
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        return _parse(file.read())["process"]
                    file.truncate()
                    file.write(json.dumps(this_process(os.getpid())).encode())
                    _locked[self.uri] = os.dup(descriptor)
        except PermissionError:
            raise
        except OSError as e:  # no lock support, or a full disk: saves report a full disk
            log.warning("cannot lock %s: %s. A second launch of this run cannot be detected", self.uri, e)
            return None
        _held.append(self)
        return None

    def _is_locked(self) -> bool:
        """Return true if this process has locked the file at the path."""
        try:
            return os.path.samestat(Path(self.uri).stat(), os.fstat(_locked[self.uri]))
        except (KeyError, FileNotFoundError, NotADirectoryError):
            return False

    def release(self) -> None:
        """Release the lease. May be called twice."""
        if self not in _held:
            return
        _held.remove(self)
        if _is_shared(self):
            return
        if self._is_locked():
            try:
                Path(self.uri).unlink()
            except OSError as e:
                log.warning("could not delete %s (other launches are not blocked): %s", self.uri, e)
        _unlock(self.uri)


class HeartbeatLease:
    """Lease in a bucket: an object, rewritten every few seconds by a thread of the holder with a conditional swap.

    Another process takes the lease over with a conditional swap, and the swap fails if the object has changed since the
    last read. So only the first of several processes succeeds. A takeover is allowed after ``DEAD_SECONDS`` without
    a change, or at once if the holder ran on this machine and is gone. The old holder detects the loss at the next
    beat.

    Attributes:
        taken_over: the lease was taken from a silent process, perhaps still alive.
    """

    def __init__(self, transfer: Transfer, name: str) -> None:
        self.uri, self._transfer, self._name = transfer.store.get_uri(name), transfer, name
        self.lost_to: str | None = None
        self.taken_over = False
        self._seen_version: str | None = None
        self._unchanged_since = self._renewed_at = -math.inf
        self._lock, self._is_released = threading.Lock(), threading.Event()
        self._threads: list[threading.Thread] = []

    def try_to_take(self) -> str | None:
        """Return ``None`` if this process holds the lease now, otherwise a description of the holder.

        Raises:
            PermissionError: the object cannot be read back, or access is denied.
            ObjectStoreError: the store does not answer.
            OSError: no thread can be started to renew the lease.
        """
        holder = self.observe()
        is_new = self._seen_version is None
        is_free = is_new or _is_own_or_gone(holder)
        if not is_free and _now() - self._unchanged_since < DEAD_SECONDS:
            return holder["process"]
        self.taken_over = not is_free
        self.lost_to = None
        self.confirm(max_age=0)
        if is_new and self._seen_version is None:  # some stores hide unreadable objects
            raise PermissionError(f"{self.uri}: the lease was written but cannot be read. Grant the right to read it.")
        if self.lost_to is not None:
            return self.lost_to
        _held.append(self)
        self._threads = start_threads(self._beat, 1, name="lease")
        if not self._threads:
            raise OSError(f"{self.uri}: no thread can be started to renew the lease: raise the limit (ulimit -u)")
        return None

    def observe(self) -> dict[str, Any]:
        """Read and return the holder. Store the object's version (``None``: no object) and when the version changed."""
        try:
            data, version = self._transfer.read_versioned(self._name)
        except FileNotFoundError:
            data, version = b"", None
        if version != self._seen_version:
            self._seen_version, self._unchanged_since = version, _now()
        return _parse(data)

    def confirm(self, max_age: float = 2 * BEAT_SECONDS) -> None:
        """Write a beat if the last beat is older than ``max_age`` seconds. Sets ``lost_to`` after a takeover.

        If the object was deleted, the next beat creates a new object. If the last beat is also older than
        ``DEAD_SECONDS``, the lease is lost: another process may have taken the lease, deleted the object and ended.

        Raises:
            ObjectStoreError: the store does not answer.
        """
        with self._lock:  # publishing threads and the thread of the lease call this method
            began, own = _now(), this_process(os.getpid())
            if self.lost_to is not None or began - self._renewed_at < max_age:
                return
            data = json.dumps({**own, "beat": time.time_ns()}).encode()
            with contextlib.suppress(FileExistsError):  # another process or thread was faster: see the holder below
                if self._seen_version is None:
                    self._transfer.put_bytes(self._name, data, create_only=True)
                else:
                    self._transfer.swap_bytes(self._name, data, self._seen_version)
            holder = self.observe()
            if holder["id"] == own["id"]:
                self._renewed_at = began
            elif self._seen_version is not None or began - self._renewed_at > DEAD_SECONDS:
                self.lost_to = holder["process"]

    def _beat(self) -> None:
        """Renew the lease until the release. Then delete the object, unless another lease of this process shares it."""
        is_released = False
        while not is_released and self.lost_to is None:
            is_released = self._is_released.wait(BEAT_SECONDS)
            try:
                self.confirm(max_age=0)
                if is_released and self.lost_to is None and not _is_shared(self):
                    self._transfer.delete(self._name)
            except (ObjectStoreError, OSError) as e:
                log.warning("the lease %s was not renewed or removed: %s", self.uri, e)

    def release(self) -> None:
        """Release the lease: wait up to ``DEAD_SECONDS`` until the object is deleted. May be called twice."""
        if self in _held:
            _held.remove(self)
            self._is_released.set()
            for thread in self._threads:  # with a limit: requests to a dead store are retried for minutes
                thread.join(min(DEAD_SECONDS, max(seconds_left(), 1.0)))


Lease = FileLease | HeartbeatLease
_held: list[Lease] = []
"""Leases held by this process."""
_locked: dict[str, int] = {}
"""Descriptors of the files locked by this process, by path."""


def _is_shared(lease: Lease) -> bool:
    return any(other.uri == lease.uri for other in _held)


def _unlock(path: str) -> None:
    if path in _locked:
        os.close(_locked.pop(path))


def _close_in_child() -> None:
    """Close inherited files in a forked child: a child must not hold the locks after the parent has ended."""
    for path in list(_locked):
        _unlock(path)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _now() -> float:
    """Return a monotonic time in seconds, which also counts while the machine is suspended if the system can."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
