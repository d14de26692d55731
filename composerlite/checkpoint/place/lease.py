"""Leases: one process at a time writes the checkpoint files and the link of a run."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import logging
import os
import socket
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, final

from composerlite.errors import ObjectStoreError, RunInUseError
from composerlite.storage import Transfer, make_folder, seconds_left
from composerlite.threads import start_threads

__all__ = ["FileLease", "HeartbeatLease", "Lease", "lease_name", "renew_leases", "take_leases"]

log = logging.getLogger(__name__)
_RETRY_SECONDS = 0.5
_MAX_RECORD_BYTES = 4096
_OTHER_RUN = (
    "Stop that process if it is another launch of this run. If it is another run, each would replace the other's "
    "files: give this run a save_folder or names of its own."
)


class Lease(ABC):
    """Exclusive right of one process to write a file name.

    Attributes:
        lost_to: the process that took the lease over from this process; ``None`` if no process did.
        taken_over: the lease was taken from a silent process that may still be alive.
    """

    lost_to: str | None = None
    taken_over = False

    @abstractmethod
    def try_to_take(self) -> str | None:
        """Return ``None`` if this process holds the lease now, otherwise a description of the holder."""

    @abstractmethod
    def release(self) -> None:
        """Release the lease. May be called twice."""

    def watch(self) -> None:
        """Note the holder's last sign of life, so that the holder's silence counts from now."""

    def keep(self) -> bool:
        """Take the lease again if its file vanished. Returns false if the file had vanished."""
        return True

    def confirm(self) -> None:
        """Ask the store whether this process still holds the lease, if the last answer is old. Sets ``lost_to``."""


def lease_name(name: str) -> str:
    """Return the file name of the lease of the file name ``name``."""
    return f".{name.replace('/', '%2F')}.lease"


def take_leases(leases: Mapping[str, Lease], what: str, timeout: float, advice: str = _OTHER_RUN) -> None:
    """Take all leases, and wait for other holders to release them.

    Args:
        leases: by the path or URI that each lease protects.
        what: the run or checkpoint that is written, for messages.
        timeout: seconds to wait in total.
        advice: the way out, for messages.

    Raises:
        RunInUseError: another process still holds a lease after ``timeout``. No lease is held then.
    """
    until = time.monotonic() + timeout
    with contextlib.ExitStack() as taken:
        waiting = dict(leases)
        for uri, lease in leases.items():
            del waiting[uri]
            last_holder = ""
            while (holder := lease.try_to_take()) is not None:
                for later in waiting.values():  # a dead holder of several leases is waited for once
                    later.watch()
                if time.monotonic() > until:
                    raise RunInUseError(
                        f"{what}: {uri!r} is written by another process, {holder}, which is alive. {advice} "
                        f"Waited {timeout:.0f} s for the end of that process."
                    )
                if holder != last_holder:
                    log.warning("%s: %r is written by %s: waiting up to %.0f s", what, uri, holder, timeout)
                    last_holder = holder
                time.sleep(_RETRY_SECONDS)
            taken.callback(lease.release)
        taken.pop_all()


@functools.cache
def _own_record(pid: int) -> dict[str, Any]:
    """Return the record of the process ``pid``, which is this process. The id is unique among all processes ever."""
    try:  # process numbers are unique within one boot and one process namespace (container)
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        boot = f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux, or hidden: a process number proves nothing
        boot = ""
    return {"id": f"{pid}-{uuid.uuid4().hex}", "host": socket.gethostname(), "pid": pid, "boot": boot}


def _parse(data: bytes) -> dict[str, Any]:
    """Return the record of a holder; an empty dict if ``data`` is not a record."""
    try:
        record: dict[str, Any] = json.loads(data)
        boot = str(record.get("boot", ""))
        return {"id": str(record["id"]), "host": str(record["host"]), "pid": int(record["pid"]), "boot": boot}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return {}


def _describe(record: Mapping[str, Any]) -> str:
    return f"process {record['pid']} on {record['host']}" if record else "a process that has not written its name"


def _is_gone(record: Mapping[str, Any]) -> bool:
    """Return true if the holder ran on this machine and its process no longer exists."""
    own = _own_record(os.getpid())
    if not record or not own["boot"] or any(record[key] != own[key] for key in ("host", "boot")):
        return False
    if record["pid"] == own["pid"]:  # an earlier process had this process's number
        return record["id"] != own["id"]
    try:
        os.kill(record["pid"], 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # a process of another user, or not a process number
        return False
    return False


@final
class FileLease(Lease):
    """Lease in a folder: a lock on the file ``path``, which the kernel releases when the process ends.

    All leases of one path in one process share the lock. A forked child does not keep the lock. On a file system
    without locks a warning is logged and every process gets the lease.
    """

    _locked: ClassVar[dict[Path, tuple[int, set[FileLease]]]] = {}
    """The open file descriptor and the leases that share it, by path."""

    def __init__(self, path: Path) -> None:
        self._path = Path(os.path.abspath(path))  # noqa: PTH100 - a link in the path must not be resolved
        self._held = False

    def try_to_take(self) -> str | None:
        if not self._is_locked():
            with contextlib.ExitStack() as on_failure:
                file = -1
                try:
                    make_folder(self._path.parent)
                    file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                    on_failure.callback(os.close, file)
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.ftruncate(file, 0)
                    os.pwrite(file, json.dumps(_own_record(os.getpid())).encode(), 0)
                except BlockingIOError:
                    return _describe(_parse(os.pread(file, _MAX_RECORD_BYTES, 0)))
                except PermissionError:
                    raise
                except OSError as e:  # no locks, or no space: saves report a full disk, which may be tolerated
                    log.warning("no lock on %s: %s. A second launch of this run is not refused", self._path, e)
                    return None
                on_failure.pop_all()
            self._locked[self._path] = (file, set())
            if not self._is_locked():  # the previous holder removed the file between open and lock
                return self.try_to_take()
        self._locked[self._path][1].add(self)
        self._held = True
        return None

    def _is_locked(self) -> bool:
        """Return true if this process has the lock. Closes the file if it was removed or replaced."""
        if self._path not in self._locked:
            return False
        file, _ = self._locked[self._path]
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(self._path.stat(), os.fstat(file)):
                return True
        del self._locked[self._path]
        os.close(file)
        return False

    def keep(self) -> bool:
        if not self._held or (self._is_locked() and self in self._locked[self._path][1]):
            return True
        self.lost_to = self.try_to_take()
        self._held = self.lost_to is None
        return False

    def release(self) -> None:
        self._held = False
        file, users = self._locked[self._path] if self._is_locked() else (-1, set[FileLease]())
        if self not in users:
            return
        users.remove(self)
        if not users:
            del self._locked[self._path]
            with contextlib.suppress(OSError):  # on a read-only disk the file stays, and the lock ends all the same
                self._path.unlink(missing_ok=True)
            os.close(file)

    @classmethod
    def _close_in_child(cls) -> None:
        """Close inherited descriptors: otherwise a child that outlives this process would hold the locks."""
        locked, cls._locked = cls._locked, {}
        for file, _ in locked.values():
            os.close(file)


os.register_at_fork(after_in_child=FileLease._close_in_child)  # pyright: ignore[reportPrivateUsage]


_now = functools.partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Seconds that include the time in which the machine was suspended, where the system counts it."""


@final
class HeartbeatLease(Lease):
    """Lease in a bucket: one object that the holder rewrites every few seconds by a conditional swap.

    Another process takes the lease over by one swap of the version that it read, so exactly one of several processes
    succeeds. It does so if the object has not changed for ``dead_seconds`` by its own clock, or at once if the holder
    ran on this machine and is gone. A holder finds out at its next beat. All leases of one object in one process share
    the object. Where no thread can be started, :func:`renew_leases` renews the lease.

    Args:
        transfer: to the bucket.
        name: of the object.
        beat_seconds: between two beats of the holder.
        dead_seconds: silence after which a holder counts as dead; the same for all processes.
    """

    _users: ClassVar[Counter[str]] = Counter()
    """Number of leases that this process holds, by URI of the object."""
    _without_thread: ClassVar[set[HeartbeatLease]] = set()
    _beats: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, transfer: Transfer, name: str, *, beat_seconds: float = 5.0, dead_seconds: float = 20.0) -> None:
        self._transfer, self._name, self._uri = transfer, name, transfer.store.get_uri(name)
        self._own = _own_record(os.getpid())
        self.beat_seconds, self._dead_seconds = beat_seconds, dead_seconds
        self._seen_version: str | None = None
        self._seen: str | None = None
        self._seen_since = 0.0
        self._held, self._renewed_at = False, 0.0
        self._stop, self._threads = threading.Event(), list[threading.Thread]()

    def try_to_take(self) -> str | None:
        record = self._read()
        if not self._is_own(record):
            gone = _is_gone(record)
            if self._seen_version is not None and not gone and not self._is_silent():
                return _describe(record)
            self.taken_over = self._seen_version is not None and not gone
            is_written, record = self._write(), self._read()
            if is_written and self._seen_version is None:
                raise PermissionError(
                    f"{self._uri}: the lease was written and is not found: get the right to read there. Some stores "
                    "hide objects that one may not read."
                )
            if not self._is_own(record):
                return _describe(record)
        self._held, self.lost_to, self._renewed_at = True, None, _now()
        self._users[self._uri] += 1
        self._stop.clear()
        self._threads = start_threads(self._beat, 1, name="lease")
        if not self._threads:
            self._without_thread.add(self)
            log.warning("no thread for the lease %s: it is renewed between batches and parts of transfers", self._uri)
        return None

    def watch(self) -> None:
        self._read()
        self._is_silent()

    def _is_silent(self) -> bool:
        """Return true if the version that was read last has been the same for ``dead_seconds``."""
        if self._seen != self._seen_version:
            self._seen, self._seen_since = self._seen_version, _now()
        return _now() - self._seen_since > self._dead_seconds

    def _is_own(self, record: Mapping[str, Any]) -> bool:
        return record.get("id") == self._own["id"]

    def _read(self) -> dict[str, Any]:
        """Return the record, or an empty dict if there is none. Notes the version; ``None`` if there is no object."""
        try:
            data, self._seen_version = self._transfer.read_versioned(self._name)
        except FileNotFoundError:
            data, self._seen_version = b"", None
        return _parse(data)

    def _write(self) -> bool:
        """Write a beat in place of the version that was read last. Returns false if the object changed since."""
        data = json.dumps({**self._own, "beat": next(self._beats)}).encode()
        try:
            if self._seen_version is None:
                self._transfer.put_bytes(self._name, data, create_only=True)
            else:
                self._transfer.swap_bytes(self._name, data, self._seen_version)
        except FileExistsError:
            return False
        except FileNotFoundError:
            if self._seen_version is None:  # there is no such bucket
                raise
            return False
        return True

    def _renew(self, min_age: float) -> None:
        """Write a beat if the last beat is ``min_age`` seconds old. Sets ``lost_to`` if the lease is lost."""
        if self.lost_to is None and _now() - self._renewed_at >= min_age:
            self._write()
            record = self._read()
            if record and not self._is_own(record):
                self.lost_to = _describe(record)
            self._renewed_at = _now()

    def confirm(self) -> None:
        self._renew(2 * self.beat_seconds)

    def renew(self, min_age: float) -> None:
        """Write a beat if the last beat is ``min_age`` seconds old. Logs a failure of the store."""
        try:
            self._renew(min_age)
        except (ObjectStoreError, OSError) as e:
            log.warning("the lease %s was not renewed: %s", self._uri, e)

    def _beat(self) -> None:
        while not self._stop.wait(self.beat_seconds):
            self.renew(0)
        self._remove()

    def release(self) -> None:
        if not self._held:
            return
        self._held = False
        self._without_thread.discard(self)
        self._users[self._uri] -= 1
        self._stop.set()
        for thread in self._threads:  # removes the object; a store that does not answer is tried for minutes
            thread.join(min(self._dead_seconds, max(seconds_left(), 1.0)))
        if not self._threads:
            self._remove()

    def _remove(self) -> None:
        """Delete the object if this process still holds it and no other lease of this process shares it."""
        try:
            if not self._users[self._uri]:
                self._renew(self.beat_seconds)  # no process takes over a lease that was renewed just now
                if self.lost_to is None:
                    self._transfer.delete(self._name)
        except (ObjectStoreError, OSError) as e:
            log.warning("the lease %s was not removed, and the next launch waits: %s", self._uri, e)


os.register_at_fork(after_in_child=HeartbeatLease._without_thread.clear)  # pyright: ignore[reportPrivateUsage]


def renew_leases() -> None:
    """Renew the leases that have no thread, if a beat is due. Call between batches and parts of transfers."""
    for lease in list(HeartbeatLease._without_thread):  # pyright: ignore[reportPrivateUsage]
        lease.renew(lease.beat_seconds)
