"""Reader of ``.pt`` files: first the contents, then the bytes of the wanted tensors, directly into their memory.

Reads every file of ``torch.save`` since torch 1.6.
"""

from __future__ import annotations

import io
import pickle
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, final

import torch
from isal import isal_zlib

from composerlite.checkpoint.format.byte_sources import ByteSource, MemoryFile
from composerlite.checkpoint.format.zip_file import ZipRecord, entries
from composerlite.checkpoint.trust.unpickler import STORAGE_DTYPES, RefusedError, RestrictedUnpickler
from composerlite.devices import RingSlots, shared_ring
from composerlite.errors import CorruptCheckpointError, UntrustedCheckpointError
from composerlite.storage.disk.memory import address_of, memory_at
from composerlite.types import Piece, batches

T = TypeVar("T")
MapLocation = str | torch.device | Mapping[str, str] | Callable[[Any, str], Any] | None
"""Devices of tensors, in the forms of ``torch.load``."""

_MOST_PICKLE_BYTES = 1 << 30
_SIEVED_BYTES = 32 << 20
"""Bytes to read at a time from records with a :class:`Sieve`."""
_SLOTS = 3  # one slot is filled from the file while the others are copied to a device


class Sieve(Protocol):
    """Takes the bytes of a record in parts, from front to back, and keeps the wanted bytes."""

    step_bytes: int
    """The size of each part but the last is a multiple of this number, at least 1."""
    device: torch.device | None
    """Target device of asynchronous copies; ``None``: no asynchronous copies."""

    def take(self, start: int, part: torch.Tensor, slots: RingSlots) -> None:
        """Take the bytes from ``start`` on.

        Args:
            start: offset of ``part`` in the record.
            part: bytes of the record. The memory is reused after the call, and after device copies noted in ``slots``.
            slots: owner of the memory of ``part``.
        """
        ...


@final
class TorchFile:
    """A ``.pt`` file. :attr:`contents` is read at once. The bytes of tensors are undefined until :meth:`read`.

    Attributes:
        contents: the contents of the file.
        records: the records of the zip archive, by name below the archive's root.
        unread: the storages whose bytes are not read yet, by the name of the record. A storage that nothing else refers
            to is left out.
        ring: buffers for reading to devices.
        progress: called with each number of bytes read by :meth:`read`.
        verified: numbers of the chunks of the file that were read and verified so far.

    Args:
        source: bytes of the file.
        size_bytes: size of the file.
        map_location: devices of tensors.
        trust: load any type, **running all code in the file**.
        check_sums: compare the CRC-32 of each record with the zip directory; for files without other digests. Then the
            comment behind the archive must be present.
        types: further allowed classes, by full name, created and filled as pickle does.

    Raises:
        CorruptCheckpointError: damaged, or no torch file.
        RefusedError: the file names a class or function outside of the allowed list.
    """

    def __init__(
        self,
        source: ByteSource,
        size_bytes: int,
        *,
        map_location: MapLocation = "cpu",
        trust: bool = False,
        check_sums: bool = False,
        types: Mapping[str, type] | None = None,
    ) -> None:
        self._source = source
        self.ring = shared_ring
        self.progress: Callable[[int], object] = int
        self.verified: Collection[int] = ()
        listed = entries(size_bytes, source.read, is_whole=check_sums)
        roots = [name[: -len("data.pkl")] for name in listed if name.partition("/")[2] == "data.pkl"]
        if len(roots) != 1:
            raise CorruptCheckpointError(f"it is a zip archive with {len(roots)} records '…/data.pkl' and not one")
        self.records = {name[len(roots[0]) :]: entry for name, entry in listed.items() if name.startswith(roots[0])}
        # torch.serialization.set_crc32_options(False) writes zeros.
        self._check_sums = check_sums and any(entry.crc for entry in self.records.values())
        order = self._small("byteorder") if "byteorder" in self.records else sys.byteorder.encode()
        if order != sys.byteorder.encode():
            raise CorruptCheckpointError(
                f"its tensors have the byte order {order[:20]!r}, and this machine has {sys.byteorder!r}. Convert "
                "it with torch alone: torch.save(torch.load(path, weights_only=True), path)"
            )
        self._map_location = map_location
        self._eager = trust  # the code in the file may read the numbers of tensors
        self.unread: weakref.WeakValueDictionary[str, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._known: dict[str, torch.UntypedStorage] = {}
        self._sums: dict[str, int] = {}  # CRC-32 of the parts read so far, by record
        data = self._small("data.pkl")
        try:
            reader = RestrictedUnpickler(data, self.storage, types, read_now=self.read_now)
            self.contents = _trusted(data, self.storage) if trust else reader.load()
        except (ValueError, LookupError, EOFError, pickle.UnpicklingError) as e:
            raise CorruptCheckpointError(f"its contents cannot be read: {e}") from e
        self._known = {}  # from here on only the contents keep storages alive

    def storage(self, identity: Any) -> torch.storage.TypedStorage:
        """Return the storage with the persistent id ``identity``. Memory on the CPU is filled later."""
        mark, dtype, key, location, count = identity
        has_types = isinstance(dtype, torch.dtype) and type(key) is type(location) is str and type(count) is int
        if mark != "storage" or not has_types:
            raise ValueError("an unknown form of storage")
        if key not in self._known:
            name = f"data/{key}"
            record = self.records.get(name)
            if record is None or count * dtype.itemsize != record.size:
                raise ValueError(f"the storage {key!r} of {count!r} × {dtype}: the file has fewer bytes")
            wanted = self._map_location
            if isinstance(wanted, Mapping):
                wanted = wanted.get(location)
            target = location if wanted is None or callable(wanted) else str(wanted)
            kind = None if callable(wanted) else torch.device(target).type
            storage: Any = torch.UntypedStorage(record.size, device="meta" if kind == "meta" else "cpu")
            if kind == "meta" or (kind == "cpu" and not self._eager):
                self.unread[name] = storage
            else:
                self._read_parts([(record, 0, storage.data_ptr(), record.size)])
                moved: Any = wanted(storage, location) if callable(wanted) else None
                restore: Any = torch.serialization.default_restore_location
                storage = restore(storage, target) if moved is None else moved
            self._known[key] = storage
        return torch.storage.TypedStorage(wrap_storage=self._known[key], dtype=dtype, _internal=True)

    def read_now(self) -> None:
        """Read the bytes of all storages so far. Later storages are read at once."""
        self.read()
        self._eager = True

    def read(self, *, places: Mapping[str, int] | None = None, sieves: Mapping[str, Sieve] | None = None) -> None:
        """Read the bytes of all living tensors, each storage once.

        Args:
            places: addresses of further memory to fill with a record, by record name.
            sieves: receivers of records in parts, by record name. Small records are read together.

        Raises:
            CorruptCheckpointError: the file is damaged, or changed since the directory was read.
        """
        records = self.records
        wanted = [(name, one.data_ptr()) for name, one in self.unread.items() if one.device.type != "meta"]
        wanted += (places or {}).items()
        self.unread.clear()
        self._read_parts([(records[name], 0, address, records[name].size) for name, address in wanted])
        if not sieves:
            return
        slot_bytes = min(_SIEVED_BYTES, sum(records[name].size for name in sieves))
        slot_bytes = max(slot_bytes, *(sieve.step_bytes for sieve in sieves.values()), 1)
        on_devices = [sieve.device for sieve in sieves.values() if sieve.device is not None]
        device, count = (on_devices[0], _SLOTS) if on_devices else (torch.device("cpu"), 1)
        parts: list[tuple[str, int, int]] = []
        for name in sorted(sieves, key=lambda name: records[name].offset):
            size, step = records[name].size, sieves[name].step_bytes
            part = max(step, _SIEVED_BYTES // step * step)
            parts += [(name, start, min(part, size - start)) for start in range(0, size, part)]
        with self.ring.slots(slot_bytes, device, count) as slots:
            for batch in in_slots(slots, parts, slot_bytes):
                self._read_parts([(records[name], start, one.data_ptr(), one.nbytes) for name, start, one in batch])
                for name, start, one in batch:
                    sieves[name].take(start, one, slots)

    def _read_parts(self, parts: Sequence[tuple[ZipRecord, int, int, int]]) -> None:
        """Read parts of records, and compare the CRC-32 of a record after its last part.

        The offset of a record's data depends on the header, so the header is verified with the first part.

        Args:
            parts: record, first byte in the record, address in memory, and size of each part.
        """
        headers = [(record, bytearray(len(record.header))) for record, start, _, _ in parts if start == 0]
        wanted: list[Piece] = [(record.offset + start, place, size) for record, start, place, size in parts if size]
        wanted += [(record.start, address_of(header), len(header)) for record, header in headers]
        if wanted:
            self._source.read_into(sorted(wanted), self.progress)
        if any(bytes(header) != record.header for record, header in headers):
            raise CorruptCheckpointError("it changed while it was read")
        for record, start, place, size in parts if self._check_sums else ():
            crc = isal_zlib.crc32(memory_at(place, size), self._sums.pop(record.name, 0))
            if start + size < record.size:
                self._sums[record.name] = crc
            else:
                _compare_sum(record, crc)

    def _small(self, name: str) -> bytes:
        """Return the bytes of a small record."""
        record = self.records[name]
        if record.size > _MOST_PICKLE_BYTES:
            raise CorruptCheckpointError(f"its record {name!r} has {record.size} bytes")
        if self._source.read(record.start, len(record.header)) != record.header:
            raise CorruptCheckpointError("it changed while it was read")
        data = self._source.read(record.offset, record.size)
        if self._check_sums:
            _compare_sum(record, isal_zlib.crc32(data))
        return data


def in_slots(
    slots: RingSlots, parts: Iterable[tuple[T, int, int]], slot_bytes: int
) -> Iterator[list[tuple[T, int, torch.Tensor]]]:
    """Yield ``parts`` (owner, start, size in bytes) in batches, each part with memory in a slot instead of a size."""
    for batch in batches(parts, slot_bytes, lambda part: part[2]):
        sizes = [size for *_, size in batch]
        places = slots.next()[: sum(sizes)].split(sizes)
        yield [(owner, start, place) for (owner, start, _), place in zip(batch, places, strict=True)]


def _compare_sum(record: ZipRecord, crc: int) -> None:
    if crc != record.crc:
        raise CorruptCheckpointError(f"the bytes of its record {record.name!r} have another CRC-32 than it says")


def _trusted(data: bytes, load_storage: Callable[[Any], Any]) -> Any:
    """Load the pickle with pickle itself, which runs all code in the pickle."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return STORAGE_DTYPES.get(f"{module}.{name}") or super().find_class(module, name)

        def persistent_load(self, pid: Any) -> Any:
            return load_storage(pid)

    return Unpickler(io.BytesIO(data), encoding="utf-8").load()


def untrusted(what: str, refused: RefusedError, *, may_trust: bool = False) -> UntrustedCheckpointError:
    """Return the error for an unknown type in ``what``. ``may_trust``: suggest ``trust_checkpoint=True``."""
    kind = refused.name.rsplit(".", 1)[-1]
    ways = [f"allow the type with torch.serialization.add_safe_globals([{kind}])"] if refused.allowable else []
    if may_trust:
        ways.append("load with trust_checkpoint=True, which runs whatever code the file holds")
    hint = f" Only if it is yours, {', or '.join(ways)}." if ways else ""
    return UntrustedCheckpointError(f"{what} holds {refused.name}, which is not known to be safe to load.{hint}")


def item_contents(data: bytes | bytearray) -> Any:
    """Load the ``.pt`` file ``data``: an item of a sharded checkpoint.

    Raises:
        CorruptCheckpointError: the item is no torch file, or is damaged according to its checksums.
        RefusedError: the item names a class or function outside of the allowed list.
    """
    file = TorchFile(MemoryFile(data), len(data), check_sums=True)
    file.read()
    return file.contents
