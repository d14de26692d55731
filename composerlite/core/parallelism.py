"""Configuration of FSDP and tensor parallelism."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, TypeVar, cast, final

from composerlite.errors import ConfigError, UnknownArgumentError, did_you_mean

T = TypeVar("T")

__all__ = ["FSDP2Config", "FSDPConfig", "ParallelismConfig", "TPConfig", "ensure_parallelism"]

_CHOICES = {"state_dict_type": ("full", "sharded"), "mixed_precision": ("DEFAULT", "PURE", "FULL")}
_FLAGS = (
    "auto_wrap",
    "reshard_after_forward",
    "activation_checkpointing",
    "cpu_offload",
    "load_monolith_rank0_only",
)


@final
@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Shard parameters, gradients and optimizer state over ranks with torch's ``fully_shard`` (FSDP2).

    Attributes:
        data_parallel_shard_degree: number of ranks for a copy of the model; -1 for all remaining ranks.
        data_parallel_replicate_degree: number of copies of the model, each sharded (HSDP); ``None`` for one copy.
        auto_wrap: gather parameters block by block. If false, gather all parameters at once. Blocks are modules
            with ``model.fsdp_wrap_fn(module)`` true, or with ``_fsdp_wrap = True``, or of a class in ``wrap_classes``.
            Without any of these, the items of each ``ModuleList``, and of a ``Sequential`` of blocks.
        wrap_classes: names of the classes of blocks.
        reshard_after_forward: release gathered parameters after the forward pass and gather them again for the
            backward pass: less memory, more traffic.
        mixed_precision: ``'DEFAULT'``: with precision bf16 or fp16, compute in this precision and reduce gradients in
            fp32; ``'PURE'``: also reduce gradients in this precision; ``'FULL'``: compute in fp32.
        activation_checkpointing: compute the activations of blocks again in the backward pass to save memory.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
        ignored_modules: modules to leave unsharded.
        state_dict_type: layout of checkpoints: ``'sharded'``, a directory with files of every rank; or ``'full'``, a
            single file, gathered on rank 0.
        sharded_ckpt_prefix_dir: name of the directory in the save folder.
        load_monolith_rank0_only: accepted for compatibility. Only rank 0 reads checkpoints in a single file anyway.

    Raises:
        ConfigError: a value does not exist, or two values contradict each other.
    """

    data_parallel_shard_degree: int = -1
    data_parallel_replicate_degree: int | None = None
    auto_wrap: bool = True
    wrap_classes: Sequence[str] = ()
    reshard_after_forward: bool = True
    mixed_precision: str = "DEFAULT"
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    ignored_modules: Sequence[Any] | None = None
    state_dict_type: str = "sharded"
    sharded_ckpt_prefix_dir: str = "ep{epoch}-ba{batch}"
    load_monolith_rank0_only: bool = False

    def __post_init__(self) -> None:
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"fsdp: {name}={getattr(self, name)!r}: expected True or False.")
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"fsdp: {name}={value!r} does not exist.{did_you_mean(str(value), known)}")
        shard, replicate = self.data_parallel_shard_degree, self.data_parallel_replicate_degree
        if not _is_count(shard) and shard != -1:
            raise ConfigError(
                f"fsdp: data_parallel_shard_degree={shard!r}: expected a number of ranks, or -1 for all others."
            )
        if replicate is not None and not _is_count(replicate):
            raise ConfigError(
                f"fsdp: data_parallel_replicate_degree={replicate!r}: expected a number of copies, or None."
            )
        if isinstance(self.wrap_classes, str):
            raise ConfigError(f"fsdp: wrap_classes={self.wrap_classes!r}: expected a list of class names.")
        if self.wrap_classes and not self.auto_wrap:
            raise ConfigError("fsdp: auto_wrap=False contradicts wrap_classes. Remove one of them.")
        if not self.sharded_ckpt_prefix_dir:
            raise ConfigError("fsdp: sharded_ckpt_prefix_dir='': expected a name, such as 'ep{epoch}-ba{batch}'.")

    @property
    def given_prefix_dir(self) -> str | None:
        """``sharded_ckpt_prefix_dir``; ``None`` for the default, with which directories get the names of files."""
        own = type(self).sharded_ckpt_prefix_dir
        return None if self.sharded_ckpt_prefix_dir == own else self.sharded_ckpt_prefix_dir


FSDP2Config = FSDPConfig
"""Composer's name for the configuration of torch's ``fully_shard``."""


@final
@dataclass(frozen=True, kw_only=True)
class TPConfig:
    """Split single layers over ranks: tensor parallelism.

    Attributes:
        layer_plan: split of each module, by name: a dict for torch's ``parallelize_module``. Keys may be globs, such as
            ``{'blocks.*.up': ColwiseParallel(), 'blocks.*.down': RowwiseParallel()}``. The names ``'colwise'``,
            ``'rowwise'`` and ``'sequence'`` stand for styles.
        tensor_parallel_degree: number of ranks that share a layer and the data.

    Raises:
        ConfigError: the plan is empty, or the degree is not a number of ranks.
    """

    layer_plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tensor_parallel_degree: int = 1

    def __post_init__(self) -> None:
        if not _is_count(self.tensor_parallel_degree):
            raise ConfigError(
                f"tp: tensor_parallel_degree={self.tensor_parallel_degree!r}: expected a number of ranks."
            )
        if not isinstance(self.layer_plan, Mapping) or not self.layer_plan:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"tp: layer_plan={self.layer_plan!r}: expected a dict from names of modules to their split, "
                "such as {'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}."
            )


@final
@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """Configuration of FSDP and tensor parallelism. Each part may be a dict of arguments.

    Attributes:
        fsdp: configuration of FSDP.
        tp: configuration of tensor parallelism.

    Args:
        fsdp2: Composer's name for ``fsdp``.

    Raises:
        ConfigError: an invalid part, or both ``fsdp`` and ``fsdp2``.
    """

    fsdp: FSDPConfig | None = None
    tp: TPConfig | None = None
    fsdp2: InitVar[FSDPConfig | None] = None

    def __post_init__(self, fsdp2: FSDPConfig | None) -> None:
        if fsdp2 is not None and self.fsdp is not None:
            raise ConfigError("parallelism_config: 'fsdp' and 'fsdp2' are the same here. Remove one of them.")
        fsdp: object = self.fsdp if fsdp2 is None else fsdp2
        object.__setattr__(self, "fsdp", _built(FSDPConfig, "parallelism_config['fsdp']", fsdp))
        object.__setattr__(self, "tp", _built(TPConfig, "parallelism_config['tp']", self.tp))

    @property
    def tensor_parallel_degree(self) -> int:
        """Number of ranks that share a layer."""
        return 1 if self.tp is None else self.tp.tensor_parallel_degree

    def degrees(self, world_size: int) -> tuple[int, int, int]:
        """Return (copies of the model, ranks of a copy, ranks of a layer).

        Args:
            world_size: number of ranks.

        Raises:
            ConfigError: the product of the three numbers is not ``world_size``.
        """
        tensor = self.tensor_parallel_degree
        if world_size % tensor:
            raise ConfigError(
                f"tensor_parallel_degree={tensor} does not divide the {world_size} ranks. Start a multiple of {tensor} "
                "ranks, or change the degree."
            )
        left = world_size // tensor
        if self.fsdp is None:
            if left > 1:
                raise ConfigError(
                    f"tensor_parallel_degree={tensor} leaves {left} groups of ranks out of {world_size}, without data "
                    f"parallelism between them. Add 'fsdp': {{}}, or start {tensor} ranks."
                )
            return 1, 1, tensor
        replicate, shard = self.fsdp.data_parallel_replicate_degree, self.fsdp.data_parallel_shard_degree
        copies = 1 if replicate is None else replicate
        if shard == -1:
            if left % copies:
                raise ConfigError(
                    f"data_parallel_replicate_degree={copies} does not divide the {left} ranks"
                    f"{_of_all(world_size, tensor)}. Start a multiple of {copies}, or change the degree."
                )
            shard = left // copies
        elif replicate is None and left % shard == 0:
            copies = left // shard
        if copies * shard != left:
            raise ConfigError(
                f"data_parallel_replicate_degree={replicate} × data_parallel_shard_degree={shard} is not the "
                f"{left} ranks{_of_all(world_size, tensor)}. Start {copies * shard * tensor} ranks, or remove one of "
                "the two degrees to have it computed."
            )
        return copies, shard, tensor


def ensure_parallelism(value: Mapping[str, Any] | ParallelismConfig | None) -> ParallelismConfig | None:
    """Return ``value`` as a :class:`ParallelismConfig`; ``None`` if no part is configured.

    Args:
        value: the object, or a dict such as ``{'fsdp': {…}, 'tp': {…}}``.

    Raises:
        ConfigError: a key does not exist, or a value is invalid.
    """
    config = _built(ParallelismConfig, "parallelism_config", value)
    return None if config is None or (config.fsdp is None and config.tp is None) else config


def _built(kind: type[T], where: str, value: object) -> T | None:
    if value is None or isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}={value!r}: expected a dict.")
    known = list(inspect.signature(kind).parameters)
    for key in cast("Mapping[Any, Any]", value):
        if key not in known:
            raise UnknownArgumentError(f"{where} has no {key!r}.{did_you_mean(str(key), known)}")
    return kind(**value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _of_all(world_size: int, tensor: int) -> str:
    return "" if tensor == 1 else f" ({world_size} ranks, {tensor} for each layer)"
