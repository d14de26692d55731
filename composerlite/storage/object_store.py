"""ObjectStore: what every place that keeps objects by name can do, from a bucket to a folder."""

from __future__ import annotations

import functools
import hashlib
import inspect
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError

_PIECE_BYTES = 8 << 20

Progress = Callable[[int, int], object]
"""Called with (bytes moved, total)."""


@final
@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object in a listing.

    Attributes:
        name: as the verbs take it.
        size_bytes: of its content.
        modified_at: when it was put there, by the clock of the store, if that tells; in UTC.
    """

    name: str
    size_bytes: int
    modified_at: datetime | None = field(default=None, compare=False)


class PartUpload(ABC):
    """An object that is sent in parts and that nobody sees before :meth:`complete`.

    Parts are numbered from 1, all of one size but the last, which may be smaller. Several threads may send at once.

    Attributes:
        name: of the object to come.
        upload_id: how the store calls it.
        started_at: when it was started, if the store tells; in UTC.
    """

    def __init__(self, name: str, upload_id: str, started_at: datetime | None = None) -> None:
        self.name = name
        self.upload_id = upload_id
        self.started_at = started_at

    @abstractmethod
    def has(self, number: int, data: memoryview) -> bool:
        """True if the store has part ``number`` with exactly these bytes, sent by this process or an earlier one.

        Args:
            number: of the part, from 0.
            data: its content.

        Returns:
            True if the store has it.
        """

    @abstractmethod
    def send(self, number: int, data: memoryview) -> None:
        """Send part ``number``; it replaces one of the same number.

        Args:
            number: of the part, from 0.
            data: its content.

        Raises:
            PermissionError: not allowed.
            ObjectStoreTransientError: it may succeed when it is tried again.
            ObjectStoreError: it will not.
        """

    @abstractmethod
    def complete(self, *, count: int, create_only: bool = False) -> None:
        """Make the object exist, of the parts 1 to ``count``, in place of what had its name.

        Args:
            count: of the parts.
            create_only: fail with FileExistsError if something has its name, as :meth:`ObjectStore.put_bytes`.

        Raises:
            FileNotFoundError: the store has forgotten the upload. Other errors are those of :meth:`send`.
        """

    @abstractmethod
    def abort(self) -> None:
        """Abort the upload and delete its parts. An upload that is gone is no error."""


class ObjectStore(ABC):
    """Keeps objects, each a name and its bytes. Names look like paths: ``run/ep1.pt``. Do not use both ``a`` and
    ``a/b``: stores of files cannot keep both, and refuse the second (ObjectStoreError).

    An object appears atomically: a reader gets the bytes of one single upload. Several threads
    may use one store at the same time. No verb tries again what failed: :class:`~composerlite.storage.Transfer` does.

    A store of one's own has four verbs at least: upload, download, the size of an object and the listing. The others
    follow from those, as well as they can. That several ranges are of one single upload follows only where
    :meth:`read_pieces` tells versions.

    Every verb raises, with a message that names the object, the operation and the cause:

    - FileNotFoundError: there is no such object, or no such bucket;
    - PermissionError: the credentials are missing, wrong, expired, or do not allow it: never "not found";
    - ObjectStoreTransientError: it may succeed when it is tried again;
    - ObjectStoreError: anything else;
    - ConfigError: ``name`` is none (see :func:`check_name`).
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        listing = cls.__dict__.get("list_objects")
        if listing is not None:
            cls.list_objects = _listing_of_names(listing)  # pyright: ignore[reportAttributeAccessIssue]
        uploading = cls.__dict__.get("upload_object")
        if uploading is not None and "create_only" not in inspect.signature(uploading).parameters:
            cls.upload_object = _uploading_with_a_look(uploading)  # pyright: ignore[reportAttributeAccessIssue]
        reading = cls.__dict__.get("read_pieces")
        if reading is not None and "version" not in inspect.signature(reading).parameters:
            cls.read_pieces = _reading_of_any_version(reading)  # pyright: ignore[reportAttributeAccessIssue]

    @abstractmethod
    def upload_object(
        self, name: str, filename: str | Path, callback: Progress | None = None, *, create_only: bool = False
    ) -> None:
        """Make the file ``filename`` the content of the object ``name``, in place of what is there.

        A subclass may leave ``create_only`` out, as stores of Composer do.

        Args:
            name: of the object.
            filename: local file.
            callback: called with (bytes sent, total).
            create_only: fail if the object exists, as in :meth:`put_bytes`.
        """

    @abstractmethod
    def download_object(
        self, name: str, filename: str | Path, overwrite: bool = False, callback: Progress | None = None
    ) -> None:
        """Make the content of the object ``name`` the file ``filename``, whose folder exists.

        The file appears atomically. FileExistsError: it is there already and ``overwrite`` is false.

        Args:
            name: of the object.
            filename: local file to write.
            overwrite: replace a local file.
            callback: called with (bytes received, total).
        """

    @abstractmethod
    def get_object_size(self, name: str) -> int:
        """Bytes of the object ``name``."""

    @abstractmethod
    def list_objects(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """List the objects whose names begin with ``prefix``, sorted by name.

        An empty sequence where there are none, a missing bucket is FileNotFoundError. A subclass may return the names
        alone, as stores of Composer do.

        Args:
            prefix: beginning of the names; empty for all.

        Returns:
            Name, size and time of each object.
        """

    # ── what follows from those four, where a store knows no better way ──────────────────────────────────────────
    def get_uri(self, name: str) -> str:
        """The URI of the object ``name``, whether it exists or not."""
        return f"{type(self).__name__}://{name}"

    def put_bytes(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        """Make ``data`` the content of the object ``name``, in place of what is there.

        With ``create_only`` only if there is nothing, else FileExistsError. Of several processes that try at once
        exactly one succeeds, if :attr:`creates_atomically`; where it is not, it is a check followed by a write.

        Args:
            name: of the object.
            data: its content.
            create_only: fail if the object exists.
        """
        with tempfile.TemporaryDirectory(prefix="composerlite-") as folder:
            file = Path(folder) / "object"
            file.write_bytes(data)
            self.upload_object(name, file, create_only=create_only)

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        """The bytes from ``offset`` on, ``size`` of them, fewer only where the object ends before.

        Args:
            name: of the object.
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

    def read_tail(self, name: str, most_bytes: int) -> tuple[int, bytes]:
        """Size of the object ``name``, and its last bytes, in one request where the store has a verb for that.

        Args:
            name: of the object.
            most_bytes: number of bytes, at least 1; a smaller object is returned whole.

        Returns:
            Size of the whole object in bytes, and the last ``min(size, most_bytes)`` bytes.
        """
        if most_bytes < 1:
            raise ConfigError(f"{self.get_uri(name)}: read the tail: most_bytes={most_bytes}: expected 1 or more.")
        size = self.get_object_size(name)
        length = min(size, most_bytes)
        tail = self.read_range(name, size - length, length) if size else b""
        if len(tail) != length:
            raise ObjectStoreTransientError(
                f"{self.get_uri(name)}: read the tail: {len(tail)} of {length} bytes came: read again."
            )
        return size, tail

    def read_versioned(self, name: str) -> tuple[bytes, str]:
        """Content of the small object ``name``, and the version that :meth:`swap_bytes` replaces.

        Args:
            name: of the object.

        Returns:
            All bytes, and an opaque version. Here the version is a digest of the content, so give each content of an
            object that is swapped something of its own, such as a counter.
        """
        data = self.read_range(name, 0, self.get_object_size(name))
        return data, version_of(data)

    def swap_bytes(self, name: str, data: bytes, version: str) -> None:
        """Replace the content of the object ``name`` by ``data`` if the object still has ``version``.

        Of several processes that swap the same version at once exactly one succeeds, if :attr:`swaps_atomically`. Else
        the store reads, compares and writes. Two processes can both succeed if both compare before either writes; the
        later write wins.

        Args:
            name: of the object.
            data: new content.
            version: that :meth:`read_versioned` returned.

        Raises:
            FileExistsError: the object has another version or was deleted. The object is unchanged.
        """
        try:
            is_same = self.read_versioned(name)[1] == version
        except FileNotFoundError as e:
            raise self._not_swapped(name, version) from e
        if not is_same:
            raise self._not_swapped(name, version)
        self.put_bytes(name, data)

    def _not_swapped(self, name: str, version: str) -> FileExistsError:
        return FileExistsError(
            f"{self.get_uri(name)}: swap: the object does not have version {version!r} any more: read the object again."
        )

    def list_level(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """List the objects and folders directly below ``prefix``: one level of the tree that slashes in names make.

        Args:
            prefix: beginning of the names, usually a folder with its slash, such as ``run/``; empty for the top level.

        Returns:
            The objects whose names have no slash after ``prefix``, and the names up to and including the next slash of
            all others, such as ``run/ep1/``. Both are sorted. A store of files also lists folders without objects.
        """
        return split_level(prefix, self.list_objects(prefix))

    def delete_object(self, name: str) -> None:
        """Remove the object ``name``. That there is none is fine."""
        if self._has(name):
            raise ObjectStoreError(
                f"{self.get_uri(name)}: delete: {type(self).__name__} has no delete_object. Add one to the class."
            )

    def check_writable(self, prefix: str) -> None:
        """See that objects whose names begin with ``prefix`` can be written, and leave nothing behind.

        Called before training starts. Raises what writing would raise. Where nothing can be deleted, a file of one
        name is left.
        """
        name = f"{prefix.rstrip('/')}.writable".lstrip("/")
        self.put_bytes(name, b"")
        if type(self).delete_object is not ObjectStore.delete_object:
            self.delete_object(name)

    def close(self) -> None:
        """Close connections. May be called twice."""

    def _has(self, name: str) -> bool:
        try:
            self.get_object_size(name)
        except FileNotFoundError:
            return False
        return True

    @classmethod
    def at(cls, bucket: str, **backend_kwargs: Any) -> Self:
        """Open the store of ``bucket``, which is what stands in a URI between the scheme and the next slash.

        Args:
            bucket: name of the bucket.
            **backend_kwargs: arguments of the constructor.

        Returns:
            The store.

        Raises:
            ConfigError: its library is not installed (the message says which extra has it), or an argument is wrong.
        """
        opened: Any = cls  # each store's arguments are its own
        return opened(bucket, **backend_kwargs)

    def read_pieces(
        self, name: str, offset: int, size: int, *, version: Callable[[str], object] = str
    ) -> Generator[bytes]:
        """Yield the bytes that :meth:`read_range` returns, piece by piece, so that a long range takes little memory.

        What a store raises may come after some of the pieces. Here a piece is a call of :meth:`read_range`; a store
        that gets its bytes as a stream overrides this. A subclass may leave ``version`` out.

        Args:
            name: of the object.
            offset: in bytes.
            size: in bytes.
            version: is called before the bytes of each answer with what tells this upload of the object from another,
                such as its ETag, by stores that know it. What it raises ends the reading.

        Yields:
            Consecutive pieces.
        """
        end = offset + size
        while offset < end:
            asked = min(_PIECE_BYTES, end - offset)
            piece = self.read_range(name, offset, asked)
            yield piece
            if len(piece) < asked:
                return
            offset += asked

    # ── what not every store has ─────────────────────────────────────────────────────────────────────────────────
    @property
    def creates_atomically(self) -> bool:
        """True if ``create_only`` lets exactly one of several processes succeed."""
        return False

    @property
    def swaps_atomically(self) -> bool:
        """True if :meth:`swap_bytes` lets exactly one of several processes replace the same version."""
        return False

    def start_parts(self, name: str) -> PartUpload | None:
        """Begin to send an object in parts; ``None`` from a store that takes objects only as a whole."""
        return None

    def unfinished_parts(self, prefix: str) -> Sequence[PartUpload]:
        """Uploads in parts that were started for names that begin with ``prefix`` and not ended, oldest first."""
        return ()

    @property
    def least_part_bytes(self) -> int:
        """The smallest part, but for the last one, that the store takes."""
        return 1

    @property
    def most_parts(self) -> int:
        """Largest number of parts of a multipart upload."""
        return 10_000

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _listing_of_names(listing: Callable[..., Iterable[str | ObjectInfo]]) -> Callable[..., list[ObjectInfo]]:
    """Return ``listing``, which may give names alone, as :meth:`ObjectStore.list_objects`."""

    @functools.wraps(listing)
    def list_objects(self: ObjectStore, prefix: str = "") -> list[ObjectInfo]:
        found = [
            entry if isinstance(entry, ObjectInfo) else ObjectInfo(entry, self.get_object_size(entry))
            for entry in listing(self, prefix)
        ]
        return sorted(found, key=lambda one: one.name)

    return list_objects


def _uploading_with_a_look(uploading: Callable[..., None]) -> Callable[..., None]:
    """Return ``uploading``, which always replaces, as :meth:`ObjectStore.upload_object`."""

    @functools.wraps(uploading)
    def upload_object(self: ObjectStore, name: str, *arguments: Any, create_only: bool = False, **more: Any) -> None:
        if create_only and self._has(name):  # pyright: ignore[reportPrivateUsage] - of its class
            raise FileExistsError(f"{self.get_uri(name)}: create: there is one already.")
        uploading(self, name, *arguments, **more)

    return upload_object


def _reading_of_any_version(reading: Callable[[Any, str, int, int], Generator[bytes]]) -> Callable[..., Any]:
    """Return ``reading``, which tells no versions, as :meth:`ObjectStore.read_pieces`."""

    @functools.wraps(reading)
    def read_pieces(
        self: ObjectStore, name: str, offset: int, size: int, *, version: Callable[[str], object] = str
    ) -> Generator[bytes]:
        return reading(self, name, offset, size)

    return read_pieces


def version_of(data: bytes) -> str:
    """Version of an object in a store that has no versions: a digest of its content ``data``."""
    return hashlib.sha256(data).hexdigest()


def split_level(prefix: str, found: Iterable[ObjectInfo]) -> tuple[list[ObjectInfo], list[str]]:
    """Return the objects directly below ``prefix`` and the folders of the others, as :meth:`ObjectStore.list_level`."""
    objects: list[ObjectInfo] = []
    folders: set[str] = set()
    for info in found:
        child, slash, _ = info.name[len(prefix) :].partition("/")
        if slash:
            folders.add(f"{prefix}{child}/")
        else:
            objects.append(info)
    return sorted(objects, key=lambda info: info.name), sorted(folders)


def check_name(name: str) -> str:
    """``name`` if it can be that of an object.

    Raises:
        ConfigError: it is empty, begins or ends with a slash, has an empty part, ``.`` or ``..`` between slashes, is no
            text, or is longer than the 1024 bytes that stores take.
    """
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") for part in parts) or "\0" in name:
        raise ConfigError(
            f"object name {name!r}: expected parts between slashes, none of them empty, '.' or '..', such as "
            "'run/ep1.pt'."
        )
    try:
        size = len(name.encode())
    except UnicodeEncodeError as e:
        raise ConfigError(f"object name {name!r} is no text, as that of a file may be: give one that is UTF-8.") from e
    if size > 1024:
        raise ConfigError(f"object name {name[:40]!r}… has {size} bytes: stores take 1024.")
    return name


def is_name(name: str) -> bool:
    """Return true if ``name`` can be that of an object: see :func:`check_name`."""
    try:
        check_name(name)
    except ConfigError:
        return False
    return True


def meaning_of_status(status: int) -> type[Exception]:
    """Type of the error that an answer of HTTP with this status means."""
    if status in (404, 410):
        return FileNotFoundError
    if status == 412:
        return FileExistsError
    if status in (401, 403, 407):
        return PermissionError
    if status in (408, 425, 429) or (status >= 500 and status != 501):
        return ObjectStoreTransientError
    return ObjectStoreError
