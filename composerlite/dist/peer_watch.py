"""Detection of a rank whose process or node has ended: each rank holds a connection to the next rank.

A store does not notice the end of a rank, and a wait for this rank would last until the timeout. The ranks watch each
other in a ring: each rank has two connections, for any number of ranks.
"""

from __future__ import annotations

import os
import socket
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, final

from composerlite.errors import RankError
from composerlite.threads import start_threads

if TYPE_CHECKING:
    from composerlite.dist.group import Group

_CONNECT_SECONDS = 10.0
_GOODBYE = b"."
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5}
"""A connection to a node without power or network ends after 15 seconds."""

_watches: weakref.WeakSet[PeerWatch] = weakref.WeakSet()


@final
class PeerWatch:
    """Watches the process of the next rank. Every rank makes a watch and calls :meth:`connect`.

    If the connection to the next rank ends before the next rank calls :meth:`stop`, the next rank is reported as lost.
    A rank accepts the connection of the previous rank only in :meth:`stop`: until then the kernel holds the
    connection, and ends the connection when the process ends.

    Args:
        group: all ranks; gets the report of a lost rank.

    Attributes:
        address: where the previous rank connects.

    Raises:
        OSError: this rank finds no route to MASTER_ADDR, or cannot listen for the previous rank.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._next = (group.rank + 1) % group.size
        self._is_stopped = False
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # finds the address of the route to MASTER_ADDR
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
            self._server = socket.create_server((probe.getsockname()[0], 0), backlog=128)
        self.address: tuple[str, int] = self._server.getsockname()
        self._ahead = socket.socket()
        self._ahead.settimeout(_CONNECT_SECONDS)
        _watches.add(self)

    def connect(self, address: tuple[str, int]) -> None:
        """Connect to the next rank at its ``address``, and watch the connection in a thread.

        Raises:
            RankError: this rank cannot connect to the next rank, or cannot start a thread.
        """
        rank, what = self._group.rank, "watching the next rank"
        try:
            self._ahead.connect(address)
        except OSError as e:
            self.close()
            where = f"rank {self._next} at {address[0]}:{address[1]}"
            raise RankError(
                f"{what}: rank {rank} cannot connect to {where}: {e}. Ranks must reach each other at the addresses of "
                "the route to MASTER_ADDR.",
                [self._next],
            ) from e
        self._ahead.settimeout(None)
        self._ahead.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            self._ahead.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        threads = start_threads(self._watch, 1, name="peer-watch")
        if not threads:
            self.close()
            raise RankError(f"{what}: rank {rank} cannot start a thread.", [rank])
        self._thread = threads[0]

    def stop(self) -> None:
        """End the watch, and tell the previous rank that this process ends on purpose. Frees sockets and thread."""
        self._is_stopped = True
        with suppress(OSError):  # no more connections
            self._server.setblocking(False)
            while True:
                connection, _ = self._server.accept()
                with connection, suppress(OSError):  # the other process has ended already
                    connection.sendall(_GOODBYE)
        with suppress(OSError):
            self._ahead.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_CONNECT_SECONDS)
        self.close()

    def close(self) -> None:
        """Close the descriptors of this process. In a forked process: the parent continues to watch."""
        self._ahead.close()
        self._server.close()

    def _watch(self) -> None:
        """Wait, in the thread, until the connection to the next rank ends, and report a lost rank."""
        try:
            last = self._ahead.recv(1)
        except OSError:  # the process was killed, or its node does not answer
            last = b""
        if last != _GOODBYE and not self._is_stopped:
            self._group.report_lost(self._next)


def _close_in_fork() -> None:
    """Close the connections that a forked process inherited: workers of a loader may outlive their rank."""
    for watch in list(_watches):
        watch.close()
    _watches.clear()


os.register_at_fork(after_in_child=_close_in_fork)
