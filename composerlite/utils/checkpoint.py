"""The documented path of functions that save and load checkpoints by hand. They live in ``composerlite.checkpoint``."""

import importlib
from typing import TYPE_CHECKING, Any

from composerlite.checkpoint import load_checkpoint, safe_torch_load, save_checkpoint
from composerlite.checkpoint.load.download import download_checkpoint
from composerlite.checkpoint.record.contents import glob_filter
from composerlite.checkpoint.record.naming import PartialFilePath, get_save_filename

if TYPE_CHECKING:
    from composerlite.checkpoint.load.sharded.readers_of_stores import (
        DistCPObjectStoreReader,
        FileSystemReaderWithValidation,
    )

__all__ = [
    "DistCPObjectStoreReader",
    "FileSystemReaderWithValidation",
    "PartialFilePath",
    "download_checkpoint",
    "get_save_filename",
    "glob_filter",
    "load_checkpoint",
    "safe_torch_load",
    "save_checkpoint",
]

_READERS = ("DistCPObjectStoreReader", "FileSystemReaderWithValidation")


def __getattr__(name: str) -> Any:
    if name not in _READERS:  # they need torch.distributed.checkpoint, which takes its time
        raise AttributeError(f"module 'composerlite.utils.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module("composerlite.checkpoint.load.sharded.readers_of_stores"), name)


def __dir__() -> list[str]:
    return __all__
