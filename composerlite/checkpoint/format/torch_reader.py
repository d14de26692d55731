"""Reading a ``.pt`` file: what it holds first, the bytes of its tensors when it is known which are wanted, and where.

Any file that ``torch.save`` has written since 1.6 is read, by whatever program.
"""

from __future__ import annotations

import ctypes
import functools
import io
import math
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, Protocol, cast, final

import torch
from isal import isal_zlib
from torch import Tensor, nn

from composerlite.checkpoint.format.zip_file import Layout, ZipEntry, entries, records_root
from composerlite.checkpoint.trust.trusted import StorageKind, storage_kind
from composerlite.checkpoint.trust.unpickler import RestrictedUnpickler
from composerlite.devices import RingSlots, shared_ring
from composerlite.errors import CorruptCheckpointError
from composerlite.types import Piece

__all__ = [
    "ByteSource",
    "MapLocation",
    "Sieve",
    "StorageRecord",
    "StoredTensor",
    "TorchFile",
    "UnverifiedFile",
    "Window",
    "is_legacy",
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
    """Parts are multiples of it."""
    device: torch.device | None
    """Where ``part`` is copied to while this thread continues; ``None``: it does not."""

    def take(self, start: int, part: torch.Tensor, slots: RingSlots) -> None:
        """The bytes from ``start`` on. ``part`` is used again, but for what ``slots`` is told of: when that is done."""
        ...


class StorageRecord(NamedTuple):
    """The bytes of a storage in the file."""

    name: str
    size: int
    offset: int


class _Unread(NamedTuple):
    """A storage whose bytes have not been read, and where they are."""

    storage: weakref.ref[torch.UntypedStorage]
    name: str
    dtype: torch.dtype


@final
class TorchFile:
    """A ``.pt`` file. :attr:`contents` is there at once; the bytes of its tensors are undefined until :meth:`read`.

    Attributes:
        contents: what the file holds.

    Args:
        source: its bytes.
        size_bytes: how many there are.
        peek: reads bytes that need not be verified: they are verified when the tensors are read.
        expect: is called with the bytes that ``peek`` will be asked for.
        map_location: where tensors go.
        trust: load any type, **running whatever code the file holds**.
        check_sums: compare the CRC-32 of each record with that in the archive; for what nothing else verifies.
        comment_bytes: size of the comment behind the archive, if ``size_bytes`` does not include the comment.
        types: further classes that it may hold, by full name, made and filled as pickle does. Theirs is what may run.

    Raises:
        CorruptCheckpointError: damaged, or no torch file.
        RefusedError: it names something that is not known to be safe.
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
        self.ring = shared_ring  # through which it is read where it goes to devices
        self._unread: list[_Unread] = []
        if is_legacy(size_bytes, peek):
            if not trust:
                raise CorruptCheckpointError(
                    "it has the format of torch before 1.6. Only if the file is yours, load it with "
                    "trust_checkpoint=True, which runs whatever code the file holds, or convert it: "
                    "torch.save(torch.load(path, weights_only=False), path)"
                )
            self._swap, self._check_sums, self._records = False, False, {}
            self.contents = _legacy(source.read(0, size_bytes), map_location)
            return
        listed = entries(size_bytes, source.read, peek, expect, comment_bytes=comment_bytes)
        root = records_root(listed)
        self._records = {name.removeprefix(root): entry for name, entry in listed.items() if name.startswith(root)}
        # torch.serialization.set_crc32_options(False) writes zeros.
        self._check_sums = check_sums and any(entry.crc for entry in self._records.values())
        self._swap = self._small("byteorder", b"little") != sys.byteorder.encode()
        self._map_location = map_location
        self._devices: dict[str, str | None] = {}
        self._eager = trust  # its code may look at the numbers in the tensors that it is given
        self._known: dict[str, torch.UntypedStorage] = {}
        data = self._small("data.pkl")
        try:
            self.contents = _trusted(data, self) if trust else RestrictedUnpickler(data, self, types).load()
        except (ValueError, pickle.UnpicklingError) as e:
            raise CorruptCheckpointError(str(e)) from e
        self._known = {}  # from here on a storage lives as long as something in the contents has it

    # ── what the pickle asks for ─────────────────────────────────────────────────────────────────────────────────
    def storage(self, identity: Any) -> torch.storage.TypedStorage:
        """The storage that the pickle calls ``identity``."""
        mark, kind, key, location, count = identity
        if mark != "storage" or not isinstance(kind, StorageKind) or type(key) is not str or type(location) is not str:
            raise ValueError("a storage in a form that torch does not write")
        storage = self._known.get(key)
        if storage is None:
            storage = self._known[key] = self._new(key, kind.dtype, location, count)
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=kind.dtype, _internal=True)

    def read_now(self) -> None:
        """Read the bytes of all storages so far; those to come are read at once."""
        self.read()
        self._eager = True

    def _new(self, key: str, dtype: torch.dtype, location: str, count: Any) -> torch.UntypedStorage:
        name = f"data/{key}"
        record = self._records.get(name)
        if record is None or type(count) is not int or count * dtype.itemsize != record.size:
            raise ValueError(f"the storage {key!r} of {count!r} × {dtype}, of which the file has not as many bytes")
        if location not in self._devices:
            self._devices[location] = _device(self._map_location, location)
        device = self._devices[location]
        storage = torch.UntypedStorage(record.size, device="meta" if device == "meta" else "cpu")
        if device != "meta" and (self._eager or device != "cpu"):
            self._fill([(name, storage.data_ptr())], int)
            if self._swap:
                storage.byteswap(dtype)
            return _moved(storage, self._map_location, location)
        self._unread.append(_Unread(weakref.ref(storage), name, dtype))
        return storage

    # ── what is read ─────────────────────────────────────────────────────────────────────────────────────────────
    def unread(self) -> dict[int, StorageRecord]:
        """The records whose bytes are yet to be read, by the ``id`` of the storage that is to have them.

        There are none where the bytes need more than to be copied.
        """
        if self._swap:
            return {}
        return {
            id(storage): StorageRecord(item.name, self._records[item.name].size, self._records[item.name].offset)
            for item in self._unread
            if (storage := item.storage()) is not None
        }

    def read(
        self,
        *,
        places: Mapping[str, int] | None = None,
        sieves: Mapping[str, Sieve] | None = None,
        progress: Callable[[int], object] = int,
    ) -> None:
        """Read the bytes of every tensor that something still refers to, each storage once.

        Args:
            places: addresses of memory that has the size of a record and is filled with it as well, by record name.
            sieves: what else takes records, by their names.
            progress: is called with each number of bytes.
        """
        alive = [
            (item, storage)
            for item in self._unread
            if (storage := item.storage()) is not None and storage.device.type != "meta"
        ]
        self._fill(
            [(item.name, storage.data_ptr()) for item, storage in alive] + list((places or {}).items()), progress
        )
        if self._swap:
            for item, storage in alive:
                storage.byteswap(item.dtype)
        self._unread = []
        if sieves:
            self._sift(sieves, progress)

    def _sift(self, sieves: Mapping[str, Sieve], progress: Callable[[int], object]) -> None:
        """Read records in parts, several at a time where they are small."""
        slot_bytes = min(_SIEVED_BYTES, sum(self._records[name].size for name in sieves))
        slot_bytes = max(slot_bytes, *(sieve.step_bytes for sieve in sieves.values()), 1)
        on_devices = [sieve.device for sieve in sieves.values() if sieve.device is not None]
        device, count = (on_devices[0], _SLOTS) if on_devices else (torch.device("cpu"), 1)
        batch: list[tuple[str, int, int]] = []
        sums: dict[str, int] = {}
        with self.ring.slots(slot_bytes, device, count) as slots:
            for name, start, size in self._parts(sieves):
                if sum(size for _, _, size in batch) + size > slot_bytes:
                    self._sift_batch(batch, slots, sieves, sums, progress)
                    batch = []
                batch.append((name, start, size))
            self._sift_batch(batch, slots, sieves, sums, progress)
        for name, crc in sums.items():
            self._compare_sum(name, self._records[name], crc)

    def _parts(self, sieves: Mapping[str, Sieve]) -> Iterator[tuple[str, int, int]]:
        """(record, first byte in it, bytes) of what is read at a time."""
        for name, sieve in sorted(sieves.items(), key=lambda item: self._records[item[0]].offset):
            size, step = self._records[name].size, max(1, sieve.step_bytes)
            part = max(step, _SIEVED_BYTES // step * step)
            for start in range(0, size, part):
                yield name, start, min(part, size - start)

    def _sift_batch(
        self,
        batch: Sequence[tuple[str, int, int]],
        slots: RingSlots,
        sieves: Mapping[str, Sieve],
        sums: dict[str, int],
        progress: Callable[[int], object],
    ) -> None:
        pieces: list[Piece] = []
        scratch = slots.next()
        address = scratch.data_ptr()
        for name, start, size in batch:
            pieces.append((self._records[name].offset + start, address, size))
            address += size
        self._read_records([self._records[name] for name, start, _ in batch if start == 0], pieces, progress)
        begin = 0
        for name, start, size in batch:
            part = scratch[begin : begin + size]
            if self._check_sums:
                sums[name] = isal_zlib.crc32(part.numpy(), sums.get(name, 0))
            sieves[name].take(start, part, slots)
            begin += size

    def _fill(self, wanted: Sequence[tuple[str, int]], progress: Callable[[int], object]) -> None:
        """Read records to addresses."""
        ordered = sorted(((self._records[name], name, address) for name, address in wanted), key=lambda w: w[0].offset)
        pieces = [(entry.offset, address, entry.size) for entry, _, address in ordered if entry.size]
        self._read_records([entry for entry, _, _ in ordered], pieces, progress)
        if self._check_sums:
            for entry, name, address in ordered:
                self._check_sum(name, entry, (ctypes.c_char * entry.size).from_address(address))

    def _read_records(
        self, records: Sequence[ZipEntry], pieces: Sequence[Piece], progress: Callable[[int], object]
    ) -> None:
        """Read ``pieces`` of data, and the headers of ``records``: all are in the order of the file.

        The directory says where headers are, headers where data are: they are verified with the data.
        """
        headers = bytearray(sum(len(entry.header_bytes) for entry in records) + 1)
        address = ctypes.addressof(ctypes.c_char.from_buffer(headers))
        wanted = list(pieces)
        for entry in records:
            wanted.append((entry.header, address, len(entry.header_bytes)))
            address += len(entry.header_bytes)
        if wanted:
            self._source.read_into(sorted(wanted), progress)
        if bytes(headers[:-1]) != b"".join(entry.header_bytes for entry in records):
            raise CorruptCheckpointError("it changed while it was read")

    def _small(self, name: str, default: bytes | None = None) -> bytes:
        """The bytes of a record that is no storage."""
        entry = self._records.get(name)
        if entry is None:
            if default is None:
                raise CorruptCheckpointError(f"it has no record {name!r}")
            return default
        if entry.size > _MOST_PICKLE_BYTES:
            raise CorruptCheckpointError(f"its record {name!r} has {entry.size} bytes")
        if self._source.read(entry.header, len(entry.header_bytes)) != entry.header_bytes:
            raise CorruptCheckpointError("it changed while it was read")
        data = self._source.read(entry.offset, entry.size)
        if self._check_sums:
            self._check_sum(name, entry, data)
        return data

    def _check_sum(self, name: str, entry: ZipEntry, data: Any) -> None:
        self._compare_sum(name, entry, isal_zlib.crc32(data))

    def _compare_sum(self, name: str, entry: ZipEntry, crc: int) -> None:
        if crc != entry.crc:
            raise CorruptCheckpointError(f"the bytes of its record {name!r} have another CRC-32 than it says")


def is_legacy(size_bytes: int, peek: Callable[[int, int], bytes]) -> bool:
    """Return true for a file of torch before 1.6, which is no zip archive."""
    return peek(0, min(size_bytes, len(_LEGACY))) == _LEGACY


def _legacy(data: bytes, map_location: MapLocation) -> Any:
    """Load a file of torch before 1.6: whatever code it names is run."""
    try:
        return torch.load(io.BytesIO(data), cast("Any", map_location), weights_only=False)
    except (EOFError, IndexError, KeyError, RuntimeError, UnicodeDecodeError) as e:
        raise CorruptCheckpointError(f"its pickle is malformed: {e!r}") from e
    except (ValueError, pickle.UnpicklingError) as e:
        raise CorruptCheckpointError(str(e)) from e


def _trusted(data: bytes, storages: TorchFile) -> Any:
    """Load the pickle with pickle itself: whatever code it names is run."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            kind = storage_kind(module, name)
            return super().find_class(module, name) if kind is None else kind

        def persistent_load(self, pid: Any) -> Any:
            return storages.storage(pid)

    try:
        return Unpickler(io.BytesIO(data), encoding="utf-8").load()
    except (EOFError, IndexError, KeyError, UnicodeDecodeError) as e:
        raise pickle.UnpicklingError(f"its pickle is malformed: {e!r}") from e


def _device(map_location: MapLocation, location: str) -> str | None:
    """The kind of device that a storage from ``location`` goes to; ``None``: a function decides."""
    if callable(map_location):
        return None
    if isinstance(map_location, Mapping):
        map_location = map_location.get(location, location)
    return torch.device(location if map_location is None else map_location).type


def _moved(storage: torch.UntypedStorage, map_location: MapLocation, location: str) -> Any:
    restore: Any = torch.serialization.default_restore_location
    if callable(map_location):
        moved = map_location(storage, location)
        return restore(storage, location) if moved is None else moved
    if isinstance(map_location, Mapping):
        map_location = map_location.get(location, location)
    return restore(storage, str(location if map_location is None else map_location))


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
    return StoredTensor(shape, dtype, record.data_offset), record.data_offset + record.size_bytes


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
    outer = [range(offsets[dim], offsets[dim] + lengths[dim]) for dim in range(inner - 1)]
    for place in _each(outer):
        yield first + sum(at * strides[dim] for dim, at in enumerate(place)), count


def _each(ranges: Sequence[range]) -> Iterator[tuple[int, ...]]:
    if not ranges:
        yield ()
        return
    for at in ranges[0]:
        for rest in _each(ranges[1:]):
            yield (at, *rest)
