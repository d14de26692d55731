"""The documented path of object stores. They live in ``composerlite.storage``; an SDK loads with its class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composerlite.errors import ObjectStoreTransientError
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'composerlite.utils.object_store' has no attribute {name!r}")
    import composerlite.utils

    return getattr(composerlite.utils, name)
