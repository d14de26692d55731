"""Ports of loopback for programs that must be told one before they listen there."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["hold_port", "reserved_port"]


@contextmanager
def reserved_port() -> Generator[int]:
    """A port that the system gives to nobody else until the end of the block; a server of the test can listen there.

    The socket is bound and does not listen. A server that allows the reuse of addresses, as the stores of torch,
    OpenSSH and Go's servers do, can bind the port beside it; a program that asks for any port cannot be given it.
    """
    with hold_port(0) as holder:
        yield int(holder.getsockname()[1])


def hold_port(port: int) -> socket.socket:
    """A socket that keeps ``port``, 0 for any. OSError where another process has it, reserved or in use."""
    holder = socket.socket()
    try:
        holder.bind(("127.0.0.1", port))  # first alone: it fails where another one holds the port
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except BaseException:
        holder.close()
        raise
    return holder
