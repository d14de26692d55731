"""Where bytes are kept. Nothing here imports torch or knows of training."""

from composerlite.storage.digests import Digester, FileDigest, chunk_bytes_for
from composerlite.storage.disk import (
    StagedFile,
    abandoned_temporaries,
    atomic_write,
    digest_file,
    fsync_folder,
    replace_symlink,
)
from composerlite.storage.stream_writer import StreamWriter

__all__ = [
    "Digester",
    "FileDigest",
    "StagedFile",
    "StreamWriter",
    "abandoned_temporaries",
    "atomic_write",
    "chunk_bytes_for",
    "digest_file",
    "fsync_folder",
    "replace_symlink",
]
