"""Names that users of other trainers write, and what is written here instead: one table for all messages.

The names are those of the documentation of Composer, Lightning, transformers.Trainer and Accelerate.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["way_here"]

_MICROBATCHES = "device_train_microbatch_size, the samples of one forward pass: a batch is split, its gradients add up"
_CLIPPING = "algorithms=GradientClipping(clipping_type='norm', clipping_threshold=1.0)"
_EVAL_INTERVAL = "eval_interval='1ep' or '500ba'"
_EVAL_DATA = "eval_dataloader=DataLoader(…), or a list of them"
_TRAIN_DATA = "train_dataloader=DataLoader(…)"
_MIXED = "precision='amp_bf16', 'amp_fp16' or 'fp32'"
_LOADING = "load_path='…', or autoresume=True, which finds the newest checkpoint of the run by itself"
_LAUNCHER = "the launcher: torchrun --nproc-per-node=8 script.py starts a process for each GPU"
_SCHEDULES = "schedulers=LinearWithWarmupScheduler(t_warmup='100ba')"
_RATE = "optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3)"
_BATCH_SIZE = "the batch_size of the DataLoader"

_ARGUMENTS: Mapping[str, str] = {
    "accelerator": "device='gpu', 'cpu' or 'mps'",
    "accumulate_grad_batches": _MICROBATCHES,
    "bf16": "precision='amp_bf16'",
    "check_val_every_n_epoch": "eval_interval='1ep'",
    "ckpt_path": _LOADING,
    "compute_metrics": "get_metrics and update_metric of the model",
    "data_collator": "the collate_fn of the DataLoader",
    "default_root_dir": "save_folder='…'",
    "deterministic": "deterministic_mode=True",
    "devices": _LAUNCHER,
    "enable_checkpointing": "save_folder='…', and None for no checkpoints",
    "enable_progress_bar": "progress_bar=True or False",
    "epochs": "max_duration='90ep'",
    "eval_dataset": _EVAL_DATA,
    "eval_steps": _EVAL_INTERVAL,
    "eval_strategy": _EVAL_INTERVAL,
    "evaluation_strategy": _EVAL_INTERVAL,
    "fast_dev_run": "max_duration='1ba' with eval_subset_num_batches=1",
    "fp16": "precision='amp_fp16'",
    "fsdp_config": "parallelism_config={'fsdp': {…}}",
    "grad_accum": _MICROBATCHES,
    "gradient_accumulation_steps": _MICROBATCHES,
    "gradient_clip_algorithm": _CLIPPING,
    "gradient_clip_val": _CLIPPING,
    "learning_rate": _RATE,
    "limit_train_batches": "train_subset_num_batches=100",
    "limit_val_batches": "eval_subset_num_batches=100",
    "log_every_n_steps": "console_log_interval='50ba'",
    "logger": "loggers=…",
    "logging_steps": "console_log_interval='50ba'",
    "lr": _RATE,
    "lr_scheduler": "schedulers=…",
    "lr_schedulers": "schedulers=…",
    "max_epochs": "max_duration='90ep'",
    "max_grad_norm": _CLIPPING,
    "max_steps": "max_duration='10000ba'",
    "max_time": "max_duration='36h'",
    "mixed_precision": _MIXED,
    "num_epochs": "max_duration='90ep'",
    "num_nodes": _LAUNCHER,
    "num_train_epochs": "max_duration='3ep'",
    "optimizer": "optimizers=…",
    "output_dir": "save_folder='…'",
    "per_device_eval_batch_size": _BATCH_SIZE,
    "per_device_train_batch_size": _BATCH_SIZE,
    "resume_from_checkpoint": _LOADING,
    "save_steps": "save_interval='500ba'",
    "save_strategy": "save_interval='1ep' or '500ba'",
    "save_total_limit": "save_num_checkpoints_to_keep=3",
    "scheduler": "schedulers=…",
    "strategy": "parallelism_config={'fsdp': {}}, and nothing for data parallel training",
    "train_dataloaders": _TRAIN_DATA,
    "train_dataset": _TRAIN_DATA,
    "val_check_interval": _EVAL_INTERVAL,
    "val_dataloader": _EVAL_DATA,
    "val_dataloaders": _EVAL_DATA,
    "warmup_steps": _SCHEDULES,
}

_PRECISIONS: Mapping[str, str] = {
    "16": "'amp_fp16'",
    "16-mixed": "'amp_fp16'",
    "32": "'fp32'",
    "32-true": "'fp32'",
    "bf16": "'amp_bf16'",
    "bf16-mixed": "'amp_bf16'",
    "float16": "'amp_fp16'",
    "bfloat16": "'amp_bf16'",
    "float32": "'fp32'",
    "fp16": "'amp_fp16'",
    "no": "'fp32'",
}

_METHODS: Mapping[str, str] = {
    "on_after_backward": "after_backward",
    "on_batch_end": "batch_end",
    "on_batch_start": "batch_start",
    "on_before_backward": "before_backward",
    "on_before_optimizer_step": "after_train_batch",
    "on_epoch_begin": "epoch_start",
    "on_epoch_end": "epoch_end",
    "on_epoch_start": "epoch_start",
    "on_evaluate": "eval_end",
    "on_fit_end": "fit_end",
    "on_fit_start": "fit_start",
    "on_load_checkpoint": "load_state_dict",
    "on_pre_optimizer_step": "after_train_batch",
    "on_predict_end": "predict_end",
    "on_predict_start": "predict_start",
    "on_save_checkpoint": "state_dict",
    "on_step_begin": "batch_start",
    "on_step_end": "batch_end",
    "on_train_batch_end": "batch_end",
    "on_train_batch_start": "batch_start",
    "on_train_begin": "fit_start",
    "on_train_end": "fit_end",
    "on_train_epoch_end": "epoch_end",
    "on_train_epoch_start": "epoch_start",
    "on_train_start": "fit_start",
    "on_validation_batch_end": "eval_batch_end",
    "on_validation_batch_start": "eval_batch_start",
    "on_validation_end": "eval_end",
    "on_validation_epoch_end": "eval_end",
    "on_validation_epoch_start": "eval_start",
    "on_validation_start": "eval_start",
}

_TABLES: Mapping[str, Mapping[str, str]] = {
    "Callback": _METHODS,
    "Precision": _PRECISIONS,
    "Trainer": _ARGUMENTS,
}


def way_here(owner: str, name: str) -> str | None:
    """Return the equivalent here of ``name`` of another trainer; ``None`` if the table has none.

    Args:
        owner: the class that it was given to: ``'Trainer'`` for arguments, ``'Callback'`` for methods, ``'Precision'``
            for values.
        name: the argument, method or value.
    """
    return _TABLES.get(owner, {}).get(name)
