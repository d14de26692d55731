"""Detection of a rank whose process or node is gone: each rank holds a connection to the next one and reports its end.

A store does not tell who has died, and a wait for a rank that is gone would last for its whole timeout. The ranks
watch each other in a ring, so that each has two connections, however many there are.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, final

from composerlite.dist.store_barrier import Poll, StoreBarrier
from composerlite.threads import start_threads

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage] - documented

_log = logging.getLogger(__name__)

_TOKEN_BYTES = 16
_CONNECT_SECONDS = 10.0
_HELLO, _GOODBYE = b"+", b"."
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5}
"""A node without power or network answers nothing: its connection ends after 15 seconds."""

_watches: weakref.WeakSet[PeerWatch] = weakref.WeakSet()


@final
class PeerWatch:
    """Watches the process of the next rank, and is watched by the rank before. Every rank makes one.

    If the connection to the next rank ends before that rank has called :meth:`stop`, all waits of ``barrier`` end with
    an error that names it. Where ranks cannot connect, or get no thread, that is logged, and a rank that is gone is
    found when a wait for it times out.
    """

    def __init__(self, store: Store, barrier: StoreBarrier, timeout: timedelta) -> None:
        self._barrier = barrier
        self._next = (barrier.rank + 1) % barrier.world_size
        self._is_stopped = False
        self._ahead: socket.socket | None = None
        self._behind: socket.socket | None = None
        self._thread: threading.Thread | None = None
        _watches.add(self)
        where = ""
        try:
            with socket.create_server((_own_address(), 0)) as server:
                token = secrets.token_bytes(_TOKEN_BYTES)
                host, port = server.getsockname()
                store.set(str(barrier.rank), f"{host} {port} {token.hex()}")
                Poll(store, barrier.world_size).until(
                    str(self._next), timeout, lambda: barrier.check_nobody_left("connecting to the next rank")
                )
                host, port, theirs = store.get(str(self._next)).decode().split()
                where = f" at {host}:{port}"
                self._ahead = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
                self._ahead.sendall(bytes.fromhex(theirs))
                self._behind = _accept(server, token)
                self._behind.sendall(_HELLO)
        except OSError as e:
            _log.warning(
                "rank %d cannot connect to rank %d%s (%s): if one of them is lost, the others wait until dist_timeout",
                barrier.rank,
                self._next,
                where,
                e,
            )
        if self._ahead is not None:
            _keep_alive(self._ahead)
            self._thread = next(iter(start_threads(self._watch, 1, name="peer-watch")), None)
            if self._thread is None:
                _log.warning(
                    "rank %d does not watch rank %d, for want of a thread: if that one is lost, the others wait until "
                    "dist_timeout",
                    barrier.rank,
                    self._next,
                )

    def stop(self) -> None:
        """End the watch: say to the rank before that this process ends by intention."""
        self._is_stopped = True
        if self._behind is not None:
            with suppress(OSError):  # the rank before has ended already
                self._behind.sendall(_GOODBYE)
        if self._ahead is not None:
            with suppress(OSError):
                self._ahead.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread is not None:
            self._thread.join(_CONNECT_SECONDS)
        self.close()

    def close(self) -> None:
        """Close the descriptors of this process, those of a fork only: no other process learns of it."""
        for end in (self._ahead, self._behind):
            if end is not None:
                end.close()

    def _watch(self) -> None:
        assert self._ahead is not None
        try:
            if self._ahead.recv(1) != _HELLO:
                return  # the next rank did not take the connection, and has logged why
        except OSError:
            return
        try:
            last = self._ahead.recv(1)
        except OSError:  # the node has not answered, or the process was killed with bytes unread
            last = b""
        if last != _GOODBYE and not self._is_stopped:
            self._barrier.report_gone(self._next)


def _own_address() -> str:
    """The address under which the other ranks reach this one: that of the way to MASTER_ADDR."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        return str(probe.getsockname()[0])


def _accept(server: socket.socket, token: bytes) -> socket.socket:
    """The connection of the rank before, which knows ``token``; others are closed."""
    server.settimeout(_CONNECT_SECONDS)
    while True:
        connection, _ = server.accept()
        connection.settimeout(_CONNECT_SECONDS)
        with suppress(OSError):
            if hmac.compare_digest(connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL), token):
                connection.settimeout(None)
                return connection
        connection.close()


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
