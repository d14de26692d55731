"""The monolithic format: one file that plain ``torch.load(weights_only=True)`` opens and ``unzip -t`` accepts.

The contents are pickled as torch does; where the bytes of tensors lie in the file and how they get there is ours: see
``zip_layout`` and ``storage.StreamWriter``.
"""

from __future__ import annotations

import collections
import functools
import io
import logging
import pickle
import sys
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2  # pyright: ignore[reportPrivateUsage] - the name that the format has for it

from composerlite.checkpoint.formats.zip_layout import Layout, Record, trailer, trailer_bytes
from composerlite.checkpoint.trusted import is_loadable
from composerlite.storage import HostMemory, Sink
from composerlite.types import StateDict

__all__ = ["StorageCopy", "TorchImage", "storage_id"]

log = logging.getLogger(__name__)
_PICKLE_PROTOCOL = 2  # what torch.save writes, and what its restricted reader takes
_STORAGE_TYPES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
"""What the format calls the storages of common tensors. The others are pickled by torch itself."""

_COMMON = frozenset({str, int, float, bool, type(None), tuple, dict, list, collections.OrderedDict, Tensor, type})


class StorageCopy(NamedTuple):
    """A storage, and where in the file its bytes belong."""

    storage: torch.UntypedStorage
    offset: int


def storage_id(storage: torch.UntypedStorage) -> int:
    """What tells storages apart, for ``torch.save`` too: two tensors that share memory have the same."""
    return storage._cdata  # pyright: ignore[reportPrivateUsage] - it has no public name


@final
class TorchImage:
    """The ``.pt`` file of some contents, laid out and not yet written.

    Everything but the bytes of tensors is pickled when this is made, and does not change with training any more. The
    bytes are read when the image is written: from the tensors themselves, or from a copy after :meth:`staged_in`.

    Args:
        contents: what is to be in the file.
        known: classes that its reader is told to take; of others that it will refuse the log says so.

    Attributes:
        size_bytes: of the file.
        stand_in: gives the storage to read in the place of one of those in the contents, as each is written.

    Raises:
        Exception: whatever pickle raises for something that it cannot write.
    """

    def __init__(self, contents: StateDict, known: Collection[str] = ()) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, protocol=_PICKLE_PROTOCOL, known=known)
        pickler.dump(contents)
        self._index = pickler.index
        self._storages: list[torch.UntypedStorage] | None = pickler.storages
        self._rest = [("data.pkl", buffer.getvalue()), ("byteorder", sys.byteorder.encode()), ("version", b"3\n")]
        # Data first: the layout is then the same at every save. torch's '.format_version' and '.storage_alignment' are
        # left out: they invite readers to compute where torch's own writer would have put each storage.
        data = [(f"data/{number}", storage.nbytes()) for number, storage in enumerate(pickler.storages)]
        self._layout = Layout([*data, *((name, len(value)) for name, value in self._rest)])
        self._memory: HostMemory | None = None
        self._start = 0
        self.stand_in: Callable[[torch.UntypedStorage], torch.UntypedStorage] | None = None
        self.size_bytes = self._layout.end + trailer_bytes(self._layout.records, self._layout.end)

    def storages(self) -> list[StorageCopy]:
        """What is to be copied before training changes it, each storage once."""
        assert self._storages is not None, "the image was staged already"
        return [StorageCopy(s, r.data_offset) for s, r in zip(self._storages, self._layout.records, strict=False)]

    def numbers_of(self, tensors: Iterable[Any]) -> list[int]:
        """The numbers, in the list that :meth:`write` returns, of the storages of ``tensors``."""
        found = {self._index.get(storage_id(t.untyped_storage())) for t in tensors if type(t) is Tensor}
        return sorted(number for number in found if number is not None)

    def staged_in(self, memory: HostMemory, start: int = 0) -> None:
        """From now on the bytes are those in ``memory``: from ``start`` on, each storage at its offset in the file."""
        self._memory, self._start = memory, start
        self._storages = None

    def write(self, sink: Sink) -> list[int]:
        """Write the file to ``sink``; the CRC-32 of each storage."""
        crcs = [self._write_record(sink, number, record) for number, record in enumerate(self._layout.records)]
        sink.write(trailer(self._layout.records, crcs, self._layout.end))
        return crcs[: len(crcs) - len(self._rest)]

    def _write_record(self, sink: Sink, number: int, record: Record) -> int:
        """Write one record, from its header to its descriptor; the CRC-32 of its data."""
        sink.write(record.header)
        rest = number - (len(self._layout.records) - len(self._rest))
        if rest >= 0:
            data = torch.frombuffer(bytearray(self._rest[rest][1]), dtype=torch.uint8)
            crc = sink.copy(data.data_ptr(), record.size_bytes)
        elif self._memory is not None:
            crc = sink.copy(self._memory.address + self._start + record.data_offset, record.size_bytes)
        else:
            assert self._storages is not None
            storage = self._storages[number]
            if self.stand_in is not None:
                storage = self.stand_in(storage)
            if storage.device.type != "cpu":
                storage = storage.cpu()
            crc = sink.copy(storage.data_ptr(), record.size_bytes)
        sink.write(record.descriptor(crc))
        return crc


@final
class _Reference:
    """Stands for a storage in the pickle: what its reader is given to find it by."""

    __slots__ = ("value",)

    def __init__(self, value: tuple[str, Any, str, str, int]) -> None:
        self.value = value


@final
class _Pickler(pickle.Pickler):
    """Pickles as ``torch.save`` does, and notes each storage once instead of writing it.

    Deques and defaultdicts become constructor calls, the only form in which ``weights_only`` takes them back.
    """

    def __init__(self, file: io.BytesIO, protocol: int, known: Collection[str]) -> None:
        super().__init__(file, protocol)
        self._known = known
        self.storages: list[torch.UntypedStorage] = []
        self.index: dict[int, int] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)  # asked of every object: the common ones first
        if kind is _Reference:
            return obj.value
        if kind in _COMMON:
            return None
        if isinstance(obj, torch.UntypedStorage):
            return self._refer(obj, torch.UntypedStorage, torch.uint8, obj.nbytes())
        if isinstance(obj, torch.storage.TypedStorage):
            storage_type = getattr(torch, obj._pickle_storage_type())  # pyright: ignore[reportPrivateUsage]
            return self._refer(obj._untyped_storage, storage_type, obj.dtype, obj._size())  # pyright: ignore[reportPrivateUsage]
        return None

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is Tensor:
            return self._reduce_tensor(obj)
        if kind is collections.deque:
            return collections.deque, (list(obj), obj.maxlen)
        if kind is collections.defaultdict:
            return collections.defaultdict, (obj.default_factory, dict(obj))
        is_named = isinstance(obj, type | types.FunctionType | types.BuiltinFunctionType)
        if is_named and f"{obj.__module__}.{obj.__qualname__}" not in self._known:
            _warn_if_not_loadable(obj)
        return NotImplemented

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        """What torch's own reduction gives, in a tenth of the time; the rare kinds of tensors are left to that."""
        storage_type = _STORAGE_TYPES.get(tensor.dtype)
        dense = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if storage_type is None or not dense or tensor.device.type == "meta" or tensor.__dict__:
            return NotImplemented
        storage = tensor.untyped_storage()
        count = storage.nbytes() // tensor.itemsize
        reference = _Reference(self._refer(storage, storage_type, tensor.dtype, count))
        hooks: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return _rebuild_tensor_v2, (reference, *place, tensor.requires_grad, hooks)

    def _refer(
        self, storage: torch.UntypedStorage, storage_type: Any, dtype: torch.dtype, count: int
    ) -> tuple[str, Any, str, str, int]:
        identity = storage_id(storage)
        number = self.index.get(identity)
        if number is None:
            number = self.index[identity] = len(self.storages)
            self.storages.append(storage)
        if self._dtypes.setdefault(identity, dtype) is not dtype:
            raise ValueError(f"two tensors share memory and have the types {self._dtypes[identity]} and {dtype}")
        location = "cpu" if storage.device.type == "cpu" else str(storage.device)
        return "storage", storage_type, str(number), location, count


@functools.cache
def _warn_if_not_loadable(thing: Any) -> None:
    """Say at the save, once per type, what would be refused at the load."""
    if not is_loadable(thing):
        log.warning(
            "the checkpoint holds %s.%s: it loads only after torch.serialization.add_safe_globals([%s]), or with "
            "trust_checkpoint=True",
            thing.__module__,
            thing.__qualname__,
            thing.__qualname__,
        )
