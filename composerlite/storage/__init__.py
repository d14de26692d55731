"""Where bytes are kept. Nothing here imports torch or knows of training.

What talks to object stores is imported when it is first used: most runs have none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from composerlite.storage.background import Background, StagedFiles
from composerlite.storage.disk.digests import Digester, FileDigest, chunk_bytes_for
from composerlite.storage.disk.files import (
    SecondName,
    StagedFile,
    StagedLink,
    abandoned_temporaries,
    atomic_write,
    digest_file,
    fsync_folder,
    is_abandoned,
    make_folder,
    read_small_file,
    replace_symlink,
)
from composerlite.storage.disk.memory import Copier, Copying, HostMemory, available_memory
from composerlite.storage.disk.page_watch import PageWatch, whole_pages
from composerlite.storage.disk.reader import ParallelReader, verify_file
from composerlite.storage.disk.sink import Sink
from composerlite.storage.disk.stream_writer import RING_BYTES, StreamWriter
from composerlite.storage.helpers import Helpers, number_of, start_threads
from composerlite.storage.object_store import ObjectInfo, ObjectStore, PartUpload, Progress, check_name
from composerlite.storage.retry import RetryPolicy, retry
from composerlite.storage.sdk import isolate_sdk_rng
from composerlite.storage.uri import download_url, is_uri, maybe_create_object_store_from_uri, open_store, parse_uri

if TYPE_CHECKING:
    from composerlite.storage.stores.local import LocalObjectStore
    from composerlite.storage.transfer import Transfer
    from composerlite.storage.uploader import Uploader
    from composerlite.storage.verified_object import VerifiedObject

__all__ = [
    "RING_BYTES",
    "Background",
    "Copier",
    "Copying",
    "Digester",
    "FileDigest",
    "Helpers",
    "HostMemory",
    "LocalObjectStore",
    "ObjectInfo",
    "ObjectStore",
    "PageWatch",
    "ParallelReader",
    "PartUpload",
    "Progress",
    "RetryPolicy",
    "SecondName",
    "Sink",
    "StagedFile",
    "StagedFiles",
    "StagedLink",
    "StreamWriter",
    "Transfer",
    "Uploader",
    "VerifiedObject",
    "abandoned_temporaries",
    "atomic_write",
    "available_memory",
    "check_name",
    "chunk_bytes_for",
    "digest_file",
    "download_url",
    "fsync_folder",
    "is_abandoned",
    "is_uri",
    "isolate_sdk_rng",
    "make_folder",
    "maybe_create_object_store_from_uri",
    "number_of",
    "open_store",
    "parse_uri",
    "read_small_file",
    "replace_symlink",
    "retry",
    "start_threads",
    "verify_file",
    "whole_pages",
]

_HOMES = {
    "LocalObjectStore": "stores.local",
    "Transfer": "transfer",
    "Uploader": "uploader",
    "VerifiedObject": "verified_object",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'composerlite.storage' has no attribute {name!r}")
    return getattr(importlib.import_module(f"composerlite.storage.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
