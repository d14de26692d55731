"""The rank and the device of this process, and its connection to the other ranks."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed
from torch.distributed import HashStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

from composerlite._torch_compat import default_store
from composerlite.errors import ConfigError, RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # pyright: ignore[reportPrivateImportUsage] - documented

    from composerlite.dist.peer_watch import PeerWatch
    from composerlite.dist.store_barrier import StoreBarrier


def _from_environment(*names: str, default: int) -> int:
    for name in names:
        if (text := os.environ.get(name)) is not None:
            try:
                return int(text)
            except ValueError as e:
                raise ConfigError(
                    f"environment variable {name}={text!r}: expected a whole number, as torchrun sets it."
                ) from e
    return default


def get_global_rank() -> int:
    """The number of this process among all of the run, from 0: in the process group if there is one."""
    return torch.distributed.get_rank() if is_initialized() else _from_environment("RANK", default=0)


def get_world_size() -> int:
    """The number of processes of the run: of the process group if there is one."""
    return torch.distributed.get_world_size() if is_initialized() else _from_environment("WORLD_SIZE", default=1)


def get_local_rank() -> int:
    """The number of this process among those of its node, from 0.

    Where somebody has made a process group that the environment does not speak of (``mp.spawn``; the variables are
    those of another job, or not all there), processes of one host name are a node. That is known once
    :func:`initialize_dist` was called, which the trainer does; until then all are taken for those of one node, as
    ``mp.spawn`` starts them.
    """
    layout = _own_layout()
    return _from_environment("LOCAL_RANK", default=0) if layout is None else layout.local_rank


def get_local_world_size() -> int:
    """The number of processes on this node; see :func:`get_local_rank`."""
    layout = _own_layout()
    return _from_environment("LOCAL_WORLD_SIZE", default=1) if layout is None else layout.local_world_size


def get_node_rank() -> int:
    """The number of this node, from 0; see :func:`get_local_rank`."""
    layout = _own_layout()
    return _from_environment("NODE_RANK", "GROUP_RANK", default=0) if layout is None else layout.node_rank


@final
@dataclass(frozen=True, slots=True)
class _Layout:
    """The place of this process in a group that the environment does not speak of."""

    local_rank: int
    local_world_size: int
    node_rank: int


def _own_layout() -> _Layout | None:
    """``None``: what the environment says holds."""
    if _layout is not None or not is_initialized():
        return _layout
    return None if _environment_is_of_the_group() else _Layout(get_global_rank(), get_world_size(), 0)


def _environment_is_of_the_group() -> bool:
    """Return true if the variables of a launcher are all there and say what the process group says."""
    said = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if not all(text.isdecimal() for text in said):
        return False
    rank, world_size, local_rank, local_world_size = map(int, said)
    is_of_it = (rank, world_size) == (torch.distributed.get_rank(), torch.distributed.get_world_size())
    return is_of_it and local_rank < local_world_size <= world_size


def is_available() -> bool:
    """Return true if torch was built with ``torch.distributed``."""
    return torch.distributed.is_available()


def is_initialized() -> bool:
    """Return true if this process has a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


_KINDS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps", "xpu": "xpu"}


def get_device(device: str | torch.device | None = None) -> torch.device:
    """The device this process trains on: ``'cpu'``, ``'gpu'`` (that of the local rank), ``'mps'`` or ``'xpu'``.

    ``None`` takes the GPU if there is one. What a package has registered with torch has the name that it has there.

    Raises:
        ConfigError: the name is unknown or there is no such device here.
    """
    if device is None:
        device = "gpu" if torch.cuda.is_available() else "cpu"
    name, _, index = str(device).lower().partition(":")
    registered = torch.accelerator.current_accelerator()
    known = _KINDS if registered is None else {**_KINDS, registered.type: registered.type}
    kind = known.get(name)
    if kind is None or (index and not index.isdigit()):
        raise ConfigError(f"device={device!r} is not known. Known: {', '.join(sorted(known))}.")
    if kind == "cpu":
        return torch.device(kind)
    module = torch.get_device_module(kind)
    if not module.is_available():
        raise ConfigError(
            f"device={device!r}: this machine has no {kind.upper()} device that torch can use. Use device='cpu'."
        )
    if kind == "mps":  # there is one
        return torch.device(kind)
    return torch.device(kind, int(index) if index else gpu_of(get_local_rank(), module.device_count()))


def gpu_of(local_rank: int, visible: int) -> int:
    """Return the number of the GPU of a process that sees ``visible`` of them.

    Where it sees one, that is its own, as with ``--gpus-per-task`` of Slurm.
    """
    return 0 if visible == 1 else local_rank


def claim_device(device: torch.device) -> None:
    """Make a GPU the one that this process uses where no other is named, also in its threads' first use of it.

    Raises:
        ConfigError: it does not exist.
    """
    if device.type in ("cpu", "mps"):  # there is one
        return
    module = torch.get_device_module(device)
    count = module.device_count()
    if device.index >= count:
        raise ConfigError(
            f"device='{device}': this process sees {count} GPUs (its local rank is {get_local_rank()}). "
            "Start at most as many processes per node, or name one from 0."
        )
    module.set_device(device)


@final
@dataclass(frozen=True)
class Control:
    """The connection between the ranks apart from training. Nothing here waits on the process group of training.

    Attributes:
        store: keys of this run; prefix yours.
        group: a gloo group of all ranks, for the main thread.
        barrier: of all ranks, for the main thread.
        rounds: numbers of the votes over commits: no key of a vote is ever used again.
        timeout: of every wait that is given none.
        watch: reports ranks that are gone; ``None`` in a run of one process.
    """

    store: Store
    group: ProcessGroup
    barrier: StoreBarrier
    timeout: timedelta
    watch: PeerWatch | None = None
    rounds: Iterator[int] = field(default_factory=lambda: itertools.count(1))


_log = logging.getLogger(__name__)

_control: Control | None = None
_layout: _Layout | None = None
_times_initialized: Counter[tuple[str | None, ...]] = Counter()
_owns_training_group = False
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_TRAINING_TIMES = 3
"""Ratio of NCCL's timeout to that of our groups: its watchdog ends the process, and says less than our errors."""
_GOODBYE = timedelta(seconds=10)
_GOODBYE_AT_EXIT = timedelta(seconds=2)


def get_control() -> Control:
    """Return the control connection that :func:`initialize_dist` made.

    Raises:
        ConfigError: it was not called.
    """
    if _control is None:
        raise ConfigError(f"WORLD_SIZE={get_world_size()}, but the ranks are not connected: call initialize_dist().")
    return _control


def check_nobody_left(what: str) -> None:
    """Look whether another rank has failed or is gone: what waits for its part would wait in vain. For any thread.

    Args:
        what: is waited for, for the error.

    Raises:
        RankError: one is; names it.
    """
    if (control := _control) is not None:
        control.barrier.check_nobody_left(what)


def initialize_dist(
    device: str | torch.device | None = None,
    timeout: float | timedelta = 300.0,
    *,
    min_world_size: int = 2,
) -> bool:
    """Connect the ranks that torchrun started: a process group for training; apart from it a gloo group and a store.

    Every rank calls it. Where there is a process group already, that one stays the group of training, and ranks are
    those that it says, whatever the environment does. Nothing happens the second time, nor in a run of fewer than
    ``min_world_size`` processes.

    Args:
        device: as :func:`get_device` takes it. A GPU uses NCCL (XCCL on XPU), and gloo for what lies in host memory.
        timeout: seconds, of every wait of these groups; NCCL's own, at whose end it kills the process, is three times
            as long, so that ranks that miss another one raise first.
        min_world_size: 1 makes a process group for one process too; a device mesh needs one.

    Returns:
        Whether this call connected them: then :func:`finalize_dist` is for the caller.

    Raises:
        ConfigError: the environment says only half of what is needed, or contradicts itself.
        RankError: a rank failed here; every rank raises it. What all failed with is raised as it is.
        LateRankError: not every rank came; names those that are late.
    """
    global _control, _layout
    _check_environment()
    if _control is not None or (get_world_size() < min_world_size and not is_initialized()):
        return False
    rank, world_size = get_global_rank(), get_world_size()
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    is_made = is_initialized()
    # The same on every rank: keys of an earlier time are never met again.
    if is_made:
        store = default_store()
        times = store.add(f"composerlite/times/{rank}", 1)
    else:
        store = _connect(rank, world_size, limit)
        rendezvous = tuple(os.environ.get(name) for name in _RENDEZVOUS)
        _times_initialized[rendezvous] += 1
        times = _times_initialized[rendezvous]
    store = PrefixStore(f"{times}", store)
    ours = PrefixStore("composerlite", store)
    from composerlite.dist.peer_watch import PeerWatch  # a run of one process has none
    from composerlite.dist.store_barrier import StoreBarrier

    barrier = StoreBarrier(PrefixStore("barrier", ours), rank, world_size)
    if is_made:
        _layout = _find_layout(PrefixStore("nodes", ours), barrier, limit)
    with barrier.all_succeed("connecting the ranks", limit):
        chosen = _claim_device(device)
    with barrier.all_succeed("making process groups", limit):
        group = _make_groups(store, rank, world_size, chosen, limit)
    watch = PeerWatch(PrefixStore("peers", ours), barrier, limit) if world_size > 1 else None
    _control = Control(ours, group, barrier, limit, watch)
    # Threads of a group that nobody has ended abort the process now and then when it exits. Nobody waits long for that.
    atexit.unregister(finalize_dist)
    atexit.register(finalize_dist, _GOODBYE_AT_EXIT)
    return True


def finalize_dist(timeout: timedelta = _GOODBYE) -> None:
    """Destroy the process groups of :func:`initialize_dist`. Does nothing without one, or the second time.

    Waits up to ``timeout`` until the others leave, unless one has failed and said so. Never fails because of them.
    """
    global _control, _layout, _owns_training_group
    if _control is None:
        return
    control, _control, _layout = _control, None, None
    _say_goodbye(control, timeout)
    if control.watch is not None:
        control.watch.stop()
    if not is_initialized():
        return
    torch.distributed.destroy_process_group(control.group)
    if _owns_training_group:
        torch.distributed.destroy_process_group()
        _owns_training_group = False


def _say_goodbye(control: Control, timeout: timedelta) -> None:
    """Wait until every rank has come here, so that none cuts off what another still reads."""
    from composerlite.dist.store_barrier import Poll

    store, barrier = control.store, control.barrier
    try:
        if store.add("goodbyes", 1) == barrier.world_size:
            store.set("all gone", "")
        Poll(store, barrier.world_size).until("all gone", timeout, lambda: barrier.check_nobody_left("leaving"))
    except (torch.distributed.DistError, RankError) as e:
        _log.debug("left without the others: %s", e)  # they are gone already, or failed and said so


def _check_environment() -> None:
    set_here = [name for name in _NEEDED if name in os.environ]
    several = get_world_size() > 1 or get_global_rank() > 0
    if "RANK" in os.environ and "WORLD_SIZE" not in os.environ:
        several = True
    missing = [name for name in _NEEDED if name not in os.environ]
    if several and missing and not is_initialized():
        raise ConfigError(
            f"the environment sets {', '.join(set_here)}, but not {', '.join(missing)}. Start the script with "
            "torchrun, which sets all; or set all yourself; or, for one process, none."
        )
    for what, (rank, size) in {
        "RANK, WORLD_SIZE": (get_global_rank(), get_world_size()),
        "LOCAL_RANK, LOCAL_WORLD_SIZE": (get_local_rank(), get_local_world_size()),
    }.items():
        if not 0 <= rank < size:
            raise ConfigError(f"{what} are {rank}, {size}: expected a rank from 0 to {size - 1}, as torchrun sets it.")
    if get_local_world_size() > get_world_size():
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={get_local_world_size()} is more than WORLD_SIZE={get_world_size()}: "
            "the processes of a node are part of the run's."
        )


def _connect(rank: int, world_size: int, timeout: timedelta) -> Store:
    """A connection to the store at MASTER_ADDR:MASTER_PORT, which torchrun's agent holds, or else rank 0."""
    if "MASTER_ADDR" not in os.environ:
        return HashStore()  # one process without a launcher
    host, port = os.environ["MASTER_ADDR"], _from_environment("MASTER_PORT", default=0)
    agent_holds_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0 and not agent_holds_it,
            timeout=timeout,
            wait_for_workers=False,  # a meeting waits for them, and names those that are late
            multi_tenant=True,
        )
    except torch.distributed.DistError as e:
        raise RankError(
            f"rank {rank}: no store at MASTER_ADDR:MASTER_PORT = {host}:{port} ({e}). Rank 0 or torchrun's agent holds "
            "it: is that one running, does it say what failed, is the port free there and open from here?",
            [rank],
        ) from e
    if agent_holds_it:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"/worker/attempt_{attempt}", store)
    return store


def _find_layout(store: Store, barrier: StoreBarrier, timeout: timedelta) -> _Layout | None:
    """Return the layout of ranks on nodes; ``None`` where the environment of each says so."""
    with barrier.all_succeed("telling each other the nodes", timeout):
        store.set(str(barrier.rank), socket.gethostname())
        if not _environment_is_of_the_group():
            store.add("without", 1)
    if store.add("without", 0) == 0:
        return None
    hosts = store.multi_get([str(rank) for rank in range(barrier.world_size)])
    own = [rank for rank, host in enumerate(hosts) if host == hosts[barrier.rank]]
    nodes = list(dict.fromkeys(hosts))
    return _Layout(own.index(barrier.rank), len(own), nodes.index(hosts[barrier.rank]))


def _claim_device(device: str | torch.device | None) -> torch.device:
    chosen = get_device(device)
    claim_device(chosen)
    return chosen


def training_group_arguments(device: torch.device, timeout: timedelta) -> dict[str, Any]:
    """Arguments of ``init_process_group`` for the group of training on ``device``.

    NCCL waits longer than ``timeout``, that of our own group: its watchdog ends the process, and our error comes first.
    """
    backend = backend_of(device)
    if backend == "gloo":
        return {"backend": backend, "timeout": timeout, "device_id": None}
    groups, waits = f"cpu:gloo,{device.type}:{backend}", timeout * _TRAINING_TIMES
    return {"backend": groups, "timeout": waits, "device_id": device}


def backend_of(device: torch.device) -> str:
    """Return the name of the backend of ``torch.distributed`` for tensors on ``device``."""
    return torch.distributed.Backend.default_device_backend_map.get(device.type, "gloo")


def _make_groups(store: Store, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> ProcessGroup:
    """Make the group of training, unless there is one, and ours."""
    global _owns_training_group
    if not is_initialized():
        torch.distributed.init_process_group(
            **training_group_arguments(device, timeout),
            store=PrefixStore("training", store),
            rank=rank,
            world_size=world_size,
        )
        _owns_training_group = True
    group = torch.distributed.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, torch.distributed.ProcessGroup)  # of all ranks, so this one is in it
    return group
