"""The monolithic format: one file that plain ``torch.load(weights_only=True)`` opens and ``unzip -t`` accepts.

The contents are pickled as torch does; where the bytes of tensors lie in the file and how they get there is ours: see
``zip_layout`` and ``storage.StreamWriter``.
"""

from __future__ import annotations

import ctypes
import io
import sys
import zlib
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from composerlite._torch_compat import storage_id
from composerlite.checkpoint.format.tensor_kinds import is_dense
from composerlite.checkpoint.format.torch_pickle import Pickled
from composerlite.checkpoint.format.zip_layout import Layout, Record, trailer
from composerlite.storage import FileDigest, HostMemory, Sink
from composerlite.types import StateDict

__all__ = ["StorageCopy", "TorchImage", "file_bytes"]


class StorageCopy(NamedTuple):
    """A storage, and where in the file its bytes belong."""

    storage: torch.UntypedStorage
    offset: int


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
        pickled = Pickled(contents, known)
        self._index = pickled.index
        self._storages: list[torch.UntypedStorage] | None = pickled.storages
        self._rest = [("data.pkl", pickled.data), ("byteorder", sys.byteorder.encode()), ("version", b"3\n")]
        # Data first: the layout is then the same at every save. torch's '.format_version' and '.storage_alignment' are
        # left out: they invite readers to compute where torch's own writer would have put each storage.
        self._layout = Layout.of_data([storage.nbytes() for storage in pickled.storages])
        for name, value in self._rest:
            self._layout.add(name, len(value))
        self._memory: HostMemory | None = None
        self._start = 0
        self.stand_in: Callable[[torch.UntypedStorage], torch.UntypedStorage] | None = None
        self.size_bytes = self._layout.size_bytes

    def storages(self) -> list[StorageCopy]:
        """What is to be copied before training changes it, each storage once."""
        assert self._storages is not None, "the image was staged already"
        return [StorageCopy(s, r.data_offset) for s, r in zip(self._storages, self._layout.records, strict=False)]

    def numbers_of(self, tensors: Iterable[Any]) -> list[int]:
        """The numbers, in the list that :meth:`write` returns, of the storages of ``tensors``."""
        found = {self._index.get(storage_id(t.untyped_storage())) for t in tensors if type(t) is Tensor and is_dense(t)}
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


def file_bytes(contents: Any) -> bytes:
    """The ``.pt`` file of ``contents``; for what is small. Raises what :class:`TorchImage` does."""
    sink = _Bytes()
    TorchImage(contents).write(sink)
    return sink.file.getvalue()


@final
class _Bytes:
    """A file in memory."""

    def __init__(self) -> None:
        self.file = io.BytesIO()
        self.size_bytes = 0
        self.seconds: dict[str, float] = {}

    def write(self, data: bytes) -> None:
        self.size_bytes += self.file.write(data)

    def copy(self, address: int, size: int) -> int:
        data = ctypes.string_at(address, size)
        self.write(data)
        return zlib.crc32(data)

    def finish(self) -> FileDigest:
        raise NotImplementedError("it is never durable")

    def __enter__(self) -> _Bytes:
        return self

    def __exit__(self, *exception: object) -> None:
        pass
