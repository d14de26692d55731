"""Copies from accelerators to memory of this machine, and back.

Training queues work on a device and does not wait for the result. Copies have a queue of their own. Waits between the
two queues determine the bytes that a copy reads. :class:`DeviceCopier` has the waits as methods.
``tests/checkpoint/test_copy_order.py`` runs the work on a simulated device in any order that the waits allow.
Streams and events: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#asynchronous-concurrent-execution
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor

from composerlite import dist
from composerlite.storage import HostMemory

log = logging.getLogger(__name__)
_CHUNK_BYTES = 64 << 20  # 1 ms of copying: small copies of training run between two chunks
_STREAM_COPIES = 512  # with 1,024 queued copies in a stream, the host would wait for the first copy
_STREAMS = 8
_SLICE_BYTES = 1 << 30  # r580 drivers refuse to pin 512 GiB in one call; no copy may span memory pinned in two calls
_PORTABLE = 1  # pinned for all devices, and not only for the current device
_POLL_SECONDS = 0.00005  # the first sleep; later sleeps are an eighth of the time waited
_MOST_POLL_SECONDS = 0.01
_RANK_CHECK_SECONDS = 1.0
_READ_SECONDS = 600.0


class DeviceCopier(Protocol):
    """Copier between one device and memory of this machine.

    :meth:`wait` and :meth:`fetch` are for any thread. All other methods are for the training thread, or for a single
    other thread while the training thread waits. Before the other thread starts, the training thread calls
    :meth:`finish_training`.

    Attributes:
        may_run_late: true: copies run beside training. False: a copy is complete when :meth:`copy` returns.
    """

    may_run_late: bool

    def after_training(self) -> None:
        """Make later copies wait, on the device, for all work of training so far."""
        ...

    def copy(
        self, storage: torch.UntypedStorage, memory: HostMemory, offset: int, start: int = 0, size: int | None = None
    ) -> None:
        """Queue a copy of ``storage``, or of a part. Both memories must exist until the copy is complete.

        The copy does not wait for work of training queued after the last :meth:`after_training`.

        Args:
            storage: on the device.
            memory: host memory.
            offset: in ``memory``, in bytes.
            start: in ``storage``, in bytes.
            size: in bytes; ``None``: to the end of the storage.
        """
        ...

    def gather(self, storages: Sequence[torch.UntypedStorage]) -> torch.UntypedStorage:
        """Queue, among the copies, a concatenation of ``storages`` into new memory of the device.

        Args:
            storages: on the device.

        Returns:
            The new memory. Copies queued later may read the new memory.
        """
        ...

    def load(self, source: Tensor, storage: torch.UntypedStorage, start: int) -> Any:
        """Queue, among the work of training, a copy of host memory to ``storage``.

        Args:
            source: bytes, not to be changed until the copy is complete.
            storage: on the device.
            start: in ``storage``, in bytes.

        Returns:
            The end of the copy, for :meth:`wait`.
        """
        ...

    def mark(self) -> Any:
        """Return the end of the copies queued so far, for :meth:`wait` and :meth:`before_training`."""
        ...

    def before_training(self, mark: Any) -> None:
        """Make later work of training wait, on the device, for ``mark``. The calling thread does not wait."""
        ...

    def wait(self, mark: Any, timeout: float) -> None:
        """Wait for ``mark`` in any thread.

        Args:
            mark: result of :meth:`mark` or :meth:`load`.
            timeout: in seconds.

        Raises:
            TimeoutError: the copies are not complete by then.
            RankError: another rank has failed or is gone. Copies may still be queued.
            RuntimeError: the device reports an error.
        """
        ...

    def finish_training(self, timeout: float) -> None:
        """Wait until the device has finished all work of training. Any thread may then read memory of the device.

        Raises:
            TimeoutError: the work is not finished within ``timeout`` seconds.
            RankError: another rank has failed or is gone.
        """
        ...

    def read(self, numbers: Tensor) -> Any:
        """Queue a copy of a few ``numbers``, after all work of training so far. Training does not wait.

        Returns:
            The copy, for :meth:`fetch`. ``numbers`` must not change before :meth:`fetch` returns.
        """
        ...

    def fetch(self, read: Any) -> Any:
        """Wait for a result of :meth:`read`, and for no later work, in any thread.

        Returns:
            The numbers: a number for a scalar, else nested lists.

        Raises:
            TimeoutError: the device does not copy the numbers.
            RankError: another rank has failed or is gone.
        """
        ...

    def waited_seconds(self) -> float:
        """Return the seconds that training waited, on the device, for the marks of :meth:`before_training`.

        Only waits that have ended since the last call count.
        """
        ...


class Devices(Protocol):
    """The accelerators of this machine."""

    def of(self, storage: torch.UntypedStorage) -> DeviceCopier | None:
        """Return the copier for ``storage``; ``None`` for a storage in memory of this machine."""
        ...

    def current(self) -> torch.device | None:
        """Return the accelerator of the calling thread, for :meth:`pin`; ``None`` if memory needs no pinning."""
        ...

    def pin(self, memory: HostMemory, device: torch.device) -> bool:
        """Pin ``memory`` for copies by all devices. For any thread; may be called twice.

        Args:
            memory: host memory.
            device: a device of this process.

        Returns:
            True if the memory is pinned.
        """
        ...

    def release(self, memory: HostMemory) -> None:
        """Unpin ``memory``; call before closing the memory. No copy from or to the memory may be queued."""
        ...


def bytes_of(storage: torch.UntypedStorage, start: int = 0, size: int | None = None) -> Tensor:
    """Return bytes of ``storage`` as a tensor with the same memory."""
    count = storage.nbytes() - start if size is None else size
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (count,), (1,))  # pyright: ignore[reportArgumentType]


def cuts(size: int, offset: int) -> Iterator[tuple[int, int, int]]:
    """Cut a copy of ``size`` bytes to ``offset`` into chunks, each within one slice of pinned memory.

    Args:
        size: of the copy, in bytes.
        offset: of the copy in host memory, in bytes.

    Yields:
        Start in the source, offset in host memory, and size of each chunk.
    """
    start = 0
    while start < size:
        in_slice = _SLICE_BYTES - (offset + start) % _SLICE_BYTES
        length = min(_CHUNK_BYTES, in_slice, size - start)
        yield start, offset + start, length
        start += length


def poll(is_done: Callable[[], bool], timeout: float, late: str) -> None:
    """Wait until ``is_done`` returns true. The thread sleeps between two calls and leaves the core to others.

    With NCCL a device may wait for a lost rank: the ranks are checked each second.

    Args:
        is_done: called at once, then after an eighth of the time waited, at most 10 ms.
        timeout: in seconds.
        late: beginning of the error message.

    Raises:
        TimeoutError: ``is_done`` is false for ``timeout`` seconds.
        RankError: another rank has failed or is gone.
    """
    started = time.monotonic()
    next_check = _RANK_CHECK_SECONDS
    while not is_done():
        waited = time.monotonic() - started
        if waited > timeout:
            raise TimeoutError(f"{late} within {timeout:g} s")
        if waited > next_check:
            dist.connect.check_nobody_left(late)
            next_check = waited + _RANK_CHECK_SECONDS
        time.sleep(min(max(waited / 8, _POLL_SECONDS), _MOST_POLL_SECONDS))


# ── a GPU of CUDA or ROCm ────────────────────────────────────────────────────────────────────────────────────────────
@final
class Pinning:
    """Pins host memory, so that GPUs copy to the memory directly.

    Args:
        runtime: has ``cudaHostRegister(address, size, flags)`` and ``cudaHostUnregister(address)``, which return an
            error number, 0 for success.
        clear_error: clears the last error of the device. Otherwise the next kernel would report the error.
    """

    def __init__(self, runtime: Any, clear_error: Callable[[], object]) -> None:
        self._runtime, self._clear_error = runtime, clear_error
        self._lock = threading.Lock()
        self._pinned: dict[int, list[int]] = {}  # pinned slices by address of the memory; [] if pinning failed

    def add(self, memory: HostMemory) -> bool:
        """Pin ``memory`` in slices of 1 GiB, and return true if all slices are pinned.

        May be called twice: a failed pinning is not tried again until :meth:`remove`.
        """
        with self._lock:
            if memory.address in self._pinned:
                return bool(self._pinned[memory.address])
            done: list[int] = []
            for offset in range(0, memory.size_bytes, _SLICE_BYTES):
                address, size = memory.address + offset, min(_SLICE_BYTES, memory.size_bytes - offset)
                if code := int(self._runtime.cudaHostRegister(address, size, _PORTABLE)):
                    self._clear_error()
                    self._undo(done)
                    self._pinned[memory.address] = []
                    log.warning(
                        "%d bytes of memory for checkpoints could not be pinned (CUDA error %d): the GPU copies to "
                        "it slowly, and training waits meanwhile. Check the limit on locked memory (ulimit -l).",
                        memory.size_bytes,
                        code,
                    )
                    return False
                done.append(address)
            self._pinned[memory.address] = done
            return True

    def remove(self, memory: HostMemory) -> None:
        """Unpin ``memory``, if it is pinned."""
        with self._lock:
            self._undo(self._pinned.pop(memory.address, []))

    def _undo(self, addresses: Sequence[int]) -> None:
        for address in addresses:
            if code := int(self._runtime.cudaHostUnregister(address)):
                self._clear_error()
                log.warning("memory for checkpoints could not be unpinned (CUDA error %d)", code)


@final
class CudaCopier:
    """Copier of a GPU of the type ``cuda``, by NVIDIA or AMD. Copies have streams of their own."""

    may_run_late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The streams form one queue: after _STREAM_COPIES copies, the next stream waits for the previous stream.
        self._streams = deque([torch.cuda.Stream(device)])
        self._queued = 0
        self._reading = torch.cuda.Stream(device)  # for read: a read must not wait for long copies
        self._spacer = torch.zeros(1, device=device)
        # Events before and after each wait of training for copies.
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def _training(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _stream(self) -> torch.cuda.Stream:
        """Return the stream for the next copy."""
        if self._queued >= _STREAM_COPIES:
            before = self._streams[0]
            if len(self._streams) < _STREAMS:
                self._streams.appendleft(torch.cuda.Stream(self._device))
            else:
                self._streams.rotate()
            self._streams[0].wait_stream(before)
            self._queued = 0
        return self._streams[0]

    def after_training(self) -> None:
        self._stream().wait_stream(self._training())

    def copy(
        self, storage: torch.UntypedStorage, memory: HostMemory, offset: int, start: int = 0, size: int | None = None
    ) -> None:
        for begin, to, length in cuts(storage.nbytes() - start if size is None else size, offset):
            target = torch.frombuffer(memory.view(to, length), dtype=torch.uint8)
            with torch.cuda.stream(self._stream()):
                target.copy_(bytes_of(storage, start + begin, length), non_blocking=True)
                # Copies of one direction run in the order in which they become ready. A copy after a kernel becomes
                # ready late, so copies of training run first (https://github.com/meta-pytorch/torchrec/pull/4373).
                self._spacer.add_(1)
            self._queued += 1

    def gather(self, storages: Sequence[torch.UntypedStorage]) -> torch.UntypedStorage:
        with torch.cuda.stream(self._stream()):  # the allocator reuses the memory only after work of this stream
            return torch.cat([bytes_of(storage) for storage in storages]).untyped_storage()

    def load(self, source: Tensor, storage: torch.UntypedStorage, start: int) -> Any:
        bytes_of(storage, start, source.numel()).copy_(source, non_blocking=True)
        return self._training().record_event()

    def mark(self) -> Any:
        return self._streams[0].record_event()

    def before_training(self, mark: Any) -> None:
        training = self._training()
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(training)
        training.wait_event(mark)
        after.record(training)
        self._stalls.append((before, after))

    def wait(self, mark: Any, timeout: float) -> None:
        poll(mark.query, timeout, f"{self._device} did not finish its copies")  # raises errors of the device

    def finish_training(self, timeout: float) -> None:
        self.wait(self._training().record_event(), timeout)

    def read(self, numbers: Tensor) -> tuple[Tensor, Any]:
        target = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._reading.wait_stream(self._training())
        with torch.cuda.stream(self._reading):
            target.copy_(numbers, non_blocking=True)
        numbers.record_stream(self._reading)  # the allocator does not reuse the memory before the copy has ended
        return target, self._reading.record_event()

    def fetch(self, read: Any) -> Any:
        target, event = read
        self.wait(event, _READ_SECONDS)
        return target.tolist()

    def waited_seconds(self) -> float:
        seconds = 0.0
        while self._stalls and self._stalls[0][1].query():
            before, after = self._stalls.popleft()
            seconds += before.elapsed_time(after) / 1000
        return seconds


# ── other devices ────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class PageableCopier:
    """Copier without streams, for devices such as MPS or XPU. Host memory is not pinned, and copies block."""

    may_run_late = False

    def after_training(self) -> None:
        """Do nothing: the device works in the order of the calls."""

    def copy(
        self, storage: torch.UntypedStorage, memory: HostMemory, offset: int, start: int = 0, size: int | None = None
    ) -> None:
        part = bytes_of(storage, start, size)
        torch.frombuffer(memory.view(offset, part.numel()), dtype=torch.uint8).copy_(part)

    def gather(self, storages: Sequence[torch.UntypedStorage]) -> torch.UntypedStorage:
        return torch.cat([bytes_of(storage) for storage in storages]).untyped_storage()

    def load(self, source: Tensor, storage: torch.UntypedStorage, start: int) -> None:
        bytes_of(storage, start, source.numel()).copy_(source)

    def mark(self) -> None:
        """Do nothing: copies are complete already."""

    def before_training(self, mark: Any) -> None:
        """Do nothing: copies are complete already."""

    def wait(self, mark: Any, timeout: float) -> None:
        """Do nothing: copies are complete already."""

    def finish_training(self, timeout: float) -> None:
        """Do nothing: a read waits for the device."""

    def read(self, numbers: Tensor) -> Tensor:
        return numbers

    def fetch(self, read: Any) -> Any:
        return read.tolist()

    def waited_seconds(self) -> float:
        return 0.0


# ── the devices of this machine ──────────────────────────────────────────────────────────────────────────────────────
@final
class MachineDevices:
    """The accelerators of this machine, as torch finds them."""

    def __init__(self) -> None:
        self._copiers: dict[torch.device, DeviceCopier] = {}
        self._pinning: Pinning | None = None

    def of(self, storage: torch.UntypedStorage) -> DeviceCopier | None:
        device = storage.device
        if device.type == "cpu":
            return None
        if (copier := self._copiers.get(device)) is None:
            copier = self._copiers[device] = CudaCopier(device) if device.type == "cuda" else PageableCopier()
        return copier

    def current(self) -> torch.device | None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None

    def pin(self, memory: HostMemory, device: torch.device) -> bool:
        if device.type != "cuda":
            return False
        if self._pinning is None:
            self._pinning = Pinning(torch.cuda.cudart(), _clear_cuda_error)
        with torch.cuda.device(device):  # a new thread begins with the first device of the machine
            return self._pinning.add(memory)

    def release(self, memory: HostMemory) -> None:
        if self._pinning is not None:
            self._pinning.remove(memory)


def _clear_cuda_error() -> None:
    """Launch a kernel, so that torch raises the last error of CUDA, and ignore the error."""
    try:
        torch.zeros(1, device="cuda").add_(1)
    except RuntimeError as e:
        log.debug("cleared a CUDA error: %s", e)


this_machine = MachineDevices()
"""The accelerators of this machine."""
