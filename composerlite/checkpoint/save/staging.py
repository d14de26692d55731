"""Consistent copies of what is saved, for trainers, functions and ``Checkpointer``, in memory that is used again.

A copy is laid out as the file will be, so that writing it later moves nothing in memory again. On the CPU the bytes are
moved by several threads without the interpreter's lock; from a GPU by a side stream, and the training thread resumes.
Where memory for a copy would be new, the state is written as it is: docs/adr/0039, and :class:`HandOver`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol, final
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from composerlite import dist
from composerlite._torch_compat import local_part, storage_id
from composerlite.checkpoint.format.torch_file import StorageCopy, is_dense
from composerlite.errors import SaveError
from composerlite.storage import (
    RING_BYTES,
    Copier,
    Copying,
    HostMemory,
    PageWatch,
    WarmMemory,
    available_memory,
    start_threads,
    whole_pages,
)

__all__ = ["HandOver", "OptimizerStepBarrier", "Snapshot", "Stageable", "Staging", "shared_staging"]

log = logging.getLogger(__name__)
_GRANULE_BYTES = 4 << 20  # what a checkpoint may grow by before it needs new memory
_LEAST_RING_BYTES = 16 << 20
_LITTLE_BYTES = 8 << 20  # as new memory that costs nothing
_LEAST_WATCHED_BYTES = 64 << 10  # less is copied before anybody could be asked to watch it
_WAIT_SECONDS = 600.0
_HAND_OVER_SECONDS = 3600.0

Job = tuple[int, int, int]  # address to, address from, bytes


class Stageable(Protocol):
    """State that can be copied before it is written.

    Attributes:
        size_bytes: of memory for the copy.
    """

    size_bytes: int

    def storages(self) -> Sequence[StorageCopy]:
        """Return the storages to copy before training changes them, each once, and the destination of each."""
        ...

    def staged_in(self, memory: HostMemory) -> None:
        """From now on the bytes are those in ``memory``, which holds each storage at its offset."""
        ...


@final
class HandOver:
    """The moment from which a state that is written as it is, without a copy, may change."""

    def __init__(self) -> None:
        self._may_change = threading.Event()
        self._is_waited_for = True

    def wait(self) -> None:
        """Wait for it; the end of the save is one, too.

        Raises:
            SaveError: it does not come.
        """
        try:
            if not self._may_change.wait(_HAND_OVER_SECONDS):
                raise SaveError(f"the state is not written after {_HAND_OVER_SECONDS:g} s: does the disk hang?")
        except BaseException:  # an interrupt, too: the state changes from now on, and is still being read
            self._is_waited_for = False
            raise

    def take_place(self) -> None:
        """In the thread that writes: everything was read.

        Raises:
            SaveError: whoever saves did not wait for it.
        """
        if not self._is_waited_for:
            raise SaveError("the save was interrupted while its state was read: what was written is not of one moment.")
        self._may_change.set()

    def end(self) -> None:
        """The save has ended, well or not."""
        self._may_change.set()


@final
class OptimizerStepBarrier:
    """Lets the copy of state that only optimizers change continue until one of them steps."""

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

    Attributes:
        memory: where it is.
        seconds: what copying took.
        stall_seconds: how long the training thread waited for it.
        is_over: nothing is copied any more, as :meth:`wait` found.
        was_torn: tensors changed while they were copied, as that found.
    """

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.is_over = False
        self.was_torn = False
        self.seconds = 0.0
        self.stall_seconds = 0.0
        self.copying: Copying | None = None
        self.events: list[Any] = []
        self._late: _LateCopy | None = None

    def start(self, copier: Copier, late: _LateCopy) -> None:
        """Copy ``late`` behind this thread."""
        self._late = late
        self.copying = copier.start(late.jobs, late.watch.end)

    def finish(self) -> None:
        """On the training thread, before an optimizer steps: :meth:`complete`, which training waits for."""
        started = time.perf_counter()
        self.complete()
        self.stall_seconds += time.perf_counter() - started

    def complete(self) -> None:
        """On the training thread: help to copy what is left."""
        if self.copying is not None:
            self.copying.finish()

    def wait(self) -> None:
        """Wait until everything is copied and known to be of one moment.

        Raises:
            SaveError: tensors changed while they were copied.
        """
        if self.copying is not None:
            self.copying.wait(_WAIT_SECONDS)
            self.seconds += self.copying.seconds
        for event in self.events:
            event.synchronize()
        self.is_over = True
        late, self._late = self._late, None  # what it keeps may go now
        self.was_torn = late is not None and late.was_written_to()
        if self.was_torn:
            raise SaveError(
                "a weight or an optimizer's state was changed between the save and the optimizer's next step: by the "
                "model's forward pass, a callback, or an optimizer that the saver does not know. From now on this run "
                "copies before training continues; save_lazy=False does so from the start."
            )


@final
class _LateCopy:
    """Copies that are made while training continues, and the watch over their sources since the save began.

    Attributes:
        jobs: the copies.
        watch: of what they read.
    """

    def __init__(self, jobs: Sequence[Job], storages: Sequence[torch.UntypedStorage], watch: PageWatch) -> None:
        self.jobs = jobs
        self.watch = watch
        # Kept, so that what replaces a tensor's memory does not free what is being copied.
        self._storages = [(storage, storage.data_ptr(), storage.nbytes()) for storage in storages]

    def was_written_to(self) -> bool:
        """Return true if a source has changed by now, or by the first call. Ends the watch."""
        written = self.watch.end()
        return written or any((s.data_ptr(), s.nbytes()) != (at, size) for s, at, size in self._storages)


@final
class Staging:
    """The memory for copies, one after the other: allocated and faulted in once, and kept from save to save.

    A copy has the memory from :meth:`take` to :meth:`give_back`. Another that is taken meanwhile finds none, and gets
    some that is new.

    Args:
        limit_bytes: the most memory to use; ``None`` for half of what is free when it is allocated, divided by the
            processes of this run on this machine.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()  # copies are given back in the threads that have written them
        self._free = WarmMemory()
        self._lent = 0
        self._copier: Copier | None = None
        self._preparing: threading.Thread | None = None
        self._new: HostMemory | None = None  # what is being prepared
        self._go = threading.Event()  # set: memory may be prepared, which takes the machine's time
        self._go.set()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned: WeakSet[HostMemory] = WeakSet()
        self._barrier = OptimizerStepBarrier()
        self._trial: _LateCopy | None = None
        self._last: Snapshot | None = None
        self._may_copy_late: bool | None = None  # None: not known yet
        self._has_warned = False

    @property
    def ring_bytes(self) -> int:
        """Memory to write with what does not fit as a whole."""
        return RING_BYTES if self._limit_bytes is None else max(_LEAST_RING_BYTES, self._limit_bytes)

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _have(self) -> int:
        """Bytes that are free for a copy, or will be when they are prepared."""
        new = self._new
        return self._free.size_bytes if new is None else new.size_bytes

    def fits(self, size_bytes: int) -> bool:
        """Return true if a snapshot of ``size_bytes`` may be taken."""
        have = self._have()
        if size_bytes <= have:
            return True
        if self._limit_bytes is not None:
            return size_bytes <= self._limit_bytes
        free = available_memory() // dist.get_local_world_size()  # the other processes of this machine save, too
        return size_bytes <= (free + have) // 2

    def would_be_new(self, image: Stageable) -> bool:
        """Return true if memory for a copy of ``image`` would be touched first, and there is room for more beside it.

        Then the image is better written as it is than copied: see ``may_grow`` of :class:`StreamWriter`.
        """
        size_bytes, have = image.size_bytes, self._have()
        if size_bytes <= _LITTLE_BYTES or (self.prepared(0) and size_bytes <= have):
            return False
        if any(copy.storage.device.type != "cpu" for copy in image.storages()):
            return False  # from there copies are made by the device, and only into memory that is pinned
        return self.fits(size_bytes + max(have, size_bytes))

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Let :meth:`prepare` wait."""
        self._go.clear()
        try:
            yield
        finally:
            self._go.set()

    def reserve(self, size_bytes: int) -> bool:
        """Get memory for a snapshot of ``size_bytes``; false where that is too much, or the system gives no more."""
        self.prepared()
        with self._lock:
            if self._free.has(size_bytes):
                return True
            if (memory := self._allocated(size_bytes)) is not None:
                self._release(self._free.keep(memory))
            return memory is not None

    def _allocated(self, size_bytes: int) -> HostMemory | None:
        """Memory that is new, in the place of what is free; ``None`` where that is too much."""
        if not self.fits(size_bytes):
            if self._limit_bytes is None:
                self._warn_of_no_memory("half of this process's share of what is free is less")
            return None
        self._release(self._free.take())
        try:
            return HostMemory(-(-size_bytes // _GRANULE_BYTES) * _GRANULE_BYTES + _GRANULE_BYTES)
        except (OSError, MemoryError) as e:
            self._warn_of_no_memory(e)
            return None

    def _warn_of_no_memory(self, error: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "no memory for a copy of what is saved (%s): training waits while each checkpoint is written. "
                "save_staging_bytes limits what is tried.",
                error,
            )

    def prepare(self, size_bytes: int) -> None:
        """Fault memory for a snapshot of ``size_bytes`` in, in the background: the first touch is what costs most.

        Memory that a copy has now is given back, so that nothing is prepared meanwhile.
        """
        self.prepared()
        with self._lock:
            if self._lent or self._have() >= size_bytes or (memory := self._allocated(size_bytes)) is None:
                return
            self._new = memory
            run = functools.partial(self._fault_in, memory)
            self._preparing = next(iter(start_threads(run, 1, name="checkpoint-memory")), None)
            if self._preparing is None:
                self._new = None
                self._release(self._free.keep(memory))

    def _fault_in(self, memory: HostMemory) -> None:
        try:
            memory.fault_in(self._go)
        except OSError as e:  # whoever needs it meets that again
            log.info("memory for checkpoints could not be prepared: %s", e)
        with self._lock:
            self._new = None
            self._release(self._free.keep(memory))

    def prepared(self, timeout: float = _WAIT_SECONDS) -> bool:
        """Wait for :meth:`prepare`; whether it is done."""
        preparing = self._preparing
        if preparing is not None:
            preparing.join(timeout)
            return not preparing.is_alive()
        return True

    def give_back(self, memory: HostMemory) -> None:
        """Let the next copy have ``memory``; of two pieces the larger one is kept. Nothing may refer to it any more."""
        with self._lock:
            self._lent -= 1
        self._release(self._free.keep(memory))

    def close(self) -> None:
        """Give the memory back to the system."""
        with self._lock:
            if self._new is not None:
                self._new.close()  # which ends that
        self.prepared()
        self._end_trial()
        if self._copier is not None:
            self._copier.close()
            self._copier = None
        self._release(self._free.take())

    def _release(self, memory: HostMemory | None) -> None:
        """Give ``memory`` back to the system."""
        if memory is None:
            return
        if memory in self._pinned:
            self._pinned.discard(memory)
            _cudart().cudaHostUnregister(memory.address)
        memory.close()

    # ── copies ───────────────────────────────────────────────────────────────────────────────────────────────────
    def take(self, image: Stageable, lazy: Sequence[Optimizer] = ()) -> Snapshot:
        """Copy the tensors of ``image`` and make it read from the copy, in memory that :meth:`reserve` got.

        The first time, what could be copied later is copied at once and watched until an optimizer steps: where
        somebody else changes it, everything is always copied at once from then on.

        Args:
            image: what is to be written.
            lazy: optimizers whose parameters and state nothing else changes: those are copied until one steps.

        Returns:
            The copy, in memory to :meth:`give_back` when the image is written.
        """
        started = time.perf_counter()
        with self._lock:
            memory = self._free.take()
            assert memory is not None
            self._lent += 1
        self._copier = self._copier or Copier()
        self._end_trial()
        if self._last is not None and self._last.was_torn:
            self._may_copy_late = False
        now, on_devices, late = self._dealt(image.storages(), lazy, memory)
        snapshot = self._last = Snapshot(memory)
        snapshot.events = self._copy_from_devices(on_devices, memory)
        self._copier.copy(now)
        snapshot.seconds = time.perf_counter() - started
        if late is not None and self._may_copy_late is not None:
            snapshot.start(self._copier, late)
            self._barrier.set(lazy, snapshot.finish)
        elif late is not None:
            self._copier.copy(late.jobs)
            self._trial = late
            self._barrier.set(lazy, self._end_trial)
        image.staged_in(memory)
        snapshot.stall_seconds = time.perf_counter() - started
        return snapshot

    def _dealt(
        self, copies: Iterable[StorageCopy], lazy: Sequence[Optimizer], memory: HostMemory
    ) -> tuple[list[Job], list[StorageCopy], _LateCopy | None]:
        """Partition the copies: at once, by devices, and later (watched from now on)."""
        assert self._copier is not None
        may_wait = lazy and self._may_copy_late is not False and self._copier.has_helpers
        late = {storage_id(tensor.untyped_storage()) for tensor in _tensors_of(lazy)} if may_wait else set[int]()
        now: list[Job] = []
        later: list[Job] = []
        on_devices: list[StorageCopy] = []
        storages: list[torch.UntypedStorage] = []
        for copy in copies:
            storage, offset = copy
            if storage.device.type != "cpu":
                on_devices.append(copy)
            elif size := storage.nbytes():
                to, source = memory.address + offset, storage.data_ptr()
                start, watched = whole_pages(source, size)
                if storage_id(storage) not in late or watched < _LEAST_WATCHED_BYTES or storage.is_shared():
                    now.append((to, source, size))
                    continue
                before, after = start - source, start + watched - source
                now += [(to, source, before), (to + after, source + after, size - after)]
                later.append((to + before, start, watched))
                storages.append(storage)
        watch = PageWatch.begin([(at, size) for _, at, size in later]) if later else None
        if watch is None:
            return [*now, *later], on_devices, None
        return now, on_devices, _LateCopy(later, storages, watch)

    def _end_trial(self) -> None:
        """On the training thread: see whether anybody but the optimizers changed what might be copied later."""
        trial, self._trial = self._trial, None
        if trial is None:
            return
        self._may_copy_late = not trial.was_written_to()
        if not self._may_copy_late:
            log.warning(
                "weights or the optimizer's state change between a save and the optimizer's next step, by the model's "
                "forward pass, a callback, or an optimizer that the saver does not know, or are shared with another "
                "process: they are copied before training continues, as with save_lazy=False."
            )

    def _copy_from_devices(self, copies: Sequence[StorageCopy], memory: HostMemory) -> list[torch.cuda.Event]:
        """Start the copies from GPUs, each on a stream of its own; events that say when they are done.

        The stream that training uses waits for the copy by itself: whatever is queued from now on comes after it.
        """
        if not copies:
            return []
        if memory not in self._pinned:
            _cudart().cudaHostRegister(memory.address, memory.size_bytes, 0)  # the GPU writes to it directly
            self._pinned.add(memory)
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
    local = [local_part(t) for t in (*parameters, *states)]
    return [t for t in local if isinstance(t, Tensor) and t.device.type == "cpu" and is_dense(t)]


shared_staging = Staging()
"""For the saves of functions and of ``Checkpointer``, which nobody ends: memory stays with the process."""
atexit.register(shared_staging.close)
