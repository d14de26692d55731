"""Copies of a training state. Checkpoints are written from a copy while training continues.

A copy has the layout of the file, so the bytes are written to the file without another copy. Tensors on the CPU are
copied when a save is called. Tensors on an accelerator that only optimizers change may be copied on a side stream until
the next optimizer step. Without memory for a copy a save is synchronous.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
from collections.abc import Container, Iterable, Sequence
from typing import final
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from composerlite import dist
from composerlite._torch_compat import change_count, local_part, storage_id
from composerlite.checkpoint.format.torch_file import StorageCopy
from composerlite.devices import DeviceCopier, Devices, this_machine
from composerlite.dist import is_dense
from composerlite.errors import SaveError
from composerlite.storage import HostMemory
from composerlite.storage.disk.memory import available_memory, copy_memory
from composerlite.threads import start_threads

log = logging.getLogger(__name__)
_SPARE_BYTES = 4 << 20  # room for a growing checkpoint, and for small tensors of devices
_LITTLE_BYTES = 8 << 20  # up to this size new memory needs no preparation
_FAULT_BYTES = 2 << 20  # piece to fault in at once, a huge page: an allocation by training may wait for a piece
_FAULT_PAUSES = 19.0  # seconds of pause per second of work: the thread takes 5 % of a core
_MOST_PAUSE_SECONDS = 0.2
_SMALL_BYTES = 64 << 10  # smaller storages of a device are copied together
_MOST_GATHERED_BYTES = 16 << 20  # of all small storages
_WAIT_SECONDS = 600.0  # longest wait for a device or a thread


def finish_device_work(copies: Iterable[StorageCopy], devices: Devices = this_machine) -> None:
    """Wait until accelerators have finished the work of training, so that any thread may read their storages.

    Call on the training thread, since the queues of other threads on a device do not wait for training.

    Args:
        copies: the storages.
        devices: the accelerators.

    Raises:
        TimeoutError: a device does not finish.
    """
    for copier in {copier for storage, _ in copies if (copier := devices.of(storage)) is not None}:
        copier.finish_training(_WAIT_SECONDS)


@final
class Snapshot:
    """A copy of the state at one moment. Devices may copy tensors of optimizers until an optimizer steps.

    The saving thread calls :meth:`wait`, writes from ``memory``, and frees the memory with :meth:`give_back`.

    Attributes:
        memory: memory with the copy; ``None`` after the memory was given back.
        seconds: duration of the copy on the training thread, in seconds.
        stall_seconds: duration of later waits of training, also on devices. Grows until the next optimizer step.
    """

    def __init__(
        self,
        staging: StagingMemory,
        memory: HostMemory,
        device_copies: Sequence[_DeviceCopy],
        late_tensors: Sequence[Tensor],
    ) -> None:
        self._staging = staging
        self.memory: HostMemory | None = memory
        self.seconds = self.stall_seconds = 0.0
        self._device_copies = device_copies
        self._counts = [(tensor, change_count(tensor)) for tensor in late_tensors]
        self._was_changed = False
        self._lock = threading.Lock()  # no optimizer steps while another thread compares the counts

    def finish_before_step(self) -> None:
        """Let the next optimizer step wait, on the devices, for the copies. For the training thread."""
        started = time.perf_counter()
        self._compare_counts()
        for copy in self._device_copies:
            copy.before_step()
        self.stall_seconds += time.perf_counter() - started

    def finish_copies(self) -> None:
        """Wait until nothing is written to the memory any more. For any thread.

        Raises:
            TimeoutError: a device does not finish.
        """
        for copy in self._device_copies:
            waited = copy.wait()
            self.stall_seconds += waited
        self._device_copies = ()  # frees tensors replaced by training

    def give_back(self) -> None:
        """Give the memory back when no device writes to the memory any more. May be called twice.

        Raises:
            TimeoutError: a device does not finish. The memory stays lent.
        """
        if (memory := self.memory) is not None:
            self.finish_copies()
            self.memory = None
            self._staging.give_back(memory)

    def wait(self) -> None:
        """Wait until everything is copied, and check that no tensor changed before the optimizer step. For any thread.

        Raises:
            SaveError: a tensor changed between the save and the optimizer step.
            TimeoutError: a device does not finish.
        """
        self.finish_copies()
        self._compare_counts()
        if self._was_changed:
            raise SaveError(
                "a weight or an optimizer's state was changed between the save and the optimizer's next step: by "
                "the model's forward pass, a callback, or an unknown optimizer. Nothing was committed. Set "
                "save_lazy=False to copy tensors before training continues."
            )

    def _compare_counts(self) -> None:
        """Set ``_was_changed`` if torch has counted a change since the save. Only the first call compares."""
        with self._lock:
            self._was_changed |= any(change_count(tensor) != count for tensor, count in self._counts)
            self._counts = []


@final
class _DeviceCopy:
    """The copies of one device to a snapshot.

    Args:
        copier: of the device.
        memory: of the snapshot.
        spare: offset of free room in ``memory``. Small storages are copied there together, and later moved into place.
        copies: the storages. All but the late storages are copied before training changes anything.
        may_be_late: ids of storages that may be copied until an optimizer steps.

    Attributes:
        spare_left: offset of the room still free.
        late_ids: ids of the storages that are read until an optimizer steps. Small storages are read at once.
    """

    def __init__(
        self,
        copier: DeviceCopier,
        memory: HostMemory,
        spare: int,
        copies: Sequence[StorageCopy],
        may_be_late: Container[int],
    ) -> None:
        self._copier, self._memory = copier, memory
        self._kept = copies  # storages must exist until they are copied
        self._small = _small_of(copies, memory.size_bytes - spare)
        self._spare, self.spare_left = spare, spare + sum(copy.storage.nbytes() for copy in self._small)
        small = {copy.offset for copy in self._small}
        large = [copy for copy in copies if copy.offset not in small]
        late = [copy for copy in large if storage_id(copy.storage) in may_be_late]
        early = [copy for copy in large if storage_id(copy.storage) not in may_be_late]
        self.late_ids = {storage_id(copy.storage) for copy in late}
        copier.after_training()
        gathered = copier.gather([copy.storage for copy in self._small]) if small else None
        for storage, offset in early:
            copier.copy(storage, memory, offset)
        if early or small:
            copier.before_training(copier.mark())
        if gathered is not None:  # training does not change the gathered bytes
            copier.copy(gathered, memory, spare)
        for storage, offset in late:
            copier.copy(storage, memory, offset)
        self._gathered = gathered  # must exist until the end of its copy
        self._copied = copier.mark()

    def before_step(self) -> None:
        """Make later work of training wait, on the device, for the copies."""
        if self.late_ids:
            self._copier.before_training(self._copied)

    def wait(self) -> float:
        """Wait until everything is copied, and move small storages into place.

        Returns:
            Seconds for which training waited on the device.

        Raises:
            TimeoutError: the device does not finish.
        """
        self._copier.wait(self._copied, _WAIT_SECONDS)
        at = self._spare
        for storage, offset in self._small:
            size = storage.nbytes()
            self._memory.view(offset, size)[:] = self._memory.view(at, size)
            at += size
        return self._copier.waited_seconds()


def _small_of(copies: Sequence[StorageCopy], room: int) -> list[StorageCopy]:
    """Return small storages of ``copies``, together at most ``room`` bytes; fewer than two: none."""
    found: list[StorageCopy] = []
    room = min(room, _MOST_GATHERED_BYTES)
    for copy in copies:
        size = copy.storage.nbytes()
        if size < _SMALL_BYTES and size <= room:
            found.append(copy)
            room -= size
    return found if len(found) > 1 else []


@final
class StagingMemory:
    """Memory for one copy at a time: faulted in by a thread, kept from save to save, lent by :meth:`reserve`.

    Args:
        limit_bytes: the largest size; ``None``: half of the free memory when the memory is allocated, divided by the
            number of processes of this run on this machine.
        devices: the accelerators with tensors.
    """

    def __init__(self, limit_bytes: int | None = None, *, devices: Devices = this_machine) -> None:
        self._limit_bytes = limit_bytes
        self._devices = devices
        self._lock = threading.RLock()  # the saving thread gives memory back
        self._memory: HostMemory | None = None  # ready for a copy
        self._in_use: HostMemory | None = None  # lent, or being faulted in
        self._preparing: threading.Thread | None = None
        self._has_warned = False
        self._optimizers: WeakSet[Optimizer] = WeakSet()  # with the hook :meth:`_before_step`
        self._late: Snapshot | None = None  # with copies that may run until the next optimizer step

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────
    def prepare(self, size_bytes: int) -> None:
        """Allocate memory for copies of ``size_bytes`` and let a thread fault it in. For the training thread.

        The thread works in small pieces with pauses: no training step takes over 5 % longer. With an accelerator the
        thread pauses half of the time. Nothing happens while memory is lent or being faulted in.
        """
        if size_bytes <= _LITTLE_BYTES:  # :meth:`reserve` allocates at once
            return
        with self._lock:
            if self._has(size_bytes) or (memory := self._allocate(size_bytes)) is None:
                return
            self._in_use = memory
            run = functools.partial(self._fault_in, memory, self._devices.current())
            self._preparing = next(iter(start_threads(run, 1, name="checkpoint-memory")), None)
            if self._preparing is None:
                self.give_back(memory)

    def _fault_in(self, memory: HostMemory, device: torch.device | None) -> None:
        pauses = _FAULT_PAUSES if device is None else 1.0
        try:
            for offset in range(0, memory.size_bytes, _FAULT_BYTES):
                if self._in_use is not memory:  # closed
                    return
                started = time.perf_counter()
                memory.fault_in(offset, min(_FAULT_BYTES, memory.size_bytes - offset))
                time.sleep(min(pauses * (time.perf_counter() - started), _MOST_PAUSE_SECONDS))
            if device is not None:
                self._devices.pin(memory, device)
        except (OSError, RuntimeError) as e:  # pinning by torch raises the latter
            log.warning("memory for checkpoints could not be prepared: %s", e)
        finally:
            self.give_back(memory)

    def wait_until_prepared(self, timeout: float = _WAIT_SECONDS) -> bool:
        """Wait for the thread of :meth:`prepare`; return true if the thread has ended."""
        preparing = self._preparing
        if preparing is not None:
            preparing.join(timeout)
        return preparing is None or not preparing.is_alive()

    def reserve(self, size_bytes: int) -> HostMemory | None:
        """Lend memory for a copy of ``size_bytes`` until :meth:`give_back`. A small copy needs no preparation.

        Returns:
            The memory; ``None`` if none is ready: none or too little was prepared, or another save has the memory.
        """
        with self._lock:
            memory = self._memory if self._has(size_bytes) else None
            if memory is None and size_bytes <= _LITTLE_BYTES:
                memory = self._allocate(size_bytes)
            if memory is not None:
                self._memory, self._in_use = None, memory
            return memory

    def give_back(self, memory: HostMemory) -> None:
        """Take lent ``memory`` back for the next copy. Nothing may refer to the memory any more."""
        with self._lock:
            if self._in_use is memory:
                self._memory, self._in_use = memory, None
                return
        self._release(memory)  # closed meanwhile

    def close(self) -> None:
        """Free the memory. Memory in use is freed in :meth:`give_back`. Callable twice; the object stays usable."""
        with self._lock:
            memory, self._memory, self._in_use = self._memory, None, None
        self.wait_until_prepared()
        if memory is not None:
            self._release(memory)

    def fits(self, size_bytes: int) -> bool:
        """Return true if there may be memory for a copy of ``size_bytes``."""
        if self._limit_bytes is not None:
            return size_bytes <= self._limit_bytes
        have = 0 if self._memory is None else self._memory.size_bytes
        free = available_memory() // dist.get_local_world_size()  # other processes of this machine save, too
        return size_bytes <= max(have, (free + have) // 2)

    def _has(self, size_bytes: int) -> bool:
        return self._memory is not None and self._memory.size_bytes >= size_bytes

    def _allocate(self, size_bytes: int) -> HostMemory | None:
        """Release the memory, and return new memory; ``None`` if memory is in use, too large or not available."""
        if self._in_use is not None:
            return None
        reason: object = None  # the user has set a limit
        if self._limit_bytes is None:
            reason = "more than half of this process's share of the free memory"
        if self.fits(size_bytes):
            if self._memory is not None:
                self._release(self._memory)
                self._memory = None
            try:
                return HostMemory(-(-size_bytes // _SPARE_BYTES) * _SPARE_BYTES + _SPARE_BYTES)
            except (OSError, MemoryError) as e:
                reason = e
        if reason is not None and not self._has_warned:
            self._has_warned = True
            log.warning(
                "no memory for a copy of the state, %d bytes (%s): training waits while each checkpoint is written. "
                "save_staging_bytes limits the size of the copy.",
                size_bytes,
                reason,
            )
        return None

    def _release(self, memory: HostMemory) -> None:
        self._devices.release(memory)
        memory.close()

    # ── copies ───────────────────────────────────────────────────────────────────────────────────────────────────
    def take(self, copies: Iterable[StorageCopy], size_bytes: int, lazy: Sequence[Optimizer] = ()) -> Snapshot | None:
        """Copy storages to the memory of :meth:`reserve`. For the training thread.

        Args:
            copies: the storages, and the offset of each in the memory.
            size_bytes: of all storages in the memory.
            lazy: optimizers. The optimizers' parameters and state on accelerators may be copied until an optimizer
                steps. Until then nothing else may change these tensors.

        Returns:
            The copy. After the file is written, :meth:`Snapshot.give_back` gives the memory back. ``None``: no memory
            is ready.
        """
        started = time.perf_counter()
        memory = self.reserve(size_bytes)
        if memory is None:
            return None
        on_this_machine: list[tuple[int, int, int]] = []
        on_devices: dict[DeviceCopier, list[StorageCopy]] = {}
        for copy in copies:
            if (copier := self._devices.of(copy.storage)) is None:
                on_this_machine.append((memory.address + copy.offset, copy.storage.data_ptr(), copy.storage.nbytes()))
            elif copy.storage.nbytes():
                on_devices.setdefault(copier, []).append(copy)
        tensors = _tensors_of(lazy) if on_devices else []
        owned = {storage_id(tensor.untyped_storage()) for tensor in tensors}
        device_copies: list[_DeviceCopy] = []
        spare = size_bytes
        try:
            for copier, parts in on_devices.items():
                self._devices.pin(memory, parts[0].storage.device)
                device_copies.append(_DeviceCopy(copier, memory, spare, parts, owned if copier.may_run_late else ()))
                spare = device_copies[-1].spare_left
            copy_memory(on_this_machine)
        except BaseException:
            for copier in on_devices:  # copies that have begun still write to the memory
                copier.wait(copier.mark(), _WAIT_SECONDS)
            self.give_back(memory)
            raise
        late_ids = set[int]().union(*(copy.late_ids for copy in device_copies))
        late_tensors = [tensor for tensor in tensors if storage_id(tensor.untyped_storage()) in late_ids]
        snapshot = Snapshot(self, memory, device_copies, late_tensors)
        if late_tensors:
            self._late = snapshot
            for optimizer in lazy:
                if optimizer not in self._optimizers:
                    optimizer.register_step_pre_hook(self._before_step)
                    self._optimizers.add(optimizer)
        snapshot.seconds = time.perf_counter() - started
        return snapshot

    def _before_step(self, *_: object) -> None:
        snapshot, self._late = self._late, None
        if snapshot is not None:
            snapshot.finish_before_step()


def _tensors_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return the tensors of the parameters and of the state of ``optimizers`` on this rank."""
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    states = [v for optimizer in optimizers for state in optimizer.state.values() for v in state.values()]
    local = [local_part(t) for t in (*parameters, *states)]
    return [t for t in local if isinstance(t, Tensor) and is_dense(t)]


shared_staging = StagingMemory()
"""For saves of functions and of ``Checkpointer``: the memory stays with the process."""
atexit.register(shared_staging.close)
