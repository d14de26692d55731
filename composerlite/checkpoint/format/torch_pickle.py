"""Pickles contents as ``torch.save`` does, byte for byte, and quicker: training waits for it at each save."""

from __future__ import annotations

import collections
import functools
import io
import logging
import pickle
import types
from collections.abc import Collection
from typing import Any, final

import torch
from torch import Tensor

from composerlite._torch_compat import rebuild_tensor, storage_id, typed_storage_class, untyped_storage
from composerlite.checkpoint.format.tensor_kinds import check_savable, is_dense
from composerlite.checkpoint.trust.trusted import is_loadable
from composerlite.types import StateDict

__all__ = ["Pickled", "check_tensor"]

log = logging.getLogger(__name__)
_PROTOCOL = 2  # what torch.save writes, and what its restricted reader takes
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
_BARE = (torch.UntypedStorage, torch.storage.TypedStorage)
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)

# A reference to a storage is a tuple followed by an opcode that only Pickler.persistent_id writes, and a pickler that
# has one asks it of every object. So a number that is pickled to known bytes stands behind each tuple, and those bytes
# are replaced by the opcode afterwards. Only the first of them is a G: they cannot overlap.
_STAND_IN = 2.1906318370474834e145
_STAND_IN_BYTES = pickle.dumps(_STAND_IN, protocol=_PROTOCOL)[2:-1]

_Reference = tuple[str, Any, str, str, int]
"""What the reader is given to find a storage by."""


@final
class Pickled:
    """Some contents as a pickle that refers to the storages of tensors by their numbers.

    Args:
        contents: what is to be pickled.
        known: classes that the reader is told to take; of others that it will refuse the log says so.

    Attributes:
        data: the pickle.
        storages: what it refers to, in order, each once.
        index: of each storage in ``storages``, by :func:`storage_id`.

    Raises:
        Exception: whatever pickle raises for something that it cannot write.
    """

    def __init__(self, contents: StateDict, known: Collection[str] = ()) -> None:
        buffer = io.BytesIO()
        pickler: _Pickler = _QuickPickler(buffer, known)
        try:
            pickler.dump(contents)
            self.data = buffer.getvalue()
            quick = self.data.count(_STAND_IN_BYTES) == pickler.references
        except _BareStorageError:
            quick = False
        if quick:
            self.data = self.data.replace(_STAND_IN_BYTES, pickle.BINPERSID)
        else:  # there is a storage without a tensor, or the number itself among the contents
            buffer = io.BytesIO()
            pickler = _ThoroughPickler(buffer, known)
            pickler.dump(contents)
            self.data = buffer.getvalue()
        self.storages = pickler.storages
        self.index = pickler.index


class _Pickler(pickle.Pickler):
    """Notes each storage once instead of writing it.

    Deques and defaultdicts become constructor calls, the only form in which ``weights_only`` takes them back.
    """

    def __init__(self, file: io.BytesIO, known: Collection[str]) -> None:
        super().__init__(file, _PROTOCOL)
        self._known = known
        self.storages: list[torch.UntypedStorage] = []
        self.index: dict[int, int] = {}
        self.references = 0
        self._seen: dict[int, tuple[torch.dtype, str]] = {}

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is Tensor:
            return self._reduce_tensor(obj)
        if kind is collections.OrderedDict and not obj:
            return collections.OrderedDict, ()  # as it would be, sooner
        if kind is collections.deque:
            return collections.deque, (list(obj), obj.maxlen)
        if kind is collections.defaultdict:
            return collections.defaultdict, (obj.default_factory, dict(obj))
        if isinstance(obj, _NAMED) and f"{obj.__module__}.{obj.__qualname__}" not in self._known:
            _warn_if_not_loadable(obj)
        elif isinstance(obj, _BARE):
            raise _BareStorageError
        elif isinstance(obj, Tensor) and f"{kind.__module__}.{kind.__qualname__}" not in self._known:
            check_savable(obj)
        return NotImplemented

    def _referred(self, reference: _Reference) -> tuple[Any, ...]:
        """What stands for a storage among the arguments of a call."""
        raise NotImplementedError

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        """What torch's own reduction gives, in a tenth of the time; the rare kinds of tensors are left to that."""
        dtype = tensor.dtype
        storage_type = _STORAGE_TYPES.get(dtype)
        dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_neg() or tensor.is_meta)
        if storage_type is None or not dense or tensor.__dict__:
            made, arguments, *rest = _reduced(tensor)
            if arguments and isinstance(arguments[0], _BARE):
                arguments = (*self._referred(self._refer_to(arguments[0])), *arguments[1:])
            return made, arguments, *rest
        storage = tensor.untyped_storage()
        referred = self._referred(self._refer(storage, storage_type, dtype, storage.nbytes() // tensor.itemsize))
        hooks: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.requires_grad, hooks)
        return rebuild_tensor, (*referred, *place)

    def _refer_to(self, storage: torch.UntypedStorage | torch.storage.TypedStorage) -> _Reference:
        if isinstance(storage, torch.UntypedStorage):
            return self._refer(storage, torch.UntypedStorage, torch.uint8, storage.nbytes())
        bare = untyped_storage(storage)
        return self._refer(bare, typed_storage_class(storage), storage.dtype, bare.nbytes() // storage.dtype.itemsize)

    def _refer(self, storage: torch.UntypedStorage, storage_type: Any, dtype: torch.dtype, count: int) -> _Reference:
        identity = storage_id(storage)
        seen = self._seen.get(identity)
        if seen is None:
            number = self.index[identity] = len(self.storages)
            self.storages.append(storage)
            seen = self._seen[identity] = (dtype, str(number))
        elif seen[0] is not dtype:
            raise ValueError(f"two tensors share memory and have the types {seen[0]} and {dtype}")
        location = "cpu" if storage.device.type == "cpu" else str(storage.device)
        self.references += 1
        return "storage", storage_type, seen[1], location, count


class _BareStorageError(Exception):
    """There is a storage that no common tensor leads to."""


@final
class _QuickPickler(_Pickler):
    """Writes :data:`_STAND_IN` where the opcode of a reference belongs."""

    def _referred(self, reference: _Reference) -> tuple[Any, ...]:
        return reference, _STAND_IN


@final
class _Referred:
    """Stands for a storage among the arguments of a call."""

    __slots__ = ("reference",)

    def __init__(self, reference: _Reference) -> None:
        self.reference = reference


@final
class _ThoroughPickler(_Pickler):
    """Takes a storage wherever one is."""

    def persistent_id(self, obj: Any) -> Any:
        kind = type(obj)  # asked of every object: the common ones first
        if kind is _Referred:
            return obj.reference
        if kind in _COMMON:
            return None
        if isinstance(obj, _BARE):
            return self._refer_to(obj)
        return None

    def _referred(self, reference: _Reference) -> tuple[Any, ...]:
        return (_Referred(reference),)


def check_tensor(tensor: Tensor) -> None:
    """See that ``tensor`` can be saved where it is.

    Raises:
        SaveError: it cannot; names the kind and the way out.
    """
    if not is_dense(tensor):
        check_savable(tensor)


def _reduced(tensor: Tensor) -> Any:
    """What torch makes of a rare kind of tensor."""
    if not is_dense(tensor):
        check_savable(tensor)
    return tensor.__reduce_ex__(_PROTOCOL)


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
