"""The shape of a run's YAML: which keys there are and what each takes.

The top level holds the keys of :data:`PARTS`, which name objects to build, and the fields of
:class:`TrainerArguments`, which go to the Trainer as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from composerlite.config.origin import Origin

PARTS: Mapping[str, str] = MappingProxyType(
    {
        "model": "`name` and the arguments of a class or function that makes a `ComposerModel`. Needed.",
        "train_loader": "A data set and how it is loaded. Needed.",
        "eval_loader": "The same, or a list of them.",
        "optimizer": "`name` and arguments; the model's parameters are passed as the first one.",
        "scheduler": "`name` and arguments of a learning rate schedule.",
        "algorithms": "Names, each with its arguments.",
        "callbacks": "Names, each with its arguments.",
        "loggers": "Names, each with its arguments.",
    }
)
"""The keys that name objects to build, and what each holds."""

OF_THE_FILE: Mapping[str, str] = MappingProxyType(
    {
        "defaults": "The files that this one starts from, and the place of its own values among them, `_self_`.",
        "variables": "Anything, for `${variables.x}`.",
    }
)
"""The keys that are for the file itself, and what each holds."""


@dataclass(frozen=True, kw_only=True)
class TrainerArguments:
    """The arguments of the Trainer that take plain values, with the Trainer's own names and defaults.

    A test compares them with the Trainer's signature. They are written out here because reading a configuration
    should not cost the import of torch.

    Args:
        auto_log_hparams: log the whole configuration, as ``optimizer.lr`` and the like. What depends on the environment
            is logged as it is written.
    """

    train_dataloader_label: str = "train"
    train_subset_num_batches: int = -1
    spin_dataloaders: bool = True
    max_duration: int | str | None = None
    scale_schedule_ratio: float = 1.0
    step_schedulers_every_batch: bool | None = None
    eval_interval: int | str = 1
    eval_subset_num_batches: int = -1
    run_name: str | None = None
    progress_bar: bool = True
    log_to_console: bool = False
    console_stream: str = "stderr"
    console_log_interval: int | str = "1ba"
    log_traces: bool = False
    auto_log_hparams: bool = False
    load_path: str | None = None
    load_weights_only: bool = False
    load_strict_model_weights: bool = True
    load_progress_bar: bool = True
    load_ignore_keys: list[str] | None = None
    load_exclude_algorithms: list[str] | None = None
    load_key_map: dict[str, str] | None = None
    trust_checkpoint: bool = False
    save_folder: str | None = None
    save_filename: str = "ep{epoch}-ba{batch}-rank{rank}.pt"
    save_remote_file_name: str | None = None
    save_latest_filename: str | None = "latest-rank{rank}.pt"
    save_overwrite: bool = False
    save_interval: int | str = "1ep"
    save_weights_only: bool = False
    save_ignore_keys: list[str] | None = None
    save_compat: str | None = None
    save_num_checkpoints_to_keep: int = -1
    save_metrics: bool = False
    save_async: bool = True
    save_staging_bytes: int | None = None
    save_lazy: bool | None = None
    save_on_exception: bool = False
    save_failure_limit: int = 0
    save_ephemeral_interval: int | str | None = None
    save_keep_every: int | str | None = None
    save_best_k: int | None = None
    save_best_metric: str | None = None
    save_best_mode: str = "max"
    save_staging_folder: str | None = None
    save_num_remote_checkpoints_to_keep: int = -1
    save_memory_interval: int | str | None = None
    save_memory_folder: str = "/dev/shm"
    save_memory_replication: float | None = None
    autoresume: bool = False
    autoresume_timeout: float = 60.0
    device: str | None = None
    precision: str | None = None
    device_train_microbatch_size: int | str | None = None
    accumulate_train_batch_on_tokens: bool = False
    seed: int | None = None
    deterministic_mode: bool = False
    dist_timeout: float = 300.0
    ddp_sync_strategy: str | None = None
    parallelism_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | str | None = None
    python_log_level: str | None = None
    compile_config: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class LoaderArguments:
    """The arguments of ``torch.utils.data.DataLoader`` that take plain values, and ``collate_fn`` by name.

    Args:
        batch_size: samples in a batch.
        shuffle: another order of samples in each epoch.
        drop_last: leave out a last batch that is smaller.
        num_workers: processes that load batches; 0 loads them in this one.
        prefetch_factor: batches that each worker loads ahead.
        persistent_workers: workers live on from one epoch to the next.
        multiprocessing_context: how workers are started: ``'fork'``, ``'spawn'`` or ``'forkserver'``.
        pin_memory: copy batches to memory from which a GPU reads faster.
        timeout: seconds to wait for a batch of a worker; 0 waits without end.
        collate_fn: ``module:attr`` of a function that makes a batch of a list of samples.
    """

    batch_size: int
    shuffle: bool = False
    drop_last: bool = False
    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    multiprocessing_context: str | None = None
    pin_memory: bool = False
    timeout: float = 0.0
    collate_fn: str | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluatorArguments:
    """The arguments of :class:`composerlite.Evaluator` that take plain values."""

    label: str = "eval"
    metric_names: list[str] | None = None
    subset_num_batches: int | None = None
    eval_interval: int | str | None = None
    device_eval_microbatch_size: int | None = None


@dataclass(frozen=True)
class Component:
    """An object to build: the name of its class, its arguments, and its place in the YAML."""

    name: str
    arguments: dict[str, Any]
    path: tuple[str, ...]


@dataclass(frozen=True)
class Loader:
    """A data set, and a DataLoader to be put around it."""

    dataset: Component
    arguments: LoaderArguments
    path: tuple[str, ...]


@dataclass(frozen=True)
class Evaluation:
    """A loader to evaluate on, and how. A ``Component`` builds the loader itself."""

    loader: Loader | Component
    arguments: EvaluatorArguments


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run, read and checked, with nothing built yet.

    Attributes:
        values: the whole of it, merged and resolved. May hold secrets of the environment; the texts do not.
    """

    model: Component
    train_loader: Loader | Component
    eval_loaders: list[Evaluation]
    optimizer: Component | None
    scheduler: Component | None
    algorithms: list[Component]
    callbacks: list[Component]
    loggers: list[Component]
    trainer: TrainerArguments
    origin: Origin
    values: dict[str, Any]

    @property
    def resolved(self) -> str:
        """YAML that gives the same run without overrides and other files. ``${oc.env:…}`` stays as it is."""
        return self.origin.as_yaml(self.values)

    @property
    def annotated(self) -> str:
        """:attr:`resolved` with the place behind each value that it comes from: file and line, or override."""
        return self.origin.annotated(self.values)
