"""Copies from devices to memory of this machine, in the order in which each device works.

Training queues its work on a device and does not wait for it, and so do copies: what is read when follows
from waits between the two queues. Those are the verbs of :class:`DeviceCopier`; ``tests/checkpoint/test_copy_order.py``
runs a simulated device that does its work in any order that they allow. Streams and events are those of the CUDA
programming guide, https://docs.nvidia.com/cuda/cuda-c-programming-guide/#asynchronous-concurrent-execution
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor

from composerlite import dist
from composerlite.storage import HostMemory

log = logging.getLogger(__name__)
_CHUNK_BYTES = 64 << 20  # of one copy, 1 ms: small copies of training get in between two
_STREAM_COPIES = 512  # a stream takes 1,024 before the host has to wait for the first
_STREAMS = 8
_SLICE_BYTES = 1 << 30  # drivers of the series r580 refuse 512 GiB in one call, and no copy may reach over two calls
_PORTABLE = 1  # pinned for all devices, and not only for the current one
_PAUSE_SECONDS = 0.01
_POLL_SECONDS = 0.00005  # then an eighth of what was waited
_MOST_POLL_SECONDS = 0.01
_LOOK_SECONDS = 1.0  # between looks at the other ranks
_READ_SECONDS = 600.0


class DeviceCopier(Protocol):
    """The copies of one device. All but :meth:`wait` and :meth:`fetch` are for the training thread.

    Attributes:
        may_run_late: copies run while training does; else each is done when :meth:`copy` returns.
    """

    may_run_late: bool

    def after_training(self) -> None:
        """Make later copies wait, on the device, for the work that training has queued up to now."""
        ...

    def copy(
        self, storage: torch.UntypedStorage, memory: HostMemory, offset: int, start: int = 0, size: int | None = None
    ) -> None:
        """Queue a copy of ``storage``, or of a part of it. It has to exist until the copy is done.

        Args:
            storage: on the device.
            memory: host memory.
            offset: in ``memory``, in bytes.
            start: in ``storage``, in bytes.
            size: in bytes; ``None`` for all from ``start`` on.
        """
        ...

    def gather(self, storages: Sequence[torch.UntypedStorage]) -> torch.UntypedStorage:
        """Queue, among the copies, one of all ``storages`` into new memory of the device, one after the other.

        Args:
            storages: on the device.

        Returns:
            The new memory, which is filled when the copies that are queued so far are done.
        """
        ...

    def load(self, source: Tensor, storage: torch.UntypedStorage, start: int) -> Any:
        """Queue, among training's work, a copy of host memory to ``storage``.

        Args:
            source: bytes, which must stay as they are until the copy is done.
            storage: on the device.
            start: in ``storage``, in bytes.

        Returns:
            The moment at which it is done, for :meth:`wait`.
        """
        ...

    def mark(self) -> Any:
        """Return the moment at which the copies queued up to now are done."""
        ...

    def before_training(self, mark: Any) -> None:
        """Make work that training queues from now on wait, on the device, for ``mark``. This thread does not wait."""
        ...

    def wait(self, mark: Any, timeout: float) -> None:
        """Wait for ``mark`` in any thread.

        Args:
            mark: result of :meth:`mark`.
            timeout: in seconds.

        Raises:
            TimeoutError: it does not come.
        """
        ...

    def finish_training(self, timeout: float) -> None:
        """Wait until what training has queued is done: then the memory may be read in any order.

        Raises:
            TimeoutError: it is not.
        """
        ...

    def read(self, numbers: Tensor) -> Any:
        """Queue a copy of a few ``numbers`` as training has left them up to now; training does not wait for it."""
        ...

    def sum_up(self, storages: Sequence[torch.UntypedStorage]) -> Any:
        """:meth:`read` :func:`content_sums` of what they hold."""
        ...

    def fetch(self, read: Any) -> Any:
        """Wait for what :meth:`read` or :meth:`sum_up` gave, and for no later work; the numbers. In any thread.

        Raises:
            TimeoutError: it does not come.
        """
        ...

    def waited_seconds(self) -> float:
        """Return the seconds that training waited for copies on the device, in waits that ended since the last call."""
        ...


Pin = Callable[["HostMemory", threading.Event | None], bool]
"""Pins memory for direct writes by devices; returns true if it did. With an event it is in the background: it pauses
while the event is cleared, and loads the kernels of sums, which the first save would wait for otherwise."""


class Devices(Protocol):
    """The devices that storages lie on."""

    def of(self, storage: torch.UntypedStorage) -> DeviceCopier | None:
        """Copier for ``storage``; ``None`` for one in this machine's memory."""
        ...

    def pinner(self, device: torch.device | None = None) -> Pin:
        """Function that pins host memory, callable in any thread.

        Args:
            device: one that this process works with; ``None`` for the current one, on the training thread.
        """
        ...

    def release(self, memory: HostMemory) -> None:
        """End that, before ``memory`` goes. Nothing may be copied to it any more."""
        ...


# ── content ──────────────────────────────────────────────────────────────────────────────────────────────────────────
_SMALL_BYTES = 1 << 20
_GROUP_BYTES = 16 << 20
_COLUMNS = 1 << 12
_ROWS = 1 << 11
_BLOCK_BYTES = 8 * _COLUMNS * _ROWS
_BATCH = 64
_FACTORS = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))
"""Of the generator splitmix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2660193.2660195), as torch has them."""


def content_sums(parts: Sequence[Tensor]) -> Tensor:
    """Return two sums of each 64 MiB of each of ``parts``, but for small ones in a row, which have theirs together.

    The sums are modulo 2^64: of 64-bit words, and of each word times a weight of its place. Words are laid out as a
    table, and the weight of a place is that of its row and that of its column: memory is read twice. A device is
    given three kernels for a block and a few for each 64 of them, and needs 5 MiB.

    Args:
        parts: bytes, on one device.

    Returns:
        Numbers of 64 bits, on that device: a row of two for each block. Equal parts have equal sums on every device.
    """
    blocks = [block for part in _grouped(parts) for block in part.split(_BLOCK_BYTES)]
    if not blocks:
        return torch.zeros(0, 2, dtype=torch.int64)
    device = blocks[0].device
    weights = _weights(0, _COLUMNS + _ROWS + 1, device)
    batches = [blocks[start : start + _BATCH] for start in range(0, len(blocks), _BATCH)]
    return torch.cat([_sums_of_blocks(batch, weights[:_COLUMNS], weights[_COLUMNS:]) for batch in batches])


def _grouped(parts: Sequence[Tensor]) -> list[Tensor]:
    """Join small parts in a row: which ones depends on their sizes alone."""
    groups: list[list[Tensor]] = [[]]
    room = 0
    for part in parts:
        size = part.numel()
        if size > room or size > _SMALL_BYTES:
            groups.append([])
            room = _GROUP_BYTES if size <= _SMALL_BYTES else 0
        groups[-1].append(part)
        room -= size
    return [one[0] if len(one) == 1 else torch.cat(one) for one in groups if one]


def _sums_of_blocks(blocks: Sequence[Tensor], of_columns: Tensor, of_rows: Tensor) -> Tensor:
    """Return the two sums of each of ``blocks``."""
    of_row, of_column, last = (
        torch.zeros(len(blocks), length, dtype=torch.int64, device=of_rows.device)
        for length in (_ROWS, _COLUMNS, _COLUMNS)
    )
    for number, block in enumerate(blocks):
        rows, left = divmod(block.numel(), 8 * _COLUMNS)
        if rows:
            table = block[: 8 * _COLUMNS * rows].view(torch.int64).view(rows, _COLUMNS)
            torch.sum(table, 1, out=of_row[number, :rows])
            torch.sum(table, 0, out=of_column[number])
        if left:  # a row that is not full
            last[number].view(torch.uint8)[:left] = block[-left:]
    plain = of_column.sum(1) + last.sum(1)
    placed = (of_row * of_rows[:_ROWS]).sum(1) + (of_column * of_columns).sum(1)
    return torch.stack([plain, placed + (last * (of_columns + of_rows[_ROWS])).sum(1)], 1)


def _weights(start: int, count: int, device: torch.device) -> Tensor:
    """Weights number ``start`` and up, which look drawn at random and are the same everywhere."""
    mixed = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device)
    for factor in _FACTORS:
        mixed = mixed * factor
        mixed = mixed ^ (mixed >> 29)
    return mixed


def bytes_of(storage: torch.UntypedStorage, start: int = 0, size: int | None = None) -> Tensor:
    """Return bytes of ``storage`` as a tensor that shares its memory."""
    count = storage.nbytes() - start if size is None else size
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (count,), (1,))  # pyright: ignore[reportArgumentType]


class Cut(NamedTuple):
    """A part of a storage, and where it goes to in a memory."""

    start: int
    offset: int
    size: int


def cuts(size: int, offset: int) -> Iterator[Cut]:
    """Cut a copy of ``size`` bytes to ``offset`` into chunks, each within one slice of pinned memory."""
    start = 0
    while start < size:
        in_slice = _SLICE_BYTES - (offset + start) % _SLICE_BYTES
        length = min(_CHUNK_BYTES, in_slice, size - start)
        yield Cut(start, offset + start, length)
        start += length


def poll(is_done: Callable[[], bool], timeout: float, late: str) -> None:
    """Wait until ``is_done`` returns true, and sleep in between: a core that spins is missing elsewhere.

    A device that waits for another rank, as NCCL lets it, is not done if that rank is gone.

    Args:
        is_done: is asked at once, and then at intervals of an eighth of what was waited, 10 ms at most.
        timeout: in seconds.
        late: what the error says has not happened.

    Raises:
        TimeoutError: it does not.
        RankError: another rank has failed or is gone.
    """
    started = time.monotonic()
    next_look = _LOOK_SECONDS
    while not is_done():
        waited = time.monotonic() - started
        if waited > timeout:
            raise TimeoutError(f"{late} within {timeout:g} s")
        if waited > next_look:
            dist.check_nobody_left(late)
            next_look = waited + _LOOK_SECONDS
        time.sleep(min(max(waited / 8, _POLL_SECONDS), _MOST_POLL_SECONDS))


# ── a GPU of CUDA or ROCm ────────────────────────────────────────────────────────────────────────────────────────────
@final
class Pinning:
    """Memory that GPUs write to directly, without a copy in between.

    Args:
        register: pins memory: address, bytes, flags; returns the error's number, 0 for none.
        unregister: ends that: address; returns the same.
        clear_error: clears the device's last error, which the next kernel would report otherwise.
    """

    def __init__(
        self,
        register: Callable[[int, int, int], Any],
        unregister: Callable[[int], Any],
        clear_error: Callable[[], object],
    ) -> None:
        self._register, self._unregister, self._clear_error = register, unregister, clear_error
        self._lock = threading.Lock()
        self._pinned: dict[int, list[int]] = {}  # addresses of the slices, by that of the memory
        self._refused: set[int] = set()

    def add(self, memory: HostMemory, go: threading.Event | None = None) -> bool:
        """Pin ``memory`` in slices, between which other threads may pin theirs. May be called twice.

        Args:
            memory: host memory.
            go: pinning pauses while this event is cleared; ``None``: it does not pause.

        Returns:
            True if all of ``memory`` is pinned.
        """
        with self._lock:
            if memory.address in self._pinned or memory.address in self._refused:
                return memory.address in self._pinned
            done: list[int] = []
            for offset in range(0, memory.size_bytes, _SLICE_BYTES):
                if go is not None:
                    go.wait(_PAUSE_SECONDS)
                address, size = memory.address + offset, min(_SLICE_BYTES, memory.size_bytes - offset)
                if code := int(self._register(address, size, _PORTABLE)):
                    self._clear_error()
                    self._undo(done)
                    self._refused.add(memory.address)
                    log.warning(
                        "%d bytes of memory for checkpoints could not be pinned (CUDA error %d): the GPU copies to it "
                        "slowly, and training waits meanwhile. Is there a limit on locked memory (ulimit -l)?",
                        memory.size_bytes,
                        code,
                    )
                    return False
                done.append(address)
            self._pinned[memory.address] = done
            return True

    def remove(self, memory: HostMemory) -> None:
        """Unpin it; what was never pinned, too."""
        with self._lock:
            self._refused.discard(memory.address)
            self._undo(self._pinned.pop(memory.address, []))

    def _undo(self, addresses: Sequence[int]) -> None:
        for address in addresses:
            if code := int(self._unregister(address)):
                self._clear_error()
                log.warning("memory for checkpoints could not be unpinned (CUDA error %d)", code)


@final
class CudaCopier:
    """A GPU that torch reaches as ``cuda``: copies have a stream of their own."""

    may_run_late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One queue: a stream that has got many copies is followed by the next, which waits for them.
        self._streams = deque([torch.cuda.Stream(device)])
        self._queued = 0
        self._reading = torch.cuda.Stream(device)
        self._spacer = torch.zeros(1, device=device)
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def _training(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _stream(self) -> torch.cuda.Stream:
        """Return the stream for what is queued next."""
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
        for cut in cuts(storage.nbytes() - start if size is None else size, offset):
            target = torch.frombuffer(memory.view(cut.offset, cut.size), dtype=torch.uint8)
            with torch.cuda.stream(self._stream()):
                target.copy_(bytes_of(storage, start + cut.start, cut.size), non_blocking=True)
                # Copies of one direction run in the order in which they become ready: a kernel lets others get in
                # (https://github.com/meta-pytorch/torchrec/pull/4373).
                self._spacer.add_(1)
            self._queued += 1

    def gather(self, storages: Sequence[torch.UntypedStorage]) -> torch.UntypedStorage:
        with torch.cuda.stream(self._stream()):  # whose memory it is, too
            return torch.cat([bytes_of(storage) for storage in storages]).untyped_storage()

    def load(self, source: Tensor, storage: torch.UntypedStorage, start: int) -> torch.cuda.Event:
        bytes_of(storage, start, source.numel()).copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._training())
        return event

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._streams[0])
        return event

    def before_training(self, mark: Any) -> None:
        training = self._training()
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(training)
        training.wait_event(mark)
        after.record(training)
        self._stalls.append((before, after))

    def wait(self, mark: Any, timeout: float) -> None:
        poll(mark.query, timeout, f"{self._device} did not finish its copies")  # an error of the device is raised here

    def finish_training(self, timeout: float) -> None:
        event = torch.cuda.Event()
        event.record(self._training())
        self.wait(event, timeout)

    def read(self, numbers: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        target = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._reading.wait_stream(self._training())
        with torch.cuda.stream(self._reading):
            target.copy_(numbers, non_blocking=True)
        numbers.record_stream(self._reading)  # its memory is not used again before that
        event = torch.cuda.Event()
        event.record(self._reading)
        return target, event

    def sum_up(self, storages: Sequence[torch.UntypedStorage]) -> Any:
        return self.read(content_sums([bytes_of(storage) for storage in storages]))

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
    """A device without streams that we know, such as MPS or XPU: each copy is waited for."""

    may_run_late = False

    def after_training(self) -> None:
        """The device copies in the order in which it is asked."""

    def copy(
        self, storage: torch.UntypedStorage, memory: HostMemory, offset: int, start: int = 0, size: int | None = None
    ) -> None:
        for cut in cuts(storage.nbytes() - start if size is None else size, offset):
            target = torch.frombuffer(memory.view(cut.offset, cut.size), dtype=torch.uint8)
            target.copy_(bytes_of(storage, start + cut.start, cut.size))

    def gather(self, storages: Sequence[torch.UntypedStorage]) -> torch.UntypedStorage:
        return torch.cat([bytes_of(storage) for storage in storages]).untyped_storage()

    def load(self, source: Tensor, storage: torch.UntypedStorage, start: int) -> None:
        bytes_of(storage, start, source.numel()).copy_(source)

    def mark(self) -> None:
        """Do nothing: every copy is finished when it returns."""

    def before_training(self, mark: Any) -> None:
        """Do nothing: every copy is finished when it returns."""

    def wait(self, mark: Any, timeout: float) -> None:
        """Do nothing: every copy is finished when it returns.

        Args:
            mark: ignored.
            timeout: ignored.
        """

    def finish_training(self, timeout: float) -> None:
        """Do nothing: a read waits for the device by itself."""

    def read(self, numbers: Tensor) -> Tensor:
        return numbers

    def sum_up(self, storages: Sequence[torch.UntypedStorage]) -> Tensor:
        return content_sums([bytes_of(storage) for storage in storages])

    def fetch(self, read: Any) -> Any:
        return read.tolist()

    def waited_seconds(self) -> float:
        return 0.0


# ── which one ────────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class MachineDevices:
    """The devices of this machine, as torch has them."""

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

    def pinner(self, device: torch.device | None = None) -> Pin:
        if not torch.cuda.is_initialized() or (device is not None and device.type != "cuda"):
            return lambda memory, go: False
        if self._pinning is None:
            runtime: Any = torch.cuda.cudart()
            self._pinning = Pinning(runtime.cudaHostRegister, runtime.cudaHostUnregister, _clear_cuda_error)
        pinning, current = self._pinning, torch.cuda.current_device() if device is None else device

        def pin(memory: HostMemory, go: threading.Event | None) -> bool:
            with torch.cuda.device(current):  # a new thread has the first device of the machine
                if go is not None:
                    _load_kernels()
                return pinning.add(memory, go)

        return pin

    def release(self, memory: HostMemory) -> None:
        if self._pinning is not None:
            self._pinning.remove(memory)


def _load_kernels() -> None:
    """Sum up a little on the current device, and get pinned memory for the sums: the first time takes over 50 ms."""
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            sums = content_sums([torch.zeros(n, dtype=torch.uint8, device="cuda") for n in (5, 16 * _COLUMNS)])
            torch.empty(1 << 16, pin_memory=True)[: sums.numel()].copy_(sums.view(-1), non_blocking=True)
    except RuntimeError as e:  # no memory: the first save may find some
        log.debug("kernels are loaded at the first save: %s", e)


def _clear_cuda_error() -> None:
    """Launch a kernel for nothing: torch raises the error that was left behind, and it is forgotten."""
    try:
        torch.zeros(1, device="cuda").add_(1)
    except RuntimeError as e:
        log.debug("forgotten: %s", e)


this_machine = MachineDevices()
"""The devices of this machine."""
