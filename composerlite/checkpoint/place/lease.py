"""Leases of runs: the process that holds a run's lease writes its checkpoints, one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import math
import os
import re
import socket
import struct
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, final

from composerlite.errors import CorruptCheckpointError, ObjectStoreError, RunInUseError
from composerlite.storage import Transfer, make_folder, seconds_left
from composerlite.threads import start_threads

__all__ = ["FileLease", "HeartbeatLease", "Lease", "renew_leases", "take_leases", "turn_at"]

log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
_PAUSE_SECONDS = 0.02
_LAST_SECONDS = 1.0
"""For so long a lease is given up after the end of a grace period."""
_PATIENCE = timedelta(hours=2)
_MOST_BYTES = 4096
_MOST_VANISHED = 4
_CLAIM = ".claim"
_WHOLE_FILE = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""``struct flock`` of Linux on 64 bits."""


_ONE_RUN = "two launches of one run would train it twice. Stop it, or give this run a run_name of its own."


class Lease(ABC):
    """The right of one process at a time to write what has one name, as a :class:`Place` gives it out.

    Attributes:
        lost_to: who has taken it from us; ``None``: nobody.
    """

    lost_to: str | None = None

    @abstractmethod
    def try_to_take(self) -> str | None:
        """Take it; who has it, if that is somebody else."""

    @abstractmethod
    def release(self) -> None:
        """Release the lease. May be called twice."""

    @abstractmethod
    def keep(self) -> bool:
        """See before a save that it is still ours, and take it again if it vanished; false if it had."""


def take_leases(leases: Sequence[Lease], what: str, timeout: float, advice: str = _ONE_RUN) -> None:
    """Take all ``leases``, waiting for those who have them.

    Args:
        leases: of one run.
        what: is written, for messages.
        timeout: seconds to wait for a holder who is alive.
        advice: why that is not allowed, and the way out, for messages.

    Raises:
        RunInUseError: one is not given up in time. None is held then.
    """
    until = time.monotonic() + timeout
    with contextlib.ExitStack() as taken:
        for lease in leases:
            told = ""
            while (holder := lease.try_to_take()) is not None:
                if time.monotonic() > until:
                    raise RunInUseError(
                        f"{what} is written by another process, {holder}, which is alive: {advice} "
                        f"Waited {timeout:.0f} s for its end."
                    )
                if holder != told:
                    log.warning("%s is written by %s: waiting for its end, %.0f s at most", what, holder, timeout)
                    told = holder
                time.sleep(_LOOK_SECONDS)
            taken.callback(lease.release)
        taken.pop_all()


@functools.cache
def _machine() -> dict[str, str]:
    """Identity of the space of process numbers: host, boot and process namespace.

    Containers on one machine may share its name and each have a process 1, and a machine may have booted since.
    """
    told = {"host": socket.gethostname(), "boot": "", "processes": ""}
    with contextlib.suppress(OSError):  # not Linux, or hidden: nothing is taken for dead by its number then
        told["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        told["processes"] = str(Path("/proc/self/ns/pid").readlink())
    return told


def _own_name() -> dict[str, Any]:
    return {**_machine(), "pid": os.getpid(), "started": _started(os.getpid())}


@functools.cache
def _own_id(pid: int) -> str:
    """Identity of this process among all that ever were; one that is forked has another number."""
    return f"{pid}-{uuid.uuid4().hex}"


def _started(pid: int) -> str | None:
    """Return the start time of the process ``pid`` in kernel ticks; ``None`` if /proc does not show it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _shown(record: dict[str, Any]) -> str:
    if not record:
        return "a process that has not said its name"
    return f"process {record.get('pid')} on {record.get('host')}"


@final
class FileLease(Lease):
    """A lock on the file ``path``. It ends with the process that holds it, however that ends.

    The lock belongs to the open file (``F_OFD_SETLK`` of Linux, else ``flock``), and not to the process, whose POSIX
    locks end as soon as anything in it opens and closes the file, such as a copy of the folder. Processes that are
    forked give their copy back, so workers that outlive their parent hold nothing. Over NFS a lock is the server's.
    Where a file system has none, there is no lease. All leases of one file in one process share the lock: a second
    Trainer of a run does not shut the first one out. It is lost when the file is removed, as with its folder.
    """

    _held: ClassVar[dict[Path, tuple[int, set[FileLease]]]] = {}
    """The open file of each lease that this process holds, and who shares it."""

    def __init__(self, path: Path) -> None:
        self._path = Path(os.path.abspath(path))  # noqa: PTH100
        self._holds = False

    def keep(self) -> bool:
        if not self._holds or (self._shared() is not None and self in self._held[self._path][1]):
            return True
        self.lost_to = self.try_to_take()
        self._holds = self.lost_to is None
        return False

    def _shared(self) -> int | None:
        """Return the file by which this process holds the lease; ``None`` if it does not, or the file was removed."""
        file, _ = self._held.get(self._path, (None, None))
        if file is None or self._is_there(file):
            return file
        del self._held[self._path]
        os.close(file)
        return None

    def try_to_take(self) -> str | None:
        if self._shared() is not None:
            self._held[self._path][1].add(self)
            self._holds = True
            return None
        make_folder(self._path.parent)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            holder = self._take(file)
        except BaseException:
            os.close(file)
            raise
        if self._held.get(self._path, (None, None))[0] != file:
            os.close(file)
        return holder

    def _take(self, file: int) -> str | None:
        """Lock ``file``, which is open; who has it, if that is somebody else."""
        try:
            if not _lock(file):
                return _holder(file)
        except OSError as e:
            log.warning("no lock on %s: %s. Nothing keeps a second launch of this run from writing", self._path, e)
            return None
        if not self._is_there(file):  # who had it has removed it: the file that counts is another
            return self.try_to_take()
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(_own_name()).encode(), 0)
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(self._path)) from e  # the system's own names no file
        self._held[self._path] = (file, {self})
        self._holds = True
        return None

    def release(self) -> None:
        if not self._holds:
            return
        self._holds = False
        if (file := self._shared()) is None:
            return
        sharing = self._held[self._path][1]
        sharing.discard(self)
        if sharing:
            return
        del self._held[self._path]
        try:
            self._path.unlink(missing_ok=True)
        except OSError as e:  # a disk that is read-only by now: the lock ends all the same
            log.warning("%s stays: %s", self._path, e)
        finally:
            os.close(file)

    def _is_there(self, file: int) -> bool:
        """Return true if ``file`` is the one that another process would open."""
        try:
            there = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        own = os.fstat(file)
        return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)

    @classmethod
    def _forget_in_child(cls) -> None:
        """Close the files of the parent, whose locks a child would hold on to when the parent is dead."""
        held, cls._held = cls._held, {}
        for file, _ in held.values():
            os.close(file)


os.register_at_fork(after_in_child=FileLease._forget_in_child)  # pyright: ignore[reportPrivateUsage]


def _lock(file: int) -> bool:
    """Lock ``file`` for this opening of it; whether nobody else had.

    Raises:
        OSError: its file system has no locks.
    """
    try:
        if hasattr(fcntl, "F_OFD_SETLK"):
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _holder(file: int) -> str:
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return _shown(json.loads(os.pread(file, _MOST_BYTES, 0)))
    return _shown({})


@final
class HeartbeatLease(Lease):
    """An object that its holder writes again every few seconds. It is lost by who slept, or could not reach the bucket.

    Nobody's clock is compared with another's: who wants the lease watches the object, and takes it when it has not
    changed for longer than a living holder would leave it. Of several that want to take over at once one may: it is
    the one that creates an object named for the content of the dead holder's, its claim. The claim of a process that
    died over it is taken over in the same way. Where a store cannot create atomically, two may. All leases of one
    object in one process share it, as two savers of a Trainer do: the last that is released removes it.

    A thread of its own writes. Where none can be started :func:`renew_leases` does, whenever it is called, and who has
    not called it for too long may lose the lease.

    Args:
        transfer: to the bucket. name: of the object.
        beat_seconds: between two writes of the holder.
        dead_seconds: a holder who has written nothing for so long, and so has missed three beats, is taken for dead;
            the same for all processes.
        of: the lease of the run whose files have the name. Its heartbeats count for this one, which is written once:
            it is taken first, and released last.
    """

    _unattended: ClassVar[set[HeartbeatLease]] = set()
    """Those that are held without a thread."""
    _shared: ClassVar[Counter[tuple[str, str]]] = Counter()
    """How many leases of each object, by who holds it, are held in this process."""

    def __init__(
        self,
        transfer: Transfer,
        name: str,
        *,
        beat_seconds: float = 5.0,
        dead_seconds: float = 20.0,
        of: HeartbeatLease | None = None,
    ) -> None:
        self._transfer, self._name = transfer, name
        self._own, self._beats = {**_own_name(), "id": _own_id(os.getpid())}, 0
        if of is not None:
            self._own["of"] = of._name
        self._beat_seconds, self._dead_seconds = beat_seconds, dead_seconds
        self._seen: dict[bytes, float] = {}
        self._stop = threading.Event()
        self._held, self._beating, self._vanished = False, list[threading.Thread](), 0
        self._renewing, self._renewed = threading.Lock(), 0.0

    def try_to_take(self) -> str | None:
        seen, self._seen = self._seen, {}
        data = self._read(self._name)
        dead = None if self._is_own(data) else data
        if dead is not None and (holder := self._claim(dead, seen)) is not None:
            return holder
        with contextlib.suppress(FileExistsError):  # another one was first
            self._put(self._name, create_only=data is None)
        if (winner := self._read(self._name)) is None:  # who has had it may have removed it in this moment
            self._vanished += 1
            if self._vanished == _MOST_VANISHED:
                raise PermissionError(
                    f"{self._transfer.store.get_uri(self._name)}: it was written and is not found, "
                    f"{self._vanished} times: get the right to read there. Some stores hide what one may not read."
                )
        else:
            self._vanished = 0
        if not self._is_own(winner):
            return _shown(_record(winner))
        if dead is not None:
            self._remove_claims()
        self._stop.clear()
        self._shared[self._key] += 1
        self._held, self._renewed, self.lost_to = True, time.monotonic(), None
        self._beating = start_threads(self._beat, 1, name="lease")
        if not self._beating:
            if not self._unattended:
                log.warning(
                    "no thread renews the lease %s: it is renewed between batches and parts of transfers, and another "
                    "launch may take it when %.0f s pass without either",
                    self._transfer.store.get_uri(self._name),
                    self._dead_seconds,
                )
            self._unattended.add(self)
        return None

    def _claim(self, data: bytes, seen: dict[bytes, float]) -> str | None:
        """Get the right to write over ``data``, the lease of a holder who is dead; who has it, if that is another."""
        last: bytes | None = data
        while last is not None and self._is_dead(last, seen):
            claim = f"{self._name}.{hashlib.sha256(last).hexdigest()[:16]}{_CLAIM}"
            try:
                self._put(claim, create_only=True)
            except FileExistsError:
                last = self._read(claim)
                continue
            if (now := self._read(self._name)) == data:
                return None
            with contextlib.suppress(ObjectStoreError, OSError):  # the next one removes it
                self._transfer.delete(claim)  # meanwhile it was taken over, and the claim on it was removed
            return _shown(_record(now))
        return _shown(_record(last))

    def _remove_claims(self) -> None:
        """Remove the claims on leases before this one, those of dead processes too."""
        claim = re.compile(rf"{re.escape(self._name)}\.[0-9a-f]{{16}}{re.escape(_CLAIM)}")
        with contextlib.suppress(ObjectStoreError, OSError):  # the next one removes them
            for one in self._transfer.list(f"{self._name}."):
                if claim.fullmatch(one.name):
                    self._transfer.delete(one.name)

    def release(self) -> None:
        if not self._held:
            return
        self._held = False
        self._unattended.discard(self)
        self._shared.subtract([self._key])
        self._stop.set()
        left = max(seconds_left(), _LAST_SECONDS)
        for thread in self._beating:
            thread.join(min(self._dead_seconds, left))
        if self._shared[self._key]:
            return
        del self._shared[self._key]
        if self.lost_to is not None:
            return
        if left == math.inf:
            self._remove()
        for thread in start_threads(self._remove, 1, name="lease") if left < math.inf else ():
            thread.join(left)  # a store that does not answer is tried for minutes

    def _remove(self) -> None:
        with contextlib.suppress(ObjectStoreError, OSError):  # the next one waits a little then
            if self._is_own(self._read(self._name)):
                self._transfer.delete(self._name)

    def keep(self) -> bool:
        if self in self._unattended:
            self._renew_if_due()
        return True

    @property
    def _key(self) -> tuple[str, str]:
        return self._own["id"], self._transfer.store.get_uri(self._name)

    def _is_own(self, data: bytes | None) -> bool:
        return _record(data).get("id") == self._own["id"]

    def _is_dead(self, data: bytes, seen: dict[bytes, float]) -> bool:
        """Return true if the process that wrote ``data`` is known to be dead, or ``data`` was ``seen`` for long."""
        record = _record(data)
        here = {key: record.get(key) for key in ("host", "boot", "processes")} == _machine()
        if here and all(_machine().values()) and _is_gone(record["pid"], record.get("started")):
            return True
        if (run := record.get("of")) is not None:
            beat = self._read(run)
            if _record(beat) and _record(beat)["id"] != record["id"]:
                return True  # who wrote it would have released it before that of its run
            data += beat or b""
        now = time.monotonic()
        self._seen[data] = seen.get(data, now)
        return now - self._seen[data] > self._dead_seconds

    def _beat(self) -> None:
        while self.lost_to is None and not self._stop.wait(self._beat_seconds):
            self._renew()

    def _renew(self) -> None:
        try:
            there = self._read(self._name)
            if _record(there) and not self._is_own(there):
                self.lost_to = _shown(_record(there))
                return
            if there is None or "of" not in self._own:
                self._beats += 1
                self._put(self._name, create_only=there is None)
        except FileExistsError:
            pass  # it had vanished, and another process was first: it is read at the next beat
        except (ObjectStoreError, OSError) as e:
            log.warning("the lease of this run was not renewed: %s", e)

    @classmethod
    def renew_due(cls) -> None:
        """Renew those that are held without a thread, and are due."""
        for lease in list(cls._unattended):
            lease._renew_if_due()

    def _renew_if_due(self) -> None:
        if time.monotonic() - self._renewed < self._beat_seconds or not self._renewing.acquire(blocking=False):
            return
        try:
            self._renew()
            self._renewed = time.monotonic()
            if self.lost_to is None:
                self._beating = start_threads(self._beat, 1, name="lease")  # there may be one by now
            if self._beating or self.lost_to is not None:
                self._unattended.discard(self)
        finally:
            self._renewing.release()

    def _read(self, name: str) -> bytes | None:
        try:
            return self._transfer.read_all(name, most_bytes=_MOST_BYTES)
        except FileNotFoundError:
            return None
        except CorruptCheckpointError:
            return b""  # it is larger than any record, and so is none

    def _put(self, name: str, *, create_only: bool) -> None:
        self._transfer.put_bytes(name, json.dumps({**self._own, "beat": self._beats}).encode(), create_only=create_only)


os.register_at_fork(after_in_child=HeartbeatLease._unattended.clear)  # pyright: ignore[reportPrivateUsage]


def renew_leases() -> None:
    """Renew the leases of this process that no thread renews and that are due: to be called often."""
    HeartbeatLease.renew_due()


def _record(data: bytes | None) -> dict[str, Any]:
    """Parse the record of a holder; empty if it is not one."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        record: dict[str, Any] = json.loads(data or b"{}")
        known = {key: record[key] for key in ("boot", "processes", "started", "of") if isinstance(record.get(key), str)}
        return {**known, "host": str(record["host"]), "pid": int(record["pid"]), "id": str(record["id"])}
    return {}


def _is_gone(pid: int, started: str | None) -> bool:
    """Return true if the system says that the process ``pid`` that ``started`` then does not exist.

    Another of that number does not count, and this one knows its own by their id. False where it is not known: /proc
    may hide the processes of other users.
    """
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # it belongs to another user; or it is no number of a process
        pass
    now = _started(pid)
    return None not in (now, started) and now != started  # a number is given again


# ── turns ────────────────────────────────────────────────────────────────────────────────────────────────────────────
_turns: set[tuple[int, int, int, int]] = set()
"""Those that threads of this process have: process, thread, device and inode."""


@contextlib.contextmanager
def turn_at(path: Path, timeout: timedelta = _PATIENCE) -> Generator[None]:
    """Within it no other thread or process of this machine is in one at ``path``.

    A process that dies gives its turn to the next. Within a turn of the same thread, as a handler of a signal that
    saves may be, there is nothing to wait for.

    Args:
        path: a directory, or a file, which is made if need be.
        timeout: to wait for the others.

    Raises:
        OSError: a link is there, or what cannot be opened; or the file system has no locks.
        TimeoutError: the others have taken longer than ``timeout``.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    how = os.O_DIRECTORY if path.is_dir() else os.O_WRONLY | os.O_CREAT
    file = os.open(path, how | os.O_NOFOLLOW, 0o666)
    status = os.fstat(file)
    turn = os.getpid(), threading.get_ident(), status.st_dev, status.st_ino
    try:
        if turn in _turns:
            yield
            return
        while not _locked(file):
            if time.monotonic() > deadline:
                raise TimeoutError(f"other processes have held {str(path)!r} for {timeout}: does one of them hang?")
            time.sleep(_PAUSE_SECONDS)
        _turns.add(turn)
        try:
            yield
        finally:
            _turns.discard(turn)
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile would hold it on
    finally:
        os.close(file)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
