"""An unpickler with a list of allowed classes and functions, for checkpoints without ``trust_checkpoint=True``.

The tables of the allowed classes and functions are above the unpickler. The functions above the tables check the
arguments and create the values. Classes allowed by users with ``torch.serialization.add_safe_globals`` are called as
the pickle asks. Nothing else is called, imported or given attributes: reading a pickle imports no module. The size of
the pickle bounds time and memory, except in classes of users.
"""

from __future__ import annotations

import collections
import datetime
import enum
import io
import math
import pathlib
import pickle
import re
import struct
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from composerlite._torch_compat import negative_view, storage_dtypes, untyped_storage, wrapper_tensor

_MOST_DEPTH = 200
_MOST_KEY_PARTS, _MOST_KEY_DEPTH = 1000, 20
"""Limits of tuples and frozensets that are keys of dicts or items of sets: the time to hash a key is bounded."""
_MOST_NAME_CHARACTERS = 1000
_MOST_DIMENSIONS = 64
_SPARE_ITEMS = 1_000_000
"""Number of objects that a pickle of any size may create."""
_BLOCKED = ("sys", "os", "posix", "nt", "subprocess", "builtins.eval", "builtins.exec")
"""Modules and functions that are refused even if a user allows the names."""
_DTYPE = re.compile(r"[<>|=]?([?bBhHiIlLqQpPefdgFDG]|[iufcb]\d{1,2}|[SU]\d{0,9})")


class RefusedError(Exception):
    """The pickle names a class or function outside of the allowed list.

    Attributes:
        name: the class or function, as ``module.name``.
        allowable: true if ``torch.serialization.add_safe_globals`` can allow the class or function.
    """

    def __init__(self, name: str, *, allowable: bool) -> None:
        super().__init__(name)
        self.name = name
        self.allowable = allowable


def _user_types() -> dict[str, Any]:
    """Return the classes and functions allowed by the user, by full name."""
    allowed: dict[str, Any] = {}
    for item in cast("list[Any]", torch.serialization.get_safe_globals()):
        thing, name = item if isinstance(item, tuple) else (item, name_of(item))
        allowed[name] = thing
    return allowed


def name_of(thing: Any) -> str:
    """Return the name of a class or function, as ``module.name``."""
    return f"{thing.__module__}.{thing.__qualname__}"


def _own_enum(name: str) -> type[enum.Enum] | None:
    """Return the enumeration of composerlite with the full name ``name``, or with this full name in Composer.

    ``None``: there is no such enumeration, or its module is not imported.
    """
    module, _, kind = name.rpartition(".")
    module = f"composerlite.{rest}" if (rest := module.removeprefix("composer.")) != module else module
    is_ours = module.startswith("composerlite.") and module in sys.modules
    found = vars(sys.modules[module]).get(kind) if is_ours else None
    return found if isinstance(found, type) and issubclass(found, enum.Enum) else None


def is_loadable(thing: Any) -> bool:
    """Return true if checkpoints with the class or function ``thing`` load without ``trust_checkpoint=True``."""
    full = name_of(thing)
    return full in _KNOWN or full in _user_types() or _own_enum(full) is not None


@final
@dataclass(frozen=True, slots=True)
class _Maker:
    """Stands for an allowed function on the stack of the unpickler.

    ``call`` gets the unpickler and the arguments, checks the arguments, and returns the result of the function.
    """

    call: Callable[..., Any]


# ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _check_key(key: Any, budget: list[int], depth: int) -> None:
    """Refuse a key of a dict, or an item of a set, that takes long to hash.

    Args:
        key: the key.
        budget: a list with the number of parts that may follow; counted down in place.
        depth: number of tuples and frozensets around the key.

    Raises:
        ValueError: the key has too many parts, or is nested too deeply.
    """
    budget[0] -= 1
    if budget[0] < 0 or depth > _MOST_KEY_DEPTH:
        raise ValueError("a key of many parts")
    if isinstance(key, tuple | frozenset):
        for part in cast("Iterable[Any]", key):
            _check_key(part, budget, depth + 1)


def _check_counts(*shapes: Any) -> None:
    """Refuse a shape or strides that are no tuple of whole numbers from 0 to 2**62 - 1. Raises ValueError."""
    for shape in shapes:
        if type(shape) not in (tuple, torch.Size) or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
            raise ValueError(f"{_short(shape)} is not a shape")


def _check_numbers(dtype: Any, raw: Any, count: int) -> None:
    """Check that ``raw`` is ``count`` numbers or texts of ``dtype``, and that ``dtype`` has no object references."""
    if not isinstance(dtype, np.dtype) or dtype.hasobject or type(raw) not in (bytes, bytearray):
        raise ValueError(f"{_short(raw)} as numbers of {_short(dtype)}")
    if count * dtype.itemsize != len(raw):
        raise ValueError(f"{count} numbers of {dtype} in {len(raw)} bytes")


def check_shape(contents: Any, size_bytes: int) -> None:
    """Refuse contents with cycles, great depth, or exponentially repeated references.

    Args:
        contents: the loaded contents of a pickle.
        size_bytes: size of the pickle.

    Raises:
        ValueError: a walk over the contents would take too long.
    """
    most = 4 * size_bytes + _SPARE_ITEMS
    sizes: dict[int, tuple[int, int]] = {}  # items and depth of each container

    def visit(node: Any, depth: int) -> tuple[int, int]:
        known = sizes.get(id(node))
        if known is not None:
            return known
        if depth > _MOST_DEPTH:
            raise ValueError(f"its contents are nested deeper than {_MOST_DEPTH}, or contain themselves")
        size, below = 1, 0
        for child in cast("Iterable[Any]", node.values() if isinstance(node, dict) else node):
            size += 1
            if isinstance(child, _CONTAINERS):
                inner_size, inner_below = visit(child, depth + 1)
                size, below = size + inner_size, max(below, inner_below + 1)
        if size > most or depth + below > _MOST_DEPTH:
            raise ValueError("its contents expand to many times their size")
        sizes[id(node)] = size, below
        return size, below

    visit((contents,), -1)


def _short(value: object) -> str:
    """Return a text of bounded length for a value of a pickle."""
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {str(value)[:200]}"
    if isinstance(value, int):
        return hex(value)[:40]
    return repr(value)[:80] if isinstance(value, str | bytes | float | None) else f"a {type(value).__name__}"


# ── how objects get their state ──────────────────────────────────────────────────────────────────────────────────────
def _set_attributes(target: Any, state: Any) -> None:
    """Set the attributes in ``state``: ``None``, a dict, or a tuple of two dicts.

    Names of attributes of the class are refused, so no method of the class can be replaced. Names that begin with two
    underscores are refused: numpy would read any memory named by ``__array_interface__``.

    Raises:
        ValueError: a name is refused.
    """
    parts = state if isinstance(state, tuple) and len(cast("tuple[Any, ...]", state)) == 2 else (state,)
    for part in cast("tuple[Any, ...]", parts):
        for name, value in (part or {}).items():
            is_free = type(name) is str and name.isidentifier() and not hasattr(type(target), name)
            if not is_free or name.startswith("__"):
                raise ValueError(f"an attribute {_short(name)} of {type(target).__name__}")
            setattr(target, name, value)


def _restore(target: Any, state: Any) -> None:
    """Restore an object of a class allowed by the user, as pickle does."""
    own = getattr(type(target), "__setstate__", None)
    if own is not None and own is not Tensor.__setstate__:  # the method of tensors is for files of older torch
        target.__setstate__(state)
        return
    parts = state if isinstance(state, tuple) and len(cast("tuple[Any, ...]", state)) == 2 else (state, None)
    attributes, slots = cast("tuple[Any, Any]", parts)
    if attributes:
        target.__dict__.update(attributes)
    for name, value in (slots or {}).items():
        setattr(target, name, value)


def _set_byte_order(dtype: np.dtype[Any], state: Any) -> None:
    """Give ``dtype``, a new object, the byte order in ``state``, a tuple as numpy pickles it. Other state is refused.

    numpy's ``__setstate__`` checks nothing: with another size, arrays of this dtype would reach beyond their memory.

    Raises:
        RefusedError: the dtype has fields, a shape or another property that is not allowed.
    """
    order, *rest, size, alignment, _ = state[1:]
    is_same = rest == [None, None, None] and (size, alignment) in ((-1, -1), (dtype.itemsize, dtype.alignment))
    if dtype.kind in "mMV" or not is_same or order not in ("<", ">", "|", "="):
        raise RefusedError(f"numpy.dtype({dtype})", allowable=False)
    if order in "<>" and dtype.byteorder != "|":
        cast("Any", dtype).__setstate__((3, order, None, None, None, dtype.itemsize, dtype.alignment, dtype.flags))


# ── how objects are created. ``own`` is the RestrictedUnpickler ────────────────────────────────────────────────
def _bytes(own: Any, data: Any = b"", encoding: Any = "latin1") -> bytes:
    """Return bytes. Protocol 2 writes bytes as text. A number is refused: ``bytes(n)`` allocates n bytes."""
    if type(data) not in (str, bytes) or encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes from {type(data).__name__} with {_short(encoding)}")
    return data.encode("latin-1") if type(data) is str else data


def _defaultdict(own: Any, factory: Any = None, items: Any = None) -> collections.defaultdict[Any, Any]:
    is_class = isinstance(factory, type) and (factory in _NAMED.values() or own.is_users(factory))
    if not (factory is None or is_class) or not (items is None or own.is_dict(items)):
        raise ValueError("a defaultdict with a factory that is not a class, or with items that are not a dict")
    return collections.defaultdict(cast("Any", factory), items or {})


def _ordered_dict(own: Any, items: Any = ()) -> collections.OrderedDict[Any, Any]:
    pairs = list(items.items()) if own.is_dict(items) else [(key, value) for key, value in items]
    own.keys([key for key, _ in pairs])
    return collections.OrderedDict(pairs)


def _enum_member(own: Any, kind: Any, name: Any) -> Any:
    """Return a member of an enumeration. Python 3.11 pickles a member as a call such as ``getattr(Color, 'RED')``."""
    allowed = isinstance(kind, type) and issubclass(kind, enum.Enum)
    if not allowed or type(name) is not str or name not in kind.__members__:
        raise RefusedError("builtins.getattr", allowable=False)
    return kind.__members__[name]


def _dtype(own: Any, text: Any, *_: Any) -> np.dtype[Any]:
    if type(text) is not str or _DTYPE.fullmatch(text) is None:
        raise RefusedError(f"numpy.dtype({str(text)[:40]!r})", allowable=False)
    return np.dtype(text, copy=True)  # without a copy, the byte order would be set in an object shared with other code


def _array(own: Any, data: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> np.ndarray[Any, Any]:
    _check_counts(shape)
    _check_numbers(dtype, data, math.prod(shape))
    own.charge(math.prod(shape))
    return np.frombuffer(data, dtype, math.prod(shape)).reshape(shape, order=order).copy(order)


def _empty_array(own: Any, kind: Any, shape: Any, _: Any) -> np.ndarray[Any, Any]:
    """Return an empty array, to be filled by :meth:`RestrictedUnpickler._build`."""
    if kind is not np.ndarray or shape != (0,):
        raise ValueError("an unknown form of a numpy array")
    return np.empty(0, np.int8)


def _scalar(own: Any, dtype: Any, data: Any) -> Any:
    _check_numbers(dtype, data, 1)
    return np.frombuffer(data, dtype)[0]


def _tensor(own: Any, storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Tensor:
    """Return a dense tensor with the type of the storage. ``rest``: nothing, or requires_grad, hooks, metadata."""
    requires_grad, _, *metadata = rest or (False, None)
    return _tensor_v3(own, storage, offset, shape, stride, requires_grad, None, storage.dtype, *metadata)


def _tensor_v3(own: Any, storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Tensor:
    """Return a dense tensor of any type, within its storage. ``rest``: requires_grad, hooks, type, metadata."""
    requires_grad, _, dtype, *metadata = rest
    if type(storage) is not torch.storage.TypedStorage or type(offset) is not int or offset < 0:
        raise ValueError(f"a tensor in {type(storage).__name__} at {_short(offset)}")
    _check_counts(shape, stride)
    if len(shape) != len(stride) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {len(shape)} dimensions with {len(stride)} strides")
    items = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    untyped = untyped_storage(storage)
    have = untyped.nbytes()
    if (offset + items) * dtype.itemsize > have or math.prod(shape) >= 1 << 62:
        raise ValueError(f"a tensor of the shape {shape} at {offset} in a storage of {have} bytes")
    made = torch.empty(0, dtype=dtype, device=untyped.device).set_(untyped, offset, shape, stride)
    made.requires_grad_(bool(requires_grad))
    for name, value in (metadata[0] if metadata and metadata[0] else {}).items():
        if name == "conj" and value is True:
            made = made.conj()
        elif name == "neg" and value is True:
            made = negative_view(made)
    return made


def _sparse(own: Any, layout: Any, data: Any) -> Tensor:
    """Return a sparse tensor. Indices outside of the shape are refused, and indices or values that are no tensors."""
    own.read_now()
    if not all(isinstance(part, Tensor) for part in data[: 2 if layout is torch.sparse_coo else 3]):
        raise ValueError("a sparse tensor of other parts than tensors")
    if layout is not torch.sparse_coo:
        return torch.sparse_compressed_tensor(*data, layout=layout, check_invariants=True)
    coalesced = data[3] if len(data) > 3 else None
    return torch.sparse_coo_tensor(*data[:3], is_coalesced=coalesced, check_invariants=True)


def _parameter(own: Any, data: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None) -> nn.Parameter:
    made = nn.Parameter(data, bool(requires_grad))
    _set_attributes(made, state)
    return made


def _with_type(own: Any, make: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Return the tensor made by ``make``, as a ``kind``, perhaps a class of the user, with the attributes ``state``."""
    made = own.make(arguments, make)
    if not isinstance(made, Tensor):
        raise ValueError("attributes of an object that is not a tensor")
    if type(made) is not kind:
        if not own.is_users(kind):
            raise RefusedError(getattr(kind, "__qualname__", "?"), allowable=True)
        made = made.as_subclass(kind)
    (_restore if own.is_users(kind) else _set_attributes)(made, state)
    return made


def _wrapper(own: Any, kind: Any, dtype: Any, shape: Any, stride: Any, *rest: Any) -> Any:
    """Return a tensor of a class allowed by the user. The numbers are in attributes of the tensor.

    ``rest``: offset, layout, device, requires_grad.
    """
    if not own.is_users(kind):
        raise ValueError(f"{_short(kind)} as a class of tensors, which no user has allowed")
    offset, layout, _, requires_grad = rest
    _check_counts(shape, stride)
    how: dict[str, Any] = {"strides": stride, "dtype": dtype, "storage_offset": offset, "layout": layout}
    return wrapper_tensor(kind, shape, **how, device="cpu", requires_grad=bool(requires_grad))


# ── allowed values ──────────────────────────────────────────────────────────────────────────────────────────────────
_OF_COMPOSER = ("composer.", "torchmetrics.")
"""Prefixes of the names of classes of Composer and torchmetrics. The unpickler creates a dict in place of an instance,
with the class name, the arguments and the state.
"""
_CONTAINERS = (dict, list, tuple, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_SIZED = {str, bytes, bytearray, set, frozenset, *_CONTAINERS, *_DICTS}
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath)

_SCALARS = {int, float, bool, str, bytes, type(None), datetime.timedelta, datetime.timezone}
_CLASSES: dict[type, set[type]] = {
    **dict.fromkeys((datetime.timedelta, datetime.datetime, datetime.date, datetime.time), _SCALARS),
    **{kind: {str} for kind in (*_PATHS, TorchVersion)},
    collections.Counter: {dict, type(None)},
    collections.deque: {list, tuple, int, type(None)},
    complex: {int, float},
    datetime.timezone: {datetime.timedelta, str},
    slice: _SCALARS,
    torch.Size: {tuple, list},
    torch.device: {str, int},
}
"""Allowed types of arguments, by class. The class itself is called."""
_MAKERS: dict[type, Callable[..., Any]] = {
    set: lambda own, *items: set(own.keys(*items)),
    frozenset: lambda own, *items: frozenset(own.keys(*items)),
    bytes: _bytes,
    bytearray: lambda own, *arguments: bytearray(_bytes(own, *arguments)),
    collections.defaultdict: _defaultdict,
    collections.OrderedDict: _ordered_dict,
    np.dtype: _dtype,
}
"""Functions that create an instance, by class."""
_NOT_CALLED = (list, dict, int, float, str, bool, tuple, nn.Parameter, Tensor, np.ndarray)
"""Classes that are only arguments, such as the factory of a defaultdict."""
_NAMED: dict[str, Any] = {
    **{name_of(kind): kind for kind in (*_CLASSES, *_MAKERS, *_NOT_CALLED)},
    "torch._tensor.Tensor": Tensor,
    # Python 3.13 calls the module pathlib._local. Every version of Python reads the files of all versions.
    **{f"{module}.{kind.__name__}": kind for module in ("pathlib", "pathlib._local") for kind in _PATHS},
}
"""Allowed classes, by full name."""
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _bytes,
    "builtins.getattr": _enum_member,
    **{f"numpy.{core}.multiarray._reconstruct": _empty_array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _array for core in ("core", "_core")},
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _with_type,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch.serialization._get_layout": lambda own, name: _CONSTANTS[name],
}
"""Allowed functions, by full name."""
_CONSTANTS = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype | torch.qscheme | torch.layout | torch.memory_format)
}
STORAGE_DTYPES = {
    f"{module}.{name}": dtype
    for module in ("torch", "torch.storage", "torch.cuda")
    for name, dtype in {"UntypedStorage": torch.uint8, **storage_dtypes()}.items()
    if dtype not in (torch.quint4x2, torch.quint2x4)  # several numbers in a byte: no size can be checked
}
"""Types of the numbers in storages, by the full name of the class of the storage."""
_MADE = {name: _Maker(call) for name, call in _FUNCTIONS.items()}
_KNOWN: dict[str, Any] = {**_CONSTANTS, **_NAMED, **_MADE, **STORAGE_DTYPES}


# ── the unpickler ────────────────────────────────────────────────────────────────────────────────────────────────────
_MALFORMED = (
    *(struct.error, pickle.UnpicklingError, IndexError, KeyError, TypeError, ValueError, AttributeError),
    *(EOFError, OverflowError, RuntimeError),
)
_PYTHONS: Any = pickle._Unpickler  # pyright: ignore - the unpickler in Python, with replaceable operations
# Python's own code for these operations only moves values between the data, the stack and the memo.
_MOVES = (
    *(pickle.PROTO, pickle.FRAME, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.STOP, pickle.NONE),
    *(pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4),
    *(pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8),
    *(pickle.EMPTY_TUPLE, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID),  # call find_class and persistent_load below
)


@final
class RestrictedUnpickler(_PYTHONS):
    """Reads one pickle of protocol 2 to 5, without out-of-band buffers. Creates only allowed objects.

    Args:
        data: the pickle. The size bounds the number of objects.
        persistent_load: returns the storage with a persistent id of the pickle. The bytes may be read later.
        types: further allowed classes, by full name. Pickle's own rules create and fill the instances, so methods of
            these classes run.
        read_now: reads the bytes of all storages so far; bytes of later storages are read at once.
    """

    def __init__(
        self,
        data: bytes,
        persistent_load: Callable[[Any], Any] | None,
        types: Mapping[str, type] | None = None,
        *,
        read_now: Callable[[], object] = int,
    ) -> None:
        self._file = io.BytesIO(data)
        self._size_bytes = len(data)
        super().__init__(self._file)
        self.persistent_load, self.read_now = persistent_load, read_now
        self._budget = 8 * len(data) + _SPARE_ITEMS
        self._user = {**_user_types(), **(types or {})}
        self._user_ids = {id(thing) for thing in self._user.values()}

    def load(self) -> Any:
        """Return the contents of the pickle.

        Raises:
            RefusedError: the pickle names a class or function outside of the allowed list.
            ValueError: the pickle is malformed, or unfolds to many times its size.
        """
        try:
            contents = super().load()
        except _MALFORMED as e:
            at = f"byte {self._file.tell()} of {self._size_bytes}"
            raise ValueError(f"its pickle is malformed at {at}: {_short(e)}") from e
        check_shape(contents, self._size_bytes)
        return contents

    # ── what the functions above need ───────────────────────────────────────────────────────────────────────
    def is_users(self, kind: Any) -> bool:
        """Return true if the class ``kind`` is allowed by the user, or is in ``types``."""
        return id(kind) in self._user_ids

    def is_dict(self, target: Any) -> bool:
        """Return true if ``target`` is a dict in which the pickle may set keys."""
        return type(target) in _DICTS or (isinstance(target, dict) and self.is_users(type(target)))  # pyright: ignore[reportUnknownArgumentType]

    def keys(self, items: Any = ()) -> list[Any]:
        """Return ``items`` as a list, after a check that the time to hash each item is bounded. Raises ValueError."""
        if type(items) not in _SIZED:
            raise ValueError(f"items that are {type(items).__name__}")
        for item in (keys := list(items)):
            if type(item) is not str:
                _check_key(item, [_MOST_KEY_PARTS], 0)
        return keys

    def charge(self, items: int) -> None:
        """Count ``items`` created objects or bytes.

        Raises:
            ValueError: there are too many for the size of the pickle.
        """
        self._budget -= items
        if self._budget < 0:
            raise ValueError("it expands to many times its size")

    def make(self, arguments: Any, kind: Any) -> Any:
        """Return the result of a call of the class or function ``kind``, if allowed.

        Raises:
            RefusedError: the class is not allowed to be called.
            ValueError: the arguments have the wrong types, or ``kind`` is no class or function.
        """
        if type(arguments) is not tuple:
            raise ValueError(f"arguments that are {type(arguments).__name__}")
        self.charge(sum(len(value) for value in arguments if type(value) in _SIZED))
        if type(kind) is _Maker:
            return kind.call(self, *arguments)
        if isinstance(kind, type):
            if (takes := _CLASSES.get(kind)) is not None:
                if not all(type(value) in takes for value in arguments):
                    raise ValueError(f"{kind.__name__} of {', '.join(map(_short, arguments))}")
                return kind(*arguments)
            if (maker := _MAKERS.get(kind)) is not None:
                return maker(self, *arguments)
            if issubclass(kind, enum.Enum):
                (value,) = arguments
                return kind(*self.keys([value]))
        if id(kind) in self._user_ids:
            return kind(*arguments)
        if isinstance(kind, type):
            raise RefusedError(name_of(kind), allowable=kind not in _NAMED.values())
        raise ValueError(f"a call of {type(kind).__name__}")

    # ── operations of pickles ────────────────────────────────────────────────────────────────────────────────────────
    def find_class(self, module: str, name: str) -> Any:
        """Return the object that represents ``module.name`` on the stack.

        The result is the class or constant of the name; a ``_Maker`` for a function, or for any class of Composer; the
        dtype for a class of storages.

        Raises:
            RefusedError: the class or function is not allowed.
            ValueError: the name is too long.
        """
        if len(module) + len(name) > _MOST_NAME_CHARACTERS:
            raise ValueError(f"a name of {len(module) + len(name)} characters")
        if f"{module}.{name}" not in self._user:  # protocol 2 has the names of Python 2, such as xrange
            module, name = NAME_MAPPING.get((module, name)) or (IMPORT_MAPPING.get(module, module), name)
        full = f"{module}.{name}"
        if module in _BLOCKED or full in _BLOCKED:
            raise RefusedError(full, allowable=False)
        if full in _KNOWN:
            return _KNOWN[full]
        if full in self._user:
            self.read_now()  # the user's code may read the numbers of tensors
            return self._user[full]
        if (own := _own_enum(full)) is not None:
            return own
        if full.startswith(_OF_COMPOSER):
            return _Maker(lambda _, *arguments: {"class": full, "arguments": arguments})
        raise RefusedError(full, allowable=True)

    def _extend(self, items: list[Any]) -> None:
        """Add ``items`` to a list, a deque or a set."""
        target = self.stack[-1]
        if type(target) is set:
            target.update(self.keys(items))
        elif type(target) in (list, collections.deque):
            target.extend(items)
        else:
            raise ValueError(f"items for {type(target).__name__}, which accepts none")

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not self.is_dict(target):
            raise ValueError(f"keys for {type(target).__name__}, which is not a dict")
        for key, value in zip(self.keys(items[::2]), items[1::2], strict=True):
            target[key] = value

    def _frozenset(self) -> None:
        items = self.pop_mark()
        self.append(frozenset(self.keys(items)))

    def _new(self, keywords: Any = None) -> None:
        """Call ``__new__`` of a class. ``keywords`` is a dict or ``None``."""
        arguments, kind = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or type(keywords) not in (dict, type(None)):
            raise ValueError(f"arguments that are {type(arguments).__name__} and {type(keywords).__name__}")
        if isinstance(kind, type) and self.is_users(kind):
            self.append(kind.__new__(kind, *arguments, **(keywords or {})))
        elif keywords:
            raise ValueError("keywords for an object that accepts none")
        else:
            self.append(self.make(arguments, kind))

    def _build(self) -> None:
        """Give an object its state."""
        state, target = self.stack.pop(), self.stack[-1]
        kind = type(target)
        if isinstance(target, np.dtype):
            _set_byte_order(target, state)
        elif kind is np.ndarray:
            if target.shape != (0,) or target.dtype != np.int8:  # other objects may share the memory of the array
                raise ValueError("a second state of an array")
            _, shape, dtype, _, raw = state
            _check_counts(shape)
            _check_numbers(dtype, raw, math.prod(shape))
            self.charge(max(len(raw), math.prod(shape)))
            target.__setstate__(state)
        elif kind in (collections.OrderedDict, TorchVersion):
            _set_attributes(target, state)
        elif self.is_users(kind):
            _restore(target, state)
        elif kind is dict:  # an object of a class of Composer
            target["state"] = state
        else:
            raise RefusedError(name_of(kind), allowable=False)

    dispatch: ClassVar[dict[int, Callable[[Any], Any]]] = {
        **{code[0]: _PYTHONS.dispatch[code[0]] for code in _MOVES},
        pickle.BYTEARRAY8[0]: lambda self: self.append(bytearray(self.read(struct.unpack("<Q", self.read(8))[0]))),
        pickle.APPEND[0]: lambda self: self._extend([self.stack.pop()]),
        pickle.APPENDS[0]: lambda self: self._extend(self.pop_mark()),
        pickle.SETITEM[0]: lambda self: self._set_items([self.stack.pop(), self.stack.pop()][::-1]),
        pickle.SETITEMS[0]: lambda self: self._set_items(self.pop_mark()),
        pickle.ADDITEMS[0]: lambda self: self._extend(self.pop_mark()),
        pickle.FROZENSET[0]: _frozenset,
        pickle.REDUCE[0]: lambda self: self.append(self.make(self.stack.pop(), self.stack.pop())),
        pickle.NEWOBJ[0]: _new,
        pickle.NEWOBJ_EX[0]: lambda self: self._new(self.stack.pop()),
        pickle.BUILD[0]: _build,
    }
