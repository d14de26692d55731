"""BackendStore: the common part of all stores. A store adds its requests and the meaning of its errors."""

# pyright: reportPrivateUsage=false
# _Parts calls the requests of BackendStore.

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import logging
import os
import re
import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, final

from composerlite.errors import ComposerliteError, ConfigError, ObjectStoreError, ObjectStoreTransientError
from composerlite.storage.object_store import (
    ObjectInfo,
    ObjectRange,
    ObjectStore,
    PartUpload,
    Progress,
    check_name,
    meaning_of_status,
    split_level,
)
from composerlite.storage.retry import RetryPolicy
from composerlite.storage.transfer import Transfer

CONNECTIONS = 64
"""Connections to a service at the same time."""
PIECE_BYTES = 1 << 20
"""Size of one read or write."""
ABSENT = ""
"""The version of an object that does not exist."""
_WHOLE_BYTES = 64 << 20  # a larger file is uploaded in parts, where the store takes parts
_MOST_VERSIONED_BYTES = 64 << 20
_TRANSFER_THREADS = 4

Meaning = tuple[type[Exception], str]
"""Type of the error that a method raises, and the cause in its message."""

log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """An object or a folder in a listing of a backend.

    Attributes:
        key: key of the object or folder.
        size_bytes: size of the object; -1 for a folder.
        modified_at: time of the upload, where the backend tells.
    """

    key: str
    size_bytes: int
    modified_at: datetime | None


class BackendStore(ObjectStore):
    """An object store without its requests.

    The methods check names, add :attr:`prefix`, translate the errors of the backend and sort listings. A subclass
    implements the methods with an underscore. Their ``key`` is a checked name with the prefix. They raise the errors of
    their library, and ``_meaning`` translates these errors.

    Args:
        uri: URI of the bucket, with a slash at the end.
        prefix: put before every name, with a slash between.
    """

    reads_ranges = True
    _has_versions: ClassVar[bool] = False
    """True if each upload of an object has a version, and ``_put`` compares versions."""

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
        try:
            self._put_version("swap", name, io.BytesIO(data), len(data), version)
        except (FileExistsError, FileNotFoundError) as e:
            raise FileExistsError(
                f"{self.get_uri(name)}: swap: the object has another version than {version!r}: read the object again."
            ) from e

    def _put_version(self, operation: str, name: str, file: IO[bytes], size: int, version: str | None) -> None:
        with self._translated(operation, name) as key:
            compares = self.creates_atomically if version == ABSENT else self.swaps_atomically
            if version is not None and not compares:
                self._check_version(name, version)
            self._put(key, file, size, version)

    @property
    def swaps_atomically(self) -> bool:
        return self._has_versions and self.creates_atomically

    def delete_object(self, name: str) -> None:
        with self._translated("delete", name) as key:
            self._delete(key)

    def check_writable(self, prefix: str) -> None:
        name = f"{prefix}{'' if not prefix or prefix.endswith('/') else '.'}check-{secrets.token_hex(8)}"
        with self._translated("check that objects can be written", name) as key:
            upload_id = ""
            if self.least_part_bytes:  # leaves nothing, also without the right to delete objects
                upload_id, _ = self._start(key)
            else:
                self._put(key, io.BytesIO(b"check"), 5, None)
            try:
                if upload_id:
                    self._abort(key, upload_id)
                else:
                    self._delete(key)
            except Exception as e:
                meaning = self._meaning(e)
                if meaning is None or meaning[0] is not PermissionError:
                    raise
                log.warning("%s: the check of the bucket was not removed: %s", self.get_uri(name), meaning[1])

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def download_object(
        self, name: str, filename: str | Path, overwrite: bool = False, callback: Progress | None = None
    ) -> None:
        with self._transfer() as transfer:
            transfer.download(name, filename, overwrite=overwrite, callback=callback)

    def _transfer(self) -> Transfer:
        return Transfer(self, threads=_TRANSFER_THREADS, retry=RetryPolicy(attempts=1))

    def open_range(self, name: str, offset: int, size: int) -> ObjectRange:
        answer = self._answer("read", name, offset, size)
        version, size_bytes = next(answer)
        return ObjectRange(version, size_bytes, answer)

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        return b"".join(self.open_range(name, offset, size).pieces)

    def read_tail(self, name: str, most_bytes: int) -> tuple[int, bytes]:
        answer = self._answer("read the tail", name, -most_bytes, most_bytes)
        _, size_bytes = next(answer)
        return size_bytes, b"".join(answer)

    def read_versioned(self, name: str) -> tuple[bytes, str]:
        if not self._has_versions:
            return super().read_versioned(name)
        answer = self._answer("read", name, 0, _MOST_VERSIONED_BYTES)
        version, _ = next(answer)
        return b"".join(answer), version

    def _answer(self, operation: str, name: str, offset: int, size: int) -> Generator[Any]:
        """Yield version and size of the object, and then its bytes, with translated errors."""
        with self._translated(operation, name) as key:
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
        # Consoles make an object whose name ends with a slash to show an empty folder: the prefix itself is left out.
        return split_level(prefix, (info for info in self._infos(prefix, level=True) if info.name != prefix))

    def _infos(self, prefix: str, *, level: bool) -> list[ObjectInfo]:
        """List objects, and folders as names with a slash at the end."""
        begin = len(self.prefix)
        with self._translated("list", prefix, is_prefix=True):
            found = [
                ObjectInfo(f"{key[begin:]}/" if size < 0 else key[begin:], size, modified_at)
                for key, size, modified_at in self._list(self.prefix + prefix, level=level)
            ]
        return sorted(found, key=lambda info: info.name)

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────
    def start_parts(self, name: str) -> PartUpload | None:
        if not self.least_part_bytes:
            return None
        with self._translated("start an upload in parts", name) as key:
            upload_id, started_at = self._start(key)
        return _Parts(self, name, upload_id, started_at, {})

    def unfinished_parts(self, prefix: str) -> Sequence[PartUpload]:
        begin = len(self.prefix)
        with self._translated("list unfinished uploads", prefix, is_prefix=True):
            found = sorted(self._unfinished(self.prefix + prefix), key=lambda upload: upload[2])
        return [_Parts(self, key[begin:], upload_id, started_at, None) for key, upload_id, started_at in found]

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────
    @abstractmethod
    def _put(self, key: str, file: IO[bytes], size: int, version: str | None) -> None:
        """Make the ``size`` bytes of ``file`` the content of an object.

        ``version``: replace only this version; ``ABSENT``: only create. Otherwise raise FileExistsError. A store that
        cannot do this atomically ignores ``version``: the caller has compared it.
        """

    @abstractmethod
    def _delete(self, key: str) -> None:
        """Delete an object. A missing object is no error."""

    @abstractmethod
    def _read(self, key: str, offset: int, size: int) -> Generator[Any]:
        """Yield first (version, size of the object), then the bytes from ``offset`` on, at most ``size``, at least 1.

        A negative ``offset`` counts from the end of the object, and stands for 0 if the object is smaller.
        """

    @abstractmethod
    def _stat(self, key: str) -> tuple[str, int]:
        """Return version and size of an object."""

    @abstractmethod
    def _list(self, prefix: str, *, level: bool) -> Iterable[Entry]:
        """List the objects whose keys begin with ``prefix``.

        ``level``: folders may be listed in place of the objects whose keys have a slash after ``prefix``.
        """

    @abstractmethod
    def _meaning(self, error: Exception) -> Meaning | None:
        """Translate an error of the library; ``None``: the error is not one of the library."""

    def _headers(self, error: Exception) -> Mapping[str, str]:
        """Return the headers of the answer that caused an error, with names in lower case."""
        return {}

    def _start(self, key: str) -> tuple[str, datetime | None]:
        """Begin an upload in parts; return its id, and the time of its start where the backend tells."""
        raise NotImplementedError

    def _unfinished(self, prefix: str) -> Iterable[tuple[str, str, datetime]]:
        """List key, id and start of the unfinished uploads whose keys begin with ``prefix``."""
        return ()

    def _list_parts(self, key: str, upload_id: str) -> dict[int, Any]:
        """Return the parts that the backend has, by their numbers."""
        raise NotImplementedError

    def _recognized(self, part: Any, data: memoryview) -> Any:
        """Return ``part`` as ``_complete`` needs it if its content is ``data``; otherwise ``None``."""
        raise NotImplementedError

    def _send_part(self, key: str, upload_id: str, number: int, data: memoryview) -> Any:
        """Send a part and return it as ``_complete`` needs it."""
        raise NotImplementedError

    def _complete(self, key: str, upload_id: str, parts: Sequence[Any], version: str | None) -> None:
        """Make the object of all ``parts``, which are in order. ``version``: ``ABSENT`` or ``None``, as in ``_put``."""
        raise NotImplementedError

    def _abort(self, key: str, upload_id: str) -> None:
        """Abort an upload. An unknown upload is no error."""
        raise NotImplementedError

    # ── names and errors ─────────────────────────────────────────────────────────────────────────────────────────
    def _check_version(self, name: str, version: str) -> None:
        """Raise FileExistsError if the object has another version than ``version``."""
        if self.has_object(name) if version == ABSENT else self.read_versioned(name)[1] != version:
            raise FileExistsError

    @contextlib.contextmanager
    def _translated(self, operation: str, name: str, *, is_prefix: bool = False) -> Generator[str]:
        """Give the block the key of ``name``, and translate its errors into those that every store has."""
        key = self.prefix + name if is_prefix else self._key(name)
        try:
            yield key
        except ComposerliteError:
            raise
        except Exception as e:
            where = f"{self.get_uri(name)}: {operation}"
            if str(e).startswith(self._uri):
                raise  # translated by an inner call
            meaning = self._meaning(e) or _of_system(e)
            if meaning is None:
                raise
            kind, cause = meaning
            cause = "there is an object of this name." if kind is FileExistsError else cause
            raise _error(kind, f"{where}: {cause}", self._headers(e)) from e

    def _key(self, name: str) -> str:
        """Return the key of ``name``. ConfigError: no object can have this name."""
        return check_name(self.prefix + name)


def _error(kind: type[Exception], message: str, headers: Mapping[str, str]) -> Exception:
    """Return the error, with the time after which the service allows another attempt.

    A variable in the frame that raises the error would keep the cause and its connection alive until a collection.
    """
    error = kind(message)
    after = headers.get("retry-after", "").strip()
    if isinstance(error, ObjectStoreTransientError) and re.fullmatch(r"\d{1,6}", after):
        error.retry_after_seconds = float(after)
    return error


def _of_system(error: Exception) -> Meaning | None:
    """Translate an error of the system. A missing file of this machine does not mean that an object is missing."""
    if not isinstance(error, OSError):
        return None
    cause = error.strerror or str(error) or type(error).__name__
    if isinstance(error, ConnectionError | TimeoutError):
        return ObjectStoreTransientError, cause
    if isinstance(error, FileExistsError):
        return FileExistsError, cause
    kind = PermissionError if isinstance(error, PermissionError) else ObjectStoreError
    return kind, cause if error.filename is None else f"{cause}: {error.filename!r}, a file of this machine."


@final
class _Parts(PartUpload):
    """An upload in parts to a :class:`BackendStore`.

    Args:
        parts: parts that the store has; ``None``: the store is asked once.
    """

    def __init__(
        self,
        store: BackendStore,
        name: str,
        upload_id: str,
        started_at: datetime | None,
        parts: dict[int, Any] | None,
    ) -> None:
        super().__init__(name, upload_id, started_at)
        self._store = store
        self._parts = parts
        self._lock = threading.Lock()

    def has(self, number: int, data: memoryview) -> bool:
        with self._store._translated(f"compare part {number}", self.name) as key:
            part = self._known(key).get(number)
            found = None if part is None else self._store._recognized(part, data)
            if found is not None:
                self._known(key)[number] = found
        return found is not None

    def send(self, number: int, data: memoryview) -> None:
        with self._store._translated(f"send part {number}", self.name) as key:
            self._known(key)[number] = self._store._send_part(key, self.upload_id, number, data)

    def complete(self, *, count: int, create_only: bool = False) -> None:
        operation = "complete the upload"
        with self._store._translated(operation, self.name) as key:
            known = self._known(key)
            if missing := [number for number in range(1, count + 1) if number not in known]:
                uri = self._store.get_uri(self.name)
                raise ObjectStoreError(f"{uri}: {operation}: part {missing[0]} of {count} was not sent.")
            if create_only and self._store.has_object(self.name):  # some services ignore the condition here
                raise FileExistsError
            chosen = [known[number] for number in range(1, count + 1)]
            self._store._complete(key, self.upload_id, chosen, ABSENT if create_only else None)

    def abort(self) -> None:
        with self._store._translated("abort the upload", self.name) as key:
            self._store._abort(key, self.upload_id)

    def _known(self, key: str) -> dict[int, Any]:
        """Return the parts that the store has."""
        with self._lock:
            if self._parts is None:
                self._parts = self._store._list_parts(key, self.upload_id)
            return self._parts


# ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class RequestBody:
    """Body of a request: memory that SDKs read like a file, without a copy."""

    def __init__(self, data: memoryview) -> None:
        self._data = data.cast("B")
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[memoryview]:
        return iter(lambda: self.read(PIECE_BYTES), b"")

    def read(self, size: int = -1) -> memoryview:
        # Returns more than urllib3 asks for: urllib3 asks for 16 KiB, and sends whatever it gets.
        length = len(self._data) if size < 0 else max(size, PIECE_BYTES)
        piece = self._data[self._at : self._at + length]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        return self._at

    def tell(self) -> int:
        return self._at


def range_header(offset: int, size: int) -> str:
    """Return the value of the header ``Range`` for the arguments of ``BackendStore._read``."""
    return f"bytes={offset}" if offset < 0 else f"bytes={offset}-{offset + size - 1}"


def ranged_answer(
    version: str, headers: Mapping[str, str], pieces: Iterable[bytes], offset: int, size: int
) -> Generator[Any]:
    """Yield the items of ``BackendStore._read`` from an answer to a request with ``Range``.

    Args:
        version: version of the object.
        headers: headers of the answer. Without ``content-range`` the answer has the whole object.
        pieces: body of the answer.
        offset: as in ``_read``.
        size: as in ``_read``.
    """
    content_range = headers.get("content-range")
    total = int(headers["content-length"] if content_range is None else content_range.rpartition("/")[2])
    start = max(0, total + offset) if offset < 0 else min(offset, total)
    yield version, total
    skip, left = (start if content_range is None else 0), min(size, total - start)
    for piece in pieces:
        wanted = piece[skip : skip + left]
        skip = max(0, skip - len(piece))
        left -= len(wanted)
        if wanted:
            yield wanted
    if left:
        raise ConnectionError(f"the answer was cut short: {left} bytes are missing")


def meaning_of_answer(status: int, cause: str, body: str) -> Meaning:
    """Translate an HTTP answer. A page of HTML comes from a proxy, so it does not tell if an object exists.

    Args:
        status: status of the answer.
        cause: text for the message.
        body: body of the answer as text.
    """
    kind = meaning_of_status(status)
    if kind in (FileNotFoundError, FileExistsError) and body.lstrip().startswith("<"):
        return ObjectStoreError, f"a page of HTML came instead of an answer: check endpoint_url and proxies. {cause}"
    return kind, cause


def base64_md5(data: bytes | memoryview) -> str:
    """Return the MD5 of ``data`` in base 64."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def checked_url(service: str, endpoint_url: str | None) -> str | None:
    """Return ``endpoint_url``. ConfigError: ``endpoint_url`` is neither ``None`` nor an HTTP address."""
    if endpoint_url is not None and not re.fullmatch(r"https?://[^\s/?#]+/?", endpoint_url):
        raise ConfigError(
            f"{service}: endpoint_url={endpoint_url!r}: expected scheme and host, such as 'https://host'."
        )
    return endpoint_url


def root_cause(error: BaseException) -> str:
    """Return the text of the innermost cause: the outer errors repeat the address."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"


# ── objects that are files ───────────────────────────────────────────────────────────────────────────────────────
def files_below(entries: Callable[[str], Iterable[Entry]], prefix: str, *, level: bool) -> Iterator[Entry]:
    """List files whose keys begin with ``prefix``, in all folders; with ``level`` files and folders of one folder.

    ``entries`` lists one folder, and nothing if the folder does not exist.
    """
    folder = prefix.rpartition("/")[0]
    if folder and any(part in ("", ".", "..") for part in folder.split("/")):
        return  # no name begins like that
    folders = [folder]
    while folders:
        for entry in entries(folders.pop()):
            if level or entry.size_bytes >= 0:
                if entry.key.startswith(prefix):
                    yield entry
            elif f"{entry.key}/".startswith(prefix) or prefix.startswith(f"{entry.key}/"):
                folders.append(entry.key)
