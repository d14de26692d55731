"""Documented import path of object stores, from ``composerlite.storage``. SDKs are imported on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composerlite.errors import ObjectStoreTransientError
from composerlite.on_demand import lazy_names
from composerlite.storage import ObjectStore

if TYPE_CHECKING:
    from composerlite.storage.stores.gcs import GCSObjectStore
    from composerlite.storage.stores.libcloud import LibcloudObjectStore
    from composerlite.storage.stores.oci import OCIObjectStore
    from composerlite.storage.stores.s3 import S3ObjectStore
    from composerlite.storage.stores.sftp import SFTPObjectStore

__all__ = [
    "GCSObjectStore",
    "LibcloudObjectStore",
    "OCIObjectStore",
    "ObjectStore",
    "ObjectStoreTransientError",
    "S3ObjectStore",
    "SFTPObjectStore",
]

__getattr__, __dir__ = lazy_names(__name__)
