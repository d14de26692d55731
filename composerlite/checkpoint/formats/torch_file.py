"""The monolithic format: one file that plain ``torch.load(weights_only=True)`` opens."""

from __future__ import annotations

import collections
import functools
import logging
import pickle
import types
from typing import Any

import torch

from composerlite.checkpoint.trusted import is_loadable
from composerlite.storage import DigestWriter
from composerlite.types import StateDict

__all__ = ["write"]

log = logging.getLogger(__name__)


def write(contents: StateDict, file: DigestWriter) -> None:
    """Write ``contents`` to ``file`` as ``torch.save`` does."""
    torch.save(contents, file, pickle_module=_PICKLING)  # type: ignore[arg-type]


class _Pickler(pickle.Pickler):
    """Writes deques and defaultdicts as constructor calls, the only form in which ``weights_only`` takes them back."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is collections.deque:
            return collections.deque, (list(obj), obj.maxlen)
        if type(obj) is collections.defaultdict:
            return collections.defaultdict, (obj.default_factory, dict(obj))
        if isinstance(obj, type | types.FunctionType | types.BuiltinFunctionType):
            _warn_if_not_loadable(obj)
        return NotImplemented


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


_PICKLING = types.SimpleNamespace(
    Pickler=_Pickler, Unpickler=pickle.Unpickler, dumps=pickle.dumps, dump=pickle.dump, __name__="pickle"
)
