"""What takes the bytes of a file from front to back."""

from __future__ import annotations

from typing import Protocol

from composerlite.storage.disk.digests import FileDigest

__all__ = ["Sink"]


class Sink(Protocol):
    """Takes the bytes of one file in order. Used as a context manager: leaving it without :meth:`finish` gives up.

    Attributes:
        size_bytes: taken so far.
        seconds: spent by name, ``hash``, ``write`` and ``flush`` among them. Complete after :meth:`finish`.
    """

    size_bytes: int
    seconds: dict[str, float]

    def write(self, data: bytes) -> None:
        """Append ``data``.

        Raises:
            OSError: what came before could not be written.
        """
        ...

    def copy(self, address: int, size: int) -> int:
        """Append ``size`` bytes of memory at ``address``; their CRC-32. The memory may change when this returns.

        Raises:
            OSError: what came before could not be written.
        """
        ...

    def finish(self) -> FileDigest:
        """Wait until everything is durable; what the file contains. Nothing can be appended any more.

        Raises:
            OSError: something could not be written.
        """
        ...

    def __enter__(self) -> Sink: ...

    def __exit__(self, *exception: object) -> None: ...
