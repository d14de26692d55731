"""An unpickler with a list of allowed calls, from :mod:`composerlite.checkpoint.trust.trusted`.

Reading a pickle imports no module.
"""

from __future__ import annotations

import collections
import enum
import io
import math
import pickle
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

import numpy as np
from torch.torch_version import TorchVersion

from composerlite.checkpoint.trust import trusted

_MALFORMED = (
    *(struct.error, pickle.UnpicklingError, IndexError, KeyError, TypeError, ValueError, AttributeError),
    *(OverflowError, RuntimeError),
)
_PYTHONS: Any = pickle._Unpickler  # pyright: ignore - the unpickler in Python, with replaceable operations
# Python's own code for these operations only moves values between the data, the stack and the memo.
_MOVES = (
    *(pickle.PROTO, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4, pickle.BINFLOAT),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
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

    Attributes:
        fresh_arrays: empty arrays without state, by ``id``.
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
        self._budget = 8 * len(data) + trusted.SPARE_ITEMS
        self._user = {**trusted.user_types(), **(types or {})}
        self._user_ids = {id(thing) for thing in self._user.values()}
        self.fresh_arrays: dict[int, Any] = {}

    def load(self) -> Any:
        """Return the contents of the pickle.

        Raises:
            RefusedError: the pickle names a class or function outside of the allowed list.
            ValueError: the pickle is malformed, or unfolds to many times its size.
        """
        self.read, self.readline = self._file.read, self._file.readline
        self.metastack, self.stack = list[Any](), list[Any]()
        self.append = self.stack.append
        steps = self._STEPS
        try:
            while (code := self.read(1)) != pickle.STOP:
                steps[code](self)
            contents = self.stack.pop()
        except _MALFORMED as e:
            at = f"byte {self._file.tell()} of {self._size_bytes}"
            raise ValueError(f"its pickle is malformed at {at}: {trusted.short(e)}") from e
        trusted.check_shape(contents, self._size_bytes)
        return contents

    # ── what the functions of ``trusted`` need ───────────────────────────────────────────────────────────────────────
    def is_users(self, kind: Any) -> bool:
        """Return true if the class ``kind`` is allowed by the user, or is in ``types``."""
        return id(kind) in self._user_ids

    def is_dict(self, target: Any) -> bool:
        """Return true if ``target`` is a dict in which the pickle may set keys."""
        return type(target) in trusted.DICTS or (isinstance(target, dict) and self.is_users(type(target)))  # pyright: ignore[reportUnknownArgumentType]

    def keys(self, items: list[Any]) -> list[Any]:
        """Return ``items``, after a check that the time to hash each item is bounded. Raises ValueError."""
        for item in items:
            if type(item) is not str:
                trusted.check_key(item, [trusted.MOST_KEY_PARTS], 0)
        return items

    def charge(self, items: int) -> None:
        """Count ``items`` created objects or bytes.

        Raises:
            ValueError: there are too many for the size of the pickle.
        """
        self._budget -= items
        if self._budget < 0:
            raise ValueError("it unfolds to many times its size")

    def make(self, arguments: Any, kind: Any) -> Any:
        """Return the result of a call of the class or function ``kind``, if allowed.

        Raises:
            RefusedError: the class is not allowed to be called.
            ValueError: the arguments have the wrong types, or ``kind`` is no class or function.
        """
        if type(arguments) is not tuple:
            raise ValueError(f"arguments that are {type(arguments).__name__}")
        self.charge(sum(len(value) for value in arguments if type(value) in trusted.SIZED))
        if type(kind) is trusted.Maker:
            return kind.call(self, *arguments)
        if isinstance(kind, type):
            if (takes := trusted.CLASSES.get(kind)) is not None:
                if not all(type(value) in takes for value in arguments):
                    raise ValueError(f"{kind.__name__} of {', '.join(map(trusted.short, arguments))}")
                return kind(*arguments)
            if (maker := trusted.MAKERS.get(kind)) is not None:
                return maker(self, *arguments)
            if issubclass(kind, enum.Enum):
                (value,) = arguments
                return kind(*self.keys([value]))
        if id(kind) in self._user_ids:
            return kind(*arguments)
        if isinstance(kind, type):
            raise trusted.RefusedError(
                f"{kind.__module__}.{kind.__qualname__}", allowable=kind not in trusted.NAMED.values()
            )
        raise ValueError(f"a call of {type(kind).__name__}")

    # ── operations of pickles ────────────────────────────────────────────────────────────────────────────────────────
    def find_class(self, module: str, name: str) -> Any:
        """Return the object that represents ``module.name`` on the stack.

        The result is the class or constant of the name; a ``Maker`` for a function, or for any class of Composer; the
        dtype for a class of storages.

        Raises:
            RefusedError: the class or function is not allowed.
            ValueError: the name is too long.
        """
        if len(module) + len(name) > trusted.MOST_NAME_CHARACTERS:
            raise ValueError(f"a name of {len(module) + len(name)} characters")
        if f"{module}.{name}" not in self._user:  # protocol 2 has the names of Python 2, such as xrange
            module, name = NAME_MAPPING.get((module, name)) or (IMPORT_MAPPING.get(module, module), name)
        full = f"{module}.{name}"
        if module in trusted.BLOCKED or full in trusted.BLOCKED:
            raise trusted.RefusedError(full, allowable=False)
        if (dtype := trusted.storage_dtype(module, name)) is not None:
            return dtype
        if full in trusted.KNOWN:
            return trusted.KNOWN[full]
        if full in self._user:
            self.read_now()  # the user's code may read the numbers of tensors
            return self._user[full]
        if (own := trusted.own_enum(full)) is not None:
            return own
        if full.startswith(trusted.OF_COMPOSER):
            return trusted.Maker(lambda _, *arguments: trusted.Described({"class": full, "arguments": arguments}))
        raise trusted.RefusedError(full, allowable=True)

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (list, collections.deque):
            raise ValueError(f"items for {type(target).__name__}, which takes none")
        target.extend(items)

    def _add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set:
            raise ValueError(f"items for {type(target).__name__}, which is no set")
        target.update(self.keys(items))

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not self.is_dict(target):
            raise ValueError(f"keys for {type(target).__name__}, which is no dict")
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
            raise ValueError("keywords for what takes none")
        else:
            self.append(self.make(arguments, kind))

    def _build(self) -> None:
        """Give an object its state."""
        state, target = self.stack.pop(), self.stack[-1]
        kind = type(target)
        if isinstance(target, np.dtype):
            trusted.set_byte_order(target, state)
        elif kind is np.ndarray:
            if self.fresh_arrays.pop(id(target), None) is None:
                raise ValueError("the state of an array that has one")
            _, shape, dtype, _, raw = state
            trusted.check_counts(shape)
            trusted.check_numbers(dtype, raw, math.prod(shape))
            self.charge(max(len(raw), math.prod(shape)))
            target.__setstate__(state)
        elif kind in (collections.OrderedDict, TorchVersion):
            trusted.set_attributes(target, state)
        elif self.is_users(kind):
            trusted.restore(target, state)
        elif kind is trusted.Described:
            target["state"] = state
        else:
            raise trusted.RefusedError(f"{kind.__module__}.{kind.__qualname__}", allowable=False)

    _STEPS: ClassVar[dict[bytes, Callable[[Any], Any]]] = {
        **{code: _PYTHONS.dispatch[code[0]] for code in _MOVES},
        pickle.FRAME: lambda self: self.read(8),
        pickle.BYTEARRAY8: lambda self: self.append(bytearray(self.read(struct.unpack("<Q", self.read(8))[0]))),
        pickle.APPEND: lambda self: self._extend([self.stack.pop()]),
        pickle.APPENDS: lambda self: self._extend(self.pop_mark()),
        pickle.SETITEM: lambda self: self._set_items([self.stack.pop(), self.stack.pop()][::-1]),
        pickle.SETITEMS: lambda self: self._set_items(self.pop_mark()),
        pickle.ADDITEMS: lambda self: self._add(self.pop_mark()),
        pickle.FROZENSET: _frozenset,
        pickle.REDUCE: lambda self: self.append(self.make(self.stack.pop(), self.stack.pop())),
        pickle.NEWOBJ: _new,
        pickle.NEWOBJ_EX: lambda self: self._new(self.stack.pop()),
        pickle.BUILD: _build,
    }
