"""The import paths that documentation and scripts use. The code lives in the packages below; names load when used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composerlite.checkpoint import load_checkpoint, safe_torch_load, save_checkpoint
    from composerlite.checkpoint.format.packing import KNOWN_COMPRESSORS, get_compressor, is_compressed_pt, is_tar
    from composerlite.checkpoint.load.download import download_checkpoint, get_file
    from composerlite.checkpoint.record.contents import glob_filter
    from composerlite.checkpoint.record.naming import (
        PartialFilePath,
        format_name_with_dist,
        format_name_with_dist_and_time,
        get_save_filename,
    )
    from composerlite.core import FSDPConfig, ParallelismConfig, TPConfig, create_interval_scheduler
    from composerlite.errors import ObjectStoreTransientError
    from composerlite.storage import ObjectStore, maybe_create_object_store_from_uri, parse_uri, retry
    from composerlite.storage.stores.gcs import GCSObjectStore
    from composerlite.storage.stores.libcloud import LibcloudObjectStore
    from composerlite.storage.stores.oci import OCIObjectStore
    from composerlite.storage.stores.s3 import S3ObjectStore
    from composerlite.storage.stores.sftp import SFTPObjectStore
    from composerlite.utils import checkpoint, dist, object_store, reproducibility

__all__ = [
    "KNOWN_COMPRESSORS",
    "FSDPConfig",
    "GCSObjectStore",
    "LibcloudObjectStore",
    "OCIObjectStore",
    "ObjectStore",
    "ObjectStoreTransientError",
    "ParallelismConfig",
    "PartialFilePath",
    "S3ObjectStore",
    "SFTPObjectStore",
    "TPConfig",
    "checkpoint",
    "create_interval_scheduler",
    "dist",
    "download_checkpoint",
    "format_name_with_dist",
    "format_name_with_dist_and_time",
    "get_compressor",
    "get_file",
    "get_save_filename",
    "glob_filter",
    "is_compressed_pt",
    "is_tar",
    "load_checkpoint",
    "maybe_create_object_store_from_uri",
    "object_store",
    "parse_uri",
    "reproducibility",
    "retry",
    "safe_torch_load",
    "save_checkpoint",
]

_MODULES = ("checkpoint", "dist", "object_store", "reproducibility")
_HOMES = {
    **dict.fromkeys(("FSDPConfig", "ParallelismConfig", "TPConfig", "create_interval_scheduler"), "composerlite.core"),
    **dict.fromkeys(
        ("PartialFilePath", "format_name_with_dist", "format_name_with_dist_and_time", "get_save_filename"),
        "composerlite.checkpoint.record.naming",
    ),
    "glob_filter": "composerlite.checkpoint.record.contents",
    "ObjectStoreTransientError": "composerlite.errors",
    "S3ObjectStore": "composerlite.storage.stores.s3",
    "GCSObjectStore": "composerlite.storage.stores.gcs",
    "OCIObjectStore": "composerlite.storage.stores.oci",
    "LibcloudObjectStore": "composerlite.storage.stores.libcloud",
    "SFTPObjectStore": "composerlite.storage.stores.sftp",
    **dict.fromkeys(
        ("ObjectStore", "maybe_create_object_store_from_uri", "parse_uri", "retry"), "composerlite.storage"
    ),
    **dict.fromkeys(("download_checkpoint", "get_file"), "composerlite.checkpoint.load.download"),
    **dict.fromkeys(
        ("KNOWN_COMPRESSORS", "get_compressor", "is_compressed_pt", "is_tar"), "composerlite.checkpoint.format.packing"
    ),
}
"""Where a name lives that is not in ``composerlite.checkpoint``."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"composerlite.utils.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'composerlite.utils' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "composerlite.checkpoint")), name)


def __dir__() -> list[str]:
    return __all__
