"""BackendStore: base class of all stores. A subclass adds the requests to a service and the translation of errors."""

# pyright: reportPrivateUsage=false
# _Parts calls the requests of BackendStore.

from __future__ import annotations

import contextlib
import io
import logging
import os
import secrets
import threading
from abc import abstractmethod
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, final

from composerlite.errors import ComposerliteError, ObjectStoreError, ObjectStoreTransientError
from composerlite.storage.object_store import (
    ObjectInfo,
    ObjectRange,
    ObjectStore,
    PartUpload,
    Progress,
    check_name,
    split_level,
)
from composerlite.storage.retry import RetryPolicy
from composerlite.storage.transfer import Transfer

CONNECTIONS = 64
"""Largest number of connections of a store at the same time."""
PIECE_BYTES = 1 << 20
"""Size of one read or write, in bytes."""
ABSENT = ""
"""The version of an object that does not exist."""
_WHOLE_BYTES = 64 << 20  # a larger file is uploaded in parts, where the store takes parts
_TRANSFER_THREADS = 4

Meaning = tuple[type[Exception], str]
"""Translation of an error: the type of the new error, and the cause for the message."""

log = logging.getLogger(__name__)


class BackendStore(ObjectStore):
    """Everything in an object store except the requests to the service.

    The public methods check names, add :attr:`prefix`, translate the errors of the backend and sort listings. A
    subclass implements the abstract methods, and the methods for parts if ``least_part_bytes`` is not 0. The argument
    ``key`` is a checked name with the prefix. A subclass raises the errors of the SDK, and ``_meaning`` translates
    each error.

    Args:
        uri: URI of the bucket, with a slash at the end.
        prefix: put before every name, with a slash between.

    Raises:
        ConfigError: no object can have a name with this prefix.
    """

    reads_ranges = True

    def __init__(self, uri: str, prefix: str = "") -> None:
        self.prefix = f"{check_name(prefix.strip('/'))}/" if prefix.strip("/") else ""
        self._uri = uri

    def get_uri(self, name: str) -> str:
        return f"{self._uri}{self.prefix}{name}"

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def upload_object(
        self, name: str, filename: str | Path, callback: Progress | None = None, *, create_only: bool = False
    ) -> None:
        with Path(filename).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _WHOLE_BYTES and self.least_part_bytes:
                with self._transfer() as transfer:
                    transfer.upload(name, filename, callback, create_only=create_only)
                return
            self._put_version("upload", name, file, size, ABSENT if create_only else None)
        if callback is not None:
            callback(size, size)

    def put_bytes(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        operation, version = ("create", ABSENT) if create_only else ("write", None)
        self._put_version(operation, name, io.BytesIO(data), len(data), version)

    def swap_bytes(self, name: str, data: bytes, version: str) -> None:
        if not self.swaps_atomically:
            super().swap_bytes(name, data, version)
            return
        try:
            self._put_version("swap", name, io.BytesIO(data), len(data), version)
        except (FileExistsError, FileNotFoundError) as e:
            raise FileExistsError(
                f"{self.get_uri(name)}: swap: the object has another version than {version!r}: read the object again."
            ) from e

    def _put_version(self, operation: str, name: str, file: IO[bytes], size: int, version: str | None) -> None:
        with self._translated(operation, name) as key:
            if version == ABSENT and not self.creates_atomically and self.has_object(name):
                raise FileExistsError
            self._put(key, file, size, version)

    def delete_object(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._translated("delete", name) as key:
            self._delete(key)

    def check_writable(self, prefix: str) -> None:
        name = f"{prefix}{'' if not prefix or prefix.endswith('/') else '.'}check-{secrets.token_hex(8)}"
        with self._translated("check that objects can be written", name) as key:
            if self.least_part_bytes:  # an aborted upload leaves nothing, without the right to delete
                undo = _Parts(self, name, self._start(key)).abort
            else:
                self._put(key, io.BytesIO(b"check"), 5, None)
                undo = partial(self.delete_object, name)
        try:
            undo()
        except PermissionError as e:
            log.warning("could not remove the check object from the bucket: %s", e)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def download_object(
        self, name: str, filename: str | Path, overwrite: bool = False, callback: Progress | None = None
    ) -> None:
        with self._transfer() as transfer:
            transfer.download(name, filename, overwrite=overwrite, callback=callback)

    def _transfer(self) -> Transfer:
        return Transfer(self, threads=_TRANSFER_THREADS, retry=RetryPolicy(attempts=1))

    def open_range(self, name: str, offset: int, size: int) -> ObjectRange:
        answer = self._answer(name, offset, size)
        version, size_bytes = next(answer)
        return ObjectRange(version, size_bytes, answer)

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        return self.open_range(name, offset, size).read()

    def _answer(self, name: str, offset: int, size: int) -> Generator[Any]:
        """Yield (version, size of the object), then the bytes as in ``_read``, with translated errors."""
        with self._translated("read", name) as key:
            if size == 0:
                yield self._stat(key)
            else:
                yield from self._read(key, offset, size)

    def get_object_size(self, name: str) -> int:
        with self._translated("get the size", name) as key:
            return self._stat(key)[1]

    def list_objects(self, prefix: str = "") -> Sequence[ObjectInfo]:
        return [info for info in self._infos(prefix, level=False) if not info.name.endswith("/")]

    def list_level(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        # Consoles store an empty folder as an object with a slash at the end of the name. Leave out this object.
        return split_level(prefix, (info for info in self._infos(prefix, level=True) if info.name != prefix))

    def _infos(self, prefix: str, *, level: bool) -> list[ObjectInfo]:
        """List objects, and folders as names with a slash at the end."""
        begin = len(self.prefix)
        with self._translated("list", prefix, is_prefix=True):
            found = [replace(info, name=info.name[begin:]) for info in self._list(self.prefix + prefix, level=level)]
        return sorted(found, key=lambda info: info.name)

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────
    def start_parts(self, name: str) -> PartUpload | None:
        if not self.least_part_bytes:
            return None
        with self._translated("start an upload in parts", name) as key:
            upload = _Parts(self, name, self._start(key))
        upload.parts = {}
        return upload

    def unfinished_parts(self, prefix: str) -> Sequence[PartUpload]:
        begin = len(self.prefix)
        with self._translated("list unfinished uploads", prefix, is_prefix=True):
            found = sorted(self._unfinished(self.prefix + prefix), key=lambda upload: upload[2])
        return [_Parts(self, key[begin:], upload_id, started_at) for key, upload_id, started_at in found]

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def _put(self, key: str, file: IO[bytes], size: int, version: str | None) -> None:
        """Make the ``size`` bytes of ``file`` the content of an object.

        If ``version`` is ``None``, replace any version. If ``version`` is ``ABSENT``, only create the object. Otherwise
        replace only this version. If the object has another version, raise an error that :meth:`_meaning` translates to
        FileExistsError. A store with false :attr:`creates_atomically` ignores ``version``: the caller has checked if
        the object exists.
        """

    @abstractmethod
    def _delete(self, key: str) -> None:
        """Delete an object. A missing object may be an error."""

    @abstractmethod
    def _read(self, key: str, offset: int, size: int) -> Generator[Any]:
        """Yield (version, size of the object), then at most ``size`` bytes from ``offset`` on. ``size`` is at least 1.

        A negative ``offset`` counts from the end of the object, and stands for 0 if the object is smaller.
        """

    @abstractmethod
    def _stat(self, key: str) -> tuple[str, int]:
        """Return version and size of an object."""

    @abstractmethod
    def _list(self, prefix: str, *, level: bool) -> Iterable[ObjectInfo]:
        """List the objects with keys beginning with ``prefix``. The ``name`` of each result is the key.

        With ``level``, a result may be a folder in place of all objects in the folder. The key of a folder ends with
        the first slash after ``prefix``.
        """

    @abstractmethod
    def _meaning(self, error: Exception) -> Meaning | None:
        """Translate an error of the SDK. Return ``None`` for any other error."""

    def _start(self, key: str) -> str:
        """Begin an upload in parts, and return the id."""
        raise NotImplementedError

    def _unfinished(self, prefix: str) -> Iterable[tuple[str, str, datetime]]:
        """Yield (key, id, start) of each unfinished upload with a key beginning with ``prefix``."""
        return ()

    def _list_parts(self, key: str, upload_id: str) -> dict[int, Any]:
        """Return the parts stored by the backend, by number. A part is any value that ``_complete`` accepts."""
        raise NotImplementedError

    def _recognized(self, part: Any, data: bytes | memoryview) -> Any:
        """Return a part for ``_complete`` if ``part`` of ``_list_parts`` has the content ``data``; else ``None``."""
        raise NotImplementedError

    def _send_part(self, key: str, upload_id: str, number: int, data: bytes | memoryview) -> Any:
        """Send a part and return the part for ``_complete``."""
        raise NotImplementedError

    def _complete(self, key: str, upload_id: str, parts: Sequence[Any], version: str | None) -> None:
        """Make the object from ``parts``, in order. ``version`` is ``ABSENT`` or ``None``, as in ``_put``."""
        raise NotImplementedError

    def _abort(self, key: str, upload_id: str) -> None:
        """Abort an upload. An unknown upload may be an error."""
        raise NotImplementedError

    # ── names and errors ─────────────────────────────────────────────────────────────────────────────────────────
    @contextlib.contextmanager
    def _translated(self, operation: str, name: str, *, is_prefix: bool = False) -> Generator[str]:
        """Yield the key of ``name``, and translate errors of the block into errors of :class:`ObjectStore`."""
        key = self.prefix + name if is_prefix else self._key(name)
        try:
            yield key
        except ComposerliteError:
            raise
        except Exception as e:
            if str(e).startswith(self._uri):
                raise  # translated by an inner call
            meaning = self._meaning(e) or _of_system(e)
            if meaning is None:
                raise
            kind, cause = meaning
            cause = "there is an object of this name." if kind is FileExistsError else cause
            raise kind(f"{self.get_uri(name)}: {operation}: {cause}") from e

    def _key(self, name: str) -> str:
        """Return the key of ``name``. ConfigError: no object can have this name."""
        return check_name(self.prefix + name)


def _of_system(error: Exception) -> Meaning | None:
    """Translate an error of the operating system.

    A missing local file becomes ObjectStoreError, since FileNotFoundError stands for a missing object.
    """
    if not isinstance(error, OSError):
        return None
    cause = error.strerror or str(error) or type(error).__name__
    if isinstance(error, ConnectionError | TimeoutError):
        return ObjectStoreTransientError, cause
    if isinstance(error, FileExistsError):
        return FileExistsError, cause
    kind = PermissionError if isinstance(error, PermissionError) else ObjectStoreError
    return kind, cause if error.filename is None else f"{cause}: {error.filename!r}, a local file."


@final
class _Parts(PartUpload):
    """An upload in parts to a :class:`BackendStore`."""

    def __init__(self, store: BackendStore, name: str, upload_id: str, started_at: datetime | None = None) -> None:
        super().__init__(name, upload_id, started_at)
        self.parts: dict[int, Any] | None = None  # None: not listed yet; see _known
        self._store = store
        self._lock = threading.Lock()

    def send(self, number: int, data: bytes | memoryview) -> None:
        with self._store._translated(f"send part {number}", self.name) as key:
            known = self._known(key)
            part = self._store._recognized(known[number], data) if number in known else None
            known[number] = self._store._send_part(key, self.upload_id, number, data) if part is None else part

    def complete(self, *, count: int, create_only: bool = False) -> None:
        operation = "complete the upload"
        with self._store._translated(operation, self.name) as key:
            known = self._known(key)
            if missing := [number for number in range(1, count + 1) if number not in known]:
                uri = self._store.get_uri(self.name)
                raise ObjectStoreError(f"{uri}: {operation}: part {missing[0]} of {count} was not uploaded.")
            if create_only and self._store.has_object(self.name):  # some services ignore ABSENT in _complete
                raise FileExistsError
            chosen = [known[number] for number in range(1, count + 1)]
            self._store._complete(key, self.upload_id, chosen, ABSENT if create_only else None)

    def abort(self) -> None:
        with contextlib.suppress(FileNotFoundError), self._store._translated("abort the upload", self.name) as key:
            self._store._abort(key, self.upload_id)

    def _known(self, key: str) -> dict[int, Any]:
        """Return the parts in the store. The first call lists the parts, and ``send`` adds to the result."""
        with self._lock:
            if self.parts is None:
                self.parts = self._store._list_parts(key, self.upload_id)
            return self.parts
