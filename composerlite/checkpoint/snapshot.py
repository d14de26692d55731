"""A consistent copy of what is saved, in memory that is used again at every save.

The copy is laid out as the file will be, so that writing it later moves nothing in memory again. On the CPU the bytes
are moved by two threads without the interpreter's lock; from a GPU by a side stream, and the training thread goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from composerlite.checkpoint.formats.torch_file import StorageCopy, storage_id
from composerlite.errors import SaveError
from composerlite.storage import RING_BYTES, Copier, Copying, HostMemory, available_memory

__all__ = ["Snapshot", "Stageable", "Staging", "StepFence"]

log = logging.getLogger(__name__)
_GRANULE_BYTES = 4 << 20  # what a checkpoint may grow by before it needs new memory
_LEAST_RING_BYTES = 16 << 20
_WAIT_SECONDS = 600.0
_LONGEST_CHANGE_SECONDS, _LONGEST_CHANGE_COPIES = 1.0, 4.0
"""No change of a tensor in place takes longer than that, or than so many copies of the state."""

Job = tuple[int, int, int]  # address to, address from, bytes


class Stageable(Protocol):
    """What can be copied before it is written.

    Attributes:
        size_bytes: of memory for the copy.
    """

    size_bytes: int

    def storages(self) -> Sequence[StorageCopy]:
        """What is to be copied before training changes it, each storage once, and where to."""
        ...

    def staged_in(self, memory: HostMemory) -> None:
        """From now on the bytes are those in ``memory``, which holds each storage at its offset."""
        ...


@final
class StepFence:
    """Lets the copy of what only optimizers change go on until one of them steps."""

    def __init__(self) -> None:
        self._watched: WeakSet[Optimizer] = WeakSet()
        self._before_step: Callable[[], None] | None = None

    def set(self, optimizers: Sequence[Optimizer], before_step: Callable[[], None]) -> None:
        """Call ``before_step`` once, on the training thread, before any of ``optimizers`` changes a tensor."""
        self._before_step = before_step
        for optimizer in optimizers:
            if optimizer not in self._watched:
                optimizer.register_step_pre_hook(self._hook)
                self._watched.add(optimizer)

    def _hook(self, *_: object) -> None:
        before_step, self._before_step = self._before_step, None
        if before_step is not None:
            before_step()


@final
class Snapshot:
    """A copy that was taken, but for what only optimizers change: that is being copied until one of them steps.

    torch counts the changes of each tensor, and counts one when it is done: a change that runs while the tensor is
    copied is seen later only. So the last look is taken where nothing of the training thread can be running, in
    :meth:`complete`; or, if that does not come, when any change would have ended.

    Attributes:
        seconds: what copying took.
        stall_seconds: how long the training thread waited for it.
    """

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self.seconds = 0.0
        self.stall_seconds = 0.0
        self.copying: Copying | None = None
        self.events: list[Any] = []
        self._lock = threading.Lock()
        self._versions = [(tensor, tensor._version) for tensor in tensors]
        self._torn = False
        self._completed = threading.Event()
        self._copied_at = 0.0

    def finish(self) -> None:
        """On the training thread, before an optimizer steps: :meth:`complete`, which training waits for."""
        started = time.perf_counter()
        self.complete()
        self.stall_seconds += time.perf_counter() - started

    def complete(self) -> None:
        """On the training thread: help to copy what is left, then look for the last time whether anything changed."""
        if self.copying is not None:
            self.copying.finish()
        with self._lock:
            self._look()
            self._versions = []
        self._completed.set()

    def wait(self) -> None:
        """Wait until everything is copied, as it seems by then: :meth:`settle` knows.

        Raises:
            SaveError: tensors changed while they were copied.
        """
        if self.copying is not None:
            self.copying.wait(_WAIT_SECONDS)
            self.seconds += self.copying.seconds
        for event in self.events:
            event.synchronize()
        self._copied_at = time.monotonic()
        self._check()

    def settle(self) -> None:
        """After :meth:`wait`, before anybody relies on the copy: wait for the last look, or take it.

        Raises:
            SaveError: tensors changed while they were copied.
        """
        if self._versions:
            longest = max(_LONGEST_CHANGE_SECONDS, _LONGEST_CHANGE_COPIES * self.seconds)
            self._completed.wait(max(0.0, self._copied_at + longest - time.monotonic()))
        self._check()
        self._versions = []

    def _check(self) -> None:
        with self._lock:
            self._look()
        if self._torn:
            raise SaveError(
                "a weight or an optimizer's state was changed in place between the save and the optimizer's next step, "
                "by the model's forward pass or a callback. Have it copied before training goes on: save_lazy=False."
            )

    def _look(self) -> None:
        self._torn |= any(tensor._version != version for tensor, version in self._versions)


@final
class Staging:
    """The memory for one snapshot, allocated and faulted in once.

    Args:
        limit_bytes: the most memory to use; ``None`` for half of what is free when it is allocated.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._memory: HostMemory | None = None
        self._copier: Copier | None = None
        self._preparing: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: HostMemory | None = None
        self._fence = StepFence()

    @property
    def ring_bytes(self) -> int:
        """Memory to write with what does not fit as a whole."""
        return RING_BYTES if self._limit_bytes is None else max(_LEAST_RING_BYTES, self._limit_bytes)

    def fits(self, size_bytes: int) -> bool:
        """Whether a snapshot of ``size_bytes`` may be taken."""
        have = 0 if self._memory is None else self._memory.size_bytes
        if size_bytes <= have:
            return True
        limit = (available_memory() + have) // 2 if self._limit_bytes is None else self._limit_bytes
        return size_bytes <= limit

    def prepare(self, size_bytes: int) -> None:
        """Fault memory for a snapshot of ``size_bytes`` in, in the background: the first touch is what costs most."""
        self.prepared()
        have = 0 if self._memory is None else self._memory.size_bytes
        if have < size_bytes and self.fits(size_bytes):
            memory = self._allocate(size_bytes)
            self._preparing = threading.Thread(target=memory.fault_in, name="checkpoint-memory", daemon=True)
            self._preparing.start()

    def prepared(self, timeout: float = _WAIT_SECONDS) -> bool:
        """Wait for :meth:`prepare`; whether it is done."""
        if self._preparing is not None:
            self._preparing.join(timeout)
            if self._preparing.is_alive():
                return False
            self._preparing = None
        return True

    def take(self, image: Stageable, lazy: Sequence[Optimizer] = ()) -> tuple[HostMemory, Snapshot]:
        """Copy the tensors of ``image`` and make it read from the copy.

        Args:
            image: what is to be written.
            lazy: optimizers whose parameters and state nothing else changes: those are copied until one steps.

        Returns:
            The memory, which must not be used for another snapshot before the image is written; and the copy.
        """
        started = time.perf_counter()
        self.prepared()
        memory = self._memory
        if memory is None or memory.size_bytes < image.size_bytes:
            memory = self._allocate(image.size_bytes)
        self._copier = self._copier or Copier()
        tensors = _tensors_of(lazy)
        late = {storage_id(tensor.untyped_storage()) for tensor in tensors}
        now: list[Job] = []
        later: list[Job] = []
        on_devices: list[StorageCopy] = []
        for copy in image.storages():
            storage, offset = copy
            if storage.device.type != "cpu":
                on_devices.append(copy)
            elif size := storage.nbytes():
                jobs = later if storage_id(storage) in late else now
                jobs.append((memory.address + offset, storage.data_ptr(), size))
        snapshot = Snapshot(tensors if later else ())
        snapshot.events = self._copy_from_devices(on_devices, memory)
        self._copier.copy(now)
        snapshot.seconds = time.perf_counter() - started
        if later:
            snapshot.copying = self._copier.start(later)
            self._fence.set(lazy, snapshot.finish)
        image.staged_in(memory)
        snapshot.stall_seconds = time.perf_counter() - started
        return memory, snapshot

    def close(self) -> None:
        """Give the memory back."""
        self.prepared()
        if self._copier is not None:
            self._copier.close()
            self._copier = None
        self._release()

    def _release(self) -> None:
        if self._memory is not None:
            if self._pinned is self._memory:
                _cudart().cudaHostUnregister(self._memory.address)
            self._memory.close()
        self._memory = self._pinned = None

    def _allocate(self, size_bytes: int) -> HostMemory:
        self._release()
        self._memory = HostMemory(-(-size_bytes // _GRANULE_BYTES) * _GRANULE_BYTES + _GRANULE_BYTES)
        return self._memory

    def _copy_from_devices(self, copies: Sequence[StorageCopy], memory: HostMemory) -> list[torch.cuda.Event]:
        """Start the copies from GPUs, each on a stream of its own; events that say when they are done.

        The stream that training uses waits for the copy by itself: whatever is queued from now on comes after it.
        """
        if not copies:
            return []
        if self._pinned is not memory:
            _cudart().cudaHostRegister(memory.address, memory.size_bytes, 0)  # the GPU writes to it directly
            self._pinned = memory
        events: list[torch.cuda.Event] = []
        for device in {copy.storage.device for copy in copies}:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            training = torch.cuda.current_stream(device)
            stream.wait_stream(training)
            with torch.cuda.stream(stream):
                for storage, offset in copies:
                    if storage.device == device and (size := storage.nbytes()):
                        target = torch.frombuffer(memory.view(offset, size), dtype=torch.uint8)
                        source = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # pyright: ignore[reportArgumentType]
                        target.copy_(source, non_blocking=True)
                event = torch.cuda.Event()
                event.record(stream)
            training.wait_stream(stream)
            events.append(event)
        return events


def _cudart() -> Any:
    return torch.cuda.cudart()


def _tensors_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """The parameters and the state of ``optimizers`` that are in this machine's memory."""
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    states = [v for optimizer in optimizers for state in optimizer.state.values() for v in state.values()]
    local = [getattr(t, "_local_tensor", t) for t in (*parameters, *states)]  # the shard of this rank, if it is one
    return [t for t in local if isinstance(t, Tensor) and t.device.type == "cpu"]
