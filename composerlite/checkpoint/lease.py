"""One run, one process: who holds the lease of a run writes its checkpoints."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, final

from composerlite.checkpoint.remote import RemoteCatalog
from composerlite.errors import ObjectStoreError, RunInUseError
from composerlite.storage import make_folder

__all__ = ["BucketLease", "FolderLease", "Lease", "take_leases"]

log = logging.getLogger(__name__)
_BEAT_SECONDS = 5.0
_DEAD_SECONDS = 20.0
"""A holder whose lease has not changed for so long is dead: it has missed three beats."""
_LOOK_SECONDS = 0.5
_MOST_BYTES = 4096


class Lease(Protocol):
    """The right to write the checkpoints of one run to one place."""

    def try_to_take(self) -> str | None:
        """Take it; who has it, if that is somebody else."""
        ...

    def release(self) -> None:
        """Let the next one have it. Twice is fine."""
        ...

    @property
    def lost_to(self) -> str | None:
        """Who has taken it from us; ``None``: nobody."""
        ...


def take_leases(leases: Sequence[Lease], what: str, timeout: float) -> None:
    """Take all ``leases``, waiting for those who have them.

    Args:
        leases: of one run.
        what: is written, for messages.
        timeout: seconds to wait for a holder who is alive.

    Raises:
        RunInUseError: one is not given up in time. None is held then.
    """
    until = time.monotonic() + timeout
    for number, lease in enumerate(leases):
        told = ""
        while (holder := lease.try_to_take()) is not None:
            if time.monotonic() > until:
                for taken in leases[:number]:
                    taken.release()
                raise RunInUseError(
                    f"{what} is written by another process, {holder}, which is alive: two launches of one run would "
                    f"train it twice. Waited {timeout:.0f} s for its end. Stop it, or give this run a run_name of its "
                    "own."
                )
            if holder != told:
                log.warning("%s is written by %s: waiting for its end, %.0f s at most", what, holder, timeout)
                told = holder
            time.sleep(_LOOK_SECONDS)


def _own_name() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid()}


def _shown(record: dict[str, Any]) -> str:
    return f"process {record.get('pid')} on {record.get('host')}"


@final
class FolderLease:
    """A lock on a file beside the manifests. It ends with the process that holds it, however that ends.

    Locks are those of POSIX, which belong to a process rather than to its children, and which file systems that are
    shared between nodes have too. Where one has none, there is no lease.
    """

    def __init__(self, folder: str | Path, run_name: str) -> None:
        self._path = Path(folder) / ".manifest" / f".{run_name}.lease"
        self._file: int | None = None
        self._holds = False

    @property
    def lost_to(self) -> str | None:
        """Nobody can take a lock."""
        return None

    def try_to_take(self) -> str | None:
        """See :class:`Lease`."""
        if self._file is None:
            make_folder(self._path.parent)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        file = self._file
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.EACCES, errno.EAGAIN):
                with contextlib.suppress(ValueError, OSError):
                    return _shown(json.loads(os.pread(file, _MOST_BYTES, 0)))
                return "a process that has not said its name"
            log.warning("no lock on %s: %s. Nothing keeps a second launch of this run from writing", self._path, e)
            return None
        if not self._is_there(file):  # who had it has removed it: the file that counts is another
            os.close(file)
            self._file = None
            return self.try_to_take()
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(_own_name()).encode(), 0)
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(self._path)) from e  # the system's own names no file
        self._holds = True
        return None

    def release(self) -> None:
        """See :class:`Lease`."""
        file, self._file = self._file, None
        if file is not None:
            if self._holds:
                self._path.unlink(missing_ok=True)
            self._holds = False
            os.close(file)

    def _is_there(self, file: int) -> bool:
        """Whether ``file`` is the one that another process would open."""
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        own = os.fstat(file)
        return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


@final
class BucketLease:
    """An object beside the manifests that its holder writes again every few seconds.

    Nobody's clock is compared with another's: who wants the lease watches the object, and takes it when it has not
    changed for longer than a living holder would leave it.

    Args:
        remote: where the checkpoints are. run_name: of the run.
        beat_seconds: between two writes of the holder.
        dead_seconds: a holder who has written nothing for so long is taken for dead; the same for all processes.
    """

    def __init__(
        self,
        remote: RemoteCatalog,
        run_name: str,
        *,
        beat_seconds: float = _BEAT_SECONDS,
        dead_seconds: float = _DEAD_SECONDS,
    ) -> None:
        self._transfer = remote.transfer
        self._name = remote.name_of(f".manifest/.{run_name}.lease")
        self._own, self._beats = {**_own_name(), "id": uuid.uuid4().hex}, 0
        self._beat_seconds, self._dead_seconds = beat_seconds, dead_seconds
        self._seen: tuple[bytes, float] | None = None
        self._stop = threading.Event()
        self._beating: threading.Thread | None = None
        self._lost_to: str | None = None

    @property
    def lost_to(self) -> str | None:
        """See :class:`Lease`: while this process slept, or could not reach the bucket."""
        return self._lost_to

    def try_to_take(self) -> str | None:
        """See :class:`Lease`."""
        data = self._read()
        record = _record(data)
        if data is not None and record.get("id") != self._own["id"] and not self._is_dead(data, record):
            return _shown(record)
        try:
            self._write(create_only=data is None)
        except FileExistsError:
            return "a process that was first"
        if (winner := _record(self._read())).get("id") != self._own["id"]:
            return _shown(winner)
        self._stop.clear()
        self._beating = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._beating.start()
        return None

    def release(self) -> None:
        """See :class:`Lease`."""
        beating, self._beating = self._beating, None
        if beating is None:
            return
        self._stop.set()
        beating.join(self._dead_seconds)
        if self._lost_to is None:
            with contextlib.suppress(ObjectStoreError, OSError):  # the next one waits a little then
                self._transfer.delete(self._name)

    def _is_dead(self, data: bytes, record: dict[str, Any]) -> bool:
        """Whether its holder is known to be dead, or has not been heard of for long since we began to watch."""
        if record.get("host") == socket.gethostname() and not _is_another(record["pid"]):
            return True
        now = time.monotonic()
        if self._seen is None or self._seen[0] != data:
            self._seen = data, now
        return now - self._seen[1] > self._dead_seconds

    def _beat(self) -> None:
        while not self._stop.wait(self._beat_seconds):
            try:
                there = _record(self._read())
                if there and there.get("id") != self._own["id"]:
                    self._lost_to = _shown(there)
                    return
                self._beats += 1
                self._write()
            except (ObjectStoreError, OSError) as e:
                log.warning("the lease of this run was not renewed: %s", e)

    def _read(self) -> bytes | None:
        try:
            return self._transfer.read_all(self._name, most_bytes=_MOST_BYTES)
        except FileNotFoundError:
            return None

    def _write(self, *, create_only: bool = False) -> None:
        self._transfer.put_bytes(
            self._name, json.dumps({**self._own, "beat": self._beats}).encode(), create_only=create_only
        )


def _record(data: bytes | None) -> dict[str, Any]:
    """What a holder has written; nothing, if it is not that."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        record: dict[str, Any] = json.loads(data or b"{}")
        return {"host": record["host"], "pid": int(record["pid"]), "id": record["id"]}
    return {}


def _is_another(pid: int) -> bool:
    """Whether it is a living process other than this one. A trainer here that was not closed trains no more."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
