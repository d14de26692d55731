"""Run a function on several ranks at once: real processes that meet over gloo, on this machine."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, final

from composerlite.errors import ConfigError

# Forked from one that has imported what takes long, so that a rank starts in a moment. None of these starts a thread or
# opens a process group when it is imported; torch._dynamo is imported by the first optimizer.
_processes = multiprocessing.get_context("forkserver")
_PRELOAD = [
    "composerlite.checkpoint.api.checkpointer",
    "composerlite.checkpoint.api.state_dict",
    "composerlite.testing.cluster",
    "composerlite.trainer",
    "composerlite.utils.dist",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torchmetrics",
]
_STACKS = signal.SIGQUIT  # the others are those of handlers of preemption, which tasks install
_STACKS_SECONDS = 2.0
_START_SECONDS = 60.0
_EXIT_SECONDS = 2.0
_GOODBYE_SECONDS = 1.0
_LEAVE_SECONDS = 5.0
_MOST_THREADS = 16
"""Of a process that is used again. torch keeps some of a task's groups, each with threads that poll for ever."""


@final
@dataclass(frozen=True)
class RankOutcome:
    """Outcome of the function on one rank.

    Attributes:
        rank: which.
        value: that the function returned.
        error: that it raised, with the traceback of the rank as a note; ``ChildProcessError`` if the process ended.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None


def quick_processes(*modules: str) -> ForkServerContext:
    """Context of processes that start in a moment: each is forked from one that has only imported things.

    Args:
        modules: to be imported there besides; they count until the first of the processes starts.

    Returns:
        Context, as of :mod:`multiprocessing`.
    """
    _PRELOAD.extend(module for module in modules if module not in _PRELOAD)
    _processes.set_forkserver_preload(_PRELOAD)
    return _processes


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    dist_timeout: float | None = 30.0,
    fresh: bool = False,
) -> list[Any]:
    """Call ``function(*args)`` on ``world_size`` ranks of one node; returns what each returned, in the order of ranks.

    The ranks are processes of their own, with the environment that torchrun sets and this process's variables and
    current directory. They are used again by later calls, so what a function leaves in its modules stays.

    Args:
        function: found by name in a module that can be imported. It and its arguments and results are pickled.
        world_size: number of ranks.
        args: of the function.
        timeout: seconds until all ranks are killed, from when their processes have started.
        dist_timeout: seconds, for ``initialize_dist``, which is called before; None leaves that to the function.
        fresh: in processes that have run nothing before and are not used again, for libraries that change the process.

    Returns:
        Results, one for each rank.

    Raises:
        ExceptionGroup: of what the ranks raised, each with a note that names the rank.
        TimeoutError: the ranks did not end in ``timeout``. Its notes are the stacks of all.
    """
    outcomes = run_ranks_to_the_end(
        function, world_size, *args, timeout=timeout, dist_timeout=dist_timeout, fresh=fresh
    )
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {world_size} ranks failed", errors)
    return [outcome.value for outcome in outcomes]


def run_ranks_to_the_end(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    dist_timeout: float | None = 30.0,
    fresh: bool = False,
) -> list[RankOutcome]:
    """:func:`run_ranks` for ranks that may fail: the outcome of each, in the order of ranks.

    Args:
        function, world_size, args, timeout, dist_timeout, fresh: as in :func:`run_ranks`.

    Returns:
        Outcomes, one for each rank.

    Raises:
        TimeoutError: the ranks did not end in ``timeout``. Its notes are the stacks of all.
    """
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: expected 1 or more.")
    return _pool.run(pickle.dumps((function, args, dist_timeout)), world_size, timeout, fresh=fresh)


@final
@dataclass(frozen=True)
class _Order:
    """Order to a process.

    Attributes:
        pickled_call: function, arguments and ``dist_timeout``, unpickled when ``path`` is set.
    """

    pickled_call: bytes
    environment: dict[str, str]
    path: list[str]
    folder: str


@final
class _Worker:
    """A process that waits for tasks."""

    def __init__(self, folder: Path) -> None:
        self._connection, theirs = Pipe()
        self._is_ready = False
        with tempfile.NamedTemporaryFile(dir=folder, prefix="stacks-", delete=False) as file:
            self._stacks = Path(file.name)
        self._process = _processes.Process(target=_serve, args=(theirs, self._stacks))
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        if self._is_ready:
            return
        if not self._connection.poll(_START_SECONDS):
            self.stop()
            raise TimeoutError(f"a process did not start in {_START_SECONDS:g} s")
        try:
            self._connection.recv()
        except (EOFError, ConnectionError) as e:
            raise ChildProcessError(f"a process did not start, and ended with {self.stop(_EXIT_SECONDS)}") from e
        self._is_ready = True

    @property
    def connection(self) -> Connection[Any, Any]:
        return self._connection

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def send(self, order: _Order) -> None:
        self._connection.send(order)

    def is_usable_again(self) -> bool:
        """Return true if the process has left the task behind; it is ended if not."""
        if self._connection.closed:
            return False
        try:
            if self._connection.poll(_LEAVE_SECONDS) and self._connection.recv():
                return True
        except (EOFError, ConnectionError):
            pass  # it ended while it left
        self.stop()
        return False

    def ask_for_stacks(self) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, _STACKS)

    def stacks(self) -> str:
        """Read the stacks written since :meth:`ask_for_stacks`."""
        return self._stacks.read_text(errors="replace")

    def stop(self, seconds: float = 0.0) -> int:
        """Wait for the process to end, then kill it. Returns its exit code."""
        self._connection.close()
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._stacks.unlink(missing_ok=True)
        code = self._process.exitcode
        assert code is not None
        return code


@final
class _Pool:
    """Processes that are kept for the next call."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._runs = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._owner = 0

    def run(self, call: bytes, world_size: int, timeout: float, *, fresh: bool) -> list[RankOutcome]:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

        workers = self._take(world_size, fresh=fresh)
        # One for each call, as torchrun has one for each attempt: torch finds the addresses of earlier groups in it.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._runs += 1
        try:
            for rank, worker in enumerate(workers):
                environment = self._environment(rank, world_size, store.port)
                worker.send(_Order(call, environment, sys.path, str(Path.cwd())))
            outcomes = self._collect(workers, timeout)
        except BaseException:
            for worker in workers:
                worker.stop()
            raise
        assert self._folder is not None
        folder = Path(self._folder.name)
        if fresh:
            for worker in workers:
                worker.stop(_EXIT_SECONDS)
            return outcomes
        # Each in its place: torch remembers which rank a process was. New ones start by themselves.
        self._idle[:0] = [worker if worker.is_usable_again() else _Worker(folder) for worker in workers]
        return outcomes

    def close(self) -> None:
        for worker in self._idle:
            worker.stop(_EXIT_SECONDS)
        self._idle.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _take(self, world_size: int, *, fresh: bool) -> list[_Worker]:
        if self._folder is None or self._owner != os.getpid():
            self._open()
        assert self._folder is not None
        self._idle = [worker for worker in self._idle if worker.is_alive]
        folder = Path(self._folder.name)
        workers = [] if fresh else self._idle[:world_size]
        del self._idle[: len(workers)]
        workers += [_Worker(folder) for _ in range(world_size - len(workers))]
        try:
            for worker in workers:
                worker.wait_until_ready()
        except BaseException:
            for worker in workers:
                worker.stop()
            raise
        return workers

    def _open(self) -> None:
        quick_processes()
        self._owner = os.getpid()  # a fork starts anew
        self._idle = []
        self._folder = tempfile.TemporaryDirectory(prefix="composerlite-ranks-")
        atexit.register(self.close)

    def _environment(self, rank: int, world_size: int, port: int) -> dict[str, str]:
        """Make the environment that torchrun's agent sets, whose part of holding the store is ours."""
        return {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._runs),
        }

    def _collect(self, workers: list[_Worker], timeout: float) -> list[RankOutcome]:
        deadline = time.monotonic() + timeout
        waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
        outcomes: dict[int, RankOutcome] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _timeout_error(workers, outcomes, timeout)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                outcomes[rank] = _outcome(rank, workers[rank])
        return [outcomes[rank] for rank in range(len(workers))]


_pool = _Pool()


def _outcome(rank: int, worker: _Worker) -> RankOutcome:
    try:
        pickled, trace = worker.connection.recv()
    except (EOFError, ConnectionError):
        code = worker.stop(_EXIT_SECONDS)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return RankOutcome(rank, error=ChildProcessError(f"rank {rank} {how}"))
    result = pickle.loads(pickled)
    if not trace:
        return RankOutcome(rank, value=result)
    result.add_note(f"Raised on rank {rank}:\n{trace}")
    return RankOutcome(rank, error=result)


def _timeout_error(workers: list[_Worker], outcomes: dict[int, RankOutcome], timeout: float) -> TimeoutError:
    hanging = [worker for rank, worker in enumerate(workers) if rank not in outcomes]
    for worker in hanging:
        worker.ask_for_stacks()
    deadline = time.monotonic() + _STACKS_SECONDS
    while time.monotonic() < deadline and not all(worker.stacks().endswith("\n") for worker in hanging):
        time.sleep(0.05)
    time.sleep(0.1)  # the stacks of the last threads
    error = TimeoutError(f"{len(hanging)} of {len(workers)} ranks did not end in {timeout:g} s")
    for rank, worker in enumerate(workers):
        if rank not in outcomes:
            error.add_note(f"Rank {rank} was here:\n{worker.stacks()}")
        else:
            ended = outcomes[rank]
            error.add_note(f"Rank {rank} had ended: " + ("returned" if ended.error is None else f"{ended.error!r}"))
    return error


def _serve(connection: Connection[Any, Any], stacks: Path) -> None:
    """Serve in a process of the pool: one task after the other, until the connection is closed."""
    import torch

    gc.freeze()  # what was imported stays: collections need not go through it, nor copy its pages
    multiprocessing.set_start_method(None, force=True)  # workers of DataLoaders start as in any other program
    torch.set_num_threads(1)
    with stacks.open("w") as file:
        faulthandler.register(_STACKS, file=file, all_threads=True)
        connection.send("ready")
        while True:
            try:
                order: _Order = connection.recv()
            except (EOFError, ConnectionError):
                return
            with suppress(BrokenPipeError):  # nobody waits any more; the next recv ends this process
                connection.send(_run(order))
                connection.send(_leave_cleanly())


def _run(order: _Order) -> tuple[bytes, str]:
    """Run the call of ``order``. Returns the pickled value, or error and its trace."""
    from composerlite import dist

    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)
    sys.path[:] = order.path
    try:
        function, args, dist_timeout = pickle.loads(order.pickled_call)
        if dist_timeout is not None:
            dist.initialize_dist("cpu", dist_timeout)
        return pickle.dumps(function(*args)), ""
    except BaseException as e:  # noqa: BLE001 - it goes to the one who called
        trace = traceback.format_exc()
        return _pickled_error(e, trace), trace


def _leave_cleanly() -> bool:
    """Leave the groups; false if something of this task may live on in this process."""
    from composerlite import dist

    try:
        dist.finalize_dist(timedelta(seconds=_GOODBYE_SECONDS))
    except Exception:  # noqa: BLE001 - the process is thrown away, and the answer is what the task said
        return False
    threads = Path("/proc/self/task")
    return not dist.is_initialized() and (not threads.exists() or len(list(threads.iterdir())) <= _MOST_THREADS)


def _pickled_error(error: BaseException, trace: str) -> bytes:
    """Pickle ``error``, or its last line where somebody else's class cannot be pickled, or not be read again."""
    try:
        pickled = pickle.dumps(error)
        if isinstance(pickle.loads(pickled), BaseException):
            return pickled
    except Exception:  # noqa: BLE001 - the trace says what happened
        pass
    return pickle.dumps(RuntimeError(trace.splitlines()[-1]))
