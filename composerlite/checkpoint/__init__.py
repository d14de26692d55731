"""Checkpoints: what is saved, how it is written and committed, how it is found, verified and restored.

The names below are for users. Each name is imported on first use: a listing of checkpoints needs no torch, and the
import of ``torch.distributed.checkpoint`` is slow. Modules of composerlite import from the module that defines a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from composerlite.on_demand import lazy_names

if TYPE_CHECKING:
    from composerlite.checkpoint.api.checkpointer import Checkpointer, CheckpointerConfig
    from composerlite.checkpoint.api.state_dict import (
        async_save_model_and_optim_state,
        async_save_state_dict,
        get_checkpoint_metadata,
        load_keys,
        load_model_and_optim_state,
        load_state_dict,
        save_model_and_optim_state,
        save_safetensors,
        save_state_dict,
    )
    from composerlite.checkpoint.api.step_files import CheckpointMetadata
    from composerlite.checkpoint.api.unshard import UnshardStrategy, UnshardStrategyType, unshard_checkpoint
    from composerlite.checkpoint.contents import IgnoreKeys, TrainingState
    from composerlite.checkpoint.deepspeed.archives import unshard_zero
    from composerlite.checkpoint.load.reader import safe_torch_load
    from composerlite.checkpoint.load.restore import load_checkpoint, read_checkpoint
    from composerlite.checkpoint.load.sharded_reader import RemoteFileSystemReader
    from composerlite.checkpoint.load.state_dicts import merge_state_dicts, prune_state_dict, swap_param_keys
    from composerlite.checkpoint.manager import CheckpointManager
    from composerlite.checkpoint.place.catalog import Catalog
    from composerlite.checkpoint.record.record import FileRecord, Manifest
    from composerlite.checkpoint.save.save import SaveReport, SaveTask, save_checkpoint
    from composerlite.checkpoint.save.sharded_writer import RemoteFileSystemWriter
    from composerlite.devices import rng

__all__ = [
    "Catalog",
    "CheckpointManager",
    "CheckpointMetadata",
    "Checkpointer",
    "CheckpointerConfig",
    "FileRecord",
    "IgnoreKeys",
    "Manifest",
    "RemoteFileSystemReader",
    "RemoteFileSystemWriter",
    "SaveReport",
    "SaveTask",
    "TrainingState",
    "UnshardStrategy",
    "UnshardStrategyType",
    "async_save_model_and_optim_state",
    "async_save_state_dict",
    "get_checkpoint_metadata",
    "load_checkpoint",
    "load_keys",
    "load_model_and_optim_state",
    "load_state_dict",
    "merge_state_dicts",
    "prune_state_dict",
    "read_checkpoint",
    "rng",
    "safe_torch_load",
    "save_checkpoint",
    "save_model_and_optim_state",
    "save_safetensors",
    "save_state_dict",
    "swap_param_keys",
    "unshard_checkpoint",
    "unshard_zero",
]

__getattr__, __dir__ = lazy_names(__name__)
