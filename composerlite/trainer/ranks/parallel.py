"""Training of one model by several ranks: replicas (DDP), shards (FSDP2, HSDP), split layers (TP), or all of these.

``state.model`` stays the user's module in all of them. DDP is a wrapper that only this module and the training step
know; sharding changes the module in place, after which its parameters are DTensors.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import inspect
import itertools
import logging
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, cast, final

import torch
import torch.distributed
from torch import nn
from torch.nn.parameter import is_lazy

from composerlite import dist
from composerlite.core import Precision, State, algorithms_of
from composerlite.devices import Device
from composerlite.errors import ConfigError, TrainingError, did_you_mean

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from composerlite.core import ParallelismConfig
    from composerlite.core.parallelism import FSDPConfig, TPConfig

__all__ = [
    "Parallel",
    "Replicated",
    "Sharded",
    "bundled",
    "check_same_model",
    "check_spreadable",
    "check_sync_strategy",
    "copy_model",
    "saved_buffers",
    "send_tensors",
    "shard_model",
]

log = logging.getLogger(__name__)

_STRATEGIES = ("single_auto_sync", "multi_auto_sync", "forced_sync")
_BUCKET_BYTES = 25 << 20
_BUNDLE_BYTES = 4 << 20
_SHOWN_DIFFERENCES = 3


class Parallel:
    """A rank's way to train the model together with the others: here, by itself.

    Attributes:
        data_rank: which share of the data is this rank's.
        data_ranks: number of shares.
        counts: whether the data of this rank are counted; of ranks that share layers one is enough.
        forward_is_shared: a forward pass waits for the other ranks, so that all need as many.
        passes_are_shared: the same of the forward and backward pass of a microbatch.
        steps_itself: :meth:`step` is to be called in the place of the optimizer's, which has no gradients.
    """

    data_rank: int = 0
    data_ranks: int = 1
    counts: bool = True
    forward_is_shared: bool = False
    passes_are_shared: bool = False
    steps_itself: bool = False

    def trained(self, model: nn.Module) -> Callable[..., Any]:
        """Return the module to call for the forward pass of a training batch."""
        return model

    def before_microbatch(self, *, last: bool) -> None:
        """Call it before the forward pass of each microbatch."""

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of a microbatch."""
        loss.backward()

    def reduce(self, model: nn.Module) -> None:
        """Make gradients those of all ranks, if they are not yet. Call it after the last backward pass of a batch."""

    def step(self) -> None:
        """Change the weights, where this does it in place of the optimizer."""
        raise AssertionError("unreachable")

    def before_evaluation(self, model: nn.Module) -> None:
        """Make the model the same on all ranks."""

    def after_evaluation(self, model: nn.Module) -> None:
        """Reshard parameters that forward passes without a backward pass have left gathered."""

    def give_up(self) -> None:
        """Release the connection to the other ranks, on a rank that failed and before the connection is closed."""

    def close(self) -> None:
        """Free resources when the trainer is closed, on every rank. May be called twice."""


@final
class Replicated(Parallel):
    """A replica on every rank, whose gradients are averaged.

    All ranks begin with the parameters and buffers of rank 0. Before each forward pass they get its buffers.

    Args:
        model: with parameters that need gradients.
        device: where it is.
        strategy: when gradients are averaged: ``'single_auto_sync'``, during the backward pass of a batch's last
            microbatch; ``'multi_auto_sync'``, during that of every microbatch, and a parameter may be unused in it;
            ``'forced_sync'``, after the last backward pass.
    """

    def __init__(self, model: nn.Module, device: Device, strategy: str) -> None:
        self.data_rank, self.data_ranks = dist.get_global_rank(), dist.get_world_size()
        self.passes_are_shared = self._every_time = strategy == "multi_auto_sync"
        self._forced = strategy == "forced_sync"
        self._device = device
        self._parameters = list(model.parameters())
        self._trained: list[bool] = []
        self._wrapper: Any = None
        self._wrap(model)

    def _wrap(self, model: nn.Module) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.give_up()
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        if any(self._trained):
            self._wrapper = DistributedDataParallel(
                model,
                device_ids=None if self._device.index is None else [self._device.index],
                find_unused_parameters=self._every_time,
            )
            # With forced_sync nothing waits for other ranks before the end of a batch: one may break off and try again.
            self._wrapper.require_forward_param_sync = not self._forced

    def trained(self, model: nn.Module) -> Callable[..., Any]:
        if not self._forced and self._trained != [parameter.requires_grad for parameter in self._parameters]:
            self._wrap(model)  # a callback has frozen or unfrozen some: it averages those of its construction alone
        return model if self._wrapper is None else self._wrapper

    def before_microbatch(self, *, last: bool) -> None:
        if self._wrapper is not None:
            self._wrapper.require_backward_grad_sync = not self._forced and (last or self._every_time)

    def reduce(self, model: nn.Module) -> None:
        if self._forced:
            average_gradients(model.parameters())
            self.before_evaluation(model)

    def before_evaluation(self, model: nn.Module) -> None:
        send_tensors(model.buffers())

    def give_up(self) -> None:
        wrapper, self._wrapper = self._wrapper, None
        # An exception may hold the wrapper for long. And if its reducer were the last to hold the process group, it
        # would wait for the threads of the group, which wait for the interpreter lock that it holds.
        if wrapper is not None:
            del wrapper.reducer, wrapper.logger, wrapper.process_group


@final
class Sharded(Parallel):
    """Shards of the model on every rank, or parts of its layers, or both. The model is changed in place.

    All ranks begin with the parameters and buffers of rank 0, and after each batch they get its buffers.

    Args:
        state: its model and optimizers; the optimizers are given the new parameters.
        config: how.

    Raises:
        ConfigError: what ``config`` asks for cannot be had with this model or this number of ranks.
    """

    forward_is_shared = True
    passes_are_shared = True

    def __init__(self, state: State, config: ParallelismConfig) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        model = state.model
        _check_shardable(state)
        copies, shards, tensor = config.degrees(state.world_size)
        rank = dist.get_global_rank()
        self.data_rank, self.data_ranks = rank // tensor, copies * shards
        self.counts = rank % tensor == 0
        named = {"replicate": copies, "shard": shards, "tensor": tensor}
        used = {
            name: size for name, size in named.items() if size > 1 or name == ("shard" if config.fsdp else "tensor")
        }
        mesh = init_device_mesh(state.device.type, tuple(used.values()), mesh_dim_names=tuple(used))
        old = {id(parameter): name for name, parameter in model.named_parameters()}
        send_tensors(itertools.chain(model.parameters(), model.buffers()))
        if config.tp is not None:
            _split_layers(model, mesh["tensor"], config.tp)
        if config.fsdp is not None:
            names = tuple(name for name in used if name != "tensor")
            _shard(state, mesh[names[0] if len(names) == 1 else names], config.fsdp)
        self._buffers = saved_buffers(model)
        self._fsdp: Any = None if config.fsdp is None else model
        self._reduces = True
        _give_parameters(state, old)

    def before_microbatch(self, *, last: bool) -> None:
        if self._fsdp is not None and last is not self._reduces:
            self._fsdp.set_requires_gradient_sync(last)
            self._reduces = last

    def backward(self, loss: torch.Tensor) -> None:
        try:
            loss.backward()
        except RuntimeError as e:
            from torch.utils.checkpoint import CheckpointError

            if not isinstance(e, CheckpointError):
                raise
            raise TrainingError(
                "activation_checkpointing=True: a block gave other tensors when the backward pass computed it again. "
                "Its forward keeps something from one call to the next, such as a cache of keys and values: leave that "
                "out while self.training is true, or leave out activation_checkpointing."
            ) from e

    def reduce(self, model: nn.Module) -> None:
        send_tensors(self._buffers)

    def after_evaluation(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _check_shardable(state: State) -> None:
    if any(parameter.is_meta for parameter in state.model.parameters()):
        raise ConfigError(
            "parallelism_config: the model is on the meta device, it has no values to train. Build it on the CPU: "
            "sharding moves it to the device piece by piece."
        )
    check_spreadable(state, "parallelism_config")


def check_spreadable(state: State, argument: str) -> None:
    """Check that ``argument`` can shard the model.

    Raises:
        ConfigError: microbatches are to be found automatically, or the optimizer has stepped.
    """
    if state.auto_microbatching:
        raise ConfigError(
            f"device_train_microbatch_size='auto' contradicts {argument}: a rank that is out of memory cannot leave a "
            "pass in which the others wait for it. Give a number of samples."
        )
    if any(optimizer.state for optimizer in state.optimizers):
        raise ConfigError(
            f"optimizers: the optimizer has stepped before {argument} spreads the model, and its state cannot follow. "
            "Build a new one; load_path restores its state."
        )


def check_same_model(model: nn.Module) -> None:
    """Check that the tensors of ``model`` have the same names, shapes and kinds on every rank. Every rank calls it.

    Raises:
        ConfigError: they differ. The message names the first rank with another model and the first differences.
    """
    own = _description(model)
    group = dist.get_group()
    digests = group.gather(hashlib.sha256(repr(own).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    first = group.broadcast(own)
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    differences = group.gather(_differences(first, own))[others[0]]
    shown = "; ".join(differences[:_SHOWN_DIFFERENCES])
    more = f"; and {len(differences) - _SHOWN_DIFFERENCES} more" if len(differences) > _SHOWN_DIFFERENCES else ""
    raise ConfigError(
        f"rank {others[0]} has another model than rank 0: {shown}{more}. Build the same model on every rank."
    )


def _description(model: nn.Module) -> list[tuple[str, str]]:
    """Name and kind of every tensor, in order: it is the order in which the ranks exchange them."""
    parameters = [(name, f"{_kind(p)}{'' if p.requires_grad else ', frozen'}") for name, p in model.named_parameters()]
    return [*parameters, *((name, _kind(buffer)) for name, buffer in model.named_buffers())]


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of an unknown shape" if is_lazy(tensor) else f"{tensor.dtype} {tuple(tensor.shape)}"


def _differences(first: list[tuple[str, str]], own: list[tuple[str, str]]) -> list[str]:
    """List the differences between this rank and rank 0."""
    theirs, mine = dict(first), dict(own)
    found = [
        f"{name!r} is {mine[name]} and not {theirs[name]}"
        for name in theirs
        if mine.get(name, theirs[name]) != theirs[name]
    ]
    found += [f"it has no {name!r}" for name in theirs if name not in mine]
    found += [f"it has {name!r}, which rank 0 has not" for name in mine if name not in theirs]
    return found or (["the order of its parameters differs"] if first != own else [])


def send_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Copy those of rank 0 to all. Small ones of a type travel together: what each message costs is its latency."""
    for bundle in bundled(tensor.detach() for tensor in tensors):
        if len(bundle) == 1:
            torch.distributed.broadcast(bundle[0], 0)
            continue
        sent = torch.cat([tensor.reshape(-1) for tensor in bundle])
        torch.distributed.broadcast(sent, 0)
        for tensor, part in zip(bundle, sent.split([tensor.numel() for tensor in bundle]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def bundled(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return ``tensors`` in groups that make one message each: of one type, on one device, of up to 4 MiB."""
    bundles: list[list[torch.Tensor]] = []
    open_ones: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        if not tensor.is_contiguous():  # it may have several places for one number
            bundles.append([tensor])
            continue
        kind, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.itemsize
        bundle, taken = open_ones.get(kind, ([], _BUNDLE_BYTES))
        if taken + size > _BUNDLE_BYTES:
            bundle, taken = [], 0
            bundles.append(bundle)
        bundle.append(tensor)
        open_ones[kind] = bundle, taken + size
    return bundles


def saved_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Buffers that a forward pass may change: those that are saved, as the statistics of batch norm."""
    saved = model.state_dict().keys()
    return [b for name, b in model.named_buffers() if name in saved and not dist.is_distributed_tensor(b)]


def _give_parameters(state: State, old: dict[int, str]) -> None:
    """Put the parameters that sharding has made into the optimizers, where the ``old`` ones were."""
    new = dict(state.model.named_parameters())
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new[old[id(p)]] if id(p) in old else p for p in group["params"]]


def _split_layers(model: nn.Module, mesh: DeviceMesh, config: TPConfig) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    styles = {name: _style(style) for name, style in config.layer_plan.items()}
    names = [name for name, _ in model.named_modules()]
    for pattern in styles:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"tp: layer_plan[{pattern!r}]: the model has no such module.{did_you_mean(pattern, names)}"
            )
    plan = {
        name: style
        for name in names
        for pattern, style in styles.items()
        if name and fnmatch.fnmatchcase(name, pattern)
    }
    parallelize_module(model, mesh, plan)


def _style(style: Any) -> ParallelStyle:
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

    named = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel, "sequence": SequenceParallel}
    if isinstance(style, str) and style in named:
        return named[style]()
    if not isinstance(style, ParallelStyle):
        raise ConfigError(
            f"tp: layer_plan: {style!r} does not say how to split a layer.{did_you_mean(str(style), named)}"
        )
    return style


def _shard(state: State, mesh: DeviceMesh, config: FSDPConfig) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = state.model
    blocks = _blocks(model, config)
    compute = {Precision.AMP_BF16: torch.bfloat16, Precision.AMP_FP16: torch.float16}.get(state.precision)
    if config.mixed_precision == "FULL":
        compute = None
    reduce = compute if config.mixed_precision == "PURE" or compute is None else torch.float32
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce),
        "offload_policy": CPUOffloadPolicy(torch.cuda.is_available()) if config.cpu_offload else OffloadPolicy(),
        "ignored_params": {p for module in config.ignored_modules or () for p in module.parameters()},
    }
    if config.activation_checkpointing:
        _without_cache(model)
    for block in blocks:
        if config.activation_checkpointing:
            _compute_twice(block)
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **arguments)
    fully_shard(model, **arguments)


def _compute_twice(block: nn.Module) -> None:
    """Checkpoint the activations of ``block``: the backward pass computes them again, its buffers stay."""
    from torch.utils.checkpoint import checkpoint

    def contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        return contextlib.nullcontext(), _keeping_buffers(block)

    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


@contextlib.contextmanager
def _keeping_buffers(module: nn.Module) -> Generator[None]:
    """Within it, what the forward pass does to buffers does not last: running means count each batch once."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, values in before:
            buffer.data.copy_(values)  # unnoticed by autograd, which may keep the buffer for this backward pass


def _without_cache(model: nn.Module) -> None:
    """Turn off the cache of keys and values in training: a block computed twice would add its own twice."""
    found = [  # models of transformers: it leaves the cache out in the same way where it computes blocks twice itself
        module
        for module in model.modules()
        if hasattr(module, "gradient_checkpointing_enable") and hasattr(getattr(module, "config", None), "use_cache")
    ]
    for module in found:
        if "use_cache" in inspect.signature(module.forward).parameters:
            module.register_forward_pre_hook(_use_no_cache, with_kwargs=True)
    if any(cast("Any", module).config.use_cache for module in found) and dist.get_global_rank() == 0:
        log.warning("activation_checkpointing=True: the model's use_cache=True is left out while it trains")


def _use_no_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    return (args, {**kwargs, "use_cache": False}) if torch.is_grad_enabled() else None


def _blocks(model: nn.Module, config: FSDPConfig) -> list[nn.Module]:
    """Modules that FSDP gathers as one unit, inner ones first."""
    if not config.auto_wrap:
        return []
    modules = [module for module in model.modules() if module is not model]
    wants = getattr(model, "fsdp_wrap_fn", None)
    if callable(wants):
        chosen = [module for module in modules if wants(module)]
    elif any(getattr(module, "_fsdp_wrap", False) for module in modules):
        chosen = [module for module in modules if getattr(module, "_fsdp_wrap", False)]
    elif config.wrap_classes:
        classes = {type(module).__name__ for module in modules}
        for name in config.wrap_classes:
            if name not in classes:
                raise ConfigError(f"fsdp: wrap_classes: the model has no {name!r}.{did_you_mean(name, classes)}")
        chosen = [module for module in modules if type(module).__name__ in config.wrap_classes]
    else:
        chosen = [item for module in modules if isinstance(module, nn.ModuleList) for item in module]
    without_forward = (nn.ModuleList, nn.ModuleDict)
    return [m for m in reversed(chosen) if any(True for _ in m.parameters()) and not isinstance(m, without_forward)]


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients over all ranks. Where a rank has none and another has, that of the first counts as zero."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    device = trained[0].device
    used = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.uint8, device=device)
    torch.distributed.all_reduce(used, torch.distributed.ReduceOp.MAX)
    gradients: list[torch.Tensor] = []
    for parameter, is_used in zip(trained, used.tolist(), strict=True):
        if is_used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        torch.distributed.all_reduce(flat)
        flat /= torch.distributed.get_world_size()
        for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Tensors of one kind next to each other, in pieces of bounded size."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size >= _BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def check_sync_strategy(value: str | None) -> str | None:
    """``value`` if it says when gradients are averaged, or leaves it to the trainer.

    Raises:
        ConfigError: there is no such strategy.
    """
    name = None if value is None else str(value).lower()
    if name is not None and name not in _STRATEGIES:
        raise ConfigError(f"ddp_sync_strategy={value!r} does not exist.{did_you_mean(name, _STRATEGIES)}")
    return name


def shard_model(state: State) -> Parallel | None:
    """Spread ``state.model`` over the ranks as ``state.parallelism`` says; ``None`` if it says nothing.

    Before a checkpoint is loaded, so that each rank loads only its shards.

    Raises:
        ConfigError: the model cannot be spread like that, or differs between ranks.
    """
    if state.world_size > 1:
        check_same_model(state.model)
    return None if state.parallelism is None else Sharded(state, state.parallelism)


def copy_model(state: State, strategy: str | None) -> Parallel:
    """Make ``state.model`` ready to be trained as a whole on every rank. After a checkpoint was loaded.

    Raises:
        ConfigError: ``strategy`` waits for every gradient, and an algorithm leaves some out.
    """
    if state.world_size == 1:
        return Parallel()
    unused = [type(one).__name__ for one in algorithms_of(state) if one.find_unused_parameters]
    if unused and strategy == _STRATEGIES[0]:
        raise ConfigError(
            f"ddp_sync_strategy={strategy!r} waits for the gradient of every parameter, and with {', '.join(unused)} "
            "some have none. Leave it out, or pass 'forced_sync'."
        )
    if state.auto_microbatching or (unused and strategy is None):
        strategy = "forced_sync"
    return Replicated(state.model, state.device, strategy or _STRATEGIES[0])
