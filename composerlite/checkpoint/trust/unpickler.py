"""An unpickler with a list of allowed calls, from :mod:`composerlite.checkpoint.trust.trusted`. Imports nothing."""

from __future__ import annotations

import collections
import io
import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

from composerlite.checkpoint.trust.trusted import Dtype, SafeConstructor, Storages, check_shape, short

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
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID),  # call find_class and persistent_load below
)


@final
class RestrictedUnpickler(_PYTHONS):
    """Reads one pickle of protocol 2 to 5, without out-of-band buffers.

    Args:
        data: the pickle.
        storages: provides the storages of tensors.
        types: further allowed classes, by full name. Pickle's own rules create and fill the instances, so methods of
            these classes run.
    """

    def __init__(self, data: bytes, storages: Storages, types: Mapping[str, type] | None = None) -> None:
        self._file = io.BytesIO(data)
        self._size_bytes = len(data)
        super().__init__(self._file)
        self._storages = storages
        self._constructor = SafeConstructor(len(data), storages, types or {})

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
            raise ValueError(f"its pickle is malformed at {at}: {short(e)}") from e
        check_shape(contents, self._size_bytes)
        return contents

    def find_class(self, module: str, name: str) -> Any:
        return self._constructor.named(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return self._storages.storage(pid)

    def _read_bytearray(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(min(size, self._size_bytes))))

    def _get(self, key: int) -> None:
        value = self.memo[key]
        self.append(value.built if type(value) is Dtype else value)

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (list, collections.deque):
            raise ValueError(f"items for {type(target).__name__}, which takes none")
        target.extend(items)

    def _add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set:
            raise ValueError(f"items for {type(target).__name__}, which is no set")
        target.update(self._constructor.keys(items))

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not self._constructor.is_dict(target):
            raise ValueError(f"keys for {type(target).__name__}, which is no dict")
        for key, value in zip(self._constructor.keys(items[::2]), items[1::2], strict=True):
            target[key] = value

    def _frozenset(self) -> None:
        items = self.pop_mark()
        self.append(frozenset(self._constructor.keys(items)))

    def _reduce(self) -> None:
        arguments, what = self.stack.pop(), self.stack.pop()
        self.append(self._constructor.make(what, arguments))

    def _new(self, keywords: Any = None) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        self.append(self._constructor.new_object(kind, arguments, keywords))

    def _build(self) -> None:
        state = self.stack.pop()
        self.stack[-1] = self._constructor.build(self.stack[-1], state)

    _STEPS: ClassVar[dict[bytes, Callable[[Any], Any]]] = {
        **{code: _PYTHONS.dispatch[code[0]] for code in _MOVES},
        pickle.FRAME: lambda self: self.read(8),
        pickle.BYTEARRAY8: _read_bytearray,
        pickle.BINGET: lambda self: self._get(self.read(1)[0]),
        pickle.LONG_BINGET: lambda self: self._get(struct.unpack("<I", self.read(4))[0]),
        pickle.APPEND: lambda self: self._extend([self.stack.pop()]),
        pickle.APPENDS: lambda self: self._extend(self.pop_mark()),
        pickle.SETITEM: lambda self: self._set_items([self.stack.pop(), self.stack.pop()][::-1]),
        pickle.SETITEMS: lambda self: self._set_items(self.pop_mark()),
        pickle.ADDITEMS: lambda self: self._add(self.pop_mark()),
        pickle.FROZENSET: _frozenset,
        pickle.REDUCE: _reduce,
        pickle.NEWOBJ: _new,
        pickle.NEWOBJ_EX: lambda self: self._new(self.stack.pop()),
        pickle.BUILD: _build,
    }
