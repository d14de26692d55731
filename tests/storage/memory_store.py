"""A store in memory that takes objects in parts: quick, and as strict as a service."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Sequence
from datetime import UTC, datetime
from typing import IO, Any

from composerlite.storage import ObjectInfo
from composerlite.storage.object_store import span_of
from composerlite.storage.stores.base import ABSENT, BackendStore, Meaning


class MemoryStore(BackendStore):
    """Keeps objects and parts in dictionaries. Each upload of an object has a number as its version.

    Attributes:
        sent_parts: number of parts that were sent so far.
    """

    least_part_bytes = 1
    has_versions = creates_atomically = swaps_atomically = True

    def __init__(self) -> None:
        super().__init__("memory://bucket/")
        self._objects: dict[str, tuple[str, bytes]] = {}
        self._uploads: dict[str, tuple[str, datetime, dict[int, bytes]]] = {}
        self._count = 0
        self.sent_parts = 0
        self._lock = threading.Lock()

    def _put(self, key: str, file: IO[bytes], size: int, version: str | None) -> None:
        self._set(key, file.read(), version)

    def _set(self, key: str, data: bytes, version: str | None) -> None:
        with self._lock:
            there = self._objects.get(key, (ABSENT, b""))[0]
            if version is not None and version != there:
                raise FileExistsError
            self._count += 1
            self._objects[key] = (str(self._count), data)

    def _delete(self, key: str) -> None:
        self._objects.pop(key, None)

    def _read(self, key: str, offset: int, size: int) -> Generator[Any]:
        version, data = self._get(key)
        yield version, len(data)
        start, end = span_of(offset, size, len(data))
        for at in range(start, end, 1 << 20):
            yield data[at : min(at + (1 << 20), end)]

    def _stat(self, key: str) -> tuple[str, int]:
        version, data = self._get(key)
        return version, len(data)

    def _get(self, key: str) -> tuple[str, bytes]:
        if key not in self._objects:
            raise FileNotFoundError("there is no such object")
        return self._objects[key]

    def _list(self, prefix: str, *, level: bool) -> Iterable[ObjectInfo]:
        return [ObjectInfo(key, len(data)) for key, (_, data) in list(self._objects.items()) if key.startswith(prefix)]

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _start(self, key: str) -> str:
        with self._lock:
            self._count += 1
            upload_id = str(self._count)
            self._uploads[upload_id] = (key, datetime.now(UTC), {})
        return upload_id

    def _unfinished(self, prefix: str) -> Iterable[tuple[str, str, datetime]]:
        for upload_id, (key, started_at, _) in list(self._uploads.items()):
            if key.startswith(prefix):
                yield key, upload_id, started_at

    def _list_parts(self, key: str, upload_id: str) -> dict[int, bytes]:
        return dict(self._parts(upload_id))

    def _recognized(self, part: bytes, data: memoryview) -> bytes | None:
        return part if part == data else None

    def _send_part(self, key: str, upload_id: str, number: int, data: memoryview) -> bytes:
        self.sent_parts += 1
        part = self._parts(upload_id)[number] = bytes(data)
        return part

    def _complete(self, key: str, upload_id: str, parts: Sequence[bytes], version: str | None) -> None:
        self._parts(upload_id)
        self._set(key, b"".join(parts), version)
        self._abort(key, upload_id)

    def _abort(self, key: str, upload_id: str) -> None:
        self._uploads.pop(upload_id, None)

    def _parts(self, upload_id: str) -> dict[int, bytes]:
        if upload_id not in self._uploads:
            raise FileNotFoundError("there is no such upload")
        return self._uploads[upload_id][2]

    def _meaning(self, error: Exception) -> Meaning | None:
        if isinstance(error, FileNotFoundError | FileExistsError):
            return type(error), str(error)
        return None
