"""A device with two queues of work, as a GPU has, that does what was queued in any order that its waits allow.

What is queued is done later, on memory as it is then; the host runs ahead. Which of the queues does its next piece of
work, and how much is done before the host continues, is chosen by the test.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from composerlite._torch_compat import storage_id
from composerlite.devices import DeviceCopier
from composerlite.storage import HostMemory
from composerlite.storage.disk.memory import move

Choose = Callable[[int], int]
"""Picks one of so many, from 0."""

WAITS = (
    "copies wait for training",
    "training waits for what is copied at once",
    "an optimizer waits for what is copied late",
    "the host waits for the copies",
    "the host waits for training",
    "numbers that are read wait for training",
)


class Moment:
    """It has come when the queue that it was put into has reached it."""

    def __init__(self) -> None:
        self.has_come = False


class SimulatedDevice:
    """Training and copies, each in a queue of its own.

    Args:
        choose: what happens next.
        without: one of :data:`WAITS` that is left out.
    """

    def __init__(self, choose: Choose, without: str = "") -> None:
        assert without == "" or without in WAITS
        self._choose = choose
        self._queues: dict[str, deque[Callable[[], bool]]] = {"training": deque(), "copies": deque(), "reads": deque()}
        self._storages = dict[int, torch.UntypedStorage]()
        self._copier = _Copier(self, without)
        self._lock = threading.RLock()

    def owns(self, *tensors: torch.Tensor) -> None:
        """These tensors are on the device."""
        for tensor in tensors:
            self._storages[storage_id(tensor.untyped_storage())] = tensor.untyped_storage()

    def of(self, storage: torch.UntypedStorage) -> DeviceCopier | None:
        """The copier of what it owns."""
        return self._copier if storage_id(storage) in self._storages else None

    def current(self) -> torch.device | None:
        """It has no name of its own in torch."""
        return None

    def pin(self, memory: HostMemory, device: torch.device) -> bool:
        """All memory can be written to."""
        return True

    def release(self, memory: HostMemory) -> None:
        """Nothing was done to it."""

    def train(self, work: Callable[[], object]) -> None:
        """Queue ``work`` of training, which changes tensors of the device."""
        self.queue("training", work)

    def queue(self, name: str, work: Callable[[], object]) -> None:
        """Queue ``work``; some of what is queued is done before this returns."""

        def done() -> bool:
            work()
            return True

        with self._lock:
            self._queues[name].append(done)
            for _ in range(self._choose(4)):
                self._do_something()

    def record(self, name: str) -> Moment:
        """Queue a moment."""
        moment = Moment()

        def come() -> None:
            moment.has_come = True

        self.queue(name, come)
        return moment

    def wait_in(self, name: str, moment: Moment) -> None:
        """Nothing that is queued from now on is done before ``moment``."""
        with self._lock:
            self._queues[name].append(lambda: moment.has_come)

    def run_until(self, moment: Moment) -> None:
        """The host waits."""
        with self._lock:
            while not moment.has_come:
                assert self._do_something(), "all queues wait for each other"

    def run_all(self) -> None:
        """Do all that is queued."""
        with self._lock:
            while self._do_something():
                pass

    def _do_something(self) -> bool:
        """Do the next piece of work of one of the queues; whether there was any."""
        names = [name for name, queue in self._queues.items() if queue]
        while names:
            name = names.pop(self._choose(len(names)))
            queue = self._queues[name]
            if queue[0]():
                queue.popleft()
                return True
        return False


class _Copier:
    """The copies of a simulated device."""

    may_run_late = True

    def __init__(self, device: SimulatedDevice, without: str) -> None:
        self._device = device
        self._without = without
        self._copied_late = False

    def after_training(self) -> None:
        if self._without != WAITS[0]:
            self._device.wait_in("copies", self._device.record("training"))
        self._copied_late = False

    def copy(
        self, storage: torch.UntypedStorage, memory: HostMemory, offset: int, start: int = 0, size: int | None = None
    ) -> None:
        to, source = memory.address + offset, storage.data_ptr() + start
        count = storage.nbytes() - start if size is None else size
        half = count // 2
        self._device.queue("copies", lambda: move(to, source, half))
        self._device.queue("copies", lambda kept=storage: move(to + half, source + half, count - half))

    def gather(self, storages: Sequence[torch.UntypedStorage]) -> torch.UntypedStorage:
        together = torch.zeros(sum(storage.nbytes() for storage in storages), dtype=torch.uint8).untyped_storage()
        at = together.data_ptr()
        for storage in storages:
            job = at, storage.data_ptr(), storage.nbytes()
            self._device.queue("copies", lambda job=job, kept=together: move(*job))
            at += storage.nbytes()
        return together

    def load(self, source: torch.Tensor, storage: torch.UntypedStorage, start: int) -> Moment:
        to, at, size = storage.data_ptr() + start, source.data_ptr(), source.numel()
        self._device.train(lambda kept=storage: move(to, at, size))
        return self._device.record("training")

    def mark(self) -> Moment:
        return self._device.record("copies")

    def before_training(self, mark: Any) -> None:
        left_out = WAITS[2] if self._copied_late else WAITS[1]
        self._copied_late = True  # what training waits for next is what is copied late
        if self._without != left_out:
            self._device.wait_in("training", mark)

    def wait(self, mark: Any, timeout: float) -> None:
        if self._without != WAITS[3]:
            self._device.run_until(mark)

    def finish_training(self, timeout: float) -> None:
        if self._without != WAITS[4]:
            self._device.run_until(self._device.record("training"))

    def read(self, numbers: torch.Tensor) -> Any:
        found: list[Any] = []
        if self._without != WAITS[5]:
            self._device.wait_in("reads", self._device.record("training"))
        self._device.queue("reads", lambda: found.append(numbers.tolist()))
        return found, self._device.record("reads")

    def fetch(self, read: Any) -> Any:
        found, moment = read
        self._device.run_until(moment)
        return found[0]

    def waited_seconds(self) -> float:
        return 0.0
