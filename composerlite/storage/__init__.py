"""Stores, transfers and files. Nothing here imports torch or knows of training.

What talks to object stores is imported when it is first used: most runs have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from composerlite.on_demand import lazy_names
from composerlite.storage.disk.files import (
    FileDigest,
    StagedFile,
    abandoned_temporaries,
    atomic_write,
    chunk_bytes_for,
    fsync_folder,
    is_temporary,
    make_folder,
    pinned_file,
    replace_symlink,
    staged_symlink,
)
from composerlite.storage.disk.memory import HostMemory, WarmMemory, available_memory, copy_memory
from composerlite.storage.disk.reader import ParallelReader, verify_file
from composerlite.storage.disk.writer import Digester, Seal, Sink, StreamWriter
from composerlite.storage.object_store import (
    ObjectInfo,
    ObjectRange,
    ObjectStore,
    PartUpload,
    Progress,
    check_name,
    is_name,
)
from composerlite.storage.retry import RetryPolicy, retry
from composerlite.storage.sdk import importing_sdk, isolate_sdk_rng
from composerlite.storage.uri import (
    download_url,
    is_uri,
    maybe_create_object_store_from_uri,
    open_store,
    parse_uri,
    without_secrets,
)
from composerlite.storage.workers import (
    Background,
    StagedFiles,
    WorkerPool,
    leave_by,
    number_of,
    seconds_left,
    wait_at_exit,
    wait_no_more,
)

if TYPE_CHECKING:
    from composerlite.storage.transfer import Transfer, Uploader, VerifiedObject

__all__ = [
    "Background",
    "Digester",
    "FileDigest",
    "HostMemory",
    "ObjectInfo",
    "ObjectRange",
    "ObjectStore",
    "ParallelReader",
    "PartUpload",
    "Progress",
    "RetryPolicy",
    "Seal",
    "Sink",
    "StagedFile",
    "StagedFiles",
    "StreamWriter",
    "Transfer",
    "Uploader",
    "VerifiedObject",
    "WarmMemory",
    "WorkerPool",
    "abandoned_temporaries",
    "atomic_write",
    "available_memory",
    "check_name",
    "chunk_bytes_for",
    "copy_memory",
    "download_url",
    "fsync_folder",
    "importing_sdk",
    "is_name",
    "is_temporary",
    "is_uri",
    "isolate_sdk_rng",
    "leave_by",
    "make_folder",
    "maybe_create_object_store_from_uri",
    "number_of",
    "open_store",
    "parse_uri",
    "pinned_file",
    "replace_symlink",
    "retry",
    "seconds_left",
    "staged_symlink",
    "verify_file",
    "wait_at_exit",
    "wait_no_more",
    "without_secrets",
]

__getattr__, __dir__ = lazy_names(__name__)
