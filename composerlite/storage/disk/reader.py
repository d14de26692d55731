"""Reading parts of a large file into memory: by several threads, straight into place, verified on the way."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import final

import xxhash

from composerlite.errors import CorruptCheckpointError
from composerlite.storage.disk.files import FileDigest, open_direct
from composerlite.storage.disk.memory import address_of
from composerlite.storage.disk.read_direct import (
    SHALLOW_PREFETCH,
    WIDE_PREFETCH,
    DirectWork,
    PrefetchDepth,
    deep_prefetch,
)
from composerlite.storage.disk.read_work import (
    UNIT_BYTES,
    CachedWork,
    OpenFile,
    ReadTargets,
    Target,
    Unit,
    Work,
    cached_share,
    layers,
    runs,
    touched_chunks,
)
from composerlite.threads import start_threads
from composerlite.types import Piece

_PIECE_BYTES = 1 << 20
_FEW_CORES = 2  # one is for putting into place, the other for all that brings the bytes
_TRIAL_BYTES = 32 << 20  # read in one way to see how long it takes
_STRETCH_BYTES = 2 << 30  # read in the way that was quicker
_MOST_WAITED = 0.6  # of a trial; a disk that is waited for longer is asked for more at a time


@final
class ParallelReader:
    """Reads parts of one file. Used as a context manager, or until :meth:`close`.

    With a digest that has chunks, every chunk that is touched is read whole and verified as it passes. With one that
    has none the whole file is verified before the first part is read. What is in the page cache is read from there,
    the rest past it (O_DIRECT) where the file system takes that and it is more than a tenth of the file.

    Args:
        path: the file.
        digest: what it must contain; ``None``: it is read unverified.
        threads: that read at the same time, the caller's included; where the disk is waited for as many and two more
            beside it, or one on two cores as long as that keeps the caller busy.
        cores: that there are for it; ``None``: those that the process may use.

    Attributes:
        size_bytes: of the file, without its tail if there is a digest.
        tail_bytes: size of the tail, 0 if there is no digest.
        verified: numbers of the chunks that were read and verified so far; 0 stands for a file without chunks.

    Raises:
        CorruptCheckpointError: it is no file, or has another size than it was saved with.
        OSError: it is not there or cannot be read.
    """

    def __init__(
        self, path: Path, digest: FileDigest | None = None, *, threads: int = 2, cores: int | None = None
    ) -> None:
        self._path = path
        self._threads = threads
        self._cores = len(os.sched_getaffinity(0)) if cores is None else cores
        self._unverified = digest if digest is not None and not digest.chunk_bytes else None
        self._buffered = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would keep us waiting
        self._direct: int | None = None
        try:
            self._file = self._checked(digest)
        except BaseException:
            self.close()
            raise
        self.size_bytes = self._file.size_bytes
        self.tail_bytes = 0 if digest is None else digest.tail_bytes
        self.verified: set[int] = set()

    def read(self, offset: int, size: int) -> bytes:
        """The bytes from ``offset`` to ``offset + size``.

        Args:
            offset: in bytes.
            size: in bytes.

        Returns:
            The bytes.

        Raises:
            CorruptCheckpointError: the file ends before, or the bytes are not those that were saved.
        """
        self._check_range(offset, size)
        data = bytearray(size)
        self.read_into([(offset, address_of(data), size)] if size else [])
        return bytes(data)

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = int) -> None:
        """Fill memory.

        Args:
            targets: an offset in the file, an address in memory and a number of bytes each, in any order. The memory
                must be there until this returns.
            progress: is called in this thread with each number of bytes read. Whole chunks are more than the targets.

        Raises:
            CorruptCheckpointError: the file ends before, or the bytes are not those that were saved; the message says
                which. Memory may have been filled with them.
        """
        for offset, _, size in targets:
            self._check_range(offset, size)
        self._verify_whole(progress)
        for layer in layers(targets):
            chunk_bytes = self._file.chunk_bytes
            units = touched_chunks(layer, chunk_bytes, self.size_bytes) if chunk_bytes else runs(layer)
            self._run(ReadTargets(layer), units, progress)

    def verify(self, progress: Callable[[int], object] = int, skip: Container[int] = ()) -> None:
        """Read everything there is a digest of.

        Args:
            progress: is called in this thread with each number of bytes read.
            skip: numbers of chunks to leave out, as in :attr:`verified`.

        Raises:
            CorruptCheckpointError: the bytes are not those that were saved; the message says which.
        """
        if 0 not in skip:
            self._verify_whole(progress)
        chunk_bytes = self._file.chunk_bytes
        numbers = (number for number in range(len(self._file.chunks)) if number not in skip)
        if left := [Target(number * chunk_bytes, 0, chunk_bytes) for number in numbers]:
            self._run(ReadTargets([]), touched_chunks(left, chunk_bytes, self.size_bytes), progress)

    def close(self) -> None:
        """Close the file. May be called twice."""
        descriptors, self._buffered, self._direct = (self._buffered, self._direct), -1, None
        for descriptor in descriptors:
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)

    def __enter__(self) -> ParallelReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _checked(self, digest: FileDigest | None) -> OpenFile:
        """The file, if it can be the one that ``digest`` is of."""
        status = os.fstat(self._buffered)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptCheckpointError(f"{str(self._path)!r} is not a file.")
        size = status.st_size
        if digest is not None and digest.size_bytes != size:
            raise CorruptCheckpointError(
                f"{str(self._path)!r} has {size} bytes and was saved with {digest.size_bytes}."
            )
        if digest is not None and digest.tail_bytes:
            tail = os.pread(self._buffered, digest.tail_bytes, digest.body_bytes)
            if xxhash.xxh3_128_hexdigest(tail) != digest.tail_xxh3_128:
                raise CorruptCheckpointError(f"the record of {str(self._path)!r} is not the one that was saved.")
        try:
            chunks = [] if digest is None else digest.chunk_digests()
        except ValueError as e:
            raise CorruptCheckpointError(f"the digests of {str(self._path)!r} are not those of a file: {e}.") from e
        # The same file, whatever has its name by now.
        self._direct = open_direct(Path(f"/proc/self/fd/{self._buffered}"), os.O_RDONLY)
        chunk_bytes = digest.chunk_bytes if chunks and digest is not None else 0
        size = size if digest is None else digest.body_bytes
        return OpenFile(self._path, size, self._buffered, self._direct, chunk_bytes, chunks)

    def _check_range(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size_bytes:
            raise CorruptCheckpointError(
                f"{str(self._path)!r} has {self.size_bytes} bytes; there are no bytes {offset} to {offset + size}."
            )

    def _verify_whole(self, progress: Callable[[int], object]) -> None:
        """Verify a file that has no digests of chunks, once."""
        if self._unverified is None:
            return
        digest, piece, position = xxhash.xxh3_128(), bytearray(_PIECE_BYTES), 0
        while count := min(os.preadv(self._buffered, [piece], position), self.size_bytes - position):
            digest.update(memoryview(piece)[:count])
            position += count
            progress(count)
        if digest.hexdigest() != self._unverified.xxh3_128:
            raise CorruptCheckpointError(f"the bytes of {str(self._path)!r} are not those that were saved.")
        self._unverified = None
        self.verified.add(0)

    def _run(self, places: ReadTargets, units: Sequence[Unit], progress: Callable[[int], object]) -> None:
        """Read ``units`` with several threads, this one included."""
        left = units
        if self._direct is None or cached_share(self._buffered, 0, self.size_bytes) >= 0.9:
            _do(CachedWork(self._file, places, units), min(len(units), self._threads) - 1, progress)
            left = []
        elif self._cores <= _FEW_CORES:
            left = self._read_near(places, units, progress)
        if left:
            self._run_direct(places, left, deep_prefetch(self._threads + 2), progress)
        if chunk_bytes := self._file.chunk_bytes:
            for start, end in units:
                self.verified.update(range(start // chunk_bytes, -(-end // chunk_bytes)))

    def _read_near(
        self, places: ReadTargets, units: Sequence[Unit], progress: Callable[[int], object]
    ) -> Sequence[Unit]:
        """Read ``units`` with a shallow prefetch as long as that is quicker; returns those that are left.

        It is not where the disk is slow to answer. It is not either where cores that share no cache bring the bytes and
        use them, which in a virtual machine changes from minute to minute: then memory is quicker than the cache.
        """
        unit_bytes = max(UNIT_BYTES, self._file.chunk_bytes)
        trial, stretch = max(1, _TRIAL_BYTES // unit_bytes), max(1, _STRETCH_BYTES // unit_bytes)
        while units:
            near = self._run_direct(places, units[:trial], SHALLOW_PREFETCH, progress)
            units = units[trial:]
            if near.waited_share > _MOST_WAITED or not units:
                break
            if len(units) > trial:
                loose = self._run_direct(places, units[:trial], WIDE_PREFETCH, progress)
                units = units[trial:]
                if loose.bytes_per_s > near.bytes_per_s:
                    break
            self._run_direct(places, units[:stretch], SHALLOW_PREFETCH, progress)
            units = units[stretch:]
        return units

    def _run_direct(
        self, places: ReadTargets, units: Sequence[Unit], depth: PrefetchDepth, progress: Callable[[int], object]
    ) -> DirectWork:
        """Read ``units`` past the page cache; return how that went."""
        work = DirectWork(self._file, places, units, depth)
        _do(work, work.helpers, progress)
        return work


def _do(work: Work, helpers: int, progress: Callable[[int], object]) -> None:
    """Do ``work`` with ``helpers`` threads beside this one, or as many as the system gives."""
    threads: list[threading.Thread] = []
    try:
        while len(threads) < helpers and (new := start_threads(work.help, 1, name="checkpoint-reader")):
            threads += new
        work.helpers = len(threads)
        work.run(progress)
        for thread in threads:
            thread.join()
    except BaseException as e:  # an interrupt: the memory is the caller's again only when nobody fills it any more
        work.stop(e)
        for thread in threads:
            thread.join()
        raise
    finally:
        work.close()
    work.finish(progress)


def verify_file(
    path: Path,
    digest: FileDigest,
    progress: Callable[[int], object] = int,
    skip: Container[int] = (),
) -> None:
    """Compare the file ``path`` with ``digest``. ``progress`` is called with each number of bytes read.

    Args:
        path: of the file.
        digest: its expected size and hashes.
        progress: called with each number of bytes read.
        skip: numbers of chunks that were verified before, as :class:`ParallelReader` counts them.

    Raises:
        CorruptCheckpointError: it has another size or other bytes.
        OSError: it is not there or cannot be read.
    """
    with ParallelReader(path, digest) as reader:
        reader.verify(progress, skip)
