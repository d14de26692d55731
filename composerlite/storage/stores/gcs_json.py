"""Google Cloud Storage by Google's own protocol and SDK."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from composerlite.errors import ObjectStoreError, ObjectStoreTransientError
from composerlite.storage.part_uploads import FileSource
from composerlite.storage.sdk import importing_sdk
from composerlite.storage.stores.base import (
    ABSENT,
    CONNECTIONS,
    PIECE_BYTES,
    BackendStore,
    Entry,
    Meaning,
    WritesTold,
    meaning_of_answer,
    root_cause,
    tail_of,
)

with importing_sdk("google-cloud-storage, which GCS needs,", extra="gcs", packages=("google", "requests", "urllib3")):
    import requests.exceptions
    from google.api_core.exceptions import GoogleAPICallError, NotFound, RequestRangeNotSatisfiable, from_http_response
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.cloud import storage
    from google.cloud.storage.exceptions import DataCorruption
    from requests.adapters import HTTPAdapter
    from urllib3.exceptions import HTTPError

log = logging.getLogger(__name__)

_CHUNK_BYTES = 32 << 20
"""Bytes of one request of a large upload, which are in memory. A multiple of 256 KiB, as the service requires."""
_RANGE_BYTES = 8 << 20
"""Bytes of one read request: the SDK returns a range as a whole."""
_GIVEN_UP = {200, 204, 404, 410, 499}
"""Answers of the service when an upload that was begun is given up: 499, if all is well."""
_NOT_GCS = "it is not that of Google's service, or was cut short"
_WAY_OUT = (
    "Set GOOGLE_APPLICATION_CREDENTIALS to a service account's file, run 'gcloud auth application-default login',"
    " or set GCS_KEY and GCS_SECRET to an HMAC key."
)


class GCSJSONObjectStore(BackendStore):
    """A bucket, with application default credentials. Arguments are those of ``GCSObjectStore``.

    Args:
        timeout: seconds, until there is a connection and without a byte from the service.
    """

    _has_versions = True

    def __init__(
        self, bucket: str, prefix: str, *, endpoint_url: str | None, project: str | None, timeout: tuple[float, float]
    ) -> None:
        super().__init__(f"gs://{bucket}/", prefix)
        self.bucket = bucket
        self._always: dict[str, Any] = {"timeout": timeout, "retry": None}
        with self._translated("open", ""):
            self._client: Any = _new_client(endpoint_url, project)  # the SDK is not typed
            self._bucket: Any = self._client.bucket(bucket)

    @property
    def creates_atomically(self) -> bool:
        return True

    def close(self) -> None:
        self._client.close()

    def _upload(self, key: str, source: FileSource, version: str | None) -> None:
        self._upload_from(key, source, source.size_bytes, version)

    def _put(self, key: str, data: memoryview, version: str | None = None) -> None:
        self._upload_from(key, io.BytesIO(data), data.nbytes, version)

    def _upload_from(self, key: str, source: Any, size: int, version: str | None) -> None:
        condition = {} if version is None else {"if_generation_match": 0 if version == ABSENT else int(version)}
        blob = self._bucket.blob(key, chunk_size=_CHUNK_BYTES)
        blob.upload_from_file(source, size=size, checksum="crc32c", **condition, **self._always)

    def _delete(self, key: str) -> None:
        try:
            self._bucket.blob(key).delete(**self._always)
        except NotFound as e:
            if (meaning := self._meaning(e)) is None or meaning[0] is not FileNotFoundError:
                raise

    def _check_writable(self, key: str) -> None:
        session_url = self._bucket.blob(key).create_resumable_upload_session(**self._always)
        answer = self._client._http.delete(session_url, timeout=self._always["timeout"])
        if answer.status_code not in _GIVEN_UP:
            # Writing works, and the service forgets in a week what was begun.
            log.warning("%s%s: give up a check: %d %s", self._uri, key, answer.status_code, answer.text)

    def _download(self, name: str, key: str, file: WritesTold) -> None:
        blob = self._bucket.blob(key)
        with self._translated("download", name):
            blob.download_to_file(file, checksum="crc32c", raw_download=True, **self._always)
            _generation(blob)

    def _read(self, key: str, offset: int, size: int | None, version: Callable[[str], object]) -> Generator[bytes]:
        if size is None:
            blob = self._bucket.blob(key)
            data: bytes = blob.download_as_bytes(checksum="crc32c", raw_download=True, **self._always)
            version(str(_generation(blob)))
            yield data
            return
        generations: set[object] = set()
        for start in range(offset, offset + size, _RANGE_BYTES):
            asked = min(_RANGE_BYTES, offset + size - start)
            blob = self._bucket.blob(key)
            try:
                piece: bytes = blob.download_as_bytes(
                    start=start, end=start + asked - 1, checksum=None, raw_download=True, **self._always
                )
            except RequestRangeNotSatisfiable:
                return  # the object ends before the range begins
            generations.add(generation := _generation(blob))
            version(str(generation))
            if len(generations) > 1:
                raise ConnectionError("the object was replaced while it was read")
            if len(piece) > asked:
                raise ObjectStoreError(f"{self._uri}{key}: read: {len(piece)} bytes came for {asked}.")
            yield piece
            if len(piece) < asked:
                return

    def _tail(self, key: str, most_bytes: int) -> tuple[int, bytes] | None:
        # The SDK can ask for the last bytes, but does not return the size of the whole object, which is in a header.
        url = self._bucket.blob(key)._get_download_url(self._client)
        span = {"Range": f"bytes=-{most_bytes}", "Accept-Encoding": "gzip"}
        with contextlib.closing(
            self._client._http.get(url, headers=span, timeout=self._always["timeout"], stream=True)
        ) as answer:
            if answer.status_code == RequestRangeNotSatisfiable.code:  # the object is empty
                return None
            if answer.status_code not in (200, 206):
                raise from_http_response(answer)
            if "x-goog-generation" not in answer.headers:
                raise ConnectionError(f"the answer has no generation: {_NOT_GCS}")
            pieces = answer.raw.stream(PIECE_BYTES, decode_content=False)
            length = int(answer.headers.get("content-length", -1))
            return tail_of(answer.headers.get("content-range"), length, pieces, most_bytes)

    def _size(self, key: str) -> int:
        blob = self._bucket.blob(key)
        blob.reload(**self._always)
        return int(blob.size)

    def _list(self, prefix: str, *, level: bool = False) -> Iterable[Entry]:
        wanted: dict[str, Any] = {"prefix": prefix, **self._always}
        wanted["fields"] = "items(name,size,updated),prefixes,nextPageToken"
        blobs = self._client.list_blobs(self._bucket, delimiter="/" if level else None, **wanted)
        yield from (Entry(blob.name, blob.size, blob.updated) for blob in blobs)
        yield from (Entry(folder.removesuffix("/"), -1, None) for folder in blobs.prefixes)

    def _meaning(self, error: Exception) -> Meaning | None:
        if isinstance(error, GoogleAPICallError):
            # Two writers at once, or the service has lost the session of an upload: that is begun anew.
            passing = error.code == 409 or (error.code in (404, 410) and _method(error) == "PUT")
            if passing:
                return ObjectStoreTransientError, str(error)
            return meaning_of_answer(error.code or 0, str(error), getattr(error.response, "text", ""))
        if isinstance(error, GoogleAuthError):
            if isinstance(error, TransportError) or error.retryable:
                return ObjectStoreTransientError, f"the service of the credentials: {error}"
            return PermissionError, f"{error} {_WAY_OUT}"
        if isinstance(error, DataCorruption):
            return ObjectStoreTransientError, f"other bytes arrived than were sent: {error}"
        if isinstance(error, requests.exceptions.JSONDecodeError):
            return ObjectStoreTransientError, f"the answer is not JSON: {_NOT_GCS}"
        if isinstance(error, requests.exceptions.RequestException | HTTPError | ConnectionError | TimeoutError):
            return ObjectStoreTransientError, root_cause(error)
        return None

    def _headers(self, error: Exception) -> Mapping[str, str]:
        return getattr(getattr(error, "response", None), "headers", {})


def _generation(blob: Any) -> int:
    """Return the generation of what was read. Only the service tells it: a proxy answers 200, too, with a page."""
    if blob.generation is None:
        raise ConnectionError(f"the answer has no generation: {_NOT_GCS}")
    return blob.generation


def _method(error: GoogleAPICallError) -> str:
    """Return the method of the request that was answered with ``error``: PUT sends to the session of an upload."""
    return getattr(getattr(error.response, "request", None), "method", "")


def _new_client(endpoint_url: str | None, project: str | None) -> Any:
    """The SDK's client, without retries or extra requests of its own, and with connections for many threads."""
    options = {"api_endpoint": endpoint_url} if endpoint_url else None
    client: Any = storage.Client(project=project, client_options=options)
    # For traces the SDK asks for the bucket itself, in a thread of its own, which many accounts may not.
    client._bucket_metadata_cache = None
    adapter = HTTPAdapter(pool_maxsize=CONNECTIONS)  # the SDK's own has 10, and offers no way to say so
    for scheme in ("https://", "http://"):
        client._http.mount(scheme, adapter)
    return client
