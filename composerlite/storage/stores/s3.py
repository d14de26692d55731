"""S3 and the many services that speak its protocol."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal, final
from urllib.parse import urlsplit

from isal import isal_zlib

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError, checked_arguments
from composerlite.storage.object_store import meaning_of_status
from composerlite.storage.sdk import importing_sdk
from composerlite.storage.stores.base import (
    ABSENT,
    CONNECTIONS,
    PIECE_BYTES,
    Entry,
    Meaning,
    MultipartStore,
    RequestBody,
    base64_md5,
    tail_of,
)

with importing_sdk("boto3, which S3 needs,", extra="s3", packages=("boto3", "botocore", "s3transfer", "urllib3")):
    import boto3
    import botocore
    import botocore.config
    import botocore.exceptions as sdk
    import botocore.loaders
    import botocore.session
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError

log = logging.getLogger(__name__)

_VIRTUAL_HOSTS = (".cwobject.com", ".cwlota.com")
"""Services (CoreWeave's) that take the bucket only as a part of the host's name."""

_REFUSED = (PermissionError, "not allowed ({said}).")
_CLOCK = ("RequestTimeTooSkewed", "RequestExpired")
_NOT_ALLOWED = (
    *("AccessDenied", "AccountProblem", "AllAccessDisabled", "AuthorizationHeaderMalformed", "ExpiredToken"),
    *("ExpiredTokenException", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidSecurity", "InvalidToken"),
    *("SignatureDoesNotMatch", "TokenRefreshRequired", "UnauthorizedAccess", "UnrecognizedClientException"),
)
_TRANSIENT = (
    *("BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError", "InvalidDigest"),
    *("OperationAborted", "RequestLimitExceeded", "RequestTimeout", "RequestTimeoutException", "ServiceUnavailable"),
    *("SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "XAmzContentChecksumMismatch"),
    "XAmzContentSHA256Mismatch",
)
_NOT_S3 = "it is not that of an S3 service, or was cut short"
_NO_OBJECT = ("NoSuchKey", "NotFound", "404")
_BEYOND = ("InvalidRange", "416")
_MEANINGS: dict[str, Meaning] = {
    code: meaning
    for codes, meaning in (
        (_NO_OBJECT, (FileNotFoundError, "there is no such object, or no such bucket ({said}).")),
        (("NoSuchBucket", "InvalidBucketName"), (FileNotFoundError, "there is no such bucket ({said}).")),
        (("NoSuchUpload",), (FileNotFoundError, "the service has no such upload any more ({said}).")),
        (("PreconditionFailed", "412"), (FileExistsError, "")),
        (_CLOCK, (PermissionError, "{said}. The clock of this machine is wrong: set it.")),
        (_NOT_ALLOWED, _REFUSED),
        (_TRANSIENT, (ObjectStoreTransientError, "{said}")),
        (("NotImplemented",), (ObjectStoreError, "the service does not offer it ({said}).")),
        # The answer to HEAD has no reason in it.
        (("400",), (PermissionError, "{said}: the credentials are expired, or the region is wrong.")),
    )
    for code in codes
}
"""Codes of answers, by what they mean. They are looked at first: some statuses say less, as 400 of an expired token."""
_NO_CREDENTIALS = (
    *(sdk.NoCredentialsError, sdk.PartialCredentialsError, sdk.NoAuthTokenError, sdk.TokenRetrievalError),
    *(sdk.SSOError, sdk.UnknownCredentialError, sdk.UnknownTokenProviderError),
)
_LOST = (
    *(sdk.HTTPClientError, sdk.ConnectionError, sdk.IncompleteReadError, sdk.FlexibleChecksumError, HTTPError),
    *(sdk.MetadataRetrievalError, sdk.CredentialRetrievalError, ResponseParserError),
)
"""Connections that broke, answers that were cut short or changed, and credentials whose source did not answer."""


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """A part that the service has. ``crc32``: in base 64, empty where it is not known."""

    size_bytes: int
    etag: str
    crc32: str


class S3ObjectStore(MultipartStore):
    """Objects in a bucket of S3, or of a service that speaks its protocol. Needs ``composerlite[s3]``.

    Credentials are looked for as all of Amazon's tools do: in the arguments, the environment (``AWS_ACCESS_KEY_ID``
    …), the profile, the role of the machine. Every object and part is sent with a checksum that the service verifies.
    The SDK's own retries are off.

    Names are below ``prefix``; no verb returns it.

    Args:
        bucket: its name. It must exist.
        prefix: put before every name, with a slash between.
        region_name: of the bucket; else that of the environment or profile.
        endpoint_url: of the service, as in ``https://host:9000``; else ``S3_ENDPOINT_URL``, ``AWS_ENDPOINT_URL`` or
            what the profile says; else Amazon's. With one, buckets are addressed by path, unless ``client_config`` has
            ``{"s3": {"addressing_style": "virtual"}}``; CoreWeave's are addressed as it wants.
        aws_access_key_id: together with ``aws_secret_access_key``.
        aws_secret_access_key: together with ``aws_access_key_id``.
        aws_session_token: of temporary credentials.
        profile_name: whose credentials and settings to use, from the files of Amazon's tools.
        unsigned: without credentials, for public buckets.
        canned_acl: given to every object that is written, as in ``bucket-owner-full-control``; else
            ``S3_CANNED_ACL``.
        client_config: further arguments of ``botocore.config.Config``; they win over ours.
        checksum: ``md5`` for services that refuse the headers of the newer ``crc32``, such as GCS.
        conditional_writes: False for services that ignore ``If-None-Match`` and ``If-Match`` when an object is put:
            then ``create_only`` and :meth:`swap_bytes` look first. Services that say that they cannot are noticed.
        scheme: of :meth:`get_uri`.
        connect_timeout_seconds: until a connection must be there.
        read_timeout_seconds: without a byte from the service.

    Raises:
        ConfigError: an argument is wrong, or there is no such profile.
    """

    _whole_bytes = 64 << 20
    _has_versions = True

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
        self._conditional = conditional_writes
        acl = os.environ.get("S3_CANNED_ACL", "") if canned_acl is None else canned_acl
        self._acl = {"ACL": acl} if acl else {}
        endpoint_url = endpoint_url or os.environ.get("S3_ENDPOINT_URL") or None
        settings = _client_settings(endpoint_url, unsigned, connect_timeout_seconds, read_timeout_seconds)
        config = {**settings, **(client_config or {}), "s3": settings["s3"] | (client_config or {}).get("s3", {})}
        with self._translated("open", ""):
            try:
                session = boto3.Session(
                    botocore_session=_sdk_session(),
                    aws_access_key_id=aws_access_key_id,
                    aws_secret_access_key=aws_secret_access_key,
                    aws_session_token=aws_session_token,
                    region_name=region_name,
                    profile_name=profile_name,
                )
                self._client: Any = session.client(  # untyped by the SDK
                    "s3", endpoint_url=endpoint_url, config=botocore.config.Config(**config)
                )
            except (sdk.ProfileNotFound, TypeError, ValueError) as e:
                raise ConfigError(f"S3ObjectStore: {e}") from e

    @property
    def creates_atomically(self) -> bool:
        return self._conditional

    @property
    def least_part_bytes(self) -> int:
        return 5 << 20

    def close(self) -> None:
        self._client.close()

    def _at(self, key: str, upload_id: str | None = None) -> dict[str, str]:
        """Arguments of a request that say what it is about."""
        return {"Bucket": self.bucket, "Key": key} | ({"UploadId": upload_id} if upload_id is not None else {})

    # ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _put(self, key: str, data: memoryview, version: str | None = None) -> None:
        how = {**self._at(key), **self._digest(data), **self._acl}
        self._write(key, version, lambda **condition: self._client.put_object(Body=_body(data), **how, **condition))

    def _write(self, key: str, version: str | None, request: Callable[..., Mapping[str, Any]]) -> None:
        """Make an object exist with ``request``, which takes the condition that ``version`` is: see :meth:`_put`."""
        condition: dict[str, str] = {}
        if version is not None and self._conditional:
            condition = {"IfNoneMatch": "*"} if version == ABSENT else {"IfMatch": version}
        try:
            answer = request(**condition)
        except sdk.ClientError as e:
            if version is None or not condition or not _is_not_offered(e):
                raise
            log.warning("%s: this service has no conditional writes: we look before we write.", self.get_uri(""))
            self._conditional = False
            self._check_version(key, version)
            answer = request()
        _field(answer, "ETag")  # a proxy answers 200, too, with a page of its own

    def _delete(self, key: str) -> None:
        with _suppressed(*_NO_OBJECT):
            answer = self._client.delete_object(**self._at(key))["ResponseMetadata"]
            if answer["HTTPStatusCode"] != 204 and int(answer["HTTPHeaders"].get("content-length", 0)):
                raise ConnectionError(f"the answer has a body: {_NOT_S3}")

    def _read(self, key: str, offset: int, size: int | None, version: Callable[[str], object]) -> Generator[bytes]:
        # The checksum of a whole object says nothing of a range.
        span = {"Range": f"bytes={offset}-{offset + size - 1}"} if size is not None else {}
        verify = {"ChecksumMode": "ENABLED"} if size is None and self._checksum == "crc32" else {}
        with _suppressed(*_BEYOND):  # the object ends before the range begins
            answer = self._client.get_object(**self._at(key), **span, **verify)
            with contextlib.closing(answer["Body"]) as body:
                version(_field(answer, "ETag"))
                if size is None:
                    _field(answer, "ContentLength")
                elif answer["ResponseMetadata"]["HTTPStatusCode"] != 206:
                    yield _range_of_all(answer, body, offset, size)
                    return
                while piece := body.read(PIECE_BYTES):
                    yield piece

    def _tail(self, key: str, most_bytes: int) -> tuple[int, bytes] | None:
        with _suppressed(*_BEYOND):  # so is an empty object answered, and perhaps any by a service without such ranges
            answer = self._client.get_object(**self._at(key), Range=f"bytes=-{most_bytes}")
            with contextlib.closing(answer["Body"]) as body:
                _field(answer, "ETag")
                pieces = iter(lambda: body.read(PIECE_BYTES), b"")
                return tail_of(answer.get("ContentRange"), _field(answer, "ContentLength"), pieces, most_bytes)
        return None

    def _size(self, key: str) -> int:
        answer = self._client.head_object(**self._at(key))
        _field(answer, "ETag")
        return _field(answer, "ContentLength")

    def _list(self, prefix: str, *, level: bool = False) -> Iterable[Entry]:
        # Some services list folder by folder: their StartAfter leaves out some.
        delimiter = {"Delimiter": "/"} if level else {}
        for page in self._pages("list_objects_v2", Bucket=self.bucket, Prefix=prefix, **delimiter):
            _field(page, "IsTruncated")  # an empty answer is no empty listing
            for entry in page.get("Contents", ()):
                yield Entry(entry["Key"], entry["Size"], entry.get("LastModified"))
            for folder in page.get("CommonPrefixes", ()):
                yield Entry(folder["Prefix"].removesuffix("/"), -1, None)

    def _pages(self, verb: str, **arguments: str) -> Iterable[Mapping[str, Any]]:
        return self._client.get_paginator(verb).paginate(**arguments)

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _start(self, key: str) -> tuple[str, datetime | None]:
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self._checksum == "crc32" else {}
        answer = self._client.create_multipart_upload(**self._at(key), **algorithm, **self._acl)
        return _field(answer, "UploadId"), None

    def _unfinished(self, prefix: str) -> Iterable[tuple[str, str, datetime]]:
        for page in self._pages("list_multipart_uploads", Bucket=self.bucket, Prefix=prefix):
            for entry in page.get("Uploads", ()):
                yield entry["Key"], entry["UploadId"], entry["Initiated"].astimezone(UTC)

    def _list_parts(self, key: str, upload_id: str) -> dict[int, _Part]:
        return {
            entry["PartNumber"]: _Part(entry["Size"], entry["ETag"], entry.get("ChecksumCRC32", ""))
            for page in self._pages("list_parts", **self._at(key, upload_id))
            for entry in page.get("Parts", ())
        }

    def _recognized(self, part: _Part, data: memoryview) -> _Part | None:
        if part.size_bytes != data.nbytes:
            return None
        if part.crc32:
            return part if part.crc32 == _crc32(data) else None
        if part.etag.strip('"') != hashlib.md5(data, usedforsecurity=False).hexdigest():
            return None
        # Some services do not tell the CRC, and still want it at the end.
        return replace(part, crc32=_crc32(data)) if self._checksum == "crc32" else part

    def _send_part(self, key: str, upload_id: str, number: int, data: memoryview) -> _Part:
        digest = self._digest(data)
        where = self._at(key, upload_id)
        answer = self._client.upload_part(**where, PartNumber=number, Body=_body(data), **digest)
        return _Part(data.nbytes, _field(answer, "ETag"), digest.get("ChecksumCRC32", ""))

    def _complete(self, key: str, upload_id: str, parts: Sequence[_Part], *, create_only: bool) -> None:
        named = [
            {"PartNumber": number, "ETag": part.etag} | ({"ChecksumCRC32": part.crc32} if part.crc32 else {})
            for number, part in enumerate(parts, 1)
        ]
        how = {**self._at(key, upload_id), "MultipartUpload": {"Parts": named}}
        complete = self._client.complete_multipart_upload
        self._write(key, ABSENT if create_only else None, lambda **condition: complete(**how, **condition))

    def _abort(self, key: str, upload_id: str) -> None:
        with _suppressed("NoSuchUpload"):
            self._client.abort_multipart_upload(**self._at(key, upload_id))

    def _digest(self, data: memoryview) -> dict[str, str]:
        """Argument of a request by which the service verifies ``data``."""
        return {"ChecksumCRC32": _crc32(data)} if self._checksum == "crc32" else {"ContentMD5": base64_md5(data)}

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
        if isinstance(error, sdk.ParamValidationError):
            return ConfigError, str(error)
        if isinstance(error, sdk.BotoCoreError):
            return ObjectStoreError, str(error)
        if type(error) is RuntimeError and "credentials" in str(error):  # how the SDK says that new ones are expired
            return PermissionError, str(error)
        return None

    def _headers(self, error: Exception) -> Mapping[str, str]:
        is_answer = isinstance(error, sdk.ClientError)
        return error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}) if is_answer else {}


def _answered(e: sdk.ClientError) -> Meaning:
    """Meaning of an answer of the service: by its code first, then by its status."""
    code, status = _code(e), _status(e)
    reason = str(e.response.get("Error", {}).get("Message", "")).rstrip(".")
    known = _MEANINGS.get("NotImplemented" if _is_not_offered(e) else code)
    if known is None and status in (401, 403):
        known = _REFUSED
    # 404 without a code that says so may be anybody's, a proxy's for one: it is no proof that an object is missing.
    kind, says = known or (ObjectStoreError if status in (404, 412) else meaning_of_status(status), "{said}")
    return kind, says.format(said=f"{status} {code}: {reason}")


def _code(e: sdk.ClientError) -> str:
    return str(e.response.get("Error", {}).get("Code", ""))


def _status(e: sdk.ClientError) -> int:
    return int(e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _is_not_offered(e: sdk.ClientError) -> bool:
    """Return true if the service says that it has no such operation."""
    return _code(e) == "NotImplemented" or (_status(e) == 501 and _code(e) not in _MEANINGS)


@contextlib.contextmanager
def _suppressed(*codes: str) -> Generator[None]:
    """Take answers with these codes for success."""
    try:
        yield
    except sdk.ClientError as e:
        if _code(e) not in codes:
            raise


def _field(answer: Mapping[str, Any], name: str) -> Any:
    if name not in answer:
        raise ConnectionError(f"the answer has no {name}: {_NOT_S3}")
    return answer[name]


def _range_of_all(answer: Mapping[str, Any], body: Any, offset: int, size: int) -> bytes:
    """Range of an answer that is all: the object has no other bytes, or the service has no ranges."""
    data = body.read(offset + size)
    if len(data) < min(offset + size, _field(answer, "ContentLength")):
        raise ConnectionError(f"the answer was cut short after {len(data)} bytes")
    return data[offset:]


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _sdk_session() -> Any:
    """A session of the SDK that reads what describes the service once in a process: that takes a tenth of a second."""
    session = botocore.session.get_session()
    session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
    return session


@functools.cache
def _descriptions(data_path: str | None) -> Any:
    return botocore.loaders.create_loader(data_path)


def _client_settings(endpoint_url: str | None, unsigned: bool, connect: float, read: float) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "connect_timeout": connect,
        "read_timeout": read,
        "max_pool_connections": CONNECTIONS,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "tcp_keepalive": True,
        # We send checksums ourselves, and ask for those of whole objects: a part of one cannot be verified by it.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        # A second digest of every byte, the slowest of all. The checksum tells what was damaged; TLS keeps others out.
        "s3": {"payload_signing_enabled": False},
    }
    address = endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    if f".{urlsplit(address).hostname}".endswith(_VIRTUAL_HOSTS):
        settings["s3"]["addressing_style"] = "virtual"
    if unsigned:
        settings["signature_version"] = botocore.UNSIGNED
    return settings


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _body(data: memoryview) -> bytes | RequestBody:
    """Small ones as bytes: before it sends a file the SDK waits for the service to agree."""
    return bytes(data) if data.nbytes <= PIECE_BYTES else RequestBody(data)


def _crc32(data: memoryview) -> str:
    """CRC-32 in base 64, as the protocol writes it."""
    return base64.b64encode(isal_zlib.crc32(data).to_bytes(4, "big")).decode()
