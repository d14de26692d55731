"""Oracle's Object Storage."""

from __future__ import annotations

import base64
import configparser
import contextlib
import hashlib
import os
import re
import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, final

from composerlite.errors import ConfigError, ObjectStoreError, ObjectStoreTransientError, checked_arguments
from composerlite.storage.chance import draw_apart
from composerlite.storage.disk.files import atomic_write
from composerlite.storage.object_store import ObjectInfo, ObjectStore, PartUpload, Progress, check_name

try:
    import oci
    from oci import exceptions as sdk
    from urllib3.exceptions import HTTPError
except ImportError as e:
    raise ConfigError("oci, which Oracle's storage needs, is not installed: pip install 'composerlite[oci]'") from e

draw_apart("oci", "urllib3")

__all__ = ["OCIObjectStore"]

_PIECE_BYTES = 1 << 20
_CONNECTIONS = 64
_TRANSIENT = {408, 429, 500, 502, 503, 504}
_TRANSIENT_CODES = {"ConcurrentObjectUpdate", "UnmatchedContentMD5"}
_NO_UPLOAD = {"NoSuchUpload", "InvalidUploadId"}
_HIDDEN = {"BucketNotFound", "NamespaceNotFound", "NotAuthorizedOrNotFound"}
"""What the service also answers where the user may not know that it exists."""
_WANTED = "composerlite needs the keys user, tenancy, fingerprint, region and key_file"


@final
class OCIObjectStore(ObjectStore):
    """Objects in a bucket of Oracle's Object Storage. Needs ``composerlite[oci]``.

    Credentials are those of a profile of Oracle's configuration file, which ``oci setup config`` writes. Every object
    and part is sent with its MD5, which the service verifies. The SDK's own retries are off.

    Names are below ``prefix``; no verb returns it.

    Args:
        bucket: its name. It must exist.
        prefix: put before every name, with a slash between.
        namespace: of the tenancy; else the service is asked for it once.
        config_file: else ``OCI_CONFIG_FILE``, else ``~/.oci/config``.
        profile: of the configuration file.
        endpoint_url: of the service, as in ``https://host``; else ``OCI_ENDPOINT_URL``, else that of the region.
        connect_timeout_seconds: until a connection must be there.
        read_timeout_seconds: without a byte from the service.

    Raises:
        ConfigError: there is no configuration file, no such profile, or a key of it is missing or malformed.
        PermissionError: the private key that it names cannot be read.
    """

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
        self.bucket = bucket
        self.prefix = f"{check_name(prefix.strip('/'))}/" if prefix.strip("/") else ""
        endpoint_url = _checked_url(endpoint_url or os.environ.get("OCI_ENDPOINT_URL") or None)
        timeout = (connect_timeout_seconds, read_timeout_seconds)
        path = Path(config_file or os.environ.get("OCI_CONFIG_FILE") or "~/.oci/config").expanduser()
        client = _new_client(_read_config(path, profile), path, endpoint_url, timeout)
        self._requests = _Requests(client, bucket, f"oci://{bucket}/{self.prefix}", namespace)

    @classmethod
    def at(cls, bucket: str, **backend_kwargs: Any) -> OCIObjectStore:
        """As :class:`OCIObjectStore`."""
        return cls(bucket, **backend_kwargs)

    def get_uri(self, name: str) -> str:
        return f"{self._requests.uri}{name}"

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────
    def upload_object(self, name: str, filename: str | Path, callback: Progress | None = None) -> None:
        check_name(name)
        with Path(filename).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.file_digest(file, _new_md5).digest()
            file.seek(0)
            body = _Body(file.read, size, callback) if size else b""
            with self._requests.translated("upload", name):
                self._requests.call("put_object", self.prefix + name, body, content_md5=_base64(digest))
        if callback is not None:
            callback(size, size)

    def put_bytes(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        check_name(name)
        condition = {"if_none_match": "*"} if create_only else {}
        with self._requests.translated("create" if create_only else "write", name):
            self._requests.call("put_object", self.prefix + name, bytes(data), content_md5=_md5(data), **condition)

    def delete_object(self, name: str) -> None:
        check_name(name)
        with self._requests.translated("delete", name), _suppressed({"ObjectNotFound"}):
            self._requests.call("delete_object", self.prefix + name)

    def check_writable(self, prefix: str) -> None:
        name = f"{prefix}{'/' if prefix and not prefix.endswith('/') else ''}check-{secrets.token_hex(8)}"
        self._start_parts("check that objects can be written", name).abort()

    @property
    def creates_atomically(self) -> bool:
        return True

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────
    def download_object(
        self, name: str, filename: str | Path, overwrite: bool = False, callback: Progress | None = None
    ) -> None:
        check_name(name)
        if os.path.lexists(filename) and not overwrite:
            raise FileExistsError(f"{filename}: there is a file of this name; overwrite=True replaces it.")
        digest, done = _new_md5(), 0
        with self._requests.translated("download", name):
            answer = self._requests.call("get_object", self.prefix + name)
            size = int(answer.headers["content-length"])
            with contextlib.closing(answer.data), atomic_write(Path(filename)) as file:
                for piece in answer.data.raw.stream(_PIECE_BYTES, decode_content=False):
                    file.write(piece)
                    digest.update(piece)
                    done += len(piece)
                    if callback is not None:
                        callback(done, size)
                expected = answer.headers.get("content-md5")  # the service has none of what was sent in parts
                if expected is not None and expected != _base64(digest.digest()):
                    raise ObjectStoreTransientError(
                        f"{self.get_uri(name)}: download: other bytes than the service has."
                    )
        if not size and callback is not None:
            callback(0, 0)

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        check_name(name)
        if not size:
            self.get_object_size(name)
            return b""
        with self._requests.translated("read", name), _suppressed({"InvalidRange"}):
            answer = self._requests.call("get_object", self.prefix + name, range=f"bytes={offset}-{offset + size - 1}")
            with contextlib.closing(answer.data):
                data: bytes = answer.data.raw.read(decode_content=False)
            return data if answer.status == 206 else data[offset : offset + size]
        return b""  # the object ends before the range begins

    def get_object_size(self, name: str) -> int:
        check_name(name)
        with self._requests.translated("get the size", name):
            return int(self._requests.call("head_object", self.prefix + name).headers["content-length"])

    def list_objects(self, prefix: str = "", *, start_after: str = "") -> Sequence[ObjectInfo]:
        begin = len(self.prefix)
        found: list[ObjectInfo] = []
        start: dict[str, str] = {"start_after": self.prefix + start_after} if start_after else {}
        with self._requests.translated("list", prefix):
            while True:
                page = self._requests.call(
                    "list_objects", prefix=self.prefix + prefix, fields="name,size,timeModified", **start
                ).data
                for entry in page.objects:
                    if not entry.name.endswith("/"):  # consoles make such an object to show an empty folder
                        found.append(ObjectInfo(entry.name[begin:], entry.size, entry.time_modified))
                if not page.next_start_with:
                    return found
                start = {"start": page.next_start_with}

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def least_part_bytes(self) -> int:
        return 10 << 20

    def start_parts(self, name: str) -> PartUpload:
        check_name(name)
        return self._start_parts("start parts", name)

    def _start_parts(self, operation: str, name: str) -> _OCIPartUpload:
        details = oci.object_storage.models.CreateMultipartUploadDetails(object=self.prefix + name)
        with self._requests.translated(operation, name):
            answer = self._requests.call("create_multipart_upload", details).data
        return self._part_upload(name, answer.upload_id, {}, answer.time_created)

    def unfinished_parts(self, prefix: str) -> Sequence[PartUpload]:
        with self._requests.translated("list unfinished uploads", prefix):
            entries = [
                e for e in self._requests.pages("list_multipart_uploads") if e.object.startswith(self.prefix + prefix)
            ]
        entries.sort(key=lambda entry: entry.time_created)
        begin = len(self.prefix)
        return [self._part_upload(e.object[begin:], e.upload_id, None, e.time_created) for e in entries]

    def _part_upload(
        self, name: str, upload_id: str, sent: dict[int, _Part] | None, started_at: datetime | None
    ) -> _OCIPartUpload:
        return _OCIPartUpload(self._requests, self.prefix + name, name, upload_id, sent, started_at)

    def close(self) -> None:
        self._requests.client.base_client.session.close()


@final
class _Requests:
    """The requests of one bucket: what the SDK is asked, and its errors as ours.

    Attributes:
        client: of the SDK, which is not typed.
        uri: of the names, for messages.
    """

    def __init__(self, client: Any, bucket: str, uri: str, namespace: str | None) -> None:
        self.client = client
        self.uri = uri
        self._bucket = bucket
        self._namespace = namespace
        self._lock = threading.Lock()

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """What the SDK's ``verb`` answers for this bucket."""
        with self._lock:
            if self._namespace is None:
                self._namespace = str(self.client.get_namespace().data)
        return getattr(self.client, verb)(self._namespace, self._bucket, *args, **kwargs)

    def pages(self, verb: str, *args: Any) -> Iterator[Any]:
        """What the SDK's ``verb`` lists, from all pages."""
        page: dict[str, str] = {}
        while True:
            answer = self.call(verb, *args, **page)
            yield from answer.data
            if not answer.has_next_page:
                return
            page = {"page": answer.next_page}

    @contextlib.contextmanager
    def translated(self, operation: str, name: str) -> Generator[None]:
        """Raise the SDK's errors as ours."""
        where = f"{self.uri}{name}: {operation}"
        try:
            yield
        except sdk.ServiceError as e:
            raise _as_ours(e, where) from e
        except (sdk.RequestException, sdk.ConnectTimeout, HTTPError, ConnectionError, TimeoutError) as e:
            raise ObjectStoreTransientError(f"{where}: {_root(e)}") from e
        except sdk.ClientError as e:
            raise ObjectStoreError(f"{where}: {e}") from e


def _as_ours(error: sdk.ServiceError, where: str) -> Exception:
    """The error that says what the service's answer means."""
    text = f"{where}: {error.status} {error.code or ''}: {error.message}"
    if error.status == 404 and error.code in _HIDDEN:
        return FileNotFoundError(f"{text} (Or the user may not see it: the service does not tell which.)")
    if error.status == 404:
        return FileNotFoundError(text)
    if error.status == 412:
        return FileExistsError(f"{where}: there is an object of this name.")
    if error.status in (401, 403):
        hint = "See that user, fingerprint and key_file of the configuration belong together and the clock is right."
        return PermissionError(f"{text}. {hint}" if error.status == 401 else text)
    if error.status in _TRANSIENT or error.code in _TRANSIENT_CODES:
        return ObjectStoreTransientError(text)
    return ObjectStoreError(text)


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """A part that the service has: how it calls it, and the MD5 of its bytes."""

    etag: str
    md5: str


@final
class _OCIPartUpload(PartUpload):
    """An upload in parts. Those that an earlier process sent are asked for once, when they are needed."""

    def __init__(
        self,
        requests: _Requests,
        key: str,
        name: str,
        upload_id: str,
        sent: dict[int, _Part] | None,
        started_at: datetime | None,
    ) -> None:
        super().__init__(name, upload_id, started_at)
        self._requests = requests
        self._key = key
        self._lock = threading.Lock()
        self._sent = sent

    def has(self, number: int, data: memoryview) -> bool:
        part = self._known().get(number)
        return part is not None and part.md5 == _md5(data)

    def send(self, number: int, data: memoryview) -> None:
        md5 = _md5(data)
        body = _Body(_reading(data), data.nbytes) if data.nbytes else b""
        with self._requests.translated(f"send part {number}", self.name):
            answer = self._requests.call("upload_part", self._key, self.upload_id, number, body, content_md5=md5)
        with self._lock:
            if self._sent is not None:
                self._sent[number] = _Part(answer.headers["etag"], md5)

    def complete(self, *, count: int) -> None:
        parts = self._known()
        missing = [number for number in range(1, count + 1) if number not in parts]
        if missing:
            raise ObjectStoreError(f"{self._requests.uri}{self.name}: complete parts: it has no part {missing[0]}.")
        models = oci.object_storage.models
        chosen = [
            models.CommitMultipartUploadPartDetails(part_num=number, etag=parts[number].etag)
            for number in range(1, count + 1)
        ]
        details = models.CommitMultipartUploadDetails(parts_to_commit=chosen)
        with self._requests.translated("complete parts", self.name):
            self._requests.call("commit_multipart_upload", self._key, self.upload_id, details)

    def abort(self) -> None:
        with self._requests.translated("abort parts", self.name), _suppressed(_NO_UPLOAD):
            self._requests.call("abort_multipart_upload", self._key, self.upload_id)

    def _known(self) -> dict[int, _Part]:
        """The parts that the service has."""
        with self._lock:
            if self._sent is None:
                with self._requests.translated("list parts", self.name):
                    entries = self._requests.pages("list_multipart_upload_parts", self._key, self.upload_id)
                    self._sent = {entry.part_number: _Part(entry.etag, entry.md5) for entry in entries}
            return dict(self._sent)


@final
class _Body:
    """What the SDK reads and sends: ``size`` bytes, without a copy of all of them.

    Args:
        read: returns the next so many bytes.
        size: of all, not 0: the SDK would send an empty one in another encoding.
        callback: is told how many were taken.
    """

    def __init__(self, read: Callable[[int], bytes | memoryview], size: int, callback: Progress | None = None) -> None:
        self._read = read
        self._size = size
        self._taken = 0
        self._callback = callback

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return iter(lambda: self.read(_PIECE_BYTES), b"")

    def read(self, size: int = -1) -> bytes | memoryview:
        left = self._size - self._taken
        piece = self._read(left if size < 0 else min(size, left))
        self._taken += len(piece)
        if self._callback is not None and piece:
            self._callback(self._taken, self._size)
        return piece


def _reading(data: memoryview) -> Callable[[int], memoryview]:
    """A function that returns the next so many bytes of ``data``."""
    view, at = data.cast("B"), 0

    def read(size: int) -> memoryview:
        nonlocal at
        at += size
        return view[at - size : at]

    return read


def _read_config(path: Path, profile: str) -> dict[str, Any]:
    """The settings of ``profile`` in the configuration file ``path``, checked."""
    try:
        config: dict[str, Any] = oci.config.from_file(str(path), profile)
        oci.config.validate_config(config)
    except sdk.ConfigFileNotFound as e:
        raise ConfigError(
            f"OCI: there is no configuration file {path}: write one with 'oci setup config', or name another by"
            f" OCI_CONFIG_FILE or config_file. {_WANTED}."
        ) from e
    except sdk.ProfileNotFound as e:
        raise ConfigError(f"OCI: the configuration file {path} has no profile {profile!r}.") from e
    except sdk.InvalidKeyFilePath as e:
        raise PermissionError(f"OCI: the private key that key_file in {path} names is not there: {e}") from e
    except sdk.InvalidConfig as e:
        wrong = ", ".join(f"{key} is {why}" for key, why in e.errors.items())
        raise ConfigError(f"OCI: in profile {profile!r} of {path}: {wrong}. {_WANTED}.") from e
    except (sdk.ClientError, configparser.Error, ValueError) as e:
        raise ConfigError(f"OCI: the configuration file {path} cannot be read: {e}") from e
    return config


def _new_client(config: dict[str, Any], path: Path, endpoint_url: str | None, timeout: tuple[float, float]) -> Any:
    """The SDK's client, which tries nothing twice and has room for the connections of many threads."""
    try:
        client = oci.object_storage.ObjectStorageClient(
            config,
            service_endpoint=endpoint_url,
            timeout=timeout,
            retry_strategy=oci.retry.NoneRetryStrategy(),
            circuit_breaker_strategy=oci.circuit_breaker.NoCircuitBreakerStrategy(),
        )
    except (sdk.InvalidPrivateKey, OSError) as e:
        raise PermissionError(
            f"OCI: the private key {config.get('key_file')} that {path} names is of no use: {e}"
        ) from e
    client.base_client.session.get_adapter(client.base_client.endpoint).init_poolmanager(_CONNECTIONS, _CONNECTIONS)
    return client


def _checked_url(endpoint_url: str | None) -> str | None:
    if endpoint_url is not None and not re.fullmatch(r"https?://[^\s/?#]+/?", endpoint_url):
        raise ConfigError(f"OCI: endpoint_url={endpoint_url!r}: want scheme and host, as in 'https://host'.")
    return endpoint_url


@contextlib.contextmanager
def _suppressed(codes: set[str]) -> Generator[None]:
    """Pass over answers of the service with one of ``codes``."""
    try:
        yield
    except sdk.ServiceError as e:
        if e.code not in codes:
            raise


def _root(error: BaseException) -> str:
    """The error that was first: those around it repeat the address."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"


def _new_md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _md5(data: bytes | memoryview) -> str:
    return _base64(hashlib.md5(data, usedforsecurity=False).digest())
