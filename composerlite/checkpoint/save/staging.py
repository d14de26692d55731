"""Consistent copies of what is saved, for trainers, functions and ``Checkpointer``, in memory that is used again.

A copy is laid out as the file will be, so that writing it later moves nothing in memory again. On the CPU the bytes are
moved by several threads without the interpreter's lock; from a GPU by a side stream, and the training thread resumes.
Where memory for a copy would be new, the state is written as it is: docs/adr/0039, and :class:`UncopiedState`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import final
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from composerlite import dist
from composerlite._torch_compat import change_count, local_part, storage_id
from composerlite.checkpoint.format.torch_file import StorageCopy
from composerlite.devices import DeviceCopier, Devices, PageableCopier, Pin, content_sums, this_machine
from composerlite.dist import is_dense
from composerlite.errors import SaveError
from composerlite.storage import (
    RING_BYTES,
    Copier,
    Copying,
    HostMemory,
    PageWatch,
    WarmMemory,
    available_memory,
    whole_pages,
)
from composerlite.threads import start_threads

__all__ = [
    "OptimizerStepBarrier",
    "Snapshot",
    "Staging",
    "UncopiedState",
    "VerifyCopy",
    "finish_device_work",
    "shared_staging",
]

log = logging.getLogger(__name__)
_GRANULE_BYTES = 4 << 20  # what a checkpoint may grow by before it needs new memory
_LEAST_RING_BYTES = 16 << 20
_LITTLE_BYTES = 8 << 20  # as new memory that costs nothing
_LEAST_WATCHED_BYTES = 64 << 10  # less is copied before anybody could be asked to watch it
_SMALL_BYTES = 64 << 10  # of a storage on a device: copied together with others
_MOST_GATHERED_BYTES = 16 << 20
_WAIT_SECONDS = 600.0
_READ_SECONDS = 3600.0

Job = tuple[int, int, int]  # address to, address from, bytes

VerifyCopy = int | str
"""At which saves the content of what was copied is compared with what it was: 'first', 'always', 'never', every so
many."""


@final
class UncopiedState:
    """State that is written without a copy: training waits until it was read, and may change it then."""

    def __init__(self) -> None:
        self._may_change = threading.Event()
        self._is_waited_for = True

    def wait(self) -> None:
        """Wait until the state was read, or the save has ended.

        Raises:
            SaveError: neither happens in time.
        """
        try:
            if not self._may_change.wait(_READ_SECONDS):
                raise SaveError(f"the state is not written after {_READ_SECONDS:g} s: does the disk hang?")
        except BaseException:  # an interrupt, too: the state changes from now on, and is still being read
            self._is_waited_for = False
            raise

    def mark_read(self) -> None:
        """Report, in the thread that writes, that the whole state was read.

        Raises:
            SaveError: the training thread stopped waiting for it.
        """
        if not self._is_waited_for:
            raise SaveError("the save was interrupted while its state was read: what was written is not of one moment.")
        self._may_change.set()

    def release(self) -> None:
        """Let training continue: the save has ended, well or not."""
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
        self.on_devices: list[_DeviceCopy] = []
        self.checks: list[_ContentCheck] = []
        self._late: _LateCopy | None = None

    def start(self, copier: Copier, late: _LateCopy) -> None:
        """Copy ``late`` in the background."""
        self._late = late
        self.copying = copier.start(late.jobs, late.watch.stop)

    def finish_before_step(self) -> None:
        """Call :meth:`finish` on the training thread before an optimizer steps; training waits for it.

        Of devices only the device waits: the step is queued behind the copy.
        """
        started = time.perf_counter()
        for copy in self.on_devices:
            copy.before_step()
        self.finish()
        self.stall_seconds += time.perf_counter() - started

    def abandon(self) -> None:
        """Let optimizers step without the rest of the copy, in a forked process, where nobody makes it."""
        self.copying, self.on_devices = None, []

    def finish(self) -> None:
        """Copy the rest on the training thread, together with the background threads."""
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
        on_devices = self.on_devices
        for copy in on_devices:
            copy.wait()
            self.stall_seconds += copy.waited_seconds()
        self.is_over = True
        self.on_devices = []  # what they keep may go now, and no step needs to wait
        late, self._late = self._late, None
        self.was_torn = (late is not None and late.was_written_to()) or any(c.was_written_to() for c in on_devices)
        if self.was_torn:
            raise SaveError(
                "a weight or an optimizer's state was changed between the save and the optimizer's next step: by the "
                "model's forward pass, a callback, or an optimizer that the saver does not know. From now on this run "
                "copies before training continues; save_lazy=False does so from the start."
            )
        checks, self.checks = [*self.checks, *(check for copy in on_devices for check in copy.checks)], []
        self.was_torn = any(check.differs(self.memory) for check in checks)
        if self.was_torn:
            raise SaveError(
                "what was copied is not what the tensors held at the save (save_verify_copy): something else than the "
                "optimizers has changed them since, or the machine's memory fails. Nothing was committed. From now on "
                "this run copies before training resumes; save_lazy=False does so from the start."
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
        written = self.watch.stop()
        return written or any((s.data_ptr(), s.nbytes()) != (at, size) for s, at, size in self._storages)


@final
class _ContentCheck:
    """Content of storages at the moment of a save.

    Args:
        copier: of the device that they are on.
        copies: the storages, and where each goes to.
    """

    def __init__(self, copier: DeviceCopier, copies: Sequence[StorageCopy]) -> None:
        self._copier = copier
        self._copies = copies
        self._sums = copier.sum_up([copy.storage for copy in copies])

    def has_changed(self) -> bool:
        """Return true if they hold something else by now. For the training thread."""
        again = self._copier.sum_up([copy.storage for copy in self._copies])
        return self._copier.fetch(again) != self._copier.fetch(self._sums)

    def differs(self, memory: HostMemory) -> bool:
        """Return true if ``memory`` holds something else."""
        copied = [
            torch.frombuffer(memory.view(offset, storage.nbytes()), dtype=torch.uint8)
            for storage, offset in self._copies
        ]
        return content_sums(copied).tolist() != self._copier.fetch(self._sums)


@final
class _Changes:
    """Count of changes of tensors, as torch keeps it: not by fused optimizers, nor through ``.data``."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._seen = [(tensor, change_count(tensor)) for tensor in tensors]
        self._lock = threading.Lock()  # no optimizer steps while another thread looks
        self._found: bool | None = None

    def found(self) -> bool:
        """Return true if any was changed up to now, or up to the first call."""
        with self._lock:
            if self._found is None:
                self._found = any(change_count(tensor) != count for tensor, count in self._seen)
                self._seen = []
            return self._found


@final
class _DeviceCopy:
    """The copies of a snapshot that one device makes: at first what training waits for, there, and then the others.

    Args:
        copier: of the device.
        memory: where to.
        spare: where in it there is room behind all copies: small storages go there together, and are put into their
            places when that is done.
        early: is copied before training changes anything.
        late: may be copied until an optimizer steps.
        tensors: of what is late.
        waits_for_step: it is; else all is copied before training changes anything.
        verify: note what all of it holds, to be compared with what is copied.
    """

    def __init__(
        self,
        copier: DeviceCopier,
        memory: HostMemory,
        spare: int,
        early: Sequence[StorageCopy],
        late: Sequence[StorageCopy],
        tensors: Sequence[Tensor],
        *,
        waits_for_step: bool,
        verify: bool,
    ) -> None:
        self._copier = copier
        self._kept = [*early, *late]  # so that what replaces a tensor's memory does not free what is being copied
        self._changes = _Changes(tensors if waits_for_step else ())
        self.checks = [_ContentCheck(copier, copies) for copies in (early, late) if verify and copies]
        self.late_check = self.checks[-1] if verify and late else None
        self._memory, self._spare = memory, spare
        self._small = _gathered(self._kept, memory.size_bytes - spare)
        small = {copy.offset for copy in self._small}
        at_once = [copy for copy in (early if waits_for_step else self._kept) if copy.offset not in small]
        later = [copy for copy in (late if waits_for_step else ()) if copy.offset not in small]
        copier.after_training()
        self._gathered = copier.gather([copy.storage for copy in self._small]) if small else None
        self.gathered_bytes = 0 if self._gathered is None else self._gathered.nbytes()
        for storage, offset in at_once:
            copier.copy(storage, memory, offset)
        self._is_late = bool(later)
        if at_once or small or not later:
            copier.before_training(copier.mark())
        if self._gathered is not None:  # training does not touch that
            copier.copy(self._gathered, memory, spare)
        for storage, offset in later:
            copier.copy(storage, memory, offset)
        self._copied = copier.mark()

    def before_step(self) -> None:
        """Queue an optimizer's step, which is about to come, after the copy. For the training thread."""
        self._changes.found()
        if self._is_late:
            self._copier.before_training(self._copied)

    def wait(self) -> None:
        """Wait until everything is copied.

        Raises:
            TimeoutError: it is not.
        """
        self._copier.wait(self._copied, _WAIT_SECONDS)
        at = self._spare
        for storage, offset in self._small:
            size = storage.nbytes()
            self._memory.view(offset, size)[:] = self._memory.view(at, size)
            at += size
        self._small, self._gathered = [], None

    def was_written_to(self) -> bool:
        """Return true if torch has seen a change up to now, or up to an optimizer's step."""
        return self._changes.found()

    def waited_seconds(self) -> float:
        """Seconds that training has waited for copies on the device."""
        return self._copier.waited_seconds()


def _gathered(copies: Sequence[StorageCopy], room: int) -> list[StorageCopy]:
    """Return the small ones of ``copies``, as many as there is room for; none where that would be one."""
    found: list[StorageCopy] = []
    room = min(room, _MOST_GATHERED_BYTES)
    for copy in copies:
        size = copy.storage.nbytes()
        if size < _SMALL_BYTES and size <= room:
            found.append(copy)
            room -= size
    return found if len(found) > 1 else []


@final
class _Trial:
    """Watch over state that could have been copied late, and was copied at once: only optimizers should change it."""

    def __init__(self, late: _LateCopy | None, changes: _Changes, checks: Sequence[_ContentCheck]) -> None:
        self._late = late
        self._changes = changes
        self._checks = checks

    def was_written_to(self) -> bool:
        """Return true if anything was changed up to now."""
        written = self._late is not None and self._late.was_written_to()
        return written or self._changes.found() or any(check.has_changed() for check in self._checks)

    def stop(self) -> None:
        """Stop watching."""
        if self._late is not None:
            self._late.watch.stop()


def finish_device_work(copies: Iterable[StorageCopy], devices: Devices = this_machine) -> None:
    """Wait until devices have done what concerns ``copies``, so that any thread may read it. For the training thread.

    A thread has queues of its own on a device, which do not wait for those of training.

    Raises:
        TimeoutError: a device does not get done.
    """
    found = {id(copier): copier for storage, _ in copies if (copier := devices.of(storage)) is not None}
    for copier in found.values():
        copier.finish_training(_WAIT_SECONDS)


@final
class _Partition:
    """Partition of an image's copies.

    Attributes:
        now: copies to make at once.
        late: copies of this machine's memory that may be made later, watched from now on.
        late_storages: whole storages of those, and where they go to.
        on_devices: by device, what is copied at once and what may be later.
    """

    def __init__(self) -> None:
        self.now: list[Job] = []
        self.late: _LateCopy | None = None
        self.late_storages: list[StorageCopy] = []
        self.on_devices: dict[DeviceCopier, tuple[list[StorageCopy], list[StorageCopy]]] = {}

    @property
    def late_on_devices(self) -> set[int]:
        """Storages that devices may copy later."""
        return {storage_id(copy.storage) for _, late in self.on_devices.values() for copy in late}


@final
class Staging:
    """The memory for copies, one after the other: allocated and faulted in once, and kept from save to save.

    A copy has the memory from :meth:`reserve` to :meth:`give_back`. Another, perhaps of another thread, that is taken
    meanwhile finds none, and gets some that is new.

    Args:
        limit_bytes: the most memory to use; ``None`` for half of what is free when it is allocated, divided by the
            processes of this run on this machine.
        verify: at which saves the copy of what is on a device is compared with what it was. A number or ``'always'``
            compares what this machine's memory holds, too, of which the kernel tells every change at every save.
        devices: that storages may be on.
    """

    def __init__(
        self, limit_bytes: int | None = None, verify: VerifyCopy = "first", *, devices: Devices = this_machine
    ) -> None:
        self._limit_bytes = limit_bytes
        self._verify = verify
        self._devices = devices
        self._taken = 0
        self._lock = threading.RLock()  # copies are given back in the threads that have written them
        self._free = WarmMemory()
        self._lent = 0
        self._copier: Copier | None = None
        self._preparing: threading.Thread | None = None
        self._new: HostMemory | None = None  # what is being prepared
        self._go = threading.Event()  # set: memory may be prepared, which takes the machine's time
        self._go.set()
        self._barrier = OptimizerStepBarrier()
        self._trial: _Trial | None = None
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

    def would_be_new(self, copies: Iterable[StorageCopy], size_bytes: int) -> bool:
        """Return true if memory for ``copies`` would be touched first, and there is room for more beside it.

        Then it is better written as it is than copied: see ``may_grow`` of :class:`StreamWriter`.
        """
        have = self._have()
        if size_bytes <= _LITTLE_BYTES or (self.prepared(0) and size_bytes <= have):
            return False
        if any(self._devices.of(copy.storage) is not None for copy in copies):
            return False  # from there copies are made by the device, and only into memory that is pinned
        return self.fits(size_bytes + max(have, size_bytes))

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Make :meth:`prepare` wait within the block."""
        self._go.clear()
        try:
            yield
        finally:
            self._go.set()

    def reserve(self, size_bytes: int) -> HostMemory | None:
        """Lend memory for a snapshot of ``size_bytes``, which no other thread gets until :meth:`give_back`.

        ``None`` where that is too much, or the system gives no more.
        """
        self.prepared()
        with self._lock:
            memory = self._free.take() if self._free.has(size_bytes) else None
            memory = memory or self._allocated(size_bytes)
            self._lent += memory is not None
            return memory

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
            run = functools.partial(self._fault_in, memory, self._devices.pinner())
            self._preparing = next(iter(start_threads(run, 1, name="checkpoint-memory")), None)
            if self._preparing is None:
                self._new = None
                self._release(self._free.keep(memory))

    def _fault_in(self, memory: HostMemory, pin: Pin) -> None:
        try:
            memory.fault_in(self._go)
            if not memory.is_closed:
                pin(memory, self._go)
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
        """Release ``memory`` for the next copy; of two pieces the larger is kept. Nothing may refer to it any more."""
        with self._lock:
            self._lent -= 1
        self._release(self._free.keep(memory))

    def close(self) -> None:
        """Give the memory back to the system."""
        with self._lock:
            if self._new is not None:
                self._new.close()  # which ends that
        self.prepared()
        trial, self._trial = self._trial, None
        if trial is not None:
            trial.stop()
        if self._copier is not None:
            self._copier.close()
            self._copier = None
        self._release(self._free.take())

    def _release(self, memory: HostMemory | None) -> None:
        """Give ``memory`` back to the system."""
        if memory is not None:
            self._devices.release(memory)
            memory.close()

    # ── copies ───────────────────────────────────────────────────────────────────────────────────────────────────
    def take(
        self, memory: HostMemory, copies: Iterable[StorageCopy], size_bytes: int, lazy: Sequence[Optimizer] = ()
    ) -> Snapshot:
        """Copy storages to ``memory``.

        The first time, what could be copied later is copied at once and watched until an optimizer steps: where
        somebody else changes it, everything is always copied at once from then on.

        Args:
            memory: from :meth:`reserve`.
            copies: the storages, and where in the memory each of them belongs.
            size_bytes: of all of them there.
            lazy: optimizers whose parameters and state nothing else changes: those are copied until one steps.

        Returns:
            The copy, in memory to :meth:`give_back` when it is written.
        """
        started = time.perf_counter()
        self._copier = self._copier or Copier()
        self._stop_trial()
        if self._last is not None and self._last.was_torn:
            self._may_copy_late = False
        verify = self._is_verified()
        self._taken += 1
        shares = self._partition(copies, lazy, memory)
        tries = self._may_copy_late is None
        snapshot = self._last = Snapshot(memory)
        late_tensors = _tensors_in(lazy, shares.late_on_devices)
        if shares.on_devices:
            self._devices.pinner()(memory, None)
        spare = size_bytes
        for copier, (early, late) in shares.on_devices.items():
            copy = _DeviceCopy(
                copier, memory, spare, early, late, late_tensors, waits_for_step=not tries, verify=verify
            )
            spare += copy.gathered_bytes
            snapshot.on_devices.append(copy)
        self._copier.copy(shares.now)
        if tries and (shares.late is not None or late_tensors):
            if shares.late is not None:
                self._copier.copy(shares.late.jobs)
            checks = [copy.late_check for copy in snapshot.on_devices if copy.late_check is not None]
            self._trial = _Trial(shares.late, _Changes(late_tensors), checks)
            self._barrier.set(lazy, self._stop_trial)
        snapshot.seconds = time.perf_counter() - started
        if not tries and (shares.late is not None or late_tensors):
            if shares.late is not None:
                if verify and self._verify != "first":
                    snapshot.checks.append(_ContentCheck(PageableCopier(), shares.late_storages))
                snapshot.start(self._copier, shares.late)
            self._barrier.set(lazy, snapshot.finish_before_step)
        snapshot.stall_seconds = time.perf_counter() - started
        return snapshot

    def _is_verified(self) -> bool:
        """Return true if the content of the next copy is to be compared."""
        if isinstance(self._verify, str):
            return self._verify == "always" or (self._verify == "first" and self._taken == 0)
        return self._taken % self._verify == 0

    def _partition(self, copies: Iterable[StorageCopy], lazy: Sequence[Optimizer], memory: HostMemory) -> _Partition:
        """Assign each storage to a copier, and watch those that may be copied late from now on."""
        assert self._copier is not None
        may_wait = lazy and self._may_copy_late is not False
        late = {storage_id(tensor.untyped_storage()) for tensor in _tensors_of(lazy)} if may_wait else set[int]()
        shares = _Partition()
        later: list[Job] = []
        storages: list[torch.UntypedStorage] = []
        for copy in copies:
            storage, offset = copy
            if not (size := storage.nbytes()):
                continue
            if (copier := self._devices.of(storage)) is not None:
                parts = shares.on_devices.setdefault(copier, ([], []))
                parts[copier.may_run_late and storage_id(storage) in late].append(copy)
                continue
            to, source = memory.address + offset, storage.data_ptr()
            start, watched = whole_pages(source, size)
            can_wait = storage_id(storage) in late and self._copier.has_helpers
            if not can_wait or watched < _LEAST_WATCHED_BYTES or storage.is_shared():
                shares.now.append((to, source, size))
                continue
            before, after = start - source, start + watched - source
            shares.now += [(to, source, before), (to + after, source + after, size - after)]
            later.append((to + before, start, watched))
            storages.append(storage)
            shares.late_storages.append(copy)
        watch = PageWatch.begin([(at, size) for _, at, size in later]) if later else None
        if watch is None:
            shares.now += later
        else:
            shares.late = _LateCopy(later, storages, watch)
        return shares

    def _stop_trial(self) -> None:
        """Check, on the training thread, that only optimizers changed the tensors that may be copied late."""
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


def _tensors_of(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """The parameters and the state of ``optimizers`` that are on this rank."""
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    states = [v for optimizer in optimizers for state in optimizer.state.values() for v in state.values()]
    local = [local_part(t) for t in (*parameters, *states)]
    return [t for t in local if isinstance(t, Tensor) and is_dense(t)]


def _tensors_in(optimizers: Sequence[Optimizer], storages: set[int]) -> list[Tensor]:
    """Return the tensors of ``optimizers`` that are in one of ``storages``."""
    return [t for t in _tensors_of(optimizers) if storage_id(t.untyped_storage()) in storages] if storages else []


shared_staging = Staging()
"""For the saves of functions and of ``Checkpointer``, which nobody ends: memory stays with the process."""
atexit.register(shared_staging.close)
