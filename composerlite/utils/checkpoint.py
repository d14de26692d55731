"""Documented import path of functions to save and load checkpoints, from ``composerlite.checkpoint``."""

from typing import TYPE_CHECKING

from composerlite.checkpoint import load_checkpoint, safe_torch_load, save_checkpoint
from composerlite.checkpoint.contents import glob_filter
from composerlite.checkpoint.load.resolve import download_checkpoint
from composerlite.checkpoint.record.naming import PartialFilePath, get_save_filename
from composerlite.on_demand import lazy_names

if TYPE_CHECKING:
    from composerlite.checkpoint.load.sharded_reader import DistCPObjectStoreReader, FileSystemReaderWithValidation

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

__getattr__, __dir__ = lazy_names(__name__)  # on demand: torch.distributed.checkpoint is slow to import
