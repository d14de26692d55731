"""Transfer: objects to and from a store, in parts, by several threads, again where it may help, and whole; Uploader:
the same in the background."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import final

from composerlite.errors import ConfigError, CorruptCheckpointError, ObjectStoreError, ObjectStoreTransientError
from composerlite.storage.background import Background
from composerlite.storage.disk.files import StagedFile, check_free, write_all
from composerlite.storage.disk.memory import address_of, memory_at
from composerlite.storage.disk.reader import ReadTargets, Unit, cut, layers, units_of
from composerlite.storage.object_store import ObjectInfo, ObjectStore, PartUpload, Progress
from composerlite.storage.part_uploads import (
    Buffers,
    FileSource,
    MemorySource,
    PartSender,
    Source,
    part_bytes_for,
    summed,
)
from composerlite.storage.retry import RetryPolicy
from composerlite.storage.workers import Batch, WorkerPool
from composerlite.types import Piece

_MiB = 1 << 20
_WHOLE_BYTES = 16 * _MiB  # up to that an object goes in one request
_LEAST_RANGE_BYTES, _MOST_RANGE_BYTES = _MiB, 32 * _MiB
_GAP_BYTES = 512 << 10  # a request costs about as long as reading over such a gap

_CLOSE_SECONDS = 5.0

_log = logging.getLogger(__name__)


@final
class ReplacedError(ObjectStoreError):
    """An object has other bytes than those of which some were read."""


@final
class OneUpload:
    """Sees that what is read of the object ``name``, by whichever thread, is of one single upload of it.

    The first answer decides which. A store that tells no versions is trusted.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: str | None = None
        self._lock = threading.Lock()

    def check(self, version: str) -> None:
        """Raise ReplacedError if ``version`` is another than that of the first answer."""
        with self._lock:
            if self._seen is None:
                self._seen = version
        if version != self._seen:
            raise ReplacedError(
                f"object {self._name!r} was replaced while it was read: read it again when nobody writes it."
            )


@final
class Transfer:
    """Moves objects to and from ``store``: large ones in parts at the same time, and what fails is tried again.

    Used as a context manager, or until :meth:`close`; the store stays open. Several threads may use one transfer; they
    share its threads. Its memory is at most ``threads`` parts. One name is uploaded by one process at a time: an
    unfinished upload that is found is taken for that of a process that is dead.

    Every method raises what the verbs of the store raise, an ObjectStoreTransientError only after the policy has given
    up. After an error or an interrupt nothing touches a file or memory of the caller any more.

    Args:
        store: keeps the objects.
        threads: parts on their way at the same time, of all transfers together.
        retry: how often what may pass is tried again.
        part_bytes: of uploads, if the store takes such, and the most that is read by one request; ``None``: 8 to 16
            MiB, and up to 32 MiB for reading.

    Raises:
        ConfigError: a value is out of its range.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        threads: int = 8,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - it is frozen
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
        self._buffers = Buffers()

    # ── uploads ──────────────────────────────────────────────────────────────────────────────────────────────────
    def upload(
        self, name: str, path: str | Path, callback: Progress | None = None, *, create_only: bool = False
    ) -> None:
        """Make the file ``path`` the content of the object ``name``, in place of what is there.

        A large file goes in parts, and those that an upload before this one has sent, with the same bytes, are not
        sent again. If it fails for good the parts are removed; if it fails with what may pass, or is killed, they stay
        for the next upload of the same name or for :meth:`abort_stale`.

        Args:
            name: of the object.
            path: must not be changed meanwhile.
            callback: is called with (bytes in the store, total); of parts, in this thread.
            create_only: fail if the object exists.

        Raises:
            FileNotFoundError: there is no such file, or no such bucket.
            FileExistsError: the object exists, and ``create_only`` is true. In a store that takes no parts, a large
                object may be that of this upload, where an answer was lost.
        """
        with FileSource(path) as source:
            if self._sent_in_parts(name, source, callback, create_only=create_only):
                return
            size = source.size_bytes
        upload = partial(self.store.upload_object, name, path, callback, create_only=create_only)
        if create_only and size <= _WHOLE_BYTES:
            self._put_once(f"upload of {name!r}", lambda *_: upload(), name, Path(path).read_bytes())
        else:
            self._retry.run(upload, f"upload of {name!r}")

    def put_bytes(self, name: str, data: bytes | bytearray | memoryview, *, create_only: bool = False) -> None:
        """Make ``data`` the content of the object ``name``, in place of what is there.

        With ``create_only`` only if there is nothing or, where an answer was lost, the same bytes: else
        FileExistsError. Large data goes in parts as that of :meth:`upload` does, unless ``create_only``.

        Args:
            name: of the object.
            data: its content.
            create_only: fail if the object exists.
        """
        if not create_only and self._sent_in_parts(name, MemorySource(memoryview(data)), None):
            return
        put = partial(self.store.put_bytes, create_only=create_only)
        self._put_once(f"put of {name!r}", put, name, bytes(data))

    def swap_bytes(self, name: str, data: bytes, version: str) -> None:
        """Replace the content of the object ``name`` by ``data`` if the object still has ``version``.

        Succeeds also if an earlier try replaced the content and the answer was lost. For that ``data`` must not be what
        another process might write.

        Args:
            name: of the object.
            data: new content.
            version: that :meth:`read_versioned` returned.

        Raises:
            FileExistsError: the object has another version or was deleted. The object is unchanged.
            ObjectStoreTransientError: it is unknown whether the content was replaced: read the object.
        """
        self._put_once(f"swap of {name!r}", partial(self.store.swap_bytes, version=version), name, data)

    def _put_once(self, what: str, put: Callable[[str, bytes], object], name: str, content: bytes) -> None:
        """Call ``put`` with retries. A retry that is refused has succeeded if the object has the content."""
        tries: list[int] = []

        def put_or_find() -> None:
            tries.append(1)
            try:
                put(name, content)
            except FileExistsError:
                if len(tries) == 1 or not self._has_content(name, content):
                    raise  # else an earlier try has put it, and its answer was lost

        self._retry.run(put_or_find, what)

    def _has_content(self, name: str, content: bytes) -> bool:
        try:
            return self.store.read_range(name, 0, len(content) + 1) == content
        except FileNotFoundError:
            return False

    def abort_stale(self, prefix: str, older_than: timedelta) -> Sequence[PartUpload]:
        """Remove the parts of uploads that dead processes have left below ``prefix``; return the uploads.

        Only those are removed that were started ``older_than`` ago, by the clock of the store. Those of a store that
        does not tell stay.

        Args:
            prefix: beginning of the names of objects.
            older_than: age from which an upload counts as abandoned.

        Returns:
            The uploads that were aborted.
        """
        stale = self.stale(prefix, older_than)
        for upload in stale:
            self._retry.run(upload.abort, f"abort of the upload of {upload.name!r}")
            _log.info("removed the parts of the upload of %r that was started %s", upload.name, upload.started_at)
        return stale

    def stale(self, prefix: str, older_than: timedelta) -> Sequence[PartUpload]:
        """The uploads that :meth:`abort_stale` would remove.

        Args:
            prefix: beginning of the names of objects.
            older_than: age from which an upload counts as abandoned.

        Returns:
            The uploads.
        """
        found = self._retry.run(lambda: self.store.unfinished_parts(prefix), f"look for parts below {prefix!r}")
        latest = datetime.now(UTC) - older_than
        return [upload for upload in found if upload.started_at is not None and upload.started_at <= latest]

    def _sent_in_parts(
        self, name: str, source: Source, callback: Progress | None, *, create_only: bool = False
    ) -> bool:
        part_bytes = part_bytes_for(source.size_bytes, self.store, self._part_bytes)
        if source.size_bytes <= (_WHOLE_BYTES if self._part_bytes is None else part_bytes):
            return False
        sender = PartSender(
            self.store, name, source, part_bytes, pool=self._pool, buffers=self._buffers, retry=self._retry
        )
        return sender.run(callback, create_only=create_only)

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
        """Make the content of the object ``name`` the file ``path``, whose folder exists.

        The file is there whole and durable or not at all. All of it is of one single upload: if the object is replaced
        meanwhile the download begins anew, as often as the policy tries.

        Args:
            name: of the object.
            path: of the file.
            overwrite: replace a file that is there.
            size_bytes: of the object, if it is known: the store is not asked for it.
            callback: is called in this thread with (bytes received, total).
            check: is called with the path of the temporary that has all bytes; the file appears unless it raises.

        Raises:
            FileExistsError: the file is there already and ``overwrite`` is false.
            CorruptCheckpointError: the object has not ``size_bytes`` bytes.
            ObjectStoreError: it was replaced again and again.
        """
        target = Path(path)
        check_free(target, overwrite)
        with StagedFile(target) as staged:
            self._download_into(staged.file.fileno(), name, size_bytes, callback)
            if check is not None:
                check(staged.temporary)
            staged.flush()
            staged.publish(overwrite=overwrite)

    def read_into(
        self,
        name: str,
        targets: Sequence[Piece],
        progress: Callable[[int], object] = int,
        upload: OneUpload | None = None,
    ) -> None:
        """Fill memory with parts of the object ``name``.

        Args:
            name: of the object.
            targets: an offset in the object, an address in memory and a number of bytes each, in any order. The memory
                must be there until this returns.
            progress: is called in this thread with each number of bytes read. Small gaps are read, too.
            upload: of which all must be; ``None``: the caller verifies what comes.

        Raises:
            CorruptCheckpointError: the object ends before.
            ReplacedError: it is of another upload.
        """
        for offset, _, size in targets:
            _check_range(name, offset, size)
        for layer in layers(targets):
            units = units_of(layer, gap_bytes=_GAP_BYTES, unit_bytes=self._range_bytes(sum(t.size for t in layer)))
            places = ReadTargets(layer)
            self._pool.run(Batch(partial(self._read_unit, name, unit, places, upload) for unit in units), progress)

    def read(self, name: str, offset: int, size: int) -> bytes:
        """The bytes of the object ``name`` from ``offset`` to ``offset + size``.

        Args:
            name: of the object.
            offset: in bytes.
            size: in bytes.

        Returns:
            The bytes.

        Raises:
            CorruptCheckpointError: the object ends before.
        """
        _check_range(name, offset, size)
        if size <= _LEAST_RANGE_BYTES:
            return self._read_range(name, offset, size)
        data = bytearray(size)
        self.read_into(name, [(offset, address_of(data), size)])
        return bytes(data)

    def read_all(self, name: str, most_bytes: int = 64 * _MiB) -> bytes:
        """The content of the object ``name``, which is small: it comes in one request.

        Args:
            name: of the object.
            most_bytes: largest size that is accepted.

        Returns:
            The bytes.

        Raises:
            CorruptCheckpointError: it has more than ``most_bytes`` bytes, and is something else than it should be.
        """
        data = self._retry.run(lambda: self.store.read_range(name, 0, most_bytes + 1), f"read of {name!r}")
        if len(data) > most_bytes:
            raise CorruptCheckpointError(f"read of {name!r}: it has more than the {most_bytes} bytes that it may have.")
        return data

    def read_tail(self, name: str, most_bytes: int) -> tuple[int, bytes]:
        """Size of the object ``name``, and its last bytes, in one request where the store can.

        Args:
            name: of the object.
            most_bytes: number of bytes, at least 1; a smaller object is returned whole.

        Returns:
            Size of the whole object in bytes, and the last ``min(size, most_bytes)`` bytes.
        """
        return self._retry.run(lambda: self.store.read_tail(name, most_bytes), f"read of the tail of {name!r}")

    def read_versioned(self, name: str) -> tuple[bytes, str]:
        """Content of the small object ``name``, and the version that :meth:`swap_bytes` replaces."""
        return self._retry.run(lambda: self.store.read_versioned(name), f"read of {name!r}")

    # ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────
    def size(self, name: str) -> int:
        """Bytes of the object ``name``."""
        return self._retry.run(lambda: self.store.get_object_size(name), f"look at {name!r}")

    def exists(self, name: str) -> bool:
        """Return true if there is an object ``name``."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """List the objects whose names begin with ``prefix``, sorted by name.

        Args:
            prefix: beginning of the names; empty for all.

        Returns:
            Name, size and time of each object.
        """
        return self._retry.run(lambda: self.store.list_objects(prefix), f"listing of {prefix!r}")

    def list_level(self, prefix: str = "") -> tuple[Sequence[ObjectInfo], Sequence[str]]:
        """List the objects and folders directly below ``prefix``.

        Args:
            prefix: beginning of the names, usually a folder with its slash, such as ``run/``.

        Returns:
            The objects whose names have no slash after ``prefix``, and the names of the folders, such as ``run/ep1/``.
        """
        return self._retry.run(lambda: self.store.list_level(prefix), f"listing of {prefix!r}")

    def delete(self, name: str) -> None:
        """Remove the object ``name``. That there is none is fine."""
        self._retry.run(lambda: self.store.delete_object(name), f"deletion of {name!r}")

    def check_writable(self, name: str) -> None:
        """See that an object ``name`` could be written; nothing is left of that."""
        self._retry.run(
            lambda: self.store.check_writable(name), f"check that {self.store.get_uri(name)} can be written to"
        )

    def close(self) -> None:
        """Stop the threads and free the memory. The store stays open. May be called twice."""
        self._pool.close(_CLOSE_SECONDS)
        self._buffers.clear()

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ── ranges ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _range_bytes(self, size: int) -> int:
        """Bytes of one request of a thread for an object of ``size`` bytes, such that all threads have work."""
        share = -(-size // self._threads)
        most = self._part_bytes or _MOST_RANGE_BYTES
        return min(most, max(_LEAST_RANGE_BYTES, -(-share // _MiB) * _MiB))

    def _download_into(self, descriptor: int, name: str, size_bytes: int | None, callback: Progress | None) -> None:
        """Write an object to a file, anew if it is replaced meanwhile."""
        for tries_left in reversed(range(self._retry.attempts)):
            size = self.size(name) if size_bytes is None else size_bytes
            try:
                self._download_upload(descriptor, name, size, callback)
                return
            except (ReplacedError, CorruptCheckpointError) as e:
                has_another_size = size_bytes is None and self.size(name) != size
                if not tries_left or not (isinstance(e, ReplacedError) or has_another_size):
                    raise
                _log.warning("%s was replaced while it was downloaded: once more", self.store.get_uri(name))
                os.ftruncate(descriptor, 0)

    def _download_upload(self, descriptor: int, name: str, size: int, callback: Progress | None) -> None:
        """Write an object of ``size`` bytes to a file. ReplacedError: it is another one by now."""
        units = list(cut(0, size, self._range_bytes(size))) or [(0, 0)]
        job = partial(self._download_unit, descriptor, threading.Lock(), name, size, OneUpload(name))
        self._pool.run(Batch(partial(job, unit) for unit in units), summed(callback, size))
        if callback is not None and not size:
            callback(0, 0)

    def _download_unit(
        self,
        descriptor: int,
        writing: threading.Lock,
        name: str,
        size: int,
        upload: OneUpload,
        unit: Unit,
        batch: Batch,
    ) -> int:
        """Job of the pool: one range of the object to its place in the file. Reports bytes as they arrive."""
        start, end = unit

        def write(piece: memoryview, at: int) -> None:
            with writing:  # the system lets in one at a time, and the others would wait for it at full speed
                write_all(descriptor, piece, at)

        # An object that is longer than it should be is not taken for whole.
        self._stream(name, start, end, batch, write, upload, beyond=1 if end == size else 0)
        return 0

    def _read_unit(self, name: str, unit: Unit, places: ReadTargets, upload: OneUpload | None, batch: Batch) -> int:
        """Job of the pool: one range of the object to its places in memory. Reports bytes as they arrive."""
        start, end = unit

        def copy(piece: memoryview, at: int) -> None:
            done = 0
            for address, size in places.of(at, at + piece.nbytes):
                if address is not None:
                    memory_at(address, size)[:] = piece[done : done + size]
                done += size

        self._stream(name, start, end, batch, copy, upload)
        return 0

    def _stream(
        self,
        name: str,
        start: int,
        end: int,
        batch: Batch,
        put: Callable[[memoryview, int], object],
        upload: OneUpload | None,
        *,
        beyond: int = 0,
    ) -> None:
        """Give ``put`` the bytes from ``start`` to ``end`` as they come, each once; no more may come if ``beyond``.

        After a failure it resumes where it was.
        """
        at = start
        version = str if upload is None else upload.check

        def read() -> None:
            nonlocal at
            asked = at
            with contextlib.closing(self.store.read_pieces(name, at, end + beyond - at, version=version)) as pieces:
                for piece in pieces:
                    if at + len(piece) > end:
                        self._explain(name, start, end - start, at + len(piece) - start)
                    with batch.touching():
                        put(memoryview(piece), at)
                    at += len(piece)
                    batch.tell(len(piece))
            if at != end:
                self._explain(name, asked, end - asked, at - asked)

        self._retry.run(read, f"read of {name!r}, bytes {start} to {end}", batch.stopped)

    def _read_range(self, name: str, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes."""

        def read() -> bytes:
            data = self.store.read_range(name, offset, size)
            if len(data) != size:
                self._explain(name, offset, size, len(data))
            return data

        return self._retry.run(read, f"read of {name!r}, bytes {offset} to {offset + size}")

    def _explain(self, name: str, offset: int, size: int, got: int) -> None:
        """Raise the reason for which ``got`` bytes came and not ``size``."""
        actual = self.store.get_object_size(name)
        if got > size:
            raise CorruptCheckpointError(f"object {name!r} has {actual} bytes where {offset + size} were expected.")
        if actual < offset + size:
            raise CorruptCheckpointError(
                f"object {name!r} has {actual} bytes; there are no bytes {offset} to {offset + size}."
            )
        raise ObjectStoreTransientError(f"read of {name!r}: {got} of {size} bytes came, from {offset} on.")


def _check_range(name: str, offset: int, size: int) -> None:
    if offset < 0 or size < 0:
        raise CorruptCheckpointError(f"object {name!r}: there are no bytes {offset} to {offset + size}.")


class Uploader(Background):
    """Uploads in the background.

    Args:
        transfer: moves the bytes. It is closed with this.
        num_concurrent: uploads at the same time, of different lanes.
        timeout: as for :class:`Background`.
    """

    def __init__(self, transfer: Transfer, *, num_concurrent: int = 1, timeout: float = 3600.0) -> None:
        super().__init__(
            "the uploader",
            jobs="uploads",
            done="uploaded",
            num_concurrent=num_concurrent,
            timeout=timeout,
            error=ObjectStoreError,
            late_error=ObjectStoreError,
        )
        self.transfer = transfer

    def stop(self, seconds: float) -> list[str]:
        late = super().stop(seconds)
        self.transfer.close()
        return late
