"""Modules of Composer whose names lie elsewhere here: ``from composerlite.optim.scheduler import StepScheduler`` works.

A module has the names that follow, each home before its names. None of them has a file: see
:class:`composerlite.on_demand.ModulesOfOtherNames`.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["PATHS"]

_SCHEDULERS = """ComposerScheduler ConstantScheduler ConstantWithWarmupScheduler CosineAnnealingScheduler
    CosineAnnealingWarmRestartsScheduler CosineAnnealingWithWarmupScheduler ExponentialScheduler LinearScheduler
    LinearWithWarmupScheduler MultiStepScheduler MultiStepWithWarmupScheduler PolynomialScheduler
    PolynomialWithWarmupScheduler StepScheduler compile_composer_scheduler"""

PATHS: Mapping[str, Mapping[str, str]] = {
    # algorithms, callbacks
    "algorithms.blurpool": {"algorithms": "BlurConv2d BlurMaxPool2d BlurPool apply_blurpool"},
    "algorithms.channels_last": {"algorithms": "ChannelsLast apply_channels_last"},
    "algorithms.cutmix": {"algorithms": "CutMix cutmix_batch"},
    "algorithms.cutout": {"algorithms": "CutOut cutout_batch"},
    "algorithms.label_smoothing": {"algorithms": "LabelSmoothing smooth_labels"},
    "algorithms.low_precision_groupnorm": {"algorithms": "LowPrecisionGroupNorm apply_low_precision_groupnorm"},
    "algorithms.low_precision_layernorm": {"algorithms": "LowPrecisionLayerNorm apply_low_precision_layernorm"},
    "algorithms.mixup": {"algorithms": "MixUp mixup_batch"},
    "algorithms.no_op_model": {"algorithms": "NoOpModel"},
    "algorithms.progressive_resizing": {"algorithms": "ProgressiveResizing resize_batch"},
    "algorithms.seq_length_warmup": {"algorithms": "SeqLengthWarmup set_batch_sequence_length"},
    "algorithms.stochastic_depth": {"algorithms": "StochasticDepth apply_stochastic_depth"},
    "callbacks.activation_monitor": {"callbacks": "ActivationMonitor"},
    "callbacks.lr_monitor": {"callbacks": "LRMonitor"},
    "callbacks.memory_monitor": {"callbacks": "MemoryMonitor"},
    "callbacks.memory_snapshot": {"callbacks": "MemorySnapshot"},
    "callbacks.nan_monitor": {"callbacks": "NaNMonitor"},
    "callbacks.oom_observer": {"callbacks": "OOMObserver"},
    "callbacks.optimizer_monitor": {"callbacks": "OptimizerMonitor"},
    "callbacks.runtime_estimator": {"callbacks": "RuntimeEstimator"},
    "callbacks.system_metrics_monitor": {"callbacks": "SystemMetricsMonitor"},
    # core
    "core.data_spec": {"core": "DataSpec ensure_data_spec"},
    "core.evaluator": {"core": "Evaluator ensure_evaluator"},
    "core.passes": {"core": "AlgorithmPass"},
    "core.precision": {"core": "Precision get_precision_context"},
    "core.serializable": {"core": "Serializable"},
    "core.types": {"core": "Batch JSON"},
    # devices
    "devices.device_cpu": {"devices": "DeviceCPU"},
    "devices.device_gpu": {"devices": "DeviceGPU"},
    "devices.device_mps": {"devices": "DeviceMPS"},
    # loggers
    "loggers.console_logger": {"loggers": "ConsoleLogger"},
    "loggers.file_logger": {"loggers": "FileLogger"},
    "loggers.in_memory_logger": {"loggers": "InMemoryLogger"},
    "loggers.logger": {"loggers": "Logger LoggerDestination"},
    "loggers.logger_destination": {"loggers": "LoggerDestination"},
    "loggers.mlflow_logger": {"loggers": "MLFlowLogger"},
    "loggers.progress_bar_logger": {"loggers": "ProgressBarLogger"},
    "loggers.slack_logger": {"loggers": "SlackLogger"},
    "loggers.tensorboard_logger": {"loggers": "TensorboardLogger"},
    "loggers.wandb_logger": {"loggers": "WandBLogger"},
    # loss, metrics, models, optim
    "loss.utils": {"loss": "check_for_index_targets ensure_targets_one_hot infer_target_type"},
    "metrics.nlp": {"metrics": "BinaryF1Score LanguageCrossEntropy LanguagePerplexity MaskedAccuracy"},
    "models.tasks": {"models": "ComposerClassifier"},
    "models.tasks.classification": {"models": "ComposerClassifier"},
    "optim.decoupled_weight_decay": {"optim": "DecoupledAdamW DecoupledSGDW"},
    "optim.scheduler": {"optim": _SCHEDULERS},
    # profiler
    "profiler.json_trace_handler": {"profiler": "JSONTraceHandler"},
    "profiler.profiler_action": {"profiler": "ProfilerAction"},
    "profiler.profiler_schedule": {"profiler": "cyclic_schedule"},
    "profiler.trace_handler": {"profiler": "TraceHandler"},
    # utils
    "utils.auto_log_hparams": {
        "utils": "convert_flat_dict_to_nested_dict convert_nested_dict_to_flat_dict extract_hparams"
    },
    "utils.batch_helpers": {"utils": "batch_get batch_set"},
    "utils.collect_env": {"utils": "get_composer_env_dict print_env"},
    "utils.compression": {"utils": "KNOWN_COMPRESSORS get_compressor is_compressed_pt"},
    "utils.device": {"utils": "get_device"},
    "utils.file_helpers": {
        "utils": """create_symlink_file ensure_folder_is_empty format_name_with_dist format_name_with_dist_and_time
            get_file is_tar maybe_create_object_store_from_uri parse_uri"""
    },
    "utils.import_helpers": {"utils": "MissingConditionalImportError import_object"},
    "utils.inference": {"utils": "ExportFormat export_for_inference export_with_logger"},
    "utils.iter_helpers": {"utils": "ensure_tuple map_collection"},
    "utils.misc": {
        "utils": """STR_TO_DTYPE create_interval_scheduler get_free_tcp_port is_model_fsdp is_notebook model_eval_mode
            partial_format"""
    },
    "utils.object_store.gcs_object_store": {"utils.object_store": "GCSObjectStore"},
    "utils.object_store.libcloud_object_store": {"utils.object_store": "LibcloudObjectStore"},
    "utils.object_store.object_store": {"utils.object_store": "ObjectStore ObjectStoreTransientError"},
    "utils.object_store.oci_object_store": {"utils.object_store": "OCIObjectStore"},
    "utils.object_store.s3_object_store": {"utils.object_store": "S3ObjectStore"},
    "utils.object_store.sftp_object_store": {"utils.object_store": "SFTPObjectStore"},
    "utils.parallelism": {"utils": "FSDP2Config FSDPConfig ParallelismConfig TPConfig"},
    "utils.retrying": {"utils": "retry"},
    "utils.string_enum": {"utils": "StringEnum"},
}
"""Names by home, by module, all within ``composerlite``."""
