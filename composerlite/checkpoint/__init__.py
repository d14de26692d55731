"""Checkpoints: what is saved, how it is written and committed, how it is found, verified and restored.

The functions on sharded directories are imported when first used: ``torch.distributed.checkpoint`` takes its time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from composerlite.checkpoint import rng
from composerlite.checkpoint.catalog import Catalog
from composerlite.checkpoint.contents import IgnoreKeys, TrainingState, check_ignore_keys, glob_filter
from composerlite.checkpoint.loading import load_checkpoint, read_checkpoint
from composerlite.checkpoint.manifest import FileRecord, Manifest
from composerlite.checkpoint.naming import (
    FIRST_RANK,
    PartialFilePath,
    archive_template,
    check_template,
    directory_template,
    ensure_no_conflict,
    format_name_with_dist,
    format_name_with_dist_and_time,
    get_save_filename,
    names_of_ranks,
)
from composerlite.checkpoint.pipeline import PendingSave, Pipeline, save, save_checkpoint
from composerlite.checkpoint.progress import download_bar
from composerlite.checkpoint.publishing import Publisher, RemoteSaving
from composerlite.checkpoint.publishing_together import Shares
from composerlite.checkpoint.reading import safe_torch_load
from composerlite.checkpoint.remote import RemoteCatalog
from composerlite.checkpoint.resume import Bucket, newest_good
from composerlite.checkpoint.retention import RetentionPolicy, deletions, retention_policy
from composerlite.checkpoint.save_job import SaveReport
from composerlite.checkpoint.several_disks import prepared_folder
from composerlite.checkpoint.shared_folder import ONE_DISK, Disks, check_one_disk, disks_of
from composerlite.checkpoint.together import from_first_rank, together

if TYPE_CHECKING:
    from composerlite.checkpoint.checkpointer import Checkpointer, CheckpointerConfig, CheckpointMetadata
    from composerlite.checkpoint.formats.deepspeed import DEEPSPEED_TYPES
    from composerlite.checkpoint.formats.sharded import RemoteFileSystemReader
    from composerlite.checkpoint.formats.sharded_writing import RemoteFileSystemWriter
    from composerlite.checkpoint.state_dict import (
        async_save_model_and_optim_state,
        async_save_state_dict,
        get_checkpoint_metadata,
        load_keys,
        load_model_and_optim_state,
        load_state_dict,
        save_model_and_optim_state,
        save_state_dict,
    )
    from composerlite.checkpoint.state_keys import merge_state_dicts, prune_state_dict, swap_param_keys
    from composerlite.checkpoint.unshard import UnshardStrategy, UnshardStrategyType, unshard_checkpoint
    from composerlite.checkpoint.zero_unsharding import unshard_zero

__all__ = [
    "DEEPSPEED_TYPES",
    "FIRST_RANK",
    "ONE_DISK",
    "Bucket",
    "Catalog",
    "CheckpointMetadata",
    "Checkpointer",
    "CheckpointerConfig",
    "Disks",
    "FileRecord",
    "IgnoreKeys",
    "Manifest",
    "PartialFilePath",
    "PendingSave",
    "Pipeline",
    "Publisher",
    "RemoteCatalog",
    "RemoteFileSystemReader",
    "RemoteFileSystemWriter",
    "RemoteSaving",
    "RetentionPolicy",
    "SaveReport",
    "Shares",
    "TrainingState",
    "UnshardStrategy",
    "UnshardStrategyType",
    "archive_template",
    "async_save_model_and_optim_state",
    "async_save_state_dict",
    "check_ignore_keys",
    "check_one_disk",
    "check_template",
    "deletions",
    "directory_template",
    "disks_of",
    "download_bar",
    "ensure_no_conflict",
    "format_name_with_dist",
    "format_name_with_dist_and_time",
    "from_first_rank",
    "get_checkpoint_metadata",
    "get_save_filename",
    "glob_filter",
    "load_checkpoint",
    "load_keys",
    "load_model_and_optim_state",
    "load_state_dict",
    "merge_state_dicts",
    "names_of_ranks",
    "newest_good",
    "prepared_folder",
    "prune_state_dict",
    "read_checkpoint",
    "retention_policy",
    "rng",
    "safe_torch_load",
    "save",
    "save_checkpoint",
    "save_model_and_optim_state",
    "save_state_dict",
    "swap_param_keys",
    "together",
    "unshard_checkpoint",
    "unshard_zero",
]

_HOMES = {
    "composerlite.checkpoint.checkpointer": ("CheckpointMetadata", "Checkpointer", "CheckpointerConfig"),
    "composerlite.checkpoint.formats.deepspeed": ("DEEPSPEED_TYPES",),
    "composerlite.checkpoint.formats.sharded": ("RemoteFileSystemReader",),
    "composerlite.checkpoint.formats.sharded_writing": ("RemoteFileSystemWriter",),
    "composerlite.checkpoint.state_dict": (
        "async_save_model_and_optim_state",
        "async_save_state_dict",
        "get_checkpoint_metadata",
        "load_keys",
        "load_model_and_optim_state",
        "load_state_dict",
        "save_model_and_optim_state",
        "save_state_dict",
    ),
    "composerlite.checkpoint.state_keys": ("merge_state_dicts", "prune_state_dict", "swap_param_keys"),
    "composerlite.checkpoint.unshard": ("UnshardStrategy", "UnshardStrategyType", "unshard_checkpoint"),
    "composerlite.checkpoint.zero_unsharding": ("unshard_zero",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'composerlite.checkpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
