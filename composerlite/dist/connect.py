"""Connects the ranks of a run, detects lost ranks, and ends the connection."""

from __future__ import annotations

import atexit
import logging
import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed
from torch.distributed import HashStore, PrefixStore, ProcessGroup, Store, TCPStore  # pyright: ignore - documented

from composerlite._torch_compat import default_store
from composerlite.dist import env
from composerlite.dist.env import get_world_size, is_initialized
from composerlite.dist.group import TIMEOUT, Group
from composerlite.errors import ConfigError, RankError
from composerlite.threads import start_threads

_log = logging.getLogger(__name__)

_group: Group | None = None
_watch: PeerWatch | None = None
_owns_training_group = False
_TRAINING_TIMES = 3
"""Timeout of NCCL, as a multiple of the timeout of other waits.

After a timeout NCCL ends the process without naming the late ranks, so errors of this package must come first.
"""
_GOODBYE, _GOODBYE_AT_EXIT = timedelta(seconds=10), timedelta(seconds=2)
_CONNECT_SECONDS = 10.0
_GOODBYE_BYTE = b"."
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5}
"""A connection to a node without power or network ends after 15 seconds."""
_SINGLE = Group()


def get_group() -> Group:
    """Return the group of all ranks of this run.

    Raises:
        ConfigError: there are several ranks, and :func:`~composerlite.dist.initialize_dist` was not called.
    """
    if get_world_size() == 1:
        return _SINGLE
    if _group is None:
        raise ConfigError(f"WORLD_SIZE={get_world_size()}, but the ranks are not connected: call initialize_dist().")
    return _group


def group_of(process_group: ProcessGroup | None = None) -> Group:
    """Return the group of the ranks of ``process_group``; ``None``: of all ranks, which are connected if necessary.

    Every rank of the group calls this equally often. As long as ``torch.distributed`` is not initialized, the result
    is a group of one process.
    """
    if not is_initialized():
        return _SINGLE
    if process_group is None:
        if get_world_size() > 1:
            initialize_dist()
        return get_group()
    rank, size = torch.distributed.get_rank(process_group), torch.distributed.get_world_size(process_group)
    store = _new_keys(default_store(), f"composerlite/groups/{process_group.group_name}", rank)
    return Group(rank, size, store, TIMEOUT if _group is None else _group.timeout, process_group)


def _new_keys(store: Store, prefix: str, rank: int) -> Store:
    """Return ``store`` with a prefix of keys that no earlier connection used. Every rank calls this equally often."""
    number = store.add(f"{prefix}/times/{rank}", 1)
    return PrefixStore(f"{prefix}/{number}", store)


def check_nobody_left(operation: str) -> None:
    """Raise an error if another rank has failed or was lost, since a wait for the other rank would not succeed.

    Any thread may call this. Does nothing if the ranks are not connected.

    Args:
        operation: name of the operation, for the error.

    Raises:
        RankError: names the rank and the cause.
    """
    if (group := _group) is not None:
        group.check_nobody_left(operation)


def initialize_dist(
    device: str | torch.device | None = None,
    timeout: float | timedelta = TIMEOUT,
    *,
    min_world_size: int = 2,
) -> bool:
    """Connect the ranks: a process group for training, and a gloo group and a store for everything else.

    Every rank calls this. An existing process group is used for training, and defines the ranks. Otherwise the
    environment of torchrun defines the ranks. The device becomes the current device of the process. At exit
    :func:`finalize_dist` is called.

    Does nothing if the ranks are connected already, or if there is no process group and the run has fewer than
    ``min_world_size`` processes.

    Args:
        device: name, as in :func:`get_device`. GPUs use NCCL (XPU: XCCL), and gloo for tensors in host memory.
        timeout: of every wait of these groups, in seconds. The timeout of NCCL is three times as long: NCCL ends the
            process, and the other errors must come first.
        min_world_size: 1 makes a process group for one process too, as a device mesh needs.

    Returns:
        True if this call connected the ranks. Then the caller calls :func:`finalize_dist`.

    Raises:
        ConfigError: variables of the environment are missing or contradict each other, or the device does not exist.
            Raised on every rank if the check fails on one rank.
        RankError: a rank was lost, or the store at MASTER_ADDR cannot be reached.
        LateRankError: not every rank connected in time; names the late ranks.
    """
    global _group, _watch, _owns_training_group
    env.check_environment()
    if _group is not None or (get_world_size() < min_world_size and not is_initialized()):
        return False
    rank, world_size = env.get_global_rank(), get_world_size()
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    has_group = is_initialized()
    store = _new_keys(default_store() if has_group else _connect(rank, limit), "composerlite", rank)
    group = Group(rank, world_size, PrefixStore("control", store), limit, exchanges=world_size > 1)
    with group.all_or_none("connecting the ranks"):
        host = socket.gethostname()
        first = store.compare_set("host", "", host).decode()  # host of the first rank that sets the key
        if host != first and not env.environment_counts():
            raise ConfigError(
                f"the ranks of the process group are on several machines, such as {first} and {host}, and the "
                "environment does not define which rank is on which machine. Set RANK, WORLD_SIZE, LOCAL_RANK "
                "and LOCAL_WORLD_SIZE as torchrun does."
            )
        chosen = env.get_device(device)
        env.claim_device(chosen)
    with group.all_or_none("making process groups"):
        if not has_group:
            arguments = training_group_arguments(chosen, limit)
            training = PrefixStore("training", store)
            torch.distributed.init_process_group(store=training, rank=rank, world_size=world_size, **arguments)
            _owns_training_group = True
        group.process_group = torch.distributed.new_group(backend="gloo", timeout=limit)
    if world_size > 1:
        _watch = watch = group.agree("watching the next rank", lambda: PeerWatch(group))
        address = group.gather(watch.address)[(rank + 1) % world_size]
        group.all_reduce("watching the next rank", lambda: watch.connect(address), any)
    _group = group
    # A process with open groups sometimes aborts at exit, so an exit handler destroys the groups, without a long wait.
    atexit.unregister(finalize_dist)
    atexit.register(finalize_dist, _GOODBYE_AT_EXIT)
    return True


def finalize_dist(timeout: timedelta = _GOODBYE) -> None:
    """Destroy the process groups that :func:`initialize_dist` made. Every rank calls this. May be called twice.

    Raises no ``RankError``: a rank that is late or has failed is logged.

    Args:
        timeout: of the wait for the other ranks, which may still read from this rank. The wait ends early if a rank
            has failed.
    """
    global _group, _owns_training_group
    if _group is None:
        return
    group, _group = _group, None
    try:
        group.meet_once("end", "the end of the run", timeout)
    except RankError as e:
        _log.debug("leaving without the other ranks: %s", e)
    if _watch is not None:
        _watch.stop()
    if not is_initialized():
        return
    torch.distributed.destroy_process_group(None if _owns_training_group else group.process_group)  # None: all groups
    group.process_group, _owns_training_group = None, False


def _connect(rank: int, timeout: timedelta) -> Store:
    """Connect to the store at MASTER_ADDR:MASTER_PORT, which torchrun's agent holds, or else rank 0."""
    if "MASTER_ADDR" not in os.environ:
        return HashStore()  # one process without a launcher
    host, port = os.environ["MASTER_ADDR"], env.env_int("MASTER_PORT", default=0)
    agent_holds_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = rank == 0 and not agent_holds_it
    try:  # does not wait for workers: the first exchange of the group waits, and names late ranks
        store = TCPStore(host, port, is_master=is_master, timeout=timeout, wait_for_workers=False, multi_tenant=True)
    except torch.distributed.DistError as e:
        raise RankError(
            f"rank {rank}: no store at MASTER_ADDR:MASTER_PORT = {host}:{port} ({e}). Rank 0 or torchrun's agent "
            "hosts it: check its log, and that the port is free there and reachable from here.",
            [rank],
        ) from e
    if agent_holds_it:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"/worker/attempt_{attempt}", store)
    return store


def training_group_arguments(device: torch.device, timeout: timedelta) -> dict[str, Any]:
    """Return the arguments of ``init_process_group`` for the group that trains on ``device``."""
    backend = env.backend_of(device)
    if backend == "gloo":
        return {"backend": backend, "timeout": timeout, "device_id": None}
    groups, waits = f"cpu:gloo,{device.type}:{backend}", timeout * _TRAINING_TIMES
    return {"backend": groups, "timeout": waits, "device_id": device}


# ── lost ranks ───────────────────────────────────────────────────────────────────────────────────────────────────────
@final
class PeerWatch:
    """Watches the process of the next rank. Every rank makes a watch and calls :meth:`connect`.

    If the connection to the next rank ends before the next rank calls :meth:`stop`, the next rank is reported as lost.
    A rank accepts the connection of the previous rank only in :meth:`stop`: until then the kernel holds the
    connection, and ends the connection when the process ends. A forked process closes its copies of the connections,
    since workers of a loader may outlive their rank.

    A store does not notice the end of a rank, and a wait for this rank would last until the timeout. The ranks watch
    each other in a ring: each rank has two connections, for any number of ranks.

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
        os.register_at_fork(after_in_child=self._server.close)

    def connect(self, address: tuple[str, int]) -> None:
        """Connect to the next rank at its ``address``, and watch the connection in a thread.

        Raises:
            RankError: this rank cannot connect to the next rank, or cannot start a thread.
        """
        try:
            self._ahead = socket.create_connection(address, _CONNECT_SECONDS)
        except OSError as e:
            self._server.close()
            raise RankError(
                f"watching the next rank: rank {self._group.rank} cannot connect to rank {self._next} at "
                f"{address[0]}:{address[1]}: {e}. Ranks must reach each other at the addresses of the route to "
                "MASTER_ADDR.",
                [self._next],
            ) from e
        os.register_at_fork(after_in_child=self._ahead.close)
        self._ahead.settimeout(None)
        self._ahead.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            self._ahead.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        threads = start_threads(self._watch, 1, name="peer-watch")
        if not threads:
            self._ahead.close()
            self._server.close()
            raise RankError(f"rank {self._group.rank} cannot start a thread to watch its peer.", [self._group.rank])
        self._thread = threads[0]

    def stop(self) -> None:
        """End the watch, and tell the previous rank that this process ends on purpose. Frees sockets and thread."""
        self._is_stopped = True
        with suppress(OSError):  # no more connections
            self._server.setblocking(False)
            while True:
                connection, _ = self._server.accept()
                with connection, suppress(OSError):  # the other process has ended already
                    connection.sendall(_GOODBYE_BYTE)
        with suppress(OSError):
            self._ahead.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_CONNECT_SECONDS)
        self._ahead.close()
        self._server.close()

    def _watch(self) -> None:
        """Wait, in the thread, until the connection to the next rank ends, and report a lost rank."""
        try:
            last = self._ahead.recv(1)
        except OSError:  # the process was killed, or its node does not answer
            last = b""
        if last != _GOODBYE_BYTE and not self._is_stopped:
            self._group.report_lost(self._next)
