"""OCIObjectStore: objects in a bucket of Oracle's Object Storage."""

from __future__ import annotations

import configparser
import contextlib
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, final

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError, checked_arguments
from composerlite.storage.object_store import ObjectInfo
from composerlite.storage.sdk import importing_sdk
from composerlite.storage.stores import web
from composerlite.storage.stores.base import ABSENT, CONNECTIONS, PIECE_BYTES, BackendStore, Meaning

with importing_sdk("oci, which Oracle's storage needs,", extra="oci", packages=("oci", "urllib3")):
    import oci
    from oci import exceptions as sdk
    from urllib3.exceptions import HTTPError

_TRANSIENT_CODES = {"ConcurrentObjectUpdate", "UnmatchedContentMD5"}
_Part = tuple[str, str]
"""An uploaded part: ETag, and MD5 of the bytes in base 64."""


@final
class OCIObjectStore(BackendStore):
    """Objects in a bucket of Oracle's Object Storage. Needs ``composerlite[oci]``.

    Credentials come from a profile of Oracle's configuration file; ``oci setup config`` writes the file. The service
    verifies the MD5 of every object and part. The SDK's own retries are off.

    Args:
        bucket: name of an existing bucket.
        prefix: put before every name, with a slash between. Listings return names without the prefix.
        namespace: namespace of the tenancy; ``None``: requested from the service.
        config_file: configuration file; otherwise ``OCI_CONFIG_FILE``, or ``~/.oci/config``.
        profile: profile of the configuration file.
        endpoint_url: address of the service, such as ``https://host``; otherwise ``OCI_ENDPOINT_URL``, or the address
            of the region.
        connect_timeout_seconds: longest wait for a connection.
        read_timeout_seconds: longest wait for the next bytes of an answer.

    Raises:
        ConfigError: the configuration file, the profile or the private key does not exist, or a value is missing or
            malformed.
    """

    least_part_bytes = 10 << 20
    has_versions = creates_atomically = swaps_atomically = True

    @checked_arguments
    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        namespace: str | None = None,
        config_file: str | Path | None = None,
        profile: str = "DEFAULT",
        endpoint_url: str | None = None,
        connect_timeout_seconds: float = 10.0,
        read_timeout_seconds: float = 60.0,
    ) -> None:
        super().__init__(f"oci://{bucket}/", prefix)
        self.bucket = bucket
        endpoint_url = web.endpoint_of("OCI", endpoint_url)
        self._namespace = namespace
        path = Path(config_file or os.environ.get("OCI_CONFIG_FILE") or "~/.oci/config").expanduser()
        config: dict[str, Any] = {}
        try:
            config = oci.config.from_file(str(path), profile)
            oci.config.validate_config(config)
            self._client: Any = oci.object_storage.ObjectStorageClient(
                config,
                service_endpoint=endpoint_url,
                timeout=(connect_timeout_seconds, read_timeout_seconds),
                retry_strategy=oci.retry.NoneRetryStrategy(),
                circuit_breaker_strategy=oci.circuit_breaker.NoCircuitBreakerStrategy(),
            )
        except (sdk.ClientError, configparser.Error, ValueError, OSError) as e:
            raise ConfigError(
                f"OCI: profile {profile!r} of the configuration file {path} cannot be used: {e}. Check the private "
                f"key, key_file={config.get('key_file')!r}. Write the file with 'oci setup config', or name another "
                "one by OCI_CONFIG_FILE or config_file."
            ) from e
        sending = self._client.base_client
        sending.session.get_adapter(sending.endpoint).init_poolmanager(CONNECTIONS, CONNECTIONS)

    def close(self) -> None:
        self._client.base_client.session.close()

    # ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _put(self, key: str, file: IO[bytes], size: int, version: str | None) -> None:
        data = file.read()
        self._call("put_object", key, web.body_of(data), content_md5=web.base64_md5(data), **_condition(version))

    def _delete(self, key: str) -> None:
        self._call("delete_object", key)

    def _read(self, key: str, offset: int, size: int) -> Generator[Any]:
        try:
            answer = self._call("get_object", key, range=web.range_header(offset, size))
        except sdk.ServiceError as e:
            if e.code != "InvalidRange":
                raise
            yield self._stat(key)  # the range is past the end, or the object is empty
            return
        with contextlib.closing(answer.data):
            pieces = answer.data.raw.stream(PIECE_BYTES, decode_content=False)
            yield from web.ranged_answer(answer.headers["etag"], answer.headers, pieces, offset, size)

    def _stat(self, key: str) -> tuple[str, int]:
        headers = self._call("head_object", key).headers
        return headers["etag"], int(headers["content-length"])

    def _list(self, prefix: str, *, level: bool) -> Iterable[ObjectInfo]:
        delimiter = {"delimiter": "/"} if level else {}
        for page in self._pages("list_objects", prefix=prefix, fields="name,size,timeModified", **delimiter):
            for entry in page.objects:
                yield ObjectInfo(entry.name, entry.size, entry.time_modified)
            for folder in page.prefixes or ():
                yield ObjectInfo(folder, 0)

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _start(self, key: str) -> str:
        details = oci.object_storage.models.CreateMultipartUploadDetails(object=key)
        return self._call("create_multipart_upload", details).data.upload_id

    def _unfinished(self, prefix: str) -> Iterable[tuple[str, str, datetime]]:
        for page in self._pages("list_multipart_uploads"):
            for entry in page:
                if entry.object.startswith(prefix):
                    yield entry.object, entry.upload_id, entry.time_created

    def _list_parts(self, key: str, upload_id: str) -> dict[int, _Part]:
        pages = self._pages("list_multipart_upload_parts", key, upload_id)
        return {entry.part_number: (entry.etag, entry.md5) for page in pages for entry in page}

    def _recognized(self, part: _Part, data: bytes | memoryview) -> _Part | None:
        return part if part[1] == web.base64_md5(data) else None

    def _send_part(self, key: str, upload_id: str, number: int, data: bytes | memoryview) -> _Part:
        md5 = web.base64_md5(data)
        answer = self._call("upload_part", key, upload_id, number, web.body_of(data), content_md5=md5)
        return answer.headers["etag"], md5

    def _complete(self, key: str, upload_id: str, parts: Sequence[_Part], version: str | None) -> None:
        models = oci.object_storage.models
        chosen = [
            models.CommitMultipartUploadPartDetails(part_num=number, etag=etag)
            for number, (etag, _) in enumerate(parts, 1)
        ]
        details = models.CommitMultipartUploadDetails(parts_to_commit=chosen)
        self._call("commit_multipart_upload", key, upload_id, details, **_condition(version))

    def _abort(self, key: str, upload_id: str) -> None:
        self._call("abort_multipart_upload", key, upload_id)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method ``verb`` of the SDK's client with the namespace, this bucket and ``args``."""
        if self._namespace is None:
            self._namespace = str(_checked(self._client.get_namespace()).data)
        return _checked(getattr(self._client, verb)(self._namespace, self.bucket, *args, **kwargs))

    def _pages(self, verb: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield the data of each page of a listing by the method ``verb`` of the SDK's client."""
        more: dict[str, Any] = {}
        while True:
            answer = self._call(verb, *args, **kwargs, **more)
            yield answer.data
            if start := getattr(answer.data, "next_start_with", None):  # only in a listing of objects
                more = {"start": start}
            elif answer.has_next_page:
                more = {"page": answer.next_page}
            else:
                return

    def _meaning(self, error: Exception) -> Meaning | None:
        if isinstance(error, sdk.ServiceError):
            return _answered(error)
        lost = (sdk.RequestException, sdk.ConnectTimeout, HTTPError, ConnectionError, TimeoutError)
        if isinstance(error, lost):
            return ObjectStoreTransientError, web.root_cause(error)
        return (ObjectStoreError, str(error)) if isinstance(error, sdk.ClientError) else None


def _condition(version: str | None) -> dict[str, str]:
    """Return the arguments for a request to replace only ``version`` of an object.

    ``None``: no condition. ``ABSENT``: only if there is no object.
    """
    if version is None:
        return {}
    return {"if_none_match": "*"} if version == ABSENT else {"if_match": version}


def _checked(answer: Any) -> Any:
    """Return ``answer``, an answer of the SDK.

    Raises:
        ConnectionError: the answer is not from the service. A proxy may answer 200 with a page of its own.
    """
    if not answer.request_id:
        if hasattr(answer.data, "close"):
            answer.data.close()
        raise ConnectionError("the answer has no opc-request-id: the answer is not from Oracle's service")
    return answer


def _answered(error: sdk.ServiceError) -> Meaning:
    """Return the exception type and the cause for an error answer of the service."""
    cause = f"{error.status} {error.code or ''}: {error.message}"
    if error.code == "NotAuthorizedOrNotFound":
        return PermissionError, f"{cause} (The object is missing, or the permission to see it.)"
    if error.code == "InvalidUploadId":
        return FileNotFoundError, cause
    if error.code in _TRANSIENT_CODES:
        return ObjectStoreTransientError, cause
    if error.status == 401:
        cause += ". Check that user, fingerprint and key_file of the configuration match, and the clock."
    return web.meaning_of_answer(error.status, cause, "" if error.code else str(error.message))
