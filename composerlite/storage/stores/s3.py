"""S3 and the many services that speak its protocol."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import logging
import os
import secrets
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, final
from urllib.parse import urlsplit

from isal import isal_zlib

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError, checked_arguments
from composerlite.storage.chance import draw_apart
from composerlite.storage.disk.files import atomic_write
from composerlite.storage.object_store import ObjectInfo, ObjectStore, PartUpload, Progress, check_name
from composerlite.storage.part_uploads import FileSource, send_once

try:
    import boto3
    import botocore
    import botocore.config
    import botocore.exceptions as sdk
    import botocore.loaders
    import botocore.session
    from botocore.parsers import ResponseParserError
    from urllib3.exceptions import HTTPError
except ImportError as e:
    raise ConfigError("boto3, which S3 needs, is not installed: pip install 'composerlite[s3]'") from e

draw_apart("boto3", "botocore", "s3transfer", "urllib3")

__all__ = ["S3ObjectStore"]

log = logging.getLogger(__name__)

_SINGLE_BYTES = 64 << 20
"""A file up to here is sent by one request."""
_PART_BYTES = 16 << 20
_PART_THREADS = 4
_PIECE_BYTES = 1 << 20
_CONNECTIONS = 64
_VIRTUAL_HOSTS = (".cwobject.com", ".cwlota.com")
"""Services (CoreWeave's) that take the bucket only as a part of the host's name."""

# What services answer, by what it means. Codes come first: some statuses say less (a 400 may be an expired token).
_NO_OBJECT = {"NoSuchKey", "NotFound", "404"}
_NO_BUCKET = {"NoSuchBucket", "InvalidBucketName"}
_NO_UPLOAD = {"NoSuchUpload"}
_BEYOND = {"InvalidRange", "416"}
_EXISTS = {"PreconditionFailed", "412"}
_CLOCK = {"RequestTimeTooSkewed", "RequestExpired"}
_REFUSED = {
    *("AccessDenied", "AccountProblem", "AllAccessDisabled", "AuthorizationHeaderMalformed", "ExpiredToken"),
    *("ExpiredTokenException", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidSecurity", "InvalidToken"),
    *("SignatureDoesNotMatch", "TokenRefreshRequired", "UnauthorizedAccess", "UnrecognizedClientException"),
}
_TRANSIENT = {
    *("BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError", "InvalidDigest"),
    *("OperationAborted", "RequestLimitExceeded", "RequestTimeout", "RequestTimeoutException", "ServiceUnavailable"),
    *("SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "XAmzContentChecksumMismatch"),
    "XAmzContentSHA256Mismatch",
}


class _NoAnswerError(Exception):
    """What came with a good status is not what the service should say."""


_NO_CREDENTIALS = (
    *(sdk.NoCredentialsError, sdk.PartialCredentialsError, sdk.NoAuthTokenError, sdk.TokenRetrievalError),
    *(sdk.SSOError, sdk.UnknownCredentialError, sdk.UnknownTokenProviderError),
)
_LOST = (
    *(sdk.HTTPClientError, sdk.ConnectionError, sdk.IncompleteReadError, sdk.FlexibleChecksumError, HTTPError),
    *(sdk.MetadataRetrievalError, sdk.CredentialRetrievalError, ResponseParserError),
    _NoAnswerError,
)
"""Connections that broke, answers that were cut short or changed, and credentials whose source did not answer."""


class S3ObjectStore(ObjectStore):
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
        conditional_writes: False for services that ignore ``If-None-Match`` when an object is put: then ``create_only``
            looks first. Services that say that they cannot are noticed.
        scheme: of :meth:`get_uri`.
        connect_timeout_seconds: until a connection must be there.
        read_timeout_seconds: without a byte from the service.

    Raises:
        ConfigError: an argument is wrong, or there is no such profile.
    """

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
            raise ConfigError("S3ObjectStore: want aws_access_key_id and aws_secret_access_key both, or none of them.")
        if checksum not in ("crc32", "md5"):
            raise ConfigError(f"S3ObjectStore: checksum={checksum!r}: want 'crc32' or 'md5'.")
        self.bucket = bucket
        self.prefix = f"{check_name(prefix.strip('/'))}/" if prefix.strip("/") else ""
        self._scheme = scheme
        self._checksum = checksum
        self._conditional = conditional_writes
        acl = os.environ.get("S3_CANNED_ACL", "") if canned_acl is None else canned_acl
        self._acl = {"ACL": acl} if acl else {}
        endpoint_url = endpoint_url or os.environ.get("S3_ENDPOINT_URL") or None
        settings = _client_settings(endpoint_url, unsigned, connect_timeout_seconds, read_timeout_seconds)
        with _translated(self.get_uri(""), "open"), _wrong_arguments():
            session = boto3.Session(
                botocore_session=_sdk_session(),
                aws_access_key_id=aws_access_key_id,
                aws_secret_access_key=aws_secret_access_key,
                aws_session_token=aws_session_token,
                region_name=region_name,
                profile_name=profile_name,
            )
            config = botocore.config.Config(**_merged(settings, client_config or {}))
            self._client: Any = session.client("s3", endpoint_url=endpoint_url, config=config)  # untyped by the SDK

    @classmethod
    def at(cls, bucket: str, **backend_kwargs: Any) -> S3ObjectStore:
        """As :class:`S3ObjectStore`."""
        return cls(bucket, **backend_kwargs)

    def get_uri(self, name: str) -> str:
        return f"{self._scheme}://{self.bucket}/{self.prefix}{name}"

    def _key(self, name: str) -> str:
        """How the service calls ``name``. ConfigError: it can be no object's."""
        return check_name(self.prefix + name)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def upload_object(self, name: str, filename: str | Path, callback: Progress | None = None) -> None:
        with FileSource(filename) as source:
            size = source.size_bytes
            if size > _SINGLE_BYTES:
                send_once(self, name, source, callback, part_bytes=_PART_BYTES, threads=_PART_THREADS)
                return
            data = memoryview(bytearray(size))
            source.read_into(data, 0)
            self._put("upload", name, data)
        if callback is not None:
            callback(size, size)

    def put_bytes(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        if not create_only:
            self._put("write", name, memoryview(data))
        elif not self._conditional:
            self._look_and_put(name, data)
        else:
            try:
                self._put("create", name, memoryview(data), IfNoneMatch="*")
            except _NotOfferedError:
                log.warning("%s: this service cannot create atomically: we look before we write.", self.get_uri(""))
                self._conditional = False
                self._look_and_put(name, data)

    def _look_and_put(self, name: str, data: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.get_object_size(name)
            raise FileExistsError(f"{self.get_uri(name)}: create: there is an object of this name.")
        self._put("create", name, memoryview(data))

    def _put(self, operation: str, name: str, data: memoryview, **condition: str) -> None:
        with _translated(self.get_uri(name), operation):
            self._client.put_object(
                Bucket=self.bucket,
                Key=self._key(name),
                Body=_body(data),
                **_digest(self._checksum, data),
                **self._acl,
                **condition,
            )

    def delete_object(self, name: str) -> None:
        with _translated(self.get_uri(name), "delete"), _suppressed(_NO_OBJECT):
            self._client.delete_object(Bucket=self.bucket, Key=self._key(name))

    def check_writable(self, prefix: str) -> None:
        name = f"{prefix}{'/' if prefix and not prefix.endswith('/') else ''}check-{secrets.token_hex(8)}"
        upload = self._start_parts("check that objects can be written", name)
        try:
            upload.abort()
        except PermissionError as e:
            # Writing works. What killed uploads leave stays until the bucket's own rules remove it.
            log.warning("%s", e)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def download_object(
        self, name: str, filename: str | Path, overwrite: bool = False, callback: Progress | None = None
    ) -> None:
        if os.path.lexists(filename) and not overwrite:
            raise FileExistsError(f"{filename}: there is a file of this name; overwrite=True replaces it.")
        tell = callback or _tell_nobody
        verify = {"ChecksumMode": "ENABLED"} if self._checksum == "crc32" else {}
        with _translated(self.get_uri(name), "download"):
            answer = self._client.get_object(Bucket=self.bucket, Key=self._key(name), **verify)
            size, done = _field(answer, "ContentLength"), 0
            with contextlib.closing(answer["Body"]) as body, atomic_write(Path(filename)) as file:
                while piece := body.read(_PIECE_BYTES):
                    file.write(piece)
                    done += len(piece)
                    tell(done, size)
        if not size:
            tell(0, 0)

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        if not size:
            self.get_object_size(name)
            return b""
        span = f"bytes={offset}-{offset + size - 1}"
        with _translated(self.get_uri(name), "read"), _suppressed(_BEYOND):
            answer = self._client.get_object(Bucket=self.bucket, Key=self._key(name), Range=span)
            with contextlib.closing(answer["Body"]) as body:
                if answer["ResponseMetadata"]["HTTPStatusCode"] == 206:
                    return body.read()
                return _range_of_all(answer, body, offset, size)
        return b""  # the object ends before the range begins

    def read_pieces(self, name: str, offset: int, size: int) -> Generator[bytes]:
        if not size:
            self.get_object_size(name)
            return
        span = f"bytes={offset}-{offset + size - 1}"
        with _translated(self.get_uri(name), "read"), _suppressed(_BEYOND):
            answer = self._client.get_object(Bucket=self.bucket, Key=self._key(name), Range=span)
            with contextlib.closing(answer["Body"]) as body:
                if answer["ResponseMetadata"]["HTTPStatusCode"] == 206:
                    while piece := body.read(_PIECE_BYTES):
                        yield piece
                else:
                    yield _range_of_all(answer, body, offset, size)

    def get_object_size(self, name: str) -> int:
        with _translated(self.get_uri(name), "get the size"):
            return _field(self._client.head_object(Bucket=self.bucket, Key=self._key(name)), "ContentLength")

    def list_objects(self, prefix: str = "", *, start_after: str = "") -> Sequence[ObjectInfo]:
        begin = len(self.prefix)
        found: list[ObjectInfo] = []
        with _translated(self.get_uri(prefix), "list"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self.prefix + prefix
            )
            for page in pages:
                _field(page, "IsTruncated")  # an empty answer is no empty listing
                for entry in page.get("Contents", ()):
                    name = entry["Key"][begin:]
                    if name > start_after and not name.endswith("/"):  # consoles make those to show an empty folder
                        found.append(ObjectInfo(name, entry["Size"], entry.get("LastModified")))
        found.sort(key=lambda info: info.name)  # some services list folder by folder: their StartAfter leaves out some
        return found

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def creates_atomically(self) -> bool:
        return self._conditional

    @property
    def least_part_bytes(self) -> int:
        return 5 << 20

    def start_parts(self, name: str) -> PartUpload:
        return self._start_parts("start parts", name)

    def _start_parts(self, operation: str, name: str) -> _S3PartUpload:
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self._checksum == "crc32" else {}
        with _translated(self.get_uri(name), operation):
            answer = self._client.create_multipart_upload(
                Bucket=self.bucket, Key=self._key(name), **algorithm, **self._acl
            )
            upload_id = _field(answer, "UploadId")
        return self._part_upload(name, upload_id, {})

    def unfinished_parts(self, prefix: str) -> Sequence[PartUpload]:
        with _translated(self.get_uri(prefix), "list unfinished uploads"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=self.prefix + prefix
            )
            entries = [entry for page in pages for entry in page.get("Uploads", ())]
        entries.sort(key=lambda entry: entry["Initiated"])
        begin = len(self.prefix)
        return [
            self._part_upload(entry["Key"][begin:], entry["UploadId"], None, entry["Initiated"].astimezone(UTC))
            for entry in entries
        ]

    def _part_upload(
        self, name: str, upload_id: str, sent: dict[int, _Part] | None, started_at: datetime | None = None
    ) -> _S3PartUpload:
        where = {"Bucket": self.bucket, "Key": self._key(name), "UploadId": upload_id}
        return _S3PartUpload(name, started_at, self._client, where, self.get_uri(name), self._checksum, sent)

    def close(self) -> None:
        self._client.close()


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """A part that the service has. ``crc32``: in base 64, empty where it is not known."""

    size_bytes: int
    etag: str
    crc32: str


@final
class _S3PartUpload(PartUpload):
    def __init__(
        self,
        name: str,
        started_at: datetime | None,
        client: Any,  # untyped by the SDK
        where: dict[str, str],
        uri: str,
        checksum: str,
        sent: dict[int, _Part] | None,
    ) -> None:
        super().__init__(name, where["UploadId"], started_at)
        self._client = client
        self._where = where
        self._uri = uri
        self._checksum = checksum
        self._sent = sent
        self._lock = threading.Lock()

    def has(self, number: int, data: memoryview) -> bool:
        part = self._known().get(number)
        if part is None or part.size_bytes != data.nbytes:
            return False
        if part.crc32:
            return part.crc32 == _crc32(data)
        if part.etag.strip('"') != _md5(data):
            return False
        if self._checksum == "crc32":  # some services do not tell it, and still want it at the end
            self._remember(number, _Part(part.size_bytes, part.etag, _crc32(data)))
        return True

    def send(self, number: int, data: memoryview) -> None:
        digest = _digest(self._checksum, data)
        with _translated(self._uri, f"send part {number}"):
            answer = self._client.upload_part(**self._where, PartNumber=number, Body=_body(data), **digest)
            etag = _field(answer, "ETag")
        self._remember(number, _Part(data.nbytes, etag, digest.get("ChecksumCRC32", "")))

    def _remember(self, number: int, part: _Part) -> None:
        known = self._known()
        with self._lock:
            known[number] = part

    def complete(self, *, count: int) -> None:
        known = self._known()
        if missing := [number for number in range(1, count + 1) if number not in known]:
            raise ObjectStoreError(f"{self._uri}: complete the upload: part {missing[0]} of {count} was not sent.")
        parts = [_named(number, known[number]) for number in range(1, count + 1)]
        with _translated(self._uri, "complete the upload"):
            self._client.complete_multipart_upload(**self._where, MultipartUpload={"Parts": parts})

    def abort(self) -> None:
        with _translated(self._uri, "abort the upload"), _suppressed(_NO_UPLOAD):
            self._client.abort_multipart_upload(**self._where)

    def _known(self) -> dict[int, _Part]:
        """The parts that the service has: what it says, once, and what was sent from here since."""
        with self._lock:
            if self._sent is None:
                with _translated(self._uri, "list parts"):
                    pages = self._client.get_paginator("list_parts").paginate(**self._where)
                    self._sent = {
                        entry["PartNumber"]: _Part(entry["Size"], entry["ETag"], entry.get("ChecksumCRC32", ""))
                        for page in pages
                        for entry in page.get("Parts", ())
                    }
            return self._sent


def _named(number: int, part: _Part) -> dict[str, Any]:
    checksum = {"ChecksumCRC32": part.crc32} if part.crc32 else {}
    return {"PartNumber": number, "ETag": part.etag, **checksum}


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class _NotOfferedError(ObjectStoreError):
    """The service says that it has no such operation."""


@contextlib.contextmanager
def _translated(uri: str, operation: str) -> Generator[None]:
    """Raise what the SDK raises as the errors that every store has."""
    what = f"{uri}: {operation}"
    try:
        yield
    except sdk.ClientError as e:
        raise _answered(e, what) from e
    except _NO_CREDENTIALS as e:
        raise PermissionError(
            f"{what}: no usable credentials: {e} Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile."
        ) from e
    except _LOST as e:
        if "CERTIFICATE_VERIFY_FAILED" in str(e):
            raise ObjectStoreError(f"{what}: the certificate of the service is not trusted: {e}") from e
        raise ObjectStoreTransientError(f"{what}: {e}") from e
    except sdk.ParamValidationError as e:
        raise ConfigError(f"{what}: {e}") from e
    except sdk.BotoCoreError as e:
        raise ObjectStoreError(f"{what}: {e}") from e
    except RuntimeError as e:
        if type(e) is RuntimeError and "credentials" in str(e):  # how the SDK says that new ones are expired, too
            raise PermissionError(f"{what}: {e}") from e
        raise


def _answered(e: sdk.ClientError, what: str) -> Exception:
    """What an answer of the service means. By its code first, then by its status: some statuses say less."""
    code, status, said = _code(e), _status(e), _said(e)
    if code in _CLOCK:
        return PermissionError(f"{what}: {said}. The clock of this machine is wrong: set it.")
    if code in _NO_BUCKET:
        return FileNotFoundError(f"{what}: there is no such bucket ({said}).")
    if code in _NO_UPLOAD:
        return FileNotFoundError(f"{what}: the service has no such upload any more ({said}).")
    if code in _NO_OBJECT:
        return FileNotFoundError(f"{what}: there is no such object, or no such bucket ({said}).")
    if code in _EXISTS:
        return FileExistsError(f"{what}: there is an object of this name ({said}).")
    if code in _REFUSED:
        return PermissionError(f"{what}: not allowed ({said}).")
    if code in _TRANSIENT:
        return ObjectStoreTransientError(f"{what}: {said}")
    if code == "NotImplemented" or status == 501:
        return _NotOfferedError(f"{what}: the service does not offer it ({said}).")
    if status in (401, 403):
        return PermissionError(f"{what}: not allowed ({said}).")
    if code == "400":  # the answer to HEAD has no reason in it
        return PermissionError(f"{what}: {said}: the credentials are expired, or the region is wrong.")
    if status == 429 or status >= 500:
        return ObjectStoreTransientError(f"{what}: {said}")
    return ObjectStoreError(f"{what}: {said}")


def _code(e: sdk.ClientError) -> str:
    return str(e.response.get("Error", {}).get("Code", ""))


def _status(e: sdk.ClientError) -> int:
    return int(e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _said(e: sdk.ClientError) -> str:
    reason = str(e.response.get("Error", {}).get("Message", "")).rstrip(".")
    return f"{_status(e)} {_code(e)}: {reason}"


@contextlib.contextmanager
def _suppressed(codes: set[str]) -> Generator[None]:
    """Take answers with these codes for success."""
    try:
        yield
    except sdk.ClientError as e:
        if _code(e) not in codes:
            raise


@contextlib.contextmanager
def _wrong_arguments() -> Generator[None]:
    try:
        yield
    except (sdk.ProfileNotFound, TypeError, ValueError) as e:
        raise ConfigError(f"S3ObjectStore: {e}") from e


def _field(answer: Mapping[str, Any], name: str) -> Any:
    if name not in answer:
        raise _NoAnswerError(f"the answer has no {name}: it is not that of an S3 service, or was cut short")
    return answer[name]


def _range_of_all(answer: Mapping[str, Any], body: Any, offset: int, size: int) -> bytes:
    """Of an answer that is not the range but all: the object has no other bytes, or the service has no ranges."""
    data = body.read(offset + size)
    if len(data) < min(offset + size, _field(answer, "ContentLength")):
        raise _NoAnswerError(f"the answer was cut short after {len(data)} bytes")
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
        "max_pool_connections": _CONNECTIONS,
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


def _merged(settings: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """``wanted`` over ``settings``; those of S3 one by one."""
    return {**settings, **wanted, "s3": {**settings["s3"], **wanted.get("s3", {})}}


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class _Body:
    """Memory, as the SDK reads a file, without a copy of it."""

    def __init__(self, data: memoryview) -> None:
        self._data = data.cast("B")
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int = -1) -> memoryview:
        # More than is asked for: the SDK asks for 16 KiB, and sends whatever it gets.
        length = len(self._data) if size < 0 else max(size, _PIECE_BYTES)
        piece = self._data[self._at : self._at + length]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at


def _body(data: memoryview) -> bytes | _Body:
    """Small ones as bytes: before it sends a file the SDK waits for the service to agree."""
    return bytes(data) if data.nbytes <= _PIECE_BYTES else _Body(data)


def _digest(checksum: str, data: memoryview) -> dict[str, str]:
    """The argument of a request by which the service verifies ``data``."""
    if checksum == "crc32":
        return {"ChecksumCRC32": _crc32(data)}
    return {"ContentMD5": base64.b64encode(bytes.fromhex(_md5(data))).decode()}


def _crc32(data: memoryview) -> str:
    """In base 64, as the protocol writes it."""
    return base64.b64encode(isal_zlib.crc32(data).to_bytes(4, "big")).decode()


def _md5(data: memoryview) -> str:
    """In hexadecimal."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _tell_nobody(done: int, total: int) -> None:
    """The callback of who gave none."""
