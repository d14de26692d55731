"""Google Cloud Storage."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from composerlite.errors import ConfigError, checked_arguments
from composerlite.storage.object_store import ObjectInfo, ObjectStore, PartUpload, Progress, check_name

__all__ = ["GCSObjectStore"]

_XML_API = "https://storage.googleapis.com"


@final
class GCSObjectStore(ObjectStore):
    """Objects in a bucket of Google Cloud Storage. Needs ``composerlite[gcs]``.

    With an HMAC key in the environment, ``GCS_KEY`` and ``GCS_SECRET``, the service is spoken to by its S3 protocol
    (needs ``composerlite[s3]``): large objects go in parts, and ``create_only`` looks before it writes, as here that
    protocol cannot create atomically. Else credentials are Google's application default ones: the file that
    ``GOOGLE_APPLICATION_CREDENTIALS`` names, ``gcloud auth application-default login``, or the machine's own. Then
    objects are created atomically, and sent as a whole. Either way what is sent is verified by a checksum, and the
    SDK's own retries are off.

    Names are below ``prefix``; no verb returns it.

    Args:
        bucket: its name. It must exist.
        prefix: put before every name, with a slash between.
        endpoint_url: of the service, as in ``https://host``; else ``GCS_ENDPOINT_URL``, else Google's. For emulators
            that want no credentials, ``STORAGE_EMULATOR_HOST`` is heeded instead.
        project: that pays, if not the credentials' own.
        connect_timeout_seconds: until a connection must be there.
        read_timeout_seconds: without a byte from the service.

    Raises:
        ConfigError: an argument is wrong, or only one of ``GCS_KEY`` and ``GCS_SECRET`` is set.
        PermissionError: there are no credentials.
    """

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
        self.bucket = bucket
        self.prefix = f"{check_name(prefix.strip('/'))}/" if prefix.strip("/") else ""
        endpoint_url = _checked_url(endpoint_url or os.environ.get("GCS_ENDPOINT_URL") or None)
        timeout = (connect_timeout_seconds, read_timeout_seconds)
        if (key := _hmac_key()) is None:
            self._store = _open_json(bucket, self.prefix, endpoint_url, project, timeout)
        else:
            self._store = _open_xml(bucket, self.prefix, endpoint_url, key, timeout)

    @classmethod
    def at(cls, bucket: str, **backend_kwargs: Any) -> GCSObjectStore:
        """As :class:`GCSObjectStore`."""
        return cls(bucket, **backend_kwargs)

    def get_uri(self, name: str) -> str:
        return f"gs://{self.bucket}/{self.prefix}{name}"

    def upload_object(self, name: str, filename: str | Path, callback: Progress | None = None) -> None:
        self._store.upload_object(name, filename, callback)

    def put_bytes(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        self._store.put_bytes(name, data, create_only=create_only)

    def download_object(
        self, name: str, filename: str | Path, overwrite: bool = False, callback: Progress | None = None
    ) -> None:
        self._store.download_object(name, filename, overwrite, callback)

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        return self._store.read_range(name, offset, size)

    def get_object_size(self, name: str) -> int:
        return self._store.get_object_size(name)

    def list_objects(self, prefix: str = "", *, start_after: str = "") -> Sequence[ObjectInfo]:
        return self._store.list_objects(prefix, start_after=start_after)

    def delete_object(self, name: str) -> None:
        self._store.delete_object(name)

    def check_writable(self, prefix: str) -> None:
        self._store.check_writable(prefix)

    def close(self) -> None:
        self._store.close()

    @property
    def creates_atomically(self) -> bool:
        return self._store.creates_atomically

    def start_parts(self, name: str) -> PartUpload | None:
        return self._store.start_parts(name)

    def unfinished_parts(self, prefix: str) -> Sequence[PartUpload]:
        return self._store.unfinished_parts(prefix)

    @property
    def least_part_bytes(self) -> int:
        return self._store.least_part_bytes

    @property
    def most_parts(self) -> int:
        return self._store.most_parts


def _hmac_key() -> tuple[str, str] | None:
    """Key and secret of the environment."""
    key, secret = os.environ.get("GCS_KEY"), os.environ.get("GCS_SECRET")
    if bool(key) != bool(secret):
        raise ConfigError("GCS: want GCS_KEY and GCS_SECRET both in the environment, or none of them.")
    return (key, secret) if key and secret else None


def _checked_url(endpoint_url: str | None) -> str | None:
    if endpoint_url is not None and not re.fullmatch(r"https?://[^\s/?#]+/?", endpoint_url):
        raise ConfigError(f"GCS: endpoint_url={endpoint_url!r}: want scheme and host, as in 'https://host'.")
    return endpoint_url


def _open_xml(
    bucket: str, prefix: str, endpoint_url: str | None, key: tuple[str, str], timeout: tuple[float, float]
) -> ObjectStore:
    """The bucket by the S3 protocol."""
    from composerlite.storage.s3 import S3ObjectStore

    when_required = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    return S3ObjectStore(
        bucket,
        prefix,
        endpoint_url=endpoint_url or _XML_API,
        region_name="auto",
        aws_access_key_id=key[0],
        aws_secret_access_key=key[1],
        canned_acl="",
        client_config=when_required,
        checksum="md5",
        conditional_writes=False,
        scheme="gs",
        connect_timeout_seconds=timeout[0],
        read_timeout_seconds=timeout[1],
    )


def _open_json(
    bucket: str, prefix: str, endpoint_url: str | None, project: str | None, timeout: tuple[float, float]
) -> ObjectStore:
    """The bucket by Google's own protocol."""
    from composerlite.storage.gcs_json import GCSJSONObjectStore

    return GCSJSONObjectStore(bucket, prefix, endpoint_url=endpoint_url, project=project, timeout=timeout)
