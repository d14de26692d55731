"""GCSObjectStore: objects in a bucket of Google Cloud Storage."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable
from typing import IO, Any, final

from composerlite.errors import ConfigError, ObjectStoreTransientError, checked_arguments
from composerlite.storage.object_store import ObjectInfo
from composerlite.storage.sdk import importing_sdk
from composerlite.storage.stores import web
from composerlite.storage.stores.base import ABSENT, CONNECTIONS, PIECE_BYTES, BackendStore, Meaning

_XML_API = "https://storage.googleapis.com"
_CHUNK_BYTES = 32 << 20
"""Bytes of a large upload in each request, held in memory. The service requires a multiple of 256 KiB."""
_NOT_GCS = "the answer is not from Google's service, or is incomplete"
_WAY_OUT = (
    "Set GOOGLE_APPLICATION_CREDENTIALS to a service account's file, run 'gcloud auth application-default login',"
    " or set GCS_KEY and GCS_SECRET to an HMAC key."
)


@final
class GCSObjectStore(BackendStore):
    """Objects in a bucket of Google Cloud Storage. Needs ``composerlite[gcs]``.

    With an HMAC key in the environment, ``GCS_KEY`` and ``GCS_SECRET``, the constructor returns an ``S3ObjectStore``
    for the S3 protocol of the service (needs ``composerlite[s3]``). Then large objects are uploaded in parts, and
    ``create_only`` is a check followed by a write.

    Otherwise credentials are Google's application default credentials: the file in ``GOOGLE_APPLICATION_CREDENTIALS``,
    ``gcloud auth application-default login``, or credentials of the machine. Then objects are created atomically, and
    an interrupted upload starts again from the beginning. The service verifies a checksum of every upload. The SDK
    does not retry.

    Args:
        bucket: name of an existing bucket.
        prefix: put before every name, with a slash between. Listings return names without the prefix.
        endpoint_url: address of the service, such as ``https://host``; otherwise ``GCS_ENDPOINT_URL``, or Google's. For
            emulators without credentials set ``STORAGE_EMULATOR_HOST`` instead.
        project: project of the SDK's client, unused with an HMAC key; otherwise the project of the credentials.
        connect_timeout_seconds: longest wait for a connection.
        read_timeout_seconds: longest wait for the next bytes of an answer.

    Raises:
        ConfigError: an argument is wrong, or only one of ``GCS_KEY`` and ``GCS_SECRET`` is set.
        PermissionError: there are no credentials.
    """

    has_versions = creates_atomically = swaps_atomically = True

    def __new__(cls, bucket: str, prefix: str = "", **arguments: Any) -> Any:
        key, secret = os.environ.get("GCS_KEY"), os.environ.get("GCS_SECRET")
        if bool(key) != bool(secret):
            raise ConfigError("GCS: expected GCS_KEY and GCS_SECRET both in the environment, or none of them.")
        if not key:
            return super().__new__(cls)
        from composerlite.storage.stores.s3 import S3ObjectStore

        arguments.pop("project", None)
        return S3ObjectStore(
            bucket,
            prefix,
            endpoint_url=web.endpoint_of("GCS", arguments.pop("endpoint_url", None)) or _XML_API,
            region_name="auto",
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            canned_acl="",
            checksum="md5",
            conditional_writes=False,
            scheme="gs",
            **arguments,
        )

    @checked_arguments
    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        project: str | None = None,
        connect_timeout_seconds: float = 10.0,
        read_timeout_seconds: float = 60.0,
    ) -> None:
        super().__init__(f"gs://{bucket}/", prefix)
        self.bucket = bucket
        self._always: dict[str, Any] = {"timeout": (connect_timeout_seconds, read_timeout_seconds), "retry": None}
        endpoint_url = web.endpoint_of("GCS", endpoint_url)
        with importing_sdk(
            "google-cloud-storage, which GCS needs,", extra="gcs", packages=("google", "requests", "urllib3")
        ):
            from google.cloud import storage
            from requests.adapters import HTTPAdapter
        with self._translated("open", "", is_prefix=True):
            options = {"api_endpoint": endpoint_url} if endpoint_url else None
            self._client: Any = storage.Client(project=project, client_options=options)  # the SDK has no types
            # For traces the SDK would request metadata of the bucket in a thread. Many accounts have no right to do so.
            self._client._bucket_metadata_cache = None
            for scheme in ("https://", "http://"):  # the SDK's own adapter has 10 connections
                self._client._http.mount(scheme, HTTPAdapter(pool_maxsize=CONNECTIONS))
            self._bucket: Any = self._client.bucket(bucket)

    def close(self) -> None:
        self._client.close()

    # ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _put(self, key: str, file: IO[bytes], size: int, version: str | None) -> None:
        condition = {} if version is None else {"if_generation_match": 0 if version == ABSENT else int(version)}
        blob = self._bucket.blob(key, chunk_size=_CHUNK_BYTES)
        blob.upload_from_file(file, size=size, checksum="crc32c", **condition, **self._always)

    def _delete(self, key: str) -> None:
        self._bucket.blob(key).delete(**self._always)

    def _read(self, key: str, offset: int, size: int) -> Generator[Any]:
        # Not by the SDK: the SDK returns a range only as a whole, and without the object's size from the header.
        from google.api_core.exceptions import from_http_response

        url = self._bucket.blob(key)._get_download_url(self._client)
        headers = {"Range": web.range_header(offset, size), "Accept-Encoding": "gzip"}
        timeout = self._always["timeout"]
        with contextlib.closing(self._client._http.get(url, headers=headers, timeout=timeout, stream=True)) as answer:
            if answer.status_code == 416:  # the range is past the end, or the object is empty
                yield self._stat(key)
                return
            if answer.status_code not in (200, 206):
                raise from_http_response(answer)
            if "x-goog-generation" not in answer.headers:
                raise ConnectionError(f"the answer has no generation: {_NOT_GCS}")
            pieces = answer.raw.stream(PIECE_BYTES, decode_content=False)
            yield from web.ranged_answer(answer.headers["x-goog-generation"], answer.headers, pieces, offset, size)

    def _stat(self, key: str) -> tuple[str, int]:
        blob = self._bucket.blob(key)
        blob.reload(**self._always)
        return str(blob.generation), int(blob.size)

    def _list(self, prefix: str, *, level: bool) -> Iterable[ObjectInfo]:
        wanted: dict[str, Any] = {"prefix": prefix, "delimiter": "/" if level else None, **self._always}
        wanted["fields"] = "items(name,size,updated),prefixes,nextPageToken"
        blobs = self._client.list_blobs(self._bucket, **wanted)
        yield from (ObjectInfo(blob.name, blob.size, blob.updated) for blob in blobs)
        yield from (ObjectInfo(folder, 0) for folder in blobs.prefixes)

    # ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _meaning(self, error: Exception) -> Meaning | None:
        import requests.exceptions
        from google.api_core.exceptions import GoogleAPICallError
        from google.auth.exceptions import GoogleAuthError, TransportError
        from google.cloud.storage.exceptions import DataCorruption
        from urllib3.exceptions import HTTPError

        if isinstance(error, GoogleAPICallError):
            method = getattr(getattr(error.response, "request", None), "method", "")
            # 409: two writers at once. 404 or 410 to a PUT: the service has lost the session of an upload.
            if error.code == 409 or (error.code in (404, 410) and method == "PUT"):
                return ObjectStoreTransientError, str(error)
            return web.meaning_of_answer(error.code or 0, str(error), getattr(error.response, "text", ""))
        if isinstance(error, GoogleAuthError):
            if isinstance(error, TransportError) or error.retryable:
                return ObjectStoreTransientError, f"the service of the credentials: {error}"
            return PermissionError, f"{error} {_WAY_OUT}"
        if isinstance(error, DataCorruption):
            return ObjectStoreTransientError, f"the received bytes differ from the sent bytes: {error}"
        if isinstance(error, requests.exceptions.JSONDecodeError):
            return ObjectStoreTransientError, f"the answer is not JSON: {_NOT_GCS}"
        if isinstance(error, requests.exceptions.RequestException | HTTPError | ConnectionError | TimeoutError):
            return ObjectStoreTransientError, web.root_cause(error)
        return None
