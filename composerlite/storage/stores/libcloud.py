"""LibcloudObjectStore: objects in a container of any provider with a driver in Apache Libcloud."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import tempfile
from collections.abc import Generator, Iterable, Mapping
from typing import IO, Any, final

from composerlite.errors import ConfigError, ObjectStoreTransientError, checked_arguments, did_you_mean
from composerlite.storage.object_store import ObjectInfo, meaning_of_status, span_of
from composerlite.storage.sdk import importing_sdk
from composerlite.storage.stores import web
from composerlite.storage.stores.base import BackendStore, Meaning

with importing_sdk("apache-libcloud", extra="libcloud", packages=("libcloud", "requests", "urllib3")):
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
    )
    from urllib3.exceptions import HTTPError

_TIMEOUT_SECONDS = 60.0
_MISSING = (ContainerDoesNotExistError, ObjectDoesNotExistError)
_LOST = (requests.RequestException, HTTPError, ObjectHashMismatchError, ServiceUnavailableError)
_NOT_UNDERSTOOD = (AttributeError, LookupError, TypeError, ValueError)
"""Errors that drivers raise if a proxy answers with a page."""
_LISTS_WHOLE = {"local", "dummy", "atmos", "backblaze_b2"}
"""Providers without listings by prefix. Their drivers log a warning if given a prefix."""
_TIMES = ("last_modified", "modify_time")
"""Names of the time of an upload in the metadata from a driver."""


@final
class LibcloudObjectStore(BackendStore):
    """Objects in a container of any provider supported by Apache Libcloud. Needs ``composerlite[libcloud]``.

    The guarantees depend on the driver of the provider. If the provider is a service, objects appear atomically. The
    driver of the provider ``local`` writes files in place, and reads a whole file for each range: for a folder, use a
    path instead of this class.
    ``create_only`` and :meth:`swap_bytes` are a check followed by a write. Uploads report progress once, at the end.

    Args:
        provider: value in ``libcloud.storage.types.Provider``, such as ``s3_us_west``, in upper or lower case.
        container: name of an existing container.
        chunk_size: size of the pieces of a download, in bytes.
        key_environ: environment variable with the ``key`` of the driver.
        secret_environ: environment variable with the ``secret`` of the driver.
        provider_kwargs: further arguments of the driver, such as ``host`` and ``port``.
        prefix: put before every name, with a slash between.

    Raises:
        ConfigError: an argument is wrong, an environment variable is not set, or the driver needs another library.
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
            raise ConfigError(f"chunk_size={chunk_size!r}: expected the bytes of a piece, at least 1.")
        super().__init__(f"libcloud://{container}/", prefix)
        if provider.lower() not in DRIVERS:
            raise ConfigError(f"provider={provider!r} does not exist.{did_you_mean(provider.lower(), DRIVERS)}")
        self.provider, self.container = provider.lower(), container
        self._chunk_size = chunk_size
        self._arguments = dict(provider_kwargs or {})
        for key, variable in (("key", key_environ), ("secret", secret_environ)):
            if variable is not None and variable not in os.environ:
                raise ConfigError(f"{key}_environ is {variable!r}: there is no such environment variable.")
            if variable is not None:
                self._arguments[key] = os.environ[variable]
        self._idle = [self._new_driver()]

    @classmethod
    def at(cls, bucket: str, **backend_kwargs: Any) -> LibcloudObjectStore:
        if "provider" not in backend_kwargs:
            raise ConfigError(f"libcloud://{bucket} names no provider: give provider, for example provider='s3'.")
        named: dict[str, Any] = {"container": bucket, **backend_kwargs}
        return cls(**named)

    def close(self) -> None:
        while self._idle:
            _hang_up(self._idle.pop())

    # ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _put(self, key: str, file: IO[bytes], size: int, version: str | None) -> None:
        # Bytes go to a file first: an upload from a stream costs three requests instead of one, and is not verified.
        with self._driver() as driver, contextlib.ExitStack() as temporary:
            if isinstance(file, io.BytesIO):
                content, file = file, temporary.enter_context(tempfile.NamedTemporaryFile())
                file.write(content.read())
                file.flush()
            driver.upload_object(file.name, driver.get_container(self.container), key)

    def _delete(self, key: str) -> None:
        with self._driver() as driver:
            if not driver.delete_object(driver.get_object(self.container, key)):
                raise LibcloudError("the driver reported a failure", driver=driver)

    def _read(self, key: str, offset: int, size: int) -> Generator[Any]:
        with self._driver() as driver:
            found = driver.get_object(self.container, key)
            total = int(found.size)
            start, end = span_of(offset, size, total)
            headers, pieces = {"content-length": str(total)}, ()
            if 0 < end - start < total:
                with contextlib.suppress(NotImplementedError):  # some drivers cannot read ranges
                    pieces = driver.download_object_range_as_stream(found, start, end, chunk_size=self._chunk_size)
                    headers["content-range"] = f"bytes {start}-{end - 1}/{total}"
            if end > start and "content-range" not in headers:
                pieces = driver.download_object_as_stream(found, chunk_size=self._chunk_size)
            version = f"{found.size} {found.hash} {[found.extra.get(time) for time in _TIMES]}"
            yield from web.ranged_answer(version, headers, pieces, offset, size)

    def _stat(self, key: str) -> tuple[str, int]:
        with self._driver() as driver:
            return "", int(driver.get_object(self.container, key).size)

    def _list(self, prefix: str, *, level: bool) -> Iterable[ObjectInfo]:
        with self._driver() as driver:
            container = driver.get_container(self.container)
            asked = None if self.provider in _LISTS_WHOLE else prefix or None
            try:
                listed = driver.list_container_objects(container, prefix=asked)
            except ObjectDoesNotExistError as e:  # the container exists
                raise ConnectionError("an object was deleted during the listing") from e
        return [ObjectInfo(found.name, int(found.size)) for found in listed if found.name.startswith(prefix)]

    # ── drivers ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _new_driver(self) -> Any:
        try:
            driver: Any = get_driver(self.provider)(**self._arguments)
        except ImportError as e:
            raise ConfigError(f"provider {self.provider!r} needs a library that is not installed: {e}") from e
        except (LibcloudError, TypeError, ValueError) as e:
            raise ConfigError(f"provider {self.provider!r} does not accept these provider_kwargs: {e}") from e
        _hang_up(driver)  # the constructor has opened a connection without a timeout
        driver.connection.conn_class, driver.connection.connection = _TimedConnection, None
        return driver

    @contextlib.contextmanager
    def _driver(self) -> Generator[Any]:
        """Lend the calling thread a driver of its own: a driver has a single connection, and state."""
        try:
            driver = self._idle.pop()
        except IndexError:
            driver = self._new_driver()
        try:
            yield driver
        except _MISSING:
            self._idle.append(driver)
            raise
        except BaseException:
            _hang_up(driver)  # an unread answer may be left in the connection
            raise
        self._idle.append(driver)

    # ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _meaning(self, error: Exception) -> Meaning | None:
        if isinstance(error, ContainerDoesNotExistError):
            return FileNotFoundError, f"container {self.container!r} of {self.provider} does not exist."
        is_missing_file = isinstance(error, FileNotFoundError) and self.provider == "local"
        if isinstance(error, ObjectDoesNotExistError) or is_missing_file:
            return FileNotFoundError, f"there is no such object ({self.provider})."
        if isinstance(error, InvalidCredsError):
            return PermissionError, f"{self.provider} rejects the key or does not allow this: {error}"
        if isinstance(error, (*_LOST, ConnectionError, TimeoutError)):
            return ObjectStoreTransientError, f"{self.provider}: {error or type(error).__name__}"
        if isinstance(error, BaseHTTPError | LibcloudError | ObjectError):
            found = re.search(r"status code:? (\d{3})", str(error), re.IGNORECASE)  # the status is in a sentence
            status = int(error.code) if isinstance(error, BaseHTTPError) else int(found[1]) if found else 0
            return meaning_of_status(status), f"{self.provider}: {error}"
        if isinstance(error, _NOT_UNDERSTOOD):
            said = f"{type(error).__name__}: {error}"
            return ObjectStoreTransientError, f"{self.provider}: the driver cannot parse the answer: {said}"
        return None


@final
class _TimedConnection(LibcloudConnection):
    """A connection with a timeout also for uploads. Libcloud's own connection has no timeout for uploads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        session: Any = self.session
        session.send = functools.partial(session.send, timeout=getattr(session, "timeout", _TIMEOUT_SECONDS))


def _hang_up(driver: Any) -> None:
    """Close the connection of ``driver``, if any."""
    connection = driver.connection.connection
    if connection is None:
        return  # never used
    if connection.response is not None:
        connection.response.close()  # the body may be unread
    connection.session.close()
