"""Copies of states for saves behind training, in memory that is used again by the next one."""

from __future__ import annotations

import atexit
import copy
import functools
import logging
import threading
import weakref
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composerlite.checkpoint.format.torch_file import is_dense
from composerlite.checkpoint.save.hand_over import HandOver
from composerlite.storage import Copier, HostMemory, available_memory, start_threads
from composerlite.types import StateDict, with_items

__all__ = ["Staged", "copied"]

log = logging.getLogger(__name__)
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
class Staged:
    """The state of one save behind training: a copy, or, where memory for that would be new, the state itself.

    New memory costs more than what is done with it. The state is then written at once, through a ring that grows
    where the disk is slower than new memory is, and whoever saves waits until all of it was handed over.

    Args:
        may_be_live: false where the writing may have to wait for others.

    Attributes:
        is_live: it is the state itself.
        may_grow: there is memory for a ring that grows.
    """

    def __init__(self, *, may_be_live: bool) -> None:
        self.is_live = False
        self.may_grow = False
        self._moment = HandOver()
        self._may_be_live = may_be_live
        self._bytes = 0

    def take(self, state: StateDict) -> StateDict:
        """What is to be saved of ``state``."""
        self._bytes = sum(_places(state).values())
        self.is_live = self._may_be_live and not _pool.is_ready(self._bytes)
        self.may_grow = self.is_live and self._bytes <= available_memory() // 2
        return state if self.is_live else copied(state)

    def wait(self) -> None:
        """Wait until the state may change; the end of the save is one, too.

        Raises:
            SaveError: it does not come.
        """
        if not self.is_live:
            return
        _pool.go.clear()
        try:
            self._moment.wait()
        finally:
            _pool.go.set()

    def hand_over(self) -> None:
        """In the thread that writes: everything was read.

        Raises:
            SaveError: whoever saves did not wait for it.
        """
        self._moment.take_place()

    def end(self) -> None:
        """The save has ended, well or not."""
        self._moment.end()

    def prepare_next(self) -> None:
        """Get memory ready for the copy of the next save, after this one."""
        if self.is_live:
            start_threads(functools.partial(_pool.prepare, self._bytes), 1, name="checkpoint-memory")


def _places(value: Any) -> dict[int, int]:
    """How many bytes a copy takes of each tensor in host memory."""
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        is_plain = local.device.type == "cpu" and is_dense(local)
        return {id(value): -(-local.numel() * local.itemsize // _ALIGNMENT) * _ALIGNMENT if is_plain else 0}
    found: dict[int, int] = {}
    if isinstance(value, (dict, list, tuple)):
        inner = cast("dict[Any, Any]", value).values() if isinstance(value, dict) else cast("list[Any]", value)
        for one in inner:
            found.update(_places(one))
    return found


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
        self._lent = 0
        self.go = threading.Event()  # set: memory may be prepared, which takes the machine's time
        self.go.set()
        self._copier: Copier | None = None

    def is_ready(self, size_bytes: int) -> bool:
        """Whether a copy of ``size_bytes`` takes no new memory, or little."""
        with self._lock:
            return size_bytes < _LEAST_BYTES or (self._free is not None and self._free.size_bytes >= size_bytes)

    def prepare(self, size_bytes: int) -> None:
        """Get memory for a copy of ``size_bytes``, unless there is some or the machine has too little."""
        with self._lock:
            if self._lent or self.is_ready(size_bytes) or size_bytes > available_memory() // 2:
                return
            self._lent += 1
        memory: HostMemory | None = None
        try:
            memory = HostMemory(size_bytes)
            memory.fault_in(self.go)
        except OSError as e:
            log.info("no memory for the copy of the next save: %s", e)
            if memory is not None:
                memory.close()
            with self._lock:
                self._lent -= 1
        else:
            self.give_back(memory)

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
        with self._lock:
            self._lent += 1
        return _Lease(self, memory)

    def give_back(self, memory: HostMemory) -> None:
        """Keep the larger one."""
        with self._lock:
            self._lent -= 1
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
