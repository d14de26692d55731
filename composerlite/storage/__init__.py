"""Where bytes are kept. Nothing here imports torch or knows of training."""

from composerlite.storage.digests import Digester, FileDigest, chunk_bytes_for
from composerlite.storage.disk import (
    StagedFile,
    abandoned_temporaries,
    atomic_write,
    digest_file,
    fsync_folder,
    make_folder,
    replace_symlink,
)
from composerlite.storage.memory import Copier, Copying, HostMemory, available_memory
from composerlite.storage.reader import ParallelReader, verify_file
from composerlite.storage.sink import Sink
from composerlite.storage.stream_writer import StreamWriter

__all__ = [
    "Copier",
    "Copying",
    "Digester",
    "FileDigest",
    "HostMemory",
    "ParallelReader",
    "Sink",
    "StagedFile",
    "StreamWriter",
    "abandoned_temporaries",
    "atomic_write",
    "available_memory",
    "chunk_bytes_for",
    "digest_file",
    "fsync_folder",
    "make_folder",
    "replace_symlink",
    "verify_file",
]
