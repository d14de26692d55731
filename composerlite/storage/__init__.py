"""Where bytes are kept. Nothing here imports torch or knows of training."""

from composerlite.storage.disk import (
    DigestWriter,
    StagedFile,
    abandoned_temporaries,
    atomic_write,
    digest_file,
    fsync_folder,
    replace_symlink,
)

__all__ = [
    "DigestWriter",
    "StagedFile",
    "abandoned_temporaries",
    "atomic_write",
    "digest_file",
    "fsync_folder",
    "replace_symlink",
]
