"""BackendStore: everything that the stores do alike. A store adds its requests and the meaning of its errors."""

# pyright: reportPrivateUsage=false
# _Parts is the other half of MultipartStore: it calls its requests, which are nobody else's.

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import re
import secrets
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple, final

from composerlite.errors import ComposerliteError, ConfigError, ObjectStoreError, ObjectStoreTransientError
from composerlite.storage.disk.files import atomic_write, check_free
from composerlite.storage.object_store import (
    ObjectInfo,
    ObjectStore,
    PartUpload,
    Progress,
    check_name,
    meaning_of_status,
    split_level,
    version_of,
)
from composerlite.storage.part_uploads import FileSource, send_once

CONNECTIONS = 64
"""To a service at the same time, for as many threads."""
PIECE_BYTES = 1 << 20
"""Read or written at once."""
ABSENT = ""
"""The version of an object that does not exist."""

Meaning = tuple[type[Exception], str]
"""Type of the error that a verb raises, and what its message says of the cause."""

log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """Something that a backend lists.

    Attributes:
        key: of an object, or of a folder.
        size_bytes: of the object; -1 for a folder.
        modified_at: when the object was written, where the backend tells.
    """

    key: str
    size_bytes: int
    modified_at: datetime | None


class BackendStore(ObjectStore):
    """An object store but for its requests.

    The verbs check names, put :attr:`prefix` before them, raise the backend's errors as ours, tell callbacks, write
    downloads to a temporary file, and order listings. A derived class implements the methods with an underscore. They
    are called with a *key*: a name that was checked, with the prefix before it. They raise what their library raises;
    ``_meaning`` says what that is.

    Args:
        uri: of the bucket, with a slash at its end.
        prefix: put before every name, with a slash between.
    """

    _whole_bytes: ClassVar[int] = sys.maxsize
    """A larger file is uploaded in parts."""
    _reserved: ClassVar[re.Pattern[str]] = re.compile(r"(?!)")
    """Parts of names that are for files which are not written to their end."""
    _has_versions: ClassVar[bool] = False
    """True if the service gives each upload of an object a version, and can replace an object only in that version."""

    def __init__(self, uri: str, prefix: str = "") -> None:
        self.prefix = f"{check_name(prefix.strip('/'))}/" if prefix.strip("/") else ""
        self._uri = uri

    def get_uri(self, name: str) -> str:
        return f"{self._uri}{self.prefix}{name}"

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def upload_object(
        self, name: str, filename: str | Path, callback: Progress | None = None, *, create_only: bool = False
    ) -> None:
        key = self._key(name)
        with FileSource(filename, callback) as source:
            size = source.size_bytes
            if size > self._whole_bytes:
                send_once(self, name, source, callback, create_only=create_only)
                return
            with self._translated("upload", name):
                version = ABSENT if create_only else None
                self._compare(key, version)
                self._upload(key, source, version)
        if callback is not None:
            callback(size, size)

    def put_bytes(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        self._put_over("create" if create_only else "write", name, data, ABSENT if create_only else None)

    def swap_bytes(self, name: str, data: bytes, version: str) -> None:
        try:
            self._put_over("swap", name, data, version)
        except (FileExistsError, FileNotFoundError) as e:
            raise self._not_swapped(name, version) from e

    def _put_over(self, operation: str, name: str, data: bytes, version: str | None) -> None:
        key = self._key(name)
        with self._translated(operation, name):
            self._compare(key, version)
            self._put(key, memoryview(data), version)

    def _compare(self, key: str, version: str | None) -> None:
        """Check the version of an object before it is replaced, in a store that does not do so as it replaces it."""
        if not (version is None or (self.creates_atomically if version == ABSENT else self.swaps_atomically)):
            self._check_version(key, version)

    @property
    def swaps_atomically(self) -> bool:
        return self._has_versions and self.creates_atomically

    def delete_object(self, name: str) -> None:
        key = self._key(name)
        with self._translated("delete", name):
            self._delete(key)

    def check_writable(self, prefix: str) -> None:
        what = "check that objects can be written"
        with self._translated(what, prefix):
            inside = not prefix or prefix.endswith("/") or self._is_folder(self.prefix + prefix)
        folder = f"{prefix.rstrip('/')}/".lstrip("/") if inside else f"{prefix}."
        name = f"{folder}check-{secrets.token_hex(8)}"
        key = self._key(name)
        with self._translated(what, name):
            self._check_writable(key)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def download_object(
        self, name: str, filename: str | Path, overwrite: bool = False, callback: Progress | None = None
    ) -> None:
        key = self._key(name)
        check_free(Path(filename), overwrite)
        total = 0 if callback is None else self.get_object_size(name)
        with atomic_write(Path(filename)) as file:
            told = WritesTold(file, total, callback)
            self._download(name, key, told)
        if callback is not None:
            callback(told.done, told.done)

    def _download(self, name: str, key: str, file: WritesTold) -> None:
        """Write the whole object to ``file``, whose errors are not those of the store."""
        with contextlib.closing(self._pieces("download", name, key, 0, None)) as pieces:
            for piece in pieces:
                file.write(piece)

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        return b"".join(self.read_pieces(name, offset, size))

    def read_tail(self, name: str, most_bytes: int) -> tuple[int, bytes]:
        key = self._key(name)
        with self._translated("read the tail", name):
            found = self._tail(key, most_bytes) if most_bytes > 0 else None
        return super().read_tail(name, most_bytes) if found is None else found

    def read_versioned(self, name: str) -> tuple[bytes, str]:
        key = self._key(name)
        with self._translated("read", name):
            return self._versioned(key)

    def _versioned(self, key: str) -> tuple[bytes, str]:
        versions: list[str] = []
        data = b"".join(self._read(key, 0, None, versions.append))
        return data, versions[0] if self._has_versions else version_of(data)

    def read_pieces(
        self, name: str, offset: int, size: int, *, version: Callable[[str], object] = str
    ) -> Generator[bytes]:
        yield from self._pieces("read", name, self._key(name), offset, size, version)

    def _pieces(
        self,
        operation: str,
        name: str,
        key: str,
        offset: int,
        size: int | None,
        version: Callable[[str], object] = str,
    ) -> Generator[bytes]:
        with self._translated(operation, name):
            if size == 0:
                self._size(key)  # an object that is missing is missing
            else:
                yield from self._read(key, offset, size, version)

    def get_object_size(self, name: str) -> int:
        key = self._key(name)
        with self._translated("get the size", name):
            return self._size(key)

    def list_objects(self, prefix: str = "") -> Sequence[ObjectInfo]:
        begin = len(self.prefix)
        with self._translated("list", prefix):
            return [
                ObjectInfo(key[begin:], size, modified_at)
                for key, size, modified_at in self._list(self.prefix + prefix)
                # Consoles make an object whose name ends with a slash to show an empty folder.
                if not key.endswith("/")
            ]

    def list_level(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        begin, start = len(self.prefix), self.prefix + prefix
        with self._translated("list", prefix):
            found = [
                ObjectInfo(f"{key[begin:]}/" if size < 0 else key[begin:], size, modified_at)
                for key, size, modified_at in self._list(start, level=True)
                if key != start or not key.endswith("/")  # the object that a console makes to show an empty folder
            ]
        return split_level(prefix, found)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _upload(self, key: str, source: FileSource, version: str | None) -> None:
        """Make a file, of up to ``_whole_bytes``, the content of an object. ``version``: as in :meth:`_put`."""
        data = memoryview(bytearray(source.size_bytes))
        source.read_into(data, 0)
        self._put(key, data, version)

    @abstractmethod
    def _put(self, key: str, data: memoryview, version: str | None = None) -> None:
        """Make ``data`` the content of an object.

        ``version``: replace only this version, ``ABSENT``: only create, else FileExistsError. A store that cannot do
        this atomically ignores ``version``, which the caller has compared.
        """

    @abstractmethod
    def _delete(self, key: str) -> None:
        """Remove an object. That there is none is fine."""

    @abstractmethod
    def _check_writable(self, key: str) -> None:
        """See that this object, which there is not, could be written; leave nothing, nor what died beside it."""

    def _is_folder(self, key: str) -> bool:
        """Return true if objects whose keys begin with ``key`` and a slash can be, without anything that is made."""
        return True

    @abstractmethod
    def _read(self, key: str, offset: int, size: int | None, version: Callable[[str], object]) -> Generator[bytes]:
        """Yield the bytes from ``offset`` on, at most ``size``, which is not 0; all where it is ``None``, verified.

        ``version`` is called as :meth:`read_pieces` says.
        """

    def _tail(self, key: str, most_bytes: int) -> tuple[int, bytes] | None:
        """Size and last bytes of an object by one request; ``None``: ask for the size, then for a range."""
        return None

    @abstractmethod
    def _size(self, key: str) -> int:
        """Bytes of an object."""

    @abstractmethod
    def _list(self, prefix: str, *, level: bool = False) -> Iterable[Entry]:
        """Objects whose keys begin with ``prefix``.

        ``level``: a folder may be listed in place of the objects whose keys have a slash after ``prefix``.
        """

    @abstractmethod
    def _meaning(self, error: Exception) -> Meaning | None:
        """Meaning of an error of the library; ``None``: it is not one of its own."""

    def _headers(self, error: Exception) -> Mapping[str, str]:
        """Headers of the answer that is an error of the library, in lower case; none where it is something else."""
        return {}

    # ── names and errors ─────────────────────────────────────────────────────────────────────────────────────────
    def _key(self, name: str) -> str:
        """Return the key of ``name``. ConfigError: it can be no object's."""
        key = check_name(self.prefix + name)
        for part in key.split("/"):
            if self._reserved.fullmatch(part):
                raise ConfigError(f"object name {name!r}: {part!r} is a name for what is not written to its end yet.")
        return key

    def _check_version(self, key: str, version: str) -> None:
        """Raise FileExistsError if the object ``key`` has another version, or, for ``ABSENT``, if there is one."""
        if version != ABSENT:
            if self._versioned(key)[1] != version:
                raise FileExistsError
            return
        try:
            self._size(key)
        except Exception as e:
            meaning = self._meaning(e) or _of_system(e)
            if meaning is None or meaning[0] is not FileNotFoundError:
                raise
        else:
            raise FileExistsError

    @contextlib.contextmanager
    def _translated(self, operation: str, name: str) -> Generator[None]:
        """Raise the errors of the library, of the system and of the network as those that every store has."""
        try:
            yield
        except ComposerliteError:
            raise
        except Exception as e:
            meaning = self._meaning(e) or _of_system(e)
            if meaning is None:
                raise
            kind, said = meaning
            said = "there is an object of this name." if kind is FileExistsError else said
            raise _error(kind, f"{self.get_uri(name)}: {operation}: {said}", self._headers(e)) from e


def _error(kind: type[Exception], said: str, headers: Mapping[str, str]) -> Exception:
    """Make the error, with the time after which the service says to try again; a date is of another clock.

    It is no variable of the frame that raises it: its cause, and the connection of that, would stay until a collection.
    """
    error = kind(said)
    after = headers.get("retry-after", "").strip()
    if isinstance(error, ObjectStoreTransientError) and re.fullmatch(r"\d{1,6}", after):
        error.retry_after_seconds = float(after)
    return error


def _of_system(error: Exception) -> Meaning | None:
    """Meaning of an error of the system.

    It is never that there is no object: a file of this machine may be missing, as one with credentials. Stores whose
    objects are files say themselves what their errors mean.
    """
    if not isinstance(error, OSError):
        return None
    said = error.strerror or str(error) or type(error).__name__
    if isinstance(error, ConnectionError | TimeoutError):
        return ObjectStoreTransientError, said
    if error.filename is not None:
        kind = PermissionError if isinstance(error, PermissionError) else ObjectStoreError
        return kind, f"{said}: {error.filename!r}, a file of this machine."
    if isinstance(error, FileNotFoundError):
        return ObjectStoreError, said
    for kind in (FileExistsError, PermissionError):
        if isinstance(error, kind):
            return kind, said
    return None


def meaning_of_answer(status: int, said: str, body: str) -> Meaning:
    """Meaning of an answer of HTTP. What is missing, or there, only the service knows: a proxy answers with a page.

    Args:
        status: of the answer.
        said: what the message tells of it.
        body: of it, as text.
    """
    kind = meaning_of_status(status)
    if kind in (FileNotFoundError, FileExistsError) and body.lstrip().startswith("<"):
        return ObjectStoreError, f"a page of HTML came, which is not the service's: check endpoint_url, proxies. {said}"
    return kind, said


class MultipartStore(BackendStore):
    """A store whose backend takes objects in parts.

    How the backend calls a part that it has, and knows it again, is the derived class's own business: ``Any``.
    """

    def start_parts(self, name: str) -> PartUpload:
        return self._start_parts("start an upload in parts", name)

    def _start_parts(self, operation: str, name: str) -> _Parts:
        key = self._key(name)
        with self._translated(operation, name):
            upload_id, started_at = self._start(key)
        return _Parts(self, name, key, upload_id, started_at, {})

    def unfinished_parts(self, prefix: str) -> Sequence[PartUpload]:
        begin = len(self.prefix)
        with self._translated("list unfinished uploads", prefix):
            found = sorted(self._unfinished(self.prefix + prefix), key=lambda upload: upload[2])
        return [_Parts(self, key[begin:], key, upload_id, started_at, None) for key, upload_id, started_at in found]

    def _check_writable(self, key: str) -> None:
        upload_id, _ = self._start(key)
        try:
            self._abort(key, upload_id)
        except Exception as e:
            meaning = self._meaning(e)
            if meaning is None or meaning[0] is not PermissionError:
                raise
            # Writing works. What killed uploads leave stays until the bucket's own rules remove it.
            log.warning("%s%s: abort the upload: %s", self._uri, key, meaning[1])

    @abstractmethod
    def _start(self, key: str) -> tuple[str, datetime | None]:
        """Begin to send an object in parts; the id of the upload, and when it was started, where the backend tells."""

    @abstractmethod
    def _unfinished(self, prefix: str) -> Iterable[tuple[str, str, datetime]]:
        """Key, id and start of the uploads whose keys begin with ``prefix``."""

    @abstractmethod
    def _list_parts(self, key: str, upload_id: str) -> dict[int, Any]:
        """Return the parts that the backend has, by their numbers."""

    @abstractmethod
    def _recognized(self, part: Any, data: memoryview) -> Any:
        """Return ``part`` as completing needs it, if it consists of ``data``; else ``None``."""

    @abstractmethod
    def _send_part(self, key: str, upload_id: str, number: int, data: memoryview) -> Any:
        """Send a part; what the backend calls it."""

    @abstractmethod
    def _complete(self, key: str, upload_id: str, parts: Sequence[Any], *, create_only: bool) -> None:
        """Make the object of ``parts``, which are all, in order. ``create_only``: as ``ABSENT`` in :meth:`_put`."""

    @abstractmethod
    def _abort(self, key: str, upload_id: str) -> None:
        """Abort an upload in the backend. An unknown upload is no error."""


@final
class _Parts(PartUpload):
    """An upload in parts to a :class:`MultipartStore`.

    Args:
        parts: that the store has; ``None``: it is asked for them once, when they are needed.
    """

    def __init__(
        self,
        store: MultipartStore,
        name: str,
        key: str,
        upload_id: str,
        started_at: datetime | None,
        parts: dict[int, Any] | None,
    ) -> None:
        super().__init__(name, upload_id, started_at)
        self._store = store
        self._key = key
        self._parts = parts
        self._lock = threading.Lock()

    def has(self, number: int, data: memoryview) -> bool:
        part = self._known().get(number)
        if part is None:
            return False
        with self._translated(f"compare part {number}"):
            found = self._store._recognized(part, data)
        if found is not None:
            self._known()[number] = found
        return found is not None

    def send(self, number: int, data: memoryview) -> None:
        with self._translated(f"send part {number}"):
            part = self._store._send_part(self._key, self.upload_id, number, data)
        self._known()[number] = part

    def complete(self, *, count: int, create_only: bool = False) -> None:
        known = self._known()
        with self._translated("complete the upload"):
            if missing := [number for number in range(1, count + 1) if number not in known]:
                uri = self._store.get_uri(self.name)
                raise ObjectStoreError(f"{uri}: complete the upload: part {missing[0]} of {count} was not sent.")
            if create_only:  # some services compare where they put an object, and not where they complete an upload
                self._store._check_version(self._key, ABSENT)
            chosen = [known[number] for number in range(1, count + 1)]
            self._store._complete(self._key, self.upload_id, chosen, create_only=create_only)
        self._parts = None

    def abort(self) -> None:
        with self._translated("abort the upload"):
            self._store._abort(self._key, self.upload_id)
        self._parts = None

    def _known(self) -> dict[int, Any]:
        """Return the parts that the store has: what it says, once, and what was sent from here since."""
        with self._lock:
            if self._parts is None:
                with self._translated("list parts"):
                    self._parts = self._store._list_parts(self._key, self.upload_id)
            return self._parts

    def _translated(self, operation: str) -> contextlib.AbstractContextManager[None]:
        return self._store._translated(operation, self.name)


# ── what libraries read and write ────────────────────────────────────────────────────────────────────────────────
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
        # More than is asked for: urllib3 asks for 16 KiB, and sends whatever it gets.
        length = len(self._data) if size < 0 else max(size, PIECE_BYTES)
        piece = self._data[self._at : self._at + length]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at


@final
class WritesTold:
    """A file that tells how much of it was written."""

    def __init__(self, file: IO[bytes], size: int, callback: Progress | None) -> None:
        self.done = 0
        self._file = file
        self._size = size
        self._callback = callback

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.done += len(data)
        if self._callback is not None and self.done < self._size:
            self._callback(self.done, self._size)


def tail_of(
    content_range: str | None, content_length: int, pieces: Iterable[bytes], most_bytes: int
) -> tuple[int, bytes]:
    """Size and last bytes of an object, from the answer of HTTP to a request for its last ``most_bytes`` bytes.

    Args:
        content_range: header of the answer, such as ``bytes 5-9/10``; ``None``: the answer is the whole object.
        content_length: of the answer.
        pieces: body of the answer.
        most_bytes: number of bytes that were asked for.

    Returns:
        Size of the whole object, and its last ``min(size, most_bytes)`` bytes.
    """
    size = content_length if content_range is None else int(content_range.rpartition("/")[2])
    tail = b""
    for piece in pieces:
        tail = (tail + piece)[-most_bytes:]
    if len(tail) != min(size, most_bytes):
        raise ConnectionError(f"the answer was cut short: {len(tail)} of {min(size, most_bytes)} bytes came")
    return size, tail


# ── objects that are files ───────────────────────────────────────────────────────────────────────────────────────
def files_below(entries: Callable[[str], Iterable[Entry]], prefix: str, *, level: bool = False) -> Iterator[Entry]:
    """Files whose keys begin with ``prefix``, in all folders; with ``level`` the files and folders of one folder.

    ``entries`` lists one folder: nothing where there is none.
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


# ── small things ─────────────────────────────────────────────────────────────────────────────────────────────────
def base64_md5(data: bytes | memoryview) -> str:
    """MD5 of ``data``, as services want and tell it."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def checked_url(service: str, endpoint_url: str | None) -> str | None:
    """Return ``endpoint_url`` if it is none or an address. ConfigError: it is something else."""
    if endpoint_url is not None and not re.fullmatch(r"https?://[^\s/?#]+/?", endpoint_url):
        raise ConfigError(
            f"{service}: endpoint_url={endpoint_url!r}: expected scheme and host, such as 'https://host'."
        )
    return endpoint_url


def root_cause(error: BaseException) -> str:
    """Text of the error that was first: those around it repeat the address."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"
