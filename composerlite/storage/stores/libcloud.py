"""LibcloudObjectStore: objects in whatever store Apache Libcloud has a driver for."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import tempfile
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from composerlite.errors import (
    ConfigError,
    ObjectStoreError,
    ObjectStoreTransientError,
    checked_arguments,
    did_you_mean,
)
from composerlite.storage.chance import draw_apart
from composerlite.storage.disk.files import atomic_write
from composerlite.storage.object_store import ObjectInfo, ObjectStore, Progress, check_name

try:
    import requests
    from libcloud.common.exceptions import BaseHTTPError
    from libcloud.common.types import InvalidCredsError, LibcloudError, ServiceUnavailableError
    from libcloud.http import LibcloudConnection
    from libcloud.storage.providers import DRIVERS, get_driver
    from libcloud.storage.types import (
        ContainerDoesNotExistError,
        ObjectDoesNotExistError,
        ObjectError,
        ObjectHashMismatchError,
        Provider,
    )
    from urllib3.exceptions import HTTPError
except ImportError as e:
    raise ConfigError("apache-libcloud is not installed: pip install 'composerlite[libcloud]'") from e

draw_apart("libcloud", "requests", "urllib3")

__all__ = ["LibcloudObjectStore"]

_TIMEOUT_SECONDS = 60.0
_TRANSIENT_STATUS = {408, 409, 425, 429}
_MISSING = (ContainerDoesNotExistError, ObjectDoesNotExistError)
_LOST = (requests.RequestException, HTTPError, ObjectHashMismatchError, ServiceUnavailableError)
_LISTS_WHOLE = {"local", "dummy", "atmos", "backblaze_b2"}
"""Providers whose drivers list everything, and warn where they are asked for a prefix."""


@final
class LibcloudObjectStore(ObjectStore):
    """Keeps objects in a container of any provider that Apache Libcloud knows.

    What is promised is what the provider's driver does. Those of services make objects appear as a whole; that of
    provider ``local`` writes files in place, so that a reader may see the beginning of one, and reads a whole file for
    each range of it: :class:`~composerlite.storage.LocalObjectStore` is for folders. ``create_only`` is a check
    followed by a write. Uploads report their progress once, at the end.

    Args:
        provider: as in ``libcloud.storage.types.Provider``, in upper or lower case.
        container: exists, and is not made.
        chunk_size: bytes of a piece of a download.
        key_environ: environment variable with the ``key`` of the driver.
        secret_environ: environment variable with its ``secret``.
        provider_kwargs: further arguments of the driver, as ``host`` and ``port``.
        prefix: put before every name, with a slash between.
    """

    @checked_arguments
    def __init__(
        self,
        provider: str,
        container: str,
        chunk_size: int = 1 << 20,
        key_environ: str | None = None,
        secret_environ: str | None = None,
        provider_kwargs: Mapping[str, Any] | None = None,
        prefix: str = "",
    ) -> None:
        if chunk_size < 1:
            raise ConfigError(f"chunk_size={chunk_size!r}: want the bytes of a piece, at least 1.")
        self.provider, self.container = _provider(provider), container
        self._chunk_size = chunk_size
        self._prefix = f"{check_name(prefix.strip('/'))}/" if prefix.strip("/") else ""
        self._arguments: dict[str, Any] = {
            **(provider_kwargs or {}),
            **_from_environment("key_environ", "key", key_environ),
            **_from_environment("secret_environ", "secret", secret_environ),
        }
        self._lock = threading.Lock()
        self._idle = [self._new_driver()]

    @classmethod
    def at(cls, bucket: str, **backend_kwargs: Any) -> LibcloudObjectStore:
        if "provider" not in backend_kwargs:
            raise ConfigError(f"libcloud://{bucket} does not say whose: give provider, as in provider='s3'.")
        named: dict[str, Any] = {"container": bucket, **backend_kwargs}
        return cls(**named)

    def get_uri(self, name: str) -> str:
        return f"libcloud://{self.container}/{self._key(name)}"

    def upload_object(self, name: str, filename: str | Path, callback: Progress | None = None) -> None:
        key = self._key(name)
        with Path(filename).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
        with self._driver("upload", name) as driver:
            driver.upload_object(str(filename), driver.get_container(self.container), key)
        if callback is not None:
            callback(size, size)

    def put_bytes(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        key = self._key(name)
        # As a file: what drivers send from a stream costs three requests instead of one, and is not verified.
        with tempfile.NamedTemporaryFile() as file, self._driver("put", name) as driver:
            file.write(data)
            file.flush()
            if create_only and self._find(driver, key) is not None:
                raise FileExistsError
            driver.upload_object(file.name, driver.get_container(self.container), key)

    def download_object(
        self, name: str, filename: str | Path, overwrite: bool = False, callback: Progress | None = None
    ) -> None:
        target = Path(filename)
        if target.exists() and not overwrite:
            raise FileExistsError(f"{target} is there already: pass overwrite=True to replace it.")
        pieces = self._pieces(name)
        total, done = next(pieces), 0
        assert isinstance(total, int)
        with contextlib.closing(pieces), atomic_write(target) as copy:
            for piece in pieces:
                assert isinstance(piece, bytes)
                copy.write(piece)
                done += len(piece)
                if callback is not None and done < total:
                    callback(done, total)
        if callback is not None:
            callback(total, total)

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        key = self._key(name)
        with self._driver("read", name) as driver:
            found = driver.get_object(self.container, key)
            end = min(offset + size, found.size)
            if end <= offset:
                return b""
            data = b"".join(self._range(driver, found, offset, end))
            if len(data) != end - offset:
                raise ConnectionError(f"{len(data)} of {end - offset} bytes arrived")
            return data

    def get_object_size(self, name: str) -> int:
        key = self._key(name)
        with self._driver("look at", name) as driver:
            return int(driver.get_object(self.container, key).size)

    def list_objects(self, prefix: str = "", *, start_after: str = "") -> Sequence[ObjectInfo]:
        asked = self._prefix + prefix
        with self._driver("list", prefix) as driver:
            container = driver.get_container(self.container)
            try:
                listed = driver.list_container_objects(container, prefix=None if self._lists_whole else asked or None)
            except ObjectDoesNotExistError as e:
                raise ConnectionError("an object was deleted while it was listed") from e
        found = [ObjectInfo(o.name[len(self._prefix) :], int(o.size)) for o in listed if o.name.startswith(asked)]
        # Names that end in a slash are what some tools make to show a folder.
        objects = [info for info in found if info.name > start_after and not info.name.endswith("/")]
        return sorted(objects, key=lambda info: info.name)

    def delete_object(self, name: str) -> None:
        key = self._key(name)
        with self._driver("delete", name) as driver:
            found = self._find(driver, key)
            if found is None:
                driver.get_container(self.container)
                return
            with contextlib.suppress(FileNotFoundError, ObjectDoesNotExistError):  # deleted by another since
                if not driver.delete_object(found):
                    raise LibcloudError("the driver says that it could not", driver=driver)

    def check_writable(self, prefix: str) -> None:
        name = f"{prefix}composerlite-check-{secrets.token_hex(8)}"
        self.put_bytes(name, b"check")
        self.delete_object(name)

    def close(self) -> None:
        with self._lock:
            drivers, self._idle = self._idle, []
        for driver in drivers:
            _hang_up(driver)

    # ── drivers ──────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def _lists_whole(self) -> bool:
        return self.provider in _LISTS_WHOLE

    def _key(self, name: str) -> str:
        """The name in the container."""
        return check_name(self._prefix + check_name(name))

    def _find(self, driver: Any, key: str) -> Any:
        """The object ``key``, ``None`` if there is none."""
        try:
            return driver.get_object(self.container, key)
        except _MISSING:
            return None

    def _pieces(self, name: str) -> Generator[int | bytes]:
        """First the size of the object ``name``, then its bytes."""
        key = self._key(name)
        with self._driver("download", name) as driver:
            found = driver.get_object(self.container, key)
            yield int(found.size)
            done = 0
            for piece in driver.download_object_as_stream(found, chunk_size=self._chunk_size):
                done += len(piece)
                yield piece
            if done != found.size:
                raise ConnectionError(f"{done} of {found.size} bytes arrived")

    def _range(self, driver: Any, found: Any, offset: int, end: int) -> Iterator[bytes]:
        """The bytes from ``offset`` to ``end``, for drivers that know no ranges by reading all before them."""
        try:
            yield from driver.download_object_range_as_stream(found, offset, end, chunk_size=self._chunk_size)
            return
        except NotImplementedError:
            pass
        at = 0
        for piece in driver.download_object_as_stream(found, chunk_size=self._chunk_size):
            yield piece[max(0, offset - at) : max(0, end - at)]
            at += len(piece)
            if at >= end:
                return

    def _new_driver(self) -> Any:
        try:
            driver: Any = get_driver(self.provider)(**self._arguments)
        except ImportError as e:
            raise ConfigError(f"provider {self.provider!r} needs a library that is not installed: {e}") from e
        except (LibcloudError, TypeError, ValueError) as e:
            raise ConfigError(f"provider {self.provider!r} does not take these provider_kwargs: {e}") from e
        _hang_up(driver)
        driver.connection.conn_class, driver.connection.connection = _TimedConnection, None
        return driver

    @contextlib.contextmanager
    def _driver(self, operation: str, name: str) -> Generator[Any]:
        """A driver that no other thread uses meanwhile: each has one connection, and state."""
        with self._translated(operation, name):
            with self._lock:
                driver = self._idle.pop() if self._idle else None
            if driver is None:
                driver = self._new_driver()
            try:
                yield driver
            except (*_MISSING, FileExistsError):
                self._give_back(driver)
                raise
            except BaseException:
                _hang_up(driver)  # an answer may be under way
                raise
            self._give_back(driver)

    def _give_back(self, driver: Any) -> None:
        with self._lock:
            self._idle.append(driver)

    # ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────
    @contextlib.contextmanager
    def _translated(self, operation: str, name: str) -> Generator[None]:
        """Raise the errors of Libcloud, of its drivers and of HTTP as what the verbs promise."""
        where = f"{operation} {name!r} in container {self.container!r} of {self.provider}"
        try:
            yield
        except GeneratorExit:
            raise
        except FileExistsError as e:
            raise FileExistsError(f"{where}: the object exists already.") from e
        except (*_MISSING, FileNotFoundError) as e:
            what = "the container" if isinstance(e, ContainerDoesNotExistError) else "the object"
            raise FileNotFoundError(f"{where}: {what} does not exist.") from e
        except requests.exceptions.SSLError as e:
            raise ObjectStoreError(f"{where}: the service cannot be trusted: {e}") from e
        except InvalidCredsError as e:
            raise PermissionError(f"{where}: the service refuses the key or does not allow this: {e}") from e
        except PermissionError as e:
            raise PermissionError(f"{where}: {e}.") from e
        except (*_LOST, ConnectionError, TimeoutError) as e:
            raise ObjectStoreTransientError(f"{where}: {e or type(e).__name__}") from e
        except (BaseHTTPError, LibcloudError, ObjectError) as e:
            raise _of_status(e, where) from e
        except OSError as e:
            raise ObjectStoreError(f"{where}: {e}") from e


def _of_status(error: Exception, where: str) -> Exception:
    """What the verbs promise for an answer of HTTP: the drivers put its status into a code or a sentence."""
    found = re.search(r"status code:? (\d{3})", str(error), re.IGNORECASE)
    status = error.code if isinstance(error, BaseHTTPError) else int(found[1]) if found else 0
    if status == 404:
        return FileNotFoundError(f"{where}: {error}")
    if status in (401, 403):
        return PermissionError(f"{where}: {error}")
    if status in _TRANSIENT_STATUS or status >= 500:
        return ObjectStoreTransientError(f"{where}: {error}")
    return ObjectStoreError(f"{where}: {error}")


@final
class _TimedConnection(LibcloudConnection):
    """A connection that waits for uploads, too, no longer than a time: Libcloud's own has none for them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        session: Any = self.session
        session.send = functools.partial(session.send, timeout=getattr(session, "timeout", _TIMEOUT_SECONDS))


def _hang_up(driver: Any) -> None:
    connection = driver.connection.connection
    if connection is None:
        return  # it was never used
    if connection.response is not None:
        connection.response.close()  # its body may not have been read
    connection.session.close()


def _provider(name: str) -> str:
    """The name by which Libcloud finds the driver, its own or one that was registered with it."""
    known: dict[str, str] = {value.lower(): value for value in DRIVERS}
    known |= {constant.lower(): value for constant, value in vars(Provider).items() if value in DRIVERS}
    if name.lower() not in known:
        raise ConfigError(f"provider={name!r} is none.{did_you_mean(name.lower(), known)}")
    return known[name.lower()]


def _from_environment(argument: str, key: str, variable: str | None) -> dict[str, str]:
    """The driver's argument ``key``, from an environment variable."""
    if variable is None:
        return {}
    if variable not in os.environ:
        raise ConfigError(f"{argument} is {variable!r}: there is no such environment variable.")
    return {key: os.environ[variable]}
