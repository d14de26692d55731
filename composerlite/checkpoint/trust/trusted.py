"""Reading a checkpoint without running code in it: a reader of pickles that makes tensors and plain values.

It knows by name what it makes, and checks the arguments of each: nothing else is called, imported, or given attributes.
Work and memory are bounded by the size of the pickle. What users allow with ``torch.serialization.add_safe_globals``
is called as it asks to be: that is theirs to judge.
"""

from __future__ import annotations

import collections
import datetime
import enum
import functools
import math
import pathlib
import re
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from composerlite._torch_compat import negative_view, rebuild_quantized_tensor, untyped_storage, wrapper_tensor

__all__ = [
    "Dtype",
    "RefusedError",
    "SafeConstructor",
    "StorageKind",
    "Storages",
    "check_shape",
    "is_loadable",
    "short",
    "storage_kind",
]

_MOST_DEPTH = 200
_MOST_KEY_ITEMS = 1000
_SPARE_ITEMS = 1_000_000
_MERSENNE = (1 << 61) - 1  # beyond it, as many numbers as one likes have the same hash
_MOST_EQUAL_HASHES = 1000
_BLOCKED = ("sys", "os", "posix", "nt", "subprocess", "builtins.eval", "builtins.exec")
_DTYPE = re.compile(r"[<>|=]?([?bBhHiIlLqQpPefdgFDG]|[iufcb]\d{1,2}|[SUV]\d{0,9}|[mM]8)")


class RefusedError(Exception):
    """The pickle names something that is not known to be safe.

    Attributes:
        name: what, as ``module.name``.
        allowable: whether ``torch.serialization.add_safe_globals`` may allow it.
    """

    def __init__(self, name: str, *, allowable: bool) -> None:
        super().__init__(name)
        self.name = name
        self.allowable = allowable


@final
class StorageKind:
    """The kind of storage of one type of numbers, as a pickle calls it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


_KINDS = {
    name: StorageKind(dtype)
    for name, dtype in {
        "UntypedStorage": torch.uint8,
        "DoubleStorage": torch.float64,
        "FloatStorage": torch.float32,
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
        "LongStorage": torch.int64,
        "IntStorage": torch.int32,
        "ShortStorage": torch.int16,
        "CharStorage": torch.int8,
        "ByteStorage": torch.uint8,
        "BoolStorage": torch.bool,
        "ComplexFloatStorage": torch.complex64,
        "ComplexDoubleStorage": torch.complex128,
        "QUInt8Storage": torch.quint8,
        "QInt8Storage": torch.qint8,
        "QInt32Storage": torch.qint32,
    }.items()
}
_CONSTANTS = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype | torch.qscheme | torch.layout | torch.memory_format)
}
_LAYOUTS = {str(value): value for value in _CONSTANTS.values() if isinstance(value, torch.layout)}


def storage_kind(module: str, name: str) -> StorageKind | None:
    """Return the kind of storage that ``module.name`` is, if it is one."""
    return _KINDS.get(name) if module in ("torch", "torch.storage", "torch.cuda") else None


class Storages(Protocol):
    """The source of the bytes of tensors."""

    def storage(self, identity: Any) -> Any:
        """The storage that the pickle calls ``identity``. Its bytes need not have been read."""
        ...

    def read_now(self) -> None:
        """Read the bytes of all storages so far; those to come are read at once."""
        ...


def _user_types() -> dict[str, Any]:
    """Types that the user has allowed, by name."""
    allowed: dict[str, Any] = {}
    for item in torch.serialization.get_safe_globals():
        if isinstance(item, tuple):
            thing, name = cast("tuple[Any, str]", item)
            allowed[name] = thing
        else:
            allowed[f"{item.__module__}.{item.__qualname__}"] = item
    return allowed


def _own_enum(name: str) -> type[enum.Enum] | None:
    """The enumeration ``name`` if it is one of ours that is in use, under Composer's name for it or ours."""
    module, _, kind = name.rpartition(".")
    module = f"composerlite.{rest}" if (rest := module.removeprefix("composer.")) != module else module
    found = (
        vars(sys.modules[module]).get(kind) if module.startswith("composerlite.") and module in sys.modules else None
    )
    return found if isinstance(found, type) and issubclass(found, enum.Enum) else None


def is_loadable(thing: Any) -> bool:
    """Check that a checkpoint that names the class or function ``thing`` loads without ``trust_checkpoint=True``."""
    module, name = thing.__module__, thing.__qualname__
    full = f"{module}.{name}"
    known = full in _KNOWN or full in _user_types()
    return known or _own_enum(full) is not None or storage_kind(module, name) is not None


def _name_in_python_3(module: str, name: str) -> tuple[str, str]:
    """Module and name of what protocol 2, of Python 2, calls ``module.name``, such as ``xrange``."""
    return NAME_MAPPING.get((module, name)) or (IMPORT_MAPPING.get(module, module), name)


@final
class Described(dict[str, Any]):
    """An object of a class that is not here: its name, what it was called with and its state. It does nothing."""


@final
class Dtype:
    """A numpy dtype until its state is known. It never sees numpy's own ``__setstate__``, which believes anything."""

    def __init__(self, value: np.dtype[Any]) -> None:
        self.value = value
        self.memo_keys: list[int] = []


@final
class _Function:
    """A function of the table below; what stands for it on the stack."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


@final
class SafeConstructor:
    """Creates the objects that one pickle names, and no others.

    Args:
        size_bytes: of the pickle; it bounds the number of objects created.
        storages: gives storages.
        types: further classes, by full name, that are made and filled as those are that the user has allowed.
    """

    def __init__(self, size_bytes: int, storages: Storages, types: Mapping[str, type]) -> None:
        self._storages = storages
        self._budget = 8 * size_bytes + _SPARE_ITEMS
        self._user = {**_user_types(), **types}
        self._user_ids = {id(thing) for thing in self._user.values()}
        self._fresh_arrays: dict[int, Any] = {}
        self._equal_hashes: collections.Counter[int] = collections.Counter()

    # ── names and calls ──────────────────────────────────────────────────────────────────────────────────────────
    def named(self, module: str, name: str) -> Any:
        """Look up the object that the pickle calls ``module.name``.

        Raises:
            RefusedError: it is not known to be safe.
        """
        if f"{module}.{name}" not in self._user:
            module, name = _name_in_python_3(module, name)
        full = f"{module}.{name}"
        if module in _BLOCKED or full in _BLOCKED:
            raise RefusedError(full, allowable=False)
        if (kind := storage_kind(module, name)) is not None:
            return kind
        if full in _KNOWN:
            return _KNOWN[full]
        if full in self._user:
            self._storages.read_now()  # the user's code may look at the numbers in the tensors that it is given
            return self._user[full]
        if (own := _own_enum(full)) is not None:
            return own
        if full.startswith(_OF_COMPOSER):
            return _Function(functools.partial(Self.described, name=full))
        raise RefusedError(full, allowable=True)

    def make(self, what: Any, arguments: tuple[Any, ...]) -> Any:
        """Call ``what`` if that is allowed."""
        if type(what) is _Function:
            return what.call(self, *arguments)
        if isinstance(what, type):
            name = f"{what.__module__}.{what.__qualname__}"
            if (maker := _MAKERS.get(what)) is not None:
                return maker(self, *arguments)
            if issubclass(what, enum.Enum):
                (value,) = arguments
                return what(*self.keys([value]))
            if id(what) not in self._user_ids:
                raise RefusedError(name, allowable=what not in _VALUES.values())
            return what(*arguments)
        if id(what) in self._user_ids:
            return what(*arguments)
        raise ValueError(f"a call of {type(what).__name__}")

    def new_object(self, kind: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        """Call ``kind.__new__``."""
        if type(arguments) is not tuple:
            raise ValueError(f"arguments that are {type(arguments).__name__}")
        if isinstance(kind, type) and id(kind) in self._user_ids:
            return kind.__new__(kind, *arguments, **keywords)
        if type(kind) is _Function and isinstance(kind.call, functools.partial):
            return kind.call(self, *arguments, keywords) if keywords else kind.call(self, *arguments)
        if keywords:
            raise ValueError("keywords for what takes none")
        return self.make(kind, arguments)

    def build(self, target: Any, state: Any) -> Any:
        """``target`` with the ``state`` that was saved of it."""
        kind = type(target)
        if kind is Dtype:
            return _built_dtype(target.value, state)
        if kind is np.ndarray:
            if self._fresh_arrays.pop(id(target), None) is None:
                raise ValueError("the state of an array that has one")
            self._fill_array(target, state)
        elif kind in (collections.OrderedDict, TorchVersion):
            _set_attributes(target, state)
        elif id(kind) in self._user_ids:
            _restore(target, state)
        elif kind is Described:
            target["state"] = state
        else:
            raise RefusedError(f"{kind.__module__}.{kind.__qualname__}", allowable=False)
        return target

    def is_dict(self, target: Any) -> bool:
        """Check that keys may be set in ``target``."""
        return type(target) in _DICTS or (isinstance(target, dict) and id(type(target)) in self._user_ids)  # pyright: ignore[reportUnknownArgumentType]

    def keys(self, items: list[Any]) -> list[Any]:
        """``items``, all of which can be hashed, and found again, in a bounded time."""
        for item in items:
            if type(item) is not str:
                _check_key(item, [_MOST_KEY_ITEMS], 0)
                if isinstance(item, int | float) and not -_MERSENNE < item < _MERSENNE:
                    self._equal_hashes[hash(item)] += 1
                    if self._equal_hashes[hash(item)] > _MOST_EQUAL_HASHES:
                        raise ValueError("keys that were chosen to be slow")
        return items

    def _charge(self, items: int) -> None:
        self._budget -= items
        if self._budget < 0:
            raise ValueError("it unfolds to many times its size")

    def _fill_array(self, target: np.ndarray[Any, Any], state: Any) -> None:
        _, shape, dtype, _, raw = state
        _check_counts(shape)
        if not isinstance(dtype, np.dtype) or dtype.hasobject or type(raw) is not bytes:
            raise ValueError("an array of what is no plain number or text")
        if math.prod(shape) * dtype.itemsize != len(raw):
            raise ValueError(f"an array of the shape {shape} in {len(raw)} bytes")
        self._charge(max(len(raw), math.prod(shape)))
        target.__setstate__(state)  # pyright: ignore[reportUnknownMemberType]

    # ── what the table calls ─────────────────────────────────────────────────────────────────────────────────────
    def sized(self, items: Any) -> list[Any]:
        """``items``, hashable and not too many."""
        if not isinstance(items, list | tuple | set | frozenset | dict):
            raise ValueError(f"items that are {type(items).__name__}")
        self._charge(len(items))
        return list(self.keys(list(items)))

    def encode(self, text: Any, encoding: Any = "latin1") -> bytes:
        """The bytes that protocol 2 writes as text."""
        if type(text) is not str or encoding not in ("latin1", "latin-1"):
            raise ValueError(f"bytes from {type(text).__name__} with {encoding!r}")
        self._charge(len(text))
        return text.encode("latin-1")

    def new_bytes(self, data: Any = b"", encoding: Any = "latin1") -> bytes:
        """Bytes; never so many zeros."""
        if type(data) is str:
            return self.encode(data, encoding)
        if type(data) is not bytes:
            raise ValueError(f"bytes from {type(data).__name__}")
        self._charge(len(data))
        return data

    def new_deque(self, items: Any = (), most: Any = None) -> collections.deque[Any]:
        """A deque."""
        if type(items) not in (list, tuple) or not (most is None or type(most) is int):
            raise ValueError("a deque of no list")
        self._charge(len(items))
        return collections.deque(items, most)

    def new_defaultdict(self, factory: Any = None, items: Any = None) -> collections.defaultdict[Any, Any]:
        """A defaultdict, whose factory is a class of ours or the user's."""
        known = factory is None or (
            isinstance(factory, type) and (factory in _FACTORIES or id(factory) in self._user_ids)
        )
        if not known:
            raise ValueError("a defaultdict that calls something else than a class")
        return collections.defaultdict(cast("Any", factory), self._mapping(items))

    def new_counter(self, items: Any = None) -> collections.Counter[Any]:
        """A Counter."""
        return collections.Counter(self._mapping(items))

    def new_ordered(self, items: Any = ()) -> collections.OrderedDict[Any, Any]:
        """An OrderedDict."""
        if isinstance(items, dict):
            return collections.OrderedDict(self._mapping(items))
        return collections.OrderedDict(zip(self.sized([key for key, _ in items]), [v for _, v in items], strict=True))

    def _mapping(self, items: Any) -> dict[Any, Any]:
        if items is None:
            return {}
        if not isinstance(items, dict):
            raise ValueError(f"keys and values that are {type(items).__name__}")
        self._charge(len(cast("dict[Any, Any]", items)))
        return dict(cast("dict[Any, Any]", items))

    def path(self, kind: Callable[..., Any], *parts: Any) -> Any:
        """A path of texts."""
        if not all(type(part) is str for part in parts):
            raise ValueError("a path that is no text")
        self._charge(sum(map(len, parts)))
        return kind(*parts)

    def enum_member(self, kind: Any, name: Any) -> Any:
        """Member that ``getattr(Color, 'RED')`` gives: so Python 3.11 writes it. Nothing else has attributes here."""
        allowed = isinstance(kind, type) and issubclass(kind, enum.Enum)
        if not allowed or type(name) is not str or name not in kind.__members__:
            raise RefusedError("builtins.getattr", allowable=False)
        return kind.__members__[name]

    def dtype(self, text: Any, *_: Any) -> Dtype:
        """A numpy dtype."""
        if type(text) is not str or _DTYPE.fullmatch(text) is None:
            raise RefusedError(f"numpy.dtype({str(text)[:40]!r})", allowable=False)
        return Dtype(np.dtype(text))

    def new_array(self, kind: Any, shape: Any, _: Any) -> np.ndarray[Any, Any]:
        """An empty array; its numbers come with its state."""
        if kind is not np.ndarray or shape != (0,):
            raise ValueError("an array in a form that numpy does not write")
        array = np.empty(0, np.int8)
        self._fresh_arrays[id(array)] = array
        return array

    def array_of(self, data: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> np.ndarray[Any, Any]:
        """An array over bytes."""
        _check_counts(shape)
        if not isinstance(dtype, np.dtype) or dtype.hasobject or type(data) not in (bytes, bytearray):
            raise ValueError("an array of what is no plain number or text")
        self._charge(len(data))
        return np.frombuffer(data, dtype).reshape(shape, order=order).copy(order)

    def scalar(self, dtype: Any, data: Any) -> Any:
        """A numpy scalar."""
        if not isinstance(dtype, np.dtype) or dtype.hasobject or type(data) is not bytes or len(data) != dtype.itemsize:
            raise ValueError("a scalar of what is no plain number or text")
        self._charge(len(data))
        return np.frombuffer(data, dtype)[0]

    def tensor(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        stride: Any,
        requires_grad: Any = False,
        hooks: Any = None,
        metadata: Any = None,
    ) -> Tensor:
        """A dense tensor of the type of its storage."""
        return self.tensor_of_type(storage, offset, shape, stride, requires_grad, hooks, storage.dtype, metadata)

    def tensor_of_type(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        stride: Any,
        requires_grad: Any,
        hooks: Any,
        dtype: Any,
        metadata: Any = None,
    ) -> Tensor:
        """A dense tensor, whose type may have no storage of its own."""
        _check_extent(storage, dtype.itemsize, offset, shape, stride)
        untyped = untyped_storage(storage)
        made = torch.empty(0, dtype=dtype, device=untyped.device).set_(untyped, offset, shape, stride)
        if requires_grad:
            made.requires_grad_(True)
        for name, value in (metadata or {}).items():
            if name == "conj" and value is True:
                made = made.conj()
            elif name == "neg" and value is True:
                made = negative_view(made)
        return made

    def quantized(
        self, storage: Any, offset: Any, shape: Any, stride: Any, quantizer: Any, requires_grad: Any, hooks: Any
    ) -> Tensor:
        """A quantized tensor."""
        _check_extent(storage, storage.dtype.itemsize, offset, shape, stride)
        self._charge(math.prod(shape))
        self._storages.read_now()
        return rebuild_quantized_tensor(storage, offset, shape, stride, quantizer, requires_grad=requires_grad)

    def sparse(self, layout: Any, data: Any) -> Tensor:
        """A sparse tensor whose indices lie within it."""
        self._storages.read_now()
        with torch.sparse.check_sparse_tensor_invariants():
            if layout is torch.sparse_coo:
                indices, values, shape, *coalesced = data
                return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced[0] if coalesced else None)
            return torch.sparse_compressed_tensor(*data, layout=layout)

    def described(self, *arguments: Any, name: str) -> Described:
        """A description of an object of Composer, none of whose code is here."""
        self._charge(len(arguments))
        return Described({"class": name, "arguments": arguments})

    def layout(self, name: Any) -> torch.layout:
        """``torch.strided`` and the like."""
        return _LAYOUTS[name]

    def meta(self, dtype: Any, shape: Any, stride: Any, requires_grad: Any) -> Tensor:
        """A tensor without numbers."""
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=requires_grad)

    def from_host(self, data: Any, dtype: Any, device: Any, requires_grad: Any) -> Tensor:
        """A tensor of a device that has no storages. It stays on the CPU."""
        self._storages.read_now()
        host = torch.from_numpy(data.copy()) if type(data) is np.ndarray else data  # pyright: ignore
        self._charge(host.numel() * 16)
        return host.to(dtype).requires_grad_(bool(requires_grad))

    def parameter(self, data: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None) -> nn.Parameter:
        """A parameter."""
        made = nn.Parameter(data, bool(requires_grad))
        if state is not None:
            _set_attributes(made, state)
        return made

    def with_type(self, make: Any, kind: Any, arguments: Any, state: Any) -> Any:
        """A tensor with attributes, or of a class that the user has allowed."""
        made = self.make(make, arguments)
        if not isinstance(made, Tensor):
            raise ValueError("attributes of what is no tensor")
        if type(made) is not kind:
            if id(kind) not in self._user_ids:
                raise RefusedError(getattr(kind, "__qualname__", "?"), allowable=True)
            made = made.as_subclass(kind)
        if id(kind) in self._user_ids:
            _restore(made, state)
        else:
            _set_attributes(made, state)
        return made

    def wrapper(
        self, kind: Any, dtype: Any, shape: Any, stride: Any, offset: Any, layout: Any, device: Any, requires_grad: Any
    ) -> Any:
        """A tensor of a class that the user has allowed, whose numbers are in its attributes."""
        if id(kind) not in self._user_ids:
            raise RefusedError(
                f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '?')}", allowable=True
            )
        _check_counts(shape)
        _check_counts(stride)
        how: dict[str, Any] = {"strides": stride, "dtype": dtype, "storage_offset": offset, "layout": layout}
        return wrapper_tensor(kind, shape, **how, device="cpu", requires_grad=bool(requires_grad))


def _check_key(key: Any, budget: list[int], depth: int) -> None:
    budget[0] -= 1
    if budget[0] < 0 or depth > 20:
        raise ValueError("a key of many parts")
    if isinstance(key, tuple | frozenset):
        for part in cast("Iterable[Any]", key):
            _check_key(part, budget, depth + 1)


def _check_counts(shape: Any) -> None:
    if type(shape) not in (tuple, torch.Size) or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
        raise ValueError(f"{short(shape)} is no shape")


def _check_extent(storage: Any, item_bytes: int, offset: Any, shape: Any, stride: Any) -> None:
    if type(storage) is not torch.storage.TypedStorage or type(offset) is not int or offset < 0:
        raise ValueError(f"a tensor in {type(storage).__name__} at {short(offset)}")
    _check_counts(shape)
    _check_counts(stride)
    if len(shape) != len(stride) or len(shape) > 64:
        raise ValueError(f"a tensor of {len(shape)} dimensions with {len(stride)} strides")
    items = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    have = untyped_storage(storage).nbytes()
    if (offset + items) * item_bytes > have or math.prod(shape) >= 1 << 62:
        raise ValueError(f"a tensor of the shape {shape} at {offset} in a storage of {have} bytes")


def _set_attributes(target: Any, state: Any) -> None:
    """Attributes that the class does not have: nothing that it does changes."""
    parts = state if isinstance(state, tuple) and len(cast("tuple[Any, ...]", state)) == 2 else (state,)
    for part in cast("tuple[Any, ...]", parts):
        for name, value in (part or {}).items():
            if type(name) is not str or not name.isidentifier() or hasattr(type(target), name):
                raise ValueError(f"an attribute {short(name)} of {type(target).__name__}")
            setattr(target, name, value)


def _restore(target: Any, state: Any) -> None:
    """Restore an object of the user's as pickle does."""
    own = getattr(type(target), "__setstate__", None)
    if own is not None and own is not Tensor.__setstate__:  # that of tensors takes what older torch wrote
        target.__setstate__(state)
        return
    parts = state if isinstance(state, tuple) and len(cast("tuple[Any, ...]", state)) == 2 else (state, None)
    attributes, slots = cast("tuple[Any, Any]", parts)
    if attributes:
        target.__dict__.update(attributes)
    for name, value in (slots or {}).items():
        setattr(target, name, value)


def _built_dtype(dtype: np.dtype[Any], state: Any) -> np.dtype[Any]:
    """``dtype`` with the ``state`` that numpy has written for it."""
    _, order, inner, names, fields, size, _, flags, *metadata = state
    if inner is not None:
        base, shape = inner
        _check_plain(base)
        _check_counts(shape)
        return np.dtype((base, shape))
    if names is not None:
        if type(size) is not int or not 0 <= size < 1 << 31 or len(names) > 1000:
            raise ValueError("a dtype of many bytes")
        formats = [fields[name][0] for name in names]
        for part in formats:
            _check_plain(part)
        layout = {"names": list(names), "formats": formats, "offsets": [fields[n][1] for n in names], "itemsize": size}
        return np.dtype(cast("Any", layout), align=bool(flags & 0x80))
    if dtype.kind in "mM" and metadata:
        unit, count, divisor, _ = metadata[0][1]
        unit = unit.decode() if type(unit) is bytes else unit
        if (
            unit not in ("generic", "Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")
            or divisor != 1
        ):
            raise ValueError(f"a time in {short(unit)}")
        dtype = dtype if unit == "generic" else np.dtype(f"{dtype.kind}8[{int(count)}{unit}]")
    if order not in ("<", ">", "|", "="):
        raise ValueError(f"the byte order {short(order)}")
    return dtype.newbyteorder(order) if order in "<>" else dtype


def _check_plain(dtype: Any) -> None:
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise ValueError(f"a dtype of {short(dtype)}")


def check_shape(contents: Any, size_bytes: int) -> None:
    """Refuse contents that would take for ever to walk: cycles, great depth, and exponentially repeated references."""
    most = 4 * size_bytes + _SPARE_ITEMS
    sizes: dict[int, tuple[int, int]] = {}  # items and depth of each container

    def visit(node: Any, depth: int) -> tuple[int, int]:
        known = sizes.get(id(node))
        if known is not None:
            return known
        if depth > _MOST_DEPTH:
            raise ValueError(f"its contents are nested more than {_MOST_DEPTH} deep, or hold themselves")
        size, below = 1, 0
        for child in cast("Iterable[Any]", node.values() if isinstance(node, dict) else node):
            size += 1
            if isinstance(child, _CONTAINERS):
                inner_size, inner_below = visit(child, depth + 1)
                size, below = size + inner_size, max(below, inner_below + 1)
        if size > most or depth + below > _MOST_DEPTH:
            raise ValueError("its contents unfold to many times their size")
        sizes[id(node)] = size, below
        return size, below

    if isinstance(contents, _CONTAINERS):
        visit(contents, 0)


def short(value: object) -> str:
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {str(value)[:200]}"
    if isinstance(value, tuple | list | dict | set | frozenset):
        return f"a {type(cast('object', value)).__name__}"
    if isinstance(value, int):
        return hex(value)[:40]
    return repr(value)[:80] if isinstance(value, str | bytes | float | None) else f"a {type(value).__name__}"


_OF_COMPOSER = ("composer.", "torchmetrics.")
"""How the names of classes begin that Composer pickles, or has pickled: those are described."""
_CONTAINERS = (dict, list, tuple, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
_FACTORIES = (list, dict, set, int, float, str, bool, tuple, bytes, *_DICTS, collections.deque)

_PLAIN = (slice, datetime.timedelta, datetime.datetime, datetime.date, datetime.time, datetime.timezone, torch.device)
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath)

Self = SafeConstructor
_MAKERS: dict[type, Callable[..., Any]] = {
    set: lambda self, items=(): set(self.sized(items)),
    frozenset: lambda self, items=(): frozenset(self.sized(items)),
    bytes: Self.new_bytes,
    bytearray: lambda self, *arguments: bytearray(self.new_bytes(*arguments)),
    complex: lambda self, real, imaginary=0.0: complex(float(real), float(imaginary)),
    collections.deque: Self.new_deque,
    collections.defaultdict: Self.new_defaultdict,
    collections.Counter: Self.new_counter,
    collections.OrderedDict: Self.new_ordered,
    **{kind: functools.partial(lambda kind, self, *arguments: kind(*arguments), kind) for kind in _PLAIN},
    **{kind: functools.partial(lambda kind, self, *parts: self.path(kind, *parts), kind) for kind in _PATHS},
    torch.Size: lambda self, items=(): torch.Size(items),
    TorchVersion: lambda self, text: TorchVersion(self.new_bytes(text, "latin1").decode()),
    nn.Parameter: Self.parameter,
    np.dtype: Self.dtype,
}
_VALUES: dict[str, Any] = {
    **{f"builtins.{kind.__name__}": kind for kind in (list, dict, set, int, float, str, bool, tuple)},
    **{f"builtins.{kind.__name__}": kind for kind in (bytes, bytearray, complex, frozenset, slice)},
    **{f"{kind.__module__}.{kind.__qualname__}": kind for kind in _MAKERS if kind.__module__ != "builtins"},
    "builtins.long": int,  # as protocol 2 calls them
    "builtins.unicode": str,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch.nn.parameter.Parameter": nn.Parameter,
    "torch.Tensor": Tensor,
    "torch._tensor.Tensor": Tensor,
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    # pathlib._local is what Python 3.13 calls it, in its files, too; all read each other's.
    **{f"{module}.{kind.__name__}": kind for module in ("pathlib", "pathlib._local") for kind in _PATHS},
}
_CALLS: dict[str, _Function] = {
    name: _Function(call)
    for names, call in (
        (("_codecs.encode",), Self.encode),
        (("builtins.getattr",), Self.enum_member),
        (("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"), Self.new_array),
        (("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"), Self.scalar),
        (("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"), Self.array_of),
        (("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"), Self.tensor),
        (("torch._utils._rebuild_tensor_v3",), Self.tensor_of_type),
        (("torch._utils._rebuild_qtensor",), Self.quantized),
        (("torch._utils._rebuild_sparse_tensor",), Self.sparse),
        (("torch._utils._rebuild_meta_tensor_no_storage",), Self.meta),
        (("torch._utils._rebuild_device_tensor_from_numpy",), Self.from_host),
        (("torch._utils._rebuild_device_tensor_from_cpu_tensor",), Self.from_host),
        (("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"), Self.parameter),
        (("torch._tensor._rebuild_from_type_v2",), Self.with_type),
        (("torch._utils._rebuild_wrapper_subclass",), Self.wrapper),
        (("torch.serialization._get_layout",), Self.layout),
    )
    for name in names
}
_KNOWN: dict[str, Any] = {**_CONSTANTS, **_VALUES, **_CALLS}
