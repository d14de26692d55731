"""A store with injected faults."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, final

from composerlite.errors import ConfigError, ObjectStoreTransientError
from composerlite.storage import ObjectInfo, ObjectRange, ObjectStore, PartUpload, Progress


def _lost() -> Exception:
    return ObjectStoreTransientError("the connection was lost (injected fault)")


@final
@dataclass(frozen=True)
class Fault:
    """A fault of calls of a :class:`FaultyStore`.

    Attributes:
        verb: method of the store, or of an upload in parts (``send``, ``complete``, ``abort``); may contain ``*``.
        name: name of the object, or prefix; may contain ``*``.
        error: function to create the exception; ``None``: raise nothing.
        after: number of successful calls before the fault.
        times: number of failing calls; later calls succeed.
        lost_answer: forward the call, then fail.
        seconds: delay of the call.
        first: function to call before anything else, for example to wait.
    """

    verb: str = "*"
    name: str = "*"
    error: Callable[[], Exception] | None = _lost
    after: int = 0
    times: int = 1
    lost_answer: bool = False
    seconds: float = 0.0
    first: Callable[[], object] = lambda: None


@final
class FaultyStore(ObjectStore):
    """Forwards calls to ``store``, with faults. The first matching fault is injected.

    Args:
        store: the store to wrap.
        faults: the faults.

    Attributes:
        faults: the faults; may be changed at any time.
        calls: method and name of every call, in order.
        sent_bytes: total size of all sent parts and objects, including failed calls.

    Example::

        store = FaultyStore(S3ObjectStore("my-bucket"), Fault(verb="start_parts", times=2))
    """

    def __init__(self, store: ObjectStore, *faults: Fault) -> None:
        self.faults: Sequence[Fault] = faults
        self.calls: list[tuple[str, str]] = []
        self.sent_bytes = 0
        self._store = store
        self.least_part_bytes = store.least_part_bytes
        self.most_parts = store.most_parts
        self.reads_ranges = store.reads_ranges
        self.creates_atomically = store.creates_atomically
        self.swaps_atomically = store.swaps_atomically
        self._seen: Counter[int] = Counter()
        self._lock = threading.Lock()

    @classmethod
    def at(cls, bucket: str, **backend_kwargs: Any) -> FaultyStore:
        raise ConfigError(f"{cls.__name__} opens no buckets: pass a store.")

    def count(self, verb: str) -> int:
        """Return the number of calls of a method."""
        return sum(called == verb for called, _ in self.calls)

    def get_uri(self, name: str) -> str:
        return self._store.get_uri(name)

    def upload_object(
        self, name: str, filename: str | Path, callback: Progress | None = None, *, create_only: bool = False
    ) -> None:
        with self.call("upload_object", name, Path(filename).stat().st_size):
            self._store.upload_object(name, filename, callback, create_only=create_only)

    def put_bytes(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        with self.call("put_bytes", name, len(data)):
            self._store.put_bytes(name, data, create_only=create_only)

    def download_object(
        self, name: str, filename: str | Path, overwrite: bool = False, callback: Progress | None = None
    ) -> None:
        with self.call("download_object", name):
            self._store.download_object(name, filename, overwrite, callback)

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        with self.call("read_range", name):
            return self._store.read_range(name, offset, size)

    def open_range(self, name: str, offset: int, size: int) -> ObjectRange:
        with self.call("read_range", name):
            found = self._store.open_range(name, offset, size)
            data = found.read()
        return ObjectRange(found.version, found.size_bytes, (piece for piece in [data]))

    def get_object_size(self, name: str) -> int:
        with self.call("get_object_size", name):
            return self._store.get_object_size(name)

    def list_objects(self, prefix: str = "") -> Sequence[ObjectInfo]:
        with self.call("list_objects", prefix):
            return self._store.list_objects(prefix)

    def read_tail(self, name: str, most_bytes: int) -> tuple[int, bytes]:
        with self.call("read_tail", name):
            return self._store.read_tail(name, most_bytes)

    def read_versioned(self, name: str) -> tuple[bytes, str]:
        with self.call("read_versioned", name):
            return self._store.read_versioned(name)

    def swap_bytes(self, name: str, data: bytes, version: str) -> None:
        with self.call("swap_bytes", name, len(data)):
            self._store.swap_bytes(name, data, version)

    def list_level(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        with self.call("list_level", prefix):
            return self._store.list_level(prefix)

    def delete_object(self, name: str) -> None:
        with self.call("delete_object", name):
            self._store.delete_object(name)

    def check_writable(self, prefix: str) -> None:
        with self.call("check_writable", prefix):
            self._store.check_writable(prefix)

    def close(self) -> None:
        self._store.close()

    def start_parts(self, name: str) -> PartUpload | None:
        with self.call("start_parts", name):
            upload = self._store.start_parts(name)
            return None if upload is None else _FaultyParts(self, upload)

    def unfinished_parts(self, prefix: str) -> Sequence[PartUpload]:
        with self.call("unfinished_parts", prefix):
            return [_FaultyParts(self, upload) for upload in self._store.unfinished_parts(prefix)]

    @contextlib.contextmanager
    def call(self, verb: str, name: str, sent_bytes: int = 0) -> Generator[None]:
        """Record a call, and inject a fault around the block.

        Args:
            verb: name of the method.
            name: name of the object.
            sent_bytes: size of the sent data.
        """
        with self._lock:
            self.calls.append((verb, name))
            self.sent_bytes += sent_bytes
            fault = self._fault(verb, name)
        if fault is None:
            yield
            return
        fault.first()
        time.sleep(fault.seconds)
        if fault.lost_answer or fault.error is None:
            yield
        if fault.error is not None:
            raise fault.error()

    def _fault(self, verb: str, name: str) -> Fault | None:
        for fault in self.faults:
            if fnmatchcase(verb, fault.verb) and fnmatchcase(name, fault.name):
                self._seen[id(fault)] += 1
                if fault.after < self._seen[id(fault)] <= fault.after + fault.times:
                    return fault
        return None


@final
class _FaultyParts(PartUpload):
    def __init__(self, store: FaultyStore, upload: PartUpload) -> None:
        super().__init__(upload.name, upload.upload_id, upload.started_at)
        self._store = store
        self._upload = upload

    def send(self, number: int, data: bytes | memoryview) -> None:
        with self._store.call("send", self.name, len(data)):
            self._upload.send(number, data)

    def complete(self, *, count: int, create_only: bool = False) -> None:
        with self._store.call("complete", self.name):
            self._upload.complete(count=count, create_only=create_only)

    def abort(self) -> None:
        with self._store.call("abort", self.name):
            self._upload.abort()
