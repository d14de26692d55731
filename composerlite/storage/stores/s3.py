"""S3ObjectStore: objects in a bucket of S3 or of a service with the protocol of S3."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, Any, Literal, final
from urllib.parse import urlsplit

from isal import isal_zlib

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError, checked_arguments
from composerlite.storage.object_store import ObjectInfo, meaning_of_status
from composerlite.storage.sdk import importing_sdk
from composerlite.storage.stores import web
from composerlite.storage.stores.base import ABSENT, CONNECTIONS, PIECE_BYTES, BackendStore, Meaning, log

with importing_sdk("boto3, which S3 needs,", extra="s3", packages=("boto3", "botocore", "s3transfer", "urllib3")):
    import boto3
    import botocore
    import botocore.config
    import botocore.exceptions as sdk
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

_VIRTUAL_HOSTS = (".cwobject.com", ".cwlota.com")
"""Hosts of services (CoreWeave's) that require the bucket in the name of the host."""
_NOT_S3 = "the answer is not from an S3 service, or is incomplete"
_NOT_ALLOWED = {
    *("AuthorizationHeaderMalformed", "ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "InvalidToken"),
    *("RequestExpired", "TokenRefreshRequired", "UnrecognizedClientException"),
}
"""Codes of answers with status 400 for wrong or expired credentials."""
_TRANSIENT = {
    *("BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InvalidDigest", "OperationAborted"),
    *("RequestTimeout", "RequestTimeoutException", "Throttling", "ThrottlingException"),
    *("XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"),
}
"""Codes of answers with status 400 or 409 for errors where a retry may succeed."""
_MISSING = {"NoSuchKey", "NotFound", "404", "NoSuchBucket", "InvalidBucketName", "NoSuchUpload"}
_PART_FIELDS = ("PartNumber", "ETag", "ChecksumCRC32")
"""Fields of a part in the request to complete an upload."""
_NO_CREDENTIALS = (
    *(sdk.NoCredentialsError, sdk.PartialCredentialsError, sdk.NoAuthTokenError, sdk.TokenRetrievalError),
    *(sdk.SSOError, sdk.UnknownCredentialError, sdk.UnknownTokenProviderError),
)
_LOST = (
    *(sdk.HTTPClientError, sdk.ConnectionError, sdk.IncompleteReadError, HTTPError),
    *(sdk.MetadataRetrievalError, sdk.CredentialRetrievalError, ResponseParserError),
)
"""Lost connections, incomplete answers, and no answer from the source of the credentials."""


@final
class S3ObjectStore(BackendStore):
    """Objects in a bucket of S3, or of a service with the protocol of S3. Needs ``composerlite[s3]``.

    Credentials are found as Amazon's tools find credentials: in the arguments, the environment (``AWS_ACCESS_KEY_ID``
    …), the profile, the role of the machine. The service verifies a checksum of every object and part. The SDK's own
    retries are off.

    Args:
        bucket: name of an existing bucket.
        prefix: put before every name, with a slash between. Listings return names without the prefix.
        region_name: region of the bucket; otherwise the region of the environment or the profile.
        endpoint_url: address of the service, such as ``https://host:9000``; otherwise ``S3_ENDPOINT_URL``,
            ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``, the profile, or Amazon. At a given address the bucket is a
            part of the path, at addresses of CoreWeave a part of the host, unless ``client_config`` has
            ``{"s3": {"addressing_style": …}}``.
        aws_access_key_id: together with ``aws_secret_access_key``.
        aws_secret_access_key: together with ``aws_access_key_id``.
        aws_session_token: token of temporary credentials.
        profile_name: profile in the files of Amazon's tools.
        unsigned: send no credentials, for public buckets.
        canned_acl: ACL of every written object, such as ``bucket-owner-full-control``; otherwise ``S3_CANNED_ACL``.
        client_config: further arguments of ``botocore.config.Config``, with priority over the values of this class.
        checksum: ``md5`` for services without support for the newer ``crc32``, such as GCS.
        conditional_writes: False for services that ignore ``If-None-Match`` and ``If-Match``: then ``create_only`` and
            :meth:`swap_bytes` are a check followed by a write. If a service refuses these headers, the first such
            write raises ObjectStoreTransientError, and later writes check first.
        scheme: scheme of :meth:`get_uri`.
        connect_timeout_seconds: longest wait for a connection.
        read_timeout_seconds: longest wait for the next bytes of an answer.

    Raises:
        ConfigError: an argument is wrong, or the profile does not exist.
    """

    least_part_bytes = 5 << 20
    has_versions = True

    @checked_arguments
    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        region_name: str | None = None,
        endpoint_url: str | None = None,
        aws_access_key_id: str | None = None,
        aws_secret_access_key: str | None = None,
        aws_session_token: str | None = None,
        profile_name: str | None = None,
        unsigned: bool = False,
        canned_acl: str | None = None,
        client_config: Mapping[str, Any] | None = None,
        checksum: Literal["crc32", "md5"] = "crc32",
        conditional_writes: bool = True,
        scheme: str = "s3",
        connect_timeout_seconds: float = 10.0,
        read_timeout_seconds: float = 60.0,
    ) -> None:
        if (aws_access_key_id is None) != (aws_secret_access_key is None):
            raise ConfigError(
                "S3ObjectStore: expected aws_access_key_id and aws_secret_access_key both, or none of them."
            )
        if checksum not in ("crc32", "md5"):
            raise ConfigError(f"S3ObjectStore: checksum={checksum!r}: expected 'crc32' or 'md5'.")
        super().__init__(f"{scheme}://{bucket}/", prefix)
        self.bucket = bucket
        self._checksum = checksum
        self.creates_atomically = self.swaps_atomically = conditional_writes
        acl = os.environ.get("S3_CANNED_ACL", "") if canned_acl is None else canned_acl
        self._acl = {"ACL": acl} if acl else {}
        given = dict(client_config or {})
        config: dict[str, Any] = {
            "connect_timeout": connect_timeout_seconds,
            "read_timeout": read_timeout_seconds,
            "max_pool_connections": CONNECTIONS,
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "tcp_keepalive": True,
            # This class sends checksums itself. The checksum of a whole object cannot verify a range.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **({"signature_version": botocore.UNSIGNED} if unsigned else {}),
            **given,
            # Payload signing is a second, slow digest of every byte. The checksum finds damage; TLS keeps others out.
            "s3": {"payload_signing_enabled": False, **given.get("s3", {})},
        }
        endpoint_url = endpoint_url or os.environ.get("S3_ENDPOINT_URL") or None
        address = endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        if f".{urlsplit(address).hostname}".endswith(_VIRTUAL_HOSTS):
            config["s3"].setdefault("addressing_style", "virtual")
        with self._translated("open", "", is_prefix=True):
            try:
                session = boto3.Session(
                    aws_access_key_id=aws_access_key_id,
                    aws_secret_access_key=aws_secret_access_key,
                    aws_session_token=aws_session_token,
                    region_name=region_name,
                    profile_name=profile_name,
                )
                self._client: Any = session.client(  # the SDK has no types
                    "s3", endpoint_url=endpoint_url, config=botocore.config.Config(**config)
                )
            except (sdk.ProfileNotFound, TypeError, ValueError) as e:
                raise ConfigError(f"S3ObjectStore: {e}") from e

    def close(self) -> None:
        self._client.close()

    def _at(self, key: str, upload_id: str | None = None) -> dict[str, str]:
        """Return the arguments for the object of a request, and for the upload if ``upload_id`` is given."""
        return {"Bucket": self.bucket, "Key": key} | ({"UploadId": upload_id} if upload_id is not None else {})

    @contextlib.contextmanager
    def _condition(self, version: str | None) -> Generator[dict[str, str]]:
        """Yield the arguments that make a request replace only ``version``, a value as in ``_put``.

        ``ABSENT``: create the object only. ``None``, or a service without conditional writes: no condition.

        Raises:
            ObjectStoreTransientError: the service has no conditional writes. A retry writes without a condition.
        """
        condition: dict[str, str] = {}
        if version is not None and self.creates_atomically:
            condition = {"IfNoneMatch": "*"} if version == ABSENT else {"IfMatch": version}
        try:
            yield condition
        except sdk.ClientError as e:
            if not condition or not _is_not_offered(e):
                raise
            self.creates_atomically = self.swaps_atomically = False
            cause = f"{self._uri} has no conditional writes: the next attempt checks first and then writes"
            log.warning("%s", cause)
            raise ObjectStoreTransientError(cause) from e

    def _digest(self, data: bytes | memoryview) -> dict[str, str]:
        """Return the arguments of a request with the checksum of ``data``, for verification by the service."""
        if self._checksum == "md5":
            return {"ContentMD5": web.base64_md5(data)}
        return {"ChecksumCRC32": base64.b64encode(isal_zlib.crc32(data).to_bytes(4, "big")).decode()}

    # ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _put(self, key: str, file: IO[bytes], size: int, version: str | None) -> None:
        data = file.read()
        how = {**self._at(key), **self._digest(data), **self._acl}
        with self._condition(version) as condition:
            _field(self._client.put_object(Body=web.body_of(data), **how, **condition), "ETag")

    def _delete(self, key: str) -> None:
        answer = self._client.delete_object(**self._at(key))["ResponseMetadata"]
        if answer["HTTPStatusCode"] != 204 and int(answer["HTTPHeaders"].get("content-length", 0)):
            raise ConnectionError(f"the answer has a body: {_NOT_S3}")

    def _read(self, key: str, offset: int, size: int) -> Generator[Any]:
        try:
            answer = self._client.get_object(**self._at(key), Range=web.range_header(offset, size))
        except sdk.ClientError as e:
            if _code(e) not in ("InvalidRange", "416"):
                raise
            yield self._stat(key)  # the range is past the end, or the object is empty
            return
        with contextlib.closing(answer["Body"]) as body:
            version, headers = _field(answer, "ETag"), answer["ResponseMetadata"]["HTTPHeaders"]
            _field(headers, "content-length")
            yield from web.ranged_answer(version, headers, iter(lambda: body.read(PIECE_BYTES), b""), offset, size)

    def _stat(self, key: str) -> tuple[str, int]:
        answer = self._client.head_object(**self._at(key))
        return _field(answer, "ETag"), _field(answer, "ContentLength")

    def _list(self, prefix: str, *, level: bool) -> Iterable[ObjectInfo]:
        delimiter = {"Delimiter": "/"} if level else {}
        for page in self._pages("list_objects_v2", Bucket=self.bucket, Prefix=prefix, **delimiter):
            _field(page, "IsTruncated")  # an empty answer is not an empty listing
            for entry in page.get("Contents", ()):
                yield ObjectInfo(entry["Key"], entry["Size"], entry.get("LastModified"))
            for folder in page.get("CommonPrefixes", ()):
                yield ObjectInfo(folder["Prefix"], 0)

    def _pages(self, verb: str, **arguments: str) -> Iterable[Mapping[str, Any]]:
        return self._client.get_paginator(verb).paginate(**arguments)

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _start(self, key: str) -> str:
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self._checksum == "crc32" else {}
        answer = self._client.create_multipart_upload(**self._at(key), **algorithm, **self._acl)
        return _field(answer, "UploadId")

    def _unfinished(self, prefix: str) -> Iterable[tuple[str, str, datetime]]:
        for page in self._pages("list_multipart_uploads", Bucket=self.bucket, Prefix=prefix):
            for entry in page.get("Uploads", ()):
                yield entry["Key"], entry["UploadId"], entry["Initiated"].astimezone(UTC)

    def _list_parts(self, key: str, upload_id: str) -> dict[int, Mapping[str, Any]]:
        pages = self._pages("list_parts", **self._at(key, upload_id))
        return {entry["PartNumber"]: entry for page in pages for entry in page.get("Parts", ())}

    def _recognized(self, part: Mapping[str, Any], data: bytes | memoryview) -> Mapping[str, Any] | None:
        digest = self._digest(data)
        if "ChecksumCRC32" in part:
            is_same = part["ChecksumCRC32"] == digest.get("ChecksumCRC32")
        else:
            is_same = part["ETag"].strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest()
        # Some services do not list the CRC of a part and yet require the CRC to complete the upload.
        return {**part, **digest} if is_same and part.get("Size", len(data)) == len(data) else None

    def _send_part(self, key: str, upload_id: str, number: int, data: bytes | memoryview) -> Mapping[str, Any]:
        digest = self._digest(data)
        where = self._at(key, upload_id)
        answer = self._client.upload_part(**where, PartNumber=number, Body=web.body_of(data), **digest)
        return {"PartNumber": number, "ETag": _field(answer, "ETag"), **digest}

    def _complete(self, key: str, upload_id: str, parts: Sequence[Mapping[str, Any]], version: str | None) -> None:
        named = [{field: part[field] for field in _PART_FIELDS if field in part} for part in parts]
        how = {**self._at(key, upload_id), "MultipartUpload": {"Parts": named}}
        with self._condition(version) as condition:
            _field(self._client.complete_multipart_upload(**how, **condition), "ETag")

    def _abort(self, key: str, upload_id: str) -> None:
        self._client.abort_multipart_upload(**self._at(key, upload_id))

    # ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _meaning(self, error: Exception) -> Meaning | None:
        if isinstance(error, sdk.ClientError):
            return _answered(error)
        if isinstance(error, _NO_CREDENTIALS):
            way_out = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile."
            return PermissionError, f"no usable credentials: {error} {way_out}"
        if isinstance(error, _LOST):
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                return ObjectStoreError, f"the certificate of the service is not trusted: {error}"
            return ObjectStoreTransientError, str(error)
        if isinstance(error, sdk.BotoCoreError):
            kind = ConfigError if isinstance(error, sdk.ParamValidationError) else ObjectStoreError
            return kind, str(error)
        if type(error) is RuntimeError and "credentials" in str(error):  # the SDK got expired credentials
            return PermissionError, str(error)
        return None


def _answered(error: sdk.ClientError) -> Meaning:
    """Translate an error answer of the service, by its code or else by its status."""
    code, status = _code(error), int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    reason = str(error.response.get("Error", {}).get("Message", "")).rstrip(".")
    cause = f"{status} {code}: {reason}"
    if code in _MISSING:
        missing = "bucket" if code == "NoSuchBucket" else "object or upload"
        return FileNotFoundError, f"there is no such {missing} ({cause})."
    if code in ("PreconditionFailed", "412"):
        return FileExistsError, cause
    if code in _NOT_ALLOWED or status in (401, 403):
        return PermissionError, f"not allowed ({cause}). Check the credentials, and the clock of this machine."
    if code in _TRANSIENT:
        return ObjectStoreTransientError, cause
    if code == "400":  # the answer to HEAD has no reason
        return PermissionError, f"{cause}: the credentials are expired, or the region is wrong."
    if _is_not_offered(error):
        return ObjectStoreError, f"the service does not support this ({cause})."
    # A 404 without a known code may come from a proxy, and is no proof of a missing object.
    return ObjectStoreError if status in (404, 412) else meaning_of_status(status), cause


def _is_not_offered(error: sdk.ClientError) -> bool:
    return _code(error) in ("NotImplemented", "501")


def _code(error: sdk.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _field(answer: Mapping[str, Any], name: str) -> Any:
    """Return a field of an answer.

    Raises:
        ConnectionError: there is no such field. A proxy may answer 200 with a page of its own.
    """
    if name not in answer:
        raise ConnectionError(f"the answer has no {name}: {_NOT_S3}")
    return answer[name]
