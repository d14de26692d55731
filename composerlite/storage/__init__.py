"""Where bytes are kept. Nothing here imports torch or knows of training."""

from composerlite.storage.digests import Digester, FileDigest, chunk_bytes_for
from composerlite.storage.disk import (
    SecondName,
    StagedFile,
    abandoned_temporaries,
    atomic_write,
    digest_file,
    fsync_folder,
    make_folder,
    replace_symlink,
)
from composerlite.storage.http import download_url
from composerlite.storage.memory import Copier, Copying, HostMemory, available_memory
from composerlite.storage.object_store import ObjectInfo, ObjectStore, PartUpload, Progress, check_name
from composerlite.storage.reader import ParallelReader, verify_file
from composerlite.storage.retry import RetryPolicy, retry
from composerlite.storage.sink import Sink
from composerlite.storage.stream_writer import StreamWriter
from composerlite.storage.transfer import Transfer
from composerlite.storage.uploader import Uploader
from composerlite.storage.uri import is_uri, maybe_create_object_store_from_uri, open_store, parse_uri

__all__ = [
    "Copier",
    "Copying",
    "Digester",
    "FileDigest",
    "HostMemory",
    "ObjectInfo",
    "ObjectStore",
    "ParallelReader",
    "PartUpload",
    "Progress",
    "RetryPolicy",
    "SecondName",
    "Sink",
    "StagedFile",
    "StreamWriter",
    "Transfer",
    "Uploader",
    "abandoned_temporaries",
    "atomic_write",
    "available_memory",
    "check_name",
    "chunk_bytes_for",
    "digest_file",
    "download_url",
    "fsync_folder",
    "is_uri",
    "make_folder",
    "maybe_create_object_store_from_uri",
    "open_store",
    "parse_uri",
    "replace_symlink",
    "retry",
    "verify_file",
]
