"""A reader of pickles that runs none of what they say: what they name :class:`SafeConstructor` makes, or nothing."""

from __future__ import annotations

import collections
import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

from composerlite.checkpoint.trust.trusted import Dtype, SafeConstructor, Storages, check_shape, short

__all__ = ["RestrictedUnpickler"]

_MALFORMED = (struct.error, IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError)
_U16, _U32, _U64 = (struct.Struct(f"<{code}") for code in "HIQ")
_I32, _FLOAT = struct.Struct("<i"), struct.Struct(">d")


@final
class RestrictedUnpickler:
    """Reads one pickle. Protocols 2 to 5 without out-of-band buffers.

    Args:
        data: the pickle.
        storages: gives storages.
        types: further classes that it may hold, by full name, made and filled as pickle does. Theirs is what may run.
    """

    def __init__(self, data: bytes, storages: Storages, types: Mapping[str, type] | None = None) -> None:
        self._data = data
        self._at = 0
        self._storages = storages
        self._constructor = SafeConstructor(len(data), storages, types or {})
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """Return the contents of the pickle.

        Raises:
            RefusedError: it names something that is not known to be safe.
            ValueError: it is malformed, or holds more than its size allows.
        """
        data, stop = self._data, pickle.STOP[0]
        steps = [self._STEPS.get(bytes([code])) for code in range(256)]
        try:
            while (code := data[self._at]) != stop:
                self._at += 1
                step = steps[code]
                if step is None:
                    raise ValueError(f"its pickle holds the operation {code} at {self._at - 1}")
                step(self)
            contents = self._stack.pop()
        except _MALFORMED as e:
            raise ValueError(f"its pickle is malformed at byte {self._at} of {len(data)}: {short(e)}") from e
        check_shape(contents, len(data))
        return contents

    # ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _take(self, size: int) -> bytes:
        start = self._at
        self._at = end = start + size
        if end > len(self._data):
            raise ValueError(f"{size} bytes are wanted and {len(self._data) - start} are left")
        return self._data[start:end]

    def _number(self, layout: struct.Struct) -> Any:
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value

    def _byte(self) -> int:
        value = self._data[self._at]
        self._at += 1
        return value

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at, self._at + 1000)
        if end < 0:
            raise ValueError("a name without an end")
        line = self._data[self._at : end].decode()
        self._at = end + 1
        return line

    # ── values ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _text(self, size: int) -> None:
        self._stack.append(self._take(size).decode("utf-8", "surrogatepass"))

    def _integer(self, size: int) -> None:
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def _protocol(self) -> None:
        if self._take(1)[0] > 5:
            raise ValueError("a newer protocol than 5")

    def _buffer(self) -> None:
        raise ValueError("data outside of the pickle")

    def _frame(self) -> None:
        self._take(8)

    # ── containers ───────────────────────────────────────────────────────────────────────────────────────────────
    def _mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._marks.pop()
        return items

    def _tuple(self, size: int) -> None:
        if len(self._stack) < size:
            raise ValueError("too few items for a tuple")
        self._stack[-size:] = [tuple(self._stack[-size:])]

    def _marked_tuple(self) -> None:
        items = self._since_mark()
        self._stack.append(tuple(items))

    def _marked_list(self) -> None:
        items = self._since_mark()
        self._stack.append(items)

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (list, collections.deque):
            raise ValueError(f"items for {type(target).__name__}, which takes none")
        target.extend(items)

    def _add(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not set:
            raise ValueError(f"items for {type(target).__name__}, which is no set")
        target.update(self._constructor.keys(items))

    def _frozenset(self) -> None:
        items = self._since_mark()
        self._stack.append(frozenset(self._constructor.keys(items)))

    def _dict(self) -> None:
        items = self._since_mark()
        self._stack.append({})
        self._set_items(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not self._constructor.is_dict(target):
            raise ValueError(f"keys for {type(target).__name__}, which is no dict")
        for key, value in zip(self._constructor.keys(items[::2]), items[1::2], strict=True):
            target[key] = value

    # ── memo ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _put(self, key: int) -> None:
        value = self._stack[-1]
        if type(value) is Dtype:
            value.memo_keys.append(key)
        self._memo[key] = value

    def _put_short(self) -> None:
        self._put(self._data[self._at])
        self._at += 1

    def _put_long(self) -> None:
        self._put(_U32.unpack_from(self._data, self._at)[0])
        self._at += 4

    def _get_short(self) -> None:
        self._stack.append(self._memo[self._data[self._at]])
        self._at += 1

    def _get_long(self) -> None:
        self._stack.append(self._memo[_U32.unpack_from(self._data, self._at)[0]])
        self._at += 4

    # ── names and what they make ─────────────────────────────────────────────────────────────────────────────────
    def _global(self) -> None:
        module, name = self._line(), self._line()
        self._stack.append(self._constructor.named(module, name))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("a name that is no text")
        self._stack.append(self._constructor.named(module, name))

    def _persistent(self) -> None:
        self._stack.append(self._storages.storage(self._stack.pop()))

    def _reduce(self) -> None:
        arguments, what = self._stack.pop(), self._stack.pop()
        if type(arguments) is not tuple:
            raise ValueError(f"arguments that are {type(arguments).__name__}")
        self._stack.append(self._constructor.make(what, arguments))

    def _new(self) -> None:
        arguments, kind = self._stack.pop(), self._stack.pop()
        self._stack.append(self._constructor.new_object(kind, arguments, {}))

    def _new_with_keywords(self) -> None:
        keywords, arguments, kind = self._stack.pop(), self._stack.pop(), self._stack.pop()
        if type(keywords) is not dict:
            raise ValueError("keywords that are no dict")
        self._stack.append(self._constructor.new_object(kind, arguments, keywords))

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        built = self._stack[-1] = self._constructor.build(target, state)
        if type(target) is Dtype:
            for key in target.memo_keys:
                if self._memo.get(key) is target:
                    self._memo[key] = built

    _STEPS: ClassVar[dict[bytes, Callable[[Any], Any]]] = {
        pickle.PROTO: _protocol,
        pickle.FRAME: _frame,
        pickle.MARK: _mark,
        pickle.POP: lambda self: self._stack.pop() if self._stack else self._since_mark(),
        pickle.POP_MARK: lambda self: self._since_mark(),
        pickle.NONE: lambda self: self._stack.append(None),
        pickle.NEWTRUE: lambda self: self._stack.append(True),
        pickle.NEWFALSE: lambda self: self._stack.append(False),
        pickle.BININT: lambda self: self._stack.append(self._number(_I32)),
        pickle.BININT1: lambda self: self._stack.append(self._byte()),
        pickle.BININT2: lambda self: self._stack.append(self._number(_U16)),
        pickle.LONG1: lambda self: self._integer(self._byte()),
        pickle.LONG4: lambda self: self._integer(self._number(_U32)),
        pickle.BINFLOAT: lambda self: self._stack.append(self._number(_FLOAT)),
        pickle.BINUNICODE: lambda self: self._text(self._number(_U32)),
        pickle.SHORT_BINUNICODE: lambda self: self._text(self._byte()),
        pickle.BINUNICODE8: lambda self: self._text(self._number(_U64)),
        pickle.SHORT_BINBYTES: lambda self: self._stack.append(self._take(self._byte())),
        pickle.BINBYTES: lambda self: self._stack.append(self._take(self._number(_U32))),
        pickle.BINBYTES8: lambda self: self._stack.append(self._take(self._number(_U64))),
        pickle.BYTEARRAY8: lambda self: self._stack.append(bytearray(self._take(self._number(_U64)))),
        pickle.NEXT_BUFFER: _buffer,
        pickle.EMPTY_TUPLE: lambda self: self._stack.append(()),
        pickle.EMPTY_LIST: lambda self: self._stack.append([]),
        pickle.EMPTY_DICT: lambda self: self._stack.append({}),
        pickle.EMPTY_SET: lambda self: self._stack.append(set()),
        pickle.TUPLE: _marked_tuple,
        pickle.TUPLE1: lambda self: self._tuple(1),
        pickle.TUPLE2: lambda self: self._tuple(2),
        pickle.TUPLE3: lambda self: self._tuple(3),
        pickle.LIST: _marked_list,
        pickle.DICT: _dict,
        pickle.APPEND: lambda self: self._append([self._stack.pop()]),
        pickle.APPENDS: lambda self: self._append(self._since_mark()),
        pickle.SETITEM: lambda self: self._set_items([self._stack.pop(), self._stack.pop()][::-1]),
        pickle.SETITEMS: lambda self: self._set_items(self._since_mark()),
        pickle.ADDITEMS: lambda self: self._add(self._since_mark()),
        pickle.FROZENSET: _frozenset,
        pickle.BINPUT: _put_short,
        pickle.LONG_BINPUT: _put_long,
        pickle.MEMOIZE: lambda self: self._put(len(self._memo)),
        pickle.BINGET: _get_short,
        pickle.LONG_BINGET: _get_long,
        pickle.GLOBAL: _global,
        pickle.STACK_GLOBAL: _stack_global,
        pickle.BINPERSID: _persistent,
        pickle.REDUCE: _reduce,
        pickle.NEWOBJ: _new,
        pickle.NEWOBJ_EX: _new_with_keywords,
        pickle.BUILD: _build,
    }
