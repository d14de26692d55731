"""The monolithic format: one file that plain ``torch.load(weights_only=True)`` opens and ``unzip -t`` accepts.

torch pickles the contents and says which storages belong to them; where they lie in the file and how they get there is
ours: see ``zip_layout`` and ``storage.StreamWriter``.
"""

from __future__ import annotations

import collections
import functools
import logging
import pickle
import types
from pathlib import Path
from typing import Any, final

import torch
from isal import isal_zlib
from torch.serialization import _save as torch_save_records  # pyright: ignore[reportPrivateUsage] - see _Records

from composerlite.checkpoint.formats.zip_layout import Layout, Record, trailer
from composerlite.checkpoint.trusted import is_loadable
from composerlite.storage import StreamWriter
from composerlite.types import StateDict

__all__ = ["write"]

log = logging.getLogger(__name__)
_PICKLE_PROTOCOL = 2  # what torch.save writes, and what its restricted reader takes
_DIRECTORY_BYTES = 256  # more than a record takes in the central directory


def write(contents: StateDict, path: Path) -> tuple[int, str]:
    """Write ``contents`` to the empty file ``path``; its size in bytes and its XXH3-128. It is durable then.

    Raises:
        OSError: no space, which is known before anything is written where the file system can reserve it.
        Exception: whatever pickle raises for something that it cannot write.
    """
    records = _Records()
    torch_save_records(contents, records, _PICKLING, _PICKLE_PROTOCOL, False)
    ordered = records.data_first()
    layout = Layout([(name, size) for name, _, size in ordered])
    with StreamWriter(path, layout.end + _DIRECTORY_BYTES * len(ordered)) as writer:
        crcs = [_write_record(writer, r, data) for r, (_, data, _) in zip(layout.records, ordered, strict=True)]
        writer.write(trailer(layout.records, crcs, layout.end))
        return writer.size_bytes, writer.finish()


def _write_record(writer: StreamWriter, record: Record, data: bytes | torch.UntypedStorage) -> int:
    """Write one record, from its header to its descriptor; the CRC-32 of its data."""
    writer.write(record.header)
    if isinstance(data, bytes):
        writer.write(data)
        crc = isal_zlib.crc32(data)
    else:
        crc = 0
        for offset, size in writer.copy(data.data_ptr(), record.size_bytes):
            crc = isal_zlib.crc32(writer.view(offset, size), crc)
    writer.write(record.descriptor(crc))
    return crc


@final
class _Records:
    """What ``torch.save`` would write, collected instead: it takes the place of torch's own zip writer.

    The function that torch.save hands its writer to has no public name. The records are those of every torch since 1.6.
    """

    def __init__(self) -> None:
        self._records: list[tuple[str, bytes | torch.UntypedStorage, int]] = []

    def write_record(self, name: str, data: bytes | str | torch.UntypedStorage, size: int) -> None:
        """Called by torch for each record; storages are on the CPU."""
        self._records.append((name, data.encode() if isinstance(data, str) else data, size))

    def data_first(self) -> list[tuple[str, bytes | torch.UntypedStorage, int]]:
        """All records: the storages, then the pickle and what describes the archive.

        ``.format_version`` and ``.storage_alignment`` are left out: they invite readers to compute where torch's own
        writer would have put each storage.
        """
        data = [record for record in self._records if record[0].startswith("data/")]
        rest = [record for record in self._records if record[0] in ("data.pkl", "byteorder")]
        return [*data, *rest, ("version", b"3\n", 2)]


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
