"""A small pinned buffer between devices and files. Saves and loads need no more memory, however large the tensors are.

A device copies to and from pinned memory at the speed of its link, and the host does not wait:
https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, final

import torch
from torch import Tensor

from composerlite.devices.copier import DeviceCopier, Devices, this_machine
from composerlite.storage import HostMemory

_READ_SLOTS = 3  # the host writes from a slot, the device fills another, and the third is ready
_WAIT_SECONDS = 600.0


@final
class RingSlots:
    """Slots of memory, filled by the host and copied by devices. A slot is reused after all copies from the slot.

    Args:
        memory: for all slots; must exist until :meth:`finish` has returned.
        slot_bytes: size of a slot.
        count: number of slots.
    """

    def __init__(self, memory: HostMemory, slot_bytes: int, count: int) -> None:
        self._slots = [
            torch.frombuffer(memory.view(number * slot_bytes, slot_bytes), dtype=torch.uint8) for number in range(count)
        ]
        self._copies: list[list[tuple[DeviceCopier, Any]]] = [[] for _ in range(count)]
        self._number = -1

    def next(self) -> Tensor:
        """Return the bytes of the next slot, to be filled. Waits for earlier copies from the slot.

        Raises:
            TimeoutError: a device does not finish copies from the slot within 10 minutes.
            RankError: another rank has failed or is gone.
        """
        self._number = (self._number + 1) % len(self._slots)
        self._wait(self._number)
        return self._slots[self._number]

    def is_copied(self, copier: DeviceCopier, mark: Any) -> None:
        """Register a copy by a device, from the slot returned last by :meth:`next`.

        Args:
            copier: of the device.
            mark: the end of the copy: result of :meth:`DeviceCopier.load`.
        """
        self._copies[self._number].append((copier, mark))

    def finish(self) -> None:
        """Wait until devices have copied all slots.

        Raises:
            TimeoutError: a device does not finish within 10 minutes.
            RankError: another rank has failed or is gone.
        """
        for number in range(len(self._slots)):
            self._wait(number)

    def _wait(self, number: int) -> None:
        copies, self._copies[number] = self._copies[number], []
        for copier, mark in copies:
            copier.wait(mark, _WAIT_SECONDS)


@final
class DeviceRing:
    """Pinned memory between devices and files. After a use the memory is kept for the next use.

    Threads may share a ring: each gets memory of its own. A copier is for one thread at a time.

    Args:
        devices: the accelerators.
        slot_bytes: largest size of a copy from a device, in bytes.
    """

    def __init__(self, devices: Devices = this_machine, slot_bytes: int = 8 << 20) -> None:
        self._devices = devices
        self._slot_bytes = slot_bytes
        self._idle: list[HostMemory] = []

    def copier_of(self, storage: torch.UntypedStorage) -> DeviceCopier | None:
        """Return the copier for ``storage``; ``None`` for a storage in memory of this machine."""
        return self._devices.of(storage)

    def read(self, copier: DeviceCopier, storage: torch.UntypedStorage) -> Iterator[tuple[int, int]]:
        """Copy ``storage`` to this machine in pieces. The device copies the next pieces while the caller uses a piece.

        No change of ``storage`` may be queued on the device: the copies do not wait for work of training. The caller
        uses the iterator to the end or closes the iterator; then the memory is free for the next use.

        Args:
            copier: for the storage.
            storage: on a device.

        Yields:
            Address and size of a piece, valid until the next piece.

        Raises:
            TimeoutError: the device does not finish within 10 minutes.
            RankError: another rank has failed or is gone.
            OSError: the system has no memory for the slots.
        """
        size, slot_bytes = storage.nbytes(), self._slot_bytes
        with self._memory(_READ_SLOTS * slot_bytes, storage.device) as memory:
            copied: deque[tuple[Any, int, int]] = deque()
            try:
                for number, start in enumerate(range(0, size, slot_bytes)):
                    if len(copied) == _READ_SLOTS:
                        yield _done(copier, *copied.popleft())
                    offset, length = number % _READ_SLOTS * slot_bytes, min(slot_bytes, size - start)
                    copier.copy(storage, memory, offset, start, length)
                    copied.append((copier.mark(), memory.address + offset, length))
                while copied:
                    yield _done(copier, *copied.popleft())
            finally:
                for mark, _, _ in copied:  # after an error, too: the device still writes to the slots
                    copier.wait(mark, _WAIT_SECONDS)

    @contextlib.contextmanager
    def slots(self, slot_bytes: int, device: torch.device, count: int) -> Generator[RingSlots]:
        """Return slots for loads as a context manager. The end of the block waits until devices have copied all slots.

        Args:
            slot_bytes: size of a slot.
            device: a device that copies from the slots: the memory is pinned if the device needs pinned memory.
            count: number of slots.

        Yields:
            The slots, valid until the end of the block.

        Raises:
            TimeoutError: a device does not finish within 10 minutes.
            RankError: another rank has failed or is gone.
            OSError: the system has no memory for the slots.
        """
        with self._memory(slot_bytes * count, device) as memory:
            slots = RingSlots(memory, slot_bytes, count)
            try:
                yield slots
            finally:
                slots.finish()  # after an error, too: the device still reads the slots

    @contextlib.contextmanager
    def _memory(self, size_bytes: int, device: torch.device) -> Generator[HostMemory]:
        """Lend memory of at least ``size_bytes``, pinned if possible. No copy may be queued at the end of the block."""
        memory: HostMemory | None = None
        with contextlib.suppress(IndexError):  # another thread may use the memory that was idle
            memory = self._idle.pop()
        if memory is not None and memory.size_bytes < size_bytes:
            self._release(memory)
            memory = None
        if memory is None:
            memory = HostMemory(size_bytes)
        self._devices.pin(memory, device)
        try:
            yield memory
        finally:
            if self._idle:
                self._release(memory)
            else:
                self._idle.append(memory)

    def _release(self, memory: HostMemory) -> None:
        self._devices.release(memory)
        memory.close()


def _done(copier: DeviceCopier, mark: Any, address: int, size: int) -> tuple[int, int]:
    copier.wait(mark, _WAIT_SECONDS)
    return address, size


shared_ring = DeviceRing()
"""The ring for the accelerators of this machine."""
