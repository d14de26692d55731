"""Checkpoints: what is saved, how it is written and committed, how it is found, verified and restored."""

from composerlite.checkpoint import rng
from composerlite.checkpoint.catalog import Catalog
from composerlite.checkpoint.contents import IgnoreKeys, TrainingState, check_ignore_keys, glob_filter
from composerlite.checkpoint.loading import load_checkpoint, read_checkpoint
from composerlite.checkpoint.manifest import FileRecord, Manifest
from composerlite.checkpoint.naming import (
    PartialFilePath,
    check_template,
    ensure_no_conflict,
    format_name_with_dist,
    format_name_with_dist_and_time,
    get_save_filename,
)
from composerlite.checkpoint.pipeline import PendingSave, Pipeline, save, save_checkpoint
from composerlite.checkpoint.publishing import Publisher, RemoteSaving
from composerlite.checkpoint.reading import safe_torch_load
from composerlite.checkpoint.remote import RemoteCatalog
from composerlite.checkpoint.resume import Bucket, newest_good
from composerlite.checkpoint.retention import RetentionPolicy, deletions, retention_policy
from composerlite.checkpoint.save_job import SaveReport

__all__ = [
    "Bucket",
    "Catalog",
    "FileRecord",
    "IgnoreKeys",
    "Manifest",
    "PartialFilePath",
    "PendingSave",
    "Pipeline",
    "Publisher",
    "RemoteCatalog",
    "RemoteSaving",
    "RetentionPolicy",
    "SaveReport",
    "TrainingState",
    "check_ignore_keys",
    "check_template",
    "deletions",
    "ensure_no_conflict",
    "format_name_with_dist",
    "format_name_with_dist_and_time",
    "get_save_filename",
    "glob_filter",
    "load_checkpoint",
    "newest_good",
    "read_checkpoint",
    "retention_policy",
    "rng",
    "safe_torch_load",
    "save",
    "save_checkpoint",
]
