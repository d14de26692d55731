"""The documented path of functions that save and load checkpoints by hand. They live in ``composerlite.checkpoint``."""

from composerlite.checkpoint import (
    PartialFilePath,
    get_save_filename,
    glob_filter,
    load_checkpoint,
    safe_torch_load,
    save_checkpoint,
)
from composerlite.checkpoint.download import download_checkpoint

__all__ = [
    "PartialFilePath",
    "download_checkpoint",
    "get_save_filename",
    "glob_filter",
    "load_checkpoint",
    "safe_torch_load",
    "save_checkpoint",
]
