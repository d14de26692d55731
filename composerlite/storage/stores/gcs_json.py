"""Google Cloud Storage by Google's own protocol and SDK."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import secrets
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import IO, Any, final

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError
from composerlite.storage.chance import draw_apart
from composerlite.storage.disk.files import atomic_write
from composerlite.storage.object_store import ObjectInfo, ObjectStore, Progress, check_name

try:
    import requests.exceptions
    from google.api_core.exceptions import GoogleAPICallError, NotFound, RequestRangeNotSatisfiable
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.cloud import storage
    from google.cloud.storage.exceptions import DataCorruption
    from requests.adapters import HTTPAdapter
    from urllib3.exceptions import HTTPError
except ImportError as e:
    raise ConfigError("google-cloud-storage, which GCS needs, is not installed: pip install 'composerlite[gcs]'") from e

draw_apart("google", "requests", "urllib3")

__all__ = ["GCSJSONObjectStore"]

log = logging.getLogger(__name__)

_CHUNK_BYTES = 32 << 20
"""Of a large upload, so many are in memory and sent at once. A multiple of 256 KiB, as the service wants."""
_CONNECTIONS = 64
_TRANSIENT = {408, 409, 429, 500, 502, 503, 504}
_GIVEN_UP = {200, 204, 404, 410, 499}
"""What the service answers when an upload that was begun is given up: 499, if all is well."""
_WAY_OUT = (
    "Set GOOGLE_APPLICATION_CREDENTIALS to a service account's file, run 'gcloud auth application-default login',"
    " or set GCS_KEY and GCS_SECRET to an HMAC key."
)


class GCSJSONObjectStore(ObjectStore):
    """A bucket, with application default credentials. Arguments are those of ``GCSObjectStore``.

    Args:
        timeout: seconds, until there is a connection and without a byte from the service.
    """

    def __init__(
        self, bucket: str, prefix: str, *, endpoint_url: str | None, project: str | None, timeout: tuple[float, float]
    ) -> None:
        self._uri = f"gs://{bucket}/{prefix}"
        self._prefix = prefix
        self._always: dict[str, Any] = {"timeout": timeout, "retry": None}
        with self._translated("open", ""):
            self._client: Any = _new_client(endpoint_url, project)  # the SDK is not typed
            self._bucket: Any = self._client.bucket(bucket)

    @classmethod
    def at(cls, bucket: str, **backend_kwargs: Any) -> GCSJSONObjectStore:
        """As the class."""
        return cls(bucket, **backend_kwargs)

    def get_uri(self, name: str) -> str:
        return f"{self._uri}{name}"

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def upload_object(self, name: str, filename: str | Path, callback: Progress | None = None) -> None:
        with Path(filename).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._upload("upload", name, _ToldOnRead(file, size, callback), size)
        if callback is not None:
            callback(size, size)

    def put_bytes(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        condition = {"if_generation_match": 0} if create_only else {}
        self._upload("create" if create_only else "write", name, io.BytesIO(data), len(data), **condition)

    def _upload(self, operation: str, name: str, source: Any, size: int, **condition: int) -> None:
        blob = self._blob(name)
        blob.chunk_size = _CHUNK_BYTES
        with self._translated(operation, name):
            blob.upload_from_file(source, size=size, checksum="crc32c", **condition, **self._always)

    def delete_object(self, name: str) -> None:
        with self._translated("delete", name), contextlib.suppress(NotFound):
            self._blob(name).delete(**self._always)

    def check_writable(self, prefix: str) -> None:
        name = f"{prefix}{'/' if prefix and not prefix.endswith('/') else ''}check-{secrets.token_hex(8)}"
        with self._translated("check that objects can be written", name):
            session_url = self._blob(name).create_resumable_upload_session(**self._always)
            answer = self._client._http.delete(session_url, timeout=self._always["timeout"])
        if answer.status_code not in _GIVEN_UP:
            # Writing works, and the service forgets in a week what was begun.
            log.warning("%s: give up a check: %d %s", self.get_uri(name), answer.status_code, answer.text)

    @property
    def creates_atomically(self) -> bool:
        return True

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def download_object(
        self, name: str, filename: str | Path, overwrite: bool = False, callback: Progress | None = None
    ) -> None:
        blob = self._blob(name)
        if os.path.lexists(filename) and not overwrite:
            raise FileExistsError(f"{filename}: there is a file of this name; overwrite=True replaces it.")
        with self._translated("download", name):
            if callback is not None:
                blob.reload(**self._always)
            size = 0 if callback is None else blob.size
            with atomic_write(Path(filename)) as file:
                told = _ToldOnWrite(file, size, callback)
                blob.download_to_file(told, checksum="crc32c", raw_download=True, **self._always)
        if callback is not None:
            callback(told.done, told.done)

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        blob = self._blob(name)
        if not size:
            self.get_object_size(name)
            return b""
        span = {"start": offset, "end": offset + size - 1}
        with self._translated("read", name), contextlib.suppress(RequestRangeNotSatisfiable):
            data: bytes = blob.download_as_bytes(**span, checksum=None, raw_download=True, **self._always)
            if len(data) > size:
                raise ObjectStoreError(f"{self.get_uri(name)}: read: {len(data)} bytes came for {size}.")
            return data
        return b""  # the object ends before the range begins

    def get_object_size(self, name: str) -> int:
        blob = self._blob(name)
        with self._translated("get the size", name):
            blob.reload(**self._always)
        return int(blob.size)

    def list_objects(self, prefix: str = "", *, start_after: str = "") -> Sequence[ObjectInfo]:
        begin = len(self._prefix)
        after = {"start_offset": self._prefix + start_after} if start_after else {}
        with self._translated("list", prefix):
            blobs = self._client.list_blobs(
                self._bucket,
                prefix=self._prefix + prefix,
                fields="items(name,size,updated),nextPageToken",
                **after,
                **self._always,
            )
            return [
                ObjectInfo(blob.name[begin:], blob.size, blob.updated)
                for blob in blobs
                # Consoles make an object that ends with a slash to show an empty folder.
                if blob.name > self._prefix + start_after and not blob.name.endswith("/")
            ]

    def close(self) -> None:
        self._client.close()

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._prefix + check_name(name))

    @contextlib.contextmanager
    def _translated(self, operation: str, name: str) -> Generator[None]:
        """Raise the SDK's errors as ours."""
        where = f"{self.get_uri(name)}: {operation}"
        try:
            yield
        except GoogleAPICallError as e:
            raise _as_ours(e, where) from e
        except GoogleAuthError as e:
            if isinstance(e, TransportError) or e.retryable:
                raise ObjectStoreTransientError(f"{where}: the service of the credentials: {e}") from e
            raise PermissionError(f"{where}: {e} {_WAY_OUT}") from e
        except DataCorruption as e:
            raise ObjectStoreTransientError(f"{where}: other bytes arrived than were sent: {e}") from e
        except (requests.exceptions.RequestException, HTTPError, ConnectionError, TimeoutError) as e:
            raise ObjectStoreTransientError(f"{where}: {_root(e)}") from e


def _as_ours(error: GoogleAPICallError, where: str) -> Exception:
    """The error that says what the service's answer means."""
    text = f"{where}: {error}"
    if error.code == 404:
        return FileNotFoundError(text)
    if error.code == 412:
        return FileExistsError(f"{where}: there is an object of this name.")
    if error.code in (401, 403):
        return PermissionError(text)
    if error.code in _TRANSIENT:
        return ObjectStoreTransientError(text)
    return ObjectStoreError(text)


def _new_client(endpoint_url: str | None, project: str | None) -> Any:
    """The SDK's client, which asks for nothing but what it is told to, over connections for many threads."""
    options = {"api_endpoint": endpoint_url} if endpoint_url else None
    client: Any = storage.Client(project=project, client_options=options)
    # For traces the SDK asks for the bucket itself, in a thread of its own, which many accounts may not.
    client._bucket_metadata_cache = None
    adapter = HTTPAdapter(pool_maxsize=_CONNECTIONS)  # the SDK's own has 10, and offers no way to say so
    for scheme in ("https://", "http://"):
        client._http.mount(scheme, adapter)
    return client


@final
class _ToldOnRead:
    """A file that tells how much of it was sent: what was read before, when more is read."""

    def __init__(self, file: IO[bytes], size: int, callback: Progress | None) -> None:
        self._file = file
        self._size = size
        self._callback = callback
        self.tell = file.tell
        self.seek = file.seek

    def read(self, size: int = -1) -> bytes:
        if self._callback is not None:
            self._callback(self._file.tell(), self._size)
        return self._file.read(size)


@final
class _ToldOnWrite:
    """A file that tells how much of it was written."""

    def __init__(self, file: IO[bytes], size: int, callback: Progress | None) -> None:
        self.done = 0
        self._file = file
        self._size = size
        self._callback = callback

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.done += len(data)
        if self._callback is not None:
            self._callback(self.done, max(self.done, self._size))


def _root(error: BaseException) -> str:
    """The error that was first: those around it repeat the address."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"
