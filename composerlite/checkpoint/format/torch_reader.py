"""Reading a ``.pt`` file: what it holds first, the bytes of its tensors when it is known which are wanted, and where.

Any file that ``torch.save`` has written since 1.6 is read, by whatever program.
"""

from __future__ import annotations

import ctypes
import functools
import io
import itertools
import math
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, Protocol, final

import torch
from isal import isal_zlib
from torch import Tensor, nn

from composerlite.checkpoint.format.zip_file import Layout, ZipRecord, entries, records_root
from composerlite.checkpoint.trust.trusted import storage_dtype
from composerlite.checkpoint.trust.unpickler import RestrictedUnpickler
from composerlite.devices import RingSlots, shared_ring
from composerlite.errors import CorruptCheckpointError
from composerlite.types import Piece

__all__ = [
    "ByteSource",
    "MapLocation",
    "Sieve",
    "StoredTensor",
    "TorchFile",
    "UnverifiedFile",
    "Window",
    "item_contents",
    "predicted",
    "runs_of",
    "stored_tensor",
]

MapLocation = str | torch.device | Mapping[str, str] | Callable[[Any, str], Any] | None
"""Where tensors go: as ``torch.load`` takes it."""

_MOST_PICKLE_BYTES = 1 << 30
_SIEVED_BYTES = 32 << 20
"""What is read at a time of what is not kept whole."""
_SLOTS = 3  # one is read from the file, the others are being copied to a device
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


class ByteSource(Protocol):
    """The bytes of a file, in any order. Those that are not what was saved raise :class:`CorruptCheckpointError`."""

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        ...

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = ...) -> None:
        """Fill memory. ``progress`` is called with each number of bytes."""
        ...


@final
class UnverifiedFile:
    """A file that is open for reading, unverified."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes; :class:`CorruptCheckpointError` where the file ends before."""
        self._file.seek(offset)
        data = self._file.read(size)
        if len(data) != size:
            raise CorruptCheckpointError(f"it ends at {offset + len(data)} and not at {offset + size}")
        return data

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = int) -> None:
        """Fill memory, one piece after the other."""
        for offset, address, size in targets:
            self._file.seek(offset)
            view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
            while view:
                count = self._file.readinto(view)  # type: ignore[attr-defined]
                if not count:
                    raise CorruptCheckpointError(f"it ends before {offset + size}")
                progress(count)
                view = view[count:]

    def expect(self, offset: int, size: int) -> None:
        """Let the system read ``size`` bytes ahead."""
        os.posix_fadvise(self._file.fileno(), offset, size, os.POSIX_FADV_WILLNEED)


@final
@dataclass(frozen=True, slots=True)
class Window:
    """A file within another one.

    Attributes:
        source: the other one.
        start: where in it this file begins.
        size_bytes: of this file.
        known: what was read of it before: where each part begins, and its bytes. Where the end is looked for, zeros
            stand for what lies before the last part.
    """

    source: ByteSource
    start: int
    size_bytes: int
    known: Sequence[tuple[int, bytearray]] = ()

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly ``size`` bytes."""
        for first, data in self.known:
            if first <= offset and offset + size <= first + len(data):
                return bytes(data[offset - first : offset - first + size])
            if first + len(data) == self.size_bytes == offset + size:
                return bytes(first - offset) + bytes(data)
        self._check(offset, size)
        return self.source.read(self.start + offset, size)

    def read_into(self, targets: Sequence[Piece], progress: Callable[[int], object] = int) -> None:
        """Fill memory."""
        for offset, _, size in targets:
            self._check(offset, size)
        self.source.read_into([(self.start + offset, address, size) for offset, address, size in targets], progress)

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size_bytes:
            raise CorruptCheckpointError(f"it has no bytes {offset} to {offset + size}")


class Sieve(Protocol):
    """Takes the bytes of a record a part at a time, from front to back, and keeps what it needs."""

    step_bytes: int
    """Parts are multiples of this size."""
    device: torch.device | None
    """Where ``part`` is copied to while this thread continues; ``None``: it is not copied to a device."""

    def take(self, start: int, part: torch.Tensor, slots: RingSlots) -> None:
        """Take the bytes from ``start`` on. ``part`` is used again, except for copies that ``slots`` knows of."""
        ...


@final
class TorchFile:
    """A ``.pt`` file. :attr:`contents` is there at once; the bytes of its tensors are undefined until :meth:`read`.

    Attributes:
        contents: what the file contains.
        ring: tensors on devices are read through it.

    Args:
        source: bytes of the file.
        size_bytes: size of the file.
        peek: reads bytes that need not be verified: they are verified when the tensors are read.
        expect: is called with the bytes that ``peek`` will be asked for.
        map_location: where tensors go.
        trust: load any type, **running whatever code the file contains**.
        check_sums: compare the CRC-32 of each record with that in the archive; for files that nothing else verifies.
        comment_bytes: size of the comment behind the archive, if ``size_bytes`` does not include the comment.
        types: further classes that the file may contain, by full name, created and filled as pickle does.

    Raises:
        CorruptCheckpointError: damaged, or no torch file.
        RefusedError: the file names something that is not known to be safe.
    """

    def __init__(
        self,
        source: ByteSource,
        size_bytes: int,
        *,
        peek: Callable[[int, int], bytes],
        expect: Callable[[int, int], object] | None = None,
        map_location: MapLocation = "cpu",
        trust: bool = False,
        check_sums: bool = False,
        types: Mapping[str, type] | None = None,
        comment_bytes: int = 0,
    ) -> None:
        self._source = source
        self.ring = shared_ring
        if peek(0, min(size_bytes, len(_LEGACY))) == _LEGACY:
            raise CorruptCheckpointError(
                "it has the format of torch before 1.6. Convert it, only if the file is yours, since whatever code the "
                "file holds is run: torch.save(torch.load(path, weights_only=False), path)"
            )
        listed = entries(size_bytes, source.read, peek, expect, comment_bytes=comment_bytes)
        root = records_root(listed)
        self._records = {name.removeprefix(root): entry for name, entry in listed.items() if name.startswith(root)}
        # torch.serialization.set_crc32_options(False) writes zeros.
        self._check_sums = check_sums and any(entry.crc for entry in self._records.values())
        if (order := self._small("byteorder", sys.byteorder.encode())) != sys.byteorder.encode():
            raise CorruptCheckpointError(
                f"its numbers have the byte order {order[:20]!r}, and this machine has {sys.byteorder!r}. Convert it "
                "with torch alone: torch.save(torch.load(path, weights_only=True), path)"
            )
        self._map_location = map_location
        self._eager = trust  # its code may look at the numbers in its tensors
        self._unread: list[tuple[weakref.ref[torch.UntypedStorage], ZipRecord]] = []
        self._known: dict[str, torch.UntypedStorage] = {}
        data = self._small("data.pkl")
        try:
            self.contents = _trusted(data, self) if trust else RestrictedUnpickler(data, self, types).load()
        except (ValueError, pickle.UnpicklingError) as e:
            raise CorruptCheckpointError(str(e)) from e
        self._known = {}  # from here on a storage lives as long as something in the contents has it

    def storage(self, identity: Any) -> torch.storage.TypedStorage:
        """Return the storage that the pickle calls ``identity``."""
        mark, dtype, key, location, count = identity
        has_types = isinstance(dtype, torch.dtype) and type(key) is type(location) is str and type(count) is int
        if mark != "storage" or not has_types:
            raise ValueError("a storage in a form that torch does not write")
        if key not in self._known:
            record = self._records.get(f"data/{key}")
            if record is None or count * dtype.itemsize != record.size:
                raise ValueError(f"the storage {key!r} of {count!r} × {dtype}, of which the file has not as many bytes")
            self._known[key] = self._new_storage(record, location)
        return torch.storage.TypedStorage(wrap_storage=self._known[key], dtype=dtype, _internal=True)

    def _new_storage(self, record: ZipRecord, location: str) -> torch.UntypedStorage:
        """Return memory for a storage that was saved on the device ``location``. Memory on the CPU is filled later."""
        wanted = self._map_location
        if isinstance(wanted, Mapping):
            wanted = wanted.get(location)
        kind = None if callable(wanted) else torch.device(location if wanted is None else wanted).type
        storage = torch.UntypedStorage(record.size, device="meta" if kind == "meta" else "cpu")
        if kind == "meta" or (kind == "cpu" and not self._eager):
            self._unread.append((weakref.ref(storage), record))
            return storage
        self._fill([(record, storage.data_ptr())], int)
        moved: Any = wanted(storage, location) if callable(wanted) else None
        restore: Any = torch.serialization.default_restore_location
        target = location if wanted is None or callable(wanted) else str(wanted)
        return restore(storage, target) if moved is None else moved

    def read_now(self) -> None:
        """Read the bytes of all storages so far, and those of later storages at once."""
        self.read()
        self._eager = True

    def unread(self) -> dict[int, ZipRecord]:
        """Return the records whose bytes are yet to be read, by the ``id`` of their storage."""
        return {id(storage): record for reference, record in self._unread if (storage := reference()) is not None}

    def read(
        self,
        *,
        places: Mapping[str, int] | None = None,
        sieves: Mapping[str, Sieve] | None = None,
        progress: Callable[[int], object] = int,
    ) -> None:
        """Read the bytes of every tensor that something still refers to, each storage once.

        Args:
            places: addresses of memory that has the size of a record and is filled as well, by record name.
            sieves: take records as well, by record name.
            progress: is called with each number of bytes.
        """
        wanted = [
            (record, storage.data_ptr())
            for reference, record in self._unread
            if (storage := reference()) is not None and storage.device.type != "meta"
        ]
        names = {record.name: record for record in self._records.values()}
        self._fill([*wanted, *((names[name], address) for name, address in (places or {}).items())], progress)
        self._unread = []
        if sieves:
            self._sift({names[name]: sieve for name, sieve in sieves.items()}, progress)

    def _sift(self, sieves: Mapping[ZipRecord, Sieve], progress: Callable[[int], object]) -> None:
        """Read records in parts, several at a time where they are small."""
        slot_bytes = min(_SIEVED_BYTES, sum(record.size for record in sieves))
        slot_bytes = max(slot_bytes, *(sieve.step_bytes for sieve in sieves.values()), 1)
        on_devices = [sieve.device for sieve in sieves.values() if sieve.device is not None]
        device, count = (on_devices[0], _SLOTS) if on_devices else (torch.device("cpu"), 1)
        sums: dict[ZipRecord, int] = {}
        with self.ring.slots(slot_bytes, device, count) as slots:
            for batch in _batches(sieves, slot_bytes):
                scratch = slots.next()
                places = list(itertools.accumulate((size for _, _, size in batch), initial=0))
                pieces = [
                    (record.offset + start, scratch.data_ptr() + place, size)
                    for (record, start, size), place in zip(batch, places, strict=False)
                ]
                self._read_records([record for record, start, _ in batch if start == 0], pieces, progress)
                for (record, start, size), place in zip(batch, places, strict=False):
                    part = scratch[place : place + size]
                    if self._check_sums:
                        sums[record] = isal_zlib.crc32(part.numpy(), sums.get(record, 0))
                    sieves[record].take(start, part, slots)
        for record, crc in sums.items():
            _compare_sum(record, crc)

    def _fill(self, wanted: Sequence[tuple[ZipRecord, int]], progress: Callable[[int], object]) -> None:
        """Read records to addresses."""
        ordered = sorted(wanted, key=lambda one: one[0].offset)
        pieces = [(record.offset, address, record.size) for record, address in ordered if record.size]
        self._read_records([record for record, _ in ordered], pieces, progress)
        if self._check_sums:
            for record, address in ordered:
                _compare_sum(record, isal_zlib.crc32((ctypes.c_char * record.size).from_address(address)))

    def _read_records(
        self, records: Sequence[ZipRecord], pieces: Sequence[Piece], progress: Callable[[int], object]
    ) -> None:
        """Read ``pieces`` of data, and the headers of ``records``, both in the order of the file.

        The directory says where headers are, headers say where data are: they are verified with the data.
        """
        headers = bytearray(sum(len(record.header) for record in records) + 1)
        address = ctypes.addressof(ctypes.c_char.from_buffer(headers))
        wanted = list(pieces)
        for record in records:
            wanted.append((record.start, address, len(record.header)))
            address += len(record.header)
        if wanted:
            self._source.read_into(sorted(wanted), progress)
        if bytes(headers[:-1]) != b"".join(record.header for record in records):
            raise CorruptCheckpointError("it changed while it was read")

    def _small(self, name: str, default: bytes | None = None) -> bytes:
        """Return the bytes of a record that is no storage."""
        record = self._records.get(name)
        if record is None:
            if default is None:
                raise CorruptCheckpointError(f"it has no record {name!r}")
            return default
        if record.size > _MOST_PICKLE_BYTES:
            raise CorruptCheckpointError(f"its record {name!r} has {record.size} bytes")
        if self._source.read(record.start, len(record.header)) != record.header:
            raise CorruptCheckpointError("it changed while it was read")
        data = self._source.read(record.offset, record.size)
        if self._check_sums:
            _compare_sum(record, isal_zlib.crc32(data))
        return data


def _batches(sieves: Mapping[ZipRecord, Sieve], most_bytes: int) -> Iterator[list[tuple[ZipRecord, int, int]]]:
    """Yield batches of parts of records, in the order of the file: record, first byte in the record, and size."""
    batch: list[tuple[ZipRecord, int, int]] = []
    for record, sieve in sorted(sieves.items(), key=lambda one: one[0].offset):
        step = max(1, sieve.step_bytes)
        part = max(step, _SIEVED_BYTES // step * step)
        for start in range(0, record.size, part):
            size = min(part, record.size - start)
            if batch and sum(size for _, _, size in batch) + size > most_bytes:
                yield batch
                batch = []
            batch.append((record, start, size))
    yield batch


def _compare_sum(record: ZipRecord, crc: int) -> None:
    if crc != record.crc:
        raise CorruptCheckpointError(f"the bytes of its record {record.name!r} have another CRC-32 than it says")


def _trusted(data: bytes, storages: TorchFile) -> Any:
    """Load the pickle with pickle itself: whatever code it names is run."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return storage_dtype(module, name) or super().find_class(module, name)

        def persistent_load(self, pid: Any) -> Any:
            return storages.storage(pid)

    try:
        return Unpickler(io.BytesIO(data), encoding="utf-8").load()
    except (EOFError, IndexError, KeyError, UnicodeDecodeError) as e:
        raise pickle.UnpicklingError(f"its pickle is malformed: {e!r}") from e


# ── a file inside another: an item of a sharded checkpoint ───────────────────────────────────────────────────────────
class StoredTensor(NamedTuple):
    """A tensor whose numbers lie in a file, in row-major order.

    Attributes:
        shape: of it.
        dtype: of it.
        start: where its numbers begin in the item.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int


@functools.lru_cache(1024)
def predicted(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[StoredTensor, int]:
    """Layout of a tensor in an item of this package, and where what follows its numbers begins."""
    (record,) = Layout([("data/0", math.prod(shape) * dtype.itemsize)]).records
    return StoredTensor(shape, dtype, record.offset), record.offset + record.size


def stored_tensor(item: Window) -> StoredTensor | None:
    """The tensor that the item holds, its numbers unread; ``None`` if it is of a rarer kind than row-major.

    Read as a whole an item says what is wrong with it, or is of a kind that can be read so only.

    Raises:
        RefusedError: it names something that is not known to be safe.
    """
    try:
        file = TorchFile(item, item.size_bytes, peek=item.read, map_location="meta")
    except CorruptCheckpointError:
        return None
    contents, unread = file.contents, file.unread()
    if type(contents) not in (Tensor, nn.Parameter) or contents.layout is not torch.strided or contents.is_quantized:
        return None
    record = unread.get(id(contents.untyped_storage()))
    if record is None or len(unread) != 1 or not contents.is_contiguous() or contents.is_conj() or contents.is_neg():
        return None
    start = record.offset + contents.storage_offset() * contents.itemsize
    return StoredTensor(tuple(contents.shape), contents.dtype, start)


def item_contents(data: bytes | bytearray) -> Any:
    """Load the contents of an item from its bytes.

    Raises:
        CorruptCheckpointError: it is no torch file, or its own checksums say that it is damaged.
        RefusedError: it names something that is not known to be safe.
    """
    source = UnverifiedFile(io.BytesIO(data))
    file = TorchFile(source, len(data), peek=source.read, check_sums=True)
    file.read()
    return file.contents


def runs_of(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The parts of a row-major tensor that make up a box in it, in order: first element and number of elements.

    Raises:
        CorruptCheckpointError: the box is not in the tensor.
    """
    if (
        len(shape) != len(offsets)
        or len(shape) != len(lengths)
        or any(o < 0 or n < 0 or o + n > size for size, o, n in zip(shape, offsets, lengths, strict=True))
    ):
        raise CorruptCheckpointError(f"there is no part {list(lengths)} at {list(offsets)} in the shape {list(shape)}")
    if 0 in lengths:
        return
    inner = len(shape)  # the dimensions from here on are wanted whole
    while inner > 0 and lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if inner == 0:
        yield 0, math.prod(shape)
        return
    count = lengths[inner - 1] * strides[inner - 1]
    first = offsets[inner - 1] * strides[inner - 1]
    for place in itertools.product(*(range(offsets[dim], offsets[dim] + lengths[dim]) for dim in range(inner - 1))):
        yield first + sum(at * strides[dim] for dim, at in enumerate(place)), count
