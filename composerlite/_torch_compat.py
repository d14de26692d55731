"""The private names of torch that composerlite uses. No other module uses one.

torch may change them in any release. Each is here since it has no public name that does the same;
``tests/test_torch_compat.py`` says what each must do, and with which releases of torch that was seen.
"""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch._utils
from torch import Tensor, nn
from torch.nn.modules import module as _module

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = [
    "EXTRA_STATE",
    "OWN_OF_LOADERS",
    "change_count",
    "dcp_memory_format_class",
    "dcp_storage_info_class",
    "default_store",
    "forget_workers",
    "has_load_hooks",
    "is_iterated_by_torch",
    "load_hooks",
    "local_part",
    "map_leaves",
    "mark_as_stepped",
    "memory_snapshot",
    "multiply_each",
    "negative_view",
    "observe_out_of_memory",
    "rebuild_tensor",
    "record_memory_history",
    "savable_dtypes",
    "scheduler_parts",
    "storage_dtypes",
    "storage_id",
    "typed_storage_class",
    "untyped_storage",
    "with_versions",
    "wrapper_tensor",
]


EXTRA_STATE: str = _module._EXTRA_STATE_KEY_SUFFIX
"""The end of the names under which modules keep what ``get_extra_state`` returns, of any type."""


# ── tensors and storages ─────────────────────────────────────────────────────────────────────────────────────────────
rebuild_tensor: Any = torch._utils._rebuild_tensor_v2
"""The function that a file of ``torch.save`` names for each tensor; its name is part of the format."""


def wrapper_tensor(kind: Any, shape: Any, *, requires_grad: bool, **how: Any) -> Any:
    """A tensor of the class ``kind`` without numbers of its own."""
    return Tensor._make_wrapper_subclass(kind, shape, **how, requires_grad=requires_grad)  # pyright: ignore


def negative_view(tensor: Tensor) -> Tensor:
    """``tensor`` with the bit set that says to read its numbers with the other sign, as ``conj().imag`` has it."""
    view: Any = torch._neg_view(tensor)  # pyright: ignore[reportAttributeAccessIssue]
    return view


def change_count(tensor: Tensor) -> int:
    """Return autograd's version counter of ``tensor`` and its memory; -1 for an inference tensor, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return the identity of a storage, as ``torch.save`` uses it: two tensors that share memory have the same one.

    Their addresses do not: all storages without a byte have the same.
    """
    return storage._cdata


def untyped_storage(storage: torch.storage.TypedStorage) -> torch.UntypedStorage:
    """The bytes of a typed storage; ``storage.untyped()`` warns that typed ones will go."""
    return storage._untyped_storage


def typed_storage_class(storage: torch.storage.TypedStorage) -> Any:
    """The class that the format names for a typed storage, such as ``torch.FloatStorage``."""
    return getattr(torch, storage._pickle_storage_type())


def storage_dtypes() -> dict[str, torch.dtype]:
    """Return the types of the numbers in torch's typed storages, by the names of the storage classes."""
    tables: Any = torch.storage
    return {name: dtype for dtype, name in tables._dtype_to_storage_type_map().items()}


@functools.cache
def savable_dtypes() -> frozenset[torch.dtype]:
    """The types of numbers that torch can save: those of its private tables, which pickling looks at."""
    tables: Any = torch.storage
    return frozenset(tables._new_dtypes()) | frozenset(tables._dtype_to_storage_type_map())


def local_part(tensor: Any) -> Any:
    """The tensor that a distributed one is made of on this rank, itself; any other tensor as it is.

    ``to_local()`` gives a view of it where gradients are recorded.
    """
    return getattr(tensor, "_local_tensor", tensor)


# ── modules, optimizers, loaders ─────────────────────────────────────────────────────────────────────────────────────
def load_hooks(module: nn.Module) -> Iterable[Any]:
    """Return the hooks that run before ``module`` loads a state."""
    return module._load_state_dict_pre_hooks.values()


def has_load_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return true if a hook runs before ``optimizer`` loads a state."""
    return bool(optimizer._optimizer_load_state_dict_pre_hooks)


OWN_OF_LOADERS = frozenset({"_iterator", "_IterableDataset_len_called", "_DataLoader__initialized"})
"""Attributes that a loader keeps for itself while it is iterated over."""


def scheduler_parts(scheduler: Any) -> Sequence[Any]:
    """Return the schedulers that a ``SequentialLR`` or ``ChainedScheduler`` is made of; none of any other."""
    kept = [value for value in vars(scheduler).values() if isinstance(value, list | tuple)]
    return [one for value in kept for one in value if isinstance(one, torch.optim.lr_scheduler.LRScheduler)]


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Keep schedulers from the warning that ``optimizer`` has not stepped before them: it has, in another process."""
    vars(optimizer)["_opt_called"] = True


def multiply_each(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply all ``tensors`` in place, on a GPU in one kernel. Documented under "Foreach Operations", underscore or
    not.
    """
    torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportCallIssue, reportArgumentType]


def is_iterated_by_torch(loader: DataLoader[Any]) -> bool:
    """Return true if ``iter(loader)`` is torch's own and not overridden by a subclass."""
    from torch.utils.data import DataLoader

    return type(loader)._get_iterator is DataLoader._get_iterator


def forget_workers(loader: DataLoader[Any]) -> None:
    """Release the iterator that ``loader`` keeps where its workers persist: it is a copy, or they are to end."""
    vars(loader)["_iterator"] = None


# ── torch.distributed, which is imported where it is used ────────────────────────────────────────────────────────────
def default_store() -> Any:
    """The store by which the ranks of the default process group found each other."""
    import torch.distributed

    return torch.distributed.distributed_c10d._get_default_store()


def dcp_storage_info_class() -> Any:
    """The class of the places of data in ``.metadata``; its name is part of the format."""
    from torch.distributed.checkpoint import filesystem

    return filesystem._StorageInfo


def dcp_memory_format_class() -> Any:
    """The class of a tensor's memory format in ``.metadata``; its name is part of the format."""
    from torch.distributed.checkpoint import metadata

    return metadata._MEM_FORMAT_ENCODING


# ── arguments and memory ─────────────────────────────────────────────────────────────────────────────────────────────
def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Replace each leaf of nested containers by what ``function`` gives for it, as ``torch.export`` nests shapes."""
    from torch.utils import _pytree

    return _pytree.tree_map(function, tree)


def record_memory_history(max_entries: int | None) -> None:
    """Remember the last ``max_entries`` allocations on CUDA GPUs; ``None``: forget them and remember no more.

    ``torch.cuda.memory`` documents it under its private name: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
    """
    if max_entries is None:
        torch.cuda.memory._record_memory_history(None)
    else:
        torch.cuda.memory._record_memory_history("all", max_entries=max_entries)


def memory_snapshot() -> Any:
    """The state of the memory of CUDA GPUs now, with the allocations that are remembered."""
    return torch.cuda.memory._snapshot()


def observe_out_of_memory(observer: Callable[[int, int, int, int], None]) -> None:
    """Call ``observer`` with device and bytes before an allocation on a CUDA GPU fails. It stays for the process."""
    torch._C._cuda_attach_out_of_memory_observer(observer)  # pyright: ignore


def with_versions(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """``state`` of ``model`` with the versions of its modules, as ``state_dict()`` has them.

    Without them a module that has changed the form of its state converts what is in the present form already.
    """
    versioned: Any = OrderedDict(state)
    modules = model.named_modules(remove_duplicate=False)
    vars(versioned).update(_metadata=OrderedDict((name, {"version": module._version}) for name, module in modules))
    return versioned
