"""Google Cloud Storage."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, final

from composerlite.errors import ConfigError, checked_arguments
from composerlite.storage.stores.base import BackendStore, checked_url

_XML_API = "https://storage.googleapis.com"

if TYPE_CHECKING:  # the verbs come with the protocol, whose SDK is imported when a store is opened
    from composerlite.storage.stores.gcs_json import GCSJSONObjectStore as _Verbs
else:
    _Verbs = BackendStore


@final
class GCSObjectStore(_Verbs):
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

    def __new__(cls, *_: Any, **__: Any) -> GCSObjectStore:
        return object.__new__(_by_s3() if _hmac_key() else _by_google())

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
        endpoint_url = checked_url("GCS", endpoint_url or os.environ.get("GCS_ENDPOINT_URL") or None)
        timeout = (connect_timeout_seconds, read_timeout_seconds)
        arguments: dict[str, Any] = {"endpoint_url": endpoint_url, "project": project, "timeout": timeout}
        if key := _hmac_key():
            arguments = _s3_arguments(endpoint_url, key, timeout)
        super().__init__(bucket, prefix, **arguments)


@functools.cache
def _by_google() -> type[GCSObjectStore]:
    """The class of the stores that speak Google's own protocol."""
    from composerlite.storage.stores.gcs_json import GCSJSONObjectStore

    return type("GCSObjectStore", (GCSObjectStore, GCSJSONObjectStore), {})


@functools.cache
def _by_s3() -> type[GCSObjectStore]:
    """The class of the stores that speak the S3 protocol."""
    from composerlite.storage.stores.s3 import S3ObjectStore

    return type("GCSObjectStore", (GCSObjectStore, S3ObjectStore), {})


def _s3_arguments(endpoint_url: str | None, key: tuple[str, str], timeout: tuple[float, float]) -> dict[str, Any]:
    """The arguments of ``S3ObjectStore`` for this service."""
    return {
        "endpoint_url": endpoint_url or _XML_API,
        "region_name": "auto",
        "aws_access_key_id": key[0],
        "aws_secret_access_key": key[1],
        "canned_acl": "",
        "client_config": {
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
        "checksum": "md5",
        "conditional_writes": False,
        "scheme": "gs",
        "connect_timeout_seconds": timeout[0],
        "read_timeout_seconds": timeout[1],
    }


def _hmac_key() -> tuple[str, str] | None:
    """Key and secret of the environment."""
    key, secret = os.environ.get("GCS_KEY"), os.environ.get("GCS_SECRET")
    if bool(key) != bool(secret):
        raise ConfigError("GCS: expected GCS_KEY and GCS_SECRET both in the environment, or none of them.")
    return (key, secret) if key and secret else None
