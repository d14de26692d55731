"""Memory that a write or a read of a file works with, kept from one to the next."""

from __future__ import annotations

import threading
from typing import final

from composerlite.storage.disk.memory import HostMemory

__all__ = ["borrow_memory", "give_memory_back"]

_LEAST_BYTES = 49 << 20  # what is asked for by default, so that each finds what the other left
_MOST_KEPT_BYTES = 65 << 20  # a load's blocks


@final
class _Spare:
    """One piece of memory that nobody uses."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: HostMemory | None = None

    def swap(self, memory: HostMemory | None) -> HostMemory | None:
        """Leave ``memory``, take what was there."""
        with self._lock:
            self._memory, memory = memory, self._memory
        return memory


_spare = _Spare()


def borrow_memory(size_bytes: int) -> HostMemory:
    """Memory of at least ``size_bytes``, until :func:`give_memory_back`. It holds what the last user left in it.

    The first touch of memory costs more than what is done with it, up to 3 ms per MiB in virtual machines whose host
    takes free pages back: as much as writing it to a fast disk.

    Raises:
        OSError: the system does not give that much.
    """
    memory = _spare.swap(None)
    if memory is not None and memory.size_bytes < size_bytes:
        memory.close()
        memory = None
    if memory is not None:
        return memory
    try:
        return HostMemory(max(size_bytes, _LEAST_BYTES))
    except OSError:
        return HostMemory(size_bytes)


def give_memory_back(memory: HostMemory) -> None:
    """Let others use what was borrowed. The last piece is kept, if it has up to 65 MiB; no view of it may be used."""
    unwanted = _spare.swap(memory) if memory.size_bytes <= _MOST_KEPT_BYTES else memory
    if unwanted is not None:
        unwanted.close()
