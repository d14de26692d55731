"""Training of one model on several ranks: replicas (DDP), shards (FSDP2, HSDP), split layers (TP), or combinations.

``state.model`` is always the user's module. Only this module and the training step know DDP's wrapper. Sharding changes
the module in place: the parameters become DTensors.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import inspect
import itertools
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed
from torch import nn
from torch.nn.parameter import is_lazy

from composerlite import dist
from composerlite.core import Precision, State
from composerlite.core.engine import algorithms_of
from composerlite.devices import Device
from composerlite.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from composerlite.core import ParallelismConfig
    from composerlite.core.parallelism import FSDPConfig, TPConfig

__all__ = [
    "Averaged",
    "Parallel",
    "Replicated",
    "Sharded",
    "check_same_model",
    "check_spreadable",
    "check_sync_strategy",
    "copy_model",
    "saved_buffers",
    "send_tensors",
    "shard_model",
]

_STRATEGIES = ("single_auto_sync", "multi_auto_sync", "forced_sync")
_MESSAGE_BYTES = 4 << 20


class Parallel:
    """Trains the model together with the other ranks. This base class trains on a single rank.

    Attributes:
        data_rank: index of this rank's share of the data.
        data_ranks: number of shares.
        counts: count the samples of this rank; false if another rank has the same share.
        forward_is_shared: a forward pass is collective, so all ranks need the same number of forward passes.
        passes_are_shared: the forward and backward pass of a training batch is collective.
        steps_itself: :meth:`step` replaces the optimizer's ``step``, and the optimizer has no gradients.
    """

    data_rank: int = 0
    data_ranks: int = 1
    counts: bool = True
    forward_is_shared: bool = False
    passes_are_shared: bool = False
    steps_itself: bool = False

    def training_module(self, model: nn.Module) -> Callable[..., Any]:
        """Return the module to call for the forward pass of a training batch."""
        return model

    def before_microbatch(self, *, last: bool) -> None:
        """Prepare the passes of a microbatch. ``last``: the last microbatch of the batch."""

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a microbatch."""
        loss.backward()

    def reduce(self, model: nn.Module) -> None:
        """Finish the reduction of gradients and buffers. Call after the last backward pass of a batch."""

    def step(self) -> None:
        """Step the optimizer, if ``steps_itself``."""
        raise AssertionError("unreachable")

    def before_evaluation(self, model: nn.Module) -> None:
        """Make the buffers of the model the same on all ranks."""

    def after_evaluation(self, model: nn.Module) -> None:
        """Reshard parameters that forward passes without a backward pass have gathered."""

    def disconnect(self) -> None:
        """Release the process group. Call before the group is destroyed, also on a rank that failed."""

    def close(self) -> None:
        """Free resources when the trainer is closed, on every rank. May be called twice."""


@final
class Replicated(Parallel):
    """A replica on every rank in torch's ``DistributedDataParallel``, which averages gradients in the backward pass.

    All ranks start with the parameters and buffers of rank 0, and get its buffers before each forward pass.

    Args:
        model: module with parameters that need gradients.
        device: device of the model.
        every_microbatch: average gradients in the backward pass of every microbatch; a parameter may then be unused.
            False: in the last microbatch of a batch.
    """

    def __init__(self, model: nn.Module, device: Device, *, every_microbatch: bool) -> None:
        self.data_rank, self.data_ranks = dist.get_global_rank(), dist.get_world_size()
        self.passes_are_shared = self._every_microbatch = every_microbatch
        self._device = device
        self._parameters = list(model.parameters())
        self._trained: list[bool] = []
        self._wrapper: Any = None
        self._wrap(model)

    def _wrap(self, model: nn.Module) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.disconnect()
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        if any(self._trained):
            self._wrapper = DistributedDataParallel(
                model,
                device_ids=None if self._device.index is None else [self._device.index],
                find_unused_parameters=self._every_microbatch,
            )

    def training_module(self, model: nn.Module) -> Callable[..., Any]:
        if self._trained != [parameter.requires_grad for parameter in self._parameters]:
            self._wrap(model)  # a callback has frozen or unfrozen parameters, which the wrapper has read once
        return model if self._wrapper is None else self._wrapper

    def before_microbatch(self, *, last: bool) -> None:
        if self._wrapper is not None:
            self._wrapper.require_backward_grad_sync = last or self._every_microbatch

    def before_evaluation(self, model: nn.Module) -> None:
        send_tensors(model.buffers())

    def disconnect(self) -> None:
        wrapper, self._wrapper = self._wrapper, None
        # An exception may keep the wrapper alive. If the reducer were the last owner of the process group, deleting the
        # reducer would wait for threads of the group, and these wait for the interpreter lock: a deadlock.
        if wrapper is not None:
            del wrapper.reducer, wrapper.logger, wrapper.process_group


@final
class Averaged(Parallel):
    """A replica on every rank. Gradients are averaged after the last backward pass of a batch (``forced_sync``).

    The passes are not collective: one rank may run out of memory and start the batch again. All ranks start with the
    parameters and buffers of rank 0, and get its buffers after each batch.

    Args:
        model: module to train.
    """

    def __init__(self, model: nn.Module) -> None:
        self.data_rank, self.data_ranks = dist.get_global_rank(), dist.get_world_size()
        send_tensors(itertools.chain(model.parameters(), model.buffers()))

    def reduce(self, model: nn.Module) -> None:
        average_gradients(model.parameters())
        send_tensors(model.buffers())

    def before_evaluation(self, model: nn.Module) -> None:
        send_tensors(model.buffers())


@final
class Sharded(Parallel):
    """The model is sharded over the ranks, or the layers are split, or both. Changes the model in place.

    All ranks start with the parameters and buffers of rank 0, and get its buffers after each batch.

    Args:
        state: state with the model, and optimizers, which get the new parameters.
        config: degrees of parallelism.

    Raises:
        ConfigError: the model or the number of ranks does not allow ``config``.
    """

    forward_is_shared = True
    passes_are_shared = True

    def __init__(self, state: State, config: ParallelismConfig) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        model = state.model
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ConfigError(
                "parallelism_config: the model is on the meta device and has no values to train. Build the model on "
                "the CPU: sharding moves it to the device in pieces."
            )
        check_spreadable(state, "parallelism_config")
        copies, shards, tensor = config.degrees(state.world_size)
        rank = dist.get_global_rank()
        self.data_rank, self.data_ranks = rank // tensor, copies * shards
        self.counts = rank % tensor == 0
        named = {"replicate": copies, "shard": shards, "tensor": tensor}
        only = "shard" if config.fsdp else "tensor"  # the mesh needs a dimension, even of size 1
        used = {name: size for name, size in named.items() if size > 1 or name == only}
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
        new = dict(model.named_parameters())
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [new[old[id(p)]] if id(p) in old else p for p in group["params"]]

    def before_microbatch(self, *, last: bool) -> None:
        if self._fsdp is not None and last is not self._reduces:
            self._fsdp.set_requires_gradient_sync(last)
            self._reduces = last

    def reduce(self, model: nn.Module) -> None:
        send_tensors(self._buffers)

    def after_evaluation(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def check_spreadable(state: State, argument: str) -> None:
    """Check that the trainer's ``argument`` can shard the model.

    Raises:
        ConfigError: the microbatch size is ``'auto'``, or the optimizer has stepped.
    """
    if state.auto_microbatching:
        raise ConfigError(
            f"device_train_microbatch_size='auto' contradicts {argument}: a rank that is out of memory cannot leave a "
            "pass while the other ranks wait for that rank. Give a number of samples."
        )
    if any(optimizer.state for optimizer in state.optimizers):
        raise ConfigError(
            f"optimizers: the optimizer has stepped before {argument} shards the model, and its state cannot be "
            "sharded. Build a new optimizer; load_path restores the state."
        )


def check_same_model(model: nn.Module) -> None:
    """Check that the tensors of ``model`` have the same names, shapes and types on every rank. Collective.

    Raises:
        ConfigError: they differ. The message has the first difference.
    """
    own = [f"{n!r} is {_type(p)}{'' if p.requires_grad else ', frozen'}" for n, p in model.named_parameters()]
    own += [f"{n!r} is {_type(buffer)}" for n, buffer in model.named_buffers()]
    group = dist.get_group()
    if len(set(group.gather(hashlib.sha256(repr(own).encode()).hexdigest()))) == 1:
        return
    first = group.broadcast(own)
    pairs = itertools.zip_longest(own, first, fillvalue="no further tensor")
    differences = group.gather(next((pair for pair in pairs if pair[0] != pair[1]), None))
    rank, (mine, theirs) = next((r, pair) for r, pair in enumerate(differences) if pair is not None)
    raise ConfigError(
        f"rank {rank} has another model than rank 0: {mine}, and on rank 0: {theirs}. Build the same model on every "
        "rank."
    )


def _type(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of an unknown shape" if is_lazy(tensor) else f"{tensor.dtype} {tuple(tensor.shape)}"


def send_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Copy the values of ``tensors`` from rank 0 to all ranks. Small tensors share a message."""
    for bundle in _bundles(tensor.detach() for tensor in tensors):
        if len(bundle) == 1:
            torch.distributed.broadcast(bundle[0], 0)
            continue
        sent = torch.cat([tensor.reshape(-1) for tensor in bundle])
        torch.distributed.broadcast(sent, 0)
        for tensor, part in zip(bundle, sent.split([tensor.numel() for tensor in bundle]), strict=True):
            tensor.copy_(part.view(tensor.shape))


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Average gradients over all ranks. A missing gradient counts as zero if any rank has a gradient."""
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
    for bundle in _bundles(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bundle])
        torch.distributed.all_reduce(flat)
        flat /= torch.distributed.get_world_size()
        for gradient, mean in zip(bundle, flat.split([g.numel() for g in bundle]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def _bundles(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return ``tensors`` in groups for one message each: one type, one device, up to 4 MiB."""
    bundles: list[list[torch.Tensor]] = []
    open_bundles: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        if not tensor.is_contiguous():  # an expanded tensor has several elements in one place
            bundles.append([tensor])
            continue
        kind, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.itemsize
        bundle, taken = open_bundles.get(kind, ([], _MESSAGE_BYTES))
        if taken + size > _MESSAGE_BYTES:
            bundle, taken = [], 0
            bundles.append(bundle)
        bundle.append(tensor)
        open_bundles[kind] = bundle, taken + size
    return bundles


def saved_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Return the buffers in ``state_dict``, such as the statistics of batch norm: a forward pass may change them."""
    saved = model.state_dict().keys()
    return [b for name, b in model.named_buffers() if name in saved and not dist.is_distributed_tensor(b)]


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
        raise ConfigError(f"tp: layer_plan: {style!r} is not a way to split a layer.{did_you_mean(str(style), named)}")
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
        _disable_caches(model)
    for block in blocks:
        if config.activation_checkpointing:
            _checkpoint_activations(block)
        fully_shard(block, reshard_after_forward=config.reshard_after_forward, **arguments)
    fully_shard(model, **arguments)


def _checkpoint_activations(block: nn.Module) -> None:
    """Let the backward pass compute the activations of ``block`` again; buffers change only in the forward pass."""
    from torch.utils.checkpoint import checkpoint

    def contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        return contextlib.nullcontext(), _keeping_buffers(block)

    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


@contextlib.contextmanager
def _keeping_buffers(module: nn.Module) -> Generator[None]:
    """Restore the buffers of ``module`` after the block, so that running means count each batch once."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, values in before:
            buffer.data.copy_(values)  # .data: autograd may have saved the buffer for this backward pass


def _disable_caches(model: nn.Module) -> None:
    """Turn off the key-value cache of transformers' models in training: a recomputed block would fill it twice."""

    def without_cache(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        return (args, {**kwargs, "use_cache": False}) if torch.is_grad_enabled() else None

    for module in model.modules():
        is_of_transformers = hasattr(module, "gradient_checkpointing_enable")
        if is_of_transformers and "use_cache" in inspect.signature(module.forward).parameters:
            module.register_forward_pre_hook(without_cache, with_kwargs=True)


def _blocks(model: nn.Module, config: FSDPConfig) -> list[nn.Module]:
    """Return the modules that FSDP gathers as a unit, inner modules first."""
    if not config.auto_wrap:
        return []
    modules = [module for module in model.modules() if module is not model]
    wraps = getattr(model, "fsdp_wrap_fn", None)
    if callable(wraps):
        chosen = [module for module in modules if wraps(module)]
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


def check_sync_strategy(value: str | None) -> str | None:
    """Return the checked ``ddp_sync_strategy`` in lower case; ``None``: the trainer chooses.

    Raises:
        ConfigError: unknown strategy.
    """
    name = None if value is None else str(value).lower()
    if name is not None and name not in _STRATEGIES:
        raise ConfigError(f"ddp_sync_strategy={value!r} does not exist.{did_you_mean(name, _STRATEGIES)}")
    return name


def shard_model(state: State) -> Parallel | None:
    """Shard ``state.model`` as ``state.parallelism`` says. Call before a checkpoint is loaded into the shards.

    Returns:
        ``None`` without ``state.parallelism``: call :func:`copy_model` after the load.

    Raises:
        ConfigError: the model cannot be sharded like this, or differs between ranks.
    """
    if state.world_size > 1:
        check_same_model(state.model)
    return None if state.parallelism is None else Sharded(state, state.parallelism)


def copy_model(state: State, strategy: str | None) -> Parallel:
    """Copy ``state.model`` from rank 0 to all ranks, and train the replicas. Call after a checkpoint is loaded.

    Args:
        state: state with the model.
        strategy: checked ``ddp_sync_strategy``.

    Raises:
        ConfigError: ``strategy`` needs every gradient, and an algorithm leaves some out.
    """
    if state.world_size == 1:
        return Parallel()
    unused = [type(algorithm).__name__ for algorithm in algorithms_of(state) if algorithm.find_unused_parameters]
    if unused and strategy == "single_auto_sync":
        raise ConfigError(
            f"ddp_sync_strategy={strategy!r} waits for the gradient of every parameter, and {', '.join(unused)} leaves "
            "some out. Leave ddp_sync_strategy out, or pass 'forced_sync'."
        )
    if strategy == "forced_sync" or state.auto_microbatching or (unused and strategy is None):
        return Averaged(state.model)
    return Replicated(state.model, state.device, every_microbatch=strategy == "multi_auto_sync")
