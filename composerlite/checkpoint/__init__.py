"""Checkpoints: what is saved, how it is written and committed, how it is found, verified and restored.

The names below are imported when they are first used: a listing needs no torch, and ``torch.distributed.checkpoint``
takes its time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composerlite.checkpoint.api.checkpointer import Checkpointer, CheckpointerConfig, CheckpointMetadata
    from composerlite.checkpoint.api.deepspeed_unsharding import unshard_zero
    from composerlite.checkpoint.api.state_dict import (
        async_save_model_and_optim_state,
        async_save_state_dict,
        get_checkpoint_metadata,
        load_keys,
        load_model_and_optim_state,
        load_state_dict,
        save_model_and_optim_state,
        save_state_dict,
    )
    from composerlite.checkpoint.api.unshard import UnshardStrategy, UnshardStrategyType, unshard_checkpoint
    from composerlite.checkpoint.format.deepspeed import DEEPSPEED_TYPES
    from composerlite.checkpoint.load.loading import load_checkpoint, read_checkpoint
    from composerlite.checkpoint.load.progress import download_bar, progress_of
    from composerlite.checkpoint.load.reading import safe_torch_load
    from composerlite.checkpoint.load.resume import Bucket, Choice, begin_attempt, choose, newest_good
    from composerlite.checkpoint.load.sharded.reader import RemoteFileSystemReader
    from composerlite.checkpoint.load.sharded.state_keys import merge_state_dicts, prune_state_dict, swap_param_keys
    from composerlite.checkpoint.place.catalog import Catalog
    from composerlite.checkpoint.place.lease import BucketLease, FolderLease, Lease, take_leases
    from composerlite.checkpoint.place.remote import RemoteCatalog
    from composerlite.checkpoint.place.several_disks import prepared_folder
    from composerlite.checkpoint.place.shared_folder import ONE_DISK, Disks, check_one_disk, disks_of
    from composerlite.checkpoint.record import rng
    from composerlite.checkpoint.record.contents import (
        IgnoreKeys,
        TrainingState,
        check_ignore_keys,
        check_kinds,
        glob_filter,
    )
    from composerlite.checkpoint.record.lineage import in_line, living_line, may_be_replaced
    from composerlite.checkpoint.record.manifest import FileRecord, Manifest, versions
    from composerlite.checkpoint.record.naming import (
        FIRST_RANK,
        PartialFilePath,
        archive_template,
        check_name_of_run,
        check_template,
        directory_template,
        ensure_no_conflict,
        format_name_with_dist,
        format_name_with_dist_and_time,
        get_save_filename,
        names_of_ranks,
    )
    from composerlite.checkpoint.record.retention import RetentionPolicy, deletions, retention_policy
    from composerlite.checkpoint.save.pipeline import PendingSave, Pipeline, save_checkpoint
    from composerlite.checkpoint.save.publishing import Publication, Publisher, RemoteSaving
    from composerlite.checkpoint.save.publishing_together import Shares
    from composerlite.checkpoint.save.save_job import SaveReport
    from composerlite.checkpoint.save.sharded.writing import RemoteFileSystemWriter

__all__ = [
    "DEEPSPEED_TYPES",
    "FIRST_RANK",
    "ONE_DISK",
    "Bucket",
    "BucketLease",
    "Catalog",
    "CheckpointMetadata",
    "Checkpointer",
    "CheckpointerConfig",
    "Choice",
    "Disks",
    "FileRecord",
    "FolderLease",
    "IgnoreKeys",
    "Lease",
    "Manifest",
    "PartialFilePath",
    "PendingSave",
    "Pipeline",
    "Publication",
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
    "begin_attempt",
    "check_ignore_keys",
    "check_kinds",
    "check_name_of_run",
    "check_one_disk",
    "check_template",
    "choose",
    "deletions",
    "directory_template",
    "disks_of",
    "download_bar",
    "ensure_no_conflict",
    "format_name_with_dist",
    "format_name_with_dist_and_time",
    "get_checkpoint_metadata",
    "get_save_filename",
    "glob_filter",
    "in_line",
    "living_line",
    "load_checkpoint",
    "load_keys",
    "load_model_and_optim_state",
    "load_state_dict",
    "may_be_replaced",
    "merge_state_dicts",
    "names_of_ranks",
    "newest_good",
    "prepared_folder",
    "progress_of",
    "prune_state_dict",
    "read_checkpoint",
    "retention_policy",
    "rng",
    "safe_torch_load",
    "save_checkpoint",
    "save_model_and_optim_state",
    "save_state_dict",
    "swap_param_keys",
    "take_leases",
    "unshard_checkpoint",
    "unshard_zero",
    "versions",
]

_HOMES = {
    "composerlite.checkpoint.place.catalog": ("Catalog",),
    "composerlite.checkpoint.api.checkpointer": ("CheckpointMetadata", "Checkpointer", "CheckpointerConfig"),
    "composerlite.checkpoint.record.contents": (
        "IgnoreKeys",
        "TrainingState",
        "check_ignore_keys",
        "check_kinds",
        "glob_filter",
    ),
    "composerlite.checkpoint.format.deepspeed": ("DEEPSPEED_TYPES",),
    "composerlite.checkpoint.load.sharded.reader": ("RemoteFileSystemReader",),
    "composerlite.checkpoint.save.sharded.writing": ("RemoteFileSystemWriter",),
    "composerlite.checkpoint.place.lease": ("BucketLease", "FolderLease", "Lease", "take_leases"),
    "composerlite.checkpoint.load.loading": ("load_checkpoint", "read_checkpoint"),
    "composerlite.checkpoint.record.manifest": ("FileRecord", "Manifest", "versions"),
    "composerlite.checkpoint.record.naming": (
        "FIRST_RANK",
        "PartialFilePath",
        "archive_template",
        "check_name_of_run",
        "check_template",
        "directory_template",
        "ensure_no_conflict",
        "format_name_with_dist",
        "format_name_with_dist_and_time",
        "get_save_filename",
        "names_of_ranks",
    ),
    "composerlite.checkpoint.record.lineage": ("in_line", "living_line", "may_be_replaced"),
    "composerlite.checkpoint.save.pipeline": ("PendingSave", "Pipeline", "save_checkpoint"),
    "composerlite.checkpoint.load.progress": ("download_bar", "progress_of"),
    "composerlite.checkpoint.save.publishing": ("Publication", "Publisher", "RemoteSaving"),
    "composerlite.checkpoint.save.publishing_together": ("Shares",),
    "composerlite.checkpoint.load.reading": ("safe_torch_load",),
    "composerlite.checkpoint.place.remote": ("RemoteCatalog",),
    "composerlite.checkpoint.load.resume": ("Bucket", "Choice", "begin_attempt", "choose", "newest_good"),
    "composerlite.checkpoint.record.retention": ("RetentionPolicy", "deletions", "retention_policy"),
    "composerlite.checkpoint.save.save_job": ("SaveReport",),
    "composerlite.checkpoint.place.several_disks": ("prepared_folder",),
    "composerlite.checkpoint.place.shared_folder": ("Disks", "ONE_DISK", "check_one_disk", "disks_of"),
    "composerlite.checkpoint.api.state_dict": (
        "async_save_model_and_optim_state",
        "async_save_state_dict",
        "get_checkpoint_metadata",
        "load_keys",
        "load_model_and_optim_state",
        "load_state_dict",
        "save_model_and_optim_state",
        "save_state_dict",
    ),
    "composerlite.checkpoint.load.sharded.state_keys": ("merge_state_dicts", "prune_state_dict", "swap_param_keys"),
    "composerlite.checkpoint.api.unshard": ("UnshardStrategy", "UnshardStrategyType", "unshard_checkpoint"),
    "composerlite.checkpoint.api.deepspeed_unsharding": ("unshard_zero",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "rng":
        return importlib.import_module("composerlite.checkpoint.record.rng")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'composerlite.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
