"""The ``.pt`` file: plain ``torch.load(weights_only=True)`` opens the file, and ``unzip -t`` accepts the file.

The pickle is the pickle of ``torch.save``, byte for byte, with two exceptions: all storages are on the CPU, and deques
and defaultdicts become constructor calls. Training waits for the pickle at each save, so this module reduces tensors
(``__reduce_ex__``) faster than torch. The offsets of tensors in the file differ from torch's: see ``zip_file``.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import io
import logging
import pickle
import sys
import types
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from composerlite._torch_compat import (
    local_part,
    rebuild_tensor,
    savable_dtypes,
    storage_dtypes,
    storage_id,
    typed_storage_class,
    untyped_storage,
)
from composerlite.checkpoint.format.packing import Sink
from composerlite.checkpoint.format.zip_file import ZipRecord, layout, trailer
from composerlite.checkpoint.trust.unpickler import RefusedError, RestrictedUnpickler, check_shape, is_loadable, name_of
from composerlite.devices import shared_ring
from composerlite.dist import is_dense, is_distributed_tensor
from composerlite.errors import SaveError
from composerlite.storage import HostMemory
from composerlite.types import StateDict

log = logging.getLogger(__name__)


class StorageCopy(NamedTuple):
    """A storage, and the offset of its bytes in the file."""

    storage: torch.UntypedStorage
    offset: int


@final
class TorchImage:
    """The ``.pt`` file of some contents, laid out and not yet written.

    The constructor pickles everything but the bytes of tensors. Later training does not change the pickle.
    :meth:`write` reads the bytes of tensors, from the tensors themselves or from a copy.

    Args:
        contents: a dict of tensors and plain values.
        must_load: refuse contents that need ``trust_checkpoint`` to load.
        watched: named, strided tensors of the file. :meth:`write` looks for NaN and infinite values there.

    Attributes:
        size_bytes: size of the file, without the comment.
        storages: storages to copy before training changes their bytes, each once, with the offset in the file. Empty
            after the image is written from a copy.
        comment_bytes: size of the zip comment. The caller sets the size before :meth:`write`, and appends the comment.
        ring: buffers for reading from devices.
        not_finite: after :meth:`write`, name of the first watched tensor in the file with a NaN or infinite value.

    Raises:
        SaveError: ``must_load``, and the contents need ``trust_checkpoint``.
        Exception: errors of pickle.
    """

    def __init__(
        self, contents: StateDict, *, must_load: bool = False, watched: Iterable[tuple[str, Tensor]] = ()
    ) -> None:
        pickled = Pickled(contents, must_load=must_load)
        self._rest = [("data.pkl", pickled.data), ("byteorder", sys.byteorder.encode()), ("version", b"3\n")]
        # Bytes of tensors come first, so the layout is the same at every save. torch's records '.format_version' and
        # '.storage_alignment' are left out: with these records, readers compute the offsets of torch's own writer.
        sizes = tuple(storage.nbytes() for storage in pickled.storages)
        self._records, self.size_bytes = layout(sizes, [(name, len(value)) for name, value in self._rest])
        self.storages = [StorageCopy(s, r.offset) for s, r in zip(pickled.storages, self._records, strict=False)]
        # By position of the storage: name, dtype, and (offset, size, stride) of each watched tensor in the storage.
        self._watched: dict[int, list[tuple[str, torch.dtype, tuple[Any, ...]]]] = {}
        for name, tensor in watched:
            found = pickled.index.get(storage_id(tensor.untyped_storage()))
            if found is not None and tensor.dtype in _EXPONENTS:
                place = int(tensor.storage_offset()), tensor.size(), tensor.stride()
                self._watched.setdefault(int(found[1]), []).append((name, tensor.dtype, place))
        self.not_finite: str | None = None
        self.ring = shared_ring
        self.comment_bytes = 0

    def write(self, sink: Sink | FileInMemory, memory: HostMemory | None = None, start: int = 0) -> None:
        """Write the file to ``sink``. The bytes of tensors come from the tensors, or from a copy in ``memory``.

        Args:
            sink: takes the bytes.
            memory: has each storage of :attr:`storages` at its offset in the file, plus ``start``.
            start: offset of the copy in ``memory``.
        """
        if memory is not None:
            self.storages = []  # frees tensors that training has replaced
        written: list[ZipRecord] = []
        count = len(self._records) - len(self._rest)
        for number, record in enumerate(self._records):
            sink.write(record.header)
            if number < count:
                crc = self._copy(number, record, sink, memory, start)
            else:
                data = self._rest[number - count][1]
                sink.write(data)
                crc = zlib.crc32(data)
            written.append(record._replace(crc=crc))
            sink.write(written[-1].descriptor)
        sink.write(trailer(written, self.comment_bytes))

    def _copy(
        self, number: int, record: ZipRecord, sink: Sink | FileInMemory, memory: HostMemory | None, first: int
    ) -> int:
        """Copy the storage ``number`` to ``sink``, and return the CRC-32.

        Looks for NaN and infinite values in each piece. After a suspicious piece, each watched tensor of the storage is
        checked once, and later pieces of the storage are not. The first tensor with such a value ends the search.
        """
        if not record.size:
            return 0
        if memory is None:
            storage = self.storages[number].storage
        else:
            copy = memory.view(first + record.offset, record.size)
            storage = torch.frombuffer(copy, dtype=torch.uint8).untyped_storage()
        if (copier := self.ring.copier_of(storage)) is not None:
            pieces = self.ring.read(copier, storage)
        else:
            address, starts = storage.data_ptr(), range(0, record.size, sink.piece_bytes)
            pieces = ((address + start, min(sink.piece_bytes, record.size - start)) for start in starts)
        watched, crc = self._watched.get(number), 0
        for start, size in pieces:
            if watched and self.not_finite is None and not _are_finite(start, size, watched[0][1]):
                found = (name for name, dtype, place in watched if not _is_finite(storage, dtype, place))
                self.not_finite = next(found, None)
                watched = None  # the value may be outside the watched tensors, or a sum of large numbers overflowed
            crc = sink.copy(start, size, crc)
        return crc


@final
class FileInMemory(io.BytesIO):
    """A file in memory, for :meth:`TorchImage.write`."""

    piece_bytes = 1 << 20

    def copy(self, address: int, size: int, crc: int = 0) -> int:
        """Append ``size`` bytes of memory at ``address``, and return the CRC-32, continued from ``crc``."""
        data = ctypes.string_at(address, size)
        self.write(data)
        return zlib.crc32(data, crc)


# ── NaN and infinite values ─────────────────────────────────────────────────────────────────────────────────────
_EXPONENTS = {
    torch.float64: ("f8", 0),
    torch.float32: ("f4", 0),
    torch.complex128: ("f8", 0),
    torch.complex64: ("f4", 0),
    torch.float16: ("i2", 0x7C00),
    torch.bfloat16: ("i2", 0x7F80),
}
"""By dtype: the numpy type to read, and the bits of infinity; 0 for types that numpy can add. A complex number is read
as two numbers.
"""


def _are_finite(address: int, size_bytes: int, dtype: torch.dtype) -> bool:
    """Return true if ``size_bytes`` of memory contain only finite numbers of ``dtype``.

    False may be wrong for numbers of 4 or 8 bytes. A sum with NaN or infinity is never finite. A sum of large finite
    numbers may overflow.
    """
    kind, exponent = _EXPONENTS[dtype]
    memory = memoryview((ctypes.c_char * size_bytes).from_address(address))
    numbers = np.frombuffer(memory, kind, size_bytes // int(kind[1]))
    if not exponent:
        with np.errstate(all="ignore"):
            return bool(np.isfinite(np.add.reduce(numbers)))
    # As signed integers, positive numbers are the largest. As unsigned integers, negative numbers are the largest.
    # NaN has larger bits than infinity of the same sign.
    positive, negative = numbers.max(initial=0), numbers.view("u2").max(initial=0)
    return bool(positive < exponent and negative < exponent | 0x8000)


def _is_finite(storage: torch.UntypedStorage, dtype: torch.dtype, place: tuple[Any, ...]) -> bool:
    empty: Any = torch.empty(0, dtype=dtype, device=storage.device)
    return bool(empty.set_(storage, *place).isfinite().all())


# ── the pickle ───────────────────────────────────────────────────────────────────────────────────────────────────────
_PROTOCOL = 2  # the protocol of torch.save and of the weights_only reader
_STORAGE_TYPES = {
    dtype: getattr(torch, name) for name, dtype in storage_dtypes().items() if not name.startswith(("Q", "Complex"))
}
"""Storage classes of common tensors, by the type of the numbers. Other tensors are reduced by torch itself."""
_COMMON = frozenset(
    {str, int, float, bool, type(None), tuple, dict, list, collections.OrderedDict, Tensor, type}
    | {types.FunctionType, type(torch.FloatStorage)}
)
"""Types of most objects of a checkpoint. None of the objects is a storage."""
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
"""Types of classes and functions: pickled by name."""


@final
class _Reference(tuple[Any, ...]):
    """The persistent id of a storage: ``"storage"``, class, position, device and count of numbers.

    The device is always the CPU, so a machine without the device of the tensor loads the file.
    """

    __slots__ = ()


@final
class Pickled(pickle.Pickler):
    """Pickle of ``contents``, byte for byte as by ``torch.save`` on the CPU. Tensors refer to storages by position.

    Only deques and defaultdicts differ: both become constructor calls, because ``weights_only`` refuses torch's form.

    Args:
        contents: a dict of tensors and plain values.
        must_load: refuse contents that need ``trust_checkpoint`` to load.

    Attributes:
        data: the pickle.
        storages: the storages in the contents, in order, each once.
        index: by :func:`storage_id`, the type of the numbers in each storage, and the position in ``storages`` as text.

    Raises:
        SaveError: ``must_load``, and the contents need ``trust_checkpoint``.
        Exception: errors of pickle.
    """

    def __init__(self, contents: StateDict, *, must_load: bool = False) -> None:
        buffer = io.BytesIO()
        super().__init__(buffer, _PROTOCOL)
        self._must_load = must_load
        self._has_objects = False  # not tensors, plain values or containers; set only if ``must_load``
        self.storages: list[torch.UntypedStorage] = []
        self.index: dict[int, tuple[torch.dtype, str]] = {}
        self.dump(contents)
        self.data = buffer.getvalue()
        if not must_load:
            return
        try:
            if self._has_objects:
                RestrictedUnpickler(self.data, self.storage).load()
            else:
                check_shape(contents, len(self.data))
        except RefusedError as e:
            kind = e.name.rpartition(".")[2]
            allow = f", or allow it where the script begins: torch.serialization.add_safe_globals([{kind}])"
            way_out = f"Keep plain values{allow if e.allowable else ''}."
            raise SaveError(f"{e.name} can be saved but not loaded. {way_out}") from e
        except (ValueError, RecursionError) as e:
            raise SaveError(f"it could be saved but not loaded: {e}. Keep plain values.") from e

    def storage(self, identity: Any) -> torch.storage.TypedStorage:
        """Return the live storage with the persistent id ``identity``."""
        _, dtype, key, _, _ = identity
        return torch.storage.TypedStorage(wrap_storage=self.storages[int(key)], dtype=dtype, _internal=True)

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)  # called for every object, so common types return first
        if kind in _COMMON:
            return None
        if kind is _Reference:
            return tuple(obj)
        if isinstance(obj, torch.UntypedStorage):
            return tuple(self._refer(obj, torch.UntypedStorage, torch.uint8))
        if isinstance(obj, torch.storage.TypedStorage):
            return tuple(self._refer(untyped_storage(obj), typed_storage_class(obj), obj.dtype))
        return None

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is Tensor:
            return self._reduce_tensor(obj)
        if kind is collections.OrderedDict and not obj:
            return collections.OrderedDict, ()  # the same pickle, in less time
        if kind is collections.deque:
            return collections.deque, (list(obj), obj.maxlen)
        if kind is collections.defaultdict:
            return collections.defaultdict, (obj.default_factory, dict(obj))
        if isinstance(obj, np.dtype) and obj.kind in "mMV":
            raise SaveError(f"numbers of the numpy type {obj} cannot be saved. Keep the fields, or integers or text.")
        if isinstance(obj, Tensor):
            check_savable(obj)
        if self._must_load:
            self._has_objects |= not (isinstance(obj, _NAMED) and is_loadable(obj))
        elif isinstance(obj, _NAMED):
            _warn_if_not_loadable(obj)
        return NotImplemented

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        """Reduce ``tensor`` to the same pickle as torch, in a tenth of the time. torch itself reduces rare kinds."""
        dtype = tensor.dtype
        storage_type = _STORAGE_TYPES.get(dtype)
        dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_neg() or tensor.is_meta)
        if storage_type is None or not dense or tensor.__dict__:
            if not is_dense(tensor):
                check_savable(tensor)
            return tensor.__reduce_ex__(_PROTOCOL)
        referred = self._refer(tensor.untyped_storage(), storage_type, dtype)
        hooks: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.requires_grad, hooks)
        return rebuild_tensor, (referred, *place)

    def _refer(self, storage: torch.UntypedStorage, storage_type: Any, dtype: torch.dtype) -> _Reference:
        identity = storage_id(storage)
        seen = self.index.get(identity)
        if seen is None:
            seen = self.index[identity] = (dtype, str(len(self.storages)))
            self.storages.append(storage)
        elif seen[0] is not dtype:
            raise ValueError(f"two tensors share memory with the dtypes {seen[0]} and {dtype}")
        return _Reference(("storage", storage_type, seen[1], "cpu", storage.nbytes() // dtype.itemsize))


@functools.cache
def _warn_if_not_loadable(thing: Any) -> None:
    """Warn at the save, once per class, that a load will refuse the class."""
    if not is_loadable(thing) and not str(thing.__module__).startswith("deepspeed."):  # the reader has placeholders
        log.warning(
            "the checkpoint holds %s: it loads only after torch.serialization.add_safe_globals([%s]), or with "
            "trust_checkpoint=True",
            name_of(thing),
            thing.__qualname__,
        )


# ── kinds of tensors ─────────────────────────────────────────────────────────────────────────────────────────────────
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def check_savable(tensor: Tensor) -> None:
    """Check that a rank can pickle ``tensor``, and that a script can load the pickle without ``trust_checkpoint``.

    Raises:
        SaveError: the tensor cannot be saved. The message names the kind and the fix.
    """
    kind = type(tensor)
    if is_distributed_tensor(tensor):
        raise SaveError(
            f"a distributed tensor of the shape {tuple(tensor.shape)} with parts of "
            f"{name_of(type(local_part(tensor)))} cannot be saved here. Keep a tensor that is distributed over ranks "
            "in a dict with text as keys, or in a list, of the state, where each rank writes its own part, and parts "
            "of another class as plain tensors."
        )
    if is_lazy(tensor):
        return
    if tensor.is_nested:
        raise SaveError("a nested tensor cannot be saved. Keep its values and offsets, which are plain tensors.")
    if kind not in (Tensor, nn.Parameter):
        if not is_loadable(kind):
            raise SaveError(
                f"a tensor of the class {name_of(kind)} can be saved but not loaded. If it can be pickled, allow "
                f"it where the script begins: torch.serialization.add_safe_globals([{kind.__name__}])."
            )
    elif tensor.is_quantized or tensor.dtype not in savable_dtypes():
        raise SaveError(
            f"a tensor of {tensor.dtype} cannot be saved. Keep tensor.view(torch.uint8), or of a quantized tensor "
            "int_repr() and the scales."
        )
    elif tensor.layout is not torch.strided and tensor.layout not in _SPARSE:
        raise SaveError(f"a tensor of the layout {tensor.layout} cannot be saved. Keep tensor.to_dense().")
