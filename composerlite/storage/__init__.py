"""Object stores, transfers to and from them, and files of this machine. No module here imports torch.

``Transfer``, ``Uploader`` and the modules of the stores are imported at the first use: most runs need none of them.
``__all__`` lists the names for users. Other packages of composerlite also import names that ``__all__`` does not list.
"""

# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

from typing import TYPE_CHECKING

from composerlite.on_demand import lazy_names
from composerlite.storage.disk.files import FileDigest, StagedFile, atomic_write, chunk_bytes_for, make_folder
from composerlite.storage.disk.memory import HostMemory
from composerlite.storage.disk.reader import ParallelReader, verify_file
from composerlite.storage.disk.writer import Seal, StreamWriter
from composerlite.storage.object_store import ObjectInfo, ObjectRange, ObjectStore, PartUpload, Progress, check_name
from composerlite.storage.retry import RetryPolicy, retry
from composerlite.storage.uri import is_uri, open_store, parse_uri, without_secrets
from composerlite.storage.workers import Background, WorkerPool, leave_by, number_of

if TYPE_CHECKING:
    from composerlite.storage.transfer import Transfer, Uploader

__all__ = [
    "ObjectInfo",
    "ObjectRange",
    "ObjectStore",
    "PartUpload",
    "Progress",
    "RetryPolicy",
    "Transfer",
    "Uploader",
    "check_name",
    "is_uri",
    "open_store",
    "parse_uri",
    "retry",
]

__getattr__, __dir__ = lazy_names(__name__)
