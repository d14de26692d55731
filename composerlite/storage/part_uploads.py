"""Sending one object in parts: several at once, in bounded memory, and not again what the store has already."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Protocol, final

from composerlite.errors import ObjectStoreError, ObjectStoreTransientError
from composerlite.storage.disk.memory import HostMemory
from composerlite.storage.object_store import ObjectStore, PartUpload, Progress
from composerlite.storage.retry import RetryPolicy
from composerlite.storage.workers import Batch, WorkerPool

_MiB = 1 << 20
_LEAST_PART_BYTES, _MOST_PART_BYTES = 8 * _MiB, 16 * _MiB
_USUAL_PARTS = 128
_THREADS = 4
_DRAIN_SECONDS = 60.0
_CLOSE_SECONDS = 5.0

_log = logging.getLogger(__name__)


def part_bytes_for(size_bytes: int, store: ObjectStore, wanted: int | None = None) -> int:
    """Return the size of the parts of an object: the same for a store and a size, so that a restart finds them equal.

    ``wanted`` or, where it is ``None``, 8 to 16 MiB; more where the store would otherwise get too many parts.
    """
    usual = min(_MOST_PART_BYTES, max(_LEAST_PART_BYTES, -(-size_bytes // _USUAL_PARTS)))
    least = max(store.least_part_bytes, -(-size_bytes // store.most_parts))
    size = max(least, usual if wanted is None else wanted)
    return size if size == wanted else -(-size // _MiB) * _MiB


def summed(callback: Progress | None, total: int) -> Callable[[int], None]:
    """Make a callback for numbers of bytes that calls ``callback`` with (bytes moved, ``total``)."""
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if callback is not None:
            callback(done, total)

    return progress


class Source(Protocol):
    """Source of the bytes of an object."""

    @property
    def size_bytes(self) -> int:
        """Size of all parts, in bytes."""
        ...

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes from ``offset`` on."""
        ...


@final
class FileSource:
    """A file of this machine, open until :meth:`close`; for who wants one, a file that tells how much of it was read.

    Args:
        path: of the file.
        callback: called by :meth:`read` with the bytes that it returned before.
    """

    def __init__(self, path: str | os.PathLike[str], callback: Progress | None = None) -> None:
        self.path = os.fspath(path)
        self._file = Path(path).open("rb")  # noqa: SIM115 - see close
        self._descriptor = self._file.fileno()
        self._callback = callback
        self.size_bytes = os.fstat(self._descriptor).st_size
        self.seek, self.tell = self._file.seek, self._file.tell

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes. Who asks for more has done with those before."""
        at = self.tell()
        if self._callback is not None and at < self.size_bytes:
            self._callback(at, self.size_bytes)
        return self._file.read(size)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes from ``offset`` on. ObjectStoreError: the file has become shorter."""
        got = 0
        while got < view.nbytes:
            count = os.preadv(self._descriptor, [view[got:]], offset + got)
            if not count:
                raise ObjectStoreError(
                    f"upload of {self.path!r}: it had {self.size_bytes} bytes and now ends at {offset + got}. "
                    "A file must not be changed while it is uploaded."
                )
            got += count

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@final
class MemorySource:
    """Bytes in memory, which must stay as they are until the upload has returned."""

    def __init__(self, data: memoryview) -> None:
        self._data = data.cast("B")
        self.size_bytes = data.nbytes

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes from ``offset`` on."""
        for at in range(0, view.nbytes, _MiB):  # other threads get their turn in between
            end = min(at + _MiB, view.nbytes)
            view[at:end] = self._data[offset + at : offset + end]


@final
class Buffers:
    """Memory for the parts that are on their way, used again and again. There are as many as are borrowed at once."""

    def __init__(self) -> None:
        self._free: list[HostMemory] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def borrow(self, size: int) -> Generator[memoryview]:
        """``size`` bytes for the time of the block."""
        with self._lock:
            memory = self._free.pop() if self._free else None
        if memory is not None and memory.size_bytes < size:
            memory.close()
            memory = None
        memory = memory or HostMemory(size)
        try:
            yield memory.view(0, size)
        finally:
            with self._lock:
                self._free.append(memory)

    def clear(self) -> None:
        """Release all memory that is not borrowed."""
        with self._lock:
            free, self._free = self._free, []
        for memory in free:
            memory.close()


@final
class PartSender:
    """The upload of one object in parts.

    Args:
        store: where to.
        name: of the object.
        source: its bytes, at least one.
        part_bytes: of every part but the last.
        pool: sends them.
        buffers: memory for them.
        retry: for every operation.
        resumable: continue with an unfinished upload of this name, and leave for the next one what may pass; else an
            upload that fails is aborted, whatever the reason.
    """

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        source: Source,
        part_bytes: int,
        *,
        pool: WorkerPool,
        buffers: Buffers,
        retry: RetryPolicy,
        resumable: bool = True,
    ) -> None:
        self._store = store
        self._name = name
        self._source = source
        self._part_bytes = part_bytes
        self._count = -(-source.size_bytes // part_bytes)
        self._pool = pool
        self._buffers = buffers
        self._retry = retry
        self._resumable = resumable
        self._create_only = False

    def run(self, callback: Progress | None, *, create_only: bool = False) -> bool:
        """Send all parts and complete the object; ``False``, and nothing done, if the store takes no parts.

        An unfinished upload of this name is continued, others of this name are aborted. What fails for good is
        aborted; what may pass, and what is interrupted, is left for the next upload of this name.

        Args:
            callback: is called in this thread with the number of bytes in the store.
            create_only: fail if the object exists. Another process may upload other bytes under this name, so an
                unfinished upload with another first part is left alone.

        Raises:
            FileExistsError: the object exists, and ``create_only`` is true.
            ObjectStoreTransientError: an operation failed too often.
            ObjectStoreError, PermissionError, OSError: as the verbs raise them.
        """
        self._create_only = create_only
        found = self._unfinished() if self._resumable else []
        self._abort(*found[:-1])
        if found:
            try:
                self._send(found[-1], callback, resumed=True, create_only=create_only)
                return True
            except ObjectStoreTransientError:
                raise
            except (FileNotFoundError, ObjectStoreError) as e:  # another upload may do what this one did not
                _log.warning("upload of %r: the unfinished one is of no use; starting anew: %s", self._name, e)
        if (upload := self._start()) is None:
            return False
        try:
            self._send(upload, callback, resumed=False, create_only=create_only)
        except FileNotFoundError as e:
            raise ObjectStoreError(
                f"upload of {self._name!r}: the store has forgotten it before it was complete: {e} "
                "Does something else upload the same name, or remove unfinished uploads early?"
            ) from e
        return True

    # ── beginning ────────────────────────────────────────────────────────────────────────────────────────────────
    def _unfinished(self) -> list[PartUpload]:
        """Uploads of this name to continue or abort, oldest first; none where it is not allowed or offered to look."""
        try:
            found = self._retry.run(lambda: self._store.unfinished_parts(self._name), self._what("look for parts"))
        except ObjectStoreTransientError:
            raise
        except (PermissionError, ObjectStoreError) as e:
            _log.info("upload of %r: not looking for an unfinished one: %s", self._name, e)
            return []
        found = [upload for upload in found if upload.name == self._name]
        return [upload for upload in found if not self._create_only or self._begins(upload)]

    def _begins(self, upload: PartUpload) -> bool:
        """Return true if the first part of an unfinished upload is there, and the same as that of the source."""
        with self._buffers.borrow(min(self._part_bytes, self._source.size_bytes)) as view:
            self._source.read_into(view, 0)
            return self._retry.run(lambda: self._has(upload, 1, view), self._what("look for parts"))

    def _start(self) -> PartUpload | None:
        tries: list[int] = []

        def start() -> PartUpload | None:
            tries.append(1)
            return self._store.start_parts(self._name)

        upload = self._retry.run(start, self._what("start"))
        if upload is not None and len(tries) > 1:  # an answer that was lost may have started one, too
            try:
                self._abort(*(other for other in self._unfinished() if other.upload_id != upload.upload_id))
            except ObjectStoreTransientError as e:  # it costs space, no more: abort_stale removes it
                _log.warning("upload of %r: could not abort it, parts may remain in the bucket: %s", self._name, e)
        return upload

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _send(self, upload: PartUpload, callback: Progress | None, *, resumed: bool, create_only: bool) -> None:
        progress = summed(callback, self._source.size_bytes)
        numbers = range(1, self._count + 1)
        batch = Batch(partial(self._send_part, upload, number, resumed=resumed) for number in numbers)
        try:
            self._pool.run(batch, progress)
            self._complete(upload, create_only=create_only)
        except BaseException as e:
            passing = isinstance(e, ObjectStoreTransientError | FileNotFoundError) or not isinstance(e, Exception)
            if self._resumable and passing:
                _log.warning("upload of %r: failed; its parts are left for another try: %s", self._name, e)
                raise
            # A part that arrives after the abort would stay for ever.
            if not batch.drain(_DRAIN_SECONDS):
                _log.warning("upload of %r: a part is still on its way while the upload is aborted", self._name)
            self._abort(upload)
            raise

    def _send_part(self, upload: PartUpload, number: int, batch: Batch, *, resumed: bool) -> int:
        """Job of the pool: have the store have part ``number``."""
        offset = (number - 1) * self._part_bytes
        size = min(self._part_bytes, self._source.size_bytes - offset)
        may_be_there = resumed

        def send() -> None:
            nonlocal may_be_there
            if may_be_there and self._has(upload, number, view):
                return
            may_be_there = True  # if this fails: the answer only may have been lost
            upload.send(number, view)

        with self._buffers.borrow(size) as view:
            with batch.touching():
                self._source.read_into(view, offset)
            self._retry.run(send, self._what(f"part {number} of {self._count}"), batch.stopped)
        return size

    def _has(self, upload: PartUpload, number: int, view: memoryview) -> bool:
        try:
            return upload.has(number, view)
        except ObjectStoreTransientError:
            raise
        except (PermissionError, ObjectStoreError) as e:  # not allowed or not offered: then it is sent
            _log.info("upload of %r: not asking for its parts: %s", self._name, e)
            return False

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _complete(self, upload: PartUpload, *, create_only: bool) -> None:
        tries: list[int] = []

        def complete() -> None:
            tries.append(1)
            try:
                upload.complete(count=self._count, create_only=self._create_only)
            except (FileNotFoundError, FileExistsError):
                if len(tries) == 1 or not self._is_there():
                    raise  # else it was completed by an earlier try, whose answer was lost

        self._retry.run(complete, self._what("completion"))
        size = self._retry.run(lambda: self._store.get_object_size(self._name), self._what("look at the object"))
        if size != self._source.size_bytes:
            raise ObjectStoreError(
                f"upload of {self._name!r}: {self._source.size_bytes} bytes were sent and the object has {size}. "
                "Does something else write the same name?"
            )

    def _is_there(self) -> bool:
        """Return true if the object has the bytes of the source."""
        try:
            if self._store.get_object_size(self._name) != self._source.size_bytes:
                return False
        except FileNotFoundError:
            return False
        try:
            self._pool.run(Batch(partial(self._compare, number) for number in range(self._count)), int)
        except _DifferentError:
            return False
        return True

    def _compare(self, index: int, batch: Batch) -> int:
        """Job of the pool: compare one part of the object with the source."""
        offset = index * self._part_bytes
        size = min(self._part_bytes, self._source.size_bytes - offset)
        data = self._retry.run(
            lambda: self._store.read_range(self._name, offset, size), self._what("comparison"), batch.stopped
        )
        with self._buffers.borrow(size) as view:
            with batch.touching():
                self._source.read_into(view, offset)
            if memoryview(data) != view:
                raise _DifferentError
        return size

    def _abort(self, *uploads: PartUpload) -> None:
        """Abort ``uploads``. One that cannot be aborted costs space, no more: it is logged."""
        for upload in uploads:
            try:
                self._retry.run(upload.abort, self._what("abort"))
            except (ObjectStoreError, PermissionError, FileNotFoundError) as e:
                _log.warning("upload of %r: upload %s was not aborted: %s", self._name, upload.upload_id, e)

    def _what(self, step: str) -> str:
        return f"upload of {self._name!r}, {step}"


def send_once(store: ObjectStore, name: str, source: Source, callback: Progress | None, *, create_only: bool) -> None:
    """Send one object in parts, several at once and none a second time: a store's own upload of a large file."""
    pool, buffers = WorkerPool(_THREADS, name="upload"), Buffers()
    size = part_bytes_for(source.size_bytes, store, _MOST_PART_BYTES)
    retry = RetryPolicy(attempts=1)
    sender = PartSender(store, name, source, size, pool=pool, buffers=buffers, retry=retry, resumable=False)
    try:
        sender.run(callback, create_only=create_only)
    finally:
        pool.close(_CLOSE_SECONDS)
        buffers.clear()


class _DifferentError(Exception):
    """The object has other bytes than the source."""
