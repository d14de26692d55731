"""Copies of states for saves behind training, in memory that is used again by the next one."""

from __future__ import annotations

import atexit
import copy
import threading
import weakref
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composerlite.checkpoint.formats.tensor_kinds import is_dense
from composerlite.storage import Copier, HostMemory, available_memory
from composerlite.types import StateDict, with_items

__all__ = ["copied"]

_ALIGNMENT = 64
_LEAST_BYTES = 1 << 20  # below that new memory costs nothing


def copied(state: StateDict) -> StateDict:
    """A copy of ``state`` that training does not change any more: tensors in this machine's memory.

    The memory is kept when nothing refers to the copy any more, and used by the next: its first touch is what costs
    most.
    """
    copying = _Copying()
    result = copying.copy_of(state)
    copying.run()
    return result


@final
class _Copying:
    """One copy. Tensors in host memory are found first, and then copied all together."""

    def __init__(self) -> None:
        self._known: dict[int, Tensor] = {}
        self._plain: list[tuple[Tensor, Tensor]] = []  # copy, and what it is of
        self._alive: list[Any] = []

    def copy_of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self._known:
                self._alive.append(value)  # no other tensor gets its number meanwhile
                self._known[id(value)] = self._tensor(value.detach())
            return self._known[id(value)]
        copied = with_items(value, lambda _, inner: self.copy_of(inner))
        return copied if copied is not value else copy.deepcopy(value)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            local = tensor.to_local().detach()
            if local.device.type != "cpu":
                return tensor.cpu()
            mesh, placements = tensor.device_mesh, tensor.placements
            mine = self._tensor(local)
            with torch.no_grad():  # so that what to_local() gives is what the other is made of, not a view of it
                made = DTensor.from_local(
                    mine, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
                )
                inner = made.to_local()
            if self._plain and self._plain[-1][0] is mine:
                self._plain[-1] = inner, local
            return made
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.cpu()
        if not is_dense(tensor) or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
            return tensor.clone()
        made = torch.empty(0, dtype=tensor.dtype)
        self._plain.append((made, tensor))
        return made

    def run(self) -> None:
        """Give the copies their memory, and copy."""
        sizes = [tensor.numel() * tensor.itemsize for _, tensor in self._plain]
        memory = _pool.take(sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        jobs: list[tuple[int, int, int]] = []
        offset = 0
        for (made, tensor), size in zip(self._plain, sizes, strict=True):
            if memory is None or not size:
                made.set_(tensor.clone())  # pyright: ignore[reportArgumentType]
                continue
            storage = torch.frombuffer(memory.view(offset, size), dtype=torch.uint8).untyped_storage()
            made.set_(storage, 0, tensor.size(), tensor.stride())  # pyright: ignore[reportArgumentType]
            jobs.append((memory.memory.address + offset, tensor.data_ptr(), size))
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        if jobs:
            _pool.copy(jobs)


@final
class _Lease:
    """Memory as long as something refers to a view of it; then it goes back."""

    def __init__(self, pool: _Pool, memory: HostMemory) -> None:
        self.memory = memory
        self._pool = pool
        self._views = 0
        self._lock = threading.RLock()

    def view(self, offset: int, size: int) -> memoryview:
        view = self.memory.view(offset, size)
        with self._lock:
            self._views += 1
        weakref.finalize(view, self._drop).atexit = False
        return view

    def _drop(self) -> None:
        with self._lock:
            self._views -= 1
            is_last = not self._views
        if is_last:
            self._pool.give_back(self.memory)


@final
class _Pool:
    """The memory of the last copy that nothing refers to any more."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # memory comes back in whatever thread drops the last view
        self._free: HostMemory | None = None
        self._copier: Copier | None = None

    def take(self, size_bytes: int) -> _Lease | None:
        """Memory for ``size_bytes``; ``None`` where that is little, or too much for this machine."""
        if size_bytes < _LEAST_BYTES:
            return None
        with self._lock:
            memory, self._free = self._free, None
        if memory is None or memory.size_bytes < size_bytes:
            if memory is not None:
                memory.close()
            if size_bytes > available_memory() // 2:
                return None
            memory = HostMemory(size_bytes)
        return _Lease(self, memory)

    def give_back(self, memory: HostMemory) -> None:
        """Keep the larger one."""
        with self._lock:
            smaller, larger = memory, self._free
            if larger is None or larger.size_bytes < smaller.size_bytes:
                smaller, larger = larger, smaller
            self._free = larger
        if smaller is not None:
            smaller.close()

    def copy(self, jobs: list[tuple[int, int, int]]) -> None:
        """Copy memory, with the help of threads."""
        with self._lock:
            copier = self._copier = self._copier or Copier()
        copier.copy(jobs)

    def close(self) -> None:
        """At the end of the program: the helping threads end."""
        if self._copier is not None:
            self._copier.close()


_pool = _Pool()
atexit.register(_pool.close)
