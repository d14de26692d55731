"""ObjectStore: the interface of every store of objects, from a bucket to a folder."""

from __future__ import annotations

import hashlib
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Self, final

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError
from composerlite.types import Closing

_MOST_VERSIONED_BYTES = 64 << 20

Progress = Callable[[int, int], object]
"""Called with (bytes moved, total)."""


@final
@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object in a listing.

    Attributes:
        name: name of the object, as given to the methods of the store.
        size_bytes: size of the content.
        modified_at: time of the upload by the clock of the store, in UTC; ``None`` if the store does not say.
    """

    name: str
    size_bytes: int
    modified_at: datetime | None = field(default=None, compare=False)


@final
@dataclass(frozen=True, slots=True)
class ObjectRange:
    """A part of an object in a running download.

    Attributes:
        version: version of the object, such as an ETag. If :attr:`ObjectStore.has_versions`, uploads with
            different content have different versions; otherwise the version may be empty, or the same for both.
        size_bytes: size of the whole object.
        pieces: yields the bytes in order. Raises the errors of :class:`ObjectStore`. Close the generator to end
            the request early.
    """

    version: str
    size_bytes: int
    pieces: Generator[bytes]

    def read(self) -> bytes:
        """Return all bytes of the range."""
        return b"".join(self.pieces)


class PartUpload(ABC):
    """An object that is sent in parts. Readers do not see the object before :meth:`complete`.

    Parts have numbers from 1. All parts have one size, only the last part may be smaller. Threads may send parts at
    the same time.

    Attributes:
        name: name of the object.
        upload_id: identifier that the store gave to the upload.
        started_at: start of the upload in UTC; ``None`` if the store does not say.
    """

    def __init__(self, name: str, upload_id: str, started_at: datetime | None = None) -> None:
        self.name = name
        self.upload_id = upload_id
        self.started_at = started_at

    @abstractmethod
    def send(self, number: int, data: bytes | memoryview) -> None:
        """Send a part, in place of an earlier part of the same number.

        Nothing is sent if the store has the part with the same bytes, from this process or an earlier one.

        Args:
            number: number of the part.
            data: content of the part.

        Raises:
            PermissionError, ObjectStoreTransientError, ObjectStoreError: as the methods of :class:`ObjectStore`.
        """

    @abstractmethod
    def complete(self, *, count: int, create_only: bool = False) -> None:
        """Create the object from the parts 1 to ``count``.

        Args:
            count: number of parts.
            create_only: fail with FileExistsError if the object exists.

        Raises:
            FileNotFoundError: the store does not know the upload.
        """

    @abstractmethod
    def abort(self) -> None:
        """Delete the parts. An upload that the store does not know is no error."""


class ObjectStore(Closing):
    """Interface of a store of objects, each with a name and bytes. Names look like paths: ``run/ep1.pt``.

    Do not use both ``a`` and ``a/b`` as names: stores of files cannot keep both and raise ObjectStoreError.

    An object appears atomically: a reader gets the bytes of a single upload. Threads may share a store. Methods do not
    retry: :class:`~composerlite.storage.Transfer` does.

    A subclass needs four methods: upload, download, size and listing. The defaults of the other methods use those
    four, except :meth:`delete_object`, which raises ObjectStoreError.

    Every method raises errors that name the object, the operation and the cause:

    - FileNotFoundError: the object or the bucket does not exist.
    - PermissionError: the credentials are missing, wrong or expired, or do not allow the operation.
    - ObjectStoreTransientError: the operation may succeed when it is tried again.
    - ObjectStoreError: any other cause.
    - ConfigError: the name is not allowed (see :func:`check_name`).

    Attributes:
        least_part_bytes: smallest size of a part, except for the last one; 0 if the store takes no parts.
        most_parts: largest number of parts of an upload.
        reads_ranges: the store can read a range without a download of the whole object.
        has_versions: uploads of an object with different content get different versions, as in :class:`ObjectRange`.
        creates_atomically: ``create_only`` lets exactly one of several processes succeed.
        swaps_atomically: :meth:`swap_bytes` lets exactly one of several processes replace a version.
    """

    least_part_bytes: int = 0
    most_parts: int = 10_000
    reads_ranges: bool = False
    has_versions: bool = False
    creates_atomically: bool = False
    swaps_atomically: bool = False

    @abstractmethod
    def upload_object(
        self, name: str, filename: str | Path, callback: Progress | None = None, *, create_only: bool = False
    ) -> None:
        """Make the file ``filename`` the content of the object ``name``, in place of the old content.

        Args:
            name: name of the object.
            filename: local file.
            callback: called with (bytes sent, total).
            create_only: raise FileExistsError if the object exists. A subclass with false ``creates_atomically`` may
                leave this argument out.
        """

    @abstractmethod
    def download_object(
        self, name: str, filename: str | Path, overwrite: bool = False, callback: Progress | None = None
    ) -> None:
        """Write the content of the object ``name`` to the file ``filename`` in an existing folder.

        Args:
            name: name of the object.
            filename: local file to write. The file appears atomically.
            overwrite: replace a local file.
            callback: called with (bytes received, total).

        Raises:
            FileExistsError: the local file exists and ``overwrite`` is false.
        """

    @abstractmethod
    def get_object_size(self, name: str) -> int:
        """Return the size of the object ``name`` in bytes."""

    @abstractmethod
    def list_objects(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """List the objects with names beginning with ``prefix``, sorted by name.

        The list is empty if no object matches. A subclass may return names instead, as stores of Composer do.

        Args:
            prefix: beginning of the names; empty for all.

        Returns:
            Name, size and time of each object.

        Raises:
            FileNotFoundError: the bucket does not exist.
        """

    def list_infos(self, prefix: str = "") -> list[ObjectInfo]:
        """Return the result of :meth:`list_objects` sorted by name, also if a subclass returns names there."""
        infos = [
            one if isinstance(one, ObjectInfo) else ObjectInfo(one, self.get_object_size(one))  # pyright: ignore[reportUnnecessaryIsInstance]
            for one in self.list_objects(prefix)
        ]
        return sorted(infos, key=lambda info: info.name)

    def get_uri(self, name: str) -> str:
        """Return the URI of the object ``name``, which need not exist."""
        return f"{type(self).__name__}://{name}"

    def put_bytes(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        """Make ``data`` the content of the object ``name``, in place of the old content.

        Args:
            name: name of the object.
            data: new content.
            create_only: raise FileExistsError if the object exists. Exactly one of several concurrent calls succeeds
                if :attr:`creates_atomically`; otherwise the store checks first and then writes.
        """
        if create_only and self.has_object(name):
            raise FileExistsError(f"{self.get_uri(name)}: create: an object with this name exists.")
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
            file = Path(folder) / "object"
            file.write_bytes(data)
            self.upload_object(name, file)

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        """Return ``size`` bytes of the object from ``offset`` on, or fewer if the object ends before.

        Args:
            name: name of the object.
            offset: in bytes.
            size: in bytes.

        Returns:
            The bytes.
        """
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
            file = Path(folder) / "object"
            self.download_object(name, file)
            with file.open("rb") as content:
                content.seek(offset)
                return content.read(size)

    def open_range(self, name: str, offset: int, size: int) -> ObjectRange:
        """Begin to read ``size`` bytes of the object from ``offset`` on, or fewer if the object ends before.

        Args:
            name: name of the object.
            offset: in bytes. A negative offset counts from the end, and stands for 0 if the object is smaller.
            size: in bytes.

        Returns:
            The version and size of the object, and an iterator of the bytes.
        """
        size_bytes = self.get_object_size(name)
        start, end = span_of(offset, size, size_bytes)
        data = self.read_range(name, start, end - start)
        if len(data) != end - start:
            raise ObjectStoreTransientError(f"{self.get_uri(name)}: read: got {len(data)} of {end - start} bytes.")
        return ObjectRange("", size_bytes, (piece for piece in [data]))

    def read_tail(self, name: str, most_bytes: int) -> tuple[int, bytes]:
        """Return the size of the object ``name`` and the last bytes, in one request if the store can do so.

        Args:
            name: name of the object.
            most_bytes: number of bytes, at least 1. A smaller object is returned whole.

        Returns:
            Size of the whole object in bytes, and the last ``min(size, most_bytes)`` bytes.
        """
        found = self.open_range(name, -most_bytes, most_bytes)
        return found.size_bytes, found.read()

    def read_versioned(self, name: str) -> tuple[bytes, str]:
        """Return the content of the small object ``name``, and the version for :meth:`swap_bytes`.

        Args:
            name: name of the object, of up to 64 MiB.

        Returns:
            All bytes, and the version. Some stores derive the version from the content alone, so never write the same
            content twice to an object for :meth:`swap_bytes`.
        """
        found = self.open_range(name, 0, _MOST_VERSIONED_BYTES)
        data = found.read()
        return data, found.version if self.has_versions else hashlib.sha256(data).hexdigest()

    def swap_bytes(self, name: str, data: bytes, version: str) -> None:
        """Replace the content of the object ``name`` by ``data`` if the object still has ``version``.

        Exactly one of several concurrent swaps of a version succeeds if :attr:`swaps_atomically`. Otherwise the store
        reads, compares and writes, and two swaps may both succeed.

        Args:
            name: name of the object.
            data: new content.
            version: as returned by :meth:`read_versioned`.

        Raises:
            FileExistsError: the object has another version or was deleted. The object is unchanged.
        """
        try:
            is_same = self.read_versioned(name)[1] == version
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise FileExistsError(f"{self.get_uri(name)}: swap: the object has another version than {version!r}.")
        self.put_bytes(name, data)

    def list_level(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """List the objects and folders directly below ``prefix``: one level of the tree that slashes in names make.

        Args:
            prefix: beginning of the names, usually a folder with its slash, such as ``run/``; empty for the top level.

        Returns:
            The objects whose names have no slash after ``prefix``, and the names up to and including the next slash of
            all other objects, such as ``run/ep1/``. Both are sorted. A store of files also lists empty folders.
        """
        return split_level(prefix, self.list_infos(prefix))

    def delete_object(self, name: str) -> None:
        """Delete the object ``name``. A missing object is no error."""
        raise ObjectStoreError(
            f"{self.get_uri(name)}: delete: {type(self).__name__} has no delete_object. Add one to the class."
        )

    def check_writable(self, prefix: str) -> None:
        """Write a trial object with a name beginning with ``prefix``, and raise the error if the write fails.

        Called before training starts. This default writes an empty object ``<prefix>.writable``, which stays.
        """
        self.put_bytes(f"{prefix}.writable", b"")

    def has_object(self, name: str) -> bool:
        """Return true if the object ``name`` exists."""
        try:
            self.get_object_size(name)
        except FileNotFoundError:
            return False
        return True

    def close(self) -> None:
        """Close connections. May be called twice."""

    @classmethod
    def at(cls, bucket: str, **backend_kwargs: Any) -> Self:
        """Open the store of ``bucket``, the part of a URI between the scheme and the next slash.

        Args:
            bucket: name of the bucket.
            **backend_kwargs: arguments of the constructor.

        Returns:
            The store.

        Raises:
            ConfigError: the library is not installed (the message names the extra), or an argument is wrong.
        """
        return cls(bucket, **backend_kwargs)  # pyright: ignore[reportCallIssue] - each store has its own arguments

    def start_parts(self, name: str) -> PartUpload | None:
        """Begin to send an object in parts. Return ``None`` if the store takes no parts."""
        return None

    def unfinished_parts(self, prefix: str) -> Sequence[PartUpload]:
        """Return the unfinished uploads of objects with names beginning with ``prefix``, oldest first."""
        return ()


def split_level(prefix: str, found: Iterable[ObjectInfo]) -> tuple[list[ObjectInfo], list[str]]:
    """Return the objects directly below ``prefix`` and the folders of the other objects, both sorted."""
    objects: list[ObjectInfo] = []
    folders: set[str] = set()
    for info in found:
        child, slash, _ = info.name[len(prefix) :].partition("/")
        if slash:
            folders.add(f"{prefix}{child}/")
        else:
            objects.append(info)
    return sorted(objects, key=lambda info: info.name), sorted(folders)


def span_of(offset: int, size: int, size_bytes: int) -> tuple[int, int]:
    """Return start and end, exclusive, of a range of an object of ``size_bytes``, cut at the end of the object.

    ``offset`` and ``size`` are as in :meth:`ObjectStore.open_range`.
    """
    start = max(0, size_bytes + offset) if offset < 0 else min(offset, size_bytes)
    return start, min(start + size, size_bytes)


def check_name(name: str) -> str:
    """Return ``name`` if an object can have this name.

    Raises:
        ConfigError: the name is empty, begins or ends with a slash, has an empty part, ``.`` or ``..`` between slashes,
            is not UTF-8, or is longer than the 1024 bytes that stores take.
    """
    if not is_name(name):
        raise ConfigError(
            f"object name {name[:100]!r}: expected up to 1024 bytes of UTF-8, where no part between slashes is empty, "
            "'.' or '..', such as 'run/ep1.pt'."
        )
    return name


def is_name(name: str) -> bool:
    """Return true if an object can have the name ``name``: see :func:`check_name`."""
    is_text = re.search("[\0\ud800-\udfff]", name) is None
    return is_text and len(name.encode()) <= 1024 and not {"", ".", ".."} & set(name.split("/"))


def meaning_of_status(status: int) -> type[Exception]:
    """Return the type of error for an HTTP answer with this status."""
    if status in (404, 410):
        return FileNotFoundError
    if status == 412:
        return FileExistsError
    if status in (401, 403, 407):
        return PermissionError
    if status in (408, 425, 429) or (status >= 500 and status != 501):
        return ObjectStoreTransientError
    return ObjectStoreError
