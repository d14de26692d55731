"""Detection of a rank whose process or node has ended: each rank holds a connection to the next rank.

A store does not notice the end of a rank, and a wait for this rank would last until the timeout. The ranks watch each
other in a ring: each rank has two connections, for any number of ranks.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, final

from composerlite.dist.rounds import wait_until
from composerlite.threads import start_threads

if TYPE_CHECKING:
    from composerlite.dist.control import Control

_log = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_GOODBYE = b"."
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5}
"""A connection to a node without power or network ends after 15 seconds."""

_watches: weakref.WeakSet[PeerWatch] = weakref.WeakSet()


@final
class PeerWatch:
    """Watches the process of the next rank. Every rank makes a watch at the same time.

    If the connection to the next rank ends before the next rank calls :meth:`stop`, the next rank is reported as lost.
    A rank accepts the connection of the previous rank only in :meth:`stop`: until then the kernel holds the
    connection, and ends the connection when the process ends.

    If ranks cannot connect, a warning is logged. Then a lost rank is found when a wait times out.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._next = (control.rank + 1) % control.world_size
        self._is_stopped = False
        self._server: socket.socket | None = None
        self._ahead: socket.socket | None = None
        self._thread: threading.Thread | None = None
        _watches.add(self)
        next_key, where = f"peer/{self._next}", ""
        try:
            self._server = socket.create_server((_own_address(), 0), backlog=128)
            host, port = self._server.getsockname()
            control.store.set(f"peer/{control.rank}", f"{host} {port}")
            wait_until(
                lambda: control.store.check([next_key]),
                control.timeout,
                control.world_size,
                lambda: control.check_nobody_left("connecting to the next rank"),
            )
            host, port = control.store.get(next_key).decode().split()
            where = f" at {host}:{port}"
            self._ahead = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
            _keep_alive(self._ahead)
            self._thread = next(iter(start_threads(self._watch, 1, name="peer-watch")), None)
        except OSError as e:
            _log.warning("rank %d cannot connect to rank %d%s: %s", control.rank, self._next, where, e)
        if self._thread is None:
            _log.warning(
                "rank %d does not watch rank %d: if that rank is lost, the others wait until dist_timeout",
                control.rank,
                self._next,
            )

    def stop(self) -> None:
        """End the watch, and tell the previous rank that this process ends on purpose."""
        self._is_stopped = True
        if self._server is not None:
            with suppress(OSError):  # no more connections
                self._server.setblocking(False)
                while True:
                    connection, _ = self._server.accept()
                    with connection, suppress(OSError):  # the other process has ended already
                        connection.sendall(_GOODBYE)
        if self._ahead is not None:
            with suppress(OSError):
                self._ahead.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread is not None:
            self._thread.join(_CONNECT_SECONDS)
        self.close()

    def close(self) -> None:
        """Close the descriptors of this process. In a forked process: the parent continues to watch."""
        for end in (self._ahead, self._server):
            if end is not None:
                end.close()

    def _watch(self) -> None:
        assert self._ahead is not None
        try:
            last = self._ahead.recv(1)
        except OSError:  # the process was killed, or its node does not answer
            last = b""
        if last != _GOODBYE and not self._is_stopped:
            self._control.report_lost(self._next)


def _own_address() -> str:
    """Return the address at which the other ranks reach this rank: that of the route to MASTER_ADDR."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        return str(probe.getsockname()[0])


def _keep_alive(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _close_in_fork() -> None:
    """Close the connections that a forked process inherited: workers of a loader may outlive their rank."""
    for watch in list(_watches):
        watch.close()
    _watches.clear()


os.register_at_fork(after_in_child=_close_in_fork)
