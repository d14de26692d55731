"""Documented import paths of utilities. Names are imported from their packages on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composerlite.on_demand import lazy_names

if TYPE_CHECKING:
    from composerlite.callbacks.export_for_inference import ExportFormat, export_for_inference, export_with_logger
    from composerlite.checkpoint import load_checkpoint, safe_torch_load, save_checkpoint
    from composerlite.checkpoint.contents import glob_filter
    from composerlite.checkpoint.format.compression import KNOWN_COMPRESSORS, get_compressor, is_compressed_pt
    from composerlite.checkpoint.format.packing import is_tar
    from composerlite.checkpoint.load.resolve import download_checkpoint, get_file
    from composerlite.checkpoint.record.naming import (
        PartialFilePath,
        format_name_with_dist,
        format_name_with_dist_and_time,
        get_save_filename,
    )
    from composerlite.core import ParallelismConfig, create_interval_scheduler
    from composerlite.core.data import batch_get, batch_set
    from composerlite.core.parallelism import FSDP2Config, FSDPConfig, TPConfig
    from composerlite.devices import get_device
    from composerlite.errors import ObjectStoreTransientError
    from composerlite.storage import ObjectStore, parse_uri, retry
    from composerlite.storage.stores.gcs import GCSObjectStore
    from composerlite.storage.stores.libcloud import LibcloudObjectStore
    from composerlite.storage.stores.oci import OCIObjectStore
    from composerlite.storage.stores.s3 import S3ObjectStore
    from composerlite.storage.stores.sftp import SFTPObjectStore
    from composerlite.storage.uri import maybe_create_object_store_from_uri
    from composerlite.utils import checkpoint, dist, module_surgery, object_store, reproducibility
    from composerlite.utils.helpers import (
        STR_TO_DTYPE,
        MissingConditionalImportError,
        StringEnum,
        convert_flat_dict_to_nested_dict,
        convert_nested_dict_to_flat_dict,
        create_symlink_file,
        ensure_folder_is_empty,
        ensure_tuple,
        extract_hparams,
        get_composer_env_dict,
        get_free_tcp_port,
        import_object,
        is_model_fsdp,
        is_notebook,
        map_collection,
        model_eval_mode,
        partial_format,
        print_env,
    )

__all__ = [
    "KNOWN_COMPRESSORS",
    "STR_TO_DTYPE",
    "ExportFormat",
    "FSDP2Config",
    "FSDPConfig",
    "GCSObjectStore",
    "LibcloudObjectStore",
    "MissingConditionalImportError",
    "OCIObjectStore",
    "ObjectStore",
    "ObjectStoreTransientError",
    "ParallelismConfig",
    "PartialFilePath",
    "S3ObjectStore",
    "SFTPObjectStore",
    "StringEnum",
    "TPConfig",
    "batch_get",
    "batch_set",
    "checkpoint",
    "convert_flat_dict_to_nested_dict",
    "convert_nested_dict_to_flat_dict",
    "create_interval_scheduler",
    "create_symlink_file",
    "dist",
    "download_checkpoint",
    "ensure_folder_is_empty",
    "ensure_tuple",
    "export_for_inference",
    "export_with_logger",
    "extract_hparams",
    "format_name_with_dist",
    "format_name_with_dist_and_time",
    "get_composer_env_dict",
    "get_compressor",
    "get_device",
    "get_file",
    "get_free_tcp_port",
    "get_save_filename",
    "glob_filter",
    "import_object",
    "is_compressed_pt",
    "is_model_fsdp",
    "is_notebook",
    "is_tar",
    "load_checkpoint",
    "map_collection",
    "maybe_create_object_store_from_uri",
    "model_eval_mode",
    "module_surgery",
    "object_store",
    "parse_uri",
    "partial_format",
    "print_env",
    "reproducibility",
    "retry",
    "safe_torch_load",
    "save_checkpoint",
]

__getattr__, __dir__ = lazy_names(__name__)
