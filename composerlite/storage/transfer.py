"""Transfer: uploads and downloads objects, in parts and with retries. VerifiedObject: reads and verifies an object.
Uploader: uploads in the background.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import IO, final

import xxhash

from composerlite.errors import ConfigError, CorruptCheckpointError, ObjectStoreError, ObjectStoreTransientError
from composerlite.storage.disk.files import BLOCK_BYTES, FileDigest, StagedFile, reserve, set_direct, write_window
from composerlite.storage.disk.memory import address_of, borrow_memory, give_memory_back
from composerlite.storage.disk.reader import ReadTargets, Unit, check_targets, cut, layers, put, read_bytes, units_of
from composerlite.storage.object_store import ObjectInfo, ObjectRange, ObjectStore, PartUpload, Progress
from composerlite.storage.progress import summed
from composerlite.storage.retry import RetryPolicy
from composerlite.storage.workers import Background, WorkerPool
from composerlite.types import Closing, Piece, batches

_MiB = 1 << 20
_WHOLE_BYTES = 16 * _MiB  # up to this size an object is sent by one request
_LEAST_PART_BYTES, _MOST_PART_BYTES, _USUAL_PARTS = 8 * _MiB, 16 * _MiB, 128
_LEAST_RANGE_BYTES, _MOST_RANGE_BYTES = _MiB, 32 * _MiB
_WINDOW_BYTES = 8 * _MiB  # memory of each thread in a download to a file
_GAP_BYTES = 512 << 10  # an additional request takes about as long as to read a gap of this size
_CLOSE_SECONDS = 5.0
_DRAIN_SECONDS = 60.0

_log = logging.getLogger(__name__)


@final
class ReplacedError(ObjectStoreError):
    """An object was replaced by another upload while it was read."""


@final
class SameVersion:
    """Checks that all parts of the object ``name`` have the version of the first part. Threads may share a check.

    The check finds only differences in :attr:`ObjectRange.version`: a store without versions may not show a new upload.

    Args:
        name: name of the object.
        size_bytes: expected size of the object; ``None``: any.
    """

    def __init__(self, name: str, size_bytes: int | None = None) -> None:
        self._name = name
        self._size_bytes = size_bytes
        self._first: dict[str, str] = {}  # setdefault is atomic

    def check(self, found: ObjectRange) -> None:
        """Raise an error if ``found`` has another version or size than expected.

        Raises:
            ReplacedError: the version differs from the version of the first answer.
            CorruptCheckpointError: the size is not the expected one.
        """
        if found.version != self._first.setdefault("version", found.version):
            raise ReplacedError(f"object {self._name!r} was replaced while it was read: read it again.")
        if self._size_bytes not in (None, found.size_bytes):
            raise CorruptCheckpointError(
                f"object {self._name!r} has {found.size_bytes} bytes where {self._size_bytes} were expected."
            )


@final
class _Batch:
    """Jobs of one transfer. At most ``threads`` jobs run at the same time. The first error stops the other jobs.

    Attributes:
        stopped: set when no job should continue.
    """

    def __init__(self, pool: WorkerPool, threads: int) -> None:
        self.stopped = threading.Event()
        self._pool = pool
        self._threads = threads
        self._lock = threading.Lock()
        self._moved = 0
        self._pending: set[Future[object]] = set()

    def count(self, moved: int) -> None:
        """Count bytes moved by a job."""
        with self._lock:
            self._moved += moved

    def deliver(self, put: Callable[[bytes, int], object], piece: bytes, at: int) -> None:
        """Call ``put`` with received bytes and the offset ``at``, and count the bytes.

        Raises:
            CancelledError: the batch was stopped. Then ``put`` may not write to the memory of the caller.
        """
        with self._lock:
            if self.stopped.is_set():
                raise CancelledError
            put(bytes(piece), at)  # a store may yield another type of buffer
            self._moved += len(piece)

    def run(self, jobs: Iterable[Callable[[], object]], progress: Callable[[int], object]) -> None:
        """Run all jobs in the pool, and call ``progress`` in this thread with each new number of bytes moved.

        Few jobs are queued in advance, so that concurrent transfers take turns.

        Raises:
            Exception: the first error of a job. After an error or an interrupt no bytes are delivered, but jobs may
                still run and wait for the network.
        """
        jobs = iter(jobs)
        try:
            while True:
                while len(self._pending) < 2 * self._threads and (job := next(jobs, None)) is not None:
                    self._pending.add(self._pool.submit(job))
                if not self._pending:
                    break
                done, self._pending = wait(self._pending, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                with self._lock:
                    moved, self._moved = self._moved, 0
                if moved:
                    progress(moved)
        except BaseException:
            self.stopped.set()
            for future in self._pending:
                future.cancel()
            with self._lock:  # wait for the end of a delivery
                raise

    def drain(self) -> bool:
        """Wait after an error until all jobs have ended. Return false if a job still runs after 60 s."""
        return not wait(self._pending, timeout=_DRAIN_SECONDS).not_done


@final
class _Source:
    """Bytes to upload: a file, or memory that does not change until the upload has returned.

    The file stays open as long as a thread uses this object. Each thread reads into a buffer of its own.
    """

    _file: IO[bytes] | None = None  # for __del__ after an error of __init__

    def __init__(self, content: str | Path | memoryview) -> None:
        self._memory = content.cast("B") if isinstance(content, memoryview) else None
        self._file = None if isinstance(content, memoryview) else Path(content).open("rb")  # noqa: SIM115 - see __del__
        self._buffers = threading.local()
        self.size_bytes = os.fstat(self._file.fileno()).st_size if self._file else len(self._memory or b"")

    def view(self, offset: int, end: int) -> memoryview:
        """Return the bytes from ``offset`` to ``end``, valid until the next call in this thread.

        Raises:
            ObjectStoreError: the file has become shorter.
        """
        if self._memory is not None:
            return self._memory[offset:end]
        assert self._file is not None
        size = end - offset
        buffer: bytearray = getattr(self._buffers, "buffer", bytearray())
        if len(buffer) < size:
            self._buffers.buffer = buffer = bytearray(size)
        view, got = memoryview(buffer)[:size], 0
        while got < size:
            count = os.preadv(self._file.fileno(), [view[got:]], offset + got)
            if not count:
                raise ObjectStoreError(
                    f"upload of {self._file.name!r}: it had {self.size_bytes} bytes and now ends at "
                    f"{offset + got}. Do not change a file during its upload."
                )
            got += count
        return view

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()


def part_bytes_for(size_bytes: int, store: ObjectStore, wanted: int | None = None) -> int:
    """Return the size of the parts of an object in bytes. The size is the same after a restart, so uploads can resume.

    Args:
        size_bytes: size of the object.
        store: the store.
        wanted: preferred size, if the store accepts parts of this size; ``None``: 8 to 16 MiB.
    """
    usual = min(_MOST_PART_BYTES, max(_LEAST_PART_BYTES, -(-size_bytes // _USUAL_PARTS)))
    least = max(store.least_part_bytes, -(-size_bytes // store.most_parts))
    size = max(least, usual if wanted is None else wanted)
    return size if size == wanted else -(-size // _MiB) * _MiB


@final
class Transfer(Closing):
    """Moves objects to and from ``store`` with retries, and large objects in parts at the same time.

    Used as a context manager, or until :meth:`close`; the store stays open. Threads may share a transfer. Memory is
    limited to ``threads`` parts. Only one process at a time may upload to a name: an unfinished upload of the name is
    resumed.

    Every method raises the errors of the store, and ObjectStoreTransientError only after the last attempt. After an
    error or an interrupt no thread writes to the files or memory of the caller.

    Args:
        store: store of the objects. The caller closes the store.
        threads: number of parts that move at the same time.
        retry: attempts and pauses of each operation.
        part_bytes: size of the parts of uploads, and of the largest range that one request reads; ``None``: 8 to
            16 MiB, and up to 32 MiB for reading.

    Raises:
        ConfigError: a value is out of its range.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        threads: int = 8,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        part_bytes: int | None = None,
    ) -> None:
        if threads < 1:
            raise ConfigError(f"threads={threads}: expected 1 or more")
        if part_bytes is not None and part_bytes < 1:
            raise ConfigError(f"part_bytes={part_bytes}: expected 1 or more")
        self.store = store
        self._threads = threads
        self._retry = retry
        self._part_bytes = part_bytes
        self._pool = WorkerPool(threads, name="transfer")

    # ── uploads ──────────────────────────────────────────────────────────────────────────────────────────────────
    def upload(
        self, name: str, path: str | Path, callback: Progress | None = None, *, create_only: bool = False
    ) -> None:
        """Make the file ``path`` the content of the object ``name``, in place of the old content.

        A large file is sent in parts. Parts of an interrupted upload with the same bytes are not sent again.
        After a transient error, a FileNotFoundError, an interrupt or a kill, the parts stay for the next upload of the
        name or for :meth:`abort_stale`. After any other error the parts are deleted.

        Args:
            name: name of the object.
            path: file, which must not change during the upload.
            callback: called in this thread with (bytes in the store, total).
            create_only: raise FileExistsError if the object exists. An object with the same bytes is no error in a
                retry: the answer to an earlier attempt was lost.

        Raises:
            FileNotFoundError: the file or the bucket does not exist.
        """
        put = partial(self.store.upload_object, name, path, callback)
        self._send(name, _Source(path), put, callback, create_only=create_only)

    def put_bytes(self, name: str, data: bytes | bytearray | memoryview, *, create_only: bool = False) -> None:
        """Make ``data`` the content of the object ``name``, in place of the old content.

        Args:
            name: name of the object.
            data: new content. Large data is sent in parts.
            create_only: as in :meth:`upload`.
        """
        put = partial(self.store.put_bytes, name, bytes(data))
        self._send(name, _Source(memoryview(data)), put, None, create_only=create_only)

    def swap_bytes(self, name: str, data: bytes, version: str) -> None:
        """Replace the content of the object ``name`` by ``data`` if the object still has ``version``.

        A retry succeeds if the object has the content ``data``: an earlier attempt replaced the content, and the answer
        was lost. So no other process may write the same ``data``.

        Args:
            name: name of the object.
            data: new content.
            version: as returned by :meth:`read_versioned`.

        Raises:
            FileExistsError: the object has another version or was deleted. The object is unchanged.
            ObjectStoreTransientError: the content may have been replaced: read the object.
        """
        swap = partial(self.store.swap_bytes, name, data, version)
        self._put_once(f"swap of {name!r}", swap, name, _Source(memoryview(data)))

    def _send(
        self, name: str, source: _Source, put: Callable[..., object], callback: Progress | None, *, create_only: bool
    ) -> None:
        """Make ``source`` the content of an object: in parts, or by ``put`` with or without ``create_only=True``."""
        if self.store.least_part_bytes and source.size_bytes > (self._part_bytes or _WHOLE_BYTES):
            self._send_in_parts(name, source, callback, create_only=create_only)
            return
        if create_only and not self.store.creates_atomically and self.exists(name):
            raise FileExistsError(f"{self.store.get_uri(name)}: upload: an object with this name exists.")
        how = {"create_only": True} if create_only and self.store.creates_atomically else {}
        self._put_once(f"upload of {name!r}", partial(put, **how), name, source)

    def _put_once(self, what: str, put: Callable[[], object], name: str, source: _Source) -> None:
        """Call ``put`` with retries. A refused retry succeeds if the object has the bytes of ``source``."""
        attempts = itertools.count(1)

        def put_or_find() -> None:
            is_first = next(attempts) == 1
            try:
                put()
            except (FileExistsError, FileNotFoundError):
                if is_first or not self._has_content(name, source):
                    raise

        self._retry.run(put_or_find, what)

    def _has_content(self, name: str, source: _Source) -> bool:
        """Return true if the object has exactly the bytes of ``source``."""
        try:
            if self.store.get_object_size(name) != source.size_bytes:
                return False
        except FileNotFoundError:
            return False
        parts = cut(0, source.size_bytes, _LEAST_PART_BYTES)
        return all(memoryview(self.read(name, start, end - start)) == source.view(start, end) for start, end in parts)

    def _send_in_parts(self, name: str, source: _Source, callback: Progress | None, *, create_only: bool) -> None:
        """Send an object in parts. Resume the newest unfinished upload of the name and abort older ones."""
        unfinished: Sequence[PartUpload] = ()
        try:
            unfinished = self._retry.run(lambda: self._unfinished(name), f"list parts of {name!r}")
        except ObjectStoreTransientError:
            raise
        except (PermissionError, ObjectStoreError) as e:
            _log.info("upload of %r: cannot list unfinished uploads: %s", name, e)
        for upload in unfinished[:-1]:
            self._abort(upload)
        if unfinished:
            try:
                self._send_parts(unfinished[-1], source, callback, create_only=create_only)
                return
            except ObjectStoreTransientError:
                raise
            except (FileNotFoundError, PermissionError, ObjectStoreError) as e:
                _log.warning("upload of %r: the unfinished upload cannot be used, starting a new one: %s", name, e)
        known, attempts = {one.upload_id for one in unfinished}, itertools.count()

        def start() -> PartUpload | None:
            if next(attempts):  # the first attempt may have started an upload, and the answer was lost
                for one in self._unfinished(name):
                    if one.upload_id not in known:
                        return one
            return self.store.start_parts(name)

        upload = self._retry.run(start, f"upload of {name!r}, start")
        assert upload is not None, "the store has least_part_bytes, so it takes parts"
        self._send_parts(upload, source, callback, create_only=create_only)

    def _unfinished(self, name: str) -> list[PartUpload]:
        return [upload for upload in self.store.unfinished_parts(name) if upload.name == name]

    def _send_parts(self, upload: PartUpload, source: _Source, callback: Progress | None, *, create_only: bool) -> None:
        """Send the missing parts of ``upload`` and complete the object. Abort unless a later upload may resume."""
        step = part_bytes_for(source.size_bytes, self.store, self._part_bytes)
        parts = list(cut(0, source.size_bytes, step))
        batch, what = _Batch(self._pool, self._threads), f"upload of {upload.name!r}"

        def send(number: int, part: tuple[int, int]) -> None:
            view = source.view(*part)
            self._retry.run(partial(upload.send, number, view), f"{what}, part {number} of {len(parts)}", batch.stopped)
            batch.count(len(view))

        try:
            jobs = (partial(send, number, part) for number, part in enumerate(parts, 1))
            batch.run(jobs, summed(callback, source.size_bytes))
            complete = partial(upload.complete, count=len(parts), create_only=create_only)
            self._put_once(f"{what}, completion", complete, upload.name, source)
        except BaseException as e:
            if isinstance(e, ObjectStoreTransientError | FileNotFoundError) or not isinstance(e, Exception):
                _log.warning("%s failed. Its parts stay for the next upload: %s", what, e)
                raise
            # Wait for running jobs: a part that arrives after the abort would stay in the store forever.
            if not batch.drain():
                _log.warning("%s: a part is still being uploaded during the abort", what)
            self._abort(upload)
            raise

    def _abort(self, upload: PartUpload) -> None:
        """Abort ``upload``. A failure costs only space and is logged."""
        try:
            self._retry.run(upload.abort, f"upload of {upload.name!r}, abort")
        except (ObjectStoreError, PermissionError, FileNotFoundError) as e:
            _log.warning("upload of %r: could not abort upload %s: %s", upload.name, upload.upload_id, e)

    def abort_stale(
        self, prefix: str, older_than: timedelta, is_wanted: Callable[[str], object] = bool, *, dry_run: bool = False
    ) -> Sequence[PartUpload]:
        """Delete the parts of interrupted uploads of objects with names beginning with ``prefix``.

        Args:
            prefix: beginning of the names of objects.
            older_than: age, from the start reported by the store to the time of this machine. Uploads without a
                reported start stay.
            is_wanted: called with the name of the object; an upload stays if the result is false.
            dry_run: delete nothing.

        Returns:
            The uploads that were aborted, or with ``dry_run`` would be.
        """
        found = self._retry.run(lambda: self.store.unfinished_parts(prefix), f"list parts below {prefix!r}")
        latest = datetime.now(UTC) - older_than
        stale = [one for one in found if one.started_at and one.started_at <= latest and is_wanted(one.name)]
        for upload in () if dry_run else stale:
            self._retry.run(upload.abort, f"abort of the upload of {upload.name!r}")
            _log.info("removed the parts of the upload of %r that was started %s", upload.name, upload.started_at)
        return stale

    # ── downloads ────────────────────────────────────────────────────────────────────────────────────────────────
    def download(
        self,
        name: str,
        path: str | Path,
        *,
        overwrite: bool = False,
        size_bytes: int | None = None,
        callback: Progress | None = None,
        check: Callable[[Path], object] | None = None,
    ) -> None:
        """Write the content of the object ``name`` to the file ``path`` in an existing folder.

        The file appears atomically and durably, with the bytes of a single upload.

        Args:
            name: name of the object.
            path: path of the file.
            overwrite: replace an existing file.
            size_bytes: size of the object, if it is known.
            callback: called in this thread with (bytes received, total).
            check: called with the path of the complete temporary file. If ``check`` raises, the file does not appear.

        Raises:
            FileExistsError: the file exists and ``overwrite`` is false.
            CorruptCheckpointError: the size of the object is not ``size_bytes``.
            ReplacedError: the object was replaced during the download.
        """
        target = Path(path)
        if not overwrite and os.path.lexists(target):
            raise FileExistsError(f"{str(target)!r} exists already: pass overwrite=True to replace it.")
        with StagedFile(target) as staged:
            if self.store.reads_ranges:
                self._download_ranges(staged, name, size_bytes, callback)
            else:
                get = partial(self.store.download_object, name, staged.temporary, overwrite=True, callback=callback)
                self._retry.run(get, f"download of {name!r}")
                if size_bytes not in (None, size := staged.temporary.stat().st_size):
                    raise CorruptCheckpointError(f"object {name!r} has {size} bytes where {size_bytes} were expected.")
            if check is not None:
                check(staged.temporary)
            staged.flush()
            staged.publish(overwrite=overwrite)

    def _download_ranges(
        self, staged: StagedFile, name: str, size_bytes: int | None, callback: Progress | None
    ) -> None:
        """Write an object to a file with O_DIRECT: new pages of the page cache cost more than the network."""
        size = self.size(name) if size_bytes is None else size_bytes
        reserve(staged.file.fileno(), size, staged.path)
        step = min(self._range_bytes(size), _WINDOW_BYTES)
        step += -step % BLOCK_BYTES
        memory = borrow_memory(self._threads * step)
        windows: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for number in range(self._threads):
            windows.put(memory.view(number * step, step))
        batch, same = _Batch(self._pool, self._threads), SameVersion(name, size)

        def save(start: int, end: int) -> None:
            window = windows.get_nowait()  # there is a window for each thread

            def put(piece: bytes, at: int) -> None:
                window[at - start : at - start + len(piece)] = piece

            try:
                self._stream(batch, name, start, end, put, same)
                with staged.temporary.open("r+b", buffering=0) as file:  # no shared file: after an error jobs run on
                    set_direct(file, True)
                    write_window(file, window, start, end - start)
            finally:
                windows.put(window)

        ranges = list(cut(0, size, step)) or [(0, 0)]
        batch.run((partial(save, start, end) for start, end in ranges), summed(callback, size))
        give_memory_back(memory)  # not after an error: jobs may still fill the windows
        os.ftruncate(staged.file.fileno(), size)  # the last block was written whole
        if callback is not None and not size:
            callback(0, 0)

    def read_into(
        self,
        name: str,
        targets: Sequence[Piece],
        progress: Callable[[int], object] = int,
        same: SameVersion | None = None,
    ) -> None:
        """Fill memory with parts of the object ``name``.

        Args:
            name: name of the object.
            targets: an offset in the object, an address in memory and a number of bytes each, in any order. The memory
                must exist until this returns.
            progress: called in this thread with each number of bytes read, small gaps between the targets included.
            same: checks the version of the object; ``None``: the caller verifies the bytes.

        Raises:
            CorruptCheckpointError: the object ends before the end of a target, or ``same`` expects another size.
            ReplacedError: the object has another version than the first part that ``same`` checked.
        """
        check_targets(targets, name)
        for layer in layers(targets):
            wanted = sum(size for _, _, size in layer)
            units = units_of(layer, gap_bytes=_GAP_BYTES, unit_bytes=self._range_bytes(wanted))
            stream = partial(self._stream, batch := _Batch(self._pool, self._threads), name)
            copy = partial(put, ReadTargets(layer))
            batch.run((partial(stream, start, end, copy, same) for start, end in units), progress)

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return the bytes of the object ``name`` from ``offset`` to ``offset + size``.

        Args:
            name: name of the object.
            offset: in bytes.
            size: in bytes.

        Returns:
            The bytes.

        Raises:
            CorruptCheckpointError: the object ends before ``offset + size``.
        """
        return read_bytes(partial(self.read_into, name), offset, size)

    def read_all(self, name: str, most_bytes: int = 64 * _MiB) -> bytes:
        """Return the content of the small object ``name``, in one request.

        Args:
            name: name of the object.
            most_bytes: largest accepted size.

        Returns:
            The bytes.

        Raises:
            CorruptCheckpointError: the object has more than ``most_bytes`` bytes.
        """
        data = self._retry.run(lambda: self.store.read_range(name, 0, most_bytes + 1), f"read of {name!r}")
        if len(data) > most_bytes:
            raise CorruptCheckpointError(f"read of {name!r}: it has more than the allowed {most_bytes} bytes.")
        return data

    def read_tail(self, name: str, most_bytes: int) -> tuple[int, bytes]:
        """Read the end of an object.

        Args:
            name: name of the object.
            most_bytes: number of bytes, at least 1. A smaller object is returned whole.

        Returns:
            Size of the whole object in bytes, and the last ``min(size, most_bytes)`` bytes.
        """
        return self._retry.run(lambda: self.store.read_tail(name, most_bytes), f"read of the tail of {name!r}")

    def read_versioned(self, name: str) -> tuple[bytes, str]:
        """Return the content of the small object ``name``, and the version for :meth:`swap_bytes`."""
        return self._retry.run(lambda: self.store.read_versioned(name), f"read of {name!r}")

    def _range_bytes(self, size: int) -> int:
        """Return the bytes of each request to read ``size`` bytes, such that all threads have work."""
        share = -(-size // self._threads)
        most = self._part_bytes or _MOST_RANGE_BYTES
        return min(most, max(_LEAST_RANGE_BYTES, -(-share // _MiB) * _MiB))

    def _stream(
        self,
        batch: _Batch,
        name: str,
        start: int,
        end: int,
        put: Callable[[bytes, int], object],
        same: SameVersion | None,
    ) -> None:
        """Deliver each piece of the bytes ``start`` to ``end`` on arrival. A retry continues after the last piece."""
        at = start

        def read() -> None:
            nonlocal at
            found = self.store.open_range(name, at, end - at)
            with contextlib.closing(found.pieces) as pieces:
                if same is not None:
                    same.check(found)
                if found.size_bytes < end:
                    raise CorruptCheckpointError(
                        f"object {name!r} has {found.size_bytes} bytes; bytes {start} to {end} do not exist."
                    )
                for piece in pieces:
                    batch.deliver(put, piece, at)
                    at += len(piece)
            if at != end:
                raise ObjectStoreTransientError(f"read of {name!r}: the answer ended at byte {at} instead of {end}.")

        self._retry.run(read, f"read of {name!r}, bytes {start} to {end}", batch.stopped)

    # ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────
    def size(self, name: str) -> int:
        """Return the size of the object ``name`` in bytes."""
        return self._retry.run(lambda: self.store.get_object_size(name), f"size of {name!r}")

    def exists(self, name: str) -> bool:
        """Return true if the object ``name`` exists."""
        return self._retry.run(lambda: self.store.has_object(name), f"size of {name!r}")

    def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """List the objects with names beginning with ``prefix``, sorted by name.

        Args:
            prefix: beginning of the names; empty for all.

        Returns:
            Name, size and time of each object.
        """
        return self._retry.run(lambda: self.store.list_infos(prefix), f"listing of {prefix!r}")

    def list_level(self, prefix: str = "") -> tuple[Sequence[ObjectInfo], Sequence[str]]:
        """List the objects and folders directly below ``prefix``.

        Args:
            prefix: beginning of the names, usually a folder with its slash, such as ``run/``.

        Returns:
            The objects whose names have no slash after ``prefix``, and the names of the folders, such as ``run/ep1/``.
        """
        return self._retry.run(lambda: self.store.list_level(prefix), f"listing of {prefix!r}")

    def delete(self, name: str) -> None:
        """Delete the object ``name``. A missing object is no error."""
        self._retry.run(lambda: self.store.delete_object(name), f"deletion of {name!r}")

    def check_writable(self, name: str) -> None:
        """Raise the error of a write if objects with names beginning with ``name`` cannot be written."""
        self._retry.run(lambda: self.store.check_writable(name), f"check that {name!r} can be written")

    def close(self) -> None:
        """Stop the threads. The store stays open. May be called twice."""
        self._pool.close(_CLOSE_SECONDS)


@final
class VerifiedObject:
    """An object to read in whole chunks, each verified by a digest.

    Without a digest, :class:`SameVersion` checks the object instead: ReplacedError if the object was replaced.

    Args:
        transfer: transfer of the bucket.
        name: name of the object.
        digest: size and hashes of the content; ``None``: not verified.

    Raises:
        CorruptCheckpointError: ``digest`` has no digests of chunks, or not the right number.
    """

    _BATCH_BYTES = 64 << 20

    def __init__(self, transfer: Transfer, name: str, digest: FileDigest | None) -> None:
        self._transfer = transfer
        self._name = name
        self._digest = digest
        self._same = SameVersion(name)
        self._chunks = [] if digest is None else digest.chunk_digests(name)
        if digest is not None and not self._chunks and digest.body_bytes:
            raise CorruptCheckpointError(f"the record has no digests of the chunks of {name!r}.")

    def read(self, offset: int, size: int) -> bytes:
        """Return the bytes from ``offset`` to ``offset + size``. Errors are those of :meth:`read_into`."""
        return read_bytes(self.read_into, offset, size)

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = int) -> None:
        """Fill memory with parts of the object.

        Args:
            targets: offset in the object, address in memory and number of bytes of each part, in any order.
            progress: called in this thread with numbers of bytes read.

        Raises:
            CorruptCheckpointError: the object is shorter, or the bytes differ from the digest.
            ReplacedError: the object was replaced, without a digest.
        """
        if self._digest is None:
            self._transfer.read_into(self._name, targets, progress, self._same)
            return
        step, size_bytes = self._digest.chunk_bytes, self._digest.body_bytes
        check_targets(targets, self._name, size_bytes)
        for layer in layers(targets):
            units, places = units_of(layer, chunk_bytes=step, size_bytes=size_bytes), ReadTargets(layer)
            for batch in batches(units, self._BATCH_BYTES, lambda unit: unit[1] - unit[0]):
                self._read_units(batch, places, progress)

    def _read_units(self, units: Sequence[Unit], places: ReadTargets, progress: Callable[[int], object]) -> None:
        """Read ``units``, in whole chunks, at the same time. Verify the chunks and copy the requested parts."""
        assert self._digest is not None
        step = self._digest.chunk_bytes
        parts = [bytearray(end - start) for start, end in units]
        spans = [(start, address_of(part), len(part)) for (start, _), part in zip(units, parts, strict=True)]
        self._transfer.read_into(self._name, spans, progress)
        for (start, end), part in zip(units, parts, strict=True):
            data = memoryview(part)
            for begin, stop in cut(start, end, step):
                if xxhash.xxh3_64_hexdigest(data[begin - start : stop - start]) != self._chunks[begin // step]:
                    raise CorruptCheckpointError(
                        f"the bytes {begin} to {stop} of {self._name!r} differ from the saved bytes."
                    )
            put(places, data, start)


class Uploader(Background):
    """Uploads in the background.

    Args:
        transfer: moves the bytes. Closed by :meth:`close`.
        num_concurrent: number of uploads at the same time, as in :class:`Background`.
        timeout: as in :class:`Background`.
    """

    late_error = ObjectStoreError

    def __init__(self, transfer: Transfer, *, num_concurrent: int = 1, timeout: float = 3600.0) -> None:
        super().__init__("the uploader", num_concurrent=num_concurrent, timeout=timeout)
        self.transfer = transfer

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.transfer.close()
