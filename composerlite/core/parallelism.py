"""Configuration of how a model is distributed over ranks, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast, final

from composerlite.errors import ConfigError, UnknownArgumentError, did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    D = TypeVar("D", bound=DataclassInstance)

__all__ = ["FSDP2Config", "FSDPConfig", "ParallelismConfig", "TPConfig", "ensure_parallelism"]

_STATE_DICT_TYPES = ("full", "sharded")
_MIXED_PRECISIONS = ("DEFAULT", "PURE", "FULL")


@final
@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """Shards parameters, gradients and optimizer state over ranks with torch's ``fully_shard`` (FSDP2).

    Attributes:
        data_parallel_shard_degree: ranks over which a copy of the model is sharded; -1 for all that are left.
        data_parallel_replicate_degree: copies of the model, each sharded by itself (HSDP); ``None`` for one.
        auto_wrap: gather the parameters block by block; ``False`` gathers those of the whole model at once. Blocks are
            what ``model.fsdp_wrap_fn(module)`` says yes to, or modules with ``_fsdp_wrap = True``, or those of a class
            in ``wrap_classes``, or else every item of a ``ModuleList``, and of a ``Sequential`` of such items.
        wrap_classes: names of the classes of blocks.
        reshard_after_forward: release gathered parameters after the forward pass and gather them again for the
            backward one: less memory, more traffic.
        mixed_precision: ``'DEFAULT'``: where the trainer's precision is bf16 or fp16, compute in it and reduce
            gradients in fp32; ``'PURE'``: reduce in it as well; ``'FULL'``: compute in fp32.
        activation_checkpointing: compute the activations of blocks again in the backward pass rather than keep them.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
        ignored_modules: modules whose parameters are not sharded.
        state_dict_type: how checkpoints are laid out: ``'sharded'``, a directory that every rank writes a part of; or
            ``'full'``, one file, gathered on rank 0.
        sharded_ckpt_prefix_dir: name of that directory in the save folder.
        load_monolith_rank0_only: accepted, without effect: only rank 0 reads a checkpoint that is one file.

    Raises:
        ConfigError: a value that does not exist, or two that contradict each other.
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
        _check_flags(self, "fsdp")
        _check_choice("fsdp", "state_dict_type", self.state_dict_type, _STATE_DICT_TYPES)
        _check_choice("fsdp", "mixed_precision", self.mixed_precision, _MIXED_PRECISIONS)
        shard, replicate = self.data_parallel_shard_degree, self.data_parallel_replicate_degree
        if not _is_count(shard) and shard != -1:
            raise ConfigError(
                f"fsdp: data_parallel_shard_degree={shard!r}: expected a number of ranks, or -1 for all that are left."
            )
        if replicate is not None and not _is_count(replicate):
            raise ConfigError(
                f"fsdp: data_parallel_replicate_degree={replicate!r}: expected a number of copies, or None."
            )
        if isinstance(self.wrap_classes, str):
            raise ConfigError(f"fsdp: wrap_classes={self.wrap_classes!r}: expected a list of names of classes.")
        if self.wrap_classes and not self.auto_wrap:
            raise ConfigError("fsdp: auto_wrap=False contradicts wrap_classes: give one of the two.")
        if not self.sharded_ckpt_prefix_dir:
            raise ConfigError("fsdp: sharded_ckpt_prefix_dir='' names no directory; e.g. 'ep{epoch}-ba{batch}'.")

    @property
    def given_prefix_dir(self) -> str | None:
        """``sharded_ckpt_prefix_dir`` where it is not the default: directories are named after files otherwise."""
        own = type(self).sharded_ckpt_prefix_dir
        return None if self.sharded_ckpt_prefix_dir == own else self.sharded_ckpt_prefix_dir


FSDP2Config = FSDPConfig
"""Composer's name for the configuration of torch's ``fully_shard``."""


@final
@dataclass(frozen=True, kw_only=True)
class TPConfig:
    """Splits single layers over ranks: tensor parallelism.

    Attributes:
        layer_plan: how each module is split, by name: a dict for torch's ``parallelize_module``, whose keys may hold
            globs, such as ``{'blocks.*.up': ColwiseParallel(), 'blocks.*.down': RowwiseParallel()}``. In place of a
            style, its name: ``'colwise'``, ``'rowwise'`` or ``'sequence'``.
        tensor_parallel_degree: ranks that share a layer, and the data.

    Raises:
        ConfigError: no plan, or a degree that is no number of ranks.
    """

    layer_plan: Mapping[str, Any]
    tensor_parallel_degree: int = 1

    def __post_init__(self) -> None:
        if not _is_count(self.tensor_parallel_degree):
            raise ConfigError(
                f"tp: tensor_parallel_degree={self.tensor_parallel_degree!r}: expected a number of ranks."
            )
        if not isinstance(self.layer_plan, Mapping) or not self.layer_plan:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"tp: layer_plan={self.layer_plan!r}: expected a dict from names of modules to how they are split, "
                "such as {'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}."
            )


@final
@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """Configuration of how a model is distributed over ranks.

    Attributes:
        fsdp: shard it. tp: split its layers.

    Args:
        fsdp2: another name for ``fsdp``, which Composer has for torch's ``fully_shard``.

    Raises:
        ConfigError: ``fsdp`` and ``fsdp2`` are both given.
    """

    fsdp: FSDPConfig | None = None
    tp: TPConfig | None = None
    fsdp2: InitVar[FSDPConfig | None] = None

    def __post_init__(self, fsdp2: FSDPConfig | None) -> None:
        if fsdp2 is not None and self.fsdp is not None:
            raise ConfigError(
                "parallelism_config: 'fsdp' and 'fsdp2' are two names for one thing here. Give one of them."
            )
        if fsdp2 is not None:
            object.__setattr__(self, "fsdp", fsdp2)

    @property
    def tensor_parallel_degree(self) -> int:
        """Ranks that share a layer."""
        return 1 if self.tp is None else self.tp.tensor_parallel_degree

    def degrees(self, world_size: int) -> tuple[int, int, int]:
        """(copies of the model, ranks that each is sharded over, ranks that share a layer), for that number of ranks.

        Raises:
            ConfigError: the number of ranks is not their product.
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
                    f"tensor_parallel_degree={tensor} leaves {left} groups of ranks out of {world_size}, and nothing "
                    f"says how they train together. Add 'fsdp': {{}}, or start {tensor} ranks."
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
                f"data_parallel_replicate_degree={replicate} × data_parallel_shard_degree={shard} does not make the "
                f"{left} ranks{_of_all(world_size, tensor)}. Start {copies * shard * tensor} ranks, or leave one of "
                "the two out: it becomes what is left."
            )
        return copies, shard, tensor


def ensure_parallelism(value: Mapping[str, Any] | ParallelismConfig | None) -> ParallelismConfig | None:
    """``value`` checked: a dict such as ``{'fsdp': {…}, 'tp': {…}}``, or the object; ``None`` if it says nothing.

    Raises:
        ConfigError: a key that does not exist, or a value that does not fit.
    """
    if value is None:
        return None
    if not isinstance(value, ParallelismConfig):
        given = _mapping("parallelism_config", value)
        _check_keys("parallelism_config", given, ("fsdp", "fsdp2", "tp"))
        fsdp, fsdp2 = _part(FSDPConfig, "fsdp", given), _part(FSDPConfig, "fsdp2", given)
        value = ParallelismConfig(fsdp=fsdp, fsdp2=fsdp2, tp=_part(TPConfig, "tp", given))
    return None if value.fsdp is None and value.tp is None else value


def _part(kind: type[D], name: str, given: Mapping[str, Any]) -> D | None:
    value = given.get(name)
    if value is None or isinstance(value, kind):
        return value
    where = f"parallelism_config[{name!r}]"
    arguments = _mapping(where, value)
    fields = dataclasses.fields(kind)
    _check_keys(where, arguments, [field.name for field in fields])
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in arguments:
            raise ConfigError(f"{where} has no {field.name!r}, which it needs.")
    return kind(**arguments)


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}={value!r}: expected a dict.")
    return cast("Mapping[str, Any]", value)


def _check_keys(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            raise UnknownArgumentError(f"{where} has no {key!r}.{did_you_mean(str(key), known)}")


def _check_flags(config: DataclassInstance, name: str) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(field.default, bool) and not isinstance(value, bool):
            raise ConfigError(f"{name}: {field.name}={value!r}: expected True or False.")


def _check_choice(name: str, field: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name}: {field}={value!r} does not exist.{did_you_mean(str(value), known)}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _of_all(world_size: int, tensor: int) -> str:
    return "" if tensor == 1 else f" ({world_size} ranks, {tensor} for each layer)"
